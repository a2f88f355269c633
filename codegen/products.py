"""What generated code of target `cpu` calls: matrix products of tiles, and the threads that share the work.

A form of `cpu` says whose products its code has: those of torch, or of oneDNN for tiles of one head, which is about
twice as fast as MKL on processors that are not Intel's. Threads divide heads among them: the product of one tile is too
small to be divided well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


# -- products ----------------------------------------------------------------------------------------------------------
FEW = 8  # rows of w for which torch is faster the other way round


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + bias: x [N, n, k], w [N, m, k] and bias [N, m] give [N, n, m]."""
    if w.shape[1] <= FEW:
        found = torch.bmm(w, x.mT).mT
    else:
        found = torch.bmm(x, w.mT)
    return found if bias is None else found.add_(bias[:, None])


def add_product(total: Tensor, x: Tensor, w: Tensor) -> None:
    """Add x w^T to total [N, n, m]: x [N, n, k] and w [N, m, k]."""
    if w.shape[1] <= FEW:
        total.add_(product(x, w))
    else:
        total.baddbmm_(x, w.mT)


def one_dnn_product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product`, of one head in float32 by oneDNN, which takes a thousand times as long where rows of w have gaps."""
    if x.shape[0] == 1 and w.shape[1] > FEW and x.dtype == torch.float32 and (linear := one_dnn_linear()):
        w = w[0] if w[0].is_contiguous() or w[0].mT.is_contiguous() else w[0].contiguous()
        return linear(x[0].contiguous(), w, None if bias is None else bias[0], "none", [], "")[None]
    return product(x, w, bias)


def add_one_dnn_product(total: Tensor, x: Tensor, w: Tensor) -> None:
    """`add_product`, of one head in float32 by oneDNN."""
    if x.shape[0] == 1 and x.dtype == torch.float32 and one_dnn_linear():
        total.add_(one_dnn_product(x, w))
    else:
        add_product(total, x, w)


@lru_cache(maxsize=1)
def one_dnn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's product with a bias, where torch has it; a private op, so it is tried first."""
    linear = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    if linear is None or not torch.backends.mkldnn.is_available():
        return None
    x, w, bias = _floats([[1, 0, 0], [0, 1, 0], [0, 0, 1]]), _floats([[0, 1, 2], [3, 4, 5]]), _floats([1, 2])
    with torch.autocast("cpu", enabled=False):
        try:
            found: Tensor = linear(x, w, bias, "none", [], "")
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        return linear if torch.equal(found, torch.addmm(bias, x, w.T)) else None


def _floats(numbers: Sequence[object]) -> Tensor:
    """What is tried holds for all calls: no default of torch, nor autocast, may have a say in it."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


VERY_SHORT = 1 << 13  # scores of calls that cost what the host takes for them: one op is then faster than any tiles
# Queries times keys times columns of a head, forward and backward, below which one op is faster than the tiles of a
# processor that has fast ones: what torch takes for each of its ops is then more than is won (docs/performance.md).
SHORT_HEAD, SHORT_HEAD_BACKWARD = 1 << 24, 1 << 23


def whole_attention(scores: int, of_a_head: int, in_tiles: bool = False) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """torch's own attention with its log-sum-exp, for calls that it computes as they are and faster than tiles do.

    (query, key, value, 0.0, is_causal, scale=...) -> (out, lse). None where there is none, and in calls of more scores
    where tiles are the faster ones (in_tiles), which a form says. of_a_head: queries times keys times columns.
    """
    return own_attention() if not in_tiles or scores <= VERY_SHORT or of_a_head < SHORT_HEAD else None


def whole_backward(
    scores: int, of_a_head: int, in_tiles: bool = False, in_16_bits: bool = False
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """The gradients of such a call, by the same rule.

    (dout, query, key, value, out, lse, 0.0, is_causal, scale=...) -> (dquery, dkey, dvalue). lse must be finite.
    """
    # in 16 bits torch's takes 0.8 to 1.4 of the time of tiles on the processors that were timed, at any length
    is_short = scores <= VERY_SHORT or (of_a_head < SHORT_HEAD_BACKWARD and not in_16_bits)
    return own_backward() if is_short or not in_tiles else None


@lru_cache(maxsize=1)
def own_attention() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """torch's own attention for all calls: a private op, so it is tried first."""
    attend = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)  # quicker than through torch.ops
    if attend is None:
        return None
    query, hidden = _floats([[[[0, 1], [2, 3]]]]), _floats([[0, 1], [0, 0]]) > 0
    with torch.autocast("cpu", enabled=False):
        try:
            out, lse = attend(query.expand(1, 2, 2, 2), query, query, 0.0, True, scale=0.5)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            return None
        scores = (0.5 * query @ query.mT).masked_fill(hidden, -float("inf"))
        right = torch.allclose(out, scores.softmax(-1) @ query) and torch.allclose(lse, scores.logsumexp(-1))
    return attend if right else None


@lru_cache(maxsize=1)
def own_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """Its backward, likewise tried: of two query heads that share a key head."""
    attend = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if (attend := getattr(attend, "default", None)) is None:
        return None
    rows, hidden = _floats([[[[0, 1], [2, 3]], [[1, 0], [1, 2]]]]), _floats([[0, 1], [0, 0]]) > 0
    key, value, dout = rows[:, 1:] - 1, rows[:, :1], rows.mT.contiguous()
    with torch.autocast("cpu", enabled=False):
        scores = (0.5 * rows @ key.mT).masked_fill(hidden, -float("inf"))
        weights = scores.softmax(-1)
        out, lse = weights @ value, scores.logsumexp(-1)
        try:
            found = attend(dout, rows, key, value, out, lse, 0.0, True, scale=0.5)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            return None
        dscores = 0.5 * weights * (dout @ value.mT - (dout * out).sum(-1, keepdim=True))
        exact = dscores @ key, (dscores.mT @ rows).sum(1, keepdim=True), (weights.mT @ dout).sum(1, keepdim=True)
        right = all(g.shape == e.shape and torch.allclose(g, e, atol=1e-6) for g, e in zip(found, exact, strict=True))
    return attend if right else None


def overlap(*tensors: Tensor) -> bool:
    """Whether rows of one begin inside of others, as those of `x.unfold(...)`: torch's own kernels lay results out as
    operands are, and are wrong for such ones. Rows that are one and the same, as of `x.expand(...)`, are no harm."""
    for tensor in tensors:
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
