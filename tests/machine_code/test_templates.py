"""What templates are written with, and rules of those of `triton`, `cpu`, backwards and divided keys of `hopper`."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import jinja2
import pytest

from weft.codegen.loader import TEMPLATES
from weft.codegen.templates import environment, listed, quoted

ROOMS = [
    *(TEMPLATES / "triton").rglob("*.jinja"),
    *(TEMPLATES / "cpu").rglob("*.jinja"),
    *(TEMPLATES / "hopper" / "shares").glob("*.jinja"),
    *(TEMPLATES / "hopper").rglob("split_*.jinja"),
    *(TEMPLATES / "hopper" / "steps").glob("divide_*.jinja"),
    TEMPLATES / "hopper" / "flash_backward.py.jinja",
    *(TEMPLATES / "hopper" / "kernels").glob("*.jinja"),
    *(TEMPLATES / "hopper" / "features").glob("*.jinja"),
    *(
        path
        for folder in ("parts", "roles", "steps")
        for path in (TEMPLATES / "hopper" / folder).glob("backward_*.jinja")
    ),
    *(path for folder in ("roles", "steps") for path in (TEMPLATES / "hopper" / folder).glob("dquery_*.jinja")),
]
FORWARD = sorted({*(TEMPLATES / "hopper").rglob("*forward*.jinja")} - {*ROOMS})  # names come to it joined by commas


def _rendered(folder: Path, **files: str) -> str:
    for name, text in files.items():
        (folder / f"{name}.jinja").write_text(text)
    return environment.__wrapped__(folder).get_template("main.jinja").render(known=True)


def test_a_hole_of_lines_prints_them_at_its_column_or_no_line(tmp_path: Path) -> None:
    text = """\
{% macro two() %}

first
    second

{% endmacro %}
{% macro nothing() %}{% if not known %}never{% endif %}{% endmacro %}
def f():
    :: two()
    :: nothing()
    {% if known %}
        :: two() \\
          ~ ''
    {% endif %}
    return
"""
    expected = "def f():\n    first\n        second\n        first\n            second\n    return\n"
    assert _rendered(tmp_path, main=text).endswith(expected)


def test_a_mistake_in_a_hole_is_on_its_line(tmp_path: Path) -> None:
    with pytest.raises(jinja2.TemplateSyntaxError) as raised:
        _rendered(tmp_path, main="a\n    :: f(\\\n      1)\nb\n    :: f(2\n")
    assert raised.value.lineno == 5


def test_names_are_listed_in_rows() -> None:
    assert listed([]) == ""
    assert listed(["alpha", "", "beta: int", "gamma"], width=20) == "alpha, beta: int,\ngamma,"


def test_names_are_quoted_one_by_one() -> None:
    assert quoted([]) == ""
    assert quoted(["alpha", "", "beta, gamma"]) == '"alpha", "beta", "gamma",'


def test_a_part_is_complete_with_another(tmp_path: Path) -> None:
    base = "{% set a, b = 1, 2 %}{% macro c() %}3{% endmacro %}"
    own = '{% import "base.jinja" as base %}{% set otherwise = base %}{% set b = 20 %}'
    main = '{% import "own.jinja" as own %}{% set own = own | complete %}{{ own.a }} {{ own.b }} {{ own.c() }}'
    assert _rendered(tmp_path, base=base, own=own, main=main) == "1 20 3"
    with pytest.raises(jinja2.UndefinedError):
        _rendered(tmp_path, main=main.replace("own.a", "own.d"))


def test_lines_fit() -> None:
    paths = sorted(TEMPLATES.rglob("*.jinja"))
    lines = [(path.name, line) for path in paths for line in path.read_text().splitlines()]
    assert len(paths) > 100 and [line for line in lines if len(line[1]) > 140] == []


@pytest.mark.parametrize("path", [*ROOMS, *FORWARD], ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_a_template_can_be_read(path: Path) -> None:
    """Files and macros are short, and nothing is replaced in text that was printed before."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 600
    surgery = r"\| *replace|filter replace" + ("" if path in FORWARD else r"|({[{%]|^ *:: ).*\.split\(")
    assert [line for line in lines if re.search(surgery, line)] == []
    begins = [n for n, line in enumerate(lines) if "{% macro" in line]
    ends = [n for n, line in enumerate(lines) if re.search(r"\{%-? endmacro", line)]
    assert [n for n, end in zip(begins, ends, strict=True) if end - n > 80] == []


def test_kernels_do_not_ask_for_dropout() -> None:
    """Its own parts do. Code that is printed may have the word in a sentence."""
    asking = [
        path.name
        for path in ROOMS
        if re.search(r"{[{%:][^}]*\bdrops\b|^ *::.*\bdrops\b", path.read_text(), re.MULTILINE)
    ]
    assert sorted(asking) == ["backward_dropout.py.jinja", "dropout.py.jinja", "dropout.py.jinja"]


MOST_SHARED = 9  # lines in a row, blank ones not counted: what is longer is a part or a macro


def _shared(one: str, other: str) -> list[str]:
    """What two texts have in common: the first line of each run of more than MOST_SHARED lines."""
    (first, second) = ([line.strip() for line in text.splitlines() if line.strip()] for text in (one, other))
    size = MOST_SHARED + 1
    runs = {tuple(second[n : n + size]) for n in range(len(second) - size + 1)}
    return [first[n] for n in range(len(first) - size + 1) if tuple(first[n : n + size]) in runs]


def test_lines_that_two_templates_share_are_a_part_of_their_own() -> None:
    texts = {str(path.relative_to(TEMPLATES)): path.read_text() for path in sorted(TEMPLATES.rglob("*.jinja"))}
    assert {(a, b): found for a, b in combinations(texts, 2) if (found := _shared(texts[a], texts[b]))} == {}


def test_shared_lines_are_found() -> None:
    lines = [f"line {n}" for n in range(MOST_SHARED + 1)]
    assert _shared("\n\n".join(["a", *lines]), "\n".join([*lines, "b"])) == ["line 0"]
    assert _shared("\n".join(lines), "\n".join(lines[1:])) == []
