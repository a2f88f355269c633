"""What generated code of target `cpu` calls: matrix products of tiles, and the threads that share the work.

A form of `cpu` says whose products its code has: those of torch, or of oneDNN for tiles of one head, which is about
twice as fast as MKL on processors that are not Intel's. Threads divide heads among them: the product of one tile is too
small to be divided well.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import lru_cache, wraps
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..compiler.analysis.values.magnitudes import NEAR_0 as NEAR_0
from ..compiler.planning.machines.hardware import matrix_units

T = TypeVar("T")


# -- products ----------------------------------------------------------------------------------------------------------
FEW_ROWS = 8  # rows of w for which torch is faster the other way round


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + bias: x [N, n, k], w [N, m, k] and bias [N, m] give [N, n, m]."""
    if w.shape[1] <= FEW_ROWS:
        found = torch.bmm(w, x.mT).mT
    else:
        found = torch.bmm(x, w.mT)
    return found if bias is None else found.add_(bias[:, None])


def add_product(total: Tensor, x: Tensor, w: Tensor) -> None:
    """Add x w^T to total [N, n, m] or [.., .., n, m]: x [N, n, k] and w [N, m, k]."""
    if total.dim() > 3 or w.shape[1] <= FEW_ROWS:
        total.add_(product(x, w).view(total.shape))
    else:
        total.baddbmm_(x, w.mT)


MOST_OF_A_HEAD = 1 << 16  # scores of a query head up to which a backward is computed in one piece


def fits_one_piece(scores: int) -> bool:
    """Whether a backward has so few scores of a query head that it needs no tiles."""
    return 0 < scores <= MOST_OF_A_HEAD


def multiply(x: Tensor, y: Tensor, factor: float, at: Tensor | None = None) -> Tensor:
    """factor x y of [N, n, k] and [N, k, m]; at: memory that may hold it, from a product of as many or more."""
    if factor != factor:  # MKL takes NaN for 1
        x, factor = x * factor, 1.0
    kept = None if at is None or at.shape[1:] != (x.shape[1], y.shape[2]) or len(at) < len(x) else at[: len(x)]
    return torch.baddbmm(x.new_empty(()), x, y, beta=0, alpha=factor, out=kept)


def store(result: Tensor, x: Tensor, y: Tensor, factor: float) -> None:
    """Fill a result [batch rows, heads, n, m] with factor x y, [N, n', k] and [N, k, m]."""
    shape = (x.shape[0], x.shape[1], y.shape[2])
    if result.dtype == x.dtype and result.is_contiguous():
        multiply(x, y, factor, result.view(shape))
    else:
        result.copy_(multiply(x, y, factor).view(result.shape))


def where_seen(dout: Tensor, lse: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The gradient [B, Hq, L, Dv], 0 in rows that see nothing: a weight of 0 times NaN would be NaN.

    lse [B, Hq, L] tells which rows these are, where it is -inf of them alone; else out, which is 0, and is looked at if
    the gradient is not finite.
    """
    if lse is not None:
        if math.isfinite(lse.sum()):
            return dout
        return dout.masked_fill((lse == -math.inf)[..., None], 0.0)
    if out is None or math.isfinite(dout.sum()):
        return dout
    return dout.masked_fill((out == 0.0).all(-1, keepdim=True), 0.0)


def one_dnn_product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product`, of one head in float32 by oneDNN, which takes a thousand times as long where rows of w have gaps."""
    if x.shape[0] == 1 and w.shape[1] > FEW_ROWS and x.dtype == torch.float32 and (linear := one_dnn_linear()):
        w = w[0] if w[0].is_contiguous() or w[0].mT.is_contiguous() else w[0].contiguous()
        return linear(x[0].contiguous(), w, None if bias is None else bias[0], "none", [], "")[None]
    return product(x, w, bias)


def add_one_dnn_product(total: Tensor, x: Tensor, w: Tensor) -> None:
    """`add_product`, of one head in float32 by oneDNN."""
    if x.shape[0] == 1 and x.dtype == torch.float32 and one_dnn_linear():
        total.add_(one_dnn_product(x, w))
    else:
        add_product(total, x, w)


# oneDNN compiles code for each shape, 0.3 MB that stays: only lengths that are multiples of this get any. Tiles are cut
# so that few products are left over, which torch has at half the speed.
REGULAR, REGULAR_ROWS = 64, 128


class RegularProducts:
    """`product` and `add_product` by oneDNN where the shape is one of few. widths: dimensions that are no lengths."""

    def __init__(self, *widths: int) -> None:
        self.widths = frozenset(widths)

    def _has(self, x: Tensor, w: Tensor) -> bool:
        return all(n % REGULAR == 0 or n in self.widths for n in (*x.shape[1:], w.shape[1]))

    def product(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return one_dnn_product(x, w, bias) if self._has(x, w) else product(x, w, bias)

    def add_product(self, total: Tensor, x: Tensor, w: Tensor) -> None:
        (add_one_dnn_product if self._has(x, w) else add_product)(total, x, w)


def row_tiles(length: int, block: int, regular: bool = False) -> list[tuple[int, slice]]:
    """(number, rows) of the tiles of queries. regular: the last one is cut, so that its first part has few lengths."""
    found = [(n, slice(first, min(first + block, length))) for n, first in enumerate(range(0, length, block))]
    left = (length % block) % REGULAR_ROWS
    if regular and left and length % block > left:
        number, rows = found.pop()
        found += [(number, slice(rows.start, length - left)), (number, slice(length - left, length))]
    return found


def _tried(find: Callable[[], T]) -> Callable[[], T | None]:
    """Of a function that tries a private op: once, and None where torch has another op of that name.

    What is tried holds for all calls: neither a default of torch nor autocast may have a say in it.
    """

    @wraps(find)
    def found() -> T | None:
        with torch.autocast("cpu", enabled=False), suppress(RuntimeError, TypeError, NotImplementedError, ValueError):
            return find()
        return None

    return lru_cache(maxsize=1)(found)


def _floats(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


@_tried
def one_dnn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's product with a bias, where torch has it."""
    linear = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    if linear is None or not torch.backends.mkldnn.is_available():
        return None
    x, w, bias = _floats([[1, 0, 0], [0, 1, 0], [0, 0, 1]]), _floats([[0, 1, 2], [3, 4, 5]]), _floats([1, 2])
    return linear if torch.equal(linear(x, w, bias, "none", [], ""), torch.addmm(bias, x, w.T)) else None


VERY_SHORT = 1 << 13  # scores of calls that cost what the host takes for them: one op is then faster than any tiles
# Queries times keys times columns of a head, forward and backward, below which one op is faster in one thread than the
# tiles of a processor that has fast ones: what torch takes for each of its ops is then more than is won
# (docs/performance.md).
SHORT_HEAD, SHORT_HEAD_BACKWARD = 1 << 24, 1 << 23
# How many times that in two threads, which share one op better than they share tiles; and in more, where tiles have no
# products of oneDNN.
TWO_THREADS, TWO_THREADS_IN_16_BITS, MORE_THREADS = 4, 64, 1 << 40
ANY_LENGTH = MORE_THREADS  # what no head has


def short_head(backward: bool = False, in_16_bits: bool = False) -> int:
    """Queries times keys times columns of a head below which one op is faster than tiles, in torch's threads."""
    if backward and in_16_bits:
        # torch's takes 0.8 to 1.4 of the time of tiles on the processors that were timed, at any length
        return 0
    threads, in_one = torch.get_num_threads(), SHORT_HEAD_BACKWARD if backward else SHORT_HEAD
    if threads == 1:
        return in_one
    return in_one * (MORE_THREADS if threads > 2 else TWO_THREADS_IN_16_BITS if in_16_bits else TWO_THREADS)


def whole_attention(
    scores: int, of_a_head: int, in_tiles: bool = False, in_16_bits: bool = False
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """torch's own attention with its log-sum-exp, for calls that it computes as they are and faster than tiles do.

    (query, key, value, 0.0, is_causal, scale=...) -> (out, lse). None where there is none, and in calls of more scores
    where tiles are the faster ones (in_tiles), which a form says. of_a_head: queries times keys times columns; half of
    that where a query sees keys up to its own.
    """
    if in_tiles and scores > VERY_SHORT and of_a_head >= short_head(in_16_bits=in_16_bits):
        return None
    return own_attention()


def whole_backward(
    scores: int, of_a_head: int, in_tiles: bool = False, in_16_bits: bool = False
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """The gradients of such a call, by the same rule. of_a_head: whatever the mask.

    (dout, query, key, value, out, lse, 0.0, is_causal, scale=...) -> (dquery, dkey, dvalue). lse must be finite.
    """
    if in_tiles and scores > VERY_SHORT and of_a_head >= short_head(True, in_16_bits):
        return None
    return own_backward()


@_tried
def own_attention() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """torch's own attention for all calls."""
    attend = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)  # quicker than through torch.ops
    if attend is None:
        return None
    query, hidden = _floats([[[[0, 1], [2, 3]]]]), _floats([[0, 1], [0, 0]]) > 0
    out, lse = attend(query.expand(1, 2, 2, 2), query, query, 0.0, True, scale=0.5)
    scores = (0.5 * query @ query.mT).masked_fill(hidden, -float("inf"))
    right = torch.allclose(out, scores.softmax(-1) @ query) and torch.allclose(lse, scores.logsumexp(-1))
    return attend if right else None


@_tried
def own_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """Its backward, tried with two query heads that share a key head."""
    attend = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if (attend := getattr(attend, "default", None)) is None:
        return None
    rows, hidden = _floats([[[[0, 1], [2, 3]], [[1, 0], [1, 2]]]]), _floats([[0, 1], [0, 0]]) > 0
    key, value, dout = rows[:, 1:] - 1, rows[:, :1], rows.mT.contiguous()
    scores = (0.5 * rows @ key.mT).masked_fill(hidden, -float("inf"))
    weights = scores.softmax(-1)
    out, lse = weights @ value, scores.logsumexp(-1)
    found = attend(dout, rows, key, value, out, lse, 0.0, True, scale=0.5)
    dscores = 0.5 * weights * (dout @ value.mT - (dout * out).sum(-1, keepdim=True))
    exact = dscores @ key, (dscores.mT @ rows).sum(1, keepdim=True), (weights.mT @ dout).sum(1, keepdim=True)
    right = all(g.shape == e.shape and torch.allclose(g, e, atol=1e-6) for g, e in zip(found, exact, strict=True))
    return attend if right else None


@_tried
def takes_masks() -> bool:
    """Whether both take a mask that is added to scores, of which a row may be -inf alone."""
    attend, backward = own_attention(), own_backward()
    if attend is None or backward is None:
        return False
    rows = _floats([[[[0, 1], [2, 3]], [[1, 0], [1, 2]]]])
    mask = _floats([[[[0.5, -math.inf]], [[-math.inf, -math.inf]]]]).expand(1, 2, 2, 2)
    weights = (0.5 * rows @ rows.mT + mask).softmax(-1).nan_to_num()
    out, lse = attend(rows, rows, rows, 0.0, False, attn_mask=mask.contiguous(), scale=0.5)
    found = backward(rows, rows, rows, rows, out, lse, 0.0, False, attn_mask=mask.contiguous(), scale=0.5)
    dscores = 0.5 * weights * (rows @ rows.mT - (rows * out).sum(-1, keepdim=True))
    exact = weights @ rows, dscores @ rows, dscores.mT @ rows, weights.mT @ rows
    return all(torch.allclose(g, e, atol=1e-6) for g, e in zip((out, *found), exact, strict=True))


FINITE = float(torch.finfo(torch.float64).max)
MOST_OF_A_MASK = 1 << 20  # numbers of a mask that is made at once: more batch rows are computed one after the other


def short_head_with_mask(backward_in: torch.dtype | None = None) -> int:
    """Queries times keys times columns of a head below which torch's own attention is handed a mask."""
    if backward_in is not None and backward_in.itemsize == 2 and not multiplies(backward_in):
        return 0
    in_one_thread = SHORT_HEAD if backward_in is None else SHORT_HEAD_BACKWARD
    return in_one_thread if torch.get_num_threads() == 1 else in_one_thread * TWO_THREADS


def rows_of_a_mask(
    sizes: tuple[int, int, int, int, int, int], by_batch: bool, by_head: bool, backward_in: torch.dtype | None = None
) -> int:
    """How many batch rows torch's own attention computes at once, which is handed a mask; 0 for what tiles compute.

    sizes: B, Hq, Hkv, L, T and head_dim. by_batch, by_head: whether the mask differs by them. backward_in: the type of
    operands, in a backward.
    """
    batch, heads, _, q_len, kv_len, head_dim = sizes
    is_short = q_len * kv_len * head_dim < short_head_with_mask(backward_in)
    numbers = q_len * kv_len * (heads if by_head else 1)  # of the mask of one batch row
    if not is_short or numbers > 8 * MOST_OF_A_MASK or not numbers or not takes_masks():
        return 0
    return min(batch, max(1, MOST_OF_A_MASK // numbers)) if by_batch else batch


@lru_cache(maxsize=4)
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor has units for products of 16 bits, so that torch's own backward in them is fast."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype) in matrix_units()


def as_mask(found: Tensor, heads: int, group: int, kv_len: int) -> Tensor:
    """What broadcasts to [B, Hkv, G, L, T], as torch's own attention takes a mask: [B or 1, Hq or 1, L or 1, T]."""
    if found.dim() < 5:
        found = found.view(*(1,) * (5 - found.dim()), *found.shape)
    if group > 1 and found.shape[1] * found.shape[2] > 1:
        found = found.expand(-1, heads // group, group, -1, -1)
    found = found.flatten(1, 2)
    return (found if found.shape[3] == kv_len else found.expand(-1, -1, -1, kv_len)).contiguous()


MOST_REMEMBERED, REMEMBERED = 1 << 14, 4  # pairs of a mask that is kept, and how many are


def remembered(mask_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`mask_of_pairs` that makes a short mask once: of a variant that reads whole numbers alone, which decide it."""
    again = lru_cache(maxsize=REMEMBERED)(mask_of)

    def found(q_offset: int, first: int, end: int, heads: int, env: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        is_short = env[4] * env[5] * heads <= MOST_REMEMBERED * REMEMBERED
        return (again if is_short else mask_of)(q_offset, first, end, heads, env, dtype)

    return found


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, mask_of: Callable[[int, int], Tensor], rows: int, scale: float,
    most: float = FINITE,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """out and lse by torch's own attention, so many batch rows at once.

    mask_of: the mask of batch rows first to end - 1. Queries that see no key have 0 and -inf. None where a log-sum-exp
    is NaN or larger than `most`: a hidden key may hold NaN, and NaN less inf is no -inf.
    """
    attend, parts = own_attention(), []
    assert attend is not None
    batch = query.shape[0]
    for first in range(0, batch, rows):
        end = min(first + rows, batch)
        mask, given = mask_of(first, end), (query, key, value)
        if rows < batch:
            given = query[first:end], key[first:end], value[first:end]
        out, lse = attend(*given, 0.0, False, attn_mask=mask, scale=scale)
        if not (_within(lse, most) and told_apart(out, lse, mask)):
            return None
        parts.append((out, lse))
    if len(parts) == 1:
        return parts[0]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(sums)


def _within(numbers: Tensor, most: float) -> bool:
    """Whether none is NaN, or farther from 0: the root of the sum of their squares is a bound that takes less time."""
    norm = torch.linalg.vector_norm
    return float(norm(numbers)) <= most or float(norm(numbers, math.inf)) <= most


def told_apart(out: Tensor, lse: Tensor, mask: Tensor) -> bool:
    """Give rows that see no key their 0 and -inf; False where a 0 is not theirs.

    torch's kernel gives 0 for the log-sum-exp of a row whose scores are all -inf, and takes one of NaN for such a row
    where there are fewer keys than a vector of the processor has.
    """
    if int(torch.count_nonzero(lse)) == lse.numel():
        return True
    blind = mask.amax(-1) == -math.inf
    if bool((lse == 0.0).logical_and_(~blind).any()):
        return False
    out.masked_fill_(blind[..., None], 0.0)
    lse.masked_fill_(blind, -math.inf)
    return True


def gradients_with_mask(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    mask_of: Callable[[int, int], Tensor], rows: int, scale: float, most: float = FINITE,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The gradients of query, key and value of such a call; None where one of the query's is not finite."""
    attend, parts = own_backward(), []
    assert attend is not None
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # weights of a row that sees nothing are then exp(-inf)
    if not _within(lse, most):
        return None
    for first in range(0, len(query), rows):
        end = min(first + rows, len(query))
        given = [dout, query, key, value, out, lse]
        if rows < len(query):
            given = [x[first:end] for x in given]
        found = attend(*given, 0.0, False, attn_mask=mask_of(first, end), scale=scale)
        if not math.isfinite(found[0].sum(dtype=lse.dtype)):
            return None
        parts.append(found)
    return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))


def overlap(*tensors: Tensor) -> bool:
    """Whether rows of one begin inside of others, as those of `x.unfold(...)`: torch's own kernels lay results out as
    operands are, and are wrong for such ones. Rows that are one and the same, as of `x.expand(...)`, are no harm."""
    for tensor in tensors:
        if tensor.is_contiguous():  # as most are: this is of every short call
            continue
        *sizes, width = tensor.shape
        for size, stride in zip(sizes, tensor.stride()):
            if 0 < stride < width and size > 1:
                return True
    return False


# -- threads -----------------------------------------------------------------------------------------------------------
MOST_THREADS = 2  # of Python: each waits for the others between any two calls of torch; four are slower than two


def heads_at_once(heads: int, one_dnn: bool = False) -> int:
    """How many heads of a longer call are computed together: one for each thread of torch, where there are so many.

    torch then divides each step by heads. With fewer heads they are computed one by one, and `in_threads` divides them.
    one_dnn: whether products are oneDNN's, which takes those of one head.
    """
    threads = torch.get_num_threads()
    if heads < threads or (threads <= MOST_THREADS and one_dnn and one_dnn_linear()):
        return 1
    return threads


def in_threads(
    work: Callable[[list[Any], int, int], None], units: Sequence[Sequence[Any]], at_once: int, *, by_tiles: bool
) -> None:
    """Do all units of work; where heads are computed one by one, in threads with one thread inside of products each.

    work(parts of units, k, n): compute these parts; of their query tiles, from the k-th on every n-th.
    by_tiles: whether the query tiles of a unit may be divided too.
    """
    threads = min(MOST_THREADS, torch.get_num_threads())
    if threads == 1 or at_once > 1:
        work([part for unit in units for part in unit], 0, 1)
        return
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
    pieces, begun = _pieces(units, threads, by_tiles), list[Future[None]]()
    with suppress(RuntimeError):  # the process ends, and Python starts no work in threads: this one does what is left
        pool = _pools.of(threads)
        for piece in pieces:
            begun.append(pool.submit(_quietly, mode, work, *piece))
    for piece in pieces[len(begun) :]:
        work(*piece)
    for done in begun:
        done.result()


def _pieces(units: Sequence[Sequence[Any]], threads: int, by_tiles: bool) -> list[tuple[list[Any], int, int]]:
    """Nearly equal runs of units, one a thread; where there are fewer units than threads, their tiles are divided."""
    runs = min(threads, len(units))
    ways = -(-threads // runs) if by_tiles and len(units) < threads else 1
    ends = [round(len(units) * i / runs) for i in range(runs + 1)]
    parts = [[part for unit in units[a:b] for part in unit] for a, b in pairwise(ends)]
    return [(part, k, ways) for part in parts for k in range(ways)]


def _quietly(mode: Callable[[], AbstractContextManager[Any]], work: Callable[..., None], *arguments: Any) -> None:
    with mode():  # a thread begins with gradients on, and what is made in inference mode is written in it alone
        work(*arguments)


class _Pools:
    """One pool of threads a process, as large as was asked for."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock, self._size = threading.Lock(), 0
        self._pool: ThreadPoolExecutor | None = None

    def of(self, threads: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._size < threads:
                self._pool, self._size = _new_pool(threads), threads
            return self._pool


def _new_pool(threads: int) -> ThreadPoolExecutor:
    """Threads that have one thread for torch each."""
    kept = torch.get_num_threads()
    all_here = threading.Barrier(threads)
    pool = ThreadPoolExecutor(threads, "weft", initializer=_alone)
    try:
        for started in [pool.submit(all_here.wait) for _ in range(threads)]:
            started.result()
    except RuntimeError:
        all_here.abort()  # or those that started would wait for ever, and the end of the process for them
        raise
    finally:
        torch.set_num_threads(kept)
    return pool


def _alone() -> None:
    """One thread for torch in this one. A new thread takes the number that was last set anywhere when it first asks."""
    torch.set_num_threads(1)
    torch.get_num_threads()


_pools = _Pools()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.forget)  # threads stay behind
