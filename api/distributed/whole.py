"""Whole tensors of rows that lie on several ranks, and tensors that all of them have whole."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .collectives import all_gather
from .rows import Deal, Run, count, places

if TYPE_CHECKING:
    from .context import ContextParallel


class Share(torch.autograd.Function):
    """A tensor of whose gradient each rank has an equal share."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


class Whole(torch.autograd.Function):
    """Rows of all ranks, in the order of their positions."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, deal: Deal, tensor: Tensor, dim: int) -> Tensor:
        ctx.deal, ctx.rank, ctx.dim = deal, cp.rank, dim
        rows = tensor.movedim(dim, 0).resolve_conj().resolve_neg().contiguous()
        width = prod(rows.shape[1:]) * rows.element_size()
        stored = rows.view(-1).view(torch.uint8).view(len(rows), width)  # no backend sends every dtype
        most = max(count(deal.rows(r)) for r in range(cp.ranks))
        padded = torch.cat([stored, stored.new_zeros(most - len(rows), width)]) if len(rows) < most else stored
        gathered = stored.new_empty(cp.ranks * most, width)
        all_gather(gathered, padded, cp.group)
        parts: list[tuple[Run, Tensor]] = []
        for rank in range(cp.ranks):
            own = deal.rows(rank)
            parts += [(run, gathered[rank * most + a : rank * most + b]) for run, (a, b) in zip(own, places(own, own))]
        parts.sort(key=lambda part: part[0])
        whole = torch.cat([part for _, part in parts])
        return whole.view(-1).view(rows.dtype).view(len(whole), *rows.shape[1:]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = ctx.deal.rows(ctx.rank)
        parts = [gradient.narrow(ctx.dim, first, end - first) for first, end in own]
        return None, None, torch.cat(parts, ctx.dim) if parts else gradient.narrow(ctx.dim, 0, 0), None
