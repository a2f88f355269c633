"""Which floats have a value everywhere: kernels evaluate scores at rows that are not there, too.

Positions may be any. What tensors and scalars hold is taken to be of usual size: other values
reach pairs that exist, too. Roundings are left out of account.
"""

from __future__ import annotations

import math

from ....ir.expr import Call, Const, Expr, Load, Scalar, Symbol, call
from ....ir.operators import LARGEST_FLOOR, OPERATORS, Range
from ....ir.walk import rebuild, symbols
from .floats import Interval, applied, in_range, squared

LARGEST_FLOAT = 2.0**120  # a float32 below it is finite, and so are sums of a few
SMALLEST_FLOAT = 2.0**-120  # a float32 of this size is not 0, and so are products of a few
USUAL = Interval(-(2.0**40), 2.0**40)  # where products of query and key are taken to lie
_INT = (-(2**31), 2**31)
_COUNTS = {"kv_pos": 2**31, "head": 2**20, "kv_head": 2**20, "batch": 2**31, "q_len": 2**31, "kv_len": 2**31}
_AT_LEAST_1 = {"group": 2**20, "head_dim": 2**12, "block": 2**12}


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


def largest(node: Expr, empty: bool = False) -> float:
    """A bound on the absolute value of a float; inf where none is known.

    Below inf it is a number, and not NaN. Anything may be read from a tensor or given as a scalar. Sound where products
    of query and key have usual size. empty: lengths may be 0.
    """
    found = _interval(node, 0 if empty else 1, given=None)
    return math.inf if found is None else max(-found.low, found.high)


def is_clearly_positive(node: Expr) -> bool:
    """Whether a factor is above 0 for all run-time values, in float32 too: exp(-120.0) is 0 there."""
    found = _interval(node, 1, given=None)
    return found is not None and 0 < found.low and found.high < math.inf


def _interval(node: Expr, least_length: int, given: Interval | None = USUAL) -> Interval | None:
    """All values of a float; None where NaN may be among them. given: of what tensors and scalars hold."""
    if node.dtype != "float":
        return Interval(*map(float, _ints(node, least_length)))
    match node:
        case Const(value):
            return _as_float32(Interval(value, value))
        case Symbol("qk"):
            return USUAL
        case Symbol() | Scalar() | Load():
            return given
        case Call("mul", (a, b)) if a.text == b.text:
            found = _interval(a, least_length, given)
            return None if found is None else squared(found, _as_float32)
        case Call("rsqrt", (a,)):  # 0 may have either sign
            return _interval(call("div", 1.0, call("sqrt", a)), least_length, given)
        case Call("where", (_, *args)) | Call(_, args):
            known = [_interval(a, least_length, given) for a in args]
            return None if None in known else applied(node.op, [k for k in known if k is not None], _as_float32)
        case _:
            return None


def _as_float32(x: Interval, relative: float = 0.0, absolute: float = 0.0) -> Interval:
    """Roundings are left out of account."""
    return in_range(x, SMALLEST_FLOAT, LARGEST_FLOAT)


def never_negative(node: Expr) -> bool:
    """Whether the value of an int is provably not negative, also where a length is 0."""
    return _ints(node, 0)[0] >= 0


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
