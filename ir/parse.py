"""Read expressions and variants back from their text, without running any code."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

from .errors import WeftError
from .expr import OPS, SYMBOLS, Expr, Operand, Scalar, TensorOperand, call, expression, scalar, symbol, tensor

if TYPE_CHECKING:
    from .attention import Attention

Declared = Union[Scalar, TensorOperand]
_BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_UNARY = {ast.USub: "neg", ast.Invert: "not"}
_TYPES = {"int": int, "float": float, "bool": bool}


def parse(text: str, operands: Mapping[str, Declared] | None = None) -> Expr:
    """The expression that `text` writes; `operands` are the scalars and tensors it may name.

    Raises WeftError for anything outside the language.

    >>> parse("(kv_pos <= q_pos) & (q_pos - kv_pos < window)", {"window": scalar("window", int)})
    (kv_pos <= q_pos) & (q_pos - kv_pos < window)
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise WeftError(f"not an expression of the language: {text!r} ({error.msg})") from None
    return expression(_node(tree, operands or {}))


def parse_attention(text: str) -> Attention:
    """The variant that `str(attention)` printed: declarations, one a line, then `weft.Attention(...)`."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise WeftError(f"not a variant: {error.msg} in {text!r}") from None
    if not body or not isinstance(body[-1], ast.Expr):
        raise WeftError("expected declarations followed by weft.Attention(...)")
    operands: dict[str, Declared] = {}
    for line in body[:-1]:
        operand = _declaration(line)
        operands[operand.name] = operand
    return _attention(body[-1].value, operands)


def _attention(tree: ast.expr, operands: Mapping[str, Declared]) -> Attention:
    from .attention import Attention, Latent

    if not (isinstance(tree, ast.Call) and ast.unparse(tree.func) == "weft.Attention" and not tree.args):
        raise WeftError(f"expected weft.Attention(...), got {ast.unparse(tree)}")
    values = {}
    for item in tree.keywords:
        if item.arg in ("name", "dropout"):
            values[item.arg] = ast.literal_eval(item.value)
        elif item.arg == "latent" and isinstance(item.value, ast.Call):
            values[item.arg] = Latent(**{k.arg: ast.literal_eval(k.value) for k in item.value.keywords if k.arg})
        else:
            values[item.arg] = _node(item.value, operands)
    return Attention(**values)  # type: ignore[arg-type]


def _declaration(line: ast.stmt) -> Declared:
    match line:
        case ast.Assign(value=ast.Call(func=ast.Attribute(attr="scalar"), args=[ast.Constant(value=name), ast.Name(id=kind)])):
            return scalar(name, _TYPES[kind])
        case ast.Assign(
            value=ast.Call(
                func=ast.Attribute(attr="tensor"),
                args=[ast.Constant(value=name), ast.Constant(value=rank), ast.Name(id=kind)],
            )
        ):
            return tensor(name, rank, _TYPES[kind])
        case _:
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
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return call(_BINARY[type(op)], _node(left, operands), _node(right, operands))
        case ast.Compare(left, [op], [right]) if type(op) in _BINARY:
            return call(_BINARY[type(op)], _node(left, operands), _node(right, operands))
        case ast.UnaryOp(ast.USub(), ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return call(_UNARY[type(op)], _node(operand, operands))
        case ast.Call(ast.Name(id=name) | ast.Attribute(attr=name), args, []) if _is_function(name):
            return call(name, *(_node(a, operands) for a in args))
        case ast.Subscript(ast.Name(id=name), index) if isinstance(operands.get(name), TensorOperand):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return operands[name][tuple(_node(i, operands) for i in parts)]  # type: ignore[index]
        case ast.Name(id=name):
            raise WeftError(f"unknown name {name!r}: expected a symbol ({', '.join(SYMBOLS)}) or a declared operand")
        case _:
            raise WeftError(f"not part of the language: {ast.unparse(tree)}")


def _is_function(name: str) -> bool:
    return name in OPS and OPS[name].symbol is None
