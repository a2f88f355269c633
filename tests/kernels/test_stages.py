"""Generated kernels say the words of their plan, each over the code that does it."""

from __future__ import annotations

import pytest

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen import generate as generator
from weft.codegen.stages import StageComments
from weft.compiler.analysis.facts import facts_of
from weft.compiler.planning.records import Schedule, Specialisation, Tiling
from weft.compiler.planning.segments import for_heads
from weft.compiler.planning.stages import Tiles, stages_of

causal = kv_pos <= q_pos
slopes = weft.tensor("slopes", 1)
VARIANTS = {
    "dense": weft.Attention(name="dense"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), causal, name="alibi"),
    "documents": weft.Attention(mask=causal & masks.document(weft.tensor("doc", 1, int)), name="documents"),
}
SIZES = weft.shape(heads=2, q_len=256, head_dim=80)


@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_triton_kernels_say_what_their_plan_says(name: str, direction: str, schedule: str) -> None:
    given = {"device": "h200", "target": "triton", "schedule": schedule}
    text = " ".join(VARIANTS[name].source(SIZES, direction=direction, **given).replace("#  ", "").split())
    kernels = [
        k for k in VARIANTS[name].plan(SIZES, **given).kernels if k.direction == direction and f"def {k.name}(" in text
    ]
    assert kernels
    for kernel in kernels:
        for stage in kernel.stages:
            if kernel.name == "standard_dscores" and stage.key == "load query":
                continue  # words of a plan that knows of no gradients of operands
            assert f"{stage.kind} (each {stage.per}): {stage.what}" in text, f"{kernel.name}: {stage.key}"


def test_the_kernels_that_measure_tiles_do_too() -> None:
    text = " ".join(generator.generate_spans(facts_of(VARIANTS["documents"])).split())
    assert "what the mask reads at queries of a tile" in text and "what the mask reads at keys of a tile" in text


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_stage_of_the_cpu_is_placed_once(name: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, segments, tiling = facts_of(VARIANTS[name]), for_heads(80, 64), Tiling(32, 64)
    kernel = f"flash_{direction}"
    stages = StageComments({kernel: stages_of("cpu", kernel, Tiles(32, 64, segments, facts.traits))})
    monkeypatch.setattr(generator, "_stages", lambda *arguments: stages)
    spec = Specialisation(direction, "cpu", "fp32", 80, 64)
    text = generator.generate(facts, spec, Schedule("flash", "cpu", tiling, tiling, tiling), segments)
    stages.check()
    assert "load (each query tile): Q tile [32, 64 + 16]" in text
