"""Branches that a generated module's own constants decide are left out."""

from __future__ import annotations

import ast

import pytest

import weft
from weft.codegen.decided import decided

ON, OFF = "A = gl.constexpr(True)  # why\n", "A = gl.constexpr(False)\n"
CASES = {
    "if, on": (ON + "if A:  # reason\n    f()\nelse:\n    g()", "# reason\nf()"),
    "if, off": (OFF + "if A:\n    f()\nelse:  # reason\n    g()", "# reason\ng()"),
    "without else": (OFF + "if A:\n    f()\nh()", "h()"),
    "elif, on": (ON + "if x:\n    f()\nelif A:\n    g()\nelse:\n    h()", "if x:\n    f()\nelse:\n    g()"),
    "elif, off": (OFF + "if x:\n    f()\nelif A:\n    g()\nelse:\n    h()", "if x:\n    f()\nelse:\n    h()"),
    "before elif": (OFF + "if A:\n    f()\nelif x:\n    g()", "if x:\n    g()"),
    "within": (ON + "if x:\n    if A and y:\n        if not A:\n            f()\n        g()",
               "if x:\n    if y:\n        g()"),
    "of an expression": (OFF + "a = (b if A else c + 1) * 2\nd = f(b if A else c)", "a = (c + 1) * 2\nd = f(c)"),
    "part of a test": (OFF + "if (x or A) and not A and y:\n    f()", "if x and y:\n    f()"),
    "of a decorator": (ON + "@f(b if A else c)\ndef g():\n    pass", "@f(b)\ndef g():\n    pass"),
    "side by side": (ON + "f(); g(A)\nif A:\n    h()", ON + "f(); g(A)\nh()"),
    "all of a text": (OFF + "if A:\n    f()", ""),
    "open": ("B = gl.constexpr(3)\nif B > 2:\n    f()", "B = gl.constexpr(3)\nif B > 2:\n    f()"),
    "still read": (ON + "f(A)", ON + "f(A)"),
    "a text that does not parse": (ON + "if A:", ON + "if A:"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_stays(case: str) -> None:
    text, expected = CASES[case]
    assert decided(text) == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_switch_is_left_to_a_reader(direction: str) -> None:
    variant = weft.Attention(weft.scores.softcap(50.0)(weft.score), weft.masks.causal, dropout=0.1, name="capped")
    text = variant.source(weft.shape(heads=4, q_len=256, head_dim=128), target="hopper", device="h200",
                          direction=direction)  # fmt: skip
    assert decided(text) == text
    names = {n.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If) for n in ast.walk(node.test)
             if isinstance(n, ast.Name)}  # fmt: skip
    assert not names & {"MASKED", "FAR", "LINEAR", "LAZY_RESCALE", "PAIR_MAXIMUM", "LOADS_AT_POSITIONS"}
