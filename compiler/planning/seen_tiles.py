"""Which tiles of a head's queries see which tiles of its keys, all of them at once, on the CPU.

It is what `Measurement.lists` finds tile by tile. A plan over devices looks at all tiles of a sequence: 2048 x 2048 of
them take a fifth of a second here, and several seconds in plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ir.errors import WeftError
from ...ir.expr import Expr
from ...ir.reference import evaluate
from ...ir.walk import loads
from ..analysis.tiles.measured import Measurement
from ..analysis.tiles.results import Axis, TileProgram
from ..analysis.tiles.survey import CELL

NONE, SOME, ALL = range(3)
_MOST = 1 << 22  # pairs of blocks that are looked at together
_CPU = torch.device("cpu")


def seen_tiles(found: Measurement, program: TileProgram, values: Mapping[str, Any], block: int) -> Tensor:
    """uint8 [tiles of queries, tiles of keys]: whether NONE, SOME or ALL of their pairs are visible.

    No visible pair lies in a tile of NONE, and each pair of a tile of ALL is visible; tiles of SOME are not looked at
    closer. found: of the head. program: kv_tiles of the variant. values: symbols and operands by name, tensors on the
    CPU. block: rows of a tile. Raises WeftError for reads beyond the end of a tensor.
    """
    head = _Head(found, program, values, block)
    if head.named & values.keys():  # an operand has a name of the survey's
        return head.one_by_one(program)
    return head.tiles()


class _Head:
    """One head of one batch row."""

    def __init__(self, found: Measurement, program: TileProgram, values: Mapping[str, Any], block: int) -> None:
        self.found, self.survey, self.block = found, found.found, block
        self.lengths: dict[Axis, int] = {axis: len(rows) for axis, rows in found.positions.items()}
        self.rows, self.columns = -(-self.lengths["q"] // block), -(-self.lengths["kv"] // block)
        self.values = {name: v for name, v in values.items() if isinstance(v, Tensor | int | float)}
        self.mine = found.ends("q", block)
        self.theirs = {n: _row(column) for n, column in found.ends("kv", block).items()}
        self.ranges = found.ranges(program, block, block)

    @property
    def named(self) -> set[str]:
        """What the survey calls what it measures."""
        cells = range(len(self.survey.cells))
        return {*self.mine, *self.theirs, *(f"cells{n}_{what}" for n in cells for what in ("any", "all"))}

    def one_by_one(self, program: TileProgram) -> Tensor:
        found = torch.full((self.rows, self.columns), NONE, dtype=torch.uint8)
        lists = self.found.lists(program, self.block, self.block)
        for tile, row in enumerate(found):
            edge, full = lists(tile)
            row[edge], row[full] = SOME, ALL
        return found

    def tiles(self) -> Tensor:
        finest = min([1.0, *((c.q / self.block) * (c.kv / self.block) for c in self.survey.cells)])
        step = max(1, int(_MOST * finest) // max(1, self.columns))
        return torch.cat([self._of(range(n, min(n + step, self.rows))) for n in range(0, self.rows, step)])

    def _of(self, tiles: range) -> Tensor:
        """Of some tiles of queries, [tiles, tiles of keys]."""
        inside, full = (torch.zeros(len(tiles), self.columns, dtype=torch.bool) for _ in range(2))
        for n, tile in enumerate(tiles):
            for span in self.ranges(tile, self.mine)[0]:
                inside[n, span.lo : max(span.lo, span.hi)] = True
                full[n, span.full_lo : max(span.full_lo, span.full_hi)] = True
        known = {n: _row(column[tiles.start : tiles.stop])[:, None] for n, column in self.mine.items()}
        values: dict[str, Any] = {**self.values, **known, **self.theirs}
        for n, cells in enumerate(self.survey.cells):
            looked = self._cells(cells.condition, tiles, {"q": cells.q, "kv": cells.kv}, inside)
            values |= {f"cells{n}_any": looked[0], f"cells{n}_all": looked[1]}
        possible, certain = (
            _value(node, values, inside).expand(inside.shape) for node in (self.survey.possible, self.survey.certain)
        )
        for a, b in self.found.equal:
            possible = possible & ((values[f"q{a}_bits"] & values[f"kv{b}_bits"]) != 0)
        if self.found.blocks is not None:
            some, every = self._pairs(tiles)
            possible, certain = possible & some, certain | every
        whole = torch.arange(self.columns) < self.lengths["kv"] // self.block
        return (inside & possible).to(torch.uint8) * (1 + (whole & (certain | full)).to(torch.uint8))

    def _cells(self, condition: Expr, tiles: range, sizes: Mapping[Axis, int], inside: Tensor) -> tuple[Tensor, Tensor]:
        """Whether it holds for some, and for all, blocks of pairs that two tiles reach into: one pair of each."""
        axes = self._axes(tiles, sizes, self.found.positions)
        within = inside
        for dim, axis in enumerate(axes):
            within = _some(within, axis.tiles, dim)
        places = {"q_pos": axes[0].places[:, None], "kv_pos": axes[1].places}
        return _some_and_all(_value(condition, {**self.values, **places}, within).expand(within.shape), axes)

    def _pairs(self, tiles: range) -> tuple[Tensor, Tensor]:
        """Whether some, and all, of the pairs that two tiles hold match, by blocks of CELL rows and keys."""
        assert self.found.blocks is not None
        axes = self._axes(tiles, {"q": CELL, "kv": CELL}, {axis: range(n) for axis, n in self.lengths.items()})
        numbers = (axes[0].places // CELL).tolist()
        seen = torch.stack([torch.tensor(self.found.blocks(number), dtype=torch.uint8) for number in numbers])
        return _some_and_all(seen > 0, axes)[0], _some_and_all(seen == ALL, axes)[1]

    def _axes(
        self, tiles: range, sizes: Mapping[Axis, int], positions: Mapping[Axis, range]
    ) -> tuple[_Blocks, _Blocks]:
        """The blocks that these tiles of queries reach into, and all blocks of keys."""
        return (
            _blocks(positions["q"][tiles.start * self.block : tiles.stop * self.block], self.block, sizes["q"]),
            _blocks(positions["kv"], self.block, sizes["kv"]),
        )


class _Blocks(NamedTuple):
    """Of a run of positions, the first of which begins a tile. Tiles and blocks count from the first that it has."""

    places: Tensor  # a position of each block
    tiles: tuple[Tensor, Tensor]  # the first and the last that a block reaches into
    blocks: tuple[Tensor, Tensor]  # the first and the last that a tile reaches into


def _blocks(positions: range, rows: int, size: int) -> _Blocks:
    """rows: of a tile. size: of a block, which begins at a multiple of it."""
    first, last = positions[0], positions[-1]
    starts = torch.arange(first // size, last // size + 1) * size
    tiles = torch.arange(first, last + 1, rows)
    ends = (starts + size - 1).clamp(max=last), (tiles + rows - 1).clamp(max=last)
    starts = starts.clamp(min=first)
    return _Blocks(
        starts,
        ((starts - first) // rows, (ends[0] - first) // rows),
        (tiles // size - first // size, ends[1] // size - first // size),
    )


def _some_and_all(holds: Tensor, axes: tuple[_Blocks, _Blocks]) -> tuple[Tensor, Tensor]:
    """Whether something holds for some, and for all, of the blocks that two tiles reach into. holds: of blocks."""
    some, not_all = holds, ~holds
    for dim, axis in enumerate(axes):
        some, not_all = _some(some, axis.blocks, dim), _some(not_all, axis.blocks, dim)
    return some, ~not_all


def _some(found: Tensor, ends: tuple[Tensor, Tensor], dim: int) -> Tensor:
    """Whether one of the rows from the first to the last holds, for each pair of these, along a dimension."""
    first, last = ends
    result = found.index_select(dim, first)
    for n in range(1, int((last - first).max()) + 1):
        result = result | found.index_select(dim, torch.minimum(first + n, last))
    return result


def _value(node: Expr, values: Mapping[str, Any], visible: Tensor) -> Tensor:
    """An expression where `visible`; operands are read there alone. Raises WeftError for reads beyond their ends."""
    for load in loads(node):
        operand = values[load.tensor.name]
        for size, index in zip(operand.shape, load.index):
            places = torch.where(visible, evaluate(index, values, torch.float64, _CPU, visible), 0)
            for place in (int(places.min()), int(places.max())) if places.numel() else ():
                if not 0 <= place < size:
                    raise WeftError(f"{load.tensor.name}: the mask reads index {place}, expected 0 to {size - 1}")
    return evaluate(node, values, torch.float64, _CPU, visible)


def _row(column: Sequence[Any]) -> Tensor:
    """A value for each tile, as 64 bits of any sign."""
    return torch.tensor([v - (1 << 64) if v >> 63 == 1 else v for v in map(int, column)], dtype=torch.int64)
