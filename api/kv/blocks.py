"""Who holds which block of a cache: references, free blocks, and full pages that are found again by their tokens.

Numbers only, on the host: tensors are moved by `cache.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from types import NoneType
from typing import NamedTuple, TypeAlias

from ..ir.errors import WeftError


class OutOfBlocksError(WeftError):
    """There are fewer free blocks than a call needs; nothing was changed. Free a sequence, or swap one out."""


class Start(NamedTuple):
    """What lies before the first page of sequences with one salt; its type counts, as 1 == True == 1.0."""

    kind: type
    salt: Hashable


Before: TypeAlias = int | Start  # the number of the page before, or a start
NO_SALT = Start(NoneType, None)


def start_of(what: str, salt: Hashable) -> Start:
    """Where sequences with this salt begin. Raises WeftError for one that cannot be compared."""
    try:
        hash(salt)
    except TypeError:
        got = type(salt).__name__
        raise WeftError(
            f"{what}: salt: expected what has a hash, as bytes, an int or a tuple of such, got {got}"
        ) from None
    return Start(type(salt), _with_types(salt))


def _with_types(salt: Hashable) -> Hashable:
    """A salt in which the type of each part counts, too: ("image", 1) is not ("image", True)."""
    if type(salt) is tuple or type(salt) is frozenset:
        return type(salt), type(salt)((type(part), _with_types(part)) for part in salt)
    return repr(salt) if isinstance(salt, float) else salt  # 0.0 == -0.0


class Page(NamedTuple):
    """A full page that can be found again: what it holds, and what lies before it."""

    before: Before
    tokens: tuple[int, ...]


class Blocks:
    """Blocks 0 .. number - 1, each held by any number of sequences.

    A full page is published under the number of the page before it and its own tokens, so that equal prefixes, and no
    others, are found: entries are compared, not their hashes alone. First pages have the salt of their sequence in
    the place of a number, so that nothing is shared between salts. A published block that nobody holds counts as free,
    and keeps its content until it is taken: those that were dropped first are taken first, and unpublished ones before.
    """

    def __init__(self, number: int) -> None:
        self.holders = [0] * number
        self._blank = deque(range(number))  # free, with nothing to be found again
        self._kept: OrderedDict[int, None] = OrderedDict()  # free and published, those dropped first in front
        self._page_of: dict[int, Page] = {}  # of a published block
        self._found: dict[Page, tuple[int, int]] = {}  # block, and the number of the page
        self._last_number = 0

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        """How many of the free ones would be found again."""
        return len(self._kept)

    @property
    def shared(self) -> int:
        """How many have several holders."""
        return sum(n > 1 for n in self.holders)

    def check_free(self, needed: int, what: str) -> None:
        """Raise OutOfBlocksError where there are fewer."""
        if needed > self.free:
            raise OutOfBlocksError(
                f"{what}: expected {needed} free blocks, got {self.free} of {len(self.holders)}; nothing was changed. "
                "Free a sequence, swap one out, or make the cache with more blocks"
            )

    def take(self, number: int) -> list[int]:
        """Free blocks, which now have one holder. There must be as many."""
        taken = []
        for _ in range(number):
            if self._blank:
                block = self._blank.popleft()
            else:
                block, _ = self._kept.popitem(last=False)
                self.forget(block)
            self.holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            self._kept.pop(block, None)
            self.holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder less of each. The last page of a sequence is taken first, as the others are of no use without it
        and it is of no use without them."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                if block in self._page_of:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    # -- full pages --------------------------------------------------------------------------------------------------
    def publish(self, block: int, before: Before, tokens: Sequence[int]) -> int:
        """Let a full page be found again; its number, that of an equal page where there is one already."""
        page = Page(before, tuple(tokens))
        if (there := self._found.get(page)) is not None:
            return there[1]
        self._last_number += 1
        self._page_of[block], self._found[page] = page, (block, self._last_number)
        return self._last_number

    def find(self, tokens: Sequence[int], page: int, start: Start = NO_SALT) -> list[tuple[int, int]]:
        """Blocks and numbers of the longest published prefix of these tokens that leaves one of them over."""
        found: list[tuple[int, int]] = []
        for end in range(page, len(tokens), page):
            before = found[-1][1] if found else start
            there = self._found.get(Page(before, tuple(tokens[end - page : end])))
            if there is None:
                break
            found.append(there)
        return found

    def forget(self, block: int) -> None:
        """What a block holds is about to change."""
        page = self._page_of.pop(block, None)
        if page is not None:
            del self._found[page]
