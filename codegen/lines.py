"""Lines of generated text that are too long, broken as a formatter would: nothing but white space and comments moves.

    fitted(text)    comments and docstrings go on in another line, and calls have their arguments in lines of their own

Python reads the same program. Templates and printers need not count columns: names of operands and sizes are a user's.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

WIDTH = 120
_OPERATORS = {sign: n for n, signs in enumerate(("|", "&", "+-", "*/"), 1) for sign in signs}
_STRING = re.compile(r'"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')


_COMMENT = re.compile(r"#.*")


class _Break(NamedTuple):
    """A comma, after which a line may be broken, or the space before an operator."""

    at: int  # its place in the line
    depth: int  # brackets of the line around it
    opened: int  # the place of the innermost one, -1 where there is none
    binds: int  # 0 of a comma; of an operator how tightly it binds


def fitted(text: str, width: int = WIDTH) -> str:
    """The text with no line longer than `width`, as far as its words and operators let it.

    >>> print(fitted("x = f(first, second)  # why", 20))
    # why
    x = f(
        first, second
    )
    """
    found: list[str] = []
    lines = text.split("\n")
    in_string = in_docstring = False
    depth, uncounted = 0, list[str]()  # brackets that are open, and lines that may open more
    for n, line in enumerate(lines):
        begins = line.lstrip().startswith('"""')
        if len(line) <= width or (in_string and not in_docstring):
            found.append(line)
        elif begins or in_string:
            *rows, last = _words(line, width)
            found += [*rows, *_handed_on(last, lines, n + 1)]
        elif line.lstrip().startswith("#"):
            *rows, last = _comment(line, width)
            found += [*rows, *_handed_on(last, lines, n + 1)]
        else:
            depth += _opens("\n".join(uncounted))
            uncounted.clear()
            found += _code(line, width, depth > 0)
        parts = line.split('"""')
        uncounted.append("".join(parts[in_string::2]))
        if len(parts) % 2 == 0:
            in_string, in_docstring = not in_string, begins
    return "\n".join(found)


def _handed_on(words: str, lines: list[str], n: int) -> list[str]:
    """What is left of a sentence, which goes to the line that goes on with it, if there is one."""
    begins = re.match(r"\s*(# )?(?=[a-z(\[])", lines[n]) if n < len(lines) else None
    if begins is None or bool(begins[1]) != words.lstrip().startswith("#"):
        return [words]
    goes_on = words.startswith(begins[0]) and not words[len(begins[0]) :].startswith(" ")
    if not goes_on or re.search(r"\S {2,}", lines[n]) or words.endswith(('"""', ".", ":")):
        return [words]
    lines[n] = f"{words} {lines[n][len(begins[0]) :]}"
    return []


def _opens(lines: str) -> int:
    """How many more brackets lines open than they close."""
    code = _COMMENT.sub("", _masked(lines))
    return sum(code.count(sign) for sign in "([{") - sum(code.count(sign) for sign in ")]}")


def _masked(text: str) -> str:
    """The text with strings blotted out."""
    return _STRING.sub(lambda found: "_" * len(found[0]), text)


def _words(line: str, width: int) -> list[str]:
    """A line of a docstring; what explains a name goes on below its own words."""
    indent = line[: len(line) - len(line.lstrip())]
    named = re.match(r"\s*\S+(?:, \S+| \S+){0,3} {2,}", line)
    further = " " * len(named[0]) if named else indent
    return textwrap.wrap(line.strip(), width, initial_indent=indent, subsequent_indent=further, break_long_words=False)


def _comment(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    further = f"{indent}# "
    return textwrap.wrap(line.strip(), width, initial_indent=indent, subsequent_indent=further, break_long_words=False)


def _code(line: str, width: int, inside: bool) -> list[str]:
    """inside: the line is of brackets that a line before it opened."""
    indent, comment = line[: len(line) - len(line.lstrip())], _masked(line).find("#")
    if comment < 0:
        return _code_alone(line, width, inside)
    return [*_comment(indent + line[comment:], width), *_code_alone(line[:comment].rstrip(), width, inside)]


def _code_alone(line: str, width: int, inside: bool) -> list[str]:
    breaks, closed = _breaks(line)
    breaks = [each for each in breaks if inside or each.depth]
    if len(line) <= width or not breaks:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    outer = min(breaks, key=lambda each: (each.depth, each.binds, each.at))
    places = [each.at for each in breaks if (each.opened, each.binds) == (outer.opened, outer.binds)]
    if outer.opened < 0:  # of arguments in lines of their own, already
        return list(_rows(line, places, 0, len(line), indent, width))
    start, end = outer.opened + 1, closed.get(outer.opened)
    if end is None:  # its arguments go on in the next line, below each other
        rows = list(_rows(line, places, start, len(line), " " * start, width))
        return [line[:start] + rows[0].lstrip(), *rows[1:]]
    rows = [*_rows(line, places, start, end, f"{indent}    ", width)]
    head, tail = line[:start], indent + line[end:]
    return [*_code_alone(head, width, inside), *rows, *_code_alone(tail, width, inside)]


def _breaks(line: str) -> tuple[list[_Break], dict[int, int]]:
    """Where a line may be broken, and where brackets that it opens are closed."""
    breaks: list[_Break] = []
    closed: dict[int, int] = {}
    opened: list[int] = []
    masked = _masked(line)
    for at, sign in enumerate(masked):
        if sign in "([{":
            opened.append(at)
        elif sign in ")]}":
            if not opened:  # of a bracket in a line before: what follows is another expression's
                break
            closed[opened.pop()] = at
        elif sign == "," and line[at + 1 :].strip():
            breaks.append(_Break(at, len(opened), opened[-1] if opened else -1, 0))
        elif sign in _OPERATORS and masked[at - 1 : at + 2] == f" {sign} " and masked[:at].strip():
            breaks.append(_Break(at - 1, len(opened), opened[-1] if opened else -1, _OPERATORS[sign]))
    return breaks, closed


def _rows(line: str, places: list[int], start: int, end: int, indent: str, width: int) -> Iterator[str]:
    """The part of a line from `start` to `end`, broken at some of these places."""
    row = ""
    for first, last in zip([start, *(at + 1 for at in places)], [*(at + 1 for at in places), end]):
        piece = line[first:last].strip()
        if row and len(indent) + len(row) + len(piece) + 1 > width:
            yield from _code_alone(indent + row, width, True)
            row = ""
        row = f"{row} {piece}" if row else piece
    if row:
        yield from _code_alone(indent + row, width, True)
