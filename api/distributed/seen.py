"""Which keys a run of queries can see, from numbers alone: a superset, exact where the mask has a closed form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from torch import Tensor

from ..compiler.analysis.tiles.facts import facts_of
from ..compiler.analysis.tiles.measured import Measurement, Visited
from ..compiler.analysis.tiles.pairs import visible_pairs
from ..compiler.analysis.tiles.programs import tile_runs
from ..compiler.planning.pairs import pair_blocks
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.errors import Problem, collected
from ..ir.expr import TensorOperand
from ..ir.walk import names, symbols
from ..request import environment
from .rows import Run, Runs, common, joined

_TILES = 2048  # of an axis, that tensors are looked at in: a second of the host
_ROWS = 1 << 5  # of a run, that are looked at one by one
_HEADS = 8  # whose pairs are counted: they stand for all


def decisive_tensors(attention: Attention) -> frozenset[str]:
    """Tensor operands whose values a plan cannot do without: those that say where the mask begins or ends."""
    read = {n for line in facts_of(attention).kv_tiles.body for n in names(line.value)}
    return frozenset(p.name for p in attention.canonical.parameters if isinstance(p, TensorOperand) and p.name in read)


class Sight:
    """What queries of a variant see in calls of these sizes.

    given: values of operands, by name: all numbers that the mask reads. Tensors whose values are given are looked at;
    of others nothing is assumed. Raises WeftError that names what is missing.
    """

    def __init__(
        self, attention: Attention, sizes: Shape, q_offset: int, given: Mapping[str, Any], first_batch: int = 0
    ) -> None:
        self.attention, self.sizes, self.q_offset, self.first_batch = attention, sizes, q_offset, first_batch
        self.facts = facts_of(attention)
        self.given = {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in given.items()}
        self._check()
        self._tiles: dict[int, Callable[[int], Visited]] = {}

    def _check(self) -> None:
        """The tile program must be able to run: its numbers, and tensors that it reads as numbers, are there."""
        read = {n for line in self.facts.kv_tiles.body for n in names(line.value)}
        needed = [p for p in self.attention.canonical.parameters if p.name in read and p.name not in self.given]
        if needed:
            kinds = {p.name: "a tensor" if isinstance(p, TensorOperand) else f"a {p.dtype}" for p in needed}
            problems = [
                Problem(operand=n, what="missing", expected=kind, next_step=f"pass {n}=..., which the mask reads")
                for n, kind in kinds.items()
            ]
            raise collected(f"{self.attention.name}: plan", problems)

    @cached_property
    def measures(self) -> bool:
        """Whether values of tensors are looked at."""
        survey = self.facts.survey
        return survey is not None and {o.name for o in self._read_by_mask} <= self.given.keys()

    @cached_property
    def stands_on(self) -> frozenset[str]:
        """Operands whose values decide what is seen."""
        if not self.attention.canonical.is_masked:
            return frozenset()
        read = {n for line in self.facts.kv_tiles.body for n in names(line.value)}
        looked_at = {o.name for o in self._read_by_mask} if self.measures else set()
        return frozenset((read | looked_at) & self.given.keys())

    @cached_property
    def _read_by_mask(self) -> list[Any]:
        read = names(self.attention.canonical.folded_mask)
        return [p for p in self.attention.canonical.parameters if p.name in read]

    @cached_property
    def _lanes(self) -> list[dict[str, Any]]:
        """What tile programs read, of each head and batch row whose queries see keys of their own."""
        sizes, read = self.sizes, symbols(self.attention.canonical.folded_mask)
        batches = range(self.first_batch, self.first_batch + (sizes.batch if "batch" in read else 1))
        heads = range(sizes.heads) if read & {"head", "kv_head"} else range(1)
        group = sizes.heads // sizes.kv_heads
        fixed = {"group": group, "head_dim": sizes.head_dim, "q_len": sizes.q_len, "kv_len": sizes.kv_len}
        fixed |= {"q_offset": self.q_offset} | environment(self.attention, self.given)
        return [{**fixed, "batch": b, "head": h, "kv_head": h // group} for b in batches for h in heads]

    def keys(self, queries: Run) -> Runs:
        """Keys that queries in these rows may see."""
        if not self.attention.canonical.is_masked:
            return joined([(0, self.sizes.kv_len)])
        return joined(run for n in range(len(self._lanes)) for run in self._keys(n, queries))

    def queries(self, keys: Run, among: Run) -> Run:
        """Of the queries in `among`, a run that has all those that may see keys in these rows; it may be empty."""
        if not self.attention.canonical.is_masked:
            return among
        found = joined(run for n in range(len(self._lanes)) for run in self._queries(n, keys))
        seen = common(found, (among,))
        return (seen[0][0], seen[-1][1]) if seen else (among[0], among[0])

    def pairs(self, queries: Run) -> int:
        """About how many pairs of a head of a batch row they see."""
        first, end = queries
        if first >= end:
            return 0
        if not self.attention.canonical.is_masked:
            return (end - first) * self.sizes.kv_len
        chosen = range(0, len(self._lanes), max(1, len(self._lanes) // _HEADS))
        return sum(self._pairs(n, queries) for n in chosen) // len(chosen)

    # -- of one lane -------------------------------------------------------------------------------------------------
    def _keys(self, lane: int, queries: Run) -> Iterator[Run]:
        first, end = queries
        if first >= end:
            return
        env, block, length = self._lanes[lane], 1, self.sizes.kv_len
        if self.measures:
            block = self._block
            for number in range(first // block, -(-end // block)):
                for tile in (t for tiles in self._measured(lane)(number) for t in tiles):
                    yield tile * block, min(length, (tile + 1) * block)
            return
        own = {"block": 1, "length": length, "q_first": first + self.q_offset, "q_last": end - 1 + self.q_offset}
        for runs in tile_runs(self.facts.kv_tiles, env, own):
            yield from ((max(0, run.start), min(length, run.stop)) for run in runs)

    def _queries(self, lane: int, keys: Run) -> Iterator[Run]:
        """By positions: what tensors hide besides is not looked at here."""
        length = self.sizes.q_len
        own = {"block": 1, "length": length, "kv_first": keys[0], "kv_last": keys[1] - 1}
        for runs in tile_runs(self.facts.q_tiles, self._lanes[lane], own):
            yield from ((max(0, run.start), min(length, run.stop)) for run in runs)

    def _pairs(self, lane: int, queries: Run) -> int:
        first, end = queries
        env = self._lanes[lane]
        if not self.measures:
            rows, offset = end - first, first + self.q_offset
            return visible_pairs(
                self.facts.kv_tiles, q_len=rows, kv_len=self.sizes.kv_len, q_offset=offset, env=env, most=_ROWS
            )
        block, twice = self._block, 0
        for number in range(first // block, -(-end // block)):
            rows = min(end, (number + 1) * block) - max(first, number * block)
            edge, full = self._measured(lane)(number)
            twice += rows * block * (len(edge) + 2 * len(full))
        return twice // 2

    @cached_property
    def _block(self) -> int:
        rows = max(self.sizes.q_len, self.sizes.kv_len)
        return max(16, 1 << (-(-rows // _TILES) - 1).bit_length())

    def _measured(self, lane: int) -> Callable[[int], Visited]:
        if lane not in self._tiles:
            facts, env, sizes = self.facts, self._lanes[lane], self.sizes
            assert facts.survey is not None
            blocks = pair_blocks(facts, {**env, **self.given}) if facts.survey.by_pair else None
            found = Measurement(
                facts.survey, env, q_len=sizes.q_len, kv_len=sizes.kv_len, q_offset=self.q_offset, blocks=blocks
            )
            self._tiles[lane] = cache(found.tiles(facts.kv_tiles, self._block, self._block))
        return self._tiles[lane]


class PackedSight:
    """The same of sequences packed one after the other: queries see keys of their own sequence alone.

    starts: the first row of each sequence, and the end of the last. Numbers and positions of a mask are those of a
    sequence.
    """

    def __init__(self, attention: Attention, sizes: Shape, starts: tuple[int, ...], given: Mapping[str, Any]) -> None:
        self.attention, self.sizes, self.starts, self.given = attention, sizes, starts, given
        numbers = {n: v for n, v in given.items() if not isinstance(v, Tensor) or n in decisive_tensors(attention)}
        by_number = "batch" in symbols(attention.canonical.folded_mask)

        @cache
        def of(length: int, number: int) -> Sight:
            own = replace(sizes, batch=1, q_len=length, kv_len=length)
            return Sight(attention, own, 0, numbers, number)

        self._of = lambda n: of(starts[n + 1] - starts[n], n if by_number else 0)
        self.stands_on = self._of(0).stands_on if len(starts) > 1 else frozenset[str]()

    def _inside(self, run: Run) -> Iterator[tuple[int, int, Run]]:
        """Sequences that have rows in a run: number, first row, and those rows counted from it."""
        number = max(0, bisect_right(self.starts, run[0]) - 1)
        for n in range(number, len(self.starts) - 1):
            start, end = self.starts[n], self.starts[n + 1]
            if start >= run[1]:
                return
            first, behind = max(run[0], start), min(run[1], end)
            if first < behind:
                yield n, start, (first - start, behind - start)

    def keys(self, queries: Run) -> Runs:
        """As of Sight."""
        return joined(
            (start + first, start + end)
            for n, start, own in self._inside(queries)
            for first, end in self._of(n).keys(own)
        )

    def queries(self, keys: Run, among: Run) -> Run:
        """As of Sight."""
        found: list[Run] = []
        for n, start, own in self._inside(keys):
            first, end = self._of(n).queries(own, (0, self.starts[n + 1] - start))
            found += common(((start + first, start + end),) if first < end else (), (among,))
        return (min(found)[0], max(found)[1]) if found else (among[0], among[0])

    def pairs(self, queries: Run) -> int:
        """As of Sight."""
        return sum(self._of(n).pairs(own) for n, _, own in self._inside(queries))
