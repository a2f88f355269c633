"""A plan as a notebook shows it: what `explain` prints, its tables as tables, and each kernel's stages to be opened."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from ...ir import page
from ...ir.errors import InternalError
from .explain import explanation
from .plan import Plan

_WORDS = "What letters and times mean"


def plan_page(plan: Plan) -> str:
    """HTML of the plan."""
    explained = explanation(plan)
    assert isinstance(explained, Group)
    blocks = [
        list(block) for is_space, block in groupby(explained.renderables, lambda part: part == "") if not is_space
    ]
    return f'<div style="font-size: 90%; max-width: 70em">{"".join(map(_block, blocks))}</div>'


def _block(parts: list[RenderableType]) -> str:
    """What stands between empty lines: stages of a kernel, and small print, are opened where wanted."""
    first = parts[0]
    body = "".join(map(_part, parts))
    if isinstance(first, Table) and isinstance(first.title, Text):
        return page.folded_html(first.title.plain, body)
    if all(isinstance(part, Text) and part.style == "dim" for part in parts):
        return page.folded_html(_WORDS, body)
    return body


def _part(part: RenderableType) -> str:
    match part:
        case str():
            return escape(part)
        case Text():
            bold = "; font-weight: bold" if part.style == "bold" else ""
            return f'<div style="margin: 0.2em 0{bold}">{escape(part.plain)}</div>'
        case Padding():
            return f'<div style="margin-left: {part.left / 2}em">{_part(part.renderable)}</div>'
        case Table():
            return _table(part)
        case _:
            raise InternalError(f"plan page: no HTML of {type(part).__name__}")


def _table(table: Table) -> str:
    header = [_plain(column.header) for column in table.columns] if table.show_header else ()
    return page.table_html(_rows(table), header, columns=[_style(column) for column in table.columns])


def _style(column: Column) -> str:
    return (page.RIGHT if column.justify == "right" else page.LEFT) + (page.UNBROKEN if column.no_wrap else "")


def _rows(table: Table) -> Iterator[list[str]]:
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield [escape(_plain(cell)) for cell in cells]


def _plain(cell: RenderableType) -> str:
    if not isinstance(cell, (str, Text)):
        raise InternalError(f"plan page: expected text in a cell, got {type(cell).__name__}")
    return cell.plain if isinstance(cell, Text) else cell
