"""Sequences of their own lengths: which rows of the operands each of them has, as numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rows(NamedTuple):
    """The rows of one sequence. What lies behind them belongs to nobody, and is never read."""

    number: int  # of the sequence: the value of the symbol `batch`
    row: int  # batch row of the operands that it lies in; 0 where they are packed
    q_first: int
    q_len: int
    kv_first: int
    kv_len: int
    q_offset: int  # position of its first query


def padded_rows(
    batch: int, q_rows: int, kv_rows: int, q_lens: Sequence[int] | None, kv_lens: Sequence[int] | None,
    q_offset: int | Sequence[int] | None,
) -> list[Rows]:  # fmt: skip
    """Sequence b begins at row 0 of batch row b. q_rows, kv_rows: L and T of the operands, which lengths stay within.

    None for lengths: all rows. None for q_offset: bottom right, kv_len - q_len of each sequence.
    """
    found = []
    for b in range(batch):
        q_len = q_rows if q_lens is None else min(max(q_lens[b], 0), q_rows)
        kv_len = kv_rows if kv_lens is None else min(max(kv_lens[b], 0), kv_rows)
        found.append(Rows(b, b, 0, q_len, 0, kv_len, _offset(q_offset, b, kv_len - q_len)))
    return found


def packed_rows(
    q_rows: int, kv_rows: int, cu_q: Sequence[int], cu_kv: Sequence[int], q_offset: int | Sequence[int] | None
) -> list[Rows]:
    """Sequence b has rows cu[b] to cu[b + 1] of the one batch row; arguments else as for padded_rows."""
    found = []
    for b in range(len(cu_q) - 1):
        q_first, q_len = _between(cu_q[b], cu_q[b + 1], q_rows)
        kv_first, kv_len = _between(cu_kv[b], cu_kv[b + 1], kv_rows)
        found.append(Rows(b, 0, q_first, q_len, kv_first, kv_len, _offset(q_offset, b, kv_len - q_len)))
    return found


def packed_before_padded_rows(
    q_rows: int, kv_rows: int, cu_q: Sequence[int], kv_lens: Sequence[int], q_offset: int | Sequence[int] | None
) -> list[Rows]:
    """Queries as of packed_rows; keys of sequence b from row 0 of a batch row of its own, as of padded_rows."""
    found = []
    for b in range(len(cu_q) - 1):
        q_first, q_len = _between(cu_q[b], cu_q[b + 1], q_rows)
        kv_len = min(max(kv_lens[b], 0), kv_rows)
        found.append(Rows(b, 0, q_first, q_len, 0, kv_len, _offset(q_offset, b, kv_len - q_len)))
    return found


def _between(start: int, end: int, rows: int) -> tuple[int, int]:
    first = min(max(start, 0), rows)
    return first, min(max(end, first), rows) - first


def _offset(q_offset: int | Sequence[int] | None, number: int, bottom_right: int) -> int:
    if q_offset is None:
        return bottom_right
    return q_offset if isinstance(q_offset, int) else q_offset[number]
