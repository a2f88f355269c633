"""The schedules `standard` and `streaming` compute what the definition says, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from tests.support import check_variant, poisoned
from weft import head, kv_pos, q_pos, score

pytest.importorskip("triton")

SCHEDULES = ("standard", "streaming")
window = weft.scalar("window", int)
prefix = weft.scalar("prefix", int)
slopes = weft.tensor("slopes", 1)
row_gain = weft.tensor("row_gain", 2)
column_bias = weft.tensor("column_bias", 2)

full = weft.Attention(name="full")
causal = weft.Attention(mask=kv_pos <= q_pos, name="causal")
capped_window = weft.Attention(
    score=20.0 * weft.tanh(score / 20.0), mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window), name="capped_window"
)
alibi = weft.Attention(score=score + slopes[head] * (kv_pos - q_pos), mask=kv_pos <= q_pos, name="alibi")
prefix_lm = weft.Attention(mask=(kv_pos <= q_pos) | (kv_pos < prefix), name="prefix_lm")
temperature = weft.Attention(score=score * weft.exp(slopes[head]), mask=kv_pos <= q_pos, name="temperature")
biased = weft.Attention(score=score * (1.0 + row_gain[head, q_pos]) + column_bias[head, kv_pos], name="biased")

Sizes = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, L, T, D, Dv


def operands(sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value with NaN around them."""
    batch, heads, kv_heads, q_len, kv_len, dim, value_dim = sizes
    return (
        poisoned((batch, heads, q_len, dim), dtype, blhd=True, seed=1),
        poisoned((batch, kv_heads, kv_len, dim), dtype, seed=2),
        poisoned((batch, kv_heads, kv_len, value_dim), dtype, blhd=True, seed=3),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("variant", "sizes", "scalars"),
    [
        (full, (1, 2, 2, 50, 50, 16, 16), {}),
        (causal, (2, 4, 2, 33, 70, 16, 32), {}),
        (causal, (1, 2, 2, 40, 40, 40, 40), {}),
        (causal, (1, 4, 1, 1, 65, 80, 16), {}),
        (capped_window, (1, 2, 1, 50, 50, 16, 16), {"window": 17}),
        (prefix_lm, (1, 2, 1, 50, 70, 16, 16), {"prefix": 24}),
    ],
    ids=["full", "causal-gqa-cross", "D40", "decode-mqa-D80", "softcap-window", "prefix"],
)
def test_matches_the_definition(schedule: str, variant: weft.Attention, sizes: Sizes, scalars: dict[str, int]) -> None:
    check_variant(variant, *operands(sizes), target="interpret", operands=dict(scalars), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", [alibi, temperature], ids=lambda v: v.name)
def test_gradient_of_an_operand_indexed_by_head(schedule: str, variant: weft.Attention) -> None:
    sizes = (2, 4, 2, 40, 40, 16, 16)
    values = {"slopes": torch.linspace(0.05, 0.3, 4)}
    check_variant(
        variant, *operands(sizes), target="interpret", operands=values, differentiate=("slopes",), schedule=schedule
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_operands_indexed_by_row_and_column(schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        "row_gain": 0.3 * torch.randn((2, 40), generator=generator),
        "column_bias": torch.randn((2, 40), generator=generator),
    }
    check_variant(
        biased, *operands((1, 2, 1, 40, 40, 16, 16)), target="interpret", operands=values,
        differentiate=("row_gain", "column_bias"), schedule=schedule,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_see_nothing_give_zero(schedule: str) -> None:
    # 70 queries end where 40 keys end, so the first 30 come before every key
    query, key, value = operands((1, 2, 1, 70, 40, 16, 16))
    out, lse = causal(query, key, value, return_lse=True, target="interpret", schedule=schedule)
    assert torch.equal(out[:, :, :30], torch.zeros_like(out[:, :, :30]))
    assert torch.equal(lse[:, :, :30], torch.full_like(lse[:, :, :30], -torch.inf))
    check_variant(causal, query, key, value, target="interpret", schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_offset_for_each_batch_row(schedule: str) -> None:
    offsets = torch.tensor([20, 13, 6], dtype=torch.int32)
    check_variant(causal, *operands((3, 2, 2, 20, 40, 16, 16)), target="interpret", q_offset=offsets, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_half_precision(schedule: str) -> None:
    tensors = operands((1, 2, 1, 50, 50, 32, 32), torch.float16)
    check_variant(causal, *tensors, target="interpret", schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_forms_of_latent_attention(schedule: str) -> None:
    mla = weft.Attention(mask=kv_pos <= q_pos, latent=weft.Latent(rank=32, rope=16), name="mla")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, cache, uk, uv = normal(1, 4, 40, 32), normal(1, 1, 40, 48), normal(4, 32, 16), normal(4, 32, 32)
    expected = mla.reference(*(t.double() for t in (query, cache)), uk=uk.double(), uv=uv.double())
    for form in ("expanded", "absorbed"):
        out = mla(query, cache, uk=uk, uv=uv, form=form, target="interpret", schedule=schedule)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_repeated_runs_agree_bitwise(schedule: str) -> None:
    query, key, value = (t.clone().requires_grad_() for t in operands((1, 4, 2, 40, 40, 16, 16)))

    def gradients() -> tuple[Tensor, ...]:
        out = causal(query, key, value, target="interpret", schedule=schedule)
        return torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=False))


def test_schedules_agree_with_flash() -> None:
    tensors = operands((1, 2, 1, 50, 50, 16, 16))
    expected = causal(*tensors, target="interpret", schedule="flash")
    for schedule in SCHEDULES:
        torch.testing.assert_close(causal(*tensors, target="interpret", schedule=schedule), expected)


def test_streaming_computes_nothing_for_keys_that_no_query_sees() -> None:
    """NaN in whole tiles of such keys and values does not show."""
    query, key, value = (t.clone() for t in operands((1, 1, 1, 32, 128, 16, 16)))
    key[:, :, 64:], value[:, :, 64:] = torch.nan, torch.nan
    out = causal(query, key, value, q_offset=0, target="interpret", schedule="streaming")
    expected = causal.reference(query, key[:, :, :64], value[:, :, :64], q_offset=0)
    torch.testing.assert_close(out, expected)
