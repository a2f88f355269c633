"""Short calls of target `cpu` by torch's own operations on all scores: a product, a softmax and a product.

What a softmax of plain torch does is as fast as any tile there, and its backward needs four products in place of five,
because it keeps the weights. They are kept where they are no more than twice the numbers of the query. In 16 bits the
processor's own products are used where it has them; scores have 32 bits in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.planning.hardware import dot_units
from .products import multiplies, multiply

MOST_OF_A_HEAD = 1 << 14  # scores of a query head, up to which weights are kept
MOST_A_COLUMN = 2  # keys for each column of a head: what is kept is then no more than twice the query
LEAST_WEIGHT = 2.0**-120  # smaller ones are 0: products of denormal numbers are a hundred times slower
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


@lru_cache(maxsize=4)
def _has_dots(dtype: torch.dtype) -> bool:
    """Whether the processor has products of this type of 16 bits that torch's own attention makes no use of."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype) in dot_units()


def _has_products(dtype: torch.dtype) -> bool:
    return multiplies(dtype) or _has_dots(dtype)


def attend_at_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | float, scale: float) -> Attended | None:
    """mask: what is added to scale times q.k, [B or 1, Hq or 1, L or 1, T] in the type of scores, or 0.0.

    None where a score is NaN or inf: a hidden key may hold NaN, and NaN less inf is no -inf.
    """
    if not scale or not math.isfinite(scale):  # a product times 0 is none, whatever it holds
        return None
    batch, heads, q_len, _ = query.shape
    number, kv_len = batch * key.shape[1], key.shape[2]
    queries, keys, values = (x.reshape(number, -1, x.shape[3]) for x in (query, key, value))
    dtype = query.dtype if query.dtype in (torch.float32, torch.float64) else torch.float32
    weights = torch.empty((number, queries.shape[1], kv_len), dtype=dtype, device="cpu")
    spread = weights.view(batch, heads, q_len, kv_len)
    spread.copy_(mask) if isinstance(mask, Tensor) else spread.fill_(mask)
    narrow = dtype != query.dtype and _has_products(query.dtype)
    if narrow:
        _add_product_of_16_bits(weights, queries, keys.mT, scale)
    else:
        queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
        weights.baddbmm_(queries, keys.mT, alpha=scale)
    top = weights.amax(-1)
    torch.softmax(weights, -1, out=weights)
    log_sum = weights.amax(-1).log_().neg_()
    if not math.isfinite(top.sum()):
        blind = top == -math.inf
        if not math.isfinite(top.masked_fill(blind, 0.0).sum()):
            return None
        weights.masked_fill_(blind[..., None], 0.0)
        log_sum.masked_fill_(blind, 0.0)
    torch.nn.functional.threshold_(weights, LEAST_WEIGHT, 0.0)
    weights = weights.to(query.dtype) if narrow else weights
    out = torch.bmm(weights, values).to(query.dtype).view(batch, heads, q_len, -1)
    return Attended(out, *(x.view(batch, heads, q_len) for x in (top, log_sum)), weights)


def _add_product_of_16_bits(total: Tensor, x: Tensor, y: Tensor, factor: float) -> None:
    """Add factor x y, of float32, by products that are rounded to 16 bits: one, and what its rounding took away."""
    rounded = torch.baddbmm(x.new_empty(()), x, y, beta=0, alpha=factor)
    total.add_(rounded)
    total.add_(rounded.baddbmm_(x, y, beta=-1, alpha=factor))


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

    def own(dweights: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
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


def distances(q_offset: int, q_len: int, kv_len: int) -> Tensor:
    """q_pos - kv_pos of all pairs, the greatest first, [L + T - 1, 1]."""
    return torch.arange(q_offset + q_len - 1, q_offset - kv_len, -1, device="cpu")[:, None]


def sums_by_distance(pairs: Tensor) -> Tensor:
    """The sum over each diagonal of [.., L, T], in the order of `distances`: [.., L + T - 1, 1]."""
    *others, q_len, kv_len = pairs.shape
    # rows of L + T - 1 numbers, each one place further than the row below it
    skewed = pairs.new_zeros(*others, q_len, q_len + kv_len)
    skewed[..., :kv_len] = pairs.flip(-2)
    wide = q_len + kv_len - 1
    return skewed.flatten(-2)[..., : q_len * wide].unflatten(-1, (q_len, wide)).sum(-2)[..., None]
