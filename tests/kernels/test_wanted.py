"""Backward kernels compute the gradients that are wanted and no others, for every schedule of target `triton`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, q_pos, score
from weft.codegen import generate as generator
from weft.codegen.interpret import execute_interpreted
from weft.codegen.stages import StageComments
from weft.compiler.analysis.facts import Facts, facts_of
from weft.compiler.planning.records import Schedule, Specialisation, Tiling
from weft.compiler.planning.segments import Segments, for_heads, split
from weft.compiler.planning.stages import Tiles

pytest.importorskip("triton")

ALL = frozenset(("query", "key", "value", "rope"))
slopes, row_bias, column_bias = weft.tensor("slopes", 1), weft.tensor("row_bias", 2), weft.tensor("column_bias", 2)
causal = kv_pos <= q_pos
VARIANTS = {
    "causal": weft.Attention(mask=causal, name="causal"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), causal, name="alibi"),
    "rows": weft.Attention(score + row_bias[head, q_pos], causal, name="rows"),
    "columns": weft.Attention(score + column_bias[head, kv_pos], causal, name="columns"),
}
SCHEDULES = ("flash", "streaming", "standard")
WANTED = [{"query"}, {"key"}, {"value"}, {"query", "value"}, {"key", "value"}, set()]
TILING = Tiling(32, 32, 4, 2)
ROPE = Segments((*split(16), *split(16, "rope", start=0)), split(16))


Force = Callable[[frozenset[str]], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """A function that makes the generator want these gradients and no others."""
    stages_of_plan = generator._stages

    def forced(wanted: frozenset[str]) -> None:
        def stages(
            facts: Facts, spec: Specialisation, schedule: Schedule, segments: Segments, sums: frozenset[str]
        ) -> StageComments:
            """Kernels that nothing wants are in no plan."""
            found = stages_of_plan(facts, spec, schedule, segments, sums)
            rope = any(s.source == "rope" for s in segments.qk)
            for kernel, left_out in unwanted(wanted, sums, rope).items():
                if left_out:
                    found._words.pop(kernel, None)
            return found

        monkeypatch.setitem(generator._environment().globals, "wanted", wanted)
        monkeypatch.setattr(generator, "Tiles", lambda *a, **k: replace(Tiles(*a, **k), wanted=wanted))
        monkeypatch.setattr(generator, "_stages", stages)

    return forced


def unwanted(wanted: frozenset[str], sums: frozenset[str], rope: bool = False) -> dict[str, bool]:
    """For each kernel that may be left out, whether it is."""
    keys = "key" in wanted or (rope and "rope" in wanted)
    return {
        "flash_dquery": "query" not in wanted and not sums - {"column"},
        "flash_dkey_dvalue": not keys and "value" not in wanted and "column" not in sums,
        "standard_dvalue": "value" not in wanted,
        "standard_dweights": not keys and "query" not in wanted and not sums,
        "standard_dscores": not keys and "query" not in wanted and not sums,
        "standard_dquery": "query" not in wanted,
        "standard_dkey": not keys,
    }


def source(name: str, schedule: str, gradients: bool, segments: Segments | None = None) -> str:
    facts = facts_of(VARIANTS[name])
    names = tuple(load.tensor.name for load in facts.attention.gradient_loads) if gradients else ()
    spec = Specialisation("backward", "cpu", "fp32", 16, 16, gradients=names)
    planned = Schedule(schedule, "interpret", TILING, TILING, TILING)
    return generator.generate(facts, spec, planned, segments or for_heads(16, 16))


class Missing:
    """Takes the place of a kernel that is not in the module: its launch does nothing."""

    def __getitem__(self, grid: object) -> object:
        return lambda *arguments, **constants: None

    def prepare(self, *arguments: object, **constants: object) -> object:
        return lambda *tensors: None


def run(text: str, tensors: dict[str, Tensor], operands: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients as the module writes them into NaN, and its sums."""
    module = ModuleType("backward")
    execute_interpreted(compile(text, "backward", "exec"), module)
    for kernel in unwanted(ALL, frozenset()):
        if kernel not in vars(module):
            setattr(module, kernel, Missing())
    results = {n: torch.full_like(tensors[n], torch.nan) for n in ("query", "key", "value")}
    config = {"BLOCK_Q": 32, "BLOCK_KV": 32, "HEAD_BUNCH": 2, "num_warps": 4, "num_stages": 1}
    sums = module.launch_backward(
        tensors["dout"], None, tensors["query"], [tensors["key"]], tensors["value"], tensors["out"], tensors["lse"],
        results["query"], [results["key"]], results["value"], 0, operands, config, config, 16, {},
    )  # fmt: skip
    return results, sums


def inputs(name: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    generated = torch.Generator().manual_seed(3)
    made = {n: torch.randn(1, h, 40, 16, generator=generated) for n, h in (("query", 2), ("key", 1), ("value", 1))}
    variant = VARIANTS[name]
    operands = {
        p.name: torch.randn(2, 40, generator=generated) if p.name != "slopes" else torch.tensor([0.3, 0.1])
        for p in variant.parameters
    }
    out, lse = variant.reference(*made.values(), return_lse=True, **operands)
    dout = torch.randn(out.shape, generator=generated)
    return {**made, "out": out, "lse": lse.contiguous(), "dout": dout}, list(operands.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", VARIANTS)
def test_wanted_gradients_are_those_of_the_whole_backward(name: str, schedule: str, force: Force) -> None:
    tensors, operands = inputs(name)
    expected, expected_sums = run(source(name, schedule, True), tensors, operands)
    for wanted in WANTED:
        force(frozenset(wanted))
        results, sums = run(source(name, schedule, True), tensors, operands)
        for gradient, result in results.items():
            if gradient in wanted:
                assert torch.equal(result, expected[gradient]), f"{gradient} of {wanted}"
        for got, want in zip(sums, expected_sums, strict=True):
            assert torch.equal(got, want), f"sums of {wanted}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_unwanted_is_computed(name: str, gradients: bool, schedule: str, force: Force) -> None:
    """No product of an unwanted gradient, and no kernel that nothing wants."""
    kinds = {"alibi": "total", "rows": "row", "columns": "column"}
    sums = frozenset({kinds[name]} if gradients and name in kinds else ())
    products = {"query": "dq0 = tl.dot(", "key": "dk0 = tl.dot(", "value": "dv0 = tl.dot("}
    for wanted in WANTED:
        force(frozenset(wanted))
        text = source(name, schedule, gradients)
        for gradient, product in products.items():
            assert (product in text) == (gradient in wanted), f"{gradient} of {wanted}"
        for kernel, left_out in unwanted(frozenset(wanted), sums).items():
            if kernel.startswith(schedule):
                assert (f"def {kernel}(" not in text) == left_out, f"{kernel} of {wanted}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wanted", ["key", "rope"])
def test_each_part_of_a_key_in_two_tensors_by_itself(wanted: str, schedule: str, force: Force) -> None:
    force(frozenset({wanted, "value"}))
    text = source("causal", schedule, False, ROPE)
    assert ("dk0 = tl.dot(" in text) == (wanted == "key") and ("dk1 = tl.dot(" in text) == (wanted == "rope")
