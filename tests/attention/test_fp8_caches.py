"""Caches of FP8 that quantise what is appended: pages, rows of padded sequences, latent ones, steps of decodes."""

from __future__ import annotations

import math

import pytest
import torch

import weft
from weft import kv_pos, q_pos

from ..support import lost_by_a_cache
from .cases import CAUSAL

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TARGETS = ("cpu", "interpret")


def step_of(cache, sequences, rows, new, target):
    """out of a step that appends these rows to both layers, and the exact one over the same stored numbers."""
    query = torch.randn(len(sequences), 4, max(new), 32, generator=torch.Generator().manual_seed(3)).half()
    with cache.extend(sequences, new) as step:
        for layer, (key, value) in enumerate(rows):
            step.append(layer, key, value)
        out = CAUSAL(query, step.keys(1), step.values(1), target=target, **step.options_of(1))
        exact = CAUSAL.reference(query.double(), step.keys(1), step.values(1), **step.options_of(1))
    return out, exact


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scale", ["token", "head"])
@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_a_cache_quantises_what_is_appended(kind: str, scale: str, target: str) -> None:
    given = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": E4M3, "scale": scale}
    cache = weft.kv.PagedCache(24, page=16, **given) if kind == "paged" else weft.kv.DenseCache(4, 64, **given)
    sequences = [cache.allocate() for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    with weft.settings(target=target):
        for new in ([20, 1, 7], [1, 1, 1]):
            rows = [torch.randn(2, 3, 2, max(new), 32, generator=generator).half() for _ in range(2)]
            for pair in rows:  # what lies behind a length is not read
                for b, n in enumerate(new):
                    pair[:, b, :, n:] = torch.nan
            out, exact = step_of(cache, sequences, rows, new, target)
            for b, n in enumerate(new):
                assert (out[b, :, :n] - exact[b, :, :n]).abs().max() < 0.01
            key = rows[1][0]
            block, page = cache.blocks(sequences[0])[0], cache.page
            if new[0] == 20:
                stored = cache.keys(1)[block, :, :1].float()
                descale = cache.scales.k_descales[1]
                descale = descale[block, :, :1] if scale == "token" else descale[0]
                assert (stored * descale - key[0, :, :1].float()).norm() < 0.06 * key[0, :, :1].float().norm()
    if kind == "paged":
        plain = weft.kv.PagedCache(24, page=16, **{**given, "dtype": torch.float16, "scale": None})
        rows_of_scales = {"token": 2 * 2 * 2 * 4 * 24 * page, "head": 0}[scale]
        assert cache.usage.bytes == plain.usage.bytes // 2 + rows_of_scales


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_copies_and_pages_on_the_host_keep_their_descales(kind: str) -> None:
    given = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": E4M3}
    cache = weft.kv.PagedCache(24, page=16, **given) if kind == "paged" else weft.kv.DenseCache(4, 64, **given)
    sequence = cache.allocate()
    rows = [torch.randn(2, 1, 2, 20, 32) * torch.logspace(-3, 3, 20)[:, None] for _ in range(2)]
    cache.append([sequence], [r[0] for r in rows], [r[1] for r in rows])
    query = torch.randn(1, 4, 20, 32)

    def found(sequence):
        step = cache.view([sequence])
        return CAUSAL(query, step.keys(1), step.values(1), **step.options_of(1))

    expected, copy = found(sequence), cache.fork(sequence)
    more = torch.randn(1, 2, 1, 32)
    cache.append([copy], [more, more], [more, more])
    cache.swap_out(copy)
    cache.swap_in(copy)
    assert torch.equal(found(sequence), expected)
    cache.truncate(copy, 20)
    assert torch.equal(found(copy), expected)


@pytest.mark.parametrize("scale", ["token", "head"])
@pytest.mark.parametrize("kind", ["pages", "packed pages", "rows", "latent pages"])
def test_a_step_of_a_decode_is_compiled_whole(kind: str, scale: str) -> None:
    """It appends and attends, with no target named, without a break in the graph."""
    latent = weft.Latent(rank=64, rope=32) if "latent" in kind else None
    widths = {"kv_heads": 2, "head_dim": 64} if latent is None else {"latent": latent}
    cache = (
        weft.kv.DenseCache(2, 64, dtype=E4M3, scale=scale, **widths) if kind == "rows"
        else weft.kv.PagedCache(8, page=16, dtype=E4M3, scale=scale, **widths)
    )  # fmt: skip
    variant = weft.Attention(mask=kv_pos <= q_pos, latent=latent, scale=0.1, name="compiled_step")
    packed = {"packed": True} if "packed" in kind else {}

    def rows(step):
        sizes = (1 if packed else 2, 1 if latent else 2, step.length, 96 if latent else 64)
        return [torch.randn(sizes).bfloat16() for _ in range(1 if latent else 2)]

    def decode(step, query, new):
        step.append(0, *new)
        return step.attend(0, variant, query)

    compiled = torch.compile(decode, fullgraph=True, backend="eager")
    sequences = [cache.allocate(), cache.allocate()]
    with cache.extend(sequences, [20, 9], **packed) as step:
        step.append(0, *rows(step))
    for _ in range(2):
        with cache.extend(sequences, [1, 1], **packed) as step:
            new = rows(step)
            query = torch.randn(new[0].shape[0], 4, step.length, new[0].shape[3]).bfloat16()
            found = compiled(step, query, new)
            assert torch.equal(found, step.attend(0, variant, query))


def test_prefixes_are_found_again_with_their_descales() -> None:
    cache = weft.kv.PagedCache(24, page=16, kv_heads=2, head_dim=32, dtype=E4M3)
    tokens = list(range(40))
    first = cache.allocate(tokens)
    rows = torch.randn(2, 1, 2, 40, 32) * 7
    cache.append([first], rows[0], rows[1], tokens=[tokens])
    second = cache.allocate(tokens)
    assert cache.length(second) == 32
    cache.append([second], rows[0][:, :, 32:], rows[1][:, :, 32:], tokens=[tokens[32:]])
    query = torch.randn(1, 4, 8, 32)
    outs = [CAUSAL(query, s.keys(), s.values(), **s.options) for s in (cache.view([n]) for n in (first, second))]
    assert torch.equal(*outs)


def test_descales_of_heads_are_given_or_made_of_the_first_rows_and_then_rows_saturate() -> None:
    given = {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": E4M3, "scale": "head", "page": 16}
    cache = weft.kv.PagedCache(8, **given)
    sequence, ones = cache.allocate(), torch.ones(1, 2, 4, 16)
    with pytest.raises(weft.WeftError, match="layer 0: has no descales yet; append to it first, or give k_descale="):
        cache.view([sequence]).options_of(0)
    cache.append([sequence], [ones, 2 * ones], [ones, ones])
    assert cache.scales.k_descales[1].flatten().tolist() == pytest.approx([4 / 448] * 2)
    cache.append([sequence], [ones, 100 * ones], [ones, ones])
    step = cache.view([sequence])
    assert (step.keys(1).float() * step.options_of(1)["k_descale"]).max() == pytest.approx(4.0)
    with pytest.raises(weft.WeftError, match=r"options: descales of FP8 differ by layer; pass \*\*step.options_of"):
        step.options  # noqa: B018
    known = weft.kv.PagedCache(8, **given, k_descale=torch.tensor([[0.5, 1.0], [2.0, 4.0]]), v_descale=0.25)
    assert known.scales.of(1, None)["k_descale"].flatten().tolist() == [2.0, 4.0]
    assert known.scales.of(0, None)["v_descale"].flatten().tolist() == [0.25, 0.25]
    for wrong, message in (
        ({"scale": "row"}, "scale: expected 'head' or 'token', got 'row'"),
        ({"k_descale": 0.0}, "k_descale: expected positive numbers that float32 holds, got 0.0"),
        ({"k_descale": -1.0}, "k_descale: expected positive numbers that float32 holds, got -1.0"),
        (
            {"k_descale": torch.tensor(1e300, dtype=torch.float64)},
            "positive numbers that float32 holds, got .*1.*e.300",
        ),
        ({"k_descale": torch.tensor(1e-60, dtype=torch.float64)}, "positive numbers that float32 holds, got .*1.*e-60"),
        ({"k_descale": torch.ones(2, device="meta")}, r"k_descale: expected a positive .*got \[2\] on meta"),
        ({"k_descale": torch.zeros(2).to(E4M3)}, "k_descale: expected positive numbers that float32 holds, got .*"),
        ({"k_descale": 10**400}, "k_descale: expected .*, got an int of 1329 bits"),
        ({"v_descale": torch.tensor([1.0, math.nan])}, "v_descale: expected positive numbers .*, got .*nan"),
        ({"v_descale": math.inf}, "v_descale: expected positive numbers .*, got inf"),
        ({"k_descale": "x"}, r"k_descale: expected a positive number, or \[2, 2\] of them, .*got 'x'"),
        ({"v_descale": torch.ones(3)}, r"v_descale: expected a positive number, or \[2, 2\] of them, .*got \[3\]"),
        ({"v_descale": torch.ones(2, 2, 1)}, r"v_descale: expected .*\[layers, Hkv\], got \[2, 2, 1\]"),
        ({"scale": "token", "page": 1}, "page: expected 2 or more beside a descale for each token, got 1"),
        ({"scale": "token", "k_descale": 1.0}, "k_descale: expected None; descales that are given are those of scale="),
        ({"dtype": torch.float16}, "scale: expected None, as dtype is torch.float16"),
    ):
        with pytest.raises(weft.WeftError, match=message):
            weft.kv.PagedCache(8, **{**given, **wrong})
    with pytest.raises(weft.WeftError, match="key: expected real numbers, which the cache quantises, got torch.float8"):
        cache.append([sequence], [ones.to(E4M3)] * 2, [ones] * 2)
    with pytest.raises(weft.WeftError, match="key: expected .*, got what weft.fp8.quantize gives; pass real numbers"):
        cache.append([sequence], weft.fp8.quantize(ones), weft.fp8.quantize(ones))
    with pytest.raises(weft.WeftError, match="options_of: layer: expected 0 to 1, got 2"):
        step.options_of(2)


def test_a_head_whose_first_rows_are_0_keeps_descale_1() -> None:
    """As docs/fp8.md says: nobody on the host knows that they are 0."""
    cache = weft.kv.PagedCache(8, kv_heads=2, head_dim=16, dtype=E4M3, scale="head", page=16)
    sequence, ones = cache.allocate(), torch.ones(1, 2, 4, 16)
    first = torch.stack([torch.zeros(1, 4, 16), ones[:, 0]], 1)
    for new in (first, ones):
        cache.append([sequence], new, new)
        assert cache.scales.k_descales[0].flatten().tolist() == pytest.approx([1.0, 2 / 448])


@pytest.mark.parametrize("default", ["meta", torch.float16])
def test_descales_that_are_given_are_the_same_whatever_torchs_defaults(default: object) -> None:
    """A number lies nowhere, and has the digits of float32."""
    given = {"kv_heads": 2, "head_dim": 16, "dtype": E4M3, "scale": "head", "k_descale": 1e-9, "v_descale": [0.1, 0.2]}
    set_default = torch.set_default_device if default == "meta" else torch.set_default_dtype
    try:
        set_default(default)
        cache = weft.kv.PagedCache(8, **given)
    finally:
        set_default(None if default == "meta" else torch.float32)
    found = cache.scales.of(0, None)
    assert found["k_descale"].flatten().tolist() == pytest.approx([1e-9] * 2)
    assert found["v_descale"].flatten().tolist() == pytest.approx([0.1, 0.2])


def test_a_descale_that_is_given_alone_holds_and_only_rows_that_stay_decide_the_other() -> None:
    given = {"kv_heads": 1, "head_dim": 16, "dtype": E4M3, "scale": "head"}
    cache, ones = (
        weft.kv.PagedCache(8, **given, k_descale=torch.tensor([0.5], requires_grad=True)),
        torch.ones(1, 1, 4, 16),
    )
    sequence = cache.allocate()
    fixed = cache.fixed_step(2, 4, pages=1)  # as before a capture: it has no row yet
    fixed.append(0, ones.expand(2, -1, -1, -1), ones.expand(2, -1, -1, -1))
    cancelled = cache.extend([sequence], [4])
    cancelled.append(0, ones, 0.01 * ones)
    cancelled.cancel()
    with pytest.raises(weft.WeftError, match="layer 0: has no descales yet"):
        cache.view([sequence]).options_of(0)
    cache.append([sequence], ones, 8 * ones)
    found = cache.view([sequence]).options_of(0)
    assert found["k_descale"].item() == 0.5 and not found["k_descale"].requires_grad
    assert found["v_descale"].item() == pytest.approx(16 / 448)
    another = cache.extend([cache.allocate()], [4])
    another.append(0, ones, ones)
    another.cancel()  # the first sequence has rows that this descale is of
    assert cache.view([sequence]).options_of(0)["v_descale"].item() == pytest.approx(16 / 448)


@pytest.mark.parametrize("wrote", [False, True])
def test_rows_of_a_cancelled_step_decide_for_no_other_that_is_open(wrote: bool) -> None:
    """But where that one wrote rows already: they are stored with these descales."""
    cache, ones = weft.kv.PagedCache(8, kv_heads=1, head_dim=16, dtype=E4M3, scale="head"), torch.ones(1, 1, 4, 16)
    steps = [cache.extend([cache.allocate()], [4]) for _ in range(2)]
    steps[0].append(0, 100 * ones, 100 * ones)
    if wrote:
        steps[1].append(0, ones, ones)
    steps[0].cancel()
    if not wrote:
        steps[1].append(0, ones, ones)
    steps[1].commit()
    found = cache.view(steps[1].sequences)
    assert found.options_of(0)["k_descale"].item() == pytest.approx((200 if wrote else 2) / 448)
    stored = found.keys()[int(found.block_table[0, 0]), :, :4].float()
    real = stored * found.options_of(0)["k_descale"][0]
    assert real.flatten().tolist() == pytest.approx([1.0] * 64, rel=2.0**-4)


@pytest.mark.parametrize("largest", [1e38, 2e38, 3e38, math.inf])
def test_first_rows_of_any_size_decide_descales_that_calls_take(largest: float) -> None:
    """Twice the largest number of float32 is none."""
    cache = weft.kv.PagedCache(4, kv_heads=2, head_dim=8, dtype=E4M3, scale="head")
    sequence, rows = cache.allocate(), torch.ones(1, 2, 3, 8)
    rows[:, 0, 0, 0] = largest
    cache.append([sequence], rows, rows)
    step = cache.view([sequence])
    descale = step.options_of(0)["v_descale"]
    assert bool(descale.isfinite().all()) and bool((descale > 0).all())
    out = step.attend(0, CAUSAL, torch.zeros(1, 2, 1, 8), out_dtype=torch.float64)
    assert bool(out.isfinite().all()) and (out[:, 1] - 1.0).abs().max() < 0.04


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scale", ["token", "head"])
def test_what_is_appended_saturates_and_nan_stays(scale: str, target: str) -> None:
    own = {"k_descale": 1.0, "v_descale": 1.0} if scale == "head" else {}
    cache = weft.kv.PagedCache(4, kv_heads=1, head_dim=16, dtype=E4M3, scale=scale, **own)
    row = torch.zeros(1, 1, 1, 16).half()
    row[..., :4] = torch.tensor([math.nan, math.inf, -1000.0, 2.0])
    with weft.settings(target=target):
        cache.append([cache.allocate()], row, row)
    stored = cache.keys()[0, 0, 0].float()
    assert stored[0].isnan() and stored[1:3].tolist() == [448.0, -448.0]
    assert stored[3].item() == (2.0 if scale == "head" else pytest.approx(448 * 2 / 1000, rel=0.07))


@pytest.mark.parametrize("scale", ["token", "head"])
def test_a_module_reads_an_fp8_cache(scale: str) -> None:
    module = weft.nn.Attention(64, heads=4, kv_heads=2, variant=CAUSAL)
    x = torch.randn(2, 12, 64)
    with torch.no_grad():
        cache = weft.kv.PagedCache(8, kv_heads=2, head_dim=16, dtype=E4M3, scale=scale)
        lost = lost_by_a_cache(module, cache, x)
    assert lost < 0.08
