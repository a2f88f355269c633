"""Which parts of a score a call reads from tables by distance, and the kernel that makes these tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..analysis.distances import ByDistance, parts_by_distance
from ..analysis.facts import Facts
from .kernels import DISTANCE_TABLES, Algorithm, Kernel, Sizes, none
from .plan import CodePlan
from .signature import PACKED, Signature


def tables_of(facts: Facts, algorithm: Algorithm, signature: Signature) -> tuple[ByDistance, ...]:
    """The parts of the score, and in a backward of its derivatives, that kernels for GPUs read by distance.

    None where few queries would read little of a table, nor where positions differ from row to row in a way that the
    host does not know. In sequences of their own lengths a table serves all of them.
    """
    if algorithm != "flash" or signature.few or signature.offset == "per_row" or not facts.score_by_distance:
        return ()
    found = facts.score_by_distance
    if signature.direction == "backward":
        gradients = facts.operand_gradients(signature.wanted)
        derivatives = [g.derivative for g in gradients if g.kind != "sink"]
        known = {part.part.text for part in found}
        found += tuple(p for p in parts_by_distance(derivatives) if p.part.text not in known)
    if signature.sequences == "dense":
        return found
    return tuple(p for p in found if not p.by_length and not (p.by_batch and signature.sequences in PACKED))


def tables_in(code: CodePlan, facts: Facts) -> tuple[ByDistance, ...]:
    """Those that the kernels of a plan read."""
    return tables_of(facts, code.schedule.algorithm, code.signature) if code.has(DISTANCE_TABLES) else ()


def with_tables_made(kernels: Sequence[Kernel], tables: Sequence[ByDistance]) -> list[Kernel]:
    """The kernels, and before them the one that makes their tables."""
    if not tables:
        return list(kernels)
    by_batch, by_head = any(t.by_batch for t in tables), any(t.by_head for t in tables)
    return [_tables_kernel(kernels[0], len(tables), by_batch, by_head), *kernels]


@lru_cache(maxsize=64)
def _tables_kernel(before: Kernel, number: int, by_batch: bool, by_head: bool) -> Kernel:
    def tables(x: Sizes) -> float:
        return (x.B if by_batch else 1) * (x.Hq if by_head or by_batch else 1)

    def programs(x: Sizes) -> float:
        return tables(x) * (x.L + x.T) / x.bkv

    def written(x: Sizes) -> float:
        return 4 * number * tables(x) * (x.L + x.T)

    return Kernel(
        DISTANCE_TABLES, before.direction, before.slot, "kv", "its distances", programs, none, none, written, none,
        none, before.again,
    )  # fmt: skip
