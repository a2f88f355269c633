"""How sequences of a cache were changed, as far as ranks that hold it together compare it with the next step."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

_SHOWN = 4  # sequences


class Changes:
    """In order: ranks that make the same ones have the same text."""

    def __init__(self) -> None:
        self.number, self.sum, self.last = 0, 0, "none"
        self.compared = 0  # how often ranks were asked

    def add(self, what: str, *values: int, beside: object = None) -> None:
        """beside: what is compared, and not shown."""
        self.number += 1
        self.last = f"{what}({some_of(values)})"
        self.sum = crc32(f"{what} {values} {beside}".encode(), self.sum)

    def __str__(self) -> str:
        return f"{self.number}, the last {self.last} ({self.sum:08x})"


def some_of(values: Iterable[object]) -> str:
    """The first of these, in words.

    >>> some_of(range(9))
    '0, 1, 2, 3, ...'
    """
    words = list(map(str, values))
    return ", ".join(words[:_SHOWN]) + ", ..." * (len(words) > _SHOWN)
