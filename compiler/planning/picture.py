"""Pictures of the tiles that a kernel skips, masks and takes as full, drawn from the program that the kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...ir.errors import WeftError, counted
from ..analysis.records import TileCounts

if TYPE_CHECKING:
    import numpy

EMPTY, EDGE, FULL = 0, 1, 2
# (first row, last row) -> runs of edge tiles, and of full ones
Ranges = Callable[[int, int], tuple[Sequence[range], Sequence[range]]]

_COLOURS = ("#ffffff", "#f2a541", "#2a6f97")  # empty, edge, full; distinct in grey too
_LABELS = ("empty: never visited", "edge: mask evaluated", "full: no mask code")
_LETTERS = " ▒█"
_MOST_PIXELS = 2048  # of a side: more than the picture has
_DENSE_PIXELS = 1 << 22  # the mask itself is drawn up to this many pairs


@dataclass(frozen=True)
class TileGrid:
    """The class of every tile of one head: rows are query tiles, columns key tiles."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    classes: tuple[bytes, ...]  # a byte a tile

    @property
    def counts(self) -> TileCounts:
        return TileCounts(*(sum(row.count(which) for row in self.classes) for which in (EMPTY, EDGE, FULL)))


def grid_of(ranges: Ranges, q_len: int, kv_len: int, block_q: int, block_kv: int) -> TileGrid:
    """Classes of all tiles, by running the kernel's tile program once a query tile.

    ranges: (first row, last row) of a query tile, inclusive, to runs of its edge tiles and of its full tiles.
    """
    columns = -(-kv_len // block_kv)
    rows = []
    for first in range(0, q_len, block_q):
        row = bytearray(columns)
        for which, runs in zip((EDGE, FULL), ranges(first, min(first + block_q, q_len) - 1)):
            for run in runs:
                row[run.start : run.stop] = bytes([which]) * len(run)
        rows.append(bytes(row))
    return TileGrid(q_len, kv_len, block_q, block_kv, tuple(rows))


def mask_text(grid: TileGrid, *, width: int = 64, title: str = "") -> str:
    """The picture in characters: blank where empty, ▒ edge, █ full. A large grid is thinned to `width` columns.

    A thinned cell shows the class most tiles of it have, or edge where classes mix.
    """
    step = -(-max(len(grid.classes[0]) if grid.classes else 1, 1) // width)
    cells = [grid.classes[r : r + step] for r in range(0, len(grid.classes), step)]
    lines = ["".join(_cell(rows, c, step) for c in range(0, len(rows[0]), step)) for rows in cells]
    frame = "─" * (len(lines[0]) if lines else 0)
    counts = grid.counts
    size = f"tile {grid.block_q} queries x {grid.block_kv} keys" + (
        f", {step} x {step} tiles a character" if step > 1 else ""
    )
    legend = f"{counts.empty} empty, {counts.edge} edge ▒, {counts.full} full █; {size}"
    return "\n".join(
        [*([title] if title else []), f"┌{frame}┐", *(f"│{line}│" for line in lines), f"└{frame}┘", legend]
    )


def _cell(rows: tuple[bytes, ...], column: int, step: int) -> str:
    found = set(b"".join(row[column : column + step] for row in rows))
    return _LETTERS[found.pop() if len(found) == 1 else EDGE]


def mask_picture(grid: TileGrid, path: str | Path, *, title: str = "", dense: numpy.ndarray | None = None) -> Path:
    """Save the picture as a PNG and return its path; `check_path` says which paths are refused.

    dense: the mask itself, bool [q_len, kv_len]; drawn faintly over the tiles where it is small enough.
    """
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tall = max(2.5, min(12.0, 6.0 * grid.q_len / grid.kv_len))
    figure = Figure(figsize=(7.0, tall + 1.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas without a window, whatever backend the user has chosen
    axes = figure.add_subplot()
    rows, columns = len(grid.classes), len(grid.classes[0])
    extent = (0.0, float(columns * grid.block_kv), float(rows * grid.block_q), 0.0)
    colours = ListedColormap(_COLOURS)
    classes = numpy.frombuffer(b"".join(grid.classes), dtype=numpy.uint8).reshape(rows, columns)
    step = -(-max(rows, columns) // _MOST_PIXELS)  # the nearest tile is drawn, as matplotlib would of all
    shown = classes[::step, ::step]
    axes.imshow(shown, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
    if dense is not None and dense.size <= _DENSE_PIXELS:
        seen = (0.0, float(grid.kv_len), float(grid.q_len), 0.0)
        axes.imshow(
            dense, cmap=ListedColormap(["#00000000", "#00000040"]), extent=seen, interpolation="nearest", aspect="auto"
        )
    if max(rows, columns) <= 64:
        axes.vlines([c * grid.block_kv for c in range(columns + 1)], 0, extent[2], colors="#00000030", linewidth=0.5)
        axes.hlines([r * grid.block_q for r in range(rows + 1)], 0, extent[1], colors="#00000030", linewidth=0.5)
    axes.set(xlim=(0, grid.kv_len), ylim=(grid.q_len, 0), xlabel="key", ylabel="query")
    axes.set_title(title or f"{counted(grid.q_len, 'query')}, {counted(grid.kv_len, 'key')}", fontsize=10)
    counts = grid.counts
    numbers = (counts.empty, counts.edge, counts.full)
    patches = [
        Patch(facecolor=c, edgecolor="#888888", label=f"{t} ({n})")
        for c, t, n in zip(_COLOURS, _LABELS, numbers, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    path = check_path(path)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise WeftError(f"picture: {path}: cannot be written ({error.strerror})") from error
    return path


def check_path(path: str | Path) -> Path:
    """The path of a picture. Raises WeftError for another suffix than .png, and where there is no such folder."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise WeftError(f"picture: expected a file that ends in .png, got {path}")
    if not path.parent.is_dir():
        raise WeftError(f"picture: {path}: there is no folder {path.parent}; make it first")
    return path
