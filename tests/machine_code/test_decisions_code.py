"""What a comparison or floor reads is rounded as IEEE 754 says, in compiled kernels too; other quotients are fast."""

from __future__ import annotations

import pytest

import weft
from weft import kv_pos, q_pos, score

from ..support import mostly
from .ahead import compiled

pytest.importorskip("triton")

pytestmark = pytest.mark.compiles

QUOTIENT = weft.Attention(mask=weft.floor((q_pos - kv_pos) / 7) % 2 == 0, name="quotient")
SUMMED = weft.Attention(mask=weft.floor(0.7 * q_pos - 7.0) <= kv_pos, name="summed")
SMOOTH = weft.Attention(score * (1.0 / (1.0 + abs(score) / 3.0)), name="smooth")


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_quotients_that_decide(target: str) -> None:
    text = compiled(QUOTIENT, "forward", 64, target=target).kernels["flash_forward"].assembly
    assert "div.rn.f32" in text


@pytest.mark.parametrize("target", mostly(["triton"], ["triton", "hopper"]))
def test_products_are_rounded_before_they_are_added(target: str) -> None:
    """-7 is added by itself, to a product that was rounded."""
    kernel = compiled(SUMMED, "forward", 64, target=target).kernels["flash_forward"]
    seven = "0f[4C]0E00000"
    assert kernel.count(rf"(?:add|sub)(?:\.rn)?\.f32[^;]*{seven}") and not kernel.count(rf"fma[^;]*{seven}")


def test_quotients_that_decide_nothing_are_fast() -> None:
    assert "div.rn.f32" not in compiled(SMOOTH, "forward", 64, target="triton").kernels["flash_forward"].assembly
