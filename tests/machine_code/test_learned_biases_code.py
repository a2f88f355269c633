"""Kernels of the gradients of what pairs read compile for GPUs that are not here, and spill nothing in loops."""

from __future__ import annotations

import pytest

import weft
from weft import batch, head, kv_pos, q_pos, score
from weft.compiler.planning.machines.hardware import by_name

pytest.importorskip("triton")
from .ahead import compiled

pytestmark = pytest.mark.compiles

CAUSAL = kv_pos <= q_pos
BIAS, TABLE = weft.tensor("bias", 4), weft.tensor("table", 2)
APART = weft.minimum(weft.maximum(weft.tensor("apart", 3, int)[batch, q_pos, kv_pos], 0), 31)
VARIANTS = {
    "flash_dquery": weft.Attention(score + BIAS[batch, head, q_pos, kv_pos], CAUSAL, name="full"),
    "flash_dpairs": weft.Attention(score + weft.tensor("shared", 3)[head, q_pos, kv_pos], CAUSAL, name="shared"),
    "flash_ddiagonals": weft.Attention(weft.scores.t5_bias(TABLE)(score), CAUSAL, scale=1.0, name="t5"),
}
# the gradients that each kernel is there for: others would be compiled in vain
WANTED = {
    "flash_dquery": frozenset({"query", "bias"}),
    "flash_dpairs": frozenset({"shared"}),
    "flash_ddiagonals": frozenset({"table"}),
}
LISTED = weft.Attention(score + TABLE[head, APART], CAUSAL, name="graphormer")
PRODUCTS = {"h200": "wgmma.mma_async", "a100": "mma.sync", "mi300x": "v_mfma"}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", VARIANTS)
def test_sm_90(kernel: str, head_dim: int) -> None:
    module = compiled(VARIANTS[kernel], "backward", head_dim, wanted=WANTED[kernel])
    own = module.kernels[kernel]
    assert own.count("wgmma.mma_async") and not own.serialised
    assert own.spills_in_loops() == 0 and own.sram <= module.plans[kernel].sram_bytes.value
    form = module.plans[kernel].form
    if kernel != "flash_dquery":
        assert bool(own.count("cp.async.c")) == (form.num_stages > 1), "tiles are loaded ahead where there are buffers"


@pytest.mark.parametrize(
    ("device", "kernel"), [("a100", "flash_dquery"), ("a100", "flash_ddiagonals"), ("mi300x", "flash_dpairs")]
)
def test_other_gpus(device: str, kernel: str) -> None:
    own = compiled(VARIANTS[kernel], "backward", 64, device=device, wanted=WANTED[kernel]).kernels[kernel]
    assert own.count(PRODUCTS[device])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_dtypes(dtype: str) -> None:
    for kernel in ("flash_dpairs", "flash_ddiagonals"):
        own = compiled(VARIANTS[kernel], "backward", 64, dtype, wanted=WANTED[kernel]).kernels[kernel]
        assert own.sram <= by_name("h200").sram_per_block


@pytest.mark.parametrize("sequences", ["lengths", "packed"])
def test_sequences(sequences: str) -> None:
    for kernel in ("flash_dquery", "flash_ddiagonals"):
        made = compiled(VARIANTS[kernel], "backward", 64, sequences=sequences, wanted=WANTED[kernel])
        assert made.kernels[kernel].sram <= by_name("h200").sram_per_block


def test_lists_and_wide_heads() -> None:
    wanted = WANTED["flash_ddiagonals"]
    listed = compiled(LISTED, "backward", 64, wanted=wanted).kernels["flash_dpairs"]
    assert listed.sram <= by_name("h200").sram_per_block
    added = compiled(LISTED, "backward", 64, deterministic=False, wanted=wanted).kernels
    assert "flash_dpairs" not in added and added["flash_dquery"].count("red.|atom.")
    for kernel in ("flash_dpairs", "flash_ddiagonals"):
        own = compiled(VARIANTS[kernel], "backward", 256, wanted=WANTED[kernel])
        assert own.kernels[kernel].sram <= own.plans[kernel].sram_bytes.value
