"""Rows of keys and values on their way between ranks, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import under_way
from .rows import Run, Runs, common, count, places
from .shardplan import ShardPlan

if TYPE_CHECKING:
    from .portions import Sum

Tensors = tuple[Tensor, ...]  # [B, Hkv, rows, columns]: key and value, or a latent cache


class AtHand(NamedTuple):
    """Keys and values of a step: rows of the whole sequence, one after the other."""

    rows: Runs
    tensors: Tensors


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
        self.kept = common(self.own, self.rows)  # a rank's own rows that it computes in this step
        # where these lie among its own, and among those of the step: neighbours in both as one run
        self.kept_at = list(_together(zip(places(self.kept, self.own), places(self.kept, self.rows))))

    # -- there -------------------------------------------------------------------------------------------------------
    def start(self, own: Tensors) -> Fetch:
        """Begin to send this rank's own rows, and to receive those of the step."""
        sent = [_taken(own, places(runs, self.own)) for runs in self.gives]
        return Fetch(self, own, _Swap(sent, [count(runs) * _of_row(own) for runs in self.gets], own[0], self))

    # -- and back ----------------------------------------------------------------------------------------------------
    def give_back(self, found: Sequence[Sum], sums: Sequence[Sum]) -> Return:
        """Begin to send gradients of the rows of this step to their owners. They lie as the rows did.

        sums: of this rank's own rows, to which what it has itself is added at once, so that nothing else is kept.
        """
        for here, there in self.kept_at:
            for total, own in zip(sums, found):
                for (first, end), part in own.parts(there):
                    total.add((here[0] + first - there[0], here[0] + end - there[0]), part)
        sent = [[total.result(run) for run in places(runs, self.rows) for total in found] for runs in self.gets]
        like = tuple(total.result((0, 0)) for total in found)  # no rows
        sizes = [count(runs) * _of_row(like) for runs in self.gives]
        return Return(self, like, _Swap(sent, sizes, like[0], self))


class Fetch:
    """Rows that are under way."""

    def __init__(self, route: Route, own: Tensors, swap: _Swap) -> None:
        self.route, self.own, self.swap = route, own, swap

    def wait(self) -> AtHand:
        """The rows of the step, in the order of their positions."""
        route, own = self.route, self.own
        if not route.is_used and route.rows == route.own:
            return AtHand(route.own, own)
        arrived: list[tuple[Run, Tensors]] = []
        for run, (first, end) in zip(route.kept, places(route.kept, route.own)):
            arrived.append((run, tuple(t[:, :, first:end] for t in own)))
        for runs, part in zip(route.gets, self.swap.wait()):
            arrived += zip(runs, _given(part, runs, own))
        arrived.sort(key=lambda found: found[0])
        if len(arrived) == 1:
            return AtHand(route.rows, arrived[0][1])
        if not arrived:
            return AtHand((), tuple(t[:, :, :0] for t in own))
        return AtHand(route.rows, tuple(torch.cat(parts, 2) for parts in zip(*(found for _, found in arrived))))


class Return:
    """Gradients that are under way. like: tensors with as many heads and columns."""

    def __init__(self, route: Route, like: Tensors, swap: _Swap) -> None:
        self.route, self.like, self.swap = route, like, swap

    def add_to(self, sums: Sequence[Sum]) -> None:
        """Add what has come to gradients of this rank's own rows."""
        route = self.route
        for runs, part in zip(route.gives, self.swap.wait()):
            for here, found in zip(places(runs, route.own), _given(part, runs, self.like)):
                for total, rows in zip(sums, found):
                    total.add(here, rows)


class _Swap:
    """One all-to-all of flat parts, which a rank may have none of."""

    def __init__(self, sent: Sequence[list[Tensor]], sizes: list[int], like: Tensor, route: Route) -> None:
        self.sizes, self.work = sizes, None
        if not route.is_used:
            self.received = like.new_empty(0)
            return
        given = [sum(part.numel() for part in to_rank) for to_rank in sent]
        self.sent = like.new_empty(sum(given))  # kept until all of it is away
        parts = [part for to_rank in sent for part in to_rank]
        for there, part in zip(self.sent.split([part.numel() for part in parts]), parts):
            there.view(part.shape).copy_(part)
        self.received = like.new_empty(sum(sizes))
        with under_way():
            self.work = dist.all_to_all_single(self.received, self.sent, sizes, given, group=route.group, async_op=True)

    def wait(self) -> Sequence[Tensor]:
        """What each rank has sent."""
        if self.work is not None:
            with under_way():
                self.work.wait()
            self.work = None
            del self.sent
        received = self.received
        del self.received  # it lives as long as whoever asked keeps it
        return received.split(self.sizes) if received.numel() or self.sizes else [received]


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


def _of_row(tensors: Tensors) -> int:
    """Elements of a row of all of these."""
    return sum(prod(t.shape[:2]) * t.shape[3] for t in tensors)


def _taken(tensors: Tensors, runs: Iterator[Run]) -> list[Tensor]:
    """These rows: run by run, each tensor's in turn."""
    return [t[:, :, first:end] for first, end in runs for t in tensors]


def _given(part: Tensor, runs: Runs, like: Tensors) -> list[Tensors]:
    """Rows of each tensor, run by run, from a flat part. like: tensors with as many heads and columns."""
    found: list[Tensors] = []
    place = 0
    for first, end in runs:
        shapes = [(*t.shape[:2], end - first, t.shape[3]) for t in like]
        sizes = [prod(shape) for shape in shapes]
        pieces = part[place : place + sum(sizes)].split(sizes)
        found.append(tuple(piece.view(shape) for piece, shape in zip(pieces, shapes)))
        place += sum(sizes)
    return found
