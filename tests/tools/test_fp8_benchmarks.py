"""Benchmarks of FP8 beside those of attention, as far as they run without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fp8_writes
from fp8_writes import ALL, APPENDS, Quantizing


def test_rows_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    fp8_writes.main(["--list"])
    listed = capsys.readouterr().out.splitlines()
    assert listed == [row.name for row in ALL] and len(set(listed)) == len(ALL)
    assert "append of a token, 64 sequences, pages, bf16" in listed
    assert "append of a token, 64 sequences, pages, FP8, a descale a token" in listed
    assert "quantize 512 MiB, a descale a token, in columns" in listed
    with pytest.raises(SystemExit, match="2"):
        fp8_writes.main(["--rows", "nothing"])
    assert "no row has 'nothing'; the rows are append of" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="1"):
            fp8_writes.main(["--rows", "append"])


@pytest.mark.parametrize("row", APPENDS, ids=lambda row: row.name)
def test_each_append_runs(row: fp8_writes.Appending) -> None:
    row.made("cpu", rows=3)()


def test_a_row_says_its_share_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_writes, "ROUNDS", 1)
    rows = [Quantizing((1, 2, 100, 32), per, "columns") for per in ("tensor", "head", 64, "token")]
    assert [row.bytes - 3 * 200 * 32 for row in rows] == [4, 8, 16, 800]
    lines = [*fp8_writes.measured(rows, "cpu")]
    assert len(lines) == 4 and all("GB/s" in line and "% of a copy" in line for line in lines)
