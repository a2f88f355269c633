"""Rows that see nothing: what arrives there as a gradient, NaN too, reaches no other gradient."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

FIRST = -3  # position of the first query: three rows see nothing
bias, pad, sinks = weft.tensor("bias", 2), weft.tensor("pad", 2), weft.tensor("sinks", 1)
VARIANTS = {
    "causal": weft.Attention(mask=masks.causal, name="causal"),
    "window": weft.Attention(mask=masks.causal & (q_pos - kv_pos < 5), name="window"),
    "biased": weft.Attention(score + bias[q_pos - FIRST, kv_pos], masks.causal, name="biased"),
    "capped": weft.Attention(2.0 * weft.tanh(score), masks.causal, name="capped"),
    "padded": weft.Attention(score + pad[batch, kv_pos], masks.causal, name="padded"),
    "sunk": weft.Attention(mask=masks.causal, sink=sinks[head], name="sunk"),
    "sigmoids": weft.Attention(mask=masks.causal, normalizer="sigmoid", name="sigmoids"),
    "dropped": weft.Attention(mask=masks.causal, dropout=0.25, name="dropped"),
}


def gradients(name: str, target: str, rows: int, dtype: torch.dtype, poison: float, learned: bool) -> dict:
    """Gradients by operand, where rows that see nothing get `poison` from above."""
    generator = torch.Generator().manual_seed(rows)
    made = {n: torch.randn(2, h, rows, 16, generator=generator, dtype=dtype).requires_grad_()
            for n, h in (("query", 4), ("key", 2), ("value", 2))}  # fmt: skip
    shapes = {"bias": (rows, rows), "pad": (2, rows), "sinks": (4,)}
    operands = {p.name: torch.randn(shapes[p.name], generator=generator).requires_grad_(learned)
                for p in VARIANTS[name].canonical.parameters if p.name in shapes}  # fmt: skip
    if name == "padded":
        operands["pad"] = torch.where(torch.arange(rows) % 5 == 3, -1e9, 0.0).repeat(2, 1).requires_grad_(learned)
    seed = {"seed": 3} if name == "dropped" else {}
    out = VARIANTS[name](*made.values(), **operands, q_offset=FIRST, target=target, **seed)
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    dout[:, :, :-FIRST] = poison
    leaves = made | (operands if learned else {})
    return dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], dout)))


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(("rows", "dtype"), [(40, torch.float32), (40, torch.bfloat16), (300, torch.float32)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_gradient_of_nan_reaches_nothing_on_a_cpu(name: str, rows: int, dtype, learned: bool) -> None:
    found = gradients(name, "cpu", rows, dtype, torch.nan, learned)
    for operand, wanted in gradients(name, "cpu", rows, dtype, 0.0, learned).items():
        torch.testing.assert_close(found[operand], wanted, msg=lambda text, n=operand: f"d{n}: {text}")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gradient_of_nan_reaches_values_and_sinks_alone_in_kernels(name: str) -> None:
    """Of values the weights, 0, are multiplied by it in tiles that some row sees; of a sink the output, which is 0."""
    found = gradients(name, "interpret", 40, torch.float32, torch.nan, True)
    for operand, wanted in gradients(name, "interpret", 40, torch.float32, 0.0, True).items():
        if operand not in ("value", "sinks"):
            torch.testing.assert_close(found[operand], wanted, msg=lambda text, n=operand: f"d{n}: {text}")
