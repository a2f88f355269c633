"""Sums that kernels leave, added up by torch: of lists, of tiles and of sequences. Always in one order."""

from __future__ import annotations

import torch
from torch import Tensor

_MANY = 64  # sums of an entry on average: of half a million for 512 entries `index_put_` took 350 us, and runs take 70


def add_listed(table: Tensor, entries: Tensor, sums: Tensor) -> None:
    """Add listed sums to the entries that they belong to, in one order."""
    own, entries, sums = table.view(-1), entries.flatten(), sums.flatten()
    if not table.is_cuda:  # from the first to the last, in one thread
        own.scatter_add_(0, entries.long(), sums)
    elif sums.numel() <= _MANY * own.numel():
        own.index_put_((entries.long(),), sums, accumulate=True)  # sorts
    else:
        own += sums_by_entry(entries, sums, own.numel())


def sums_by_entry(entries: Tensor, sums: Tensor, number: int) -> Tensor:
    """What belongs to each of so many entries, [number]: sorted, and each run of one entry added up by a block."""
    narrow = entries.to(torch.int16) if number < 2**15 else entries  # which takes half of the passes over them
    ordered, places = torch.sort(narrow, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(number + 1, device=entries.device, dtype=ordered.dtype))
    return torch.segment_reduce(sums[places], "sum", offsets=starts, unsafe=True)


def reduced(partial: Tensor, algorithm: str, kind: str, q_len: int) -> Tensor:
    """The sums of one read: total and sink [B, Hq], row [B, Hq, L], column [B, Hq, T]."""
    if kind in ("total", "sink"):
        return partial.sum(-1)
    if algorithm == "standard":
        return partial.sum(2)
    return partial[..., :q_len] if algorithm == "streaming" and kind == "row" else partial


def by_slot(partial: Tensor, slots: int) -> Tensor:
    """Sums [1, Hq, n] of tiles, of which each slot of a list has as many, as sums of slots."""
    return partial if partial.shape[2] == slots else partial.unflatten(2, (slots, -1)).sum(3)


def by_sequence(partial: Tensor, owner: Tensor, number: int) -> Tensor:
    """Sums [1, Hq, n] of tiles or rows as sums of the sequences that own them, [number, Hq], always in one order."""
    owner = owner.long().clamp(0, number - 1)  # what belongs to none is 0
    shares = partial[0].T
    total = shares.new_zeros(number, shares.shape[1])
    if total.is_cuda:
        return total.index_put_((owner,), shares, accumulate=True)  # sorts
    return total.index_add_(0, owner, shares)
