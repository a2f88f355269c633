"""Kernels of sequences with lengths compile for GPUs that are not here, and are as good as those of dense calls."""

from __future__ import annotations

import pytest

import weft
from weft import kv_pos, q_pos
from weft.codegen.targets.triton.kernels.measures import RUNS
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.sources import kind_named

pytest.importorskip("triton")
from ..support import mostly
from .ahead import compiled, stale_addresses

pytestmark = pytest.mark.compiles

CAUSAL = weft.Attention(mask=kv_pos <= q_pos, name="causal")
DOCUMENTS = weft.Attention(mask=(kv_pos <= q_pos) & weft.masks.document(weft.tensor("doc", 2, int)), name="documents")
LISTS = {"query_work", "key_work"}  # before the others, of packed calls
PRODUCTS = {"h200": "wgmma.mma_async", "a100": "mma.sync", "mi300x": "v_mfma"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("sequences", ["lengths", "packed"])
def test_loops_are_those_of_dense_kernels(sequences, direction):
    """The same products, the same copies ahead and as much SRAM: what a sequence is, is settled before the loops."""
    dense = compiled(CAUSAL, direction, 128).kernels
    made = compiled(CAUSAL, direction, 128, sequences=sequences).kernels
    assert made.keys() - LISTS == dense.keys()
    assert bool(made.keys() & LISTS) == (sequences == "packed")
    for name, kernel in dense.items():
        own = made[name]
        assert own.sram == kernel.sram, name
        for pattern in ("wgmma.mma_async", "cp.async.c"):
            assert own.count(pattern) == kernel.count(pattern), f"{name}: {pattern}"
        assert own.spilled <= kernel.spilled + 16, name
        assert not own.serialised, name


OF_HOPPER = [
    ("packed", "forward", 128, 128), ("lengths", "backward", 128, 128), ("packed", "backward", 64, 64),
    ("lengths", "forward", 192, 128), ("paged", "forward", 128, 128), ("paged", "forward", 80, 64),
    ("packed_paged", "forward", 128, 128),
]  # fmt: skip


@pytest.mark.parametrize(("sequences", "direction", "dim", "value_dim"), mostly([OF_HOPPER[2]], OF_HOPPER))
def test_loops_of_hopper_are_those_of_dense_kernels(sequences, direction, dim, value_dim):
    """A sequence's own lengths cost a few instructions of the loops, no SRAM but a card's, and serialise no product."""
    dense, made = (
        compiled(CAUSAL, direction, dim, value_dim=value_dim, sequences=s, target="hopper").kernels
        for s in ("dense", sequences)
    )
    limit = (
        1.13 if kind_named(sequences).keys.pooled else 1.03
    )  # beside eight blocks of a tile ptxas packs predicates of edge tiles
    assert made.keys() - LISTS == dense.keys()
    assert bool(made.keys() & LISTS) == kind_named(sequences).rows.packed
    for name, kernel in dense.items():
        own = made[name]
        assert own.sram <= kernel.sram + 256 and not own.serialised, name
        assert own.count("wgmma.mma_async") == kernel.count("wgmma.mma_async"), name
        assert own.spills_in_loops() <= kernel.spills_in_loops() + 4, name
        for ours, theirs in zip(own.product_loops(), kernel.product_loops(), strict=True):
            assert len(ours) <= limit * len(theirs), name


GAIN = CAUSAL.replace(score=weft.score * (1.0 + weft.tensor("gain", 2)[weft.batch, weft.head]), name="gain")
ALL = frozenset({"query", "key", "value"})
IN_TWO_PASSES = [
    (CAUSAL, "packed", 192, 128), (CAUSAL, "lengths", 256, 256), (CAUSAL, "packed", 128, 128),
    (DOCUMENTS, "packed", 192, 128), (GAIN, "lengths", 192, 128),
]  # fmt: skip


# the first one's dense kernels are those of test_hopper_backward_in_two_passes
@pytest.mark.parametrize(
    ("variant", "sequences", "dim", "value_dim"), mostly([(CAUSAL, "packed", 64, 64)], IN_TWO_PASSES)
)
def test_loops_of_two_passes_on_hopper_are_those_of_dense_kernels(variant, sequences, dim, value_dim):
    """Also where tiles are measured, and where gradients of operands are summed."""
    wanted = ALL | {"gain"} if variant is GAIN else None
    dense, made = (
        compiled(
            variant, "backward", dim, value_dim=value_dim, sequences=s, target="hopper", deterministic=True,
            wanted=wanted,
        ).kernels
        for s in ("dense", sequences)
    )  # fmt: skip
    assert {"flash_dquery", "flash_dkey_dvalue"} < dense.keys() == made.keys() - LISTS
    assert bool(made.keys() & LISTS) == (sequences == "packed")
    for name in ("row_statistics", "flash_dquery", "flash_dkey_dvalue"):
        own, kernel = made[name], dense[name]
        assert own.sram <= kernel.sram + 256 and not own.serialised and not stale_addresses(own), name
        assert own.count("wgmma.mma_async") == kernel.count("wgmma.mma_async"), name
        assert own.spills_in_loops() <= kernel.spills_in_loops(), name
        for ours, theirs in zip(own.product_loops(), kernel.product_loops(), strict=True):
            assert len(ours) <= 1.06 * len(theirs), name


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("device", ["a100", "mi300x"])
@pytest.mark.parametrize("sequences", mostly(["packed"], ["lengths", "packed"]))
def test_other_gpus(sequences, device, direction):
    module = compiled(CAUSAL, direction, 64, device=device, sequences=sequences)
    for name, kernel in module.kernels.items():
        assert bool(kernel.count(PRODUCTS[device])) == name.startswith("flash_"), name


@pytest.mark.parametrize(
    ("sequences", "device"), mostly([("lengths", "a100")], [("lengths", "a100"), ("packed", "h200")])
)
@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_sinks_cost_the_loops_nothing(direction, sequences, device):
    sinks = weft.tensor("sinks", 2)
    sunk = CAUSAL.replace(sink=sinks[weft.batch, weft.head], name="sunk")
    plain, own = (compiled(v, direction, 64, sequences=sequences, device=device).kernels for v in (CAUSAL, sunk))
    assert own.keys() == plain.keys()
    for name, kernel in own.items():
        assert kernel.spilled <= plain[name].spilled + 48 and kernel.sram == plain[name].sram, name
        assert kernel.spills_in_loops() <= plain[name].spills_in_loops(), name
    if direction == "forward":
        return
    alone = compiled(sunk, "backward", 64, sequences=sequences, device=device, wanted=frozenset({"sinks"}))
    assert alone.kernels.keys() - LISTS == {"row_statistics", "flash_dquery"}
    assert not alone.kernels["flash_dquery"].count("mma")


@pytest.mark.parametrize("target", ["hopper", "triton"])
def test_measured_tiles_of_packed_sequences(target):
    kernels = compiled(DOCUMENTS, "backward", 64, sequences="packed", target=target).kernels
    runs = {n for n in RUNS if target == "triton" or n.startswith("q")}  # one pass owns keys
    assert {"query_work", "key_work", *runs} <= kernels.keys()
    assert all(kernel.sram <= by_name("h200").sram_per_block for kernel in kernels.values())
    assert target == "triton" or not kernels["flash_backward"].spills_in_loops()


@pytest.mark.parametrize(("page", "sequences"), [(16, "paged"), (128, "paged"), (16, "packed_paged")])
def test_pages_are_copied_16_bytes_at_a_time(page, sequences):
    """Smaller than a tile of keys, and larger."""
    for name, kernel in compiled(CAUSAL, "forward", 128, sequences=sequences, page=page).kernels.items():
        if name in LISTS:
            continue
        assert not kernel.spilled and not kernel.serialised, name
        assert kernel.count("wgmma.mma_async") and kernel.count(r"cp.async.cg.shared.global .* 0x10") >= 16, name


COUNTED = ("wgmma.mma_async", "mma.sync", "cp.async.c")


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_long_sequences_have_the_loops_of_all(target):
    """Which sequences are whose is settled before the loops, on either target."""
    how = {"sequences": "packed_paged", "heads": 8, "q_len": 256, "target": target}
    whole, made = (compiled(CAUSAL, "forward", 128, **how, serves=s).kernels for s in ("all", "long"))
    assert made.keys() == whole.keys()
    for name in made.keys() - LISTS:
        own, kernel = made[name], whole[name]
        assert own.sram <= kernel.sram and own.spilled <= kernel.spilled and not own.serialised, name
        assert all(own.count(pattern) == kernel.count(pattern) for pattern in COUNTED), name


def test_short_sequences_have_the_loops_of_many_rows():
    """Tiles of a call of many rows, whose SRAM they have, and nothing spilled."""
    how = {"sequences": "packed_paged", "heads": 8, "schedule": "split_kv/split_forward=triton:64x64w4s3"}
    whole, made = (
        compiled(CAUSAL, "forward", 128, **how, q_len=16, serves=serves).kernels["split_forward"]
        for serves in ("all", "short")
    )
    assert made.sram == whole.sram and not made.spilled and not made.serialised
    assert all(made.count(pattern) == whole.count(pattern) for pattern in COUNTED)


def test_pages_on_other_gpus():
    for device, page, sequences in (("a100", 16, "paged"), ("mi300x", 64, "paged"), ("mi300x", 16, "packed_paged")):
        for name, kernel in compiled(
            CAUSAL, "forward", 64, device=device, sequences=sequences, page=page
        ).kernels.items():
            assert bool(kernel.count(PRODUCTS[device])) == (name not in LISTS)


@pytest.mark.parametrize("sequences", ["dense", "paged", "packed_paged"])
def test_keys_of_few_queries_are_copied_ahead_of_products(sequences):
    """16 bytes at a time, as many tiles ahead with pages as without, and nothing is spilled."""
    kernels = compiled(CAUSAL, "forward", 128, q_len=1, heads=8, sequences=sequences).kernels
    assert kernels.keys() == {"split_forward", "join_parts"}
    split = kernels["split_forward"]
    assert not split.spilled and split.count("mma.sync") and not split.count("wgmma")
    assert split.count(r"cp.async.cg.shared.global .* 0x10") >= 64 and split.sram > 3 * 64 * 128 * 2
