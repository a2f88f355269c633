"""Name what is computed more than once, so that generated code computes it once and reads well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from ....ir.expr import Call, Expr, Load, Symbol
from ....ir.operators import OPERATORS
from ....ir.walk import children, names, nodes, symbols, with_children


def shared(exprs: Sequence[Expr]) -> tuple[list[tuple[str, Expr]], list[Expr]]:
    """Straight-line form: assignments in order, then `exprs` in terms of the names they define.

    An operator or tensor read whose text occurs twice or more (in one expression or in several) gets a name `t0`,
    `t1`, ... that is not used in `exprs`; each value may use the names before it. Leaves are never named.

    >>> from ....ir.parse import parse
    >>> shared([parse("tanh(score) * 2.0"), parse("1.0 - tanh(score) * tanh(score)")])
    ([('t0', tanh(score))], [t0 * 2.0, 1.0 - t0 * t0])
    """
    uses: Counter[str] = Counter()
    for expr in exprs:
        _count(expr, uses)
    fresh = _unused("t", exprs)
    named: dict[str, Symbol] = {}
    assignments: list[tuple[str, Expr]] = []

    def visit(node: Expr) -> Expr:
        if node.text in named:
            return named[node.text]
        result = with_children(node, visit)
        if uses[node.text] < 2:
            return result
        name = Symbol(next(fresh), node.dtype)
        assignments.append((name.name, result))
        named[node.text] = name
        return name

    return assignments, [visit(expr) for expr in exprs]


def names_that_decide(
    assignments: Sequence[tuple[str, Expr]], results: Sequence[Expr], all_of_them: bool = False
) -> frozenset[str]:
    """Names of all that a comparison or floor reads, by way of other names too.

    assignments, results: as of `shared`; all_of_them: the results decide something themselves.

    >>> from ....ir.parse import parse
    >>> from ....ir.expr import scalar
    >>> names = {n: scalar(n, float) for n in ("t0", "t1", "t2")}
    >>> values = [("t0", parse("q_pos / 7")), ("t1", parse("t0 * 2.0", names)), ("t2", parse("q_pos / 5"))]
    >>> sorted(names_that_decide(values, [parse("floor(t1 + 1.0) * t2", names)]))
    ['q_pos', 't0', 't1']
    """
    found: set[str] = set()
    for name, value in [*(("", r) for r in results), *reversed(assignments)]:
        whole = name in found or (all_of_them and not name)
        roots = [value] if whole else [n for n in nodes(value) if isinstance(n, Call) and OPERATORS[n.op].decides]
        found.update(*map(names, roots))
    return frozenset(found)


_POSITIONS = {"q_pos", "kv_pos"}
_OF_ALL_HEADS = _POSITIONS | {"group", "q_len", "kv_len", "head_dim"}


def of_positions(exprs: Sequence[Expr]) -> tuple[list[tuple[Symbol, Expr]], list[Expr]]:
    """What does not differ by head: the largest parts of `exprs` that read both positions and no head or batch row.

    Gives names for them and `exprs` in terms of these. The name of an int that is used among floats is a float.

    >>> from ....ir.parse import parse
    >>> of_positions([parse("score + 0.5 * (kv_pos - q_pos)")])
    ([(part0, 0.5 * (kv_pos - q_pos))], [score + part0])
    """
    fresh = _unused("part", exprs)
    parts: dict[tuple[str, str], tuple[Symbol, Expr]] = {}

    def visit(node: Expr, among_floats: bool) -> Expr:
        read = symbols(node)
        if isinstance(node, (Call, Load)) and read >= _POSITIONS and read <= _OF_ALL_HEADS:
            dtype = "float" if among_floats and node.dtype == "int" else node.dtype
            if (node.text, dtype) not in parts:
                parts[node.text, dtype] = Symbol(next(fresh), dtype), node
            return parts[node.text, dtype][0]
        floats = isinstance(node, Call) and "float" in {node.dtype, *(child.dtype for child in children(node))}
        return with_children(node, lambda child: visit(child, floats))

    found = [visit(expr, expr.dtype != "bool") for expr in exprs]
    return list(parts.values()), found


def _count(node: Expr, uses: Counter[str]) -> None:
    """Count uses of operators and reads; what is inside a repeated one is not repeated once that has a name."""
    if not isinstance(node, (Call, Load)):
        return
    uses[node.text] += 1
    if uses[node.text] == 1:
        for child in children(node):
            _count(child, uses)


def _unused(prefix: str, exprs: Sequence[Expr]) -> Iterator[str]:
    taken = frozenset().union(*map(names, exprs))
    return (name for i in count() if (name := f"{prefix}{i}") not in taken)
