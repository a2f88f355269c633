"""Sequences of their own lengths on a CPU: runs of equal ones are dense calls on views of the operands.

Of a paged cache the keys of a run are copied out of their blocks, a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from ...ir.sequences import Rows
from .scaled import Scaled


@dataclass(frozen=True)
class Run:
    """Sequences of equal lengths and offsets, one after the other."""

    first: Rows  # of the first one
    count: int
    packed: bool  # queries, and keys that are in no table, lie one after the other in one batch row
    table: Tensor | None = None  # int32 [B, pages], where keys are pools [blocks, Hkv, page, ...]

    def queries(self, tensor: Tensor | Scaled) -> Tensor:
        """Their rows of [B, Hq, L, ...], or of packed [1, Hq, total, ...]: a view [count, Hq, q_len, ...]."""
        if isinstance(tensor, Scaled):
            return tensor.real(self.queries)
        return self._view(tensor, self.first.q_first, self.first.q_len)

    def keys(self, tensor: Tensor | Scaled) -> Tensor:
        """The same of keys, values and their gradients; a copy where these are pools."""
        if isinstance(tensor, Scaled):
            return tensor.real(self.keys)
        if self.table is not None:
            pages = -(-self.first.kv_len // tensor.shape[2])
            blocks = self.table[self.first.number : self.first.number + self.count, :pages].long()
            return tensor[blocks].transpose(1, 2).flatten(2, 3)[:, :, : self.first.kv_len]
        return self._view(tensor, self.first.kv_first, self.first.kv_len)

    def _view(self, tensor: Tensor, first: int, length: int) -> Tensor:
        if not self.packed:
            return tensor[self.first.row : self.first.row + self.count, :, :length]
        rows = tensor[0].narrow(1, first, self.count * length)
        return rows.unflatten(1, (self.count, length)).transpose(0, 1)


class Runs(NamedTuple):
    """All sequences of a call."""

    number: int
    runs: list[Run]


MOST_COPIED = 1 << 15  # rows of keys that are copied out of pages at once, where one sequence has no more


def runs_of(rows: Sequence[Rows], packed: bool, sink: bool = False, table: Tensor | None = None) -> Runs:
    """The runs of those that compute something: others have no query, or no key (nor sink) that a query could see."""
    computed = (r for r in rows if r.q_len and (r.kv_len or sink))
    found = []
    packed_keys = packed and table is None
    for _, same in groupby(enumerate(computed), lambda each: _place(each[0], each[1], packed, packed_keys)):
        members = [r for _, r in same]
        most = len(members) if table is None else max(1, MOST_COPIED // max(members[0].kv_len, 1))
        for i in range(0, len(members), most):
            found.append(Run(members[i], len(members[i : i + most]), packed, table))
    return Runs(len(rows), found)


def _place(i: int, r: Rows, packed: bool, packed_keys: bool) -> tuple[int, ...]:
    """What neighbours in a run have in common: numbers and rows go on where those of the one before end."""
    q_start, kv_start = (r.q_first - i * r.q_len if packed else r.row - i), r.kv_first - i * r.kv_len * packed_keys
    return (r.q_len, r.kv_len, r.q_offset, r.number - i, q_start, kv_start)
