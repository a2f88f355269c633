"""Gradients of what a score reads by position and by distance, by the kernels of `hopper`: right, and repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft

from ..attention.test_gradients_on_hopper import BATCHES, HEADS, LEVELS, MASKS, SCORES, variant
from ..attention.test_levels import operands_of as tables_of
from ..support import check_variant, mostly, poisoned

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
pytestmark = [pytest.mark.gpu, hopper]
BF16 = torch.bfloat16


def given(q_len: int, kv_len: int, dim: int, dtype: torch.dtype = BF16, batches: int = BATCHES) -> list[Tensor]:
    """Query, key and value with NaN around them."""
    shapes = ((batches, HEADS, q_len, dim), (batches, 2, kv_len, dim), (batches, 2, kv_len, dim))
    return [poisoned(shape, dtype, "cuda", seed=n) for n, shape in enumerate(shapes)]


def operands_of(attention: weft.Attention, rows: int, batches: int = BATCHES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = {"by_head": (HEADS, rows), "by_batch": (batches, rows), "gains": (HEADS, rows)}
    sizes |= {"entries": (9,), "slopes": (HEADS,)}
    made = {n: torch.randn(size, generator=generator) * 0.5 for n, size in sizes.items()}
    made["kinds"] = torch.randint(0, 9, (batches, rows), generator=generator)
    return {t.name: made[t.name].cuda() for t in attention.canonical.tensors}


def by_distance(name: str, far: float = 0.0) -> tuple[weft.Attention, dict[str, Tensor]]:
    declared = weft.Attention(LEVELS[name], MASKS["none" if name == "t5" else "causal"], name=name)
    operands = {n: t.cuda() for n, t in tables_of(declared, far).items()}
    if "tables" in operands:  # of four heads
        own = operands["tables"]
        operands["tables"] = torch.cat([own, own.flip(0), own, own], 1)
    return declared, operands


def learned(operands: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(n for n, t in operands.items() if t.is_floating_point())


def uses_hopper(declared: weft.Attention, tensors: list[Tensor], operands: dict[str, Tensor]) -> bool:
    plan = declared.plan(*tensors, **operands)
    return {k.target for k in plan.kernels if k.name in ("flash_backward", "flash_dkey_dvalue")} == {"hopper"}


# -- by one position --------------------------------------------------------------------------------------------------
@pytest.mark.sampled(94)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 80, 128, 192])
@pytest.mark.parametrize("name", SCORES)
def test_reads_by_one_position(name: str, dim: int, deterministic: bool) -> None:
    tensors = [t if n < 2 else t[..., : min(dim, 128)] for n, t in enumerate(given(300, 333, dim))]
    operands = operands_of(variant(name), 400)
    check_variant(
        variant(name), *tensors, operands=operands, differentiate=learned(operands), deterministic=deterministic,
        target="hopper",
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow(10)), 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("name", mostly(["of_both"], ["of_keys", "of_queries", "of_both"]))
def test_lengths(name: str, length: int) -> None:
    for more in (0, 5, 200):
        operands = operands_of(variant(name), length + more)
        tensors = given(length, length + more, 64, torch.float16)
        check_variant(variant(name), *tensors, operands=operands, differentiate=learned(operands), target="hopper")


@pytest.mark.sampled(18)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["of_keys", "looked_up", "of_queries", "of_both"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_sequences(name: str, kind: str, deterministic: bool) -> None:
    lens = ([100, 1, 0, 300, 70], [130, 1, 7, 300, 0])
    counts = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in lens]
    if kind == "packed":
        starts = [torch.nn.functional.pad(c.cumsum(0), (1, 0)).int() for c in counts]
        options: dict[str, object] = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
        tensors = given(sum(lens[0]), sum(lens[1]), 64, batches=1)
    else:
        options = {"q_lens": counts[0], "kv_lens": counts[1]}
        tensors = given(300, 300, 64, batches=5)
    operands = operands_of(variant(name), 480, 5)
    check_variant(
        variant(name), *tensors, operands={**operands, **options}, differentiate=learned(operands), q_offset=0,
        target="hopper", deterministic=deterministic,
    )  # fmt: skip


# -- by distance ------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(73)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
@pytest.mark.parametrize("name", LEVELS)
def test_tables_by_distance(name: str, dim: int, deterministic: bool) -> None:
    declared, operands = by_distance(name)
    rows = 200 if name == "nowhere_alike" else 700  # beyond that table every entry is the last
    tensors = given(rows, rows, dim)
    check_variant(
        declared, *tensors, operands=operands, differentiate=learned(operands), deterministic=deterministic,
        target="hopper",
    )  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow(20)), 63, 64, 65, 128, 129, 191, 320])
def test_lengths_of_tables(length: int) -> None:
    for more in (0, 5, 200):
        declared, operands = by_distance("t5")
        tensors = given(length, length + more, 64, torch.float16)
        check_variant(declared, *tensors, operands=operands, differentiate=learned(operands), target="hopper")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("far", [pytest.param(200.0, marks=pytest.mark.slow(11)), 300.0, 1e4, -1e9])
def test_numbers_far_from_0(far: float) -> None:
    declared, operands = by_distance("t5_causal", far)
    check_variant(declared, *given(700, 700, 128), operands=operands, differentiate=learned(operands), target="hopper")


def test_these_are_the_kernels_that_a_call_takes() -> None:
    declared, operands = by_distance("t5_causal")
    assert uses_hopper(declared, given(700, 700, 128), operands)
    for name in SCORES:
        assert uses_hopper(variant(name), given(300, 300, 128), operands_of(variant(name), 300)), name


@pytest.mark.slow(20)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["of_both", "t5_causal"])
def test_gradients_repeat(name: str) -> None:
    """Two passes bit for bit; one pass all but dQ, whose sums many programs add to."""
    if name in SCORES:
        declared, operands = variant(name), operands_of(variant(name), 900)
    else:
        declared, operands = by_distance(name)
    tensors = [t.detach().clone().requires_grad_() for t in given(900, 900, 128)]
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in operands.items()}
    dout = torch.randn_like(tensors[0])
    for deterministic in (True, False):
        found = []
        for _ in range(20):
            out = declared(*tensors, **leaves, deterministic=deterministic, target="hopper")
            found.append(torch.autograd.grad(out, [*tensors, *(leaves[n] for n in learned(operands))], dout))
        for other in found[1:]:
            same = [torch.equal(a, b) for a, b in zip(found[0], other, strict=True)]
            assert all(same if deterministic else same[1:])
