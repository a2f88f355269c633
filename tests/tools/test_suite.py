"""The tests themselves: their names, what `make test` runs of them, and that what compiles says so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import left_out
from tests.recorded import Recorded

TESTS = Path(__file__).parents[1]


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_test_that_is_not_marked_cannot_compile() -> None:
    triton = pytest.importorskip("triton")
    with pytest.raises(pytest.fail.Exception, match="compiles a kernel"):
        triton.compile(None)


def case(folder: str, marks: tuple[str, ...] = (), sampled: int = 0, **parameters: object) -> Any:
    """What `left_out` reads of a test's case."""
    found = {name: SimpleNamespace(args=()) for name in marks}
    if sampled:
        found["sampled"] = SimpleNamespace(args=(sampled,))
    return SimpleNamespace(
        path=TESTS / folder / "test_it.py",
        callspec=SimpleNamespace(params=parameters),
        iter_markers=lambda name: [SimpleNamespace(args=(parameter,)) for parameter in parameters],
        get_closest_marker=found.get,
    )


def names_kept(cases: list[Any]) -> list[list[object]]:
    out = [id(c) for c in left_out(cases)]
    return [[*c.callspec.params.values()] for c in cases if id(c) not in out]


@pytest.mark.parametrize(
    ("folder", "marks", "kept"),
    [
        ("attention", (), [["a", 1], ["b", 2], ["c", 1]]),  # each value once
        ("attention", ("every",), [["a", 1], ["a", 2], ["b", 1], ["b", 2], ["c", 1], ["c", 2]]),
        ("machine_code", ("compiles",), [["a", 1]]),
        ("language", (), [["a", 1], ["a", 2], ["b", 1], ["b", 2], ["c", 1], ["c", 2]]),
    ],
)
def test_cases_that_make_test_runs(folder: str, marks: tuple[str, ...], kept: list[list[object]]) -> None:
    assert names_kept([case(folder, marks, name=name, width=width) for name in "abc" for width in (1, 2)]) == kept


@pytest.mark.parametrize("folder", ["attention", "gpu"])
def test_every_nth_case_of_a_sampled_test(folder: str) -> None:
    assert names_kept([case(folder, sampled=3, name=name) for name in "abcdefg"]) == [["a"], ["d"], ["g"]]
    several = [case("gpu", sampled=5, name=name, width=width) for name in "abc" for width in (1, 2)]
    assert names_kept(several) == [["a", 1], ["c", 2]]


def test_counts_are_held_to_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.recorded.FOLDER", tmp_path)
    monkeypatch.setattr("tests.recorded.LOCK", tmp_path / "lock")
    Recorded("test_it", "test[a]", "torch", writes=False)(
        "kernel", spilled=9
    )  # nothing of this version to compare with
    Recorded("test_it", "test[a]", "torch", writes=True)("kernel", spilled=8, loops=2)
    holds = Recorded("test_it", "test[a]", "torch", writes=False)
    holds("kernel", spilled=8, loops=1)
    with pytest.raises(
        AssertionError, match=r"kernel: more than recorded \(found, recorded\): \{'spilled': \(9, 8\)\}"
    ):
        holds("kernel", spilled=9, loops=2)
    with pytest.raises(AssertionError, match="other: nothing is recorded"):
        holds("other", spilled=0)
