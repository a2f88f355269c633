"""What plans know of backwards with gradients of operands: tiles of level pairs, and what torch adds up afterwards."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score, scores
from weft.compiler.planning.cost import Times, of_sequences
from weft.compiler.planning.gradient_sums import DIAGONAL_PARTS
from weft.compiler.planning.plan import KernelPlan, Plan
from weft.compiler.planning.sum_times import DIAGONAL, LAST, LISTED, PUT

AWAY = q_pos - kv_pos
table, lookup = weft.tensor("table", 2), weft.tensor("lookup", 1, int)
reach = weft.scalar("reach", int)
T5 = scores.t5_bias(table, 8, 100)(score)
# the index that a pair reads, of its distance
INDICES = {
    "t5": (T5, None),
    "clamped": (score + 0.5 * table[head, weft.minimum(weft.maximum(AWAY, -70), 90) + 70],
                lambda d, reach: d.clamp(-70, 90)),
    "reaching": (score + 0.5 * table[head, weft.minimum(weft.maximum(AWAY, 0), reach)],
                 lambda d, reach: d.clamp(0, reach)),
}  # fmt: skip
MASKS = {"causal": masks.causal, "none": True, "window": masks.causal & (AWAY < 400)}
SEEN = {
    "causal": lambda d: d >= 0, "none": lambda d: torch.ones_like(d, dtype=torch.bool),
    "window": lambda d: (d >= 0) & (d < 400),
}  # fmt: skip


def bucket_of(distance: torch.Tensor) -> torch.Tensor:
    """T5's, of 8 in both directions and up to 100: a step function of which any monotone copy will do."""
    index = weft.bucket(kv_pos - q_pos, buckets=8, max_distance=100, bidirectional=True)
    found = weft.Attention(score * 0.0 + weft.tensor("row", 1)[index], True).reference
    ones = torch.zeros(len(distance), 1, 1, 1, dtype=torch.float64)  # a query and a key of each distance
    row = torch.arange(8.0, dtype=torch.float64)
    return found(ones, ones, ones, row=row, q_offset=distance.int(), return_lse=True)[1].flatten()


def planned(name: str, mask: str, q_len: int, kv_len: int, target: str = "triton", **options) -> Plan:
    attention = weft.Attention(INDICES[name][0], MASKS[mask], name=f"{name}_{mask}")
    given = {"reach": 150} if name == "reaching" else {}
    shape = weft.shape(batch=2, heads=3, q_len=q_len, kv_len=kv_len, head_dim=64, dtype="bf16")
    return attention.plan(shape, device="h200", target=target, **given, **options)


def level_tiles(k: KernelPlan, name: str, mask: str, q_len: int, kv_len: int) -> tuple[int, int, int]:
    """(edge, full, level) tiles of one head by looking at every pair; level ones are full."""
    offset = kv_len - q_len
    distances = torch.arange(offset - kv_len + 1, offset + q_len)
    index = INDICES[name][1]
    values = bucket_of(distances) if index is None else index(distances, 150)
    distant_from = int(distances[(values != values[-1]).nonzero()[-1]]) + 1
    distant_to = int(distances[(values != values[0]).nonzero()[0]]) - 1
    edge = full = level = 0
    for first in range(0, q_len, k.form.block_q):
        for begin in range(0, kv_len, k.form.block_kv):
            rows = torch.arange(first, first + k.form.block_q)[:, None]
            keys = torch.arange(begin, begin + k.form.block_kv)[None]
            d = rows + offset - keys
            there = (rows < q_len) & (keys < kv_len)
            # a kernel that owns queries looks at the ends of keys, and the other way round
            own = keys < kv_len if k.code.kernel.axis == "kv" else rows < q_len
            is_full = bool(SEEN[mask](d)[there].all()) and bool(own.all())
            is_level = bool((d >= distant_from).all() or (d <= distant_to).all())
            full += is_full
            edge += bool((SEEN[mask](d) & there).any()) and not is_full
            level += is_full and is_level
    return edge, full, level


@pytest.mark.sampled(2)  # each index under each mask once, of sizes in turn
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1024, 1024), (640, 1152)])
def test_level_tiles_are_those_of_every_pair(name: str, mask: str, q_len: int, kv_len: int) -> None:
    plan = planned(name, mask, q_len, kv_len)
    for k in plan.kernels:
        if k.name not in ("flash_dquery", "flash_dkey_dvalue"):
            continue
        edge, full, level = (6 * number for number in level_tiles(k, name, mask, q_len, kv_len))
        assert (k.tiles.edge, k.tiles.full, k.tiles.level_full) == (edge, full, level), k.name
        assert k.sizes.u == k.tiles.visited - level
    assert any(k.tiles.level_full for k in plan.kernels)


def test_diagonals_of_level_pairs_are_not_visited() -> None:
    plan = planned("reaching", "causal", 1024, 1024)
    diagonals = next(k for k in plan.kernels if k.name == "flash_ddiagonals")
    block = diagonals.form.block_q
    near = [d for d in range(1024 // block) if d * block - (block - 1) < 150]  # of tiles, from the main one on
    assert diagonals.tiles.visited == 6 * sum(1024 // block - d for d in near)
    assert diagonals.work is not None and diagonals.work.pairs.longest == 1024 // block / DIAGONAL_PARTS


def test_what_is_not_known_is_taken_to_be_read_by_every_pair() -> None:
    """An index that reads a tensor is known where the tensor is."""
    reading = score + 0.5 * table[head, weft.minimum(lookup[weft.minimum(weft.maximum(AWAY, 0), 60)], 9)]
    attention = weft.Attention(reading, masks.causal, name="looked_up")
    shape = weft.shape(heads=2, q_len=1024, head_dim=64, dtype="bf16")
    unknown = attention.plan(shape, device="h200", target="triton")
    known = attention.plan(shape, device="h200", target="triton", lookup=torch.arange(61).clamp(max=9))
    assert all(k.tiles.level_full == 0 for k in unknown.kernels)
    assert any(k.tiles.level_full for k in known.kernels) and known.seconds("backward") < unknown.seconds("backward")


def test_on_hopper_the_pass_that_owns_queries_reads_the_table_for_every_tile() -> None:
    kernels = {k.name: k for k in planned("t5", "causal", 1024, 1024, "hopper", deterministic=True).kernels}
    formulas = {name: k.work.other.formula for name, k in kernels.items() if k.work is not None}
    assert "u" not in formulas["flash_dquery"] and kernels["flash_dkey_dvalue"].tiles.level_full


def test_explain_says_which_tiles_are_level() -> None:
    attention = weft.Attention(INDICES["clamped"][0], masks.causal, name="clamped")
    shape = weft.shape(heads=2, q_len=4096, head_dim=64, dtype="bf16")
    text = " ".join(attention.explain(shape, device="h200", target="triton").split())
    plan = attention.plan(shape, device="h200", target="triton")
    k = next(k for k in plan.kernels if k.name == "flash_dkey_dvalue")
    assert f"visited n = {k.tiles.visited:,}, of which level {k.tiles.level_full:,}, not u = {k.sizes.u:,}" in text
    assert "flash_ddiagonals does not visit them" in text
    causal = weft.Attention(mask=masks.causal, name="causal").explain(shape, device="h200", target="triton")
    assert "level" not in causal and "adding up" not in causal


# -- what torch adds up ------------------------------------------------------------------------------------------------
SUMMED = [
    (score + table[head, kv_pos], 0, 0),
    (score * table[head, q_pos // 2], 2 * 3 * 500, 0),
    (T5, 0, 2 * DIAGONAL_PARTS * 2 * 3 * 1200),
    (score + weft.tensor("bias", 4)[weft.batch, head, q_pos, kv_pos], 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("scored", "rows", "along"), SUMMED, ids=["key", "query", "distance", "stored"])
def test_sums_of_gradients_of_operands(scored, rows: int, along: int) -> None:
    shape = weft.shape(batch=2, heads=3, q_len=500, kv_len=700, head_dim=64, dtype="bf16")
    attention = weft.Attention(scored, name="summed")
    plan = attention.plan(shape, device="h200", target="triton")
    assert plan.sums is not None
    assert (plan.sums.rows.value, plan.sums.along.value) == (rows, along)
    listed = plan.sums.listed.value
    assert plan.sums.seconds == pytest.approx(LAST + PUT * rows + DIAGONAL * along + LISTED * listed)
    kernels = sum(k.seconds for k in plan.kernels if k.direction == "backward")
    assert plan.seconds("backward") == pytest.approx(kernels + plan.sums.seconds)
    text = " ".join(attention.explain(shape, device="h200", target="triton").split())
    said = f"adding up gradients of operands takes {plan.sums.seconds * 1e3:.4f} ms: 0.005 of the last sums"
    assert said in text


def test_gradients_of_heads_are_few() -> None:
    slopes = weft.tensor("slopes", 1)
    alibi = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
    plan = alibi.plan(weft.shape(heads=4, q_len=1024, head_dim=64, dtype="bf16"), device="h200")
    assert plan.sums is None
    assert plan.seconds("backward") == sum(k.seconds for k in plan.kernels if k.direction == "backward")


# -- packed sequences --------------------------------------------------------------------------------------------------
def test_keys_of_a_packed_sequence_are_its_own() -> None:
    """64 sequences whose keys an L2 holds are as a batch of them, and not as one that it would not hold."""
    causal = weft.Attention(mask=masks.causal, name="causal")
    starts = torch.arange(65, dtype=torch.int32) * 8192
    shape = weft.shape(heads=8, q_len=64 * 8192, head_dim=128, dtype="bf16")
    packed = causal.plan(shape, device="h200", target="hopper", cu_seqlens_q=starts)
    batch = weft.shape(batch=64, heads=8, q_len=8192, head_dim=128, dtype="bf16")
    dense = causal.plan(batch, device="h200", target="hopper")
    shares = [next(k.sizes.k for k in plan.kernels if k.name == "flash_forward") for plan in (packed, dense)]
    assert shares == [0.0, 0.0]
    sizes = next(k.sizes for k in packed.kernels if k.name == "flash_forward")
    assert of_sequences(sizes, 64)[:7] == next(k.sizes for k in dense.kernels if k.name == "flash_forward")[:7]
    assert packed.seconds("forward") == pytest.approx(dense.seconds("forward"), rel=0.05)


# -- what measures tiles -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("length", "steps"), [(1024, 1), (4096, 1), (8192, 2), (12000, 3), (16384, 4)])
def test_programs_that_measure_tiles_take_a_step_for_every_4096_positions(length: int, steps: int) -> None:
    doc = weft.tensor("doc", 1, int)
    documents = weft.Attention(mask=masks.causal & (doc[kv_pos] == doc[q_pos]), name="documents")
    plan = documents.plan(weft.shape(heads=4, q_len=length, head_dim=128, dtype="bf16"), device="h200", target="hopper")
    spans = next(k for k in plan.kernels if k.name == "kv_spans")
    assert isinstance(spans.times, Times)
    assert spans.times.latency == pytest.approx(3e-6 + 2.3e-6 + 4e-6 * steps)
    assert spans.seconds > spans.times.latency
