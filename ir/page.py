"""HTML as notebooks show it. Colours are those of the page around it, so that it reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

LEFT, RIGHT, UNBROKEN = "text-align: left", "text-align: right", "; white-space: nowrap"  # styles of columns
_TABLE = "border-collapse: collapse; margin: 0.4em 0; color: inherit; font-size: inherit"
_CELL = "padding: 0.1em 0.8em 0.1em 0; vertical-align: top; background: transparent; border: 0"


def code_html(text: str) -> str:
    """A name or an expression within a line.

    >>> code_html("kv_pos <= q_pos")
    '<code>kv_pos &lt;= q_pos</code>'
    """
    return f"<code>{escape(text)}</code>"


def lines_html(text: str) -> str:
    """Text whose lines stay as they are, such as a declaration; long ones are folded."""
    return f'<pre style="margin: 0.4em 0; white-space: pre-wrap; background: transparent">{escape(text)}</pre>'


def folded_html(title: str, body: str) -> str:
    """A part that opens where its title is clicked; title is text, body HTML."""
    return f'<details style="margin: 0.4em 0"><summary>{escape(title)}</summary>{body}</details>'


def table_html(rows: Iterable[Sequence[str]], header: Sequence[str] = (), *, columns: Sequence[str] = ()) -> str:
    """Rows of HTML cells. header: titles, as text. columns: the style of each column, where it is not LEFT."""

    def row(tag: str, cells: Sequence[str], more: str = "") -> str:
        styles = (*columns, *[LEFT] * (len(cells) - len(columns)))
        return "".join(f'<{tag} style="{_CELL}; {own}{more}">{cell}</{tag}>' for cell, own in zip(cells, styles))

    line = "; font-weight: bold; border-bottom: 1px solid currentColor"
    head = f"<thead><tr>{row('th', [escape(title) for title in header], line)}</tr></thead>" if any(header) else ""
    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return f'<table style="{_TABLE}">{head}<tbody>{body}</tbody></table>'
