"""Whose line it is: the innermost caller outside of the package, which messages and warnings name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
# What calls back into the package, and what runs its work in threads: the line is of whoever called these.
_BETWEEN = frozenset(
    {__name__.partition(".")[0], "torch", "numpy", "dataclasses", "functools", "contextlib", "concurrent", "threading"}
)
_starter: ContextVar[FrameType | None] = ContextVar("weft_starter", default=None)  # of work in another thread


def _caller() -> FrameType | None:
    """The frame of the innermost caller outside; None where there is none, as in a thread of the package's own."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return _starter.get()


def outside_of_graphs(function: F) -> F:
    """A function that declares, which torch.compile does not trace: where it may not break the graph, its error says
    so. As `torch.compiler.disable`, which imports all of Dynamo where it only has to leave marks."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "weft: a variant is declared outside of what torch compiles: at module level, or in __init__; calls of it are "
        "compiled"
    )
    return function


@outside_of_graphs
def source_line() -> str:
    """`file:line` of the innermost caller outside, for messages."""
    frame = _caller()
    return "<unknown>" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """A warning at the line of the innermost caller outside, however deep in the package it is found."""
    frame = _caller()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"),
        names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def for_threads(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose warnings in other threads name the line that called here."""
    starter = _caller()

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _starter.set(starter)
        try:
            return function(*args, **kwargs)
        finally:
            _starter.reset(token)

    return run
