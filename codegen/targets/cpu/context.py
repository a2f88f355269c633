"""What templates of `cpu` are told besides (codegen/context.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....compiler.analysis.records import Axis
from ...context import Cell, Value


@dataclass(frozen=True)
class Score:
    """What is particular of a score, where tiles are torch's."""

    attention_text: str  # the variant, for the docstring
    uniform: bool  # what q.k is multiplied by is one number for a head
    by_distance: bool  # what is added depends on q_pos - kv_pos and the head alone
    score_by_batch: bool  # the score differs from batch row to batch row
    rows_first: bool  # the score differs from head to head, and not from batch row to batch row
    less_lse: bool  # products of scores start from less the log-sum-exp


@dataclass(frozen=True)
class Mask:
    """What is particular of a mask, and of which tiles are visited."""

    causal: bool  # it is kv_pos <= q_pos
    one_run: bool  # what a query may see is one run of keys
    open_mask: bool  # a part of it has no closed form
    per_head_bounds: bool  # ends of tiles to visit differ from head to head
    mask_of: Literal["heads", "rows", "all"]  # what it may differ by
    mask_reads: frozenset[str]  # of "batch" and "head", what a mask handed to torch differs by
    remembers: bool  # such a mask follows from lengths and numbers alone, so that it is kept
    survey: bool  # what it reads is looked at tile by tile
    values: dict[Axis, tuple[Value, ...]]  # of that, what depends on one position, by axis
    cells: tuple[Cell, ...]  # and what is the same in blocks of pairs


@dataclass(frozen=True)
class Ways:
    """How calls are computed, and in which pieces."""

    most_scores: int  # scores of a tile
    one_dnn: bool  # oneDNN's product serves
    widths: list[int]  # columns of products
    in_tiles: bool  # tiles are faster than torch's own attention in longer calls
    whole: bool  # torch's own attention computes calls in which all is seen
    with_mask: bool  # torch's own attention computes short calls, handed a mask
    at_once: bool  # short calls may be a product, a softmax and a product
    whole_rows: bool  # of a backward: chunks have whole batch rows
