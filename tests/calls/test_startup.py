"""What a process imports before its first call is done, in one of its own."""

from __future__ import annotations

import os
from pathlib import Path

from tests import fresh
from weft.codegen.function_values import LOG2_E
from weft.codegen.functions import _USUAL_SCALE
from weft.compiler.analysis.values.symbolic import simplify
from weft.ir.expr import Const, call

PROGRAM = """
import sys
import torch, weft
late = {"sympy", "jinja2", "triton", "rich"}
assert not late & set(sys.modules), late & set(sys.modules)
variant = weft.Attention(mask=weft.masks.causal, name="startup")
query = torch.randn(1, 2, 20, 16, requires_grad=True)
variant(query, query, query).sum().backward()
print(*sorted(late & set(sys.modules)))
"""


def imported_by_a_first_call(folder: Path) -> list[str]:
    env = {**os.environ, "WEFT_CACHE_DIR": str(folder)}
    return fresh.run(PROGRAM, env=env, check=True).stdout.split()


def test_a_plain_score_is_generated_without_sympy_and_loaded_without_jinja(tmp_path: Path) -> None:
    assert imported_by_a_first_call(tmp_path) == ["jinja2"]
    assert imported_by_a_first_call(tmp_path) == []


def test_the_usual_scale_is_as_simple_as_sympy_would_make_it() -> None:
    in_powers_of_two = call("mul", Const(LOG2_E), _USUAL_SCALE)
    assert simplify(_USUAL_SCALE).text == _USUAL_SCALE.text
    assert simplify(call("mul", _USUAL_SCALE, Const(LOG2_E))).text == in_powers_of_two.text
