"""Gradients of tables whose index stays what it is from some distance on, on a GPU."""

from __future__ import annotations

import pytest
import torch

import weft

from ..attention.test_levels import MASKS, SCORES, operands_of
from ..support import check_variant, mostly, poisoned

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def check(
    name: str, mask: str = "causal", rows: tuple[int, int] = (700, 700), dim: int = 64, dtype: torch.dtype = BF16,
    batches: int = 2, far: float = 0.0, **more: object,
) -> None:  # fmt: skip
    attention = weft.Attention(SCORES[name], MASKS[mask], name=f"{name}_{mask}")
    shapes = ((batches, 4, rows[0], dim), (batches, 2, rows[1], dim), (batches, 2, rows[1], dim))
    tensors = [poisoned(shape, dtype, "cuda", seed=n) for n, shape in enumerate(shapes)]
    operands = {n: t.cuda() for n, t in operands_of(attention, far).items()}
    if "docs" in operands:
        ends = torch.tensor([[450], [129]], device="cuda")
        operands["docs"] = (torch.arange(max(rows), device="cuda")[None] // ends).contiguous()
    learned = tuple(n for n, t in operands.items() if t.is_floating_point())
    check_variant(attention, *tensors, operands={**operands, **more}, differentiate=learned, target="triton")


@pytest.mark.sampled(38)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", SCORES)
def test_every_index(name: str, dtype: torch.dtype) -> None:
    check(name, dtype=dtype)


@pytest.mark.parametrize("mask", mostly(["none", "causal", "documents"], [*MASKS]))
def test_masks(mask: str) -> None:
    check("t5", mask)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dim", [64, 128, 80, 256])
def test_widths(dim: int) -> None:
    check("t5_causal", dim=dim)
    check("t5", "none", (600, 300), dim)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 191, 192, 193, 320])
def test_lengths(length: int) -> None:
    for more in (0, 5, 200):
        check("t5", "none", (length, length + more))


@pytest.mark.parametrize("far", [200.0, 300.0, 1e4, -1e9])
def test_numbers_far_from_0(far: float) -> None:
    """Up to 256 weights are found in one step, from there on as those of other tiles."""
    check("t5_causal", far=far)


def test_an_entry_that_is_no_number_reaches_what_reads_it() -> None:
    attention = weft.Attention(SCORES["t5_causal"], MASKS["causal"])
    operands = {n: t.cuda().requires_grad_() for n, t in operands_of(attention, float("nan")).items()}
    tensors = [torch.randn(1, 4, 300, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    attention(*tensors, **operands, target="triton").float().sum().backward()
    assert tensors[0].grad is not None and tensors[0].grad[0, 0, 299].isnan().all()
    assert not tensors[0].grad[0, 0, :5].isnan().any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_sequences(kind: str) -> None:
    if kind == "packed":
        starts = torch.tensor([0, 300, 300, 301, 700], device="cuda", dtype=torch.int32)
        check("t5", batches=1, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    else:
        lens = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([600, 33], [650, 480])]
        check("t5", q_lens=lens[0], kv_lens=lens[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["t5_causal", "capped", "twice"])
def test_gradients_repeat(name: str) -> None:
    attention = weft.Attention(SCORES[name], MASKS["causal"], name=name)
    operands = {n: t.cuda() for n, t in operands_of(attention).items()}
    leaves = {n: t.requires_grad_() for n, t in operands.items() if t.is_floating_point()}
    tensors = [torch.randn(2, 4, 900, 128, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    found = []
    for _ in range(3):
        out = attention(*tensors, **{**operands, **leaves}, target="triton")
        found.append(torch.autograd.grad(out, [*tensors, *leaves.values()], dout))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
