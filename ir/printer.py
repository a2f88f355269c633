"""Expressions as text of the language: what `str` gives, `parse` reads back."""

from __future__ import annotations

from .errors import InternalError
from .expr import OPS, Call, Const, Expr, Load, Scalar, Symbol


def print_expr(node: Expr, outer: int = 0) -> str:
    """Text of `node`, with parentheses only where precedence asks for them."""
    match node:
        case Const(value):
            text = repr(value)
            return f"({text})" if text.startswith("-") and outer > OPS["add"].precedence else text
        case Symbol(name) | Scalar(name):
            return name
        case Load(tensor, index):
            return f"{tensor.name}[{', '.join(print_expr(i) for i in index)}]"
        case Call(op, args):
            return _print_call(op, args, outer)
        case _:
            raise InternalError(f"printer: unknown node {type(node).__name__}")


def _print_call(name: str, args: tuple[Expr, ...], outer: int) -> str:
    op = OPS[name]
    if op.symbol is None:
        return f"{name}({', '.join(print_expr(a) for a in args)})"
    if op.arity == 1:
        text = f"{op.symbol}{print_expr(args[0], op.precedence)}"
    else:
        # Operators group to the left; comparisons do not chain, so both their sides ask for parentheses.
        left = op.precedence + 1 if op.gives == "bool" and op.takes != "bool" else op.precedence
        text = f"{print_expr(args[0], left)} {op.symbol} {print_expr(args[1], op.precedence + 1)}"
    return f"({text})" if op.precedence < outer else text
