"""Write equal expressions the same way, whatever their Python spelling, so that they share one cache key."""

from __future__ import annotations

import math

from .expr import INT32_MAX, Call, Const, Expr, _result
from .operators import OPERATORS, Number
from .walk import rewrite

_FLIPPED = {"gt": "lt", "ge": "le"}


def canonical(root: Expr) -> Expr:
    """An equal expression in canonical form.

    Guarantees: no `>` or `>=`; constants folded where exact; operands of commutative operators ordered by their
    text; neutral and absorbing elements of `&`, `|`, `~`, `+`, `*` gone.
    """
    return rewrite(root, _rule)


def _rule(node: Expr) -> Expr | None:
    if not isinstance(node, Call):
        return None
    op, args = node.op, node.args
    if op in _FLIPPED:
        op, args = _FLIPPED[op], args[::-1]
    operator = OPERATORS[op]
    if operator.exact and all(isinstance(a, Const) for a in args):
        value = operator.python(*(a.value for a in args))  # type: ignore[union-attr]
        if node.dtype == "float":
            value = float(value)  # minimum(0, 0.0) is a float, also where Python gives the int
        if not math.isnan(value) and (not isinstance(value, int) or abs(value) <= INT32_MAX):
            return Const(value, where=node.where)
    if operator.commutative:
        args = tuple(sorted(args, key=lambda a: a.text))
    simpler = _identity(op, args)
    if simpler is not None:
        return simpler
    if op == node.op and all(a is b for a, b in zip(args, node.args, strict=True)):
        return None
    return Call(op, args, _result(operator, args, node.where), where=node.where)


def _is(node: Expr, value: Number) -> bool:
    return isinstance(node, Const) and type(node.value) is type(value) and node.value == value


def _identity(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """x & True = x, x & False = False, x | x = x, ~~x = x, x + 0 = x, x * 1 = x, --x = x."""
    if op in ("and", "or"):
        neutral = op == "and"
        for a, b in (args, args[::-1]):
            if _is(a, neutral):
                return b
            if _is(a, not neutral):
                return a
        return args[0] if args[0].text == args[1].text else None
    if op in ("not", "neg") and isinstance(args[0], Call) and args[0].op == op:
        return args[0].args[0]
    if op in ("add", "mul"):
        for a, b in (args, args[::-1]):
            if _is(a, 0 if op == "add" else 1) or (b.dtype == "float" and _is(a, 0.0 if op == "add" else 1.0)):
                return b
    if op == "sub" and (_is(args[1], 0) or (args[0].dtype == "float" and _is(args[1], 0.0))):
        return args[0]
    return None
