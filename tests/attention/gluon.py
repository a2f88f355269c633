"""Warp-specialised Gluon kernels on a CPU: generated text run as Python, one thread for each role of a program.

Triton has no interpreter of Gluon. This one knows what kernels of target hopper use, and is unkind where hardware may
be: roles take turns at random, copies of TMA arrive at any time before somebody waits for them and leave at any time
before they are waited for, and a product reads its operands when it is waited for, at the latest moment that hardware
could. A slot that is given back too early, or a barrier with a wrong phase, gives wrong numbers or a deadlock, which is
reported.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple, cast

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

DTYPES = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}


class Deadlock(AssertionError):
    """All roles wait, and no copy is under way."""


class Pointer:
    """An address in a tensor's storage, counted in elements, or a tile of such."""

    def __init__(self, storage: Tensor, at: Any = 0) -> None:
        self.storage, self.at = storage, at
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    @staticmethod
    def to(tensor: Tensor) -> Pointer:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(whole, tensor.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.at + offset)

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.storage, self.at[index])


class Shared:
    """Memory of a program, or a view of it."""

    def __init__(self, tile: Tensor) -> None:
        self.tile, self.dtype = tile, tile.dtype
        self._parts: dict[int, Shared] = {}

    def index(self, i: Any) -> Shared:
        at = int(i)
        if at not in self._parts:
            self._parts[at] = Shared(self.tile[at])
        return self._parts[at]

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.tile.view(list(shape)))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tile.permute(*order))

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.tile.narrow(dim, int(start), length))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        """Other numbers in the same bytes; those of words are without their upper halves, which are not there."""
        if self.dtype != Language.uint32:
            return Shared(self.tile.view(dtype).view(list(shape)))
        assert dtype == torch.uint8 and shape[-1] == 4
        return Shared(self.tile.view(dtype).view(*shape[:-1], 8)[..., :4])

    def load(self, layout: object) -> Tensor:
        return self.tile.clone()

    def store(self, value: Tensor) -> None:
        self.tile.copy_(value)

    @cached_property
    def key(self) -> tuple[int, int]:
        return self.tile.untyped_storage().data_ptr(), self.tile.storage_offset()


class Descriptor:
    """What a launch hands over for TMA, for tiles of these sizes."""

    layout = None

    def __init__(self, box: Any, block: Sequence[int]) -> None:
        self.pointer, self.shape, self.strides, self.block = Pointer.to(box.base), box.shape, box.strides, list(block)
        self.dtype = box.base.dtype
        self.block_type = SimpleNamespace(nbytes=self.dtype.itemsize * torch.Size(self.block).numel())

    def _inside(self, coordinates: Sequence[Any]) -> tuple[tuple[slice, ...], Tensor] | None:
        """The part of a tile that lies inside, and its elements in the storage; addresses count modulo 2**64 bytes."""
        size_of, address, last, part = self.dtype.itemsize, 0, 0, []
        for at, size, extent, stride in zip(map(int, coordinates), self.block, self.shape, self.strides, strict=True):
            assert abs(at) < 2**31
            first, end = max(0, -at), min(size, int(extent) - at)
            if first >= end:
                return None
            assert end - first == 1 or 0 < stride < 2**40
            address += (at + first) * int(stride) * size_of
            last += (end - first - 1) * int(stride)
            part.append(slice(first, end))
        start = (address + 2**63) % 2**64 - 2**63 >> size_of.bit_length() - 1
        assert 0 <= start and self.pointer.at + start + last < len(self.pointer.storage), "a wild access"
        sizes = [found.stop - found.start for found in part]
        return tuple(part), self.pointer.storage.as_strided(sizes, self.strides, self.pointer.at + start)

    def read(self, coordinates: Sequence[Any]) -> Tensor:
        """A tile, 0 where it lies outside."""
        tile = torch.zeros(self.block, dtype=self.dtype)
        if (inside := self._inside(coordinates)) is not None:
            tile[inside[0]] = inside[1]
        return tile

    def write(self, coordinates: Sequence[Any], tile: Tensor, adds: bool) -> None:
        if (inside := self._inside(coordinates)) is not None:
            part, to = inside
            new = tile.reshape(self.block)[part]
            to.copy_(to + new if adds else new)


class Token:
    """A product under way."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.operands, self.value = (a, b, acc, use_acc), None

    def finish(self) -> Any:
        if self.value is None:
            a, b, acc, use_acc = self.operands
            left = a.tile if isinstance(a, Shared) else a
            before = acc.finish() if isinstance(acc, Token) else acc
            product = left.double() @ b.tile.double()
            self.value = (product + before if use_acc else product).float()
        return self.value


# -- threads, which all programs of a launch share: to make one takes longer than most turns ---------------------------
_idle: list[SimpleNamespace] = []


def closed() -> threading.Lock:
    """A lock that is taken, as one waits at it: semaphores of threading are written in Python and slower."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def start(work: Callable[[], None]) -> threading.Lock:
    """Run something in an idle thread, which opens the lock at its end."""
    thread = _idle.pop() if _idle else _new_thread()
    thread.work, thread.end = work, closed()
    thread.gate.release()
    return cast(threading.Lock, thread.end)


def _new_thread() -> SimpleNamespace:
    thread = SimpleNamespace(gate=closed())

    def run() -> None:
        while True:
            thread.gate.acquire()
            if thread.work is None:
                return
            thread.work()
            _idle.append(thread)
            thread.end.release()

    thread.itself = threading.Thread(target=run, daemon=True)
    thread.itself.start()
    return thread


def end_threads() -> None:
    while _idle:
        thread = _idle.pop()
        thread.work = None
        thread.gate.release()
        thread.itself.join()


class Machine:
    """One program: its roles, its barriers and the copies under way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.gates: list[threading.Lock] = []  # a role waits at its own for its turn
        self.barriers: dict[tuple[int, int], list[int]] = {}  # arrivals wanted, arrivals missing, bytes missing, phase
        self.copies: list[Callable[[], None]] = []
        self.leaving: dict[int, list[Callable[[], None]]] = {}  # copies to HBM that a role has begun
        self.waiting: dict[int, tuple[tuple[int, int], int]] = {}
        self.alive: list[int] = []
        self.turn, self.error = -1, None

    # -- barriers ------------------------------------------------------------------------------------------------------
    def init(self, barrier: Shared, count: int) -> None:
        self.barriers[barrier.key] = [count, count, 0, 0]

    def arrive(self, barrier: Shared, count: int = 1) -> None:
        self._change(barrier.key, count, 0)
        self._pass_on()

    def expect(self, barrier: Shared, nbytes: int) -> None:
        self._change(barrier.key, 1, nbytes)

    def _change(self, key: tuple[int, int], arrivals: int, nbytes: int) -> None:
        state = self.barriers[key]
        state[1] -= arrivals
        state[2] += nbytes
        assert state[1] >= 0, "a barrier was arrived at too often"
        if state[1] == 0 and state[2] == 0:
            state[1], state[3] = state[0], state[3] + 1

    def _is_over(self, key: tuple[int, int], phase: int) -> bool:
        return self.barriers[key][3] & 1 != phase

    def wait(self, barrier: Shared, phase: Any) -> None:
        self._wait(barrier.key, int(phase))

    def _wait(self, key: tuple[int, int], phase: int) -> None:
        if not self.alive:  # a kernel without roles
            while not self._is_over(key, phase):
                self.copies.pop(self.random.randrange(len(self.copies)))()
            return
        me = self._me()
        self.waiting[me] = (key, phase)
        self._pass_on()
        del self.waiting[me]

    def copy(self, descriptor: Descriptor, coordinates: Sequence[Any], barrier: Shared, to: Shared) -> None:
        assert list(to.tile.shape) == descriptor.block
        coordinates = [int(c) for c in coordinates]

        def arrive() -> None:
            to.tile.copy_(descriptor.read(coordinates))
            self._change(barrier.key, 0, -descriptor.block_type.nbytes)

        self.copies.append(arrive)

    def copy_out(self, descriptor: Descriptor, coordinates: Sequence[Any], source: Shared, adds: bool = False) -> None:
        assert source.dtype == descriptor.dtype
        coordinates = [int(c) for c in coordinates]
        begun = self.leaving.setdefault(self._me(), [])
        begun.append(lambda: descriptor.write(coordinates, source.tile, adds))
        if self.random.random() < 0.5:
            self.wait_left()

    def wait_left(self) -> None:
        for leave in self.leaving.pop(self._me(), []):
            leave()

    # -- barriers of the hardware, which a consumer's 128 threads arrive at; the producer's 32, or others', wait -------
    def named(self, number: int, threads: int, waits: bool) -> int:
        key = (-1, number)
        roles = threads // 128 + threads % 128 // 32  # warpgroups, and single warps
        self.barriers.setdefault(key, [roles, roles, 0, 0])
        phase = self.barriers[key][3] & 1
        self._change(key, 1, 0)
        if waits:
            self._wait(key, phase)
        else:
            self._pass_on()
        return 0

    # -- turns ---------------------------------------------------------------------------------------------------------
    def _me(self) -> int:
        return self.turn if self.alive else -1  # nobody else runs

    def _pass_on(self) -> None:
        """Give the turn to any role that can go on, and wait for the own one."""
        me = self._me()
        self._choose()
        if self.turn != me and self.error is None:
            self.gates[self.turn].release()
            self.gates[me].acquire()
        if self.error is not None:
            raise SystemExit

    def _choose(self) -> None:
        while True:
            while self.copies and self.random.random() < 0.3:
                self.copies.pop(self.random.randrange(len(self.copies)))()
            able = [r for r in self.alive if r not in self.waiting or self._is_over(*self.waiting[r])]
            if able:
                self.turn = self.random.choice(able)
                return
            if not self.alive:
                return
            if not self.copies:
                self.error = Deadlock(f"roles {sorted(self.waiting)} wait for each other")
                return
            self.copies.pop(self.random.randrange(len(self.copies)))()

    def run(self, roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        def work(role: int) -> None:
            function, arguments = roles[role]
            self.gates[role].acquire()
            try:
                if self.error is None:
                    function(*arguments)
            except SystemExit:
                pass
            except BaseException as error:
                self.error = error
            self.alive.remove(role)
            if self.error is None:
                self._choose()
            if self.alive:  # after an error each ends the next
                self.gates[self.turn if self.error is None else self.alive[0]].release()

        self.alive = list(range(len(roles)))
        self.gates = [closed() for _ in roles]
        ends = [start(partial(work, role)) for role in self.alive]
        self._choose()
        self.gates[self.turn].release()
        for end in ends:
            end.acquire()
        if self.error is not None:
            raise self.error
        assert not self.copies and not self.leaving, "a copy that nobody waited for"


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
    float16, uint8, uint32, int1 = torch.float16, torch.uint8, torch.int64, torch.bool  # words, as `_words_of` has them
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
