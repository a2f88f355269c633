"""Lines of generated text that are too long: what breaks them changes no program."""

from __future__ import annotations

import ast

import pytest

from tests.same.texts import texts_of
from weft.codegen.lines import WIDTH, fitted

CODE = '''\
"""A map: {words}.

  name      what it is, {words}
"""
first, second = called(alpha, (beta, gamma[:, None]), "a, b # c")  # {words}
if first:
    # {words}
    # and more of it
    return (first * second + called(first, second)).to(first) & (second | first)
assembly = run("""{{
    add.f32 one, two; // as long as it may be, for nothing here is Python's to break
}}""", [first,
     second, called(first, second)])
values = [
    first, second, called(first, [second, first], first), second,
]
'''.format(words="words that go on and on, up to here")


def meaning(text: str) -> str:
    """The program that Python reads, with words of docstrings apart from where lines end."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for each in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                each.value.value = " ".join(each.value.value.split())
    return ast.dump(tree)


@pytest.mark.parametrize("width", [20, 30, 40, 60, 90])
def test_the_program_is_the_same_at_any_width(width: int) -> None:
    text = fitted(CODE, width)
    assert meaning(text.replace("return", "x =")) == meaning(CODE.replace("return", "x ="))
    assert width < 60 or max(len(line) for line in text.splitlines() if "//" not in line) <= width


def test_a_sentence_goes_on_in_the_next_line() -> None:
    text = "# one two three four\n# five six.\n# Seven.\n"
    assert fitted(text, 18) == "# one two three\n# four five six.\n# Seven.\n"


@pytest.mark.parametrize(
    "name", ["t5-causal-triton-h200", "documents-256x256-hopper-h200", "alibi-packed_paged-hopper", "encoding-cpu-cpu"]
)
def test_lines_of_generated_modules_fit(name: str) -> None:
    texts = texts_of(name)
    lines = [line for part in ("forward", "backward") for line in texts.get(part, "").splitlines()]
    assert len(lines) > 200 and [line for line in lines if len(line) > WIDTH] == []
