"""Which plan is made: what a caller asks for, the plans that come into question, and the one that is fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from torch import Tensor

from ..compiler.planning.machines import hardware
from ..compiler.planning.machines.hardware import Hardware
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.errors import WeftError
from ..ir.philox import TOGETHER
from . import rows
from .asked import (
    AUTO,
    BALANCES,
    HEADS,
    STRATEGIES,
    Links,
    check_asked,
    check_known,
    not_by_heads,
    own_operands,
    starts_of,
)
from .rows import Deal, Run, Runs
from .seen import PackedSight, Sight
from .shardplan import ShardPlan, gap_of, seconds_of_a_pair, stands_on, tasks_of, version_of

_CHUNKS = 8  # of a rank, where chunks are dealt by visible pairs
_NEAR = 1.03  # times as long as the fastest: plans that are as good
_MOST_LOOKED_AT = 4  # plans that are kept with the tensors that they stand on


def plan(
    attention: Attention, *, ranks: int | tuple[int, int], batch: int = 1, heads: int, kv_heads: int | None = None,
    length: int, kv_length: int | None = None, head_dim: int, value_dim: int | None = None, dtype: str = "bf16",
    q_offset: int | None = None, cu_seqlens: Sequence[int] | Tensor | None = None, strategy: str = AUTO,
    balance: str = AUTO, device: str | None = None, links: Links | None = None, **operands: Any,
) -> ShardPlan:  # fmt: skip
    """A plan for any number of ranks, of machines that need not be there.

    ranks: how many. Two numbers, such as (4, 8), where they lie along an outer and an inner dimension of a mesh: those
    of the inner one may then divide heads. length, kv_length: of the whole sequence. cu_seqlens: of sequences packed
    into one batch row, the first row of each, and the end of the last; positions, lengths and `batch` are then those of
    a sequence. head_dim, value_dim: of latent attention the widths of its queries, nope + rope, or rank + rope where
    they are latent already, and of its output. operands: numbers that the mask reads, and the tensors whose values
    decide which keys are seen, such as document ids; a plan that stands on values holds for these alone. strategy:
    "gather", "ring", "exchange", "heads", of two dimensions also "heads+ring" and "heads+exchange"; balance:
    "contiguous", "zigzag", "striped", "pairs". "auto" takes what is predicted to be fastest. device: a name such as
    "h100"; this machine where not given.

    Raises WeftError for sizes and names that are none.
    """
    if not isinstance(attention, Attention):
        raise WeftError(f"plan: expected a weft.Attention, got {type(attention).__name__}")
    is_latent = attention.latent is not None
    keys = length if kv_length is None else kv_length
    sizes = Shape(batch, heads, (1 if is_latent else heads) if kv_heads is None else kv_heads, length, keys, head_dim,
                  head_dim if value_dim is None else value_dim, dtype)  # fmt: skip
    mesh = ranks if isinstance(ranks, tuple) else (ranks,)
    check_asked(mesh, sizes, strategy, balance, is_latent, q_offset, links)
    operands = own_operands(attention, operands)
    starts = None if cu_seqlens is None else starts_of(cu_seqlens, sizes, q_offset)
    offset = keys - length if q_offset is None else q_offset
    machine = hardware.this_machine() if device is None else hardware.by_name(device)
    asked = attention, sizes, offset, mesh, machine, links or Links(), starts, strategy, balance
    if all(isinstance(v, (int, float)) for v in operands.values()):
        return _kept(*asked, tuple((n, type(v), v) for n, v in sorted(operands.items())))
    if all(isinstance(v, (int, float, Tensor)) for v in operands.values()):
        return _of_values(asked, operands)
    return _planned(*asked, operands)


@lru_cache(maxsize=128)
def _kept(*asked: Any) -> ShardPlan:
    """The plan that was made for the same numbers before, with what is known of it."""
    *of_call, numbers = asked
    make: Callable[..., ShardPlan] = _planned
    return make(*of_call, {n: v for n, _, v in numbers})


_looked_at: dict[Hashable, ShardPlan] = {}  # by what was asked, the last ones


def _of_values(asked: tuple[Any, ...], operands: Mapping[str, Any]) -> ShardPlan:
    """The plan that was made for the same tensors before, to which nothing was written since."""
    tensors = {n: v for n, v in operands.items() if isinstance(v, Tensor)}
    make: Callable[..., ShardPlan] = _planned
    if any(t.is_inference() for t in tensors.values()):  # nobody knows what is written to them
        return make(*asked, operands)
    numbers = tuple((n, type(v), v) for n, v in sorted(operands.items()) if n not in tensors)
    where = tuple((n, t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for n, t in sorted(tensors.items()))
    found = _looked_at.get(key := (asked, numbers, where))
    if found is None or not all(n in found.looked_at and stands_on(found, n, t) for n, t in tensors.items()):
        found = make(*asked, operands)
        while len(_looked_at) >= _MOST_LOOKED_AT:
            _looked_at.pop(next(iter(_looked_at)), None)
        _looked_at[key] = found
    return found


def _planned(
    attention: Attention, sizes: Shape, offset: int, mesh: tuple[int, ...], machine: Hardware, links: Links,
    starts: tuple[int, ...] | None, strategy: str, balance: str, operands: Mapping[str, Any],
) -> ShardPlan:  # fmt: skip
    sight: Sight | PackedSight
    if starts is None:
        sight = Sight(attention, sizes, offset, operands)
    else:
        sight = PackedSight(attention, sizes, starts, operands)
    looked_at = {n: operands[n] for n in sorted(sight.stands_on)}
    check_known(attention, looked_at)
    inner = mesh[1] if len(mesh) == 2 else 1
    maker = _Maker(attention, sizes, offset, math.prod(mesh), inner, machine, links, sight, looked_at, starts)
    return maker.best(strategy, balance)


def plan_of_sizes(
    attention: Attention,
    sizes: Shape,
    ranks: int | tuple[int, int],
    per_host: int,
    device: str | None,
    operands: Mapping[str, Any],
) -> ShardPlan:
    """The same for the sizes of a call, of hosts with so many devices. Raises WeftError for FP8."""
    if sizes.q_dtype or sizes.kv_dtype:
        raise WeftError(f"{attention.name}: mesh: expected operands of bf16, fp16 or fp32, as FP8 is of one device")
    return plan(
        attention, ranks=ranks, batch=sizes.batch, heads=sizes.heads, kv_heads=sizes.kv_heads, length=sizes.q_len,
        kv_length=sizes.kv_len, head_dim=sizes.head_dim, value_dim=sizes.value_dim, dtype=sizes.dtype, device=device,
        links=Links(per_host=per_host), **operands,
    )  # fmt: skip


@dataclass(frozen=True)
class _Maker:
    """Makes plans that differ in strategy and balance."""

    attention: Attention
    sizes: Shape
    q_offset: int
    ranks: int
    inner: int  # of them, along the inner dimension of a mesh
    machine: Hardware
    links: Links
    sight: Sight | PackedSight
    looked_at: Mapping[str, Any]
    starts: tuple[int, ...] | None

    def best(self, strategy: str, balance: str) -> ShardPlan:
        """The one that is predicted to be fastest; of those within 3 %, that with the simplest strategy."""
        tried, least, candidates = list[ShardPlan](), math.inf, self._candidates(strategy, balance)
        if len(candidates) == 1:
            return candidates[0][1]()
        for pairs, make in candidates:
            if pairs * self._seconds > _NEAR * least:
                break  # its products alone take longer
            tried.append(make())
            least = min(least, tried[-1].predicted.seconds)
        near = [p for p in tried if p.predicted.seconds <= _NEAR * least]
        found = min(near, key=lambda p: (STRATEGIES.index(p.strategy), p.predicted.seconds))
        return replace(found, thought_of=partial(self._others, found, strategy, balance))

    def _others(self, found: ShardPlan, strategy: str, balance: str) -> tuple[tuple[str, float, float], ...]:
        """Of each other strategy the fastest plan: its name, seconds, and times as fast as one device."""
        fastest: dict[str, ShardPlan] = {}
        for _, make in self._candidates(strategy, balance):
            if (p := make()).strategy != found.strategy:
                known = fastest.setdefault(p.strategy, p)
                fastest[p.strategy] = min(known, p, key=lambda plan: plan.predicted.seconds)
        return tuple((f"{p.strategy}, {p.balance}", p.predicted.seconds, p.predicted.gain) for p in fastest.values())

    def _candidates(self, strategy: str, balance: str) -> list[tuple[float, Callable[[], ShardPlan]]]:
        """Plans to choose from, with the visible pairs of the rank that has most: those with the fewest first."""
        found: list[tuple[float, Callable[[], ShardPlan]]] = []
        names = BALANCES if balance == AUTO else (balance,)
        self._pairs([run for name in names for run in self._chunks(name)])  # of all at once
        for name in names:
            dealt, pairs = cache(partial(self._dealt, name)), self._pairs_of(self._deal(name))
            for kind in STRATEGIES if strategy == AUTO else (strategy,):
                if kind == "gather" and strategy == AUTO:  # exchange never sends more
                    continue
                if kind == "heads" and (name != names[0] or not self._by_heads(self.ranks)):
                    continue  # rows lie in order again: one balance is as good as another
                if (
                    kind.startswith(HEADS)
                    and strategy == AUTO
                    and not (1 < self.inner < self.ranks and self._by_heads(self.inner))
                ):
                    continue  # of one dimension it is another strategy
                shares = self.ranks if kind == "heads" else self.inner if kind.startswith(HEADS) else 1
                most = max(sum(pairs[r : r + shares]) for r in range(0, self.ranks, shares)) / shares
                found.append((most, partial(_of_strategy, dealt, kind)))
        return sorted(found, key=lambda candidate: candidate[0])

    def _dealt(self, balance: str) -> ShardPlan:
        queries = self._deal(balance)
        alike = self.sizes.q_len == self.sizes.kv_len
        keys = queries if alike else rows.contiguous(self.sizes.kv_len, self.ranks)
        pairs, gap = self._pairs_of(queries), gap_of(self.attention, self.sizes, self.ranks, self.links)
        versions = {n: version_of(v) for n, v in self.looked_at.items() if isinstance(v, Tensor)}
        return ShardPlan(
            self.attention, self.sizes, self.q_offset, self.ranks, "exchange", balance, queries,  # type: ignore[arg-type]
            keys, tasks_of(queries, self.sight, gap), pairs, self.machine, self.links, self.sight, self.starts,
            self.inner, looked_at=self.looked_at, versions=versions,
        )  # fmt: skip

    def _by_heads(self, ranks: int) -> bool:
        return not_by_heads(self.sizes, ranks, self.attention.latent is not None) is None

    def _chunks(self, balance: str) -> Runs:
        """Of a deal by visible pairs: chunks as long as each other, apart from the last. Of others their own."""
        if balance != "pairs":
            return self._deal(balance).chunks
        length, ranks = self.sizes.q_len, self.ranks
        number = ranks * max(1, min(_CHUNKS, rows.MOST_CHUNKS // ranks, length // ranks))
        return Deal(length, rows.chunk_of(length, number, self._multiple), (0,) * number, ranks).chunks

    def _deal(self, balance: str) -> Deal:
        length, ranks = self.sizes.q_len, self.ranks
        if balance == "pairs":
            return rows.by_pairs(length, ranks, self._pairs(self._chunks(balance)), self._multiple)
        if balance == "contiguous":
            return rows.contiguous(length, ranks)
        return {"zigzag": rows.zigzag, "striped": rows.striped}[balance](length, ranks, self._multiple)

    @property
    def _multiple(self) -> int:
        """Of rows, where chunks begin: there share keys the draws of dropout."""
        return TOGETHER if self.attention.canonical.drops else 1

    def _pairs_of(self, deal: Deal) -> tuple[int, ...]:
        """Of each rank."""
        found = [0] * self.ranks
        for owner, pairs in zip(deal.owners, self._pairs(deal.chunks)):
            found[owner] += pairs
        return tuple(found)

    @cached_property
    def _seconds(self) -> float:
        return sum(seconds_of_a_pair(self.sizes, self.machine))

    def _pairs(self, runs: Sequence[Run]) -> list[int]:
        """Of each of these."""
        if more := [run for run in dict.fromkeys(runs) if run not in self._counted]:
            self._counted.update(zip(more, self.sight.pairs_of(more)))
        return [self._counted[run] for run in runs]

    @cached_property
    def _counted(self) -> dict[Run, int]:
        return {}


def _of_strategy(dealt: Callable[[], ShardPlan], strategy: str) -> ShardPlan:
    return replace(dealt(), strategy=strategy)  # type: ignore[arg-type]
