"""Attention where each rank computes some heads: of all rows (Jacobs et al. 2023, "DeepSpeed Ulysses"), or of those of
its neighbours, while keys travel between ranks that have the same heads (Fang and Zhao 2024, "USP")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..codegen.torch_private import of_all_rows
from ..ir.attention import SEED
from ..runtime.call import choices_of
from . import sharded
from .agreement import Backwards, backwards
from .collectives import all_reduce, under_way
from .copies import fill, joined_copy
from .placed import names_beside, placed, positions_divided_by
from .portions import operand_names
from .rows import Deal, Run, Runs, count, joined, places
from .shardplan import ShardPlan

Main = tuple[Tensor, Tensor, Tensor]  # query, key and value


class Neighbours(NamedTuple):
    """Ranks that divide the heads of a call among themselves, and have the rows of all of them meanwhile."""

    group: Any
    rank: int  # among these
    ranks: int


class Options(NamedTuple):
    """Of a call."""

    return_lse: bool
    target: str | None
    deterministic: bool | None


class Side(NamedTuple):
    """How rows of queries, or of keys, lie on neighbours before heads are divided, and what each has behind."""

    rows: tuple[Runs, ...]  # of each before
    together: Runs  # of all: each has these behind
    heads: tuple[Run, ...]  # of each behind
    number: int  # of all heads


def attended(
    plan: ShardPlan, near: Neighbours, far: sharded.Place, main: Main, operands: Mapping[str, Any], options: Options
) -> tuple[Tensor, Tensor | None]:
    """out [B, Hq, rows, Dv] of a rank's queries and lse. main: its rows. operands: all that the variant has.

    near: the ranks that divide heads. far: this one among those that have the same heads, of strategies with two parts.
    """
    of_queries, of_keys = _sides(plan, far.rank * near.ranks)
    first, then = of_queries.heads[near.rank][0], backwards(far.agreement, str(plan.attention.name))
    mine: Main = _ToHeads.apply(near, then, (of_queries, of_keys, of_keys), *main)
    if plan.strategy == "heads":
        out, lse = _of_all_rows(plan, far.every, then, first, mine, operands, options)
    else:
        out, lse = _of_some_rows(plan, far, first, mine, operands, options)
    if lse is None:
        (out,) = _ToRows.apply(near, then, of_queries, out)
        return out, None
    out, lse = _ToRows.apply(near, then, of_queries, out, lse[..., None])
    return out, lse[..., 0]


@lru_cache(maxsize=256)
def _sides(plan: ShardPlan, first: int) -> tuple[Side, Side]:
    """Of queries and of keys. first: the first of the neighbours, as all ranks count."""
    n = plan.shares

    def of(deal: Deal, heads: list[Run], number: int) -> Side:
        rows = tuple(deal.rows(first + r) for r in range(n))
        return Side(rows, joined(run for own in rows for run in own), tuple(heads), number)

    heads, kv_heads = plan.sizes.heads, plan.sizes.kv_heads
    return of(plan.queries, _even(heads, n), heads), of(plan.keys, _shared(kv_heads, n), kv_heads)


def _even(heads: int, ranks: int) -> list[Run]:
    """The heads of each rank."""
    return [(r * heads // ranks, (r + 1) * heads // ranks) for r in range(ranks)]


def _shared(heads: int, ranks: int) -> list[Run]:
    """The key heads of each rank: several ranks may have one of them."""
    own = max(1, heads // ranks)
    return [(first := r * heads // ranks, first + own) for r in range(ranks)]


# -- the heads of a rank -----------------------------------------------------------------------------------------------
def _of_some_rows(
    plan: ShardPlan, far: sharded.Place, first: int, main: Main, operands: Mapping[str, Any], options: Options
) -> tuple[Tensor, Tensor | None]:
    """out and lse of some heads and queries: keys of these heads travel. first: the first head."""
    names = operand_names(plan.attention)
    numbers = {n: v for n, v in operands.items() if n not in names} | {names_beside(plan.attention).head: first}
    choices = choices_of(options.target, None, options.deterministic)
    state = sharded.State(far, plan.of_some_heads, numbers, choices, tuple(names), 2, None)
    query, *keys = main
    out, lse = sharded.attended(state, query, tuple(keys), [operands[n] for n in names])
    return out, lse if options.return_lse else None


def _of_all_rows(
    plan: ShardPlan, every: Any, then: Backwards, first: int, main: Main, operands: Mapping[str, Any], options: Options
) -> tuple[Tensor, Tensor | None]:
    """out and lse of some heads: a call on one device. every: the group over which gradients of operands are summed."""
    query, sizes, names = main[0], plan.sizes, names_beside(plan.attention)
    variant = _variant(plan)
    read = {p.name for p in variant.canonical.parameters}
    beside: dict[str, Any] = {names.head: first}
    where: dict[str, Any] = {}
    if plan.starts is None:
        beside |= {names.first_key: 0, names.q_len: sizes.q_len, names.kv_len: sizes.kv_len}
        where["q_offset"] = plan.q_offset
    else:
        starts, of_each = _starts(plan, query.device)
        beside |= {names.first_key: torch.zeros_like(of_each), names.batch: 0}
        beside |= {names.q_len: of_each, names.kv_len: of_each, names.last: max(0, plan.longest - 1)}
        where["cu_seqlens_q"] = where["cu_seqlens_kv"] = starts
    given = {n: v for n, v in operands.items() if n in read}
    if learned := {n: _widened(v, query) for n, v in given.items() if _learns(v)}:
        given |= zip(learned, _Shared.apply(every, then, *learned.values()))
    given |= {n: v for n, v in beside.items() if n in read}
    if variant.canonical.drops:
        where["seed"] = given.pop(SEED.name)
    with of_all_rows():
        found = variant(*main, **where, **options._asdict(), operands=given)
    return found if options.return_lse else (found, None)


@lru_cache(maxsize=64)
def _starts(plan: ShardPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first row of each packed sequence, with the end, and their lengths. A CUDA graph copies none from a host."""
    with torch.inference_mode(False):  # a call with gradients may come next
        starts = torch.tensor(plan.starts, dtype=torch.int32, device=device)
        return starts, starts.diff()


@lru_cache(maxsize=64)
def _variant(plan: ShardPlan) -> Any:
    group = plan.sizes.heads // plan.sizes.kv_heads
    return placed(
        plan.attention, group=group, packed=plan.starts is not None, in_step=plan.attention.canonical.drops,
        multiple=positions_divided_by(plan.attention),
    )  # fmt: skip


def _widened(operand: Tensor, query: Tensor) -> Tensor:
    """An operand whose gradient is a sum over ranks, which is rounded once, at the end."""
    return operand.to(torch.promote_types(operand.dtype, torch.promote_types(query.dtype, torch.float32)))


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Shared(torch.autograd.Function):
    """Operands that all ranks read: their gradients are sums of those of all."""

    @staticmethod
    def forward(ctx: Any, group: Any, then: Backwards, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.then = group, then
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = [gradient.clone() for gradient in gradients]
        with ctx.then.of("operands"):
            for gradient in summed:
                all_reduce(gradient, ctx.group)
        return None, None, *summed


# -- from rows to heads, and back --------------------------------------------------------------------------------------
class _ToHeads(torch.autograd.Function):
    """From a rank's rows of all heads to all rows of its heads, in the order of their positions: query, key, value."""

    @staticmethod
    def forward(ctx: Any, near: Neighbours, then: Backwards, sides: Sequence[Side], *tensors: Tensor) -> Any:
        ctx.near, ctx.then, ctx.sides = near, then, sides
        found = [_to_heads(near, side, t) for side, t in zip(sides, tensors)]
        ctx.mark_non_differentiable(*(t for t, need in zip(found, ctx.needs_input_grad[3:]) if not need))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.then.of("rows that became heads"):
            found = [_to_rows(ctx.near, side, gradient) if need else None
                     for side, gradient, need in zip(ctx.sides, gradients, ctx.needs_input_grad[3:])]  # fmt: skip
        return None, None, None, *found


class _ToRows(torch.autograd.Function):
    """The way back, of out and lse."""

    @staticmethod
    def forward(ctx: Any, near: Neighbours, then: Backwards, side: Side, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.near, ctx.then, ctx.side = near, then, side
        return tuple(_to_rows(near, side, t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.then.of("heads that became rows"):
            return None, None, None, *(_to_heads(ctx.near, ctx.side, gradient) for gradient in gradients)


def _to_heads(near: Neighbours, side: Side, tensor: Tensor) -> Tensor:
    batch, _, _, width = tensor.shape
    first, end = side.heads[near.rank]
    shapes = [(batch, end - first, count(rows), width) for rows in side.rows]
    parts = _swapped(near, tensor, [[tensor[:, a:b]] for a, b in side.heads], shapes)
    runs = [(run, part[:, :, a:b]) for rows, part in zip(side.rows, parts)
            for run, (a, b) in zip(rows, places(rows, rows))]  # fmt: skip
    empty = tensor.new_empty(batch, end - first, 0, width)
    return joined_copy([empty, *(part for _, part in sorted(runs, key=lambda found: found[0]))])


def _to_rows(near: Neighbours, side: Side, tensor: Tensor) -> Tensor:
    batch, own, _, width = tensor.shape
    rows = count(side.rows[near.rank])
    sent = [[tensor[:, :, a:b] for a, b in places(runs, side.together)] for runs in side.rows]
    parts = _swapped(near, tensor, sent, [(batch, own, rows, width)] * near.ranks)
    if own * near.ranks == side.number:
        return joined_copy(parts, 1)
    total = tensor.new_zeros(batch, side.number, rows, width, dtype=torch.promote_types(tensor.dtype, torch.float32))
    for (first, end), part in zip(side.heads, parts):  # several ranks have a head
        total[:, first:end].add_(part)
    return total.to(tensor.dtype)


def _swapped(
    near: Neighbours, like: Tensor, sent: Sequence[Sequence[Tensor]], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """What each rank has sent to this one. sent: to each rank, runs of rows. shapes: of what comes."""
    given, sizes = [sum(run.numel() for run in runs) for runs in sent], [prod(shape) for shape in shapes]
    flat, received = like.new_empty(sum(given)), like.new_empty(sum(sizes))
    for there, runs in zip(flat.split(given), sent):
        if runs:
            fill(there.view(*runs[0].shape[:2], sum(run.shape[2] for run in runs), like.shape[3]), runs)
    with under_way():
        dist.all_to_all_single(received, flat, sizes, given, group=near.group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes)]
