"""A target from outside the package: registered, called by name, planned like any other, and taken away again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from weft import head, kv_pos, masks, score
from weft.codegen import targets
from weft.codegen.launch.fast.ways import Ways
from weft.codegen.targets.cpu.forms import CpuForm
from weft.codegen.targets.cpu.target import CpuTarget

from ..support import check_variant

slopes = weft.tensor("slopes", 1)


class Counted:
    """A launcher in the place of another: it counts the launches."""

    def __init__(self, launcher: Any, launches: list[str], direction: str) -> None:
        self.launcher, self.launches, self.direction = launcher, launches, direction
        self.fast = Ways()
        self.partition, self.workspace = launcher.partition, launcher.workspace

    def __call__(self, *given: Any) -> Any:
        self.launches.append(self.direction)
        return self.launcher(*given)


class Small(CpuTarget):
    """Tiles of 16 by 16, for calls that ask for it by name."""

    name = measured_by = "small"
    by_name_only = True

    def __init__(self) -> None:
        self.launches: list[str] = []

    def forms(self, *_: Any) -> list[CpuForm]:
        return [CpuForm(16, 16)]

    def bind(self, modules: Any, code: Any, facts: Any, device: Any) -> Counted:
        return Counted(super().bind(modules, code, facts, device), self.launches, code.signature.direction)


@pytest.fixture
def small() -> Iterator[Small]:
    target = Small()
    targets.register(target)
    yield target
    targets.unregister("small")


def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, 50, 24, generator=generator) for h in (4, 2, 2)]


def test_it_computes_what_asks_for_it_and_nothing_else(small):
    variant = weft.Attention(score + slopes[head] * kv_pos, masks.causal, name="small_target")
    given = {"slopes": torch.linspace(-0.5, 0.5, 4)}
    variant(*qkv(), **given)
    assert small.launches == []
    check_variant(variant, *qkv(), target="small", operands=given, differentiate=("slopes",))
    assert small.launches == ["forward", "backward"]


def test_its_plan_and_its_source_are_those_of_its_calls(small):
    variant = weft.Attention(mask=masks.causal, name="small_plan")
    plan = variant.plan(*qkv(), target="small")
    assert {(k.target, str(k.form)) for k in plan.kernels} == {("small", "16x16")}
    assert "small" in variant.explain(*qkv(), target="small")
    assert "def forward" in variant.source(*qkv(), target="small")


def test_it_is_refused_where_it_cannot_compute_and_unknown_when_taken_away(small):
    variant = weft.Attention(mask=masks.causal, name="small_refused")
    with pytest.raises(weft.UnavailableError, match="has schedule flash only"):
        variant(*qkv(), target="small", schedule="standard")
    with pytest.raises(weft.WeftError, match="expected one of hopper, triton, interpret, cpu, small, got 'tiny'"):
        variant(*qkv(), target="tiny")
    targets.unregister("small")
    try:
        with pytest.raises(weft.WeftError, match="expected one of hopper, triton, interpret, cpu, got 'small'"):
            variant(*qkv(), target="small")
    finally:
        targets.register(small)
