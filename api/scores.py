"""Ready scores: functions from a score expression to a score expression, written in the public language.

They compose: `scores.alibi(slopes)(scores.softcap(50.0)(score))`.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir.errors import WeftError
from .ir.expr import Expr, Operand, TensorOperand, expression, symbol
from .ir.functions import maximum, minimum, tanh

Score = Callable[[Operand], Expr]
_q, _kv, _head = symbol("q_pos"), symbol("kv_pos"), symbol("head")


def softcap(cap: Operand) -> Score:
    """cap * tanh(score / cap): scores stay within -cap .. cap (Gemma 2, arXiv 2408.00118).

    >>> softcap(50.0)(symbol("score"))
    50.0 * tanh(score / 50.0)
    """
    if isinstance(cap, (int, float)) and not cap > 0:
        raise WeftError(f"scores.softcap: expected cap to be above 0, got {cap}")
    return lambda score: expression(cap) * tanh(expression(score) / cap)


def alibi(slopes: TensorOperand) -> Score:
    """A penalty linear in distance, with a slope for each head (ALiBi, arXiv 2108.12409); slopes [Hq].

    >>> from weft import tensor
    >>> alibi(tensor("slopes", 1))(symbol("score"))
    score + slopes[head] * (kv_pos - q_pos)
    """
    if slopes.rank != 1:
        raise WeftError(f"scores.alibi: expected {slopes.name} to have rank 1 [heads], got {slopes.rank}")
    return lambda score: expression(score) + slopes[_head] * (_kv - _q)


def relative_bias(table: TensorOperand, max_distance: int) -> Score:
    """A learned bias for each head and distance, clamped to max_distance (Shaw et al., arXiv 1803.02155; T5).

    table: [Hq, 2 * max_distance + 1]; entry max_distance is distance 0. Its gradient is not available.

    >>> from weft import tensor
    >>> relative_bias(tensor("table", 2), 4)(symbol("score"))
    score + table[head, maximum(minimum(kv_pos - q_pos, 4), -4) + 4]
    """
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance < 1:
        raise WeftError(f"scores.relative_bias: expected max_distance to be at least 1, got {max_distance!r}")
    if table.rank != 2:
        raise WeftError(f"scores.relative_bias: expected {table.name} of rank 2 [heads, distances], got {table.rank}")
    distance = maximum(minimum(_kv - _q, max_distance), -max_distance)
    return lambda score: expression(score) + table[_head, distance + max_distance]


def temperature(value: Operand) -> Score:
    """The score divided by a temperature: a number, a scalar operand, or a read such as `t[head]`.

    >>> temperature(2.0)(symbol("score"))
    score / 2.0
    """
    if isinstance(value, (int, float)) and not value > 0:
        raise WeftError(f"scores.temperature: expected a value above 0, got {value}")
    return lambda score: expression(score) / value


def compose(*parts: Score) -> Score:
    """The scores one after the other, the first one innermost.

    >>> compose(temperature(2.0), softcap(30.0))(symbol("score"))
    30.0 * tanh(score / 2.0 / 30.0)
    """

    def composed(score: Operand) -> Expr:
        result = expression(score)
        for part in parts:
            result = part(result)
        return result

    return composed
