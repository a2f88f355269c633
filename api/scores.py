"""Ready scores: functions from a score expression to a score expression, written in the public language.

They compose: `scores.alibi(slopes)(scores.softcap(50.0)(score))`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, NoReturn

from .buckets import bucket
from .ir.attention import Attention
from .ir.errors import WeftError, shown
from .ir.expr import Const, Expr, Node, Operand, TensorOperand, expression, symbol
from .ir.foreign import number_in
from .ir.functions import log, maximum, minimum, tanh

__all__ = [
    "alibi", "compose", "forgetting", "llama4_temperature", "log_n", "relative_bias", "softcap", "ssmax", "t5_bias",
    "temperature", "yarn",
]  # fmt: skip
Score = Callable[[Operand], Expr]
_q, _kv, _head, _batch = symbol("q_pos"), symbol("kv_pos"), symbol("head"), symbol("batch")


if not TYPE_CHECKING:  # a type checker knows which names there are

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")


def _above_zero(function: str, argument: str, value: Operand) -> Expr:
    """An expression; a number that is not above 0, or infinite, is refused here."""
    node = expression(value)
    if node.dtype == "bool" or (isinstance(node, Const) and not 0 < node.value < inf):
        raise WeftError(f"scores.{function}: expected {argument} to be above 0 and finite, got {node}")
    return node


def _check_operand(function: str, operand: TensorOperand, rank: int, dimensions: str) -> None:
    if not isinstance(operand, TensorOperand):
        raise WeftError(
            f"scores.{function}: expected a tensor operand such as weft.tensor('x', {rank}), whose values the call "
            f"gives, got {type(operand).__name__}"
        )
    if operand.rank != rank:
        raise WeftError(
            f"scores.{function}: expected {operand.name} to have rank {rank} {dimensions}, got {operand.rank}"
        )
    if operand.dtype == "bool":
        raise WeftError(f"scores.{function}: expected {operand.name} to hold numbers, got bools")


def softcap(cap: Operand) -> Score:
    """cap * tanh(score / cap): scores stay within -cap .. cap (Gemma 2, arXiv 2408.00118).

    >>> softcap(50.0)(symbol("score"))
    50.0 * tanh(score / 50.0)
    """
    node = _above_zero("softcap", "cap", cap)
    return lambda score: node * tanh(expression(score) / node)


def alibi(slopes: TensorOperand) -> Score:
    """A penalty linear in distance, with a slope for each head (ALiBi, arXiv 2108.12409); slopes [Hq], which may learn.

    >>> from weft import tensor
    >>> alibi(tensor("slopes", 1))(symbol("score"))
    score + slopes[head] * (kv_pos - q_pos)
    """
    _check_operand("alibi", slopes, 1, "[heads]")
    return lambda score: expression(score) + slopes[_head] * (_kv - _q)


def relative_bias(table: TensorOperand, max_distance: int) -> Score:
    """A learned bias for each head and distance, clamped to max_distance (Shaw et al., arXiv 1803.02155; T5).

    table: [Hq, 2 * max_distance + 1]; entry max_distance is distance 0. It gets a gradient.

    >>> from weft import tensor
    >>> relative_bias(tensor("table", 2), 4)(symbol("score"))
    score + table[head, maximum(minimum(kv_pos - q_pos, 4), -4) + 4]
    """
    number = number_in(max_distance)
    max_distance = number if isinstance(number, int) else max_distance
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance < 1:
        raise WeftError(f"scores.relative_bias: expected max_distance to be at least 1, got {shown(max_distance)}")
    _check_operand("relative_bias", table, 2, "[heads, distances]")
    distance = maximum(minimum(_kv - _q, max_distance), -max_distance)
    return lambda score: expression(score) + table[_head, distance + max_distance]


def t5_bias(table: TensorOperand, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Score:
    """A learned bias for each head and bucket of distances (T5, arXiv 1910.10683); T5 itself scales by 1, scale=1.0.

    table: [Hq, buckets], the transpose of the embedding that T5 keeps; it gets a gradient. buckets, max_distance and
    bidirectional: as of `weft.bucket`.

    >>> from weft import tensor
    >>> t5_bias(tensor("table", 2), 4, 8, bidirectional=False)(symbol("score")).args[1].tensor.name
    'table'
    """
    _check_operand("t5_bias", table, 2, "[heads, buckets]")
    number = bucket(_kv - _q, buckets, max_distance, bidirectional)
    return lambda score: expression(score) + table[_head, number]


def forgetting(decay: TensorOperand) -> Score:
    """The logarithms of forget gates between key and query, added up (Forgetting Transformer, arXiv 2503.02130).

    decay: float32 [B, Hq, T], the running sum of log f: torch's logsigmoid(gates).cumsum(-1), for all T tokens.
    It gets a gradient, and so do the gates. A key's own gate does not count, those of all tokens after it do.

    >>> from weft import tensor
    >>> forgetting(tensor("decay", 3))(symbol("score"))
    score + (decay[batch, head, q_pos] - decay[batch, head, kv_pos])
    """
    _check_operand("forgetting", decay, 3, "[batch, heads, length]")
    return lambda score: expression(score) + (decay[_batch, _head, _q] - decay[_batch, _head, _kv])


def temperature(value: Operand) -> Score:
    """The score divided by a temperature: a number, a scalar operand, or a read such as `t[head]`.

    >>> temperature(2.0)(symbol("score"))
    score / 2.0
    """
    node = _above_zero("temperature", "value", value)
    return lambda score: expression(score) / node


def log_n(train_length: Operand) -> Score:
    """log(n) / log(train_length) for queries beyond the length of training, n = q_pos + 1 (Chiang and Cholak, arXiv
    2202.12172; as Qwen has it, arXiv 2309.16609): attention over more keys stays as sharp.

    >>> log_n(2048)(symbol("score"))
    score * maximum(log(1.0 * (q_pos + 1)) / log(2048.0), 1.0)
    """
    node = _above_zero("log_n", "train_length", train_length)
    if isinstance(node, Const) and node.value <= 1:  # the logarithm of 1 is 0, by which nothing can be divided
        raise WeftError(f"scores.log_n: expected train_length to be above 1, got {node}")
    longest = Const(float(node.value)) if isinstance(node, Const) else 1.0 * node
    return lambda score: expression(score) * maximum(log(1.0 * (_q + 1)) / log(longest), 1.0)


def ssmax(scale: Operand) -> Score:
    """scale * log(n), n = q_pos + 1 keys under a causal mask (scalable softmax, arXiv 2501.19399).

    scale: a number, or a read of what is learned, `s[head]`.

    >>> from weft import tensor
    >>> ssmax(tensor("s", 1)[_head])(symbol("score"))
    score * (s[head] * log(1.0 * (q_pos + 1)))
    """
    node = _above_zero("ssmax", "scale", scale)
    return lambda score: expression(score) * (node * log(1.0 * (_q + 1)))


def yarn(factor: Operand) -> Score:
    """The temperature of a context that is `factor` times as long: (0.1 log(factor) + 1) ** 2 (YaRN, arXiv 2309.00071).

    Positions that are interpolated, by parts or as NTK-aware scaling has it, are the rotary embedding's, before a call.

    >>> yarn(4.0)(symbol("score"))
    score * ((0.1 * log(4.0) + 1.0) * (0.1 * log(4.0) + 1.0))
    """
    node = _above_zero("yarn", "factor", factor)
    if isinstance(node, Const) and node.value < 1:
        raise WeftError(f"scores.yarn: expected factor to be at least 1, as contexts become longer, got {node}")
    grown = 0.1 * log(node) + 1.0
    return lambda score: expression(score) * (grown * grown)


def llama4_temperature(floor_scale: Operand = 8192, attn_scale: Operand = 0.1) -> Score:
    """log(floor((q_pos + 1) / floor_scale) + 1) * attn_scale + 1, of layers without positions (Llama 4).

    >>> llama4_temperature()(symbol("score"))
    score * (log(1.0 * ((q_pos + 1) // 8192 + 1)) * 0.1 + 1.0)
    """
    steps, share = _above_zero("llama4_temperature", "floor_scale", floor_scale), expression(attn_scale)
    return lambda score: expression(score) * (log(1.0 * ((_q + 1) // steps + 1)) * share + 1.0)


def compose(*parts: Score) -> Score:
    """The scores one after the other, the first one innermost.

    >>> compose(temperature(2.0), softcap(30.0))(symbol("score"))
    30.0 * tanh(score / 2.0 / 30.0)
    """

    for part in parts:
        if isinstance(part, (Node, Attention, type)) or not callable(part):
            raise WeftError(f"scores.compose: expected scores such as scores.softcap(30.0), got {shown(part)}")

    def composed(score: Operand) -> Expr:
        result = expression(score)
        for part in parts:
            result = expression(part(result))
        return result

    return composed
