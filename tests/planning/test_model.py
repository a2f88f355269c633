"""The model of a GPU: what is counted of a pair, how that becomes a time, and that time beside measured ones."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import pytest
import torch

import weft
from weft import batch, head, kv_pos, q_pos, score
from weft.codegen.targets.triton.kernels.measures import Visitor, spans_kernel
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import Traits, Work
from weft.compiler.planning.paces import PACES, UNFITTED, Pace, instructions_of, longest_of, pace_of
from weft.compiler.planning.plan import KernelPlan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import model

from weft.codegen.targets.triton.target import KERNELS

FLASH = KERNELS["flash"]

CAUSAL = kv_pos <= q_pos
BIAS, TABLE, DOC = weft.tensor("bias", 4), weft.tensor("table", 2), weft.tensor("doc", 1, int)
LONG = weft.shape(batch=2, heads=16, q_len=8192, head_dim=128)


# -- what is counted ---------------------------------------------------------------------------------------------------
COUNTED = [
    (score, CAUSAL, Work(), Work(), Work(0, 1)),
    (2.0 * score, True, Work(), Work(), Work()),
    (20.0 * weft.tanh(score / 20.0), CAUSAL, Work(1, 3), Work(1, 3), Work(0, 1)),
    (score + head * (kv_pos - q_pos), CAUSAL, Work(0, 4), Work(), Work(0, 1)),
    (score + BIAS[batch, head, q_pos, kv_pos], True, Work(0, 4, 1, 0), Work(), Work()),
    (score + TABLE[head, weft.maximum(q_pos - kv_pos, 0)], True, Work(0, 6, 0, 1), Work(), Work()),
    (score, CAUSAL & (DOC[kv_pos] == DOC[q_pos]), Work(), Work(), Work(0, 3, key_reads=1, query_reads=1)),
    (score + TABLE[head, kv_pos], True, Work(0, 2, key_reads=1), Work(), Work()),
    (score * TABLE[head, q_pos], True, Work(0, 2, query_reads=1), Work(), Work()),
]  # fmt: skip


@pytest.mark.parametrize(("scored", "mask", "of_score", "of_slope", "of_mask"), COUNTED, ids=lambda x: str(x)[:30])
def test_instructions_of_a_pair(scored, mask, of_score: Work, of_slope: Work, of_mask: Work) -> None:
    traits = facts_of(weft.Attention(scored, mask)).traits
    assert (traits.score_work, traits.slope_work, traits.mask_work) == (of_score, of_slope, of_mask)


def test_a_normalizer_has_its_own_instructions() -> None:
    """relu has no exponential, sigmoid one and a reciprocal."""
    forward = FLASH[0]
    counts = {
        name: instructions_of(forward, facts_of(weft.Attention(mask=CAUSAL, normalizer=name)).traits)
        for name in ("softmax", "sigmoid", "relu")
    }
    assert {name: count.special for name, count in counts.items()} == {"softmax": 1, "sigmoid": 2, "relu": 0}
    relu = weft.Attention(mask=CAUSAL, normalizer="relu", name="relu").plan(LONG, device="h200", target="triton")
    assert all(k.exps.value == 0 and k.times.exp == 0 for k in relu.kernels)  # type: ignore[union-attr]
    text = weft.Attention(mask=CAUSAL, normalizer="relu", name="relu").explain(LONG, device="h200", target="triton")
    assert "\n  exps " not in text


def test_dropout_is_arithmetic() -> None:
    plain, dropping = (weft.Attention(mask=CAUSAL, dropout=p, name="dropped") for p in (0.0, 0.1))
    for kernel, more in ((FLASH[0], 8), (FLASH[2], 8), (FLASH[3], 27)):
        one, other = (instructions_of(kernel, facts_of(a).traits) for a in (plain, dropping))
        assert other == replace(one, other=one.other + more)
    assert main_kernel(dropping).seconds > 1.1 * main_kernel(plain).seconds


def test_kernels_that_read_no_pairs_have_none() -> None:
    one = instructions_of(FLASH[1], Traits(score_work=Work(1, 1, 1, 1)))
    assert all(getattr(one, f.name) == 0 for f in fields(one))


# -- how it becomes a time ---------------------------------------------------------------------------------------------
def main_kernel(attention: weft.Attention, **options) -> KernelPlan:
    return attention.plan(LONG, device="h200", target="triton", **options).kernels[0]


def test_a_score_costs_what_it_computes() -> None:
    causal, softcap = weft.Attention(mask=CAUSAL), weft.Attention(20.0 * weft.tanh(score / 20.0), CAUSAL)
    biased = weft.Attention(score + BIAS[batch, head, q_pos, kv_pos], CAUSAL)
    times = [main_kernel(a).seconds for a in (causal, softcap, biased)]
    assert times[0] < times[1] < times[2]


def test_the_longest_program_is_the_tail_of_a_small_call() -> None:
    causal = weft.Attention(mask=CAUSAL)
    small = weft.shape(heads=1, q_len=4096, head_dim=128)
    for sizes, least in ((small, 4.0), (LONG, 1.0)):
        kernel = causal.plan(sizes, device="h200", target="triton").kernels[0]
        assert kernel.work is not None
        found = kernel.work.pairs
        assert found.tail >= least and found.tail == max(1.0, found.longest * 132 / kernel.tiles.visited)
        assert found.longest == longest_of(FLASH[0], kernel.sizes, True)
    assert kernel.work.pairs.tail == 1.0


def test_what_bounds_is_the_largest_part_and_its_share() -> None:
    times = main_kernel(weft.Attention(mask=CAUSAL)).times
    assert times.bound == "matrix" and times.share == times.parts["matrix"] / times.seconds
    memory = replace(times, memory=2 * times.computing)  # type: ignore[union-attr]
    assert memory.bound == "memory" and memory.seconds == memory.latency + memory.memory
    waiting = replace(times, latency=10 * times.seconds)  # type: ignore[union-attr]
    assert waiting.bound == "latency" and 0.9 < waiting.share < 1


def test_paces() -> None:
    assert all(pace.matrix >= model.LEAST["matrix"] and pace != UNFITTED for pace in PACES.values())
    assert pace_of(KERNELS["streaming"][0], "triton streaming_forward") == UNFITTED == Pace()
    measuring = facts_of(weft.Attention(mask=DOC[q_pos] == DOC[kv_pos])).traits.measured
    assert measuring is not None
    spans = spans_kernel(Visitor("flash_forward", "kv", "forward", "forward"), measuring)
    assert spans.name == "kv_spans" and pace_of(spans, "triton kv_spans").start > 0


# -- against what was measured -----------------------------------------------------------------------------------------
MEASURED = model.measured(model.stored())
SHOWN = [
    "hopper forward  D128 H16 S8192 causal", "hopper forward  D64 H32 S2048 causal",
    "hopper backward D128 H16 S8192 causal",
    "triton backward D256 H8 S8192 causal", "triton forward  D80 S4096 causal",
    "triton forward  D128 H16 S8192 dropout 10", "triton forward  D128 H16 S8192 sigmoid",
]  # fmt: skip


def test_all_stored_rows_are_read() -> None:
    assert len(MEASURED) >= 138 and len({str(m) for m in MEASURED}) == len(MEASURED)
    times = {str(m): m.seconds for m in MEASURED}
    assert times["hopper forward  D128 H16 S8192 causal"] == pytest.approx(767e-6, rel=0.01)
    assert set(SHOWN) <= set(times)


@pytest.mark.parametrize("name", SHOWN)
def test_a_predicted_time_is_near_the_measured_one(name: str) -> None:
    each = next(m for m in MEASURED if str(m) == name)
    assert model.error(model.plan_of(each).seconds(each.direction), each.seconds) < 0.25


@pytest.mark.thorough
def test_all_predicted_times_are_near_the_measured_ones() -> None:
    errors = {str(m): model.error(model.plan_of(m).seconds(m.direction), m.seconds) for m in MEASURED}
    assert median(errors.values()) < 0.1
    assert {name: error for name, error in errors.items() if error > 0.25} == {}


def test_a_fit_finds_paces_that_give_the_times_that_were_measured() -> None:
    made = {"a": Pace(matrix=1.1, exp=0.5, tile=0.2), "b": Pace(matrix=0.9, exp=0.0, program=2.0)}
    examples = []
    for n in range(1, 9):
        parts = {
            family: {"matrix": 1e-3 * n, "exp": 1e-4 * n**2, "tile": 1e-4 * (9 - n), "program": 1e-5 * n**3}
            for family in made
        }
        used = dict(list(parts.items())[: 1 + n % 2])
        seconds = sum(
            getattr(made[family], part) * value for family, found in used.items() for part, value in found.items()
        )
        examples.append(model.Example(f"{n}", seconds, used))
    found = model.fitted(examples)
    assert all(pace.matrix >= model.LEAST["matrix"] for pace in found.values())
    for example in examples:
        again = sum(
            getattr(found[family], part) * x for family, parts in example.parts.items() for part, x in parts.items()
        )
        assert again == pytest.approx(example.seconds, rel=0.02)


@pytest.mark.parametrize(("tokens", "measured"), [(1 << 16, 16.9), (1 << 18, 19.5), (1 << 20, 33.2)])
def test_measuring_tiles_of_long_axes_takes_what_was_measured(tokens: int, measured: float) -> None:
    """Of documents of 1024 tokens, D128 H8: the kernels of a forward that measure, microseconds."""
    documents = weft.Attention(mask=CAUSAL & (DOC[kv_pos] == DOC[q_pos]), name="documents")
    plan = documents.plan(weft.shape(heads=8, q_len=tokens, head_dim=128, dtype="bf16"), device="h200", target="hopper")
    times = {k.code.name: k.times.seconds * 1e6 for k in plan.kernels if k.code.kernel.direction == "forward"}
    del times["flash_forward"]
    assert times.keys() == {"kv_ends", "kv_long_spans"}
    assert sum(times.values()) == pytest.approx(measured, rel=0.1)  # 256k before there were bits


def test_the_bytes_of_a_bias_that_is_brought_are_counted() -> None:
    biased = weft.Attention(score + BIAS[batch, head, q_pos, kv_pos], CAUSAL, name="biased")
    sizes = weft.shape(heads=4, q_len=2048, head_dim=128, dtype="bf16")
    given = {"device": "h200", "target": "hopper"}
    bias = torch.empty(1, 4, 2048, 2048, dtype=torch.bfloat16, device="meta")
    for direction, name in (("forward", "flash_forward"), ("backward", "flash_backward")):
        with_boxes, without = (
            next(k for k in p.kernels if k.code.name == name and k.code.kernel.direction == direction)
            for p in (biased.plan(sizes, bias=bias, **given), weft.Attention(mask=CAUSAL).plan(sizes, **given))
        )
        pairs = with_boxes.tiles.visited * with_boxes.code.form.block_q * with_boxes.code.form.block_kv
        rows = with_boxes.code.kernel.read(with_boxes.sizes)
        assert with_boxes.hbm_read.value == rows + 2 * pairs
        assert "2*bkv*bq*n" in with_boxes.hbm_read.formula and "bkv*bq*n" not in without.hbm_read.formula
