"""When a call is like the last one that was looked at closely (codegen/launch/repeating.py), and when to look again.

A closer look takes as long as half a call. It is worth it where calls of one layout follow each other, as those of
layers do and of steps, and not where each has another layout. Of layouts that differ in the number of keys alone, as
those of one layer while its cache grows, one look finds what serves all of them, though each not as fast as its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..codegen.launch.repeating import Again

MOST_PATIENCE = 256  # calls between two looks, where none of them led to anything
WORTH = 4  # calls that a look should have served


@dataclass(slots=True)
class Known:
    """What was found for calls of one layout."""

    fits: Any
    launch: Any
    measures: bool  # which tiles to visit, by kernels of its own
    recorded: bool  # whether autograd records such calls, where it is on
    look: Callable[..., Again | None] | None = None  # closer, at a call of those whose numbers of keys differ
    keeping: Any = None  # launch of a recorded call whose backward takes weights
    record: Any = None  # the output alone, whose gradients torch records
    checked: bool = False  # whether sizes and numbers of calls that fit are those of a call that was checked
    kind: Any = None  # what ops keep for them, once autograd recorded one


class Repeats:
    """The layout of calls that repeat, if they do. Threads may count a call too few: no result depends on it."""

    __slots__ = ("_looks", "_patience", "_served", "_waited", "growing", "hits", "known")

    def __init__(self) -> None:
        self.known: Known | None = None
        self.growing: Known | None = None  # of layouts that differ in the number of keys
        self.hits = self._looks = 0
        self._patience, self._waited = 1, 0
        self._served = False  # the growing ones, since the last look

    def wants(self) -> bool:
        """Count a call of another layout: whether it should be looked at closely."""
        if self.known is not None:
            self.known = None
            self._patience = 1 if self.hits >= WORTH else min(2 * self._patience, MOST_PATIENCE)
            self._waited = self.hits = 0
        self._waited += 1
        return self._waited >= self._patience

    def wants_of_grown(self) -> bool:
        """The same of a call that was served as one of the growing ones."""
        self._served = True
        return self.wants()

    def wants_growing(self) -> bool:
        """Whether a look should find the growing ones anew: where layouts differ, and those known served none."""
        served, self._served = self._served, False
        return self._looks > 1 and not served

    def learn(self, found: Again | None, measures: bool, recorded: bool) -> None:
        """found: None for a call that cannot be repeated so."""
        self._looks += 1
        if found is None:
            self._patience, self._waited = MOST_PATIENCE, 0
        else:
            record, checked = found.record, found.checked
            self.known = Known(found.fits, found.launch, measures, recorded, None, found.keeping, record, checked)
