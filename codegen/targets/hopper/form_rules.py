"""Forms of the kernels of target hopper: which ones there can be, and the first to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.form import Form
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.signature import Signature, Widths
from ....ir.expr import Call, Const, Expr, Symbol
from ....ir.reference import evaluate
from ....ir.walk import nodes
from .forms import ROWS, HopperBackwardForm, HopperForm
from .pieces import columns_of, fits_by_rows, piecewise


def no_boxes(form: Form, signature: Signature) -> str | None:
    """Why tiles of what pairs read cannot be brought."""
    if form.pair_bytes in (0, signature.boxed):
        return None
    return (
        f"p{form.pair_bytes} is for a float operand of {form.pair_bytes} bytes an element whose last index is kv_pos, "
        "and another one q_pos, and whose address and strides are multiples of 16 bytes"
    )


def _has_few_edges(facts: Facts) -> bool:
    """Whether most tiles see all or nothing, whatever the mask computes: it is the same in blocks of 128 x 128 pairs,
    but for what positions decide."""
    found = facts.survey
    if facts.tile_source != "lists" or facts.linear_scale is None or facts.attention.canonical.drops:
        return False
    assert found is not None
    of_positions = all(isinstance(value, Symbol) for value in (*found.q_values, *found.kv_values))
    return of_positions and not found.by_pair and not any(c.q < 128 or c.kv % 128 for c in found.cells)


def no_cells_form(kernel: Kernel, form: Form, facts: Facts) -> str | None:
    """Why the tiles of a form lie in more blocks of pairs, over which the mask is the same, than kernels look at."""
    if facts.tile_source != "lists":
        return None
    queries, keys = (ROWS, form.block_kv) if kernel.axis == "kv" else (form.block_q, ROWS)  # of a consumer
    assert facts.survey is not None
    for c in facts.survey.cells:
        if queries > c.q or c.kv % keys:
            return f"a mask that is the same in blocks of {c.q} queries and {c.kv} keys needs smaller tiles"
    return None


def is_plain(scale: Expr) -> bool:
    """Whether the score's factor is a positive number that only the head dimension decides, and far from underflow."""
    leaves = [n for n in nodes(scale) if not isinstance(n, Call)]
    plain = all(isinstance(n, Const) or (isinstance(n, Symbol) and n.name == "head_dim") for n in leaves)
    if not plain:
        return False
    value = float(evaluate(scale, {"head_dim": 128}, torch.float64, torch.device("cpu")))
    return 2.0**-40 < value < 2.0**40


def best_form(widths: Widths, facts: Facts, short: bool = False, fp8: bool = False) -> HopperForm:
    """The form of a forward, with tiles of keys that lie in one block of those over which the mask is the same.

    Where rows have no maximum, it goes without what is about that. fp8: of products of 8 bits.
    """
    best = _best_of_fp8(widths) if fp8 else _best_of_softmax(widths, facts, short)
    if not facts.attention.canonical.weighs.saves_lse:
        best = replace(best, lazy_rescale=False, pair_maximum=False)
    small = facts.tile_source == "lists" and any(c.kv % best.block_kv for c in facts.survey.cells)  # type: ignore[union-attr]
    return replace(best, block_kv=ROWS) if small else best


def _best_of_fp8(widths: Widths) -> HopperForm:
    """As many stages as SRAM has room for. Beside sums of 256 columns registers have room for the scores of 64 keys."""
    columns, value_columns = columns_of(widths)
    return HopperForm(2, 64 if value_columns == 256 else 128, 3 if columns == 256 > value_columns else 4, fp8=True)


def _best_of_softmax(widths: Widths, facts: Facts, short: bool) -> HopperForm:
    """The form that measured best for tiles of these widths (docs/experiments).

    What reads positions needs registers for them, and so does dropout: fewer consumers at D64, the query in SRAM at
    D128, where drawers are faster unless scores read positions, too. short: of calls that are (`is_short_call`): fewer
    consumers and fewer keys at D64.
    """
    spare = not (facts.traits.positional or facts.traits.drops)  # registers
    columns, value_columns = piecewise(widths.head_dim), columns_of(widths)[1]
    if columns == 256 or value_columns == 256:
        return HopperForm(2, 64, 2, lazy_rescale=True, output_in_query=columns == value_columns)
    if columns > 128:
        in_place = value_columns == 128  # as many as of the query's left piece
        return HopperForm(
            2, 128, 2, lazy_rescale=True, output_in_query=in_place, overlap_edges=facts.score_reads_positions
        )
    if max(columns, value_columns) <= 64:
        if spare and short:
            return HopperForm(2, 64, 4, query_in_registers=True, lazy_rescale=True, pair_maximum=True)
        return HopperForm(
            3 if spare else 2, 128, 3, 2 if spare else 1, query_in_registers=not spare, pair_maximum=True,
            lazy_rescale=facts.traits.drops or _has_few_edges(facts),
        )  # fmt: skip
    return HopperForm(
        2, 128, 2, query_in_registers=spare, lazy_rescale=True, overlap_edges=facts.score_reads_positions,
        drawers=facts.traits.drops and not facts.score_reads_positions,
    )  # fmt: skip


def with_boxes(best: HopperForm | HopperBackwardForm, pair_bytes: int) -> Iterator[HopperForm | HopperBackwardForm]:
    """The form with tiles of what pairs read in SRAM, then others that take less of it."""
    if isinstance(best, HopperBackwardForm):
        for stages in (3, 2):
            yield replace(best, stages=stages, pair_bytes=pair_bytes)
        return
    for block_kv in dict.fromkeys((best.block_kv, 64)):
        for in_place in dict.fromkeys((best.output_in_query, True)):
            for stages in range(best.stages, 1, -1):
                yield replace(
                    best, block_kv=block_kv, output_in_query=in_place, stages=stages, pair_bytes=pair_bytes,
                    lazy_rescale=True, drawers=False,
                )  # fmt: skip


def best_backward_form(
    kernel: Kernel, widths: Widths, facts: Facts, summed: bool, lean: bool = False
) -> HopperBackwardForm:
    """The form that measured best for tiles of these widths (docs/experiments).

    What a score's derivative computes, or a mask reads, needs registers that tiles of 128 queries leave to none.
    summed: gradients of the score's operands are wanted, for which the same holds. lean: not so in one pass, where all
    that pairs read is a table that levels off (`is_lean`).
    """
    width = max(columns_of(widths))
    busy = facts.loads_at_positions or facts.traits.drops
    spare = facts.linear_scale is not None and not busy  # registers
    if width == 256:
        if kernel.name == "flash_dquery":
            return HopperBackwardForm(128, 32 if columns_of(widths)[1] == 256 else 64)
        if not fits_by_rows(widths):
            return HopperBackwardForm(64, 64, by_columns=True)
        return HopperBackwardForm(32 if piecewise(widths.head_dim) == 192 else 64)  # or scores spill beside the sums
    if kernel.name == "flash_dquery":
        wide = spare or (width <= 64 and not facts.loads_at_positions)
        return HopperBackwardForm(128, 128 if wide and not summed else 64)
    if width <= 64 and kernel.name == "flash_backward" and not summed and _has_few_edges(facts):
        return HopperBackwardForm(128)
    if width > 64 or not (spare or (lean and kernel.name == "flash_backward")):
        return HopperBackwardForm(64)
    return HopperBackwardForm(128, next_scores=kernel.name == "flash_backward")
