"""Which tiles a call visits where kernels measure that, computed in plain Python: for plans, pictures and tests.

The model of the kernels `kv_spans` and `q_spans` (templates/triton/tile_spans.py.jinja), range for range and tile for
tile, and of `kv_lists` and `q_lists` (tile_lists.py.jinja), tile for tile where lists have room. Ints have any size
here and floats 64 bits, so it differs where the arithmetic of a kernel overflows or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice, repeat
from typing import NamedTuple, TypeAlias

from ....ir.errors import WeftError
from ....ir.expr import Call, Expr, Load, Symbol
from ....ir.operators import OPERATORS
from ....ir.walk import loads, nodes, scalars, symbols, tensors
from ..values.affine import is_bool
from .programs import Environment, Value, _function, _operand, _values, evenly
from .results import Axis, MeasuredAxis, Measuring, TileCounts, TileProgram
from .survey import CELL, Survey

LONG_AXIS = 1 << 14  # positions above which an axis is long: ends of its tiles are written before tiles are measured
LIST_HEAD = 4  # numbers before the tiles of a list
LIST_ROOM = 1024  # tiles that a list holds at most; those behind the last of them are visited as a run
SPAN_ROOM = 512  # tiles that a list behind ranges has room for: where there are more, ranges are visited as runs
MOST_STEPS = 1 << 22  # operators applied to pairs of tiles by one count of all heads: a fifth of a second
MOST_PAIRS = 1 << 24  # pairs of a head that are looked at for a count
MOST_POSITIONS = 1 << 20  # positions of all heads measured together whose values are computed
Column: TypeAlias = "list[Value] | range"  # one value for each position, or for each tile
Ends: TypeAlias = dict[str, list[Value]]  # least and greatest values of the tiles of an axis, by name
# of a block of CELL queries, by number: 0, 1 or 2 for each block of CELL keys, where none, some or all pairs match
Blocks: TypeAlias = Callable[[int], Sequence[int]]


class Span(NamedTuple):
    """A range of tiles [lo, hi) to visit, of which [full_lo, full_hi) need no mask."""

    lo: int
    full_lo: int
    full_hi: int
    hi: int


Visited: TypeAlias = tuple[list[int], list[int]]  # edge tiles and full tiles


def measuring(found: Survey, kv_tiles: TileProgram, q_tiles: TileProgram, by_head: bool) -> Measuring:
    """What the cost of measuring depends on besides sizes."""

    def of(program: TileProgram, values: tuple[Expr, ...], compared: set[int]) -> MeasuredAxis:
        inside = {load.text: load for value in values for load in loads(value)}
        reads = sum(1 for load in inside.values() if symbols(load) & {"q_pos", "kv_pos"})
        read = sum(not isinstance(value, Symbol) for value in values)
        return MeasuredAxis(len(program.outputs) // 4, reads, read, len(compared))

    return Measuring(
        by_head, of(kv_tiles, found.kv_values, {m for _, m in found.equal}),
        of(q_tiles, found.q_values, {n for n, _ in found.equal}), "lists" if found.joins_reads else "spans",
        len(found.cells), min((c.q for c in found.cells), default=0), found.by_pair,
    )  # fmt: skip


def visited(spans: Iterable[Span]) -> Visited:
    """The edge tiles and the full tiles of these ranges, each in the order in which a kernel visits them."""
    spans = list(spans)
    edge = [t for s in spans for t in (*range(s.lo, s.full_lo), *range(s.full_hi, s.hi))]
    return edge, [t for s in spans for t in range(s.full_lo, s.full_hi)]


def is_listed(runs: Iterable[Span], seen: int) -> bool:
    """Whether the kernels list the tiles that are seen, in place of these ranges."""
    return 8 * seen < 7 * sum(run.hi - run.lo for run in runs) and seen <= SPAN_ROOM


# -- operands ---------------------------------------------------------------------------------------------------------
class Table:
    """A tensor operand in an environment: a function of its indices that also reads many places at once."""

    def __init__(self, name: str, tolist: Callable[[], object]) -> None:
        """tolist: gives the entries as nested lists. It is called once, when something is first read."""
        self.name, self._tolist = name, tolist

    @cached_property
    def _rows(self) -> object:
        return self._tolist()

    def __call__(self, *index: int) -> Value:
        found = self._rows
        for place in index:
            found = self._entries(found, place, place + 1)[0]
        return found  # type: ignore[return-value]

    def run(self, outer: Sequence[int], places: range) -> list[Value]:
        """The entries at [*outer, place] of neighbouring places."""
        found = self._rows
        for place in outer:
            found = self._entries(found, place, place + 1)[0]
        return self._entries(found, places.start, places.stop)  # type: ignore[return-value]

    def _entries(self, rows: object, first: int, end: int) -> list[object]:
        assert isinstance(rows, list)
        if first < 0 or end > len(rows):
            beyond = first if first < 0 else end - 1
            raise WeftError(f"{self.name}: the mask reads index {beyond}, expected 0 to {len(rows) - 1}")
        return rows[first:end]


# -- expressions over columns -----------------------------------------------------------------------------------------
def _each(node: Expr, columns: Mapping[str, Column], env: dict[str, object]) -> Column | Value:
    """The expression for each element of the columns; one value where it reads none of them."""
    match node:
        case Symbol(text) if text in columns:
            return columns[text]
        case Load(tensor, index):
            return _read(env[_operand(tensor.name)], [_each(i, columns, env) for i in index])
        case Call(op, args):
            return _mapped(OPERATORS[op].python, [_each(a, columns, env) for a in args])
        case _:
            return _function(node)(env)


def _mapped(apply: Callable[..., Value], values: Sequence[Column | Value]) -> Column | Value:
    if not any(isinstance(v, (list, range)) for v in values):
        return apply(*values)
    return list(map(apply, *(v if isinstance(v, (list, range)) else repeat(v) for v in values)))


def _read(operand: object, index: list[Column | Value]) -> Column | Value:
    *outer, last = index
    if isinstance(operand, Table) and isinstance(last, range) and all(isinstance(i, int) for i in outer):
        return operand.run(outer, last)  # type: ignore[arg-type]
    return _mapped(operand, index)  # type: ignore[arg-type]


# -- one head ---------------------------------------------------------------------------------------------------------
class Measurement:
    """What is measured for one head of one batch row, and the ranges of tiles that follow.

    found, programs: of the variant. env: as for tiles.tile_ranges, with values of every operand that the mask reads
    (head, batch, group, ... are 0 or 1 when absent). q_offset: position of query row 0; bottom right when None.
    blocks: what is found where the survey looks at pairs; where not given, that may be anything.
    Raises WeftError naming operands that are missing, and later for reads beyond the end of a Table.
    """

    def __init__(
        self, found: Survey, env: Environment, *, q_len: int, kv_len: int, q_offset: int | None = None,
        blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        offset = kv_len - q_len if q_offset is None else q_offset
        self.found = found
        self.env: dict[str, object] = {
            "batch": 0, "head": 0, "kv_head": 0, "group": 1, "head_dim": 64, **_values(env),
            "q_len": q_len, "kv_len": kv_len, "q_offset": offset,
        }  # fmt: skip
        self.positions: dict[Axis, range] = {"q": range(offset, offset + q_len), "kv": range(kv_len)}
        self._known: dict[tuple[Axis, int], Ends] = {}
        self.equal = () if found.joins_reads else found.equal  # lists for pairs go by ends alone
        self.blocks = lru_cache(maxsize=None)(blocks) if blocks and found.by_pair else None
        self._steps = sum(isinstance(n, Call) for node in (found.possible, found.certain) for n in nodes(node))
        self._steps *= 1 if found.joins_reads else 2  # ranges, and lists
        self._steps += sum(12 * sum(1 for _ in nodes(c.condition)) for c in found.cells)
        _check_given(found, self.env)

    @cached_property
    def _measured(self) -> dict[Axis, list[Column]]:
        """What the mask reads, at every position of both axes."""
        values: tuple[tuple[Axis, tuple[Expr, ...]], ...] = (("q", self.found.q_values), ("kv", self.found.kv_values))
        return {axis: [self._at_positions(axis, value) for value in own] for axis, own in values}

    def _at_positions(self, axis: Axis, value: Expr) -> Column:
        try:
            column = _each(value, {f"{axis}_pos": self.positions[axis]}, self.env)
        except WeftError:
            raise
        except (ArithmeticError, ValueError) as error:
            raise WeftError(f"`{value}` in the mask cannot be computed for these operands: {error}") from error
        assert isinstance(column, (list, range))
        return column

    def ends(self, axis: Axis, block: int) -> Ends:
        """Least and greatest value in each tile of an axis, by the names that the survey has for them; and bits."""
        if (axis, block) not in self._known:
            ends: Ends = {}
            for n, column in enumerate(self._measured[axis]):
                parts = [column[start : start + block] for start in range(0, len(column), block)]
                ends[f"{axis}{n}_low"] = [int(min(part)) for part in parts]
                ends[f"{axis}{n}_high"] = [int(max(part)) for part in parts]
            for n in {pair[axis == "kv"] for pair in self.equal}:
                column = self._measured[axis][n]
                ends[f"{axis}{n}_bits"] = [_bits(column[at : at + block]) for at in range(0, len(column), block)]
            self._known[axis, block] = ends
        return self._known[axis, block]

    def tiles(self, program: TileProgram, block_q: int, block_kv: int) -> Callable[[int], Visited]:
        """The edge tiles and the full tiles that a tile of the other axis visits, as a function of its number."""
        lists = self.lists(program, block_q, block_kv)
        if self.found.joins_reads:
            return lists
        spans = self.spans(program, block_q, block_kv)

        def of(tile: int) -> Visited:
            runs = spans(tile)
            edge, full = lists(tile)
            return (edge, full) if is_listed(runs, len(edge) + len(full)) else visited(runs)

        return of

    def lists(self, program: TileProgram, block_q: int, block_kv: int) -> Callable[[int], Visited]:
        """Those that kernels list one by one."""
        own: Axis = "q" if program.axis == "kv" else "kv"
        sizes: dict[Axis, int] = {"q": block_q, "kv": block_kv}
        mine, others = self.ends(own, sizes[own]), self.ends(program.axis, sizes[program.axis])
        ranges, length = self.ranges(program, block_q, block_kv), len(self.positions[program.axis])

        def of(tile: int) -> Visited:
            spans, values = ranges(tile, mine)
            edge: list[int] = []
            full: list[int] = []
            for span in spans:
                known = {name: column[span.lo : span.hi] for name, column in others.items()}
                known |= self._cells(own, tile, range(span.lo, span.hi), sizes)
                for other, (possible, certain) in zip(range(span.lo, span.hi), self._pairs(known, values, span)):
                    if self.blocks is not None:
                        seen = self._seen(*((tile, other) if own == "q" else (other, tile)), block_q, block_kv)
                        possible, certain = possible and seen > 0, certain or seen == 2
                    whole = other < length // sizes[program.axis]
                    if possible:
                        sure = whole and (certain or span.full_lo <= other < span.full_hi)
                        (full if sure else edge).append(other)
            return edge, full

        return of

    def _pairs(
        self, known: Mapping[str, Column], values: dict[str, object], span: Span
    ) -> Iterable[tuple[bool, Value]]:
        """(possible, certain) of a tile and each of the tiles of a range."""
        both = (_each(node, known, values) for node in (self.found.possible, self.found.certain))
        possible, certain = (each if isinstance(each, (list, range)) else [each] * (span.hi - span.lo) for each in both)
        return zip(self._sharing(possible, known, values), certain)

    def _sharing(
        self, possible: Iterable[Value], others: Mapping[str, Column], values: Mapping[str, object]
    ) -> list[bool]:
        """What is possible of a tile and each of others, where values that must be equal share a bit."""
        found = [bool(each) for each in possible]
        for n, m in self.equal:
            names = [f"q{n}_bits", f"kv{m}_bits"]
            column = next(others[name] for name in names if name in others)
            own = next(values[name] for name in names if name not in others)
            found = [each and own & bits != 0 for each, bits in zip(found, column)]  # type: ignore[operator]
        return found

    def _cells(self, own: Axis, tile: int, others: range, sizes: Mapping[Axis, int]) -> dict[str, list[Value]]:
        """cells<n>_any and cells<n>_all of a tile and each of others: a pair of each block is looked at."""
        found: dict[str, list[Value]] = {}
        for n, cells in enumerate(self.found.cells):
            step: dict[Axis, int] = {"q": cells.q, "kv": cells.kv}
            axis: Axis = "kv" if own == "q" else "q"
            mine = self._of_blocks(own, tile, sizes[own], step[own])
            theirs = [self._of_blocks(axis, other, sizes[axis], step[axis]) for other in others]
            pairs = [(a, b) for each in theirs for b in each for a in mine]
            columns: dict[str, Column] = {f"{own}_pos": [a for a, _ in pairs], f"{axis}_pos": [b for _, b in pairs]}
            values = iter(_each(cells.condition, columns, self.env) if pairs else [])  # type: ignore[arg-type]
            looked = [list(islice(values, len(mine) * len(each))) for each in theirs]
            found[f"cells{n}_any"] = [any(each) for each in looked]
            found[f"cells{n}_all"] = [all(each) for each in looked]
        return found

    def _of_blocks(self, axis: Axis, tile: int, rows: int, size: int) -> list[Value]:
        """A position of each block of `size` that a tile reaches into."""
        own = self.positions[axis][tile * rows : (tile + 1) * rows]
        return [own[0], *range(own[0] - own[0] % size + size, own[-1] + 1, size)]

    def _seen(self, q_tile: int, kv_tile: int, block_q: int, block_kv: int) -> int:
        """0, 1 or 2 where none, some or all of the blocks of pairs that two tiles reach into match."""
        rows, columns = (
            _blocks_of(q_tile, block_q, len(self.positions["q"])),
            _blocks_of(kv_tile, block_kv, len(self.positions["kv"])),
        )
        assert self.blocks is not None
        found = {self.blocks(row)[column] for row in rows for column in columns}
        return found.pop() if len(found) == 1 else 1

    def spans(self, program: TileProgram, block_q: int, block_kv: int) -> Callable[[int], list[Span]]:
        """The ranges of tiles of the program's axis that a tile of the other axis visits, as a function of its number.

        program: kv_tiles or q_tiles of the variant. The ranges are those that the kernel of this axis writes. (The
        Hopper forward visits what the ranges of its 64 rows at a time join to, which is no wider.)
        """
        own: Axis = "q" if program.axis == "kv" else "kv"
        step, block = (block_q, block_kv) if own == "q" else (block_kv, block_q)
        mine, others = self.ends(own, step), self.ends(program.axis, block)
        ranges, length = self.ranges(program, block_q, block_kv), len(self.positions[program.axis])

        def of(tile: int) -> list[Span]:
            spans, values = ranges(tile, mine)
            return [self._narrowed(span, others, values, length // block) for span in spans]

        return of

    def ranges(
        self, program: TileProgram, block_q: int, block_kv: int
    ) -> Callable[[int, Ends], tuple[list[Span], dict[str, object]]]:
        """Of a tile, by number and with the ends of its axis: the ranges that positions leave over, and all values."""
        own: Axis = "q" if program.axis == "kv" else "kv"
        step, block = (block_q, block_kv) if own == "q" else (block_kv, block_q)
        positions, length = self.positions[own], len(self.positions[program.axis])
        lines = [(line.name, _function(line.value)) for line in program.body]

        def of(tile: int, mine: Ends) -> tuple[list[Span], dict[str, object]]:
            rows = positions[tile * step : (tile + 1) * step]
            values = {**self.env, "block": block, "length": length, f"{own}_first": rows[0], f"{own}_last": rows[-1]}
            for target, value in lines:
                values[target] = value(values)
            values |= {end: column[tile] for end, column in mine.items()}
            ends = [values[output] for output in program.outputs]
            return [Span(*four) for four in zip(*[iter(ends)] * 4)], values

        return of

    def _narrowed(self, span: Span, others: Ends, values: dict[str, object], complete: int) -> Span:
        """A range from its first to its last tile in which a pair may be visible; full tiles where they are one run."""
        known = {name: column[span.lo : span.hi] for name, column in others.items()}
        possible = self._sharing(_decided(self.found.possible, others, values, span.lo, span.hi), known, values)
        if True not in possible:
            return Span(*[span.lo] * 4)
        first, end = span.lo + possible.index(True), span.hi - possible[::-1].index(True)
        if is_bool(self.found.certain, False):
            return Span(first, end, end, end)
        certain = _decided(self.found.certain, others, values, first, end)
        full = [
            tile
            for tile, sure in zip(range(first, min(end, complete)), certain)
            if possible[tile - span.lo] and (sure or span.full_lo <= tile < span.full_hi)
        ]
        if not full or full[-1] + 1 - full[0] != len(full):
            return Span(first, end, end, end)
        return Span(first, full[0], full[-1] + 1, end)

    def count(
        self, program: TileProgram, block_q: int, block_kv: int, most: int = MOST_STEPS,
        kv_tiles: TileProgram | None = None,
    ) -> TileCounts:  # fmt: skip
        """Tiles of the head by class. kv_tiles: the program of that axis, for both axes where pairs are looked at.

        Where to decide on all pairs of tiles would apply more than `most` operators, evenly spaced tiles are looked at,
        as many as keep to that number, each against all of the program's axis, and the counts are scaled.
        """
        own: Axis = "q" if program.axis == "kv" else "kv"
        blocks: dict[Axis, int] = {"q": block_q, "kv": block_kv}
        tiles, others = (-(-len(self.positions[axis]) // blocks[axis]) for axis in (own, program.axis))
        number = min(tiles, max(1, most // (others * max(1, self._steps))))
        if self.blocks is not None:  # tiles of queries, whose blocks lie together
            if own == "kv" and kv_tiles is not None:
                return self.count(kv_tiles, block_q, block_kv, most)
            number = min(number, max(1, MOST_PAIRS // (block_q * len(self.positions["kv"]))))
        of = self.tiles(program, block_q, block_kv)
        edge = full = 0
        for tile in evenly(tiles, number):
            edges, fulls = of(tile)
            edge, full = edge + len(edges), full + len(fulls)
        edge, full = round(edge * tiles / number), round(full * tiles / number)
        return TileCounts(empty=max(0, tiles * others - edge - full), edge=edge, full=full)


def _blocks_of(tile: int, rows: int, length: int) -> range:
    """Numbers of the blocks of CELL rows that a tile reaches into."""
    return range(tile * rows // CELL, -(-min((tile + 1) * rows, length) // CELL))


def _bits(column: Sequence[Value]) -> int:
    """A bit for each value, as the kernels set them."""
    return sum(1 << place for place in {(int(v) ^ int(v) >> 6 ^ int(v) >> 12) & 63 for v in column})


def _decided(condition: Expr, others: Ends, values: dict[str, object], first: int, end: int) -> list[Value]:
    """A condition of the survey for one tile and each of the tiles first .. end - 1 of the other axis."""
    found = _each(condition, {name: column[first:end] for name, column in others.items()}, values)
    return found if isinstance(found, list) else [found] * (end - first)  # type: ignore[list-item]


def _check_given(found: Survey, values: Mapping[str, object]) -> None:
    read = (*found.q_values, *found.kv_values, found.possible, found.certain, *(c.condition for c in found.cells))
    needed = {s.name for node in read for s in scalars(node)} | {t.name for node in read for t in tensors(node)}
    missing = sorted(n for n in needed if _operand(n) not in values)
    if missing:
        raise WeftError(f"the tiles depend on {', '.join(missing)}: give values for them to measure tiles")
