"""What sizes that were proven sound are remembered by: calls of one bucket are those that one proof is about."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed, PackedPaged, Paged
from weft.runtime.check import sizes

window, shift = weft.scalar("window", int), weft.tensor("shift", 1)
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="sizes_recent")
SHIFTED = weft.Attention(score=score + shift[head], mask=masks.causal & (q_pos - kv_pos < 9), name="sizes_shifted")
LENGTHS, BATCHES = (1, 2, 3, 4, *range(16, 32, 3)), (0, 1, 2, 5)


def calls(kind: str, q_offset: Any) -> Iterator[Call]:
    for batch, q_len, kv_len, size in product(BATCHES, LENGTHS, LENGTHS, (1, 3, 4)):
        query = torch.empty(1 if "packed" in kind else batch, 2, q_len, 8)
        key = torch.empty(query.shape[0], 1, kv_len, 8)
        if "paged" in kind:
            key = torch.empty(7, 1, 4, 8)
        sequences: Any = {
            "dense": Dense(q_offset),
            "lengths": Lengths(torch.empty(batch), torch.empty(batch), q_offset),
            "packed": Packed(torch.empty(batch + 1), torch.empty(batch + 1), q_offset),
            "paged": Paged(None, torch.empty(batch), torch.empty(batch, kv_len), 4, q_offset),
            "packed_paged": PackedPaged(
                torch.empty(batch + 1), torch.empty(batch), torch.empty(batch, kv_len), 4, q_offset
            ),
        }[kind]
        yield Call(query, key, key, None, {"window": size}, sequences, Choices(), 8)


@pytest.mark.parametrize("q_offset", [None, -3, 0, 5, torch.empty(2, dtype=torch.int32, device="meta")], ids=str)
@pytest.mark.parametrize("kind", ["dense", "lengths", "packed", "paged", "packed_paged"])
def test_calls_of_one_bucket_have_one_proof(kind: str, q_offset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in (Lengths, Packed, Paged, PackedPaged):  # as if they lay on a device
        monkeypatch.setattr(record, "on_host", False)
    monkeypatch.setattr(sizes, "_known_rows", lambda call, sequences: None)
    proofs: dict[object, object] = {}
    seen = RECENT._variant._sizes
    if kind == "dense" and q_offset is None:
        q_offset = 16
    given = list(calls(kind, q_offset))
    for call in given:
        names = seen._names(call)
        assert names is not None
        ints = [call.operands["window"]]
        if kind == "dense":
            at = None if isinstance(q_offset, torch.Tensor) else (q_offset, q_offset)
            proof: object = seen._ranges(call, at, ints, rounded=True)
        else:
            ends = [sizes._ragged_ranges(call, call.sequences, None, least) for least in (0, 1)]
            rounded = [
                ({n: sizes._rounded(r) for n, r in env.items()}, far and sizes._rounded(far)) for env, far in ends
            ]
            proof = rounded, sizes._octave(ints[0])
        assert proofs.setdefault(names[1], proof) == proof
    assert len(proofs) < len(given)
    assert isinstance(q_offset, int) or len(proofs) < len(given) / 2


def test_what_was_proven_of_an_offset_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in (Lengths, Packed, Paged, PackedPaged):
        monkeypatch.setattr(record, "on_host", False)
    names = RECENT._variant._sizes._names
    offsets = (None, torch.empty(2, dtype=torch.int32, device="meta"), 3, 0)
    for kind in ("lengths", "packed", "paged", "packed_paged"):
        given = [names(next(calls(kind, offset))) for offset in offsets]
        for part in (0, 1):
            assert len({found[part] for found in given if found}) == len(offsets)
    exact = {
        found[0]
        for kind in ("dense", "lengths", "packed", "paged", "packed_paged")
        for call in calls(kind, 3)
        if (found := names(call))
    }
    assert len(exact) == 5 * len(BATCHES) * 3 * len(LENGTHS) ** 2


def test_a_known_call_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 20, 8)
    RECENT(q, k, k, window=5)
    SHIFTED(q, k, k, shift=torch.zeros(2))

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("proven again")

    monkeypatch.setattr(sizes.SizeChecks, "_problems", fails)
    for length in range(19, 32):
        RECENT(q, k[:, :, :length], k[:, :, :length], window=6)
        SHIFTED(q, k[:, :, :length], k[:, :, :length], shift=torch.zeros(2))
    with pytest.raises(AssertionError, match="proven again"):
        RECENT(q, k, k, window=1 << 20)
    with pytest.raises(AssertionError, match="proven again"):
        SHIFTED(q, k, k, shift=torch.zeros(1))


@pytest.mark.parametrize("place", ["batch", "q_pos", "kv_pos", "q_pos // kv_len"])
@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_a_call_of_nothing_reads_nothing(target: str, place: str) -> None:
    """An operand that is as empty as the call, a divisor of 0 where there are no keys."""
    row, own = weft.tensor("row", 1), weft.tensor("own", 1)
    variant = weft.Attention(score + weft.parse(f"row[{place}]", {"row": row}), sink=own[head], name="sizes_of_nothing")
    for batch, q_len, kv_len in ((0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)):
        tensors = [torch.randn(batch, 2, n, 8).requires_grad_() for n in (q_len, kv_len, kv_len)]
        operands = {"row": torch.randn(0).requires_grad_(), "own": torch.randn(2).requires_grad_()}
        out, lse = variant(*tensors, **operands, target=target, return_lse=True)
        assert not out.any() and torch.equal(lse, operands["own"][None, :, None].expand(lse.shape))
        *_, of_own = torch.autograd.grad((out, lse), [*tensors, *operands.values()], (out, torch.ones_like(lse)))
        assert torch.equal(of_own, torch.full((2,), float(batch * q_len)))
        if place != "q_pos // kv_len":
            full = [torch.randn(2, 2, 3, 8)] * 3  # what was sound of nothing is not of these
            with pytest.raises(weft.WeftError, match="row has 0 entries there"):
                variant(*full, **operands, target=target)
