"""Ranges of integers at call time: proof that no index leaves its tensor and no integer leaves 32 bits.

Sizes and scalar values are known numbers here; the rest is interval arithmetic (Moore, Interval Analysis, 1966), with
differences of positions treated as linear so that `q_pos - kv_pos + n` keeps its true range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ..ir.expr import INT32_MAX, Call, Const, Expr, Load, Scalar, Symbol
from ..ir.walk import children

Range: TypeAlias = tuple[int, int]
Ranges: TypeAlias = dict[str, Range]  # of symbols and int scalars, by name
Extents: TypeAlias = Mapping[str, tuple[int, ...]]  # shapes of tensor operands, by name

_LOADED = (-(2**30), 2**30 - 1)  # an int read from a tensor, in arithmetic
_WHOLE = (-INT32_MAX - 1, INT32_MAX)


def check_integers(root: Expr, env: Ranges, extents: Extents) -> list[str]:
    """What could go wrong with the integers of `root` for these sizes; empty when all is proven.

    env: (lowest, highest) of every symbol and int scalar. extents: the shape of every tensor operand.
    """
    return list(dict.fromkeys(_problems(root, env, extents)))


def _problems(node: Expr, env: Ranges, extents: Extents) -> Iterator[str]:
    for child in children(node):
        yield from _problems(child, env, extents)
    if isinstance(node, Load):
        yield from _index_problems(node, env, extents)
    elif isinstance(node, Call):
        if node.op in ("floordiv", "mod"):
            low, high = range_of(node.args[1], env)
            if low <= 0 <= high:
                yield f"`{node}`: the divisor `{node.args[1]}` can be 0 in this call (its range is {low} to {high})"
        if node.dtype == "int":
            low, high = range_of(node, env)
            if low < _WHOLE[0] or high > _WHOLE[1]:
                yield (
                    f"integer overflow: `{node}` reaches {low if low < _WHOLE[0] else high} in this call, beyond 32 bits; "
                    "use a smaller value, or compare differences of positions instead of sums"
                )


def _index_problems(node: Load, env: Ranges, extents: Extents) -> Iterator[str]:
    for d, (index, extent) in enumerate(zip(node.index, extents[node.tensor.name])):
        low, high = range_of(index, env)
        if low < 0 or high >= extent:
            yield (
                f"`{node}`: index {d}, `{index}`, ranges from {low} to {high} in this call, but {node.tensor.name} has "
                f"{extent} entries there; pass a larger tensor, or clamp the index: "
                f"weft.minimum(weft.maximum({index}, 0), {extent - 1})"
            )


def range_of(node: Expr, env: Ranges) -> Range:
    """(lowest, highest) value that an int expression can take."""
    terms = _linear(node)
    if terms is not None:
        low = high = terms.pop("", 0)
        for name, factor in terms.items():
            a, b = env[name][0] * factor, env[name][1] * factor
            low, high = low + min(a, b), high + max(a, b)
        return low, high
    match node:
        case Load():
            return _LOADED
        case Call("where", (_, a, b)):
            x, y = range_of(a, env), range_of(b, env)
            return min(x[0], y[0]), max(x[1], y[1])
        case Call("floor"):
            return _LOADED
        case Call(op, args):
            return _apply(op, [range_of(a, env) for a in args])
        case _:
            return _WHOLE


def _linear(node: Expr) -> dict[str, int] | None:
    """Coefficients by name ("" the constant) of a sum of symbols and scalars times constants; None for anything else."""
    match node:
        case Const(value) if isinstance(value, int):
            return {"": int(value)}
        case Symbol(name) | Scalar(name):
            return {name: 1}
        case Call("add" | "sub" as op, (a, b)):
            left, right = _linear(a), _linear(b)
            if left is None or right is None:
                return None
            sign = 1 if op == "add" else -1
            return {n: left.get(n, 0) + sign * right.get(n, 0) for n in {**left, **right}}
        case Call("neg", (a,)):
            inner = _linear(a)
            return None if inner is None else {n: -c for n, c in inner.items()}
        case Call("mul", (a, b)):
            for factor, other in ((a, b), (b, a)):
                inner = _linear(other)
                if isinstance(factor, Const) and isinstance(factor.value, int) and inner is not None:
                    return {n: c * factor.value for n, c in inner.items()}
            return None
        case _:
            return None


def _apply(op: str, args: list[Range]) -> Range:
    (a, b), (c, d) = args[0], args[-1]
    match op:
        case "add":
            return a + c, b + d
        case "sub":
            return a - d, b - c
        case "neg":
            return -b, -a
        case "mul":
            products = (a * c, a * d, b * c, b * d)
            return min(products), max(products)
        case "minimum":
            return min(a, c), min(b, d)
        case "maximum":
            return max(a, c), max(b, d)
        case "abs":
            return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
        case "floordiv":
            divisors = [x for x in (c, d, -1, 1) if x and c <= x <= d] or [1]
            quotients = [x // y for x in (a, b) for y in divisors]
            return min(quotients), max(quotients)
        case "mod":
            if 0 <= a and b < c:
                return a, b
            return (0 if c > 0 else min(c + 1, 0)), max(d - 1, 0)
        case _:
            return _WHOLE
