"""Kernels that find out which tiles there are, for the flash kernels of masks that read tensors by position.

They run before the kernel that visits what they find, on any GPU, and their tiles are those of that kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .....compiler.analysis.tiles.measured import LIST_HEAD, SPAN_ROOM
from .....compiler.analysis.tiles.results import Axis, Measuring, TileProgram
from .....compiler.analysis.tiles.survey import CELL
from .....compiler.planning.form import Form
from .....compiler.planning.kernel import KEYS_AGAIN, QUERIES_AGAIN, Again, Kernel, KernelId, Slot, Words
from .....compiler.planning.paces import Pace
from .....compiler.planning.quantities import Sizes, none
from .....compiler.planning.records import Stage
from .....compiler.planning.signature import Direction
from .....compiler.planning.sources import DENSE, SequenceKind
from .....compiler.planning.stage_words import EACH_KV, EACH_Q, ONCE, Tiles, computes, loads, stores
from ..forms import Tiling

SPAN = 16  # bytes of a range of tiles: four int32
FLAG = 4  # bytes that say whether tiles are listed behind ranges: an int32
LEAST_AND_GREATEST = 16  # bytes of the ends of a value in a tile: two int64
BITS = 8  # bytes of the bits of a value in a tile
READ = 8  # bytes of what a mask reads at a position, at most


def _in_steps(number: float, together: int) -> float:
    """How many steps of so many together that takes."""
    return -(-number // together)


SPANS = ("kv_spans", "q_spans")
ENDS, LONG_SPANS = ("kv_ends", "q_ends"), ("kv_long_spans", "q_long_spans")  # those of long axes
RUNS = (*SPANS, *ENDS, *LONG_SPANS)  # all that measure runs of tiles
LISTS = ("kv_lists", "q_lists")
PAIR_CELLS = "pair_cells"
MEASURES = (*RUNS, *LISTS, PAIR_CELLS)
STRETCH = 128  # tiles that are looked at as one before they are looked at each
ROWS_TOGETHER = 4096  # positions of the other axis that a program that measures tiles looks at together
ENDS_TOGETHER = 8192  # the same of one that writes their ends, which has twice the warps
TILES_TOGETHER = 256  # tiles of the other axis that a program that lists them looks at together, at most
CELLS_TOGETHER = 8  # blocks of keys that a program of pair_cells looks at, one after the other
_ONCE_EACH = Again(lambda x: 1, none)
_OF_A_STRETCH = f"{STRETCH} tiles, many at a time"
_A_FEW_CELLS = f"a few blocks of {CELL} keys, each with {CELL} queries"
_WARPS, _CELLS_WARPS = 8, 4  # of a program that measures tiles
_ENDS_WARPS = 16  # of one that writes ends of a stretch: few run, and its steps wait one for the other
_LONG_SPANS_WARPS = 1  # of one that looks at stretches: many run at once, and none waits for other warps
# Steps that wait one for the other: of ends, two took 13.7, 14.0 and 15.4 us at 64k, 256k and 1M tokens, and four, of
# half as many positions by half as many warps, 22 at 64k. Spans have such steps as the four; 11 to 22 us were measured
# at 8192 tokens, where they take two. Lists are taken to have the same, and were not timed.
_STEPS = Pace(start=2.3, step=4.0)
_LONG_SPANS_PACE = Pace(program=0.113)  # with ends 16.6, 19.5 and 31.5 us were measured
_MANY_KEYS, _MANY_QUERIES = (f"the {what} tiles that positions leave over, many at a time" for what in ("key", "query"))


# -- words ----------------------------------------------------------------------------------------------------------
def _long_spans(by_tiles: list[Stage], wrote: str, t: Tiles) -> list[Stage]:
    """The same by stretches, whose ends another kernel wrote where they are not those of positions."""
    own, others, matches, *stored = by_tiles
    known = f"what {wrote} wrote of" if wrote in ends_of(t.traits.measured) else "least and greatest position of"
    what = f"{known} {STRETCH} tiles as one, then of each where that leaves it open"
    ends = loads("ends", what, others.per, others.moves)
    return [own, ends, matches, *stored]


def _ends(others: str, each: str) -> list[Stage]:
    return [
        loads("values", f"what the mask reads at {others}; least and greatest of each", each, "HBM -> registers"),
        stores("ends", f"these, of each tile and of {STRETCH} tiles at once"),
    ]


def _spans(own: str, others: str, each: str) -> list[Stage]:
    """Spans are measured by one module for tiles of every size, so that no size is in the words."""
    return [
        loads("own", f"what the mask reads at {own} of a tile; least and greatest of each", ONCE, "HBM -> registers"),
        loads("others", f"what the mask reads at {others}; least and greatest of each", each, "HBM -> registers"),
        computes("matches", "by least and greatest: can any pair match, must every pair", each),
        stores("ranges", "first and last tile to visit, run of full ones; for each range"),
        stores("list", "the tiles to visit, one by one, where an eighth of these ranges and more is none"),
    ]


def _lists(own: str, others: str, each: str, t: Tiles) -> list[Stage]:
    measured = t.traits.measured
    looked = ["least and greatest of each"] + (
        ["blocks of pairs by one of each"] if measured and measured.cells else []
    )
    return [
        loads("own", f"what the mask reads at {own} of a tile; least and greatest of each", ONCE, "HBM -> registers"),
        loads("others", f"what the mask reads at {others}; {', '.join(looked)}", each, "HBM -> registers"),
        computes("matches", "can any pair match, must every pair", each),
        stores("list", "the tiles to visit, one by one, edge and full ones apart", each),
    ]


def _cells_words(t: Tiles) -> list[Stage]:
    return [
        computes("cells", f"the mask of {CELL} queries and {CELL} keys: does none, some or every pair match", EACH_KV),
        stores("cells", "that, a byte", EACH_KV),
    ]


SPANS_WORDS: dict[Axis, Words] = {
    "kv": lambda t: _spans("queries", "keys", EACH_KV), "q": lambda t: _spans("keys", "queries", EACH_Q)
}  # fmt: skip
LONG_SPANS_WORDS: dict[Axis, Words] = {
    "kv": lambda t: _long_spans(SPANS_WORDS["kv"](t), "kv_ends", t),
    "q": lambda t: _long_spans(SPANS_WORDS["q"](t), "q_ends", t),
}
ENDS_WORDS: dict[Axis, Words] = {"kv": lambda t: _ends("keys", EACH_KV), "q": lambda t: _ends("queries", EACH_Q)}
LISTS_WORDS: dict[Axis, Words] = {
    "kv": lambda t: _lists("queries", "keys", EACH_KV, t), "q": lambda t: _lists("keys", "queries", EACH_Q, t)
}  # fmt: skip


def words_of(measuring: Measuring | None, axes: Sequence[Axis], listed: bool, cells: bool) -> dict[str, Words]:
    """The words of the kernels of one module, which measures tiles of any size, by name."""
    if listed:
        found = {f"{axis}_lists": LISTS_WORDS[axis] for axis in axes}
        return found | ({PAIR_CELLS: _cells_words} if cells else {})
    found = {f"{axis}_spans": SPANS_WORDS[axis] for axis in axes}
    found |= {f"{axis}_long_spans": LONG_SPANS_WORDS[axis] for axis in axes}
    ends = ends_of(measuring)
    return found | {f"{axis}_ends": ENDS_WORDS[axis] for axis in axes if f"{axis}_ends" in ends}


# -- kernels --------------------------------------------------------------------------------------------------------
class Visitor(NamedTuple):
    """The kernel that visits what is measured."""

    name: str
    axis: Axis
    direction: Direction
    slot: Slot

    @property
    def other(self) -> Axis:
        """The axis of the tiles that visit."""
        return "q" if self.axis == "kv" else "kv"

    def kernel(self, name: str, loop: str, stages: Words, warps: int, **given: Any) -> Kernel:
        """A kernel that measures for it: its form has the visitor's tiles, and its programs may be none."""
        whole = given["finds"] == "lists"

        def own_form(visitor: Form | None, sequences: SequenceKind) -> Form:
            assert visitor is not None
            # of packed sequences the list of work has whole tiles, and so have lists
            rows = visitor.block_q if whole or sequences.keys.packed else visitor.span_rows
            return Tiling(rows, visitor.block_kv, warps, 1)

        given = {"visits": "none", "again": KEYS_AGAIN if self.axis == "kv" else QUERIES_AGAIN, **given}
        return Kernel(
            KernelId("triton", f"{self.axis}_{name}", str(self)), self.direction, self.slot, self.axis, loop, stages,
            own_form=own_form, measures=self.name, module="measures", **given,
        )  # fmt: skip


def span_width(program: TileProgram) -> int:
    """Numbers that a tile has room for: its ranges, where its tiles are listed, and the list, from a multiple of 4."""
    return len(program.outputs) + 4 + SPAN_ROOM


@lru_cache(maxsize=64)
def spans_kernel(visitor: Visitor, measuring: Measuring) -> Kernel:
    """kv_spans or q_spans: which tiles of `axis` each tile of the other one must visit.

    A program looks at all tiles of `axis`, whose positions all programs read; what one has read, others find in L2.
    """
    axis, own_reads, visited = visitor.axis, measuring.of(visitor.other).reads, measuring.of(visitor.axis)

    def rows(x: Sizes) -> float:
        """Programs of a batch row."""
        return (x.Hq if measuring.by_head else 1) * (x.nq if axis == "kv" else x.nkv)

    def programs(x: Sizes) -> float:
        return x.B * rows(x) * (1 - x.long_axis)

    def read(x: Sizes) -> float:
        own, other = (x.L, x.T) if axis == "kv" else (x.T, x.L)
        return READ * x.B * (own_reads * own + visited.reads * other * (1 + (rows(x) - 1) * x.neighbours_miss))

    def written(x: Sizes) -> float:
        return (SPAN * visited.ranges + FLAG) * programs(x)

    loop = _MANY_KEYS if axis == "kv" else _MANY_QUERIES
    return visitor.kernel(
        "spans", loop, SPANS_WORDS[axis], _WARPS, programs=programs, read=read, written=written,
        steps=lambda x: _in_steps(x.T if axis == "kv" else x.L, ROWS_TOGETHER), finds="runs", pace=_STEPS,
        is_optional=True,
    )  # fmt: skip


def _bytes_of_ends(axis: Axis, measuring: Measuring) -> int:
    """What is written of a tile: least and greatest of each value, and bits of some."""
    found = measuring.of(axis)
    return LEAST_AND_GREATEST * found.values + BITS * found.bits


@lru_cache(maxsize=64)
def long_spans_kernel(visitor: Visitor, measuring: Measuring) -> Kernel:
    """kv_long_spans or q_long_spans: the same of a long axis, of which ends were written.

    A program reads those of all stretches, and as many again: of the tiles of one or two.
    """
    axis, by_tiles = visitor.axis, spans_kernel(visitor, measuring)
    own_reads = measuring.of(visitor.other).reads

    def programs(x: Sizes) -> float:
        return x.long_axis * by_tiles.programs(x._replace(long_axis=0))

    def read(x: Sizes) -> float:
        own, tiles = (x.L, x.nkv) if axis == "kv" else (x.T, x.nq)
        ends = x.B * tiles * (1 - x.neighbours_miss) + programs(x) * (tiles / STRETCH + 2 * STRETCH) * x.neighbours_miss
        return READ * x.B * own_reads * own + _bytes_of_ends(axis, measuring) * ends

    return visitor.kernel(
        "long_spans", f"{by_tiles.loop}: in stretches", LONG_SPANS_WORDS[axis], _LONG_SPANS_WARPS, programs=programs,
        read=read, written=lambda x: by_tiles.written(x._replace(long_axis=0)), finds="runs", of_long_axis=True,
        pace=_LONG_SPANS_PACE, is_optional=True,
    )  # fmt: skip


@lru_cache(maxsize=64)
def ends_kernel(visitor: Visitor, measuring: Measuring) -> Kernel:
    """kv_ends or q_ends: least and greatest of what a mask reads in tiles of a long axis, and in stretches of them."""
    axis = visitor.axis
    reads = measuring.of(axis).reads

    def tiles(x: Sizes) -> float:
        return x.long_axis * x.B * (x.Hq if measuring.by_head else 1) * (x.nkv if axis == "kv" else x.nq)

    def programs(x: Sizes) -> float:
        return tiles(x) / STRETCH

    return visitor.kernel(
        "ends", _OF_A_STRETCH, ENDS_WORDS[axis], _ENDS_WARPS, programs=programs,
        read=lambda x: READ * reads * x.long_axis * x.B * (x.T if axis == "kv" else x.L),
        written=lambda x: _bytes_of_ends(axis, measuring) * (tiles(x) + programs(x)),
        steps=lambda x: _in_steps(STRETCH * (x.bkv if axis == "kv" else x.bq), ENDS_TOGETHER), finds="ends",
        of_long_axis=True, pace=_STEPS, is_optional=True, again=_ONCE_EACH,
    )  # fmt: skip


def ends_of(measuring: Measuring | None) -> tuple[str, ...]:
    """The kernels that write ends: for runs of tiles, and of values other than the position itself."""
    if measuring is None or measuring.source == "lists":
        return ()
    return tuple(n for n, values in zip(ENDS, (measuring.kv.values, measuring.q.values)) if values)


@lru_cache(maxsize=64)
def lists_kernel(visitor: Visitor, measuring: Measuring) -> Kernel:
    """kv_lists or q_lists: which tiles of `axis` each tile of the other one must visit, one by one.

    It reads what the spans kernel reads, an entry of each condition on cells for each pair of tiles, and what
    pair_cells found; it writes the tiles that are visited.
    """
    axis, spans = visitor.axis, spans_kernel(visitor, measuring)

    def programs(x: Sizes) -> float:
        return spans.programs(x._replace(long_axis=0))  # of long axes too

    def pairs(x: Sizes) -> float:
        """Pairs of tiles of the problem, each once for heads that see the same."""
        return programs(x) * (x.nkv if axis == "kv" else x.nq)

    def read(x: Sizes) -> float:
        found = spans.read(x) + READ * measuring.cells * pairs(x)
        return found + cells_bytes(x, measuring) if measuring.by_pair else found

    def written(x: Sizes) -> float:
        """The numbers before each list, and a number a visited tile."""
        return 4 * (LIST_HEAD * programs(x) + x.n / (1 if measuring.by_head else x.Hq))

    return visitor.kernel(
        "lists", spans.loop, LISTS_WORDS[axis], _WARPS, programs=programs, read=read, written=written,
        steps=lambda x: _in_steps(x.nkv if axis == "kv" else x.nq, TILES_TOGETHER), finds="lists", visits="visible",
        pace=_STEPS,
    )  # fmt: skip


def cells_bytes(x: Sizes, measuring: Measuring) -> float:
    """A byte for each block of CELL x CELL pairs."""
    return x.B * (x.Hq if measuring.by_head else 1) * x.L * x.T / CELL**2


@lru_cache(maxsize=64)
def cells_kernel(direction: Direction, measuring: Measuring) -> Kernel:
    """pair_cells: whether the pairs of each block of CELL x CELL see each other: none, some, or all of them."""

    def programs(x: Sizes) -> float:
        return cells_bytes(x, measuring) / CELLS_TOGETHER

    def read(x: Sizes) -> float:
        return x.B * (x.Hq if measuring.by_head else 1) * x.L * x.T

    def written(x: Sizes) -> float:
        return cells_bytes(x, measuring)

    def own_form(visitor: Form | None, sequences: SequenceKind) -> Form:
        return Tiling(CELL, CELL, _CELLS_WARPS, 1)

    slot: Slot = "forward" if direction == "forward" else "backward_q"
    return Kernel(
        KernelId("triton", PAIR_CELLS, str(measuring)), direction, slot, "kv",
        _A_FEW_CELLS, _cells_words, programs=programs, read=read, written=written, visits="none", finds="cells",
        own_form=own_form, module="measures",
    )  # fmt: skip


def with_measuring(
    kernels: Sequence[Kernel], measuring: Measuring | None, sequences: SequenceKind = DENSE
) -> list[Kernel]:
    """The kernels, and before each that visits measured tiles the one that measures them; None where nothing is.

    Few queries, whose keys are divided, do not visit lists: they look at what positions leave over. So do packed
    queries over pages, whose tiles of queries have places as packed ones, and those of keys as padded ones.
    """
    lists = measuring is not None and measuring.source == "lists"
    if measuring is None or (lists and any(k.divides for k in kernels)) or not any(k.visits_measured for k in kernels):
        return list(kernels)
    if sequences.is_mixed:
        return list(kernels)
    found: list[Kernel] = []
    if measuring.by_pair and not sequences.keys.packed:
        found.append(cells_kernel(kernels[0].direction, measuring))
    for kernel in kernels:
        if kernel.visits_measured:
            visitor = Visitor(kernel.name, kernel.axis, kernel.direction, kernel.slot)
            made = [lists_kernel] if lists else [spans_kernel, long_spans_kernel]
            made[1:1] = [ends_kernel] if f"{kernel.axis}_ends" in ends_of(measuring) else []
            found += [make(visitor, measuring) for make in made]
        found.append(kernel)
    return found
