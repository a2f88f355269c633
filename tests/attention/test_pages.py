"""Paged caches: the cpu target and Triton's interpreter against float64 over the same rows in padded operands."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import masks
from weft.runtime.driver import builds

from ..support import check_errors, long_from, mostly, poisoned
from .cases import CAUSAL, cases

VARIANTS = cases("dense", "window", "cap", "alibi", "documents", "far", "sink", "sigmoid", "dropout", rows=96)
TARGETS = ("cpu", "interpret")
LENS = {
    "q_lens": torch.tensor([42, 0, 3, 33, 42, 20]),
    "kv_lens": torch.tensor([64, 5, 3, 0, 75, 40], dtype=torch.int32),
}
GARBAGE = -(2**31)  # in a table behind a length


def padded(heads=4, kv_heads=2, dim=16, value_dim=None, dtype=torch.float32, q_rows=42):
    """Operands [6, heads, rows, dim], random in all rows."""
    query = poisoned((6, heads, q_rows, dim), dtype, seed=0)
    return query, *(poisoned((6, kv_heads, 96, d), dtype, seed=s) for s, d in ((1, dim), (2, value_dim or dim)))


def paged(key, value, page, lens=LENS["kv_lens"], rows_first=False, seed=0):
    """The same keys in pools of blocks in any order, NaN behind every length, and their table."""
    number, kv_heads, rows, _ = key.shape
    pages = -(-rows // page)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(number * pages + 5, generator=generator)[: number * pages].view(number, pages)
    pools = []
    for tensor in (key, value):
        shape = (number * pages + 5, kv_heads, page, tensor.shape[3])
        pool = poisoned(shape, tensor.dtype, blhd=rows_first, seed=3)
        pool.fill_(torch.nan)
        for b, length in enumerate(lens.tolist()):
            for i in range(-(-length // page)):
                mine = tensor[b, :, i * page : min((i + 1) * page, length)]
                pool[blocks[b, i], :, : mine.shape[1]] = mine
        pools.append(pool)
    table = blocks.int()
    for b, length in enumerate(lens.tolist()):
        table[b, -(-length // page) :] = GARBAGE
    return *pools, table


def check(variant, tensors, page, target, *, lse=True, lens=LENS, rows_first=False, **options):
    """out and lse of a call over pages, against the reference over padded rows; and the reference over pages."""
    query, key, value = tensors
    given = {**lens, **options, "return_lse": lse}

    def exact(dtype):
        own = {n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in given.items()}
        return variant.reference(*(t.to(dtype) for t in tensors), **own)

    *pools, table = paged(key, value, page, lens["kv_lens"], rows_first)
    found = variant(query, *pools, block_table=table, target=target, **given)
    again = variant.reference(query, *pools, block_table=table, **given)
    results = [found, exact(torch.float64), exact(query.dtype), again]
    for name, got, true, plain, defined in zip(("out", "lse"), *(r if lse else [r] for r in results)):
        check_errors(got, true, plain, f"{variant.name} {name}, pages of {page}")
        assert torch.equal(defined, plain), "the reference over pages is that over their rows"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", mostly(("window", "documents", "sink", "dropout"), [*VARIANTS]))
def test_masks_scores_sinks_and_normalizers(name, target):
    variant, operands = VARIANTS[name]
    check(variant, padded(), 16, target, lse=name != "sigmoid", **operands)


def test_tiles_of_long_axes_that_are_measured_in_stretches(monkeypatch):
    long_from(monkeypatch, 0, 2)
    variant, operands = VARIANTS["documents"]
    lens = {"kv_lens": LENS["kv_lens"]}
    try:
        for ids in (operands["doc"], operands["doc"][:, torch.randperm(96)]):
            variant._variant.forget()
            check(variant, padded(), 16, "interpret", doc=ids)
            check(variant, padded(q_rows=2), 16, "interpret", doc=ids, lens=lens)  # keys of few queries are divided
    finally:
        variant._variant.forget()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows_first", [False, True], ids=["heads first", "rows first"])
@pytest.mark.parametrize("page", [1, 8, 128])
def test_pages_of_any_size_and_layout(page, rows_first, target):
    """Smaller than a tile of keys, larger, and larger than a sequence."""
    check(CAUSAL, padded(dim=20, value_dim=40), page, target, rows_first=rows_first)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32)], ids=["int", "tensor"])
def test_offsets(offset, target):
    check(CAUSAL, padded(q_rows=20), 16, target, lens={"kv_lens": LENS["kv_lens"]}, q_offset=offset)


@pytest.mark.parametrize(
    ("target", "dtype"), [("interpret", torch.float16), ("cpu", torch.float16), ("cpu", torch.bfloat16)], ids=str
)
def test_dtypes(target, dtype):
    check(CAUSAL, padded(dtype=dtype), 16, target)


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_may_be_shared_and_tables_may_be_views(target):
    query, key, value = padded(q_rows=2)
    pools = [t[0].transpose(0, 1).unflatten(0, (6, 16)).transpose(1, 2) for t in (key, value)]  # six blocks of 16 rows
    wide = torch.full((6, 9), GARBAGE, dtype=torch.int32)
    wide[:, :4] = torch.tensor([0, 1, 5, 2])
    wide[3, 2] = 4
    lens = torch.tensor([64, 33, 16, 64, 40, 1], dtype=torch.int32)
    got = CAUSAL(query, *pools, block_table=wide[:, :4], kv_lens=lens, target=target)
    for b, length in enumerate(lens.tolist()):
        order = wide[b, :4].tolist()
        rows = [torch.cat([t[:1, :, 16 * i : 16 * i + 16] for i in order], 2)[:, :, :length] for t in (key, value)]
        torch.testing.assert_close(got[b : b + 1], CAUSAL.reference(query[b : b + 1], *rows), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["latent", "weights"])
def test_latent_caches(form, target):
    rank, rope, heads = 32, 16, 4
    torch.manual_seed(3)
    lens = torch.tensor([40, 7, 0], dtype=torch.int32)
    cache = torch.randn(3, 1, 48, rank + rope)
    pool, _, table = paged(cache, cache, 16, lens)
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank, rope), scale=0.2, name="mla")
    weights = {} if form == "latent" else {"uk": torch.randn(heads, rank, 8), "uv": torch.randn(heads, rank, 24)}
    query = torch.randn(3, heads, 5, (rank if form == "latent" else 8) + rope)
    got, lse = variant(query, pool, block_table=table, kv_lens=lens, target=target, return_lse=True, **weights)
    exact = {n: t.double() for n, t in weights.items()}
    wanted, wanted_lse = variant.reference(query.double(), cache.double(), kv_lens=lens, return_lse=True, **exact)
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-4)
    again = variant.reference(query.double(), pool.double(), block_table=table, kv_lens=lens, **exact)
    torch.testing.assert_close(again, wanted)


def test_lengths_and_tables_compile_nothing():
    query, key, value = padded(q_rows=1)
    *pools, table = paged(key, value, 16)
    CAUSAL(query, *pools, block_table=table, kv_lens=LENS["kv_lens"], target="interpret")
    before = builds()
    for step in range(1, 4):
        lens = (LENS["kv_lens"] - step).clamp(0)
        CAUSAL(query, *pools, block_table=table[:, : 6 - step // 2], kv_lens=lens, target="interpret")
    assert builds() == before


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_to_see(target):
    query = torch.randn(2, 4, 3, 16)
    lens, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    sink = torch.randn(4)
    variant = VARIANTS["sink"][0]
    for blocks, pages in ((0, 3), (7, 0), (7, 3)):  # no pool, no room in the table, no key
        pool = torch.full((blocks, 2, 16, 16), torch.nan)
        given = {"block_table": table[:, :pages], "kv_lens": lens, "target": target, "return_lse": True}
        out, lse = CAUSAL(query, pool, pool, **given)
        assert torch.equal(out, torch.zeros_like(query)) and bool((lse == -torch.inf).all())
        out, lse = variant(query, pool, pool, sinks=sink, **given)
        assert torch.equal(out, torch.zeros_like(query))
        torch.testing.assert_close(lse, sink.view(1, 4, 1).expand(2, 4, 3))
        assert torch.equal(CAUSAL.reference(query, pool, pool, block_table=table[:, :pages], kv_lens=lens), out)


# -- under torch -------------------------------------------------------------------------------------------------------
def test_a_compiled_model_takes_pages():
    query, key, value = padded(q_rows=2)
    *pools, table = paged(key, value, 16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value, table, lens):
        return CAUSAL(query * 1.0, key, value, block_table=table, kv_lens=lens, target="cpu")

    wanted = CAUSAL(query, *pools, block_table=table, kv_lens=LENS["kv_lens"], target="cpu")
    assert torch.equal(model(query, *pools, table, LENS["kv_lens"]), wanted)


def test_there_is_no_backward():
    query, key, value = padded(q_rows=2)
    *pools, table = paged(key, value, 16)
    given = {"block_table": table, "kv_lens": LENS["kv_lens"]}
    message = r"causal: a call with block_table has no backward: call under torch.no_grad\(\), or gather the pages"
    with pytest.raises(weft.WeftError, match=message):
        CAUSAL(query.clone().requires_grad_(), *pools, **given)
    with pytest.raises(weft.WeftError, match=message):
        torch.func.grad(lambda x: CAUSAL(x, *pools, **given).sum())(query)
    with torch.no_grad():
        CAUSAL(query.clone().requires_grad_(), *pools, **given)
    sizes = weft.shape(batch=6, heads=4, kv_heads=2, q_len=2, kv_len=96, head_dim=16)
    with pytest.raises(weft.WeftError, match=r"a call with block_table has no backward: gather the pages to train"):
        CAUSAL.source(sizes, direction="backward", device="h100", **given)
    latent = weft.Attention(latent=weft.Latent(8, 8), name="mla")
    weights = {"uk": torch.randn(4, 8, 8).requires_grad_(), "uv": torch.randn(4, 8, 8)}
    with pytest.raises(weft.WeftError, match=r"mla: a call with block_table has no backward"):
        latent(query, pools[0][:, :1], **weights, **given)
    with pytest.raises(weft.WeftError, match=r"mla: form='expanded' reads no pages"), torch.no_grad():
        latent(query, pools[0][:, :1], form="expanded", **weights, **given)


# -- what is refused ---------------------------------------------------------------------------------------------------
def small(page=16, **changed):
    given = {
        "query": torch.randn(2, 4, 1, 16), "key": torch.randn(5, 2, page, 16), "value": torch.randn(5, 2, page, 16),
        "block_table": torch.tensor([[1, 2], [4, 0]], dtype=torch.int32), "kv_lens": torch.tensor([20, 3]),
    }  # fmt: skip
    return given | changed


REFUSED = [
    (small(48), r"key: expected a page of 1, 2, 4 ... 256 rows in the pool \[blocks, Hkv, page, D\], got 48"),
    (small(512), r"key: expected a page of .* got 512 .*; pass x.transpose\(1, 2\) of a pool \[blocks, page, Hkv, D\]"),
    (small(block_table=torch.zeros(2, 2).long()), r"block_table: expected an int32 tensor \[2, pages\], got torch.int64"
     r" .*pass x.to\(torch.int32\)"),
    (small(block_table=[[0, 1], [2, 3]]), r"block_table: expected .* got list; torch.tensor\(x, dtype=torch.int32\)"),
    (small(block_table=torch.zeros(3, 2).int()), r"block_table: .* one row for each batch row, got \[3, 2\]"),
    (small(block_table=torch.zeros(2).int()), r"block_table: expected an int32 tensor \[2, pages\], got .* \[2\]"),
    (small(kv_lens=None), r"kv_lens: missing; with block_table pass the length of each sequence"),
    (small(kv_lens=torch.tensor([20])), r"kv_lens: expected a tensor int32 or int64 \[2\], one for each batch row"),
    (small(kv_lens=torch.tensor([20, 33])), r"kv_lens\[1\]: expected a length from 0 to 32, 2 pages of 16 in "
     r"block_table, got 33"),
    (small(kv_lens=torch.tensor([20, -1])), r"kv_lens\[1\]: expected a length from 0 to 32, 2 pages of 16 .* got -1"),
    (small(q_lens=torch.tensor([1, 2])), r"q_lens\[1\]: expected a length from 0 to 1, the rows of query, got 2"),
    (small(block_table=torch.tensor([[1, 5], [4, -9]]).int()), r"block_table\[0, 1\]: expected a block from 0 to 4, as "
     r"key has 5, got 5; it holds rows 16 on of a sequence of 20 keys"),
    (small(block_table=torch.tensor([[1, 2], [-1, 0]]).int()), r"block_table\[1, 0\]: expected a block from 0 to 4"),
    (small(value=torch.randn(4, 2, 16, 16)), r"value: expected 5 blocks as in key, got 4"),
    (small(value=torch.randn(5, 2, 8, 16)), r"value: expected page 16 as in key, got 8"),
    (small(value=torch.randn(5, 1, 16, 16)), r"value: expected 2 heads as in key, got 1"),
    (small(key=torch.randn(5, 2, 16, 16).half()), r"key: expected dtype torch.float32 as in query, got torch.float16"),
    (small(cu_seqlens_q=torch.tensor([0, 1, 2])), r"query: expected packed queries \[1, Hq, total, D\] with"),
    (small(q_offset=torch.zeros(3, dtype=torch.int32)), r"q_offset: expected an int or an int32 tensor \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit(given, message):
    for call in (CAUSAL, CAUSAL.reference):
        with pytest.raises(weft.WeftError, match=message):
            call(given["query"], **{n: v for n, v in given.items() if n != "query"})


def test_contents_behind_a_length_are_not_looked_at():
    given = small(block_table=torch.tensor([[1, 2], [4, 99]]).int())
    assert bool(CAUSAL(given.pop("query"), **given).isfinite().all())


# -- plans -------------------------------------------------------------------------------------------------------------
def test_a_plan_says_where_keys_lie():
    sizes = weft.shape(batch=2, heads=4, kv_heads=2, q_len=64, kv_len=256, head_dim=64)
    given = {"kv_lens": torch.tensor([200, 30]), "block_table": torch.zeros(2, 16, dtype=torch.int32)}
    said = CAUSAL.explain(sizes, device="h100", **given)
    assert "2 sequences of 64 queries and 30 to 200 keys, these in pages of 16" in said
    assert "flash_forward=hopper" in said
    assert "blocks_of(pages, first_key, kv_len, n_blocks, PAGE)" in CAUSAL.source(sizes, device="h100", **given)
    text = CAUSAL.source(sizes, device="a100", **given)
    assert "blocks_of(pages, kv_first, kv_len, n_blocks, PAGE, BLOCK_KV)" in text
    with pytest.raises(weft.WeftError, match=r"shape: kv_len: expected a multiple of the 7 pages of block_table"):
        CAUSAL.plan(sizes, device="h100", kv_lens=given["kv_lens"], block_table=torch.zeros(2, 7, dtype=torch.int32))
    for schedule in ("streaming", "standard"):
        with pytest.raises(weft.UnavailableError, match=rf"schedule {schedule} computes sequences of one length, got"):
            CAUSAL.plan(sizes, device="h100", schedule=schedule, **given)
