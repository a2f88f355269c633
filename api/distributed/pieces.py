"""Tensors whose rows come run by run: rows that have come once are kept as they are, with no pass through memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .copies import copy_rows
from .rows import Run, common, joined, without

Parts = tuple[Tensor, ...]


class Pieces:
    """Rows of several tensors that belong together.

    axes: where the rows of each lie, counted from the end. kept: what rows that come first are kept as.
    """

    def __init__(self, *axes: int, kept: Callable[[Tensor], Tensor] | None = None) -> None:
        self.axes, self.kept = axes, kept
        self.found: list[tuple[Run, Parts]] = []

    def put(self, run: Run, parts: Parts) -> list[tuple[Parts, Parts]]:
        """Keep these rows. Of rows that are here already: what is here, and what has come, to join in place."""
        known = [(common((run,), (other,)), other, kept) for other, kept in self.found]
        met = [
            (self._cut(kept, other, shared), self._cut(parts, run, shared))
            for runs, other, kept in known
            for shared in runs
        ]
        for rest in without((run,), joined(other for other, _ in self.found)):
            own = self._cut(parts, run, rest)
            self.found.append((rest, own if self.kept is None else tuple(map(self.kept, own))))
        return met

    @property
    def rows(self) -> int:
        """How many have come."""
        return sum(end - first for (first, end), _ in self.found)

    def whole(self, into: Sequence[Tensor]) -> Parts:
        """All rows. into: tensors of all of them, filled with what a row has for which nothing came."""
        for run, parts in self.found:
            for there, part in zip(self._cut(tuple(into), (0, into[0].shape[self.axes[0]]), run), parts):
                copy_rows(there, part)
        return tuple(into)

    def alone(self, rows: int) -> Parts | None:
        """The tensors themselves, where those of all rows came at once and are no part of larger ones."""
        if len(self.found) != 1 or self.found[0][0] != (0, rows):
            return None
        parts = self.found[0][1]
        return parts if all(map(fills, parts)) else None

    def _cut(self, parts: Parts, of: Run, run: Run) -> Parts:
        if of == run:
            return parts
        return tuple(part.narrow(axis, run[0] - of[0], run[1] - run[0]) for part, axis in zip(parts, self.axes))


def fills(tensor: Tensor) -> bool:
    """Whether it is no part of a larger one, whose memory it would keep."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
