"""Short calls of target `cpu` by torch's own operations on all scores: a product, a softmax and a product.

What a softmax of plain torch does is as fast as any tile there, and its backward needs four products in place of five,
because it keeps the weights. They are kept where they are no more than twice the numbers of the query. In 16 bits the
processor's own products are used where it has them, and scores have 32 bits in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.planning.machines.hardware import dot_units
from .products import multiplies, multiply

MOST_OF_A_HEAD = 1 << 14  # scores of a query head, up to which weights are kept
MOST_A_COLUMN = 2  # keys for each column of a head: what is kept is then no more than twice the query
# The same where operands want gradients, which tiles take longer for; and all weights of a call, 64 MiB of them.
MOST_RECORDED, MOST_RECORDED_A_COLUMN, MOST_WEIGHTS = 1 << 16, 4, 1 << 24
MOST_IN_A_PIECE = 1 << 19  # scores that are computed at once in 16 bits: they stay in a cache
LEAST_WEIGHT = 2.0**-120  # smaller ones are 0: products of denormal numbers are a hundred times slower
LEAST_SCALE = 2.0**-126  # below it a processor may take a number for 0
Sizes = tuple[int, int, int, int, int, int]  # B, Hq, Hkv, L, T and head_dim


class Attended(NamedTuple):
    """What a forward found."""

    out: Tensor  # [B, Hq, L, Dv]
    top: Tensor  # [B, Hq, L], the maximum of a row
    log_sum: Tensor  # the same, the log of its sum
    weights: Tensor  # [B * Hkv, G * L, T], in the type that they are multiplied in


class Gradients(NamedTuple):
    """What a backward found; None where a gradient is not wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    scores: Tensor | None  # [B * Hkv, G * L, T]


def weighs_at_once(sizes: Sizes, dtype: torch.dtype, keeps: bool) -> bool:
    """Whether such a call is computed so. keeps: its weights are kept for a backward."""
    batch, heads, _, q_len, kv_len, head_dim = sizes
    if not batch * heads or not 0 < q_len * kv_len <= MOST_OF_A_HEAD or kv_len > MOST_A_COLUMN * head_dim:
        return False
    return keeps or _has_dots(dtype)


def records_at_once(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether such a call, of which operands want gradients, is recorded so by torch, which keeps its weights."""
    batch, heads, _, q_len, kv_len, head_dim = sizes
    is_short = 0 < q_len * kv_len <= MOST_RECORDED and kv_len <= MOST_RECORDED_A_COLUMN * head_dim
    return dtype.itemsize > 2 and is_short and 0 < batch * heads * q_len * kv_len <= MOST_WEIGHTS


@lru_cache(maxsize=4)
def _has_dots(dtype: torch.dtype) -> bool:
    """Whether the processor has products of this type of 16 bits that torch's own attention makes no use of."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype) in dot_units()


def _has_products(dtype: torch.dtype) -> bool:
    return multiplies(dtype) or _has_dots(dtype)


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, keeps: bool
) -> Attended | None:  # fmt: skip
    """mask: what is added to scale times q.k, [B or 1, Hq or 1, L or 1, T] in the type of scores.

    None where a score is NaN or inf: a hidden key may hold NaN, and NaN less inf is no -inf.
    """
    if not LEAST_SCALE <= abs(scale) < math.inf:  # oneDNN takes a factor that is 0 in 32 bits for 1
        return None
    (batch, heads, q_len, _), (kv_heads, kv_len) = query.shape, key.shape[1:3]
    queries, keys, values = (x.reshape(batch * kv_heads, -1, x.shape[3]) for x in (query, key, value))
    top, log_sum = torch.empty((2, *queries.shape[:2]), dtype=mask.dtype, device="cpu")
    if mask.dtype != query.dtype and _has_products(query.dtype):
        found = _attend_in_16_bits(queries, keys, values, mask, scale, (batch, heads, q_len), keeps, (top, log_sum))
    else:
        queries, keys, values = (x.to(mask.dtype) for x in (queries, keys, values))
        weights = torch.empty((*queries.shape[:2], kv_len), dtype=mask.dtype, device="cpu")
        weights.view(batch, heads, q_len, kv_len).copy_(mask)
        weights.baddbmm_(queries, keys.mT, alpha=scale)
        found = None
        if _to_weights(weights, top, log_sum):
            out = weights.new_empty((batch, heads, q_len, values.shape[2]))  # no view: a caller may write to it
            torch.bmm(weights, values, out=out.view(len(values), -1, values.shape[2]))
            found = out, weights
    if found is None:
        return None
    out = found[0].to(query.dtype)
    top, log_sum = (x.view(batch, heads, q_len) for x in (top, log_sum))
    return Attended(out, top, log_sum, found[1])


def _to_weights(scores: Tensor, top: Tensor, log_sum: Tensor) -> bool:
    """Make weights of scores in place, and fill the statistics of rows. False where a score is NaN or inf."""
    torch.amax(scores, -1, out=top)
    torch.softmax(scores, -1, out=scores)
    torch.amax(scores, -1, out=log_sum)
    log_sum.log_().neg_()
    if not math.isfinite(top.sum()):
        blind = top == -math.inf
        if not math.isfinite(top.masked_fill(blind, 0.0).sum()):
            return False
        scores.masked_fill_(blind[..., None], 0.0)
        log_sum.masked_fill_(blind, 0.0)
    torch.threshold_(scores, LEAST_WEIGHT, 0.0)
    return True


def _attend_in_16_bits(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, shape: tuple[int, int, int], keeps: bool,
    statistics: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The output, and weights of 16 bits, of which no more than a piece is there where they are not kept.

    shape: B, Hq and L.
    """
    (batch, heads, q_len), (number, rows, _), kv_len = shape, queries.shape, keys.shape[1]
    step = max(1, MOST_IN_A_PIECE // (heads * q_len * kv_len))  # batch rows
    wide = torch.empty((min(step, batch) * number // batch, rows, kv_len), dtype=mask.dtype, device="cpu")
    narrow = torch.empty_like(wide, dtype=queries.dtype)
    weights = queries.new_empty((number, rows, kv_len)) if keeps else narrow
    out = values.new_empty((batch, heads, q_len, values.shape[2]))
    out_rows = out.view(number, rows, values.shape[2])
    for first in range(0, batch, step):
        end = min(first + step, batch)
        here = slice(first * number // batch, end * number // batch)
        scores, rounded = wide[: here.stop - here.start], narrow[: here.stop - here.start]
        added = (mask[first:end] if len(mask) > 1 else mask).expand(-1, heads, q_len, kv_len)
        _to_scores(scores, rounded, queries[here], keys[here].mT, added, scale)
        if not _to_weights(scores, *(x[here] for x in statistics)):
            return None
        found = weights[here] if keeps else rounded
        torch.bmm(found.copy_(scores), values[here], out=out_rows[here])
    return out, weights


def _to_scores(scores: Tensor, rounded: Tensor, queries: Tensor, keys: Tensor, mask: Tensor, scale: float) -> None:
    """Fill scores, of 32 bits. rounded: of 16 bits, and as large.

    A product in 16 bits is rounded to these; what that took away is another one. That is worth it where the processor
    has units for such products. With dot products alone, one in 32 bits takes less time.
    """
    pairs = scores.view(-1, *mask.shape[1:])
    if not multiplies(queries.dtype):
        pairs.copy_(mask)
        scores.baddbmm_(queries.to(scores.dtype), keys.to(scores.dtype), alpha=scale)
        return
    torch.baddbmm(rounded.new_empty(()), queries, keys, beta=0, alpha=scale, out=rounded)
    scores.copy_(rounded)
    scores.add_(rounded.baddbmm_(queries, keys, beta=-1, alpha=scale))
    pairs.add_(mask)


def gradients_at_once(
    dout: Tensor, weights: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float,
    wants: tuple[bool, bool, bool, bool],
) -> Gradients | None:  # fmt: skip
    """The gradients of such a call. wants: those of query, key, value and scores.

    None where one of the scores' is not finite: beside weights of 0, tiles may leave out what is not.
    """
    number, rows, kv_len = weights.shape
    queries, douts = (x.reshape(number, rows, -1).to(weights.dtype) for x in (query, dout))
    keys, values = (x.reshape(number, kv_len, -1).to(weights.dtype) for x in (key, value))
    found: list[Tensor | None] = [None, None, None, None]
    if wants[0] or wants[1] or wants[3]:
        # delta is that of these weights, so that gradients of a row add up to 0 whatever was rounded before
        dscores = _dscores()(torch.bmm(douts, values.mT), weights)
        if not math.isfinite(dscores.sum()):
            return None
        found[3] = dscores
        if wants[0]:
            found[0] = multiply(dscores, keys, scale).view(query.shape).to(query.dtype)
        if wants[1]:
            found[1] = multiply(dscores.mT, queries, scale).view(key.shape).to(key.dtype)
    if wants[2]:
        found[2] = torch.bmm(weights.mT, douts).view(value.shape).to(value.dtype)
    return Gradients(*found)


@lru_cache(maxsize=1)
def _dscores() -> Callable[[Tensor, Tensor], Tensor]:
    """weights * (dweights - the sum of their products), by torch's own pass where it has it: a private op, so tried."""
    dweights = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float32, device="cpu")
    weights = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float32, device="cpu")

    softmax_backward = getattr(torch, "_softmax_backward_data", None)

    def own(dweights: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = softmax_backward(dweights, weights, -1, weights.dtype)  # type: ignore[misc]
        return found

    with torch.autocast("cpu", enabled=False):
        try:
            right = torch.allclose(own(dweights, weights), _in_passes(dweights, weights))
        except (RuntimeError, TypeError, NotImplementedError, AttributeError):
            right = False
    return own if right else _in_passes


def _in_passes(dweights: Tensor, weights: Tensor) -> Tensor:
    return (dweights - (dweights * weights).sum(-1, keepdim=True)) * weights


def by_distance(found: Tensor | float, q_len: int, kv_len: int) -> Tensor | float:
    """[.., L, T] of what [.., L + T - 1, 1] holds by distance, the greatest first: that of the last query and key 0."""
    if not isinstance(found, Tensor) or found.dim() < 2 or found.shape[-2] == 1:
        return found
    return found.expand(*found.shape[:-1], 1).squeeze(-1).unfold(-1, kv_len, 1).flip(-2)


def sums_by_distance(pairs: Tensor) -> Tensor:
    """The sum over each diagonal of [.., L, T], in the order of `distances`: [.., L + T - 1, 1]."""
    *others, q_len, kv_len = pairs.shape
    # rows of L + T - 1 numbers, each one place further than the row below it
    skewed = pairs.new_zeros(*others, q_len, q_len + kv_len)
    skewed[..., :kv_len] = pairs.flip(-2)
    wide = q_len + kv_len - 1
    return skewed.flatten(-2)[..., : q_len * wide].unflatten(-1, (q_len, wide)).sum(-2)[..., None]
