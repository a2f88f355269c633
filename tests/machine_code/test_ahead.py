"""Generated kernels compile for GPUs that are not here, with the tilings that the scheduler chooses for them.

Looked at: shared memory, spilled registers, the matrix instructions, and that loops over full tiles have no mask code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from weft import head, kv_pos, q_pos, score
from weft.codegen.ahead import Compilation
from weft.codegen.targets.triton.kernels.measures import LONG_SPANS, RUNS
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.splits import JOINED_PARTS
from weft.runtime.build import build_one, jobs_of

pytest.importorskip("triton")
from ..recorded import Recorded
from ..support import mostly
from .ahead import Direction, Kernel, Module, compiled, count_opcode, stale_addresses

pytestmark = pytest.mark.compiles

window, prefix = weft.scalar("window", int), weft.scalar("prefix", int)
slopes = weft.tensor("slopes", 1)
causal = kv_pos <= q_pos
recent = causal & (q_pos - kv_pos < window)
capped = 20.0 * weft.tanh(score / 20.0)
VARIANTS = {
    "dense": weft.Attention(name="dense"),
    "causal": weft.Attention(mask=causal, name="causal"),
    "window": weft.Attention(mask=recent, name="window"),
    "softcap": weft.Attention(score=capped, mask=causal, name="softcap"),
    "softcap_window": weft.Attention(score=capped, mask=recent, name="softcap_window"),
    "alibi": weft.Attention(score=score + slopes[head] * (kv_pos - q_pos), mask=causal, name="alibi"),
    "prefix": weft.Attention(mask=causal | (kv_pos < prefix), name="prefix"),  # two intervals
    "sink": weft.Attention(mask=causal, sink=weft.tensor("sinks", 1)[head], name="sunk"),
    "softmax1": weft.Attention(mask=causal, sink=0.0, name="softmax1"),
    "documents": weft.Attention(mask=causal & weft.masks.document(weft.tensor("doc", 2, int)), name="documents"),
}
SM90 = [(name, width) for name in ("dense", "causal", "softcap_window", "alibi", "prefix") for width in (64, 128)]
SM90 += [("causal", 80), ("causal", 256)]
COMMON = [("causal", 128), ("softcap_window", 64), ("alibi", 128), ("prefix", 64), ("causal", 256)]

# Tiles whose sums do not fit beside what their loops compute: spilled also inside. dK and dV of 64 keys and 256 columns
# are 128 registers a thread, to which scores and operands are added.
SPILLS_INSIDE = {("dense", 128, "flash_dkey_dvalue"), ("causal", 256, "flash_dkey_dvalue")}
PLAN_SLACK = 512  # bytes: barriers and padding, which plans leave out
PRODUCTS = {"a100": "mma.sync", "b200": "tcgen05.mma", "mi300x": "v_mfma"}


def check_sram(module: Module, device: str = "h200") -> None:
    """Every kernel fits into a program's SRAM, with no more of it than planned."""
    for kernel in module.kernels.values():
        assert kernel.sram <= by_name(device).sram_per_block, kernel.name
        plan = module.plans.get(kernel.name)  # none: what joins parts, where there is one
        planned = plan.sram_bytes.value if plan else 0
        if planned:  # 0: only what a reduction over a row needs
            assert kernel.sram <= planned + PLAN_SLACK, f"{kernel.name}: {kernel.sram} bytes, planned {planned:.0f}"


def check_programs(module: Module) -> None:
    """No kernel takes more shared memory than its program declares, and tiles are counted to the byte."""
    assert module.rooms
    for name, room in module.rooms.items():
        taken = module.kernels[name].sram
        assert room.tiles <= taken <= room.tiles + room.others, f"{name}: {taken} bytes, declared {room}"


def check_wgmma(kernel: Kernel) -> None:
    """Products are Hopper's asynchronous ones, several in flight: waits are fewer than products."""
    assert kernel.count("wgmma.mma_async") and not kernel.count("mma.sync"), kernel.name
    assert not kernel.serialised, f"{kernel.name}: ptxas says {kernel.serialised}"
    assert kernel.instructions("WARPGROUP.DEPBAR") < kernel.instructions("HGMMA"), kernel.name


def check_full_loops(kernel: Kernel) -> None:
    """Loops come in pairs, edge tiles then full tiles; the latter choose nothing for each score."""
    loops = kernel.product_loops()
    assert loops and len(loops) % 2 == 0, f"{kernel.name}: {len(loops)} loops"
    for edge, full in zip(loops[::2], loops[1::2]):
        scores = count_opcode("MUFU.EX2", full)  # of one thread
        assert scores >= 16, kernel.name
        # a few of them choose for a row, as where a row has seen nothing yet
        assert 4 * count_opcode("F?SEL", full) <= scores <= 2 * count_opcode("F?SEL", edge), kernel.name
        assert len(full) < len(edge), kernel.name


@pytest.mark.parametrize(("name", "head_dim"), mostly(COMMON, SM90), ids=[f"{n}-D{d}" for n, d in SM90])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_portable_flash_on_sm_90(name: str, head_dim: int, direction: Direction, recorded: Recorded) -> None:
    module = compiled(VARIANTS[name], direction, head_dim)
    check_sram(module)
    for kernel in module.kernels.values():
        recorded(kernel.name, spilled=kernel.spilled)
        if kernel.name == "row_statistics":
            continue
        check_wgmma(kernel)
        check_full_loops(kernel)
        if (name, head_dim, kernel.name) not in SPILLS_INSIDE:
            assert kernel.spills_in_loops() == 0, kernel.name


@pytest.mark.parametrize(
    "name",
    mostly(["causal", "softcap", "prefix", "sink"],
           ["dense", "causal", "window", "softcap", "alibi", "prefix", "sink", "softmax1"]),
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_forward(name: str, head_dim: int) -> None:
    module = compiled(VARIANTS[name], "forward", head_dim, target="hopper", q_len=2048)
    (kernel,) = module.kernels.values()
    check_programs(module)
    assert kernel.sram <= by_name("h200").sram_per_block
    assert kernel.spilled == 0
    check_wgmma(kernel)
    check_full_loops(kernel)


@pytest.mark.parametrize("name", mostly(["dense", "prefix"], ["dense", "causal", "softcap_window", "prefix", "sink"]))
@pytest.mark.parametrize("head_dim", mostly([64], [32, 64]))
def test_hopper_forward_of_short_calls(name: str, head_dim: int) -> None:
    module = compiled(VARIANTS[name], "forward", head_dim, target="hopper", q_len=200)
    (kernel,) = module.kernels.values()
    check_programs(module)
    assert module.plans["flash_forward"].form.block_q == 128
    assert kernel.sram <= by_name("h200").sram_per_block and kernel.spilled == 0
    check_wgmma(kernel)
    check_full_loops(kernel)


@pytest.mark.parametrize("name", ["causal", "softcap"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 256), (192, 128), (80, 80), (24, 32)])
def test_hopper_forward_of_other_tiles(name: str, head_dim: int, value_dim: int) -> None:
    """In pieces, or with an output that leaves from the query's place, or it would not fit."""
    module = compiled(VARIANTS[name], "forward", head_dim, value_dim=value_dim, target="hopper")
    (kernel,) = module.kernels.values()
    check_programs(module)
    planned = module.plans["flash_forward"].sram_bytes.value
    assert planned < kernel.sram <= planned + 1024 < by_name("h200").sram_per_block  # barriers and cards besides
    assert kernel.spilled == 0
    check_wgmma(kernel)
    check_full_loops(kernel)


@pytest.mark.parametrize(
    "name", mostly(["causal", "softcap", "alibi"], ["dense", "causal", "window", "softcap", "alibi", "prefix"])
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_backward(name: str, head_dim: int, recorded: Recorded) -> None:
    """One loop a consumer, with the mask in a branch of its own; five products of a tile pair, dQ's in two halves."""
    wanted = frozenset({"query", "key", "value"})
    module = compiled(VARIANTS[name], "backward", head_dim, target="hopper", wanted=wanted)
    assert [*module.kernels] == ["row_statistics", "flash_backward", "round_dquery"]
    check_programs(module)
    if name != "alibi":  # whose plan has gradients of slopes too, and so is another target's
        check_sram(module)
    kernel = module.kernels["flash_backward"]
    recorded(kernel.name, spilled=kernel.spilled, in_loops=kernel.spills_in_loops())
    check_wgmma(kernel)
    # All queries see the first key: dQ leaves by two more warps, that of first keys stored.
    sends = name != "window"
    assert kernel.instructions("(?:@!?UP\\d )?UTMAREDG") == 2
    assert count_opcode(r"(?:@!?UP\d )?UTMASTG\.2D", [text for _, text in kernel.sass]) == (2 if sends else 0)
    loops = kernel.product_loops()
    assert len(loops) == 2  # of two consumers
    block_q = 128 if head_dim == 64 and name not in ("softcap", "alibi") else 64  # their slopes want registers
    # S and dP are sums over columns, dV and dK over queries, dQ over keys: 16 at a time
    products = 2 * head_dim // 16 + 2 * block_q // 16 + 2 * 64 // 16
    for loop in loops:
        assert count_opcode("HGMMA", loop) == products
        assert count_opcode("(?:@!?UP\\d )?UTMAREDG", loop) == (0 if sends else 1)  # dQ leaves once a tile
        assert count_opcode("MUFU.EX2", loop) == 64 * block_q // 128  # a thread's scores, once each


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", mostly([64], [64, 128]))  # plain kernels are those of test_hopper_backward
def test_a_sink_costs_the_loops_of_hopper_nothing(head_dim: int, deterministic: bool) -> None:
    """Its gradient is row_statistics' own; the other kernels have the machine code of the variant without."""
    main = frozenset({"query", "key", "value"})
    modules = [
        compiled(VARIANTS[name], "backward", head_dim, target="hopper", wanted=wanted, deterministic=deterministic)
        for name, wanted in (("causal", main), ("sink", main | {"sinks"}))
    ]
    plain, sunk = (module.kernels for module in modules)
    assert [*plain] == [*sunk] and sunk["row_statistics"].spilled == 0
    for name in set(plain) - {"row_statistics"}:
        assert sunk[name].spilled <= plain[name].spilled and sunk[name].sram == plain[name].sram
        loops = [[len(loop) for loop in kernel.product_loops()] for kernel in (plain[name], sunk[name])]
        assert loops[0] == loops[1], name


@pytest.mark.parametrize("device", mostly(["h200"], ["a100", "h200"]))
@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_sinks_of_the_portable_kernels(direction: Direction, schedule: str, device: str) -> None:
    plain, sunk = (
        compiled(VARIANTS[name], direction, 128, target="triton", schedule=schedule, device=device).kernels
        for name in ("causal", "sink")
    )
    assert [*plain] == [*sunk]
    for name, kernel in sunk.items():
        assert kernel.spilled <= plain[name].spilled, name


@pytest.mark.parametrize("name", mostly(["causal", "softcap"], ["dense", "causal", "softcap", "alibi"]))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_backward_in_two_passes(name: str, head_dim: int, recorded: Recorded) -> None:
    """Four products of a tile pair, then three; nothing is added to by several programs."""
    wanted = frozenset({"query", "key", "value"})
    module = compiled(VARIANTS[name], "backward", head_dim, target="hopper", wanted=wanted, deterministic=True)
    assert [*module.kernels] == ["row_statistics", "flash_dquery", "flash_dkey_dvalue"]
    check_programs(module)
    for kernel in module.kernels.values():
        assert kernel.sram <= by_name("h200").sram_per_block
        if name != "alibi" and kernel.name in module.plans:
            assert kernel.sram <= module.plans[kernel.name].sram_bytes.value + PLAN_SLACK, kernel.name
        tickets = int(kernel.name == "flash_dkey_dvalue")  # the number of the next tile of keys
        assert kernel.count(r"\b(red|atom)\.") == tickets and not kernel.count(r"cp\.reduce"), kernel.name
        if kernel.name == "row_statistics":
            continue
        recorded(kernel.name, spilled=kernel.spilled)
        check_wgmma(kernel)
        assert len(kernel.product_loops()) == 2  # of two consumers


@pytest.mark.parametrize(
    ("name", "head_dim", "value_dim", "products"),
    [
        # S and dP by 16 columns, dV and dK by 16 queries, dQ of 64 queries by 16 keys
        ("causal", 24, 32, [2 + 2 + 8 + 8 + 8] * 2),
        # dV and dK of two pieces, dQ of one
        ("causal", 96, 96, [6 + 6 + 8 + 8 + 8] * 2), ("softcap", 80, 80, [5 + 5 + 8 + 8 + 8] * 2),
        # without dQ, and tiles of 32 queries
        ("causal", 192, 128, [12 + 8 + 2 + 4] * 2),
        # S or dP, dV and dK
        ("softcap", 256, 256, [16 + 4 + 4] * 2), ("documents", 256, 256, [16 + 4 + 4] * 2),
    ],
)  # fmt: skip
def test_hopper_backward_of_other_tiles(
    name: str, head_dim: int, value_dim: int, products: list[int], recorded: Recorded
) -> None:
    """No product on padding but where 200 to 248 columns are filled up."""
    wanted = frozenset({"query", "key", "value"})
    module = compiled(VARIANTS[name], "backward", head_dim, value_dim=value_dim, target="hopper", wanted=wanted)
    check_programs(module)
    main = "flash_backward" if head_dim <= 128 else "flash_dkey_dvalue"
    for kernel in module.kernels.values():
        assert kernel.sram <= by_name("h200").sram_per_block
        recorded(kernel.name, spilled=kernel.spilled)
    kernel = module.kernels[main]
    check_wgmma(kernel)
    assert [count_opcode("HGMMA", loop) for loop in kernel.product_loops()] == products


@pytest.mark.parametrize("head_dim", mostly([64], [64, 128]))
def test_a_scale_of_any_sign_costs_the_full_loops_of_hopper_nothing(head_dim: int) -> None:
    """A score times t[head] is linear with a scale that may be negative or 0: Q changes its sign before the loops."""
    variants = [VARIANTS["causal"], weft.Attention(score * weft.tensor("t", 1)[head], causal, name="signed")]
    modules = [compiled(variant, "forward", head_dim, target="hopper") for variant in variants]
    plain, signed = (module.kernels["flash_forward"] for module in modules)
    negations = r"(sub|neg|mul|fma)[a-z.]*\.bf16x2"
    assert signed.count(negations) >= 16 and not plain.count(negations)
    assert signed.spilled == 0
    check_wgmma(signed)
    check_full_loops(signed)
    for before, after in zip(plain.product_loops()[1::2], signed.product_loops()[1::2], strict=True):
        assert len(after) <= len(before) + 2
        for opcode in ("BAR", "FMNMX", "FFMA", "FMUL", "F?SEL", "MUFU", "HGMMA"):
            assert count_opcode(opcode, after) == count_opcode(opcode, before), opcode


@pytest.mark.parametrize("head_dim", mostly([128], [64, 128]))
@pytest.mark.parametrize(
    ("target", "direction"),
    [("triton", "forward"), ("triton", "backward"), ("hopper", "forward"), ("hopper", "backward")],
)
def test_kernels_of_a_mask_that_is_measured(
    target: str, direction: Direction, head_dim: int, recorded: Recorded
) -> None:
    """Documents of int64 ids: the ids of a tile's rows take registers, two for each."""
    module = compiled(VARIANTS["documents"], direction, head_dim, target=target)
    if target == "hopper" and direction == "backward":
        measuring = ["q_spans", "q_ends", "q_long_spans"]
        assert [*module.kernels] == ["row_statistics", *measuring, "flash_backward", "round_dquery"]
        kernel = module.kernels["flash_backward"]
        recorded(kernel.name, spilled=kernel.spilled)
        check_wgmma(kernel)
        return
    spans = {n for n in RUNS if n.startswith("kv") or direction == "backward"}
    assert spans <= set(module.kernels)
    for name in spans & {*LONG_SPANS}:  # many programs on an SM, of one warp each
        assert module.kernels[name].count("bar.sync") == 0
        assert module.kernels[name].registers <= 80
    for kernel in module.kernels.values():
        assert kernel.sram <= by_name("h200").sram_per_block
        recorded(kernel.name, spilled=kernel.spilled)
        if kernel.name not in spans | {"row_statistics"}:
            check_wgmma(kernel)
            check_full_loops(kernel)


@pytest.mark.parametrize("schedule", ["standard", "streaming"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_other_schedules_on_sm_90(schedule: str, direction: Direction) -> None:
    module = compiled(VARIANTS["causal"], direction, 64, schedule=schedule)
    check_sram(module)
    elementwise = {"standard_softmax", "standard_dscores", "row_statistics"}
    for kernel in module.kernels.values():
        assert kernel.spilled == 0, kernel.name
        if kernel.name not in elementwise:
            check_wgmma(kernel)


@pytest.mark.parametrize("device", ["a100", "b200", "mi300x"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_other_machines(device: str, direction: Direction, recorded: Recorded) -> None:
    module = compiled(VARIANTS["causal"], direction, 64, device=device)
    for kernel in module.kernels.values():
        assert kernel.sram <= by_name(device).sram_per_block, kernel.name
        assert bool(kernel.count(PRODUCTS[device])) == (kernel.name != "row_statistics"), kernel.name
        recorded(kernel.name, spilled=kernel.spilled)


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_a_sine_takes_no_branches(target: str, recorded: Recorded) -> None:
    """Those of CUDA's own library are for angles above 105615: 48,000 instructions of a tile, a minute of ptxas."""
    waves = weft.Attention(score + weft.sin(score), causal, name="waves")
    for variant in (waves, VARIANTS["causal"]):
        kernel = compiled(variant, "forward", 128, target=target).kernels["flash_forward"]
        recorded(variant.name, instructions=len(kernel.sass))
        assert len(kernel.sass) < 13_000 and not kernel.spills_in_loops()
        assert kernel.count(r"\bbra\b") < 200


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_scores_far_from_0_are_rounded_alike_in_every_kernel(target: str) -> None:
    """No product is added to before it is rounded (the other such instructions are those of flushing logarithms)."""
    padding = weft.tensor("padding", 2)
    variant = weft.Attention(score=score + padding[weft.batch, kv_pos] / (weft.abs(slopes[head]) + 0.5), name="padded")
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        wanted = frozenset({"query", "key", "value"}) if direction == "backward" else None
        for kernel in compiled(variant, direction, 64, target=target, wanted=wanted).kernels.values():
            assert kernel.count(r"fma\.rn\.f32") == 0, kernel.name


NARROW = [("streaming", 32, 16), ("streaming", 24, 8), ("flash", 32, 16)]


@pytest.mark.parametrize(
    ("name", "head_dim", "deterministic", "sequences"),
    mostly(
        [("causal", 64, False, "dense"), ("documents", 128, True, "packed")],
        [("softcap", 128, True, "dense"), ("causal", 256, False, "dense"), ("causal", 128, False, "lengths")],
    ),
)
def test_backwards_of_hopper_are_launched_early_and_wait(
    name: str, head_dim: int, deterministic: bool, sequences: str
) -> None:
    """Each kernel waits for the one before it, and all but the last let the next one begin."""
    made = compiled(
        VARIANTS[name], "backward", head_dim, target="hopper", deterministic=deterministic, sequences=sequences
    )
    early = [kernel for kernel in made.kernels.values() if kernel.launched_early]
    assert len(early) == 3 and early[0].name == "row_statistics"
    assert [kernel.count(r"griddepcontrol\.wait") for kernel in early] == [1, 1, 1]
    assert all(kernel.count(r"griddepcontrol\.launch_dependents") for kernel in early[:-1])
    assert not any(kernel.count("griddepcontrol") for kernel in made.kernels.values() if kernel not in early)


@pytest.mark.parametrize(("direction", "q_len"), [("forward", 256), ("backward", 256), ("forward", 1)])
@pytest.mark.parametrize("dim", mostly([256], [128]))
def test_kernels_fit_where_a_program_has_100_kib(direction: Direction, q_len: int, dim: int) -> None:
    check_sram(compiled(VARIANTS["causal"], direction, dim, device="l40s", q_len=q_len, heads=8), "l40s")


@pytest.mark.parametrize(
    ("device", "sequences"),
    mostly([("h200", "paged"), ("a100", "dense"), ("l40s", "paged")], [("h200", "dense"), ("h200", "packed_paged")]),
)
def test_decode_is_launched_early_and_waits(device: str, sequences: str) -> None:
    """On GPUs that can, both kernels wait for the one before them, and let the next one begin."""
    made = compiled(
        VARIANTS["causal"], "forward", 128, device=device, schedule="split_kv", sequences=sequences, q_len=1
    )
    can = device == "h200"
    assert made.kernels.keys() == {"split_forward", "join_parts"}
    for kernel in made.kernels.values():
        assert kernel.launched_early == can
        assert kernel.count(r"griddepcontrol\.wait") == kernel.count(r"griddepcontrol\.launch_dependents") == can


def test_parts_are_read_together() -> None:
    """Sixteen of a row, and their statistics, before any of them is waited for: a few at a time took 8 us of 14."""
    made = compiled(VARIANTS["causal"], "forward", 128, schedule="split_kv", q_len=1)
    assert made.kernels["join_parts"].count(r"ld\.global") >= 2 * JOINED_PARTS


@pytest.mark.parametrize(("schedule", "head_dim", "value_dim"), NARROW)
def test_addresses_of_narrow_tiles(schedule: str, head_dim: int, value_dim: int) -> None:
    wanted = frozenset({"query", "value"})
    module = compiled(VARIANTS["causal"], "backward", head_dim, schedule=schedule, value_dim=value_dim, wanted=wanted)
    for kernel in module.kernels.values():
        assert not stale_addresses(kernel), kernel.name


@pytest.mark.parametrize("sequences", mostly(("paged",), ("dense", "lengths")))
def test_decode_steps_are_built_ahead(sequences: str, tmp_path: Path) -> None:
    with weft.settings(cache_dir=tmp_path):
        for job in jobs_of(
            [VARIANTS["causal"]], device="h200", head_dims=[128], directions=[], sequences=[sequences], decode=[4]
        ):
            done = build_one(job)
            assert done.kernels == ("split_forward", "join_parts") and not done.problem


def test_kernels_of_long_axes_are_built_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call compiles them where it launches them; who builds ahead does not know which calls there will be.

    Those of such a mask compile in test_kernels_of_a_mask_that_is_measured.
    """
    built: list[str] = []
    monkeypatch.setattr(Compilation, "compile", lambda seen, machine: built.append(seen.name))
    with weft.settings(cache_dir=tmp_path):
        (job,) = jobs_of([VARIANTS["documents"]], device="h200", head_dims=[64], directions=["forward"])
        assert build_one(job).kernels == (*built,) == ("kv_spans", "kv_ends", "kv_long_spans", "flash_forward")


IDS = weft.tensor("ids", 2, int)
COLUMNS = [weft.tensor(name, 2)[head, kv_pos] for name in "abcd"]
# the variant, how many queries, and what a tile of keys and values has no room beside
CROWDED = {
    "heads": (weft.Attention(mask=IDS[head, q_pos] == IDS[head, kv_pos]), 16),  # rows of a tile: of several heads
    "pairs": (weft.Attention(score + weft.tensor("bias", 3)[head, q_pos, kv_pos]), 256),
    "columns": (weft.Attention(score + COLUMNS[0] + COLUMNS[1] + COLUMNS[2] + COLUMNS[3]), 256),
}


@pytest.mark.parametrize(("name", "head_dim"), [("heads", 64), ("pairs", 128), ("columns", 128)])
def test_tiles_have_room_for_operands_of_64_bits(name: str, head_dim: int) -> None:
    variant, q_len = CROWDED[name]
    found = compiled(variant, "forward", head_dim, q_len=q_len, heads=16, floats=torch.float64)
    (own,) = found.kernels.keys() & {"flash_forward", "split_forward"}
    assert found.kernels[own].sram <= by_name("h200").sram_per_block
