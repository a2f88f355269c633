"""Few queries behind a cache on a GPU: divided keys, pages and latent caches against float64, and under graphs."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.runtime.run.variant import variant_of

from ..attention import cases
from ..attention.cases import CAUSAL, doc, pad
from ..support import check_errors, check_variant, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

slopes, sinks = weft.tensor("slopes", 1), weft.tensor("sinks", 2)
ROWS = 1300
VARIANTS = {
    **{name: cases.VARIANTS[name] for name in ("dense", "causal", "documents", "sigmoid")},
    "window": weft.Attention(mask=masks.sliding_window(200), name="window_of_200"),
    "cap": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="cap"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi"),
    "factors": weft.Attention(score * slopes[head], masks.causal, name="heated"),
    "windows by head": weft.Attention(mask=masks.causal & (q_pos - kv_pos < 90 * (head + 1)), name="by_head"),
    "documents by head": weft.Attention(mask=doc[head, q_pos] >= doc[head, kv_pos], name="documents_by_head"),
    "far": weft.Attention(score + pad[batch, kv_pos], masks.causal, name="far"),
    "sink": CAUSAL.replace(sink=sinks[batch, head], name="sunk"),
}
KV_LENS, Q_LENS = [ROWS, 5, 0, 640, 1025], [5, 5, 3, 0, 1]


def operands_of(name):
    given = {
        "slopes": torch.linspace(-0.3, 0.6, 8), "sinks": torch.randn(5, 8),
        "doc": (torch.arange(2048) // 450).repeat(8, 1),
        "pad": torch.where(torch.arange(2048) % 5 == 3, -1e9, 0.0).repeat(5, 1),
    }  # fmt: skip
    return {p.name: given[p.name].cuda() for p in VARIANTS[name].canonical.parameters}


def operands(q_len=5, heads=8, kv_heads=2, dim=128, value_dim=None, dtype=torch.bfloat16):
    widths = ((heads, q_len, dim), (kv_heads, ROWS, dim), (kv_heads, ROWS, value_dim or dim))
    return [poisoned((5, *w), dtype, "cuda", blhd=True, seed=n) for n, w in enumerate(widths)]


def paged(caches, lens, page, rows_first=True):
    """The same keys in pools, blocks in any order, NaN behind lengths, and a table with garbage behind them."""
    pages, pools = -(-max(ROWS, *lens) // page), []
    blocks = torch.randperm(5 * pages, generator=torch.Generator().manual_seed(0)).view(5, pages)
    for cache in caches:
        pool = poisoned((5 * pages, cache.shape[1], page, cache.shape[3]), cache.dtype, "cuda", blhd=rows_first)
        pool.fill_(torch.nan)
        for b, length in enumerate(lens):
            for i in range(-(-length // page)):
                mine = cache[b, :, i * page : min((i + 1) * page, length)]
                pool[blocks[b, i], :, : mine.shape[1]] = mine
        pools.append(pool)
    table = blocks.int()
    for b, length in enumerate(lens):
        table[b, -(-length // page) :] = -(2**31)
    return pools, table.cuda()


def check(name, made, lens, page=0, *, rows_first=True, times=3, **options):
    """Several calls, of which the later ones take the direct way; all with the same bits."""
    variant, given = VARIANTS[name], operands_of(name)
    lse = name != "sigmoid"
    tensors, more = made, {n: torch.tensor(t, device="cuda", dtype=torch.int32) for n, t in lens.items()}
    shown = dict(more)
    if page:
        pools, shown["block_table"] = paged(made[1:], lens["kv_lens"], page, rows_first)
        tensors = [made[0], *pools]
    found = [variant(*tensors, **given, **shown, return_lse=lse, **options) for _ in range(times)]
    results = [found[0]]
    for dtype in (torch.float64, made[0].dtype):
        own = {n: v.to(dtype) if v.is_floating_point() and dtype == torch.float64 else v for n, v in given.items()}
        results.append(variant.reference(*(t.to(dtype) for t in made), **own, **more, return_lse=lse))
    for label, *three in zip(("out", "lse"), *(r if lse else [r] for r in results)):
        check_errors(*three, f"{name} {label}")
    for again in found[1:]:
        pairs = zip(found[0], again) if lse else [(found[0], again)]
        assert all(torch.equal(a, b) for a, b in pairs), "the same bits every time"


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", VARIANTS)
def test_masks_scores_sinks_and_normalizers(name):
    check(name, operands(), {})
    check(name, operands(1), {"kv_lens": KV_LENS})
    made = operands()
    for b, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS)):
        made[0][b, :, q_len:] = torch.nan
        made[1][b, :, kv_len:], made[2][b, :, kv_len:] = torch.nan, torch.nan
    check(name, made, {"q_lens": Q_LENS, "kv_lens": KV_LENS}, 16)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("page", [1, 2, 8, 16, 32, 64, 128, 256])
def test_pages(page):
    for rows_first in (True, False):
        check("causal", operands(1), {"kv_lens": KV_LENS}, page, rows_first=rows_first)
    check("causal", operands(40), {"kv_lens": KV_LENS}, page)  # a chunk of a prompt: the ordinary kernels


CHUNK = {"kv_lens": KV_LENS, "q_lens": [200, 5, 130, 0, 64]}


@pytest.mark.sampled(61)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 64), (80, 64), (192, 128), (256, 256)])
def test_chunks_of_prompts_on_hopper(dim, value_dim, page, dtype):
    """Pages by TMA: a tile of keys is several blocks, or a part of one; NaN lies behind lengths."""
    if dtype == torch.float16:
        made = operands(200, 6, 3, dim, value_dim, dtype)
        return check("causal", made, {"kv_lens": KV_LENS}, page, target="hopper")
    made = operands(200, dim=dim, value_dim=value_dim)
    for b, q_len in enumerate(CHUNK["q_lens"]):
        made[0][b, :, q_len:] = torch.nan
    for rows_first in (True, False):
        check("causal", made, CHUNK, page, rows_first=rows_first, target="hopper")


@pytest.mark.sampled(19)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("name", [n for n in VARIANTS if "documents" not in n and n != "sigmoid"])
def test_variants_over_pages_on_hopper(name, page):
    if page == 16:
        check(name, operands(200), CHUNK, page, target="hopper")
    else:
        check(name, operands(70, dim=64), {"kv_lens": KV_LENS}, page, target="hopper")


@pytest.mark.parametrize(("name", "page"), [("documents", 16), ("causal", 4)])
def test_pages_that_hopper_leaves_to_triton(name, page):
    check(name, operands(200), CHUNK, page)


def test_pages_that_are_too_small_for_hopper_are_refused():
    with pytest.raises(weft.UnavailableError, match="pages of 4 rows are too small for the tensor memory accelerator"):
        check("causal", operands(200), CHUNK, 4, target="hopper")


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 1), (6, 2), (5, 1), (64, 2)])
@pytest.mark.parametrize("q_len", [1, 2, 4, 8, 16])
def test_rows_of_a_group(heads, kv_heads, q_len):
    made = operands(q_len, heads, kv_heads)
    check("causal", made, {})
    check("causal", made, {"kv_lens": KV_LENS}, 16)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(20, 40), (64, 64), (80, 64), (96, 96), (192, 128), (256, 256)])
def test_widths_and_dtypes(dim, value_dim, dtype):
    made = operands(3, dim=dim, value_dim=value_dim, dtype=dtype)
    check("causal", made, {})
    check("causal", made, {"kv_lens": KV_LENS}, 16)


def test_rows_that_are_not_aligned():
    made = [t[..., 1:] for t in operands(3, dim=65)]
    check("causal", made, {})
    check("causal", made, {"kv_lens": KV_LENS}, 64)


@pytest.mark.parametrize("offset", [700, [1295, 3, -2, 600, 1024]], ids=["int", "tensor"])
def test_offsets(offset):
    offset = torch.tensor(offset, device="cuda", dtype=torch.int32) if isinstance(offset, list) else offset
    check_variant(CAUSAL, *operands(3), gradients=False, q_offset=offset)


def test_gradients_behind_a_divided_forward():
    variant_of(VARIANTS["sink"]).forget()  # variants that read alike share what is prepared, in tests before too
    check_variant(VARIANTS["sink"], *operands(), operands=operands_of("sink"), differentiate=("sinks",))
    assert any(
        r.launcher.code.schedule.algorithm == "split_kv" for r in variant_of(VARIANTS["sink"])._forwards.values()
    )


LATENT = {
    "causal": weft.Attention(mask=masks.causal, latent=weft.Latent(512, 64), scale=192**-0.5, name="mla"),
    "dense": weft.Attention(latent=weft.Latent(512, 64), scale=192**-0.5, name="mla_dense"),
    "window": weft.Attention(
        mask=masks.sliding_window(200), latent=weft.Latent(512, 64), scale=192**-0.5, name="mla_window"
    ),
    "cap": weft.Attention(
        20.0 * weft.tanh(score / 20.0), masks.causal, latent=weft.Latent(512, 64), scale=192**-0.5, name="mla_cap"
    ),
    "alibi": weft.Attention(
        score + slopes[head] * (kv_pos - q_pos), masks.causal, latent=weft.Latent(512, 64), scale=192**-0.5,
        name="mla_alibi",
    ),
    "factors": weft.Attention(
        score * slopes[head], masks.causal, latent=weft.Latent(512, 64), scale=192**-0.5, name="mla_heated"
    ),
    "rank 256": weft.Attention(mask=masks.causal, latent=weft.Latent(256, 64), scale=192**-0.5, name="mla_256"),
    "rank 256, 32": weft.Attention(mask=masks.causal, latent=weft.Latent(256, 32), scale=192**-0.5, name="mla_256_32"),
    "rank 384": weft.Attention(mask=masks.causal, latent=weft.Latent(384, 64), scale=192**-0.5, name="mla_384"),
    "rank 128, 0": weft.Attention(mask=masks.causal, latent=weft.Latent(128, 0), scale=192**-0.5, name="mla_128"),
    "sink": weft.Attention(
        mask=masks.causal, sink=9.0 * slopes[head], latent=weft.Latent(512, 64), scale=192**-0.5, name="mla_sunk"
    ),
    "far": weft.Attention(
        score + weft.where(kv_pos % 5 == 3, -1e9, 0.0), masks.causal, sink=9.0 * slopes[head],
        latent=weft.Latent(512, 64), scale=192**-0.5, name="mla_far",
    ),
}  # fmt: skip
FORMS = [f"64x64p11{a}{b}" for a in ("", "+ordered") for b in ("", "+prefetch")]
SHAPES = {
    "whole sequences": {"heads": 128, "q_len": 1, "lens": None},
    "pages": {"heads": 64, "q_len": 2, "lens": KV_LENS, "page": 64},
    "pages below a tile": {"heads": 16, "q_len": 4, "lens": KV_LENS, "page": 16},
    "many parts": {"heads": 128, "q_len": 1, "lens": [5000, 17, 0, 4999, 64], "rows": 5000},
    "many parts of pages": {"heads": 16, "q_len": 8, "lens": [5000, 17, 0, 3000, 4000], "page": 64, "rows": 5000},
}


def reference_in_parts(variant, query, known, more, own, dtype):
    """A sequence and a few heads at a time: each head has a copy of the cache there, and other tests run beside it."""
    rows = []
    for b in range(len(query)):
        given = {n: v[b : b + 1] if isinstance(v, torch.Tensor) else v for n, v in more.items()}
        parts = []
        for first in range(0, query.shape[1], 16):
            heads = slice(first, first + 16)
            slopes = {n: v[heads].to(torch.promote_types(v.dtype, dtype)) for n, v in own.items()}
            parts.append(
                variant.reference(
                    query[b : b + 1, heads].to(dtype), known[b : b + 1].to(dtype), **given, **slopes, return_lse=True
                )
            )
        rows.append([torch.cat(found, 1) for found in zip(*parts)])
    return [torch.cat(found) for found in zip(*rows)]


def check_latent(name, heads, q_len, lens, page=0, form=None, dtype=torch.bfloat16, rows=ROWS, target="hopper"):
    """Twenty launches with the same bits; keys behind lengths, and what no key is in, are NaN."""
    torch.manual_seed(3)
    variant, device = LATENT[name], "cuda"
    width = variant.latent.rank + variant.latent.rope
    query = torch.randn(5, q_len, heads, width, device=device, dtype=dtype).transpose(1, 2)
    known = torch.randn(5, 1, rows, width, device=device, dtype=dtype)
    cache, own = (
        known.clone(),
        {p.name: torch.linspace(-0.3, 0.6, heads, device=device) for p in variant.canonical.parameters},
    )
    more = {"q_offset": rows - q_len}
    if lens is not None:
        more = {"kv_lens": torch.tensor(lens, device=device, dtype=torch.int32)}
        for b, length in enumerate(lens):
            cache[b, :, length:] = torch.nan
    tensors, given = (query, cache), dict(more)
    if page:
        (pool,), given["block_table"] = paged([cache], lens, page)
        tensors = (query, pool)
    schedule = form and f"split_kv/split_forward=hopper:{form}"
    found = [variant(*tensors, **given, **own, return_lse=True, schedule=schedule) for _ in range(20)]
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again))
    results = [reference_in_parts(variant, query, known, more, own, kind) for kind in (torch.float64, dtype)]
    for label, *three in zip(("out", "lse"), found[0], *results):
        check_errors(*three, f"{name} {label}")
    if torch.cuda.get_device_capability() == (9, 0):
        assert target in {r.launcher.code.target for r in variant_of(variant)._forwards.values()}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 8])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_latent_caches(page, q_len, heads):
    check_latent("causal", heads, q_len, KV_LENS, page)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_latent_decode(form, shape):
    check_latent("causal", form=form, **SHAPES[shape])


@pytest.mark.sampled(19)
@pytest.mark.parametrize(
    "call", [(16, 3, KV_LENS, 16), (128, 1, None), (64, 1, KV_LENS, 128, None, torch.float16)],
    ids=["paged", "dense", "half"],
)  # fmt: skip
@pytest.mark.parametrize("name", LATENT)
def test_variants_of_latent_decode(name, call):
    check_latent(name, *call)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("heads", "page"), [(1, 64), (8, 32), (192, 64), (64, 256), (32, 0), (16, 8)])
def test_rows_of_latent_decode(heads, page):
    for q_len in (1, 5, 16):
        check_latent("causal", heads, q_len, KV_LENS, page)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("heads", "page"), [(24, 0), (48, 64), (16, 4)])
def test_latent_decode_that_is_left_to_triton(heads, page):
    check_latent("causal", heads, 2, KV_LENS, page, target="triton")


@pytest.mark.slow(12)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["causal", "window", "alibi", "rank 384", "sink", "far"])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 70), (64, 33), (128, 17)])
def test_chunks_of_latent_caches(name, heads, q_len):
    """Tiles of rows in parts, and whole; sequences of fewer keys than queries."""
    check_latent(name, heads, q_len, None)
    check_latent(name, heads, q_len, KV_LENS, 64)
    check_latent(name, heads, q_len, KV_LENS)


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("heads", "q_len", "lens", "page"), [(128, 200, [3000, 17, 0, 2999, 64], 64), (16, 300, None, 0)],
    ids=["paged", "dense"],
)  # fmt: skip
def test_a_chunk_of_a_prompt_behind_a_latent_cache(heads, q_len, lens, page):
    check_latent("causal", heads, q_len, lens, page, rows=3000)


@pytest.mark.parametrize("paging", [False, True])
@pytest.mark.parametrize("is_latent", [False, True])
def test_a_graph_is_replayed_with_other_lengths(is_latent, paging, captured):
    """Nothing waits for the device, and no size is taken from what lies there."""
    query, key, value = operands(1)
    variant = CAUSAL
    if is_latent:
        variant, query = LATENT["causal"], torch.randn(5, 16, 1, 576, device="cuda", dtype=torch.bfloat16)
        key = torch.randn(5, 1, ROWS, 576, device="cuda", dtype=torch.bfloat16)
    caches = (key,) if is_latent else (key, value)
    lens = torch.full((5,), ROWS, device="cuda", dtype=torch.int32)
    tensors, given = (query, *caches), {"kv_lens": lens}
    if paging:
        pools, given["block_table"] = paged(caches, [ROWS] * 5, 16)
        tensors = (query, *pools)

    def step():
        return variant(*tensors, **given, return_lse=True)

    graph, found = captured(step)
    for other in (KV_LENS, [1] * 5, [0] * 5, [7, 64, 65, 1024, 900], [ROWS] * 5):
        lens.copy_(torch.tensor(other))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, step())), other


def test_latent_decode_waits_for_what_is_in_front_of_it(captured):
    """Its kernels are launched early, but read queries and keys that kernels in front of them have just written."""
    query = torch.randn(4, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(4, 1, 4096, 576, device="cuda", dtype=torch.bfloat16)

    def step(wait=lambda: None):
        found, rows, keys = [], query, cache
        for n in range(4):
            rows, keys = rows * 0.75 + 0.1, keys.roll(n + 1, 2) * 0.9
            wait()
            found.append(LATENT["causal"](rows, keys))
            wait()
        return tuple(found)

    apart = step(torch.cuda.synchronize)
    graph, found = captured(step)
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, apart))


@pytest.mark.parametrize(("heads", "batch", "rows"), [(128, 1, 16384), (64, 64, 1024)])
def test_small_columns_of_latent_parts_beside_large_ones(heads, batch, rows):
    """Parts are joined column by column: the error of small ones is small beside their own size."""
    size = torch.cat([torch.tensor([2.0**7, 2.0**-9, 1.0]).repeat(171)[:512], torch.ones(64)]).cuda()
    query = (torch.randn(batch, heads, 1, 576, device="cuda") / size / 2**7).bfloat16()
    cache = (torch.randn(batch, 1, rows, 576, device="cuda") * size).bfloat16()
    for lens in ({}, {"kv_lens": torch.full((batch,), rows, device="cuda", dtype=torch.int32)}):
        out = LATENT["causal"](query, cache, **lens)[:2].double()
        exact = LATENT["causal"].reference(query[:2].double(), cache[:2].double())
        for first in range(3):
            own, known = out[..., first::3], exact[..., first::3]
            assert float((own - known).norm() / known.norm()) < 2**-7


def test_a_long_cache_beyond_32_bits():
    """Places in a cache lie 2**31 elements apart."""
    rows = (1 << 31) // (8 * 128) + 3000
    key = torch.empty(1, rows, 8, 128, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)
    value = torch.empty(1, rows, 8, 128, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)
    query = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    window = VARIANTS["window"]
    wanted = window.reference(query.double(), key[:, :, -300:].double(), value[:, :, -300:].double())
    torch.testing.assert_close(window(query, key, value).double(), wanted, atol=2e-2, rtol=2e-2)
    n = rows // 256
    pools = [t[:, :, : n * 256].transpose(1, 2).view(n, 256, 8, 128).transpose(1, 2) for t in (key, value)]
    table = torch.arange(n, device="cuda", dtype=torch.int32)[None]
    lens = torch.tensor([n * 256], device="cuda", dtype=torch.int32)
    last = slice(n * 256 - 300, n * 256)
    wanted = window.reference(query.double(), key[:, :, last].double(), value[:, :, last].double())
    got = window(query, *pools, block_table=table, kv_lens=lens)
    torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("schedule", ["flash", "split_kv"])
def test_contents_are_looked_at_on_request(schedule):
    query, key, value = operands(1)
    pools, table = paged((key, value), [ROWS] * 5, 16)
    lens = torch.full((5,), ROWS, device="cuda", dtype=torch.int32)
    given = {"block_table": table, "kv_lens": lens, "schedule": schedule}
    wrong = table.clone()
    wrong[3, 7] = 100_000
    with weft.settings(check=True):
        CAUSAL(query, *pools, **given)
        with pytest.raises(weft.WeftError, match=r"block_table\[3, 7\]: expected a block from 0 to .* got 100000"):
            CAUSAL(query, *pools, **{**given, "block_table": wrong})
        with pytest.raises(weft.WeftError, match=r"kv_lens\[0\]: expected a length from 0 to"):
            CAUSAL(query, *pools, **{**given, "kv_lens": lens + 1000})
    CAUSAL(query, *pools, **{**given, "block_table": wrong})  # unasked: some block of the pool, and nothing outside
    torch.cuda.synchronize()
