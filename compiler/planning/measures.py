"""Kernels that find out which tiles there are: those that measure them for masks that read tensors, and those that list
them for packed sequences, each as formulas of what it moves (quantities.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from ..analysis.measured import SPAN_ROOM
from ..analysis.records import Axis, Measuring, TileProgram
from ..analysis.survey import CELL
from .kernels import FLASH, HOPPER_BACKWARD, KEYS_AGAIN, QUERIES_AGAIN, ROW_STATISTICS, SPLIT_KV, Again, Kernel, Slot
from .quantities import BITS, FLAG, LEAST_AND_GREATEST, READ, SPAN, Sizes, none
from .signature import Direction, SequenceKind


def _in_steps(number: float, together: int) -> float:
    """How many steps of so many together that takes."""
    return -(-number // together)


# -- what measures tiles, for the flash kernels of masks that read tensors by position -------------------------------
SPANS = ("kv_spans", "q_spans")
ENDS, LONG_SPANS = ("kv_ends", "q_ends"), ("kv_long_spans", "q_long_spans")  # those of long axes
RUNS = (*SPANS, *ENDS, *LONG_SPANS)  # all that measure runs of tiles
LISTS = ("kv_lists", "q_lists")
PAIR_CELLS = "pair_cells"
MEASURES = (*RUNS, *LISTS, PAIR_CELLS)
DISTANCE_TABLES = "distance_tables"
BESIDE = (*MEASURES, DISTANCE_TABLES)  # kernels of modules of their own, whose form is no choice
LIST_ROOM = 1024  # tiles that a list holds at most; those behind the last of them are visited as a run
FEW = 1 << 14  # positions of an axis above which it is long: ends of its tiles are written before tiles are measured
STRETCH = 128  # tiles that are looked at as one before they are looked at each
ROWS_TOGETHER = 4096  # positions of the other axis that a program that measures tiles looks at together
ENDS_TOGETHER = 8192  # the same of one that writes their ends, which has twice the warps
TILES_TOGETHER = 256  # tiles of the other axis that a program that lists them looks at together, at most
CELLS_TOGETHER = 8  # blocks of keys that a program of pair_cells looks at, one after the other
LIST_HEAD = 4  # numbers before the tiles of a list
_VISITORS = {k.name for k in (FLASH[0], SPLIT_KV[0], FLASH[2], FLASH[3], HOPPER_BACKWARD)}
_ONCE_EACH = Again(lambda x: 1, none)
_OF_A_STRETCH = f"{STRETCH} tiles, many at a time"
_A_FEW_CELLS = f"a few blocks of {CELL} keys, each with {CELL} queries"
_MANY_KEYS, _MANY_QUERIES = (f"the {what} tiles that positions leave over, many at a time" for what in ("key", "query"))


def span_width(program: TileProgram) -> int:
    """Numbers that a tile has room for: its ranges, where its tiles are listed, and the list, from a multiple of 4."""
    return len(program.outputs) + 4 + SPAN_ROOM


@lru_cache(maxsize=64)
def spans_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_spans or q_spans: which tiles of `axis` each tile of the other one must visit.

    A program looks at all tiles of `axis`, whose positions all programs read; what one has read, others find in L2.
    """
    own_reads, reads = measuring.q_reads, measuring.kv_reads
    ranges = measuring.kv_ranges
    if axis == "q":
        own_reads, reads, ranges = reads, own_reads, measuring.q_ranges

    def rows(x: Sizes) -> float:
        """Programs of a batch row."""
        return (x.Hq if measuring.by_head else 1) * (x.nq if axis == "kv" else x.nkv)

    def programs(x: Sizes) -> float:
        return x.B * rows(x) * (1 - x.r)

    def read(x: Sizes) -> float:
        own, other = (x.L, x.T) if axis == "kv" else (x.T, x.L)
        return READ * x.B * (own_reads * own + reads * other * (1 + (rows(x) - 1) * x.j))

    def written(x: Sizes) -> float:
        return (SPAN * ranges + FLAG) * programs(x)

    def steps(x: Sizes) -> float:
        return _in_steps(x.T if axis == "kv" else x.L, ROWS_TOGETHER)

    name, loop, again = (
        ("kv_spans", _MANY_KEYS, KEYS_AGAIN) if axis == "kv" else ("q_spans", _MANY_QUERIES, QUERIES_AGAIN)
    )
    return Kernel(
        name, direction, slot, axis, loop, programs, none, read, written, none, none, again, steps=steps
    )  # fmt: skip


def _bytes_of_ends(axis: Axis, measuring: Measuring) -> int:
    """What is written of a tile: least and greatest of each value, and bits of some."""
    values, bits = measuring.kv_values, measuring.kv_bits
    if axis == "q":
        values, bits = measuring.q_values, measuring.q_bits
    return LEAST_AND_GREATEST * values + BITS * bits


@lru_cache(maxsize=64)
def long_spans_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_long_spans or q_long_spans: the same of a long axis, of which ends were written.

    A program reads those of all stretches, and as many again: of the tiles of one or two.
    """
    by_tiles = spans_kernel(axis, direction, slot, measuring)
    own_reads = measuring.q_reads if axis == "kv" else measuring.kv_reads

    def programs(x: Sizes) -> float:
        return x.r * by_tiles.programs(x._replace(r=0))

    def read(x: Sizes) -> float:
        own, tiles = (x.L, x.nkv) if axis == "kv" else (x.T, x.nq)
        ends = x.B * tiles * (1 - x.j) + programs(x) * (tiles / STRETCH + 2 * STRETCH) * x.j
        return READ * x.B * own_reads * own + _bytes_of_ends(axis, measuring) * ends

    def written(x: Sizes) -> float:
        return by_tiles.written(x._replace(r=0))

    name, loop = f"{axis}_long_spans", f"{by_tiles.loop}: in stretches"
    return Kernel(name, direction, slot, axis, loop, programs, none, read, written, none, none, by_tiles.again)


@lru_cache(maxsize=64)
def ends_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_ends or q_ends: least and greatest of what a mask reads in tiles of a long axis, and in stretches of them."""
    reads = measuring.kv_reads if axis == "kv" else measuring.q_reads

    def tiles(x: Sizes) -> float:
        return x.r * x.B * (x.Hq if measuring.by_head else 1) * (x.nkv if axis == "kv" else x.nq)

    def programs(x: Sizes) -> float:
        return tiles(x) / STRETCH

    def read(x: Sizes) -> float:
        return READ * reads * x.r * x.B * (x.T if axis == "kv" else x.L)

    def written(x: Sizes) -> float:
        return _bytes_of_ends(axis, measuring) * (tiles(x) + programs(x))

    def steps(x: Sizes) -> float:
        return _in_steps(STRETCH * (x.bkv if axis == "kv" else x.bq), ENDS_TOGETHER)

    name = f"{axis}_ends"
    return Kernel(
        name, direction, slot, axis, _OF_A_STRETCH, programs, none, read, written, none, none, _ONCE_EACH, steps=steps
    )  # fmt: skip


def ends_of(measuring: Measuring | None) -> tuple[str, ...]:
    """The kernels that write ends: for runs of tiles, and of values other than the position itself."""
    if measuring is None or measuring.source == "lists":
        return ()
    return tuple(n for n, values in zip(ENDS, (measuring.kv_values, measuring.q_values)) if values)


@lru_cache(maxsize=64)
def lists_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_lists or q_lists: which tiles of `axis` each tile of the other one must visit, one by one.

    It reads what the spans kernel reads, an entry of each condition on cells for each pair of tiles, and what
    pair_cells found; it writes the tiles that are visited.
    """
    spans = spans_kernel(axis, direction, slot, measuring)

    def programs(x: Sizes) -> float:
        return spans.programs(x._replace(r=0))  # of long axes too

    def pairs(x: Sizes) -> float:
        """Pairs of tiles of the problem, each once for heads that see the same."""
        return programs(x) * (x.nkv if axis == "kv" else x.nq)

    def read(x: Sizes) -> float:
        found = spans.read(x) + READ * measuring.cells * pairs(x)
        return found + cells_bytes(x, measuring) if measuring.by_pair else found

    def written(x: Sizes) -> float:
        """The numbers before each list, and a number a visited tile."""
        return 4 * (LIST_HEAD * programs(x) + x.n / (1 if measuring.by_head else x.Hq))

    def steps(x: Sizes) -> float:
        return _in_steps(x.nkv if axis == "kv" else x.nq, TILES_TOGETHER)

    name = f"{axis}_lists"
    return Kernel(
        name, direction, slot, axis, spans.loop, programs, none, read, written, none, none, spans.again, steps=steps
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

    slot: Slot = "forward" if direction == "forward" else "backward_q"
    return Kernel(
        PAIR_CELLS, direction, slot, "kv", _A_FEW_CELLS, programs, none, read, written, none, none, KEYS_AGAIN
    )


def with_measuring(
    kernels: Sequence[Kernel], measuring: Measuring | None, sequences: SequenceKind = "dense"
) -> list[Kernel]:
    """The kernels, and before each that visits measured tiles the one that measures them; None where nothing is.

    Few queries, whose keys are divided, do not visit lists: they look at what positions leave over. So do packed
    queries over pages, whose tiles of queries have places as packed ones, and those of keys as padded ones.
    """
    lists = measuring is not None and measuring.source == "lists"
    if measuring is None or (lists and SPLIT_KV[0] in kernels) or all(k.name not in _VISITORS for k in kernels):
        return list(kernels)
    if sequences == "packed_paged":
        return list(kernels)
    found: list[Kernel] = []
    if measuring.by_pair and sequences != "packed":
        found.append(cells_kernel(kernels[0].direction, measuring))
    for kernel in kernels:
        if kernel.name in _VISITORS:
            made = [lists_kernel] if lists else [spans_kernel, long_spans_kernel]
            made[1:1] = [ends_kernel] if f"{kernel.axis}_ends" in ends_of(measuring) else []
            found += [make(kernel.axis, kernel.direction, kernel.slot, measuring) for make in made]
        found.append(kernel)
    return found


# -- what lists the tiles of packed sequences ------------------------------------------------------------------------
WORK = ("query_work", "key_work")
LISTED = 16  # sequences that a program of them lists
_LISTS, _ALL_SEQUENCES = 8, "all sequences, many at a time"  # bytes of a tile's place in a list


@lru_cache(maxsize=64)
def work_kernel(follows: str, side: Literal["q", "kv"] | None = None) -> Kernel:
    """query_work or key_work: the tiles of all sequences, for the kernel that owns them, or for a side of one.

    A sequence is as good as nothing beside its rows, so that formulas have the lists alone.
    """
    visitor = next(k for k in (*FLASH, HOPPER_BACKWARD) if k.name == follows)
    owns_queries = visitor.axis == "kv" if side is None else side == "q"
    name = WORK[0] if owns_queries else WORK[1]
    axis: Axis = "kv" if owns_queries else "q"

    def programs(x: Sizes) -> float:
        return x.B

    def written(x: Sizes) -> float:
        return _LISTS * x.B * (x.nq if owns_queries else x.nkv)

    return Kernel(
        name, visitor.direction, visitor.slot, axis, _ALL_SEQUENCES, programs, none, none, written, none, none,
        visitor.again, follows,
    )  # fmt: skip


def with_work(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a packed call: before all others those that list tiles for the ones that own them.

    The kernels around the hopper backward own tiles of queries, as large as those that it visits; its statistics of
    rows have the list of the kernel that owns queries, where there is one.
    """
    names = [k.name for k in kernels]
    if HOPPER_BACKWARD.name in names:
        return [work_kernel(HOPPER_BACKWARD.name, side) for side in ("q", "kv")] + list(kernels)
    owners = [k.name for k in FLASH if k != ROW_STATISTICS]
    found = [work_kernel(name) for name in names if name in owners]
    of_tiles = any(k.name == ROW_STATISTICS.name and k.follows is not None for k in kernels)
    if of_tiles and FLASH[2].name not in names:
        found.insert(0, work_kernel(FLASH[3].name, "q"))
    return [*found, *kernels]
