"""Latent attention over FP8 caches: one descale for all columns of a row, or rotary columns beside them in 16 bits."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import masks

from ..support import check_errors, lost_by_a_cache, poisoned

E4M3 = torch.float8_e4m3fn
TARGETS = ("cpu", "interpret")
QUERIES = {"cpu": torch.bfloat16, "interpret": torch.float16}
LATENT = weft.Latent(rank=64, rope=16)
MLA = weft.Attention(mask=masks.causal, latent=LATENT, scale=0.1, name="mla")


def exact(query, cache, **given):
    """The definition in float64."""
    wide = {n: given[n].double() for n in ("rope", "uk", "uv") if n in given}
    return MLA.reference(query.double(), cache, **{**given, **wide})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("per", ["head", "token"])
def test_a_latent_cache_of_fp8(per: str, apart: bool, target: str) -> None:
    """One descale serves both products: the values are columns of the key. It is none of rotary columns apart."""
    cache = weft.fp8.quantize(poisoned((2, 1, 90, 64 if apart else 80), torch.float32, seed=1) * 3, per=per)
    query = poisoned((2, 4, 40, 80), QUERIES[target])
    given = {"k_descale": cache.descale}
    if apart:
        given["rope"] = poisoned((2, 1, 90, 16), QUERIES[target], seed=5)
    for rows in (40, 1):  # a prefill, and a step of a decode
        part = query[:, :, -rows:]
        out = MLA(part, cache.data, target=target, **given)
        plain = MLA.reference(part, cache.data, **given)
        check_errors(out, exact(part, cache.data, **given), plain, f"latent {target}")
    uk, uv = ((torch.randn(4, 64, width) * 0.1).to(query.dtype) for width in (24, 32))
    query = query[..., :40]
    expected = exact(query, cache.data, uk=uk, uv=uv, **given)
    for form in (None, "absorbed", "expanded"):
        out = MLA(query, cache.data, uk=uk, uv=uv, form=form, target=target, **given)
        assert (out - expected).norm() <= 2.0**-6 * expected.norm()
    with pytest.raises(weft.WeftError, match="v_descale: the value is columns of the key here"):
        MLA(query, cache.data, uk=uk, uv=uv, form="absorbed", **given, v_descale=1.0)


@pytest.mark.parametrize("target", TARGETS)
def test_rotary_columns_apart_of_every_kind_of_operands(target: str) -> None:
    query, rope = poisoned((2, 4, 30, 80), QUERIES[target]), poisoned((2, 1, 90, 16), QUERIES[target], seed=5)
    latent = poisoned((2, 1, 90, 64), QUERIES[target], seed=1)
    out = MLA(query, latent, rope=rope, target=target)
    assert torch.equal(out, MLA(query, torch.cat([latent, rope], -1), target=target))
    query8, latent8 = weft.fp8.quantize(query, per="token"), weft.fp8.quantize(latent)
    given = {"rope": rope, "q_descale": query8.descale, "k_descale": latent8.descale, "out_dtype": QUERIES[target]}
    out = MLA(query8.data, latent8.data, target=target, **given)
    wide = MLA.reference(query8.data, latent8.data, **{**given, "out_dtype": torch.float64, "rope": rope.double()})
    assert (out - wide).norm() <= 2.0**-8 * wide.norm()


@pytest.mark.parametrize("columns", [16, 80, 96])
def test_rotary_columns_apart_of_any_number(columns: int) -> None:
    """80 and 96 are tiles of two sizes each."""
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(32, columns), scale=0.1, name=f"rotary_{columns}")
    query, latent = poisoned((1, 2, 5, 32 + columns), torch.float32), poisoned((1, 1, 30, 32), torch.float32, seed=1)
    rope, latent8 = poisoned((1, 1, 30, columns), torch.float32, seed=5), weft.fp8.quantize(latent)
    for cache, given in ((latent, {}), (latent8.data, {"k_descale": latent8.descale})):
        out = variant(query, cache, rope=rope, target="interpret", **given)
        real = cache.double() if cache.dtype == torch.float32 else cache
        expected = variant.reference(query.double(), real, rope=rope.double(), **given)
        assert (out - expected).norm() <= 2.0**-9 * expected.norm()


@pytest.mark.parametrize("algorithm", ["flash", "streaming", "standard"])
def test_gradients_of_rotary_columns_of_two_sizes(algorithm: str) -> None:
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=32, rope=80), name="rotary_gradients")
    query, cache = (torch.randn(1, heads, n, width) for heads, n, width in ((2, 5, 96), (1, 30, 112)))
    given = [query, cache, torch.randn(2, 32, 16), torch.randn(2, 32, 16)]
    found = []
    for dtype in (torch.float32, torch.float64):
        q, c, uk, uv = leaves = [t.to(dtype).requires_grad_() for t in given]
        if dtype == torch.float32:
            out = variant(q, c, uk=uk, uv=uv, form="expanded", target="interpret", schedule=algorithm)
        else:
            out = variant.reference(q, c, uk=uk, uv=uv)
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for got, expected in zip(*found):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scale", ["token", "head"])
@pytest.mark.parametrize("kind", ["paged", "packed", "dense"])
def test_a_cache_keeps_rotary_columns_as_they_are(kind: str, scale: str, target: str) -> None:
    dtype = QUERIES[target]
    given = {"layers": 2, "latent": LATENT, "dtype": E4M3, "scale": scale, "rope_dtype": dtype}
    cache = weft.kv.DenseCache(4, 64, **given) if kind == "dense" else weft.kv.PagedCache(24, page=16, **given)
    sequences = [cache.allocate() for _ in range(3)]
    generator, packed = torch.Generator().manual_seed(1), kind == "packed"
    with weft.settings(target=target):
        for new in ([20, 1, 7], [1, 1, 1], [3, 1, 30]):
            x = torch.randn(3, 3, 4, max(new), 80, generator=generator).to(dtype)
            rows, query = x[:2, :, :1], x[2]
            if packed:
                there = torch.arange(max(new)) < torch.tensor(new)[:, None]
                rows = rows.transpose(2, 3)[:, there].transpose(1, 2)[:, None]
                query = query.transpose(1, 2)[there].transpose(0, 1)[None]
            with cache.extend(sequences, new, packed=packed) as step:
                for layer in range(2):
                    step.append(layer, rows[layer])
                options = step.options_of(1)
                out = MLA(query, step.keys(1), **options)
                expected = exact(query, step.keys(1), **options)
            assert (out - expected).abs().max() < 0.01
    first = cache.blocks(sequences[0])[0]
    assert cache.keys(1).dtype == E4M3 and cache.keys(1).shape[3] == 64
    if kind == "paged":  # the last row of the first sequence: 20 + 1 + 3
        assert torch.equal(cache.ropes(1)[cache.blocks(sequences[0])[1], 0, 7], rows[1, 0, 0, 2, 64:])
    assert first >= 0 and cache.usage.bytes == 2 * sum(
        pool.numel() * pool.element_size() for pool in (cache.keys(), cache.ropes())
    ) + (2 * 4 * cache.keys().shape[0] * cache.page if scale == "token" else 0)


def test_copies_and_pages_on_the_host_keep_rotary_columns() -> None:
    cache = weft.kv.PagedCache(24, page=16, latent=LATENT, dtype=E4M3, rope_dtype=torch.float32)
    sequence, rows, query = cache.allocate(), torch.randn(1, 1, 20, 80), torch.randn(1, 4, 20, 80)
    cache.append([sequence], rows)

    def found(sequence):
        step = cache.view([sequence])
        return MLA(query, step.keys(), **step.options)

    expected, copy = found(sequence), cache.fork(sequence)
    cache.append([copy], torch.randn(1, 1, 1, 80))
    cache.swap_out(copy)
    cache.swap_in(copy)
    cache.truncate(copy, 20)
    assert torch.equal(found(sequence), expected) and torch.equal(found(copy), expected)


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_a_module_reads_a_latent_cache_of_fp8(kind: str) -> None:
    module = weft.nn.LatentAttention(64, 4, kv_lora=64, nope=24, rope_dim=16)
    given = {"latent": LATENT, "dtype": E4M3, "rope_dtype": torch.float32}
    x = torch.randn(2, 12, 64)
    with torch.no_grad():
        cache = weft.kv.DenseCache(2, 32, **given) if kind == "dense" else weft.kv.PagedCache(8, **given)
        lost = lost_by_a_cache(module, cache, x)
    assert lost < 0.08


def test_graphs_and_plans_take_rotary_columns_apart() -> None:
    latent = weft.fp8.quantize(torch.randn(1, 1, 64, 64), per="token")
    query, rope = torch.randn(1, 4, 5, 80), torch.randn(1, 1, 64, 16)
    given = {"rope": rope, "k_descale": latent.descale}
    compiled = torch.compile(lambda q, c, **more: MLA(q, c, **more), fullgraph=True, backend="eager")
    assert torch.equal(compiled(query, latent.data, **given), MLA(query, latent.data, **given))
    text = MLA.explain(query.bfloat16(), latent.data, device="h100", **given | {"rope": rope.bfloat16()})
    assert "(rotary, a tensor of its own)" in text and "triton" in text
    named = MLA.explain(query.bfloat16(), latent.data, None, device="h100", **given | {"rope": rope.bfloat16()})
    assert named == text  # a call may say None, too
    uk, uv = torch.randn(4, 64, 24), torch.randn(4, 64, 32)
    assert "columns of the key" in MLA.explain(query[..., :40], latent.data, uk=uk, uv=uv, **given)  # the absorbed form


@pytest.mark.parametrize(("given", "message"), [
    ({"rope": torch.randn(1, 1, 63, 16)}, r"rope: expected \[1, 1, 64, 16\] beside the cache, got \[1, 1, 63, 16\]"),
    ({"rope": torch.randn(1, 1, 64, 16).half()}, "rope: .*, or make the cache with rope_dtype=torch.float32"),
    ({"rope": torch.randn(1, 1, 64, 16).to(E4M3)}, "rope: expected 16 or 32 bits a number, got torch.float8_e4m3fn; "
     "they have no descale"),
    ({"rope": torch.randn(1, 1, 64, 16, device="meta")}, "rope: expected device cpu as in query, got meta"),
    ({"rope": [1.0]}, "rope: expected a tensor, got list"),
    ({}, r"cache: expected dim 80 \(rank \+ rope\), got 64"),
])  # fmt: skip
def test_rotary_columns_that_do_not_fit(given: dict[str, object], message: str) -> None:
    query, latent = torch.randn(1, 4, 5, 80), torch.randn(1, 1, 64, 64).to(E4M3)
    for call in (MLA, MLA.reference):
        with pytest.raises(weft.WeftError, match=message):
            call(query, latent, **given)


def test_rotary_columns_where_none_can_be() -> None:
    query, key = torch.randn(2, 1, 4, 8, 64)
    with pytest.raises(weft.WeftError, match="rope: uk, uv, form and rope belong to variants declared with latent="):
        weft.Attention(name="plain")(query, key, key, rope=key)
    bare = weft.Attention(latent=weft.Latent(rank=64, rope=0), scale=0.1, name="bare")
    with pytest.raises(weft.WeftError, match="rope: expected None, as the latent has no rotary columns, got shape"):
        bare(query, key[:, :1], rope=key[:, :1])
    for latent, dtype, rope_dtype in ((LATENT, torch.float16, torch.float16), (LATENT, E4M3, E4M3)):
        with pytest.raises(weft.WeftError, match="rope_dtype: expected one of .* for a latent cache of FP8, and None"):
            weft.kv.PagedCache(4, latent=latent, dtype=dtype, rope_dtype=rope_dtype)
