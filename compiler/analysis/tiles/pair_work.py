"""How many instructions the score and the mask of a pair of a query and a key take, by kind, as kernels print them.

Counted on expressions, each different one once. What does not depend on the pair is computed once for a row or column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ....ir.expr import Call, Const, Expr, Load
from ....ir.walk import children, loads, nodes, symbols
from ..values.places import POSITIONS, by_difference
from .results import TorchWork, Work

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
    read = {load.text: load for root in roots for load in loads(root)}.values()
    keys, queries = (sum(_read_by(load) == {axis} for load in read) for axis in ("kv_pos", "q_pos"))
    for node in _pair_nodes(roots):
        if isinstance(node, Load):
            other += _ADDRESS
            reads, gathers = (reads, gathers + 1) if by_difference(node) else (reads + 1, gathers)
        elif isinstance(node, Call):
            found = (0, 1) if _by_constant(node) else _COSTS.get(node.op, (0, 1))
            special, other = special + found[0], other + found[1]
    return Work(special, other, reads, gathers, keys, queries)


def _read_by(load: Load) -> frozenset[str]:
    """The positions that reach an index."""
    return frozenset().union(*(symbols(index) for index in load.index)) & POSITIONS


def slope_work_of(score: Expr) -> Work:
    """What the slope of a score in q.k takes besides the score: its functions again, and how these grow."""
    special = other = 0
    for node in _pair_nodes([score]):
        if isinstance(node, Call) and node.op in _COSTS and not _by_constant(node) and symbols(node) & {"qk", "score"}:
            special, other = special + _COSTS[node.op][0], other + _SLOPE + _COSTS[node.op][1]
    return Work(special, other, 0, 0)


# -- as torch computes it ----------------------------------------------------------------------------------------------
# Kinds of operators that take longer than a pass over a tile.
_KINDS = {
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log", "tanh": "tanh", "sigmoid": "sigmoid", "sqrt": "root",
    "rsqrt": "root", "sin": "sine", "cos": "sine", "where": "choice",
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod"), "compare"),
}  # fmt: skip
# Of what a derivative has besides the values that it reads: plain operations of a function's slope.
_SLOPES = {"tanh": 2, "sigmoid": 2, "div": 2, "log": 1, "log2": 2, "exp2": 1, "sqrt": 1, "rsqrt": 2}
_CHOICES = {"abs": 2, "minimum": 1, "maximum": 1, "where": 1}  # likewise: comparisons, with a choice each
_OWN_VALUE = frozenset({"exp", "exp2", "tanh", "sigmoid", "sqrt", "rsqrt", "div", "sin", "cos"})  # their slopes read it
_READ = "compare"  # a read of a tensor by index takes about as long as a comparison


def torch_work_of(roots: Iterable[Expr]) -> TorchWork:
    """What the expressions take for each pair, together, each different one once."""
    return _torch_work(_pair_nodes(roots))


def torch_slope_work_of(score: Expr) -> TorchWork:
    """What the slope of a score in q.k takes besides the score: values that it reads, and how functions grow."""
    bent = [node for node in _pair_nodes([score]) if isinstance(node, Call) and _reads_qk(node) and _bends(node)]
    read = {v.text: v for node in bent for c in children(node) for v in nodes(c)}
    read |= {node.text: node for node in bent if node.op in _OWN_VALUE}
    found = _torch_work([node for node in read.values() if _reads_qk(node)])
    plain, choices = (sum(of.get(node.op, 0) for node in bent) for of in (_SLOPES, _CHOICES))
    others = Counter(dict(found.others)) + Counter({"compare": choices, "mixed choice": choices})
    return TorchWork(found.plain + plain + len(bent), tuple(sorted(others.items())))


def _torch_work(found: Iterable[Expr]) -> TorchWork:
    plain, own, shared = 0, Counter[str](), Counter[str]()
    for node in found:
        if isinstance(node, Load):
            own[_READ] += 1
        elif isinstance(node, Call):
            kind = _KINDS.get(node.op, "plain")
            if not symbols(node) - POSITIONS:
                shared["compare" if kind == "plain" else kind] += 1  # of ints: as long as a comparison
            elif kind == "plain":
                plain += 1
            elif kind == "choice" and _reads_qk(children(node)[0]):
                own["mixed choice"] += 1  # no neighbour tells what comes next
            else:
                own[kind] += 1
    return TorchWork(plain, tuple(sorted(own.items())), tuple(sorted(shared.items())))


def _reads_qk(node: Expr) -> bool:
    return bool(symbols(node) & {"qk", "score"})


def _bends(node: Call) -> bool:
    """Whether its slope in q.k depends on the pair."""
    if node.op in ("add", "sub", "neg"):
        return False
    if node.op not in ("mul", "div"):
        return True
    first, second = children(node)
    other = second if node.op == "div" or _reads_qk(first) else first
    return _differs(symbols(other))


def _pair_nodes(roots: Iterable[Expr]) -> list[Expr]:
    """The different nodes that differ from pair to pair."""
    found = {node.text: node for root in roots for node in nodes(root)}
    return [n for n in found.values() if _differs(symbols(n))]


def _differs(names: frozenset[str]) -> bool:
    return bool(names & {"qk", "score"}) or {"q_pos", "kv_pos"} <= names


def _by_constant(node: Call) -> bool:
    """A division by a number is a product."""
    return node.op == "div" and isinstance(children(node)[1], Const)
