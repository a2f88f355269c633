"""The flash kernels of target `triton` in Triton's interpreter, against float64: forward and every gradient."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, head_dim, kv_pos, masks, q_pos, score

from ..support import check_errors, check_variant, poisoned
from .cases import CAUSAL, DENSE

window = weft.scalar("window", int)
slopes = weft.tensor("slopes", 1)
bias_q = weft.tensor("bias_q", 3)
bias_kv = weft.tensor("bias_kv", 2)
doc = weft.tensor("doc", 1, int)
limit = weft.tensor("limit", 1, int)

ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
SIMPLE = {
    "dense": DENSE,
    "causal": CAUSAL,
    "both_sides": weft.Attention(mask=masks.sliding_window(20, ahead=9), name="both_sides"),
    "prefix": weft.Attention(mask=masks.prefix_lm(37), name="prefix"),
    "dilated": weft.Attention(mask=masks.dilated(3, 40), name="dilated"),
    "block_causal": weft.Attention(mask=masks.block_causal(12), name="block_causal"),
    "block_diffusion": weft.Attention(mask=masks.block_diffusion(35, 7), name="block_diffusion"),
    "global_window": weft.Attention(mask=masks.global_window(5, 17), name="global_window"),
    "natten": weft.Attention(mask=masks.natten_2d(10, 2), name="natten"),
    "not_causal": weft.Attention(mask=~masks.causal, name="not_causal"),
    "softcap": weft.Attention(5.0 * weft.tanh(score / 5.0), masks.causal, name="softcap"),
    "pointwise": weft.Attention(2.0 * weft.sigmoid(score) + weft.abs(score) + weft.sin(score), name="pointwise"),
    "empty_rows": weft.Attention(mask=masks.causal & (q_pos >= 20), name="empty_rows"),
}


def operands(shape, kv_heads, kv_len, value_dim=None, dtype=torch.float32, blhd=False):
    heads_of_kv = (shape[0], kv_heads, kv_len)
    query = poisoned(shape, dtype, blhd=blhd, seed=0)
    key = poisoned((*heads_of_kv, shape[3]), dtype, blhd=blhd, seed=1)
    return query, key, poisoned((*heads_of_kv, value_dim or shape[3]), dtype, blhd=blhd, seed=2)


@pytest.mark.parametrize("name", SIMPLE)
def test_masks_and_scores(name):
    check_variant(SIMPLE[name], *operands((1, 2, 70, 16), 1, 70), target="interpret")


@pytest.mark.parametrize("length", [1, 31, 32, 33])
def test_lengths_at_tile_edges(length):
    check_variant(CAUSAL, *operands((1, 2, length, 16), 2, length), target="interpret")


@pytest.mark.parametrize("q_len, kv_len, offset", [(5, 70, None), (70, 5, None), (40, 60, 7), (33, 40, -9)])
def test_lengths_that_differ(q_len, kv_len, offset):
    check_variant(CAUSAL, *operands((2, 2, q_len, 16), 1, kv_len), target="interpret", q_offset=offset)


def test_an_offset_for_each_batch_row():
    offsets = torch.tensor([3, 25], dtype=torch.int32)
    check_variant(CAUSAL, *operands((2, 2, 20, 16), 1, 50), target="interpret", q_offset=offsets)


@pytest.mark.parametrize("dim, value_dim", [(16, 32), (40, 40), (80, 64), (96, 20)])
def test_head_dims(dim, value_dim):
    check_variant(CAUSAL, *operands((1, 2, 33, dim), 1, 33, value_dim), target="interpret")


@pytest.mark.parametrize("heads, kv_heads", [(4, 1), (4, 4)])
def test_grouped_heads_and_views(heads, kv_heads):
    given = {"slopes": torch.rand(heads)}
    made = operands((2, heads, 33, 16), kv_heads, 33, blhd=True)
    check_variant(ALIBI, *made, target="interpret", operands=given, differentiate=("slopes",))


def test_half_precision():
    made = operands((1, 2, 40, 16), 1, 40, dtype=torch.float16)
    given = {"slopes": torch.rand(2)}
    check_variant(ALIBI, *made, target="interpret", operands=given, differentiate=("slopes",))


def test_gradients_of_operands_by_row_and_column():
    rows = bias_q[batch, head, q_pos]
    variant = weft.Attention(score * weft.cos(rows) + bias_kv[head, kv_pos] * rows, masks.causal, name="biases")
    given = {"bias_q": torch.randn(2, 4, 35), "bias_kv": torch.randn(4, 35)}
    made = operands((2, 4, 35, 16), 2, 35)
    check_variant(variant, *made, target="interpret", operands=given, differentiate=("bias_q", "bias_kv"))


def test_scalars_and_documents():
    variant = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window) & masks.document(doc), name="packed")
    ids = torch.arange(50, dtype=torch.int32) // 13
    for size in (-3, 0, 1, 20, 2**31 - 1):
        made = operands((1, 2, 50, 16), 1, 50)
        check_variant(variant, *made, target="interpret", operands={"doc": ids, "window": size}, label=f"window {size}")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_ids_of_any_int_dtype(dtype):
    variant = weft.Attention(mask=masks.causal & masks.document(doc), name="packed")
    step = 2**32 if dtype == torch.int64 else 60  # ids that differ above 32 bits only
    ids = (torch.arange(50) // 13 * step).to(dtype)
    check_variant(variant, *operands((1, 2, 50, 16), 1, 50), target="interpret", operands={"doc": ids})


LIMITS = {
    "until": kv_pos <= limit[batch],
    "beyond": limit[batch] <= kv_pos,
    "window": q_pos - kv_pos < limit[batch],
    "blocks": kv_pos // 16 <= limit[batch],
    "outside": ~((kv_pos < limit[batch]) & (limit[batch] < q_pos)),
}


@pytest.mark.parametrize("target", ["interpret", "cpu"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", LIMITS)
def test_limits_as_large_as_their_dtype(name, dtype, target):
    """No bound wraps around: the arithmetic on what was read has room."""
    variant = weft.Attention(mask=LIMITS[name], name=name)
    info = torch.iinfo(dtype)
    limits = torch.tensor([info.max, info.max - 1, 3, info.min, info.min + 1], dtype=dtype)
    check_variant(variant, *operands((5, 1, 40, 16), 1, 70), target=target, operands={"limit": limits})


@pytest.mark.parametrize("target", ["interpret", "cpu"])
def test_limits_beyond_32_bits_are_compared_exactly(target):
    """Only arithmetic bounds what was read: two values that are compared with each other keep all their bits."""
    first, second = weft.tensor("first", 1, int), weft.tensor("second", 1, int)
    ids = {"first": torch.tensor([2**40, 2**40, -(2**41)]), "second": torch.tensor([2**40, 2**41, -(2**40)])}
    made = operands((3, 1, 40, 16), 1, 40)
    for name, seen in (("equal", first[batch] == second[batch]), ("less", first[batch] < second[batch])):
        variant = weft.Attention(mask=seen & masks.causal, name=name)
        check_variant(variant, *made, target=target, operands=ids, label=name)


def test_latent_attention_in_both_forms():
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=32, rope=16), name="mla")
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 4, 20, 40), "cache": (2, 1, 35, 48), "uk": (4, 32, 24), "uv": (4, 32, 16)}
    base = {n: torch.randn(s, generator=generator) / (3 if n.startswith("u") else 1) for n, s in shapes.items()}

    def run(call, dtype, **extra):
        leaves = {n: t.to(dtype).requires_grad_() for n, t in base.items()}
        out = call(leaves["query"], leaves["cache"], uk=leaves["uk"], uv=leaves["uv"], **extra)
        grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        return {"out": out.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}

    exact, plain = run(mla.reference, torch.float64), run(mla.reference, torch.float32)
    expanded = run(mla, torch.float32, target="interpret", form="expanded")
    for name, got in expanded.items():
        check_errors(got, exact[name], plain[name], f"expanded {name}")
    with torch.no_grad():
        query, cache, uk, uv = base.values()
        absorbed = mla(query, cache, uk=uk, uv=uv, target="interpret", form="absorbed")
    check_errors(absorbed, exact["out"], plain["out"], "absorbed out")
    with pytest.raises(weft.WeftError, match="the absorbed form has no backward; .* form='expanded'"):
        run(mla, torch.float32, target="interpret", form="absorbed")


def test_bytes_of_the_source_are_stable():
    sizes = weft.shape(heads=2, q_len=64, head_dim=80)
    for direction in ("forward", "backward"):
        texts = {ALIBI.source(sizes, device="a100", direction=direction) for _ in range(3)}
        assert len(texts) == 1
        compile(texts.pop(), "source", "exec")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("measured", [True, False], ids=["measured", "closed form"])
def test_not_of_what_is_known_when_a_kernel_is_compiled(given, measured):
    """The width of heads is such: Triton has Python's bool there, of which ~ is -2."""
    wide = ~(0.1 * head_dim <= (0.3 if given else 17))
    other = ~weft.tensor("keep", 1, bool)[kv_pos] if measured else kv_pos < 3
    variant = weft.Attention(mask=wide | other, name="not_of_known")
    q, k, v = (torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    operands = {"keep": torch.arange(40) % 3 > 0} if measured else {}
    found = variant(q, k, v, target="interpret", **operands)
    torch.testing.assert_close(found, variant.reference(q, k, v, **operands), rtol=1e-5, atol=1e-5)
