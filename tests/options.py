"""python -m tests.options: write what follows from the list of the options of a call (runtime/options.py).

That is api/calls/signatures.py, which type checkers read, and the table in docs/language.md. A test compares both.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

from weft.runtime import options

ROOT = Path(__file__).parents[1]
SIGNATURES, PAGE = ROOT / "api" / "calls" / "signatures.py", ROOT / "docs" / "language.md"
HEAD = "| option | meaning |\n| --- | --- |\n"
RESULTS = {"Literal[False] = False": "Tensor", "Literal[True]": "tuple[Tensor, Tensor]", "bool": "Result"}
TEXT = '''"""What type checkers know of calls. `python -m tests.options` writes it from runtime/options.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, overload

import torch
from torch import Tensor

from ..compiler.planning.schedule import Schedule
from ..runtime.options import Form

Result = Tensor | tuple[Tensor, Tensor]
Own = Tensor | SupportsFloat  # an operand of the variant's own: a tensor, or a number of Python or numpy


class Methods:
    """`weft.Attention` as type checkers see its calls."""

    if TYPE_CHECKING:

'''


def types() -> dict[str, tuple[str, str]]:
    """The type and the default of each option, as they are written in the list."""
    body = ast.parse(textwrap.dedent(inspect.getsource(options.CallOptions))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for line in body:
        if isinstance(line, ast.AnnAssign):
            kind = line.annotation.slice.elts[0]  # type: ignore[attr-defined]
            found[line.target.id] = ast.unparse(kind), ast.unparse(line.value)  # type: ignore[union-attr, arg-type]
    return found


def signatures() -> str:
    """The text of api/calls/signatures.py."""
    parts = [TEXT]
    for method, defined in (("__call__", False), ("reference", True)):
        for flag, result in RESULTS.items():
            own = [f"{n}: {kind} = {default}" for n, (kind, default) in types().items() if n != "return_lse"
                   and n in options.taken(defined)]  # fmt: skip
            main = ["self", "query: Tensor", "key: Tensor", "value: Tensor | None = None", "*", f"return_lse: {flag}"]
            given = [part.replace(" ", "\0") for part in (*main, *own, "**own: Own")]  # a parameter is never divided
            indent = " " * 12
            lines = textwrap.fill(", ".join(given), 106, initial_indent=indent, subsequent_indent=indent)
            lines = lines.replace("\0", " ")
            parts.append(
                f"        @overload\n        def {method}(\n{lines},\n        ) -> {result}: ...  # fmt: skip\n"
            )
        parts.append(f"        def {method}(self, *given: Any, **own: Any) -> Any: ...\n")
    return "".join(parts)


def page() -> str:
    """docs/language.md with the table as it should be."""
    text = PAGE.read_text()
    begin = text.index(HEAD) + len(HEAD)
    end = text.index("\n\n", begin) + 1
    return text[:begin] + "".join(f"{row}\n" for row in options.rows_of_the_table()) + text[end:]


if __name__ == "__main__":
    SIGNATURES.write_text(signatures())
    PAGE.write_text(page())
