"""`make near`: tests of a file, of which each is there, and which end in under a minute."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.near import RECORDED, ROOT, SECONDS, is_there, picked, recorded_for

FOUND: dict[str, Any] = json.loads(RECORDED.read_text())


def test_most_of_what_is_recorded_is_there() -> None:
    """Else it is to be recorded anew: tests/near.py says how."""
    gone = [test for test in FOUND["tests"] if not is_there(test)]
    lost = [path for path in FOUND["files"] if not (ROOT / path).exists()]
    assert len(gone) <= 0.1 * len(FOUND["tests"]) and len(lost) <= 0.1 * len(FOUND["files"]), [*gone, *lost]


def test_the_tests_of_a_file_end_in_under_a_minute() -> None:
    seconds = FOUND["seconds"]
    assert {path for path, tests in FOUND["files"].items() if sum(seconds[t] for t in tests) > SECONDS} == set()


@pytest.mark.parametrize("family", ["hopper", "triton", "cpu"])
def test_every_kernel_has_tests(family: str) -> None:
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "templates" / family).glob("*.py.jinja")]
    assert paths and all(FOUND["files"].get(path) for path in paths if "{{" in (ROOT / path).read_text())


def test_a_kernel_is_covered_by_tests_of_its_target() -> None:
    assert "tests/attention/test_lists_on_hopper.py::test_dense" in recorded_for(
        "templates/hopper/flash_forward.py.jinja"
    )
    assert recorded_for("api/none.py") == [] and recorded_for("none/near.py") == ["tests/tools/test_near.py"]


def test_tests_that_tell_most_a_second_come_first_until_the_time_is_up() -> None:
    reached: dict[str, set[Any]] = {"all": {1, 2, 3, 4}, "half": {1, 2}, "one": {3}, "same": {1, 2}, "slow": {5}}
    seconds = {"all": 30.0, "half": 1.0, "one": 2.0, "same": 1.5, "slow": 2 * SECONDS}
    assert picked(reached, seconds) == ["half", "one", "all"]
    assert picked(reached, {**seconds, "all": SECONDS - 1}) == ["half", "one"]
