"""How large a float of a score or of its derivative can be, at any values of what a call gives."""

from __future__ import annotations

import math

from ....ir.canonical import canonical
from ....ir.expr import Call, Const, Expr, Symbol
from .affine import at_most, const, make, simplified
from .ranges import has_64_bits

NEAR_0 = 1000.0  # of scores: roundings of a log-sum-exp of this size change weights by 2**-13 at most
_BOUNDED = {"tanh": 1.0, "sigmoid": 1.0, "sin": 1.0, "cos": 1.0}


def holds(condition: Expr) -> bool:
    """Whether a condition is certain for all run-time values, as far as sums of ints tell."""
    match condition:
        case Const(value):
            return value is True
        case Call("and", args):
            return all(map(holds, args))
        case Call("or", args):
            return any(map(holds, args))
        case Call("le", (a, b)) if a.dtype == b.dtype == "int":
            return at_most(*(canonical(simplified(x)) for x in (a, b)))
        case Call("lt", (a, b)) if a.dtype == b.dtype == "int":
            return holds(make("le", make("add", a, const(1)), b))
        case Call("not", (Call("lt", (a, b)),)):
            return holds(make("le", b, a))
        case Call("not", (Call("le", (a, b)),)):
            return holds(make("lt", b, a))
        case _:
            return False


def size(node: Expr) -> float:
    """How large a value may be, where products of query and key are taken to be small; -inf counts as exact."""
    if node.dtype == "int":
        node = simplified(node)
    match node:
        case Const(value):
            return 0.0 if value == -math.inf else abs(value)
        case Symbol("qk"):
            return 1.0
        case Symbol(name):
            return 2.0 ** _RANGES[name][1] if name in _RANGES else 2.0**31
        case Call("add" | "sub", args):
            return sum(map(size, args))
        case Call("mul", (a, b)):
            sizes = size(a), size(b)
            return 0.0 if 0.0 in sizes else sizes[0] * sizes[1]
        case Call("div", (a, Const(value))) if value:
            return size(a) / abs(value)
        case Call("neg" | "abs", (a,)):
            return size(a)
        case Call("softplus" | "logsigmoid", (a,)):  # within log 2 of a, or of 0
            return size(a) + 1.0
        case Call("minimum" | "maximum", args):
            return max(map(size, args))
        case Call("where", (_, a, b)):
            return max(size(a), size(b))
        case Call("rsqrt", (Symbol("head_dim"),)):
            return 1.0
        case Call(op):
            return _BOUNDED.get(op, math.inf)
        case _:
            return math.inf


def is_clearly_positive(node: Expr) -> bool:
    """Whether a factor is above 0 for all run-time values, in float32 too: exp(-120.0) is 0 there."""
    return _exponents(node) is not None


_RANGES = {"head_dim": (0, 12), "group": (0, 20), "q_len": (0, 31), "kv_len": (0, 31)}


def _exponents(node: Expr, empty: bool = False) -> tuple[float, float] | None:
    """Least and greatest log2 of a value above 0, of usual size; None for others, or where nothing is known."""
    match node:
        case Const(value):
            found = (math.log2(value), math.log2(value)) if 0 < value < math.inf else None
        case Symbol("q_len" | "kv_len") if empty:
            found = None
        case Symbol(name):
            found = _RANGES.get(name)
        case Call("mul" | "div" | "add" | "sqrt" | "rsqrt" as op, args):
            known = [_exponents(a, empty) for a in args]
            found = None if None in known else _combined(op, [k for k in known if k is not None])
        case _:
            found = None
    return found if found is not None and -100 <= found[0] and found[1] <= 100 else None


def _combined(op: str, known: list[tuple[float, float]]) -> tuple[float, float]:
    (low, high), (other_low, other_high) = known[0], known[-1]
    match op:
        case "mul":
            return low + other_low, high + other_high
        case "div":
            return low - other_high, high - other_low
        case "add":
            return max(low, other_low), max(high, other_high) + 1
        case "sqrt":
            return low / 2, high / 2
        case _:
            return -high / 2, -low / 2


USUAL_SIZE = 2.0**40  # what products of query and key are taken to be at most
LARGEST_FLOAT = 2.0**120  # a float32 below it is finite, and so are sums of a few
SMALLEST_FLOAT = 2.0**-120  # a float32 of this size is not 0, and so are products of a few


def largest(node: Expr, empty: bool = False) -> float:
    """A bound on the absolute value of a float and of all that it is computed from; inf where none is known.

    Below inf it is a number, and not NaN. Anything may be read from a tensor or given as a scalar. Sound where products
    of query and key have usual size. empty: lengths may be 0.
    """
    found = _bound(node, empty)
    return found if found <= LARGEST_FLOAT else math.inf


def _bound(node: Expr, empty: bool) -> float:
    match node:
        case Const(value):
            return abs(value)
        case Symbol("qk"):
            return USUAL_SIZE
        case _ if node.dtype == "int":
            return 2.0**63 if has_64_bits(node) else 2.0**31
        case Call("add" | "sub", args):
            return sum(largest(a, empty) for a in args)
        case Call("mul", (a, b)):
            sizes = largest(a, empty), largest(b, empty)
            return math.inf if math.inf in sizes else sizes[0] * sizes[1]
        case Call("div", (a, b)):
            return math.inf if (known := _exponents(b, empty)) is None else largest(a, empty) / 2.0 ** known[0]
        case Call("neg" | "abs", (a,)):
            return largest(a, empty)
        case Call("softplus" | "logsigmoid", (a,)):
            return largest(a, empty) + 1.0
        case Call("minimum" | "maximum", args) | Call("where", (_, *args)):
            return max(largest(a, empty) for a in args)
        case Call("sqrt" | "rsqrt"):
            return math.inf if (known := _exponents(node, empty)) is None else 2.0 ** known[1]
        case Call(op, (x,)) if op in _BOUNDED and largest(x, empty) < math.inf:  # tanh of NaN is NaN
            return _BOUNDED[op]
        case _:  # reads of tensors, scalars, and what may leave any bound: exp, log
            return math.inf
