"""Read expressions and variants back from their text, without running any code."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from threading import RLock
from typing import Union

from .attention import Attention, Latent
from .caller import outside_of_graphs
from .errors import InternalError, Problem, WeftError, shown
from .expr import (
    NO_TRUTH,
    PARENTHESES,
    SMALLER,
    SYMBOLS,
    Expr,
    Operand,
    Scalar,
    TensorOperand,
    call,
    expression,
    scalar,
    symbol,
    tensor,
)
from .foreign import SYMBOL_NAMES
from .normalizer import SOFTMAX
from .operators import OPERATORS

Declared = Union[Scalar, TensorOperand]
# CPython 3.11 counts the depth of its parser in one place for all threads: two that parse at once can fail. Held by
# whatever parses or makes others parse, as the compilation of kernels does.
PARSING = RLock()


def _python_sign(text: str) -> type[ast.AST]:
    """The class that Python's parser has for the sign in this text."""
    match ast.parse(text, mode="eval").body:
        case ast.BinOp(op=op) | ast.UnaryOp(op=op) | ast.Compare(ops=[op]):
            return type(op)
        case _:
            raise InternalError(f"parse: {text!r} applies no sign of Python")


_BINARY = {_python_sign(f"a {op.sign} b"): name for name, op in OPERATORS.items() if op.sign and op.arity == 2}
_UNARY = {_python_sign(f"{op.sign} a"): name for name, op in OPERATORS.items() if op.sign and op.arity == 1}
_TYPES = {"int": int, "float": float, "bool": bool}


@outside_of_graphs
def parse(text: str, operands: Mapping[str, Declared] | None = None) -> Expr:
    """The expression that `text` writes; `operands` are the scalars and tensors it may name.

    Raises WeftError for anything outside the language.

    >>> parse("(kv_pos <= q_pos) & (q_pos - kv_pos < window)", {"window": scalar("window", int)})
    (kv_pos <= q_pos) & (q_pos - kv_pos < window)
    """
    if not isinstance(text, str):
        raise WeftError(f"parse: expected text of the language, got {type(text).__name__}")
    _check_operands(operands)
    try:
        with PARSING:
            tree = ast.parse(text.strip(), mode="eval").body
        return expression(_node(tree, operands or {}))
    except WeftError:
        raise
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise WeftError(f"not an expression of the language: {_start(text)} ({error})") from None
    except (RecursionError, MemoryError):
        raise WeftError(f"an expression that is too deep: {_start(text)}; {SMALLER}") from None


@outside_of_graphs
def parse_attention(text: str) -> Attention:
    """The variant that `str(attention)` printed: declarations, then `weft.Attention(...)`, by lines or semicolons."""
    if not isinstance(text, str):
        raise WeftError(f"parse_attention: expected text of a variant, got {type(text).__name__}")
    try:
        with PARSING:
            body = ast.parse(text).body
        return _variant(body)
    except WeftError:
        raise
    except (SyntaxError, ValueError) as error:
        raise WeftError(f"not a variant: {_start(text)} ({error})") from None
    except (RecursionError, MemoryError):
        raise WeftError(f"a variant that is too deep: {_start(text)}; {SMALLER}") from None


def _check_operands(operands: object) -> None:
    """Raise WeftError for what are no declared operands by name."""
    how = 'pass {"window": weft.scalar("window", int)}'
    if operands is not None and not isinstance(operands, Mapping):
        problem = Problem(option="operands", expected="declared operands by name", got=shown(operands), next_step=how)
        raise WeftError.of("parse", problem)
    for name, operand in (operands or {}).items():
        if not isinstance(name, str) or not isinstance(operand, (Scalar, TensorOperand)):
            expected, got = (
                "the name of a weft.scalar or weft.tensor, and what declares it",
                f"{shown(name)}: {shown(operand)}",
            )
            raise WeftError.of("parse", Problem(option="operands", expected=expected, got=got, next_step=how))


def _start(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}..."


def _variant(body: list[ast.stmt]) -> Attention:
    if not body or not isinstance(body[-1], ast.Expr):
        raise WeftError("expected declarations followed by weft.Attention(...)")
    operands: dict[str, Declared] = {}
    for line in body[:-1]:
        operand = _declaration(line)
        operands[operand.name] = operand
    return _attention(body[-1].value, operands)


def _attention(tree: ast.expr, operands: Mapping[str, Declared]) -> Attention:
    if not (isinstance(tree, ast.Call) and ast.unparse(tree.func) == "weft.Attention" and not tree.args):
        raise WeftError(f"expected weft.Attention(...), got {ast.unparse(tree)}")
    score: Operand = symbol("score")
    mask: Operand = True
    scale: Operand | None = None
    sink: Operand | None = None
    latent: Latent | None = None
    name: str | None = None
    normalizer = SOFTMAX.name
    dropout: float | Scalar = 0.0
    origin: tuple[Operand, Operand, Operand] | None = None
    for item in tree.keywords:
        match item:
            case ast.keyword("score", value):
                score = _node(value, operands)
            case ast.keyword("mask", value):
                mask = _node(value, operands)
            case ast.keyword("scale", value):
                scale = _node(value, operands)
            case ast.keyword("sink", value):
                sink = _node(value, operands)
            case ast.keyword("dropout", ast.Constant(value=float() as dropout)):
                pass
            case ast.keyword("dropout", ast.Name(name_of)) if isinstance(operands.get(name_of), Scalar):
                dropout = operands[name_of]  # type: ignore[assignment]
            case ast.keyword("_origin", ast.Tuple([position, head, batch])):
                origin = _node(position, operands), _node(head, operands), _node(batch, operands)
            case ast.keyword("name", ast.Constant(value=str() as name)):
                pass
            case ast.keyword("normalizer", ast.Constant(value=str() as normalizer)):
                pass
            case ast.keyword(
                "latent",
                ast.Call(
                    keywords=[
                        ast.keyword("rank", ast.Constant(value=int() as rank)),
                        ast.keyword("rope", ast.Constant(value=int() as rope)),
                    ]
                ),
            ):
                latent = Latent(rank, rope)
            case _:
                raise WeftError(f"weft.Attention: cannot read {ast.unparse(item)}")
    return Attention(
        score, mask, scale=scale, sink=sink, dropout=dropout, latent=latent, name=name, normalizer=normalizer,
        _origin=origin,
    )  # fmt: skip


def _declaration(line: ast.stmt) -> Declared:
    match line:
        case ast.Assign(value=ast.Call(ast.Attribute(attr="scalar"), [ast.Constant(str() as name), ast.Name(kind)])):
            if kind in _TYPES:
                return scalar(name, _TYPES[kind])
        case ast.Assign(
            value=ast.Call(
                ast.Attribute(attr="tensor"), [ast.Constant(str() as name), ast.Constant(int() as rank), ast.Name(kind)]
            )
        ):
            if kind in _TYPES:
                return tensor(name, rank, _TYPES[kind])
    raise WeftError(f"expected a declaration of a scalar or tensor, got {ast.unparse(line)}")


def _node(tree: ast.expr, operands: Mapping[str, Declared]) -> Operand:
    match tree:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in operands:
            return operands[name]  # type: ignore[return-value]
        case ast.Name(id=name) if name in SYMBOLS:
            return symbol(name)
        case ast.Name(id="inf"):
            return float("inf")
        case ast.UnaryOp(ast.USub(), ast.Name(id="inf")):
            return float("-inf")
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return call(_BINARY[type(op)], _node(left, operands), _node(right, operands))
        case ast.Compare(left, [op], [right]) if type(op) in _BINARY:
            return call(_BINARY[type(op)], _node(left, operands), _node(right, operands))
        case ast.UnaryOp(ast.USub(), ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return call(_UNARY[type(op)], _node(operand, operands))
        case ast.Attribute(ast.Name(id="weft"), name) if name in SYMBOLS:
            return symbol(name)
        case ast.Call(ast.Name(id=name) | ast.Attribute(ast.Name(id="weft"), name), args, []) if (
            name in OPERATORS and OPERATORS[name].is_function
        ):
            return call(name, *(_node(a, operands) for a in args))
        case ast.Subscript(ast.Name(id=name), index) if isinstance(operands.get(name), TensorOperand):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return operands[name][tuple(_node(i, operands) for i in parts)]
        case ast.Compare(left, [_, _, *_], rest) if any(_joins_bits(part) for part in (left, *rest)):
            raise WeftError(f"`{ast.unparse(tree)}`: {PARENTHESES}")
        case ast.BoolOp() | ast.IfExp() | ast.Compare() | ast.UnaryOp(ast.Not()):
            raise WeftError(f"`{ast.unparse(tree)}`: {NO_TRUTH}")
        case ast.Name(id=name) | ast.Subscript(ast.Name(id=name)) if name not in operands and name not in SYMBOLS:
            near = get_close_matches(SYMBOL_NAMES.get(name, name), [*operands, *SYMBOLS], 1)
            meant = f"did you mean {near[0]}? " if near else ""
            what = f"unknown name {name!r}: {meant}expected a symbol ({', '.join(SYMBOLS)}) or a declared operand"
            raise WeftError.of("", Problem(operand=name, what=what, named=True))
        case _:
            raise WeftError(f"not part of the language: {ast.unparse(tree)}")


def _joins_bits(tree: ast.expr) -> bool:
    return isinstance(tree, ast.BinOp) and isinstance(tree.op, (ast.BitAnd, ast.BitOr, ast.BitXor))
