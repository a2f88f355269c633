"""How large a score can be, at any values of what a call gives."""

from __future__ import annotations

import math

from ....ir.canonical import canonical
from ....ir.expr import Call, Const, Expr, Symbol
from .affine import at_most, const, make, simplified

NEAR_0 = 1000.0  # of scores: roundings of a log-sum-exp of this size change weights by 2**-13 at most
_BITS = {"head_dim": 12, "group": 20, "q_len": 31, "kv_len": 31}
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
            return 2.0 ** _BITS.get(name, 31)
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
