"""Backwards of target hopper: in one pass or two, what they sum, and what they leave to triton."""

from __future__ import annotations

from collections import Counter

from ....compiler.analysis.facts import Facts
from ....compiler.analysis.places import read_once
from ....compiler.planning.distances import levels_of, tables_of
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.signature import Signature, Widths
from ....ir.expr import Const
from ....ir.walk import loads
from ..triton.kernels.pair_sums import FLASH_DDIAGONALS
from .kernels.backward import (
    DRAWN_BACKWARD,
    DRAWN_KEYS,
    FIRST_STORED_BACKWARD,
    FLASH_BACKWARD,
    FLASH_DKEY_DVALUE,
)
from .kernels.dquery import FLASH_DQUERY
from .kernels.statistics import FIRST_STORED, ROUND_DQUERY, ROW_STATISTICS, statistics_for
from .pieces import key_pieces, piecewise


def fits_by_rows(widths: Widths) -> bool:
    """Whether one consumer has registers for the sums of 64 keys."""
    return widths.value_dim <= 128 and widths.head_dim <= 192


def is_one_pass(signature: Signature) -> bool:
    """Whether one kernel for all gradients is right, and faster.

    A query's gradient alone has three products without it, others have four. Beside the sums of more than 128 columns
    there is no room for dQ on its way out, and two passes are the faster (docs/experiments.md).
    """
    wanted, widths = signature.wanted, signature.widths
    both = "query" in wanted and bool(wanted & OWNED_BY_KEYS)
    return both and not signature.deterministic and max(widths.head_dim, widths.value_dim) <= 128


OWNED_BY_KEYS = {"key", "value", "rope"}  # what the pass that owns keys has gradients of


def stores_first(signature: Signature, facts: Facts) -> bool:
    """Whether one pass stores shares of dQ of a head's first keys, and adds the others to them: no sums need zeros.

    A query tile without such a share would be waited for in vain: all queries must see key 0. Where the columns of a
    query are two pieces, nothing was gained (docs/experiments.md). Query heads that share keys go without (a number of
    the launch).
    """
    plain = signature.sequences == "dense" and signature.offset != "per_row" and facts.tile_source == "program"
    if not plain or facts.attention.drops or (facts.boxed_read is not None and signature.boxed):
        return False
    return len(key_pieces(piecewise(signature.widths.head_dim), signature.widths)) == 1 and facts.first_key_is_seen


ONE_PASS: tuple[Kernel, ...] = (ROW_STATISTICS, FLASH_BACKWARD, ROUND_DQUERY)
ONE_PASS_STORED: tuple[Kernel, ...] = (FIRST_STORED, FIRST_STORED_BACKWARD, ROUND_DQUERY)
ONE_PASS_DRAWN: tuple[Kernel, ...] = (ROW_STATISTICS, DRAWN_BACKWARD, ROUND_DQUERY)
DIAGONAL_SUMS = FLASH_DDIAGONALS  # of another target, in a module of its own


def no_pairs(kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
    """What it does not compute of a normalizer whose weights are found pair by pair, in words."""
    if facts.attention.weighs.saves_lse:
        return "calls"  # statistics of rows in its templates are those of a softmax
    if facts.attention.drops:
        return "weights that are dropped,"
    if facts.boxed_read is not None:
        return "scores that read a tensor by both positions,"
    if kernel.direction == "forward":
        return None
    if not fits_by_rows(signature.widths):
        return "backwards with D above 192 or Dv above 128,"
    if tables_of(facts, "flash", signature) or sums_diagonals(signature, facts):
        return "backwards of scores that are read by distance,"
    return None


MOST_BESIDE_WORDS = 192  # columns of D and Dv beside which tiles of 32 bits an entry have SRAM
MOST_BY_DISTANCE = 128  # columns beside which a tile's reads have registers


def no_distances(signature: Signature, facts: Facts) -> str | None:
    """Where its backwards do not read a score by distance, or sum such a gradient."""
    tables, widths = tables_of(facts, "flash", signature), signature.widths
    if not tables and not sums_diagonals(signature, facts):
        return None
    if max(widths.head_dim, widths.value_dim) > MOST_BY_DISTANCE:
        return f"with D or Dv above {MOST_BY_DISTANCE}"
    if widths.rope_dim or facts.attention.drops:
        return "of expanded latent attention, or with dropout,"
    if tables and facts.score_of_levels(tables) is None:
        return "and are no number times q.k plus what they have by distance"
    return None


def no_drawn(signature: Signature, facts: Facts) -> str | None:
    """Where it does not draw what a backward drops."""
    if signature.widths.rope_dim:
        return "of expanded latent attention"
    if not fits_by_rows(signature.widths):
        return "with D above 192 or Dv above 128"
    if _wanted_kinds(signature, facts):
        return "with gradients of operands"
    return None if facts.boxed_read is None else "beside what each pair reads"  # which has no tiles there


def sums_of_queries(signature: Signature, facts: Facts) -> bool:
    """Whether reads of the score have gradients that the pass that owns queries sums."""
    return not _wanted_kinds(signature, facts).keys().isdisjoint(("total", "row"))


def sums_of_keys(signature: Signature, facts: Facts) -> bool:
    """The same of the pass that owns keys, which has level pairs of tables too."""
    return "column" in _wanted_kinds(signature, facts) or levels_of(facts, "flash", signature) is not None


def is_lean(signature: Signature, facts: Facts) -> bool:
    """Whether all that pairs read is one table by distance, level from some distance on, that has one read with a
    gradient, and that read no factor: tiles of 128 queries leave registers for that."""
    levels = levels_of(facts, "flash", signature)
    one = len(tables_of(facts, "flash", signature)) == 1 and not loads(facts.attention.folded_mask)
    if not one or levels is None or levels.score is None or len(levels.reads) != 1:
        return False
    gradients = [g for g in facts.operand_gradients(signature.wanted) if g.kind != "sink"]
    return len(gradients) == 1 and isinstance(gradients[0].derivative, Const) and gradients[0].derivative.value == 1


def sums_diagonals(signature: Signature, facts: Facts) -> bool:
    """Whether the kernel that sums along diagonals runs beside these."""
    return "diagonal" in _wanted_kinds(signature, facts)


def _wanted_kinds(signature: Signature, facts: Facts) -> Counter[str]:
    """How the wanted gradients of reads of the score are summed, and how many are so."""
    return Counter(
        kind for load, kind in facts.gradient_kinds if kind != "sink" and load.tensor.name in signature.wanted
    )


def stores_boxes(signature: Signature, facts: Facts) -> bool:
    """Whether one pass stores the gradient of what each pair reads: tiles of dS, which lie in SRAM for dQ.

    So it is where it is added to the score, each entry once, and q.k has one factor, with which sums are multiplied.
    Of operands of 32 bits the gradient leaves from registers, before dS is rounded.
    """
    read = facts.boxed_read
    if read is None or not signature.boxed or not is_one_pass(signature):
        return False
    alone = read.tensor.name in signature.wanted and _wanted_kinds(signature, facts).total() == 1
    return alone and read_once(read) and facts.scale_beside_box is not None


def two_passes(
    wanted: frozenset[str], summed: bool = False, by_keys: bool = False, drops: bool = False
) -> tuple[Kernel, ...]:
    """The kernels of wanted gradients, each sum with one owner; of both sides where only a sink has one.

    Statistics are as the keys' pass wants them, if it runs. summed, by_keys: gradients of the score's operands, which
    the queries' or the keys' pass sums, are wanted too.
    """
    owns_queries, owns_keys = "query" in wanted or summed, bool(wanted & OWNED_BY_KEYS) or by_keys
    both = not (owns_queries or owns_keys)
    passes = [FLASH_DQUERY] if owns_queries or both else []
    passes += [DRAWN_KEYS if drops else FLASH_DKEY_DVALUE] if owns_keys or both else []
    return statistics_for(passes[-1].name), *passes


LARGEST_HANDED_ON = 2.0**14  # of fp16, whose largest number is 65504: what one consumer may hand to another


def no_backward(signature: Signature, facts: Facts) -> str | None:
    """Why it cannot compute these gradients. Those of a sink need statistics of rows alone."""
    wanted, kinds = signature.wanted, facts.gradient_kinds
    summed = {load.tensor.name for load, kind in kinds if kind not in ("sink", "diagonal")}
    if not wanted & ({"query"} | OWNED_BY_KEYS | summed):
        what = "a table's" if sums_diagonals(signature, facts) else "a sink's"
        return f"hopper: {what} gradient alone ({', '.join(sorted(wanted))}) is computed by the triton target"
    by_pair = sorted({load.tensor.name for load, kind in kinds if kind == "pair"} & wanted)
    if by_pair and not stores_boxes(signature, facts):
        lacking = (
            f"hopper: gradients of operands read by both positions ({', '.join(by_pair)}) are computed by the triton "
            "target"
        )
        read = facts.boxed_read
        if read is None or [read.tensor.name] != by_pair or not read_once(read):
            return lacking
        return (
            f"{lacking}, but in one pass, where {by_pair[0]} has 16 or 32 bits an entry, rows a multiple of 16 bytes "
            "apart, and is added to a score that is a number times q.k"
        )
    columns = piecewise(signature.widths.head_dim) + piecewise(signature.widths.value_dim)
    if by_pair and signature.boxed == 4 and columns > MOST_BESIDE_WORDS:
        return (
            f"hopper: tiles of {by_pair[0]}, 32 bits an entry, have SRAM beside {MOST_BESIDE_WORDS} columns of D and "
            f"Dv together, got {columns}: its gradient is computed by the triton target"
        )
    if sums_of_keys(signature, facts) and not fits_by_rows(signature.widths):
        return (
            "hopper: gradients of operands read by kv_pos need D of 192 and Dv of 128 or less; computed by the triton "
            "target"
        )
    hands_on = not fits_by_rows(signature.widths) and facts.linear_scale is None and signature.dtype == "fp16"
    if hands_on and facts.largest_slope > LARGEST_HANDED_ON:
        return (
            "hopper: above D 192 or Dv 128 a backward in fp16 needs a score whose derivative is known to be below "
            f"{LARGEST_HANDED_ON:.0f}; computed by the triton target"
        )
    return None
