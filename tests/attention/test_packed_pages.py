"""Packed queries over a paged cache: `cpu`, and flash and split_kv of `interpret`, against float64 over padded rows."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.codegen.launch.launcher import KernelLauncher
from weft.codegen.launch.shared import SharedLauncher
from weft.compiler.planning.signature import MOST_SHORT
from weft.runtime.driver import builds
from weft.runtime.run.variant import variant_of

from ..support import check_errors, mostly, poisoned
from .test_pages import CAUSAL, GARBAGE, LENS, VARIANTS, paged

sinks, table = weft.tensor("sinks", 2), weft.tensor("table", 2)
allowed = weft.tensor("allowed", 3, bool)
FAR = weft.minimum(weft.maximum(q_pos - kv_pos, 0), 50)
OTHERS = {  # tables by distance, masks that would be looked at tile by tile, and tiles that differ by head
    "distances": (weft.Attention(score + table[head, FAR], masks.causal, name="distances"), torch.randn(4, 51)),
    "distances by sequence": (weft.Attention(score + table[batch, FAR], masks.causal, name="own"), torch.randn(6, 51)),
    "pairs": (
        weft.Attention(mask=masks.causal & allowed[batch, q_pos, kv_pos], name="pairs"), torch.rand(6, 96, 96) > 0.5
    ),
    "windows by head": (weft.Attention(mask=masks.causal & (q_pos - kv_pos < 8 * (head + 1)), name="by_head"), None),
}  # fmt: skip
KINDS = [("cpu", None), ("interpret", "flash"), ("interpret", "split_kv")]
KV_LENS = LENS["kv_lens"]  # 64, 5, 3, 0, 75, 40
MIXED = (42, 0, 1, 3, 1, 7)  # queries: a chunk of a prompt, none, one that sees all keys or none, a few
BEHIND = 5  # rows of the query that no sequence has


def starts_of(q_lens, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=dtype)


def operands(q_lens=MIXED, heads=4, kv_heads=2, dim=16, value_dim=None, dtype=torch.float32, behind=BEHIND):
    """Queries [1, heads, total, dim], NaN behind the last sequence, and padded keys and values."""
    query = poisoned((1, heads, sum(q_lens) + behind, dim), dtype, seed=0)
    query[:, :, sum(q_lens) :] = torch.nan
    return query, *(poisoned((6, kv_heads, 96, d), dtype, seed=s) for s, d in ((1, dim), (2, value_dim or dim)))


def expected(variant, tensors, q_lens, kv_lens, dtype, **options):
    """out and lse of padded calls, of one sequence each, packed; what no sequence has gives 0 and -inf."""
    query, key, value = (t.to(dtype) for t in tensors)
    own = {n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in options.items()}
    number, longest = len(q_lens), max(*q_lens, 1)
    padded = query.new_zeros(number, query.shape[1], longest, query.shape[3])
    starts = starts_of(q_lens).tolist()
    for b, length in enumerate(q_lens):
        padded[b, :, :length] = query[0, :, starts[b] : starts[b] + length]
    lens = {"q_lens": torch.tensor(q_lens), "kv_lens": kv_lens}
    out, lse = variant.reference(padded, key, value, **lens, **own, return_lse=True)
    rows = out.new_zeros(1, *query.shape[1:3], value.shape[3])
    logs = lse.new_full(query.shape[:3], -torch.inf)
    for b, length in enumerate(q_lens):
        rows[0, :, starts[b] : starts[b] + length] = out[b, :, :length]
        logs[0, :, starts[b] : starts[b] + length] = lse[b, :, :length]
    return rows, logs


def check(variant, tensors, q_lens=MIXED, kv_lens=KV_LENS, page=16, kind=KINDS[0], lse=True, rows_first=False,
          dtype=torch.int32, **options):  # fmt: skip
    *pools, table = paged(*tensors[1:], page, kv_lens, rows_first)
    target, schedule = kind
    given = {"cu_seqlens_q": starts_of(q_lens, dtype), "kv_lens": kv_lens.to(dtype), "block_table": table, **options}
    made = variant if lse else variant.replace(normalizer="softmax")
    found = variant(tensors[0], *pools, return_lse=lse, target=target, schedule=schedule, **given)
    results = found if lse else (found,)
    if lse:
        exact, usual = (expected(made, tensors, q_lens, kv_lens, t, **options) for t in (torch.float64, found[0].dtype))
    else:  # there is no log-sum-exp to ask for: the reference over pages, which is held to this one below
        exact, usual = (
            (variant.reference(tensors[0].to(t), *(p.to(t) for p in pools), **given),)
            for t in (torch.float64, tensors[0].dtype)
        )
    for name, got, true, plain in zip(("out", "lse"), results, exact, usual):
        check_errors(got, true, plain, f"{variant.name} {name}, {kind}")
    if lse:
        again = variant.reference(tensors[0], *pools, return_lse=True, **given)
        for got, plain in zip(again, usual):
            torch.testing.assert_close(got, plain)
    return results


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", mostly(("window", "alibi", "sink", "documents", "far"), [*VARIANTS]))
def test_masks_scores_sinks_and_normalizers(name, kind):
    variant, given = VARIANTS[name]
    if name == "dropout" and kind[1] == "split_kv":
        with pytest.raises(weft.UnavailableError, match="schedule split_kv has no dropout; use schedule='flash'"):
            check(variant, operands(), kind=kind, **given)
        return
    check(variant, operands(), kind=kind, lse=name != "sigmoid", **given)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", mostly(("distances", "pairs"), [*OTHERS]))
def test_what_other_calls_look_up_ahead(name, kind):
    variant, given = OTHERS[name]
    lens = torch.tensor([64, 5, 3, 9, 75, 40], dtype=torch.int32)  # no query stands before the first key
    check(variant, operands(), kv_lens=lens, kind=kind, **{p.name: given for p in variant.canonical.parameters})


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page", mostly([8], [1, 8, 128]))
def test_pages_of_any_size_and_widths_that_are_no_powers_of_two(page, kind):
    check(CAUSAL, operands(dim=20, value_dim=40), page=page, kind=kind, rows_first=page == 8, dtype=torch.int64)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32)], ids=["int", "tensor"])
def test_offsets(offset, kind):
    check(CAUSAL, operands(), kind=kind, q_offset=offset)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), mostly([(8, 1)], [(1, 1), (8, 1), (6, 2), (12, 4)]))
def test_groups_of_heads(heads, kv_heads, kind):
    """Tiles with rows of several queries, of one, and of a part of one's heads; lse with them."""
    check(CAUSAL, operands(heads=heads, kv_heads=kv_heads), kind=kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("digits", mostly(["111111", "231811"], ["111111", "000009", "500000", "231811"]))
def test_lengths_of_decodes_and_of_chunks(digits, kind):
    q_lens = tuple(map(int, digits))
    check(CAUSAL, operands(q_lens), q_lens, kind=kind)
    check(CAUSAL, operands(q_lens, behind=0), q_lens, kind=kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_are_numbered_as_rows_of_the_table(kind):
    """What a sink reads by sequence exists for all of them, and for no other."""
    variant = weft.Attention(mask=masks.causal, sink=sinks[batch, head], name="sunk")
    lens = torch.tensor([64, 5, 3, 0, 75, 40], dtype=torch.int32)
    given = {"sinks": torch.linspace(-3.0, 3.0, 24).view(6, 4)}
    _, lse = check(variant, operands(), kv_lens=lens, kind=kind, **given)
    first, last = starts_of(MIXED)[3:5].tolist()  # queries without a key see their sink
    torch.testing.assert_close(lse[0, :, first:last], given["sinks"][3][:, None].expand(4, last - first))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_batches(kind):
    generator = torch.Generator().manual_seed(KINDS.index(kind))

    def numbers(most):
        return torch.randint(0, most + 1, (6,), generator=generator)

    for _ in range(6):
        q_lens = (numbers(40) * (numbers(2) > 0) // (1 + 39 * (numbers(1) > 0))).tolist()
        lens = numbers(96).int()
        page = 2 ** int(torch.randint(0, 6, (), generator=generator))
        check(CAUSAL, operands(q_lens), q_lens, lens, page, kind)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(KINDS[0], torch.bfloat16), (KINDS[1], torch.float16), (KINDS[2], torch.float16)], ids=str
)
def test_dtypes(kind, dtype):
    check(CAUSAL, operands(dtype=dtype), kind=kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["latent", "weights"])
def test_latent_caches(form, kind):
    rank, rope, heads, q_lens = 32, 16, 4, (9, 1, 2)
    torch.manual_seed(3)
    lens = torch.tensor([40, 7, 0], dtype=torch.int32)
    cache = torch.randn(3, 1, 48, rank + rope)
    pool, _, table = paged(cache, cache, 16, lens)
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank, rope), scale=0.2, name="mla")
    weights = {} if form == "latent" else {"uk": torch.randn(heads, rank, 8), "uv": torch.randn(heads, rank, 24)}
    query = torch.randn(1, heads, 12, (rank if form == "latent" else 8) + rope)
    given = {"cu_seqlens_q": starts_of(q_lens), "kv_lens": lens, "block_table": table}
    target, schedule = kind
    got = variant(query, pool, **given, target=target, schedule=schedule, **weights)
    exact = {n: t.double() for n, t in weights.items()}
    for b, (first, last) in enumerate([(0, 9), (9, 10), (10, 12)]):
        rows = cache[b : b + 1, :, : lens[b]].double()
        if not lens[b]:
            assert not got[:, :, first:last].any()
            continue
        wanted = variant.reference(query[:, :, first:last].double(), rows, **exact)
        torch.testing.assert_close(got[:, :, first:last].double(), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(variant.reference(query, pool, **given, **weights), got, atol=1e-4, rtol=1e-4)


def test_lengths_and_tables_compile_nothing():
    for schedule in ("flash", "split_kv"):
        for step, q_lens in enumerate([MIXED, (1, 1, 1, 1, 1, 1), (0, 0, 30, 2, 0, 0)]):
            query, key, value = operands(q_lens)
            *pools, table = paged(key, value, 16)
            lens = (KV_LENS - step).clamp(0)
            given = {"cu_seqlens_q": starts_of(q_lens), "kv_lens": lens, "block_table": table[:, : 6 - step // 2]}
            CAUSAL(query, *pools, **given, target="interpret", schedule=schedule)
            if not step:
                before = builds()
        assert builds() == before


@pytest.mark.parametrize(("target", "schedule"), KINDS)
def test_nothing_to_see(target, schedule):
    query = torch.randn(1, 4, 5, 16)
    starts, lens = starts_of((3, 1)), torch.zeros(2, dtype=torch.int32)
    table, sink = torch.zeros(2, 3, dtype=torch.int32), torch.randn(4)
    how = {"target": target, "schedule": schedule, "return_lse": True}
    for blocks, pages in ((0, 3), (7, 0), (7, 3)):  # no pool, no room in the table, no key
        pool = torch.full((blocks, 2, 16, 16), torch.nan)
        given = {"block_table": table[:, :pages], "kv_lens": lens, "cu_seqlens_q": starts}
        out, lse = CAUSAL(query, pool, pool, **given, **how)
        assert torch.equal(out, torch.zeros_like(query)) and bool((lse == -torch.inf).all())
        out, lse = VARIANTS["sink"][0](query, pool, pool, sinks=sink, **given, **how)
        assert torch.equal(out, torch.zeros_like(query))
        torch.testing.assert_close(lse[:, :, :4], sink.view(1, 4, 1).expand(1, 4, 4))
        assert bool((lse[:, :, 4] == -torch.inf).all())  # of no sequence
    none = {"block_table": table[:0], "kv_lens": lens[:0], "cu_seqlens_q": starts[:1]}  # no sequence
    pool = torch.randn(7, 2, 16, 16)
    out, lse = CAUSAL(query, pool, pool, **none, **how)
    assert not out.any() and bool((lse == -torch.inf).all())
    no_rows = {"block_table": table, "kv_lens": lens + 3, "cu_seqlens_q": starts_of((0, 0))}
    out, lse = CAUSAL(query[:, :, :0], pool, pool, **no_rows, **how)
    assert out.shape == (1, 4, 0, 16) and lse.shape == (1, 4, 0)


def test_a_padded_call_gives_the_same_bits():
    """Of sequences of one query, as a decode has them."""
    query, key, value = operands((1,) * 6, behind=0)
    *pools, table = paged(key, value, 16)
    given = {"kv_lens": KV_LENS, "block_table": table, "target": "interpret", "return_lse": True}
    packed = CAUSAL(query, *pools, cu_seqlens_q=starts_of((1,) * 6), **given)
    padded = CAUSAL(query.transpose(0, 2), *pools, **given)
    assert all(torch.equal(a.transpose(0, 2), b) for a, b in zip(packed, padded))


# -- under torch -------------------------------------------------------------------------------------------------------
def test_a_compiled_model_takes_packed_queries_over_pages():
    query, key, value = operands()
    *pools, table = paged(key, value, 16)
    given = {"cu_seqlens_q": starts_of(MIXED), "kv_lens": KV_LENS, "block_table": table}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value, **given):
        return CAUSAL(query * 1.0, key, value, target="cpu", **given)

    wanted = CAUSAL(query, *pools, target="cpu", **given)
    assert torch.equal(model(query, *pools, **given)[:, :, : sum(MIXED)], wanted[:, :, : sum(MIXED)])


def test_there_is_no_backward():
    query, key, value = operands()
    *pools, table = paged(key, value, 16)
    given = {"cu_seqlens_q": starts_of(MIXED), "kv_lens": KV_LENS, "block_table": table}
    message = r"causal: a call with block_table has no backward: call under torch.no_grad\(\), or gather the pages"
    with pytest.raises(weft.WeftError, match=message):
        CAUSAL(query.clone().requires_grad_(), *pools, **given)
    with pytest.raises(weft.WeftError, match=message):
        torch.func.grad(lambda x: CAUSAL(x, *pools, **given).sum())(query)


# -- what is refused ---------------------------------------------------------------------------------------------------
def small(**changed):
    given = {
        "query": torch.randn(1, 4, 5, 16), "key": torch.randn(5, 2, 16, 16), "value": torch.randn(5, 2, 16, 16),
        "block_table": torch.tensor([[1, 2], [4, 0]], dtype=torch.int32), "kv_lens": torch.tensor([20, 3]),
        "cu_seqlens_q": torch.tensor([0, 4, 5]),
    }  # fmt: skip
    return given | changed


REFUSED = [
    (small(cu_seqlens_q=torch.tensor([0.0, 4.0, 5.0])), r"cu_seqlens_q: expected a tensor int32 or int64 \[sequences "
     r"\+ 1\], got torch.float32 \[3\]"),
    (small(cu_seqlens_q=[0, 4, 5]), r"cu_seqlens_q: expected a tensor .* got list; torch.tensor\(x, dtype="),
    (small(cu_seqlens_q=torch.zeros(1, 3).int()), r"cu_seqlens_q: expected a tensor .* got torch.int32 \[1, 3\]"),
    (small(cu_seqlens_q=torch.zeros(0).int()), r"cu_seqlens_q: .* the first row of each sequence and the end, got no"),
    (small(cu_seqlens_q=torch.tensor([0, 5])), r"(?s)kv_lens: expected a tensor int32 or int64 \[1\], one for each "
     r"sequence of cu_seqlens_q, got \[2\].*block_table: expected an int32 tensor \[1, pages\], one row for each "
     r"sequence of cu_seqlens_q, got \[2, 2\]"),
    (small(block_table=torch.zeros(3, 2).int()), r"block_table: .* one row for each sequence of cu_seqlens_q"),
    (small(kv_lens=torch.tensor([20])), r"kv_lens: expected a tensor int32 or int64 \[2\], one for each sequence"),
    (small(kv_lens=None), r"kv_lens: missing; with block_table pass the length of each sequence"),
    (small(query=torch.randn(2, 4, 5, 16)), r"query: expected packed queries \[1, Hq, total, D\] with cu_seqlens_q, "
     r"got \[2, 4, 5, 16\]; pass padded ones with q_lens="),
    (small(q_lens=torch.tensor([4, 1])), r"expected q_lens or cu_seqlens_q, got both: q_lens is for padded queries"),
    (small(cu_seqlens_kv=torch.tensor([0, 20, 23])), r"cu_seqlens_kv: expected none with block_table, whose keys"),
    (small(q_offset=torch.zeros(3, dtype=torch.int32)), r"q_offset: expected an int or an int32 tensor \[2\]"),
    # contents, which are on the host
    (small(cu_seqlens_q=torch.tensor([1, 4, 5])), r"cu_seqlens_q\[0\]: expected 0, where the first sequence begins"),
    (small(cu_seqlens_q=torch.tensor([0, 4, 3])), r"cu_seqlens_q\[2\]: expected at least 4, where sequence 1 begins"),
    (small(cu_seqlens_q=torch.tensor([0, 4, 6])), r"cu_seqlens_q\[2\]: expected at most 5, the rows of query, got 6"),
    (small(kv_lens=torch.tensor([20, 33])), r"kv_lens\[1\]: expected a length from 0 to 32, 2 pages of 16"),
    (small(block_table=torch.tensor([[1, 5], [4, -9]]).int()), r"block_table\[0, 1\]: expected a block from 0 to 4, as "
     r"key has 5, got 5; it holds rows 16 on of a sequence of 20 keys"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit(given, message):
    for call in (CAUSAL, CAUSAL.reference):
        with pytest.raises(weft.WeftError, match=message):
            call(given["query"], **{n: v for n, v in given.items() if n != "query"})
    CAUSAL(**small())  # what is prepared for calls that fit takes none that does not
    with pytest.raises(weft.WeftError, match=message):
        CAUSAL(**given)


def test_contents_behind_a_length_are_not_looked_at():
    given = small(block_table=torch.tensor([[1, 2], [4, GARBAGE]]).int())
    assert bool(CAUSAL(**given).isfinite().all())


# -- plans -------------------------------------------------------------------------------------------------------------
def planned(q_lens, heads=8):
    number = len(q_lens)
    sizes = weft.shape(heads=heads, kv_heads=2, q_len=sum(q_lens), kv_len=4096, head_dim=128)
    lens = {"kv_lens": torch.full((number,), 4000), "block_table": torch.zeros(number, 256, dtype=torch.int32)}
    return sizes, {"cu_seqlens_q": starts_of(q_lens), **lens}


def test_few_queries_have_their_keys_divided():
    """A decode, with a few queries more than sequences; what may have a long one takes tiles of flash too."""
    sizes, given = planned((1,) * 8)
    said = CAUSAL.explain(sizes, device="h200", **given)
    assert "split_forward=triton" in said and "problem       B 8 " in said
    assert "8 sequences of 1 query and 4000 keys, these in pages of 16, queries packed one after the other" in (
        said.replace("\n", " ")
    )
    sizes, given = planned((1,) * 7 + (MOST_SHORT,))
    said = CAUSAL.explain(sizes, device="h200", **given)
    assert "split_forward" in said and "flash_forward" not in said
    sizes, given = planned((1,) * 7 + (MOST_SHORT + 1,))
    said = CAUSAL.explain(sizes, device="h200", **given)
    assert "flash_forward=hopper" in said and "query_work" in said
    text = CAUSAL.source(sizes, device="h200", **given)
    assert "blocks_of(pages, first_key, kv_len, n_blocks, PAGE)" in text and "extent_of(cu_q, batch" in text
    assert "split_forward=triton" in CAUSAL.explain(sizes, device="h200", schedule="split_kv", **given)


def test_what_hopper_leaves_to_triton_is_said():
    variant, _ = VARIANTS["documents"]
    sizes, lens = planned((600, 1), heads=4)
    said = variant.explain(sizes, device="h200", **lens, doc=torch.zeros(2, 4096, dtype=torch.int32))
    assert "flash_forward=triton" in said
    assert "masks that read tensors, of packed queries over pages, are computed by the triton target" in (
        " ".join(said.split())
    )


def test_prepared_kernels_are_found_by_sums_of_queries():
    variant = CAUSAL.replace(name="summed")
    for q_lens in ((1,) * 6, (2 * MOST_SHORT,) * 6, MIXED):
        query, key, value = operands(q_lens, heads=1, kv_heads=1)
        *pools, table = paged(key, value, 16)
        variant(query, *pools, cu_seqlens_q=starts_of(q_lens), kv_lens=KV_LENS, block_table=table, target="interpret")
    divided, shared = [r.launcher for r in variant_of(variant)._forwards.values()]
    assert type(divided) is KernelLauncher and divided.division is not None and type(shared) is SharedLauncher
