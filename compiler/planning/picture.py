"""Pictures of the tiles that a kernel skips, masks and takes as full, drawn from the program that the kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from ...ir.errors import UnavailableError, WeftError, counted
from ..analysis.tiles.results import TileCounts

if TYPE_CHECKING:
    import numpy

EMPTY, EDGE, FULL = 0, 1, 2
# (first row, last row) -> runs of edge tiles, and of full ones
Ranges = Callable[[int, int], tuple[Sequence[range], Sequence[range]]]

_COLOURS = ("#ffffff", "#f2a541", "#2a6f97")  # empty, edge, full; distinct in grey too
_LABELS = ("empty: never visited", "edge: mask evaluated", "full: no mask code")
_LETTERS = " ▒█"
SUFFIXES = (".png", ".svg")  # of files
_MOST_PIXELS = 2048  # of a side: more than the picture has
_DENSE_PIXELS = 1 << 22  # the mask itself is drawn up to this many pairs
SMALL = 1 << 14  # and up to this many wherever the picture is drawn
_MOST_CELLS = 256  # of a side of an SVG, whose size grows with them
_GRIDDED = 64  # up to so many tiles a side have lines between them


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


class Picture(str):
    """A picture in characters: text as any other, which prompts show as it is and notebooks as an SVG."""

    grid: TileGrid
    heading: str
    dense: numpy.ndarray | None  # the mask itself, where it is drawn over the tiles

    @classmethod
    def of(cls, grid: TileGrid, title: str = "", dense: numpy.ndarray | None = None) -> Picture:
        self = cls(mask_text(grid, title=title))
        self.grid, self.heading, self.dense = grid, title, dense
        return self

    def __repr__(self) -> str:
        return str(self)

    def svg(self) -> str:
        """The picture as the text of an SVG."""
        return mask_svg(self.grid, title=self.heading, dense=self.dense)

    _repr_svg_ = svg

    def save(self, path: str | Path) -> Path:
        """Write a PNG or an SVG, by the suffix, and return its path; `check_path` says which paths are refused."""
        path = check_path(path)
        if path.suffix.lower() == ".png":
            return mask_picture(self.grid, path, title=self.heading, dense=self.dense)
        try:
            path.write_text(self.svg(), encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error
        return path


def _unwritable(path: Path, error: OSError) -> WeftError:
    return WeftError(f"picture: {path}: cannot be written ({error.strerror})")


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
    lines = ["".join(_LETTERS[which] for which in row) for row in _thinned(grid, step)]
    frame = "─" * (len(lines[0]) if lines else 0)
    counts = grid.counts
    size = f"tile {counted(grid.block_q, 'query')} x {counted(grid.block_kv, 'key')}" + (
        f", {step} x {step} tiles a character" if step > 1 else ""
    )
    legend = f"{counts.empty} empty, {counts.edge} edge ▒, {counts.full} full █; {size}"
    return "\n".join(
        [*([title] if title else []), f"┌{frame}┐", *(f"│{line}│" for line in lines), f"└{frame}┘", legend]
    )


def _thinned(grid: TileGrid, step: int) -> list[bytes]:
    """The classes where step x step tiles are drawn as one: edge where theirs differ."""

    def joined(rows: Sequence[bytes], column: int) -> int:
        found = set(b"".join(row[column : column + step] for row in rows))
        return found.pop() if len(found) == 1 else EDGE

    bands = [grid.classes[r : r + step] for r in range(0, len(grid.classes), step)]
    return [bytes(joined(rows, c) for c in range(0, len(rows[0]), step)) for rows in bands]


def mask_picture(grid: TileGrid, path: str | Path, *, title: str = "", dense: numpy.ndarray | None = None) -> Path:
    """Save the picture as a PNG and return its path; `check_path` says which paths are refused.

    dense: the mask itself, bool [q_len, kv_len]; drawn faintly over the tiles where it is small enough.
    """
    import numpy

    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnavailableError(
            f"picture: matplotlib is not to be had ({error}); pip install 'weft-attention[pictures]', or write "
            "an .svg, which does without"
        ) from None

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
    if max(rows, columns) <= _GRIDDED:
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
        raise _unwritable(path, error) from error
    return path


# -- SVG -------------------------------------------------------------------------------------------------------------
_PLOT, _MARGIN, _LINE = 420, 56, 18  # of the plot at most, of what stands around it, of a line of text
_CARD = "#ffffff", "#cccccc", "#222222"  # background, border and text: its own, so that it reads on dark pages too


def mask_svg(grid: TileGrid, *, title: str = "", dense: numpy.ndarray | None = None) -> str:
    """The picture as the text of an SVG. A large grid is thinned to 256 tiles a side, as in `mask_text`.

    dense: the mask itself, bool [q_len, kv_len]; drawn faintly over edge tiles where it has up to 2**14 pairs.
    """
    across, down = _plot_size(grid)
    titles = wrap(title or f"{grid.q_len} queries, {grid.kv_len} keys", 64)
    top, width = _LINE * (len(titles) + 1) + 14, _PLOT + 2 * _MARGIN
    height = top + down + 5 * _LINE
    background, border, ink = _CARD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="{ink}">',
        f"<title>{escape(title)}</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="{background}" '
        f'stroke="{border}"/>',
        *(_svg_text(_MARGIN, _LINE * (n + 1) + 4, line, weight="bold") for n, line in enumerate(titles)),
        *_axes(grid, top, across, down),
        f'<svg x="{_MARGIN}" y="{top}" width="{across}" height="{down}" viewBox="0 0 {grid.kv_len} {grid.q_len}" '
        'preserveAspectRatio="none" shape-rendering="crispEdges">',
        *_svg_tiles(grid, EDGE),
        *(_svg_pairs(dense) if dense is not None and dense.size <= SMALL else ()),
        *_svg_tiles(grid, FULL),  # over their pairs, which all see each other
        *_svg_lines(grid),
        "</svg>",
        f'<rect x="{_MARGIN}" y="{top}" width="{across}" height="{down}" fill="none" stroke="{ink}"/>',
        *_legend(grid, top + down + _LINE + 12),
        "</svg>",
    ]
    return "\n".join(parts)


def _plot_size(grid: TileGrid) -> tuple[int, int]:
    """Width and height of the plot: true to the lengths, as far as both stay large enough to see."""
    tall = _PLOT * grid.q_len / grid.kv_len
    across = _PLOT if tall <= _PLOT else max(_PLOT // 4, round(_PLOT * _PLOT / tall))
    return across, round(min(_PLOT, max(_PLOT // 10, tall)))


def _svg_text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}"{more}>{escape(text)}</text>'


def _axes(grid: TileGrid, top: int, across: int, down: int) -> Iterator[str]:
    """What the axes are, and where they end."""
    left, middle = _MARGIN - 6, top + down / 2
    yield _svg_text(_MARGIN, top - 6, "0")
    yield _svg_text(_MARGIN + across / 2, top - 6, "key", anchor="middle")
    yield _svg_text(_MARGIN + across, top - 6, str(grid.kv_len), anchor="end")
    yield _svg_text(left, top + 10, "0", anchor="end")
    if down > 5 * _LINE:  # else there is no room for it
        yield _svg_text(left, middle, "query", anchor="middle", more=f' transform="rotate(-90 {left} {middle})"')
    yield _svg_text(left, top + down, str(grid.q_len), anchor="end")


def _svg_tiles(grid: TileGrid, which: int) -> Iterator[str]:
    """The tiles of a class, as one path."""
    step = -(-max(len(grid.classes), len(grid.classes[0])) // _MOST_CELLS)
    path = _rectangles(_thinned(grid, step), which, step * grid.block_kv, step * grid.block_q)
    if path:
        yield f'<path fill="{_COLOURS[which]}" d="{path}"/>'


def _svg_pairs(dense: numpy.ndarray) -> Iterator[str]:
    """The mask itself: pairs that see each other."""
    path = _rectangles([bytes(row.astype("uint8")) for row in dense], 1, 1, 1)
    if path:
        yield f'<path fill="#000000" fill-opacity="0.25" d="{path}"/>'


def _rectangles(rows: Sequence[bytes], which: int, wide: int, high: int) -> str:
    """The path around all cells of a class: one rectangle for those of a row side by side, and for rows alike."""
    parts, top = [], 0
    for row, same in groupby(rows):
        tall, left = len(list(same)), 0
        for found, cells in groupby(row):
            length = len(list(cells))
            if found == which:
                parts.append(f"M{left * wide} {top * high}h{length * wide}v{tall * high}h-{length * wide}z")
            left += length
        top += tall
    return "".join(parts)


def _svg_lines(grid: TileGrid) -> Iterator[str]:
    """Lines between tiles, where these are few."""
    if max(len(grid.classes), len(grid.classes[0])) > _GRIDDED // 2:
        return
    down = "".join(f"M{x} 0V{grid.q_len}" for x in range(grid.block_kv, grid.kv_len, grid.block_kv))
    across = "".join(f"M0 {y}H{grid.kv_len}" for y in range(grid.block_q, grid.q_len, grid.block_q))
    if down or across:
        thin = 'stroke="#000000" stroke-opacity="0.2" vector-effect="non-scaling-stroke"'
        yield f'<path fill="none" {thin} d="{down}{across}"/>'


def _legend(grid: TileGrid, top: int) -> Iterator[str]:
    """The classes with how many tiles are of each, and how large a tile is."""
    counts = (grid.counts.empty, grid.counts.edge, grid.counts.full)
    for number, (colour, label, count) in enumerate(zip(_COLOURS, _LABELS, counts, strict=True)):
        x = _MARGIN + number * (_PLOT + _MARGIN) // len(counts)
        yield f'<rect x="{x}" y="{top - 10}" width="11" height="11" fill="{colour}" stroke="#888888"/>'
        yield _svg_text(x + 16, top, f"{label.split(':')[0]} {count:,}")
        yield _svg_text(x + 16, top + 15, label.split(": ")[1], more=' font-size="10" fill-opacity="0.7"')
    yield _svg_text(_MARGIN, top + 36, f"tile {counted(grid.block_q, 'query')} x {counted(grid.block_kv, 'key')}")


def check_path(path: str | Path) -> Path:
    """The path of a picture. Raises WeftError for a suffix other than .png and .svg, and where there is no folder."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise WeftError(f"picture: expected a file that ends in {' or '.join(SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise WeftError(f"picture: {path}: there is no folder {path.parent}; make it first")
    return path
