"""FP8 operands that become bf16 ones before a call: which calls do, the copies, and what the plan says."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import kv_pos, q_pos
from weft.calls import conversion
from weft.compiler.planning.conversion import pays
from weft.runtime.ops.quantize import dequantize, dequantize_latent, dequantize_pages

from ..support import check_errors
from .test_fp8 import E4M3, E5M2, quantized

CAUSAL = weft.Attention(mask=kv_pos <= q_pos, name="causal")
BF16 = torch.bfloat16


@pytest.fixture
def always(monkeypatch) -> None:
    """As if each call were on a machine where copies pay."""
    monkeypatch.setattr(conversion, "pays", lambda *asked: True)


def call_of(query_is_fp8=False, layout="rows", per="head", device="cpu", rows=(70, 130)):
    query = torch.randn(2, 4, rows[0], 32, dtype=BF16, device=device)
    key, value = torch.randn(2, 2, 2, rows[1], 32, device=device)
    key8, value8 = weft.fp8.quantize(key, per=per), weft.fp8.quantize(value, per=per, layout=layout)
    options = {"k_descale": key8.descale, "v_descale": value8.descale}
    if query_is_fp8:
        query8 = weft.fp8.quantize(query, per="token")
        query, options["q_descale"] = query8.data, query8.descale
    return (query, key8.data, value8.data), options


@pytest.mark.parametrize("target", [None, "interpret"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("per", ["tensor", "head", 64, "token", None])
def test_real_numbers(per, layout, target) -> None:
    """Also of rows that are no multiple of a tile, and of widths that are no power of two."""
    for dtype, shape in ((E4M3, (2, 3, 77, 24)), (E5M2, (1, 2, 130, 16))):
        data, descale = quantized(shape, "head" if per is None else per, dtype, layout=layout)
        wanted = weft.fp8.dequantize(weft.fp8.Quantized(data, descale if per else torch.ones(1, 1, 1, 1)))
        with weft.settings(target=target):
            (found,) = dequantize([data], [descale.expand(*shape[:2], -1, 1) if per else None], torch.float32)
        assert found.is_contiguous() and torch.equal(found, wanted)


def test_what_pays() -> None:
    """As timed on an H100: 64 queries of 4 heads a key over 32k keys gain, 16 do not, nor 256 of one head over 8k."""
    pairs, copied = 4 * 32 * 32768, 3 * 2 * 4 * 8 * 32768 * 128
    assert pays("sm_90", 4.0 * 64 * pairs * 128, copied)
    assert not pays("sm_90", 4.0 * 16 * pairs * 128, copied)
    pairs, copied = 4 * 8 * 8192, 3 * 2 * 4 * 8 * 8192 * 64
    assert pays("sm_90", 4.0 * 1024 * pairs * 64, copied)
    assert not pays("sm_90", 4.0 * 256 * pairs * 64, copied)
    assert not pays("sm_100", 1e15, copied) and not pays("cpu", 1e15, copied)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("query_is_fp8", [True, False])
def test_a_call_is_that_of_real_numbers_in_bf16(query_is_fp8) -> None:
    tensors, options = call_of(query_is_fp8)
    found, lse = CAUSAL(*tensors, **options, return_lse=True)
    exact, exact_lse = CAUSAL.reference(*tensors, **{**options, "out_dtype": torch.float64}, return_lse=True)
    plain, plain_lse = CAUSAL.reference(*tensors, **{**options, "out_dtype": BF16}, return_lse=True)
    assert found.dtype == BF16
    check_errors(found, exact, plain, "out")
    given = (options.get("q_descale"), options["k_descale"], options["v_descale"])
    real = [t if d is None else weft.fp8.dequantize(weft.fp8.Quantized(t, d), BF16) for t, d in zip(tensors, given)]
    assert torch.equal(found, CAUSAL(*real)) and torch.equal(lse, CAUSAL(*real, return_lse=True)[1])
    assert "FP8 operands are made bf16 first" in CAUSAL.explain(*tensors, **options)
    assert "Dv 32  bf16" in CAUSAL.explain(*tensors, **options)
    torch.testing.assert_close(lse.double(), exact_lse, atol=0.05, rtol=0.01)
    torch.testing.assert_close(lse.double(), plain_lse.double(), atol=0.05, rtol=0.01)


@pytest.mark.usefixtures("always")
def test_calls_that_stay_as_they_are() -> None:
    (query, key, value), options = call_of()
    for odd in ({"target": "cpu"}, {"schedule": "flash"}, {"out_dtype": torch.float32}):
        assert "made bf16" not in CAUSAL.explain(query, key, value, **options, **odd)
    assert "made bf16" not in CAUSAL.explain(query.half(), key, value, **options)
    wanted = query.clone().requires_grad_()
    with pytest.raises(weft.WeftError, match="no backward"):
        CAUSAL(wanted, key, value, **options)
    with torch.no_grad():
        CAUSAL(wanted, key, value, **options)


@pytest.mark.usefixtures("always")
def test_bad_descales_are_refused_as_before() -> None:
    (query, key, value), options = call_of()
    with pytest.raises(weft.WeftError, match="k_descale: expected a positive number, got 0"):
        CAUSAL(query, key, value, **{**options, "k_descale": 0.0})
    with pytest.raises(weft.WeftError, match="v_descale: expected what broadcasts"):
        CAUSAL.explain(query, key, value, **{**options, "v_descale": torch.ones(3, 1, 1, 1)})


@pytest.mark.usefixtures("always")
def test_lengths_and_packed_sequences() -> None:
    tensors, options = call_of()
    lens = {"q_lens": torch.tensor([70, 31]), "kv_lens": torch.tensor([130, 64])}
    lens = {n: t.int() for n, t in lens.items()}
    found = CAUSAL(*tensors, **options, **lens)
    exact = CAUSAL.reference(*tensors, **options, **lens, out_dtype=torch.float64)
    check_errors(found, exact, CAUSAL.reference(*tensors, **options, **lens), "padded")
    packed = [t[:1] for t in tensors]
    own = {n: d[:1] for n, d in options.items()}
    starts = {"cu_seqlens_q": torch.tensor([0, 30, 70]).int(), "cu_seqlens_kv": torch.tensor([0, 60, 130]).int()}
    found = CAUSAL(*packed, **own, **starts)
    exact = CAUSAL.reference(*packed, **own, **starts, out_dtype=torch.float64)
    check_errors(found, exact, CAUSAL.reference(*packed, **own, **starts), "packed")


@pytest.mark.usefixtures("always")
def test_a_compiled_call() -> None:
    tensors, options = call_of()
    compiled = torch.compile(lambda q, k, v: CAUSAL(q, k, v, **options), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), CAUSAL(*tensors, **options))


def test_the_plan_for_a_gpu_says_it() -> None:
    """Of many queries a key; a step of a decode reads FP8."""
    tensors, options = call_of(rows=(4096, 8192))
    said = CAUSAL.explain(*tensors, **options, device="h100")
    assert "FP8 operands are made bf16 first" in said and "flash_forward=hopper" in said
    assert "made bf16" not in CAUSAL.explain(tensors[0][:, :, :64], *tensors[1:], **options, device="h100")
    assert "made bf16" not in CAUSAL.explain(*tensors, **options, device="b200")


def paged_call(page=16, per="token", packed=False):
    """Sequences of 0, 37 and 300 keys in a pool of NaN with holes between their blocks, and the options of a call."""
    kv_lens, width = [0, 37, 300], -(-300 // page)
    blocks = torch.randperm(3 * width + 5)[: 3 * width]
    table = torch.full((3, width), -1, dtype=torch.int32)
    pools = [torch.randn(3 * width + 5, 2, page, 32) for _ in range(2)]
    quantized = [weft.fp8.quantize(p, per="token" if per == "token" else "tensor") for p in pools]
    data = [torch.full_like(q.data.float(), float("nan")).to(E4M3) for q in quantized]
    for n, length in enumerate(kv_lens):
        own = blocks[n * width : n * width + -(-length // page)]
        table[n, : len(own)] = own.int()
        for place, block in enumerate(own.tolist()):
            rows = min(page, length - place * page)
            for d, q in zip(data, quantized):
                d[block, :, :rows] = q.data[block, :, :rows]
    options = {"k_descale": quantized[0].descale, "v_descale": quantized[1].descale, "block_table": table,
               "kv_lens": torch.tensor(kv_lens, dtype=torch.int32)}  # fmt: skip
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, 5, 25, 90], dtype=torch.int32)
    query = torch.randn(*((1, 4, 90) if packed else (3, 4, 40)), 32, dtype=BF16)
    return (query, *data), options


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page, per", [(16, "token"), (1, "tensor"), (256, "token"), (64, "tensor")])
def test_pages(page, per, packed) -> None:
    tensors, options = paged_call(page, per, packed)
    found, lse = CAUSAL(*tensors, **options, return_lse=True)
    exact, exact_lse = CAUSAL.reference(*tensors, **options, out_dtype=torch.float64, return_lse=True)
    check_errors(found, exact, CAUSAL.reference(*tensors, **options, out_dtype=BF16), "out")
    assert torch.equal(torch.isinf(lse), torch.isinf(exact_lse))
    said = CAUSAL.explain(*tensors, **options)
    assert "FP8 operands are made bf16 first" in said
    with pytest.raises(weft.WeftError, match="kv_lens: expected"):
        CAUSAL(*tensors, **{**options, "kv_lens": options["kv_lens"][:2]})


def test_pages_by_the_kernel_are_those_of_torch() -> None:
    """Also where a table has room for less than a length says, and where rows end inside of a large page."""
    for page in (16, 1, 256):
        (_, *pools), options = paged_call(page)
        table, lens = options["block_table"], options["kv_lens"] + torch.tensor([0, 0, 999], dtype=torch.int32)
        table = table.clamp(min=0)
        factors = [options["k_descale"], None]
        made = []
        for target in (None, "interpret"):
            with weft.settings(target=target):
                made.append(dequantize_pages(pools, factors, table, lens, torch.float32))
        pages = made[0][0].shape[0] // 3
        for ours, theirs in zip(*made):
            for n, length in enumerate((0, 37, table.shape[1] * page)):
                rows = [
                    t[n * pages : (n + 1) * pages].transpose(0, 1).flatten(1, 2)[:, :length] for t in (ours, theirs)
                ]
                assert torch.equal(rows[0].nan_to_num(7.0), rows[1].nan_to_num(7.0))


@pytest.mark.usefixtures("always")
def test_tables_that_want_much_memory_read_fp8(monkeypatch) -> None:
    tensors, options = paged_call()
    monkeypatch.setattr(conversion, "MOST_COPIED", 1000)
    assert "made bf16" not in CAUSAL.explain(*tensors, **options)


def latent_call(paged=False, per="token", rope=64, rows=(3, 90)):
    """Of a latent cache with 128 FP8 columns, dense or in shuffled pages of 16."""
    query = torch.randn(2, 8, rows[0], 128 + rope, dtype=BF16)
    cache = weft.fp8.quantize(torch.randn(2, 1, rows[1], 128), per=per)
    rotary = torch.randn(2, 1, rows[1], rope, dtype=BF16) if rope else None
    data, options = cache.data, {"k_descale": cache.descale}
    if paged:
        pages = -(-rows[1] // 16)
        table = torch.randperm(2 * pages + 3)[: 2 * pages].view(2, pages).int()

        def in_pages(x):
            pool = torch.full((2 * pages + 3, 16, x.shape[3]), 7, dtype=torch.float32).to(x.dtype)
            padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 16 * pages - rows[1]), value=1.0).to(x.dtype)
            pool.view(torch.int8)[table.flatten().long()] = padded.view(torch.int8).reshape(2 * pages, 16, -1)
            return pool[:, None]

        data, rotary = in_pages(data), None if rotary is None else in_pages(rotary)
        options = {"k_descale": in_pages(cache.descale) if per == "token" else cache.descale, "block_table": table}
        options["kv_lens"] = torch.tensor([rows[1], rows[1] - 21], dtype=torch.int32)
    latent = weft.Latent(rank=128, rope=rope)
    variant = weft.Attention(mask=kv_pos <= q_pos, latent=latent, scale=0.1, name=f"latent_copied_{rope}")
    return variant, (query, data), options | ({} if rotary is None else {"rope": rotary})


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize("paged", [False, True])
def test_latent_caches(paged, per, rope) -> None:
    """All columns become one bf16 tensor: a call over that gives the same, bit for bit where nothing is paged."""
    variant, tensors, options = latent_call(paged, per, rope)
    found, lse = variant(*tensors, **options, return_lse=True)
    exact, exact_lse = variant.reference(*tensors, **options, out_dtype=torch.float64, return_lse=True)
    check_errors(found, exact, variant.reference(*tensors, **options), "latent")
    torch.testing.assert_close(lse.double(), exact_lse, atol=0.05, rtol=0.01)
    said = variant.explain(*tensors, **options)
    assert "FP8 operands are made bf16 first" in said and "e4m3" not in said.split("schedule")[0]
    if not paged:
        real = weft.fp8.dequantize(weft.fp8.Quantized(tensors[1], options["k_descale"]), BF16)
        whole = torch.cat([real, options["rope"]], 3) if rope else real
        assert torch.equal(found, variant(tensors[0], whole))
    compiled = torch.compile(lambda q, c: variant(q, c, **options), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), found)


@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize("paged", [False, True])
def test_latent_copies_by_the_kernel_are_those_of_torch(paged, per) -> None:
    _, (_, data), options = latent_call(paged, per)
    parts, lens = [data, options["rope"]], options.get("kv_lens")
    made = []
    for target in (None, "interpret"):
        with weft.settings(target=target):
            made.append(dequantize_latent(parts, options["k_descale"], options.get("block_table"), lens, torch.float32))
    pages = made[0].shape[0] // 2
    for n, length in enumerate(lens.tolist() if paged else (90, 90)):
        rows = [t[n * pages : (n + 1) * pages].transpose(0, 1).flatten(1, 2)[:, :length] for t in made]
        assert torch.equal(*rows)


def test_which_calls_over_latent_caches_take_copies() -> None:
    """Hopper's kernel makes tiles 16-bit numbers in SRAM, which costs many queries more than copies do."""
    mla = weft.Attention(mask=kv_pos <= q_pos, latent=weft.Latent(rank=512, rope=64), scale=0.1, name="mla_copied")
    cache, rope = torch.empty(4, 1, 4096, 512, dtype=E4M3), torch.empty(4, 1, 4096, 64, dtype=BF16)
    for heads, rows, device, copied in ((128, 1, "h200", False), (128, 512, "h200", True), (16, 1, "h200", False)):
        query = torch.empty(4, heads, rows, 576, dtype=BF16)
        text = mla.explain(query, cache, rope=rope, k_descale=torch.ones(1, 1, 1, 1), device=device)
        assert ("made bf16 first" in text) == copied and "split_forward=hopper" in text
        assert ("FP8 as fp16" in text) != copied


def test_a_latent_cache_that_hopper_does_not_read_takes_copies_for_many_heads() -> None:
    """It is e5m2."""
    mla = weft.Attention(mask=kv_pos <= q_pos, latent=weft.Latent(rank=512, rope=64), scale=0.1, name="mla_copied")
    cache, rope = torch.empty(64, 1, 4096, 512, dtype=E5M2), torch.empty(64, 1, 4096, 64, dtype=BF16)
    for heads, copied in ((128, True), (16, False)):
        query = torch.empty(64, heads, 1, 576, dtype=BF16)
        text = mla.explain(query, cache, rope=rope, k_descale=torch.ones(1, 1, 1, 1), device="h200")
        assert ("made bf16 first" in text, "split_forward=hopper" in text) == (copied, copied)


@pytest.mark.usefixtures("always")
def test_a_length_past_the_table_ends_with_it() -> None:
    """As everywhere: not in what large pages have behind it, which nobody wrote."""
    tensors, options = paged_call(16)
    options["block_table"] = options["block_table"].clamp(min=0)
    options |= {"kv_lens": torch.tensor([0, 37, 304], dtype=torch.int32)}
    too_long = {**options, "kv_lens": torch.tensor([0, 37, 330], dtype=torch.int32)}
    found, wanted = CAUSAL(*tensors, **too_long), CAUSAL(*tensors, **options)
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))  # the last block has four rows of NaN
    with weft.settings(check=True), pytest.raises(weft.WeftError, match="kv_lens"):
        CAUSAL(*tensors, **too_long)


@pytest.mark.usefixtures("always")
def test_transforms_read_fp8() -> None:
    tensors, options = call_of()
    many = [torch.stack([t, t]) for t in tensors]
    found = torch.func.vmap(lambda q, k, v: CAUSAL(q, k, v, **options))(*many)
    assert torch.equal(found[0], found[1])


def test_packed_sequences_count_by_their_mean(monkeypatch) -> None:
    """Also where one cu_seqlens stands for both; what is no tensor is refused in words."""
    counted = []
    monkeypatch.setattr(conversion, "pays", lambda arch, flops, *rest: counted.append(flops))
    (query, key, value), options = call_of(rows=(128, 128))
    packed, own = [t[:1] for t in (query, key, value)], {n: d[:1] for n, d in options.items()}
    starts = torch.tensor([0, 60, 128]).int()
    for given in ({"cu_seqlens_q": starts}, {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}):
        CAUSAL(*packed, **own, **given)
    assert counted == [2.0 * 4 * 128 * 64 * 64] * 2
    with pytest.raises(weft.WeftError, match="cu_seqlens_kv: expected"):
        CAUSAL(*packed, **own, cu_seqlens_q=starts, cu_seqlens_kv=[0, 60, 128])
