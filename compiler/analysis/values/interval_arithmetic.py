"""Least and greatest values of integers while a position runs over a tile, as expressions of the tile's ends.

Interval arithmetic (Moore, Interval Analysis, 1966) on sums of products, `//`, `%`, min, max, abs and where.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ....ir.expr import Call, Expr, Symbol
from ....ir.walk import symbols
from .affine import Sum, choose, const, is_positive, make, maximum, minimum, plus, simplified

Range: TypeAlias = tuple[Expr, Expr]
_POSITIONS = frozenset({"q_pos", "kv_pos"})


@dataclass(frozen=True)
class Tile:
    """What interval arithmetic knows: the other position, its range, and what is assumed positive."""

    position: str
    first: Expr
    last: Expr
    positive: frozenset[str] = frozenset()

    def assuming(self, positive: tuple[Expr, ...]) -> Tile:
        """The same tile where these expressions are known to be positive."""
        return replace(self, positive=frozenset(e.text for e in positive))


def range_over(node: Expr, tile: Tile) -> Range | None:
    """Least and greatest value of an integer expression while the other position runs over the tile; None if unknown.

    Divisors are positive here: they are numbers, or assumed so by the literal that holds them.
    """
    if tile.position not in symbols(node) or node.dtype != "int":
        return node, node
    total = Sum.of(node)
    low, high = Sum({}), Sum({})
    for coefficient, factors in total.terms.values():
        part = _product_range(coefficient, factors, tile)
        if part is None:
            return None
        low, high = low + Sum.of(part[0]), high + Sum.of(part[1])
    return low.expr, high.expr


def _product_range(coefficient: int, factors: tuple[Expr, ...], tile: Tile) -> Range | None:
    fixed: Expr = const(coefficient)
    moving: list[Range] = []
    for factor in factors:
        if tile.position not in symbols(factor):
            fixed = simplified(make("mul", fixed, factor))
            continue
        found = _atom_range(factor, tile)
        if found is None:
            return None
        moving.append(found)
    result = (fixed, fixed)
    for n, part in enumerate(moving):
        result = _times(fixed, part, tile) if n == 0 else _corners(result, part)
    return result


def _times(fixed: Expr, part: Range, tile: Tile) -> Range:
    low, high = (simplified(make("mul", fixed, p)) for p in part)
    sign = Sum.of(fixed)
    if sign.value is not None or _positive(sign, tile):
        return (low, high) if sign.value is None or sign.value >= 0 else (high, low)
    return minimum(low, high), maximum(low, high)


def _positive(total: Sum, tile: Tile) -> bool:
    known = all(c > 0 and all(f.text in tile.positive for f in factors) for c, factors in total.terms.values())
    return known or total.expr.text in tile.positive or is_positive(total.expr)


def _corners(a: Range, b: Range) -> Range:
    products = [simplified(make("mul", x, y)) for x in a for y in b]
    return minimum(*products), maximum(*products)


def _atom_range(atom: Expr, tile: Tile) -> Range | None:
    if isinstance(atom, Symbol):
        return tile.first, tile.last
    if not isinstance(atom, Call):
        return None
    match atom.op:
        case "floordiv":
            a = range_over(atom.args[0], tile)
            return a and tuple(simplified(make("floordiv", x, atom.args[1])) for x in a)  # type: ignore[return-value]
        case "mod":
            a = range_over(atom.args[0], tile)
            return a and _mod_range(a, atom.args[1])
        case "minimum" | "maximum":
            a, b = (range_over(x, tile) for x in atom.args)
            choice = minimum if atom.op == "minimum" else maximum
            return None if a is None or b is None else (choice(a[0], b[0]), choice(a[1], b[1]))
        case "abs":
            a = range_over(atom.args[0], tile)
            return a and _abs_range(a)
        case "where":
            a, b = (range_over(x, tile) for x in atom.args[1:])
            if a is None or b is None or symbols(atom.args[0]) & _POSITIONS:
                return None
            return choose(atom.args[0], a[0], b[0]), choose(atom.args[0], a[1], b[1])
        case _:
            return None


def _mod_range(a: Range, d: Expr) -> Range:
    """Within one period the remainder grows; over a border it can be anything from 0 to d - 1."""
    periods = [simplified(make("floordiv", x, d)) for x in a]
    within = make("eq", *periods) if periods[0].text != periods[1].text else const(True)
    low, high = (simplified(make("mod", x, d)) for x in a)
    return choose(within, low, const(0)), choose(within, high, plus(d, -1))


def _abs_range(a: Range) -> Range:
    low, high = a
    minus_low, minus_high = (simplified(make("neg", x)) for x in a)
    return maximum(low, minus_high, const(0)), maximum(minus_low, high)
