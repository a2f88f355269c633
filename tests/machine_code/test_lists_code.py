"""Kernels that list tiles, and those that visit them, compile for GPUs that are not here; loops spill nothing."""

from __future__ import annotations

import pytest

import weft
from weft import batch, kv_pos, masks, q_pos

pytest.importorskip("triton")
from .ahead import compiled

pytestmark = pytest.mark.compiles

BLOCKS = weft.Attention(mask=masks.causal & masks.block_sparse(weft.tensor("blocks", 4, bool)), name="blocks")
ALLOWED = weft.Attention(mask=weft.tensor("allowed", 3, bool)[batch, q_pos, kv_pos], name="allowed")
CAUSAL = weft.Attention(mask=kv_pos <= q_pos, name="causal")
PRODUCTS = {"h200": "wgmma.mma_async", "a100": "mma.sync", "mi300x": "v_mfma"}


def test_listed_tiles_cost_the_loops_nothing() -> None:
    """Of a block mask: the products and the SRAM of causal attention with the same tiles."""
    own, plain = (compiled(v, "backward", 128) for v in (BLOCKS, CAUSAL))
    assert own.kernels.keys() - plain.kernels.keys() == {"kv_lists", "q_lists"}
    for name, kernel in plain.kernels.items():
        assert own.plans[name].form == plain.plans[name].form, name
        made = own.kernels[name]
        assert made.count("wgmma.mma_async") == kernel.count("wgmma.mma_async") and not made.serialised, name
        assert made.spills_in_loops() <= kernel.spills_in_loops() and made.sram <= kernel.sram, name
        assert made.count("cp.async.c") or not kernel.count("cp.async.c"), f"{name}: tiles are loaded ahead"


@pytest.mark.parametrize("width", [64, 128])
def test_listed_tiles_cost_the_loops_of_hopper_nothing(width: int) -> None:
    """No product more than under a causal mask; of masks by blocks alone hardly anything spilled, in edge tiles."""
    for direction in ("forward", "backward"):
        made = compiled(BLOCKS, direction, width, target="hopper")  # type: ignore[arg-type]
        assert made.kernels.keys() & {"kv_lists", "q_lists"}
        for name, kernel in made.kernels.items():
            assert not kernel.serialised, name
            assert kernel.spills_in_loops() <= (30 if (name, width) == ("flash_backward", 64) else 0), name


def test_reads_of_pairs() -> None:
    module = compiled(ALLOWED, "forward", 128)
    assert {"pair_cells", "kv_lists"} <= module.kernels.keys()
    for name, kernel in module.kernels.items():
        assert kernel.spills_in_loops() == 0 and not kernel.serialised, name


@pytest.mark.parametrize(
    ("variant", "device", "sequences"), [(ALLOWED, "a100", "lengths"), (BLOCKS, "mi300x", "packed")]
)
def test_other_gpus_and_sequences(variant: weft.Attention, device: str, sequences: str) -> None:
    module = compiled(variant, "forward", 64, device=device, sequences=sequences)
    for name, kernel in module.kernels.items():
        assert bool(kernel.count(PRODUCTS[device])) == name.startswith("flash_"), name
