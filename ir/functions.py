"""The functions of the language, as users call them: `weft.tanh(score / 50.0)`; one for each record of the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from .expr import Expr, Operand, call
from .operators import OPERATORS, Operator, function_names

Function: TypeAlias = Callable[..., Expr]
__all__ = function_names()


def __getattr__(name: str) -> Function:
    """The function of that name: looked up in the table, so that a record is all that a function needs."""
    operator = OPERATORS.get(name)
    if operator is None or not operator.is_function:
        raise AttributeError(f"weft has no {name!r}, and its language no such function")
    return _public(operator)


def __dir__() -> list[str]:
    return function_names()


@cache
def _public(operator: Operator) -> Function:
    """The Python function that writes a call of the operator, with the signature and docstring of its record."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=Operand) for name in operator.operands]
    signature = inspect.Signature(parameters, return_annotation=Expr)

    def function(*operands: Operand, **named: Operand) -> Expr:
        try:
            bound = signature.bind(*operands, **named)
        except TypeError as error:
            expected = ", ".join(operator.operands)
            raise TypeError(f"{operator.name}({expected}): {error}") from None
        return call(operator.name, *bound.args)

    function.__name__ = function.__qualname__ = operator.name  # so that it pickles
    function.__doc__ = operator.doc
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
