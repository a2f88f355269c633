"""Name what is computed more than once, so that generated code computes it once and reads well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from ...ir.expr import Call, Expr, Load, Symbol
from ...ir.walk import children, nodes, rebuild


def shared(exprs: Sequence[Expr]) -> tuple[list[tuple[str, Expr]], list[Expr]]:
    """Straight-line form: assignments in order, then `exprs` in terms of the names they define.

    An operator or tensor read whose text occurs twice or more (in one expression or in several) gets a name `t0`,
    `t1`, ... that is not used in `exprs`; each value may use the names before it. Leaves are never named.

    >>> from ...ir.parse import parse
    >>> shared([parse("tanh(score) * 2.0"), parse("1.0 - tanh(score) * tanh(score)")])
    ([('t0', tanh(score))], [t0 * 2.0, 1.0 - t0 * t0])
    """
    uses: Counter[str] = Counter()
    for expr in exprs:
        _count(expr, uses)
    fresh = _fresh_names(exprs)
    names: dict[str, Symbol] = {}
    assignments: list[tuple[str, Expr]] = []

    def visit(node: Expr) -> Expr:
        if node.text in names:
            return names[node.text]
        before = children(node)
        after = tuple(visit(child) for child in before)
        result = rebuild(node, after) if any(a is not b for a, b in zip(after, before, strict=True)) else node
        if uses[node.text] < 2:
            return result
        name = Symbol(next(fresh), node.dtype)
        assignments.append((name.name, result))
        names[node.text] = name
        return name

    return assignments, [visit(expr) for expr in exprs]


def _count(node: Expr, uses: Counter[str]) -> None:
    """Count uses of operators and reads; what is inside a repeated one is not repeated once that has a name."""
    if not isinstance(node, (Call, Load)):
        return
    uses[node.text] += 1
    if uses[node.text] == 1:
        for child in children(node):
            _count(child, uses)


def _fresh_names(exprs: Sequence[Expr]) -> Iterator[str]:
    taken = {n.tensor.name if isinstance(n, Load) else getattr(n, "name", "") for e in exprs for n in nodes(e)}
    return (name for i in count() if (name := f"t{i}") not in taken)
