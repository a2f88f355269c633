"""`ShardPlan`: which rank owns which rows, which keys it needs from whom, and what that is predicted to take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ..compiler.planning.freed import is_row_sum
from ..compiler.planning.machines.hardware import Hardware
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.expr import TensorOperand
from ..runtime.run.variant import variant_of
from . import rings
from .asked import HEADS, Balance, Links, Strategy
from .described import lines
from .placed import positions_divided_by
from .rows import Deal, Run, Runs, check_rank, closed, common, count, joined, without
from .seen import PackedSight, Sight

# Shares of what long matrix products reach that attention kernels reach, and passes of a backward for each of a forward
# (docs/performance.md has the rows).
_FORWARD, _BACKWARD, _PRODUCTS = 0.8, 0.65, 2.5
_ONE_MORE = 150e-6  # seconds that one more call takes: its last tiles leave most of the device idle
_LITTLE_KEPT = 0.25  # of query and output, and their gradients: memory that keys of others may take until the backward
_LONG_TO_BRING = 0.02  # of products: time that bringing keys again may take before they are kept
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
            tasks=tasks_of(queries, self.sight, gap_of(self.attention, some, queries.ranks, links)),
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
        return seconds_of_a_pair(self.sizes, self.hardware)

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


@lru_cache(maxsize=64)
def _has_row_sums(attention: Attention) -> bool:
    """Whether gradients of operands are sums over the keys of rows that rounding of the output would spoil."""
    names = frozenset(p.name for p in attention.canonical.parameters if isinstance(p, TensorOperand))
    return any(map(is_row_sum, variant_of(attention).facts.operand_gradients(names)))


def seconds_of_a_pair(sizes: Shape, machine: Hardware) -> tuple[float, float]:
    """That products take for a pair of a head of a batch row, forward and backward, of all heads and batch rows."""
    flops = 2 * sizes.batch * sizes.heads * (sizes.head_dim + sizes.value_dim)
    rate = machine.matrix_flops(sizes.dtype)
    return flops / rate / _FORWARD, _PRODUCTS * flops / rate / _BACKWARD


def _columns(attention: Attention, sizes: Shape) -> int:
    """As `ShardPlan.columns`."""
    if attention.latent is not None:
        return attention.latent.rank + attention.latent.rope
    return sizes.kv_heads * (sizes.head_dim + sizes.value_dim)


def gap_of(attention: Attention, sizes: Shape, ranks: int, links: Links) -> int:
    """Rows of keys that travel in the time that one more call takes."""
    bandwidth = links.in_host if ranks <= links.per_host else links.between
    return int(_ONE_MORE * bandwidth / (sizes.batch * _columns(attention, sizes) * sizes.element_bytes))


def tasks_of(queries: Deal, sight: Sight | PackedSight, gap: int) -> tuple[tuple[Task, ...], ...]:
    """Of each rank. gap: rows between two runs of keys that are taken with them."""
    own = [queries.rows(rank) for rank in range(queries.ranks)]
    seen = dict(zip(every := [run for of_rank in own for run in of_rank], sight.keys_of(every)))
    return tuple(tuple(Task(run, closed(seen[run], gap)) for run in of_rank) for of_rank in own)


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
