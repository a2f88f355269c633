"""Which tiling each kernel gets: candidates that fit the machine, a small table of good ones, the user's own text.

A choice depends on widths, dtype, machine and target only. Lengths, batch and heads never enter, because a new length
must not compile anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import log
from typing import Literal, get_args

from ...ir.errors import WeftError
from ..analysis.records import Traits
from .cost import accumulator_registers, cost_of, dense_counts, sram_bytes, tiling_in
from .hardware import Hardware
from .kernels import KERNELS, Kernel, Slot
from .records import Schedule, Shape, Tiling
from .segments import Segments, for_heads

Algorithm = Literal["standard", "streaming", "flash"]
Target = Literal["hopper", "triton", "interpret", "cpu"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
TARGETS: tuple[Target, ...] = get_args(Target)
SLOTS: tuple[Slot, ...] = get_args(Slot)

REGISTER_LIMIT = 224  # a thread has 255; the rest is for addresses and loads on their way
_ALTERNATIVES = 12  # tilings of one kernel that are worth measuring

# Tilings (forward, backward_q, backward_kv) of the flash kernels of target `triton`, by the wider head dimension up to
# which they are meant. 16-bit operands. Those of sm_90 were measured on one H200 (docs/performance.md) and also serve
# later NVIDIA chips; a mask makes smaller tiles pay, because less of an edge tile is wasted.
_FLASH_SM90_DENSE = {
    64: (Tiling(128, 64, 8, 3), Tiling(128, 64, 4, 3), Tiling(32, 128, 4, 4)),
    128: (Tiling(128, 128, 8, 3), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 3)),
    256: (Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 64, 8, 2)),
}
_FLASH_SM90_MASKED = {
    64: (Tiling(64, 64, 4, 3), Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3)),
    128: (Tiling(128, 64, 8, 4), Tiling(128, 64, 8, 3), Tiling(32, 64, 4, 3)),
    256: (Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 64, 8, 2)),
}
# Scores with a derivative, and masks that read tensors by position, want registers of their own.
_FLASH_SM90_CURVED = {
    **_FLASH_SM90_MASKED,
    64: (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
}
_FLASH_SM90_MEASURED = {
    **_FLASH_SM90_MASKED,
    64: (Tiling(64, 64, 4, 3), Tiling(64, 32, 4, 3), Tiling(32, 64, 4, 3)),
    128: (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2)),
}
_FLASH_SM80 = {
    64: (Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
    128: (Tiling(128, 64, 8, 3), Tiling(64, 64, 8, 2), Tiling(32, 64, 4, 2)),
    256: (Tiling(64, 64, 8, 2), Tiling(32, 64, 8, 2), Tiling(32, 32, 8, 2)),
}
_FLASH_GFX942 = {
    64: (Tiling(128, 64, 4, 1), Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),
    128: (Tiling(128, 64, 4, 1), Tiling(64, 32, 4, 1), Tiling(32, 64, 4, 1)),
    256: (Tiling(64, 32, 4, 1), Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
}
# Full-precision fp32 products run on ordinary units, which take their operands from registers: small tiles.
_FP32 = {
    64: (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
    128: (Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
    256: (Tiling(16, 32, 8, 1), Tiling(16, 32, 8, 1), Tiling(32, 16, 8, 1)),
}
# The other algorithms are there to be compared: one table serves all machines; where it does not fit, the ranking does.
_STREAMING = {
    64: (Tiling(64, 128, 4, 2), Tiling(64, 128, 8, 2), Tiling(64, 128, 8, 2)),
    128: (Tiling(64, 128, 8, 2), Tiling(64, 128, 8, 2), Tiling(64, 128, 8, 2)),
    256: (Tiling(64, 64, 8, 2), Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 2)),
}
_STANDARD = {
    128: (Tiling(128, 128, 8, 3), Tiling(128, 128, 8, 3), Tiling(128, 128, 8, 3)),
    256: (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2), Tiling(64, 128, 8, 2)),
}
# The Gluon kernel has one form a head dimension: three consumers of 64 rows, or two.
_HOPPER = {64: Tiling(192, 128, 12, 3), 128: Tiling(128, 128, 8, 2)}
_HOPPER_POSITIONAL = {64: Tiling(128, 128, 8, 3), 128: Tiling(128, 128, 8, 2)}  # positions need registers
_INTERPRET = Tiling(32, 32, 4, 1)  # small, so that short test problems have several tiles
_CPU = Tiling(128, 128, 1, 1)  # measured on two cores: score tiles stay in L2, and short problems have several


# -- choosing --------------------------------------------------------------------------------------------------------
def choose(
    shape: Shape,
    hardware: Hardware,
    target: Target,
    algorithm: Algorithm = "flash",
    *,
    segments: Segments | None = None,
    traits: Traits = Traits(),  # noqa: B008  frozen
) -> Schedule:
    """The schedule for operands of these widths and this dtype on this machine.

    Raises WeftError if no tiling fits into the SRAM of a program.
    """
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    return _choose(_nominal(shape), hardware, target, algorithm, parts, traits)


def candidates(
    shape: Shape,
    hardware: Hardware,
    target: Target,
    algorithm: Algorithm = "flash",
    *,
    segments: Segments | None = None,
    traits: Traits = Traits(),  # noqa: B008  frozen
) -> list[Schedule]:
    """The chosen schedule, then those that differ from it in the tiling of one kernel, best predicted first."""
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    best = choose(shape, hardware, target, algorithm, segments=parts, traits=traits)
    found = [best]
    for slot in SLOTS:
        for tiling in alternatives(slot, shape, hardware, target, algorithm, parts):
            schedule = with_tiling(best, slot, tiling)
            if schedule not in found:
                found.append(schedule)
    return found


def alternatives(
    slot: Slot, shape: Shape, hardware: Hardware, target: Target, algorithm: Algorithm, parts: Segments
) -> list[Tiling]:
    """Tilings of one kernel worth measuring: the chosen one, then others, best predicted first.

    Only the chosen one where the target has a fixed form.
    """
    nominal = _nominal(shape)
    chosen = tiling_in(_choose(nominal, hardware, target, algorithm, parts, Traits()), slot)
    if target != "triton":
        return [chosen]
    others = [t for t in _ranked(slot, nominal, hardware, algorithm, parts) if t != chosen]
    return [chosen, *others[: _ALTERNATIVES - 1]]


@lru_cache(maxsize=1024)
def _choose(
    shape: Shape, hardware: Hardware, target: Target, algorithm: Algorithm, parts: Segments, traits: Traits
) -> Schedule:
    fixed = {"interpret": _INTERPRET, "cpu": _CPU}.get(target)
    if fixed is not None:
        return Schedule(algorithm, target, fixed, fixed, fixed)
    if target == "hopper":
        return replace(
            _choose(shape, hardware, "triton", algorithm, parts, traits), target=target, forward=_hopper(parts, traits)
        )
    preferred = _preferred(shape, hardware, algorithm, parts, traits)
    chosen = []
    for number, slot in enumerate(SLOTS):
        wanted = preferred[number] if preferred else None
        if wanted is None or not _fits(slot, wanted, shape, hardware, algorithm, parts):
            wanted = _best(slot, shape, hardware, algorithm, parts)
        chosen.append(wanted)
    return Schedule(algorithm, target, *chosen)


def _nominal(shape: Shape) -> Shape:
    """The shape that tilings are ranked on: of the operand it keeps widths and dtype only."""
    return Shape(4, 16, 16, 4096, 4096, shape.head_dim, shape.value_dim, shape.dtype)


def _preferred(
    shape: Shape, hardware: Hardware, algorithm: Algorithm, parts: Segments, traits: Traits
) -> tuple[Tiling, Tiling, Tiling] | None:
    table = _table(shape.dtype, hardware, algorithm, traits)
    width = max(parts.qk_columns, parts.v_columns)
    return next((tilings for limit, tilings in table.items() if width <= limit), None)


def _table(
    dtype: str, hardware: Hardware, algorithm: Algorithm, traits: Traits
) -> dict[int, tuple[Tiling, Tiling, Tiling]]:
    if dtype in ("fp32", "fp64"):
        return _FP32
    if algorithm != "flash":
        return _STREAMING if algorithm == "streaming" else _STANDARD
    if hardware.kind == "hip":
        return _FLASH_GFX942
    if hardware.capability < 90:
        return _FLASH_SM80
    if not traits.masked:
        return _FLASH_SM90_DENSE
    if traits.measured:
        return _FLASH_SM90_MEASURED
    return _FLASH_SM90_MASKED if traits.linear else _FLASH_SM90_CURVED


def _hopper(parts: Segments, traits: Traits) -> Tiling:
    width = max(parts.qk_columns, parts.v_columns)
    if width not in _HOPPER:
        raise WeftError(
            f"schedule: target hopper has forms for D {', '.join(map(str, _HOPPER))}, got {width}; use target='triton'"
        )
    return (_HOPPER_POSITIONAL if traits.positional else _HOPPER)[width]


# -- candidates ------------------------------------------------------------------------------------------------------
def _kernels(slot: Slot, algorithm: Algorithm) -> list[Kernel]:
    return [k for k in KERNELS[algorithm] if k.slot == slot]


def _grid(hardware: Hardware) -> Iterator[Tiling]:
    stages = (1, 2) if hardware.kind == "hip" else (2, 3)
    for block_q in (16, 32, 64, 128):
        for block_kv in (16, 32, 64, 128):
            for warps in (4, 8):
                for stage in stages:
                    yield Tiling(block_q, block_kv, warps, stage)


def _fits(slot: Slot, tiling: Tiling, shape: Shape, hardware: Hardware, algorithm: Algorithm, parts: Segments) -> bool:
    return all(
        sram_bytes(k, tiling, shape, hardware, parts) <= hardware.sram_per_block
        and accumulator_registers(k, tiling, parts) <= REGISTER_LIMIT
        for k in _kernels(slot, algorithm)
    )


@lru_cache(maxsize=256)
def _ranked(slot: Slot, shape: Shape, hardware: Hardware, algorithm: Algorithm, parts: Segments) -> list[Tiling]:
    """Tilings that fit, best predicted first; of equals the one with the larger tile, then with fewer warps."""
    count = dense_counts(shape)

    def badness(tiling: Tiling) -> tuple[int, int, int, int]:
        seconds = sum(
            cost_of(k, tiling, shape, hardware, parts, count(k.axis, tiling.block_q, tiling.block_kv)).seconds
            for k in _kernels(slot, algorithm)
        )
        within_a_tenth = round(10 * log(seconds))  # finer differences are beyond the model
        return within_a_tenth, -tiling.block_q * tiling.block_kv, tiling.num_warps, abs(tiling.num_stages - 3)

    return sorted((t for t in _grid(hardware) if _fits(slot, t, shape, hardware, algorithm, parts)), key=badness)


def _best(slot: Slot, shape: Shape, hardware: Hardware, algorithm: Algorithm, parts: Segments) -> Tiling:
    ranked = _ranked(slot, shape, hardware, algorithm, parts)
    if ranked:
        return ranked[0]
    least = Tiling(16, 16, 4, 1)
    needed = max(sram_bytes(k, least, shape, hardware, parts) for k in _kernels(slot, algorithm))
    raise WeftError(
        f"schedule: no tiling of {algorithm} ({slot}) fits {hardware.title}: the smallest, {least}, needs {needed} "
        f"bytes of SRAM for D {shape.head_dim}, Dv {shape.value_dim}, {shape.dtype}, and a program has "
        f"{hardware.sram_per_block}; use a smaller head dimension, 16-bit operands or target='cpu'"
    )


# -- the user's own schedule -----------------------------------------------------------------------------------------
_TILING = r"(\d{1,5})x(\d{1,5})w(\d{1,2})s(\d{1,2})"
_SCHEDULE = re.compile(rf"({'|'.join(ALGORITHMS)})/({'|'.join(TARGETS)})/{_TILING}/{_TILING}/{_TILING}")


def parse_schedule(text: str) -> Schedule:
    """Read back the text of a Schedule: parse_schedule(str(schedule)) == schedule.

    >>> parse_schedule("flash/triton/128x64w4s3/128x64w8s3/64x128w8s3").forward.block_q
    128

    Raises WeftError for any other text.
    """
    match = _SCHEDULE.fullmatch(text)
    if match is None:
        raise WeftError(
            f"schedule: expected {', '.join(ALGORITHMS)}, or text like "
            f"'flash/triton/128x64w4s3/128x64w8s3/64x128w8s3' "
            f"(algorithm/target/tilings of forward, dQ and dK dV as <queries>x<keys>w<warps>s<stages>), got {text!r}"
        )
    algorithm, target, *numbers = match.groups()
    tilings = [Tiling(*map(int, numbers[i : i + 4])) for i in (0, 4, 8)]
    return Schedule(algorithm, target, *tilings)  # type: ignore[arg-type]  # the pattern admits only these names


def resolve(
    given: str | Schedule | None,
    shape: Shape,
    hardware: Hardware,
    target: Target,
    *,
    segments: Segments | None = None,
    traits: Traits = Traits(),  # noqa: B008  frozen
) -> Schedule:
    """What `schedule=` means: None or the name of an algorithm is chosen for; a Schedule or its text is checked.

    Raises WeftError for text that is no schedule, another target than the call's, tile sizes that no kernel can have,
    and tiles that do not fit into SRAM.
    """
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    if given is None or given in ALGORITHMS:
        algorithm: Algorithm = given or "flash"
        return choose(shape, hardware, target, algorithm, segments=parts, traits=traits)
    schedule = parse_schedule(given) if isinstance(given, str) else given
    if not isinstance(schedule, Schedule):
        raise WeftError(f"schedule: expected a name, a Schedule or its text, got {type(given).__name__}")
    if schedule.target != target:
        raise WeftError(
            f"schedule: it is for target {schedule.target}, the call's target is {target}; "
            f"pass target={schedule.target!r}"
        )
    if schedule.target == "hopper" and schedule.forward != _hopper(parts, traits):
        raise WeftError(
            f"schedule: the hopper forward has one form for these widths, {_hopper(parts, traits)}, "
            f"got {schedule.forward}; use target='triton' to choose tiles"
        )
    check_fits(schedule, shape, hardware, segments=parts)
    return schedule


def check_fits(schedule: Schedule, shape: Shape, hardware: Hardware, *, segments: Segments | None = None) -> None:
    """Raise WeftError if a kernel cannot have its tiling: sizes, or SRAM beyond what a program has."""
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    for slot in SLOTS:
        tiling = tiling_in(schedule, slot)
        _check_numbers(slot, tiling, schedule.target)
        if schedule.target in ("triton", "hopper"):
            for kernel in _kernels(slot, schedule.algorithm):
                _check_sram(kernel, tiling, shape, hardware, parts)


def _check_numbers(slot: Slot, tiling: Tiling, target: str) -> None:
    for name, rows in (("block_q", tiling.block_q), ("block_kv", tiling.block_kv)):
        least = 1 if target == "cpu" else 16
        power = rows > 0 and rows & (rows - 1) == 0
        if rows < least or not (power or target == "cpu" or (target == "hopper" and rows % 64 == 0)):
            raise WeftError(
                f"schedule: {slot} {tiling}: expected {name} to be a power of two of at least {least}, got {rows}"
            )
    if target == "triton" and tiling.num_warps not in (1, 2, 4, 8, 16):
        raise WeftError(f"schedule: {slot} {tiling}: expected 1, 2, 4, 8 or 16 warps, got {tiling.num_warps}")
    if tiling.num_stages < 1:
        raise WeftError(f"schedule: {slot} {tiling}: expected at least 1 stage, got {tiling.num_stages}")


def _check_sram(kernel: Kernel, tiling: Tiling, shape: Shape, hardware: Hardware, parts: Segments) -> None:
    needed = sram_bytes(kernel, tiling, shape, hardware, parts)
    if needed > hardware.sram_per_block:
        raise WeftError(
            f"schedule: {kernel.name} with {tiling} needs {needed} bytes of SRAM for D {shape.head_dim}, "
            f"Dv {shape.value_dim}, {shape.dtype}; a program of {hardware.title} has {hardware.sram_per_block}: "
            "use smaller tiles or fewer stages, or leave schedule= to be chosen"
        )


def with_tiling(schedule: Schedule, slot: Slot, tiling: Tiling) -> Schedule:
    """The schedule with another tiling in one slot."""
    match slot:
        case "forward":
            return replace(schedule, forward=tiling)
        case "backward_q":
            return replace(schedule, backward_q=tiling)
        case _:
            return replace(schedule, backward_kv=tiling)
