"""What a variant must satisfy before any pass sees it; every problem is found, then all are raised at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import Problem, WeftError, collected, shown
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
        name = attention.name if isinstance(attention.name, str) else ""
        raise collected(name or "attention", problems, where)


def _size_problems(attention: Attention) -> Iterator[Problem]:
    for label in ("score", "mask", "scale", "sink"):
        value = getattr(attention, label)
        if value is None:
            continue
        deep, operators = extent(expression(value))
        if deep > MOST_DEEP:
            expected = f"at most {MOST_DEEP} operators inside one another"
            yield Problem(option=label, expected=expected, got=str(deep), next_step=SMALLER)
        elif operators > MOST_OPERATORS:
            expected = f"at most {MOST_OPERATORS} operators when written out"
            yield Problem(option=label, expected=expected, next_step=SMALLER)


def _problems(attention: Attention) -> Iterator[Problem]:
    for label, check in (("name", check_identifier), ("normalizer", normalizer_named)):
        try:
            check(getattr(attention, label))
        except WeftError as error:
            yield replace(error.problems[0], option=label, where="")
    score, mask = expression(attention.score), expression(attention.mask)
    if score.dtype == "bool":
        yield _wrong("score", "a number", "a bool", score, "a mask goes into mask=")
    if mask.dtype != "bool":
        yield _wrong("mask", "a bool expression (a comparison)", f"{mask.dtype} `{mask}`", mask)
    if "score" in symbols(mask):
        yield _said("mask", "`score` cannot be used inside a mask", mask, "use where(...) in score=")
    expressions = [("score", score), ("mask", mask)]
    if attention.scale is not None:
        scale = expression(attention.scale)
        expressions.append(("scale", scale))
        yield from _scale_problems(scale)
    if attention.sink is not None:
        sink = expression(attention.sink)
        expressions.append(("sink", sink))
        yield from _sink_problems(attention, sink)
    if attention._origin is not None:
        of_part = [("origin", expression(e)) for e in attention._origin]
        expressions += of_part
        yield from _origin_problems([e for _, e in of_part])
    for label, root in expressions:
        yield from _index_problems(label, root)
    if isinstance(attention.dropout, Scalar):
        expressions.append(("dropout", attention.dropout))
    yield from _dropout_problems(attention.dropout)
    yield from _conflicts([root for _, root in expressions])


def _wrong(label: str, expected: str, got: str, node: Expr, next_step: str = "") -> Problem:
    return Problem(option=label, expected=expected, got=got, next_step=next_step, where=node.where or "")


def _said(label: str, what: str, node: Expr, next_step: str) -> Problem:
    return Problem(option=label, what=what, next_step=next_step, where=node.where or "")


def _scale_problems(scale: Expr) -> Iterator[Problem]:
    if scale.dtype == "bool":
        yield _wrong("scale", "a number", "a bool", scale)
    if isinstance(scale, Const) and math.isinf(scale.value):
        yield _wrong("scale", "a finite number", str(scale), scale)
    for name in sorted(symbols(scale) & (_POSITIONS | {"score"})):
        yield _wrong("scale", "lengths, heads and operands", f"`{name}`", scale, "write it into score=")


def _sink_problems(attention: Attention, sink: Expr) -> Iterator[Problem]:
    if sink.dtype == "bool":
        how = "write weft.where(c, 0.0, -math.inf), where -inf is no sink"
        yield _wrong("sink", "a number", "a bool", sink, how)
    if isinstance(sink, Const) and sink.value == math.inf:
        yield _wrong("sink", "a finite number, or -inf for none", "inf", sink)
    for name in sorted(symbols(sink) & (_POSITIONS | {"score"})):
        how = "a row has one sink, whatever it sees: index its operand by heads and batch"
        yield _wrong("sink", "lengths, heads, batch and operands", f"`{name}`", sink, how)
    if attention.normalizer in normalizers() and not normalizer_named(attention.normalizer).saves_lse:
        what = f"the normalizer {attention.normalizer} has no denominator that it could join"
        yield _said("sink", what, sink, "leave sink=None")


def _origin_problems(parts: list[Expr]) -> Iterator[Problem]:
    for part in parts:
        if part.dtype != "int":
            yield _wrong("origin", "an int expression", f"{part.dtype} `{part}`", part)
        for name in sorted(symbols(part) - {"batch"}):
            yield _wrong("origin", "batch and operands", f"`{name}`", part)


def _index_problems(label: str, root: Expr) -> Iterator[Problem]:
    for node in nodes(root):
        if isinstance(node, Load) and any("score" in symbols(i) for i in node.index):
            yield _said(label, f"`{node}` is indexed by the score", node, "an index may use positions and heads only")


def _conflicts(roots: list[Expr]) -> Iterator[Problem]:
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
                what = f"operand {name!r} is declared twice: as {seen[name]} and as {kind}"
                yield Problem(operand=name, what=what, where=node.where or "", named=True)


def _dropout_problems(dropout: object) -> Iterator[Problem]:
    if isinstance(dropout, Scalar):
        if dropout.dtype != "float":
            yield _wrong("dropout", "a float scalar", f"{dropout.name}, an {dropout.dtype}", dropout)
    elif not isinstance(dropout, float) or not 0.0 <= dropout < 1.0:
        expected = "a number from 0 on and below 1, or weft.scalar(name, float)"
        yield Problem(option="dropout", expected=expected, got=shown(dropout))
