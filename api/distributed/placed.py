"""A variant over a part of a sequence: positions are those of the whole sequence, rows count from the part's start."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from ..ir.attention import Attention
from ..ir.expr import Call, Const, Expr, Symbol, call, expression, scalar, symbol
from ..ir.walk import children, names, rebuild, substitute

Variant = TypeVar("Variant", bound=Attention)
_LENGTHS = ("q_len", "kv_len")
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_CHOICES = frozenset({"minimum", "maximum"})


class Names(NamedTuple):
    """What the operands are called that a placed variant reads besides its own: ints."""

    first_key: str  # the position of the part's first key
    q_len: str  # of the whole sequence
    kv_len: str
    head: str  # the number of the first head, of all heads


def names_beside(variant: Attention) -> Names:
    """Names that none of the variant's operands has."""
    taken = {p.name for p in variant.parameters} | set(variant.unread)

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        return name

    return Names(*map(free, ("first_key", "all_queries", "all_keys", "first_head")))


def placed(variant: Variant, *, group: int = 0) -> Variant:
    """The variant whose positions count from `first_key` on, and whose lengths are those of the whole sequence.

    Where the position of the first key cancels, as in `q_pos - kv_pos`, it is not read: causal masks, windows and
    ALiBi have the kernels of calls on one device. group: query heads of a key head, where heads too count from a first
    one, and the part may have fewer of either.
    """
    own = names_beside(variant)
    mapping: dict[str, Expr] = {n: scalar(getattr(own, n), int) for n in _LENGTHS}
    if group:
        head = symbol("head") + scalar(own.head, int)
        mapping |= {"head": head, "kv_head": head // group, "group": Const(group)}
    first = scalar(own.first_key, int)
    changed: dict[str, Expr] = {}
    for field in ("score", "mask", "scale", "sink"):
        given = getattr(variant, field)
        if given is not None:
            node, starts = _shifted(substitute(expression(given), mapping), first)
            changed[field] = node + starts * first if starts else node
    return variant.replace(**changed)


def without_sink(variant: Variant) -> Variant:
    """The variant for all parts of the keys but one, as a sink is counted once."""
    return variant if variant.sink is None else variant.replace(sink=None)


def _shifted(node: Expr, first: Expr) -> tuple[Expr, int]:
    """An expression and a number n: with positions counted from the part's start, `expression + n * first` has the
    value that `node` has with the sequence's own."""
    if isinstance(node, Symbol):
        return node, int(node.name in ("q_pos", "kv_pos"))
    if not names(node) & {"q_pos", "kv_pos"}:
        return node, 0
    if isinstance(node, Call) and node.dtype in ("int", "bool"):
        args, starts = zip(*[_shifted(a, first) for a in node.args])
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
            case op if same and op in _CHOICES:
                return rebuild(node, args), starts[0]
            case op if same and op in _COMPARISONS and all(a.dtype == "int" for a in node.args):
                return rebuild(node, args), 0
    whole = [_whole(*_shifted(child, first), first) for child in children(node)]
    return rebuild(node, tuple(whole)), 0


def _whole(node: Expr, starts: int, first: Expr) -> Expr:
    return node if not starts else call("add", node, first if starts == 1 else call("mul", Const(starts), first))
