"""Dropout on a CPU: the same weights dropped in every target, tiling and pass as the definition says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.codegen.loader import load
from weft.ir.philox import kept_pairs
from weft.runtime.driver import builds

from ..support import check_variant, poisoned

pytest.importorskip("triton")

p, slopes = weft.scalar("p", float), weft.tensor("slopes", 1)
bias, sinks = weft.tensor("bias", 2), weft.tensor("sinks", 1)
CAUSAL = weft.Attention(mask=masks.causal, dropout=0.2, name="dropped")
GIVEN = weft.Attention(mask=masks.causal, dropout=p, name="given")
VARIANTS = {
    "plain": weft.Attention(dropout=0.5, name="plain"),
    "causal": CAUSAL,
    "given": GIVEN,
    "window": weft.Attention(mask=masks.causal & masks.sliding_window(20), dropout=0.1, name="windowed"),
    "capped": weft.Attention(9.0 * weft.tanh(score / 9.0), masks.causal, dropout=0.3, name="capped"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, dropout=0.3, name="alibi"),
    "far": weft.Attention(score + bias[batch, kv_pos], masks.causal, dropout=0.3, name="far"),
    "sink": weft.Attention(mask=masks.causal, sink=sinks[head], dropout=0.3, name="sunk"),
    "few_rows_see": weft.Attention(mask=kv_pos < q_pos - 9, dropout=0.3, name="few_rows_see"),
}


def operands_of(variant: weft.Attention, kv_len: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    made: dict[str, Any] = {
        "slopes": torch.rand(4, generator=generator), "sinks": torch.randn(4, generator=generator),
        "bias": torch.where(torch.rand(2, kv_len, generator=generator) < 0.3, -1e9, 0.0),
        "p": 0.25, "seed": 1 << 40 | 7,
    }  # fmt: skip
    return {operand.name: made[operand.name] for operand in variant.canonical.parameters}


def check(variant: weft.Attention, length: int, dtype: torch.dtype, kv_more: int = 6, **options: Any) -> None:
    kv_len = length + kv_more
    shapes = ((2, 4, length, 24), (2, 2, kv_len, 24), (2, 2, kv_len, 40))
    tensors = [poisoned(shape, dtype, seed=n) for n, shape in enumerate(shapes)]
    operands = operands_of(variant, kv_len)
    floats = tuple(n for n, value in operands.items() if isinstance(value, Tensor))
    check_variant(variant, *tensors, operands=operands, differentiate=floats, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    check(VARIANTS[name], 70, dtype, target="cpu")
    tiles = "flash/flash_forward=cpu:16x48/flash_backward=cpu:32x20"  # tiles of keys that end anywhere
    check(VARIANTS[name], 70, dtype, target="cpu", schedule=tiles)


def test_long_calls_on_a_cpu() -> None:
    for name in ("causal", "capped", "sink"):
        check(VARIANTS[name], 530, torch.float32, target="cpu")  # three tiles of 256


def test_in_float64() -> None:
    tensors = [torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    assert torch.autograd.gradcheck(lambda *x: CAUSAL(*x, seed=3, return_lse=True), tensors)


@pytest.mark.parametrize("name", ["plain", "given", "alibi", "far", "sink"])
def test_in_the_interpreter(name: str) -> None:
    check(VARIANTS[name], 40, torch.float32, target="interpret")


def test_a_short_type_in_the_interpreter() -> None:
    check(CAUSAL, 40, torch.float16, target="interpret")


@pytest.mark.parametrize("tiles", ["32x16", "16x128"])
def test_tiles_in_the_interpreter(tiles: str) -> None:
    """Tiles of 16 keys have half of those that share a counter; blocks of queries and keys, in every kernel."""
    names = ("flash_forward", "flash_dquery", "flash_dkey_dvalue")
    schedule = "/".join(["flash", *(f"{name}=interpret:{tiles}w4s1" for name in names)])
    check(CAUSAL, 30, torch.float32, kv_more=50, target="interpret", schedule=schedule)


# -- which pairs -------------------------------------------------------------------------------------------------------
def kept(variant: weft.Attention, target: str | None, q_len: int = 40, kv_len: int = 72, **options: Any) -> Tensor:
    """Which pairs a call keeps, [B, H, L, T]: its weights with each key's value in a column of its own."""
    query, key = torch.zeros(2, 2, q_len, 16), torch.zeros(2, 2, kv_len, 16)
    value = torch.eye(kv_len).expand(2, 2, kv_len, kv_len)
    call = variant if target else variant.reference
    return call(query, key, value, **options, **({"target": target} if target else {})) > 0


ALL = weft.Attention(dropout=0.5, name="all_pairs")


@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize(
    ("q_offset", "seed"),
    [(None, 0), (0, -1), (-7, 1 << 62), (1 << 20, 5), (torch.tensor([3, -50], dtype=torch.int32), 6)],
)
def test_targets_drop_the_same_pairs(target: str, q_offset: Any, seed: int) -> None:
    assert torch.equal(kept(ALL, target, seed=seed, q_offset=q_offset), kept(ALL, None, seed=seed, q_offset=q_offset))


def test_a_pair_depends_on_its_position_alone() -> None:
    """A part of the queries drops what all of them do, and so do fewer keys."""
    whole = kept(ALL, "cpu", 72, 72, seed=5)
    assert torch.equal(kept(ALL, "cpu", 40, 72, seed=5), whole[:, :, 32:])
    assert torch.equal(kept(ALL, "cpu", 40, 33, seed=5, q_offset=0), whole[:, :, :40, :33])
    assert not torch.equal(kept(ALL, "cpu", 72, 72, seed=6), whole)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_sequences_drop_by_their_number_and_positions(target: str) -> None:
    """Padded and packed ones the same pairs; a sequence is the batch row of its number."""
    lens = torch.tensor([40, 0, 17, 33])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    padded = [torch.randn(4, 2, 40, 16, requires_grad=True) for _ in "qkv"]
    rows = [[x[b : b + 1, :, :n] for b, n in enumerate(lens.tolist())] for x in padded]
    together = [torch.cat(x, 2) for x in rows]
    whole = CAUSAL.reference(*padded, seed=11, q_lens=lens, kv_lens=lens)
    of_padded = CAUSAL(*padded, seed=11, q_lens=lens, kv_lens=lens, target=target)
    of_packed = CAUSAL(*together, seed=11, cu_seqlens_q=starts, target=target)
    torch.testing.assert_close(of_padded, whole)
    torch.testing.assert_close(of_packed, torch.cat([whole[b : b + 1, :, :n] for b, n in enumerate(lens.tolist())], 2))
    gradients = [
        torch.autograd.grad(out.square().sum(), padded, retain_graph=True) for out in (whole, of_padded, of_packed)
    ]
    for found in gradients[1:]:
        for one, other in zip(found, gradients[0]):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_nested_tensors() -> None:
    starts = torch.tensor([0, 9, 39])
    parts = [torch.randn(39, 2, 16) for _ in "qkv"]
    made = [torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2) for x in parts]
    expected = CAUSAL(*(x.transpose(0, 1)[None] for x in parts), seed=2, cu_seqlens_q=starts)
    assert torch.equal(torch.cat(CAUSAL(*made, seed=2).unbind(), 1)[None], expected)
    torch.testing.assert_close(torch.cat(CAUSAL.reference(*made, seed=2).unbind(), 1)[None], expected)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_latent_attention(form: Any, target: str) -> None:
    """Both forms drop the same pairs."""
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=32, rope=16), dropout=0.4, name="mla")
    query, cache = torch.randn(2, 2, 20, 32), torch.randn(2, 1, 24, 48)
    uk, uv = torch.randn(2, 32, 16), torch.randn(2, 32, 16)
    exact = mla.reference(query, cache, uk=uk, uv=uv, seed=9)
    torch.testing.assert_close(
        mla(query, cache, uk=uk, uv=uv, seed=9, form=form, target=target), exact, atol=1e-4, rtol=1e-4
    )


# -- seeds -------------------------------------------------------------------------------------------------------------
def tensors(length: int = 50) -> list[Tensor]:
    return [torch.randn(2, 2, length, 16, requires_grad=True) for _ in "qkv"]


def test_seeds_as_numbers_and_as_tensors() -> None:
    given = tensors()
    out = CAUSAL(*given, seed=7)
    for seed in (torch.tensor(7), torch.tensor([7])):
        assert torch.equal(CAUSAL(*given, seed=seed), out)
    assert not torch.equal(CAUSAL(*given, seed=7 + (1 << 32)), out)


def test_the_generator_of_torch_rules_where_no_seed_is_given() -> None:
    given = tensors()
    torch.manual_seed(4)
    first, second = CAUSAL(*given), CAUSAL(*given)
    torch.manual_seed(4)
    assert torch.equal(CAUSAL(*given), first) and not torch.equal(first, second)
    torch.testing.assert_close(CAUSAL.reference(*given), second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_drops_the_same_weights_again(use_reentrant: bool) -> None:
    given = tensors()
    torch.manual_seed(4)
    plain = torch.autograd.grad(CAUSAL(*given).square().sum(), given)
    torch.manual_seed(4)
    out = checkpoint(CAUSAL, *given, use_reentrant=use_reentrant)
    torch.rand(3)
    out.square().sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(given, plain))


def test_without_training_nothing_is_dropped() -> None:
    given = tensors()
    plain = CAUSAL.replace(dropout=0.0)(*given)
    assert torch.equal(CAUSAL(*given, train=False), plain) and torch.equal(GIVEN(*given, p=0.5, train=False), plain)
    assert torch.equal(CAUSAL.reference(*given, train=False), CAUSAL.replace(dropout=0.0).reference(*given))
    torch.testing.assert_close(GIVEN(*given, p=0.0), plain)
    assert torch.equal(CAUSAL.replace(dropout=0)(*given, train=True, seed=4), plain)


def test_a_dropout_that_is_annealed_compiles_nothing() -> None:
    given = tensors()
    GIVEN(*given, p=0.3, seed=1).sum().backward()
    before = builds()
    for share in (0.0, 0.1, 0.2):
        out = GIVEN(*given, p=share, seed=1)
        torch.testing.assert_close(out, weft.Attention(mask=masks.causal, dropout=share).reference(*given, seed=1))
        out.sum().backward()
    assert builds() == before


def test_the_mean_over_seeds_is_the_call_without_dropout() -> None:
    """Rows of a batch draw numbers of their own, too: 50 rows of 40 seeds are as many draws."""
    given = [x.detach()[:1] for x in tensors(20)]
    plain = CAUSAL(*given, train=False)
    rows = [x.repeat(50, 1, 1, 1) for x in given]
    outs = torch.cat([CAUSAL(*rows, seed=n) for n in range(40)])
    assert ((outs.mean(0) - plain).abs() <= 6 * outs.std(0) / 2000**0.5 + 1e-5).all()


def test_copies_and_texts() -> None:
    for variant in (CAUSAL, GIVEN):
        assert weft.parse_attention(str(variant)) == variant == copy.deepcopy(variant)
        assert variant != variant.replace(dropout=0.0) and "dropout=" in variant.canonical.text


# -- under torch's own tools -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [3, None, "tensor"])
def test_compiled(seed: Any) -> None:
    given = tensors()
    seed = torch.tensor([3]) if seed == "tensor" else seed

    def model(query: Tensor, key: Tensor, value: Tensor, share: float) -> Tensor:
        return GIVEN(query, key, value, p=share, seed=seed)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for share in (0.2, 0.3):
        torch.manual_seed(8)
        found = compiled(*given, share)
        torch.manual_seed(8)
        expected = model(*given, share)
        if seed is None:  # torch.compile draws by a functional generator of its own where it has one
            assert found.shape == expected.shape and not found.isnan().any()
        else:
            torch.testing.assert_close(found, expected)
            for one, other in zip(*(torch.autograd.grad(x.square().sum(), given) for x in (found, expected))):
                torch.testing.assert_close(one, other)


def test_a_share_that_is_none_is_refused_in_compiled_calls_too() -> None:
    compiled = torch.compile(lambda *x, share: GIVEN(*x, p=share, seed=1), fullgraph=True, backend="aot_eager")
    with (
        torch.no_grad(),
        pytest.raises(weft.WeftError, match="given: p: expected a dropout from 0 on and below 1, got 1"),
    ):
        compiled(*tensors(), share=1.0)


def test_under_a_profiler_and_without_gradients() -> None:
    given = tensors()
    out = CAUSAL(*given, seed=2)
    with torch.profiler.profile():
        watched = CAUSAL(*given, seed=2)
    assert torch.equal(watched, out)
    with torch.no_grad():
        assert torch.equal(CAUSAL(*given, seed=2), out)
    with torch.inference_mode():
        assert torch.equal(CAUSAL(*given, seed=2), out)


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variant", "options", "match"),
    [
        (CAUSAL, {"seed": 1.5}, r"dropped: seed: expected an int, or an int64 tensor with one element on cpu, got 1.5"),
        (CAUSAL, {"seed": True}, "dropped: seed: expected an int, .* got True"),
        (CAUSAL, {"seed": "x"}, "dropped: seed: expected an int, .* got 'x'"),
        (CAUSAL, {"seed": 1 << 63}, "dropped: seed: expected an int of 64 bits, got 9223372036854775808"),
        (CAUSAL, {"seed": torch.tensor([1, 2])}, r"dropped: seed: .* got torch.int64 \[2\] on cpu"),
        (CAUSAL, {"seed": torch.tensor(1.0)}, r"dropped: seed: .* got torch.float32 \[\] on cpu"),
        (CAUSAL, {"seed": torch.tensor(1, device="meta")}, "dropped: seed: .* on meta"),
        (CAUSAL, {"train": 1}, "dropped: train: expected True or False, got 1"),
        (GIVEN, {"p": 1.0}, "given: p: expected a dropout from 0 on and below 1, got 1.0"),
        (GIVEN, {"p": -0.5}, "given: p: expected a dropout from 0 on and below 1, got -0.5"),
        (GIVEN, {"p": float("nan")}, "given: p: expected a dropout from 0 on and below 1, got nan"),
        (GIVEN, {}, "given: p: missing; pass p=... "),
        (weft.Attention(name="none"), {"seed": "x"}, "none: seed: expected an int"),
    ],
)  # fmt: skip
def test_refused(variant: weft.Attention, options: dict[str, Any], match: str) -> None:
    for call in (variant, variant.reference):
        with pytest.raises(weft.WeftError, match=match):
            call(*tensors(), **options)


@pytest.mark.parametrize("method", ["plan", "explain", "source"])
def test_a_plan_is_refused_where_a_call_is(method: str) -> None:
    with pytest.raises(weft.WeftError, match="given: p: expected a dropout from 0 on and below 1, got 1.5"):
        getattr(GIVEN, method)(*tensors(), p=1.5)


@pytest.mark.parametrize("schedule", ["streaming", "standard"])
def test_other_schedules_say_so(schedule: str) -> None:
    with pytest.raises(weft.UnavailableError, match=f"schedule {schedule} has no dropout; use schedule='flash'"):
        CAUSAL(*tensors(), target="interpret", schedule=schedule, seed=1)


def test_explained() -> None:
    text = CAUSAL.explain(weft.shape(heads=4, q_len=512, head_dim=64), device="h100")
    assert "dropout       0.2 of the weights" in text and "O += drop(P) V" in text and "dV += drop(P)^T dO" in text
    assert "drop(X): of X the pairs that Philox-4x32-7" in text
    assert (
        "drop"
        not in CAUSAL.explain(weft.shape(heads=4, q_len=512, head_dim=64), device="h100", train=False).split("\n", 1)[1]
    )
    source = CAUSAL.source(weft.shape(heads=4, q_len=512, head_dim=64), device="a100")
    assert "def philox(" in source and "kept_keys(" in source and "kept_queries" not in source


# -- the Hopper kernel's own text --------------------------------------------------------------------------------------
def test_the_hopper_kernel_takes_tiles_apart_as_it_should(tmp_path: Path) -> None:
    """Its functions of dropout, where consumers draw, in the interpreter: with Triton's names for Gluon's, without
    layouts and assembly."""
    drawn_by_consumers = "flash/flash_forward=hopper:128x128s2q1+lazy"
    source = CAUSAL.source(
        weft.shape(heads=2, q_len=256, head_dim=128), device="h100", target="hopper", schedule=drawn_by_consumers
    )
    part = source[source.index("@gluon.jit\ndef philox(") :]
    part = part[: part.index("\n\n\n# ----")]
    assert "def kept_pairs(" in part and "gl.convert_layout(masks, layout, assert_trivial=True)" in part
    part = part.replace("gl.convert_layout(masks, layout, assert_trivial=True)", "masks")
    part = re.sub(r", gl\.SliceLayout\(\d, COUNTERS\)|, layout(?=\))|    layout: gl\.constexpr = .*\n", "", part)
    part = re.sub(r"# Where counters of .*?\n\)\)\n", "", part, flags=re.DOTALL)
    part = re.sub(r"    return gl\.inline_asm_elementwise\(.*\n.*\n", "    return below(words, bound)\n", part)
    head = """import triton
import triton.language as tl

ROWS = tl.constexpr(64)
BLOCK_KV = tl.constexpr(128)


@triton.jit
def product(word, factor):
    both = word.to(tl.uint64) * factor
    return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def below(words, bound):
    lower = (words & 0x7FFF) < (bound & 0x7FFF)
    upper = (words >> 16 & 0x7FFF) < (bound >> 16)
    return (tl.where(lower, 0xFFFF, 0) + tl.where(upper, 0xFFFF, 0) * 65536).to(tl.uint32)


"""
    kernel = """

@triton.jit
def run(out, seed, first_position, kv_first, batch, head, keep_of_32768):
    pairs = tl.full([ROWS, BLOCK_KV // 2], 0x30003, tl.int32)
    pairs = where_packed_kept(pairs, kept_pairs(first_position, kv_first, batch, head, tl.load(seed), keep_of_32768))
    tl.store(out + tl.arange(0, ROWS)[:, None] * (BLOCK_KV // 2) + tl.arange(0, BLOCK_KV // 2)[None, :], pairs)
"""
    module = load(
        tmp_path / "taken_apart.py",
        interpret=True,
        source=head + part.replace("gluon.jit", "triton.jit").replace("gl.", "tl.") + kernel,
    )
    for first_position, kv_first, seed in ((0, 0, 3), (-17, 384, -1), (70000, 128, 1 << 62)):
        for kept in (1, 9000, 16384, 20000, 32768):
            out, given = torch.zeros(64, 128, dtype=torch.int16), torch.tensor([seed])
            module.run[(1,)](out.view(torch.int32), given, first_position, kv_first, 5, 2, kept)
            rows = torch.arange(64) + first_position
            expected = kept_pairs(given, 5, torch.full((1, 1, 1, 1), 2), rows, kv_first, kv_first + 128, kept)
            assert torch.equal(out.T == 3, expected[0, :, 0])
