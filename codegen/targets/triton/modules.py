"""Modules of `triton` beside those of any GPU target: they measure tiles, make tables, or hold lent kernels."""

from __future__ import annotations

from dataclasses import replace

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.measured import LIST_HEAD, LONG_AXIS, SPAN_ROOM
from ....compiler.analysis.tiles.results import Axis, TileProgram
from ....compiler.analysis.tiles.survey import CELL, Survey
from ....compiler.analysis.values.affine import is_bool
from ....compiler.planning.by_distance import levels_in, tables_in
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.segments import Segments
from ....compiler.planning.sources import DENSE, SequenceKind
from ....compiler.planning.stage_words import Tiles
from ....compiler.planning.target import Target
from ....ir.errors import InternalError
from ...context import Printed
from ...dialects import TRITON
from ...functions import FunctionPrinter, parameter_names
from ...generate import generate, written
from ...subject import cells, level_pairs, values_of
from .context import Measured, Measuring, Table, Tables
from .kernels.measures import words_of


def measures(facts: Facts, offsets_64: bool, sequences: SequenceKind = DENSE) -> str:
    """Source of the module that measures which tiles a call must visit, for kernels of any GPU target.

    They are runs of tiles, or lists, as `Facts.tile_source` says.
    """
    found = facts.survey
    if found is None:
        raise InternalError(f"generate: {facts.attention.name} has nothing to measure")
    printer = FunctionPrinter(facts, TRITON, offsets_64=offsets_64)
    tiles = Tiles(0, 0, Segments((), ()), facts.traits)  # of any size and width
    looks = found.by_pair and not sequences.keys.packed
    words = words_of(facts.traits.measured, ("kv", "q"), facts.tile_source == "lists", looks)
    records = (_printed(printer, printer.survey(found)), _measuring(facts, found, sequences))
    kernels = {kernel: of(tiles) for kernel, of in words.items()}
    return written(f"triton/tile_{facts.tile_source}.py.jinja", records, kernels)


def tables(facts: Facts, code: CodePlan) -> str:
    """Source of the module that makes the tables by distance of a plan's kernels, on any GPU."""
    found, levels, making = tables_in(code, facts), levels_in(code, facts), code.of_module("tables")
    if not found or making is None:
        raise InternalError(f"generate: {facts.attention.name} reads nothing by distance")
    printer = FunctionPrinter(facts, TRITON, offsets_64=code.signature.offsets_64, tables=found)
    indices = levels.indices if levels else ()
    told = Tables(
        extents=", ".join(printer.extents_with(indices)),
        indices=len(indices),
        levels=level_pairs(levels),
        tables=tuple(Table(n, t.by_batch, t.by_head, str(t.part)) for n, t in enumerate(found)),
    )
    records = (_printed(replace(printer, tables=()), printer.distance_values(indices)), told)
    return written("triton/distance_tables.py.jinja", records, {making.name: making.stages})


def lent(facts: Facts, code: CodePlan, target: Target) -> str:
    """Source of the module of flash_ddiagonals alone, for a plan of another target's kernels.

    Level pairs are summed there a key, in place of a tile of queries.
    """
    own = replace(code, target=target.name, segments=target.parts(facts.attention, code.signature.widths))
    return generate(facts, own, target)


def _printed(printer: FunctionPrinter, functions: str) -> Printed:
    attention = printer.facts.attention
    names = ", ".join(parameter_names(attention, strides=True))
    return Printed(str(attention.name), functions, printer.env, printer.here, names)


def _measuring(facts: Facts, found: Survey, sequences: SequenceKind) -> Measuring:
    keys = facts.kv_tiles
    return Measuring(
        mask_text=str(facts.attention.mask),
        by_head=facts.mask_differs_by_head,
        sequences=sequences,
        values=values_of(found),
        equal=found.equal,
        cells=cells(found.cells),
        by_pair=found.by_pair,
        decides=found.decides,
        cell=CELL,
        finds_full=not is_bool(found.certain, False),
        axes=(_measured("kv", "q", keys), _measured("q", "kv", facts.q_tiles)),
        kv_bounds=", ".join(keys.outputs),
        kv_ranges=len(keys.outputs) // 4,
        list_head=LIST_HEAD,
        span_room=SPAN_ROOM,
        long_axis=LONG_AXIS,
    )


def _measured(axis: Axis, other: Axis, program: TileProgram) -> Measured:
    return Measured(axis, other, ", ".join(program.outputs), len(program.outputs) // 4)
