"""Which keys a run of queries can see, from numbers alone: a superset, exact where the mask has a closed form."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.analysis.tiles.facts import facts_of
from ..compiler.analysis.tiles.measured import Measurement
from ..compiler.analysis.tiles.pairs import visible_pairs
from ..compiler.analysis.tiles.programs import tile_runs
from ..compiler.planning.pairs import pair_blocks
from ..compiler.planning.records import Shape
from ..compiler.planning.seen_tiles import seen_tiles
from ..ir.attention import Attention
from ..ir.errors import Problem, collected
from ..ir.expr import TensorOperand
from ..ir.philox import TOGETHER
from ..ir.reference import evaluate
from ..ir.walk import loads, names, symbols
from ..plans.request import environment
from .documents import ids_of, inside, starts_of
from .placed import positions_divided_by
from .rows import Run, Runs, common, joined

_TILES = 2048  # of an axis, that tensors are looked at in: a second of the host
_ROWS = 1 << 5  # of a run, that are looked at one by one
_SAMPLES = 64  # runs of rows of a piece, whose ends stand for what is between
_HEADS = 8  # whose pairs are counted: they stand for all
_CPU = torch.device("cpu")


class Piece(NamedTuple):
    """Queries of one sequence: rows counted from its first one, its length, and its number."""

    first: int
    end: int
    length: int
    number: int
    keys: Run  # those outside are not seen


@lru_cache(maxsize=64)
def _read_by_tiles(attention: Attention) -> frozenset[str]:
    """What the tile program reads."""
    return frozenset(n for line in facts_of(attention).kv_tiles.body for n in names(line.value))


def decisive_tensors(attention: Attention) -> frozenset[str]:
    """Tensor operands whose values a plan cannot do without: those that say where the mask begins or ends."""
    read = _read_by_tiles(attention)
    return frozenset(p.name for p in attention.canonical.parameters if isinstance(p, TensorOperand) and p.name in read)


def told_of(given: Mapping[str, Any], names: Iterable[str]) -> str:
    """A sum of the bytes of each of these that is a tensor."""
    tensors = {n: given[n].detach().cpu().contiguous() for n in sorted(names) if isinstance(given[n], Tensor)}
    sums = {n: zlib.crc32(t.view(-1).view(torch.uint8).numpy()) for n, t in tensors.items() if t.numel()}
    return repr(sums) if sums else ""


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
        self.given = {n: v.detach() if isinstance(v, Tensor) else v for n, v in given.items()}
        self._check()
        self._tiles: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in another process too, looks for itself."""
        return type(self), (self.attention, self.sizes, self.q_offset, self.given, self.first_batch)

    def _check(self) -> None:
        """The tile program must be able to run: its numbers, and tensors that it reads as numbers, are there."""
        read = _read_by_tiles(self.attention)
        needed = [p for p in self.attention.canonical.parameters if p.name in read and p.name not in self.given]
        if needed:
            kinds = {
                p.name: "a tensor" if isinstance(p, TensorOperand) else f"{'an' if p.dtype == 'int' else 'a'} {p.dtype}"
                for p in needed
            }
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
    def told(self) -> str:
        """What tensors that were looked at say, for ranks to compare: where documents start, or a sum of the bytes."""
        if self._documents is not None and self.measures:
            return repr(self._documents)
        return told_of(self.given, self.stands_on)

    @cached_property
    def _read_by_mask(self) -> list[Any]:
        read = names(self.attention.canonical.folded_mask)
        return [p for p in self.attention.canonical.parameters if p.name in read]

    @cached_property
    def lanes(self) -> list[dict[str, Any]]:
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
        if self.at_once:
            return self.keys_of([queries])[0]
        return self.in_step(joined(run for n in range(len(self.lanes)) for run in self._keys(n, queries)))

    def in_step(self, keys: Runs) -> Runs:
        """With the keys before that share draws, of variants that drop weights, or lie in the same blocks of a mask."""
        step = self._step
        return keys if step == 1 else joined((first // step * step, end) for first, end in keys)

    @cached_property
    def _step(self) -> int:
        return lcm(positions_divided_by(self.attention), TOGETHER if self.attention.canonical.drops else 1)

    def queries(self, keys: Run, among: Run) -> Run:
        """Of the queries in `among`, a run that has all those that may see keys in these rows; it may be empty."""
        if not self.attention.canonical.is_masked:
            return among
        found = joined(run for n in range(len(self.lanes)) for run in self._queries(n, keys))
        if self._documents is not None and self.measures:
            off = self.q_offset
            own = [[(starts[k], starts[k + 1]) for k, _ in inside(starts, keys)] for starts in self._documents.values()]
            found = common(found, joined((a - off, b - off) for runs in own for a, b in runs))
        seen = common(found, (among,))
        return (seen[0][0], seen[-1][1]) if seen else (among[0], among[0])

    def keys_of(self, runs: Sequence[Run]) -> list[Runs]:
        """Keys that the queries of each of these runs may see."""
        if not self.at_once:
            return [self.keys(run) for run in runs]
        found: list[list[Run]] = [[] for _ in runs]
        for lane in self.lanes:
            pieces, owners = self._pieces(lane, runs)
            for n, keys in zip(owners, self.keys_of_pieces(lane, pieces)):
                found[n] += keys
        return [self.in_step(joined(keys)) for keys in found]

    def pairs_of(self, runs: Sequence[Run]) -> list[int]:
        """About how many pairs of a head of a batch row each of these runs of queries sees."""
        if not self.at_once:
            return [self.pairs(run) for run in runs]
        found, lanes = [0] * len(runs), self.chosen_lanes
        for lane in lanes:
            pieces, owners = self._pieces(lane, runs)
            for n, pairs in zip(owners, self.pairs_of_pieces(lane, pieces)):
                found[n] += pairs
        return [pairs // len(lanes) for pairs in found]

    @property
    def chosen_lanes(self) -> list[dict[str, Any]]:
        """Those that stand for all where pairs are counted."""
        return self.lanes[:: max(1, len(self.lanes) // _HEADS)]

    def pairs(self, queries: Run) -> int:
        """The same of one."""
        first, end = queries
        if first >= end:
            return 0
        if not self.attention.canonical.is_masked:
            return (end - first) * self.sizes.kv_len
        if self.at_once:
            return self.pairs_of([queries])[0]
        chosen = range(0, len(self.lanes), max(1, len(self.lanes) // _HEADS))
        return sum(self._pairs(n, queries) for n in chosen) // len(chosen)

    # -- of many runs at once ----------------------------------------------------------------------------------------
    @cached_property
    def at_once(self) -> bool:
        """Whether tile programs run for many pieces at once: they read numbers alone, none with a name of their own."""
        program = self.facts.kv_tiles
        own = {line.name for line in program.body} | {"block", "length", "q_first", "q_last"}
        return (
            self.attention.canonical.is_masked
            and not any(loads(line.value) for line in program.body)
            and not own & {p.name for p in self.attention.canonical.parameters}
            and (not self.measures or self._documents is not None)
        )

    @cached_property
    def _documents(self) -> dict[int, list[int]] | None:
        """Of each batch row where documents start, where that is all that values of tensors say."""
        read = ids_of(self.facts.survey)
        ids = None if read is None else self.given.get(read.tensor.name)
        if not isinstance(ids, Tensor) or ids.dim() != read.tensor.rank:  # type: ignore[union-attr]
            return None
        numbers = {lane["batch"] for lane in self.lanes}
        first, end = self.q_offset, max(self.q_offset + self.sizes.q_len, self.sizes.kv_len)
        if first < 0 or end > ids.shape[-1] or (ids.dim() == 2 and max(numbers) >= len(ids)):
            return None  # reads beyond the tensor, which whoever looks at each row refuses
        found = {number: starts_of(ids if ids.dim() == 1 else ids[number]) for number in numbers}
        return None if None in found.values() else found  # type: ignore[return-value]

    def _pieces(self, lane: Mapping[str, Any], runs: Sequence[Run]) -> tuple[list[Piece], list[int]]:
        """Of these runs, cut where documents end, with the number of the run that each belongs to."""
        pieces, owners, number, length = list[Piece](), list[int](), lane["batch"], self.sizes.kv_len
        for n, (first, end) in enumerate(runs):
            if self._documents is None:
                found = [Piece(first, end, length, number, (0, length))] if first < end else []
            else:
                starts, off = self._documents[number], self.q_offset
                cut = inside(starts, (first + off, end + off))
                found = [Piece(a - off, b - off, length, number, (starts[k], starts[k + 1])) for k, (a, b) in cut]
            pieces += found
            owners += [n] * len(found)
        return pieces, owners

    def _ran(self, lane: Mapping[str, Any], pieces: Sequence[Piece], rows: Tensor, last: Tensor) -> list[list[Tensor]]:
        """Ranges of keys that queries from `rows` to `last` of each piece may see: of each its ends, [pieces, n]."""
        lengths, numbers = (torch.tensor(n)[:, None] for n in ([p.length for p in pieces], [p.number for p in pieces]))
        values: dict[str, Any] = {
            **lane, "batch": numbers, "kv_len": lengths, "length": lengths, "block": 1,
            "q_first": rows + self.q_offset, "q_last": last + self.q_offset,
        }  # fmt: skip
        if self.sizes.q_len == self.sizes.kv_len:
            values["q_len"] = lengths
        program = self.facts.kv_tiles
        for line in program.body:
            values[line.name] = evaluate(line.value, values, torch.float64, _CPU)
        first, end = (torch.tensor([p.keys[k] for p in pieces])[:, None] for k in range(2))
        ends = [values[name].clamp(first, end).expand(rows.shape) for name in program.outputs]
        return [[lo, full_lo, full_hi, hi] for lo, full_lo, full_hi, hi in zip(*[iter(ends)] * 4)]

    def keys_of_pieces(self, lane: Mapping[str, Any], pieces: Sequence[Piece]) -> list[list[Run]]:
        """Keys that each of these may see, counted from the first of its sequence."""
        if not pieces:
            return []
        first, last = (torch.tensor(n)[:, None] for n in ([p.first for p in pieces], [p.end - 1 for p in pieces]))
        found: list[list[Run]] = [[] for _ in pieces]
        for span in self._ran(lane, pieces, first, last):
            for n, (lo, full_lo, full_hi, hi) in enumerate(zip(*(end[:, 0].tolist() for end in span))):
                found[n] += (lo, full_lo), (full_lo, full_hi), (full_hi, hi)
        return found

    def pairs_of_pieces(self, lane: Mapping[str, Any], pieces: Sequence[Piece]) -> list[int]:
        """About how many pairs each of these sees: the ends of some runs of its rows stand for what is between."""
        if not pieces:
            return []
        first, rows = (torch.tensor(n)[:, None] for n in ([p.first for p in pieces], [p.end - p.first for p in pieces]))
        ends = torch.arange(_SAMPLES + 1) * rows // (_SAMPLES)
        starts, behind = ends[:, :-1], ends[:, 1:]
        looked_at = first + torch.cat([starts, (behind - 1).clamp(min=0)], 1)
        seen = torch.zeros_like(looked_at)
        for span in self._ran(lane, pieces, looked_at, looked_at):
            seen += sum((end - begin).clamp(min=0) for begin, end in pairwise(span))
        return ((seen * (behind - starts).repeat(1, 2)).sum(1) // 2).tolist()

    # -- of one lane -------------------------------------------------------------------------------------------------
    def _keys(self, lane: int, queries: Run) -> Iterator[Run]:
        first, end = queries
        if first >= end:
            return
        env, block, length = self.lanes[lane], 1, self.sizes.kv_len
        if self.measures:
            block = self._block
            seen = self._measured(lane)[first // block : -(-end // block)].any(0)
            yield from ((tile * block, min(length, (tile + 1) * block)) for tile in seen.nonzero()[:, 0].tolist())
            return
        own = {"block": 1, "length": length, "q_first": first + self.q_offset, "q_last": end - 1 + self.q_offset}
        for runs in tile_runs(self.facts.kv_tiles, env, own):
            yield from ((max(0, run.start), min(length, run.stop)) for run in runs)

    def _queries(self, lane: int, keys: Run) -> Iterator[Run]:
        """By positions: what tensors hide besides, other than in documents, is not looked at here."""
        length = self.sizes.q_len
        own = {"block": 1, "length": length, "kv_first": keys[0], "kv_last": keys[1] - 1}
        for runs in tile_runs(self.facts.q_tiles, self.lanes[lane], own):
            yield from ((max(0, run.start), min(length, run.stop)) for run in runs)

    def _pairs(self, lane: int, queries: Run) -> int:
        first, end = queries
        env = self.lanes[lane]
        if not self.measures:
            rows, offset = end - first, first + self.q_offset
            return visible_pairs(
                self.facts.kv_tiles, q_len=rows, kv_len=self.sizes.kv_len, q_offset=offset, env=env, most=_ROWS
            )
        block = self._block
        tiles = range(first // block, -(-end // block))
        of_tiles = torch.tensor([min(end, (n + 1) * block) - max(first, n * block) for n in tiles])
        halves = self._measured(lane)[tiles.start : tiles.stop].sum(1)  # a tile of which some are seen counts half
        return int((of_tiles * block * halves).sum()) // 2

    @cached_property
    def _block(self) -> int:
        rows = max(self.sizes.q_len, self.sizes.kv_len)
        return max(16, 1 << (-(-rows // _TILES) - 1).bit_length())

    def _measured(self, lane: int) -> Tensor:
        """Which tiles see which, as `seen_tiles` has them."""
        if lane not in self._tiles:
            facts, env, sizes = self.facts, self.lanes[lane], self.sizes
            assert facts.survey is not None
            values = {**env, **{n: v.cpu() if isinstance(v, Tensor) else v for n, v in self.given.items()}}
            blocks = pair_blocks(facts, values) if facts.survey.by_pair else None
            found = Measurement(
                facts.survey, env, q_len=sizes.q_len, kv_len=sizes.kv_len, q_offset=self.q_offset, blocks=blocks
            )
            self._tiles[lane] = seen_tiles(found, facts.kv_tiles, values, self._block)
        return self._tiles[lane]


class PackedSight:
    """The same of sequences packed one after the other: queries see keys of their own sequence alone.

    starts: the first row of each sequence, and the end of the last. Numbers and positions of a mask are those of a
    sequence.
    """

    def __init__(self, attention: Attention, sizes: Shape, starts: tuple[int, ...], given: Mapping[str, Any]) -> None:
        self.attention, self.sizes, self.starts = attention, sizes, starts
        self.given = given = {n: v.detach() if isinstance(v, Tensor) else v for n, v in given.items()}
        numbers = {n: v for n, v in given.items() if not isinstance(v, Tensor) or n in decisive_tensors(attention)}
        by_number = "batch" in symbols(attention.canonical.folded_mask)

        @cache
        def of(length: int, number: int) -> Sight:
            own = replace(sizes, batch=1, q_len=length, kv_len=length)
            return Sight(attention, own, 0, numbers, number)

        self._any = of(max(1, sizes.q_len), 0)  # whose tile program is that of all
        self._of = lambda n: of(starts[n + 1] - starts[n], n if by_number else 0)
        self.stands_on = self._of(0).stands_on if len(starts) > 1 else frozenset[str]()

    def __reduce__(self) -> tuple[Any, ...]:
        """As of Sight."""
        return type(self), (self.attention, self.sizes, self.starts, self.given)

    @cached_property
    def told(self) -> str:
        """As of Sight."""
        return told_of(self.given, self.stands_on)

    def _inside(self, run: Run) -> Iterator[tuple[int, int, Run]]:
        """Sequences that have rows in a run: number, first row, and those rows counted from it."""
        for n, (first, end) in inside(self.starts, run):
            yield n, self.starts[n], (first - self.starts[n], end - self.starts[n])

    def keys(self, queries: Run) -> Runs:
        """As of Sight."""
        return joined(
            (start + first, start + end)
            for n, start, own in self._inside(queries)
            for first, end in self._of(n).keys(own)
        )

    @cached_property
    def queries(self) -> Callable[[Run, Run], Run]:
        """As of Sight; plans that differ in strategy ask for the same."""
        return cache(self._queries)

    def _queries(self, keys: Run, among: Run) -> Run:
        """As `queries`. No sequence between the first and the last that has such queries is asked."""
        inside = [p for p in self._inside(keys) if p[1] < among[1] and among[0] < self.starts[p[0] + 1]]
        for n, piece in enumerate(inside):
            if first := self._of_sequence(*piece, among):
                last = (own for other in inside[:n:-1] for own in self._of_sequence(*other, among))
                return first[0][0], next(last, first[0])[1]
        return among[0], among[0]

    def _of_sequence(self, number: int, start: int, keys: Run, among: Run) -> Runs:
        """The queries of a sequence that may see these of its keys, as one run, or none."""
        first, end = self._of(number).queries(keys, (0, self.starts[number + 1] - start))
        return common(((start + first, start + end),), (among,)) if first < end else ()

    def _pieces(self, runs: Sequence[Run]) -> tuple[list[Piece], list[tuple[int, int]]]:
        """Of all these, with the number of the run and the first row of the sequence of each."""
        pieces, where = list[Piece](), list[tuple[int, int]]()
        for n, run in enumerate(runs):
            for k, start, own in self._inside(run):
                length = self.starts[k + 1] - start
                pieces.append(Piece(*own, length, k, (0, length)))
                where.append((n, start))
        return pieces, where

    def keys_of(self, runs: Sequence[Run]) -> list[Runs]:
        """As of Sight."""
        if not self._any.at_once:
            return [self.keys(run) for run in runs]
        found: list[list[Run]] = [[] for _ in runs]
        pieces, where = self._pieces(runs)
        for lane in self._any.lanes:
            for (n, start), keys in zip(where, self._any.keys_of_pieces(lane, pieces)):
                found[n] += [(start + first, start + end) for first, end in self._any.in_step(joined(keys))]
        return [joined(keys) for keys in found]

    def pairs_of(self, runs: Sequence[Run]) -> list[int]:
        """As of Sight."""
        if not self._any.at_once:
            return [self.pairs(run) for run in runs]
        found, lanes = [0] * len(runs), self._any.chosen_lanes
        pieces, where = self._pieces(runs)
        for lane in lanes:
            for (n, _), pairs in zip(where, self._any.pairs_of_pieces(lane, pieces)):
                found[n] += pairs
        return [pairs // len(lanes) for pairs in found]

    def pairs(self, queries: Run) -> int:
        """As of Sight."""
        return sum(self._of(n).pairs(own) for n, _, own in self._inside(queries))
