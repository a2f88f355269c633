"""Python's compiler of generated text: functions that several modules have are compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import TypeAlias, TypeVar

C = TypeVar("C")
Part: TypeAlias = tuple[int, CodeType]  # lines before it in the module, and its code

_APART = re.compile(r"(?<=\n\n\n)(?=[@\w])")  # where a function or a class begins, as PEP 8 has it


@lru_cache(maxsize=8)
def compiled(text: str) -> tuple[Part, ...]:
    """The code of a module, of no file yet: what is checked before it is kept is what is loaded a moment later.

    Raises SyntaxError.
    """
    return in_parts(text, _compiled)


def in_parts(text: str, compile_part: Callable[[str], C]) -> tuple[tuple[int, C], ...]:
    """What is made of each function of a module, or of what stands between two blank lines, and the lines before it.

    Most functions are those of other modules too, and `compile_part` remembers. A text is one part where a part of it
    is no Python alone: between quotes, or where none of it is.
    """
    if "__future__" in text:  # which is about what comes behind it
        return ((0, compile_part(text)),)
    made, lines = [], 0
    try:
        for part in _APART.split(text):
            made.append((lines, compile_part(part)))
            lines += part.count("\n")
    except SyntaxError:
        return ((0, compile_part(text)),)
    return tuple(made)


@lru_cache(maxsize=2048)
def _compiled(text: str) -> CodeType:
    return compile(text, "<generated>", "exec", dont_inherit=True)


def of_file(code: CodeType, path: str, lines: int) -> CodeType:
    """The same code, and that of its functions, as of this file, behind so many lines."""
    parts = tuple([of_file(part, path, lines) if isinstance(part, CodeType) else part for part in code.co_consts])
    return code.replace(co_filename=path, co_firstlineno=code.co_firstlineno + lines, co_consts=parts)
