"""Intervals of floats, and what operators make of them (Moore, Interval Analysis, 1966).

An interval holds all values that a float may take. Its ends are infinite where an infinity is among them. None stands
for what may be NaN, and for what nothing is known of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ....ir.operators import OPERATORS


class Interval(NamedTuple):
    """All values between two, which may be among them; neither is NaN."""

    low: float
    high: float


# Of a result: the interval, by what share of it, and by how much besides, what computes it may be off
Widen: TypeAlias = Callable[[Interval, float, float], Interval]
_ROUNDED, _FUNCTION = 1e-5, 1e-3
_GROWING = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "softplus", "logsigmoid", "sqrt")


def applied(op: str, operands: Sequence[Interval], widen: Widen) -> Interval | None:
    """The result of an operator on floats, or on the two branches of a choice."""
    x, y = operands[0], operands[-1]
    match op:
        case "neg":
            return _negated(x)
        case "abs":
            return Interval(max(x.low, -x.high, 0.0), max(-x.low, x.high))
        case "minimum" | "maximum":
            choice = min if op == "minimum" else max
            return Interval(choice(x.low, y.low), choice(x.high, y.high))
        case "where":
            return Interval(min(x.low, y.low), max(x.high, y.high))
        case "log" | "log2" | "sqrt" | "rsqrt" if x.low < 0:
            return None
        case "rsqrt":
            return widen(Interval(_value(op, x.high), _value(op, x.low)), _FUNCTION, 0.0)
        case _ if op in _GROWING:
            return widen(Interval(_value(op, x.low), _value(op, x.high)), _FUNCTION, 1e-6)
    found = _computed(op, x, y)
    return None if found is None else widen(found, _ROUNDED, 0.0)


def _computed(op: str, x: Interval, y: Interval) -> Interval | None:
    match op:
        case "add":
            return _sum(x, y)
        case "sub":
            return _sum(x, _negated(y))
        case "mul":
            return _product(x, y)
        case "div":
            return _product(x, _reciprocal(y))
        case "sin" | "cos" if -math.inf < x.low and x.high < math.inf:
            return Interval(-1.0, 1.0)
        case _:  # of somebody's own operator nothing is known
            return None


def squared(x: Interval, widen: Widen) -> Interval:
    ends = x.low * x.low, x.high * x.high
    return widen(Interval(0.0 if x.low <= 0 <= x.high else min(ends), max(ends)), _ROUNDED, 0.0)


def in_range(x: Interval, smallest: float, largest: float) -> Interval:
    """Wider, by the infinities and the 0 that floats have for numbers outside of these sizes."""
    low = -math.inf if x.low < -largest else 0.0 if 0 < x.low < smallest else x.low
    high = math.inf if x.high > largest else 0.0 if -smallest < x.high < 0 else x.high
    return Interval(low, high)


def _sum(x: Interval, y: Interval) -> Interval | None:
    if (x.low == -math.inf and y.high == math.inf) or (x.high == math.inf and y.low == -math.inf):
        return None
    return Interval(x.low + y.low, x.high + y.high)


def _product(x: Interval, y: Interval) -> Interval | None:
    for one, other in ((x, y), (y, x)):
        if one.low <= 0 <= one.high and (other.low == -math.inf or other.high == math.inf):
            return None
    products = [a * b for a in x for b in y]
    return Interval(min(products), max(products))


def _reciprocal(x: Interval) -> Interval:
    if x.low > 0 or x.high < 0:
        return Interval(1 / x.high, 1 / x.low)
    return Interval(-math.inf, math.inf)  # 0 may have either sign


def _negated(x: Interval) -> Interval:
    return Interval(-x.high, -x.low)


def _value(op: str, x: float) -> float:
    """A growing function at the end of an interval, which may be infinite, or where it is not defined."""
    try:
        return float(OPERATORS[op].python(x))
    except (ArithmeticError, ValueError):
        lowest = {"log": -math.inf, "log2": -math.inf, "rsqrt": math.inf}.get(op, 0.0)
        return lowest if x <= 0 else math.inf
