"""Modules: against torch written out by hand, token by token over both caches, compiled, on meta, and in halves."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from weft import head, kv_pos, nn, q_pos
from weft.kv import DenseCache, PagedCache

WIDTH, HEADS, KV_HEADS, DIM = 48, 4, 2, 16
LATENT = {"kv_lora": 16, "nope": 12, "rope_dim": 8, "value_dim": 10}
window, slopes = weft.scalar("window", int), weft.tensor("slopes", 1)
LOCAL = weft.Attention(mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window), name="local")
ALIBI = weft.Attention(weft.score + slopes[head] * (kv_pos - q_pos), kv_pos <= q_pos, name="alibi")


def attention(**more):
    torch.manual_seed(0)
    return nn.Attention(WIDTH, HEADS, KV_HEADS, DIM, **{"rope": nn.Rotary(DIM), **more})


def latent(**more):
    torch.manual_seed(0)
    return nn.LatentAttention(WIDTH, HEADS, **{**LATENT, **more})


def cache_of(kind, module, **more):
    sizes = {"dtype": torch.float32, **more}
    if isinstance(module, nn.LatentAttention):
        sizes["latent"] = module.variant.latent
    else:
        sizes |= {"kv_heads": module.kv_heads, "head_dim": module.head_dim}
    return PagedCache(24, page=4, **sizes) if kind == "paged" else DenseCache(3, 32, **sizes)


# -- what it computes ------------------------------------------------------------------------------------------------
def test_attention_is_what_torch_computes():
    module = attention(qk_norm=1e-5, bias=True, out_bias=True)
    x = torch.randn(2, 9, WIDTH)

    def heads(projection, norm=None):
        rows = projection(x).view(2, 9, -1, DIM)
        rows = rows if norm is None else rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
        return rows.transpose(1, 2)

    def turned(rows):  # as complex numbers: column i and i + DIM / 2 are one
        angle = torch.arange(9)[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        pairs = torch.complex(*rows.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pairs.real, pairs.imag], -1)

    query, key = turned(heads(module.q_proj, module.q_norm)), turned(heads(module.k_proj, module.k_norm))
    value = heads(module.v_proj)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(module(x), module.o_proj(out.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)
    assert set(module.state_dict()) == {f"{p}_proj.{k}" for p in "qkvo" for k in ("weight", "bias")} | {
        "q_norm.weight", "k_norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("q_lora", [None, 20])
def test_latent_attention_is_what_torch_computes(q_lora):
    """Keys and values written out; also the gradients, as it trains expanded."""
    module = latent(q_lora=q_lora)
    x = torch.randn(2, 7, WIDTH)

    def norm(rows, weight):
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight

    def turned(rows):  # neighbours are one complex number
        angle = torch.arange(7)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
        pairs = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def by_hand():
        if q_lora is None:
            query = module.q_proj(x)
        else:
            query = module.q_b_proj(norm(module.q_a_proj(x), module.q_a_layernorm.weight))
        query = query.view(2, 7, HEADS, 20).transpose(1, 2)
        compressed = module.kv_a_proj_with_mqa(x)
        expanded = module.kv_b_proj(norm(compressed[..., :16], module.kv_a_layernorm.weight))
        nope, value = expanded.view(2, 7, HEADS, 22).transpose(1, 2).split([12, 10], -1)
        shared = turned(compressed[..., 16:])[:, None].expand(-1, HEADS, -1, -1)
        query = torch.cat([query[..., :12], turned(query[..., 12:])], -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, torch.cat([nope, shared], -1), value, is_causal=True
        )
        return module.o_proj(out.transpose(1, 2).flatten(2))

    found, expected = module(x), by_hand()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = list(module.parameters())
    for mine, exact in zip(torch.autograd.grad(found.square().sum(), weights),
                           torch.autograd.grad(expected.square().sum(), weights)):  # fmt: skip
        torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        served = module.absorb()(x)
    torch.testing.assert_close(served, expected, atol=1e-5, rtol=1e-5)
    assert "uk" in module.absorb().state_dict() and "kv_b_proj.weight" not in module.absorb().state_dict()


MODULES = {
    "plain": (attention, {}, {}),
    "window": (attention, {"variant": LOCAL, "qk_norm": True}, {"window": 5}),
    "operand": (attention, {"variant": ALIBI}, {"slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
    "latent": (latent, {}, {}),
    "absorbed": (lambda **more: latent(q_lora=20, **more).absorb(), {}, {}),
    "stretched": (
        lambda **more: nn.Attention(WIDTH, HEADS, rope=nn.Rotary(8, scaling=nn.YarnScaling(4.0, 8))), {}, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", ["paged", "dense", "packed"])
@torch.no_grad()
def test_prefill_and_decode_are_the_whole_forward(kind, name):
    """Sequences of different lengths in one step: prefill, a chunk, then token by token."""
    make, more, options = MODULES[name]
    module = make(**more)
    totals, chunks = [15, 6, 11], [[8, 2, 5], [4, 1, 3], *[[1, 1, 1]] * 3]
    x = torch.randn(3, 15, WIDTH)
    whole = [module(x[b : b + 1, :n], **options) for b, n in enumerate(totals)]
    packed = kind == "packed"
    cache = cache_of("paged" if packed else kind, module)
    sequences, done = [cache.allocate() for _ in totals], [0, 0, 0]
    for lengths in chunks:
        new = [x[b, start : start + n] for b, (start, n) in enumerate(zip(done, lengths))]
        with cache.extend(sequences, lengths, packed=packed) as step:
            rows = torch.cat(new)[None] if packed else torch.full((3, step.length, WIDTH), torch.nan)
            for b, own in enumerate([] if packed else new):
                rows[b, : len(own)] = own
            out = module(rows, cache=step, **options)
        found = out[0].split(lengths) if packed else [out[b, :n] for b, n in enumerate(lengths)]
        for b, (start, n) in enumerate(zip(done, lengths)):
            torch.testing.assert_close(found[b], whole[b][0, start : start + n], atol=2e-5, rtol=2e-5)
        done = [start + n for start, n in zip(done, lengths)]
    assert done == totals == [cache.length(s) for s in sequences]


@torch.no_grad()
def test_layers_share_one_step_and_prompts_share_pages():
    torch.manual_seed(3)
    layers = torch.nn.ModuleList([attention(layer=n) for n in range(2)])
    cache = cache_of("paged", layers[0], layers=2)
    tokens, embedded = list(range(10)), torch.randn(1, 10, WIDTH)

    def run(x, **more):
        for layer in layers:
            x = x + layer(x, **more)
        return x

    whole = run(embedded)
    a = cache.allocate(tokens)
    with cache.extend([a], [10], [tokens]) as step:
        run(embedded, cache=step)
    b = cache.allocate(tokens)
    assert cache.length(b) == 8
    with cache.extend([b], [2], [tokens[8:]]) as step:
        torch.testing.assert_close(run(embedded[:, 8:], cache=step), whole[:, 8:], atol=2e-5, rtol=2e-5)
    assert cache.usage.shared == 2


@pytest.mark.parametrize("name", ["plain", "latent"])
@torch.no_grad()
def test_a_fixed_step_stands_for_others(name):
    """As a CUDA graph wants it: the same tensors for any lengths, tables and numbers of sequences."""
    module = MODULES[name][0]()
    x = torch.randn(3, 6, WIDTH)
    plain, own = cache_of("paged", module), cache_of("paged", module)
    fixed = own.fixed_step(3, 4, pages=5)
    places = [t.data_ptr() for t in (fixed.slots, fixed.kv_lens, fixed.block_table)]
    sequences = [(plain.allocate(), own.allocate()) for _ in range(3)]
    for chosen, lengths in (([0, 1, 2], [4, 1, 3]), ([2, 0], [1, 2]), ([1], [4])):
        expected, found = (
            cache.extend([sequences[n][i] for n in chosen], lengths) for i, cache in enumerate((plain, own))
        )
        fixed.fill(found)
        rows = torch.nn.functional.pad(
            x[: len(chosen), : found.length], (0, 0, 0, 4 - found.length, 0, 3 - len(chosen))
        )
        out = module(rows, cache=fixed)
        wanted = module(x[: len(chosen), : found.length], cache=expected)
        for b, n in enumerate(lengths):
            torch.testing.assert_close(out[b, :n], wanted[b, :n], atol=1e-5, rtol=1e-5)
        assert places == [t.data_ptr() for t in (fixed.slots, fixed.kv_lens, fixed.block_table)]
        expected.commit()
        found.commit()
    assert torch.equal(plain.keys(), own.keys())
    with pytest.raises(weft.WeftError, match=r"at most 3 sequences, 4 rows and 5 pages, got \[1, 5, "):
        fixed.fill(own.extend([sequences[1][1]], [5]))
    with pytest.raises(weft.WeftError, match="expected a fixed step and one of the same cache"):
        fixed.fill(plain.view([sequences[0][0]]))
    with pytest.raises(weft.WeftError, match="pages: expected a positive int, got 0"):
        own.fixed_step(3, pages=0)


# -- in models -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [attention, latent])
def test_compiled_in_one_graph(make):
    """Training and a step of decode, whose cache grows without compiling again."""
    module = make()
    x = torch.randn(3, 6, WIDTH)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-5)
    plain, own = cache_of("paged", module), cache_of("paged", module)
    module = module.absorb() if isinstance(module, nn.LatentAttention) else module
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with torch.no_grad():
        outs = []
        for cache, run in ((plain, module), (own, compiled)):
            sequences, found = [cache.allocate() for _ in range(3)], []
            for n in (4, 1, 1, 1, 1, 1, 1):
                with cache.extend(sequences, [n] * 3) as step:
                    found.append(run(x[:, :n], cache=step))
            outs.append(torch.cat(found, 1))
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
        assert torch.equal(plain.keys(), own.keys())
        assert counter.frame_count <= 3  # a prompt, a token, and any number of pages


@pytest.mark.parametrize("make", [attention, latent])
def test_made_on_meta_and_loaded(make):
    """It has no buffer that loading would leave out."""
    module = make()
    with torch.device("meta"):
        empty = make()
    assert empty(torch.empty(2, 5, WIDTH, device="meta")).shape == (2, 5, WIDTH)
    empty.to_empty(device="cpu").load_state_dict(module.state_dict())
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(empty(x), module(x)) and torch.equal(copy.deepcopy(module)(x), module(x))
    assert not list(module.buffers())


@pytest.mark.parametrize("name", ["plain", "window", "operand", "latent", "low rank queries", "one key head", "biases"])
def test_parts_with_half_of_the_heads_sum_to_the_whole(name):
    make, more, options = MODULES.get(name, (attention, {}, {}))
    if name == "low rank queries":
        make, more = latent, {"q_lora": 20}
    if name == "biases":
        more = {"bias": True, "out_bias": True, "qk_norm": True}
    module = nn.Attention(WIDTH, HEADS, 1, DIM, rope=nn.Rotary(DIM)) if name == "one key head" else make(**more)
    x = torch.randn(2, 9, WIDTH)
    outs = []
    for rank in range(2):
        own = {n: v.chunk(2)[rank] if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        part = module.shard(rank, 2)
        assert part.heads == HEADS // 2 and part.o_proj.weight.data_ptr() is not None
        outs.append(part(x, **own))
    torch.testing.assert_close(outs[0] + outs[1], module(x, **options), atol=1e-5, rtol=1e-5)
    assert torch.equal(module.shard(0, 1)(x, **options), module(x, **options))


@pytest.mark.parametrize("make", [lambda: attention(qk_norm=True), lambda: latent(q_lora=20)])
@torch.no_grad()
def test_under_autocast_rows_have_its_dtype(make):
    module, x = make(), torch.randn(1, 6, WIDTH)
    cache = cache_of("paged", module, dtype=torch.bfloat16)
    a = cache.allocate()
    with torch.autocast("cpu", torch.bfloat16):
        whole, found = module(x), []
        for start, n in ((0, 5), (5, 1)):
            with cache.extend([a], [n]) as step:
                found.append(module(x[:, start : start + n], cache=step))
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=2e-2, rtol=2e-2)


# -- rotary embeddings -----------------------------------------------------------------------------------------------
def test_scalings_of_rotary_embeddings():
    """Against the papers' formulas, in terms of wave lengths."""
    dim, base, factor, old = 64, 500_000.0, 8.0, 4096
    plain = nn.Rotary(dim, base).frequencies
    assert plain == tuple(base ** (-2 * i / dim) for i in range(32))

    def of(scaling):
        return nn.Rotary(dim, base, scaling).frequencies

    assert of(nn.LinearScaling(factor)) == tuple(f / factor for f in plain)
    ntk = of(nn.NtkScaling(factor))
    assert ntk[0] == 1.0 and math.isclose(
        ntk[-1], plain[-1] / factor
    )  # the slowest wave by the factor, the fastest not
    llama = of(nn.Llama3Scaling(factor, old))
    for f, g in zip(plain, llama):
        wave = 2 * math.pi / f
        if wave < old / 4:
            assert g == f
        elif wave > old:
            assert g == f / factor
        else:
            smooth = (old / wave - 1) / 3
            assert math.isclose(g, (1 - smooth) * f / factor + smooth * f)
    yarn = nn.YarnScaling(factor, old)
    turns = [old * f / (2 * math.pi) for f in plain]
    for f, g, n in zip(plain, of(yarn), turns):
        assert f / factor * 0.999 <= g <= f * 1.001
        assert n < 33 or g == f
        assert n > 0.9 or math.isclose(g, f / factor)
    assert math.isclose(yarn.magnitude, 0.1 * math.log(8) + 1) and yarn.score_scale == 1.0
    deepseek = nn.YarnScaling(40.0, old, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.magnitude == 1.0 and math.isclose(deepseek.score_scale, (0.1 * math.log(40) + 1) ** 2)
    assert f"{deepseek.score_scale * (12 + 8) ** -0.5}" in str(
        latent(rope=nn.Rotary(8, scaling=deepseek)).variant.scale
    )


def test_dynamic_scaling_follows_each_sequence():
    rope = nn.Rotary(16, scaling=nn.DynamicNtkScaling(2.0, 32))
    positions = torch.arange(5).repeat(3, 1)
    cos, _ = rope(positions, torch.tensor([20, 32, 64]))
    plain, _ = nn.Rotary(16)(positions[:1])
    larger, _ = nn.Rotary(16, 10_000.0 * (2 * 64 / 32 - 1) ** (16 / 14))(positions[:1])
    torch.testing.assert_close(cos[:2], plain.expand(2, -1, -1, -1))
    torch.testing.assert_close(cos[2:], larger)
    torch.testing.assert_close(rope(positions[0], 64)[0], larger)
    with pytest.raises(weft.WeftError, match="lengths: missing; DynamicNtkScaling depends on the tokens"):
        rope(positions)


def test_dynamic_scaling_is_the_same_whatever_torchs_defaults():
    rope, positions = nn.Rotary(16, scaling=nn.DynamicNtkScaling(1.7, 32)), torch.arange(48)
    want = rope(positions, lengths=48)
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        found = rope(positions, lengths=48)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_a_layer_computes_with_numbers_after_a_run_without_data():
    """Frequencies are kept for all layers, but none that a mode of torch made, and none is given to a mode."""
    rope = nn.Rotary(DIM, base=777.0)
    for _ in range(2):
        with FakeTensorMode():
            assert attention(rope=rope)(torch.randn(1, 5, WIDTH)).shape == (1, 5, WIDTH)
        assert attention(rope=rope)(torch.randn(1, 5, WIDTH)).isfinite().all()


def test_half_of_the_columns_and_low_precision():
    rope, x = nn.Rotary(8), torch.randn(2, 3, 5, 16, dtype=torch.bfloat16)
    turned = rope.rotate(x, rope(torch.arange(5)))
    assert turned.dtype == torch.bfloat16 and torch.equal(turned[..., 8:], x[..., 8:])
    exact = rope.rotate(x.double().float(), rope(torch.arange(5)))
    assert torch.equal(turned, exact.bfloat16())


@pytest.mark.parametrize("make", [attention, latent])
def test_rows_of_padded_and_packed_sequences_are_those_of_each_alone(make):
    """Queries and keys are the same rows: one of their lengths stands for both, and positions count from 0."""
    scaling = nn.DynamicNtkScaling(2.0, original_length=4)
    module, x, lengths = make(rope=nn.Rotary(8, scaling=scaling)), torch.randn(2, 10, WIDTH), torch.tensor([10, 6])
    wanted = [module(x[b : b + 1, :n])[0] for b, n in enumerate(lengths)]
    for given in ({"kv_lens": lengths}, {"q_lens": lengths}, {"q_lens": lengths, "kv_lens": lengths}):
        for row, alone in zip(module(x, **given), wanted):
            torch.testing.assert_close(row[: len(alone)], alone)
    packed, starts = torch.cat([x[0, :10], x[1, :6]])[None], torch.tensor([0, 10, 16])
    positions = torch.cat([torch.arange(10), torch.arange(6)])
    with pytest.raises(weft.WeftError, match="DynamicNtkScaling turns the rows of a packed step by lengths"):
        module(packed, cu_seqlens_q=starts, positions=positions)  # not by the sum of their lengths
    plain = make()
    out = plain(packed, cu_seqlens_q=starts, positions=positions)
    torch.testing.assert_close(out[0, 10:], plain(x[1:, :6])[0])


# -- what is refused -------------------------------------------------------------------------------------------------
NTK = nn.DynamicNtkScaling(2.0, 4)
ROTATION = nn.Rotary(8)(torch.arange(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Attention(48, 4, 3), "kv_heads: expected a divisor of 4 heads, got 3"),
        (lambda: nn.Attention(50, 4), "head_dim: missing; it is width / heads only where 4 divides 50"),
        (lambda: nn.Attention(0, 4), "width: expected a positive int, got 0"),
        (lambda: nn.Attention(48, 4, rope=nn.Rotary(16)), "rope: expected at most 12 columns, got 16"),
        (lambda: nn.Attention(48, 4, variant="causal"), "variant: expected a weft.Attention, got 'causal'"),
        (lambda: nn.Attention(48, 4, variant=latent().variant), "got causal_latent; nn.LatentAttention takes it"),
        (lambda: latent(variant=LOCAL), "expected one with latent=, got local without; nn.Attention takes it"),
        (lambda: latent(kv_lora=8, variant=latent().variant), r"expected latent=weft.Latent\(8, 8\), got Latent"),
        (lambda: nn.Rotary(7), "dim: expected an even int from 2 to 65536, got 7"),
        (lambda: nn.Rotary(8, scaling="linear"), "scaling: expected None or one of LinearScaling, NtkScaling"),
        (lambda: nn.Rotary(8, scaling=nn.LinearScaling(0.5)), "factor: expected a number from 1 on, got 0.5"),
        (lambda: nn.Rotary(8, base="1e4"), "base: expected a number above 1, got '1e4'"),
        (lambda: nn.Rotary(8, scaling=nn.LinearScaling("2")), "factor: expected a number from 1 on, got '2'"),
        (
            lambda: nn.Rotary(8, scaling=nn.YarnScaling(4.0, 0)),
            "length: expected a positive int up to .*, got 0",
        ),
        (
            lambda: nn.Rotary(8, scaling=nn.DynamicNtkScaling(4.0, 0)),
            "length: expected a positive int up to .*, got 0",
        ),
        (lambda: nn.Rotary(8, scaling=nn.Llama3Scaling(8.0, 64, 4.0, 4.0)), "expected 0 < low < high, got 4.0 and 4.0"),
        (lambda: nn.Rotary(10**30), "dim: expected an even int from 2 to 65536, got 1000"),
        (lambda: nn.Rotary(8, interleaved=1), "interleaved: expected True or False, got 1"),
        (
            lambda: nn.Rotary(8, scaling=nn.YarnScaling(4.0, 8, mscale=torch.ones(2))),
            "mscale: expected a number from 0 on",
        ),
        (
            lambda: nn.Rotary(8)(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)),
            "positions: expected a tensor",
        ),
        (
            lambda: nn.Rotary(8, scaling=NTK)(torch.arange(4), "8"),
            "lengths: expected an int, or a tensor .B. of ints, got '8'",
        ),
        (lambda: nn.Rotary(8, scaling=NTK)(torch.arange(4), True), "lengths: expected an int, .*, got True"),
        (
            lambda: nn.Rotary(8).rotate(torch.ones(1, 2, 4, 4), ROTATION),
            "x: expected a tensor .* with 8 columns or more",
        ),
        (
            lambda: nn.Rotary(8).rotate(torch.ones(1, 2, 3, 8), ROTATION),
            "rotation: expected cosine and sine of the rows",
        ),
        (lambda: nn.Attention(10**30, 4, 4, 8), "width: expected a positive int below 2..31, got 1000"),
        (lambda: nn.Attention(48, 4, bias=np.ones(2)), "bias: expected True or False, got an ndarray"),
        (lambda: nn.Attention(48, 4, device="gpu"), "device: expected a device such as 'cuda', or None, got 'gpu'"),
        (lambda: nn.Attention(48, 4, dtype=torch.int32), "dtype: expected one of floats .*, got torch.int32"),
        (lambda: latent(rope="x"), "rope: expected a weft.nn.Rotary, got 'x'"),
        (lambda: latent(eps="x"), "eps: expected a number from 0 on, got 'x'"),
        (lambda: attention()(torch.ones(1, 4, 48), rotation=3), "rotation of these .* got a rotation 3"),
        (lambda: attention()(torch.ones(1, 4, 48), return_lse=np.ones(2)), "nn: return_lse: a module gives its output"),
        (lambda: attention().shard(False, True), "ranks that divide 4 heads and a rank below, got False of True"),
        (lambda: nn.Attention(48, 4, head_dim=512), "head_dim: expected at most 256, as calls have it, got 512"),
        (lambda: nn.Attention(48, 4, qk_norm=1), "qk_norm: expected True, False or the eps of the norms, .* got 1"),
        (lambda: nn.Attention(48, 4, layer=-1), "layer: expected the number of a cache's layer, .* got -1"),
        (lambda: latent(layer="0"), "layer: expected the number of a cache's layer, .* got '0'"),
        (lambda: attention().shard(0, 3), "expected ranks that divide 4 heads and a rank below, got 0 of 3"),
        (lambda: nn.Attention(48, 6, 3).shard(0, 2), "that divide, or are a multiple of, 3 key heads, got 2"),
        (lambda: latent().absorb().shard(0, 2), "shard the module that it was made from, then absorb"),
        (
            lambda: attention(variant=weft.Attention(weft.score * weft.exp2(-1.0 * head), name="by_head")).shard(0, 2),
            "by_head computes with the number of a head",
        ),
    ],
)
def test_what_no_module_has(make, words):
    with pytest.raises(weft.WeftError, match=words):
        make()


def test_calls_that_do_not_fit():
    module, x = attention(), torch.randn(1, 4, WIDTH)
    cache = cache_of("paged", module)
    step = cache.extend([cache.allocate()], [4])
    with torch.no_grad():
        for call, words in {
            lambda: module(x, cache=cache): r"expected a step of a cache, cache.extend\(...\), got PagedCache",
            lambda: module(x.repeat(2, 1, 1), cache=step): "expected a step of 2 sequences, as x has rows, got 1",
            lambda: module(x, cache=step, kv_lens=torch.tensor([4])): "kv_lens: expected none beside cache=",
            lambda: module(x, cache=step, q_lens=torch.tensor([4])): "q_lens: expected none beside cache=",
            lambda: module(x[:, :3], cache=step): r"x: expected \[batch, 4, width\], the new rows of the step, got 3",
            lambda: module(x, cu_seqlens_q=torch.tensor([0, 4])): "positions: missing; with cu_seqlens_q rows do not",
            lambda: module(x, q_lens=torch.tensor([3]), kv_lens=torch.tensor([4])): "positions: missing; with q_lens",
            lambda: module(x, return_lse=True): "return_lse: a module gives its output alone",
            lambda: latent()(x, uk=x, uv=x): "nn.LatentAttention: uk, uv: expected none, as the module has its own",
            lambda: latent()(x, rope=x): "nn.LatentAttention: rope: expected none, as the module has its own",
            lambda: cache.keys(3): "keys: layer: expected 0 to 0, got 3",
            lambda: cache.values(-1): "values: layer: expected 0 to 0, got -1",
        }.items():
            with pytest.raises(weft.WeftError, match=words):
                call()
        assert torch.equal(latent()(x, uk=None, rope=None), latent()(x))
    with pytest.raises(weft.WeftError, match="a cache keeps no gradients"):
        module(x, cache=step)


@pytest.mark.parametrize("kind", ["plain", "latent", "absorbed"])
def test_rows_of_another_shape_are_refused_and_none_give_none(kind: str) -> None:
    layer = weft.nn.Attention(64, heads=4, kv_heads=2, rope=weft.nn.Rotary(16), variant=weft.Attention(name="rows"))
    if kind != "plain":
        layer = weft.nn.LatentAttention(64, heads=4, kv_lora=32, nope=16, rope_dim=8)
    layer = layer.absorb() if kind == "absorbed" else layer
    for wrong in (torch.randn(3, 64), torch.randn(1, 3, 63), torch.randn(1, 1, 3, 64), None):
        with pytest.raises(weft.WeftError, match=r"Attention: x: expected \[batch, length, 64\], got"):
            layer(wrong)
    for batch, length in ((1, 0), (0, 3)):
        assert layer(torch.randn(batch, length, 64)).shape == (batch, length, 64)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    "positions",
    [torch.tensor([5]), torch.zeros(2, 1), torch.arange(7), torch.zeros(3, 10), torch.zeros(2, 10, 1), [0, 1], 3],
    ids=lambda p: str(list(p.shape)) if isinstance(p, torch.Tensor) else str(p),
)
def test_positions_that_are_not_those_of_the_rows_are_refused(latent, positions):
    """One position for all rows would be broadcast, in silence."""
    layer = nn.Attention(64, 4, rope=nn.Rotary(16))
    if latent:
        layer = nn.LatentAttention(64, 4, kv_lora=8, nope=8, rope_dim=4)
    x = torch.randn(2, 10, 64)
    with pytest.raises(weft.WeftError, match="positions"):
        layer(x, positions=positions)
    if isinstance(positions, torch.Tensor) and positions.dim() < 3:
        with pytest.raises(weft.WeftError, match=r"positions, rotation: expected positions \[10\] or \[2, 10\]"):
            layer(x, rotation=layer.rope(positions))
    for right in (torch.arange(10), torch.arange(10)[None], torch.arange(10).expand(2, 10)):
        torch.testing.assert_close(layer(x, positions=right), layer(x))


@pytest.mark.parametrize("kind", ["plain", "dynamic scaling", "latent"])
def test_modules_export_with_a_dynamic_length(kind):
    scaling = nn.DynamicNtkScaling(4.0, original_length=12) if kind == "dynamic scaling" else None
    layer = nn.Attention(64, 4, rope=nn.Rotary(16, scaling=scaling), qk_norm=True)
    if kind == "latent":
        layer = nn.LatentAttention(64, 4, kv_lora=8, nope=8, rope_dim=4)
    length = torch.export.Dim("length", min=1, max=512)
    exported = torch.export.export(layer, (torch.randn(2, 10, 64),), dynamic_shapes=({1: length},)).module()
    for rows in (10, 33, 2):
        x = torch.randn(2, rows, 64)
        torch.testing.assert_close(exported(x), layer(x))
