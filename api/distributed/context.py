"""`ContextParallel`: attention over a sequence whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..calls.internals import autocast
from ..codegen.targets import target_named
from ..codegen.torch_private import PLAIN_TYPES, break_graph, under_transform
from ..ir.attention import SEED, Attention
from ..ir.errors import Problem, UnavailableError, WeftError, collected, shown
from ..ir.expr import Scalar
from ..ir.numbers import is_int
from ..ir.philox import drawn_seed
from ..runtime.call import Call, Dense, Packed, Sequences, choices_of
from ..runtime.check.operands import as_number, check_dropout, check_operands, seed_of
from ..runtime.check.tensors import check_latent, form_problem, known_memory_problems, main_problems
from ..runtime.descales import FP8
from ..runtime.options import Form, check_values
from ..runtime.run.variant import Variant, variant_of
from . import agreement, by_heads, planner, sharded
from .asked import AUTO, Links, as_numbers
from .collectives import under_way
from .groups import groups_of
from .latent import Projected, absorbed, form_of, without_rest
from .portions import operand_names
from .rows import Deal, count
from .shardplan import ShardPlan, stands_on
from .whole import Share, Whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


UNTRACED = (
    "ContextParallel.attention sends and receives, which torch.compile does not trace; compile the layers around it, "
    "or leave out fullgraph=True"
)
KINDS: Mapping[str, type] = {"int": int, "float": float}
_MOST_SOUND = 64  # kinds of calls that are known to be sound


class _Call(NamedTuple):
    """Of one rank: what `attention` was called with."""

    attention: Attention
    query: Tensor
    key: Tensor
    value: Tensor | None
    plan: ShardPlan
    operands: dict[str, Any]
    latent: Projected


class ContextParallel:
    """Attention along one dimension of a mesh, or two, whose ranks hold rows of one sequence each.

    mesh: a DeviceMesh, or a process group; all ranks where not given. dim: the mesh's dimension, by name or number;
    None where it has one. Of two, (outer, inner), neighbours along the inner one may divide heads: let that be a host.
    strategy, balance: as for `plan`. agree: whether ranks compare what they are about to compute before each call and
    each backward, so that a mistake on one of them is an error on all.

    >>> cp = ContextParallel(mesh, dim="cp")                                    # doctest: +SKIP
    >>> plan = cp.plan(causal, heads=32, kv_heads=8, length=131072, head_dim=128)
    >>> q, k, v = (cp.shard(t, plan) for t in (query, key, value))
    >>> out = cp.attention(causal, q, k, v, plan=plan)
    """

    def __init__(
        self, mesh: DeviceMesh | dist.ProcessGroup | None = None,
        dim: str | int | tuple[str | int, str | int] | None = None,
        strategy: str = AUTO, balance: str = AUTO, *, agree: bool = True, links: Links | None = None,
    ) -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise UnavailableError(
                "ContextParallel: torch.distributed is not initialised; call init_process_group first"
            )
        if not isinstance(agree, bool):
            raise WeftError(f"ContextParallel: agree: expected True or False, got {shown(agree)}")
        self.group, self.outer, self.inner = groups_of(mesh, dim)
        self.strategy, self.balance, self.links = strategy, balance, links
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.agreement = agreement.Agreement(self.group) if agree and self.ranks > 1 else None
        self._sound: dict[object, tuple[Attention, ShardPlan, dict[str, Any], dict[str, str]]] = {}

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """This one: a copy of a model sends over the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise WeftError(
            "ContextParallel: it is not pickled, as its groups belong to this process; make another where it is loaded"
        )

    @property
    def shape(self) -> tuple[int, int] | None:
        """Ranks along the outer and the inner dimension, where there are two."""
        inner = 1 if self.inner is None else dist.get_world_size(self.inner)
        return None if self.inner is None else (self.ranks // inner, inner)

    def _neighbours(self, plan: ShardPlan) -> tuple[by_heads.Neighbours, sharded.Place]:
        """The ranks that divide heads with this one, and where it is among those that have the same heads."""
        if plan.strategy == "heads":
            return by_heads.Neighbours(self.group, self.rank, self.ranks), sharded.Place(
                0, None, self.group, self.agreement
            )
        assert self.inner is not None
        rank, ranks = dist.get_rank(self.inner), dist.get_world_size(self.inner)
        far = sharded.Place(dist.get_rank(self.outer), self.outer, self.group, self.agreement)
        return by_heads.Neighbours(self.inner, rank, ranks), far

    def plan(self, attention: Attention, **sizes: Any) -> ShardPlan:
        """A plan for these ranks; see `weft.distributed.plan`, which takes the same arguments."""
        if "ranks" in sizes:
            own, how = self.shape or self.ranks, "weft.distributed.plan(...) makes plans for others"
            raise WeftError(f"plan: ranks: expected none, as the mesh has {own}, got {shown(sizes['ranks'])}; {how}")
        given = {"strategy": self.strategy, "balance": self.balance, "links": self.links, **sizes}
        return planner.plan(attention, ranks=self.shape or self.ranks, **given)

    @contextmanager
    def heard(self, name: object) -> Iterator[None]:
        """Around what comes before a call of the variant of this name: an error is told to the ranks that make it."""
        try:
            yield
        except Exception as error:
            if self.agreement is not None:
                self.agreement.check({"variant": str(name)}, error)
            raise

    # -- rows ----------------------------------------------------------------------------------------------------------
    def rows(self, plan: ShardPlan, of: str = "queries") -> Tensor:
        """Positions in the sequence of the rows that this rank holds, int64. of: "queries" or "keys"."""
        _check_plan("rows", plan, self.ranks)
        own = _deal_of("rows", plan, of).rows(self.rank)
        return torch.cat([torch.arange(*run) for run in own]) if own else torch.arange(0)

    def shard(self, tensor: Tensor, plan: ShardPlan, dim: int = 2) -> Tensor:
        """This rank's rows of a tensor that it has whole, along `dim`; its gradient is that of these rows."""
        _check_plan("shard", plan, self.ranks)
        _check_dim(f"{plan.attention.name}: shard", tensor, dim)
        own = _deal(plan, tensor.shape[dim]).rows(self.rank)
        parts = [tensor.narrow(dim, first, end - first) for first, end in own]
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def unshard(self, tensor: Tensor, plan: ShardPlan, dim: int = 2, of: str = "queries") -> Tensor:
        """The whole tensor on each rank, from the rows of all. Each rank's rows get their gradient from its own use.

        of: whose rows they are, "queries" or "keys", which differ where there are more of the ones.
        """
        told: dict[str, str] = {"call": "unshard"}
        problem: Exception | None = None
        try:
            _check_plan("unshard", plan, self.ranks)
            _check_rows(plan, tensor, dim, of, self.rank)
            others = [n for k, n in enumerate(tensor.shape) if k != dim % tensor.dim()]
            told |= {"plan": plan.told, "rows": of, "dim": str(dim % tensor.dim())}
            told["tensor"] = f"{others} {str(tensor.dtype)[6:]}"
        except Exception as error:  # whatever it is, other ranks hear of it
            problem = error
        if self.agreement is not None:  # a rank may call this alone, as one that prints does
            self.agreement.check(told, problem)
        if problem is not None:
            raise problem
        with agreement.kept(self.agreement, "unshard"):
            return Whole.apply(self, getattr(plan, of), tensor, dim)

    def share(self, tensor: Tensor) -> Tensor:
        """The same tensor, of whose gradient this rank gets an equal share.

        `attention` gives each rank the whole gradient of an operand. A parameter whose gradients something else sums
        over these ranks, as FSDP and DDP do, goes through this, so that it counts once.
        """
        if (problem := form_problem("tensor", tensor)) is not None:
            raise WeftError(f"share: {problem}")
        return Share.apply(tensor, self.ranks)

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
        if deterministic is None and torch.are_deterministic_algorithms_enabled():
            deterministic = True
        query, key, value, uk, uv = autocast(query, key, value, uk, uv)
        call = _Call(attention, query, key, value, plan, operands, Projected(uk, uv, form))
        options = by_heads.Options(return_lse, target, deterministic)
        call, question = self._asked(call, options, seed, train)
        with agreement.kept(self.agreement, f"the forward of {call.attention.name}", question):
            out, lse = self._computed(call, options, seed, agreement.agreed_in(question))
            agreement.agreed_in(question)()
        return (out, lse) if return_lse else out

    def _asked(
        self, call: _Call, options: by_heads.Options, seed: object, train: bool
    ) -> tuple[_Call, agreement.Question | None]:
        """The call that is computed, where this rank found no mistake in it. Others are asked what they compute."""
        told: dict[str, str] = {"variant": type(call.attention).__name__}
        problem: Exception | None = None
        try:
            like = _like(call, options, seed, train)
            if like is None or (sound := self._sound.get(like)) is None:
                call = self._read(call, options, seed, train, told)
                problem = self._problem(call, options)
                if problem is None and like is not None:
                    if len(self._sound) >= _MOST_SOUND:
                        self._sound.clear()
                    self._sound[like] = call.attention, call.plan, call.operands, told
            else:
                *_, operands, told = sound
                call = call._replace(operands=operands)
                if problems := known_memory_problems({"query": call.query, "key": call.key, "value": call.value}):
                    problem = collected(str(call.attention.name), problems)
        except Exception as error:  # whatever it is, other ranks hear of it
            problem = error
        question = None if self.agreement is None else self.agreement.asks(told, problem)
        if problem is not None:
            agreement.agreed_in(question)()
            raise problem
        return call, question

    def _read(self, call: _Call, options: by_heads.Options, seed: object, train: bool, told: dict[str, str]) -> _Call:
        """The call with the variant and the operands that are computed. told: gets what ranks compare."""
        attention, plan, form = call.attention, call.plan, call.latent.form
        if not isinstance(attention, Attention):
            raise WeftError(f"attention: expected a weft.Attention, got {type(attention).__name__}")
        told["variant"] = f"{attention.name} ({attention.canonical.digest})"
        _check_plan(str(attention.name), plan, self.ranks)
        check_values(str(attention.name), {**options._asdict(), "train": train, "form": form})
        operands = {n: v for n, v in call.operands.items() if n not in attention.canonical.unread}  # as other calls do
        operands = as_numbers(attention, operands)
        if attention.canonical.drops and not train:
            attention, plan, operands = _undropped(attention, plan, operands)
        operands |= _seed(attention, operands, seed, call.query)
        call = call._replace(attention=attention, plan=plan, operands=operands)
        if self.agreement is not None:
            told.update(_told(call, options.return_lse))
            told |= {"seed": str(seed) if isinstance(seed, int) else "", "form": str(form)}
            told["options"] = f"target={options.target}, deterministic={options.deterministic}"
        return call

    def _computed(
        self, call: _Call, options: by_heads.Options, seed: object, agreed: agreement.Agreed
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse. agreed: is asked before anything is sent."""
        if call.attention.canonical.drops and not isinstance(seed, int):  # the one of the first rank
            agreed()
            with under_way():
                dist.broadcast(call.operands[SEED.name], dist.get_global_rank(self.group, 0), self.group)
        if call.plan.strategy != "heads" and not call.plan.divides_both:
            return self._over_rows(call, _declared(call), options, agreed)
        assert call.value is not None
        agreed()
        main = call.query, call.key, call.value
        return by_heads.attended(call.plan, *self._neighbours(call.plan), main, _declared(call), options)

    def _over_rows(
        self, call: _Call, operands: dict[str, Any], options: by_heads.Options, agreed: agreement.Agreed
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse where keys, or rows of a latent cache, travel."""
        attention, query, key, value, plan, _, latent = call
        names, choices = operand_names(attention), choices_of(options.target, None, options.deterministic)
        numbers, kind, after = {n: v for n, v in operands.items() if n not in names}, None, None
        own = (key,) if value is None else (key, value)
        if attention.latent is not None:
            kind = form_of(attention, plan.sizes, latent, (query, key, *operands.values()))
        if kind == "expanded":
            if plan.starts is not None:
                own = (without_rest(key, plan.keys.rows(self.rank), plan.starts),)
            names, operands = [*names, *latent.tensors], {**operands, **latent.tensors}
        elif latent.uk is not None and latent.uv is not None and attention.latent is not None:
            query, after = absorbed(query, latent.uk, attention.latent.rope), latent.uv
        place = sharded.Place(self.rank, self.group, self.group, self.agreement)
        state = sharded.State(place, plan, numbers, choices, tuple(names), len(own), kind, agreed)
        out, lse = sharded.attended(state, query, own, [operands[n] for n in names])
        return out if after is None else torch.einsum("bhlr,hrd->bhld", out, after), lse

    def _problem(self, call: _Call, options: by_heads.Options) -> WeftError | None:
        """What is wrong with a call on this rank."""
        attention, query, key, value, plan, operands, latent = call
        name, target = str(attention.name), options.target
        if plan.attention != attention:
            return WeftError(f"{name}: expected a plan of this variant, got one of {plan.attention.name}")
        if plan.divides_both and self.shape != (other := (plan.ranks // plan.inner, plan.inner)):
            own = "one dimension" if self.shape is None else f"{self.shape}"
            return WeftError(f"{name}: expected a plan for ranks along {own}, got one for {other}; cp.plan makes it")
        sizes, problems = plan.sizes, []
        if options.return_lse and not attention.canonical.weighs.saves_lse:
            what = f"the normalizer {attention.normalizer} has no log-sum-exp"
            problems.append(Problem(option="return_lse", what=what))
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
        elif any(given is not None for given in latent):
            problems.append(
                Problem(option="uk, uv, form", what="the variant is not latent", next_step="leave them out")
            )
        for n, (tensor, shape) in expected.items():
            if isinstance(tensor, Tensor) and (problem := form_problem(n, tensor)) is not None:
                problems.append(problem)
            elif not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
                got = str([*tensor.shape]) if isinstance(tensor, Tensor) else type(tensor).__name__
                wanted = f"{[*shape]}, the rows of rank {self.rank}"
                problems.append(Problem(operand=n, expected=wanted, got=got, next_step="cp.shard gives them"))
            elif tensor.dtype in FP8:
                how = "weft.fp8.dequantize(...) makes real ones"
                problems.append(
                    Problem(operand=n, expected="real numbers over ranks", got=str(tensor.dtype), next_step=how)
                )
        if problems := problems or known_memory_problems({n: tensor for n, (tensor, _) in expected.items()}):
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
            what, how = "the plan stands on another value", "make a plan with this one"
            stale = [n for n in plan.looked_at if n in operands and not stands_on(plan, n, operands[n])]
            if stale:
                return collected(name, [Problem(operand=n, what=what, next_step=how) for n in stale])
            if target is not None:
                target_named(target)
            variant = variant_of(attention)
            variant.check_sizes(_whole_call(variant, plan, (query, key, value), operands))
        except WeftError as error:
            return error
        return None


def _like(call: _Call, options: by_heads.Options, seed: object, train: bool) -> object:
    """What calls have in common of which one is as sound as the other, and says the same; None where values count.

    Variant and plan count as the objects that they are: whoever keeps this keeps them.
    """
    attention, query, key, value, plan, operands, latent = call
    main = query, key, value
    if not all([type(t) in PLAIN_TYPES for t in main]) or latent.tensors or latent.form or under_transform():
        return None
    if any([form_problem("", t) is not None for t in main]):  # it has no sizes that could be asked for
        return None
    if not isinstance(attention, Attention) or attention.canonical.drops or seed is not None:
        return None
    if not all([type(v) in (int, float) for v in operands.values()]):
        return None
    shapes = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in main]  # type: ignore[union-attr]
    beside = repr((operands, options, train))  # -0.0 is another number than 0.0, and 1 no True
    return id(attention), id(plan), *shapes, beside, torch.is_grad_enabled()


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


def _check_plan(name: str, plan: object, ranks: int) -> None:
    """Raise WeftError where it is none of these ranks."""
    if not isinstance(plan, ShardPlan):
        raise WeftError(f"{name}: plan: expected a ShardPlan, as cp.plan makes it, got {type(plan).__name__}")
    if plan.ranks != ranks:
        raise WeftError(f"{name}: expected a plan for {ranks} ranks, got one for {plan.ranks}")


def _check_rows(plan: ShardPlan, tensor: object, dim: int, of: str, rank: int) -> None:
    """Raise WeftError where a tensor has not the rows of a rank along a dimension."""
    name = f"{plan.attention.name}: unshard"
    deal = _deal_of(name, plan, of)
    _check_dim(name, tensor, dim)
    assert isinstance(tensor, Tensor)
    if tensor.shape[dim] != (rows := count(deal.rows(rank))):
        raise WeftError(f"{name}: expected {rows} rows, those of the {of} of rank {rank}, got {tensor.shape[dim]}")


def _check_dim(name: str, tensor: object, dim: object) -> None:
    """Raise WeftError where this is no tensor with such a dimension."""
    if (problem := form_problem("tensor", tensor)) is not None:
        raise WeftError(f"{name}: {problem}")
    assert isinstance(tensor, Tensor)
    if not is_int(dim, -tensor.dim(), tensor.dim() - 1):
        got = f"{[*tensor.shape]}"
        raise WeftError(f"{name}: expected a tensor with a dimension {shown(dim)}, got {got}")
    if problems := known_memory_problems({"tensor": tensor}):
        raise collected(name, problems)


def _deal_of(name: str, plan: ShardPlan, of: object) -> Deal:
    """How queries or keys are dealt."""
    if not isinstance(of, str) or of not in ("queries", "keys"):
        raise WeftError(f"{name}: of: expected 'queries' or 'keys', got {shown(of)}")
    return plan.queries if of == "queries" else plan.keys


def _deal(plan: ShardPlan, length: int) -> Deal:
    if length == plan.sizes.q_len:
        return plan.queries
    if length == plan.sizes.kv_len:
        return plan.keys
    lengths = " or ".join(map(str, dict.fromkeys((plan.sizes.q_len, plan.sizes.kv_len))))
    raise WeftError(f"{plan.attention.name}: shard: expected {lengths} rows, those of the plan, got {length}")


def _declared(call: _Call) -> dict[str, Any]:
    """The variant's own operands, with numbers of the declared kind."""
    declared = {p.name: p for p in call.attention.canonical.parameters}
    return {
        n: v if isinstance(v, Tensor) else as_number(v, KINDS[declared[n].dtype])
        for n, v in call.operands.items()
        if n in declared
    }


def _told(call: _Call, return_lse: bool) -> dict[str, str]:
    """What ranks compare: all that a mistake may differ in, by name, short."""
    attention, query, key, value, plan, operands, latent = call
    operands = {**operands, **latent.tensors}
    tensors = {"query": query, "key": key, "value": value, **operands}
    flags = [n for n, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()]
    shapes = [f"{n} {[*t.shape]} {str(t.dtype)[6:]}" for n, t in operands.items() if isinstance(t, Tensor)]
    numbers = [f"{n}={shown(v)}" for n, v in operands.items() if not isinstance(v, Tensor)]
    return {
        "variant": f"{attention.name} ({attention.canonical.digest})",
        "plan": plan.told,
        "dtypes": ", ".join(str(t.dtype)[6:] for t in (query, key, value) if isinstance(t, Tensor)),
        "operands": "; ".join((*shapes, *numbers)),
        "gradients": ", ".join(flags) + ("; lse" if return_lse else ""),
    }
