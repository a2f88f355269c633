"""Calls of target `cpu` that are like the one before: what they are asked, and that they compute the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.codegen import at_once, kept_positions, products, torch_private
from weft.runtime.run.variant import variant_of

X, BIAS, VALID = weft.scalar("x", float), weft.tensor("bias", 3), weft.tensor("valid", 2, bool)
TABLE = weft.tensor("table", 2)
FULL = weft.Attention(scale=X, name="like_full")
BIASED = weft.Attention(score + BIAS[head, q_pos, kv_pos], name="like_biased")
PADDED = weft.Attention(mask=VALID[batch, kv_pos], name="like_padded")
NEAR = weft.Attention(score + TABLE[head, 40 + weft.minimum(q_pos - kv_pos, 40)], masks.causal, name="like_near")
pytestmark = pytest.mark.skipif(
    torch_private.guard is None or not products.takes_masks(), reason="torch's own attention or guards are not there"
)


@pytest.fixture(autouse=True)
def short_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own kernel, which other tests leave to tiles."""
    monkeypatch.setattr(products, "SHORT_HEAD", 1 << 24)
    monkeypatch.setattr(products, "SHORT_HEAD_BACKWARD", 1 << 23)


def drawn(dim: int = 32, length: int = 24, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, heads, length, dim, dtype=dtype) for heads in (4, 2, 2)]


def operands(variant: weft.Attention) -> dict[str, Any]:
    valid = torch.arange(24) < torch.tensor([[24], [9]])
    known = {"x": 0.25, "bias": torch.randn(4, 24, 24), "valid": valid, "table": torch.randn(4, 81)}
    return {p.name: known[p.name] for p in variant.canonical.parameters}


def gradients(call: Callable[..., Tensor], tensors: list[Tensor], given: dict[str, Any]) -> list[Tensor]:
    learned = [t for t in given.values() if isinstance(t, Tensor) and t.is_floating_point()]
    leaves = [t.detach().requires_grad_() for t in (*tensors, *learned)]
    rest = iter(leaves[3:])
    given = {n: next(rest) if any(t is x for x in learned) else t for n, t in given.items()}
    out = call(*leaves[:3], **given)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-1))]


VARIANTS = [FULL, BIASED, PADDED, NEAR]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("keeps", [True, False])
def test_each_is_right(variant: weft.Attention, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other numbers in each call, whether weights are kept or not."""
    monkeypatch.setattr(at_once, "MOST_OF_A_HEAD", (1 << 14) if keeps else 0)
    for _ in range(5):
        tensors, given = drawn(), operands(variant)
        wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
        exact = gradients(variant.reference, [t.double() for t in tensors], wide)
        for found, wanted in zip(gradients(variant, tensors, given), exact, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)
    assert variant_of(variant).repeats.hits


CHANGES: dict[str, Callable[[list[Tensor], dict[str, Any]], None]] = {
    "a number": lambda tensors, given: given.update(x=0.5),
    "a length": lambda tensors, given: tensors.__setitem__(slice(1, 3), [t[:, :, :20] for t in tensors[1:]]),
    "a dtype": lambda tensors, given: tensors.__setitem__(slice(None), [t.double() for t in tensors]),
    "strides": lambda tensors, given: tensors.__setitem__(0, torch.cat([tensors[0]] * 2, -1)[..., :32]),
    "rows of another order": lambda tensors, given: tensors.__setitem__(
        0, tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "a negative view": lambda tensors, given: tensors.__setitem__(0, torch._neg_view(tensors[0])),
    "an offset": lambda tensors, given: given.update(q_offset=3),
    "a schedule": lambda tensors, given: given.update(schedule="flash/flash_forward=cpu:16x16"),
    "lengths": lambda tensors, given: given.update(kv_lens=torch.tensor([24, 9], dtype=torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_alike_goes_its_own_way(change: str) -> None:
    masked = weft.Attention(mask=masks.causal, scale=X, name=f"like_{change.replace(' ', '_')}")
    for _ in range(3):
        masked(*drawn(), x=0.25)
    repeats = variant_of(masked).repeats
    assert (known := repeats.known) is not None
    hits, tensors, given = repeats.hits, drawn(), {"x": 0.25}
    CHANGES[change](tensors, given)
    found = masked(*tensors, **given)
    assert repeats.hits <= hits or repeats.known is not known
    given.pop("schedule", None)
    exact = masked.reference(*[t.double() for t in tensors], **given)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_threads_and_autocast_are_asked_for() -> None:
    for _ in range(3):
        FULL(*drawn(), x=0.25)
    (known,) = [variant_of(FULL).repeats.known]
    assert known is not None
    seen: list[Any] = []
    fits, known.fits = known.fits, lambda call: seen.append(call) or fits(call)
    FULL(*drawn(), x=0.25)
    (call,) = seen
    assert fits(call)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not fits(call)
    finally:
        torch.set_num_threads(threads)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(call)


def test_nothing_of_a_call_is_kept() -> None:
    gc.freeze()  # what is older is not looked at, which takes seconds
    tensors, given = [t.requires_grad_() for t in drawn()], operands(BIASED)
    for _ in range(4):
        BIASED(*tensors, **given).sum().backward()
    references = [weakref.ref(t) for t in (*tensors, given["bias"])]
    del tensors, given
    gc.collect()
    assert not any(reference() is not None for reference in references)


# -- what follows from positions ---------------------------------------------------------------------------------------
def test_positions_are_kept_where_they_are_short() -> None:
    few, many = (3, 8, 8, 2, 4, 0, 2), (3, 8, kept_positions.MOST_KEPT, 2, 4, 0, 2)
    assert kept_positions.positions(*few)[0] is kept_positions.positions(*few)[0]
    assert kept_positions.positions(*many)[0] is not kept_positions.positions(*many)[0]
    q_pos, kv_pos, rows, heads, kv_heads = kept_positions.positions(*few)
    assert q_pos.tolist() == [[n] for n in range(3, 11)] and kv_pos.tolist() == list(range(8))
    assert rows.flatten().tolist() == [0, 1] and heads.flatten().tolist() == [0, 1, 2, 3]
    assert kv_heads.flatten().tolist() == [0, 0, 1, 1]


def test_what_inference_mode_made_serves_a_backward() -> None:
    tensors, given = drawn(), operands(NEAR)
    with torch.inference_mode():
        NEAR(*tensors, **given)
    gradients(NEAR, tensors, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pairs", [5, kept_positions.SMALL_TILE + 1])
def test_hidden_pairs_are_minus_inf(dtype: torch.dtype, pairs: int) -> None:
    seen = torch.rand(1, pairs) < 0.5
    assert torch.equal(kept_positions.as_added(seen, dtype), torch.where(seen, 0.0, -torch.inf).to(dtype))
    assert kept_positions.as_added(True, dtype).item() == 0.0


@pytest.mark.parametrize("known", [True, False])
def test_a_block_is_a_view_where_indices_count_up(known: bool) -> None:
    tensor = torch.arange(2 * 6 * 9).view(2, 6, 9)
    q_pos, kv_pos, rows, *_ = kept_positions.positions(1, 4, 9, 1, 1, 0, 2)
    if not known:
        q_pos, kv_pos, rows = q_pos.clone(), kv_pos.clone(), rows.clone()
    block = kept_positions.read(tensor, rows, q_pos, kv_pos)
    assert block.data_ptr() == tensor[:, 1].data_ptr() and torch.equal(block, tensor[rows, q_pos, kv_pos])
    assert kept_positions.block_of(tensor, (rows, q_pos + 3, kv_pos)) is None  # one row is outside


def test_torch_knows_that_a_whole_tensor_is_read() -> None:
    """The gradient of a strided view takes it longer than a short call."""
    tensor = torch.randn(3, 6, 9, requires_grad=True)
    q_pos, kv_pos, _, heads, _ = kept_positions.positions(0, 6, 9, 1, 3, 0, 1)
    whole = kept_positions.read(tensor, heads, q_pos, kv_pos)
    part = kept_positions.read(tensor, heads, kept_positions.positions(1, 5, 9, 1, 3, 0, 1)[0], kv_pos)
    other = kept_positions.read(tensor.mT, heads, kv_pos, q_pos)  # all numbers again, of a tensor in another order
    assert whole.shape == (1, 3, 1, 6, 9) and torch.equal(whole.flatten(0, 2), tensor)
    assert torch.equal(part.flatten(0, 2), tensor[:, 1:]) and torch.equal(other.flatten(0, 2), tensor)
    names = [type(found.grad_fn).__name__ for found in (whole, part)]
    assert names == ["ViewBackward0", "AsStridedBackward0"]
