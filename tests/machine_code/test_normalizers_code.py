"""Kernels of hopper for normalizers that are no softmax: nothing spills in loops, and few special units are asked."""

from __future__ import annotations

import pytest

import weft
from weft import masks, score
from weft.compiler.planning.machines.hardware import H200

from ..support import mostly

pytest.importorskip("triton")
from .ahead import Module, compiled, count_opcode, stale_addresses

pytestmark = pytest.mark.compiles

VARIANTS = {"causal": {}, "capped": {"score": 20.0 * weft.tanh(score / 20.0)}}
SPECIAL = {("sigmoid", 64): 1.25, ("sigmoid", 128): 2.0}  # instructions of the special units for a weight
PAIRS = 64  # of a thread, of a visited tile


def module(normalizer: str, name: str, direction, head_dim: int, **options) -> Module:
    declared = weft.Attention(mask=masks.causal, name=f"{name}_{normalizer}", normalizer=normalizer, **VARIANTS[name])
    return compiled(declared, direction, head_dim, target="hopper", q_len=4096, **options)


def check(found: Module) -> None:
    for kernel in found.kernels.values():
        assert not kernel.serialised and not stale_addresses(kernel), kernel.name
        assert kernel.sram <= H200.sram_per_block
        assert not kernel.spills_in_loops(), kernel.name


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("normalizer", "name"), mostly([("sigmoid", "causal"), ("relu", "causal")],
                         [(n, v) for n in ("sigmoid", "relu") for v in VARIANTS]))  # fmt: skip
def test_forwards(normalizer: str, name: str, head_dim: int) -> None:
    found = module(normalizer, name, "forward", head_dim)
    check(found)
    if name == "causal":
        for loop in found.kernels["flash_forward"].product_loops():
            assert count_opcode("MUFU", loop) == SPECIAL.get((normalizer, head_dim), 0) * PAIRS


@pytest.mark.parametrize("head_dim", mostly([128], [64, 80, 128]))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("normalizer", ["sigmoid", "relu"])
def test_backwards(normalizer: str, deterministic: bool, head_dim: int) -> None:
    found = module(normalizer, "causal", "backward", head_dim, deterministic=deterministic)
    assert "row_statistics" not in found.kernels
    check(found)


@pytest.mark.parametrize("sequences", ["lengths", "packed"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sequences(sequences, direction) -> None:
    check(module("sigmoid", "causal", direction, 128, sequences=sequences))
