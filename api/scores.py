"""Ready scores: functions from a score expression to a score expression, written in the public language.

They compose: `scores.alibi(slopes)(scores.softcap(50.0)(score))`.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir.errors import WeftError
from .ir.expr import Expr, Operand, TensorOperand, expression, symbol
from .ir.functions import maximum, minimum, tanh

Score = Callable[[Operand], Expr]
_q, _kv, _head, _batch = symbol("q_pos"), symbol("kv_pos"), symbol("head"), symbol("batch")


def softcap(cap: Operand) -> Score:
    """cap * tanh(score / cap): scores stay within -cap .. cap (Gemma 2, arXiv 2408.00118).

    >>> softcap(50.0)(symbol("score"))
    50.0 * tanh(score / 50.0)
    """
    return lambda score: expression(cap) * tanh(expression(score) / cap)


def alibi(slopes: TensorOperand) -> Score:
    """A penalty linear in distance, with a slope for each head (ALiBi, arXiv 2108.12409); slopes [Hq].

    >>> from weft import tensor
    >>> alibi(tensor("slopes", 1))(symbol("score"))
    score + slopes[head] * (kv_pos - q_pos)
    """
    if slopes.rank != 1:
        raise WeftError(f"alibi: expected {slopes.name} to have rank 1 [heads], got {slopes.rank}")
    return lambda score: expression(score) + slopes[_head] * (_kv - _q)


def relative_bias(table: TensorOperand, max_distance: int) -> Score:
    """A learned bias for each head and distance, clamped to max_distance (Shaw et al., arXiv 1803.02155; T5).

    table: [Hq, 2 * max_distance + 1]; entry max_distance is distance 0. Its gradient is not available.

    >>> from weft import tensor
    >>> relative_bias(tensor("table", 2), 4)(symbol("score"))
    score + table[head, maximum(minimum(kv_pos - q_pos, 4), -4) + 4]
    """
    if table.rank != 2:
        raise WeftError(f"relative_bias: expected {table.name} to have rank 2 [heads, distances], got {table.rank}")
    distance = maximum(minimum(_kv - _q, max_distance), -max_distance)
    return lambda score: expression(score) + table[_head, distance + max_distance]


def temperature(value: Operand) -> Score:
    """The score divided by a temperature: a number, a scalar operand, or a read such as `t[head]`.

    >>> temperature(2.0)(symbol("score"))
    score / 2.0
    """
    return lambda score: expression(score) / value
