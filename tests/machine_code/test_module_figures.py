"""The docstring of a generated module: the variant, and of each kernel its form, SRAM, registers and bound."""

from __future__ import annotations

import ast
import re

import pytest

import weft
from weft.codegen.figures import card_of

CAUSAL = weft.Attention(mask=weft.masks.causal, name="causal")
CASES = {
    "triton forward": ("triton", "forward", 4096), "hopper forward": ("hopper", "forward", 4096),
    "hopper backward": ("hopper", "backward", 4096), "decode": ("triton", "forward", 1),
    "cpu": ("cpu", "forward", 4096),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_docstring_has_the_figures_of_the_plan(case: str) -> None:
    target, direction, q_len = CASES[case]
    sizes = weft.shape(heads=64, kv_heads=1, q_len=q_len, kv_len=4096, head_dim=128, dtype="bf16")
    asked = {"target": target, "device": "cpu" if target == "cpu" else "h200"}
    said = ast.get_docstring(ast.parse(CAUSAL.source(sizes, direction=direction, **asked))) or ""
    said = re.sub(r"\s+", " ", said)
    assert repr(CAUSAL) in said
    for kernel in (k for k in CAUSAL.plan(sizes, **asked).kernels if k.direction == direction):
        sram = int(kernel.sram_bytes.value)
        found = re.search(rf"{kernel.name}: form {re.escape(str(kernel.form))};(.*?) bound by [a-zA-Z ]+, \d+%", said)
        assert found is not None and (f" {sram:,} bytes of " in found[1]) == (sram > 0)


def test_it_says_which_registers_roles_have() -> None:
    sizes = weft.shape(heads=16, q_len=4096, head_dim=128, dtype="bf16")
    said = CAUSAL.source(sizes, target="hopper", device="h200")
    assert "registers a thread: consumer 240, producer 24" in re.sub(r"\s+", " ", said)


def test_the_card_of_an_architecture_does_not_depend_on_the_machine() -> None:
    assert [card.name for arch in ("sm_80", "sm_90", "sm_89") if (card := card_of(arch))] == ["a100", "h200", "l40s"]
    assert card_of("sm_75") is None
