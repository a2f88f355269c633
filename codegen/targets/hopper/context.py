"""What templates of `hopper` are told besides (codegen/context.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.by_distance import tables_in
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.signature import Dtypes, Offset, Signature, Widths
from ....compiler.planning.target import Printing
from ....ir.expr import Expr, Load, Symbol
from ....ir.walk import nodes
from ...functions import BY_PAIR
from ...subject import stores_words
from ..gluon.program import FIRST_BARRIER, Program
from .form_rules import is_plain
from .forms import ROWS, HopperBackwardForm, HopperForm, HopperLatentForm
from .gradients import stores_boxes, stores_first
from .held import held_by
from .kernels.backward import program as program_of_keys
from .kernels.dquery import program as program_of_queries
from .kernels.forward import TURNED_KEYS, turning_warps
from .kernels.forward import program as forward_program
from .kernels.latent import ROTARY_COLUMNS, SPLIT_FORWARD
from .kernels.latent import program as latent_program
from .kernels.statistics import round_dquery_program, statistics_program
from .pieces import (
    Piece,
    backward_form,
    columns_of,
    forward_form,
    is_persistent,
    key_pieces,
    left_parts,
    main_form,
    part_columns,
    pieces_of,
    piecewise,
    places_of_results,
    statistics_of_a_row,
    sums_of_a_tile,
)


# -- every module ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Operands:
    """What operands are, and how what a call gives besides is named."""

    dtypes: Dtypes  # of operands, by name
    offset_kind: Offset  # how a call gives the position of the first query
    per_row: bool  # as a tensor, a number for each batch row
    given_offset: str  # its name among parameters
    boxed: str  # the argument of functions that are handed a tile of what pairs read, "by_pair, "; or ""
    box_rank: int  # dimensions of the tensor that such tiles are of


# -- a forward ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Forward:
    """What a forward is told."""

    form: HopperForm  # of flash_forward
    config: ForwardConfig  # its columns
    program: Program  # its roles, SRAM and barriers


@dataclass(frozen=True)
class ForwardConfig:
    """The columns of a forward."""

    head_dim: int  # columns of query and key
    value_dim: int  # columns of value and output
    columns: int  # of a tile of query or key
    value_columns: int  # of a tile of value or output
    pieces: list[Piece]  # of tiles of query and key; the last may lie in a tensor of its own that heads share
    loads_at_positions: bool  # the variant reads tensors at positions
    descales: list[str]  # options of the call, "k_descale"
    of_tiles: list[str]  # those of them that have a number for each 128 keys
    turned_keys: int  # of a program of turn_values
    turning_warps: int  # of the same


# -- a forward of latent caches ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Latent:
    """What the forward of latent caches is told."""

    config: LatentConfig  # its form and its columns
    program: Program  # its roles, SRAM and barriers
    many: bool  # queries are many


@dataclass(frozen=True)
class LatentConfig:
    """The form of split_forward, and its columns."""

    head_dim: int  # columns of query and key
    rank: int  # columns of the value, which are the first of the key
    rope: int  # columns behind them
    rotary: int  # columns of a tile of those
    piece: int  # columns of a piece of a tile
    loads_at_positions: bool  # the variant reads tensors at positions
    slots: int  # for pieces of keys
    stored: int  # for pieces in FP8, of which the producer makes those above; 0: keys have 16 bits
    prefetch: bool  # keys are brought to L2 two tiles early
    descales: list[str]  # options of the call: "k_descale"
    scaled_rows: bool  # it is numbers of rows


# -- a backward --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Backward:
    """What a backward is told."""

    main: str  # the kernel that owns keys: "flash_backward" in one pass, "flash_dkey_dvalue" in two, or "" for none
    form: HopperBackwardForm  # of that kernel, by which statistics of rows lie
    config: BackwardConfig  # its columns
    programs: Mapping[str, Program]  # roles, SRAM and barriers, by kernel
    feature_parts: Mapping[str, str]  # templates of features of its kernels, by name, in the order of their lines
    wants_dscores: bool  # the kernel that owns keys has gradients of scores
    query_form: HopperBackwardForm | None  # the form of flash_dquery, where it is there
    folded: bool  # the score's factor is a positive constant: products start at -lse / factor
    factor_at_end: bool  # the score's factor is one for all heads: it is applied to sums
    slope_at_end: bool  # the same where the score is such a factor, score_slope(...), times q.k plus what pairs read
    factor_is_defined: bool  # factors that are one number for a head are finite, also in a sequence without a pair
    behind_rows: str  # scores of rows that do not exist: "numbers" below inf, the same "as the last" row's, "anything"
    stored: int | None  # the number of the read whose gradient is that of the score, stored tile by tile
    stores_words: bool  # it has 32 bits an entry, and leaves from registers
    diagonals: bool  # flash_ddiagonals, of another target's module, reads statistics of rows in rows
    persistent: bool  # programs of the kernel that owns keys take one tile of them after another
    stores_first: bool  # tiles of keys that come first in a head may store their shares of dQ, to which others add
    places: Mapping[str, Any] | None  # of results that leave by the place of shares of dQ: how many, and the first
    adds_up_shared: bool  # the gradient of a key that heads share is summed over heads in HBM, in any order


@dataclass(frozen=True)
class BackwardConfig:
    """The columns of a backward."""

    head_dim: int  # columns of query and key
    value_dim: int  # columns of value and output
    columns: int  # of a tile of query or key
    value_columns: int  # of a tile of value or output
    pieces: list[Piece]  # of tiles of query and key; the last may lie in a tensor of its own that heads share
    value_pieces: list[Piece]  # of tiles of value and output
    own_pieces: list[Piece]  # of tiles of query and key of flash_dquery
    loads_at_positions: bool  # the variant reads tensors at positions
    statistics: int  # of a row
    parts: int  # of a tile of dQ
    part_columns: int  # columns of one
    left_parts: int  # those that the first consumer computes


def records_of(code: CodePlan, facts: Facts, printing: Printing) -> tuple[object, ...]:
    """The records of a plan's module."""
    read = facts.boxed_read if code.brings_boxes else None
    boxed, rank = ("", 0) if read is None else (f"{BY_PAIR}, ", read.tensor.rank)
    kind = code.signature.offset
    per_row = kind == "per_row"
    offset = "q_offset_ptr" if per_row else "q_offset"
    operands = Operands(code.signature.dtypes, kind, per_row, offset, boxed, rank)
    if code.schedule.algorithm == "split_kv":
        return operands, _latent(code, facts)
    if code.signature.direction == "forward":
        return operands, _forward(code, facts)
    return operands, _backward(code, facts, printing)


def _forward(code: CodePlan, facts: Facts) -> Forward:
    form, widths = forward_form(code), code.signature.widths
    columns, value_columns = columns_of(widths)
    config = ForwardConfig(
        head_dim=widths.head_dim, value_dim=widths.value_dim, columns=columns, value_columns=value_columns,
        pieces=pieces_of(form, widths)[0], loads_at_positions=facts.loads_at_positions, turned_keys=TURNED_KEYS,
        turning_warps=turning_warps(value_columns), descales=_descales(code.signature),
        of_tiles=sorted(code.signature.scaled_tiles),
    )  # fmt: skip
    return Forward(form, config, forward_program(form, held_by(code, facts)))


def _descales(signature: Signature) -> list[str]:
    return [n for n in ("q_descale", "k_descale", "v_descale") if n in signature.options]


def _latent(code: CodePlan, facts: Facts) -> Latent:
    form, widths = code.form(SPLIT_FORWARD.name), code.signature.widths
    assert isinstance(form, HopperLatentForm)
    config = LatentConfig(
        head_dim=widths.head_dim, rank=widths.value_dim, rope=widths.head_dim - widths.value_dim,
        rotary=ROTARY_COLUMNS, piece=form.piece, loads_at_positions=facts.loads_at_positions, slots=form.slots,
        stored=form.stored, prefetch=form.prefetch, descales=_descales(code.signature),
        scaled_rows="k_descale" in code.signature.scaled_rows,
    )  # fmt: skip
    return Latent(config, latent_program(form, held_by(code, facts)), many=not code.signature.few_queries)


def _backward(code: CodePlan, facts: Facts, printing: Printing) -> Backward:
    main, form = main_form(code)
    signature, tables, scale = code.signature, tables_in(code, facts), facts.linear_scale
    # Products that start from a row's statistics wait for these: of the next tile's scores nothing could hide that.
    folds = not form.next_scores and not facts.scores_lie_far and facts.attention.canonical.weighs.saves_lse
    persistent, one_pass = is_persistent(code, facts), main == "flash_backward"
    empty = printing.visits_empty and signature.sequences.ragged
    return Backward(
        main=main,
        form=form,
        config=_backward_config(form, code.signature.widths, facts),
        programs=_programs(code, facts),
        feature_parts={f.name: f.part for k in code.own for f in k.kernel.features},
        wants_dscores=one_pass or (bool(main) and held_by(code, facts).wants_dscores),
        query_form=backward_form(code, "flash_dquery") if code.has("flash_dquery") else None,
        folded=scale is not None and folds and is_plain(scale),
        factor_at_end=_has_factor_at_end(code, facts),
        slope_at_end=bool(tables) or (code.brings_boxes and facts.scale_beside_box is not None),
        factor_is_defined=not empty or facts.factor_is_defined(tables),
        behind_rows=facts.behind_rows(tables),
        stored=_stored(code, facts),
        stores_words=stores_words(facts, signature),
        diagonals=code.borrowed is not None,
        persistent=persistent,
        stores_first=one_pass and stores_first(signature, facts),
        places=places_of_results(form, signature.widths) if persistent and one_pass else None,
        adds_up_shared=not signature.deterministic,
    )


def _programs(code: CodePlan, facts: Facts) -> dict[str, Program]:
    """Those of a backward's kernels, by name. Of two with rings, the second has hardware barriers behind the first."""
    held, (main, form) = held_by(code, facts), main_form(code)
    one_pass = main == "flash_backward"
    found = {main: program_of_keys(form, held, one_pass)} if main else {}
    if code.has("flash_dquery"):
        first = max((b.numbers.stop for p in found.values() for b in p.ring_barriers), default=FIRST_BARRIER)
        found["flash_dquery"] = program_of_queries(backward_form(code, "flash_dquery"), held, first)
    found["row_statistics"] = statistics_program(form, held, one_pass)
    found["round_dquery"] = round_dquery_program(form, held)
    return found


def _backward_config(form: HopperBackwardForm, widths: Widths, facts: Facts) -> BackwardConfig:
    columns, value_columns = columns_of(widths)
    pieces, value_pieces = pieces_of(form, widths)
    return BackwardConfig(
        head_dim=widths.head_dim, value_dim=widths.value_dim, columns=columns,
        value_columns=value_columns, loads_at_positions=facts.loads_at_positions, pieces=pieces,
        value_pieces=value_pieces, own_pieces=key_pieces(piecewise(widths.head_dim), widths),
        statistics=statistics_of_a_row(facts), part_columns=part_columns(form, widths),
        left_parts=left_parts(form, widths), parts=sums_of_a_tile(form, widths) // (ROWS * part_columns(form, widths)),
    )  # fmt: skip


def _has_factor_at_end(code: CodePlan, facts: Facts) -> bool:
    """Whether sums are multiplied by the factor of q.k, in place of each pair's gradient."""
    if facts.linear_scale is not None:
        return not _differs_by_head(facts.linear_scale)
    if tables_in(code, facts):
        return True
    return code.brings_boxes and facts.scale_beside_box is not None


def _differs_by_head(scale: Expr) -> bool:
    return any(
        isinstance(n, Load) or (isinstance(n, Symbol) and n.name in ("batch", "head", "kv_head")) for n in nodes(scale)
    )


def _stored(code: CodePlan, facts: Facts) -> int | None:
    """The number of the read whose gradient is stored tile by tile, of those that have one."""
    if not stores_boxes(code.signature, facts):
        return None
    kinds = [kind for load, kind in facts.gradient_kinds if load.tensor.name in code.signature.wanted]
    return kinds.index("pair")
