"""The autograd function of a call whose keys travel between ranks: forward, and backward step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.errors import second_derivative
from ..runtime.call import Call, Choices
from ..runtime.options import Form
from ..runtime.run.variant import Variant
from .agreement import Agreed, Agreement, backwards, nothing
from .exchange import AtHand, Fetch, Return, Route, Tensors
from .latent import Keys, Projections
from .portions import (
    Given,
    Joined,
    OperandSums,
    Portion,
    Portions,
    Sum,
    given_at,
    gradients,
    known,
    run_in,
    sink_gradients,
    wide,
)
from .rows import Run, Runs
from .shardplan import ShardPlan


class Place(NamedTuple):
    """Where a process is in a call."""

    rank: int  # of those between which keys travel
    group: Any  # these
    every: Any  # all ranks of the call: gradients of operands are summed over them
    agreement: Agreement | None = None  # of all these, where they compare what they call


class State(NamedTuple):
    """What a call has besides tensors."""

    place: Place
    plan: ShardPlan
    numbers: dict[str, Any]
    choices: Choices
    names: tuple[str, ...]  # of tensor operands, and of uk and uv where caches are expanded
    n_keys: int  # tensors that keys are: key and value, or a latent cache
    form: Form | None  # of latent attention
    agreed: Agreed = nothing  # is asked before anything is sent

    @property
    def every(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return "query", *("key", "value")[: self.n_keys], *self.names


def attended(state: State, query: Tensor, keys: Tensors, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """out [B, Hq, rows, Dv] of a rank's queries, and lse. keys: its own rows. operands: those that state names."""
    found: tuple[Tensor, Tensor] = _Sharded.apply(state, query, *keys, *operands)
    return found


@lru_cache(maxsize=64)
def _parts(plan: ShardPlan) -> Portions:
    return Portions(plan)


@lru_cache(maxsize=256)
def _routes(plan: ShardPlan, rank: int, group: Any) -> list[Route]:
    return [Route(plan, rank, step, group) for step in range(len(plan.steps(rank)))]


class _Work:
    """One call on one rank: what forward and backward share."""

    def __init__(self, state: State, tensors: Sequence[Tensor]) -> None:
        self.plan, self.rank, self.choices, self.form = state.plan, state.place.rank, state.choices, state.form
        self.query, self.keys = tensors[0], tuple(tensors[1 : 1 + state.n_keys])
        self.parts, self.routes = _parts(self.plan), _routes(self.plan, self.rank, state.place.group)
        self.own = self.plan.queries.rows(self.rank)
        self.operands = {**state.numbers, **dict(zip(state.names, tensors[1 + state.n_keys :]))}
        self.projections: Projections | None = None
        if self.form == "expanded":
            assert self.plan.attention.latent is not None
            self.projections = Projections(self.plan.attention.latent, *(self.operands.pop(n) for n in ("uk", "uv")))
        self.most = self.parts.most(self.rank)

    @property
    def width(self) -> int:
        """Columns of a result."""
        if self.projections is not None:
            return self.projections.uv.shape[2]
        latent = self.plan.attention.latent
        return self.keys[1].shape[3] if latent is None else latent.rank

    def read(self, at_hand: AtHand) -> Keys:
        """What portions of a step read."""
        if self.projections is not None:
            return self.projections.expanded(*at_hand.tensors)
        return Keys(*at_hand.tensors)

    def calls(
        self, step: int, rows: Runs, keys: Keys, widest_first: bool = False
    ) -> Iterator[tuple[Portion, Variant, Call]]:
        """The portions of a step, and how each is called. rows: those of the keys."""
        portions = self.parts.portions(self.rank)[step]
        for portion in sorted(portions, key=lambda p: p.keys[0] - p.keys[1]) if widest_first else portions:
            yield portion, *self._call(portion, keys.of(*run_in(portion.keys, rows)))

    def sinks(self) -> Iterator[tuple[Portion, Variant, Call]]:
        """Portions without keys, of queries whose sink no other portion has."""
        if runs := self.parts.sinks(self.rank):
            nothing = self.read(AtHand((), tuple(t[:, :, :0] for t in self.keys)))
            for queries in runs:
                portion = Portion(queries, (0, 0), True)
                yield portion, *self._call(portion, nothing)

    def _call(self, portion: Portion, keys: Keys) -> tuple[Variant, Call]:
        first, end = self.rows(portion)
        return self.parts.call(portion, self.query[:, :, first:end], keys, self.operands, self.choices)

    def rows(self, portion: Portion) -> Run:
        """Where the queries of a portion lie among those of the rank."""
        return run_in(portion.queries, self.own)

    def asked(self, wanted: frozenset[str], keys: Keys) -> frozenset[str]:
        """Gradients of a portion for those that are wanted: where caches are expanded, of what they become."""
        if self.projections is None or not wanted & {"key", "uk", "uv"}:
            return wanted
        return (wanted - {"uk", "uv"}).union(keys.named)

    def of_own(self, at_hand: AtHand, found: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Tensor]]:
        """Gradients of the rows that travelled, and of uk and uv, from those of what portions read."""
        if self.projections is not None:
            (cache,) = at_hand.tensors
            return self.projections.gradients(cache, found)
        return tuple(found[n] for n in ("key", "value")[: len(self.keys)]), {}


class _Sharded(torch.autograd.Function):
    """Forward: keys travel to queries. Backward: they do so again, where they were not kept, and gradients of keys
    travel back. Keys of a step travel while those of the one before are computed."""

    @staticmethod
    def forward(ctx: Any, state: State, *tensors: Tensor) -> Any:
        work = _Work(state, tensors)
        done = Joined(work.query, work.width, work.parts, work.most.of_queries)
        at_hands: list[AtHand | None] = []
        fetch = work.routes[0].start(work.keys, state.agreed)
        for step in range(len(work.routes)):
            at_hand = fetch.wait()
            if step + 1 < len(work.routes):
                fetch = work.routes[step + 1].start(work.keys, state.agreed)
            for portion, variant, call in work.calls(step, at_hand.rows, work.read(at_hand)):
                done.add(work.rows(portion), *variant.forward(call))
            at_hands.append(at_hand if state.plan.keeps else None)
        for portion, variant, call in work.sinks():
            done.add(work.rows(portion), *variant.forward(call))
        out, lse = done.result()
        ctx.state, ctx.kept, ctx.is_far = state, at_hands, done.is_far
        ctx.backwards = backwards(state.place.agreement, str(state.plan.attention.name))
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse.sum(0) if done.is_far else lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        problem: Exception | None = None
        if torch.is_grad_enabled():
            problem = second_derivative(str(ctx.state.plan.attention.name))
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:  # of autograd, as where they are freed already
            problem = problem or error
        with ctx.backwards.of("keys that travel", problem, at_once=False) as agreed:
            return None, *_gradients(ctx, saved, dout, dlse, agreed)


def _gradients(
    ctx: Any, saved: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None, agreed: Agreed
) -> Iterator[Tensor | None]:  # fmt: skip
    """Of all tensors of a call."""
    state: State = ctx.state
    out, lse, *tensors = saved
    wanted = frozenset(n for n, need in zip(state.every, ctx.needs_input_grad[1:]) if need)
    query, learned = tensors[0], {n: t for n, t in zip(state.every, tensors) if n in wanted and n in state.names}
    # gradients of operands are sums over portions and ranks, which are rounded once, at the end
    exactly = [t.to(torch.promote_types(t.dtype, wide(query))) if n in learned and n not in ("uk", "uv") else t
               for n, t in zip(state.every, tensors)]  # fmt: skip
    work = _Work(state, exactly)
    dout = torch.zeros_like(out) if dout is None else dout
    if dlse is not None and ctx.is_far:  # kernels read the gradient of either statistic
        dlse = dlse.expand(2, *dlse.shape)
    found = _Backward(work, Given(out, lse, dout, dlse), wanted, OperandSums(query, learned))
    ahead: Fetch | None = None
    order = [*range(1, len(work.routes)), 0]  # others' keys first: gradients travel while its own are computed
    for n, step in enumerate(order):
        at_hand, ctx.kept[step] = ctx.kept[step], None  # a second backward brings them again
        if at_hand is None:
            at_hand = (ahead or work.routes[step].start(work.keys, agreed)).wait()
            ahead = work.routes[order[n + 1]].start(work.keys, agreed) if n + 1 < len(order) else None
        of_rows = found.step(step, at_hand)
        del at_hand  # its memory is free before gradients are copied to be sent
        found.give_back(step, of_rows, agreed)
        del of_rows
    agreed()
    gradients_of = found.result(state)
    return (gradients_of[n] if n in wanted else None for n in state.every)


class _Backward:
    """Gradients of a call, step by step."""

    def __init__(self, work: _Work, given: Given, wanted: frozenset[str], of_operands: OperandSums) -> None:
        self.work, self.given, self.wanted, self.of_operands = work, given, wanted, of_operands
        self.of_query = Sum(work.query, work.most.of_queries)
        self.of_keys = [Sum(t, work.most.of_own_keys) for t in work.keys]
        self.returns: list[Return] = []

    def step(self, step: int, at_hand: AtHand) -> list[Sum]:
        """Gradients of the portions of a step; those of its keys, as they lie there. Empty where nobody wants them."""
        work, keys = self.work, self.work.read(at_hand)
        asked = work.asked(self.wanted, keys)
        runs = [run_in(p.keys, at_hand.rows) for p in work.parts.portions(work.rank)[step]]
        among = min((run[0] for run in runs), default=0), max((run[1] for run in runs), default=0)
        totals = {n: Sum(t, work.most.of_keys[step], among) for n, t in keys.named.items()}
        # gradients of all keys are taken as they are where they come first
        for portion, variant, call in work.calls(step, at_hand.rows, keys, widest_first=True):
            rows, there = work.rows(portion), run_in(portion.keys, at_hand.rows)
            found = gradients(variant, call, given_at(rows, *self.given), asked)
            self.of_operands.add(found)
            if "query" in found:
                self.of_query.add(rows, found["query"])
            for name, total in totals.items():
                if name in found:
                    total.add(there, found[name])
            del found  # before the next portion has others
        if not asked & totals.keys():
            return []
        if self.work.projections is None:
            return list(totals.values())
        of_rows, of_projections = work.of_own(at_hand, {n: total.result() for n, total in totals.items()})
        self.of_operands.add(of_projections)
        return list(map(known, of_rows))

    def give_back(self, step: int, of_rows: list[Sum], agreed: Agreed) -> None:
        """Send gradients of the keys of a step to their owners."""
        if of_rows:
            self.returns.append(self.work.routes[step].give_back(of_rows, self.of_keys, agreed))
        if len(self.returns) > 1:  # a ring holds gradients of two steps at most
            self.returns.pop(0).add_to(self.of_keys)

    def result(self, state: State) -> dict[str, Tensor]:
        """All gradients by name, once what is under way has arrived, and sinks have theirs."""
        for portion, variant, call in self.work.sinks():
            given = given_at(self.work.rows(portion), *self.given)
            self.of_operands.add(sink_gradients(variant, call, given, self.wanted))
        while self.returns:
            self.returns.pop(0).add_to(self.of_keys)
        of_keys = {n: total.result() for n, total in zip(state.every[1:], self.of_keys)}
        return {"query": self.of_query.result(), **of_keys, **self.of_operands.result(state.place.every)}
