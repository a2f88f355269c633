"""A variant over every n-th key of a sequence, or over some of its heads: positions and heads are those of all."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeVar

from ..ir.attention import Attention
from ..ir.expr import Const, Expr, expression, scalar, symbol, tensor
from ..ir.walk import substitute
from .placed import names_beside, without_sink

Variant = TypeVar("Variant", bound=Attention)
_PLACES = ("score", "mask", "scale", "sink")


class Division(NamedTuple):
    """What a rank has of a call, as far as code depends on it."""

    ranks: int = 1  # that share the keys of a sequence: key row j of rank r has position ranks * j + r
    group: int = 0  # query heads of a key head, where heads count from a first one; 0: the rank has all heads
    sink: bool = True  # whether the sink of a row is counted here


@lru_cache(maxsize=256)
def interleaved(variant: Variant, division: Division) -> Variant:
    """The variant for the keys and heads of a rank.

    Positions, lengths and heads keep their meaning: kv_pos --> ranks * kv_pos + first_key. Bounds of causal masks and
    windows stay in closed form, so that tiles without a visible key are skipped as on one device. The result reads
    more operands, with the names of `names_beside`: `first_key` is the rank among those that share the sequence,
    `kv_len` the lengths of sequences, int32 [B], and `head` the number of the first head.
    """
    own, mapping = names_beside(variant), dict[str, Expr]()
    if division.ranks > 1:
        mapping["kv_pos"] = Const(division.ranks) * symbol("kv_pos") + scalar(own.first_key, int)
        mapping["kv_len"] = tensor(own.kv_len, 1, int)[symbol("batch")]
    if division.group:
        head = symbol("head") + scalar(own.head, int)
        mapping |= {"head": head, "kv_head": head // division.group, "group": Const(division.group)}
    changed = {n: substitute(expression(e), mapping) for n in _PLACES if (e := getattr(variant, n)) is not None}
    found = variant.replace(**changed) if mapping else variant
    return found if division.sink else without_sink(found)
