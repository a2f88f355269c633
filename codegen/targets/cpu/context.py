"""What templates of `cpu` are told besides (codegen/context.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ....compiler.analysis.tiles.results import Axis
from ...context import Cell, Value


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
