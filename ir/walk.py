"""Walking and rewriting expressions: the three things every pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from .errors import InternalError
from .expr import Call, Const, Expr, Load, Scalar, Symbol, TensorOperand, _result
from .operators import OPERATORS

T = TypeVar("T")


def children(node: Expr) -> tuple[Expr, ...]:
    match node:
        case Call(_, args):
            return args
        case Load(_, index):
            return index
        case Const() | Symbol() | Scalar():
            return ()
        case _:
            raise InternalError(f"unknown node {type(node).__name__}")


def nodes(root: Expr) -> Iterator[Expr]:
    """Every node below and including `root`, parents first."""
    yield root
    for child in children(root):
        yield from nodes(child)


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
    return frozenset(n.name for n in nodes(root) if isinstance(n, Symbol))


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


def rewrite(root: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Apply `rule` bottom-up; a rule returns None to leave a node as it is."""
    before = children(root)
    after = tuple(rewrite(c, rule) for c in before)
    changed = any(a is not b for a, b in zip(after, before, strict=True))
    node = rebuild(root, after) if changed else root
    result = rule(node)
    return node if result is None else result


def substitute(root: Expr, mapping: Mapping[str, Expr]) -> Expr:
    """Replace symbols by name.

    >>> from .expr import symbol
    >>> substitute(symbol("score") * 2, {"score": symbol("qk")})
    qk * 2
    """
    return rewrite(root, lambda n: mapping.get(n.name) if isinstance(n, Symbol) else None)


def fold(root: Expr, leaf: Callable[[Expr], T], apply: Callable[[str, list[T]], T]) -> T:
    """Evaluate bottom-up: `leaf` for constants, symbols, scalars and loads, `apply(op, values)` for operators."""
    if isinstance(root, Call):
        return apply(root.op, [fold(a, leaf, apply) for a in root.args])
    return leaf(root)
