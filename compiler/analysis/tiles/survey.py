"""Derive from a mask what to measure of a tile of queries and a tile of keys, to see what their pairs can be.

    doc[q_pos] == doc[kv_pos]   -->   some pair may be visible where (q0_low <= kv0_high) & (kv0_low <= q0_high)

Tile bounds (`bounds.py`) follow from positions alone; here the least and greatest value of what the mask reads in each
tile is measured first. The largest parts of the mask that read one position are measured, so whatever arithmetic lies
inside them is the mask's own; what joins the two sides is decided by interval arithmetic (Moore, Interval Analysis,
1966) on numbers, and by a pair (certain, possible) on bools.

    blocks[head, q_pos // 128, kv_pos // 128]   -->   cells0_any, and certainly where cells0_all

Where a mask reads a tensor by both positions, a condition that is the same in a block of pairs is looked at once a
block, a cell; one that differs from pair to pair is left to whoever looks at all pairs of two tiles (`by_pair`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TypeAlias

from ....ir.canonical import canonical
from ....ir.expr import Call, Const, Expr, Load, Symbol
from ....ir.operators import OPERATORS
from ....ir.walk import children, loads, nodes, substitute, symbols
from ..values.affine import choose, const, is_bool, make, name

Range: TypeAlias = tuple[Expr, Expr]  # least and greatest value over both tiles
_AXES = {"q_pos": "q", "kv_pos": "kv"}
_FLIPPED = {"gt": "lt", "ge": "le"}
_LARGEST = 1000  # nodes; alternatives inside alternatives double, and a longer decision costs more than a tile
CELL = 64  # queries and keys of a block of pairs that is looked at whole, whatever the tiles of the kernels
LEAST_CELL = 64  # pairs of a cell that is worth looking at by itself


@dataclass(frozen=True)
class Cells:
    """A condition that is the same for all pairs with equal q_pos // q and equal kv_pos // kv."""

    condition: Expr  # bool, of both positions, heads, batch, lengths and operands
    q: int
    kv: int


@dataclass(frozen=True)
class Survey:
    """What to measure of a tile of queries and a tile of keys, and what follows for the pair.

    Symbols q<n>_low and q<n>_high stand for the least and greatest value of q_values[n] over the tile's real positions,
    kv<n>_low and kv<n>_high for those of kv_values[n]; bools count as 0 and 1. Of cells[n], cells<n>_any and
    cells<n>_all say whether it holds for some, and for all, real pairs. Each tile holds a position at least.
    Sound where a value is computed as in the mask, in the mask's width, and only then widened to 64 bits: a call is
    checked for sums of values in 32 bits, and a sum of ends may be larger.
    """

    q_values: tuple[Expr, ...]  # int or bool, of q_pos, heads, batch, lengths and operands; sorted by text
    kv_values: tuple[Expr, ...]  # the same of kv_pos
    possible: Expr  # bool, over those symbols, heads, batch, lengths and operands: some pair may be visible
    certain: Expr  # bool, likewise: every pair is visible
    cells: tuple[Cells, ...] = ()  # sorted by text
    by_pair: bool = False  # what is left over depends on what a tensor holds for each pair
    # (n, m): a pair is visible only where q_values[n] and kv_values[m], ints and no positions, are equal; sorted
    equal: tuple[tuple[int, int], ...] = ()

    @property
    def decides(self) -> bool:
        """Whether anything is known of two tiles before their pairs are looked at."""
        return not (is_bool(self.possible, True) and is_bool(self.certain, False))

    @property
    def joins_reads(self) -> bool:
        """Whether a tensor is read by both positions: what a tile visits then lies anywhere."""
        return bool(self.cells) or self.by_pair


def survey(mask: Expr) -> Survey | None:
    """What to measure for this mask; None where no pair of tiles could be left out.

    mask: a canonical bool expression of a verified variant. For all values of operands and lengths that a call accepts,
    `possible` is false only where no pair of the two tiles is visible, `certain` true only where every pair is.
    """
    surveyor = _Surveyor(looks=reads_pairs(mask))
    found = surveyor.truth(mask)
    if is_bool(found.possible, True) and not surveyor.by_pair:
        return None
    published = surveyor.published(found)
    return replace(published, equal=tuple(sorted(_equalities(mask, published))))


def _equalities(node: Expr, found: Survey) -> Iterator[tuple[int, int]]:
    """By number, the measured values whose equality this condition asks for, whatever else it asks for."""
    match node:
        case Call("and", (a, b)):
            yield from _equalities(a, found)
            yield from _equalities(b, found)
        case Call("eq", (a, b)) if {a.dtype, b.dtype} == {"int"}:
            for x, y in ((a, b), (b, a)):
                if not isinstance(x, Symbol) and not isinstance(y, Symbol):
                    n, m = _number_of(x, found.q_values), _number_of(y, found.kv_values)
                    if n is not None and m is not None:
                        yield n, m


def _number_of(node: Expr, values: Sequence[Expr]) -> int | None:
    return next((n for n, value in enumerate(values) if value.text == node.text), None)


# -- cells ------------------------------------------------------------------------------------------------------------
def cell_size(node: Expr, position: str) -> int:
    """The largest c found such that the value depends on the position as position // c alone; 0: not at all."""
    match node:
        case Symbol(name):
            return 1 if name == position else 0
        case Call("floordiv", (a, Const(c))) if isinstance(c, int) and c > 0:
            own = cell_size(a, position)
            # of a multiple of a position, or of a sum, only whole positions are known to agree
            return own * c if _is_divided(a) else own
        case _:
            return gcd(*(cell_size(child, position) for child in children(node)))


def _is_divided(node: Expr) -> bool:
    """Whether it is a position, or one divided by constants: x // a // b is x // (a * b)."""
    match node:
        case Symbol(name):
            return name in _AXES
        case Call("floordiv", (a, Const(c))) if isinstance(c, int) and c > 0:
            return _is_divided(a)
        case _:
            return False


def reads_pairs(node: Expr) -> bool:
    """Whether it reads a tensor by an index that has both positions."""
    both = _AXES.keys()
    return any(both <= set().union(*map(symbols, load.index)) for load in loads(node))


# -- conditions -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Truth:
    """What is known of a condition: it certainly holds for every pair, it possibly holds for some."""

    certain: Expr
    possible: Expr

    @property
    def unknown(self) -> bool:
        return is_bool(self.possible, True) and is_bool(self.certain, False)

    def __invert__(self) -> _Truth:
        return _Truth(_negated(self.possible), _negated(self.certain))

    def __and__(self, other: _Truth) -> _Truth:
        return _Truth(make("and", self.certain, other.certain), make("and", self.possible, other.possible))

    def __or__(self, other: _Truth) -> _Truth:
        return _Truth(make("or", self.certain, other.certain), make("or", self.possible, other.possible))


_UNKNOWN = _Truth(const(False), const(True))


def _negated(node: Expr) -> Expr:
    """~node, with the negation at the leaves; not inside comparisons of floats, which NaN makes false both ways."""
    match node:
        case Call("not", (a,)):
            return a
        case Call("and" | "or" as op, (a, b)):
            return make("or" if op == "and" else "and", _negated(a), _negated(b))
        case Call("lt" | "le" as op, (a, b)) if {a.dtype, b.dtype} == {"int"}:
            return make("le" if op == "lt" else "lt", b, a)
        case _:
            return make("not", node)


def _choice(condition: _Truth, a: _Truth, b: _Truth) -> _Truth:
    """where(condition, a, b): certain also where both are and the condition is unknown."""
    either = (condition & a) | (~condition & b)
    return _Truth(((~condition | a) & (condition | b)).certain, either.possible)


def _compared(op: str, a: Range, b: Range) -> _Truth:
    """a < b or a <= b of two ranges."""
    return _Truth(_holds(op, a[1], b[0]), _holds(op, a[0], b[1]))


def _holds(op: str, a: Expr, b: Expr) -> Expr:
    return const(op == "le") if a.text == b.text else make(op, a, b)


# -- ranges -----------------------------------------------------------------------------------------------------------
def _extreme(op: str, a: Expr, b: Expr) -> Expr:
    return a if a.text == b.text else make(op, a, b)


def _arithmetic(op: str, args: list[Range]) -> Range | None:
    """The range of an operator that grows in every operand, or falls; None for any other."""
    match op, args:
        case "add", [(a, b), (c, d)]:
            return make("add", a, c), make("add", b, d)
        case "sub", [(a, b), (c, d)]:
            return make("sub", a, d), make("sub", b, c)
        case "neg", [(a, b)]:
            return make("neg", b), make("neg", a)
        case "minimum" | "maximum", [(a, b), (c, d)]:
            return _extreme(op, a, c), _extreme(op, b, d)
        case _:
            return None


def _may_wrap(node: Call) -> bool:
    """Whether a sum may leave its width: a call proves that none does, but for ints from tensors and from floats."""
    if node.op not in ("add", "sub", "neg"):
        return False
    return any(isinstance(n, Load) or (isinstance(n, Call) and OPERATORS[n.op].makes_ints) for n in nodes(node))


def _small(*exprs: Expr) -> bool:
    return sum(1 for e in exprs for _ in nodes(e)) <= _LARGEST


# -- the mask over two tiles ------------------------------------------------------------------------------------------
@dataclass
class _Surveyor:
    """Decides conditions over two tiles, and collects what must be measured for that.

    Names start with an underscore while they are compared by their text, so that no operand's name can equal one.
    """

    looks: bool  # at cells and pairs: where a tensor is read by both positions
    values: dict[str, list[Expr]] = field(default_factory=lambda: {"q": [], "kv": []})
    cells: list[Cells] = field(default_factory=list)
    by_pair: bool = False

    def truth(self, node: Expr) -> _Truth:
        found = self._truth(node)
        if found.unknown and self.looks:
            found = self._looked_at(node)
        found = _Truth(canonical(found.certain), canonical(found.possible))
        return found if _small(found.certain, found.possible) else _UNKNOWN

    def _looked_at(self, node: Expr) -> _Truth:
        """A condition on both positions that no rule decides: looked at cell by cell, or left to who looks at pairs."""
        size = {axis: cell_size(node, position) for position, axis in _AXES.items()}
        if size["q"] * size["kv"] < LEAST_CELL:
            self.by_pair = self.by_pair or reads_pairs(node)
            return _UNKNOWN
        texts = [c.condition.text for c in self.cells]
        if node.text not in texts:
            self.cells.append(Cells(node, size["q"], size["kv"]))
            texts.append(node.text)
        some, every = _cell_names("_cells", texts.index(node.text))
        return _Truth(Symbol(every, "bool"), Symbol(some, "bool"))

    def _truth(self, node: Expr) -> _Truth:
        own = self._one_sided(node)
        if own is not None:
            return _Truth(*(end if end.dtype == "bool" else make("lt", const(0), end) for end in own))
        match node:
            case Call("not", (a,)):
                return ~self.truth(a)
            case Call("and", (a, b)):
                return self.truth(a) & self.truth(b)
            case Call("or", (a, b)):
                return self.truth(a) | self.truth(b)
            case Call("xor" | "eq" | "ne" as op, (a, b)) if a.dtype == "bool":
                x, y = self.truth(a), self.truth(b)
                if x.unknown or y.unknown:
                    return _UNKNOWN
                return _choice(x, y, ~y) if op == "eq" else _choice(x, ~y, y)
            case Call("where", (condition, a, b)):
                return _choice(self.truth(condition), self.truth(a), self.truth(b))
            case Call(op, (a, b)) if {a.dtype, b.dtype} == {"int"}:
                return self._comparison(op, a, b)
            case _:  # a comparison of floats, or a flag read at both positions
                return _UNKNOWN

    def _comparison(self, op: str, a: Expr, b: Expr) -> _Truth:
        if op in _FLIPPED:
            op, a, b = _FLIPPED[op], b, a
        x, y = self.range(a), self.range(b)
        if x is None or y is None:
            return _UNKNOWN
        if op in ("lt", "le"):
            return _compared(op, x, y)
        equal = _compared("le", x, y) & _compared("le", y, x)
        return equal if op == "eq" else ~equal

    def range(self, node: Expr) -> Range | None:
        """Least and greatest value of an int expression over both tiles; None where they are not known."""
        found = self._one_sided(node) or self._mixed(node)
        if found is None or not _small(*found):
            return None
        return canonical(found[0]), canonical(found[1])

    def _mixed(self, node: Expr) -> Range | None:
        if not isinstance(node, Call) or _may_wrap(node):
            return None
        ranges = [r for r in map(self.range, node.args[-2:]) if r is not None]
        if len(ranges) < len(node.args[-2:]):
            return None
        if node.op != "where":
            return _arithmetic(node.op, ranges)
        condition, ((a, b), (c, d)) = self.truth(node.args[0]), ranges
        low = choose(condition.certain, a, choose(condition.possible, _extreme("minimum", a, c), c))
        return low, choose(condition.certain, b, choose(condition.possible, _extreme("maximum", b, d), d))

    # -- what is measured ---------------------------------------------------------------------------------------------
    def _one_sided(self, node: Expr) -> Range | None:
        """The ends of what reads one position at most: itself where it reads none; None where it reads both."""
        positions = symbols(node) & _AXES.keys()
        if len(positions) > 1:
            return None
        return self._measured(node, _AXES[next(iter(positions))]) if positions else (node, node)

    def _measured(self, node: Expr, axis: str) -> Range:
        texts = [v.text for v in self.values[axis]]
        if node.text not in texts:
            self.values[axis].append(node)
            texts.append(node.text)
        low, high = _names(f"_{axis}", texts.index(node.text))
        return name(low), name(high)

    def published(self, found: _Truth) -> Survey:
        """The result under its public names, with the values that it uses and no others."""
        used = symbols(found.certain) | symbols(found.possible)
        public: dict[str, Expr] = {}
        kept: dict[str, tuple[Expr, ...]] = {}
        for axis, values in self.values.items():
            numbers = [k for k in range(len(values)) if used & {*_names(f"_{axis}", k)}]
            numbers.sort(key=lambda k: values[k].text)
            kept[axis] = tuple(values[k] for k in numbers)
            for n, k in enumerate(numbers):
                public |= {own: name(new) for own, new in zip(_names(f"_{axis}", k), _names(axis, n))}
        order = [k for k in range(len(self.cells)) if used & {*_cell_names("_cells", k)}]
        order.sort(key=lambda k: self.cells[k].condition.text)
        for n, k in enumerate(order):
            both = zip(_cell_names("_cells", k), _cell_names("cells", n))
            public |= {own: Symbol(new, "bool") for own, new in both}
        return Survey(
            kept["q"], kept["kv"], substitute(found.possible, public), substitute(found.certain, public),
            tuple(self.cells[k] for k in order), self.by_pair,
        )  # fmt: skip


def _names(axis: str, number: int) -> tuple[str, str]:
    return f"{axis}{number}_low", f"{axis}{number}_high"


def _cell_names(prefix: str, number: int) -> tuple[str, str]:
    return f"{prefix}{number}_any", f"{prefix}{number}_all"
