"""The block table on the host: one row of block numbers a sequence, so that the table of a batch is one gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Table:
    """int32 rows that grow in number and width. Entries behind the pages of a sequence are 0, a block that there is."""

    def __init__(self) -> None:
        self._entries = torch.zeros(8, 8, dtype=torch.int32)
        self._free = list(range(7, -1, -1))

    def take(self) -> int:
        """A row of zeros."""
        rows = self._entries.shape[0]
        if not self._free:
            self._entries = torch.cat([self._entries, torch.zeros_like(self._entries)])
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        return self._free.pop()

    def give(self, row: int) -> None:
        """A row that is no longer used."""
        self._entries[row] = 0
        self._free.append(row)

    def write(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Blocks of the pages from `first` on."""
        if not blocks:
            return
        missing = first + len(blocks) - self._entries.shape[1]
        if missing > 0:
            more = max(missing, self._entries.shape[1])
            self._entries = torch.nn.functional.pad(self._entries, (0, more))
        self._entries[row, first : first + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def clear(self, row: int, first: int) -> None:
        """No blocks from this page on."""
        self._entries[row, first:] = 0

    def of(self, rows: Sequence[int], pages: int) -> Tensor:
        """[rows, pages], a copy."""
        missing = pages - self._entries.shape[1]
        wide = torch.nn.functional.pad(self._entries, (0, missing)) if missing > 0 else self._entries
        return wide[:, :pages].index_select(0, torch.tensor(rows, dtype=torch.int64))
