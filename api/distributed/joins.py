"""Results over parts of the keys that lie on several ranks, joined on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.joining import join_results
from .collectives import all_gather, under_way

_ALIGNED = 16  # bytes
MOST_GATHERED = 1 << 20  # bytes of a rank's result that all others get whole


class Group(NamedTuple):
    """Ranks, and which of them this process is."""

    group: Any  # None: this process alone
    rank: int
    ranks: int


def joined(group: Group, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """out [B, Hq, L, Dv] and lse over the keys of all ranks, from those over the keys of each. All get the same bits.

    lse: [B, Hq, L]; [2, B, Hq, L], two statistics of a row, where scores may lie far from 0; or None, for normalizers
    whose results are summed. Sums are in float32, or in float64. A result of few rows goes to all ranks at once. Of
    many rows each rank joins a part, and gives that to the others: two exchanges, of less.
    """
    if not out.numel():
        return out, lse
    rows = out.reshape(-1, out.shape[-1])
    parts = [rows] if lse is None else [rows, lse.reshape(-1, len(rows)).T]
    if rows.numel() * rows.element_size() <= MOST_GATHERED or group.ranks == 2:
        found = _of_all(_gathered(group, parts))
    else:
        found = _of_parts(group, parts)
    whole = found[0].view(out.shape)
    return whole, found[1].T.reshape(lse.shape) if lse is not None else None


def _of_all(parts: Sequence[Tensor]) -> list[Tensor]:
    """Joins what ranks found: out [ranks, rows, Dv] and, where there are such, statistics [ranks, rows, 1 or 2]."""
    out = parts[0]
    if len(parts) == 1:
        return [out.sum(0, dtype=torch.promote_types(out.dtype, torch.float32)).to(out.dtype)]
    outs, statistics = out[:, None, None], parts[1].movedim(2, 1)[:, :, None, None]  # [ranks, 1 or 2, 1, 1, rows]
    whole, lse = outs.new_empty(outs.shape[1:]), statistics.new_empty(statistics.shape[1:])
    join_results((outs[0], statistics[0]), (outs[1:], statistics[1:]), (whole, lse))
    return [whole[0, 0], lse[:, 0, 0].T]


def _of_parts(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """The same, where each rank joins its part of the rows."""
    rows, ranks = len(parts[0]), group.ranks
    each = -(-rows // ranks)
    sent = _Packed.room([(ranks, each, p.shape[1]) for p in parts], parts)
    for room, part in zip(sent.tensors, parts):
        room.zero_()  # the last ranks may have fewer rows, or none
        for own, rows_of_rank in zip(room, part.split(each)):
            own[: len(rows_of_rank)].copy_(rows_of_rank)
    received = sent.like(ranks)
    with under_way():
        dist.all_to_all_single(received.bytes, sent.bytes, group=group.group)
    own = _of_all(received.tensors)
    return [whole.flatten(0, 1)[:rows] for whole in _gathered(group, own)]


def _gathered(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """What all ranks have, [ranks, rows, columns] of each part [rows, columns], in one exchange."""
    own = _Packed.room([(1, *p.shape) for p in parts], parts)
    for room, part in zip(own.tensors, parts):
        room[0].copy_(part)
    every = own.like(group.ranks)
    all_gather(every.bytes, own.bytes, group.group)
    return every.tensors


def gathered_heads(group: Group, tensor: Tensor) -> Tensor:
    """[B, heads, ...] of all ranks, from the heads of each."""
    first = tensor.transpose(0, 1).contiguous()
    every = first.new_empty(group.ranks * len(first), *first.shape[1:])
    all_gather(every, first, group.group)
    return every.transpose(0, 1)


class _Packed(NamedTuple):
    """Tensors of several dtypes in one buffer, so that one exchange takes them all."""

    bytes: Tensor  # uint8 [number, bytes of each]
    tensors: list[Tensor]  # views of it, [number, rows, columns]

    @staticmethod
    def room(shapes: Sequence[tuple[int, ...]], like: Sequence[Tensor]) -> _Packed:
        """Empty tensors of these shapes, whose first dimension is the same, with the dtypes and device of others."""
        kinds = [(rows, columns, t.dtype) for (_, rows, columns), t in zip(shapes, like)]
        sizes = [-(-rows * columns * dtype.itemsize // _ALIGNED) * _ALIGNED for rows, columns, dtype in kinds]
        number, first = shapes[0][0], 0
        whole = torch.empty(number, sum(sizes), dtype=torch.uint8, device=like[0].device)
        tensors = []
        for (rows, columns, dtype), size in zip(kinds, sizes):
            own = whole[:, first : first + rows * columns * dtype.itemsize].view(dtype)
            tensors.append(own.unflatten(1, (rows, columns)))
            first += size
        return _Packed(whole, tensors)

    def like(self, number: int) -> _Packed:
        """Empty tensors of the same sizes, so many times."""
        return self.room([(number, *t.shape[1:]) for t in self.tensors], self.tensors)
