"""Plans: every kernel's stages and figures as data."""

from __future__ import annotations

import pytest

from weft.compiler.facts import facts_of
from weft.compiler.hardware import H200, KNOWN
from weft.compiler.plan import counter, make_plan
from weft.compiler.schedule import ALGORITHMS, Traits, choose
from weft.compiler.segments import for_latent
from weft.compiler.types import Shape, TileCounts
from weft.ir.attention import Attention
from weft.ir.errors import WeftError
from weft.ir.expr import scalar, symbol

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
