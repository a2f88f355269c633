"""What a variant must satisfy before any pass sees it; every problem is found, then all are raised at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .errors import WeftError, collected
from .expr import SMALLER, Const, Expr, Load, Scalar, check_identifier, expression
from .normalizer import normalizer_named, normalizers
from .walk import extent, nodes, symbols

if TYPE_CHECKING:
    from .attention import Attention

# What the passes can take: each level of an expression is several calls of Python, of which 1000 may be open at once,
# and compile time grows faster than the number of operators.
MOST_DEEP, MOST_OPERATORS = 100, 10_000
_POSITIONS = frozenset({"q_pos", "kv_pos"})


def verify(attention: Attention, where: str) -> None:
    """Raise WeftError listing every problem of the declaration, each with the line that wrote it."""
    problems = list(_size_problems(attention)) or list(dict.fromkeys(_problems(attention)))
    if problems:
        raise collected(f"{attention.name or 'attention'} (declared at {where})", problems)


def _size_problems(attention: Attention) -> Iterator[str]:
    for label in ("score", "mask", "scale", "sink"):
        value = getattr(attention, label)
        if value is None:
            continue
        deep, operators = extent(expression(value))
        if deep > MOST_DEEP:
            yield f"{label}: expected at most {MOST_DEEP} operators inside one another, got {deep}; {SMALLER}"
        elif operators > MOST_OPERATORS:
            yield f"{label}: expected at most {MOST_OPERATORS} operators when written out; {SMALLER}"


def _problems(attention: Attention) -> Iterator[str]:
    try:
        check_identifier(attention.name)  # type: ignore[arg-type]
    except WeftError as error:
        yield f"name: {str(error).splitlines()[0]}"
    try:
        normalizer_named(attention.normalizer)
    except WeftError as error:
        yield str(error)
    score, mask = expression(attention.score), expression(attention.mask)
    if score.dtype == "bool":
        yield _at("score: expected a number, got a bool; a mask goes into mask=", score)
    if mask.dtype != "bool":
        yield _at(f"mask: expected a bool expression (a comparison), got {mask.dtype} `{mask}`", mask)
    if "score" in symbols(mask):
        yield _at("mask: `score` cannot be used inside a mask; use where(...) in score=", mask)
    expressions = [("score", score), ("mask", mask)]
    if attention.scale is not None:
        scale = expression(attention.scale)
        expressions.append(("scale", scale))
        yield from _scale_problems(scale)
    if attention.sink is not None:
        sink = expression(attention.sink)
        expressions.append(("sink", sink))
        yield from _sink_problems(attention, sink)
    for label, root in expressions:
        yield from _index_problems(label, root)
    if isinstance(attention.dropout, Scalar):
        expressions.append(("dropout", attention.dropout))
    yield from _dropout_problems(attention.dropout)
    yield from _conflicts([root for _, root in expressions])


def _at(message: str, node: Expr) -> str:
    return f"{message}\n      at {node.where}" if node.where else message


def _scale_problems(scale: Expr) -> Iterator[str]:
    if scale.dtype == "bool":
        yield _at("scale: expected a number, got a bool", scale)
    if isinstance(scale, Const) and math.isinf(scale.value):
        yield _at(f"scale: expected a finite number, got {scale}", scale)
    for name in sorted(symbols(scale) & (_POSITIONS | {"score"})):
        yield _at(f"scale: expected lengths, heads and operands, got `{name}`; write it into score=", scale)


def _sink_problems(attention: Attention, sink: Expr) -> Iterator[str]:
    if sink.dtype == "bool":
        yield _at(
            "sink: expected a number, got a bool; write weft.where(c, 0.0, -math.inf), where -inf is no sink", sink
        )
    if isinstance(sink, Const) and sink.value == math.inf:
        yield _at("sink: expected a finite number, or -inf for none, got inf", sink)
    for name in sorted(symbols(sink) & (_POSITIONS | {"score"})):
        yield _at(f"sink: expected lengths, heads, batch and operands, got `{name}`; a row has one sink, whatever it "
                  "sees: index its operand by heads and batch", sink)  # fmt: skip
    if attention.normalizer in normalizers() and not normalizer_named(attention.normalizer).saves_lse:
        yield _at(
            f"sink: the normalizer {attention.normalizer} has no denominator that it could join; leave sink=None", sink
        )


def _index_problems(label: str, root: Expr) -> Iterator[str]:
    for node in nodes(root):
        if isinstance(node, Load) and any("score" in symbols(i) for i in node.index):
            yield _at(f"{label}: `{node}` is indexed by the score; an index may use positions and heads only", node)


def _conflicts(roots: list[Expr]) -> Iterator[str]:
    """Two operands of one name must be the same operand."""
    seen: dict[str, str] = {}
    for root in roots:
        for node in nodes(root):
            if isinstance(node, Scalar):
                kind, name = f"scalar {node.dtype}", node.name
            elif isinstance(node, Load):
                kind, name = f"tensor of rank {node.tensor.rank}, {node.tensor.dtype}", node.tensor.name
            else:
                continue
            if seen.setdefault(name, kind) != kind:
                yield _at(f"operand {name!r} is declared twice: as {seen[name]} and as {kind}", node)


def _dropout_problems(dropout: object) -> Iterator[str]:
    if isinstance(dropout, Scalar):
        if dropout.dtype != "float":
            yield _at(f"dropout: expected a float scalar, got {dropout.name}, an {dropout.dtype}", dropout)
    elif isinstance(dropout, bool) or not isinstance(dropout, float) or not 0.0 <= dropout < 1.0:
        yield f"dropout: expected a number from 0 on and below 1, or weft.scalar(name, float), got {dropout}"
