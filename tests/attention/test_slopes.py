"""A pair that weighs nothing has no gradient, though the slope of its score, or of an operand, may be infinite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score, scores

pytest.importorskip("triton")

SCHEDULES = pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
MASKS = pytest.mark.parametrize("mask", [True, masks.causal], ids=["unmasked", "causal"])
L = 40
pair, flag, gain = weft.tensor("pair", 2), weft.tensor("flag", 1, bool), weft.tensor("gain", 1)
row, column = weft.tensor("row", 1), weft.tensor("column", 1)
PAIR, SEEN = pair[q_pos, kv_pos], weft.tensor("seen", 2, bool)[q_pos, kv_pos]


def tensors() -> list[Tensor]:
    """Query, key and value: two heads of queries to a head of keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, L, 16), (1, 1, L, 16), (1, 1, L, 16))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def pairs(hidden: float) -> tuple[Tensor, Tensor]:
    """Factors of pairs, two in three, at random, of which are `hidden`; and which pairs are not."""
    seen = torch.rand((L, L), generator=torch.Generator().manual_seed(1)) < 1 / 3
    seen.fill_diagonal_(True)
    return torch.where(seen, 0.5, hidden), seen


def gradients(
    attention: weft.Attention, inputs: list[Tensor], operands: dict[str, Tensor], **given: str
) -> list[Tensor]:
    leaves = inputs + [t for t in operands.values() if t.requires_grad]
    out = attention(*inputs, **operands, **given) if given else attention.reference(*inputs, **operands)
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad(out, leaves, weights))


def check_hidden_by_score(written: weft.Expr, mask: weft.Expr | bool, schedule: str, more: dict[str, Tensor]) -> None:
    """Pairs hidden by a factor of -inf in a score have the gradients of pairs that a mask hides, all of them finite."""
    factors, seen = pairs(-math.inf)
    found = gradients(
        weft.Attention(written, mask, name="by_score"), tensors(), {"pair": factors, **more},
        target="interpret", schedule=schedule,
    )  # fmt: skip
    exact = [t.detach().double().requires_grad_() for t in tensors()]
    more = {n: t.detach().double().requires_grad_() if t.requires_grad else t for n, t in more.items()}
    hidden = weft.Attention(written, SEEN if mask is True else SEEN & mask, name="by_mask")
    expected = gradients(hidden, exact, {"pair": pairs(0.5)[0], "seen": seen, **more})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@SCHEDULES
@MASKS
def test_an_infinite_slope_meets_a_weight_of_0(mask: weft.Expr | bool, schedule: str) -> None:
    """Of the hidden pairs, the slope is -inf and the score is -inf, by a constant or by q.k itself."""
    by_constant = PAIR * weft.where(flag[0], score, 2.0) + score
    check_hidden_by_score(by_constant, mask, schedule, {"flag": torch.tensor([False])})
    check_hidden_by_score(PAIR * (2.0 + weft.tanh(score)), mask, schedule, {})


@SCHEDULES
@MASKS
def test_an_infinite_derivative_of_an_operand_meets_a_weight_of_0(mask: weft.Expr | bool, schedule: str) -> None:
    """Of operands by head, by query and by key."""
    near_1 = torch.linspace(0.9, 1.1, L)
    more = {"gain": near_1[:2], "row": near_1, "column": near_1.flip(0)}
    more = {name: t.clone().requires_grad_() for name, t in more.items()}
    check_hidden_by_score(score + PAIR * (gain[head] + row[q_pos] + column[kv_pos]), mask, schedule, more)


SIZES = weft.shape(heads=2, q_len=256, head_dim=64)


PLAIN = {
    "dense": weft.Attention(name="dense"),
    "causal": weft.Attention(mask=masks.causal, name="causal"),
    "alibi": weft.Attention(scores.alibi(weft.tensor("slopes", 1))(score), masks.causal, name="alibi"),
    "softcap": weft.Attention(scores.softcap(30.0)(score), masks.causal, name="softcap"),
    "bias": weft.Attention(score + PAIR, masks.causal, name="bias"),
}


# streaming has no gradient of what pairs read
@pytest.mark.parametrize(
    ("name", "schedule"), [*((n, "flash") for n in PLAIN), *((n, "streaming") for n in PLAIN if n != "bias")]
)
def test_finite_derivatives_cost_nothing(name: str, schedule: str) -> None:
    text = PLAIN[name].source(SIZES, direction="backward", device="h200", target="triton", schedule=schedule)
    assert "weighs nothing" not in text and "== 0.0, 0.0" not in text
