"""Kernels that read a score's parts by distance: one load for all pairs of a thread at one distance, and no spills."""

from __future__ import annotations

import pytest

import weft
from weft import kv_pos, q_pos, score, scores

from ..support import mostly
from .ahead import compiled, count_opcode

pytest.importorskip("triton")

pytestmark = pytest.mark.compiles

T5 = weft.Attention(scores.t5_bias(weft.tensor("table", 2), bidirectional=False)(score), kv_pos <= q_pos, name="t5")


@pytest.mark.parametrize("head_dim", mostly((64,), (64, 128)))
@pytest.mark.parametrize("target", ["hopper", "triton"])
def test_a_forward_reads_each_distance_once(target: str, head_dim: int) -> None:
    module = compiled(T5, "forward", head_dim, target=target)
    kernel, form = module.kernels["flash_forward"], module.plans["flash_forward"].form
    loops = kernel.product_loops()
    full = min(loops, key=len)
    threads = 128 * (form.block_q // 64 if target == "hopper" else form.num_warps // 4)
    pairs = form.block_q * form.block_kv // threads
    # rows r and r + 8 of a thread share all distances but those of two columns
    assert count_opcode(r"LDG\.", full) == pairs // 2 + 2
    assert not count_opcode("(?:LDL|STL)", full) and not any(count_opcode("MUFU.LG2", loop) for loop in loops)
    assert len(full) < (11.5 if target == "hopper" else 16) * pairs, "plain causal has 7 and 11"


def test_a_backward_computes_no_logarithm_for_a_pair() -> None:
    module = compiled(T5, "backward", 128, target="triton", wanted=frozenset({"query", "key", "value", "table"}))
    assert list(module.kernels) == [
        "distance_tables", "row_statistics", "flash_dquery", "flash_dkey_dvalue", "flash_ddiagonals", "sum_listed",
    ]  # fmt: skip
    for kernel in module.kernels.values():
        for loop in kernel.product_loops():
            spills = count_opcode("(?:LDL|STL)", loop)  # what level tiles need lives through all loops
            assert spills <= (11 if kernel.name == "flash_dkey_dvalue" else 0), kernel.name
        assert not any(count_opcode("MUFU.LG2", loop) for loop in kernel.product_loops()), kernel.name


@pytest.mark.parametrize(("kernel", "most"), [("flash_dquery", 12), ("flash_dkey_dvalue", 20)])
def test_level_tiles_cost_little_more_than_causal_ones(kernel: str, most: float) -> None:
    """Causal ones take 9.7 and 17.5 instructions a pair, others that read by distance 24 and 25."""
    module = compiled(T5, "backward", 128, target="triton", wanted=frozenset({"query", "key", "value", "table"}))
    form = module.plans[kernel].form
    edge, uneven, level = sorted(module.kernels[kernel].product_loops(), key=len, reverse=True)
    pairs = form.block_q * form.block_kv // (32 * form.num_warps)
    assert len(level) < most * pairs < len(uneven) < len(edge)
    reads = count_opcode(r"LDG\.", uneven) - count_opcode(r"LDG\.", level)
    assert reads >= pairs // 2, "one number is read for all pairs"
    assert count_opcode("FFMA", level) >= pairs, "a power is one operation"


@pytest.mark.parametrize("device", mostly(("mi300x",), ("a100", "mi300x")))
def test_other_gpus(device: str) -> None:
    kernels = compiled(T5, "forward", 64, device=device).kernels
    assert list(kernels) == ["distance_tables", "flash_forward"] and all(
        k.spilled <= 4 for k in kernels.values()
    )  # as causal
