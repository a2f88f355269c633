"""What templates of `triton` are told besides (codegen/context.py). Targets of its family share them."""

from __future__ import annotations

from dataclasses import dataclass

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import Axis, TileSource
from ....compiler.planning.dtypes import copies_values, dtype_named
from ....compiler.planning.gradient_sums import Finish, Owner
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.records import Segment
from ....compiler.planning.signature import starts_early
from ....compiler.planning.sources import SequenceKind
from ....ir.walk import symbols
from ...context import Cell, LevelPairs, Value
from ...launch.job import ways_in

_MEASURES: dict[TileSource, str] = {"program": "", "spans": "spans, ", "lists": "lists, room, "}


# -- the module of one direction ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Columns:
    """How columns of operands lie in tiles."""

    qk_segments: list[Columned]  # of query and key
    v_segments: list[Columned]  # of value and output
    v_is_k0: bool  # the tile of values is key segment 0


@dataclass(frozen=True)
class Kernels:
    """What is particular of portable kernels."""

    measures: str  # names of what kernels before these found of tiles to visit, "spans, "; or ""
    q_bound_names: tuple[str, ...]  # what q_tiles gives, name by name
    tiles_by_head: bool  # rows of different query heads may visit different tiles of keys
    starts_early: bool  # a kernel may be launched before the one in front of it is done
    fast_reads: bool  # PTX may be written for reads by distance


@dataclass(frozen=True)
class Features:
    """What adds lines of its own to kernels (parts/hooks.py.jinja)."""

    feature_parts: list[str]  # to all kernels of the module: templates
    sum_parts: dict[str, list[str]]  # to the sums of one, by kernel: templates


@dataclass(frozen=True)
class Quantized:
    """What FP8 operands need, of a forward."""

    converted: dict[str, str]  # what a tile of queries, keys or values is converted to, by its letter, where it is
    scales_rows: bool  # rows of the query are scaled by powers of two, to fit fp16
    fp16_values: str  # the PTX instruction that makes two FP8 values fp16 where these go to SRAM again; "" for none
    descales: list[str]  # options of the call, "k_descale"
    row_descales: frozenset[str]  # those that are numbers of rows of keys


@dataclass(frozen=True)
class PairSums:
    """How sums over pairs are made, of a backward."""

    ways: dict[int, PairWay]  # by the number of a read of pairs
    over: frozenset[str]  # what a program of flash_dpairs sums over: "batch", "head" or "group"
    bounds_by_head: bool  # ends of tiles to visit differ from head to head
    beside: bool  # the module is lent to another target's backward, which writes the statistics of rows


# -- records in fields -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Columned:
    """Columns that a kernel holds as one tile."""

    i: int  # its number, of tiles like k<i>
    start: int  # first column: of the query, and of the tensor they lie in
    width: int  # columns that exist
    block: int  # columns of the tile, a power of two
    own: bool  # of the key: they are a tensor of their own, with heads of its own


@dataclass(frozen=True)
class PairWay:
    """How the gradient of one read of pairs is summed."""

    kernel: str  # the kernel that sums it
    finish: Finish  # what becomes of the sum of a program


# -- modules beside ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measuring:
    """What a module is told that measures which tiles to visit."""

    mask_text: str  # the mask, for the docstring
    by_head: bool  # it differs from head to head
    sequences: SequenceKind  # how rows of sequences lie
    values: dict[Axis, tuple[Value, ...]]  # what the mask compares, by axis
    equal: tuple[tuple[int, int], ...]  # numbers of values, of queries and of keys, that must be equal
    cells: tuple[Cell, ...]  # conditions that are the same in blocks of pairs
    by_pair: bool  # what is left differs from pair to pair
    decides: bool  # values decide something
    cell: int  # queries, and keys, of a block of pairs that is looked at
    finds_full: bool  # some tiles are found to be full
    axes: tuple[Measured, ...]  # the axes whose tiles are measured
    kv_bounds: str  # what kv_tiles gives
    kv_ranges: int  # intervals of it
    list_head: int  # numbers before the tiles of a list
    span_room: int  # tiles that a list beside runs has room for
    long_axis: int  # positions of an axis up to which it is not long


@dataclass(frozen=True)
class Measured:
    """An axis whose tiles are visited."""

    axis: Axis  # of the visited tiles
    other: Axis  # of those that visit them
    bounds: str  # what the program of tiles gives
    ranges: int  # intervals of it


@dataclass(frozen=True)
class Tables:
    """What a module is told that makes tables by distance."""

    extents: str  # what the functions take of how far distances reach
    indices: int  # indices of operands that level off
    levels: LevelPairs | None  # pairs at distances where nothing changes any more
    tables: tuple[Table, ...]  # the tables


@dataclass(frozen=True)
class Table:
    """Values by distance."""

    n: int  # its number
    by_batch: bool  # it differs from batch row to batch row
    by_head: bool  # it differs from head to head
    title: str  # the part of the score, for a comment


def records_of(code: CodePlan, facts: Facts, names: dict[Owner, str]) -> tuple[object, ...]:
    """The records of a plan's module. names: of the kernels that sum over pairs, by what their programs own."""
    parts, arch = code.segments, code.signature.arch
    columns = Columns(_columned(parts.qk), _columned(parts.v), parts.value_is_key)
    kernels = Kernels(
        measures=_MEASURES[code.tile_source],
        q_bound_names=facts.q_tiles.outputs,
        tiles_by_head=tiles_by_head(facts, code.tile_source),
        starts_early=starts_early(arch),
        fast_reads=arch.startswith("sm_"),
    )
    if code.signature.direction == "forward":
        return columns, kernels, _features(code), _quantized(code)
    return columns, kernels, _features(code), _pair_sums(code, facts, names)


def _features(code: CodePlan) -> Features:
    kernels = [k.kernel for k in code.own]
    of_all = dict.fromkeys(f.part for k in kernels for f in k.features if not f.sums)
    return Features([*of_all], {k.name: [f.part for f in k.features if f.sums] for k in kernels})


def _quantized(code: CodePlan) -> Quantized:
    signature = code.signature
    d = signature.dtypes
    pairs = {"q": (d.query, d.products), "k": (d.key, d.products), "v": (d.value, d.weights)}
    converted = {letter: dtype_named(to).torch_name for letter, (own, to) in pairs.items() if own != to}
    own: list[str] = [n for n in ("q_descale", "k_descale", "v_descale") if n in signature.options]
    copied = code.schedule.algorithm == "split_kv" and copies_values(d.value, signature.arch)
    in_ptx = f"cvt.rn.f16x2.{d.value}x2" if copied and not signature.widths.value_is_key else ""
    return Quantized(converted if d.quantized else {}, d.scales_rows, in_ptx, own, signature.scaled_rows)


def _columned(segments: tuple[Segment, ...]) -> list[Columned]:
    starts = [sum(s.width for s in segments[:i]) for i in range(len(segments))]
    return [Columned(i, starts[i], s.width, s.block, s.source == "rope") for i, s in enumerate(segments)]


def _pair_sums(code: CodePlan, facts: Facts, names: dict[Owner, str]) -> PairSums:
    ways = ways_in(code, facts)
    found = {i: PairWay(names[way.owner], way.finish) for i, way in enumerate(ways.of_reads) if way}
    return PairSums(found, ways.over, facts.bounds_differ_by_head, code.is_lent)


def tiles_by_head(facts: Facts, source: TileSource) -> bool:
    """Whether rows of different query heads may visit different tiles of keys, which kernels learn from `source`."""
    if source == "spans":
        return "head" in symbols(facts.attention.canonical.folded_mask)
    return any("head" in symbols(line.value) for line in facts.kv_tiles.body)
