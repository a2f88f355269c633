"""Compile what a launch of a generated module would compile, for a GPU that need not be there.

The module's own launch code runs on small CPU tensors, with Triton's launch replaced by a recorder: arguments, their
types and the launch settings are those of a real call, for every kernel of every schedule. Triton then compiles each
recorded kernel for the architecture asked for, with the `ptxas` that it brings.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, MockTensor

import weft
from weft.compiler.planning.hardware import by_name
from weft.compiler.planning.records import KernelPlan, Schedule, Shape, Specialisation
from weft.ir.attention import Attention
from weft.runtime import launch
from weft.runtime.driver import Compiled, compile_kernel
from weft.runtime.launch import CallTensors

Direction = Literal["forward", "backward"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPE_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip
TARGETS = {"cuda": 32, "hip": 64}  # threads of a warp
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the module asked for it."""

    kernel: JITFunction
    arguments: Mapping[str, object]  # by parameter
    options: Mapping[str, int]  # num_warps, num_stages


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel and what to look at in it."""

    name: str
    sram: int  # bytes of shared memory of one program
    spilled: int  # bytes of spill stores a thread (NVIDIA), spilled registers (AMD)
    assembly: str  # PTX or AMD assembly
    log: str  # what ptxas said, with -v
    cubin: bytes  # empty on AMD

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
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(NVIDIA_TOOLS / "cuobjdump"), "--dump-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [(int(a, 16), i) for a, i in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)]

    def instructions(self, opcode: str) -> int:
        """How many instructions of the machine code have an opcode that starts like this."""
        return count_opcode(opcode, [text for _, text in self.sass])

    def product_loops(self) -> list[list[str]]:
        """The innermost loops that multiply matrices with wgmma, each the text of its instructions."""
        return [loop for loop in self._inner_loops() if count_opcode("HGMMA", loop)]

    def spills_in_loops(self) -> int:
        """Loads and stores of spilled registers in those loops, which is where a spill costs time."""
        return sum(count_opcode("(?:LDL|STL)", loop) for loop in self.product_loops())

    def _inner_loops(self) -> list[list[str]]:
        """The instructions between a branch backwards and its goal, where no other such branch is among them."""
        jumps = [(int(m[1], 16), at) for at, text in self.sass if (m := re.search(r"\bBRA.* 0x([0-9a-f]+)", text))]
        loops = [(first, last) for first, last in jumps if first < last]
        inner = [(f, b) for f, b in loops if not any(f <= first and last < b for first, last in loops)]
        return [[text for at, text in self.sass if first <= at <= last] for first, last in inner]


@dataclass(frozen=True)
class Module:
    """One direction of a variant: what was planned and what came out, by the name of the kernel."""

    schedule: Schedule
    plans: Mapping[str, KernelPlan]
    kernels: Mapping[str, Kernel]


def count_opcode(opcode: str, instructions: list[str]) -> int:
    """How many instructions have an opcode that starts with this pattern."""
    return sum(bool(re.match(rf"(@!?U?P\d+ )?{opcode}", text)) for text in instructions)


# -- variant -> compiled kernels -------------------------------------------------------------------------------------
def compiled(
    variant: weft.Attention, direction: Direction, head_dim: int, dtype: str = "bf16", *, device: str = "h200",
    target: str = "triton", schedule: str | None = None,
) -> Module:  # fmt: skip
    """Generate one direction of a variant and compile every kernel that a call of it launches."""
    sizes = weft.shape(heads=2, q_len=256, head_dim=head_dim, dtype=dtype)
    plan = variant.plan(sizes, device=device, target=target, schedule=schedule)
    wanted = {load.tensor.name for load in variant.gradient_loads} if direction == "backward" else set()
    gradients = tuple(sorted(wanted))
    spec = Specialisation(direction, by_name(device).arch, dtype, head_dim, head_dim, gradients=gradients)
    with tempfile.TemporaryDirectory() as folder, weft.settings(cache_dir=folder):
        made = compile_kernel(variant, spec, target, str(plan.schedule))
    kernels = {seen.kernel.__name__: compile_ahead(seen, device) for seen in recorded(made, sizes)}
    return Module(plan.schedule, {k.name: k for k in plan.kernels}, kernels)


class _NeverLaunched:
    """Takes the place of a compiled kernel where the module keeps it for its launches."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


# -- module -> launches ----------------------------------------------------------------------------------------------
def recorded(made: Compiled, sizes: Shape) -> list[Launch]:
    """The kernels that one call launches, in order, without running any."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *values: object, grid: object, warmup: bool, **named: object) -> object:
        names = [p.name for p in kernel.params]
        options = {n: named.pop(n) for n in ("num_warps", "num_stages") if n in named}
        launches.append(Launch(kernel, {**dict(zip(names, values)), **named}, options))  # type: ignore[arg-type]
        return _NeverLaunched()

    query, key, value, out, dout = _rows(sizes, 5)
    lse, dlse = torch.empty(query.shape[:3]), torch.empty(query.shape[:3])
    call = CallTensors(query, key, value, None, _operands(made.facts.attention), 0, sizes.head_dim)
    modules = [module for module in (made.module, made.spans) if module is not None]
    with mock.patch.object(JITFunction, "run", record), _without_device(*modules):
        if made.spec.direction == "forward":
            launch.forward(made)(call, out, lse)
        else:
            launch.backward(made)(call, out, lse, dout, dlse, _rows(sizes, 3))
    return launches


def _rows(sizes: Shape, number: int) -> list[Tensor]:
    """Tensors [B, H, L, D], as transposed views of [B, L, H, D]."""
    memory = (sizes.batch, sizes.q_len, sizes.heads, sizes.head_dim)
    return [torch.empty(memory, dtype=DTYPES[sizes.dtype]).transpose(1, 2) for _ in range(number)]


def _operands(variant: Attention) -> list[Tensor | int]:
    """One value for each operand of a variant, by name: int scalars, and tensors of float32 or int64."""
    dtypes = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
    tensors = {t.name: torch.empty([2] * t.rank, dtype=dtypes[t.dtype]) for t in variant.tensors}
    return [tensors.get(p.name, 64) for p in sorted(variant.parameters, key=lambda p: p.name)]


@contextlib.contextmanager
def _without_device(*modules: ModuleType) -> Iterator[None]:
    """Answers for launch code that asks which device it is on; the Hopper module also wants a stream and a counter."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        active = SimpleNamespace(get_current_stream=lambda device: 0)
        for module in modules:
            stack.enter_context(mock.patch.object(module, "driver", SimpleNamespace(active=active)))
            if hasattr(module, "_counter"):
                counter = torch.zeros(1, dtype=torch.int32)
                stack.enter_context(mock.patch.object(module, "_counter", lambda device, stream: counter))  # noqa: B023
                stack.enter_context(mock.patch.object(module, "_processors", lambda device: 132))
        yield


# -- launch -> machine code ------------------------------------------------------------------------------------------
def compile_ahead(seen: Launch, device: str) -> Kernel:
    """Compile one launch for a device of compiler/hardware.py, here and now.

    Triton's cache is passed by, because what ptxas says is not in it.
    """
    machine = by_name(device)
    arch = machine.capability if machine.kind == "cuda" else machine.arch
    target = GPUTarget(machine.kind, arch, TARGETS[machine.kind])
    said = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(_source(seen), target=target, options=dict(seen.options))
    assembly = made.asm["ptx" if machine.kind == "cuda" else "amdgcn"]
    spilled = re.findall(r"(\d+) bytes spill stores|vgpr_spill_count: *(\d+)", said.getvalue() + assembly)
    return Kernel(
        seen.kernel.__name__, made.metadata.shared, sum(int(a or b) for a, b in spilled), assembly, said.getvalue(),
        made.asm.get("cubin", b""),
    )  # fmt: skip


def _source(seen: Launch) -> ASTSource:
    kernel, signature, constants = seen.kernel, {}, {}
    for number, parameter in enumerate(kernel.params):
        value = seen.arguments.get(parameter.name, parameter.default)
        signature[parameter.name] = _type_of(parameter, value)
        if signature[parameter.name] == "constexpr":
            constants[(number,)] = value
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return kind(kernel, signature, constants, {})


def _type_of(parameter: triton.runtime.jit.KernelParam, value: object) -> str:
    """A parameter's type as Triton has it at run time; kernels of Weft are specialised on no run-time value."""
    if parameter.is_constexpr or value is None:
        return "constexpr"
    if parameter.annotation_type:
        return str(parameter.annotation_type)
    match value:
        case TensorDescriptor():
            return f"tensordesc<{TYPE_NAMES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        case Tensor(dtype=dtype) | MockTensor(dtype=dtype):
            return "*" + TYPE_NAMES[dtype]
        case int():
            return "i32"
        case _:
            raise TypeError(f"{parameter.name}: no type for {value!r}")
