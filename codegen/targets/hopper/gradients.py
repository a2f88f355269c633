"""What a backward of target hopper computes: in one pass or two, and which gradients of operands it sums."""

from __future__ import annotations

from collections import Counter

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.values.places import read_once
from ....compiler.planning.by_distance import levels_of, tables_of
from ....compiler.planning.signature import Signature
from ....ir.expr import Const
from ....ir.walk import loads
from .pieces import key_pieces, piecewise


def is_one_pass(signature: Signature) -> bool:
    """Whether one kernel for all gradients is right, and faster.

    A query's gradient alone has three products without it, others have four. Beside the sums of more than 128 columns
    there is no room for dQ on its way out, and two passes are the faster (docs/experiments).
    """
    wanted, widths = signature.wanted, signature.widths
    both = "query" in wanted and bool(wanted & OWNED_BY_KEYS)
    return both and not signature.deterministic and max(widths.head_dim, widths.value_dim) <= 128


OWNED_BY_KEYS = {"key", "value", "rope"}  # what the pass that owns keys has gradients of


def stores_first(signature: Signature, facts: Facts) -> bool:
    """Whether one pass stores shares of dQ of a head's first keys, and adds the others to them: no sums need zeros.

    A query tile without such a share would be waited for in vain: all queries must see key 0. Where the columns of a
    query are two pieces, nothing was gained (docs/experiments). Query heads that share keys go without (a number of
    the launch).
    """
    plain = not signature.sequences.ragged and signature.offset != "per_row" and facts.tile_source == "program"
    if not plain or facts.attention.canonical.drops or (facts.boxed_read is not None and signature.boxed):
        return False
    return len(key_pieces(piecewise(signature.widths.head_dim), signature.widths)) == 1 and facts.first_key_is_seen


def sums_of_queries(signature: Signature, facts: Facts) -> bool:
    """Whether reads of the score have gradients that the pass that owns queries sums."""
    return not wanted_kinds(signature, facts).keys().isdisjoint(("total", "row"))


def sums_of_keys(signature: Signature, facts: Facts) -> bool:
    """The same of the pass that owns keys, which has level pairs of tables too."""
    return "column" in wanted_kinds(signature, facts) or levels_of(facts, "flash", signature) is not None


def is_lean(signature: Signature, facts: Facts) -> bool:
    """Whether all that pairs read is one table by distance, level from some distance on, that has one read with a
    gradient, and that read no factor: tiles of 128 queries leave registers for that."""
    levels = levels_of(facts, "flash", signature)
    one = len(tables_of(facts, "flash", signature)) == 1 and not loads(facts.attention.canonical.folded_mask)
    if not one or levels is None or levels.score is None or len(levels.reads) != 1:
        return False
    gradients = [g for g in facts.operand_gradients(signature.wanted) if g.kind != "sink"]
    return len(gradients) == 1 and isinstance(gradients[0].derivative, Const) and gradients[0].derivative.value == 1


def sums_diagonals(signature: Signature, facts: Facts) -> bool:
    """Whether the kernel that sums along diagonals runs beside these."""
    return "diagonal" in wanted_kinds(signature, facts)


def wanted_kinds(signature: Signature, facts: Facts) -> Counter[str]:
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
    alone = read.tensor.name in signature.wanted and wanted_kinds(signature, facts).total() == 1
    return alone and read_once(read) and facts.scale_beside_box is not None
