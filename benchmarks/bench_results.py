"""Results that are stored: one file for each run, `benchmarks/results/<date>-<card>-<what>.json`.

A file says when and on what a run was made, and what it measured: rates of rows and columns of the benchmark
(TFLOP/s forward and backward), and tables of anything else. `docs/performance.md` is written from these files.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
FITTED = "2026-11-26"  # the day of the last fit of the model of times: rows measured later had no say in it
Rates = tuple[float | None, float | None]  # forward, backward; None where it was not measured


@dataclass(frozen=True)
class Table:
    """A table as it is printed."""

    title: str
    columns: tuple[str, ...]  # the first is that of names of rows
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = (self.columns, ("---",) * len(self.columns), *self.rows)
        text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
        return text + "".join(f"\n- {note}" for note in self.notes) + "\n" * bool(self.notes)


@dataclass(frozen=True)
class Result:
    """What one run measured."""

    date: str  # YYYY-MM-DD
    card: str
    versions: Mapping[str, str]  # of torch, Triton and the peers
    commit: str | None  # that ran; None where it was not noted
    reported: str | None  # the commit that brought the figures into the docs, where the first is not known
    command: str
    matmul_tflops: float | None = None  # what the card reached in that run: a product of 8192, a copy
    copy_gbs: float | None = None
    rates: Mapping[str, Mapping[str, Rates]] = field(default_factory=dict)  # by row and column of the benchmark
    tables: Mapping[str, Table] = field(default_factory=dict)
    name: str = ""  # of the file, without its ending

    @property
    def short_card(self) -> str:
        """As file names have it: h200, h100, or a processor."""
        found = re.search(r"\b([A-Z]\d{2,3})\b", self.card)
        return (found[1] if found else self.card.split(",")[0].replace(" ", "-")).lower()

    def save(self, folder: Path, what: str) -> Path:
        path = folder / f"{self.date}-{self.short_card}-{what}.json"
        data = {key: value for key, value in asdict(self).items() if key != "name" and value not in ({}, None)}
        path.write_text(_text(data) + "\n")
        return path


def _text(data: object, indent: int = 0) -> str:
    """JSON with a line for each row: lists, and mappings of lists, stand on one line."""
    flat = json.dumps(data, ensure_ascii=False)
    if not isinstance(data, dict) or len(flat) + indent <= 118:
        if isinstance(data, list | tuple) and len(flat) + indent > 118:
            inner = ",\n".join(" " * (indent + 1) + _text(x, indent + 1) for x in data)
            return f"[\n{inner}\n{' ' * indent}]"
        return flat
    inner = ",\n".join(
        f"{' ' * (indent + 1)}{json.dumps(key, ensure_ascii=False)}: {_text(value, indent + 1)}"
        for key, value in data.items()
    )
    return f"{{\n{inner}\n{' ' * indent}}}"


def read(path: Path) -> Result:
    data = json.loads(path.read_text())
    tables = {
        key: Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), tuple(t.get("notes", ())))
        for key, t in data.pop("tables", {}).items()
    }
    rates = {row: {c: tuple(pair) for c, pair in cells.items()} for row, cells in data.pop("rates", {}).items()}
    return Result(**{"commit": None, "reported": None} | data, rates=rates, tables=tables, name=path.stem)


def stored(folder: Path = RESULTS) -> list[Result]:
    """All results, the newest first; of one day in the order of names."""
    return sorted((read(path) for path in sorted(folder.glob("*.json"))), key=lambda r: r.date, reverse=True)


# --- from a report of the benchmark -----------------------------------------------------------------------------------
def of_report(report: Mapping[str, Any], date: str, commit: str | None) -> Result:
    """What `benchmarks/attention.py --json` wrote, as a result."""
    card, *versions = [part.strip() for part in report["machine"].split(",")]
    ceilings = report["ceilings"] or {}
    rates = {line["name"]: dict(_rates(line["cells"])) for line in report["rows"]}
    return Result(
        date,
        card,
        {name: version for name, _, version in (text.rpartition(" ") for text in versions)},
        commit,
        None,
        report["command"],
        *(round(ceilings[key], 1) if ceilings else None for key in ("matmul_tflops", "copy_gbs")),
        rates={row: cells for row, cells in rates.items() if cells},
        tables=dict(_tables(report)),
    )


def _rates(cells: Mapping[str, Any]) -> Iterator[tuple[str, Rates]]:
    for column, cell in cells.items():
        bad = cell.get("bad_error", 0.02)
        wrong = any(e is not None and not e < bad for e in (cell["out_error"], cell["grad_error"]))
        forward, backward = (
            None if cell[f"{d}_tflops"] is None else round(cell[f"{d}_tflops"], 1) for d in ("forward", "backward")
        )
        if wrong:  # NaN too; a forward may be right whose gradients are not
            forward, backward = forward if (cell["out_error"] or 0) < bad else None, None
        if forward is not None or backward is not None:
            yield column, (forward, backward)


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    from bench_peers import TITLES  # lazy: it imports torch

    columns: Sequence[str] = report["columns"]
    memory = [
        (line["name"], *(_number(line["cells"][c]["extra_mib"], 0) for c in columns))
        for line in report["rows"]
        if any(line["cells"][c]["extra_mib"] is not None for c in columns)
    ]
    if memory:
        yield "memory", Table("Peak memory", ("MiB", *(TITLES[c] for c in columns)), tuple(memory))
    host = [
        (TITLES[c], *(_median_and_least(report["host_us"][c][d]) for d in ("forward", "both")))
        for c in columns
        if isinstance(report["host_us"].get(c), dict)
    ]
    if host:
        yield "host", Table("Host time of a call", ("us", "forward", "forward and backward"), tuple(host))
    first = [
        (TITLES[c], _number(cell["cold_s"], 2), _number(cell["warm_s"], 2))
        for c, cell in report["first_calls"].items()
        if cell["cold_s"] is not None
    ]
    if first:
        yield "first_calls", Table("First calls", ("s", "caches empty", "caches warm"), tuple(first))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _median_and_least(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f})"
