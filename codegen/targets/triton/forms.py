"""Forms of Triton kernels: a tile, warps and stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ....compiler.planning.form import PROGRAMS_PER_SM, Form, Residence, number, register
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.segments import Segments
from ....compiler.planning.splits import tile_rows
from ....ir.errors import WeftError
from .paces import PACKED_PROGRAM, WIDE_COLUMNS

_WARPGROUP_ROWS = 64  # of an asynchronous product


@register
@dataclass(frozen=True)
class Tiling(Form):
    """Tile sizes and launch settings of one Triton kernel.

    >>> from weft.compiler.planning.form import parse_form
    >>> parse_form("128x64w8s3")
    Tiling(block_q=128, block_kv=64, num_warps=8, num_stages=3)
    """

    block_q: int = number("")
    block_kv: int = number("x")
    num_warps: int = number("w", default=4)
    num_stages: int = number("s", default=2)
    loads_reads: ClassVar[bool] = True
    packed_program: ClassVar[float] = PACKED_PROGRAM

    def of_rows(self, rows: int) -> Tiling:
        return replace(self, block_q=tile_rows(self.block_q, rows))

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        """As Triton 3.6 places tiles: checked against `metadata.shared` of kernels compiled for sm_80 to gfx942."""
        stages = max(1, self.num_stages)
        if hardware.kind == "hip":
            return Residence(max(1, stages - 1), 0, 0)
        rows = self.block_q if kernel.axis == "kv" else self.block_kv
        # Asynchronous warpgroup products read SRAM while the next load is under way, so they need one buffer more.
        warpgroup = hardware.capability >= 90 and element == 2 and rows >= _WARPGROUP_ROWS
        # A warp keeps its rows of P for the second product, unless warps share rows or units are not matrix units.
        # Before sm_90 they share them where a result has twice as many columns as rows, or more.
        shared = rows < 16 * self.num_warps or (hardware.capability < 90 and columns >= 2 * rows)
        spread = element > 2 or (shared and not warpgroup)
        blackwell = hardware.capability >= 100 and kernel.direction == "backward"
        return Residence(stages if warpgroup else max(1, stages - 1), 1, element if spread or blackwell else 0)

    def registers(self, kernel: Kernel, parts: Segments) -> int:
        """32-bit registers a thread for sums and scores; a compiler adds addresses and loads: keep well below 255."""
        kept = kernel.registers(self.block_q, self.block_kv, parts.qk_columns, parts.v_columns)
        return int(kept // (32 * self.num_warps))

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        registers = min(255, self.registers(kernel, parts) + 64) * 32 * self.num_warps
        fit = min(hardware.sram_per_sm // max(sram, 1024), hardware.registers_per_sm // registers, PROGRAMS_PER_SM)
        return max(1, int(fit))

    def pace_family(self, kernel: Kernel, parts: Segments) -> str:
        return f"triton {kernel.name}" + " wide" * (max(parts.qk_columns, parts.v_columns) > WIDE_COLUMNS)


# Of operands that go through registers on their way to SRAM: those that are not aligned, and FP8 ones. Triton 3.6 gives
# wrong results for large tiles on sm_90 (two asynchronous products in a row whose right operands come from registers);
# tiles of 32 rows use plain mma.
UNALIGNED = Tiling(32, 32, 4, 2)
UNALIGNED_WIDE = Tiling(32, 32, 8, 2)  # of values with more than 256 columns, whose sums fill the registers of 4 warps


def check_tiling(kernel: str, tiling: Tiling) -> None:
    """Raise WeftError for numbers that no Triton kernel can have."""
    for name, rows in (("block_q", tiling.block_q), ("block_kv", tiling.block_kv)):
        if rows < 16 or rows & (rows - 1):
            raise WeftError(
                f"schedule: {kernel} {tiling}: expected {name} to be a power of two of at least 16, got {rows}"
            )
    if tiling.num_warps not in (1, 2, 4, 8, 16):
        raise WeftError(f"schedule: {kernel} {tiling}: expected 1, 2, 4, 8 or 16 warps, got {tiling.num_warps}")
    if tiling.num_stages < 1:
        raise WeftError(f"schedule: {kernel} {tiling}: expected at least 1 stage, got {tiling.num_stages}")
