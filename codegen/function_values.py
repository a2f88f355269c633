"""What is made of a variant's expressions before they are printed as functions."""

from __future__ import annotations

import math

from ..compiler.analysis.values import affine
from ..compiler.analysis.values.affine import make
from ..ir.attention import Attention
from ..ir.expr import Call, Const, Expr, Load, Scalar, Symbol, call, expression
from ..ir.operators import OPERATORS
from ..ir.walk import nodes, symbols
from .dialects import axes

LOG2_E = math.log2(math.e)


def deciding_helpers(attention: Attention) -> frozenset[str]:
    """Helpers of functions whose value decides something, as what is compared or made an int does."""
    roots = [expression(e) for e in (attention.score, attention.mask, attention.scale, attention.sink) if e is not None]
    calls = [n for root in roots for n in nodes(root) if isinstance(n, Call)]
    deciding = [n for n in calls if OPERATORS[n.op].decides]
    return frozenset(OPERATORS[n.op].helper for root in deciding for n in nodes(root) if isinstance(n, Call))


def last_of(load: Load, dimension: int) -> str:
    return f"last{dimension}_{load.tensor.name}"


def within(node: Expr) -> Expr | None:
    """Reads that stay in their tensors, also at distances that no pair has."""
    if not isinstance(node, Load):
        return None
    inside = [
        make("maximum", make("minimum", i, affine.name(last_of(node, d))), Const(0)) for d, i in enumerate(node.index)
    ]
    return Load(node.tensor, tuple(inside), where=node.where)


def is_constant(node: Expr, values: dict[str, Expr]) -> bool:
    """A result that is a plain number whatever the call: Python keeps it as such."""
    if isinstance(node, Symbol) and node.name in values:
        return is_constant(values[node.name], values)
    return isinstance(node, Const) or not (symbols(node) or any(isinstance(n, Scalar) for n in nodes(node)))


def in_base_2(node: Expr) -> Expr:
    """The node times log2(e), by factors that are one number where there are such, so that no pair is multiplied."""
    match node:
        case Const(value):
            return Const(value * LOG2_E)
        case Call("add" | "sub", (left, right)) if node.dtype == "float":
            return call(node.op, in_base_2(left), in_base_2(right))
        case Call("neg", (operand,)) if node.dtype == "float":
            return call("neg", in_base_2(operand))
        case Call("mul", (left, right)) if not axes(right):
            return call("mul", left, in_base_2(right))
        case Call("mul", (left, right)) if not axes(left):
            return call("mul", in_base_2(left), right)
    return call("mul", Const(LOG2_E), node)
