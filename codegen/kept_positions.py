"""What short calls of target `cpu` know of their positions: found once for all calls of equal sizes.

A short call takes tens of microseconds, and each operation of torch two of them on the host, however few its numbers.
Whatever follows from lengths and offsets alone is therefore kept, for as many kinds of calls as a model has at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

KEPT, MOST_KEPT = 8, 1 << 15  # results of a function, and the numbers of one of them
Span = tuple[int, int, tuple[int, ...]]  # the first and the last of numbers that count up one by one, and their shape


def settled(function: Callable[..., R]) -> Callable[..., R]:
    """A function of whole numbers, to tensors that nobody writes to: what is short is kept for the next calls."""
    kept: dict[tuple[int, ...], R] = {}

    @wraps(function)
    def found(*given: int) -> R:
        result = kept.get(given)
        if result is None:
            with torch.inference_mode(False):  # what is made in that mode may not be used everywhere
                result = function(*given)
            tensors: Any = result if isinstance(result, tuple) else (result,)
            if sum([t.numel() for t in tensors]) <= MOST_KEPT:
                if len(kept) >= KEPT:
                    kept.pop(next(iter(kept)), None)
                kept[given] = result
        return result

    return found


@settled
def positions(
    q_offset: int, q_len: int, kv_len: int, group: int, heads: int, first: int, end: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q_pos [L, 1], kv_pos [T], batch [rows, 1, 1, 1, 1], head [1, Hkv, G, 1, 1] and kv_head, of rows first to end - 1.

    They broadcast to [batch rows, Hkv, G, L, T].
    """
    q_pos, kv_pos = _counted(q_offset, q_len, q_len, 1), _counted(0, kv_len, kv_len)
    batch, head = _counted(first, end - first, end - first, 1, 1, 1, 1), _counted(0, heads, 1, -1, group, 1, 1)
    return q_pos, kv_pos, batch, head, head if group == 1 else head // group


@settled
def distances(q_offset: int, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """In the place of q_pos and kv_pos: q_pos - kv_pos of all pairs, the greatest first, [L + T - 1, 1], and key 0."""
    apart = torch.arange(q_offset + q_len - 1, q_offset - kv_len, -1, device="cpu")
    return apart[:, None], torch.zeros(1, dtype=torch.int64, device="cpu")


def _counted(first: int, number: int, *shape: int) -> Tensor:
    """So many whole numbers from the first on. Which they are is kept with them: to look costs as much as to read."""
    found = torch.arange(first, first + number, device="cpu").view(shape)
    found.span = first, first + number - 1, tuple(found.shape)  # type: ignore[attr-defined]
    return found


# -- reads of operands -------------------------------------------------------------------------------------------------
def read(tensor: Tensor, *index: Tensor | int) -> Tensor:
    """tensor[index], as a view where each index counts up one by one, as positions and heads of a tile do."""
    found = block_of(tensor, index)
    return tensor[index] if found is None else found


def block_of(tensor: Tensor, index: Sequence[Tensor | int]) -> Tensor | None:
    """The entries that these indices read, as a view; None where they are no block, or lie outside.

    Each index has an extent where others have none, so that a block has the shape to which they broadcast.
    """
    spans = tuple([_span(i) for i in index])
    found = _block(tuple(tensor.shape), tensor.stride(), spans)
    if found is None:
        return None
    shape, strides, offset, whole = found
    if whole and tensor.untyped_storage().nbytes():  # a view of freed memory is no error to torch
        return tensor.view(shape)
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _span(index: Tensor | int) -> Span | None:
    """None of an index without numbers."""
    if not isinstance(index, Tensor):
        return index, index, ()
    known: Span | None = getattr(index, "span", None)
    if known is not None:
        return known
    shape = tuple(index.shape)
    if not index.numel():
        return None
    first, last = (int(index[(n,) * len(shape)]) for n in (0, -1))
    return first, last, shape


@lru_cache(maxsize=256)
def _block(
    sizes: tuple[int, ...], all_strides: tuple[int, ...], spans: tuple[Span | None, ...]
) -> tuple[list[int], list[int], int, bool] | None:
    """Shape, strides and place of the first entry, of a tensor that has these sizes and strides.

    Also whether all entries are read, in the order in which they lie: torch's gradient of such a view is a view, and
    that of others takes 100 us.
    """
    rank = max([len(span[2]) for span in spans if span is not None], default=0)
    shape, strides, offset = [1] * rank, [0] * rank, 0
    for size, stride, span in zip(sizes, all_strides, spans, strict=True):
        if span is None:
            return None
        first, last, extents = span
        if last - first != math.prod(extents) - 1 or first < 0 or last >= size:
            return None
        offset += first * stride
        for axis, extent in zip(range(rank - 1, -1, -1), reversed(extents)):
            if extent > 1:
                if shape[axis] > 1:
                    return None
                shape[axis], strides[axis] = extent, stride
                stride *= extent
    in_order = _lies_in_order(sizes, all_strides) and _lies_in_order(shape, strides)
    return shape, strides, offset, in_order and math.prod(shape) == math.prod(sizes)


def _lies_in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether entries lie side by side, the last axis first."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


# -- masks that are added to scores ------------------------------------------------------------------------------------
SMALL_TILE = 1 << 13  # pairs up to which one slow operation takes less than three fast ones
_INTS = {torch.float32: (torch.int32, -(2**23)), torch.float64: (torch.int64, -(2**52))}  # and the bits of -inf


def as_added(seen: Tensor | bool, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where a pair is seen, -inf where it is not. dtype: float32 or float64."""
    if not isinstance(seen, Tensor):
        seen = torch.as_tensor(seen)
    if seen.numel() <= SMALL_TILE:
        return torch.where(seen, *_zero_and_hidden(dtype))
    whole, hidden = _INTS[dtype]  # torch.where takes a nanosecond a pair
    return seen.to(whole).sub_(1).bitwise_and_(hidden).view(dtype)


@lru_cache(maxsize=2)
def _zero_and_hidden(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device="cpu"), torch.full((), -math.inf, dtype=dtype, device="cpu")
