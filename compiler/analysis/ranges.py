"""Ranges of integers at call time: proof that no index leaves its tensor and no integer leaves 32 bits.

Sizes and scalar values are known numbers here; the rest is interval arithmetic (Moore, Interval Analysis, 1966). Sums
of positions are kept linear, so that `q_pos - kv_pos + n` has its true range. Each expression is taken apart once;
a call with new lengths only does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ...ir.expr import INT32_MAX, Call, Const, Expr, Load, Scalar, Symbol
from ...ir.operators import OPERATORS, Range
from ...ir.walk import children, nodes

Ranges: TypeAlias = dict[str, Range]  # of symbols and int scalars, by name
Extents: TypeAlias = Mapping[str, tuple[int, ...]]  # shapes of tensor operands, by name

# An int read from a tensor, or made from a float, can be anything; in arithmetic it is trusted to be below 2**30 in
# size, and in an index and as a divisor it is not trusted.
_LOADED = (-(2**30) + 1, 2**30 - 1)
_WHOLE = (-INT32_MAX - 1, INT32_MAX)


def check_integers(root: Expr, env: Ranges, extents: Extents) -> list[str]:
    """What could go wrong with the integers of `root` for these sizes; empty when all is proven.

    env: range of every symbol and int scalar. extents: the shape of every tensor operand. Problems are integers beyond
    32 bits, divisors that can be 0, and indices that can leave their tensor.
    """
    if not computes_ints(root):
        return []
    steps = _steps(root)
    return list(dict.fromkeys(_problems(steps, _ranges(steps, env), extents)))


@lru_cache(maxsize=4096)
def computes_ints(root: Expr) -> bool:
    """Whether sizes could make it wrong; not where ints are compared and chosen among only, as in `kv_pos <= q_pos`."""
    computed = (isinstance(n, Call) and n.dtype == "int" and not OPERATORS[n.op].chooses for n in nodes(root))
    return any(computed) or any(isinstance(n, Load) for n in nodes(root))


def range_of(node: Expr, env: Ranges) -> Range:
    """The range of an int expression."""
    return _ranges(_steps(node), env)[-1]


@dataclass(frozen=True)
class _Step:
    """One node of an expression, after its operands."""

    node: Expr
    operands: tuple[int, ...]  # steps of its operands
    sum: tuple[tuple[str, int], ...] | None  # coefficients by name, "" for the number, where it is a linear sum


@lru_cache(maxsize=4096)
def _steps(root: Expr) -> tuple[_Step, ...]:
    """The nodes of an expression, operands first, the root last; equal nodes once."""
    steps: list[_Step] = []
    places: dict[tuple[str, str], int] = {}

    def visit(node: Expr) -> int:
        key = (type(node).__name__, node.text)
        if key not in places:
            operands = tuple(visit(c) for c in children(node))
            linear = _linear(node) if node.dtype == "int" else None
            steps.append(_Step(node, operands, None if linear is None else tuple(linear.items())))
            places[key] = len(steps) - 1
        return places[key]

    visit(root)
    return tuple(steps)


def _ranges(steps: tuple[_Step, ...], env: Ranges) -> list[Range]:
    ranges: list[Range] = []
    for step in steps:
        ranges.append(_range(step, [ranges[n] for n in step.operands], env))
    return ranges


def _range(step: _Step, operands: list[Range], env: Ranges) -> Range:
    if step.sum is not None:
        return _sum_range(step.sum, env)
    node = step.node
    if node.dtype != "int":
        return _WHOLE
    if isinstance(node, Call) and not OPERATORS[node.op].makes_ints:
        rule = OPERATORS[node.op].int_range
        return rule(*operands) if rule else _WHOLE
    return _LOADED


def _sum_range(terms: tuple[tuple[str, int], ...], env: Ranges) -> Range:
    low = high = 0
    for name, factor in terms:
        a, b = env[name] if name else (1, 1)
        low, high = low + min(a * factor, b * factor), high + max(a * factor, b * factor)
    return low, high


def _problems(steps: tuple[_Step, ...], ranges: list[Range], extents: Extents) -> Iterator[str]:
    for step, (low, high) in zip(steps, ranges):
        node = step.node
        operands = [ranges[n] for n in step.operands]
        if isinstance(node, Load):
            yield from _index_problems(node, operands, extents)
        elif isinstance(node, Call) and node.dtype == "int":
            if node.op in ("floordiv", "mod") and operands[1][0] <= 0 <= operands[1][1]:
                yield (
                    f"`{node}`: the divisor `{node.args[1]}` can be 0 in this call (it ranges from {operands[1][0]} to "
                    f"{operands[1][1]}); give a positive value, or use weft.maximum({node.args[1]}, 1)"
                )
            if low < _WHOLE[0] or high > _WHOLE[1]:
                yield (
                    f"integer overflow: `{node}` reaches {low if low < _WHOLE[0] else high} in this call, beyond 32 "
                    "bits; use smaller values, compare differences of positions instead of sums, or write 1.0 * ... "
                    "to compute in floats"
                )


def _index_problems(node: Load, indices: list[Range], extents: Extents) -> Iterator[str]:
    tensor = node.tensor.name
    for d, (index, (low, high), extent) in enumerate(zip(node.index, indices, extents[tensor])):
        if isinstance(index, Load) or low < 0 or high >= extent:
            found = "is read from a tensor" if isinstance(index, Load) else f"ranges from {low} to {high} in this call"
            yield (
                f"`{node}`: index {d}, `{index}`, {found}, but {tensor} has {extent} entries there; pass a larger "
                f"tensor, or clamp the index: weft.minimum(weft.maximum({index}, 0), {extent - 1})"
            )


def _linear(node: Expr) -> dict[str, int] | None:
    """Coefficients by name ("" the number) of a sum of symbols and scalars times numbers; None for anything else."""
    match node:
        case Const(value):
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
        case Call("mul", (Const(factor), other)) | Call("mul", (other, Const(factor))):
            inner = _linear(other)
            return None if inner is None else {n: c * int(factor) for n, c in inner.items()}
        case _:
            return None
