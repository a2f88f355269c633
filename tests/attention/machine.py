"""The machine that Gluon kernels run on in tests: memory, descriptors, products under way, and roles in turns.

It is unkind where hardware may be: roles take turns at random, copies of TMA arrive at any time before somebody waits
for them and leave at any time before they are waited for, and a product reads its operands when it is waited for, at
the latest moment that hardware could. A slot that is given back too early, or a barrier with a wrong phase, gives wrong
numbers or a deadlock, which is reported.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

WORDS = torch.int64  # dtype of words of 32 bits without a sign, which torch does not compute with


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
        self.tile, self.dtype, self.shape, self.layout = tile, tile.dtype, list(tile.shape), None
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
        if self.dtype != WORDS:
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
