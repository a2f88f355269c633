"""From which distance on nothing changes, for plans: what kernels find on the device is worked out here on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.analysis.values.distances import DISTANCE
from ..compiler.planning.by_distance import levels_in, tables_in, watched
from ..compiler.planning.plan import CodePlan
from ..ir.expr import Expr
from ..ir.reference import evaluate
from ..ir.walk import scalars, symbols, tensors
from . import parts

Ends = tuple[int, int]  # pairs are level from the first of these distances on, and up to the second


def watched_in(facts: Facts, code: CodePlan | None, options: Mapping[str, Any]) -> tuple[Expr, ...]:
    """The expressions that tell where pairs of a backward are level; () where none are, or an operand is missing."""
    levels = levels_in(code, facts) if code is not None else None
    if code is None or levels is None:
        return ()
    found = watched(levels, tables_in(code, facts))
    needed = {scalar.name for each in found for scalar in scalars(each)}
    needed |= {tensor.name for each in found for tensor in tensors(each)}
    return found if all(options.get(name) is not None for name in needed) else ()


def differ_by(found: tuple[Expr, ...]) -> frozenset[str]:
    return frozenset().union(*(symbols(each) for each in found))


def ends_of(
    found: tuple[Expr, ...], part: parts.Part, head_dim: int, options: Mapping[str, Any]
) -> Callable[[Mapping[str, int]], Ends | None] | None:
    """The ends of a head, by batch, head, kv_head and group, of sequences of one kind."""
    if not found or isinstance(part.q_offset, Tensor):
        return None
    sizes = part.sizes
    offset = sizes.kv_len - sizes.q_len if part.q_offset is None else part.q_offset
    least = offset - sizes.kv_len + 1
    device = torch.device("cpu")
    distance = torch.arange(least, offset + sizes.q_len, device=device)
    own = {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in options.items()}
    own |= {"q_len": sizes.q_len, "kv_len": sizes.kv_len, "head_dim": head_dim, DISTANCE: distance}

    def ends(head: Mapping[str, int]) -> Ends:
        values = [evaluate(each, {**own, **head}, torch.float64, device).expand_as(distance) for each in found]
        before = torch.stack([value != value[-1] for value in values]).any(0).nonzero()
        behind = torch.stack([value != value[0] for value in values]).any(0).nonzero()
        distant_from = least + (int(before[-1]) + 1 if len(before) else 0)
        return distant_from, least + (int(behind[0]) if len(behind) else len(distance)) - 1

    return ends
