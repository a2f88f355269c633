"""Which tiles a call visits where kernels measure that, computed in plain Python: for plans, pictures and tests.

The model of the kernels `kv_spans` and `q_spans` (templates/triton/tile_spans.py.jinja), range for range. Ints have any
size here and floats 64 bits, so it differs where the arithmetic of a kernel overflows or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, TypeAlias

from ...ir.errors import WeftError
from ...ir.expr import Call, Expr, Load, Symbol
from ...ir.operators import OPERATORS
from ...ir.walk import loads, nodes, scalars, symbols, tensors
from .affine import is_bool
from .records import Axis, Measuring, TileCounts, TileProgram
from .survey import Survey
from .tiles import Environment, Value, _function, _operand, _values

MOST_STEPS = 1 << 22  # operators applied to pairs of tiles by one count of all heads: a fifth of a second
MOST_POSITIONS = 1 << 20  # positions of all heads measured together whose values are computed
Column: TypeAlias = "list[Value] | range"  # one value for each position, or for each tile
Ends: TypeAlias = dict[str, list[Value]]  # least and greatest values of the tiles of an axis, by name


class Span(NamedTuple):
    """A range of tiles [lo, hi) to visit, of which [full_lo, full_hi) need no mask."""

    lo: int
    full_lo: int
    full_hi: int
    hi: int


def measuring(found: Survey, kv_tiles: TileProgram, q_tiles: TileProgram, by_head: bool) -> Measuring:
    """What the cost of measuring depends on besides sizes."""

    def reads(values: tuple[Expr, ...]) -> int:
        inside = {load.text: load for value in values for load in loads(value)}
        return sum(1 for load in inside.values() if symbols(load) & {"q_pos", "kv_pos"})

    kv_ranges, q_ranges = (len(program.outputs) // 4 for program in (kv_tiles, q_tiles))
    return Measuring(
        by_head, kv_ranges, q_ranges, reads(found.q_values), reads(found.kv_values),
        "lists" if found.joins_reads else "spans", len(found.cells), min((c.q for c in found.cells), default=0),
        found.by_pair,
    )  # fmt: skip


def visited(spans: Iterable[Span]) -> tuple[list[int], list[int]]:
    """The edge tiles and the full tiles of these ranges, each in the order in which a kernel visits them."""
    spans = list(spans)
    edge = [t for s in spans for t in (*range(s.lo, s.full_lo), *range(s.full_hi, s.hi))]
    return edge, [t for s in spans for t in range(s.full_lo, s.full_hi)]


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
    Raises WeftError naming operands that are missing, and later for reads beyond the end of a Table.
    """

    def __init__(
        self, found: Survey, env: Environment, *, q_len: int, kv_len: int, q_offset: int | None = None
    ) -> None:
        offset = kv_len - q_len if q_offset is None else q_offset
        self.found = found
        self.env: dict[str, object] = {
            "batch": 0, "head": 0, "kv_head": 0, "group": 1, "head_dim": 64, **_values(env),
            "q_len": q_len, "kv_len": kv_len, "q_offset": offset,
        }  # fmt: skip
        self.positions: dict[Axis, range] = {"q": range(offset, offset + q_len), "kv": range(kv_len)}
        self._known: dict[tuple[Axis, int], Ends] = {}
        self._steps = sum(isinstance(n, Call) for node in (found.possible, found.certain) for n in nodes(node))
        _check_given(found, self.env)

    @cached_property
    def _measured(self) -> dict[Axis, list[Column]]:
        """What the mask reads, at every position of both axes."""
        values: tuple[tuple[Axis, tuple[Expr, ...]], ...] = (("q", self.found.q_values), ("kv", self.found.kv_values))
        return {axis: [self._at_positions(axis, value) for value in own] for axis, own in values}

    def _at_positions(self, axis: Axis, value: Expr) -> Column:
        try:
            column = _each(value, {f"{axis}_pos": self.positions[axis]}, self.env)
        except (ArithmeticError, ValueError) as error:
            raise WeftError(f"`{value}` in the mask cannot be computed for these operands: {error}") from error
        assert isinstance(column, (list, range))
        return column

    def _ends(self, axis: Axis, block: int) -> Ends:
        """Least and greatest value in each tile of an axis, by the names that the survey has for them."""
        if (axis, block) not in self._known:
            ends: Ends = {}
            for n, column in enumerate(self._measured[axis]):
                parts = [column[start : start + block] for start in range(0, len(column), block)]
                ends[f"{axis}{n}_low"] = [int(min(part)) for part in parts]
                ends[f"{axis}{n}_high"] = [int(max(part)) for part in parts]
            self._known[axis, block] = ends
        return self._known[axis, block]

    def spans(self, program: TileProgram, block_q: int, block_kv: int) -> Callable[[int], list[Span]]:
        """The ranges of tiles of the program's axis that a tile of the other axis visits, as a function of its number.

        program: kv_tiles or q_tiles of the variant. The ranges are those that the kernel of this axis writes. (The
        Hopper forward visits what the ranges of its 64 rows at a time join to, which is no wider.)
        """
        own: Axis = "q" if program.axis == "kv" else "kv"
        step, block = (block_q, block_kv) if own == "q" else (block_kv, block_q)
        mine, others = self._ends(own, step), self._ends(program.axis, block)
        positions, length = self.positions[own], len(self.positions[program.axis])
        lines = [(line.name, _function(line.value)) for line in program.body]

        def of(tile: int) -> list[Span]:
            rows = positions[tile * step : (tile + 1) * step]
            values = {**self.env, "block": block, "length": length, f"{own}_first": rows[0], f"{own}_last": rows[-1]}
            for target, value in lines:
                values[target] = value(values)
            values |= {end: column[tile] for end, column in mine.items()}
            ends = [values[output] for output in program.outputs]
            return [self._narrowed(Span(*four), others, values, length // block) for four in zip(*[iter(ends)] * 4)]

        return of

    def _narrowed(self, span: Span, others: Ends, values: dict[str, object], complete: int) -> Span:
        """A range from its first to its last tile in which a pair may be visible; full tiles where they are one run."""
        possible = _decided(self.found.possible, others, values, span.lo, span.hi)
        if True not in possible:
            return Span(*[span.lo] * 4)
        first, end = span.lo + possible.index(True), span.hi - possible[::-1].index(True)
        if is_bool(self.found.certain, False):
            return Span(first, end, end, end)
        certain = _decided(self.found.certain, others, values, first, end)
        full = [
            tile
            for tile, sure in zip(range(first, min(end, complete)), certain)
            if sure or span.full_lo <= tile < span.full_hi
        ]
        if not full or full[-1] + 1 - full[0] != len(full):
            return Span(first, end, end, end)
        return Span(first, full[0], full[-1] + 1, end)

    def count(self, program: TileProgram, block_q: int, block_kv: int, most: int = MOST_STEPS) -> TileCounts:
        """Tiles of the head by class.

        Where to decide on all pairs of tiles would apply more than `most` operators, evenly spaced tiles are looked at,
        as many as keep to that number, each against all of the program's axis, and the counts are scaled.
        """
        own: Axis = "q" if program.axis == "kv" else "kv"
        blocks: dict[Axis, int] = {"q": block_q, "kv": block_kv}
        tiles, others = (-(-len(self.positions[axis]) // blocks[axis]) for axis in (own, program.axis))
        number = min(tiles, max(1, most // (others * max(1, self._steps))))
        spans = self.spans(program, block_q, block_kv)
        edge = full = 0
        for k in range(number):
            edges, fulls = visited(spans((2 * k + 1) * tiles // (2 * number)))  # from the middle of its share
            edge, full = edge + len(edges), full + len(fulls)
        edge, full = round(edge * tiles / number), round(full * tiles / number)
        return TileCounts(empty=max(0, tiles * others - edge - full), edge=edge, full=full)


def _decided(condition: Expr, others: Ends, values: dict[str, object], first: int, end: int) -> list[Value]:
    """A condition of the survey for one tile and each of the tiles first .. end - 1 of the other axis."""
    found = _each(condition, {name: column[first:end] for name, column in others.items()}, values)
    return found if isinstance(found, list) else [found] * (end - first)  # type: ignore[list-item]


def _check_given(found: Survey, values: Mapping[str, object]) -> None:
    read = (*found.q_values, *found.kv_values, found.possible, found.certain)
    needed = {s.name for node in read for s in scalars(node)} | {t.name for node in read for t in tensors(node)}
    missing = sorted(n for n in needed if _operand(n) not in values)
    if missing:
        raise WeftError(f"the tiles depend on {', '.join(missing)}: give values for them to measure tiles")
