"""Rows of keys and values on their way between ranks, and their gradients on the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .rows import Run, Runs, common, count, places
from .shardplan import ShardPlan

if TYPE_CHECKING:
    from .portions import Sum


class AtHand(NamedTuple):
    """Keys and values of a step: rows of the whole sequence, one after the other."""

    rows: Runs
    key: Tensor  # [B, Hkv, rows, D]
    value: Tensor  # [B, Hkv, rows, Dv]

    def of(self, run: Run) -> tuple[Tensor, Tensor]:
        """Those of one run, which is inside."""
        ((first, end),) = places((run,), self.rows)
        return self.key[:, :, first:end], self.value[:, :, first:end]


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

    # -- there -------------------------------------------------------------------------------------------------------
    def start(self, key: Tensor, value: Tensor) -> Fetch:
        """Begin to send this rank's own rows, and to receive those of the step."""
        widths = key.shape[3] + value.shape[3]
        of_row = prod(key.shape[:2]) * widths
        sent = [_taken((key, value), places(runs, self.own)) for runs in self.gives]
        return Fetch(self, key, value, _Swap(sent, [count(runs) * of_row for runs in self.gets], key, self))

    # -- and back ----------------------------------------------------------------------------------------------------
    def give_back(self, dkey: Tensor, dvalue: Tensor) -> Return:
        """Begin to send gradients of the rows of this step to their owners. They lie as the rows did."""
        widths = dkey.shape[3] + dvalue.shape[3]
        of_row = prod(dkey.shape[:2]) * widths
        sent = [_taken((dkey, dvalue), places(runs, self.rows)) for runs in self.gets]
        return Return(self, dkey, dvalue, _Swap(sent, [count(runs) * of_row for runs in self.gives], dkey, self))


class Fetch:
    """Rows that are under way."""

    def __init__(self, route: Route, key: Tensor, value: Tensor, swap: _Swap) -> None:
        self.route, self.key, self.value, self.swap = route, key, value, swap

    def wait(self) -> AtHand:
        """The rows of the step, in the order of their positions."""
        route, key, value = self.route, self.key, self.value
        if not route.is_used and route.rows == route.own:
            return AtHand(route.own, key, value)
        arrived: list[tuple[Run, Tensor, Tensor]] = []
        for run, (first, end) in zip(route.kept, places(route.kept, route.own)):
            arrived.append((run, key[:, :, first:end], value[:, :, first:end]))
        for runs, part in zip(route.gets, self.swap.wait()):
            arrived += zip(runs, *_given(part, runs, key, value))
        arrived.sort(key=lambda found: found[0])
        if len(arrived) == 1:
            return AtHand(route.rows, *arrived[0][1:])
        if not arrived:
            return AtHand((), key[:, :, :0], value[:, :, :0])
        _, keys, values = zip(*arrived)
        return AtHand(route.rows, torch.cat(keys, 2), torch.cat(values, 2))


class Return:
    """Gradients that are under way."""

    def __init__(self, route: Route, dkey: Tensor, dvalue: Tensor, swap: _Swap) -> None:
        self.route, self.dkey, self.dvalue, self.swap = route, dkey, dvalue, swap

    def add_to(self, dkey: Sum, dvalue: Sum) -> None:
        """Add what has come, and what this rank had itself, to gradients of its own rows."""
        route = self.route
        for here, there in zip(places(route.kept, route.own), places(route.kept, route.rows)):
            dkey.add(here, self.dkey[:, :, there[0] : there[1]])
            dvalue.add(here, self.dvalue[:, :, there[0] : there[1]])
        for runs, part in zip(route.gives, self.swap.wait()):
            for here, of_key, of_value in zip(places(runs, route.own), *_given(part, runs, self.dkey, self.dvalue)):
                dkey.add(here, of_key)
                dvalue.add(here, of_value)


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
        self.work = dist.all_to_all_single(self.received, self.sent, sizes, given, group=route.group, async_op=True)

    def wait(self) -> Sequence[Tensor]:
        """What each rank has sent."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            del self.sent
        return self.received.split(self.sizes) if self.received.numel() or self.sizes else [self.received]


def _taken(tensors: Sequence[Tensor], runs: Iterator[Run]) -> list[Tensor]:
    """These rows: run by run, each tensor's in turn."""
    return [t[:, :, first:end] for first, end in runs for t in tensors]


def _given(part: Tensor, runs: Runs, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of keys and of values, run by run, from a flat part. key, value: tensors with as many heads and columns."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    place = 0
    for first, end in runs:
        for found, like in ((keys, key), (values, value)):
            shape = (*like.shape[:2], end - first, like.shape[3])
            found.append(part[place : place + prod(shape)].view(shape))
            place += prod(shape)
    return keys, values
