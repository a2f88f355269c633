"""Attention where each rank computes some heads of the whole sequence (Jacobs et al. 2023, "DeepSpeed Ulysses")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..codegen.torch_private import of_all_rows
from ..ir.attention import SEED
from .placed import names_beside, placed
from .rows import Deal, count, places
from .shardplan import ShardPlan

if TYPE_CHECKING:
    from .context import ContextParallel


def attended(
    cp: ContextParallel, plan: ShardPlan, tensors: tuple[Tensor, Tensor, Tensor], operands: Mapping[str, Any],
    return_lse: bool, target: str | None, deterministic: bool | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out [B, Hq, rows, Dv] of a rank's queries and lse. tensors: its rows. operands: all that the variant has."""
    sizes, ranks, rank = plan.sizes, cp.ranks, cp.rank
    of_query, of_keys = (plan.queries, _even(sizes.heads, ranks)), (plan.keys, _shared(sizes.kv_heads, ranks))
    sides = zip(tensors, (of_query, of_keys, of_keys))
    query, key, value = (_ToHeads.apply(cp, deal, tensor, heads) for tensor, (deal, heads) in sides)
    variant = _variant(plan)
    names = names_beside(plan.attention)
    read = {p.name for p in variant.canonical.parameters}
    beside: dict[str, Any] = {names.head: rank * sizes.heads // ranks}
    where: dict[str, Any] = {}
    if plan.starts is None:
        beside |= {names.first_key: 0, names.q_len: sizes.q_len, names.kv_len: sizes.kv_len}
        where["q_offset"] = plan.q_offset
    else:
        starts = torch.tensor(plan.starts, dtype=torch.int32, device=query.device)
        of_each = starts.diff()
        beside |= {names.first_key: torch.zeros_like(of_each), names.batch: 0}
        beside |= {names.q_len: of_each, names.kv_len: of_each, names.last: max(0, plan.longest - 1)}
        where["cu_seqlens_q"] = where["cu_seqlens_kv"] = starts
    given = {n: _Shared.apply(cp, _widened(v, query)) if _learns(v) else v for n, v in operands.items() if n in read}
    given |= {n: v for n, v in beside.items() if n in read}
    if variant.canonical.drops:
        where["seed"] = given.pop(SEED.name)
    with of_all_rows():
        found = variant(query, key, value, **where, return_lse=return_lse, target=target, deterministic=deterministic,
                        operands=given)  # fmt: skip
    out, lse = found if return_lse else (found, None)
    out = _ToRows.apply(cp, plan.queries, out, sizes.heads)
    return out, None if lse is None else _ToRows.apply(cp, plan.queries, lse[..., None], sizes.heads)[..., 0]


@lru_cache(maxsize=64)
def _variant(plan: ShardPlan) -> Any:
    sizes = plan.sizes
    return placed(plan.attention, group=sizes.heads // sizes.kv_heads, packed=plan.starts is not None)


def _widened(operand: Tensor, query: Tensor) -> Tensor:
    """An operand whose gradient is a sum over ranks, which is rounded once, at the end."""
    return operand.to(torch.promote_types(operand.dtype, torch.promote_types(query.dtype, torch.float32)))


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _even(heads: int, ranks: int) -> list[tuple[int, int]]:
    """The heads of each rank."""
    return [(r * heads // ranks, (r + 1) * heads // ranks) for r in range(ranks)]


def _shared(heads: int, ranks: int) -> list[tuple[int, int]]:
    """The key heads of each rank: several ranks may have one of them."""
    own = max(1, heads // ranks)
    return [(first := r * heads // ranks, first + own) for r in range(ranks)]


class _ToHeads(torch.autograd.Function):
    """From a rank's rows of all heads to all rows of its heads, in the order of their positions."""

    @staticmethod
    def forward(ctx: Any, cp: Any, deal: Deal, tensor: Tensor, heads: list[tuple[int, int]]) -> Tensor:
        ctx.cp, ctx.deal, ctx.heads, ctx.shape = cp, deal, heads, tensor.shape
        return _to_heads(cp, deal, tensor, heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, _to_rows(ctx.cp, ctx.deal, gradient, ctx.heads, ctx.shape[1]), None


class _ToRows(torch.autograd.Function):
    """The way back, of heads that are dealt evenly."""

    @staticmethod
    def forward(ctx: Any, cp: Any, deal: Deal, tensor: Tensor, heads: int) -> Tensor:
        ctx.cp, ctx.deal, ctx.heads = cp, deal, _even(heads, cp.ranks)
        return _to_rows(cp, deal, tensor, ctx.heads, heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, _to_heads(ctx.cp, ctx.deal, gradient, ctx.heads), None


class _Shared(torch.autograd.Function):
    """An operand that all ranks read: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, cp: Any, tensor: Tensor) -> Tensor:
        ctx.group = cp.group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        summed = gradient.clone()
        dist.all_reduce(summed, group=ctx.group)
        return None, summed


def _to_heads(cp: Any, deal: Deal, tensor: Tensor, heads: list[tuple[int, int]]) -> Tensor:
    batch, _, _, width = tensor.shape
    own = heads[cp.rank][1] - heads[cp.rank][0]
    shapes = [(batch, own, count(deal.rows(r)), width) for r in range(cp.ranks)]
    parts = _swapped(cp, [tensor[:, a:b] for a, b in heads], shapes)
    runs = [(run, part[:, :, a:b]) for r, part in enumerate(parts)
            for run, (a, b) in zip(deal.rows(r), places(deal.rows(r), deal.rows(r)))]  # fmt: skip
    return torch.cat([part for _, part in sorted(runs, key=lambda found: found[0])], 2)


def _to_rows(cp: Any, deal: Deal, tensor: Tensor, heads: list[tuple[int, int]], number: int) -> Tensor:
    batch, own, _, width = tensor.shape
    rows = count(deal.rows(cp.rank))
    sent = [torch.cat([tensor[:, :, a:b] for a, b in deal.rows(r)] or [tensor[:, :, :0]], 2) for r in range(cp.ranks)]
    parts = _swapped(cp, sent, [(batch, own, rows, width)] * cp.ranks)
    if own * cp.ranks == number:
        return torch.cat(parts, 1)
    total = tensor.new_zeros(batch, number, rows, width, dtype=torch.promote_types(tensor.dtype, torch.float32))
    for (first, end), part in zip(heads, parts):  # several ranks have a head
        total[:, first:end].add_(part)
    return total.to(tensor.dtype)


def _swapped(cp: Any, sent: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """What each rank has sent to this one. shapes: of these."""
    flat = torch.cat([t.reshape(-1) for t in sent])
    sizes = [prod(shape) for shape in shapes]
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, [t.numel() for t in sent], group=cp.group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes)]
