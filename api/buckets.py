"""Distances in buckets, written in the public language: exact where keys are near, coarser with distance."""

from __future__ import annotations

from math import ceil, log2

from .ir import functions
from .ir.errors import WeftError, shown
from .ir.expr import Expr, Operand, expression

__all__ = ["bucket"]
_SURE = 1e-4  # by how much a logarithm in float32 must miss the next bucket


def bucket(distance: Operand, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Expr:
    """The bucket of a distance, an int from 0 to buckets - 1, as T5 has it (arXiv 1910.10683).

    distance: an int expression, the position of the key less that of the query, `kv_pos - q_pos`. Half of the buckets
    hold one distance each; the others grow with its logarithm up to max_distance, and the last one has all beyond.
    bidirectional: keys behind a query (distance above 0) have the upper half of the buckets, those before it the lower;
    otherwise keys behind a query share bucket 0 with the query's own position.

    The same bucket comes out wherever it is computed: no logarithm lies so near the next one that float32 could miss
    it, or there is none. Raises WeftError for numbers that are no such buckets.

    >>> from weft import kv_pos, q_pos
    >>> str(bucket(kv_pos - q_pos, buckets=4, max_distance=8))[:39]
    'where(kv_pos - q_pos > 0, 2, 0) + where'
    """
    away = expression(distance)
    if away.dtype != "int":
        raise WeftError(f"bucket: expected an int distance such as kv_pos - q_pos, got {away.dtype} `{away}`")
    for name, value in (("buckets", buckets), ("max_distance", max_distance)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise WeftError(f"bucket: expected {name} to be an int, got {shown(value)}")
    if not isinstance(bidirectional, bool):
        raise WeftError(f"bucket: expected bidirectional to be True or False, got {shown(bidirectional)}")
    own = buckets // 2 if bidirectional else buckets
    if own < 2 or buckets % (2 if bidirectional else 1):
        least = "an even number of at least 4" if bidirectional else "at least 2"
        raise WeftError(f"bucket: expected buckets to be {least}, got {buckets}")
    exact = own // 2
    if not exact < max_distance < 2**30:
        raise WeftError(
            f"bucket: expected max_distance above {exact}, the distances in buckets of one, got {max_distance}"
        )
    if not bidirectional:
        return _of_one_side(functions.maximum(0, -away), own, exact, max_distance)
    side = functions.where(away > 0, own, 0)
    return side + _of_one_side(functions.abs(away), own, exact, max_distance)


def _of_one_side(n: Expr, buckets: int, exact: int, max_distance: int) -> Expr:
    """The bucket of a distance n of 0 or more."""
    scale = (buckets - exact) / log2(max_distance / exact)
    firsts = [
        _first(step / scale, exact) for step in range(1, buckets - exact)
    ]  # of each bucket after the first of them
    gaps = [step - log2((n - 1) / exact) * scale for step, n in enumerate(firsts, 1)]  # of the last one before each
    shift = round(min([1.0, *gaps]) / 2, 6)
    far = functions.log2(n / exact) * scale + shift
    if shift >= _SURE:
        coarse = exact + functions.floor(far)
    else:  # so fine that buckets are counted
        coarse = expression(exact)
        for first in firsts:
            coarse = coarse + functions.where(n >= first, 1, 0)
    return functions.where(n < exact, n, functions.minimum(coarse, buckets - 1))


def _first(power: float, exact: int) -> int:
    """The least n with n >= exact * 2**power, where rounding does not count."""
    n = exact * 2.0**power
    return round(n) if abs(n - round(n)) < 1e-9 * n else ceil(n)
