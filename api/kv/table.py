"""The block table on the host: one row of block numbers a sequence, so that the table of a step is one gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Table:
    """int32 rows that grow in number and width. Entries behind the pages of a sequence are blocks that there are."""

    def __init__(self) -> None:
        self._entries = torch.zeros(0, 0, dtype=torch.int32, device="cpu")
        self._free: list[int] = []
        self._grow(8, 8)

    def _grow(self, rows: int, pages: int) -> None:
        old = self._entries
        with torch.inference_mode(False):  # it is changed in that mode and outside
            self._entries = torch.zeros(rows, pages, dtype=torch.int32, device="cpu")
        self._entries[: old.shape[0], : old.shape[1]] = old
        self._free += range(rows - 1, old.shape[0] - 1, -1)

    def take(self) -> int:
        """A row that nobody has."""
        if not self._free:
            self._grow(2 * self._entries.shape[0], self._entries.shape[1])
        return self._free.pop()

    def give(self, row: int) -> None:
        """A row that is no longer used."""
        self._free.append(row)

    def write(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Blocks of the pages from `first` on."""
        end = first + len(blocks)
        if end > self._entries.shape[1]:
            self._grow(self._entries.shape[0], max(end, 2 * self._entries.shape[1]))
        self._entries[row, first:end] = torch.tensor(blocks, dtype=torch.int32, device="cpu")

    def of(self, rows: Tensor, pages: int) -> Tensor:
        """[rows, pages], a copy. rows: int32, on the host."""
        if pages > self._entries.shape[1]:
            self._grow(self._entries.shape[0], pages)
        return self._entries[:, :pages].index_select(0, rows)
