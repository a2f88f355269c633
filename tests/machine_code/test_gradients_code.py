"""Hopper kernels that sum gradients of what scores read compile for sm_90: products in flight, few spills in loops."""

from __future__ import annotations

from functools import cache

import pytest

import weft
from weft import head, kv_pos, q_pos, score, scores
from weft.compiler.planning.machines.hardware import H200

from ..support import mostly

pytest.importorskip("triton")
from .ahead import Module, compiled, count_opcode, stale_addresses

pytestmark = pytest.mark.compiles

by_head = weft.tensor("by_head", 2)
MASK = kv_pos <= q_pos
VARIANTS = {
    "by_key": weft.Attention(score + by_head[head, kv_pos], MASK, name="by_key"),
    "by_query": weft.Attention(score * weft.sigmoid(by_head[head, q_pos]), MASK, name="by_query"),
    "t5": weft.Attention(scores.t5_bias(weft.tensor("table", 2), bidirectional=False)(score), MASK, name="t5"),
}
# Words that loops spill and load again, of each consumer: addresses and numbers of the head, beside the sums.
SPILLS = {("by_key", 128): 8, ("by_query", 128): 20, ("t5", 64): 16, ("t5", 80): 18, ("t5", 128): 20}


@cache
def module(name: str, head_dim: int, deterministic: bool) -> Module:
    wanted = frozenset({"query", "key", "value", *(t.name for t in VARIANTS[name].canonical.tensors)})
    return compiled(
        VARIANTS[name], "backward", head_dim, target="hopper", wanted=wanted, deterministic=deterministic
    )  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", mostly([64], [64, 80, 128]))
@pytest.mark.parametrize("name", mostly(["t5"], [*VARIANTS]))  # whose kernels the next tests look at, too
def test_products_stay_in_flight(name: str, head_dim: int, deterministic: bool) -> None:
    for kernel in module(name, head_dim, deterministic).kernels.values():
        assert not kernel.serialised and not stale_addresses(kernel), kernel.name
        assert kernel.sram <= H200.sram_per_block
        for loop in kernel.product_loops():
            assert count_opcode("(?:LDL|STL)", loop) <= SPILLS.get((name, head_dim), 0), kernel.name


@pytest.mark.parametrize(("head_dim", "distances"), [(64, 34), (128, 18)])
def test_pairs_of_a_distance_share_a_load(head_dim: int, distances: int) -> None:
    """Of a tile of 64 keys and 128 queries a thread has 34 distances, of 64 queries 18. Level tiles load nothing: what
    their scores have beside q.k comes on a card."""
    for loop in module("t5", head_dim, False).kernels["flash_backward"].product_loops():
        assert count_opcode(r"LDG\.", loop) == distances
        assert not count_opcode("MUFU.LG2", loop)


def test_a_table_that_levels_off_leaves_registers_for_128_queries() -> None:
    """At D 64: three programs of the kernel that sums along diagonals run on an SM, and their loop spills little."""
    found = module("t5", 64, False)
    assert str(found.plans["flash_backward"].form) == "128x128s2+next"
    diagonals = found.kernels["flash_ddiagonals"]
    assert diagonals.registers <= 168 and diagonals.spills_in_loops() <= 6
    assert 3 * diagonals.sram <= H200.sram_per_sm
    # sums of mixed tiles compare a number of the thread with constants: no position is worked out for them
    loop = found.kernels["flash_backward"].product_loops()[0]
    assert len(loop) < 2100, "2,571 before"


@pytest.mark.parametrize("sequences", ["packed", "lengths"])
@pytest.mark.parametrize("name", ["by_key", "t5"])
def test_sequences(name: str, sequences: str) -> None:
    wanted = frozenset({"query", "key", "value", *(t.name for t in VARIANTS[name].canonical.tensors)})
    found = compiled(
        VARIANTS[name], "backward", 64, target="hopper", wanted=wanted, deterministic=False, sequences=sequences
    )  # fmt: skip
    for kernel in found.kernels.values():
        assert not kernel.serialised and not stale_addresses(kernel), kernel.name
        assert kernel.spills_in_loops() <= 2 * SPILLS.get((name, 64), 0), kernel.name
