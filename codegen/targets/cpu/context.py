"""What templates of `cpu` are told besides (codegen/context.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import Axis
from ....compiler.analysis.values.cse import of_positions
from ....compiler.analysis.values.distances import of_distance
from ....compiler.planning.by_distance import gradients_in
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.signature import Signature
from ....ir.expr import Load, Scalar, TensorOperand
from ....ir.walk import nodes, symbols
from ...context import Cell, Value
from ...dialects import is_uniform
from ...functions import surveyed_by_torch
from ...launch.fast.own import axes_of_mask
from ...subject import cells, starts_less_lse, values_of
from .by_torch import differs_by_head, has_whole, kind_of_mask, scale_of, takes_a_mask, weighs_short
from .forms import CpuForm


@dataclass(frozen=True)
class Score:
    """What is particular of a score, where tiles are torch's."""

    uniform: bool  # what q.k is multiplied by is one number for a head
    settles: bool  # something of what is added follows from positions alone
    by_distance: bool  # what is added depends on q_pos - kv_pos and the head alone
    score_by_batch: bool  # the score differs from batch row to batch row
    rows_first: bool  # the score differs from head to head, and not from batch row to batch row
    less_lse: bool  # products of scores start from less the log-sum-exp


@dataclass(frozen=True)
class Mask:
    """What is particular of a mask, and of which tiles are visited."""

    per_head_bounds: bool  # ends of tiles to visit differ from head to head
    mask_reads: frozenset[str]  # of "batch" and "head", what a mask handed to torch differs by
    remembers: bool  # such a mask follows from lengths and numbers alone, so that it is kept
    survey: bool  # what it reads is looked at tile by tile
    values: dict[Axis, tuple[Value, ...]]  # of that, what depends on one position, by axis
    cells: tuple[Cell, ...]  # and what is the same in blocks of pairs


@dataclass(frozen=True)
class Kinds:
    """Which file of its folder in templates/cpu each part of a module is of."""

    products: str  # of torch or of oneDNN
    sequence: str  # where rows lie
    statistics: str  # what is saved of a row
    score: str  # what is made of q.k: a number times it, the same with a rest, or anything
    mask: str  # what a query sees, as bounds tell it
    sharing: str  # what the mask differs by


@dataclass(frozen=True)
class Ways:
    """How calls are computed, and in which pieces."""

    kinds: Kinds  # which files
    most_scores: int  # scores of a tile
    nothing: str  # a None for each operand of the variant
    widths: list[int]  # columns of products
    in_tiles: bool  # tiles are faster than torch's own attention in longer calls
    whole: bool  # torch's own attention computes calls in which all is seen
    with_mask: bool  # torch's own attention computes short calls, handed a mask
    at_once: bool  # short calls may be a product, a softmax and a product
    whole_rows: bool  # of a backward: chunks have whole batch rows


def records_of(code: CodePlan, facts: Facts) -> tuple[object, ...]:
    """The records of a plan's module."""
    return _score(code, facts), _mask(facts), _ways(code, facts)


def _score(code: CodePlan, facts: Facts) -> Score:
    scale, read = scale_of(facts), symbols(facts.attention.canonical.folded_score)
    return Score(
        uniform=scale is not None and is_uniform(scale),
        by_distance=facts.scale_and_rest is not None and of_distance(facts.scale_and_rest[1]) is not None,
        settles=_settles(facts, code.signature),
        score_by_batch="batch" in read,
        rows_first="head" in read and "batch" not in read,
        less_lse=starts_less_lse(facts, code, facts.scale_and_rest is not None),
    )


def _mask(facts: Facts) -> Mask:
    found = surveyed_by_torch(facts)
    return Mask(
        per_head_bounds=facts.bounds_differ_by_head,
        mask_reads=axes_of_mask(facts),
        remembers=all(
            not isinstance(p, TensorOperand) and p.dtype == "int" for p in facts.attention.canonical.parameters
        ),
        survey=found is not None,
        values={} if found is None else values_of(found),
        cells=() if found is None else cells(found.cells),
    )


def _ways(code: CodePlan, facts: Facts) -> Ways:
    signature, form = code.signature, code.kernels[-1].form
    widths = signature.widths
    assert isinstance(form, CpuForm)
    return Ways(
        kinds=_kinds(code, facts, form),
        most_scores=form.most_scores,
        widths=sorted({widths.head_dim, widths.head_dim - widths.rope_dim, widths.value_dim, widths.rope_dim}),
        in_tiles=form.in_tiles,
        whole=has_whole(facts, signature),
        with_mask=takes_a_mask(facts, signature),
        at_once=weighs_short(facts, signature),
        nothing=", None" * len(facts.attention.canonical.parameters),
        whole_rows=signature.direction == "backward" and bool(widths.rope_dim),
    )


def _kinds(code: CodePlan, facts: Facts, form: CpuForm) -> Kinds:
    saved = "far" if facts.scores_lie_far else "near" if facts.attention.canonical.weighs.saves_lse else "unsaved"
    return Kinds(
        products="onednn" if form.one_dnn else "torch",
        sequence="ragged" if code.signature.sequences.ragged else "dense",
        statistics=saved,
        score=_kind_of_score(code, facts),
        mask=kind_of_mask(facts),
        sharing=_kind_of_sharing(facts),
    )


def _kind_of_score(code: CodePlan, facts: Facts) -> str:
    """By what is made of q.k: a number times it, the same with a rest, or anything."""
    scale = scale_of(facts)
    if scale is None:
        return "general"
    if facts.scale_and_rest is None and any(g.kind != "sink" for g in gradients_in(code, facts)):
        return "linear_by_pair"
    kind = "linear" if facts.scale_and_rest is None else "added"
    return kind if is_uniform(scale) else f"{kind}_by_head"


def _kind_of_sharing(facts: Facts) -> str:
    """By what the mask differs by."""
    if differs_by_head(facts):
        return "heads"
    return "rows" if "batch" in symbols(facts.attention.canonical.folded_mask) else "all"


def _settles(facts: Facts, signature: Signature) -> bool:
    """Whether something of what is added to scores follows from positions alone, and needs no operand."""
    if facts.scale_and_rest is None:
        return False
    derivatives = [g.derivative for g in facts.operand_gradients(signature.wanted)]
    parts, _ = of_positions([facts.scale_and_rest[1], *derivatives])
    return bool(parts) and not any(isinstance(n, (Load, Scalar)) for _, part in parts for n in nodes(part))
