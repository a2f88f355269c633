"""`ShardPlan`: which rank owns which rows, which keys it needs from whom, and what that is predicted to take."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ..compiler.planning.freed import is_row_sum
from ..compiler.planning.machines import hardware
from ..compiler.planning.machines.hardware import Hardware
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.errors import WeftError
from ..ir.expr import TensorOperand
from ..ir.philox import TOGETHER
from ..runtime.run.variant import variant_of
from . import rings, rows
from .asked import (
    AUTO,
    BALANCES,
    HEADS,
    STRATEGIES,
    Balance,
    Links,
    Strategy,
    check_asked,
    check_known,
    not_by_heads,
    own_operands,
    starts_of,
)
from .described import lines
from .placed import positions_divided_by
from .rows import Deal, Run, Runs, check_rank, closed, common, count, joined, without
from .seen import PackedSight, Sight

_CHUNKS = 8  # of a rank, where chunks are dealt by visible pairs
# Shares of what long matrix products reach that attention kernels reach, and passes of a backward for each of a forward
# (docs/performance.md has the rows).
_FORWARD, _BACKWARD, _PRODUCTS = 0.8, 0.65, 2.5
_NEAR = 1.03  # times as long as the fastest: plans that are as good
_ONE_MORE = 150e-6  # seconds that one more call takes: its last tiles leave most of the device idle
_LITTLE_KEPT = 0.25  # of query and output, and their gradients: memory that keys of others may take until the backward
_LONG_TO_BRING = 0.02  # of products: time that bringing keys again may take before they are kept
_MOST_LOOKED_AT = 4  # plans that are kept with the tensors that they stand on
_ONE_CALL = 30e-6  # of that, but for the tiles: kernels that find tiles, or begin and end a backward
_TILE = 128  # queries of a forward, keys of a backward
_JOINED = 3, 10  # elements moved for one of out: results; gradients of a query, and what each backward begins with
_MEETING = 100e-6  # seconds of an exchange beside its bytes: 32 MB took 210 us, and 256 MB 930


class Task(NamedTuple):
    """Neighbouring queries of a rank, and the keys that they may see. Rows are those of the whole sequence.

    Keys between two runs are among them where they travel in less time than one more call takes.
    """

    queries: Run
    keys: Runs


@dataclass(frozen=True)
class Predicted:
    """Of the slowest rank, seconds; bytes that the busiest rank receives."""

    forward: float
    backward: float
    alone: float  # forward and backward of one device that has all
    bytes_in_host: int
    bytes_between: int
    bound: str  # "products", "links of a host", "links between hosts"

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def gain(self) -> float:
        """Times as fast as one device; 1 where nothing is seen."""
        return self.alone / self.seconds if self.seconds else 1.0


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """How a call is divided over ranks. It is data: nothing is sent while it is made, and no process group is needed.

    Rows of a tensor that a rank holds are those that it owns, in the order of their positions (`queries.rows(rank)`).
    """

    attention: Attention
    sizes: Shape  # of the whole call
    q_offset: int  # position of query row 0
    ranks: int
    strategy: Strategy
    balance: Balance
    queries: Deal
    keys: Deal
    tasks: tuple[tuple[Task, ...], ...]  # of each rank
    pairs: tuple[int, ...]  # that the queries of each rank see, of a head of a batch row
    hardware: Hardware
    links: Links
    sight: Sight | PackedSight = field(repr=False)
    starts: tuple[int, ...] | None = None  # the first row of each packed sequence, and the end of the last
    inner: int = 1  # neighbouring ranks that lie along the inner dimension of a mesh, where it has two
    group: int = 0  # query heads of a key head, in a plan of some heads of a call, whose numbers count from a first one
    looked_at: Mapping[str, Any] = field(default_factory=dict)  # operands whose values the plan stands on
    versions: Mapping[str, int] = field(default_factory=dict)  # of those that are tensors, when they were looked at
    thought_of: Callable[[], tuple[tuple[str, float, float], ...]] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What it is made of: what was worked out since is worked out again, in another process too."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def others(self) -> tuple[tuple[str, float, float], ...]:
        """Other strategies that were thought of: name, seconds, times as fast as one device."""
        return () if self.thought_of is None else self.thought_of()

    @property
    def columns(self) -> int:
        """Of a row of keys, that travel: of all key heads and values, or of a latent cache."""
        return _columns(self.attention, self.sizes)

    @property
    def longest(self) -> int:
        """Rows of the longest packed sequence."""
        assert self.starts is not None
        return max((b - a for a, b in pairwise(self.starts)), default=0)

    @cached_property
    def undropped(self) -> ShardPlan:
        """The same of the variant without dropout."""
        return replace(self, attention=self.attention.replace(dropout=0.0))

    @property
    def divides_both(self) -> bool:
        """Whether neighbours divide heads, and keys of the same heads travel between others."""
        return self.strategy.startswith(HEADS)

    @property
    def shares(self) -> int:
        """Neighbouring ranks that divide heads among themselves, and have the rows of all of them meanwhile."""
        return self.ranks if self.strategy == "heads" else self.inner if self.divides_both else 1

    @cached_property
    def of_some_heads(self) -> ShardPlan:
        """Of strategies of two dimensions: what ranks that have the same heads do, once they have the rows of all their
        neighbours."""
        n, sizes = self.shares, self.sizes
        queries, keys = self.queries.of_neighbours(n), self.keys.of_neighbours(n)
        strategy: Any = self.strategy.removeprefix(HEADS)
        some = replace(sizes, heads=sizes.heads // n, kv_heads=max(1, sizes.kv_heads // n))
        links = replace(self.links, per_host=max(1, self.links.per_host // n))
        return replace(
            self, strategy=strategy, ranks=queries.ranks, inner=1, group=sizes.heads // sizes.kv_heads,
            sizes=some, queries=queries, keys=keys, thought_of=None, links=links,
            tasks=_tasks(queries, self.sight, _gap(self.attention, some, queries.ranks, links)),
            pairs=tuple(sum(self.pairs[r : r + n]) for r in range(0, self.ranks, n)),
        )  # fmt: skip

    @cached_property
    def told(self) -> str:
        """The plan in a line, for ranks to compare."""
        sizes, made_of = self.sizes, [self.sizes, self.q_offset, self.ranks, self.strategy, self.queries, self.keys]
        made_of += [self.starts, self.sight.told]
        if self.divides_both:
            made_of += [self.shares, self.of_some_heads.told]
        else:
            made_of += [self.steps(0), self.overlaps, self.keeps, self.tasks]
        digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]
        return f"{self.strategy}, {self.balance}, {sizes.q_len} queries, {sizes.kv_len} keys ({digest})"

    def needed(self, rank: int) -> Runs:
        """Keys that the queries of a rank may see; all keys where they are gathered. Raises WeftError for what is no
        rank."""
        check_rank(rank, self.ranks)
        if self.strategy == "gather":
            return joined([(0, self.sizes.kv_len)])
        return self._needed[rank]

    @cached_property
    def _needed(self) -> list[Runs]:
        return [joined(run for task in tasks for run in task.keys) for tasks in self.tasks]

    def received(self, rank: int, source: int) -> Runs:
        """Keys that a rank has from another one."""
        return common(self.needed(rank), self.keys.rows(source))

    @cached_property
    def overlaps(self) -> bool:
        """Whether all of a rank's own keys are computed while others travel. Two results of each row are then joined,
        which takes a pass through memory; else those alone that queries see no others beside."""
        if self.strategy in ("ring", "gather") or self.ranks == 1:
            return self.strategy == "ring"
        if _has_row_sums(self.attention):  # which are more exact where a call has all keys of its queries
            return False
        if self.starts is None and self.keys.chunk % positions_divided_by(self.attention):  # blocks would be cut
            return False
        apart, together = (max(sum(self._times(rank, way)) for rank in range(self.ranks)) for way in (True, False))
        return apart < together

    @cached_property
    def keeps(self) -> bool:
        """Whether the backward has the keys that the forward had: no more came from others than a rank has itself, and
        they take little memory beside queries, or long to come again beside products."""
        others = max(count(without(self.needed(r), self.keys.rows(r))) for r in range(self.ranks))
        if not others or self.strategy == "ring" or others > -(-self.sizes.kv_len // self.ranks):
            return not others
        sizes, busiest = self.sizes, max(range(self.ranks), key=self._travel)
        # query and output, and their gradients, of a rank
        held = 2 * sizes.batch * sizes.heads * (sizes.head_dim + sizes.value_dim) * sizes.q_len * sizes.element_bytes
        products = self.pairs[busiest] * sum(self._seconds_of_pair)
        is_small = others * self._of_row <= _LITTLE_KEPT * held / self.ranks
        return is_small or self._travel(busiest) > _LONG_TO_BRING * products

    @cached_property
    def _of_row(self) -> int:
        """Bytes of a row of keys and values, or of a latent cache."""
        return self.sizes.batch * self.columns * self.sizes.element_bytes

    @cached_property
    def _seconds_of_pair(self) -> tuple[float, float]:
        return _seconds_of_a_pair(self.sizes, self.hardware)

    def _joining(self, rank: int) -> tuple[float, float]:
        """Seconds that it takes, both ways, to compute other keys in calls of their own, and to join the results."""
        times = sum(self._sources(rank)) if self.strategy == "ring" else 1  # once for each rank that has some of them
        sizes, besides = self.sizes, self._seen(self._apart(rank)[1])
        rows, keys = sum(count((t.queries,)) for t in besides), sum(count(t.keys) for t in besides)
        heads = sizes.batch * sizes.heads
        seconds_of_row = sizes.element_bytes * heads * sizes.value_dim / self.hardware.hbm_bytes_per_second
        # the last tiles of a call leave half of the device idle: of queries over all keys, and the other way round
        idle = [_TILE * n * s * self.hardware.sms / (2 * heads) for n, s in zip((keys, rows), self._seconds_of_pair)]
        forward, backward = (
            times * (moved * seconds_of_row * rows + len(besides) * _ONE_CALL) + n for moved, n in zip(_JOINED, idle)
        )
        return forward, backward

    def steps(self, rank: int) -> list[tuple[int, ...]]:
        """The ranks whose keys are computed together, in order: in a ring one after the other, else its own before all
        others', or all at once."""
        others = [(rank - n) % self.ranks for n in range(1, self.ranks)]
        if self.strategy == "ring":
            return [(rank,), *((other,) for other in others)]
        return [(rank,), tuple(sorted(others))] if self._begins_with_own else [tuple(range(self.ranks))]

    def step_rows(self, rank: int, step: int) -> Runs:
        """Keys that a rank has at hand in a step."""
        if self._begins_with_own and self.strategy == "exchange":
            return joined(run for task in self._first(rank)[1] for run in task.keys) if step else self.keys.rows(rank)
        return joined(run for source in self.steps(rank)[step] for run in self.received(rank, source))

    def portions(self, rank: int) -> list[list[Task]]:
        """What a rank computes in each step: runs of queries, each with one run of keys."""
        return self._portions(rank)

    @cached_property
    def _portions(self) -> Callable[[int], list[list[Task]]]:
        def of(rank: int) -> list[list[Task]]:
            if self._begins_with_own and self.strategy == "exchange":
                return [self._seen(tasks) for tasks in self._first(rank)]
            found = []
            for step in range(len(self.steps(rank))):
                at_hand = self.step_rows(rank, step)
                pairs = ((task.queries, keys) for task in self.tasks[rank] for keys in common(task.keys, at_hand))
                found.append(self._seen(Task(queries, (keys,)) for queries, keys in pairs))
            return found

        return cache(of)

    def _seen(self, tasks: Iterable[Task]) -> list[Task]:
        """With the queries alone that may see the keys."""
        seen = (Task(self.sight.queries(task.keys[0], task.queries), task.keys) for task in tasks)
        return [task for task in seen if task.queries[0] < task.queries[1]]

    @cached_property
    def _begins_with_own(self) -> bool:
        """Whether ranks have something to compute while keys of others travel."""
        if self.strategy != "exchange":
            return self.overlaps
        return self.overlaps or (self.ranks > 1 and any(self._first(rank)[0] for rank in range(self.ranks)))

    @cached_property
    def _first(self) -> Callable[[int], tuple[list[Task], list[Task]]]:
        """A rank's tasks that are computed while keys of others travel, and those that are computed then."""
        return self._apart if self.overlaps else self._alone

    @cached_property
    def _alone(self) -> Callable[[int], tuple[list[Task], list[Task]]]:
        """A rank's tasks with its own keys alone, and others."""

        def of(rank: int) -> tuple[list[Task], list[Task]]:
            own, found = self.keys.rows(rank), (list[Task](), list[Task]())
            for queries, runs in self.tasks[rank]:
                for run in runs:
                    found[common((run,), own) != (run,)].append(Task(queries, (run,)))
            return found

        return cache(of)

    @cached_property
    def _apart(self) -> Callable[[int], tuple[list[Task], list[Task]]]:
        """A rank's tasks with a run of its own keys, and those with what lies beside that run, of itself and others."""

        def of(rank: int) -> tuple[list[Task], list[Task]]:
            own, first, then = self.keys.rows(rank), list[Task](), list[Task]()
            for queries, runs in self.tasks[rank]:
                for run in runs:
                    begin, end = max(common((run,), own), key=lambda r: r[1] - r[0], default=(run[1], run[1]))
                    first += [Task(queries, ((begin, end),))] if begin < end else []
                    beside = (run[0], begin), (end, run[1])
                    then += [Task(queries, (side,)) for side in beside if side[0] < side[1]]
            return first, then

        return cache(of)

    @cached_property
    def predicted(self) -> Predicted:
        """By a simple model: products at the rate that attention kernels reach, rows at that of links, both at once
        where a step computes while others' keys, or their gradients, travel."""
        seconds, alone = self._seconds_of_pair, sum(self.pairs) * sum(self._seconds_of_pair)
        if self.strategy == "heads":
            return self._predicted_of_heads(seconds, alone)
        if self.divides_both:
            return self._predicted_of_both(alone)
        slowest, busiest, bound = (0.0, 0.0), (0, 0), "products"
        for rank in range(self.ranks):
            inside, beyond = (n * self._of_row for n in self.received_rows(rank))
            times = self._times(rank, self.overlaps)
            if sum(times) > sum(slowest):
                waits = any(time > 2 * self.pairs[rank] * of_pair for time, of_pair in zip(times, seconds))
                of_others = beyond / self.links.between > self._travel(rank) / 2
                slowest, bound = times, rings.links(of_others) if waits else "products"
            busiest = max(busiest, (inside, beyond), key=sum)
        return Predicted(*slowest, alone, *busiest, bound)

    def _times(self, rank: int, overlaps: bool) -> tuple[float, float]:
        """Seconds of a rank, both ways. overlaps: as `self.overlaps`."""
        forward, backward = (self.pairs[rank] * of_pair for of_pair in self._seconds_of_pair)
        calls = max(0, sum(len(task.keys) for task in self.tasks[rank]) - 1) * _ONE_MORE
        of_forward, of_backward = (calls + n for n in (self._joining(rank) if overlaps else (0.0, 0.0)))
        if self.strategy == "ring":
            share, (near, far) = self._own_share(rank), self._sources(rank)
            of_near, of_far = (t / n + _MEETING if n else 0.0 for t, n in zip(self._travels(rank), (near, far)))
            return (
                of_forward + rings.forward(near, far, of_near, of_far, share * forward, (1 - share) * forward),
                of_backward + rings.backward(near, far, of_near, of_far, share * backward, (1 - share) * backward),
            )
        travel, bandwidth = self._longest, self.hardware.hbm_bytes_per_second  # all ranks take part in each exchange
        gathering = 2 * self._of_row * count(self.needed(rank)) / bandwidth if self._travel(rank) else 0.0
        if overlaps:
            share, gathering = self._own_share(rank), 0.0
        else:
            share = self._share_alone(rank)
        brings = 0.0 if self.keeps else travel + gathering
        # a backward computes others' keys first, so that their gradients travel while it computes its own
        return (
            of_forward + gathering + max(share * forward, travel) + (1 - share) * forward,
            of_backward + brings + (1 - share) * backward + max(share * backward, travel),
        )

    def _share_alone(self, rank: int) -> float:
        """Of a rank's work, that of queries that see its own keys alone, if all pairs of a task were visible."""
        if self.strategy == "gather":
            return 0.0
        first, then = (sum(count((t.queries,)) * count(t.keys) for t in tasks) for tasks in self._alone(rank))
        return first / max(1, first + then)

    def _predicted_of_heads(self, seconds: tuple[float, float], alone: float) -> Predicted:
        inside, beyond, travel = self._dealing
        forward, backward = (sum(self.pairs) / self.ranks * s for s in seconds)
        bound = "products" if forward > travel else rings.links(beyond)
        return Predicted(forward + travel, backward + travel, alone, inside, beyond, bound)

    def _predicted_of_both(self, alone: float) -> Predicted:
        (inside, beyond, travel), found = self._dealing, self.of_some_heads.predicted
        bound = found.bound if found.bound != "products" or found.forward > travel else rings.links(beyond)
        near, far = inside + found.bytes_in_host, beyond + found.bytes_between
        return Predicted(found.forward + travel, found.backward + travel, alone, near, far, bound)

    @cached_property
    def _dealing(self) -> tuple[int, int, float]:
        """What a rank receives where its neighbours and it divide heads, one way: bytes from its host, bytes from
        other hosts, and seconds. A forward sends query, key, value and out in an exchange each, and a backward their
        gradients."""
        sizes, n = self.sizes, self.shares
        widths = sizes.head_dim + sizes.value_dim
        rows = sizes.heads * sizes.q_len + max(sizes.kv_heads, n) * sizes.kv_len
        moved = sizes.batch * rows * widths * sizes.element_bytes * (n - 1) // (n * self.ranks)
        inside = round(moved * (min(n, self.links.per_host) - 1) / max(1, n - 1))
        seconds = inside / self.links.in_host + (moved - inside) / self.links.between
        return inside, moved - inside, seconds + 4 * _MEETING

    def _travel(self, rank: int) -> float:
        """Seconds that the keys of a forward take to arrive, in one exchange."""
        seconds = sum(self._travels(rank))
        return seconds + _MEETING if seconds else 0.0

    @cached_property
    def _longest(self) -> float:
        return max(map(self._travel, range(self.ranks)))

    def _travels(self, rank: int) -> tuple[float, float]:
        """Of the bytes from its host, and of those from other hosts."""
        inside, beyond = self.received_rows(rank)
        return self._of_row * inside / self.links.in_host, self._of_row * beyond / self.links.between

    @cached_property
    def _sources(self) -> Callable[[int], tuple[int, int]]:
        """How many other ranks a rank has keys from: of its host, and of other hosts."""

        def of(rank: int) -> tuple[int, int]:
            missing, first = without(self.needed(rank), self.keys.rows(rank)), rank - rank % self.links.per_host
            owners = {owner for run in missing for owner in self.keys.owners_of(run)} - {rank}
            inside = sum(first <= owner < first + self.links.per_host for owner in owners)
            return inside, len(owners) - inside

        return cache(of)

    def received_rows(self, rank: int) -> tuple[int, int]:
        """Rows of keys from other ranks of its host, and from other hosts."""
        needed = self.needed(rank)
        own = count(common(needed, self.keys.rows(rank)))
        inside = count(common(needed, self._rows_of_host(rank // self.links.per_host))) - own
        return inside, count(needed) - own - inside

    @cached_property
    def _rows_of_host(self) -> Callable[[int], Runs]:
        """Keys of all ranks of a host."""

        def of(host: int) -> Runs:
            ranks = range(host * self.links.per_host, min(self.ranks, (host + 1) * self.links.per_host))
            return joined(run for rank in ranks for run in self.keys.rows(rank))

        return cache(of)

    def _own_share(self, rank: int) -> float:
        needed = count(self._needed[rank])
        return count(common(self._needed[rank], self.keys.rows(rank))) / needed if needed else 1.0

    def explain(self) -> str:
        """The plan for a person. All times are predicted."""
        return "\n".join(lines(self))


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


@lru_cache(maxsize=64)
def _has_row_sums(attention: Attention) -> bool:
    """Whether gradients of operands are sums over the keys of rows that rounding of the output would spoil."""
    names = frozenset(p.name for p in attention.canonical.parameters if isinstance(p, TensorOperand))
    return any(map(is_row_sum, variant_of(attention).facts.operand_gradients(names)))


def _seconds_of_a_pair(sizes: Shape, machine: Hardware) -> tuple[float, float]:
    """That products take for a pair of a head of a batch row, forward and backward, of all heads and batch rows."""
    flops = 2 * sizes.batch * sizes.heads * (sizes.head_dim + sizes.value_dim)
    rate = machine.matrix_flops(sizes.dtype)
    return flops / rate / _FORWARD, _PRODUCTS * flops / rate / _BACKWARD


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
        pairs, gap = self._pairs_of(queries), _gap(self.attention, self.sizes, self.ranks, self.links)
        versions = {n: version_of(v) for n, v in self.looked_at.items() if isinstance(v, Tensor)}
        return ShardPlan(
            self.attention, self.sizes, self.q_offset, self.ranks, "exchange", balance, queries,  # type: ignore[arg-type]
            keys, _tasks(queries, self.sight, gap), pairs, self.machine, self.links, self.sight, self.starts,
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
        return sum(_seconds_of_a_pair(self.sizes, self.machine))

    def _pairs(self, runs: Sequence[Run]) -> list[int]:
        """Of each of these."""
        if more := [run for run in dict.fromkeys(runs) if run not in self._counted]:
            self._counted.update(zip(more, self.sight.pairs_of(more)))
        return [self._counted[run] for run in runs]

    @cached_property
    def _counted(self) -> dict[Run, int]:
        return {}


def _columns(attention: Attention, sizes: Shape) -> int:
    """As `ShardPlan.columns`."""
    if attention.latent is not None:
        return attention.latent.rank + attention.latent.rope
    return sizes.kv_heads * (sizes.head_dim + sizes.value_dim)


def _gap(attention: Attention, sizes: Shape, ranks: int, links: Links) -> int:
    """Rows of keys that travel in the time that one more call takes."""
    bandwidth = links.in_host if ranks <= links.per_host else links.between
    return int(_ONE_MORE * bandwidth / (sizes.batch * _columns(attention, sizes) * sizes.element_bytes))


def _tasks(queries: Deal, sight: Sight | PackedSight, gap: int) -> tuple[tuple[Task, ...], ...]:
    """Of each rank. gap: rows between two runs of keys that are taken with them."""
    own = [queries.rows(rank) for rank in range(queries.ranks)]
    seen = dict(zip(every := [run for of_rank in own for run in of_rank], sight.keys_of(every)))
    return tuple(tuple(Task(run, closed(seen[run], gap)) for run in of_rank) for of_rank in own)


def _of_strategy(dealt: Callable[[], ShardPlan], strategy: str) -> ShardPlan:
    return replace(dealt(), strategy=strategy)  # type: ignore[arg-type]


def version_of(tensor: Tensor) -> int:
    """How often it was written to; 0 of tensors of inference, of which nobody knows."""
    return 0 if tensor.is_inference() else tensor._version


def stands_on(plan: ShardPlan, name: str, given: Any) -> bool:
    """Whether an operand is what a plan was made for, as far as a host can tell without waiting for a device: the same
    memory, to which nothing was written since."""
    known = plan.looked_at[name]
    if isinstance(known, Tensor) and isinstance(given, Tensor):
        is_same = known is given or (known.data_ptr() == given.data_ptr() and known.shape == given.shape)
        return is_same and version_of(given) == plan.versions[name]
    return type(known) is type(given) and bool(known == given)
