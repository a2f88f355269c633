"""What templates are told: records whose fields are the names that they read.

These records serve all families; those of one family stand in codegen/targets/<family>/context.py. Templates read flat
names, so a module's records are spread over one dictionary. tests/machine_code/test_context.py holds that a template
reads nothing that its records do not declare, and that some template reads each field.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..compiler.analysis.tiles.results import GradientKind, TileSource
from ..compiler.planning.signature import Serves
from ..compiler.planning.sources import SequenceKind
from ..ir.errors import InternalError
from ..ir.normalizer import Normalizer
from .functions import Draws
from .normalizers import Blocks
from .stages import StageComments


# -- every module ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Comments:
    """The words of stages."""

    stage: StageComments  # prints those of one stage of a kernel, stage("flash_forward", "load query")


@dataclass(frozen=True)
class Printed:
    """What is printed of a variant."""

    name: str  # its name, for the docstring
    functions: str  # what kernels call of it, as text: score, mask, tiles to visit, derivatives
    env: str  # the arguments that each of these functions ends with: on a GPU "here"
    here: str  # what that is, made of names that kernels have; "" on a CPU
    params: str  # names of what carries operands, "arg_window, arg_slopes, s0_slopes", or ""


# -- the module of one direction ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Figures:
    """What the docstring says of a variant and its kernels (codegen/figures.py)."""

    attention_text: str  # the variant as it is declared
    figures: str  # of each kernel: its form, SRAM, registers where declared, and what bounds it


@dataclass(frozen=True)
class Variant:
    """What a variant's score and mask are."""

    masked: bool  # the mask is not True
    by_head: bool  # the mask differs from head to head
    linear: bool  # the score is score_scale(...) times q.k, plus score_rest(...) where it `adds`
    adds: bool  # kernels add score_rest(...) to a number times q.k
    signed_scale: bool  # score_scale(...) may be negative or 0
    far: bool  # scores may lie far from 0: they are in natural units, and a row has two statistics
    tables: bool  # the score reads tables by distance
    apart: str  # the first argument of functions that read by distance, "q_offset + q_first - kv_first, "; or ""
    drops: bool  # weights are dropped after the sums of rows
    dropout_arguments: tuple[str, ...]  # names of what dropout_of takes on a GPU
    draws: Draws  # of a part of a call: by which positions weights are dropped


@dataclass(frozen=True)
class Rows:
    """How rows of sequences lie."""

    sequences: SequenceKind  # dense, or of lengths of their own
    serves: Serves  # which sequences of a call the module computes
    most_short: int  # the most queries of those that are "short"


@dataclass(frozen=True)
class Visits:
    """Which tiles a tile visits."""

    source: TileSource  # who says so: a program of the kernel, or kernels before it, which left runs or lists
    measured: bool  # kernels before it do
    bounds: str  # what kv_tiles gives, "lo0, full_lo0, full_hi0, hi0, ...": 4 an interval
    q_bounds: str  # the same of q_tiles
    bound_names: tuple[str, ...]  # `bounds`, name by name
    list_head: int  # numbers before the tiles of a list
    span_room: int  # tiles that a list beside runs has room for
    tile_cells: tuple[Cell, ...]  # conditions of listed tiles that kernels look at once a block of pairs


@dataclass(frozen=True)
class Softmax:
    """How scores become weights."""

    normalizer: Normalizer  # its record
    saves_lse: bool  # it saves the log-sum-exp of each row
    texts: Blocks | None  # its lines (codegen/normalizers.py); None where a template writes a softmax out
    sink: bool  # rows have one more logit, sink_logit(...)


@dataclass(frozen=True)
class Gradients:
    """What derivatives a backward finds, and what it sums of operands that scores read."""

    wanted: frozenset[str]  # of query, key, value, rope and operands, those whose gradients are computed
    slope_is_finite: bool  # d score / d (q.k) is never infinite or NaN
    grads: list[Read]  # reads with a gradient
    sink_grads: list[SinkRead]  # the same of a sink
    levels: LevelPairs | None  # pairs at distances where nothing changes any more, where they are summed apart


# -- records in fields -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    """A condition that is the same for all pairs of a block."""

    i: int  # its number
    q: int  # queries of a block
    kv: int  # keys of a block


@dataclass(frozen=True)
class Value:
    """What a mask compares of the positions of one axis."""

    i: int  # its number
    measured: bool  # it is read from memory; else it is the position
    name: str  # all of a tile's, "q0" or "q_pos"
    bits: bool  # it must be equal to one of the other axis, so 64 bits say which values a tile has


@dataclass(frozen=True)
class SinkRead:
    """One read of a sink's operand that has a gradient."""

    i: int  # its number among all reads with a gradient
    is_finite: bool  # its derivative is never infinite or NaN


@dataclass(frozen=True)
class Read:
    """One read of an operand, in a score, that has a gradient."""

    i: int  # its number, of sum<i> and dload_<i>
    is_finite: bool  # its derivative is never infinite or NaN
    is_one: bool  # its derivative is 1
    kind: GradientKind  # over which pairs its gradient is summed
    is_freed: bool  # its sums are freed of the rounding of the output
    name: str  # of the operand
    both_positions: bool  # its index has both positions
    rank: int  # dimensions of the operand
    at: int  # the operand's place among parameters
    is_block: bool  # a tile of pairs reads a block of the operand
    settles: bool  # its index follows from positions, heads and batch rows alone
    by_batch: bool  # its index or derivative differs from batch row to batch row
    many_reads: bool  # several pairs of a tile may read one entry
    read_once: bool  # each entry is read by one pair of a head


@dataclass(frozen=True)
class LevelPairs:
    """What is known of level pairs."""

    by_batch: bool  # how far they reach differs from batch row to batch row
    by_head: bool  # it differs from head to head
    have_loop: bool  # their tiles have a loop of their own, without tables
    by_keys: bool  # they are summed a key, in a module that is lent to another target


def declared(record: type[Any]) -> tuple[str, ...]:
    """The names that a record of templates declares."""
    return tuple(field.name for field in fields(record))


def spread(*records: Any) -> dict[str, object]:
    """The names of these records, for a template. Raises InternalError where two records declare one name.

    >>> from weft.compiler.planning.sources import DENSE
    >>> sorted(spread(Rows(DENSE, "all", 64), Figures("", "")))
    ['attention_text', 'figures', 'most_short', 'sequences', 'serves']
    """
    names: dict[str, object] = {}
    for record in records:
        for name in declared(type(record)):
            if name in names:
                raise InternalError(f"template: {type(record).__name__} declares {name}, which another record has")
            names[name] = getattr(record, name)
    return names
