"""Turn bounds into a short integer program that a kernel runs once: which tiles to visit, and which need no mask.

Rows are clipped to [0, length), rounded outward where something may be visible and inward where everything is, and made
sorted and disjoint when there are several intervals. What is certain to change nothing is not written, so that the
program of a simple mask is as short as a person would write it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from ....ir.errors import InternalError, WeftError
from ....ir.expr import SYMBOLS, Call, Const, Expr, Load, Scalar, Symbol, symbol
from ....ir.operators import OPERATORS
from ....ir.walk import rewrite, scalars, substitute, symbols, tensors
from ..values.affine import Sum, at_most, choose, const, difference, make, maximum, minimum, name, plus
from .results import Assign, Bounds, Interval, TileCounts, TileProgram

Value = int | float | bool
MOST_EXACT = 4096  # tiles of the other axis that count_tiles runs one by one
# Names start with an underscore while the program is put together, so that no operand's name can equal one.
_ZERO, _BLOCK, _LENGTH, _I = const(0), name("_block"), name("_length"), name("_i")
_ENDS = {"kv": ("q_first", "q_last"), "q": ("kv_first", "kv_last", "q_offset")}
_PAIR_SYMBOLS = {"qk", "q_pos", "kv_pos"}


def tile_program(bounds: Bounds) -> TileProgram:
    """The straight-line program for these bounds.

    After it runs: intervals sorted and disjoint, lo<k> <= full_lo<k> <= full_hi<k> <= hi<k> within
    [0, ceil(length / block)], no incomplete tile full, n_edge and n_full the numbers of tiles to visit.
    """
    writer = _Writer()
    rows = [_rows(i, bounds.axis) for i in bounds.intervals]
    rows = rows or [_Rows(_ZERO, _ZERO, _ZERO, _ZERO)]
    if len(rows) > 1:
        rows = _disjoint(rows, writer)
    tiles = [_tiles(r, k, len(rows) > 1, writer) for k, r in enumerate(rows)]
    _counts(tiles, writer)
    outputs = tuple(f"{part}{k}" for k in range(len(tiles)) for part in ("lo", "full_lo", "full_hi", "hi"))
    body = tuple(Assign(line.name[1:], _public(line.value), line.comment) for line in writer.lines)
    return verify_tiles(TileProgram(bounds.axis, body, outputs, _public(_edge_tile(tiles)), _public(_full_tile(tiles))))


def verify_tiles(program: TileProgram) -> TileProgram:
    """The program itself. Raise InternalError, listing all that is wrong, unless it makes every name before it is read,
    makes all of its outputs, and reads nothing that is different for each pair of a tile."""
    problems = list(_problems(program))
    if problems:
        raise InternalError(f"tile program of axis {program.axis}: {'; '.join(problems)}")
    return program


def _problems(program: TileProgram) -> Iterator[str]:
    known = (set(SYMBOLS) - _PAIR_SYMBOLS) | {"block", "length", *_ENDS[program.axis]}
    made: set[str] = set()
    for line in program.body:
        if unknown := symbols(line.value) - known - made:
            yield f"{line.name} reads {', '.join(sorted(unknown))}"
        if line.name in made or line.name in known:
            yield f"{line.name} is made twice"
        made.add(line.name)
    if missing := {"n_edge", "n_full", *program.outputs} - made:
        yield f"nothing makes {', '.join(sorted(missing))}"
    for what, tile in (("edge_tile", program.edge_tile), ("full_tile", program.full_tile)):
        if unknown := symbols(tile) - made - {"i"}:
            yield f"{what} reads {', '.join(sorted(unknown))}"


def lookups(program: TileProgram) -> TileProgram:
    """The same ranges with any content, as where they are read from memory: how the i-th tile is found in them."""
    names = [name(f"_{output}") for output in program.outputs]
    tiles = [_Rows(lo, hi, full_lo, full_hi) for lo, full_lo, full_hi, hi in zip(*[iter(names)] * 4)]
    return TileProgram(program.axis, (), program.outputs, _public(_edge_tile(tiles)), _public(_full_tile(tiles)))


def _public(node: Expr) -> Expr:
    """The same expression with the names that readers of the program know."""
    return rewrite(node, lambda n: name(n.name[1:]) if isinstance(n, Symbol) and n.name.startswith("_") else None)


@dataclass
class _Writer:
    lines: list[Assign] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)  # how many names of each label there are
    meanings: dict[str, Expr] = field(default_factory=dict)  # of names that proofs look through

    def certain(self, a: Expr, b: Expr) -> bool:
        """Whether a <= b always, by what the names stand for."""
        return at_most(substitute(a, self.meanings), substitute(b, self.meanings))

    def assign(self, target: str, value: Expr, comment: str = "") -> Expr:
        """Write `target = value`; the expression to use in later lines, which is a number where the value is one."""
        self.lines.append(Assign(target, value, comment))
        return value if isinstance(value, Const) else name(target)

    def fresh(self, label: str, value: Expr, comment: str = "") -> Expr:
        """A new name for the value, unless it is a name or a number already."""
        if isinstance(value, (Const, Symbol)):
            return value
        number = self.used.get(label, 0)
        self.used[label] = number + 1
        return self.assign(f"_{label}{number}", value, comment)


@dataclass(frozen=True)
class _Rows:
    """One interval in rows of the axis, clipped: [lo, hi), with everything visible in [full_lo, full_hi)."""

    lo: Expr
    hi: Expr
    full_lo: Expr
    full_hi: Expr

    @property
    def never_full(self) -> bool:
        return at_most(self.full_hi, self.full_lo)


# -- rows -------------------------------------------------------------------------------------------------------------
def _rows(interval: Interval, axis: str) -> _Rows:
    """Positions become rows (row = position - q_offset on the q axis), then are clipped to [0, length)."""
    own_length = "kv_len" if axis == "kv" else "q_len"

    def row(position: Expr) -> Expr:
        position = substitute(position, {own_length: _LENGTH})
        return position if axis == "kv" else _minus(position, symbol("q_offset"))

    ends = (interval.lo, interval.hi, interval.full_lo, interval.full_hi)
    lo, hi, full_lo, full_hi = (row(e) for e in ends)
    # A start past the length, or an end before 0, leaves an empty interval: only the other side needs a clip.
    return _Rows(maximum(lo, _ZERO), minimum(hi, _LENGTH), maximum(full_lo, _ZERO), minimum(full_hi, _LENGTH))


def _minus(node: Expr, offset: Expr) -> Expr:
    """node - offset, taken inside min, max and where so that like terms meet."""
    match node:
        case Call("minimum", (a, b)):
            return minimum(_minus(a, offset), _minus(b, offset))
        case Call("maximum", (a, b)):
            return maximum(_minus(a, offset), _minus(b, offset))
        case Call("where", (condition, a, b)):
            return choose(condition, _minus(a, offset), _minus(b, offset))
        case _:
            return difference(node, offset)


# -- several intervals ------------------------------------------------------------------------------------------------
def _disjoint(rows: list[_Rows], writer: _Writer) -> list[_Rows]:
    """Name the ends of every interval, sort them, then join or cut neighbours that overlap."""
    named = [_named(r, k, writer) for k, r in enumerate(rows)]
    writer.meanings = {line.name: line.value for line in writer.lines}
    for line in writer.lines:
        writer.meanings[line.name] = substitute(line.value, writer.meanings)
    for last in range(len(named) - 1, 0, -1):
        for k in range(last):
            named[k], named[k + 1] = _sorted_pair(named[k], named[k + 1], writer)
    for k in range(len(named) - 1):
        named[k], named[k + 1] = _separated(named[k], named[k + 1], len(named) > 2, writer)
    return named


def _named(rows: _Rows, k: int, writer: _Writer) -> _Rows:
    """Rows with 0 <= lo <= hi <= length, and a full part inside: empty ones too."""
    lo = writer.fresh("begin", minimum(rows.lo, _LENGTH), f"rows of interval {k} where something may be visible")
    hi = writer.fresh("end", maximum(rows.hi, lo))
    if rows.never_full:
        return _Rows(lo, hi, lo, lo)
    full_lo = writer.fresh("full_begin", minimum(maximum(rows.full_lo, lo), hi), "rows where everything is")
    full_hi = writer.fresh("full_end", minimum(maximum(rows.full_hi, full_lo), hi))
    return _Rows(lo, hi, full_lo, full_hi)


def _sorted_pair(a: _Rows, b: _Rows, writer: _Writer) -> tuple[_Rows, _Rows]:
    """Smaller ends and larger ends: the union of two intervals stays the same when their ends are sorted."""
    comment = "ends in order"
    lows, highs = [], []
    for label, part in (("begin", "lo"), ("end", "hi"), ("full_begin", "full_lo"), ("full_end", "full_hi")):
        x, y = getattr(a, part), getattr(b, part)
        if not writer.certain(x, y):
            x, y = writer.fresh(label, minimum(x, y), comment), writer.fresh(label, maximum(x, y))
            comment = ""
        lows.append(x)
        highs.append(y)
    return _Rows(*lows), _Rows(*highs)


def _separated(a: _Rows, b: _Rows, others: bool, writer: _Writer) -> tuple[_Rows, _Rows]:
    """Sorted neighbours made disjoint. Full parts that touch become one, and with them the intervals; intervals that
    overlap are cut where the second full part begins, so that no tile in a full part is visited as an edge."""
    touch, apart = make("le", b.full_lo, a.full_hi), make("lt", a.hi, b.lo)
    cut = minimum(maximum(b.full_lo, a.lo), b.hi) if others else b.full_lo
    hi = writer.fresh("end", choose(touch, a.lo, choose(apart, a.hi, cut)), "joined where full, else cut apart")
    lo = writer.fresh("begin", choose(touch, a.lo, choose(apart, b.lo, cut)))
    full_hi = writer.fresh("full_end", choose(touch, a.full_lo, a.full_hi))
    full_lo = writer.fresh("full_begin", choose(touch, a.full_lo, b.full_lo))
    return _Rows(a.lo, hi, a.full_lo, full_hi), _Rows(lo, b.hi, full_lo, b.full_hi)


# -- tiles ------------------------------------------------------------------------------------------------------------
def _tiles(rows: _Rows, k: int, several: bool, writer: _Writer) -> _Rows:
    """Rows rounded to tiles: outward where something may be visible, inward where everything is."""
    comment = f"tiles [lo{k}, hi{k}) may hold something visible"
    if several:
        lo, hi = _later_tiles(rows, k, comment, writer)
    elif _is_zero(rows.lo):
        lo = writer.assign(f"_lo{k}", _ZERO, comment)
        hi = writer.assign(f"_hi{k}", _upward(maximum(rows.hi, _ZERO)))
    else:
        begin, end = writer.fresh("begin", rows.lo), writer.fresh("end", maximum(rows.hi, _ZERO))
        hi = writer.assign(f"_hi{k}", _upward(end), comment)
        lo = writer.assign(f"_lo{k}", choose(make("lt", begin, end), _downward(begin), hi))
    if rows.never_full:
        writer.assign(f"_full_lo{k}", lo, "no tile is sure to be full")
        writer.assign(f"_full_hi{k}", lo)
        return _Rows(lo, hi, lo, lo)
    full_lo, full_hi = _full(rows, lo, hi, k, several, writer)
    return _Rows(lo, hi, full_lo, full_hi)


def _later_tiles(rows: _Rows, k: int, comment: str, writer: _Writer) -> tuple[Expr, Expr]:
    """Tiles of one of several intervals, without those of the interval before; none where it is empty."""
    if k == 0 and _is_zero(rows.lo):
        return writer.assign("_lo0", _ZERO, comment), writer.assign("_hi0", _upward(rows.hi))
    before = name(f"_hi{k - 1}") if k else _ZERO
    some = const(True) if at_most(plus(rows.lo, 1), rows.hi) else make("lt", rows.lo, rows.hi)
    hi = writer.assign(f"_hi{k}", _at_least(choose(some, _upward(rows.hi), _ZERO), before), comment)
    return writer.assign(f"_lo{k}", choose(some, _at_least(_downward(rows.lo), before), hi)), hi


def _full(rows: _Rows, lo: Expr, hi: Expr, k: int, several: bool, writer: _Writer) -> tuple[Expr, Expr]:
    """The full part, within [lo, hi): what follows from the order of the rows is not written."""
    comment = f"everything is visible in tiles [full_lo{k}, full_hi{k})"
    if _is_zero(rows.full_lo) and _is_zero(lo):
        full_lo = writer.assign(f"_full_lo{k}", _ZERO, comment)
    else:
        begin = _upward(rows.full_lo)
        begin = begin if not several and at_most(rows.lo, rows.full_lo) else _at_least(begin, lo)
        full_lo = writer.assign(f"_full_lo{k}", minimum(begin, hi), comment)
    end = _at_least(_downward(maximum(rows.full_hi, _ZERO)), full_lo)
    inside = not several and at_most(rows.full_hi, rows.hi)
    return full_lo, writer.assign(f"_full_hi{k}", end if inside else minimum(end, hi))


def _is_zero(node: Expr) -> bool:
    return isinstance(node, Const) and node.value == 0


def _at_least(node: Expr, low: Expr) -> Expr:
    return node if _is_zero(low) else make("maximum", node, low)


def _downward(row: Expr) -> Expr:
    return _ZERO if _is_zero(row) else make("floordiv", row, _BLOCK)


def _upward(row: Expr) -> Expr:
    return _ZERO if _is_zero(row) else make("floordiv", make("sub", make("add", row, _BLOCK), const(1)), _BLOCK)


def _counts(tiles: list[_Rows], writer: _Writer) -> None:
    full = _total(difference(t.full_hi, t.full_lo) for t in tiles)
    visited = _total(difference(t.hi, t.lo) for t in tiles)
    writer.assign("_n_full", full, "tiles without mask code")
    writer.assign("_n_edge", difference(visited, full), "tiles that evaluate the mask")


def _total(parts: Iterable[Expr]) -> Expr:
    total = Sum({})
    for part in parts:
        total = total + Sum.of(part)
    return total.expr


def _edge_tile(tiles: list[_Rows]) -> Expr:
    """The i-th tile outside the full parts: i plus the gaps that lie before it."""
    runs = [run for t in tiles for run in ((t.lo, t.full_lo), (t.full_hi, t.hi))]
    return _nth([r for r in runs if r[0].text != r[1].text] or runs[:1])


def _full_tile(tiles: list[_Rows]) -> Expr:
    runs = [(t.full_lo, t.full_hi) for t in tiles]
    return _nth([r for r in runs if r[0].text != r[1].text] or runs[:1])


def _nth(runs: list[tuple[Expr, Expr]]) -> Expr:
    """The i-th tile of these runs of tiles, one after the other."""
    tile = Sum.of(_I) + Sum.of(runs[0][0])
    before = Sum({})
    for (begin, end), (following, _) in pairwise(runs):
        before = before + Sum.of(end) - Sum.of(begin)
        gap = difference(following, end)
        tile = tile + Sum.of(choose(make("lt", _I, before.expr), _ZERO, gap))
    return tile.expr


# -- the program in Python --------------------------------------------------------------------------------------------
Environment = Mapping[str, object]  # ints for symbols and scalars, callables of the indices for tensors
_Compiled = Callable[[dict[str, object]], Value]


def tile_ranges(
    program: TileProgram, env: Environment, *, block: int | None = None, length: int | None = None
) -> tuple[list[int], list[int]]:
    """Run the program: the edge tiles and the full tiles, in the order in which a kernel visits them.

    env: a value for every symbol and scalar by name; for a tensor operand, a callable of its indices. `block` and
    `length` may stand in it, or be given apart where an operand has such a name.
    """
    values = _after(program, env, {k: v for k, v in (("block", block), ("length", length)) if v is not None})
    edge, full = _function(program.edge_tile), _function(program.full_tile)
    return _listed(edge, "n_edge", values), _listed(full, "n_full", values)


def tile_runs(
    program: TileProgram, env: Environment, own: Mapping[str, int] | None = None
) -> tuple[list[range], list[range]]:
    """The same tiles as runs of neighbours, some of them empty: as quick for a long row as for a short one.

    own: what is no operand's value, whatever operands are called.
    """
    values = _after(program, env, own or {})
    ends = [values[name] for name in program.outputs]
    spans: list[tuple[int, int, int, int]] = list(zip(*[iter(ends)] * 4))
    edge = [run for lo, full_lo, full_hi, hi in spans for run in (range(lo, full_lo), range(full_hi, hi))]
    return edge, [range(full_lo, full_hi) for _, full_lo, full_hi, _ in spans]


def _after(program: TileProgram, env: Environment, own: Mapping[str, int]) -> dict[str, object]:
    """All values, once the program has run."""
    values, (lines, _) = {**_values(env), **own}, _runnable(program.body)
    for target, value in lines:
        values[target] = value(values)
    return values


def _values(env: Environment) -> dict[str, object]:
    """Operands under keys of their own: a scalar may have the name of a line of the program."""
    return {**env, **{_operand(text): value for text, value in env.items()}}


def _operand(text: str) -> str:
    return f"operand {text}"


def _listed(tile: _Compiled, count: str, values: dict[str, object]) -> list[int]:
    return [int(tile({**values, "i": i})) for i in range(values[count])]  # type: ignore[call-overload]


def _function(node: Expr) -> _Compiled:
    """The expression as a Python function of its environment; division by zero gives 0, as on a GPU nothing traps."""
    match node:
        case Const(value):
            return lambda env: value
        case Symbol(text):
            return operator.itemgetter(text)
        case Scalar(text):
            return operator.itemgetter(_operand(text))
        case Load(tensor, index):
            places, key = [_function(i) for i in index], _operand(tensor.name)
            return lambda env: env[key](*(p(env) for p in places))  # type: ignore[operator]
        case Call("where", (condition, a, b)):
            test, yes, no = _function(condition), _function(a), _function(b)
            return lambda env: yes(env) if test(env) else no(env)
        case Call(op, (a,)):
            apply, only = OPERATORS[op].python, _function(a)
            return lambda env: apply(only(env))
        case Call(op, (a, b)):
            apply, left, right = OPERATORS[op].python, _function(a), _function(b)
            return lambda env: apply(left(env), right(env))
        case Call(op, args):
            apply, operands = OPERATORS[op].python, [_function(a) for a in args]
            return lambda env: apply(*(operand(env) for operand in operands))
        case _:
            raise InternalError(f"tile program: no rule for {node}")


def count_tiles(
    program: TileProgram,
    *,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
    q_offset: int | None = None,
    env: Environment | None = None,
    level_ends: tuple[int, int] | None = None,
) -> TileCounts:
    """Tiles of one head of one sequence by class. level_ends: from which distance on, and up to which, pairs are level.

    q_offset: position of query row 0; bottom right when None. env: values of scalars, and of symbols and tensors that
    the mask reads (head, batch, group, ... are 0 or 1 when absent). Raises WeftError naming what is missing. Beyond
    MOST_EXACT tiles of the axis that the program runs over, evenly spaced ones are run and the counts are scaled.
    """
    offset = kv_len - q_len if q_offset is None else q_offset
    values: dict[str, object] = {
        "batch": 0, "head": 0, "kv_head": 0, "group": 1, "head_dim": 64, **_values(env or {}),
        "q_len": q_len, "kv_len": kv_len, "q_offset": offset,
    }  # fmt: skip
    over_q = program.axis == "kv"
    rows, step, block, length = (q_len, block_q, block_kv, kv_len) if over_q else (kv_len, block_kv, block_q, q_len)
    values |= {"block": block, "length": length}
    lines, needed = _runnable(program.body)
    if missing := [name for key, name in needed.items() if key not in values]:
        raise WeftError(f"the tiles depend on {', '.join(missing)}: give values for them to count tiles")
    first, last, base = ("q_first", "q_last", offset) if over_q else ("kv_first", "kv_last", 0)
    tiles = -(-rows // step)
    chosen = evenly(tiles, MOST_EXACT)
    found = [0, 0, 0, 0]  # edge, full, and of each those that are level
    for k in chosen:
        values[first], values[last] = base + k * step, base + min((k + 1) * step, rows) - 1
        for target, value in lines:
            values[target] = value(values)
        level = (0, 0)
        if level_ends is not None:
            apart = base + k * step - (0 if over_q else offset)
            runs = level_runs(level_ends, apart, step, block, over_q)
            level = _level_of([values[name] for name in program.outputs], runs)  # type: ignore[misc]
        for n, number in enumerate((values["n_edge"], values["n_full"], *level)):
            found[n] += number  # type: ignore[operator]
    if len(chosen) < tiles:
        found = [round(number * tiles / len(chosen)) for number in found]
    return TileCounts(max(0, tiles * -(-length // block) - found[0] - found[1]), *found)


def level_runs(ends: tuple[int, int], apart: int, step: int, block: int, over_q: bool) -> tuple[int, int]:
    """Tiles of `block` rows whose pairs with a tile of `step` rows are all level: those before the first, and from the
    second on.

    ends: from which distance on, and up to which, pairs are level. apart: the distance of the first rows of both axes
    at tile 0, that of keys less that of queries where the tile's own rows are keys.
    """
    distant_from, distant_to = ends
    if over_q:
        before, behind = max(apart - distant_from + 1, 0) // block, -(-max(apart + step - 1 - distant_to, 0) // block)
    else:
        before, behind = max(apart + distant_to + 1, 0) // block, -(-max(apart + step - 1 + distant_from, 0) // block)
    return before, max(before, behind)


def _level_of(ends: list[int], runs: tuple[int, int]) -> tuple[int, int]:
    """Edge and full tiles of level pairs, in the ranges of a tile program's outputs."""
    before, behind = runs

    def level(first: int, end: int) -> int:
        return max(min(before, end) - first, 0) + max(end - max(behind, first), 0)

    ranges = list(zip(*[iter(ends)] * 4))
    full = sum(level(full_lo, full_hi) for _, full_lo, full_hi, _ in ranges)
    return sum(level(lo, hi) for lo, _, _, hi in ranges) - full, full


def evenly(number: int, most: int) -> Sequence[int]:
    """All of so many places, or at most `most` of them, each from the middle of its share."""
    return range(number) if number <= most else [(2 * k + 1) * number // (2 * most) for k in range(most)]


@lru_cache(maxsize=256)
def _runnable(body: tuple[Assign, ...]) -> tuple[list[tuple[str, _Compiled]], dict[str, str]]:
    """The lines of a program, and the operands that they read: names by keys."""
    read = {s.name for line in body for s in scalars(line.value)}
    read |= {t.name for line in body for t in tensors(line.value)}
    return [(line.name, _function(line.value)) for line in body], {_operand(n): n for n in sorted(read)}
