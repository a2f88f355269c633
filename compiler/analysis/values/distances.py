"""Parts of a score that depend on q_pos - kv_pos, heads and batch rows alone: one value serves a diagonal of pairs.

There are L + T - 1 differences of positions and L * T pairs. What costs more than a read is computed once for each
difference, into a table that kernels read by distance. Such are T5's buckets with their logarithm, a bias by distance,
or a function of it such as -slope * log(1 + |q - kv|).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....ir.expr import Call, Const, Expr, Load, Symbol
from ....ir.operators import OPERATORS
from ....ir.walk import children, nodes, rewrite, substitute, symbols, with_children
from .affine import make, name
from .places import POSITIONS, collected

DISTANCE = "distance"  # the symbol of q_pos - kv_pos in a value
A_READ = 10  # operations that a read by distance is worth: see `_operations`
_CHEAP = frozenset({"minimum", "maximum", "abs", "where"})
_LEVELLING = frozenset({"minimum", "maximum", "where"})
_DIVISIONS = frozenset({"div", "floordiv", "mod"})


@dataclass(frozen=True)
class ByDistance:
    """One such part of a score, or of a derivative of it."""

    part: Expr  # as written, over q_pos and kv_pos; a float
    value: Expr  # the same, over the symbol `distance`

    @property
    def by_batch(self) -> bool:
        return "batch" in symbols(self.part)

    @property
    def by_head(self) -> bool:
        return bool(symbols(self.part) & {"head", "kv_head"})

    @property
    def by_length(self) -> bool:
        """Whether it differs with the lengths of a sequence."""
        return bool(symbols(self.part) & {"q_len", "kv_len"})


def parts_by_distance(exprs: Sequence[Expr]) -> tuple[ByDistance, ...]:
    """The largest parts that are worth a table, each once, in order.

    >>> from ....ir.parse import parse
    >>> from ....ir.expr import tensor
    >>> found = parts_by_distance([parse("score + 0.5 * t[head, minimum(q_pos - kv_pos, 9)]", {"t": tensor("t", 2)})])
    >>> found[0].part, found[0].value
    (0.5 * t[head, minimum(q_pos - kv_pos, 9)], 0.5 * t[head, minimum(distance, 9)])
    >>> parts_by_distance([parse("score + 0.5 * (kv_pos - q_pos)"), parse("score * exp(q_pos * 1.0 + kv_pos)")])
    ()
    """
    found: dict[str, ByDistance] = {}
    for expr in exprs:
        for part, value in _largest(expr):
            if _operations(value) >= A_READ:
                found.setdefault(part.text, ByDistance(part, value))
    return tuple(found.values())


def with_tables(expr: Expr, parts: Sequence[ByDistance]) -> Expr:
    """The expression with a symbol by_distance<n> in place of the n-th part."""
    names = {part.part.text: Symbol(f"by_distance{n}", "float") for n, part in enumerate(parts)}
    return replaced(expr, names) if names else expr


def replaced(node: Expr, names: Mapping[str, Expr]) -> Expr:
    """Some nodes replaced, by their text: largest first, so that a part within another one leaves that one its name."""
    if node.text in names:
        return names[node.text]
    return with_children(node, lambda child: replaced(child, names))


def _largest(node: Expr) -> Iterator[tuple[Expr, Expr]]:
    """The largest parts of a float that read both positions, by their difference alone, with what they are of it."""
    read = symbols(node)
    if not read >= POSITIONS:
        return
    value = of_distance(node) if node.dtype == "float" and not read & {"qk", "score"} else None
    if value is not None:
        yield node, value
        return
    if isinstance(node, Call):  # not inside an index, whose values no table of floats holds
        for child in children(node):
            yield from _largest(child)


def of_distance(node: Expr) -> Expr | None:
    """The expression over the symbol `distance` in place of q_pos - kv_pos; None where positions reach it otherwise."""
    apart = make("add", name(DISTANCE), Symbol("kv_pos", "int"))
    value = rewrite(substitute(node, {"q_pos": apart}), collected)
    return None if symbols(value) & POSITIONS else value


def levels_off(value: Expr) -> bool:
    """Whether the value may stay what it is from some distance on: clamped, in the last of buckets, looked up.

    >>> from ....ir.parse import parse
    >>> levels_off(parse("minimum(q_pos - kv_pos, 9)")), levels_off(parse("abs(q_pos - kv_pos)"))
    (True, False)
    """
    match value:
        case Call(op, args):
            return op in _LEVELLING or any(map(levels_off, args))
        case Load():
            return any(isinstance(i, Load) or levels_off(i) for i in value.index)
        case _:
            return False


def _operations(value: Expr) -> int:
    """What a pair costs without a table: instructions, roughly. What one head's pairs share costs nothing."""
    differing = {node.text: node for node in nodes(value) if DISTANCE in symbols(node)}
    return sum(map(_weight, differing.values()))


def _weight(node: Expr) -> int:
    match node:
        case Load():
            return 8  # an address of 64 bits, and a conversion
        case Call(op, args):
            slow = op in _DIVISIONS or (OPERATORS[op].is_function and op not in _CHEAP)
            converted = sum(a.dtype == "int" and not isinstance(a, Const) for a in args) if node.dtype == "float" else 0
            return (8 if slow else 1) + 2 * converted
        case _:
            return 0
