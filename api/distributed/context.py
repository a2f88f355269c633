"""`ContextParallel`: attention over a sequence whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..codegen.torch_private import break_graph
from ..compiler.planning.records import Shape
from ..ir.attention import SEED, Attention
from ..ir.errors import Problem, UnavailableError, WeftError, collected, second_derivative
from ..ir.expr import Scalar
from ..ir.philox import drawn_seed
from ..runtime.call import Call, Choices, Dense, Packed, Sequences, choices_of
from ..runtime.check.operands import as_number, check_dropout, check_operands, seed_of
from ..runtime.check.tensors import DTYPES, check_latent, main_problems
from ..runtime.options import CallOptions, Form
from ..runtime.run.variant import Variant, variant_of
from . import agreement, by_heads, shardplan
from .collectives import all_gather
from .exchange import AtHand, Fetch, Return, Route, Tensors
from .latent import Keys, Projected, Projections, absorbed, form_of
from .portions import (
    Given,
    Joined,
    OperandSums,
    Portion,
    Portions,
    Sum,
    given_at,
    gradients,
    operand_names,
    run_in,
    sink_gradients,
    wide,
)
from .rows import Deal, Run, Runs, count, places
from .seen import decisive_tensors
from .shardplan import AUTO, Links, ShardPlan, stands_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


UNTRACED = (
    "ContextParallel.attention sends and receives, which torch.compile does not trace; compile the layers around it, "
    "or leave out fullgraph=True"
)
KINDS: Mapping[str, type] = {"int": int, "float": float}


class ContextParallel:
    """Attention along one dimension of a mesh, whose ranks hold rows of one sequence each.

    mesh: a DeviceMesh, or a process group; all ranks where not given. dim: the mesh's dimension, by name or number;
    None where it has one.
    strategy, balance: as for `plan`. agree: whether ranks compare what they call before each call, so that a mistake on
    one of them is an error on all.

    >>> cp = ContextParallel(mesh, dim="cp")                                    # doctest: +SKIP
    >>> plan = cp.plan(causal, heads=32, kv_heads=8, length=131072, head_dim=128)
    >>> q, k, v = (cp.shard(t, plan) for t in (query, key, value))
    >>> out = cp.attention(causal, q, k, v, plan=plan)
    """

    def __init__(
        self, mesh: DeviceMesh | dist.ProcessGroup | None = None, dim: str | int | None = None,
        strategy: str = AUTO, balance: str = AUTO, *, agree: bool = True, links: Links | None = None,
    ) -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise UnavailableError(
                "ContextParallel: torch.distributed is not initialised; call init_process_group first"
            )
        self.group = _group(mesh, dim)
        self.strategy, self.balance, self.links = strategy, balance, links
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.agreement = agreement.Agreement(self.group) if agree and self.ranks > 1 else None

    def plan(self, attention: Attention, **sizes: Any) -> ShardPlan:
        """A plan for these ranks; see `weft.distributed.plan`, which takes the same arguments."""
        given = {"strategy": self.strategy, "balance": self.balance, "links": self.links, **sizes}
        return shardplan.plan(attention, ranks=self.ranks, **given)

    # -- rows ----------------------------------------------------------------------------------------------------------
    def rows(self, plan: ShardPlan, of: str = "queries") -> Tensor:
        """Positions in the sequence of the rows that this rank holds, int64. of: "queries" or "keys"."""
        own = getattr(plan, of).rows(self.rank)
        return torch.cat([torch.arange(*run) for run in own]) if own else torch.arange(0)

    def shard(self, tensor: Tensor, plan: ShardPlan, dim: int = 2) -> Tensor:
        """This rank's rows of a tensor that it has whole, along `dim`; its gradient is that of these rows."""
        own = _deal(plan, tensor.shape[dim]).rows(self.rank)
        parts = [tensor.narrow(dim, first, end - first) for first, end in own]
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def unshard(self, tensor: Tensor, plan: ShardPlan, dim: int = 2, of: str = "queries") -> Tensor:
        """The whole tensor on each rank, from the rows of all. Each rank's rows get their gradient from its own use.

        of: whose rows they are, "queries" or "keys", which differ where there are more of the ones.
        """
        deal: Deal = getattr(plan, of)
        if tensor.shape[dim] != (rows := count(deal.rows(self.rank))):
            raise WeftError(
                f"{plan.attention.name}: unshard: expected {rows} rows, those of the {of} of rank {self.rank}, got "
                f"{tensor.shape[dim]}"
            )
        return _Whole.apply(self, deal, tensor, dim)

    def share(self, tensor: Tensor) -> Tensor:
        """The same tensor, of whose gradient this rank gets an equal share.

        `attention` gives each rank the whole gradient of an operand. A parameter whose gradients something else sums
        over these ranks, as FSDP and DDP do, goes through this, so that it counts once.
        """
        return _Share.apply(tensor, self.ranks)

    # -- attention -----------------------------------------------------------------------------------------------------
    def attention(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor | None = None, *, plan: ShardPlan,
        return_lse: bool = False, target: str | None = None, deterministic: bool | None = None,
        seed: int | Tensor | None = None, train: bool = True, uk: Tensor | None = None, uv: Tensor | None = None,
        form: Form | None = None, **operands: Any,
    ) -> Any:  # fmt: skip
        """out [B, Hq, rows, Dv] of this rank's queries over all keys, or (out, lse).

        query [B, Hq, rows, D], key [B, Hkv, rows, D], value [B, Hkv, rows, Dv]: this rank's rows, as `shard` gives
        them. operands: the variant's own, whole on each rank; their gradients are summed over ranks. Positions, heads
        and lengths in the variant are those of the whole sequence. seed, train: of dropout, as in calls on one device,
        which drop the same pairs; a seed that is a tensor, or that is drawn, is the one of the first rank. uk, uv,
        form: of latent attention, as in calls on one device, with this rank's rows of the cache in place of key. uk and
        uv are whole on each rank, and so are their gradients.

        Raises WeftError on all ranks where one of them calls something else.
        """
        if torch.compiler.is_compiling():
            break_graph(UNTRACED)
            return torch.compiler.disable(self.attention, reason=UNTRACED)(
                attention, query, key, value, plan=plan, return_lse=return_lse, target=target,
                deterministic=deterministic, seed=seed, train=train, uk=uk, uv=uv, form=form, **operands,
            )  # fmt: skip
        operands = {n: v for n, v in operands.items() if n not in attention.canonical.unread}  # as other calls do
        if attention.canonical.drops and not train:
            attention, plan, operands = _undropped(attention, plan, operands)
        problem = None
        try:
            operands |= _seed(attention, operands, seed, query)
        except WeftError as error:
            problem = error
        latent = Projected(uk, uv, form)
        problem = problem or self._problem(attention, query, key, value, plan, operands, latent)
        if return_lse and not attention.canonical.weighs.saves_lse:
            what = f"the normalizer {attention.normalizer} has no log-sum-exp"
            raise WeftError.of(str(attention.name), Problem(option="return_lse", what=what))
        if self.agreement is not None:
            told = _told(attention, query, key, value, plan, {**operands, **latent.tensors}, return_lse)
            self.agreement.check(
                {**told, "seed": str(seed) if isinstance(seed, int) else "", "form": str(form)}, problem
            )
        if problem is not None:
            raise problem
        if attention.canonical.drops and not isinstance(seed, int):
            dist.broadcast(operands[SEED.name], dist.get_global_rank(self.group, 0), self.group)
        declared = {p.name: p for p in attention.canonical.parameters}
        given = {n: v if isinstance(v, Tensor) else as_number(v, KINDS[declared[n].dtype])
                 for n, v in operands.items() if n in declared}  # fmt: skip
        if plan.strategy == "heads":
            assert value is not None
            out, lse = by_heads.attended(self, plan, (query, key, value), given, return_lse, target, deterministic)
            return (out, lse) if return_lse else out
        names, choices = operand_names(attention), choices_of(target, None, deterministic)
        numbers, kind, after = {n: v for n, v in given.items() if n not in names}, None, None
        own = (key,) if value is None else (key, value)
        if attention.latent is not None:
            kind = form_of(attention, plan.sizes, latent, (query, key, *given.values()))
        if kind == "expanded":
            names, given = [*names, *latent.tensors], {**given, **latent.tensors}
        elif uk is not None and uv is not None and attention.latent is not None:
            query, after = absorbed(query, uk, attention.latent.rope), uv
        state = _State(self, plan, numbers, choices, tuple(names), len(own), kind)
        out, lse = _Sharded.apply(state, query, *own, *(given[n] for n in names))
        out = out if after is None else torch.einsum("bhlr,hrd->bhld", out, after)
        return (out, lse) if return_lse else out

    def _problem(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor | None, plan: ShardPlan,
        operands: Mapping[str, Any], latent: Projected,
    ) -> WeftError | None:  # fmt: skip
        """What is wrong with a call on this rank."""
        name = str(attention.name)
        if plan.attention != attention:
            return WeftError(f"{name}: expected a plan of this variant, got one of {plan.attention.name}")
        if plan.ranks != self.ranks:
            return WeftError(f"{name}: expected a plan for {self.ranks} ranks, got one for {plan.ranks}")
        sizes, problems = plan.sizes, []
        rows = count(plan.queries.rows(self.rank)), count(plan.keys.rows(self.rank))
        expected = {
            "query": (query, (sizes.batch, sizes.heads, rows[0], sizes.head_dim)),
            "key": (key, (sizes.batch, sizes.kv_heads, rows[1], sizes.head_dim)),
            "value": (value, (sizes.batch, sizes.kv_heads, rows[1], sizes.value_dim)),
        }
        if attention.latent is not None:
            columns = attention.latent.rank + attention.latent.rope
            expected = {"query": expected["query"], "cache": (key, (sizes.batch, 1, rows[1], columns))}
            if value is not None:
                problems.append(Problem(operand="value", what="latent attention takes query and cache only"))
        elif latent != Projected(None, None, None):
            problems.append(
                Problem(option="uk, uv, form", what="the variant is not latent", next_step="leave them out")
            )
        for n, (tensor, shape) in expected.items():
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
                got = str([*tensor.shape]) if isinstance(tensor, Tensor) else type(tensor).__name__
                wanted = f"{[*shape]}, the rows of rank {self.rank}"
                problems.append(Problem(operand=n, expected=wanted, got=got, next_step="cp.shard gives them"))
        for n in plan.looked_at:
            if n in operands and not stands_on(plan, n, operands[n]):
                problems.append(
                    Problem(operand=n, what="the plan stands on another value", next_step="make a plan with this one")
                )
        if problems:
            return collected(name, problems)
        try:
            found: list[Problem] = []
            if attention.latent is None:
                found = main_problems(query, key, value, False)
            else:
                check_latent(attention, query, key, latent.uk, latent.uv)
                form_of(attention, sizes, latent, (query, key, *operands.values()))
                found = _unlike(query, {"cache": key, **latent.tensors})
            check_operands(attention, operands, query.device, found)
            variant = variant_of(attention)
            variant.check_sizes(_whole_call(variant, plan, (query, key, value), operands))
        except WeftError as error:
            return error
        return None


def _undropped(
    attention: Attention, plan: ShardPlan, operands: dict[str, Any]
) -> tuple[Attention, ShardPlan, dict[str, Any]]:
    """The same of the variant without dropout. A plan of another variant stays as it is, and is refused."""
    rest = attention.replace(dropout=0.0)
    if plan.attention == attention:
        plan = plan.undropped
    share = attention.dropout.name if isinstance(attention.dropout, Scalar) else None
    return rest, plan, {n: v for n, v in operands.items() if n != share}


def _seed(attention: Attention, operands: Mapping[str, Any], seed: object, query: object) -> dict[str, Tensor]:
    """The seed as kernels take it, memory of its own, where weights are dropped. Raises WeftError for a wrong one."""
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    given = seed_of(str(attention.name), seed, device)
    if not attention.canonical.drops:
        return {}
    check_dropout(attention, operands)
    return {SEED.name: drawn_seed(device) if given is None else given.clone()}


def _unlike(query: Tensor, others: Mapping[str, Tensor]) -> list[Problem]:
    """Of latent attention over ranks: what has another dtype than the query."""
    wrong = {n: t.dtype for n, t in others.items() if t.dtype != query.dtype}
    return [Problem(operand=n, expected=f"{query.dtype} as in query", got=str(dtype)) for n, dtype in wrong.items()]


def _whole_call(
    variant: Variant, plan: ShardPlan, tensors: tuple[Tensor, Tensor, Tensor | None], operands: Mapping[str, Any]
) -> Call:
    """The call on all rows, for what is asked of its shapes: what one rank refuses, all do."""
    sizes = plan.sizes
    rows = (sizes.heads, sizes.q_len), (sizes.kv_heads, sizes.kv_len), (sizes.kv_heads, sizes.kv_len)
    main = [None if t is None else t.new_empty(1).expand(sizes.batch, *of, t.shape[3])
            for t, of in zip(tensors, rows)]  # fmt: skip
    given = {n: v if isinstance(v, Tensor) else as_number(v, KINDS[kind])
             for n, kind in zip(variant.names, variant.kinds) if (v := operands[n]) is not None}  # fmt: skip
    sequences: Sequences = Dense(plan.q_offset)
    if plan.starts is not None:
        starts = torch.tensor(plan.starts, dtype=torch.int32)
        sequences = Packed(starts, starts, None)
    assert main[0] is not None and main[1] is not None
    return Call(main[0], main[1], main[2], None, given, sequences, choices_of(None, None), sizes.head_dim)


def _group(mesh: Any, dim: str | int | None) -> Any:
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return mesh or dist.group.WORLD
    if dim is None and mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise WeftError(
            f"ContextParallel: the mesh has {mesh.ndim} dimensions; pass dim=, one of {', '.join(map(str, names))}"
        )
    return mesh.get_group(0 if dim is None else dim)


def _deal(plan: ShardPlan, length: int) -> Deal:
    if length == plan.sizes.q_len:
        return plan.queries
    if length == plan.sizes.kv_len:
        return plan.keys
    lengths = " or ".join(map(str, dict.fromkeys((plan.sizes.q_len, plan.sizes.kv_len))))
    raise WeftError(f"{plan.attention.name}: shard: expected {lengths} rows, those of the plan, got {length}")


def _told(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor | None, plan: ShardPlan,
    operands: Mapping[str, Any], return_lse: bool,
) -> dict[str, str]:  # fmt: skip
    """What ranks compare: all that a mistake may differ in, by name, short."""
    tensors = {"query": query, "key": key, "value": value, **operands}
    flags = [n for n, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()]
    shapes = [f"{n} {[*t.shape]} {str(t.dtype)[6:]}" for n, t in operands.items() if isinstance(t, Tensor)]
    numbers = [f"{n}={v!r}" for n, v in operands.items() if not isinstance(v, Tensor)]
    return {
        "variant": f"{attention.name} ({attention.canonical.digest})",
        "plan": plan.told,
        "dtypes": ", ".join(str(t.dtype)[6:] for t in (query, key, value) if isinstance(t, Tensor)),
        "operands": "; ".join((*shapes, *numbers)),
        "gradients": ", ".join(flags) + ("; lse" if return_lse else ""),
    }


class _State(NamedTuple):
    """What a call has besides tensors."""

    cp: ContextParallel
    plan: ShardPlan
    numbers: dict[str, Any]
    choices: Choices
    names: tuple[str, ...]  # of tensor operands, and of uk and uv where caches are expanded
    n_keys: int  # tensors that keys are: key and value, or a latent cache
    form: Form | None  # of latent attention

    @property
    def every(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return "query", *("key", "value")[: self.n_keys], *self.names


@lru_cache(maxsize=64)
def _parts(plan: ShardPlan) -> Portions:
    return Portions(plan)


@lru_cache(maxsize=256)
def _routes(plan: ShardPlan, rank: int, group: Any) -> list[Route]:
    return [Route(plan, rank, step, group) for step in range(len(plan.steps(rank)))]


class _Work:
    """One call on one rank: what forward and backward share."""

    def __init__(self, state: _State, tensors: Sequence[Tensor]) -> None:
        self.plan, self.rank, self.choices, self.form = state.plan, state.cp.rank, state.choices, state.form
        self.query, self.keys = tensors[0], tuple(tensors[1 : 1 + state.n_keys])
        self.parts, self.routes = _parts(self.plan), _routes(self.plan, self.rank, state.cp.group)
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

    def calls(self, step: int, rows: Runs, keys: Keys) -> Iterator[tuple[Portion, Variant, Call]]:
        """The portions of a step, and how each is called. rows: those of the keys."""
        for portion in self.parts.portions(self.rank)[step]:
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
    def forward(ctx: Any, state: _State, *tensors: Tensor) -> Any:
        work = _Work(state, tensors)
        done = Joined(work.query, work.width, work.parts, work.most.of_queries)
        kept: list[AtHand | None] = []
        fetch = work.routes[0].start(work.keys)
        for step in range(len(work.routes)):
            at_hand = fetch.wait()
            if step + 1 < len(work.routes):
                fetch = work.routes[step + 1].start(work.keys)
            for portion, variant, call in work.calls(step, at_hand.rows, work.read(at_hand)):
                done.add(work.rows(portion), *variant.forward(call))
            kept.append(at_hand if state.plan.keeps else None)
        for portion, variant, call in work.sinks():
            done.add(work.rows(portion), *variant.forward(call))
        out, lse = done.result()
        ctx.state, ctx.kept, ctx.is_far = state, kept, done.is_far
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse.sum(0) if done.is_far else lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        state: _State = ctx.state
        if torch.is_grad_enabled():
            raise second_derivative(str(state.plan.attention.name))
        out, lse, *tensors = ctx.saved_tensors
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
            at_hand = ctx.kept[step]
            if at_hand is None:
                at_hand = (ahead or work.routes[step].start(work.keys)).wait()
                ahead = work.routes[order[n + 1]].start(work.keys) if n + 1 < len(order) else None
            found.step(step, at_hand)
            del at_hand  # its memory is free while the next step computes
        gradients_of = found.result(state)
        return None, *(gradients_of[n] if n in wanted else None for n in state.every)


class _Backward:
    """Gradients of a call, step by step."""

    def __init__(self, work: _Work, given: Given, wanted: frozenset[str], of_operands: OperandSums) -> None:
        self.work, self.given, self.wanted, self.of_operands = work, given, wanted, of_operands
        self.of_query = Sum(work.query, work.most.of_queries)
        self.of_keys = [Sum(t, work.most.of_own_keys) for t in work.keys]
        self.returns: list[Return] = []

    def step(self, step: int, at_hand: AtHand) -> None:
        """Gradients of the portions of a step, and those of its keys on their way."""
        work, keys = self.work, self.work.read(at_hand)
        asked = work.asked(self.wanted, keys)
        totals = {n: Sum(t, work.most.of_keys[step]) for n, t in keys.named.items()}
        for portion, variant, call in work.calls(step, at_hand.rows, keys):
            rows, there = work.rows(portion), run_in(portion.keys, at_hand.rows)
            found = gradients(variant, call, given_at(rows, *self.given), asked)
            self.of_operands.add(found)
            if "query" in found:
                self.of_query.add(rows, found["query"])
            for name, total in totals.items():
                if name in found:
                    total.add(there, found[name])
        if asked & totals.keys():
            of_rows, of_projections = work.of_own(at_hand, {n: total.result() for n, total in totals.items()})
            self.returns.append(work.routes[step].give_back(of_rows))
            self.of_operands.add(of_projections)
        if len(self.returns) > 1:  # a ring holds gradients of two steps at most
            self.returns.pop(0).add_to(self.of_keys)

    def result(self, state: _State) -> dict[str, Tensor]:
        """All gradients by name, once what is under way has arrived, and sinks have theirs."""
        for portion, variant, call in self.work.sinks():
            given = given_at(self.work.rows(portion), *self.given)
            self.of_operands.add(sink_gradients(variant, call, given, self.wanted))
        for returned in self.returns:
            returned.add_to(self.of_keys)
        of_keys = {n: total.result() for n, total in zip(state.every[1:], self.of_keys)}
        return {"query": self.of_query.result(), **of_keys, **self.of_operands.result(state.cp.group)}


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


class _Whole(torch.autograd.Function):
    """Rows of all ranks, in the order of their positions."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, deal: Deal, tensor: Tensor, dim: int) -> Tensor:
        ctx.deal, ctx.rank, ctx.dim = deal, cp.rank, dim
        rows = tensor.movedim(dim, 0).contiguous()
        sizes = [count(deal.rows(r)) for r in range(cp.ranks)]
        most = max(sizes)
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])]) if len(rows) < most else rows
        gathered = rows.new_empty(cp.ranks * most, *rows.shape[1:])
        all_gather(gathered, padded, cp.group)
        parts: list[tuple[Run, Tensor]] = []
        for rank in range(cp.ranks):
            own = deal.rows(rank)
            parts += [(run, gathered[rank * most + a : rank * most + b]) for run, (a, b) in zip(own, places(own, own))]
        parts.sort(key=lambda part: part[0])
        return torch.cat([part for _, part in parts]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = ctx.deal.rows(ctx.rank)
        parts = [gradient.narrow(ctx.dim, first, end - first) for first, end in own]
        return None, None, torch.cat(parts, ctx.dim) if parts else gradient.narrow(ctx.dim, 0, 0), None


# -- DTensors ----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=16)
def _of_mesh(mesh: DeviceMesh, dim: int, balance: str) -> ContextParallel:
    return ContextParallel(mesh, dim, balance=balance)


@lru_cache(maxsize=256)
def _plan_of_mesh(
    cp: ContextParallel, attention: Attention, sizes: Shape, q_offset: int, numbers: tuple[tuple[str, Any], ...]
) -> ShardPlan:
    return _planned(cp, attention, sizes, q_offset, dict(numbers))


def _planned(
    cp: ContextParallel, attention: Attention, sizes: Shape, q_offset: int, given: Mapping[str, Any]
) -> ShardPlan:
    return cp.plan(
        attention, batch=sizes.batch, heads=sizes.heads, kv_heads=sizes.kv_heads, length=sizes.q_len,
        kv_length=sizes.kv_len, head_dim=sizes.head_dim, value_dim=sizes.value_dim, dtype=sizes.dtype,
        q_offset=q_offset, **given,
    )  # fmt: skip


def over_mesh(
    mesh: DeviceMesh, dim: int, attention: Attention, tensors: tuple[Tensor, Tensor, Tensor], lengths: tuple[int, int],
    operands: Mapping[str, Any], options: CallOptions, balance: str = "contiguous",
) -> Any:  # fmt: skip
    """out, or (out, lse), of this process's rows of a sequence that a dimension of the mesh divides.

    tensors: its rows of query, key and value. lengths: of all queries and keys. operands: whole. balance: how rows are
    dealt, as neighbours where it is not given, which is how DTensors have them.
    """
    query, key, value = tensors
    sizes = Shape(query.shape[0], query.shape[1], key.shape[1], *lengths, query.shape[3], value.shape[3],
                  DTYPES[query.dtype])  # fmt: skip
    q_offset = lengths[1] - lengths[0] if options.q_offset is None else as_number(options.q_offset, int)
    cp, decisive = _of_mesh(mesh, dim, balance), decisive_tensors(attention)
    numbers = {n: v for n, v in operands.items() if not isinstance(v, Tensor) and n != SEED.name}
    if decisive:
        plan = _planned(cp, attention, sizes, q_offset, numbers | {n: operands[n] for n in decisive if n in operands})
    else:
        plan = _plan_of_mesh(cp, attention, sizes, q_offset, tuple(sorted(numbers.items())))
    rest = {n: v for n, v in operands.items() if n != SEED.name}  # drawn by now, or as it was given
    return cp.attention(attention, query, key, value, plan=plan, return_lse=options.return_lse, target=options.target,
                        deterministic=options.deterministic, seed=operands.get(SEED.name), **rest)  # fmt: skip
