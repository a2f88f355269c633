"""Derive from a mask where a tile must look: intervals of positions that may be visible, and parts that all are.

    (kv_pos <= q_pos) & (q_pos - kv_pos < 4)   -->   [q_first - 3, q_last + 1), full in [q_last - 3, q_first + 1)

Four steps. The mask becomes a disjunction of terms. Each comparison in them is solved for the axis (`kv_pos >= e`,
`kv_pos < e`) or for the other position. `e` is bounded over the tile of the other axis by interval arithmetic. Terms
become intervals, merged where that is certain to be exact. Divisors and coefficients known only at run time are
assumed positive, and `where(d > 0, ...)` falls back to the whole axis where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal as Choice

from ....ir.errors import InternalError
from ....ir.expr import Call, Const, Expr, Symbol, symbol
from ....ir.operators import OPERATORS
from ....ir.walk import nodes, rewrite, substitute, symbols
from ..values.affine import (
    Sum,
    all_of,
    at_most,
    choose,
    const,
    is_bool,
    is_positive,
    make,
    maximum,
    minimum,
    not_above,
    plus,
    simplified,
)  # fmt: skip
from ..values.interval_arithmetic import Range, Tile, range_over
from ..values.ranges import fits_64_bits, has_64_bits
from .intervals import MAX_INTERVALS, Axis, few, limit, merged, without
from .results import Bounds, Interval

_MAX_TERMS = 16
_MAX_HIDDEN = 3
_BEYOND_INT32 = 2**31  # one more than the largest int of a mask
_LOOSE = "the mask has too many alternatives: parts of it are left out of its bounds"
_HULL = f"the mask has more than {MAX_INTERVALS} intervals: the last ones share one that may hold empty tiles"
_TOO_FAR = "ends of an interval might not fit in 64 bits: they skip no tile"
_UNORDERED = "positions are no row numbers: all tiles are visited"
_POSITIONS = frozenset({"q_pos", "kv_pos"})


def kv_bounds(mask: Expr) -> Bounds:
    """kv positions that the query positions q_first..q_last (inclusive) can see.

    mask: a canonical bool expression. The result holds for all run-time values of operands and lengths.
    """
    ends = symbol("q_first"), symbol("q_last"), const(0), symbol("kv_len")
    return _bounds(mask, Axis("kv", "kv_pos", "q_pos", *ends))


def q_bounds(mask: Expr) -> Bounds:
    """q positions that can see the kv positions kv_first..kv_last (inclusive); see `kv_bounds`."""
    start, end = symbol("q_offset"), simplified(symbol("q_offset") + symbol("q_len"))
    return _bounds(mask, Axis("q", "q_pos", "kv_pos", symbol("kv_first"), symbol("kv_last"), start, end))


def anywhere(axis: Choice["kv", "q"]) -> Bounds:
    """Of a mask where positions are in no order of rows: any tile may see all of the axis, and none is known to."""
    start: Expr = const(0)
    end: Expr = symbol("kv_len")
    if axis == "q":
        start, end = symbol("q_offset"), simplified(symbol("q_offset") + symbol("q_len"))
    return Bounds(axis, (Interval(start, end, start, start),), (_UNORDERED,))


@dataclass(frozen=True)
class _Literal:
    """One solved condition. `assume` lists what must be positive for it to be right."""

    kind: Choice["from", "until", "other_from", "other_until", "other_sign", "run_time", "open"]
    # from: position >= value; until: position < value; other_*: the same for the other axis; other_sign: value <= 0;
    # run_time: value is a bool without positions; open: value has no closed form
    value: Expr
    assume: tuple[Expr, ...] = ()

    @cached_property
    def text(self) -> str:
        return f"{self.kind} {self.value.text} {' '.join(a.text for a in self.assume)}"


@dataclass(frozen=True)
class _Term:
    """A conjunction; `loose` where something was left out, so that it never proves everything visible."""

    literals: tuple[_Literal, ...] = ()
    loose: bool = False

    @cached_property
    def texts(self) -> frozenset[str]:
        return frozenset(literal.text for literal in self.literals)

    def joined(self, other: _Term) -> _Term:
        new = tuple(l for l in other.literals if l.text not in self.texts)
        return _Term(self.literals + new, self.loose or other.loose)


_Terms = list[_Term]  # their disjunction; [] is never, [_Term()] is always


def _bounds(mask: Expr, axis: Axis) -> Bounds:
    solver = _Solver(axis, _checked(mask, axis))
    terms = _absorbed(solver.terms(mask, True))
    intervals = _intervals(terms, solver)
    if len(terms) > 1 and any(literal.kind.startswith("other") for term in terms for literal in term.literals):
        intervals = _with_complement(intervals, mask, axis)
    if len(intervals) > MAX_INTERVALS:
        solver.notes.append(_HULL)
        intervals = few(intervals, axis)
    if not intervals:
        intervals = [Interval(axis.start, axis.start, axis.start, axis.start)]
    intervals = [_held(i, solver) for i in intervals]
    return Bounds(axis.name, tuple(intervals), tuple(dict.fromkeys(solver.notes)))


def _checked(mask: Expr, axis: Axis) -> frozenset[str]:
    """Texts of what a call is checked for: ints of 32 bits at the ends of a tile, and conditions without positions."""
    found = set()
    for node in nodes(mask):
        if node.dtype == "bool" and not symbols(node) & _POSITIONS:
            found |= {node.text, _negated(node).text}
        computed = isinstance(node, Call) and node.dtype == "int" and not OPERATORS[node.op].makes_ints
        if computed and not has_64_bits(node) and axis.position not in symbols(node):
            for end in (axis.first, axis.last):
                at_end = simplified(substitute(node, {axis.other: end}))
                found |= {at_end.text, simplified(make("neg", at_end)).text}
    return frozenset(found)


# -- the mask as terms ------------------------------------------------------------------------------------------------
@dataclass
class _Solver:
    """Turns conditions into terms; collects what it could not solve."""

    axis: Axis
    checked: frozenset[str]  # texts of what fits in any case
    notes: list[str] = field(default_factory=list)

    def fits(self, *values: Expr) -> bool:
        return all(fits_64_bits(value, self.checked) for value in values)

    def terms(self, node: Expr, wanted: bool) -> _Terms:
        """`node`, or its negation where it is not wanted, as a disjunction of terms."""
        if isinstance(node, Const):
            return [_Term()] if node.value == wanted else []
        if not symbols(node) & _POSITIONS:
            return [_Term((_Literal("run_time", node if wanted else _negated(node)),))]
        match node:
            case Call("not", (a,)):
                return self.terms(a, not wanted)
            case Call("and" | "or" as op, (a, b)):
                combine = self.both if (op == "and") == wanted else self.either
                return combine(self.terms(a, wanted), self.terms(b, wanted))
            case Call("xor" | "eq" | "ne" as op, (a, b)) if a.dtype == "bool":
                return self.agreement(a, b, (op == "eq") == wanted)
            case Call("where", (condition, a, b)):
                return self.case(condition, self.terms(a, wanted), self.terms(b, wanted))
            case Call("lt" | "le" | "gt" | "ge" | "eq" | "ne" as op, (a, b)) if {a.dtype, b.dtype} == {"int"}:
                return self.comparison(op, a, b, wanted, node)
            case _:
                return self.open(node)

    def both(self, a: _Terms, b: _Terms) -> _Terms:
        if len(a) * len(b) > _MAX_TERMS:
            self.notes.append(_LOOSE)
            a, b = (_loosened(a), b) if len(a) > len(b) else (a, _loosened(b))
        joined = [x.joined(y) for x in a for y in b]
        return _absorbed([t for t in joined if not _impossible(t)])

    def either(self, a: _Terms, b: _Terms) -> _Terms:
        both = _absorbed([*a, *b])
        if len(both) > _MAX_TERMS:
            self.notes.append(_LOOSE)
            return _loosened(both)
        return both

    def agreement(self, a: Expr, b: Expr, equal: bool) -> _Terms:
        same = self.both(self.terms(a, True), self.terms(b, equal))
        return self.either(same, self.both(self.terms(a, False), self.terms(b, not equal)))

    def case(self, condition: Expr, a: _Terms, b: _Terms) -> _Terms:
        return self.either(self.both(self.terms(condition, True), a), self.both(self.terms(condition, False), b))

    def open(self, node: Expr) -> _Terms:
        self.notes.append(_note(node))
        return [_Term((_Literal("open", node),))]

    # -- comparisons of integers --------------------------------------------------------------------------------------
    def comparison(self, op: str, a: Expr, b: Expr, wanted: bool, node: Expr) -> _Terms:
        if not wanted:
            op = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}[op]
        choice = _position_choice(node)
        if choice is not None:
            yes, no = (make(op, _branch(a, choice, n), _branch(b, choice, n)) for n in (1, 2))
            return self.case(choice, self.terms(yes, True), self.terms(no, True))
        assume = _divisors(node)
        if assume is None:
            return self.open(node)
        gap = Sum.of(a) - Sum.of(b)
        below, above = gap, gap.scaled(-1)  # gap <= 0 where a <= b, and -gap <= 0 where a >= b
        match op:
            case "le":
                return self.at_most_zero(below, assume, node)
            case "lt":
                return self.at_most_zero(below.shifted(1), assume, node)
            case "ge":
                return self.at_most_zero(above, assume, node)
            case "gt":
                return self.at_most_zero(above.shifted(1), assume, node)
            case "eq" if _solvable(gap, self.axis.position):
                return self.both(self.at_most_zero(below, assume, node), self.at_most_zero(above, assume, node))
            case "ne" if _solvable(gap, self.axis.position):
                less, more = below.shifted(1), above.shifted(1)
                return self.either(self.at_most_zero(less, assume, node), self.at_most_zero(more, assume, node))
            case _:
                return self.open(node)

    def at_most_zero(self, gap: Sum, assume: tuple[Expr, ...], node: Expr) -> _Terms:
        """`gap <= 0`, solved for the axis where it occurs, else for the other position."""
        gap = _gathered(gap)
        number = gap.value
        if number is not None:
            return self.assuming(assume, number <= 0)
        names = symbols(gap.expr)
        if self.axis.position in names:
            return self.solved(self.axis.position, gap, assume, node)
        if self.axis.other in names:
            return self.solved(self.axis.other, gap, assume, node)
        return self.assuming(assume, not_above(gap.expr, const(0)))

    def assuming(self, assume: tuple[Expr, ...], condition: Expr | bool) -> _Terms:
        """A condition without positions; unknown where an assumption fails."""
        node = const(condition) if isinstance(condition, bool) else condition
        unknown = [a for a in assume if not is_positive(a)]
        if not unknown:
            if isinstance(node, Const):
                return [_Term()] if node.value else []
            return [_Term((_Literal("run_time", node),))]
        return [_Term((_Literal("other_sign", choose(node, const(0), const(1)), tuple(unknown)),))]

    def solved(self, position: str, gap: Sum, assume: tuple[Expr, ...], node: Expr) -> _Terms:
        isolated = _isolated(gap, position)
        if isolated is None:
            if position == self.axis.other:
                return [_Term((_Literal("other_sign", gap.expr, assume),))]
            return self.open(node)
        atom, factor, rest = isolated
        upper = True
        if factor.value is None and not is_positive(factor.expr):
            if all(coefficient < 0 for coefficient, _ in factor.terms.values()):  # it is written `-stride`
                factor, upper = factor.scaled(-1), False
            assume = _with(assume, factor.expr)
        elif factor.value is not None and factor.value < 0:
            factor, upper = factor.scaled(-1), False
        # upper: factor * atom + rest <= 0; else: rest <= factor * atom
        divided = (rest.scaled(-1) if upper else rest + factor.shifted(-1)).expr
        limit = Sum.of(divided) if factor.value == 1 else Sum.of(make("floordiv", divided, factor.expr))
        return self.limited(position, atom, upper, limit, assume, node)

    def limited(
        self, position: str, atom: Expr, upper: bool, limit: Sum, assume: tuple[Expr, ...], node: Expr
    ) -> _Terms:
        """`atom <= limit` or `atom >= limit`: inverts the atom until the position itself is left."""

        def part(inner: Sum) -> _Terms:
            return self.at_most_zero(inner - limit if upper else limit - inner, assume, node)

        match atom:
            case Symbol():
                prefix = "" if position == self.axis.position else "other_"
                kind = f"{prefix}{'until' if upper else 'from'}"
                value = limit.shifted(1) if upper else limit
                return [_Term((_Literal(kind, value.expr, assume),))]  # type: ignore[arg-type]
            case Call("floordiv", (a, d)) if position not in symbols(d):
                # a // d <= u  is  a < d * (u + 1);  a // d >= v  is  a >= d * v   (d > 0). Where that may leave 64
                # bits the limit is cut: beyond all that a // d can be, which has 32, any limit says the same.
                if not (has_64_bits(a) or fits_64_bits((limit * Sum.of(d)).expr, self.checked)):
                    limit = Sum.of(minimum(maximum(limit.expr, const(-_BEYOND_INT32 - 1)), const(_BEYOND_INT32)))
                scaled = limit.shifted(1 if upper else 0) * Sum.of(d)
                gap = Sum.of(a) - scaled.shifted(-1) if upper else scaled - Sum.of(a)
                return self.at_most_zero(gap, assume, node)
            case Call("minimum" | "maximum" as op, (a, b)):
                combine = self.both if (op == "maximum") == upper else self.either
                return combine(part(Sum.of(a)), part(Sum.of(b)))
            case Call("abs", (a,)):
                combine = self.both if upper else self.either
                return combine(part(Sum.of(a)), part(Sum.of(a).scaled(-1)))
            case _ if position == self.axis.other:
                gap = Sum.of(atom) - limit if upper else limit - Sum.of(atom)
                return [_Term((_Literal("other_sign", gap.expr, assume),))]
            case _:
                return self.open(node)


def _negated(node: Expr) -> Expr:
    match node:
        case Call("not", (a,)):
            return a
        case Call("lt", (a, b)) if {a.dtype, b.dtype} == {"int"}:
            return make("le", b, a)
        case Call("le", (a, b)) if {a.dtype, b.dtype} == {"int"}:
            return make("lt", b, a)
        case _:
            return make("not", node)


def _note(node: Expr) -> str:
    return f"`{node.text}` has no closed form: it skips no tile and makes none full"


def _with(assume: tuple[Expr, ...], node: Expr) -> tuple[Expr, ...]:
    return assume if node.text in {a.text for a in assume} else (*assume, node)


def _position_choice(node: Expr) -> Expr | None:
    """The condition of an integer `where` that reads a position, to be decided before solving."""
    for n in nodes(node):
        if isinstance(n, Call) and n.op == "where" and symbols(n.args[0]) & _POSITIONS:
            return n.args[0]
    return None


def _branch(node: Expr, condition: Expr, branch: int) -> Expr:
    def rule(n: Expr) -> Expr | None:
        taken = isinstance(n, Call) and n.op == "where" and n.args[0].text == condition.text
        return n.args[branch] if taken else None  # type: ignore[union-attr]

    return rewrite(node, rule)


def _divisors(node: Expr) -> tuple[Expr, ...] | None:
    """Divisors under positions that are positive only by assumption; None where one depends on a position or is 0."""
    found: tuple[Expr, ...] = ()
    for n in nodes(node):
        if isinstance(n, Call) and n.op in ("floordiv", "mod") and symbols(n) & _POSITIONS:
            divisor = Sum.of(n.args[1])
            if symbols(divisor.expr) & _POSITIONS or divisor.value == 0:
                return None
            if divisor.value is None and not is_positive(divisor.expr):
                found = _with(found, divisor.expr)
    return found


def _isolated(gap: Sum, position: str) -> tuple[Expr, Sum, Sum] | None:
    """gap = factor * atom + rest with the position in the atom alone, and a factor without positions."""
    atoms = {f.text: f for _, factors in gap.terms.values() for f in factors if position in symbols(f)}
    if len(atoms) != 1:
        return None
    ((text, atom),) = atoms.items()
    inside = {k: t for k, t in gap.terms.items() if text in k}
    factor: dict[tuple[str, ...], tuple[int, tuple[Expr, ...]]] = {}
    for coefficient, factors in inside.values():
        others = tuple(f for f in factors if f.text != text)
        if len(others) != len(factors) - 1 or any(symbols(f) & _POSITIONS for f in others):
            return None
        factor[tuple(f.text for f in others)] = (coefficient, others)
    return atom, Sum(factor), Sum({k: t for k, t in gap.terms.items() if text not in k})


def _solvable(gap: Sum, position: str) -> bool:
    """Whether an equation can be split into two inequalities that are solved exactly."""
    gap = _gathered(gap)
    if position not in symbols(gap.expr):
        return True
    isolated = _isolated(gap, position)
    return isolated is not None and not (isinstance(isolated[0], Call) and isolated[0].op == "mod")


def _gathered(gap: Sum) -> Sum:
    """x - x % d is d * (x // d): one position less where both occur."""
    for coefficient, factors in gap.terms.values():
        for factor in factors:
            if isinstance(factor, Call) and factor.op == "mod" and symbols(factor) & _POSITIONS:
                a, d = factor.args
                whole = Sum.of(a) - Sum.of(d) * Sum.of(make("floordiv", a, d))
                others = Sum({(): (coefficient, ())})
                for other in factors:
                    if other is not factor:
                        others = others * Sum.of(other)
                tried = gap - others * Sum.of(factor) + others * whole
                if _count_positions(tried) < _count_positions(gap):
                    return _gathered(tried)
    return gap


def _count_positions(gap: Sum) -> int:
    return sum(1 for _, factors in gap.terms.values() for f in factors if symbols(f) & _POSITIONS)


# -- terms ------------------------------------------------------------------------------------------------------------
def _absorbed(terms: Iterable[_Term]) -> _Terms:
    """x | (x & y) is x."""
    kept: _Terms = []
    for term in terms:
        if any(k.texts <= term.texts and (term.loose or not k.loose) for k in kept):
            continue
        kept = [k for k in kept if not (term.texts <= k.texts and (k.loose or not term.loose))] + [term]
    return kept


def _loosened(terms: _Terms) -> _Terms:
    """One weaker term: what all of them share."""
    shared = frozenset.intersection(*(t.texts for t in terms))
    return [_Term(tuple(l for l in terms[0].literals if l.text in shared), loose=True)]


def _impossible(term: _Term) -> bool:
    """Whether two conditions exclude each other for every pair of positions."""
    sure = [l for l in term.literals if not l.assume]
    for a in sure:
        for b in sure:
            if (a.kind, b.kind) in (("from", "until"), ("other_from", "other_until")) and at_most(b.value, a.value):
                return True
            if a.kind == b.kind == "run_time" and _negated(a.value).text == b.value.text:
                return True
    return False


# -- terms as intervals -----------------------------------------------------------------------------------------------
def _piece(term: _Term, solver: _Solver) -> Interval | None:
    """The interval of one term; None where it is surely empty."""
    axis = solver.axis
    part, conditions = _tile_part(term, solver)
    whole = Tile(axis.other, axis.first, axis.last)
    found = _Piece(axis, visible=conditions, certain=not term.loose)
    for literal in term.literals:
        some, every = (range_over(literal.value, tile.assuming(literal.assume)) for tile in (part, whole))
        sure = literal.kind == "run_time" or (every is not None and solver.fits(*every))
        if literal.kind != "open" and some is not None and every is not None and sure:
            found.add(literal, some if solver.fits(*some) else every, every)
            continue
        found.certain = False
        if literal.kind != "open":
            solver.notes.append(_note(_written(literal, axis)))
    return found.interval()


@dataclass
class _Piece:
    """What the literals of a term say so far: limits and conditions for something to be visible, and everything."""

    axis: Axis
    visible: list[Expr]
    certain: bool
    complete: list[Expr] = field(default_factory=list)
    lo: list[Expr] = field(default_factory=list)
    hi: list[Expr] = field(default_factory=list)
    full_lo: list[Expr] = field(default_factory=list)
    full_hi: list[Expr] = field(default_factory=list)

    def add(self, literal: _Literal, some: Range, every: Range) -> None:
        """One literal, with the range of its value over the part of the tile in question and over the whole tile."""
        axis = self.axis
        match literal.kind:
            case "run_time":
                self.visible.append(literal.value)
                self.complete.append(literal.value)
            case "other_from":
                self.complete.append(_certainly(literal, not_above(literal.value, axis.first)))
            case "other_until":
                self.complete.append(_certainly(literal, not_above(plus(axis.last, 1), literal.value)))
            case "other_sign":
                self.visible.append(_possibly(literal, not_above(some[0], const(0))))
                self.complete.append(_certainly(literal, not_above(every[1], const(0))))
            case "from":
                self.lo.append(_assumed(literal, some[0], axis.start))
                self.full_lo.append(_assumed(literal, every[1], axis.end))
            case "until":
                self.hi.append(_assumed(literal, some[1], axis.end))
                self.full_hi.append(_assumed(literal, every[0], axis.start))
            case _:
                raise InternalError(f"tile bounds: unknown condition {literal.kind}")

    def interval(self) -> Interval | None:
        start, end = self.axis.start, self.axis.end
        visible, complete = all_of(self.visible), all_of(self.complete)
        if is_bool(visible, False):
            return None
        lo, hi = limit(maximum, self.lo, start), choose(visible, limit(minimum, self.hi, end), start)
        if not self.certain or is_bool(complete, False):
            return Interval(lo, hi, start, start)
        full_hi = choose(complete, limit(minimum, self.full_hi, end), start)
        return Interval(lo, hi, limit(maximum, self.full_lo, start), full_hi)


def _written(literal: _Literal, axis: Axis) -> Expr:
    """A solved condition as the user may recognise it."""
    position, zero = symbol(axis.position), const(0)
    match literal.kind:
        case "from":
            return make("le", literal.value, position)
        case "until":
            return make("lt", position, literal.value)
        case _:
            return make("le", literal.value, zero)


# A condition that divides by what is assumed positive must not be computed where the assumption fails: Python raises
# for a division by 0, also where the quotient would not matter. `where` computes the branch that it takes.
def _certainly(literal: _Literal, condition: Expr) -> Expr:
    """The condition, or False where an assumption fails."""
    assumed = _assumption(literal)
    return all_of([assumed, condition]) if isinstance(condition, Const) else choose(assumed, condition, const(False))


def _possibly(literal: _Literal, condition: Expr) -> Expr:
    """The condition, or True where an assumption fails."""
    assumed = _assumption(literal)
    if isinstance(condition, Const):
        return condition if condition.value or isinstance(assumed, Const) else make("not", assumed)
    return choose(assumed, condition, const(True))


def _assumption(literal: _Literal) -> Expr:
    return all_of(make("lt", const(0), a) for a in literal.assume)


def _tile_part(term: _Term, solver: _Solver) -> tuple[Tile, list[Expr]]:
    """The part of the other axis' tile that a term speaks of, and when it is not empty."""
    axis = solver.axis
    first, last = axis.first, axis.last
    conditions: list[Expr] = []
    froms = [l for l in term.literals if l.kind == "other_from" and solver.fits(l.value)]
    untils = [l for l in term.literals if l.kind == "other_until" and solver.fits(l.value)]
    for l in froms:
        first = maximum(first, _assumed(l, l.value, axis.first))
        conditions.append(_possibly(l, not_above(l.value, axis.last)))
    for l in untils:
        last = minimum(last, _assumed(l, plus(l.value, -1), axis.last))
        conditions.append(_possibly(l, not_above(plus(axis.first, 1), l.value)))
    for a in froms:
        for b in untils:
            both = _Literal("run_time", a.value, (*a.assume, *b.assume))
            conditions.append(_possibly(both, not_above(plus(a.value, 1), b.value)))
    return Tile(axis.other, first, last), [c for c in conditions if solver.fits(c)]


def _assumed(literal: _Literal, value: Expr, default: Expr) -> Expr:
    return choose(_assumption(literal), value, default)


# -- intervals --------------------------------------------------------------------------------------------------------
def _intervals(terms: _Terms, solver: _Solver) -> list[Interval]:
    pieces = [_piece(term, solver) for term in terms]
    return merged([p for p in pieces if p is not None], solver.axis)


def _held(interval: Interval, solver: _Solver) -> Interval:
    """Without ends that may leave 64 bits, as those that compare sums of ends: what they leave out is visited."""
    start, end = solver.axis.start, solver.axis.end
    if solver.fits(interval.lo, interval.hi, interval.full_lo, interval.full_hi):
        return interval
    solver.notes.append(_TOO_FAR)
    lo = interval.lo if solver.fits(interval.lo) else start
    return Interval(lo, interval.hi if solver.fits(interval.hi) else end, start, start)


def _with_complement(intervals: list[Interval], mask: Expr, axis: Axis) -> list[Interval]:
    """Full parts as what is left when everything that may be hidden is taken away.

    Terms that speak of different rows of a tile prove nothing full one by one, where together they do. Done only where
    the hidden part has a closed form and few intervals.
    """
    solver = _Solver(axis, _checked(mask, axis))
    terms = _absorbed(solver.terms(mask, False))
    if solver.notes or any(t.loose for t in terms):
        return intervals
    hidden = _intervals(terms, solver)
    if solver.notes or len(hidden) > _MAX_HIDDEN or len(intervals) > _MAX_HIDDEN:
        return intervals
    seen = merged([Interval(i.lo, i.hi, axis.start, axis.start) for i in intervals], axis)
    return [without(i, hidden, axis) for i in seen]
