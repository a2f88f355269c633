"""The templates of generated modules, as Jinja reads them. Imported where a module is generated, and not before."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.bccache import Bucket
from jinja2.ext import Extension

from ..ir.errors import InternalError
from .function_lines import taken_from_here
from .template_shelf import shelf

_HOLE = re.compile(r"^([ \t]*):: ((?:.*\\\n)*.*)\n", re.MULTILINE)


@lru_cache(maxsize=4)
def environment(*folders: Path) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_Shelved(),
        extensions=[LineHoles],
    )
    made.filters |= {"lines": lines, "listed": listed, "quoted": quoted, "complete": complete, "of_dtype": of_dtype}
    made.filters |= {"named": named, "tupled": tupled, "taken": taken, "from_here": from_here}
    return made


def lines(text: str, column: int) -> str:
    """The lines of a text at a column; nothing of a text that has none.

    >>> lines("a\\n    b\\n", 4), lines("\\n", 4)
    ('    a\\n        b\\n', '')
    """
    text = str(text).strip()
    return textwrap.indent(text, " " * column) + "\n" if text else ""


def listed(names: Iterable[str], width: int = 116) -> str:
    """Names as parameters or arguments of many lines; nothing where there are none. Empty names are left out.

    >>> listed(["a", "", "b: int"])
    'a, b: int,'
    """
    rows: list[str] = []
    for name in filter(None, names):
        if rows and len(rows[-1]) + len(name) + 2 <= width:
            rows[-1] += f" {name},"
        else:
            rows.append(f"{name},")
    return "\n".join(rows)


def quoted(names: Iterable[str], width: int = 116) -> str:
    """The same of names as texts. An entry may be several names, with commas between them.

    >>> quoted(["a", "", "b, c"])
    '"a", "b", "c",'
    """
    return listed([f'"{name.strip()}"' for entry in names for name in entry.split(",") if name.strip()], width)


def named(things: Iterable[object], *patterns: str) -> list[str]:
    """The names that things have by patterns, one thing after the other.

    >>> named([1, 2], "key{0}"), named(["a"], "{0}_low", "{0}_high")
    (['key1', 'key2'], ['a_low', 'a_high'])
    """
    return [pattern.format(thing) for thing in things for pattern in patterns]


def tupled(names: Iterable[str]) -> str:
    """A tuple, as one argument; "" where there are no names.

    >>> tupled(["a", "", "b"]), tupled(["a"]), tupled([])
    ('(a, b)', '(a,)', '')
    """
    found = [name for name in names if name]
    return f"({', '.join(found)}{',' * (len(found) == 1 and ', ' not in found[0])})" if found else ""


def taken(names: Iterable[str], source: str) -> str:
    """Lines that take such an argument apart.

    >>> taken(["a", "b"], "operands"), taken(["a"], "operands")
    ('a, b = operands', '(a,) = operands')
    """
    whole = tupled(names)
    if not whole:
        return ""
    line = f"{whole if whole.endswith(',)') else whole[1:-1]} = {source}"
    if len(line) <= 100:
        return line
    rows = textwrap.indent(listed(whole[1:-1].split(", "), 100), "    ")
    return f"(\n{rows}\n) = {source}"


def from_here(names: Iterable[str]) -> str:
    """Lines that take these out of `here`.

    >>> from_here(["head", "q_len"])
    'head, q_len = here.head, here.q_len'
    """
    return "\n".join(taken_from_here([*names]))


def of_dtype(table: Mapping[str, Any], dtype: str) -> Any:
    """What a table by dtype has of one. Raises InternalError where it has nothing: no dtype stands for another.

    >>> of_dtype({"bf16": "bf16x2", "fp16": "f16x2"}, "fp16")
    'f16x2'
    """
    if dtype not in table:
        raise InternalError(f"template: expected one of {', '.join(table)}, got {dtype}")
    return table[dtype]


def complete(part: object) -> object:
    """A part, and what it does not give itself as the part that it names `otherwise` gives it."""
    return _Complete(part) if hasattr(part, "otherwise") else part


class _Complete:
    def __init__(self, part: Any) -> None:
        self._part, self._otherwise = part, complete(part.otherwise)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part if hasattr(self._part, name) else self._otherwise, name)


class LineHoles(Extension):
    """`:: what` on a line of its own prints the lines of `what` at that column, and no line where it has none.

    So a macro of lines knows nothing of where it is called, and one that has nothing to say needs no condition around
    it. A line that ends with a backslash goes on in the next one.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        # a comment takes the end of the line along; lines are as many as before, so that messages name the right one
        return _HOLE.sub(lambda hole: f"{{{{ ({_joined(hole[2])}) | lines({len(hole[1])}) }}}}{{##}}\n", source)


def _joined(text: str) -> str:
    return text.replace("\\\n", "\n")


class _Shelved(jinja2.BytecodeCache):
    """Compiled templates on the shelf. Jinja looks whether they are those of the text that a template has now."""

    def load_bytecode(self, bucket: Bucket) -> None:
        found = shelf().read(bucket.key)
        if found is not None:
            bucket.bytecode_from_string(found)

    def dump_bytecode(self, bucket: Bucket) -> None:
        shelf().write(bucket.key, bucket.bytecode_to_string())
