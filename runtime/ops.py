"""Each variant as two torch ops, `weft::<name>_<digest>_forward` and `_backward`: schema, fake, autograd, no vmap.

An op takes the variant's operands by name, and finds its generated module by dtype, widths and device when it runs, so
that a variant is registered once and a graph that holds the op can be exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..compiler.analysis.facts import facts_of
from ..compiler.analysis.records import OperandGradient
from ..compiler.planning.records import Specialisation
from ..compiler.planning.target import device_arch
from ..ir.attention import Attention
from ..ir.errors import UnavailableError, WeftError
from ..ir.expr import TensorOperand
from ..ir.reference import evaluate
from . import launch
from .checks import check_call, hopper_misfit
from .driver import Compiled, compile_kernel
from .launch import CallTensors, Operand, Place
from .prepared import Recent, layout_of

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_registered: dict[str, Ops] = {}
Run = TypeVar("Run")
N_FIRST = 4  # query, key, value, rope come before the variant's operands


class Ops(NamedTuple):
    """The two ops of a variant, and what they call."""

    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload
    variant: _Variant


def ops_of(attention: Attention) -> Ops:
    """The ops of a variant, registered when first asked for."""
    text = attention.canonical_text
    if text not in _registered:
        _registered[text] = _register(attention)
    return _registered[text]


# -- schema -----------------------------------------------------------------------------------------------------------
def _operand_schema(attention: Attention) -> str:
    kinds = {"int": "SymInt", "float": "float"}
    parts = [f"{'Tensor' if isinstance(p, TensorOperand) else kinds[p.dtype]} {p.name}" for p in attention.parameters]
    return "".join(f"{p}, " for p in parts)


def _register(attention: Attention) -> Ops:
    name = f"{attention.name}_{attention.digest}"
    tail = f"{_operand_schema(attention)}SymInt q_offset, Tensor? q_offsets, SymInt head_dim, str target, str schedule"
    first = "Tensor query, Tensor key, Tensor? value, Tensor? rope"
    forward, backward = f"{name}_forward", f"{name}_backward"
    _LIBRARY.define(f"{forward}({first}, {tail}) -> (Tensor, Tensor)")
    grads = "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse"
    _LIBRARY.define(f"{backward}({grads}, {first}, {tail}, str wanted) -> Tensor[]")
    variant = _Variant(attention)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(forward, variant.forward, key)
        _LIBRARY.impl(backward, variant.backward, key)
    for op, fake in ((forward, variant.fake_forward), (backward, variant.fake_backward)):
        torch.library.register_fake(f"weft::{op}", fake, lib=_LIBRARY)
        torch.library.register_vmap(f"weft::{op}", variant.refuse_vmap, lib=_LIBRARY)
    namespace = torch.ops.weft
    ops = Ops(getattr(namespace, forward).default, getattr(namespace, backward).default, variant)
    variant.backward_op = ops.backward
    torch.library.register_autograd(
        f"weft::{forward}", variant.gradients, setup_context=variant.save_for_backward, lib=_LIBRARY
    )
    torch.library.register_autograd(f"weft::{backward}", variant.refuse_double_backward, lib=_LIBRARY)
    return ops


# -- the functions behind the ops --------------------------------------------------------------------------------------
class _Ready(NamedTuple, Generic[Run]):
    """What is settled for all calls of one layout, checks included."""

    run: Run
    results: tuple[Place, ...]  # of what a call returns: out and lse, or the gradients


class _Variant:
    """Implementations for one variant; arguments come as the schema lists them."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.parameters = attention.parameters
        self.facts = facts_of(attention)
        self.backward_op: Callable[..., list[Tensor]] = self.backward  # the op, once it is registered
        self.forward_calls: Recent[_Ready[launch.Forward]] = Recent()
        self.backward_calls: Recent[_Ready[launch.Backward]] = Recent()

    # forward
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, *rest: object
    ) -> tuple[Tensor, Tensor]:
        layout = layout_of((query, key, value, rope, *rest))
        call, target, schedule = self._unpack(query, key, value, rope, rest)
        ready = self.forward_calls.get(layout)
        if ready is None:
            check_call(self.facts, self.parameters, call)
            if 0 in (query.shape[0], query.shape[2], key.shape[2]):
                return launch.zero_forward(*self._forward_results(query, value))
            with _on_device(query):
                run = launch.forward(self._compiled("forward", call, target, schedule))
            ready = self.forward_calls.keep(layout, _Ready(run, self._forward_places(query, value)))
        return self._run_forward(ready, call)

    def ready(self, arguments: Sequence[object]) -> _Ready[launch.Forward] | None:
        """What is settled for the forward op's arguments; None for calls that must be checked first."""
        return self.forward_calls.found(layout_of(arguments))

    def repeat(self, ready: _Ready[launch.Forward], arguments: Sequence[object]) -> tuple[Tensor, Tensor]:
        """What the op computes, without torch's dispatch, which takes the host longer than the launch does."""
        query, key, value, rope, *rest = arguments
        return self._run_forward(ready, self._unpack(query, key, value, rope, rest)[0])  # type: ignore[arg-type]

    def record(self, ready: _Ready[launch.Forward], arguments: Sequence[object]) -> tuple[Tensor, Tensor]:
        """The same for a call that wants gradients."""
        return _Recorded.apply(self, ready, *arguments)

    def _run_forward(self, ready: _Ready[launch.Forward], call: CallTensors) -> tuple[Tensor, Tensor]:
        query = call.query
        out, lse = [place.beside(query) for place in ready.results]
        if _is_here(query):
            ready.run(call, out, lse)
        else:
            with torch.cuda.device(query.device):
                ready.run(call, out, lse)
        return out, lse

    def fake_forward(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, *rest: object
    ) -> tuple[Tensor, Tensor]:
        return self._forward_results(query, value)

    def _forward_results(self, query: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = self._forward_places(query, value)
        return out.beside(query), lse.beside(query)

    def _forward_places(self, query: Tensor, value: Tensor | None) -> tuple[Place, Place]:
        """Of out [B, Hq, L, Dv] and lse [B, Hq, L]."""
        batch, heads, rows, _ = query.shape
        width = value.shape[-1] if value is not None else self.attention.latent.rank  # type: ignore[union-attr]
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return launch.rows_like(query, heads, width), Place((batch, heads, rows), (heads * rows, rows, 1), lse_dtype)

    # backward
    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor,
        value: Tensor | None, rope: Tensor | None, *rest: object,
    ) -> list[Tensor]:  # fmt: skip
        *values, names = rest
        call, target, schedule = self._unpack(query, key, value, rope, values)
        wanted = tuple(n for n in str(names).split(",") if n)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        layout = layout_of((dout, dlse, out, lse, query, key, value, rope, *rest))
        ready = self.backward_calls.get(layout)
        if ready is None:
            if 0 in (query.shape[0], query.shape[2], key.shape[2]):
                return [place.beside(query).zero_() for place in self._gradient_places(call, wanted)]
            with _on_device(query):
                run = launch.backward(self._compiled("backward", call, target, schedule, wanted))
            ready = self.backward_calls.keep(layout, _Ready(run, self._gradient_places(call, ())))
        tensors = [place.beside(query) for place in ready.results]
        with _on_device(query):
            sums = ready.run(call, out, lse, dout, dlse, tensors)
        if not wanted:
            return tensors
        gradients = self.facts.operand_gradients(frozenset(wanted))
        return [*tensors, *self._operand_gradients(call, wanted, gradients, sums)]

    def fake_backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor,
        value: Tensor | None, rope: Tensor | None, *rest: object,
    ) -> list[Tensor]:  # fmt: skip
        *values, names = rest
        call, _, _ = self._unpack(query, key, value, rope, values)
        wanted = tuple(n for n in str(names).split(",") if n)
        return [place.beside(query) for place in self._gradient_places(call, wanted)]

    def _gradient_places(self, call: CallTensors, wanted: Sequence[str]) -> tuple[Place, ...]:
        """Of what a backward returns: for query, key, value, rope, and then the wanted operands."""
        tensors = [t for t in (call.query, call.key, call.value, call.rope) if t is not None]
        operands = {p.name: v for p, v in zip(self.parameters, call.operands)}
        read = [operands[n] for n in wanted]
        return (
            *(launch.rows_like(t, t.shape[1], t.shape[3]) for t in tensors),
            *(contiguous_like(t) for t in read if isinstance(t, Tensor)),
        )

    def _operand_gradients(
        self, call: CallTensors, wanted: Sequence[str], gradients: Sequence[OperandGradient], sums: Sequence[Tensor]
    ) -> list[Tensor]:
        operands = {p.name: v for p, v in zip(self.parameters, call.operands)}
        results = {n: torch.zeros(operands[n].shape, dtype=sums[0].dtype, device=sums[0].device) for n in wanted}  # type: ignore[union-attr]
        for gradient, total in zip(gradients, sums):
            scatter(gradient, total, call, operands, results[gradient.load.tensor.name])
        return [results[n].to(operands[n].dtype) for n in wanted]  # type: ignore[union-attr]

    # shared
    def _unpack(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, rest: Sequence[object]
    ) -> tuple[CallTensors, str | None, str | None]:
        *operands, q_offset, q_offsets, head_dim, target, schedule = rest
        offset = q_offset if q_offsets is None else q_offsets
        call = CallTensors(query, key, value, rope, operands, offset, head_dim)  # type: ignore[arg-type]
        return call, target or None, schedule or None  # type: ignore[return-value]

    def _compiled(
        self,
        direction: str,
        call: CallTensors,
        target: str | None,
        schedule: str | None,
        gradients: tuple[str, ...] = (),
    ) -> Compiled:
        query, value, rope = call.query, call.value, call.rope
        if direction == "backward":
            if target == "hopper":
                target = "triton"  # the backward behind the Hopper forward
            schedule = schedule if schedule and "/hopper/" not in schedule else None
        elif target in (None, "hopper") and query.is_cuda:
            target = self._hopper_or_triton(call, target)
        value_dim = value.shape[-1] if value is not None else self.attention.latent.rank  # type: ignore[union-attr]
        rope_dim = 0 if rope is None else rope.shape[-1]
        spec = self._specialisation(direction, query, value_dim, rope_dim, value is None, gradients)
        return compile_kernel(self.attention, spec, target, schedule)

    def _specialisation(
        self, direction: str, query: Tensor, value_dim: int, rope_dim: int, value_is_key: bool,
        gradients: tuple[str, ...],
    ) -> Specialisation:  # fmt: skip
        return Specialisation(
            direction=direction,  # type: ignore[arg-type]
            arch=device_arch(query.device),
            dtype=DTYPES[query.dtype],
            head_dim=query.shape[-1],
            value_dim=value_dim,
            rope_dim=rope_dim,
            value_is_key=value_is_key,
            gradients=gradients,
        )

    def _hopper_or_triton(self, call: CallTensors, target: str | None) -> str | None:
        """`triton` where the Hopper kernel could serve such calls but not these tensors."""
        misfit = hopper_misfit(call)
        if misfit is not None and target == "hopper":
            raise UnavailableError(f"{self.attention.name}: target hopper: {misfit}")
        return "triton" if misfit is not None else target

    # autograd
    def save_for_backward(self, ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        self.save(ctx, inputs, output, ctx.needs_input_grad)

    def save(self, ctx, inputs, output, needs) -> None:  # type: ignore[no-untyped-def]
        """Keep what `gradients` wants. needs: which of the inputs need a gradient."""
        names = [p.name for p in self.parameters]
        wanted = [n for n, need in zip(names, needs[N_FIRST:]) if need]
        self.facts.check_gradients(frozenset(wanted))
        if inputs[2] is None and any(needs):
            raise WeftError(
                f"{self.attention.name}: the absorbed form has no backward; "
                "call with uk=, uv= and form='expanded' to train"
            )
        ctx.wanted = ",".join(wanted)
        ctx.set_materialize_grads(False)
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        ctx.rest = [None if isinstance(t, Tensor) else t for t in inputs]
        ctx.is_tensor = [isinstance(t, Tensor) for t in inputs]
        ctx.save_for_backward(*output, *tensors)

    def gradients(self, ctx, dout, dlse) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        """Of every input of the forward op."""
        out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        inputs = [next(tensors) if is_tensor else other for is_tensor, other in zip(ctx.is_tensor, ctx.rest)]
        dout = torch.zeros_like(out) if dout is None else dout
        arguments = (dout, dlse, out, lse, *inputs, ctx.wanted)
        direct = not torch.is_grad_enabled() and unwatched(arguments)
        found = iter(self.backward(*arguments) if direct else self.backward_op(*arguments))
        wanted = ctx.wanted.split(",")
        names = [None] * N_FIRST + [p.name for p in self.parameters] + [None] * (len(inputs))
        return tuple(
            next(found) if (i < N_FIRST and inputs[i] is not None) or (n is not None and n in wanted) else None
            for i, n in zip(range(len(inputs)), names)
        )

    def refuse_double_backward(self, ctx, *grads) -> NoReturn:  # type: ignore[no-untyped-def]
        raise WeftError(
            f"{self.attention.name}: second derivatives are not available; use {self.attention.name}.reference(...), "
            "which torch can differentiate twice"
        )

    def refuse_vmap(self, info, in_dims, *args) -> NoReturn:  # type: ignore[no-untyped-def]
        raise WeftError(
            f"{self.attention.name}: vmap is not available; "
            "put the mapped dimension into the batch dimension of the operands"
        )


class _Recorded(torch.autograd.Function):
    """A call that is ready, and its gradients: what the op's autograd does, in half of its time on the host."""

    @staticmethod
    def forward(ctx, variant, ready, *inputs):  # type: ignore[no-untyped-def]
        output = variant.repeat(ready, inputs)
        ctx.variant = variant
        variant.save(ctx, inputs, output, ctx.needs_input_grad[2:])
        return output

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        return None, None, *ctx.variant.gradients(ctx, dout, dlse)


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, int, float, str, type(None)})
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_mode = torch._C._is_torch_function_mode_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state
_profiler = torch._C._autograd._profiler_enabled


def unwatched(arguments: Sequence[object]) -> bool:
    """Whether nothing but its caller is to see an op: no tensor subclass, mode, transform, tracer or profiler."""
    return (
        _dispatch_modes() == 0
        and not _function_mode()
        and _transform() is None
        and _tracer() is None
        and not _profiler()
        and forward_ad._current_level < 0
        and _PLAIN_TYPES.issuperset(map(type, arguments))
    )


def scatter(
    gradient: OperandGradient, total: Tensor, call: CallTensors, operands: dict[str, Operand], result: Tensor
) -> None:
    """Add the sums of one read, shaped [B, Hq], [B, Hq, L] or [B, Hq, T], to the places that it was read from."""
    batch, heads, q_len = call.query.shape[:3]
    kv_heads, kv_len = call.key.shape[1:3]
    device = total.device
    head = torch.arange(heads, device=device).view(1, -1, 1)
    offset = call.q_offset.view(-1, 1, 1) if isinstance(call.q_offset, Tensor) else call.q_offset
    env = {
        "batch": torch.arange(batch, device=device).view(-1, 1, 1), "head": head,
        "kv_head": head // (heads // kv_heads), "group": heads // kv_heads, "q_len": q_len, "kv_len": kv_len,
        "head_dim": call.head_dim, "q_pos": torch.arange(q_len, device=device) + offset,
        "kv_pos": torch.arange(kv_len, device=device), **operands,
    }  # fmt: skip
    sums = total if total.dim() == 3 else total[..., None]
    index = [evaluate(i, env, torch.float64, device).expand(sums.shape) for i in gradient.load.index]
    if device.type == "cuda":
        result.index_put_(tuple(index), sums, accumulate=True)  # sorts, so the order of additions is fixed
        return
    flat = torch.zeros_like(index[0])
    for places, extent in zip(index, result.shape):
        flat = flat * extent + places
    # index_put_ adds in any order on a CPU; bincount goes through its input once, from first to last
    result += torch.bincount(flat.flatten(), sums.flatten(), result.numel()).view(result.shape).to(result.dtype)


def contiguous_like(tensor: Tensor) -> Place:
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * size)
    return Place(tuple(tensor.shape), tuple(reversed(strides)), tensor.dtype)


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the operands' GPU the current one: Triton launches there, whatever the caller's current device is."""
    return nullcontext() if _is_here(tensor) else torch.cuda.device(tensor.device)


def _is_here(tensor: Tensor) -> bool:
    return not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()
