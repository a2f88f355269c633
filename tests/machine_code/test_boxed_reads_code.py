"""Kernels that bring tiles of what pairs read compile for sm_90: no loads of single elements, products in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import weft
from weft import batch, head, kv_pos, q_pos, score
from weft.compiler.planning.machines.hardware import H200
from weft.compiler.planning.records import Shape
from weft.runtime.call import Operand

pytest.importorskip("triton")
from . import ahead
from .ahead import Direction, Kernel, Module, compiled, count_opcode

pytestmark = pytest.mark.compiles

BIAS = weft.tensor("bias", 4)
MASKS = {"full": True, "causal": kv_pos <= q_pos}
VARIANTS = {
    name: weft.Attention(score + BIAS[batch, head, q_pos, kv_pos], mask, name=name) for name, mask in MASKS.items()
}
WANTED = frozenset({"query", "key", "value", "bias"})
LOOP_CONSTANTS = 10  # words that a loop of one pass at D 80 and 128 may load again: they are never stored there


@cache
def module(name: str, direction: str, head_dim: int, sequences: str = "dense") -> Module:
    wanted = WANTED if direction == "backward" else None
    return compiled(
        VARIANTS[name], direction, head_dim, target="hopper", wanted=wanted, deterministic=False, sequences=sequences
    )  # fmt: skip


def loads(kernel: Kernel, opcode: str) -> list[int]:
    return [count_opcode(opcode, loop) for loop in kernel.product_loops()]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", VARIANTS)
def test_forward(name: str, head_dim: int) -> None:
    found = module(name, "forward", head_dim)
    own = found.kernels["flash_forward"]
    assert "p2" in str(found.plans["flash_forward"].form)
    assert not own.serialised and own.spills_in_loops() == 0
    assert own.sram <= min(H200.sram_per_block, found.plans["flash_forward"].sram_bytes.value + 2048)
    assert own.product_loops() and not any(loads(own, "LDG"))
    # what a thread reads of a tile of 128 keys is 64 elements: eight loads of four registers
    assert set(loads(own, "LDSM")) == {4 if head_dim == 256 else 8}


def test_a_slot_is_given_back_after_it_was_read() -> None:
    """A vote over what was computed from all that was read stands before the arrival that frees the slot."""
    for loop in module("full", "forward", 64).kernels["flash_forward"].product_loops():
        last = max(n for n, text in enumerate(loop) if count_opcode("LDSM", [text]))
        votes = [n for n, text in enumerate(loop) if count_opcode("VOTE", [text]) and n > last]
        arrivals = [n for n, text in enumerate(loop) if count_opcode("BAR.ARV", [text])]
        assert votes and any(n > votes[0] for n in arrivals)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_one_pass(name: str, head_dim: int) -> None:
    found = module(name, "backward", head_dim)
    own = found.kernels["flash_backward"]
    assert not own.serialised and own.sram <= H200.sram_per_block
    assert not any(loads(own, "LDG")) and not any(loads(own, "STL"))
    assert own.spills_in_loops() <= (0 if head_dim == 64 else LOOP_CONSTANTS)
    # both ways through SRAM in transposed fragments, and tiles of the gradient by TMA
    assert set(loads(own, r"LDSM\.16\.MT88")) == {4} and set(loads(own, r"STSM\.16\.MT88")) == {4}
    assert set(loads(own, "UTMASTG")) == {1}


OF_SEQUENCES = [("backward", "packed"), ("backward", "lengths")]
OF_SEQUENCES += [("forward", sequences) for sequences in ("packed", "paged", "lengths")]


@pytest.mark.parametrize(("direction", "sequences"), OF_SEQUENCES)
def test_sequences(direction: Direction, sequences: str) -> None:
    wanted = WANTED - {"bias"} if direction == "backward" else None  # its gradient is for sequences of one length
    own = compiled(
        VARIANTS["causal"], direction, 64, target="hopper", wanted=wanted, deterministic=False, sequences=sequences
    ).kernels[f"flash_{direction}"]
    assert not own.serialised and own.spills_in_loops() <= 2 and not any(loads(own, "LDG"))


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_operands_of_32_bits(direction: Direction, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ahead._operands

    def wide(variant: weft.Attention, sizes: Shape, floats: torch.dtype) -> dict[str, Operand]:
        return made(variant, replace(sizes, dtype="fp32"), floats)

    monkeypatch.setattr(ahead, "_operands", wide)
    monkeypatch.setattr("weft.plans.request.boxed_of", lambda *given: 4)
    wanted = WANTED if direction == "backward" else None
    found = compiled(VARIANTS["full"], direction, width, target="hopper", wanted=wanted, deterministic=False)
    own = found.kernels[f"flash_{direction}"]
    assert not own.serialised and own.sram <= H200.sram_per_block and not any(loads(own, "LDG"))
    assert own.spills_in_loops() <= (0 if width == 64 else LOOP_CONSTANTS)
