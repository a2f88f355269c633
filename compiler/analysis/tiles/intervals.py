"""Intervals of one axis as expressions: cut free of hidden ones, joined where that is certain, kept few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ....ir.expr import Call, Expr
from ..values.affine import all_of, at_most, choose, const, difference, make, maximum, minimum, not_above
from .results import Interval

MAX_INTERVALS = 4
Choice: TypeAlias = Callable[..., Expr]  # minimum or maximum


@dataclass(frozen=True)
class Axis:
    name: Literal["kv", "q"]
    position: str  # the symbol that is solved for
    other: str  # the symbol that runs over the tile
    first: Expr  # of the tile
    last: Expr
    start: Expr  # of the axis
    end: Expr


def limit(choice: Choice, values: list[Expr], default: Expr) -> Expr:
    """The tightest of the values; the axis' own end is left out where another is given, tiles are clipped later."""
    given = [v for v in values if v.text != default.text]
    return choice(*given) if given else default


def without(seen: Interval, hidden: list[Interval], axis: Axis) -> Interval:
    """`seen` with its full part cut free of each hidden interval, on the side that leaves more."""
    begin, end = axis.start, axis.end
    for h in sorted(hidden, key=lambda h: not _reaches_end_or_start(h, axis)):
        lo, hi = _sides(Interval(seen.lo, seen.hi, begin, end), h, axis)
        begin, end = limit(maximum, [begin, lo], axis.start), limit(minimum, [end, hi], axis.end)
    return Interval(seen.lo, seen.hi, begin, end)


def _reaches_end_or_start(a: Interval, axis: Axis) -> bool:
    return a.lo.text == axis.start.text or _end_condition(a, axis) is not None


def _end_condition(a: Interval, axis: Axis) -> Expr | None:
    """The condition of an interval that reaches the axis' end where it holds, and is empty where not."""
    if a.hi.text == axis.end.text:
        return const(True)
    match a.hi:
        case Call("where", (condition, yes, no)) if (yes.text, no.text) == (axis.end.text, axis.start.text):
            return condition
        case _:
            return None


def _sides(seen: Interval, hidden: Interval, axis: Axis) -> tuple[Expr, Expr]:
    """What a hidden interval leaves of a seen one: positions from the first, before the second."""
    if hidden.lo.text == axis.start.text:
        return hidden.hi, axis.end
    condition = _end_condition(hidden, axis)
    if condition is not None:
        return axis.start, choose(condition, hidden.lo, axis.end)
    some = make("lt", hidden.lo, hidden.hi)
    room_before = difference(hidden.lo, maximum(seen.lo, seen.full_lo))
    room_after = difference(minimum(seen.hi, seen.full_hi), hidden.hi)
    before = not_above(room_after, room_before)
    lo = choose(all_of([some, make("not", before)]), hidden.hi, axis.start)
    return lo, choose(all_of([some, before]), hidden.lo, axis.end)


def merged(intervals: list[Interval], axis: Axis) -> list[Interval]:
    """Intervals joined as long as some pair is certain to make one interval whose full part is exact."""
    for n, a in enumerate(intervals):
        for m, b in enumerate(intervals):
            joined = _joined(a, b, axis) if n != m else None
            if joined is not None:
                rest = [x for k, x in enumerate(intervals) if k not in (n, m)]
                return merged([*rest[:n], joined, *rest[n:]], axis)
    return intervals


def _joined(a: Interval, b: Interval, axis: Axis) -> Interval | None:
    """The union of two intervals, where it is surely one interval, and so is the union of their full parts."""
    if a.lo.text == b.lo.text:
        lo, hi = a.lo, _union_end(maximum, a.hi, b.hi, axis.end)
    elif a.hi.text == b.hi.text:
        lo, hi = _union_end(minimum, a.lo, b.lo, axis.start), a.hi
    elif (whole := _condition_of(a.lo, a.hi, axis)) is not None:
        lo, hi = choose(whole, axis.start, b.lo), choose(whole, axis.end, b.hi)
    elif _no_later(a.lo, b.lo, axis) and (a.hi.text == axis.end.text or at_most(b.hi, a.hi)):
        lo, hi = a.lo, a.hi
    else:
        return None
    if _never_full(b, axis):
        return Interval(lo, hi, a.full_lo, a.full_hi)
    if _never_full(a, axis):
        return Interval(lo, hi, b.full_lo, b.full_hi)
    if a.full_lo.text == b.full_lo.text:
        return Interval(lo, hi, a.full_lo, _union_end(maximum, a.full_hi, b.full_hi, axis.end))
    if a.full_hi.text == b.full_hi.text:
        return Interval(lo, hi, _union_end(minimum, a.full_lo, b.full_lo, axis.start), a.full_hi)
    full = _condition_of(a.full_lo, a.full_hi, axis)
    if full is not None:
        return Interval(lo, hi, choose(full, axis.start, b.full_lo), choose(full, axis.end, b.full_hi))
    return None


def _condition_of(lo: Expr, hi: Expr, axis: Axis) -> Expr | None:
    """The condition of an interval that is the whole axis where it holds, and empty where not."""
    return _end_condition(Interval(lo, hi, lo, lo), axis) if lo.text == axis.start.text else None


def _union_end(choice: Choice, a: Expr, b: Expr, unbounded: Expr) -> Expr:
    return unbounded if unbounded.text in (a.text, b.text) else choice(a, b)


def _no_later(a: Expr, b: Expr, axis: Axis) -> bool:
    return a.text == axis.start.text or at_most(a, b)


def _never_full(a: Interval, axis: Axis) -> bool:
    return a.full_hi.text == axis.start.text


def few(intervals: list[Interval], axis: Axis) -> list[Interval]:
    """At most MAX_INTERVALS: the last ones share their hull, which may hold tiles where nothing is visible."""
    kept, rest = intervals[: MAX_INTERVALS - 1], intervals[MAX_INTERVALS - 1 :]
    # An empty interval must not widen the hull.
    lo = minimum(*(choose(make("lt", i.lo, i.hi), i.lo, axis.end) for i in rest))
    hi = maximum(*(choose(make("lt", i.lo, i.hi), i.hi, axis.start) for i in rest))
    return [*kept, Interval(lo, hi, rest[0].full_lo, rest[0].full_hi)]
