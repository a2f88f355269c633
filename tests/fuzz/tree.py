"""Expressions as the fuzzer has them: plain values that compare by value, and that print as Weft's Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Union

Kind = Literal["int", "float", "bool"]
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "gt": ">",
         "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}  # fmt: skip
PREFIX = {"neg": "-", "not": "~"}
INTS = ("q_pos", "kv_pos", "head", "kv_head", "group", "batch", "q_len", "kv_len", "head_dim")


@dataclass(frozen=True)
class Num:
    value: int | float | bool

    @property
    def kind(self) -> Kind:
        return "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "float"


@dataclass(frozen=True)
class Sym:
    name: str  # of INTS, or "score"

    @property
    def kind(self) -> Kind:
        return "float" if self.name == "score" else "int"


@dataclass(frozen=True)
class Scalar:
    name: str
    kind: Kind  # int or float


@dataclass(frozen=True)
class Read:
    name: str
    kind: Kind
    index: tuple[Node, ...]


@dataclass(frozen=True)
class Op:
    name: str
    args: tuple[Node, ...]
    kind: Kind


Node = Union[Num, Sym, Scalar, Read, Op]
SCORE = Sym("score")


def children(node: Node) -> tuple[Node, ...]:
    return node.index if isinstance(node, Read) else node.args if isinstance(node, Op) else ()


def nodes(node: Node) -> Iterator[Node]:
    """The node and all below it, from the root down."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children(found)[::-1]


def symbols(node: Node) -> set[str]:
    return {n.name for n in nodes(node) if isinstance(n, Sym)}


def size(node: Node) -> int:
    return sum(1 for _ in nodes(node))


def with_children(node: Node, below: tuple[Node, ...]) -> Node:
    return replace(node, index=below) if isinstance(node, Read) else replace(node, args=below)  # type: ignore[arg-type]


def text(node: Node) -> str:
    """Python that builds the expression; with parentheses wherever an operator is inside another."""
    match node:
        case Num(value):
            return _number(value)
        case Sym(name) | Scalar(name):
            return name
        case Read(name, _, index):
            return f"{name}[{', '.join(map(text, index)) or '()'}]"
        case Op(name, args) if name in INFIX:
            return f"{_inner(args[0])} {INFIX[name]} {_inner(args[1])}"
        case Op(name, args) if name in PREFIX:
            return f"{PREFIX[name]}{_inner(args[0])}"
        case Op(name, args):
            return f"weft.{name}({', '.join(map(text, args))})"
        case _:
            raise TypeError(f"no text for {node!r}")


def _inner(node: Node) -> str:
    signed = isinstance(node, Num) and text(node).startswith("-")
    infix = isinstance(node, Op) and node.name in {**INFIX, **PREFIX}
    return f"({text(node)})" if signed or infix else text(node)


def _number(value: float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return 'float("inf")' if value > 0 else '-float("inf")'
    return repr(value)
