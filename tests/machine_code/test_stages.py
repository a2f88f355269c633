"""Generated kernels say the words of their plan, each over the code that does it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace

import pytest

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen import generate as generator
from weft.codegen.stages import StageComments, wrapped
from weft.codegen.targets.triton.kernels.measures import RUNS
from weft.codegen.targets.triton.modules import measures
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import H200
from weft.compiler.planning.records import Stage
from weft.compiler.planning.signature import Direction
from weft.ir.errors import InternalError
from weft.runtime.driver import resolve

causal = kv_pos <= q_pos
slopes = weft.tensor("slopes", 1)
VARIANTS = {
    "dense": weft.Attention(name="dense"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), causal, name="alibi"),
    "documents": weft.Attention(mask=causal & masks.document(weft.tensor("doc", 1, int)), name="documents"),
}
SIZES = weft.shape(heads=2, q_len=256, head_dim=80)


def comments(text: str) -> str:
    """A source in one line, with comments of several lines joined."""
    return " ".join(re.sub(r"\n *#", "", text).split())


def words_of(stage: Stage) -> str:
    moves = f", {stage.moves}" if stage.moves else ""
    return " ".join(f"{stage.kind} (each {stage.per}): {stage.what}{moves}".split())


@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_triton_kernels_say_what_their_plan_says(name: str, direction: Direction, schedule: str) -> None:
    """Each stage as often as kernels have it: no words of a kernel that is not in the plan, and none left out."""
    given = {"device": "h200", "target": "triton", "schedule": schedule}
    said = comments(VARIANTS[name].source(SIZES, direction=direction, **given))
    code = VARIANTS[name].plan(SIZES, **given).code(direction)
    words = Counter(words_of(stage) for kernel in code.kernels if kernel.name not in RUNS for stage in kernel.stages)
    assert words
    for text in words:
        times = sum(n for other, n in words.items() if text in other)
        assert said.count(text) == times, text


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_streaming_kernel_is_read_in_one_piece(name: str, direction: Direction) -> None:
    """What it shares with others, and what is done for one tile of pairs, are functions beside it."""
    sizes = weft.shape(heads=2, q_len=256, head_dim=64)
    text = VARIANTS[name].source(sizes, direction=direction, device="h200", target="triton", schedule="streaming")
    kernels = [node for node in ast.parse(text).body if getattr(node, "name", "") == f"streaming_{direction}"]
    assert [node.end_lineno - node.lineno < 120 for node in kernels] == [True]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_backward_that_wants_little_says_little(name: str) -> None:
    everything = VARIANTS[name].plan(SIZES, device="h200", target="triton").code("backward").signature
    for wanted in ("query", "key", "value"):
        signature = replace(everything, wanted=frozenset({wanted}))
        found = resolve(VARIANTS[name], signature, H200, "triton")
        said = comments(generator.generate(facts_of(VARIANTS[name]), found.code, found.target))
        kernels = [k for k in found.code.kernels if k.name not in RUNS]
        assert all(words_of(stage) in said for k in kernels for stage in k.stages)
        assert ("flash_dquery" in {k.name for k in kernels}) == (wanted == "query")


def test_the_kernels_that_measure_tiles_do_too() -> None:
    said = comments(measures(facts_of(VARIANTS["documents"]), offsets_64=False))
    kernels = VARIANTS["documents"].plan(SIZES, device="h200", target="triton").code("backward").kernels
    spans = [k for k in kernels if k.name in RUNS]
    assert {k.name for k in spans} == {*RUNS}
    for kernel in spans:
        assert all(words_of(stage) in said for stage in kernel.stages), kernel.name


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_stage_of_the_cpu_is_placed_once(name: str, direction: Direction) -> None:
    given = {"device": "cpu", "target": "cpu", "schedule": f"flash/flash_{direction}=cpu:32x64"}
    said = comments(VARIANTS[name].source(SIZES, direction=direction, **given))
    (kernel,) = VARIANTS[name].plan(SIZES, **given).code(direction).kernels
    assert all(said.count(words_of(stage)) == 1 for stage in kernel.stages)
    assert "load (each query tile): Q tile [32, 64 + 16]" in said


# -- what places stages ------------------------------------------------------------------------------------------------
LOAD = Stage("load query", "load", "Q tile", "HBM -> SRAM", "program")
STORE = Stage("store", "store", "O", "", "program")


def test_stages_that_are_left_out_or_placed_twice_or_unknown_are_told() -> None:
    holes = StageComments({"k": (LOAD, STORE)})
    assert holes.has("k", "store") and not holes.has("k", "load key")
    assert wrapped(f"    {holes('k', 'load query')}\n") == "    # load (each program): Q tile, HBM -> SRAM\n"
    with pytest.raises(InternalError, match="stage 'store' of kernel k is placed 0 times, not once"):
        holes.check()
    holes("k", "store")
    holes.check()
    holes("k", "store")
    with pytest.raises(InternalError, match="stage 'store' of kernel k is placed 2 times, not once"):
        holes.check()
    with pytest.raises(InternalError, match="the plan has no stage 'load key' of kernel k"):
        holes("k", "load key")
