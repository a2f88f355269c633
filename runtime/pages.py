"""Pages of keys gathered into rows: for the reference, and to look at what a table holds."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from .call import PackedPaged, Paged


def used_pages(sequences: Paged | PackedPaged) -> Tensor:
    """How many entries of its row of the table each sequence has, [B, 1], on the device."""
    most = sequences.table.shape[1]
    return (((sequences.kv_lens.long() + sequences.page - 1) // sequences.page).clamp(0, most))[:, None]


def gathered(pool: Tensor, sequences: Paged | PackedPaged) -> Tensor:
    """The keys of a pool [blocks, Hkv, page, D] as padded rows [B, Hkv, pages * page, D]: a copy.

    What no sequence has is that of some block, and what lies in the table there is not looked at.
    """
    table = sequences.table
    used = torch.arange(table.shape[1], device=table.device) < used_pages(sequences)
    blocks = torch.where(used, table, 0).long()
    if pool.shape[0] == 0:
        return pool.new_zeros(table.shape[0], pool.shape[1], 0, pool.shape[3])
    return pool[blocks].transpose(1, 2).flatten(2, 3)


def packed_of_pages(pool: Tensor, sequences: PackedPaged) -> tuple[Tensor, Tensor]:
    """The keys of a pool as packed rows [1, Hkv, total, D], a copy, and their cu_seqlens. Waits for the lengths."""
    rows, lens = gathered(pool, sequences), sequences.kv_lens.tolist()
    starts = torch.tensor([0, *accumulate(lens)], dtype=sequences.cu_q.dtype, device=sequences.cu_q.device)
    parts = [row[None, :, :length] for row, length in zip(rows, lens)]
    return torch.cat([rows.new_zeros(1, rows.shape[1], 0, rows.shape[3]), *parts], 2), starts
