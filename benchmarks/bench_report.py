"""Tables of the benchmark, for a terminal, for docs and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench_first_call import FirstCall
from bench_measure import Ceilings, HostTime, RowResult
from bench_peers import TITLES
from rich.console import Console
from rich.table import Table


@dataclass
class Report:
    """Everything one run found."""

    machine: str  # card and versions, one line
    columns: tuple[str, ...]
    command: str  # that makes this report again
    rows: list[RowResult] = field(default_factory=list)
    ceilings: Ceilings | None = None
    host_us: dict[str, HostTime | str] = field(default_factory=dict)  # or why not
    first_calls: dict[str, FirstCall] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Grid:
    """A table as text, however it is shown."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


class Notes:
    """Reasons, each printed once under the table and referred to by a letter or two."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, reason: str) -> str:
        return f"({self._marks.setdefault(reason, _letters(len(self._marks)))})"

    def lines(self) -> tuple[str, ...]:
        return tuple(f"({mark}) {reason}" for reason, mark in self._marks.items())


def _letters(number: int) -> str:
    """0 -> a, 25 -> z, 26 -> aa."""
    head, last = divmod(number, 26)
    return (_letters(head - 1) if head else "") + chr(ord("a") + last)


# --- grids --------------------------------------------------------------------------------------------------------


def grids(report: Report) -> list[Grid]:
    """All tables that have something in them."""
    found = [speed_grid(report.rows, report.columns), error_grid(report.rows, report.columns)]
    found.append(memory_grid(report.rows, report.columns))
    if report.host_us or report.first_calls:
        found.append(latency_grid(report))
    return found


def speed_grid(rows: Sequence[RowResult], columns: Sequence[str]) -> Grid:
    notes = Notes()
    lines = tuple(
        (result.row.name, *(_speed(result, column, notes) for column in columns), _mask_build(result))
        for result in rows
    )
    header = ("bf16 but for FP8, B S = 16k", *(TITLES[column] for column in columns), "Flex mask build")
    return Grid("Forward / backward, TFLOP/s of visible work (medians)", header, lines, notes.lines())


def _speed(result: RowResult, column: str, notes: Notes) -> str:
    def one(direction: str) -> str:
        speed = result.tflops(column, direction)
        reason = result.cells[column].reason(direction)
        return notes.mark(reason or "not measured") if speed is None else f"{speed:.0f}"

    forward, backward = one("forward"), one("backward")
    cell = result.cells[column]
    more = (f" by {cell.by}" if cell.by else "") + (" WRONG" if cell.is_wrong else "")
    return forward + more if forward == backward and forward.startswith("(") else f"{forward} / {backward}{more}"


def _mask_build(result: RowResult) -> str:
    found = [cell.setup_ms for cell in result.cells.values() if cell.setup_ms is not None]
    return f"{min(found):.1f} ms" if found else ""


def error_grid(rows: Sequence[RowResult], columns: Sequence[str]) -> Grid:
    """Relative errors against the row's reference: output / worst gradient."""

    def one(result: RowResult, column: str) -> str:
        cell = result.cells[column]
        if column == result.reference:
            return "reference"
        if cell.out_error is None:
            return ""
        gradients = "" if cell.grad_error is None else f" / {cell.grad_error:.1e}"
        return f"{cell.out_error:.1e}{gradients}{' WRONG' if cell.is_wrong else ''}"

    lines = tuple((result.row.name, *(one(result, column) for column in columns)) for result in rows)
    title = "Difference from a peer, relative: output / worst of the three gradients"
    return Grid(title, ("", *(TITLES[column] for column in columns)), lines)


def memory_grid(rows: Sequence[RowResult], columns: Sequence[str]) -> Grid:
    def one(result: RowResult, column: str) -> str:
        extra = result.cells[column].extra_mib
        return "" if extra is None else f"{extra:.0f}"

    lines = tuple((result.row.name, *(one(result, column) for column in columns)) for result in rows)
    title = "Peak memory beyond operands, output and gradients, forward + backward, MiB"
    return Grid(title, ("", *(TITLES[column] for column in columns)), lines)


def latency_grid(report: Report) -> Grid:
    notes = Notes()
    columns = [column for column in report.columns if column in report.host_us or column in report.first_calls]
    lines = tuple((TITLES[column], *_latencies(report, column, notes)) for column in columns)
    header = (
        "",
        "host time of a call, us: median (least)",
        "of forward + backward, us",
        "first call, caches empty, s",
        "first call of a warm process, s",
    )
    return Grid("What a call costs the host", header, lines, notes.lines())


def _latencies(report: Report, column: str, notes: Notes) -> tuple[str, str, str, str]:
    host, first = report.host_us.get(column), report.first_calls.get(column)
    if isinstance(host, str):
        calls = (notes.mark(host), "")
    else:
        calls = (_median_and_least(host.forward), _median_and_least(host.both)) if host else ("", "")
    if first is None:
        return (*calls, "", "")
    if first.cold_s is None or first.warm_s is None:
        return (*calls, notes.mark(first.reason), "")
    return (*calls, f"{first.cold_s:.2f}", f"{first.warm_s:.2f}")


def _median_and_least(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f})"


# --- shown --------------------------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    for grid in grids(report):
        console.print(as_table(grid))
        for note in grid.notes:
            console.print(note, style="dim", markup=False, highlight=False)
    console.print(_ceiling_line(report), markup=False)


def as_table(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left")
    for number, name in enumerate(grid.header):
        table.add_column(name, justify="right" if number else "left")
    for line in grid.lines:
        table.add_row(*line, style="bold red" if any("WRONG" in text for text in line) else None)
    return table


def as_markdown(report: Report) -> str:
    """The same tables as Markdown."""
    parts = [f"{_ceiling_line(report)}\n", f"Made by `{report.command}`.\n"]
    for grid in grids(report):
        parts += [f"### {grid.title}\n", _markdown_table(grid)]
        if grid.notes:
            parts.append("\n".join(f"- {note}" for note in grid.notes) + "\n")
    return "\n".join(parts)


def _markdown_table(grid: Grid) -> str:
    lines = (grid.header, ("---",) * len(grid.header), *grid.lines)
    return "".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |\n" for line in lines)


def _ceiling_line(report: Report) -> str:
    found = report.ceilings
    ceilings = f" Matrix product {found.matmul_tflops:.0f} TFLOP/s, copy {found.copy_gbs:.0f} GB/s." if found else ""
    return f"{report.machine}.{ceilings} Whole run {report.seconds:.0f} s."


def write_json(report: Report, path: Path) -> None:
    """Everything measured, with TFLOP/s beside the times."""
    data = asdict(report)
    for line, result in zip(data["rows"], report.rows, strict=True):
        line["name"] = result.row.name
        for column, cell in line["cells"].items():
            for direction in ("forward", "backward"):
                cell[f"{direction}_tflops"] = result.tflops(column, direction)
    path.write_text(json.dumps(data, indent=1) + "\n")
