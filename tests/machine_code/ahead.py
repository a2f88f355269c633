"""Compile what a launch of a generated module would compile, for a GPU that need not be there, and look into it.

The compilations are those of codegen/ahead.py: arguments, their types and the launch settings are those of a call.
Triton then compiles each kernel for the architecture asked for, with the `ptxas` that it brings.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import os
import pickle
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton import knobs

import weft
from weft.codegen.ahead import Compilation, compilations, gpu_target
from weft.codegen.launch.launching import assembled
from weft.codegen.targets.gluon.program import Program
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import Traits
from weft.compiler.planning.cost import sizes_of
from weft.compiler.planning.machines.hardware import Hardware, by_name
from weft.compiler.planning.plan import CodePlan, KernelPlan
from weft.compiler.planning.records import Shape
from weft.compiler.planning.signature import Serves, has_few_queries
from weft.compiler.planning.sources import kind_named
from weft.ir.attention import Attention
from weft.runtime.call import Call, Choices, Dense, Lengths, Operand, Packed, PackedPaged, Paged, Pages
from weft.runtime.driver import Compiled, compile_kernels

Direction = Literal["forward", "backward"]
Result = TypeVar("Result")
KEPT = Path(__file__).parents[2] / "build" / "compiled"  # what all workers, and runs, compiled
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel and what to look at in it."""

    name: str
    sram: int  # bytes of shared memory of one program
    spilled: int  # bytes of spill stores a thread (NVIDIA), spilled registers (AMD)
    assembly: str  # PTX or AMD assembly
    log: str  # what ptxas said, with -v
    cubin: bytes  # empty on AMD
    launched_early: bool  # while what is in front of it runs

    @property
    def registers(self) -> int:
        """Of a thread (NVIDIA)."""
        return int(re.findall(r"Used (\d+) registers", self.log)[-1])

    def count(self, pattern: str) -> int:
        """How often a pattern is in the assembly."""
        return len(re.findall(pattern, self.assembly))

    @property
    def serialised(self) -> list[str]:
        """Why ptxas waits after every wgmma, as it remarks (C7510 to C7514 and others); empty where it does not."""
        return sorted(set(re.findall(r"wgmma.* serialized due to (.*) in ", self.log)))

    @cached_property
    def sass(self) -> list[tuple[int, str]]:
        """Machine code of an NVIDIA GPU: address and text of each instruction."""
        arch = re.findall(r"^\.target sm_(\w+)", self.assembly, re.MULTILINE)[0]
        text = kept(hashlib.sha256(self.cubin).hexdigest() + ".sass", partial(_disassembled, self.cubin, arch))
        return [(int(a, 16), i) for a, i in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)]

    def instructions(self, opcode: str) -> int:
        """How many instructions of the machine code have an opcode that starts like this."""
        return count_opcode(opcode, [text for _, text in self.sass])

    def product_loops(self) -> list[list[str]]:
        """The innermost loops that multiply matrices with wgmma, each the text of its instructions."""
        if not self.count("wgmma"):  # to disassemble takes half a second
            return []
        return [loop for loop in self.inner_loops() if count_opcode("HGMMA", loop)]

    def spills_in_loops(self) -> int:
        """Loads and stores of spilled registers in those loops, which is where a spill costs time."""
        if "\n    0 bytes stack frame" in self.log:  # there is no memory that a thread could spill to
            return 0
        return sum(count_opcode("(?:LDL|STL)", loop) for loop in self.product_loops())

    def inner_loops(self) -> list[list[str]]:
        """The instructions between a branch backwards and its goal, where no other such branch is among them."""
        jumps = [(int(m[1], 16), at) for at, text in self.sass if (m := re.search(r"\bBRA.* 0x([0-9a-f]+)", text))]
        loops = [(first, last) for first, last in jumps if first < last]
        inner = [(f, b) for f, b in loops if not any(f <= first and last < b for first, last in loops)]
        return [[text for at, text in self.sass if first <= at <= last] for first, last in inner]


def _disassembled(cubin: bytes, arch: str) -> str:
    """As cuobjdump prints it, which starts nvdisasm in turn; of code without its headers that ends a third sooner."""
    with tempfile.NamedTemporaryFile(suffix=".text") as file:
        file.write(_code_of(cubin))
        file.flush()
        command = [str(NVIDIA_TOOLS / "nvdisasm"), "--no-dataflow", "--binary", f"SM{arch}", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _code_of(cubin: bytes) -> bytes:
    """The one section of an ELF file that is named .text.<kernel>."""
    (sections,), (size, number, of_names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, sections + n * size) for n in range(number)]
    names = heads[of_names][4]
    (code,) = (cubin[h[4] : h[4] + h[5]] for h in heads if cubin[names + h[0] :].startswith(b".text."))
    return code


class Room(NamedTuple):
    """SRAM of a program as it is declared."""

    tiles: float  # bytes
    others: int  # bytes that it keeps for cards, mbarriers and what Triton takes


class Kernels(Mapping[str, Kernel]):
    """The kernels of a module by name, each compiled where it is first looked at."""

    def __init__(self, seen: Sequence[Compilation], machine: Hardware) -> None:
        self._seen, self._machine = {each.name: each for each in seen}, machine
        self._found: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._found:
            self._found[name] = compile_ahead(self._seen[name], self._machine)
        return self._found[name]

    def __contains__(self, name: object) -> bool:  # that of Mapping would compile, as would comparisons of keys
        return name in self._seen

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)


@dataclass(frozen=True)
class Module:
    """One direction of a variant: what was planned and what came out, by the name of the kernel."""

    plans: Mapping[str, KernelPlan]
    kernels: Mapping[str, Kernel]
    rooms: Mapping[str, Room]  # of kernels that declare a program, in the forms that were compiled


def count_opcode(opcode: str, instructions: list[str]) -> int:
    """How many instructions have an opcode that starts with this pattern."""
    return sum(bool(re.match(rf"(@!?U?P\d+ )?{opcode}", text)) for text in instructions)


# A descriptor of wgmma is an address, whose upper word is 0, plus constants: this adds to both words of one.
_DESCRIPTOR = re.compile(r"UIADD3\.X UR\d+, UR(\d+), -0x3ff")
_WRITES = re.compile(r"(?:@!?U?P\d+ )?(U[A-Z]\S*|R2UR\S*|S2UR\S*) (?:UP\d, )?UR(\d+)\b")


def stale_addresses(kernel: Kernel) -> list[str]:
    """Descriptors that are made of a register which no longer holds the upper word of an address, and what it holds.

    ptxas has made such code: matrices are then read from anywhere.
    """
    if not kernel.count("wgmma"):
        return []
    code, found = [text for _, text in kernel.sass], []
    for at, text in enumerate(code):
        match = _DESCRIPTOR.match(text)
        last = match and next((t for t in reversed(code[:at]) if _writes(t, int(match[1]))), "nothing")
        if last and not re.match(r"UMOV UR\d+, URZ", last):
            found.append(f"{text} after {last}")
    return found


def _writes(instruction: str, register: int) -> bool:
    match = _WRITES.match(instruction)
    if match is None:
        return False
    pair = "64" in match[1] or "WIDE" in match[1]
    return int(match[2]) in ((register, register - 1) if pair else (register,))


# -- variant -> compiled kernels -------------------------------------------------------------------------------------
def compiled(
    variant: weft.Attention, direction: Direction, head_dim: int, dtype: str = "bf16", *, device: str = "h200",
    target: str = "triton", schedule: str | None = None, value_dim: int | None = None,
    wanted: frozenset[str] | None = None, deterministic: bool | None = None, q_offset: int | Tensor = 0,
    sequences: str = "dense", page: int = 16, q_len: int = 256, heads: int = 2, serves: Serves = "all",
    floats: torch.dtype = torch.float32,
) -> Module:  # fmt: skip
    """Generate one direction of a variant and compile every kernel that a call launches.

    wanted: the gradients; all of them where None. deterministic: of a backward, as of a call.
    sequences: of the call; others than "dense" ones are bottom right, and those in pages have pages of `page` rows.
    serves: which sequences the module computes. floats: dtype of float operands.
    """
    widths = {"head_dim": head_dim, "value_dim": value_dim or head_dim}
    sizes = weft.shape(heads=heads, kv_heads=2, q_len=q_len, dtype=dtype, **widths)
    machine = by_name(device)
    form: Literal["expanded"] | None = None if variant.latent is None else "expanded"
    plan = variant.plan(sizes, device=device, target=target, schedule=schedule, deterministic=deterministic, form=form)
    signature = plan.code(direction).signature
    if wanted is not None:
        signature = replace(signature, wanted=wanted)
    if isinstance(q_offset, Tensor):
        signature = replace(signature, offset="per_row")
    if sequences != "dense":
        few_queries = has_few_queries(direction, kind_named(sequences), q_len)
        signature = replace(
            signature, sequences=kind_named(sequences), offset="bottom_right", few_queries=few_queries, serves=serves
        )
    planned = wanted is None and floats == torch.float32
    signature = replace(signature, doubles=floats == torch.float64)
    made = compile_kernels(variant, signature, machine, target, str(plan.schedule) if planned else schedule)
    kernels = Kernels(launched(made, variant, sizes, q_offset, page, floats), machine)
    rooms = _rooms(made.resolved.code, sizes, machine, facts_of(variant).traits)
    return Module({k.name: k for k in plan.kernels if k.direction == direction}, kernels, rooms)


def _rooms(code: CodePlan, shape: Shape, machine: Hardware, traits: Traits) -> dict[str, Room]:
    found = {}
    for k in code.kernels:
        if k.kernel.program is None:
            continue
        program = k.kernel.program(k.form, code.segments, traits)
        assert isinstance(program, Program)
        counted = program.sram_bytes(sizes_of(k.kernel, k.form, shape, machine, code.segments, 1, traits))
        found[k.name] = Room(counted - program.besides, program.besides + program.spare)
    return found


def launched(
    made: Compiled,
    variant: Attention,
    sizes: Shape,
    q_offset: int | Tensor = 0,
    page: int = 16,
    floats: torch.dtype = torch.float32,
) -> list[Compilation]:
    """The kernels of one call, in order."""
    query, out, dout = _rows(sizes, 3)
    key, value = _rows(replace(sizes, heads=sizes.kv_heads, q_len=256), 2)
    lse, dlse = torch.empty(query.shape[:3]), torch.empty(query.shape[:3])
    lens = torch.zeros(query.shape[0] + 1, dtype=torch.int32)
    table = torch.zeros(query.shape[0], 2, dtype=torch.int32)
    kinds = {
        "dense": Dense(q_offset), "lengths": Lengths(None, lens[1:], None), "packed": Packed(lens, lens, None),
        "paged": Paged(None, lens[1:], table, page, None),
        "packed_paged": PackedPaged(lens, lens[1:], table, page, None),
    }  # fmt: skip
    sequences = kinds[made.resolved.code.signature.sequences.name]
    if isinstance(sequences, Pages):
        key, value = key[:, :, :page], value[:, :, :page]
    nope, rope = sizes.head_dim - made.resolved.code.signature.widths.rope_dim, None
    if nope < sizes.head_dim:
        key, rope = key[..., :nope], key[:, :1, :, nope:]
    call = Call(query, key, value, rope, _operands(variant, sizes, floats), sequences, Choices(), sizes.head_dim)
    code, results = made.resolved.code, {"out": out, "lse": lse}
    if code.signature.direction == "backward":
        gradients = {f"d{n}": torch.empty_like(t) for n, t in call.tensors.items() if n in code.signature.wanted}
        results |= {"dout": dout, "dlse": dlse, **gradients}
    return compilations(made.resolved.target, made.modules, code, facts_of(variant), call, results)


def _rows(sizes: Shape, number: int) -> list[Tensor]:
    """Tensors [B, H, L, D], as transposed views of [B, L, H, D]."""
    memory = (sizes.batch, sizes.q_len, sizes.heads, sizes.head_dim)
    return [torch.empty(memory, dtype=DTYPES[sizes.dtype]).transpose(1, 2) for _ in range(number)]


def _operands(variant: Attention, sizes: Shape, floats: torch.dtype) -> dict[str, Operand]:
    """One value for each operand of a variant: int scalars, and tensors of `floats`, int64 or bool.

    What is brought by tiles has the call's dtype and rows of 16 bytes.
    """
    dtypes = {"float": floats, "int": torch.int64, "bool": torch.bool}
    tensors = {t.name: torch.empty([2] * t.rank, dtype=dtypes[t.dtype]) for t in variant.canonical.tensors}
    if (read := facts_of(variant).boxed_read) is not None and floats == torch.float32:
        tensors[read.tensor.name] = torch.empty([8] * read.tensor.rank, dtype=DTYPES[sizes.dtype])
    return {p.name: tensors.get(p.name, 64) for p in variant.canonical.parameters}


# -- compilation -> machine code -------------------------------------------------------------------------------------
def compile_ahead(seen: Compilation, machine: Hardware) -> Kernel:
    """Compile one kernel for a machine of compiler/planning/machines/hardware.py, or find it as it was compiled before.

    Triton's cache is passed by, because what ptxas says is not in it.
    """
    asked = seen._source().hash(), gpu_target(machine), sorted(seen.options.items()), triton.__version__, HOW
    return kept(hashlib.sha256(repr(asked).encode()).hexdigest() + ".kernel", partial(_compile, seen, machine))


def _compile(seen: Compilation, machine: Hardware) -> Kernel:
    said = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        made = seen.compile(machine)
    assembly = made.asm["ptx" if machine.kind == "cuda" else "amdgcn"]
    spilled = re.findall(r"(\d+) bytes spill stores|vgpr_spill_count: *(\d+)", said.getvalue() + assembly)
    return Kernel(
        seen.name, made.metadata.shared, sum(int(a or b) for a, b in spilled), assembly, said.getvalue(),
        made.asm.get("cubin", b""), bool(seen.options.get("launch_pdl")),
    )  # fmt: skip


# What makes a Kernel of a source; a change of it compiles all anew.
HOW = hashlib.sha256("".join(map(inspect.getsource, (_compile, Compilation, assembled))).encode()).hexdigest()


def kept(name: str, make: Callable[[], Result]) -> Result:
    """What was made under this name before, by this run or another: the name says all that it depends on."""
    path = KEPT / name
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        return cast(Result, pickle.loads(path.read_bytes()))
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(pickle.dumps(result))
    os.replace(file.name, path)
    return result
