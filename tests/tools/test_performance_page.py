"""docs/performance.md and the table of README.md are what the stored results give."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_report
import performance
from bench_first_call import FirstCall
from bench_measure import Ceilings, Cell, HostTime, RowResult
from bench_report import Report
from bench_results import Result, of_report, read, stored
from bench_rows import DENSE

ROW = DENSE[0]


def test_the_page_and_the_readme_are_written_from_the_results() -> None:
    """After a change of either: python benchmarks/performance.py."""
    results = stored()
    assert performance.page(results) == performance.PAGE.read_text()
    text = performance.README.read_text()
    assert performance.readme(results, text) == text


def test_each_result_says_when_on_what_and_by_which_code() -> None:
    results = stored()
    assert len(results) >= 41
    for result in results:
        assert result.name.startswith(f"{result.date}-{result.short_card}-") and result.versions and result.command
        assert result.rates or result.tables
        for table in result.tables.values():
            assert {len(row) for row in table.rows} == {len(table.columns)}, f"{result.name}: {table.title}"


def reported(tmp_path: Path) -> Path:
    cells = {
        "cudnn": Cell(1.0, 3.0, extra_mib=130.2),
        "fa4": Cell(0.9, 2.0, out_error=1e-3, grad_error=1.1, extra_mib=131.0),  # its gradients are wrong
        "weft_hopper": Cell(0.8, 2.0, out_error=1e-3, grad_error=1e-3, extra_mib=134.0),
        "math": Cell(forward_reason="out of memory", backward_reason="out of memory"),
    }
    made = Report(
        "NVIDIA H200, torch 2.11.0+cu128, Triton 3.6.0, cuDNN 9.19.0",
        tuple(cells),
        "python benchmarks/attention.py",
        [RowResult(ROW, "cudnn", cells)],
        Ceilings(812.04, 4243.0),
        {"weft_hopper": HostTime((13.0, 12.4, 14.1), (120.0, 114.0, 125.0)), "fa4": "no such call"},
        {"weft_hopper": FirstCall(3.21, 0.79), "flex": FirstCall(None, None, "not run")},
    )
    bench_report.write_json(made, tmp_path / "bench.json")
    return tmp_path / "bench.json"


def test_a_report_of_the_benchmark_becomes_a_result(tmp_path: Path) -> None:
    report = json.loads(reported(tmp_path).read_text())
    result = of_report(report, "2026-12-01", "abc1234")
    rates = result.rates[ROW.name]
    assert rates.keys() == {"cudnn", "fa4", "weft_hopper"}
    assert rates["weft_hopper"] == tuple(
        round(ROW.flops(d) / ms / 1e9, 1) for d, ms in (("forward", 0.8), ("backward", 2.0))
    )
    assert rates["fa4"][1] is None and rates["fa4"][0] is not None
    assert result.versions == {"torch": "2.11.0+cu128", "Triton": "3.6.0", "cuDNN": "9.19.0"}
    assert result.tables["host"].rows == (("Weft hopper", "13.0 (12.4)", "120.0 (114.0)"),)
    assert result.tables["first_calls"].rows == (("Weft hopper", "3.21", "0.79"),)
    assert result.tables["memory"].rows == ((ROW.name, "130", "131", "134", ""),)
    path = result.save(tmp_path, "attention")
    assert path.name == "2026-12-01-h200-attention.json"
    again = read(path)
    assert (again.rates, again.tables, again.commit) == (result.rates, result.tables, "abc1234")


def one(date: str, name: str, **rates: tuple[float, float]) -> Result:
    return Result(date, "NVIDIA H200", {"torch": "2"}, None, None, "", rates={ROW.name: rates}, name=name)


def test_the_newest_figure_of_a_row_counts_and_an_older_one_says_so() -> None:
    old = one("2026-01-01", "old", cudnn=(100.0, 50.0), weft_hopper=(110.0, 40.0), flex=(60.0, 30.0))
    new = one("2026-02-01", "new", cudnn=(101.0, 51.0), weft_hopper=(202.0, 102.0))
    (row,) = performance.rows_of([new, old], "h200")
    text = performance.table_of_rates([row], performance.letters([new, old]))
    assert text.splitlines()[2] == f"| {ROW.name} | B | 101 / 51 | 60 / 30 (A) | 202 / 102 |"
    found = {(r.peer, r.direction, r.one_run): r.value for r in performance.ratios([new, old])}
    assert found[("cudnn", 0, True)] == 2.0 and found[("flex", 1, False)] == 3.4
    assert "| H200 | hopper | cuDNN | one run | 1 | 2.00 | 2.00 |" in performance.summary(
        performance.ratios([new, old])
    )


def test_rows_behind_are_named() -> None:
    slow = one("2026-01-01", "slow", fa4=(100.0, 100.0), weft_hopper=(90.0, 99.0))
    said = f"- More than 2 % behind FA4 on an H200, forwards:\n  - {ROW.name}: 0.90."
    assert performance.behind(performance.ratios([slow])) == said
