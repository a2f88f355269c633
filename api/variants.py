"""Attentions of known models, whole and in the public language: what each of their layers declares.

Arguments are numbers, scalar operands or int expressions; what a model learns is an operand of the call. Rotary
embeddings, and norms of queries and keys, come before attention and are not part of it.

>>> from weft import variants
>>> variants.streaming_llm(4, 1020)
weft.Attention(score=score, mask=(kv_pos <= q_pos) & ((kv_pos < 4) | (q_pos - kv_pos < 1020)), name="streaming_llm")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from . import masks, scores
from .attention import Attention
from .ir.errors import WeftError, shown
from .ir.expr import Expr, Operand, TensorOperand, symbol
from .ir.functions import log, rsqrt

__all__ = [
    "fox", "gemma2", "gemma3", "gpt_oss", "learned_alibi", "llama4", "paligemma", "relu_attention", "sigmoid_attention",
    "softmax1", "streaming_llm",
]  # fmt: skip
_score, _head, _batch = symbol("score"), symbol("head"), symbol("batch")


if not TYPE_CHECKING:  # a type checker knows which names there are

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")


def _vector(function: str, operand: TensorOperand, dtype: str, dimension: str) -> TensorOperand:
    """A tensor operand of one dimension; anything else is refused."""
    if not isinstance(operand, TensorOperand) or operand.rank != 1 or operand.dtype != dtype:
        raise WeftError(
            f"variants.{function}: expected a tensor operand [{dimension}] such as weft.tensor('x', 1, {dtype}), got "
            f"{shown(operand)}"
        )
    return operand


def _local(window: Operand | None) -> Expr:
    """Causal, in a window unless that is None."""
    return masks.causal if window is None else masks.causal & masks.sliding_window(window)


def softmax1(mask: Operand = masks.causal) -> Attention:
    """exp(s) / (1 + sum(exp(s))): a query may attend to nothing ("attention is off by one", Miller 2023).

    >>> softmax1()
    weft.Attention(score=score, mask=kv_pos <= q_pos, sink=0.0, name="softmax1")
    """
    return Attention(mask=mask, sink=0.0, name="softmax1")


def sigmoid_attention(mask: Operand = masks.causal) -> Attention:
    """sigmoid(score - log(kv_len)) (Ramapuram et al. 2024, arXiv 2409.04431).

    >>> sigmoid_attention()  # doctest: +ELLIPSIS
    weft.Attention(score=score - log(1.0 * kv_len), mask=kv_pos <= q_pos, name="sigmoid_attention", ...)
    """
    shifted = _score - log(1.0 * symbol("kv_len"))
    return Attention(shifted, mask, name="sigmoid_attention", normalizer="sigmoid")


def relu_attention(mask: Operand = masks.causal) -> Attention:
    """relu(score) / kv_len (Wortsman et al. 2023, arXiv 2309.08586).

    >>> relu_attention()  # doctest: +ELLIPSIS
    weft.Attention(score=score, mask=kv_pos <= q_pos, scale=rsqrt(head_dim) / kv_len, name="relu_attention", ...)
    """
    scale = rsqrt(symbol("head_dim")) / symbol("kv_len")
    return Attention(mask=mask, scale=scale, name="relu_attention", normalizer="relu")


def learned_alibi(slopes: TensorOperand) -> Attention:
    """ALiBi whose slopes, float [Hq], get gradients (ALiBi, arXiv 2108.12409).

    >>> from weft import tensor
    >>> learned_alibi(tensor("slopes", 1))
    weft.Attention(score=score + slopes[head] * (kv_pos - q_pos), mask=kv_pos <= q_pos, name="learned_alibi")
    """
    return Attention(scores.alibi(slopes)(_score), masks.causal, name="learned_alibi")


def fox(decay: TensorOperand, mask: Operand = masks.causal) -> Attention:
    """Attention that forgets (FoX, Lin et al. 2025, arXiv 2503.02130): softmax(score + sum of log f from key to query).

    decay: float32 [B, Hq, T], the running sum of the logarithms of forget gates, as of `weft.scores.forgetting`:

        gates = torch.nn.functional.logsigmoid(linear(x).float())    # [B, T, Hq]: a gate of each token and head
        out = fox(query, key, value, decay=gates.mT.cumsum(-1))      # [B, Hq, L, Dv]

    The gates get gradients. A cache keeps `decay` beside its keys: the last entry plus the next log f goes on.

    >>> from weft import tensor
    >>> fox(tensor("decay", 3)).score
    score + (decay[batch, head, q_pos] - decay[batch, head, kv_pos])
    """
    return Attention(scores.forgetting(decay)(_score), mask, name="fox")


def streaming_llm(first: Operand = 4, window: Operand = 1020) -> Attention:
    """The first keys, which take what no other is worth, and a window (StreamingLLM, arXiv 2309.17453).

    Positions are those of the keys as they are given: of a cache that was evicted, places in the cache.
    """
    return Attention(mask=masks.global_window(first, window), name="streaming_llm")


def gpt_oss(sinks: TensorOperand, window: Operand | None = 128) -> Attention:
    """A layer of GPT-OSS (arXiv 2508.10925): a learned sink a head, float [Hq]; every other layer has no window.

    >>> from weft import tensor
    >>> gpt_oss(tensor("sinks", 1), None)
    weft.Attention(score=score, mask=kv_pos <= q_pos, sink=sinks[head], name="gpt_oss")
    """
    return Attention(mask=_local(window), sink=_vector("gpt_oss", sinks, "float", "heads")[_head], name="gpt_oss")


def gemma2(window: Operand | None = 4096, *, cap: Operand = 50.0, scale: Operand | None = None) -> Attention:
    """A layer of Gemma 2 (arXiv 2408.00118): capped scores; every other layer has no window.

    scale: 1 / sqrt(query_pre_attn_scalar) where that is not the head dimension, as in the model of 27B (144 ** -0.5).

    >>> gemma2(None)
    weft.Attention(score=50.0 * tanh(score / 50.0), mask=kv_pos <= q_pos, name="gemma2")
    """
    return Attention(scores.softcap(cap)(_score), _local(window), scale=scale, name="gemma2")


def gemma3(window: Operand | None = 1024, *, scale: Operand | None = None) -> Attention:
    """A layer of Gemma 3 (arXiv 2503.19786): five in six have a window; no cap.

    >>> gemma3(8)
    weft.Attention(score=score, mask=(kv_pos <= q_pos) & ((q_pos - kv_pos < 8) & (kv_pos - q_pos < 8)), name="gemma3")
    """
    return Attention(mask=_local(window), scale=scale, name="gemma3")


def llama4(chunk: Operand | None = 8192) -> Attention:
    """A layer of Llama 4: causal in chunks; the layers without chunk have no positions, and a temperature that grows.

    >>> llama4()
    weft.Attention(score=score, mask=(kv_pos <= q_pos) & (kv_pos // 8192 == q_pos // 8192), name="llama4")
    """
    if chunk is not None:
        return Attention(mask=masks.chunked(chunk), name="llama4")
    return Attention(scores.llama4_temperature()(_score), masks.causal, name="llama4")


def paligemma(prefix: TensorOperand) -> Attention:
    """PaliGemma (arXiv 2407.07726): image and prompt, the first prefix[batch] keys, are seen by all; int [batch].

    >>> from weft import tensor
    >>> paligemma(tensor("prefix", 1, int))
    weft.Attention(score=score, mask=(kv_pos <= q_pos) | (kv_pos < prefix[batch]), name="paligemma")
    """
    length = _vector("paligemma", prefix, "int", "batch")[_batch]
    return Attention(mask=masks.prefix_lm(length), name="paligemma")
