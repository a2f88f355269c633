"""FP8 operands as real numbers: stored ones times their descales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCKS = (64, 128)  # rows that may share a descale
OF_TILES = 7  # the power of two that is the larger one: what a tile of keys lies in


def shift_of(blocks: int, rows: int) -> int:
    """The rows of a block are a power of two: which one.

    >>> shift_of(100, 100), shift_of(2, 100), shift_of(1, 100)
    (0, 6, 7)
    """
    return 0 if blocks >= rows else 6 if blocks * BLOCKS[0] >= rows else 7


def spread(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor over all that it broadcasts to."""
    return tuple([0 if size == 1 else stride for size, stride in zip(shape, strides)])


def by_rows(descale: Tensor, shape: Sequence[int]) -> Tensor:
    """Descales [B or 1, H or 1, blocks or 1, 1] of operands [B, H, rows, D] as [B, H, rows, 1]: a view if possible."""
    batch, heads, rows, _ = shape
    blocks = descale.shape[2]
    if blocks not in (1, rows):
        descale = descale.repeat_interleave(1 << shift_of(blocks, rows), dim=2)[:, :, :rows]
    return descale.expand(batch, heads, rows, 1)


class Scaled(NamedTuple):
    """An operand that is not yet made real."""

    stored: Tensor  # [B, H, rows, columns]
    descale: Tensor | None  # [B, H, rows, 1]; None: 1
    dtype: torch.dtype  # of the real numbers

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape

    def real(self, take: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """What `take` takes of it, as real numbers."""
        found = take(self.stored).to(self.dtype)
        return found if self.descale is None else found * take(self.descale).to(self.dtype)
