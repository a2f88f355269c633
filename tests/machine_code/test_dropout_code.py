"""Dropout compiles for GPUs that are not here: random numbers where the weights lie, and nothing moved for them."""

from __future__ import annotations

import pytest

import weft
from weft import masks

pytest.importorskip("triton")
from .ahead import Direction, Kernel, compiled, count_opcode

pytestmark = pytest.mark.compiles

PLAIN = weft.Attention(mask=masks.causal, name="causal")
DROPPED = PLAIN.replace(dropout=0.1, name="dropped")
ROUNDS = 7
THREADS = 128  # of a warpgroup; kernels have w4 or w8


@pytest.mark.parametrize(("direction", "width"), [("forward", 64), ("backward", 128)])
def test_no_number_crosses_threads(direction: str, width: int) -> None:
    """As much SRAM as without dropout, as many exchanges, and one counter for sixteen or two pairs of a thread."""
    made = compiled(DROPPED, direction, width, target="triton")
    forms = "/".join(["flash", *(f"{n}=triton:{plan.form}" for n, plan in made.plans.items())])
    plain = compiled(PLAIN, direction, width, target="triton", schedule=forms)
    assert made.kernels.keys() == plain.kernels.keys()
    for name, kernel in made.kernels.items():
        before = plain.kernels[name]
        assert kernel.sram == before.sram, name
        for pattern in (r"st\.shared", r"stmatrix", r"shfl\.sync", "bar.sync"):
            assert kernel.count(pattern) == before.count(pattern), f"{name}: {pattern}"
        assert not kernel.serialised and kernel.spills_in_loops() <= 2, name
        if name == "row_statistics":
            continue
        form = made.plans[name].form
        pairs = form.block_q * form.block_kv // (form.num_warps * 32)
        counters = pairs // (2 if name == "flash_dkey_dvalue" else 16)
        loops = 2  # over edge tiles and over full ones
        # two products of 64 bits a round; those of head and batch are the same in all counters of a thread
        assert (
            kernel.count(r"mul\.(wide\.u32|hi\.u32)") <= loops * counters * 2 * ROUNDS + before.count("mul.wide") + 8
        ), name


def test_drawers_of_the_hopper_forward() -> None:
    """A consumer reads masks in pieces of 16 bytes; numbers are drawn before the wait for the place that they have."""
    kernel = compiled(DROPPED, "forward", 128, target="hopper").kernels["flash_forward"]
    assert kernel.spills_in_loops() == 0 and not kernel.serialised
    for loop in kernel.product_loops():
        assert count_opcode("LDS.128", loop) == 8 and not count_opcode("IMAD.WIDE", loop)
    code = [text for _, text in kernel.sass]
    (stored,) = [at for at, text in enumerate(code) if ", 0x100" in text and "BAR.SYNC" in text]
    compared = [at for at, text in enumerate(code) if text.startswith("HSET2")]
    between = [text for text in code[stored : stored + 60] if text.startswith(("HSET2", "STS.128"))]
    assert sum(at < stored for at in compared) >= 16 and between[0].startswith("STS.128")


CAPPED = DROPPED.replace(score=20.0 * weft.tanh(weft.score / 20.0))


@pytest.mark.parametrize(
    ("variant", "width", "schedule"),
    [(DROPPED, 64, None), (CAPPED, 128, "flash/flash_forward=hopper:128x128s2q1+lazy")],
)
def test_consumers_of_the_hopper_forward_that_draw(variant: weft.Attention, width: int, schedule: str | None) -> None:
    """Nothing is moved nor spilled in its loops, which hold the softmax of 64 or 128 keys."""
    kernel = compiled(variant, "forward", width, target="hopper", schedule=schedule).kernels["flash_forward"]
    assert kernel.spills_in_loops() <= 4 and not kernel.serialised
    plain = compiled(variant.replace(dropout=0.0), "forward", width, target="hopper").kernels["flash_forward"]
    for pattern, more in ((r"st\.shared", 2), ("stmatrix", 0), (r"ld\.shared", 8)):  # the operand seed, by program
        assert kernel.count(pattern) <= plain.count(pattern) + more, pattern


@pytest.mark.parametrize(("device", "direction"), [("mi300x", "forward"), ("a100", "backward")])
def test_other_gpus(device: str, direction: str) -> None:
    module = compiled(DROPPED, direction, 64, device=device, target="triton")
    product = {"a100": "mma.sync", "mi300x": "v_mfma"}[device]
    for name, kernel in module.kernels.items():
        assert bool(kernel.count(product)) == name.startswith("flash_"), name


@pytest.mark.parametrize("direction", ["backward", "forward"])
@pytest.mark.parametrize(
    ("variant", "width"), [(CAPPED, 128), (DROPPED.replace(mask=masks.document(weft.tensor("doc", 2, int))), 64)]
)
def test_hardly_anything_is_spilled_in_loops(variant: weft.Attention, width: int, direction: Direction) -> None:
    for name, kernel in compiled(variant, direction, width, target="triton").kernels.items():
        of_loops = sum(map(len, kernel.product_loops()))
        assert kernel.spills_in_loops() * 200 <= of_loops, name


def drawing_loops(kernel: Kernel) -> list[list[str]]:
    """Of the drawers, one for 32 queries of a tile: loops of counters without matrix products."""
    loops = [loop for loop in kernel.inner_loops() if not count_opcode("HGMMA", loop)]
    return [loop for loop in loops if count_opcode(r"IMAD\.WIDE", loop) >= 2 * (ROUNDS - 2)]


SPILLED_KEYS = 3  # keys of rounds, which a drawer of sequences with lengths may load anew for each counter


@pytest.mark.parametrize("sequences", ["lengths", "packed"])
@pytest.mark.parametrize("width", [128, 64])  # the dense kernel of 128 is that of test_the_hopper_backward
def test_the_hopper_backward_of_sequences(width: int, sequences: str) -> None:
    """Its loops are those of the dense kernel."""
    dense, own = (
        compiled(DROPPED, "backward", width, target="hopper", sequences=s).kernels["flash_backward"]
        for s in ("dense", sequences)
    )
    assert not own.serialised and own.spills_in_loops() <= dense.spills_in_loops() + 16
    for ours, theirs in zip(own.product_loops(), dense.product_loops(), strict=True):
        assert len(ours) <= len(theirs) * 1.15
    assert len(drawing_loops(own)) == 64 // 32
    for loop in drawing_loops(own):
        assert count_opcode("(?:LDL|STL)", loop) <= SPILLED_KEYS


@pytest.mark.parametrize("sequences", ["dense", "packed"])
@pytest.mark.parametrize(("width", "value_dim"), [(64, 64), (128, 128), (192, 128)])
def test_the_hopper_backward_in_two_passes(width: int, value_dim: int, sequences: str) -> None:
    """Nothing is spilled: numbers of a consumer's own pairs cost six instructions each, bits of drawers five."""
    given = {"target": "hopper", "value_dim": value_dim, "sequences": sequences, "deterministic": True}
    made = compiled(DROPPED, "backward", width, **given)
    forms = "/".join(f"{n}=hopper:{made.plans[n].form}" for n in ("flash_dquery", "flash_dkey_dvalue"))
    plain = compiled(DROPPED.replace(dropout=0.0), "backward", width, schedule=f"flash/{forms}", **given)
    for name, most in (("flash_dquery", 6.2), ("flash_dkey_dvalue", 5.0)):
        kernel, form = made.kernels[name], made.plans[name].form
        assert not kernel.serialised and not kernel.spills_in_loops(), name
        pairs = 64 * (form.block_kv if name == "flash_dquery" else form.block_q) // THREADS
        for ours, theirs in zip(kernel.product_loops(), plain.kernels[name].product_loops(), strict=True):
            assert len(ours) <= len(theirs) + most * pairs, name
    drawn = drawing_loops(made.kernels["flash_dkey_dvalue"])
    assert len(drawn) == made.plans["flash_dkey_dvalue"].form.block_q // 32
    assert not any(count_opcode("(?:LDL|STL)", loop) for loop in drawn)


@pytest.mark.parametrize(("variant", "width"), [(DROPPED, 128), (CAPPED, 64), (DROPPED, 80)])
def test_the_hopper_backward(variant: weft.Attention, width: int) -> None:
    """Drawers compute a counter once for sixteen pairs; consumers look at bits, few instructions for each pair."""
    kernel = compiled(variant, "backward", width, target="hopper").kernels["flash_backward"]
    form = "flash/flash_backward=hopper:64x128s2"
    plain = compiled(variant.replace(dropout=0.0), "backward", width, target="hopper", schedule=form)
    # 8 registers of a consumer are the drawers', who would spill in each counter else, which costs more
    assert not kernel.serialised and kernel.spills_in_loops() <= plain.kernels["flash_backward"].spills_in_loops() + 16
    consumers, before = (k.product_loops() for k in (kernel, plain.kernels["flash_backward"]))
    pairs = 64 * 64 // THREADS
    assert len(consumers) == len(before) == 2
    for ours, theirs in zip(consumers, before):
        assert len(ours) <= len(theirs) + 6 * pairs  # of which some are addresses, in which the plain kernel has a zero
    assert len(drawing_loops(kernel)) == 64 // 32
    for loop in drawing_loops(kernel):
        assert not count_opcode("(?:LDL|STL)", loop)
        assert len(loop) <= 104  # of two counters
        assert count_opcode(r"(?:ISETP|SEL)", loop) <= 2  # a comparison is one of two pairs and leaves their bits
