"""Which pairs of a query and a key read one place of a tensor: what decides how the gradient of the read is summed."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.expr import Call, Expr, Load, Symbol
from ....ir.walk import loads, rewrite, substitute, symbols
from .affine import Sum, const, difference, make, name, simplified

POSITIONS = frozenset({"q_pos", "kv_pos"})
_COMPARED = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def index_symbols(load: Load) -> frozenset[str]:
    """Names of the symbols that the index is made of, those inside other reads too."""
    return frozenset().union(*(symbols(i) for i in load.index))


def by_difference(load: Load) -> bool:
    """Whether q_pos and kv_pos reach the index as q_pos - kv_pos alone, so that a diagonal of pairs reads one place.

    >>> from ....ir.parse import parse
    >>> from ....ir.expr import tensor
    >>> by_difference(parse("t[head, maximum(2 * q_pos - 2 * kv_pos, 0)]", {"t": tensor("t", 2)}))
    True
    >>> by_difference(parse("t[q_pos // 2, kv_pos]", {"t": tensor("t", 2)}))
    False
    """
    apart = make("add", name("_apart"), Symbol("kv_pos", "int"))
    return not any(symbols(rewrite(substitute(i, {"q_pos": apart}), collected)) & POSITIONS for i in load.index)


def collected(node: Expr) -> Expr | None:
    """Equal ints in one way, so that what cancels is gone."""
    match node:
        case Call(op, (a, b)) if op in _COMPARED and a.dtype == b.dtype == "int":
            return make(op, difference(a, b), const(0))
        case Call() if node.dtype == "int":
            return simplified(node)
        case _:
            return None


def differ_by_pair(load: Load) -> bool:
    """Whether no two pairs of one head of one sequence read the same place.

    That is so where two of the indices are sums of positions, with whole coefficients that tell pairs apart.
    """
    rows = [row for row in (_coefficients(i) for i in load.index) if row is not None]
    return any(a[0] * b[1] != a[1] * b[0] for a in rows for b in rows)


def _coefficients(index: Expr) -> tuple[int, int] | None:
    """Of q_pos and kv_pos, where the index is a sum of both and of what no position changes; else None."""
    found = {"q_pos": 0, "kv_pos": 0}
    for coefficient, factors in Sum.of(index).terms.values():
        if len(factors) == 1 and isinstance(factors[0], Symbol) and factors[0].name in found:
            found[factors[0].name] = coefficient
        elif any(symbols(f) & POSITIONS for f in factors):
            return None
    return found["q_pos"], found["kv_pos"]


def rows_of_boxes(load: Load) -> int | None:
    """Of a tensor of which a tile of pairs reads a box: its dimension along queries; that along keys is the last one.

    What indexes the others is one number for a tile. None where a tile reads something else.

    >>> from ....ir.parse import parse
    >>> from ....ir.expr import tensor
    >>> rows_of_boxes(parse("b[batch, q_pos + 3, head // 2, kv_pos]", {"b": tensor("b", 4)}))
    1
    >>> rows_of_boxes(parse("b[q_pos // 2, kv_pos]", {"b": tensor("b", 2)}))
    """
    if not load.index or any(loads(i) for i in load.index):
        return None
    found = [_coefficients(i) for i in load.index]
    others = [c for c in found[:-1] if c != (0, 0)]
    return found.index((1, 0)) if found[-1] == (0, 1) and others == [(1, 0)] else None


def told_apart(load: Load) -> frozenset[str]:
    """Those of batch, head and kv_head that are an index by themselves: each value of them reads places of its own."""
    return frozenset(i.name for i in load.index if isinstance(i, Symbol)) & {"batch", "head", "kv_head"}


def differ_by_head(load: Load) -> bool:
    """Whether each value of batch, head and kv_head that the index is made of has places of its own."""
    read, apart = index_symbols(load) & {"batch", "head", "kv_head"}, told_apart(load)
    return read - apart <= ({"kv_head"} if "head" in apart else set())


def read_once(load: Load) -> bool:
    """Whether no entry is read by two pairs of whatever heads, so that nothing is summed.

    >>> from ....ir.parse import parse
    >>> from ....ir.expr import tensor
    >>> read_once(parse("b[batch, head, q_pos, kv_pos]", {"b": tensor("b", 4)}))
    True
    >>> read_once(parse("b[0, head, q_pos, kv_pos]", {"b": tensor("b", 4)}))
    False
    """
    return differ_by_pair(load) and differ_by_head(load) and not summed_over([load])


def summed_over(loads: Sequence[Load]) -> frozenset[str]:
    """Which heads the reads do not tell apart: "batch", "head" (all of them), "group" (query heads of a key head)."""
    read = frozenset().union(*(index_symbols(load) for load in loads))
    over = set() if "batch" in read else {"batch"}
    if "head" not in read:
        over.add("group" if "kv_head" in read else "head")
    return frozenset(over)
