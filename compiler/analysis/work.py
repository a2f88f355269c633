"""How many instructions the score and the mask of a pair of a query and a key take, by kind, as kernels print them.

Counted on expressions, each different one once. What does not depend on the pair is computed once for a row or column.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ir.expr import Call, Const, Expr, Load
from ...ir.walk import children, loads, nodes, symbols
from .places import POSITIONS, by_difference
from .records import Work

# (results of special function units, other instructions) of operators; any other one is an instruction.
_COSTS = {
    "exp": (1, 1), "exp2": (1, 0), "log": (1, 1), "log2": (1, 0), "tanh": (1, 0), "sigmoid": (2, 3), "sqrt": (1, 2),
    "rsqrt": (1, 0), "softplus": (1, 12), "logsigmoid": (1, 14), "sin": (1, 9), "cos": (1, 9), "div": (1, 6),
    "floordiv": (1, 6), "mod": (1, 8),
}  # fmt: skip
_ADDRESS = 2  # instructions of a read's address
_SLOPE = 3  # of the slope of a function, which has its value again


def work_of(roots: Iterable[Expr], tables: int = 0) -> Work:
    """What the expressions take for each pair, together. tables: how many are read by distance besides."""
    roots = tuple(roots)
    special, other, reads, gathers = 0, _ADDRESS * tables, 0, tables
    keys, queries = (sum(_read_by(load) == {axis} for load in _loads(roots)) for axis in ("kv_pos", "q_pos"))
    for node in _of_pairs(roots):
        if isinstance(node, Load):
            other += _ADDRESS
            reads, gathers = (reads, gathers + 1) if by_difference(node) else (reads + 1, gathers)
        elif isinstance(node, Call):
            found = (0, 1) if _by_constant(node) else _COSTS.get(node.op, (0, 1))
            special, other = special + found[0], other + found[1]
    return Work(special, other, reads, gathers, keys, queries)


def _loads(roots: Iterable[Expr]) -> list[Load]:
    return list({load.text: load for root in roots for load in loads(root)}.values())


def _read_by(load: Load) -> frozenset[str]:
    """The positions that reach an index."""
    return frozenset().union(*(symbols(index) for index in load.index)) & POSITIONS


def slope_work_of(score: Expr) -> Work:
    """What the slope of a score in q.k takes besides the score: its functions again, and how these grow."""
    special = other = 0
    for node in _of_pairs([score]):
        if isinstance(node, Call) and node.op in _COSTS and not _by_constant(node) and symbols(node) & {"qk", "score"}:
            special, other = special + _COSTS[node.op][0], other + _SLOPE + _COSTS[node.op][1]
    return Work(special, other, 0, 0)


def _of_pairs(roots: Iterable[Expr]) -> list[Expr]:
    """The different nodes that differ from pair to pair."""
    found = {node.text: node for root in roots for node in nodes(root)}
    return [n for n in found.values() if _differs(symbols(n))]


def _differs(names: frozenset[str]) -> bool:
    return bool(names & {"qk", "score"}) or {"q_pos", "kv_pos"} <= names


def _by_constant(node: Call) -> bool:
    """A division by a number is a product."""
    return node.op == "div" and isinstance(children(node)[1], Const)
