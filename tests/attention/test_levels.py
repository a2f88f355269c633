"""Gradients of tables whose index stays what it is from some distance on: where each pair's share is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score, scores
from weft.codegen.launch.adding import sums_by_entry
from weft.codegen.launch.device import Device
from weft.codegen.targets.triton.parts import sums as launched_sums
from weft.compiler.planning.gradient_sums import DIAGONAL_PARTS
from weft.runtime.run import variant

from ..support import check_variant, mostly, poisoned

pytest.importorskip("triton")

AWAY = q_pos - kv_pos
table, tables, lookup = weft.tensor("table", 1), weft.tensor("tables", 2), weft.tensor("lookup", 1, int)
docs = weft.tensor("docs", 2, int)
T5 = scores.t5_bias(tables, 8, 20)(score)
BEYOND = weft.minimum(weft.maximum(AWAY, -200), 200) + 200
SCORES = {
    "t5": T5,
    "t5_causal": scores.t5_bias(tables, 8, 20, bidirectional=False)(score),
    "clamped": 0.7 * score + 0.5 * tables[head, weft.minimum(weft.maximum(AWAY, -3), 40) + 3],
    "of_a_batch": score + tables[batch, weft.minimum(weft.abs(AWAY), 17)] + tables[head, 0],
    # how far the ends reach in differs by head
    "of_each_head": score + tables[head, weft.minimum(weft.abs(AWAY), 5 + 40 * head)],
    "looked_up": score + table[weft.maximum(weft.minimum(lookup[weft.minimum(weft.maximum(AWAY, 0), 60)], 9), 0)],
    "twice": score + table[weft.minimum(weft.maximum(AWAY, 0), 9)] + tables[head, weft.where(AWAY < 20, 1, 0)],
    # beside something of each pair, the score of a tile is no sum of q.k and one number
    "with_a_slope": T5 + 0.01 * AWAY,
    "capped": 5.0 * weft.tanh(T5 / 5.0),
    "everywhere_alike": score + tables[head, weft.minimum(weft.minimum(weft.abs(AWAY), 0) + head, 3)],
    "nowhere_alike": score + table[BEYOND],
}  # fmt: skip
MASKS = {
    "causal": masks.causal, "none": True, "window": masks.causal & (AWAY < 60),
    "documents": masks.causal & (docs[batch, q_pos] == docs[batch, kv_pos]), "future": AWAY <= 0,
    "parts": masks.causal & (docs[batch, q_pos] % 2 == docs[batch, kv_pos] % 2),
}  # fmt: skip


def operands_of(attention: weft.Attention, far: float = 0.0) -> dict[str, Tensor]:
    """`far`: what is added to the entry that T5 reads behind the last bucket."""
    generator = torch.Generator().manual_seed(5)
    made = {
        "table": torch.randn(401, generator=generator) * 0.5, "tables": torch.randn(4, 130, generator=generator) * 0.5,
        "lookup": torch.tensor([3, 1, 4, 1, 5, 9, 2, 6] + [7] * 53),
        "docs": torch.arange(260)[None].expand(2, -1) // torch.tensor([[130], [90]]),
    }  # fmt: skip
    made["tables"][:, 7] += far
    return {t.name: made[t.name] for t in attention.canonical.tensors}


def check(
    name: str, mask: str = "causal", rows: tuple[int, int] = (130, 130), heads: tuple[int, int] = (2, 1),
    batches: int = 1, far: float = 0.0, more: dict[str, object] | None = None, **options: object,
) -> None:  # fmt: skip
    attention = weft.Attention(SCORES[name], MASKS[mask], name=f"{name}_{mask}")
    shapes = ((batches, heads[0], rows[0], 16), (batches, heads[1], rows[1], 16), (batches, heads[1], rows[1], 16))
    tensors = [poisoned(shape, torch.float32, seed=n) for n, shape in enumerate(shapes)]
    operands = operands_of(attention, far)
    learned = tuple(n for n, t in operands.items() if t.is_floating_point())
    given = {**operands, **(more or {})}
    check_variant(attention, *tensors, operands=given, differentiate=learned, target="interpret", **options)


@pytest.mark.parametrize("name", mostly(("t5_causal", "twice", "of_each_head", "capped"), list(SCORES)))
def test_every_index(name: str) -> None:
    check(name, batches=2 if name == "of_a_batch" else 1)


@pytest.mark.parametrize("mask", mostly(("none", "documents"), ["none", "window", "documents", "future"]))
def test_masks(mask: str) -> None:
    check("t5", mask)


def test_listed_tiles_are_in_no_order() -> None:
    """Level ones among them are no run, and are computed as others are."""
    runs = torch.arange(260)[None].expand(2, -1) // torch.tensor([[64], [40]])
    check("t5", "parts", (230, 230), batches=2, more={"docs": runs})


@pytest.mark.parametrize("far", [1000.0, -1e9])
def test_numbers_far_from_0_are_computed_with_care(far: float) -> None:
    """In one step weights would be off by what 32 bits round there."""
    check("t5_causal", far=far)


@pytest.mark.parametrize(("q_len", "kv_len"), mostly(((40, 140),), [(40, 140), (140, 40), (1, 130), (33, 33)]))
def test_other_lengths(q_len: int, kv_len: int) -> None:
    check("t5", "none", (q_len, kv_len))


@pytest.mark.parametrize("offset", mostly((30,), [30, -45]))
def test_offsets(offset: int) -> None:
    check("t5", "none", (70, 90), q_offset=offset)


PADDED = {"q_lens": torch.tensor([100, 37]), "kv_lens": torch.tensor([100, 120])}
PACKED = {n: torch.tensor(x, dtype=torch.int32) for n, x in (
    ("cu_seqlens_q", [0, 90, 90, 130]), ("cu_seqlens_kv", [0, 95, 97, 130])
)}  # fmt: skip


@pytest.mark.parametrize("name", mostly(("t5",), ["t5", "of_a_batch", "looked_up"]))
def test_padded_sequences(name: str) -> None:
    check(name, batches=2, more=PADDED)


@pytest.mark.parametrize("name", mostly(("t5",), ["t5", "of_a_batch"]))
def test_packed_sequences(name: str) -> None:
    """Entries that differ by sequence have no ends that are those of all."""
    check(name, more=PACKED)


def listed(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What kernels list of the gradient of one table, sums and entries; 0 where none were written."""
    seen: list[tuple[Tensor, Tensor]] = []
    before = Device.sum_listed

    def add(own: Any, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        of_groups = (ranges[:, 1] > 0).repeat_interleave(group)
        written = torch.cat([of_groups, of_groups.new_ones(len(sums) - len(of_groups))])
        seen.append((torch.where(written, sums, 0.0), torch.where(written, entries, 0)))
        before(own, sums, entries, ranges, group, shares)

    monkeypatch.setattr(Device, "sum_listed", add)
    call().sum().backward()
    ((sums, entries),) = seen
    return sums, entries


def test_each_pair_is_summed_once_and_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_dquery sums pairs at both ends of T5's buckets, and flash_ddiagonals lists 0 for what it does not visit."""
    attention = weft.Attention(SCORES["t5_causal"], MASKS["causal"], name="t5")
    operands = {n: t.requires_grad_() for n, t in operands_of(attention).items()}
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(1, 1, 200, 16, generator=generator).requires_grad_() for _ in range(3)]
    sums, entries = listed(monkeypatch, lambda: attention(*tensors, **operands, target="interpret").cos())
    rows, tiles = 200, 7  # tiles of 32
    of_diagonals, of_levels = DIAGONAL_PARTS * (2 * tiles - 1) * 2 * 32, 2 * tiles
    assert len(sums) == of_diagonals + of_levels
    parts, levels = sums[:of_diagonals].view(-1, DIAGONAL_PARTS, 2, 32), sums[of_diagonals:].view(tiles, 2)
    assert parts[0].any(-1).any(-1).all()  # of seven tiles each part has one or two
    own = parts.sum(1)
    bucket = torch.tensor([int(weft_bucket(d)) for d in range(rows)])
    assert bucket[-1] == 7 and (distant_from := int((bucket != 7).sum())) < 32
    # diagonals of tiles from the second on see no distance below distant_from, and those above the first see nothing
    assert own[0].abs().sum() > 0 and own[1].abs().sum() > 0 and not own[2:].any()
    # at the one end are distances from the last bucket on; at the other, of those up to 0, one is seen
    assert levels[1:, 0].all() and levels[:, 1].all()
    assert (entries[of_diagonals:].view(tiles, 2) == torch.tensor([7, 0])).all()
    assert not own[0, 0, 0] and own[0, 1, -(distant_from - 1) :].all()
    assert distant_from > 0


@pytest.mark.parametrize("mask", mostly(["none"], ["causal", "none"]))
def test_programs_go_through_the_diagonals_of_a_head(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, each diagonal is summed as it was."""
    attention = weft.Attention(SCORES["t5"], MASKS[mask], name=f"t5_{mask}")
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 170), (1, 200), (1, 200))
    tensors = [torch.randn(1, heads, rows, 16, generator=generator).requires_grad_() for heads, rows in shapes]

    def gradient(programs: int) -> Tensor:
        monkeypatch.setattr(launched_sums, "DIAGONAL_PROGRAMS", programs)
        variant.forget()
        operands = {n: t.clone().requires_grad_() for n, t in operands_of(attention).items()}
        attention(*tensors, **operands, target="interpret").cos().sum().backward()
        assert operands["tables"].grad is not None
        return operands["tables"].grad

    few, many = gradient(1), gradient(1024)
    assert few.abs().sum() > 0 and torch.equal(few, many)


def weft_bucket(distance: int) -> int:
    """T5's bucket of a distance to the past, of 8 and up to a distance of 20, as the language computes it."""
    index = weft.bucket(kv_pos - q_pos, buckets=8, max_distance=20, bidirectional=False)
    found = weft.Attention(score + weft.tensor("table", 1)[index], True)
    position = torch.zeros(1, 1, 1, 1)
    table = torch.arange(8.0)
    out = found(position, position, position, table=table, q_offset=distance, return_lse=True, target="cpu")[1]
    return int(out.round())


def test_what_never_levels_off_has_kernels_as_before() -> None:
    """T5's table has ends, one that is read at each distance has none, and that is known ahead."""
    sizes = weft.shape(heads=2, kv_heads=2, q_len=256, head_dim=64, dtype="bf16")
    given = dict.fromkeys(("t5", "distance"), "")
    for name, of in (("t5", SCORES["t5"]), ("distance", score + 1.5 * tables[head, 2 * weft.abs(AWAY)])):
        given[name] = str(weft.Attention(of, masks.causal, name=name).explain(sizes, device="h200", target="triton"))
    assert "from where on nothing changes with distance" in given["t5"]
    assert "flash_ddiagonals" in given["distance"] and "nothing changes" not in given["distance"]


@pytest.mark.parametrize("name", mostly(["capped"], ["t5_causal", "capped"]))
def test_gradients_repeat(name: str) -> None:
    attention = weft.Attention(SCORES[name], MASKS["causal"], name=name)
    found = []
    for _ in range(2):
        operands = {n: t.requires_grad_() for n, t in operands_of(attention).items()}
        generator = torch.Generator().manual_seed(2)
        tensors = [torch.randn(1, 2, 100, 16, generator=generator) for _ in range(3)]
        attention(tensors[0].requires_grad_(), *tensors[1:], **operands, target="interpret").cos().sum().backward()
        found.append(operands["tables"].grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_listed_sums_are_added_up_by_entry(dtype: torch.dtype) -> None:
    """Entries with many sums, with none, and the first and the last of them."""
    torch.manual_seed(3)
    entries, sums = torch.randint(2, 38, (5000,), dtype=dtype), torch.randn(5000)
    entries[entries == 7] = 8
    wanted = torch.zeros(40, dtype=torch.float64).scatter_add_(0, entries.long(), sums.double())
    found = sums_by_entry(entries, sums, 40)
    assert found[[0, 7, 39]].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-5)
