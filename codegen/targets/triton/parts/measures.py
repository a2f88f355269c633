"""Kernels that find out which tiles there are: those that list tiles of packed sequences, and those that measure which
tiles a mask visits. Their buffers, their grids, and where their programs look."""

from __future__ import annotations

from typing import Any

from .....compiler.analysis.tiles.measured import LIST_HEAD, LIST_ROOM, LONG_AXIS
from .....compiler.analysis.tiles.results import Axis, TileProgram
from .....compiler.analysis.tiles.survey import CELL
from .....compiler.planning.buffer import Buffer
from .....compiler.planning.kernel import Kernel
from .....compiler.planning.signature import MOST_SHORT
from .....ir.expr import Symbol
from ....launch.job import KV_TILES, Q_TILES, Job, KernelLaunch, Mode, Part
from ..forms import Tiling
from ..kernels.measures import (
    CELLS_TOGETHER,
    ENDS,
    ENDS_TOGETHER,
    LISTS,
    LONG_SPANS,
    MEASURES,
    PAIR_CELLS,
    ROWS_TOGETHER,
    RUNS,
    SPANS,
    STRETCH,
    TILES_TOGETHER,
    span_width,
)
from ..kernels.work import LISTED, WORK

WORK_SIDES = tuple(zip(WORK, ("q", "kv")))
TILES: dict[Axis, str] = {"kv": Q_TILES, "q": KV_TILES}  # that own programs, by the axis that these loop over


class Measures(Part):
    """Lists of tiles, and what is measured of tiles.

    neighbours: tiles beside each other that are measured apart, and visit as one; 0 where no list is read.
    """

    def __init__(self, job: Job, neighbours: int = 1) -> None:
        self._job, self._code, self._facts = job, job.code, job.facts
        self._neighbours = neighbours

    def known(self, mode: Mode) -> dict[str, str]:
        found = [k.name for k in self._code.kernels if k.name in MEASURES and k.name not in LONG_SPANS]
        forms = {name: self._job.form(name, mode.aligned) for name in found}
        beside = f" by {self._neighbours}" if self._neighbours != 1 else ""
        return {name: f"{name} {form.block_q}x{form.block_kv}{beside}" for name, form in forms.items()}

    # -- buffers -------------------------------------------------------------------------------------------------------
    def buffers(self, mode: Mode) -> list[Buffer]:
        return [*self._work(), *self._cells(), *self._tiles("kv", mode), *self._tiles("q", mode)]

    def _work(self) -> list[Buffer]:
        """Lists of the tiles of packed sequences, (sequence, tile) each, and behind them what is counted."""
        sides = [side for name, side in WORK_SIDES if self._code.has(name)]
        more = " + 1" if self._job.lists_long else ""
        return [Buffer(f"{side}_work", (f"{side}_slots{more}", "2"), "int32") for side in sides]

    def _cells(self) -> list[Buffer]:
        """What is found of blocks of pairs."""
        if not self._code.has(PAIR_CELLS):
            return []
        cells = [f"({length} + {CELL - 1}) // {CELL}" for length in ("q_len", self._job.kv_rows)]
        return [Buffer(PAIR_CELLS, (self._rows_of_lists, *cells), "uint8")]

    def _tiles(self, axis: Axis, mode: Mode) -> list[Buffer]:
        """What a tile visits along an axis, ranges or a list; and ends of the tiles of a long one."""
        program: TileProgram = self._facts.kv_tiles if axis == "kv" else self._facts.q_tiles
        own = f"{axis}_measured_tiles"
        if self._job.sequences.keys.packed:
            own = "q_slots" if axis == "kv" else "kv_slots"
        widths = {f"{axis}_spans": str(span_width(program)), f"{axis}_lists": f"{LIST_HEAD} + {axis}_room"}
        found = [
            Buffer(kernel, (self._rows_of_lists, own, width), "int32")
            for kernel, width in widths.items()
            if self._code.has(kernel)
        ]
        ends = f"{axis}_ends"
        if self._code.has(ends):
            block = self._rows_of_tiles(axis, mode)
            places = f"{self._places(axis, str(block))} + {self._places(axis, f'{STRETCH} * {block}')}"
            shape = self._mask_rows, str(self._numbers_of_ends(axis)), places
            found.append(Buffer(ends, shape, "int64", when=self._is_launched(ends, axis)))
        return found

    @property
    def _rows_of_lists(self) -> str:
        return "batches * heads" if self._facts.mask_differs_by_head else "batches"

    def _numbers_of_ends(self, axis: Axis) -> int:
        """What is measured of a tile: least and greatest of values, and bits; of positions, it has them by itself."""
        measured = self._facts.traits.measured
        assert measured is not None
        found = measured.of(axis)
        return 2 * found.values + found.bits

    def _rows_of_tiles(self, axis: Axis, mode: Mode) -> int:
        """Rows of the tiles of an axis whose ends are written."""
        form = self._job.form(f"{axis}_ends", mode.aligned)
        return int(form.block_kv if axis == "kv" else form.block_q)

    # -- the vocabulary ------------------------------------------------------------------------------------------------
    def rows(self, mode: Mode) -> dict[str, str]:
        rows = {}
        axes: tuple[Axis, Axis] = "kv", "q"
        for axis, others in zip(axes, reversed(axes)):
            for kernel in (f"{axis}_spans", f"{axis}_lists"):
                if self._code.has(kernel):
                    blocks = self._job.blocks(kernel, mode)
                    rows[f"{axis}_measured_tiles"] = TILES[axis].format(**blocks)
                    visited = TILES[others].format(**blocks).replace("kv_len", self._job.kv_rows)
                    rows[f"{axis}_room"] = f"min({visited}, {LIST_ROOM})"
        for kernel, side in WORK_SIDES:
            if self._code.has(kernel):
                block = self._job.blocks(kernel, mode)["BLOCK_Q" if side == "q" else "BLOCK_KV"]
                # each sequence, and what lies behind all, has one tile at most that is not whole
                number = f"min(n_sequences, q_len // {MOST_SHORT + 1})" if self._job.lists_long else "n_sequences"
                rows[f"{side}_slots"] = f"{side}_len // {block} + {number} + 1"
        return rows

    # -- launches ------------------------------------------------------------------------------------------------------
    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        form = self._job.form(kernel.name, mode.aligned) if kernel.name in (*WORK, *MEASURES) else None
        if form is None:
            return None
        options = options_of(self._job, form)
        if kernel.name in WORK:
            return KernelLaunch(f"n_sequences // {LISTED} + 1", options)  # with the rows behind all
        only = self._is_launched(kernel.name, kernel.axis)
        return KernelLaunch(self._programs(kernel, form), options, self._looking(kernel, form), only_if=only)

    def _is_launched(self, kernel: str, axis: Axis) -> str:
        """When a kernel that measures runs has something to do; "" for always."""
        if kernel not in RUNS:
            return ""
        return f"{self._extent(axis)} {'<=' if kernel in SPANS else '>'} {LONG_AXIS}"

    def _programs(self, kernel: Kernel, form: Tiling) -> str:
        """One for each tile that visits, or for each stretch of visited ones."""
        if kernel.name in ENDS:
            tiles = self._places(kernel.axis, f"{STRETCH} * {{BLOCK_{kernel.axis.upper()}}}")
        elif self._job.sequences.keys.packed:
            tiles = "q_slots" if kernel.axis == "kv" else "kv_slots"
        else:
            tiles = TILES[kernel.axis]
        text = f"{tiles} * {self._mask_rows}"
        if kernel.name == PAIR_CELLS:
            others = KV_TILES.replace("kv_len", self._job.kv_rows)
            text = f"{text} * (({others} + {CELLS_TOGETHER - 1}) // {CELLS_TOGETHER})"
        text = text.format(BLOCK_Q=form.block_q, BLOCK_KV=form.block_kv)
        only = self._is_launched(kernel.name, kernel.axis)
        return f"{text} * ({only})" if only else text

    def _looking(self, kernel: Kernel, form: Tiling) -> dict[str, object]:
        """How a kernel that measures tiles looks at them: how many together, and how many blocks of pairs of each."""
        rows = form.block_kv if kernel.axis == "kv" else form.block_q
        if kernel.name in ENDS:
            return {"TILES": min(max(1, ENDS_TOGETHER // rows), STRETCH), "STRETCH": STRETCH}
        if kernel.name in RUNS:
            neighbours = self._neighbours
            together = 1 << (neighbours * (form.block_q + form.block_kv - rows) - 1).bit_length()
            return {"TILES": max(1, ROWS_TOGETHER // rows), "STRETCH": STRETCH,
                    "NEIGHBOURS": neighbours, "NEIGHBOUR_ROWS": max(1, together)}  # fmt: skip
        if kernel.name not in (*LISTS, PAIR_CELLS):
            return {}
        found = self._facts.survey
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

    def _extent(self, axis: Axis) -> str:
        """Positions of an axis that a call has room for, as an expression."""
        return self._job.kv_rows if axis == "kv" else "q_len"

    @property
    def _mask_rows(self) -> str:
        """For how many rows of heads a mask is measured, as an expression."""
        heads = ["heads"] if self._facts.mask_differs_by_head else []
        return " * ".join([*([] if self._job.sequences.keys.packed else ["batches"]), *heads]) or "1"

    def _places(self, axis: Axis, block: str) -> str:
        """Places of tiles of `block` positions, as an expression: a packed sequence begins one of its own."""
        if self._job.sequences.keys.packed:
            return f"({self._extent(axis)} // ({block}) + n_sequences + 1)"
        return f"(({self._extent(axis)} + ({block}) - 1) // ({block}))"


def options_of(job: Job, form: Any) -> dict[str, int]:
    """Of the compilation of a portable kernel, which may have the form of a kernel of another target."""
    if isinstance(form, Tiling):
        return {"num_warps": form.num_warps, "num_stages": form.num_stages, **job.rounding}
    return {"num_warps": 4, **job.rounding}


def cells_of(block: int, cell: int, from_start: bool) -> int:
    """Blocks of `cell` positions that a tile of `block` positions reaches into at most, as a power of 2.

    from_start: tiles begin at multiples of `block`, as those of keys do; queries begin at any position.
    """
    if from_start and cell % block == 0:
        return 1
    most = block // cell if from_start and block % cell == 0 else (block - 2) // cell + 2
    return min(block, 1 << (most - 1).bit_length())
