"""Which tokens of each sequence lie in a cache, where processes hold a sequence together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)
NOWHERE, ELSEWHERE = -1, -2  # slots of rows behind a length, and of tokens that another process holds


@dataclass(frozen=True)
class Share:
    """Tokens rank, rank + ranks, rank + 2 * ranks and so on: sequences of any length are divided evenly.

    >>> Share(1, 3).rows(8)  # tokens 1, 4 and 7
    3
    """

    rank: int = 0
    ranks: int = 1

    def rows(self, tokens: Number) -> Number:
        """How many of the first tokens of a sequence lie here."""
        return (tokens + (self.ranks - 1 - self.rank)) // self.ranks


WHOLE = Share()
