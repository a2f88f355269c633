"""A variant over a part of a sequence: positions are those of the whole sequence, rows count from the part's start."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple, TypeVar

from ..ir.attention import Attention
from ..ir.expr import Call, Const, Expr, Load, Symbol, call, expression, scalar, symbol, tensor
from ..ir.philox import TOGETHER
from ..ir.walk import children, loads, names, nodes, rebuild, substitute

Variant = TypeVar("Variant", bound=Attention)
_LENGTHS = ("q_len", "kv_len")
_POSITIONS = frozenset({"q_pos", "kv_pos"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_CHOICES = frozenset({"minimum", "maximum"})
_MOST_DIVIDED_BY = 1 << 12


class Names(NamedTuple):
    """What the operands are called that a placed variant reads besides its own: ints."""

    first_key: str  # the position of the part's first key
    q_len: str  # of the whole sequence
    kv_len: str
    head: str  # the number of the first head, of all heads
    batch: str  # the number of the first sequence, of packed ones
    last: str  # the last position of the longest one


def names_beside(variant: Attention) -> Names:
    """Names that none of the variant's operands has."""
    taken = {p.name for p in variant.canonical.parameters} | set(variant.canonical.unread)

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        return name

    return Names(*map(free, ("first_key", "all_queries", "all_keys", "first_head", "first_batch", "last_position")))


@lru_cache(maxsize=256)
def positions_divided_by(variant: Attention) -> int:
    """The least number that all constants divide by which a mask divides positions where it reads tensors at them, as
    in tables of blocks; 1 where that is large, or where it reads none."""
    reads = (node for load in loads(variant.canonical.folded_mask) for index in load.index for node in nodes(index))
    divisors = [_divisor(node) for node in reads if isinstance(node, Call) and names(node.args[0]) & _POSITIONS]
    found = lcm(*divisors)
    return found if found <= _MOST_DIVIDED_BY else 1


def _divisor(node: Call) -> int:
    """What the node divides by, or takes the rest of; 1 of other nodes, and where that is no positive constant."""
    if node.op not in ("floordiv", "mod") or not isinstance(node.args[1], Const):
        return 1
    return max(1, int(node.args[1].value))


def placed(
    variant: Variant, *, group: int = 0, packed: bool = False, in_step: bool = False, multiple: int = 1
) -> Variant:
    """The variant whose positions count from `first_key` on, and whose lengths are those of the whole sequence.

    Where the position of the first key cancels, as in `q_pos - kv_pos`, it is not read: causal masks, windows and
    ALiBi have the kernels of calls on one device. group: query heads of a key head, where heads too count from a first
    one, and the part may have fewer of either. packed: sequences are packed, so that each has a first key and lengths
    of its own. in_step: every first key is a multiple of TOGETHER, so that what is dropped is drawn for many keys at
    once. multiple: every first key is a multiple of this, so that blocks of a mask are blocks of the part too, and
    tiles of hidden blocks are not visited.
    """
    own = names_beside(variant)

    def number(name: str) -> Expr:
        return tensor(name, 1, int)[symbol("batch")] if packed else scalar(name, int)

    mapping: dict[str, Expr] = {n: number(getattr(own, n)) for n in _LENGTHS}
    if packed:
        mapping["batch"] = symbol("batch") + scalar(own.batch, int)
    if group:
        head = symbol("head") + scalar(own.head, int)
        mapping |= {"head": head, "kv_head": head // group, "group": Const(group)}
    place = _Place(number(own.first_key), scalar(own.last, int) if packed else None, multiple)
    changed: dict[str, Any] = {}
    for field in ("score", "mask", "scale", "sink"):
        given = getattr(variant, field)
        if given is not None:
            changed[field] = place.whole(substitute(expression(given), mapping))
    if variant.canonical.drops:
        first = number(own.first_key)
        if in_step:
            first = TOGETHER * (first // TOGETHER)
        changed["_origin"] = first, scalar(own.head, int) if group else 0, scalar(own.batch, int) if packed else 0
    return variant.replace(**changed)


def without_sink(variant: Variant) -> Variant:
    """The variant for all parts of the keys but one, as a sink is counted once."""
    return variant if variant.sink is None else variant.replace(sink=None)


class _Place:
    """Rewrites expressions of positions that count from a first key.

    last: positions are kept between 0 and this number where tensors are read at them; None: they need not be. Nobody
    could tell else how far tensors `first[batch]` reach. multiple: that each first key is one of.
    """

    def __init__(self, first: Expr, last: Expr | None, multiple: int) -> None:
        self.first, self.last, self.multiple = first, last, multiple
        self.names = names(first)

    def whole(self, node: Expr) -> Expr:
        """The expression with the value that it has for positions of the whole sequence."""
        return _added(*self._shifted(node), self.first)

    def _shifted(self, node: Expr) -> tuple[Expr, int]:
        """An expression and a number n: `expression + n * first` is what `whole` gives."""
        if isinstance(node, Symbol):
            return node, int(node.name in _POSITIONS)
        if not names(node) & _POSITIONS:
            return node, 0
        if isinstance(node, Call) and node.dtype in ("int", "bool"):
            args, starts = zip(*[self._shifted(a) for a in node.args])
            same = len({*starts}) == 1
            match node.op:
                case "add":
                    return rebuild(node, args), sum(starts)
                case "sub":
                    return rebuild(node, args), starts[0] - starts[1]
                case "neg":
                    return rebuild(node, args), -starts[0]
                case "mul" if isinstance(args[0], Const):
                    return rebuild(node, args), args[0].value * starts[1]
                case "mul" if isinstance(args[1], Const):
                    return rebuild(node, args), args[1].value * starts[0]
                case "mod" if self._begins_a_block(node):
                    return rebuild(node, args), 0
                case "floordiv" if self._begins_a_block(node):
                    return _added(rebuild(node, args), starts[0], call("floordiv", self.first, node.args[1])), 0
                case op if same and op in _CHOICES:
                    return rebuild(node, args), starts[0]
                case op if same and op in _COMPARISONS and all(a.dtype == "int" for a in node.args):
                    return rebuild(node, args), 0
        inside = self._index if isinstance(node, Load) else self.whole
        return rebuild(node, tuple([inside(child) for child in children(node)])), 0

    def _begins_a_block(self, node: Call) -> bool:
        """Whether the first key is a multiple of what the node divides by."""
        return _divisor(node) > 1 and self.multiple % _divisor(node) == 0

    def _index(self, node: Expr) -> Expr:
        """What a tensor is read at."""
        found = self.whole(node)
        if self.last is None or not names(found) & self.names:
            return found
        ends = {n: call("add", symbol(n), self.first) for n in _POSITIONS}
        kept = {n: call("minimum", call("maximum", end, Const(0)), self.last) for n, end in ends.items()}
        return substitute(node, kept)


def _added(node: Expr, times: int, number: Expr) -> Expr:
    """node + times * number."""
    if not times:
        return node
    return call("add", node, number if times == 1 else call("mul", Const(times), number))
