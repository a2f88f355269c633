"""Which parts of a score a call reads from tables by distance, and the kernel that makes these tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...ir.expr import Const, Expr, Load
from ...ir.walk import loads, symbols
from ..analysis.tiles.facts import Facts
from ..analysis.tiles.results import OperandGradient
from ..analysis.values.distances import DISTANCE, ByDistance, levels_off, of_distance, parts_by_distance, replaced
from .kernel import Algorithm
from .plan import CodePlan
from .signature import Signature


def tables_of(facts: Facts, algorithm: Algorithm, signature: Signature) -> tuple[ByDistance, ...]:
    """The parts of the score, and in a backward of its derivatives, that kernels for GPUs read by distance.

    None where few queries would read little of a table, nor where positions differ from row to row in a way that the
    host does not know. In sequences of their own lengths a table serves all of them.
    """
    if algorithm != "flash" or signature.few_queries or signature.offset == "per_row" or not facts.score_by_distance:
        return ()
    found = facts.score_by_distance
    if signature.direction == "backward":
        gradients = facts.operand_gradients(signature.wanted)
        derivatives = [g.derivative for g in gradients if g.kind != "sink"]
        known = {part.part.text for part in found}
        found += tuple(p for p in parts_by_distance(derivatives) if p.part.text not in known)
    if not signature.sequences.ragged:
        return found
    return tuple(p for p in found if not p.by_length and not (p.by_batch and signature.sequences.rows.packed))


@dataclass(frozen=True)
class Levels:
    """What a backward looks at to know which tiles are level: those whose pairs all read alike, tables and operands.

    At both ends of the distances, where an index is clamped or falls into the last bucket, everything stays as it is:
    how far these ends reach in is measured where tables are made.
    """

    reads: tuple[Load, ...]  # with a gradient: a level tile's share is a plain sum, of flash_dquery
    indices: tuple[Expr, ...]  # theirs, those with a distance, over the symbol `distance`
    by_batch: bool
    by_head: bool
    # (c, rest) of a score that is c * qk + rest in a level tile: then these tiles have a loop of their own
    score: tuple[Expr, Expr] | None


def levels_of(facts: Facts, algorithm: Algorithm, signature: Signature) -> Levels | None:
    """None where nothing is known to end anywhere, or where no kernel would sum what level tiles have."""
    tables = tables_of(facts, algorithm, signature)
    if signature.direction == "forward" or not tables or "query" not in signature.wanted:
        return None
    kinds = [(load, kind) for load, kind in facts.gradient_kinds if load.tensor.name in signature.wanted]
    reads = tuple(load for load, kind in kinds if kind == "diagonal")
    values = [of_distance(index) for load in reads for index in load.index]
    if not reads or any(value is None for value in values):
        return None
    indices = tuple(value for value in values if value is not None and DISTANCE in symbols(value))
    if not all(map(levels_off, [*indices, *(table.value for table in tables)])):
        return None
    read = frozenset().union(*(symbols(value) for value in indices))
    by_batch, by_head = "batch" in read, bool(read & {"head", "kv_head"})
    ragged, packed = signature.sequences.ragged, signature.sequences.keys.packed
    if (ragged and read & {"q_len", "kv_len"}) or (packed and by_batch):
        return None
    by_batch, by_head = by_batch or any(t.by_batch for t in tables), by_head or any(t.by_head for t in tables)
    # listed tiles are in no order of distances; scores that lie near 0 have no statistics to do without
    has_loop = facts.tile_source != "lists" and facts.scores_lie_far
    return Levels(reads, indices, by_batch, by_head, facts.score_of_levels(tables) if has_loop else None)


def watched(levels: Levels, tables: Sequence[ByDistance]) -> tuple[Expr, ...]:
    """What tells where pairs are level, over the symbol `distance`, with nothing read but inside an index.

    Indices, and what tables do besides reading: entries are taken to be different numbers, whatever they are.
    """
    found = {index.text: index for index in levels.indices}
    for table in tables:
        entries = {load.text: load for load in loads(table.value)}
        for load in entries.values():
            found |= {index.text: index for index in load.index if DISTANCE in symbols(index)}
        named = enumerate(sorted(entries))
        some = {text: Const(3 + n if entries[text].dtype == "int" else 0.3 + n) for n, text in named}
        beside = replaced(table.value, some)
        found |= {beside.text: beside} if DISTANCE in symbols(beside) else {}
    return tuple(found.values())


def levels_in(code: CodePlan, facts: Facts) -> Levels | None:
    """Those of the kernels of a plan."""
    return levels_of(facts, code.schedule.algorithm, code.signature) if code.of_module("tables") else None


def tables_in(code: CodePlan, facts: Facts) -> tuple[ByDistance, ...]:
    """Those that the kernels of a plan read."""
    return tables_of(facts, code.schedule.algorithm, code.signature) if code.of_module("tables") else ()


def gradients_in(code: CodePlan, facts: Facts) -> tuple[OperandGradient, ...]:
    """The gradients of operands that a plan has kernels for."""
    return facts.operand_gradients(code.signature.wanted) if code.signature.direction == "backward" else ()


class Planned:
    """A plan of a variant, and what of its score and gradients follows from both: for what prints and what launches."""

    code: CodePlan
    facts: Facts

    @property
    def signature(self) -> Signature:
        return self.code.signature

    @property
    def is_backward(self) -> bool:
        return self.signature.direction == "backward"

    @cached_property
    def tables(self) -> tuple[ByDistance, ...]:
        return tables_in(self.code, self.facts)

    @cached_property
    def levels(self) -> Levels | None:
        return levels_in(self.code, self.facts)

    @cached_property
    def gradients(self) -> tuple[OperandGradient, ...]:
        return gradients_in(self.code, self.facts)
