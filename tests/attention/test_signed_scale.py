"""Scores that are a factor of any sign, or 0, times q.k: linear kernels compute what the definition says."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.compiler.analysis.tiles.facts import facts_of

from ..support import check_variant, mostly, poisoned

pytest.importorskip("triton")

factor, factors = weft.tensor("factor", 1), weft.tensor("factors", 2)
BY_HEAD = weft.Attention(score * factor[head], masks.causal, name="signed_by_head")
BY_ROW = weft.Attention(score * factors[batch, head], (kv_pos <= q_pos) & (q_pos >= 12), name="signed_by_row")
ABSORBED = weft.Attention(
    score * factor[head], masks.causal, scale=0.2, latent=weft.Latent(rank=32, rope=16), name="signed_absorbed"
)
SIGNS = [[-1.5, 0.7, -0.2, 2.0], [0.0, -1.0, 1.0, 0.0], [-1e-30, 1.0, 0.0, -0.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("variant", [BY_HEAD, BY_ROW, ABSORBED], ids=lambda v: v.name)
def test_such_scores_are_linear_with_a_scale_of_unknown_sign(variant: weft.Attention) -> None:
    facts = facts_of(variant)
    assert facts.linear_scale is not None and facts.scale_sign_unknown
    positive = facts_of(variant.replace(score=score * (0.5 + weft.sqrt(weft.group + 0.25)), name="positive"))
    assert positive.linear_scale is not None and not positive.scale_sign_unknown


def tensors(dtype: torch.dtype = torch.float32, kv_heads: int = 2):
    shapes = ((2, 4, 40, 16), (2, kv_heads, 40, 16), (2, kv_heads, 40, 32))
    return [poisoned(shape, dtype, seed=n) for n, shape in enumerate(shapes)]


TARGETS = [("interpret", "flash"), ("interpret", "streaming"), ("interpret", "standard"), ("cpu", None)]


@pytest.mark.parametrize(("target", "schedule"), mostly([t for t in TARGETS if t[1] != "standard"], TARGETS))
@pytest.mark.parametrize("signs", SIGNS, ids=["mixed", "zeros", "smallest", "all_zero"])
@pytest.mark.parametrize("differentiate", [(), ("factor",)], ids=["", "dfactor"])
def test_factors_by_head(signs, target, schedule, differentiate) -> None:
    given = {"factor": torch.tensor(signs)}
    check_variant(BY_HEAD, *tensors(), target=target, schedule=schedule, operands=given, differentiate=differentiate)


@pytest.mark.parametrize(("target", "schedule"), TARGETS)
def test_factors_by_batch_row_with_rows_that_see_nothing(target, schedule) -> None:
    given = {"factors": torch.tensor([[1.0, -1.0, 0.0, 0.5], [-2.0, 0.0, 1.0, -0.1]])}
    check_variant(BY_ROW, *tensors(kv_heads=1), target=target, schedule=schedule, operands=given)


@pytest.mark.parametrize(("target", "schedule"), TARGETS)
def test_half_precision(target, schedule) -> None:
    given = {"factor": torch.tensor(SIGNS[0])}
    check_variant(BY_HEAD, *tensors(torch.float16), target=target, schedule=schedule, operands=given)


@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
def test_values_that_are_part_of_the_keys_keep_their_sign(schedule) -> None:
    query, cache = torch.randn(2, 4, 20, 48), torch.randn(2, 1, 35, 48)
    given = {"factor": torch.tensor(SIGNS[0])}
    expected = ABSORBED.reference(query.double(), cache.double(), factor=given["factor"].double())
    out = ABSORBED(query, cache, target="interpret", schedule=schedule, **given)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # numpy's, of the interpreter
def test_a_factor_that_is_not_a_number_shows() -> None:
    given = {"factor": torch.tensor([torch.nan, 1.0, 1.0, 1.0])}
    out = BY_HEAD(*(t.clone() for t in tensors()), target="interpret", **given)
    assert out[:, 0].isnan().all() and not out[:, 1:].isnan().any()
