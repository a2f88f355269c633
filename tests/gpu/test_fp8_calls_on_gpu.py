"""Calls with FP8 operands that repeat on a GPU, and values of descales that are looked at on request."""

from __future__ import annotations

import math

import pytest
import torch

import weft
from weft import masks

from ..support import poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MLA = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=512, rope=64), scale=192**-0.5, name="apart_on_gpu")


@pytest.mark.parametrize("per", [None, "head", "token"])
@pytest.mark.parametrize("kind", ["dense", "lengths", "pages"])
@pytest.mark.parametrize("rows", [1, 40])
def test_rotary_columns_apart_in_calls_that_repeat(rows: int, kind: str, per: str | None) -> None:
    """Each length twice: the second time nothing but the direct way is taken."""
    variant = MLA.replace(name=f"apart_{kind}_{rows}_{per}")
    latent, rotary = (
        poisoned((2, 1, 1024, 512), torch.bfloat16, "cuda"),
        poisoned((2, 1, 1024, 64), torch.bfloat16, "cuda"),
    )
    if kind == "pages":
        latent, rotary = (x.unflatten(2, (16, 64)).transpose(1, 2).flatten(0, 1).contiguous() for x in (latent, rotary))
    found = []
    for number, length in enumerate((300, 301, 302, 700, 701, 702, 1024, 64, 65, 66, 67, 68)):
        query = poisoned((2, 16, rows, 576), torch.bfloat16, "cuda", seed=number)
        given, cache, rope = {}, latent, rotary
        if kind == "pages":
            table = torch.arange(32, device="cuda", dtype=torch.int32).view(2, 16)
            given = {"block_table": table, "kv_lens": torch.tensor([length, max(rows, length - 5)], device="cuda")}
        else:
            cache, rope = latent[:, :, :length], rotary[:, :, :length]
            if kind == "lengths":
                given = {"kv_lens": torch.tensor([length, max(rows, length - 5)], device="cuda", dtype=torch.int32)}
        given["rope"] = rope
        if per == "token" or (per and kind != "pages"):
            cache, given["k_descale"] = weft.fp8.quantize(cache, per=per)
        elif per:
            cache, given["k_descale"] = (cache.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn), 0.01
        for _ in range(3):
            out = variant(query, cache, **given)
        exact = variant.reference(query.double(), cache if per else cache.double(), **{**given, "rope": rope.double()})
        error = (out.double() - exact).norm() / exact.norm()
        assert error < 0.01, (length, float(error))
        found.append(variant._variant.repeats.hits)
    assert max(found) > 0


def test_values_of_descales_are_looked_at_on_request() -> None:
    causal = weft.Attention(mask=masks.causal, name="looked_at")
    query = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, 2, 8, 64, device="cuda").to(torch.float8_e4m3fn)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        descale = torch.tensor([1.0, wrong], device="cuda")
        with weft.settings(check=True):
            for call in (causal, causal.reference):
                with pytest.raises(weft.WeftError, match=f"k_descale: expected positive numbers, got {wrong}"):
                    call(query, key, key, k_descale=descale)
    with weft.settings(check=True):
        causal(query, key, key, k_descale=torch.ones(2, device="cuda"))
