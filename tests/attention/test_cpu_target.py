"""The `cpu` target against the definition in float64: outputs, log-sum-exp and every gradient.

Rule for errors: at most twice the error of plain torch (the same definition in the operands' dtype) plus an allowance
for rounding the result, for each element.
"""

import math
import time

import pytest
import torch

import weft
from weft import batch, head, kv_pos, q_pos, score

CAUSAL = kv_pos <= q_pos
WINDOW = weft.scalar("window", int)
SLOPES = weft.tensor("slopes", 1)
TEMPERATURE = weft.tensor("temperature", 1)
ROW_BIAS = weft.tensor("row_bias", 2)
COLUMN_BIAS = weft.tensor("column_bias", 2)
DOCUMENT = weft.tensor("document", 2, int)
HEADS, LONGEST = 4, 521


def operands_of(names, dtype, batch_rows):
    generator = torch.Generator().manual_seed(7)
    known = {
        "window": 37,
        "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=dtype),
        "temperature": torch.tensor([0.5, 0.75, 1.0, 2.0], dtype=dtype),
        # scores of a few units: of larger ones the last digit alone is more than what is allowed below
        "row_bias": 0.5 * torch.randn(HEADS, LONGEST, generator=generator).to(dtype),
        "column_bias": torch.randn(HEADS, LONGEST, generator=generator).to(dtype),
        "document": (torch.arange(LONGEST) // 50).repeat(batch_rows, 1),
    }
    return {n: known[n] for n in names}


VARIANTS = {
    "full": (weft.Attention(name="full"), ()),
    "causal": (weft.Attention(mask=CAUSAL, name="causal"), ()),
    "window": (weft.Attention(mask=CAUSAL & (q_pos - kv_pos < WINDOW), name="window"), ("window",)),
    "global_window": (weft.Attention(mask=CAUSAL & ((q_pos - kv_pos < WINDOW) | (kv_pos < 5)), name="global_window"),
                      ("window",)),
    "strict": (weft.Attention(mask=kv_pos < q_pos, name="strict"), ()),
    "softcap": (weft.Attention(score=5.0 * weft.tanh(score / 5.0), mask=CAUSAL, name="softcap"), ()),
    "alibi": (weft.Attention(score=score + SLOPES[head] * (kv_pos - q_pos), mask=CAUSAL, name="alibi"), ("slopes",)),
    "temperature": (weft.Attention(score=score / TEMPERATURE[head], name="temperature"), ("temperature",)),
    "biases": (weft.Attention(score=score + ROW_BIAS[head, q_pos] * COLUMN_BIAS[head, kv_pos], name="biases"),
               ("row_bias", "column_bias")),
    "documents": (weft.Attention(mask=CAUSAL & (DOCUMENT[batch, q_pos] == DOCUMENT[batch, kv_pos]), name="documents"),
                  ("document",)),
    "head_windows": (weft.Attention(mask=CAUSAL & (q_pos - kv_pos < 20 * (head + 1)), name="head_windows"), ()),
    "steps": (weft.Attention(score=weft.minimum(score, 1.0) - weft.floor(kv_pos / 16), mask=CAUSAL, name="steps"), ()),
}  # fmt: skip


def draw(shape, dtype, seed, transposed=False):
    generator = torch.Generator().manual_seed(seed)
    b, h, n, d = shape
    if transposed:
        return torch.randn(b, n, h, d, generator=generator).to(dtype).transpose(1, 2)
    return torch.randn(b, h, n, d, generator=generator).to(dtype)


def inputs(q_len, kv_len, dtype, kv_heads=HEADS, dim=16, value_dim=16, batch_rows=2, transposed=False):
    return [
        draw((batch_rows, HEADS, q_len, dim), dtype, 1, transposed),
        draw((batch_rows, kv_heads, kv_len, dim), dtype, 2, transposed),
        draw((batch_rows, kv_heads, kv_len, value_dim), dtype, 3, transposed),
    ]


def results(call, tensors, operands, dtype, **options):
    """out, lse and the gradients of tensors and float operands of a fixed scalar function of both."""
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    operands = {n: _leaf(v, dtype) for n, v in operands.items()}
    out, lse = call(*tensors, return_lse=True, **operands, **options)
    weight, lse_weight = (torch.linspace(-1.0, 1.0, x.numel(), dtype=torch.float64).view(x.shape) for x in (out, lse))
    seen = torch.isfinite(lse)
    loss = (out * weight.to(out.dtype)).sum() + torch.where(seen, lse * lse_weight.to(lse.dtype), 0.0).sum()
    leaves = tensors + [v for v in operands.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    return [out.detach(), lse.detach(), *grads]


def on_cpu(attention):
    """The attention with its target fixed."""
    return lambda *tensors, **options: attention(*tensors, target="cpu", **options)


def _leaf(value, dtype):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_()
    return value


EPSILON = {torch.float64: 1e-15, torch.float32: 6e-8, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def check(attention, tensors, operands, schedule=None, **options):
    dtype = tensors[0].dtype
    ours = results(on_cpu(attention), tensors, operands, dtype, schedule=schedule, **options)
    exact = results(attention.reference, tensors, operands, torch.float64, **options)
    plain = results(attention.reference, tensors, operands, dtype, **options)
    labels = ["out", "lse", "d query", "d key", "d value", *(f"d operand {i}" for i in range(len(exact) - 5))]
    for label, got, wanted, naive in zip(labels, ours, exact, plain, strict=True):
        assert got.dtype in (dtype, torch.float32) and got.shape == wanted.shape, label
        got, naive = got.double(), naive.double()
        same_infinity = torch.isinf(wanted) & (got == wanted)
        error = torch.where(same_infinity, 0.0, (got - wanted).abs())
        scale = torch.where(torch.isinf(wanted), 0.0, wanted.abs())
        naive_error = torch.where(torch.isinf(wanted), 0.0, (naive - wanted).abs())
        # Rounding of one element, and of what it came from (a rounded lse, say): the largest element stands for that.
        largest = scale.max() if scale.numel() else 0.0
        allowed = 2 * naive_error.amax() + EPSILON[dtype] * (4 * scale + 16 * largest + 1) if scale.numel() else 0.0
        assert bool((error <= allowed).all()), f"{attention.name}: {label} is off by {error.max().item()}"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 250, 521])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_and_lengths(name, length):
    attention, needs = VARIANTS[name]
    check(attention, inputs(length, length, torch.float32, kv_heads=2), operands_of(needs, torch.float32, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_dtypes(name, dtype):
    attention, needs = VARIANTS[name]
    check(attention, inputs(130, 130, dtype), operands_of(needs, dtype, 2))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ["full", "window", "softcap", "alibi", "biases", "head_windows"])
def test_groups_of_heads_and_widths(name, kv_heads):
    attention, needs = VARIANTS[name]
    tensors = inputs(150, 150, torch.float32, kv_heads=kv_heads, dim=24, value_dim=40)
    check(attention, tensors, operands_of(needs, torch.float32, 2))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 521), (17, 250), (250, 300)])
@pytest.mark.parametrize("name", VARIANTS)
def test_fewer_queries_than_keys(name, q_len, kv_len):
    attention, needs = VARIANTS[name]
    check(attention, inputs(q_len, kv_len, torch.float32, kv_heads=2), operands_of(needs, torch.float32, 2))


@pytest.mark.parametrize("name", ["causal", "window", "softcap", "alibi", "documents", "head_windows", "biases"])
@pytest.mark.parametrize("offset", [0, 30, torch.tensor([7, 100], dtype=torch.int32)])
def test_offsets(name, offset):
    attention, needs = VARIANTS[name]
    check(attention, inputs(40, 200, torch.float32), operands_of(needs, torch.float32, 2), q_offset=offset)


@pytest.mark.parametrize("name", ["causal", "alibi", "head_windows"])
def test_transposed_views(name):
    attention, needs = VARIANTS[name]
    tensors = inputs(140, 140, torch.float32, kv_heads=2, transposed=True)
    check(attention, tensors, operands_of(needs, torch.float32, 2))
    out = attention(*tensors, target="cpu", **operands_of(needs, torch.float32, 2))
    assert out.transpose(1, 2).is_contiguous(), "the output keeps the memory order of the query"


def test_strided_and_overlapping_operands():
    """Rows of a longer buffer, and one key head expanded to all."""
    attention, _ = VARIANTS["causal"]
    wide = draw((2, HEADS, 140, 48), torch.float32, 5)
    query, key = wide[..., :16], draw((2, 1, 140, 16), torch.float32, 6).expand(-1, HEADS, -1, -1)
    value = wide[:, :, :, 16:32]
    out, exact = (
        attention(query, key, value, target="cpu"),
        attention.reference(*(x.double() for x in (query, key, value))),
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_more_queries_than_keys_leaves_empty_rows():
    """Bottom right: the first rows of a causal mask see nothing, and give 0, -inf and zero gradients."""
    attention, _ = VARIANTS["causal"]
    tensors = inputs(250, 17, torch.float32)
    check(attention, tensors, {})
    out, lse, dquery, *_ = results(on_cpu(attention), tensors, {}, torch.float32)
    assert bool((out[:, :, :233] == 0).all()) and bool((lse[:, :, :233] == -math.inf).all())
    assert bool((dquery[:, :, :233] == 0).all())


@pytest.mark.parametrize("score_of", [lambda s: s, lambda s: 5.0 * weft.tanh(s / 5.0), lambda s: weft.log(s * s)])
def test_nothing_visible_at_all(score_of):
    attention = weft.Attention(score=score_of(score), mask=kv_pos > q_pos + 1000, name="blind")
    for got in results(on_cpu(attention), inputs(40, 40, torch.float32), {}, torch.float32):
        assert bool(((got == 0) | (got == -math.inf)).all())


def test_infinite_scores_hide_as_a_mask_does():
    hiding = weft.Attention(score=weft.where(CAUSAL, score, -math.inf), name="hiding")
    tensors = inputs(100, 60, torch.float32)
    by_score = results(on_cpu(hiding), tensors, {}, torch.float32)
    by_mask = results(on_cpu(VARIANTS["causal"][0]), tensors, {}, torch.float32)
    for a, b in zip(by_score, by_mask, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_score_of_minus_infinity_that_is_a_factor_hides_without_a_mask():
    """Its slope is infinite too, and meets a weight of 0."""
    pair, shown = weft.tensor("pair", 2), weft.tensor("shown", 1, bool)
    attention = weft.Attention(score=pair[q_pos, kv_pos] * weft.where(shown[0], score, 0.05), name="factor")
    operands = {"pair": torch.eye(6).log().clamp(max=0.0).roll(1, 0), "shown": torch.tensor([False])}
    tensors = [t.requires_grad_() for t in inputs(6, 6, torch.float32)]
    out = attention(*tensors, target="cpu", **operands)
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert bool(out.isfinite().all()) and all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize("name", ["causal", "softcap", "alibi", "head_windows"])
def test_nan_stays_in_its_batch_row(name):
    attention, needs = VARIANTS[name]
    tensors, operands = inputs(150, 150, torch.float32), operands_of(needs, torch.float32, 2)
    clean = results(on_cpu(attention), tensors, operands, torch.float32)
    for tensor in tensors:
        tensor[1] = math.nan
    dirty = results(on_cpu(attention), tensors, operands, torch.float32)
    for got, wanted in zip(dirty[:5], clean[:5], strict=True):
        torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=0)
        assert bool(got[1].isnan().any())


@pytest.mark.parametrize("name", ["causal", "softcap", "alibi"])
def test_nan_in_hidden_keys_does_not_matter(name):
    """Keys that no query may see can hold anything: padding of a cache, for example."""
    attention, needs = VARIANTS[name]
    (query, key, value), operands = inputs(50, 100, torch.float32), operands_of(needs, torch.float32, 2)
    clean = attention(query, key, value, target="cpu", q_offset=0, return_lse=True, **operands)
    key[:, :, 50:] = math.nan
    dirty = attention(query, key, value, target="cpu", q_offset=0, return_lse=True, **operands)
    torch.testing.assert_close(dirty, clean, rtol=1e-6, atol=1e-6)


# -- masks without closed form: the mask of a tile is evaluated before its products ------------------------------------
IDS = weft.tensor("ids", 1, int)
SEEN = weft.tensor("seen", 3, bool)
SAME = IDS[q_pos] == IDS[kv_pos]
OPEN = {
    "packed": CAUSAL & SAME,
    "both_ways": SAME,
    "padded": CAUSAL & SAME & (IDS[kv_pos] >= 0),
    "keys_only": IDS[kv_pos] > 1,
    "rows_only": IDS[q_pos] > 1,
    "shared_prefix": SAME | (kv_pos < 40),
    "by_row": CAUSAL & (DOCUMENT[batch, q_pos] == DOCUMENT[batch, kv_pos]),
    "by_head": CAUSAL & SEEN[head, q_pos // 16, kv_pos // 16],
    "by_head_and_row": SEEN[head, q_pos // 16, kv_pos // 16] & (DOCUMENT[batch, q_pos] == DOCUMENT[batch, kv_pos]),
}
SMALL_TILES = "flash/flash_forward=cpu:16x16/flash_backward=cpu:16x16"


def open_operands(order, length):
    """Ids of each token, blocks that each head sees, and other ids in each batch row; -1 is padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 5, (length,), generator=generator)
    ids = torch.cat([x.expand(n) for x, n in zip(ids, [3, 60, 1, 37] * length)])[:length] if order == "runs" else ids
    ids = ids.sort().values if order == "sorted" else ids
    blocks = -(-length // 16)
    seen = torch.rand(HEADS, blocks, blocks, generator=generator) < 0.2
    seen[1] = False
    return {"ids": ids, "document": torch.stack([ids, ids.roll(50)]), "seen": seen}


@pytest.mark.parametrize("length", [70, 203])
@pytest.mark.parametrize("order", ["sorted", "runs", "shuffled"])
@pytest.mark.parametrize("name", OPEN)
def test_masks_without_closed_form(name, order, length):
    """Tiles are skipped, joined or left unmasked by what the mask says: few and many, full and partly hidden."""
    curve = weft.Attention(score=5.0 * weft.tanh(score / 5.0), mask=OPEN[name], name=f"curved_{name}")
    tensors, known = inputs(length, length, torch.float32, kv_heads=2), open_operands(order, length)
    for attention in (weft.Attention(mask=OPEN[name], name=name), curve):
        given = {t.name: known[t.name] for t in attention.canonical.tensors}
        check(attention, tensors, given, schedule=SMALL_TILES)


@pytest.mark.parametrize("offset", [None, 20, torch.tensor([7, 100], dtype=torch.int32)])
def test_masks_without_closed_form_and_gradients_of_operands(offset):
    attention = weft.Attention(score + ROW_BIAS[head, q_pos] * COLUMN_BIAS[head, kv_pos], OPEN["by_head_and_row"],
                               name="open_biases")  # fmt: skip
    known = open_operands("runs", 203) | operands_of(("row_bias", "column_bias"), torch.float32, 2)
    given = {t.name: known[t.name] for t in attention.canonical.tensors}
    check(attention, inputs(90, 203, torch.float32, kv_heads=2), given, q_offset=offset, schedule=SMALL_TILES)


def test_rows_without_visible_keys_where_the_mask_has_no_closed_form():
    """Padding sees nothing and is seen by nothing: whole tiles of it, and rows of tiles that hold other tokens."""
    attention = weft.Attention(mask=OPEN["padded"], name="padded")
    ids = torch.arange(300) // 50
    ids[20:25], ids[130:300] = -1, -1
    tensors = inputs(300, 300, torch.float32)
    check(attention, tensors, {"ids": ids}, schedule=SMALL_TILES)
    out, lse, *grads = results(on_cpu(attention), tensors, {"ids": ids}, torch.float32)
    assert bool((out[:, :, ids < 0] == 0).all()) and bool((lse[:, :, ids < 0] == -math.inf).all())
    assert all(bool((grad[:, :, ids < 0] == 0).all()) for grad in grads)


def test_nan_in_an_empty_tile_does_not_matter():
    """Not even in a value: the tile is not multiplied."""
    attention = weft.Attention(mask=OPEN["packed"], name="packed")
    tensors, ids = inputs(768, 768, torch.float32), torch.arange(768) // 256
    clean = results(on_cpu(attention), tensors, {"ids": ids}, torch.float32)
    for tensor in tensors:
        tensor[:, :, 256:512] = math.nan
    dirty = results(on_cpu(attention), tensors, {"ids": ids}, torch.float32)
    for got, wanted in zip(dirty, clean, strict=True):
        assert bool(got[:, :, 256:512].isnan().all())
        torch.testing.assert_close(got[:, :, ids != 1], wanted[:, :, ids != 1], rtol=0, atol=0)


def pairs_multiplied(monkeypatch, attention, tensors, operands):
    """How many pairs of a query and a key have their dot product computed: by a forward, and by it and a backward."""
    width, counts, bmm = tensors[0].shape[-1], [0], torch.bmm

    def counted(a, b):
        if a.shape[-1] == width:  # q.k, and in a backward dout.v: other products sum over rows or columns
            counts[-1] += a.shape[0] * a.shape[1] * b.shape[2]
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", counted)
    tensors = [t.requires_grad_() for t in tensors]
    by_torch = "flash/flash_forward=cpu:256x256/flash_backward=cpu:256x256"  # not by oneDNN, whatever is fast here
    out = attention(*tensors, target="cpu", schedule=by_torch, **operands)
    counts.append(0)
    out.sum().backward()
    return counts[0], counts[1] // 2


@pytest.mark.parametrize("batch_rows", [1, 3])
def test_empty_tiles_of_documents_cost_no_product(monkeypatch, batch_rows):
    """Documents of two tiles, sorted or not: three tiles of each are multiplied, and none of two documents."""
    tile, length = 256, 4096
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    packed = weft.Attention(mask=OPEN["packed"], name="packed")
    for ids in (torch.arange(8), order):
        ids = ids.repeat_interleave(2 * tile)
        tensors = inputs(length, length, torch.float32, batch_rows=batch_rows)
        counts = pairs_multiplied(monkeypatch, packed, tensors, {"ids": ids})
        assert counts == (batch_rows * HEADS * 8 * 3 * tile**2,) * 2


def test_batch_rows_and_heads_skip_their_own_tiles(monkeypatch):
    """Rows with documents of their own, and heads with blocks of their own, pay for no tile that only another sees."""
    tile, length = 256, 4096
    ids = torch.stack([torch.arange(length) // tile, torch.arange(length) // (4 * tile)])
    by_row = weft.Attention(mask=DOCUMENT[batch, q_pos] == DOCUMENT[batch, kv_pos], name="by_row")
    tensors = inputs(length, length, torch.float32)
    counts = pairs_multiplied(monkeypatch, by_row, tensors, {"document": ids})
    assert counts == (HEADS * (16 + 64) * tile**2,) * 2
    seen = torch.zeros(HEADS, 16, 16, dtype=torch.bool)
    seen[0], seen[1, 3, 4:9], seen[2, :, 0] = True, True, True  # and head 3 sees nothing
    by_head = weft.Attention(mask=SEEN[head, q_pos // tile, kv_pos // tile], name="by_head")
    counts = pairs_multiplied(monkeypatch, by_head, inputs(length, length, torch.float32), {"seen": seen})
    assert counts == (2 * (256 + 5 + 16) * tile**2,) * 2


def test_nothing_is_hidden_where_everything_is_visible(monkeypatch):
    """Documents that end at tiles need no mask after all: no score is replaced."""
    attention = weft.Attention(mask=OPEN["both_ways"], name="both_ways")
    tensors, ids = inputs(1024, 1024, torch.float32), torch.arange(1024) // 256
    wanted = attention(*tensors, target="cpu", ids=ids)

    def refuse(*args, **options):
        raise AssertionError("a score was hidden")

    monkeypatch.setattr(torch, "minimum", refuse)
    assert torch.equal(attention(*tensors, target="cpu", ids=ids), wanted)
    with pytest.raises(AssertionError, match="a score was hidden"):
        attention(*tensors, target="cpu", ids=ids + torch.arange(1024) // 100)


MLA = weft.Attention(mask=CAUSAL, latent=weft.Latent(rank=32, rope=16), name="mla")


def latent_operands(dtype):
    query, cache = draw((2, HEADS, 70, 24 + 16), dtype, 1), draw((2, 1, 130, 32 + 16), dtype, 2)
    return [query, cache], {
        "uk": draw((1, HEADS, 32, 24), dtype, 3)[0] / 6,
        "uv": draw((1, HEADS, 32, 20), dtype, 4)[0] / 6,
    }


def assert_close_to_exact(ours, exact, dtype):
    for got, wanted in zip(ours, exact, strict=True):
        assert (got.double() - wanted).abs().max() <= 200 * EPSILON[dtype] * (1 + wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_latent_attention(dtype):
    """Expanded: keys have a rotary part that all heads share; gradients to all four operands."""
    tensors, projections = latent_operands(dtype)
    ours = results(on_cpu(lambda *a, **k: MLA(*a, form="expanded", **k)), tensors, projections, dtype)
    assert_close_to_exact(ours, results(MLA.reference, tensors, projections, torch.float64), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_absorbed_latent_attention(dtype):
    """Absorbed: the values are the first columns of the keys; decoding only, so no gradients."""
    tensors, projections = latent_operands(dtype)
    ours = MLA(*tensors, **projections, form="absorbed", target="cpu", return_lse=True)
    exact = MLA.reference(
        *(t.double() for t in tensors), **{n: p.double() for n, p in projections.items()}, return_lse=True
    )
    assert_close_to_exact(ours, exact, dtype)


def test_results_repeat_bit_for_bit():
    attention, needs = VARIANTS["alibi"]
    tensors, operands = inputs(250, 250, torch.float32), operands_of(needs, torch.float32, 2)
    first, second = (results(on_cpu(attention), tensors, operands, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_does_not_reach_into_the_kernel():
    attention, _ = VARIANTS["softcap"]
    tensors = inputs(70, 70, torch.bfloat16)
    expected = attention(*tensors, target="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(*tensors, target="cpu"), expected)


@pytest.mark.slow
def test_memory_and_time_are_linear_in_length():
    """50,000 tokens, window 128, forward and backward: dense scores would be 10 GB and take minutes."""
    attention, _ = VARIANTS["window"]
    length = 50_000
    tensors = [draw((1, 1, length, 16), torch.float32, seed).requires_grad_() for seed in range(3)]
    attention(*(t[:, :, :64] for t in tensors), target="cpu", window=128)  # generate the code
    start = time.perf_counter()
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(*tensors, target="cpu", window=128).sum().backward()
    assert time.perf_counter() - start < 60
    peak = current = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            current += event.nbytes()
            peak = max(peak, current)
    assert 0 < peak < 100 * length * 16, f"peak {peak / 2**20:.0f} MiB"
