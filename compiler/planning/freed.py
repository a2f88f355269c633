"""Which sums over the keys of a row are freed of what rounding took from the output.

delta = rowsum(out * dout) is of the output as it was rounded, and off by one error in all of a row. dS of each pair is
off by that error times its weight, and a sum of dS times derivatives by the error times the row's mean derivative. That
is large beside the sum's own roundings where derivatives of a row are large and alike, as those of a slope that
multiplies positions are. So kernels find the error, from the row's own sum of P * dP, and take out what it left.
"""

from __future__ import annotations

from ...ir.expr import Expr
from ...ir.walk import symbols
from ..analysis.tiles.facts import Facts, without_qk
from ..analysis.tiles.results import OperandGradient
from .signature import Signature


def is_freed(gradient: OperandGradient, signature: Signature, facts: Facts) -> bool:
    """Whether a gradient is such a sum. A call with a part of the keys cannot tell the error from its sums."""
    has_delta = facts.attention.canonical.weighs.saves_lse and signature.rounds_output and not signature.part
    return has_delta and is_row_sum(gradient)


def is_row_sum(gradient: OperandGradient) -> bool:
    """Whether a gradient is a sum over the keys of rows, and one whose mean derivative may be large."""
    return gradient.kind in ("total", "row") and not _is_multiple_of_product(gradient.derivative)


def frees(signature: Signature, facts: Facts) -> bool:
    """Whether any of a backward's sums is freed."""
    return any(is_freed(g, signature, facts) for g in facts.operand_gradients(signature.wanted))


def _is_multiple_of_product(derivative: Expr) -> bool:
    """Whether it is q.k times what is one number for a row: of both signs, as large as it differs from its mean."""
    factor = without_qk(derivative)
    return factor is not None and not symbols(factor) & {"qk", "kv_pos"}
