"""Which rows of a sequence: runs of neighbours, and how runs are dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ..ir.errors import WeftError, shown
from ..ir.numbers import is_int

Run = tuple[int, int]  # first row, and the one behind the last
Runs = tuple[Run, ...]  # not empty, apart from each other, in order
MOST_CHUNKS = 1 << 11  # of a sequence: a plan of more takes the host minutes


def check_rank(rank: object, ranks: int) -> None:
    """Raise WeftError for what is no rank: a list would take -1 for its last one."""
    if not is_int(rank, least=0, most=ranks - 1):
        raise WeftError(f"rank: expected an int from 0 to {ranks - 1}, got {shown(rank)}")


def joined(runs: Iterable[Run]) -> Runs:
    """All rows of these runs, which may overlap.

    >>> joined([(4, 6), (0, 2), (5, 9), (2, 3), (9, 9)])
    ((0, 3), (4, 9))
    """
    found: list[Run] = []
    for first, end in sorted(run for run in runs if run[0] < run[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def common(some: Runs, others: Runs) -> Runs:
    """Rows that are in both.

    >>> common(((0, 4), (8, 12)), ((2, 9),))
    ((2, 4), (8, 9))
    """
    found, n, m = [], 0, 0
    while n < len(some) and m < len(others):
        first, end = max(some[n][0], others[m][0]), min(some[n][1], others[m][1])
        if first < end:
            found.append((first, end))
        if some[n][1] <= others[m][1]:
            n += 1
        else:
            m += 1
    return tuple(found)


def without(some: Runs, others: Runs) -> Runs:
    """Rows that are in the first and not in the second.

    >>> without(((0, 4), (8, 12)), ((2, 9),))
    ((0, 2), (9, 12))
    """
    end = max((run[1] for run in (*some, *others)), default=0)
    edges = [0, *(edge for run in others for edge in run), end]
    return common(some, joined(zip(edges[::2], edges[1::2])))


def closed(runs: Runs, gap: int) -> Runs:
    """With what lies between two of them, where that is at most so many rows.

    >>> closed(((0, 4), (6, 9), (20, 30)), 2)
    ((0, 9), (20, 30))
    """
    found: list[Run] = []
    for first, end in runs:
        if found and first - found[-1][1] <= gap:
            found[-1] = found[-1][0], end
        else:
            found.append((first, end))
    return tuple(found)


def depth(runs: Iterable[Run]) -> int:
    """In how many of these runs a row is, at most.

    >>> depth([(0, 4), (2, 6), (3, 4), (6, 9)])
    3
    """
    most = inside = 0
    for _, change in sorted((edge, change) for run in runs if run[0] < run[1] for edge, change in zip(run, (1, -1))):
        inside += change
        most = max(most, inside)
    return most


def count(runs: Runs) -> int:
    """How many rows."""
    return sum(end - first for first, end in runs)


def places(runs: Runs, among: Runs) -> Iterator[Run]:
    """Where these rows lie in a tensor that has the rows `among` one after the other. Each run is inside one of them.

    >>> list(places(((9, 11), (20, 22)), ((0, 4), (8, 12), (20, 30))))
    [(5, 7), (8, 10)]
    """
    starts = [0, *accumulate(end - first for first, end in among)]
    n = 0
    for first, end in runs:
        while among[n][1] <= first:
            n += 1
        yield starts[n] + first - among[n][0], starts[n] + end - among[n][0]


@dataclass(frozen=True)
class Deal:
    """Rows of one axis, cut into chunks of one size, the last ones shorter or empty, each of which has an owner."""

    length: int
    chunk: int  # rows
    owners: tuple[int, ...]  # the rank of each chunk
    ranks: int

    def rows(self, rank: int) -> Runs:
        """Those that a rank owns. It has them in this order. Raises WeftError for what is no rank."""
        check_rank(rank, self.ranks)
        return self._of_ranks[rank]

    def owners_of(self, run: Run) -> tuple[int, ...]:
        """The owner of each chunk that has rows of a run."""
        return self.owners[run[0] // self.chunk : -(-run[1] // self.chunk)]

    def of_neighbours(self, number: int) -> Deal:
        """The same rows, where so many neighbouring ranks count as one."""
        return replace(self, owners=tuple(rank // number for rank in self.owners), ranks=self.ranks // number)

    @cached_property
    def chunks(self) -> Runs:
        """All of them in order, some of them perhaps empty."""
        ends = [min(n * self.chunk, self.length) for n in range(len(self.owners) + 1)]
        return tuple(pairwise(ends))

    @cached_property
    def _of_ranks(self) -> list[Runs]:
        runs: list[list[Run]] = [[] for _ in range(self.ranks)]
        for run, owner in zip(self.chunks, self.owners):
            runs[owner].append(run)
        return [joined(own) for own in runs]


def chunk_of(length: int, number: int, multiple: int = 1) -> int:
    """Rows of each of `number` chunks, a multiple of this where there are enough rows.

    >>> chunk_of(10, 4), chunk_of(1000, 4, 128), chunk_of(100, 4, 128)
    (3, 256, 25)
    """
    rows = -(-length // number)
    whole = -(-rows // multiple) * multiple
    return max(1, whole if whole * (number - 1) < length else rows)


def contiguous(length: int, ranks: int) -> Deal:
    """A run of neighbours for each rank, as torch.chunk cuts a dimension."""
    return Deal(length, chunk_of(length, ranks), tuple(range(ranks)), ranks)


def zigzag(length: int, ranks: int, multiple: int = 1) -> Deal:
    """Two chunks for each rank, one from either end: causal masks then leave all ranks the same number of pairs
    (Brandon et al. 2023, "Striped Attention"; the zigzag form of ring attention)."""
    order = (*range(ranks), *reversed(range(ranks)))
    return Deal(length, chunk_of(length, 2 * ranks, multiple), order, ranks)


def striped(length: int, ranks: int, multiple: int = 1, stripes: int = 16) -> Deal:
    """Chunks in turn, up to this many for each rank, fewer where there are many ranks."""
    number = ranks * max(1, min(stripes, MOST_CHUNKS // ranks, -(-length // ranks)))
    return Deal(length, chunk_of(length, number, multiple), tuple(n % ranks for n in range(number)), ranks)


def by_pairs(length: int, ranks: int, pairs: Sequence[int], multiple: int = 1) -> Deal:
    """As many chunks for each rank, so that the ranks have about the same number of visible pairs.

    pairs: of each chunk; their number is a multiple of that of the ranks. The largest goes first, to the rank with the
    fewest pairs that has room left.
    """
    each = len(pairs) // ranks
    sums, owners, room = [0] * ranks, [0] * len(pairs), [each] * ranks
    for n in sorted(range(len(pairs)), key=lambda n: (-pairs[n], n)):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (sums[r], r))
        owners[n] = rank
        sums[rank] += pairs[n]
        room[rank] -= 1
    return Deal(length, chunk_of(length, len(pairs), multiple), tuple(owners), ranks)
