"""Kernels that measure which tiles a mask visits: their forms and grids, and where their programs look."""

from __future__ import annotations

from ...compiler.analysis.facts import Facts
from ...compiler.analysis.measured import LONG_AXIS
from ...compiler.analysis.records import Axis
from ...compiler.analysis.survey import CELL
from ...compiler.planning.kernel import Kernel
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.signature import PAGED, SequenceKind
from ...ir.expr import Symbol
from .triton.forms import Tiling
from .triton.kernels.measures import (
    CELLS_TOGETHER,
    ENDS,
    ENDS_TOGETHER,
    LISTS,
    MEASURES,
    PAIR_CELLS,
    ROWS_TOGETHER,
    RUNS,
    SPANS,
    STRETCH,
    TILES_TOGETHER,
)
from .triton.kernels.tables import DISTANCE_TABLES
from .triton.tilings import FIXED
from .triton_workspace import cells_of

# Operands that go through registers on their way to SRAM: Triton 3.6 gives wrong results for large tiles on sm_90 (two
# asynchronous products in a row whose right operands come from registers); tiles of 32 rows use plain mma.
UNALIGNED = Tiling(32, 32, 4, 2)

Q_TILES, KV_TILES = "(q_len + {BLOCK_Q} - 1) // {BLOCK_Q}", "(kv_len + {BLOCK_KV} - 1) // {BLOCK_KV}"


class MeasuringLauncher:
    """What launchers of Triton kernels know of tiles, and of those that measure them."""

    code: CodePlan
    facts: Facts
    sequences: SequenceKind

    def form(self, kernel: str, aligned: bool) -> Tiling:
        form = self.code.form(kernel)
        assert isinstance(form, Tiling)
        if aligned or kernel in (*FIXED, PAIR_CELLS, DISTANCE_TABLES):
            return form
        return Tiling(UNALIGNED.block_q, UNALIGNED.block_kv, form.num_warps, 1) if kernel in MEASURES else UNALIGNED

    def numbers_of_ends(self, axis: Axis) -> int:
        """What is measured of a tile: least and greatest of values, and bits; of positions, it has them by itself."""
        found = self.facts.traits.measured
        assert found is not None
        return 2 * found.kv_values + found.kv_bits if axis == "kv" else 2 * found.q_values + found.q_bits

    def rows_of_tiles(self, axis: Axis, aligned: bool) -> int:
        """Rows of the tiles of an axis whose ends are written."""
        form = self.form(f"{axis}_ends", aligned)
        return form.block_kv if axis == "kv" else form.block_q

    @property
    def _kv_rows(self) -> str:
        """Keys that a call has room for, as an expression: the key of a paged one has rows of blocks."""
        return "kv_extent" if self.sequences in PAGED else "kv_len"

    def _looking(self, kernel: Kernel, form: Tiling) -> dict[str, object]:
        """How a kernel that measures tiles looks at them: how many together, and how many blocks of pairs of each."""
        rows = form.block_kv if kernel.axis == "kv" else form.block_q
        if kernel.name in RUNS:
            if kernel.name in ENDS:
                return {"TILES": min(max(1, ENDS_TOGETHER // rows), STRETCH), "STRETCH": STRETCH}
            neighbours = self._neighbours
            together = 1 << (neighbours * (form.block_q + form.block_kv - rows) - 1).bit_length()
            return {"TILES": max(1, ROWS_TOGETHER // rows), "STRETCH": STRETCH,
                    "NEIGHBOURS": neighbours, "NEIGHBOUR_ROWS": max(1, together)}  # fmt: skip
        if kernel.name not in (*LISTS, PAIR_CELLS):
            return {}
        found = self.facts.survey
        assert found is not None
        own: dict[str, object] = {
            "TOGETHER": CELLS_TOGETHER,
            "Q_CELLS": max(1, form.block_q // CELL), "KV_CELLS": max(1, form.block_kv // CELL),
        }  # fmt: skip
        numbers = [max(1, form.block_q // CELL) * max(1, form.block_kv // CELL)]
        for n, cells in enumerate(found.cells):
            q, kv = cells_of(form.block_q, cells.q, False), cells_of(form.block_kv, cells.kv, True)
            own |= {f"Q_CELLS{n}": q, f"KV_CELLS{n}": kv}
            numbers.append(q * kv)
        values = found.kv_values if kernel.axis == "kv" else found.q_values
        numbers += [rows] if any(not isinstance(value, Symbol) for value in values) else []
        return {**own, "TILES": max(1, min(TILES_TOGETHER, ROWS_TOGETHER // max(numbers)))}

    @property
    def _neighbours(self) -> int:
        """Tiles beside each other that are measured apart, and visit as one; 0 where no list is read."""
        return 1

    def _measuring_programs(self, kernel: Kernel) -> str:
        """Of a kernel that measures tiles: one for each tile that visits, or for each stretch of visited ones."""
        if kernel.name in ENDS:
            tiles = self._places(kernel.axis, f"{STRETCH} * {{BLOCK_{kernel.axis.upper()}}}")
        elif self.sequences == "packed":
            tiles = "q_slots" if kernel.axis == "kv" else "kv_slots"
        else:
            tiles = Q_TILES if kernel.axis == "kv" else KV_TILES
        text = f"{tiles} * {self._mask_rows}"
        if kernel.name == PAIR_CELLS:
            others = KV_TILES.replace("kv_len", self._kv_rows)
            text = f"{text} * (({others} + {CELLS_TOGETHER - 1}) // {CELLS_TOGETHER})"
        return f"{text} * ({self._launched_if(kernel)})" if kernel.name in RUNS else text

    def _launched_if(self, kernel: Kernel) -> str:
        """When a kernel of this module has something to do, over names of the vocabulary; "" for always."""
        if kernel.name not in RUNS:
            return ""
        return f"{self._extent(kernel.axis)} {'<=' if kernel.name in SPANS else '>'} {LONG_AXIS}"

    def _extent(self, axis: Axis) -> str:
        """Positions of an axis that a call has room for, as an expression."""
        return self._kv_rows if axis == "kv" else "q_len"

    @property
    def _mask_rows(self) -> str:
        """For how many rows of heads a mask is measured, as an expression."""
        heads = ["heads"] if self.facts.mask_differs_by_head else []
        return " * ".join([*([] if self.sequences == "packed" else ["batches"]), *heads]) or "1"

    def _places(self, axis: Axis, block: str) -> str:
        """Places of tiles of `block` positions, as an expression: a packed sequence begins one of its own."""
        if self.sequences == "packed":
            return f"({self._extent(axis)} // ({block}) + n_sequences + 1)"
        return f"(({self._extent(axis)} + ({block}) - 1) // ({block}))"
