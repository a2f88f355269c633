"""Backward kernels compute the gradients that are wanted and no others, for every schedule of target `triton`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, q_pos, score
from weft.codegen.generate import generate
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import for_device
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.runtime.call import SLOTS
from weft.runtime.driver import resolve

from ..support import mostly

pytest.importorskip("triton")

MAIN = ("query", "key", "value")
slopes, row_bias, column_bias = weft.tensor("slopes", 1), weft.tensor("row_bias", 2), weft.tensor("column_bias", 2)
causal = kv_pos <= q_pos
VARIANTS = {
    "causal": weft.Attention(mask=causal, name="causal"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), causal, name="alibi"),
    "rows": weft.Attention(score + row_bias[head, q_pos], causal, name="rows"),
    "columns": weft.Attention(score + column_bias[head, kv_pos], causal, name="columns"),
}
SUMS = {"alibi": "total", "rows": "row", "columns": "column"}  # how the gradient of a variant's operand is summed
LATENT = weft.Attention(mask=causal, latent=weft.Latent(rank=32, rope=16), name="two_part_keys")
SCHEDULES = ("flash", "streaming", "standard")
WANTED = [{"query"}, {"key"}, {"value"}, {"query", "value"}, {"key", "value"}, set()]  # of the main tensors


def everything(name: str) -> frozenset[str]:
    return frozenset((*MAIN, *(p.name for p in VARIANTS[name].canonical.parameters)))


# -- numbers -----------------------------------------------------------------------------------------------------------
def inputs(name: str) -> dict[str, Tensor]:
    generated = torch.Generator().manual_seed(3)
    made = {n: torch.randn(1, h, 40, 16, generator=generated) for n, h in (("query", 2), ("key", 1), ("value", 1))}
    operands = {
        p.name: torch.tensor([0.3, 0.1]) if p.name == "slopes" else torch.randn(2, 40, generator=generated)
        for p in VARIANTS[name].canonical.parameters
    }
    return made | operands


def gradients(name: str, schedule: str, wanted: frozenset[str]) -> dict[str, Tensor]:
    leaves = {n: t.requires_grad_(n in wanted) for n, t in inputs(name).items()}
    out = VARIANTS[name](**leaves, target="interpret", schedule=schedule)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    names = sorted(wanted)
    return dict(zip(names, torch.autograd.grad(out, [leaves[n] for n in names], dout)))


@pytest.mark.parametrize("schedule", mostly(["flash", "streaming"], SCHEDULES))
@pytest.mark.parametrize("name", VARIANTS)
def test_wanted_gradients_are_those_of_the_whole_backward(name: str, schedule: str) -> None:
    expected = gradients(name, schedule, everything(name))
    for wanted in WANTED if schedule == "flash" else WANTED[1::2]:  # whose kernels are many
        for operands in (everything(name) - set(MAIN), frozenset[str]()):
            if not wanted | operands:
                continue
            for gradient, found in gradients(name, schedule, frozenset(wanted | operands)).items():
                assert torch.equal(found, expected[gradient]), f"{gradient} of {wanted | operands}"


def latent_gradients(schedule: str, wanted: set[str]) -> dict[str, Tensor]:
    """Of an expanded call as the op takes it: the key's own columns and the rotary ones in two tensors."""
    generated = torch.Generator().manual_seed(3)
    sizes = {"query": (2, 32), "key": (2, 16), "value": (2, 16), "rope": (1, 16)}
    made = {n: torch.randn(1, heads, 40, width, generator=generated) for n, (heads, width) in sizes.items()}
    leaves = {n: t.requires_grad_(n in wanted) for n, t in made.items()}
    options = f"target=interpret;schedule={schedule}"
    out, _ = torch.ops.weft.attention(
        *leaves.values(), [], [], [], 0, *[None] * len(SLOTS), 32, LATENT.canonical.text, options
    )
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return dict(zip(sorted(wanted), torch.autograd.grad(out, [leaves[n] for n in sorted(wanted)], dout)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_part_of_a_key_in_two_tensors_is_that_of_the_whole_backward(schedule: str) -> None:
    expected = latent_gradients(schedule, {*MAIN, "rope"})
    for wanted in ({"key"}, {"rope"}, {"rope", "value"}, {"query", "rope"}, {"value"}):
        for gradient, found in latent_gradients(schedule, wanted).items():
            assert torch.equal(found, expected[gradient]), f"{gradient} of {wanted}"


# -- text --------------------------------------------------------------------------------------------------------------
def source(variant: weft.Attention, schedule: str, wanted: frozenset[str], rope_dim: int = 0) -> str:
    machine, widths = for_device("cpu"), Widths(16 + rope_dim, 16, rope_dim)
    signature = Signature("backward", machine.arch, Dtypes.all("fp32"), widths, wanted=wanted)
    found = resolve(variant, signature, machine, "interpret", schedule)
    return generate(facts_of(variant), found.code, found.target)


def unwanted(wanted: set[str], sums: set[str]) -> dict[str, bool]:
    """For each kernel that may be left out, whether it is."""
    keys, scores = "key" in wanted, bool(wanted & {"query", "key"} or sums)
    return {
        "flash_dquery": "query" not in wanted and not sums - {"column"},
        "flash_dkey_dvalue": not keys and "value" not in wanted and "column" not in sums,
        "standard_dvalue": "value" not in wanted,
        "standard_dweights": not scores,
        "standard_dscores": not scores,
        "standard_dquery": "query" not in wanted,
        "standard_dkey": not keys,
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("of_operands", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_unwanted_is_computed(name: str, of_operands: bool, schedule: str) -> None:
    """No product of an unwanted gradient, and no kernel that nothing wants."""
    operands = everything(name) - set(MAIN) if of_operands else frozenset[str]()
    sums = {SUMS[name]} if operands else set()
    products = {"query": "dq0 = tl.dot(", "key": "dk0 = tl.dot(", "value": "dv0 = tl.dot("}
    for wanted in WANTED:
        if not wanted | operands:
            continue
        text = source(VARIANTS[name], schedule, frozenset(wanted | operands))
        for gradient, product in products.items():
            assert (product in text) == (gradient in wanted), f"{gradient} of {wanted}"
        for kernel, left_out in unwanted(wanted, sums).items():
            if kernel.startswith(schedule):
                assert (f"def {kernel}(" not in text) == left_out, f"{kernel} of {wanted}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wanted", ["key", "rope"])
def test_each_part_of_a_key_in_two_tensors_by_itself(wanted: str, schedule: str) -> None:
    text = source(LATENT, schedule, frozenset({wanted, "value"}), rope_dim=16)
    assert ("dk0 = tl.dot(" in text) == (wanted == "key") and ("dk1 = tl.dot(" in text) == (wanted == "rope")
