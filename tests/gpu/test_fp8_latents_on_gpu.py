"""Latent caches in FP8 on Hopper, whose tiles become 16-bit numbers in SRAM, against float64 of what they stand for."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import masks
from weft.runtime.run.variant import variant_of

from ..support import check_errors
from .test_decode_on_gpu import KV_LENS, LATENT, ROWS, paged, reference_in_parts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VARIANTS = {name: variant for name, variant in LATENT.items() if variant.latent.rope} | {
    "rank 128": weft.Attention(mask=masks.causal, latent=weft.Latent(128, 64), scale=192**-0.5, name="mla_128_64"),
}


def check(name, heads, q_len, lens, page=0, per="token", rows=ROWS, schedule=None, target=None):
    """Five launches with the same bits; keys behind lengths, their descales, and what no key is in, are NaN."""
    torch.manual_seed(3)
    variant = VARIANTS[name].replace(name=f"{VARIANTS[name].name}_in_fp8")
    rank, rope = variant.latent.rank, variant.latent.rope
    query = torch.randn(5, q_len, heads, rank + rope, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    sizes = 2.0 * torch.rand(5, 1, rows, 1, device="cuda") + 0.1  # so that each row has its own descale
    made = weft.fp8.quantize((torch.randn(5, 1, rows, rank, device="cuda") * sizes).bfloat16(), per=per)
    rotary = torch.randn(5, 1, rows, rope, device="cuda", dtype=torch.bfloat16)
    real = weft.fp8.dequantize(made)
    known = torch.cat([real, rotary.float()], -1)
    cache, descale = made.data.clone(), made.descale.clone()
    own = {p.name: torch.linspace(-0.3, 0.6, heads, device="cuda") for p in variant.canonical.parameters}
    more = {"q_offset": rows - q_len}
    if lens is not None:
        more = {"kv_lens": torch.tensor(lens, device="cuda", dtype=torch.int32)}
        for b, length in enumerate(lens):
            rotary[b, :, length:] = torch.nan
            cache.view(torch.uint8)[b, :, length:] = 127  # NaN
            if per == "token":
                descale[b, :, length:] = torch.nan
    given, keys = dict(more), cache
    if page:
        (pool, rotary), given["block_table"] = paged([cache.bfloat16(), rotary], lens, page)
        keys = pool.to(cache.dtype)  # exactly
        if per == "token":
            (descale,), given["block_table"] = paged([descale], lens, page)
    given |= {"rope": rotary, "k_descale": descale}
    asked = {"schedule": schedule, "target": target}
    found = [variant(query, keys, **given, **own, **asked, return_lse=True) for _ in range(5)]
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again))
    results = [reference_in_parts(variant, query, known, more, own, kind) for kind in (torch.float64, torch.bfloat16)]
    for label, *three in zip(("out", "lse"), found[0], *results):
        check_errors(*three, f"{name} {label}")
    if torch.cuda.get_device_capability() == (9, 0):
        targets = {r.launcher.code.target for r in variant_of(variant)._forwards.values()}
        assert ("triton" if heads in (24, 48) else "hopper") in targets


@pytest.mark.sampled(9)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize(
    ("page", "per"), [(0, "token"), (0, 64), (0, "head"), (0, "tensor"), (8, "token"), (64, "token")]
)
def test_latent_caches_in_fp8(page, per, q_len, heads):
    check("causal", heads, q_len, KV_LENS, page, per)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("call", [(16, 3, KV_LENS, 16), (128, 1, None)], ids=["paged", "dense"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_latent_caches_in_fp8(name, call):
    check(name, *call)


@pytest.mark.parametrize("form", ["64x64p9r4+ordered", "64x64p10r2", "64x64p9r3", "64x64p10r1+ordered"])
def test_forms_of_latent_caches_in_fp8(form):
    check("causal", 64, 2, KV_LENS, 64, schedule=f"split_kv/split_forward=hopper:{form}")


@pytest.mark.parametrize(("lens", "page"), [([5000, 17, 0, 4999, 64], 0), ([5000, 17, 0, 3000, 4000], 64)])
def test_parts_of_latent_caches_in_fp8(lens, page):
    check("causal", 128 if page else 16, 2, lens, page, rows=5000)


def test_packed_queries_over_latent_pages_in_fp8():
    torch.manual_seed(4)
    variant = VARIANTS["causal"].replace(name="mla_packed_in_fp8")
    lens, counts = [200, 40, 0, 130, 64], [1, 3, 0, 2, 1]
    query = torch.randn(1, 64, sum(counts), 576, device="cuda", dtype=torch.bfloat16)
    made = weft.fp8.quantize(torch.randn(5, 1, 256, 512, device="cuda", dtype=torch.bfloat16), per="token")
    rotary = torch.randn(5, 1, 256, 64, device="cuda", dtype=torch.bfloat16)
    (pool, rope, descale), table = paged([made.data.bfloat16(), rotary, made.descale], lens, 64)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], device="cuda", dtype=torch.int32)
    kv_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    out = variant(
        query, pool.to(made.data.dtype), rope=rope, k_descale=descale, cu_seqlens_q=starts, kv_lens=kv_lens,
        block_table=table,
    )  # fmt: skip
    known = torch.cat([weft.fp8.dequantize(made), rotary.float()], -1)
    for b, (length, first, count) in enumerate(zip(lens, starts.tolist(), counts)):
        own, keys = query[:, :, first : first + count], known[b : b + 1, :, :length]
        if count:
            results = [variant.reference(own.to(kind), keys.to(kind)) for kind in (torch.float64, torch.bfloat16)]
            check_errors(out[:, :, first : first + count], *results, f"sequence {b}")


@pytest.mark.parametrize(("heads", "page"), [(24, 0), (48, 64)])
def test_latent_caches_in_fp8_that_are_left_to_triton(heads, page):
    check("causal", heads, 2, KV_LENS, page)
