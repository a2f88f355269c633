"""Schedules: what is chosen, what fits, what a user may ask for."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from weft.compiler.analysis.records import Traits
from weft.compiler.planning import schedule as module
from weft.compiler.planning.cost import accumulator_registers, sram_bytes
from weft.compiler.planning.hardware import A100, B200, CPU, H100, H200, KNOWN, MI300X
from weft.compiler.planning.kernels import KERNELS
from weft.compiler.planning.records import Schedule, Shape, Tiling
from weft.compiler.planning.schedule import ALGORITHMS, candidates, choose, parse_schedule, resolve, tiling_in
from weft.compiler.planning.segments import for_heads, for_latent
from weft.ir.errors import WeftError

GPUS = [A100, H100, H200, B200, MI300X]
WIDTHS = [16, 40, 64, 80, 96, 128, 192, 256]


def shape(width: int, dtype: str = "bf16", length: int = 1024) -> Shape:
    return Shape(2, 8, 2, length, length, width, width, dtype)


@pytest.mark.parametrize("hardware", GPUS, ids=lambda h: h.name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_choice_fits_sram(hardware, algorithm) -> None:
    for width in WIDTHS:
        for dtype in ("bf16", "fp32"):
            sizes = shape(width, dtype)
            chosen = choose(sizes, hardware, "triton", algorithm)
            for kernel in KERNELS[algorithm]:
                needed = sram_bytes(kernel, tiling_in(chosen, kernel.slot), sizes, hardware, for_heads(width, width))
                assert needed <= hardware.sram_per_block, (kernel.name, width, dtype)


def test_tables_respect_registers() -> None:
    for width in (64, 128, 256):
        chosen = choose(shape(width), H100, "triton")
        for kernel in KERNELS["flash"]:
            assert accumulator_registers(kernel, tiling_in(chosen, kernel.slot), for_heads(width, width)) <= 224


def test_lengths_batch_and_heads_never_change_the_choice() -> None:
    known = choose(shape(64), H200, "triton")
    for length in (1, 250, 521, 100_000):
        assert choose(shape(64, length=length), H200, "triton") == known
    assert choose(Shape(64, 32, 1, 1024, 77, 64, 64), H200, "triton") == known


def test_fixed_forms() -> None:
    assert choose(shape(64), H100, "hopper").forward == Tiling(192, 128, 12, 3)
    assert choose(shape(128), H100, "hopper").forward == Tiling(128, 128, 8, 2)
    assert choose(shape(128), CPU, "cpu").forward.block_kv == 128
    assert choose(shape(128), CPU, "interpret").forward.block_q == 32
    with pytest.raises(WeftError, match=r"target hopper has forms for D 64, 128, got 80; use target='triton'"):
        choose(shape(80), H100, "hopper")


def test_latent_forms_get_a_schedule() -> None:
    absorbed = for_latent("absorbed", 512, 64, 128, 128)
    sizes = Shape(1, 128, 1, 1, 4096, 576, 512)
    chosen = choose(sizes, H200, "triton", segments=absorbed)
    assert sram_bytes(KERNELS["flash"][0], chosen.forward, sizes, H200, absorbed) <= H200.sram_per_block
    expanded = for_latent("expanded", 512, 64, 128, 128)
    assert choose(Shape(1, 8, 8, 64, 64, 192, 128), H200, "triton", segments=expanded).forward.block_q >= 64


def test_candidates_start_with_the_choice_and_change_one_kernel_each() -> None:
    found = candidates(shape(128), H200, "triton")
    assert found[0] == choose(shape(128), H200, "triton")
    assert 10 < len(found) <= 34 and len(set(found)) == len(found)
    for other in found[1:]:
        changed = [s for s in module.SLOTS if tiling_in(other, s) != tiling_in(found[0], s)]
        assert len(changed) == 1
    assert candidates(shape(128), CPU, "cpu") == [choose(shape(128), CPU, "cpu")]


def test_text_reads_back() -> None:
    for hardware in KNOWN.values():
        for algorithm in ALGORITHMS:
            chosen = choose(shape(64), hardware, "cpu" if hardware.kind == "cpu" else "triton", algorithm)
            assert parse_schedule(str(chosen)) == chosen


@pytest.mark.parametrize(
    "text", ["flsh", "", "flash/triton", "flash/triton/64x64w4s2", "flash/vulkan/1x1w1s1/1x1w1s1/1x1w1s1"]
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        WeftError, match=r"schedule: expected standard, streaming, flash, or text like 'flash/triton/128x64w4s3"
    ):
        parse_schedule(text)


def test_resolve_takes_a_name_a_schedule_or_its_text() -> None:
    sizes = shape(64)
    chosen = choose(sizes, H200, "triton", "streaming")
    assert resolve("streaming", sizes, H200, "triton") == chosen
    assert resolve(None, sizes, H200, "triton").algorithm == "flash"
    assert resolve(str(chosen), sizes, H200, "triton") == chosen
    assert resolve(chosen, sizes, H200, "triton") is chosen


def _with_forward(tiling: Tiling, target: str = "triton") -> Schedule:
    fine = Tiling(64, 64, 4, 2)
    return Schedule("flash", target, tiling, fine, fine)


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Tiling(48, 64), r"forward 48x64w4s2: expected block_q to be a power of two of at least 16, got 48"),
        (Tiling(64, 8), r"expected block_kv to be a power of two of at least 16, got 8"),
        (Tiling(64, 64, 3), r"expected 1, 2, 4, 8 or 16 warps, got 3"),
        (Tiling(64, 64, 4, 0), r"expected at least 1 stage, got 0"),
    ],
)
def test_impossible_tilings(tiling: Tiling, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        resolve(_with_forward(tiling), shape(64), H200, "triton")


def test_tiles_too_large_for_sram_say_what_is_needed_and_there() -> None:
    wanted = r"flash_forward with 128x128w8s4 needs 589824 bytes of SRAM for D 256, .* has 232448: use smaller"
    with pytest.raises(WeftError, match=wanted):
        resolve(_with_forward(Tiling(128, 128, 8, 4)), shape(256), H200, "triton")


def test_a_machine_too_small_for_any_tiling() -> None:
    tiny = replace(H200, sram_per_block=8000)
    with pytest.raises(
        WeftError, match=r"no tiling of flash \(forward\) fits .* needs \d+ bytes of SRAM .* has 8000; use a smaller"
    ):
        choose(shape(128), tiny, "triton")


def test_a_schedule_of_another_target() -> None:
    with pytest.raises(WeftError, match=r"it is for target cpu, the call's target is triton; pass target='cpu'"):
        resolve(_with_forward(Tiling(64, 64), "cpu"), shape(64), H200, "triton")


def test_choosing_is_quick_and_needs_no_sympy() -> None:
    started = time.perf_counter()
    for width in (72, 88, 136, 168):
        choose(shape(width), B200, "triton")
    assert time.perf_counter() - started < 0.2
    code = (
        "import sys; from weft.compiler.planning import hardware, records, schedule; "
        "schedule.choose(records.Shape(1, 1, 1, 8, 8, 64, 64), hardware.H100, 'triton'); print('sympy' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_hopper_schedule_has_its_fixed_form() -> None:
    fixed = choose(shape(64), H100, "hopper")
    assert resolve(str(fixed), shape(64), H100, "hopper") == fixed
    other = str(fixed).replace("192x128w12s3", "128x128w8s3")
    with pytest.raises(
        WeftError, match=r"the hopper forward has one form for these widths, 192x128w12s3, got 128x128w8s3"
    ):
        resolve(other, shape(64), H100, "hopper")
    positional = choose(shape(64), H100, "hopper", traits=Traits(positional=True))
    assert positional.forward == Tiling(128, 128, 8, 3)
