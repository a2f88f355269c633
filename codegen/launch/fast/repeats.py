"""When a call is like the last one that was looked at closely (repeating.py), and when to look again.

A closer look takes as long as half a call. It is worth it where calls of one layout follow each other, as those of
layers do and of steps, and not where each has another layout. Of layouts that differ in the number of keys alone, as
those of one layer while its cache grows, one look finds what serves all of them, though each not as fast as its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ways import Again

MOST_PATIENCE = 1024  # calls between two looks, where none of them led to anything
WORTH = 4  # calls that a look should have served


@dataclass(slots=True)
class Known:
    """What was found for calls of one layout."""

    fits: Callable[[Any], bool]
    launch: Callable[[Any], Any]
    measures: bool  # which tiles to visit, by kernels of its own
    recorded: bool  # whether autograd records such calls, where it is on
    look: Callable[[Any], Again | None] | None = None  # closer, at a call of those whose numbers of keys differ
    keeping: Callable[[Any], Any] | None = None  # launch of a recorded call whose backward takes weights
    record: Callable[[Any], Any] | None = None  # the output alone, whose gradients torch records
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

    def grew(self, known: Known, call: Any) -> None:
        """Count a call that this, known of growing ones, served, and look at it closely now and then."""
        if self.growing is known:
            self._served = True
            if self.wants() and known.look is not None:
                self.learn(known.look(call), known.measures, known.recorded)

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
