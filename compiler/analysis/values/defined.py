"""Which floats have a value everywhere: kernels evaluate scores at rows that are not there, too.

An interval holds all values that a float may take. Its ends are infinite where an infinity is among them; where NaN
may be, there is none. Positions may be any. What tensors and scalars hold is taken to be of usual size: other values
reach pairs that exist, too. Roundings are left out of account.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ....ir.expr import Call, Const, Expr, Load, Scalar, Symbol, call
from ....ir.operators import LARGEST_FLOOR, OPERATORS, Range
from ....ir.walk import rebuild, symbols
from .magnitudes import LARGEST_FLOAT, SMALLEST_FLOAT, USUAL_SIZE


class Interval(NamedTuple):
    """All values between two, which may be among them; neither is NaN."""

    low: float
    high: float


_LN_2 = math.log(2.0)
_ANY = Interval(-math.inf, math.inf)
_INT = (-(2**31), 2**31)
_COUNTS = {"kv_pos": 2**31, "head": 2**20, "kv_head": 2**20, "batch": 2**31, "q_len": 2**31, "kv_len": 2**31}
_AT_LEAST_1 = {"group": 2**20, "head_dim": 2**12}


def is_below_inf(node: Expr) -> bool:
    """Whether a float is a number, or -inf, wherever it is computed, where no sequence is empty."""
    found = _interval(node, 1)
    return found is not None and found.high < math.inf


def is_below_inf_at_last(node: Expr) -> bool:
    """The same at the position of a row that exists, whose terms and factors without q.k are numbers."""
    return is_below_inf(_given_positions(node, {}))


def _given_positions(node: Expr, names: dict[str, Expr]) -> Expr:
    """The node with operands in place of its terms, factors and divisors without q.k: those of a row that exists.

    Not of what is inside a function: tanh of an infinity is a number, but that of 0 times infinity is not.
    """
    if node.dtype == "float" and "qk" not in symbols(node):
        return names.setdefault(node.text, Scalar(f"given{len(names)}", "float"))
    match node:
        case Call("div", (a, b)) if "qk" not in symbols(b):
            return call("mul", *(_given_positions(x, names) for x in (a, call("div", 1.0, b))))
        case Call("where", (condition, a, b)) if "qk" not in symbols(condition):
            return call("where", condition, _given_positions(a, names), _given_positions(b, names))
        case Call("add" | "sub" | "neg" | "mul", args) if node.dtype == "float":
            return rebuild(node, tuple(_given_positions(a, names) for a in args))
        case _:
            return node


def is_number(node: Expr) -> bool:
    """Whether a float is neither infinite nor NaN, whatever it is computed of, also where a length is 0."""
    found = _interval(node, 0)
    return found is not None and -math.inf < found.low and found.high < math.inf


def _interval(node: Expr, least_length: int) -> Interval | None:
    """All values of a float; None where NaN may be among them."""
    if node.dtype != "float":
        return Interval(*map(float, _ints(node, least_length)))
    match node:
        case Const(value):
            return Interval(value, value)
        case Symbol() | Scalar() | Load():  # q.k, and what is given
            return Interval(-USUAL_SIZE, USUAL_SIZE)
        case Call("mul", (a, b)) if a.text == b.text:
            found = _interval(a, least_length)
            return None if found is None else _squared(found)
        case Call("where", (_, *args)) | Call(_, args):
            known = [_interval(a, least_length) for a in args]
            found = None if None in known else _of(node.op, [k for k in known if k is not None])
            return None if found is None else _as_float32(found)
        case _:
            return None


def _of(op: str, known: Sequence[Interval]) -> Interval | None:
    """Of an operator, from the intervals of its operands."""
    x, y = known[0], known[-1]
    match op:
        case "add":
            return _sum(x, y)
        case "sub":
            return _sum(x, _negated(y))
        case "neg":
            return _negated(x)
        case "mul":
            return _product(x, y)
        case "div":
            return _product(x, _reciprocal(y))
        case "abs":
            return Interval(max(x.low, -x.high, 0.0), max(-x.low, x.high))
        case "minimum":
            return Interval(min(x.low, y.low), min(x.high, y.high))
        case "maximum":
            return Interval(max(x.low, y.low), max(x.high, y.high))
        case "where":
            return Interval(min(x.low, y.low), max(x.high, y.high))
        case _:
            return _of_function(op, x)


def _of_function(op: str, x: Interval) -> Interval | None:
    match op:
        case "exp":
            return Interval(_power(math.e, x.low), _power(math.e, x.high))
        case "exp2":
            return Interval(_power(2.0, x.low), _power(2.0, x.high))
        case "log":
            return Interval(_log(x.low), _log(x.high)) if x.low >= 0 else None
        case "log2":
            return Interval(_log(x.low) / _LN_2, _log(x.high) / _LN_2) if x.low >= 0 else None
        case "sqrt":
            return Interval(math.sqrt(x.low), math.sqrt(x.high)) if x.low >= 0 else None
        case "rsqrt":
            return _reciprocal(Interval(math.sqrt(x.low), math.sqrt(x.high))) if x.low >= 0 else None
        case "tanh":
            return Interval(-1.0, 1.0)
        case "sigmoid":
            return Interval(0.0, 1.0)
        case "softplus" | "logsigmoid":  # they grow, and have a value everywhere
            low, high = (float(OPERATORS[op].python(end)) for end in x)
            return Interval(low, high)
        case "sin" | "cos":
            return Interval(-1.0, 1.0) if -math.inf < x.low and x.high < math.inf else None
        case _:  # of somebody's own operator nothing is known
            return None


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


def _squared(x: Interval) -> Interval:
    ends = x.low * x.low, x.high * x.high
    return _as_float32(Interval(0.0 if x.low <= 0 <= x.high else min(ends), max(ends)))


def _reciprocal(x: Interval) -> Interval:
    if x.low > 0 or x.high < 0:
        return _as_float32(Interval(1 / x.high, 1 / x.low))
    return _ANY  # 0 may have either sign


def _negated(x: Interval) -> Interval:
    return Interval(-x.high, -x.low)


def _power(base: float, x: float) -> float:
    try:
        return base**x
    except OverflowError:
        return math.inf


def _log(x: float) -> float:
    return math.log(x) if 0 < x < math.inf else math.inf if x else -math.inf


def _as_float32(x: Interval) -> Interval:
    """Wider, by the infinities and the 0 that floats of 32 bits may be instead."""
    low = -math.inf if x.low < -LARGEST_FLOAT else 0.0 if 0 < x.low < SMALLEST_FLOAT else x.low
    high = math.inf if x.high > LARGEST_FLOAT else 0.0 if -SMALLEST_FLOAT < x.high < 0 else x.high
    return Interval(low, high)


def _ints(node: Expr, least_length: int) -> Range:
    """The least and greatest value of an int, or 0 and 1 of a bool."""
    match node:
        case Const(value):
            return int(value), int(value)
        case Symbol(name) if name in _AT_LEAST_1:
            return 1, _AT_LEAST_1[name]
        case Symbol(name) if name in _COUNTS:
            return (least_length if name.endswith("_len") else 0), _COUNTS[name]
        case Call(op, args) if OPERATORS[op].makes_ints and args[0].dtype == "float":
            return -LARGEST_FLOOR, LARGEST_FLOOR
        case Call(op, args) if (rule := OPERATORS[op].int_range) is not None and node.dtype == "int":
            return rule(*(_ints(a, least_length) for a in args))
        case Load():
            return -(2**63), 2**63
        case _:
            return (0, 1) if node.dtype == "bool" else _INT
