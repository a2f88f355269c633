"""A contiguous cache: one row of fixed capacity a sequence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn

import torch

from ..ir.attention import Latent
from ..ir.errors import WeftError, counted
from .blocks import start_of
from .cache import Cache, _Sequence
from .given import token_ids
from .scales import Given, Scale


class DenseCache(Cache):
    """Keys and values [sequences, Hkv, capacity, D], with the face of PagedCache: a row is a block of its own.

    A fork copies its row at once, nothing is shared or found again, and each sequence that was allocated holds its
    row, long or short. The sequences of a step must lie evenly apart, in order, as their keys are a view: all of them
    do, in the order of allocation; rows of those that get nothing have length 0.

    sequences: rows. capacity: tokens of a row. The others are those of PagedCache.
    """

    _holds_pages = False

    def __init__(
        self, sequences: int, capacity: int, *, layers: int = 1, kv_heads: int | None = None,
        head_dim: int | None = None, value_dim: int | None = None, latent: Latent | None = None, dtype: torch.dtype,
        device: torch.device | str = "cpu", scale: Scale | None = None, k_descale: Given = None,
        v_descale: Given = None, rope_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            sequences, capacity, layers, kv_heads, head_dim, value_dim, latent, dtype, device, scale,
            (k_descale, v_descale), rope_dtype,
        )  # fmt: skip

    def _sizes(self, blocks: int, page: int) -> dict[str, object]:
        return {"sequences": blocks, "capacity": page}

    def allocate(self, tokens: Iterable[int] | None = None, *, salt: Hashable = None) -> int:
        """The id of a new sequence, whose row is the first free one; nothing is shared, whatever is given."""
        start_of("allocate", salt)
        if tokens is not None:
            token_ids("allocate: tokens", tokens)
        with self._lock:
            self._blocks.check_free(1, "DenseCache.allocate")
            made = _Sequence(self._table.take(), self._blocks.take(1))
            self._table.write(made.row, 0, made.blocks)
            return self._add(made)

    def fork(self, sequence: int) -> int:
        """The id of a copy, in a row of its own."""
        with self._lock:
            found = self._idle("fork", sequence, resident=True)
            self._blocks.check_free(1, "DenseCache.fork")
            made = _Sequence(self._table.take(), self._blocks.take(1), found.length)
            self._table.write(made.row, 0, made.blocks)
            rows = self.share.rows(found.length)
            for pool in self._pools:
                pool[made.blocks[0], :, :rows] = pool[found.blocks[0], :, :rows]
            return self._add(made)

    def fixed_step(self, *sizes: object, **pages: object) -> NoReturn:
        """Raises WeftError: rows of other sequences would be other memory."""
        raise WeftError(
            "fixed_step: the rows of a DenseCache are views of it, which a CUDA graph would keep; a PagedCache has "
            "fixed steps"
        )

    def _pages(self, length: int) -> int:
        return 1

    def _check_length(self, number: int, length: int) -> None:
        if length > self.page:
            raise WeftError(
                f"extend: sequence {number}: expected at most {counted(self.page, 'token')}, the capacity, got "
                f"{length}; nothing was changed"
            )

    def _rows_of(self, found: Sequence[_Sequence]) -> slice | None:
        rows = [s.blocks[0] for s in found]
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        if step < 1 or rows != list(range(rows[0], rows[0] + step * len(rows), step)):
            raise WeftError(
                f"DenseCache: expected sequences whose rows lie evenly apart, in order, got rows {rows}; take all of "
                "them, with length 0 for those that get nothing, or a PagedCache"
            )
        return slice(rows[0], rows[-1] + 1, step)

    def __repr__(self) -> str:
        u = self.usage
        swapped = f", rows on the host: {u.swapped}" if u.swapped else ""
        return (
            f"{type(self).__name__}({counted(len(self), 'sequence')}, {counted(u.tokens, 'token')}; {u.used} of "
            f"{counted(u.blocks, 'row')} of {u.page} used, "
            f"{u.free} free, {u.fragmentation:.1%} fragmentation{swapped}; {u.bytes / 2**20:.1f} MiB, "
            f"{counted(self.layers, 'layer')})"
        )
