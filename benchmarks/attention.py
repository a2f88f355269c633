"""Weft beside plain torch, FA2 and cuDNN (SDPA), FlexAttention (Triton and FLASH) and FA4: one process, one GPU.

    python benchmarks/attention.py --json out.json --markdown out.md     all rows, under 8 minutes on an H200
    python benchmarks/attention.py --quick                               three rows, about a minute
    python benchmarks/attention.py --rows 'D128.*causal' --columns cudnn,weft_hopper
    python benchmarks/attention.py --fp8                                 forwards of FP8 operands, about three minutes
    python benchmarks/attention.py --fp8 --list                          names of rows; needs no GPU

Every contender of a row is compiled and checked first; then all take turns, in shuffled rounds, with a cold L2 at each
launch, timed by CUDA events. Forward and backward are timed apart, both through the public API and autograd. A column
that cannot do a row, or fails, shows why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_first_call import FirstCall, first_call
from bench_measure import Effort, ceilings, host_times, measure_row
from bench_peers import BF16_COLUMNS, COLUMNS, FP8_COLUMNS, TITLES
from bench_report import Report, as_markdown, print_report, speed_grid, write_json
from bench_rows import FP8, QUICK, ROWS, Row
from rich.console import Console

FIRST_CALL_COLUMNS = ("flex", "weft_triton", "weft_hopper")  # the ones that compile


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="REGEX", default="", help="only rows whose name matches")
    parser.add_argument("--columns", metavar="LIST", help="of " + ", ".join(COLUMNS))
    parser.add_argument("--fp8", action="store_true", help="rows of FP8 operands in place of those of bf16")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="three rows, two rounds, no first calls")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--launches", type=int, default=5, help="timed launches in a round")
    parser.add_argument("--no-first-calls", action="store_true", help="leave out the processes that time first calls")
    parser.add_argument("--no-host-time", action="store_true", help="leave out the host time of a call")
    parser.add_argument("--seconds", type=float, default=460, help="time budget; what it does not cover is listed")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="the same tables as Markdown")
    found = parser.parse_args(words)
    found.columns = _columns(found)
    if unknown := [column for column in found.columns if column not in COLUMNS]:
        parser.error(f"--columns: expected some of {', '.join(COLUMNS)}, got {', '.join(unknown)}")
    if not chosen_rows(found):
        names = "; ".join(row.name for row in _rows(found))
        parser.error(f"--rows: no row matches {found.rows!r}; the rows are {names}")
    return found


def _columns(options: argparse.Namespace) -> tuple[str, ...]:
    if options.columns is not None:
        return tuple(filter(None, options.columns.split(",")))
    return FP8_COLUMNS if options.fp8 else BF16_COLUMNS


def _rows(options: argparse.Namespace) -> tuple[Row, ...]:
    return FP8 if options.fp8 else QUICK if options.quick else ROWS


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    return [row for row in _rows(options) if re.search(options.rows, row.name)]


def machine_line() -> str:
    import triton

    cudnn = torch.backends.cudnn.version()
    peers = importlib.metadata.distributions(name="flash-attn-4")  # none where it is not installed
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" + "".join(f", {d.name} {d.version}" for d in peers)
    )


def run(options: argparse.Namespace, console: Console) -> Report:
    """Measure everything asked for. What was found so far is on disk after each row."""
    begin = time.monotonic()
    deadline = begin + options.seconds
    report = Report(machine_line(), options.columns, "python benchmarks/attention.py --markdown PATH")
    report.ceilings = ceilings()
    effort = Effort(2 if options.quick else options.rounds, options.launches, deadline)
    rows = chosen_rows(options)
    if not (options.no_host_time or options.fp8):
        report.host_us = host_times(report.columns)
        console.print("host times measured", style="dim")
    for number, row in enumerate(rows, 1):
        result = measure_row(row, options.columns, effort)
        report.rows.append(result)
        report.seconds = time.monotonic() - begin
        torch.cuda.empty_cache()
        _save(report, options)
        line = speed_grid([result], options.columns).lines[0]
        shown = ", ".join(f"{TITLES[c]} {text}" for c, text in zip(options.columns, line[1:-1], strict=True))
        console.print(f"{time.monotonic() - begin:4.0f} s  {number}/{len(rows)} {line[0]}: {shown}", highlight=False)
    if not (options.quick or options.fp8 or options.no_first_calls):
        _first_calls(report, deadline, console)
    report.seconds = time.monotonic() - begin
    _save(report, options)
    return report


def _first_calls(report: Report, deadline: float, console: Console) -> None:
    for column in FIRST_CALL_COLUMNS:
        left = deadline - time.monotonic()
        if column in report.columns and left < 10:
            report.first_calls[column] = FirstCall(None, None, "not run: the time budget was used up")
        elif column in report.columns:
            console.print(f"first call of {TITLES[column]}", style="dim")
            report.first_calls[column] = first_call(column, timeout_s=left / 2)


def _save(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        write_json(report, options.json)
    if options.markdown:
        options.markdown.write_text(as_markdown(report))


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    if options.list:
        print("\n".join(row.name for row in chosen_rows(options)))
        return
    console = Console(width=None if sys.stdout.isatty() else 220)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py: expected a CUDA device, found none")
    warnings.simplefilter("ignore")  # of the peers: experimental features, reduced precision
    report = run(options, console)
    print_report(report, console)
    if any(cell.is_wrong for result in report.rows for cell in result.cells.values()):
        sys.exit("some results are WRONG: see the table of differences")


if __name__ == "__main__":
    main()
