"""Rows of keys and values on their way between ranks, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .collectives import under_way
from .copies import copy_rows, joined_copy
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
        self.kept_among_own = list(places(self.kept, self.own))
        # where these lie among its own, and among those of the step: neighbours in both as one run
        self.kept_at = list(_together(zip(self.kept_among_own, places(self.kept, self.rows))))
        # where runs of a rank lie among this one's own, and among those of the step; of ranks that have some
        self.given = {r: list(places(runs, self.own)) for r, runs in enumerate(self.gives) if runs}
        self.gotten = {r: list(places(runs, self.rows)) for r, runs in enumerate(self.gets) if runs}
        self.counts = list(map(count, self.gives)), list(map(count, self.gets))

    # -- there -------------------------------------------------------------------------------------------------------
    def start(self, own: Tensors) -> Fetch:
        """Begin to send this rank's own rows, and to receive those of the step."""
        runs = [run for of_rank in self.given.values() for run in of_rank]
        sent = ([t[:, :, first:end] for first, end in runs] for t in own)
        return Fetch(self, own, _Swap(sent, own, *self.counts, self))

    # -- and back ----------------------------------------------------------------------------------------------------
    def give_back(self, found: list[Sum], sums: Sequence[Sum]) -> Return:
        """Begin to send gradients of the rows of this step to their owners. They lie as the rows did.

        found: is emptied, so that each is free once it is copied. sums: of this rank's own rows, to which what it has
        itself is added at once.
        """
        like = tuple(total.like for total in found)
        runs = [run for of_rank in self.gotten.values() for run in of_rank]

        def sent() -> Iterator[list[Tensor]]:
            for total in sums:
                own = found.pop(0)
                for here, there in self.kept_at:
                    for (first, end), part in own.parts(there):
                        total.add((here[0] + first - there[0], here[0] + end - there[0]), part)
                yield [own.result(run) for run in runs]

        return Return(self, like, _Swap(sent(), like, *self.counts[::-1], self))


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
        for run, (first, end) in zip(route.kept, route.kept_among_own):
            arrived.append((run, tuple(t[:, :, first:end] for t in own)))
        parts = self.swap.wait()
        for rank in route.gotten:
            arrived += zip(route.gets[rank], _given(parts[rank], route.gets[rank], own))
        arrived.sort(key=lambda found: found[0])
        if len(arrived) == 1:
            return AtHand(route.rows, arrived[0][1])
        if not arrived:
            return AtHand((), tuple(t[:, :, :0] for t in own))
        return AtHand(route.rows, tuple(map(joined_copy, zip(*(found for _, found in arrived)))))


class Return:
    """Gradients that are under way. like: tensors with as many heads and columns."""

    def __init__(self, route: Route, like: Tensors, swap: _Swap) -> None:
        self.route, self.like, self.swap = route, like, swap

    def add_to(self, sums: Sequence[Sum]) -> None:
        """Add what has come to gradients of this rank's own rows."""
        parts = self.swap.wait()
        for rank, runs in self.route.given.items():
            for here, found in zip(runs, _given(parts[rank], runs, self.like)):
                for total, rows in zip(sums, found):
                    total.add(here, rows)


class _Swap:
    """One all-to-all of flat parts, which a rank may have none of. A part has run by run each tensor's rows.

    sent: of each tensor the rows of all runs. like: tensors of the heads and columns of a row. given, gotten: rows for
    and from each rank.
    """

    def __init__(
        self, sent: Iterable[list[Tensor]], like: Tensors, given: Sequence[int], gotten: Sequence[int], route: Route
    ) -> None:  # fmt: skip
        of_row, self.work = _of_row(like), None
        self.sizes, given_sizes = ([n * of_row for n in rows] for rows in (gotten, given))
        self.sent = like[0].new_empty(sum(given_sizes))  # kept until all of it is away
        ahead = 0  # elements of a row, of tensors before
        for tensor, parts in zip(like, sent):
            first = 0
            for part in parts:
                place = first + part.shape[2] * ahead
                copy_rows(self.sent[place : place + part.numel()].view(part.shape), part)
                first += part.shape[2] * of_row
            ahead += _of_row((tensor,))
            del parts
        self.received = like[0].new_empty(sum(self.sizes))
        if route.is_used:
            with under_way():
                self.work = dist.all_to_all_single(
                    self.received, self.sent, self.sizes, given_sizes, group=route.group, async_op=True
                )

    def wait(self) -> Sequence[Tensor]:
        """What each rank has sent."""
        if self.work is not None:
            with under_way():
                self.work.wait()
        received = self.received
        del self.work, self.sent, self.received  # it lives as long as whoever asked keeps it
        return received.split(self.sizes)


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


def _given(part: Tensor, runs: Sequence[Run], like: Tensors) -> list[Tensors]:
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
