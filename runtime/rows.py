"""Which sequence a row belongs to, on the device: symbols of rows, for what gradients of reads are summed by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codegen.launch.adding import by_sequence
from ..compiler.analysis.tiles.results import GradientKind
from .call import Packed, PackedPaged, Ragged, key_rows, length_options


def rows_of(
    sequences: Ragged, kind: GradientKind, query: Tensor, key: Tensor, with_sink: bool = False
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    """Symbols of what a read's gradient was summed for, and which of it exists; both broadcast over [B, Hq, rows].

    kind "total" and "sink": one for each sequence; "row": for each query; "column": for each key. What has nothing to
    see does not exist; queries that see a sink (kind "sink", or `with_sink`) do without keys. Nothing waits for the
    device.
    """
    device, number = query.device, sequences.number(query)
    (q_first, q_len), (kv_first, kv_len) = _extents(sequences, query, key)
    offset = sequences.q_offset
    if not isinstance(offset, Tensor):
        offset = kv_len - q_len if offset is None else torch.full_like(q_len, offset)
    batch = torch.arange(number, device=device)
    sees = q_len > 0 if with_sink or kind == "sink" else (q_len > 0) & (kv_len > 0)
    if kind in ("total", "sink"):
        own = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
        return {n: t.view(-1, 1, 1) for n, t in own.items()}, sees.view(-1, 1, 1)
    first, length = (q_first, q_len) if kind == "row" else (kv_first, kv_len)
    rows = torch.arange((query if kind == "row" else key).shape[2], device=device)
    if isinstance(sequences, Packed | PackedPaged):
        # the last sequence that begins at a row or before it, past those without rows; then [1, 1, rows]
        batch = torch.searchsorted(first + length, rows, right=True).clamp(max=number - 1)[None]
    else:
        batch = batch[:, None]
    exists = (rows >= first[batch]) & (rows - first[batch] < length[batch]) & sees[batch]
    at = rows - first[batch]
    position = at + offset[batch] if kind == "row" else at
    own = {
        "batch": batch,
        "q_len": q_len[batch],
        "kv_len": kv_len[batch],
        "q_pos" if kind == "row" else "kv_pos": position,
    }
    return {n: t[:, None] for n, t in own.items()}, exists[:, None]


def queries_of(sequences: Ragged, query: Tensor, key: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Symbols of the sequence of each query, and which queries one has: they see its sink, with or without keys."""
    return rows_of(sequences, "row", query, key, with_sink=True)


def summed_by_sequence(
    rows: Tensor, sequences: Ragged, query: Tensor, key: Tensor
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Numbers of queries [B, Hq, L] as sums [sequences, Hq]; symbols of these sequences, and which have queries."""
    own, exists = rows_of(sequences, "sink", query, key)
    if isinstance(sequences, Packed):
        owner = queries_of(sequences, query, key)[0]["batch"].flatten()
        return by_sequence(rows, owner, sequences.number(query)), own, exists
    return rows.sum(-1), own, exists


def cleared(tensor: Tensor, sequences: Ragged, query: Tensor) -> Tensor:
    """Rows of keys [B, heads, T, width] with 0 in place of what no sequence has, which no product may then spread."""
    _, exists = rows_of(sequences, "column", query, tensor)
    return torch.where(exists[..., None], tensor, 0.0)


def _extents(sequences: Ragged, query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(first row, length) of the queries and of the keys of all sequences, int64 on the device, within the operands."""
    found = []
    number = sequences.number(query)
    for (label, tensor), rows in zip(length_options(sequences).items(), (query.shape[2], key_rows(key, sequences))):
        if tensor is not None and label.startswith("cu_"):
            starts = tensor.long().clamp(0, rows)
            found.append((starts[:-1], (starts[1:] - starts[:-1]).clamp(min=0)))
        else:
            zeros = torch.zeros(number, dtype=torch.int64, device=query.device)
            found.append((zeros, zeros + rows if tensor is None else tensor.long().clamp(0, rows)))
    return found
