"""Which tilings each Triton kernel may get, best first: a small table of timed ones, then those the cost model ranks.

A choice depends on widths, dtype, machine and the variant's traits only. Lengths, batch and heads never enter, because
a new length must not compile anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import log

from ....compiler.analysis.tiles.results import PLAIN, Traits
from ....compiler.planning.cost import Times, cost_of, dense_counts, sram_bytes
from ....compiler.planning.dtypes import dtype_named
from ....compiler.planning.kernel import Algorithm, Kernel, Slot
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.records import Shape
from ....compiler.planning.segments import Segments
from ....ir.errors import WeftError
from .forms import Tiling

REGISTER_LIMIT = 224  # a thread has 255; the rest is for addresses and loads on their way
_ALTERNATIVES = 12  # tilings of one kernel that are worth timing

# Tilings (forward, backward_q, backward_kv) of the flash kernels of target `triton`, by the wider head dimension up to
# which they are meant. 16-bit operands. Those of sm_90 were measured on one H200 (docs/experiments) and also serve
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
# Scores with a derivative, dropout, and masks that read tensors by position want registers of their own.
_FLASH_SM90_CURVED = {
    **_FLASH_SM90_MASKED,
    64: (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
}
_SLOPED = Tiling(64, 64, 4, 3)  # dquery of weights with a slope of their own, as a sigmoid's: larger tiles spill
_FLASH_SM90_MEASURED = {
    **_FLASH_SM90_MASKED,
    64: (Tiling(64, 64, 4, 3), Tiling(64, 32, 4, 3), Tiling(32, 64, 4, 3)),
    128: (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2)),
}
# A mask that is read for each pair wants more of them: of compiled tilings the largest without spills in their loops.
_FLASH_SM90_PAIRS = {
    **_FLASH_SM90_MASKED,
    64: (Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 3), Tiling(32, 64, 4, 3)),
    128: (Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 2), Tiling(32, 128, 8, 2)),
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
_SLOTS: tuple[Slot, ...] = ("forward", "backward_q", "backward_kv")
FIXED = {  # kernels with one form
    "row_statistics": Tiling(64, 16, 4, 1),  # one pass over out and dout, bound by HBM alone
    "standard_softmax": Tiling(4, 512, 4, 2),  # few rows at a time, so that their second reading hits a cache
}


def tilings(
    kernel: Kernel, algorithm: Algorithm, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits = PLAIN
) -> list[Tiling]:
    """Tilings of one kernel worth timing: the one to use first, then others, best predicted first.

    shape: widths and dtype are looked at, lengths are not. Raises WeftError if no tiling fits into the SRAM of a
    program.
    """
    return list(_tilings(kernel, algorithm, nominal(shape), hardware, parts, traits))


@lru_cache(maxsize=1024)
def _tilings(
    kernel: Kernel, algorithm: Algorithm, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits
) -> tuple[Tiling, ...]:
    if kernel.name in FIXED:
        return (FIXED[kernel.name],)
    wanted = _preferred(kernel.slot, shape, hardware, algorithm, parts, traits)
    ranked = _ranked(kernel, shape, hardware, parts, traits)
    if wanted is None or not fits(kernel, wanted, shape, hardware, parts, traits):
        if not ranked:
            raise _nothing_fits(kernel, shape, hardware, parts, traits)
        wanted = ranked[0]
    return (wanted, *[t for t in ranked if t != wanted][: _ALTERNATIVES - 1])


def _diagonal_stages(hardware: Hardware, wide: bool) -> tuple[int, ...]:
    """With one, two programs of 128 columns have room on an SM of 228 KB."""
    if hardware.kind != "cuda":
        return (1,)
    return (1, 2) if wide and hardware.capability >= 90 else (2, 1)


def square_tilings(
    kernel: Kernel, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits
) -> list[Tiling]:  # fmt: skip
    """Those of kernels that sum over tiles of pairs, as many queries as keys: the largest that fits first."""
    wide = max(parts.qk_columns, parts.v_columns) > 64
    before_90 = hardware.capability < 90  # where sums of a warp spill beside wide tiles
    sizes = ((64, 8), (64, 4), (32, 4), (16, 4)) if wide and before_90 else ((64, 4), (64, 8), (32, 4), (16, 4))
    grid = [Tiling(block, block, warps, stages) for block, warps in sizes
            for stages in _diagonal_stages(hardware, wide)]  # fmt: skip
    found = [t for t in grid if fits(kernel, t, nominal(shape), hardware, parts, traits)]
    most = dtype_named(shape.dtype).of_units({"16-bit": 64, "fp32": 32})
    found = [t for t in found if t.block_q <= most] or found
    if not found:
        raise _nothing_fits(kernel, shape, hardware, parts, traits)
    return found


# Tilings of split_forward: rows of a tile at the most, and tiles of keys that keep many bytes on their way.
_SPLIT = {
    64: (Tiling(64, 128, 4, 4), Tiling(64, 64, 4, 4)),
    128: (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 4), Tiling(64, 128, 4, 3), Tiling(64, 32, 4, 4)),
    256: (Tiling(64, 32, 4, 3), Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 3)),
    1024: (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2), Tiling(64, 16, 8, 2), Tiling(32, 32, 8, 2)),
}
_SPLIT_32 = (Tiling(16, 32, 4, 2), Tiling(16, 32, 8, 1), Tiling(16, 16, 8, 1))


# Where all sequences are as long as each other, one program an SM with more bytes on their way reads as fast as some,
# and most calls then need no parts. docs/experiments has what was measured.
_SPLIT_EVEN = {128: Tiling(64, 128, 4, 3)}


SPLIT_FP8 = Tiling(32, 128, 4, 3)  # of FP8 keys of 65 to 128 columns: an SM has room for two programs of so many bytes


def split_tilings(
    kernel: Kernel, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits, even: bool = False
) -> list[Tiling]:  # fmt: skip
    """Those of split_forward, the one to use first. even: sequences have no lengths of their own."""
    kernel = kernel.divider
    width = max(parts.qk_columns, parts.v_columns)
    limit = next(most for most in _SPLIT if width <= most)
    table = _SPLIT[limit]
    if even and limit in _SPLIT_EVEN and hardware.capability >= 90:
        table = tuple(dict.fromkeys((_SPLIT_EVEN[limit], *table)))
    table = dtype_named(shape.dtype).of_units({"16-bit": table, "fp32": _SPLIT_32})
    if hardware.kind == "hip":  # one buffer is loaded ahead
        table = tuple(dict.fromkeys(Tiling(t.block_q, t.block_kv, t.num_warps, min(t.num_stages, 2)) for t in table))
    found = [t for t in table if fits(kernel, t, nominal(shape), hardware, parts, traits)]
    found += [t for t in _ranked(kernel, nominal(shape), hardware, parts, traits) if t.block_q <= 64 and t not in found]
    if not found:
        raise _nothing_fits(kernel, shape, hardware, parts, traits)
    return found[:_ALTERNATIVES]


def nominal(shape: Shape) -> Shape:
    """The shape that tilings are ranked on: of the operands it keeps widths and dtypes only."""
    return replace(shape, batch=4, heads=16, kv_heads=16, q_len=4096, kv_len=4096)


def _preferred(
    slot: Slot, shape: Shape, hardware: Hardware, algorithm: Algorithm, parts: Segments, traits: Traits
) -> Tiling | None:
    table = _table(shape.dtype, hardware, algorithm, traits)
    width = max(parts.qk_columns, parts.v_columns)
    row = next((row for limit, row in table.items() if width <= limit), None)
    return row[_SLOTS.index(slot)] if row else None


def _table(
    dtype: str, hardware: Hardware, algorithm: Algorithm, traits: Traits
) -> dict[int, tuple[Tiling, Tiling, Tiling]]:
    return dtype_named(dtype).of_units({"16-bit": _table_of_halves(hardware, algorithm, traits), "fp32": _FP32})


def _table_of_halves(
    hardware: Hardware, algorithm: Algorithm, traits: Traits
) -> dict[int, tuple[Tiling, Tiling, Tiling]]:
    if algorithm != "flash":
        return _STREAMING if algorithm == "streaming" else _STANDARD
    if hardware.kind == "hip":
        return _FLASH_GFX942
    if hardware.capability < 90:
        return _FLASH_SM80
    if traits.masked and traits.measured and not _few_edges(traits):
        return _FLASH_SM90_PAIRS if traits.measured.by_pair else _FLASH_SM90_MEASURED
    if traits.drops or (traits.masked and not traits.linear):
        return _FLASH_SM90_CURVED
    table = _FLASH_SM90_MASKED if traits.masked else _FLASH_SM90_DENSE
    return table if traits.normalizer.weight is None else {**table, 64: (table[64][0], _SLOPED, table[64][2])}


def _few_edges(traits: Traits) -> bool:
    """Whether most tiles see all or nothing, as where large blocks of pairs do: then no registers are wanting."""
    found = traits.measured
    return found is not None and found.source == "lists" and not found.by_pair and found.cell_rows >= 128


# -- candidates ------------------------------------------------------------------------------------------------------
def _grid(hardware: Hardware) -> Iterator[Tiling]:
    stages = (1, 2) if hardware.kind == "hip" else (2, 3)
    for block_q in (16, 32, 64, 128):
        for block_kv in (16, 32, 64, 128):
            for warps in (4, 8):
                for stage in stages:
                    yield Tiling(block_q, block_kv, warps, stage)


def fits(kernel: Kernel, tiling: Tiling, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits) -> bool:
    """Whether a program has the SRAM and the registers that the tiling needs."""
    return (
        sram_bytes(kernel, tiling, shape, hardware, parts, traits) <= hardware.sram_per_block
        and tiling.registers(kernel, parts) <= REGISTER_LIMIT
    )


@lru_cache(maxsize=1024)
def _ranked(kernel: Kernel, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits) -> tuple[Tiling, ...]:
    """Tilings that fit, best predicted first; of equals the one with the larger tile, then with fewer warps."""
    count = dense_counts(shape)

    def badness(tiling: Tiling) -> tuple[int, int, int, int]:
        tiles = count(kernel.axis, tiling.block_q, tiling.block_kv)
        times = cost_of(kernel, tiling, shape, hardware, parts, tiles, traits).times
        assert isinstance(times, Times)
        seconds = times.roofline  # paces are of forms that were timed, not of any
        within_a_tenth = round(10 * log(seconds))  # finer differences are beyond the model
        return within_a_tenth, -tiling.block_q * tiling.block_kv, tiling.num_warps, abs(tiling.num_stages - 3)

    return tuple(sorted((t for t in _grid(hardware) if fits(kernel, t, shape, hardware, parts, traits)), key=badness))


def _nothing_fits(kernel: Kernel, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits) -> WeftError:
    least = Tiling(16, 16, 4, 1)
    needed = sram_bytes(kernel, least, shape, hardware, parts, traits)
    return WeftError(
        f"schedule: no tiling of {kernel.name} fits {hardware.title}: the smallest, {least}, needs {needed} "
        f"bytes of SRAM for D {shape.head_dim}, Dv {shape.value_dim}, {shape.dtype}, and a program has "
        f"{hardware.sram_per_block}; use a smaller head dimension, 16-bit operands or target='cpu'"
    )
