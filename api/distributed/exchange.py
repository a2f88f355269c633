"""Rows of keys and values on their way between ranks, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .agreement import Agreed
from .collectives import under_way
from .copies import copy_rows, joined_copy
from .rows import Run, Runs, common, places
from .shardplan import ShardPlan

if TYPE_CHECKING:
    from .portions import Sum

Tensors = tuple[Tensor, ...]  # [B, Hkv, rows, columns]: key and value, or a latent cache


class AtHand(NamedTuple):
    """Keys and values of a step: rows of the whole sequence, one after the other."""

    rows: Runs
    tensors: Tensors


class _Layout:
    """Where rows lie in the flat parts of an all-to-all: rank by rank, run by run, tensor by tensor.

    runs: those for or from each rank, in order. shapes: [B, H, columns] of each tensor.
    """

    def __init__(self, runs: Sequence[Runs], shapes: Sequence[tuple[int, int, int]]) -> None:
        self.sizes: list[int] = []  # elements for or from each rank
        # of each tensor, run by run: shape, strides and first element
        self._pieces: list[list[tuple[tuple[int, ...], tuple[int, ...], int]]] = [[] for _ in shapes]
        place = 0
        for of_rank in runs:
            before = place
            for first, end in of_rank:
                for pieces, (batch, heads, columns) in zip(self._pieces, shapes):
                    shape = batch, heads, end - first, columns
                    pieces.append((shape, (prod(shape[1:]), prod(shape[2:]), columns, 1), place))
                    place += prod(shape)
            self.sizes.append(place - before)

    def views(self, flat: Tensor) -> list[list[Tensor]]:
        """Of each tensor the rows of all runs, in a flat tensor of all parts, which begins its memory."""
        return [[flat.as_strided(*piece) for piece in pieces] for pieces in self._pieces]


class Route:
    """What one rank sends and receives in one step of a plan."""

    def __init__(self, plan: ShardPlan, rank: int, step: int, group: Any) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self.own = plan.keys.rows(rank)
        self.sources = plan.steps(rank)[step]
        self.rows = plan.step_rows(rank, step)
        ranks = range(plan.ranks)
        self.gets: list[Runs] = [
            plan.received(rank, r) if r in self.sources and r != rank else () for r in ranks
        ]  # fmt: skip
        self.gives: list[Runs] = [
            plan.received(r, rank) if rank in plan.steps(r)[step] and r != rank else () for r in ranks
        ]
        self.is_used = any(
            plan.received(r, s) for r in ranks for s in plan.steps(r)[step] if r != s
        )  # by any rank: all take part, or none
        kept = common(self.own, self.rows)  # a rank's own rows that it computes in this step
        among_own = list(places(kept, self.own))
        # where these lie among its own, and among those of the step: neighbours in both as one run
        self.kept_at = list(_together(zip(among_own, places(kept, self.rows))))
        # where runs lie that are sent, among this rank's own, and those that come, among the rows of the step
        self.given = [run for runs in self.gives for run in places(runs, self.own)]
        self.gotten = [run for runs in self.gets for run in places(runs, self.rows)]
        # the rows of the step in order: own ones by where they lie, others by their number among those that come
        come = ((run, n) for n, run in enumerate(run for runs in self.gets for run in runs))
        pieces: list[tuple[Run, Run | int]] = sorted([*zip(kept, among_own), *come], key=lambda piece: piece[0])
        self.pieces = [source for _, source in pieces]
        self._layouts: dict[object, tuple[_Layout, _Layout]] = {}

    def layouts(self, like: Tensors) -> tuple[_Layout, _Layout]:
        """Of what is sent and of what comes. like: tensors of the heads and columns of a row."""
        shapes = tuple([(t.shape[0], t.shape[1], t.shape[3]) for t in like])
        if shapes not in self._layouts:
            self._layouts[shapes] = _Layout(self.gives, shapes), _Layout(self.gets, shapes)
        return self._layouts[shapes]

    # -- there -------------------------------------------------------------------------------------------------------
    def start(self, own: Tensors, agreed: Agreed) -> Fetch:
        """Begin to send this rank's own rows, and to receive those of the step. agreed: is asked before that."""
        given, gotten = self.layouts(own)
        sent = own[0].new_empty(sum(given.sizes))
        for tensor, rows in zip(own, given.views(sent)):
            for there, (first, end) in zip(rows, self.given):
                copy_rows(there, tensor[:, :, first:end])
        return Fetch(self, own, _Swap(sent, given, gotten, self, agreed))

    # -- and back ----------------------------------------------------------------------------------------------------
    def give_back(self, found: list[Sum], sums: Sequence[Sum], agreed: Agreed) -> Return:
        """Begin to send gradients of the rows of this step to their owners. They lie as the rows did.

        found: is emptied, so that each is free once it is copied. sums: of this rank's own rows, to which what it has
        itself is added at once.
        """
        given, gotten = self.layouts(tuple(total.like for total in found))
        sent = found[0].like.new_empty(sum(gotten.sizes))
        for total, rows in zip(sums, gotten.views(sent)):
            own = found.pop(0)
            for here, there in self.kept_at:
                for (first, end), part in own.parts(there):
                    total.add((here[0] + first - there[0], here[0] + end - there[0]), part)
            for room, run in zip(rows, self.gotten):
                copy_rows(room, own.result(run))
        return Return(self, given, _Swap(sent, gotten, given, self, agreed))


class Fetch:
    """Rows that are under way."""

    def __init__(self, route: Route, own: Tensors, swap: _Swap) -> None:
        self.route, self.own, self.swap = route, own, swap

    def wait(self) -> AtHand:
        """The rows of the step, in the order of their positions."""
        route, own = self.route, self.own
        if not route.is_used and route.rows == route.own:
            return AtHand(route.own, own)
        found: list[Tensor] = []
        for tensor, come in zip(own, route.layouts(own)[1].views(self.swap.wait())):
            parts = [come[at] if isinstance(at, int) else tensor[:, :, at[0] : at[1]] for at in route.pieces]
            found.append(parts[0] if len(parts) == 1 else joined_copy(parts or [tensor[:, :, :0]]))
        return AtHand(route.rows, tuple(found))


class Return:
    """Gradients that are under way. layout: of what comes."""

    def __init__(self, route: Route, layout: _Layout, swap: _Swap) -> None:
        self.route, self.layout, self.swap = route, layout, swap

    def add_to(self, sums: Sequence[Sum]) -> None:
        """Add what has come to gradients of this rank's own rows."""
        for total, parts in zip(sums, self.layout.views(self.swap.wait())):
            for run, part in zip(self.route.given, parts):
                total.add(run, part)


class _Swap:
    """One all-to-all of flat parts, which a rank may have none of. agreed: is asked before anything is sent."""

    def __init__(self, sent: Tensor, given: _Layout, gotten: _Layout, route: Route, agreed: Agreed) -> None:
        self.sent, self.work = sent, None  # kept until all of it is away
        self.received = sent.new_empty(sum(gotten.sizes))
        if route.is_used:
            agreed()
            with under_way():
                self.work = dist.all_to_all_single(
                    self.received, sent, gotten.sizes, given.sizes, group=route.group, async_op=True
                )

    def wait(self) -> Tensor:
        """What all ranks have sent."""
        if self.work is not None:
            with under_way():
                self.work.wait()
        received = self.received
        del self.work, self.sent, self.received  # it lives as long as whoever asked keeps it
        return received


def _together(pairs: Iterable[tuple[Run, Run]]) -> Iterator[tuple[Run, Run]]:
    """Runs here and there, where neighbours in both become one."""
    known: tuple[Run, Run] | None = None
    for here, there in pairs:
        if known is not None and (known[0][1], known[1][1]) == (here[0], there[0]):
            known = (known[0][0], here[1]), (known[1][0], there[1])
            continue
        if known is not None:
            yield known
        known = here, there
    if known is not None:
        yield known
