"""Warp-specialised Gluon kernels on a CPU: generated text run as Python, one thread for each role of a program.

Triton has no interpreter of Gluon. This one knows the words that kernels of target hopper use. What they do to memory,
barriers and other roles is the machine's (`machine.py`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.codegen.launch.device import Device
from weft.codegen.launch.launching import interpreted
from weft.codegen.loader import load
from weft.codegen.targets import target_named
from weft.codegen.targets.triton import modules as beside
from weft.codegen.targets.triton.kernels.tables import DISTANCE_TABLES
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.ir.philox import philox

from .machine import WORDS, Descriptor, Machine, Pointer, Shared, Token, end_threads


class Layout:
    """Says nothing here."""

    def __init__(self, *arguments: object) -> None:
        self.value = self


def _of(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _alike(a: Any, b: Any) -> Any:
    """Both as tensors of one shape: torch would take a number's dtype for less than a tile's."""
    a, b = _of(a), _of(b)
    return (a, b) if a.shape == b.shape else torch.broadcast_tensors(a, b)


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Tensor:
    at = _of(pointer.at)
    if mask is None:
        return pointer.storage[at]
    shown = torch.broadcast_to(_of(mask), at.shape)
    return torch.where(
        shown, pointer.storage[torch.where(shown, at, 0)], torch.as_tensor(other, dtype=pointer.storage.dtype)
    )


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, shown = torch.broadcast_tensors(_of(pointer.at), _of(True if mask is None else mask))
    at, value = at[shown], torch.broadcast_to(_of(value), at.shape)[shown]
    assert bool((at >= 0).all() and (at < len(pointer.storage)).all()), "a wild store"
    pointer.storage[at] = value.to(pointer.storage.dtype)


def _add(pointer: Pointer, value: int) -> int:
    before = int(pointer.storage[pointer.at])
    pointer.storage[pointer.at] += value
    return before


def _asm(text: str, operands: str, arguments: Sequence[Any], *rest: object, **more: object) -> Any:
    if "satfinite.e4m3x2" in text:
        four = [_of(a).clamp(-448.0, 448.0).to(torch.float8_e4m3fn) for a in arguments]
        return torch.stack(four, -1).view(torch.int32).squeeze(-1)
    if "f16x2.e4m3x2" in text:
        pairs = arguments[0].contiguous().view(torch.float8_e4m3fn).unflatten(-1, (-1, 2, 2)).half()
        return pairs.sum(-2, dtype=torch.float16).view(torch.int32).squeeze(-1)
    if "add.rn.f16x2" in text:
        one, other = (a.contiguous().view(torch.float16) for a in arguments)
        return (one + other).view(torch.int32)
    if "cvt.f32.f16" in text:
        return arguments[0].contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float().sum(-1)
    if text == "mov.b32 $0, $1;" and more["pack"] == 1:
        return arguments[0]
    if text == "mov.b32 $0, $1;":  # four elements, of which each has a byte of one word
        words = arguments[0].unflatten(-1, (-1, 4))
        return (words >> torch.tensor([0, 8, 16, 24])).flatten(-2).to(torch.int8)
    if "rcp.approx" in text:
        return torch.sigmoid(arguments[0] * math.log(2.0))
    if "max.NaN" in text:
        return torch.maximum(arguments[0], torch.zeros(()))
    if "mul.f32" in text:
        return arguments[0] * arguments[1]
    if "ld.global" in text:
        assert bool((arguments[0].at >= 0).all()), "a wild read"
        return _load(arguments[0])
    if "tanh" in text:
        return torch.tanh(arguments[0])
    assert "prefetch" in text, text
    pointer, last = arguments[0], max(int(found) for found in re.findall(r"\[\$1\+(\d+)\]", text))
    assert bool((pointer.at >= 0).all() and (pointer.at + last // 2 < len(pointer.storage)).all()), "a wild read"
    return 0


class Language:
    """`gl`, and `tl` of the kernel that joins parts."""

    int8 = torch.int8
    int16, int32, int64, float32, bfloat16 = torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16
    float16, uint8, uint32, int1 = torch.float16, torch.uint8, WORDS, torch.bool  # words, as `_words_of` has them
    tensor = shared_memory_descriptor = object
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = BlockedLayout = SwizzledSharedLayout = (
        DistributedLinearLayout
    ) = Layout
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda shape, dtype: None)
    static_range, load, store, atomic_add = range, staticmethod(_load), staticmethod(_store), staticmethod(_add)

    def __init__(self) -> None:
        self.machine: Any = None
        self.program, self.programs = 0, 1
        self.extra = SimpleNamespace(cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None))

    def inline_asm_elementwise(self, text: str, operands: str, args: Any, *rest: object, **more: object) -> Any:
        if "wait_group" in text:  # and then counts what was stored
            self.machine.wait_left()
            return _add(args[0], 1)
        if "ld.acquire" in text:
            # programs run one after the other: who waits here would wait for ever
            assert int(_load(args[0])), "waits for a share that nobody has stored"
            return 0
        if found := re.search(r"bar\.(arrive|sync) [$\w]+, (\d+)", text):
            return self.machine.named(int(args[0]), int(found[2]), found[1] == "sync")
        return _asm(text, operands, args, *rest, **more)

    def constexpr(self, value: Any = None) -> Any:
        return value

    def program_id(self, axis: int) -> int:
        return self.program

    def num_programs(self, axis: int) -> int:
        return self.programs

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        tile = torch.zeros(list(shape), dtype=dtype)
        return Shared(tile.fill_(float("nan")) if dtype.is_floating_point else tile)

    def barrier(self) -> None:
        """Of the threads of one role, which run as one here."""

    def warp_specialize(self, roles: Sequence[Any], warps: object, registers: object) -> None:
        self.machine.run(roles)

    def arange(self, first: int, end: int, layout: object = None) -> Tensor:
        return torch.arange(first, end)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: object = None) -> Tensor:
        return torch.zeros(list(shape), dtype=dtype)

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype, layout: object = None) -> Tensor:
        return torch.full(list(shape), value, dtype=dtype)

    def zeros_like(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def cast(self, x: Any, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return _of(x).contiguous().view(dtype) if bitcast else x.to(dtype) if isinstance(x, Tensor) else x

    def where(self, condition: Any, a: Any, b: Any) -> Tensor:
        return torch.where(_of(condition), a, b)

    def minimum(self, a: Any, b: Any) -> Tensor:
        return torch.minimum(*_alike(a, b))

    def maximum(self, a: Any, b: Any) -> Tensor:
        return torch.maximum(*_alike(a, b))

    def fma(self, a: Any, b: Any, c: Any) -> Tensor:
        return (_of(a).double() * b + c).float()

    def div_rn(self, a: Any, b: Any) -> Tensor:
        return torch.div(_of(a), _of(b))

    def cdiv(self, a: Any, b: Any) -> Any:
        return (a + b - 1) // b

    def assume(self, holds: Any) -> None:
        assert bool(holds)

    def max(self, x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    def sum(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        """exp2, log2, rsqrt and other functions of elements."""
        function = getattr(torch, name)
        return lambda *given: function(*map(_of, given))

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], -1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., 0], x[..., 1]

    def associative_scan(self, x: Tensor, axis: int, function: Callable[[Any, Any], Any]) -> Tensor:
        assert function(3, 4) == 7
        return x.cumsum(axis)

    def expand_dims(self, x: Tensor, axis: int) -> Tensor:
        return x.unsqueeze(axis)

    def permute(self, x: Tensor, order: Sequence[int]) -> Tensor:
        return x.permute(*order)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(list(shape))

    def to_tensor(self, x: Any) -> Any:
        return x

    def broadcast_to(self, x: Any, shape: Sequence[int]) -> Tensor:
        return torch.broadcast_to(_of(x), list(shape))

    def broadcast(self, a: Tensor, b: Tensor) -> Any:
        return torch.broadcast_tensors(a, b)

    def multiple_of(self, x: Any, numbers: Sequence[int]) -> Any:
        return x

    def convert_layout(self, x: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
        return x


# -- dropout: what words of 32 bits, which torch does not have, and lines of assembly compute --------------------------
_WORD = 0xFFFFFFFF


def _words_of(groups: Tensor, q_pos: Tensor, batch: Any, head: Any, seed: Any, *_: Any) -> Any:
    counter = (_of(x).long() & _WORD for x in (groups, q_pos, head, batch))
    return philox(torch.broadcast_tensors(*counter), (_of(seed) & _WORD, _of(seed) >> 32 & _WORD))  # type: ignore[arg-type]


def _halves_below(words: Tensor, bound: Tensor) -> Tensor:
    """What abs.f16x2 and set.lt.u32.f16x2 find, in torch's float16."""
    found = 0
    for first in (0, 16):
        one, other = ((x >> first & 0x7FFF).to(torch.int16).view(torch.float16) for x in (words, bound))
        found |= (one < other).long() * (0xFFFF << first)
    return _of(found)


def _where_packed_kept(weights: Tensor, masks: Tensor) -> Tensor:
    return weights * torch.stack([masks & 1, masks >> 16 & 1], -1).flatten(-2)


def _masked(weights: Tensor, even: Tensor, odd: Tensor, byte: Tensor) -> Tensor:
    both = torch.cat(torch.broadcast_tensors(even, odd), -1)
    return torch.where(both >> (8 * byte + 7) & 1 != 0, 0, weights)


def portable_module(name: str, text: str) -> Any:
    """A module of Triton's kernels, in its interpreter.

    Each text has a path: the lines of a function are those that were loaded last from its file.
    """
    return load(Path(hashlib.sha256(text.encode()).hexdigest(), name), True, text)


class OnACpu(Device):
    """A device whose launches go to the interpreter: of kernels of Gluon to `Kernels`, of others to Triton's."""

    def __init__(self, job: Any, text: str, seed: int = 0) -> None:
        super().__init__(0, True)
        self.job, self.text, self.seed, self.at_once, self.goes_directly = job, text, seed, 3, False

    @classmethod
    def of(cls, made: Any, declared: Any, seed: int = 0, edit: Callable[[str], str] | None = None) -> Any:
        """The launcher of a variant's kernels that the driver has made; edit: of their text."""
        launcher = made.resolved.target.bind(made.modules, made.resolved.code, facts_of(declared), torch.device("cpu"))
        text = made.source if edit is None else edit(made.source)
        launcher.job.device = cls(launcher.job, text, seed)
        return launcher

    def hardware(self) -> Any:
        return by_name("h200")

    def processors(self) -> int:
        return self.at_once

    def counter(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def types_of(self, arguments: Sequence[Any]) -> list[Any]:
        return list(arguments)

    def descriptor(self, box: Any, block: Sequence[int]) -> Any:
        return Descriptor(box, block)

    def compiled(self, asked: Sequence[Any]) -> list[Any]:
        own, portable = Kernels(self.text, self.seed), self._portable()

        def run(one: Any) -> Callable[..., None]:
            name = one.binding.name
            for module in portable:
                if hasattr(module, name):
                    return interpreted(getattr(module, name), one.binding, {})

            def launch(programs: Any, arguments: Sequence[Any], stream: object) -> None:
                own.launch(name, int(programs), one.types(arguments))

            return launch

        return [run(one) for one in asked]

    def _portable(self) -> list[Any]:
        """Modules of kernels that are not the target's own."""
        code, facts = self.job.code, self.job.facts
        found: list[Any] = []
        if code.tile_source != "program":
            measures = beside.measures(facts, False, code.signature.sequences)
            found.append(portable_module("tile_spans.py", measures))
        if code.has(DISTANCE_TABLES):
            found.append(portable_module("distance_tables.py", beside.tables(facts, code)))
        if code.borrowed:
            text = beside.lent(facts, code, target_named("triton"))
            text = re.sub(
                r"tl\.inline_asm_elementwise\(\s*\"ld\.global.*?\n    \)", "tl.load(places)", text, flags=re.DOTALL
            )
            found.append(portable_module("flash_ddiagonals.py", text))
        return found


@cache
def _program(text: str) -> CodeType:
    return compile(text, "<gluon>", "exec")


class Kernels:
    """The kernels of a generated module. What packs two neighbours into one register leaves them as they are."""

    def __init__(self, source: str, seed: int = 0) -> None:
        self.gl, self.seed = Language(), seed
        body = re.sub(r"^(?:import|from) .*?(?:\n(?= ).*)*$", "", source, flags=re.MULTILINE)
        body = re.sub(r"= \w+(\(\w+\))?\.type\.layout$", "= None", body, flags=re.MULTILINE)
        body = re.sub(r",\s*gl\.SliceLayout\(1, sums\.type\.layout\)", ", None", body)

        def same(function: Any = None, **options: object) -> Any:
            return same if function is None else function

        def product(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Token:
            return Token(a, b, acc, use_acc)

        def waited(left: int, deps: Sequence[Token]) -> Any:
            found = [token.finish() for token in deps]
            return found[0] if len(found) == 1 else tuple(found)

        machine = SimpleNamespace(
            init=lambda b, count: self.gl.machine.init(b, count),
            arrive=lambda b, count=1: self.gl.machine.arrive(b, count),
            expect=lambda b, nbytes: self.gl.machine.expect(b, nbytes),
            wait=lambda b, phase: self.gl.machine.wait(b, phase),
            MBarrierLayout=Layout,
        )
        self.space: dict[str, Any] = {
            "gl": self.gl, "tl": self.gl, "gluon": SimpleNamespace(jit=same, constexpr_function=same),
            "triton": SimpleNamespace(jit=same), "run_time_program": same, "run_time_kernel": same,
            "NamedTuple": NamedTuple, "fence_async_shared": lambda: None, "mbarrier": machine, "warpgroup_mma": product,
            "warpgroup_mma_wait": waited,
            "tma": SimpleNamespace(
                async_copy_global_to_shared=lambda *a: self.gl.machine.copy(*a),
                async_copy_shared_to_global=lambda *a: self.gl.machine.copy_out(*a),
                store_wait=lambda left: self.gl.machine.wait_left(),
            ),
            "tma_reduce_add": lambda *a: self.gl.machine.copy_out(*a, adds=True),
        }  # fmt: skip
        exec(_program(body), self.space)
        if "as_int" in self.space:  # asks a dtype for its width
            self.space["as_int"] = lambda x: x
        if "unpacked" in self.space and "e4m3x2" not in source:
            self.space |= {"packed": lambda p, dtype: p.to(dtype), "unpacked": lambda pairs, dtype, operand: pairs}

        known = {
            "words_of": _words_of, "halves_below": _halves_below, "masked": _masked,
            "where_packed_kept": _where_packed_kept,
        }  # fmt: skip
        self.space |= {name: own for name, own in known.items() if name in self.space}

    def launch(self, name: str, programs: int, arguments: Sequence[Any]) -> None:
        """Run all programs, one after the other; tensors stand for their addresses."""
        kinds = {Tensor: Pointer.to, float: lambda a: torch.tensor(a, dtype=torch.float32)}
        given = [kinds.get(type(a), lambda a: a)(a) for a in arguments]
        try:
            for program in range(programs):
                self.gl.program, self.gl.programs = program, programs
                self.gl.machine = Machine(self.seed + program)
                self.space[name](*given)
        finally:
            end_threads()
