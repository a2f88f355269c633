"""`source` shows every kernel that a call launches, also where these are of several modules."""

from __future__ import annotations

import ast
from typing import Literal

import pytest

import weft
from weft import masks, scores
from weft.codegen.generate import generate
from weft.compiler.analysis.tiles.facts import facts_of

pytest.importorskip("triton")

doc, tables = weft.tensor("doc", 2, int), weft.tensor("tables", 2)
blocks = weft.tensor("blocks", 2, bool)
SIZES = weft.shape(heads=4, q_len=512, head_dim=64, dtype="bf16")
VARIANTS = {
    "causal": weft.Attention(mask=masks.causal, name="causal"),
    "documents": weft.Attention(mask=masks.causal & masks.document(doc), name="documents"),
    "lists": weft.Attention(mask=blocks[weft.q_pos // 128, weft.kv_pos // 128], name="lists"),
    "t5": weft.Attention(scores.t5_bias(tables)(weft.score), masks.causal & masks.document(doc), name="t5"),
}


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kernel_of_a_call_is_there_once(
    name: str, direction: Literal["forward", "backward"], target: str
) -> None:
    target = "triton" if name == "lists" or (name, direction) == ("t5", "backward") else target
    given = {"device": "h200", "target": target}
    text = VARIANTS[name].source(SIZES, direction=direction, **given)
    compile(text, name, "exec")
    code = VARIANTS[name].plan(SIZES, **given).code(direction)
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert [defined.count(kernel.name) for kernel in code.kernels] == [1] * len(code.kernels)
    headings = [line for line in text.splitlines() if line.startswith("# ==== module ")]
    assert len(headings) == {"causal": 0, "documents": 2, "lists": 2, "t5": 3}[name]
    if headings:
        first = text.partition("\n\n")[0].splitlines()[1:]
        assert [line.split()[1].strip(",") for line in first] == [kernel.name for kernel in code.kernels]


def test_one_module_alone_is_as_it_is_loaded() -> None:
    variant = VARIANTS["causal"]
    plan = variant.plan(SIZES, device="h200", target="triton")
    target = next(t for t in weft.codegen.targets.targets() if t.name == "triton")
    wanted = generate(facts_of(variant), plan.code("forward"), target)
    assert variant.source(SIZES, device="h200", target="triton") == wanted


def test_modules_come_in_the_order_of_their_first_launches() -> None:
    text = VARIANTS["t5"].source(SIZES, device="h200", target="hopper")
    headings = [line.strip("# =") for line in text.splitlines() if line.startswith("# ====")]
    assert headings == [
        "module 1 of 3: what makes tables by distance", "module 2 of 3: what measures which tiles to visit",
        "module 3 of 3: the kernels themselves",
    ]  # fmt: skip
