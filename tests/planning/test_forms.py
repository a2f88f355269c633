"""benchmarks/forms.py: which forms are timed, and what is said of the choices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import forms
from bench_rows import Row

ROW = Row("causal", 1, 2, 256, 128)


def test_each_kernel_with_several_forms_is_a_case() -> None:
    cases = list(forms.cases_of(ROW, ["hopper"]))
    assert [(case.direction, case.kernel) for case in cases] == [
        ("forward", "flash_forward"), ("backward", "flash_backward"),
    ]  # fmt: skip
    for case in cases:
        assert case.chosen == next(iter(case.schedules)) and len(case.schedules) > 1
        assert case.predicted.keys() == case.schedules.keys() and min(case.predicted.values()) > 0
        assert all(f"{case.kernel}=hopper:{form}" in text for form, text in case.schedules.items())
    jobs = forms.jobs_of(ROW, cases)
    assert len(jobs) == sum(len(case.schedules) for case in cases) + 1


def test_choices_are_counted_that_are_near_the_fastest() -> None:
    def case(chosen: float, of_model: float) -> forms.Case:
        predicted = {"a": 3.0, "b": 2.0, "c": 4.0}
        measured = {"a": chosen, "b": of_model, "c": 100.0}
        return forms.Case("row", "hopper", "forward", "flash_forward", "a", predicted, {}, measured)

    text = forms.markdown([case(104.0, 106.0), case(101.0, 99.0), forms.Case("r", "t", "forward", "k", "a", {}, {})])
    assert "| row | hopper flash_forward | a | b | c | 1.04 | 1.06 |" in text
    assert "Within 5% of the fastest form: chosen: 2 of 2, by the model: 1 of 2." in text
