"""Bounds of tiles of ints that the mask computes in 32 bits, where solving it makes products of more than 64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, q_pos
from weft.ir.expr import Expr

MOST, BIG = 2**31 - 1, 2**30
size, stride, third = (weft.scalar(name, int) for name in ("size", "stride", "third"))
limits = weft.tensor("limits", 1, int)
NESTED = {"size": BIG, "stride": BIG}
# what cancels is computed in 32 bits in the mask; apart, the products leave 64 bits between two queries of a tile
EQUAL = {"size": MOST, "stride": MOST}

CASES: dict[str, tuple[Expr, dict[str, int], int, int]] = {  # mask, scalars, what limits hold, q_offset
    "keys": (kv_pos // size // stride <= third, NESTED | {"third": 15}, 0, 0),
    "keys below what is read": (kv_pos // size // stride <= limits[head], NESTED, 15, 0),
    "keys below far numbers": (kv_pos // size // stride <= limits[head], NESTED, 2**63 - 1, 0),
    "keys above far numbers": (kv_pos // size // stride >= limits[head], NESTED, -(2**63), 0),
    "three divisors": (kv_pos // size // stride // third <= limits[head], NESTED | {"third": BIG}, 15, 0),
    "queries": (q_pos // size // stride <= limits[head], NESTED, 15, 0),
    "queries above": (q_pos // size // stride > limits[head], NESTED, -16, 0),
    "both": (kv_pos // size // stride <= q_pos, NESTED, 0, 0),
    "a difference": (kv_pos // size // stride <= size - stride, {"size": MOST, "stride": 5}, 0, 0),
    "products that cancel": (kv_pos <= q_pos * ((size - stride) * 8) + third, EQUAL | {"third": 30}, 0, 2**29 - 20),
    "and their negation": (kv_pos >= q_pos * ((size - stride) * 8) + third, EQUAL | {"third": 10}, 0, 2**29 - 20),
    "products by four": (kv_pos <= q_pos * ((size - stride) * 4) + third, EQUAL | {"third": 30}, 0, 2**30 - 20),
}  # fmt: skip


def results(call: Callable[..., Tensor], dtype: torch.dtype, **options: object) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, 40, 16, generator=generator).to(dtype).requires_grad_() for _ in "qkv"]
    out = call(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_visible_is_skipped(name: str, target: str) -> None:
    mask, scalars, limit, offset = CASES[name]
    variant = weft.Attention(mask=mask, name="far_bounds")
    known: dict[str, int | Tensor] = {**scalars, "limits": torch.tensor([limit, limit])}
    given = {"q_offset": offset, **{p.name: known[p.name] for p in variant.canonical.parameters}}
    exact = results(variant.reference, torch.float64, **given)
    assert exact[0].any()
    for got, wanted in zip(results(variant, torch.float32, target=target, **given), exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
