"""Plans: every kernel's stages and figures as data."""

from __future__ import annotations

import pytest

from weft.compiler.analysis.facts import facts_of
from weft.compiler.analysis.records import Measuring, TileCounts, Traits
from weft.compiler.planning.cost import kernels_of, measures_tiles, predict
from weft.compiler.planning.hardware import CPU, H200, KNOWN
from weft.compiler.planning.plan import counter, make_plan
from weft.compiler.planning.records import Plan, Schedule, Shape
from weft.compiler.planning.schedule import ALGORITHMS, TARGETS, choose
from weft.compiler.planning.segments import for_latent
from weft.ir.attention import Attention
from weft.ir.errors import WeftError
from weft.ir.expr import scalar, symbol, tensor

Q_POS, KV_POS, SCORE = symbol("q_pos"), symbol("kv_pos"), symbol("score")
CAUSAL = Attention(mask=KV_POS <= Q_POS, name="causal")
GPT2 = Shape(64, 16, 16, 1024, 1024, 64, 64, "fp16")


def causal_plan(shape: Shape, algorithm: str = "flash"):
    facts = facts_of(CAUSAL)
    count = counter(facts.kv_tiles, facts.q_tiles, shape)
    schedule = choose(shape, H200, "triton", algorithm)
    return make_plan("causal", shape, H200, schedule, traits=facts.traits, count=count)


@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_for_any_machine_without_a_gpu(hardware, algorithm) -> None:
    target = "cpu" if hardware.kind == "cpu" else "triton"
    plan = make_plan("dense", GPT2, hardware, choose(GPT2, hardware, target, algorithm))
    assert {k.direction for k in plan.kernels} == {"forward", "backward"}
    for kernel in plan.kernels:
        kinds = [s.kind for s in kernel.stages]
        assert "load" in kinds and "compute" in kinds and kinds[-1] == "store"
        assert kernel.seconds > 0 and kernel.programs.value >= 1
    assert plan.hbm_bytes("forward") > 0 and plan.seconds("backward") > 0


def test_counts_are_those_of_all_heads_and_batches() -> None:
    shape = Shape(2, 4, 4, 1024, 1024, 64, 64, "fp16")
    forward = causal_plan(shape).kernels[0]
    q_tiles, kv_tiles = 1024 // forward.tiling.block_q, 1024 // forward.tiling.block_kv
    edge = q_tiles * (forward.tiling.block_q // forward.tiling.block_kv)
    full = (q_tiles * kv_tiles - edge) // 2
    assert forward.tiles == TileCounts(8 * full, 8 * edge, 8 * full)


def test_causal_attention_costs_about_half_the_work_and_the_same_bytes() -> None:
    long = Shape(4, 16, 16, 8192, 8192, 64, 64, "fp16")
    causal = causal_plan(long).kernels[0]
    dense = make_plan("dense", long, H200, choose(long, H200, "triton")).kernels[0]
    assert 0.5 < causal.flops.value / dense.flops.value < 0.52
    assert causal.hbm_read.value == dense.hbm_read.value


def test_the_standard_algorithm_computes_what_the_mask_hides() -> None:
    scores = causal_plan(GPT2, "standard").kernels[0]
    assert scores.tiles.empty == 0


def test_a_missing_scalar_is_named() -> None:
    local = Attention(mask=Q_POS - KV_POS < scalar("window", int), name="local")
    facts = facts_of(local)
    count = counter(facts.kv_tiles, facts.q_tiles, GPT2)
    with pytest.raises(WeftError, match="window"):
        make_plan("local", GPT2, H200, choose(GPT2, H200, "triton"), count=count)


def test_tiles_that_differ_by_head_are_averaged() -> None:
    by_head = Attention(mask=Q_POS - KV_POS < 64 * (symbol("head") + 1), name="by_head")
    facts = facts_of(by_head)
    shape = Shape(1, 8, 8, 1024, 1024, 64, 64)
    averaged = counter(facts.kv_tiles, facts.q_tiles, shape, by_head=True)("kv", 64, 64)
    first_only = counter(facts.kv_tiles, facts.q_tiles, shape)("kv", 64, 64)
    assert facts.bounds_differ_by_head
    assert averaged.visited > first_only.visited
    assert averaged.visited + averaged.empty == 8 * 16 * 16


def test_stages_name_tiles_as_they_are() -> None:
    plan = make_plan(
        "dense", Shape(1, 2, 2, 64, 64, 80, 80), H200, choose(Shape(1, 2, 2, 64, 64, 80, 80), H200, "triton")
    )
    forward = plan.kernels[0]
    loads = [s.what for s in forward.stages if s.kind == "load"]
    tiling = forward.tiling
    assert loads == [
        f"{n} tile [{rows}, 64 + 16]"
        for n, rows in (("Q", tiling.block_q), ("K", tiling.block_kv), ("V", tiling.block_kv))
    ]


def test_absorbed_latent_attention_loads_its_tile_once() -> None:
    parts = for_latent("absorbed", 512, 64, 128, 128)
    shape = Shape(1, 16, 1, 64, 4096, 576, 512)
    plan = make_plan("mla", shape, H200, choose(shape, H200, "triton", segments=parts), segments=parts)
    loads = [s.what for s in plan.kernels[0].stages if s.kind == "load"]
    assert plan.value_is_key and len(loads) == 2 and loads[1].endswith("512 + 64], used as V too")


def test_a_score_that_is_not_linear_shows_its_derivative() -> None:
    plan = make_plan("capped", GPT2, H200, choose(GPT2, H200, "triton"), traits=Traits(linear=False))
    texts = " ".join(s.what for k in plan.kernels for s in k.stages)
    assert "score(Q K^T)" in texts and "dS = P * (dP - delta) * score'" in texts


# -- kernels that measure tiles --------------------------------------------------------------------------------------
IDS = tensor("ids", 2, int)
BATCH, HEAD = symbol("batch"), symbol("head")
DOCUMENTS = Attention(mask=(KV_POS <= Q_POS) & (IDS[BATCH, Q_POS] == IDS[BATCH, KV_POS]), name="documents")
BY_HEAD = Attention(mask=(IDS[BATCH, KV_POS] <= HEAD) & (KV_POS <= Q_POS), name="by_head")
LONG = Shape(4, 16, 8, 8192, 8192, 128, 128)


def measured_plan(attention: Attention, target: str = "triton", algorithm: str = "flash") -> Plan:
    traits = facts_of(attention).traits
    hardware = CPU if target in ("cpu", "interpret") else H200
    schedule = choose(LONG, hardware, target, algorithm, traits=traits)
    return make_plan(str(attention.name), LONG, hardware, schedule, traits=traits)


@pytest.mark.parametrize("target", ["triton", "hopper", "interpret"])
def test_flash_kernels_of_gpu_targets_follow_those_that_measure_their_tiles(target) -> None:
    kernels = measured_plan(DOCUMENTS, target).kernels
    assert [(k.direction, k.name) for k in kernels] == [
        ("forward", "kv_spans"),
        ("forward", "flash_forward"),
        ("backward", "row_statistics"),
        ("backward", "kv_spans"),
        ("backward", "q_spans"),
        ("backward", "flash_dquery"),
        ("backward", "flash_dkey_dvalue"),
    ]


@pytest.mark.parametrize(
    ("attention", "target", "algorithm"),
    [
        (DOCUMENTS, "cpu", "flash"),
        (DOCUMENTS, "triton", "streaming"),
        (DOCUMENTS, "triton", "standard"),
        (CAUSAL, "triton", "flash"),
        (Attention(mask=(Q_POS * KV_POS) % 7 < 3, name="odd"), "triton", "flash"),
    ],
)
def test_other_plans_measure_nothing(attention, target, algorithm) -> None:
    assert not {"kv_spans", "q_spans"} & {k.name for k in measured_plan(attention, target, algorithm).kernels}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("attention", [DOCUMENTS, CAUSAL])
def test_plans_and_code_agree_on_what_is_measured(attention, algorithm, target) -> None:
    facts, tiling = facts_of(attention), choose(LONG, H200, "triton").forward
    schedule = Schedule(algorithm, target, tiling, tiling, tiling)
    names = [kernel.name for kernel in kernels_of(schedule, facts.traits)]
    assert ("kv_spans" in names) == measures_tiles(schedule, facts.traits)


def test_what_measuring_costs() -> None:
    plan = measured_plan(DOCUMENTS)
    forward, _, _, for_dquery, for_dkey, dquery, dkey = plan.kernels
    assert (forward.programs.formula, forward.programs.value) == ("B*nq", 4 * 8192 // forward.tiling.block_q)
    assert (for_dkey.programs.formula, for_dkey.programs.value) == ("B*nkv", 4 * 8192 // dkey.tiling.block_kv)
    assert (for_dquery.tiling.block_q, for_dquery.tiling.block_kv) == (dquery.tiling.block_q, dquery.tiling.block_kv)
    for kernel in (forward, for_dquery, for_dkey):
        assert (kernel.hbm_read.formula, kernel.hbm_read.value) == ("8*B*(L + T)", 8 * 4 * 2 * 8192)
        assert kernel.hbm_written.value == 16 * kernel.programs.value
        assert kernel.tiles == TileCounts(0, 0, 0)
        assert (kernel.flops.value, kernel.sram_bytes.value) == (0, 0)
        assert H200.launch_seconds <= kernel.seconds < 4 * H200.launch_seconds
        assert [s.kind for s in kernel.stages] == ["load", "load", "compute", "store"]


def test_masks_that_differ_by_head_are_measured_for_each() -> None:
    forward, _, _, _, for_dkey, _, dkey = measured_plan(BY_HEAD).kernels
    assert (forward.programs.formula, forward.programs.value) == ("B*Hq*nq", 4 * 16 * 8192 // forward.tiling.block_q)
    assert (for_dkey.programs.formula, for_dkey.programs.value) == ("B*Hq*nkv", 4 * 16 * 8192 // dkey.tiling.block_kv)
    assert forward.hbm_read.formula == "8*B*T"  # nothing is read at a query's position


def test_the_hopper_forward_has_tiles_measured_for_each_consumer() -> None:
    kv_spans, forward, _, for_dquery, *_ = measured_plan(DOCUMENTS, "hopper").kernels
    assert (forward.tiling.block_q, kv_spans.tiling.block_q) == (128, 64)
    assert kv_spans.programs.value == 4 * 8192 // 64
    assert for_dquery.tiling.block_q == measured_plan(DOCUMENTS, "hopper").schedule.backward_q.block_q


def test_each_range_takes_sixteen_bytes() -> None:
    near = (KV_POS < 5) | (Q_POS - KV_POS < 17)
    mask = (KV_POS <= Q_POS) & near & (IDS[BATCH, Q_POS] == IDS[BATCH, KV_POS])
    forward, *_, for_dkey, _, _ = measured_plan(Attention(mask=mask, name="two_ranges")).kernels
    assert (forward.name, forward.hbm_written.formula) == ("kv_spans", "32*B*nq")
    assert (for_dkey.name, for_dkey.hbm_written.formula) == ("q_spans", "16*B*nkv")


def test_measuring_a_long_sequence_takes_longer_than_a_launch() -> None:
    traits = Traits(measured=Measuring(by_head=False, kv_ranges=1, q_ranges=1, q_reads=1, kv_reads=1))
    seconds = []
    for length in (1 << 10, 1 << 17, 1 << 18):
        shape = Shape(1, 16, 16, length, length, 128, 128)
        kernel = predict(shape, choose(shape, H200, "triton", traits=traits), H200, traits=traits)[0]
        assert kernel.kernel.name == "kv_spans"
        seconds.append(kernel.seconds)
    assert seconds[0] == H200.launch_seconds < seconds[1]
    assert seconds[2] == pytest.approx(4 * seconds[1], rel=0.01)  # each program looks at each position
