"""Walking and rewriting expressions: the three things every pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_not
from typing import TypeVar

from .errors import InternalError
from .expr import Call, Const, Expr, Load, Scalar, Symbol, TensorOperand, _result
from .operators import OPERATORS

T = TypeVar("T")
_NONE: frozenset[str] = frozenset()


def children(node: Expr) -> tuple[Expr, ...]:
    if isinstance(node, Call):
        return node.args
    if isinstance(node, Load):
        return node.index
    if isinstance(node, (Const, Symbol, Scalar)):
        return ()
    raise InternalError(f"unknown node {type(node).__name__}")


def nodes(root: Expr) -> Iterator[Expr]:
    """Every node below and including `root`, parents first."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += children(node)[::-1]


def extent(root: Expr) -> tuple[int, int]:
    """How many nodes lie inside one another, and how many there are when shared ones are written out.

    For roots of any depth: no other walk may meet one before this.
    """
    found: dict[int, tuple[int, int]] = {}  # by id
    waiting = [root]
    while waiting:
        node = waiting[-1]
        missing = [c for c in children(node) if id(c) not in found]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        below = [found[id(c)] for c in children(node)]
        found[id(node)] = 1 + max((d for d, _ in below), default=0), 1 + sum(n for _, n in below)
    return found[id(root)]


def symbols(root: Expr) -> frozenset[str]:
    """Names of the symbols that occur in `root`, also inside indices."""
    known: frozenset[str] | None = root.__dict__.get("_symbols")
    if known is None:
        known = frozenset([root.name]) if isinstance(root, Symbol) else _NONE.union(*map(symbols, children(root)))
        root.__dict__["_symbols"] = known  # asked for again and again, and a node never changes
    return known


def names(root: Expr) -> frozenset[str]:
    """Names of the symbols, scalars and tensors that occur in `root`."""
    named = (n.tensor if isinstance(n, Load) else n for n in nodes(root))
    return frozenset([n.name for n in named if isinstance(n, (Symbol, Scalar, TensorOperand))])


def loads(root: Expr) -> tuple[Load, ...]:
    """The different tensor reads in `root`, in order of their text."""
    found = {n.text: n for n in nodes(root) if isinstance(n, Load)}
    return tuple(found[k] for k in sorted(found))


def scalars(root: Expr) -> tuple[Scalar, ...]:
    """The different scalar operands in `root`, by name."""
    found = {n.name: n for n in nodes(root) if isinstance(n, Scalar)}
    return tuple(found[k] for k in sorted(found))


def tensors(root: Expr) -> tuple[TensorOperand, ...]:
    """The different tensor operands in `root`, by name."""
    found = {n.tensor.name: n.tensor for n in nodes(root) if isinstance(n, Load)}
    return tuple(found[k] for k in sorted(found))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with other children; types are worked out again and the source line is kept."""
    match node:
        case Call(op):
            return Call(op, args, _result(OPERATORS[op], args, node.where), where=node.where)
        case Load(tensor):
            return Load(tensor, args, where=node.where)
        case _:
            return node


def with_children(node: Expr, visit: Callable[[Expr], Expr]) -> Expr:
    """`node` with what `visit` makes of each child; itself where that changes none."""
    before = children(node)
    after = tuple([visit(child) for child in before])
    return rebuild(node, after) if any(map(is_not, after, before)) else node


def rewrite(root: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Apply `rule` bottom-up; a rule returns None to leave a node as it is."""
    node = with_children(root, lambda child: rewrite(child, rule))
    result = rule(node)
    return node if result is None else result


def substitute(root: Expr, mapping: Mapping[str, Expr]) -> Expr:
    """Replace symbols by name.

    >>> from .expr import symbol
    >>> substitute(symbol("score") * 2, {"score": symbol("qk")})
    qk * 2
    """
    if mapping.keys().isdisjoint(symbols(root)):
        return root
    if isinstance(root, Symbol):
        return mapping[root.name]
    return rebuild(root, tuple([substitute(c, mapping) for c in children(root)]))


def fold(root: Expr, leaf: Callable[[Expr], T], apply: Callable[[str, list[T]], T]) -> T:
    """Evaluate bottom-up: `leaf` for constants, symbols, scalars and loads, `apply(op, values)` for operators."""
    if isinstance(root, Call):
        return apply(root.op, [fold(a, leaf, apply) for a in root.args])
    return leaf(root)
