"""Predicted times beside measured ones: every row of docs/performance.md that names a kernel of Weft.

    python benchmarks/model.py              each row, then median and worst error
    python benchmarks/model.py --fit        constants of the model, found anew (paste them into compiler/planning/kernel_model.py)

No GPU is needed: plans are made for an H200, on which the rows were measured. An error is measured / predicted - 1, or
the other way round where that is larger than 1.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_rows import ROWS, Row
from bench_variants import weft_variant

import weft
from weft.compiler.planning.plan import Plan

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
DEVICE = "h200"
# Names of rows in the tables that are not those of bench_rows.
RENAMED = {
    "D64 H16 S1024 B64 causal (a layer of GPT-2 medium)": "D64 H16 S1024 B64 causal",
    "D128 H16 S8192 sink (f)": "D128 H16 S8192 sink",
    "D128 H16 S8192 documents 1024 (e)": "D128 H16 S8192 documents 1024",
    "D128 H16, 16k tokens in 16 sequences": "D128 H16 S16384 packed 1024",
    "D128 H8, 524k tokens in 64 of 1 to 16k": "D128 H8 S524288 B1 ragged 64",
    "D128 H8, 606k tokens in 64 of 9475": "D128 H8 S606400 B1 packed 9475",
}
BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True)
class Measured:
    """A time that was measured: of a call as the benchmark has it, or of kernels alone."""

    name: str
    row: Row
    direction: str
    target: str
    seconds: float
    deterministic: bool | None = None

    def __str__(self) -> str:
        return f"{self.target:6} {self.direction:8} {self.name}" + " repeats" * bool(self.deterministic)


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Titles and rows of every table of a page."""
    titles: list[str] | None = None
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            if titles is not None:
                yield titles, rows
            titles, rows = None, []
        elif titles is None:
            titles = cells
        elif not set("".join(cells)) <= set("-: "):
            rows.append(cells)


def measured(text: str) -> list[Measured]:
    """All times of a page, from the rates that it has them as."""
    found: dict[tuple[str, str, str, bool | None], Measured] = {}

    def add(name: str, row: Row, direction: str, target: str, rate: str, repeats: bool | None = None) -> None:
        if number := re.match(r"(\d+)", rate):
            seconds = row.flops(direction) / (float(number[1]) * 1e12)
            # of rows in several tables the first holds: it is the latest
            found.setdefault((row.name, direction, target, repeats), Measured(name, row, direction, target, seconds, repeats))

    for titles, rows in tables(text):
        for cells in rows:
            row = BY_NAME.get(RENAMED.get(cells[0], cells[0]))
            for title, cell in zip(titles[1:], cells[1:]):
                if row is not None and title in ("Weft hopper", "Weft triton"):
                    target = title.removeprefix("Weft ")
                    for direction, rate in zip(("forward", "backward"), cell.split("/")):
                        # in one run the backward behind hopper was triton's
                        old = "Weft triton" in titles and target == "hopper" and direction == "backward" and "plain torch" in titles
                        if not old:
                            add(cells[0], row, direction, target, rate.strip())
                if row is not None and title == "two passes":
                    add(cells[0], row, "backward", "hopper", cell, True)
        if rows and titles[0] == "" and titles[1:2] == ["D40"]:  # kernels alone, causal, S4096, B4
            for cells in rows:
                for title, cell in zip(titles[1:], cells[1:]):
                    dims = [int(n) for n in re.findall(r"\d+", title)]
                    row = Row("causal", 4, 2048 // dims[0] if dims[0] in (64, 128, 256) else 16, 4096, dims[0], own_value_dim=dims[1] if len(dims) > 1 else 0)
                    for direction, rate in zip(("forward", "backward"), cell.split("/")):
                        add(f"{title} S4096 causal", row, direction, cells[0].removeprefix("Weft "), rate.strip())
    for name, direction, target, rate in _variants(text):
        add(name, BY_NAME[name], direction, target, rate)
    return list(found.values())


def _variants(text: str) -> Iterator[tuple[str, str, str, str]]:
    """The table of what a variant can say, whose cells hold more than a rate."""
    names = {
        "dropout": "D128 H16 S8192 dropout 10", "sigmoid": "D128 H16 S8192 sigmoid",
        "full bias": "D64 H16 S4096 B1 bias", "T5": "D128 H16 S8192 t5 32",
    }  # fmt: skip
    for titles, rows in tables(text):
        if titles[1:] != ["forward", "backward"]:
            continue
        for cells in rows:
            name = next((n for word, n in names.items() if word in cells[0]), None)
            if name is None:
                continue
            first, *second = re.findall(r"(\d+) ?(?:/|\(|$)|/ (\d+)", cells[1])
            forward = re.match(r"(\d+)(?: / (\d+))?", cells[1])
            assert forward is not None
            yield name, "forward", "triton", forward[1]
            if forward[2]:
                yield name, "forward", "hopper", forward[2]
            yield name, "backward", "triton", cells[2]


def plan_of(each: Measured) -> Plan:
    """The plan of a row on the target that was timed."""
    row = each.row
    declared, operands = weft_variant(row, "cpu")
    options: dict[str, Any] = dict(operands)
    options.pop("cu_seqlens_q", None)
    options.pop("seed", None)
    lens = row.lens
    batch, length = row.batch, row.length
    sizes = weft.shape(
        batch=batch, heads=row.heads, kv_heads=row.kv_heads, q_len=length, head_dim=row.dim, value_dim=row.value_dim, dtype="bf16",
    )
    if lens:
        options["cu_seqlens_q"] = operands["cu_seqlens_q"]
    return declared.plan(sizes, device=DEVICE, target=each.target, deterministic=each.deterministic, **options)


def error(one: float, other: float) -> float:
    return max(one / other, other / one) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    errors = []
    for each in measured(PAGE.read_text()):
        if options.only not in str(each):
            continue
        try:
            plan = plan_of(each)
        except Exception as reason:
            print(f"{each!s:60} {type(reason).__name__}: {str(reason)[:100]}")
            continue
        predicted = plan.seconds(each.direction)
        errors.append(error(each.seconds, predicted))
        form = [str(k.form) for k in plan.kernels if k.direction == each.direction]
        print(f"{each!s:60} {each.seconds * 1e6:10.1f} us, predicted {predicted * 1e6:10.1f}: {predicted/each.seconds:5.2f} {form}", flush=True)
    print(f"{len(errors)} rows, median error {median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
