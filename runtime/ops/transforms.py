"""Calls under torch.func: grad, vjp, jacrev and vmap.

torch's transforms take an autograd.Function apart: what it computes, what it keeps, its backward, and what it is over a
mapped dimension. Here the ops are put into two such functions. A mapped dimension joins the batch dimension of the
operands, a view where strides allow; what cannot join is computed one call after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...ir.errors import UnavailableError, second_derivative
from ...ir.walk import symbols
from ..call import MAIN, SLOTS, Arguments, Call, arguments_of
from ..run.variant import Variant, check_trainable

Dim = int | None  # of a tensor that is mapped over
OPERANDS = len(MAIN) + len(SLOTS)  # where the variant's own begin, behind the main tensors and those of options
_BY_ROW = {"q_offsets", "q_lens", "kv_lens"}  # one number for each row of the batch


@dataclass(frozen=True)
class Rest:
    """What of an op's arguments is no tensor that could be mapped over."""

    variant: Variant
    given: Arguments  # of the call, whose tensors are not read from here

    def arguments(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Of the op `weft::attention`. tensors: the main ones, those of options, operands."""
        main: dict[str, Any] = dict(zip(MAIN, tensors))
        own: dict[str, Any] = {"slots": tuple(tensors[len(MAIN) : OPERANDS]), "operands": list(tensors[OPERANDS:])}
        return self.given._replace(**main, **own).flat

    def batch_axes(
        self, tensors: Sequence[Tensor | None], dims: Sequence[Dim], wanted: frozenset[str] = frozenset()
    ) -> list[Dim] | None:
        """Of each tensor the axis that a mapped dimension joins; None where it cannot, because something tells rows of
        the batch apart, or adds them up."""
        shared = any(t is not None for n, t in zip(SLOTS, tensors[len(MAIN) :]) if n not in _BY_ROW)
        reads_batch = any("batch" in symbols(e) for e in self.variant.attention.canonical.expressions)
        mapped = any(d is not None for d in dims[OPERANDS:])
        if shared or reads_batch or mapped or self.variant.attention.canonical.drops or wanted.difference(MAIN):
            return None
        return [0] * OPERANDS + [None] * (len(tensors) - OPERANDS)

    @property
    def statistics_axis(self) -> int:
        """Of lse, which is a pair where scores may lie far from 0."""
        return int(self.variant.facts.scores_lie_far)


def call_under_transform(variant: Variant, call: Call, forward: Any, backward: Any) -> tuple[Tensor, Tensor]:
    """out and lse. forward, backward: the ops."""
    given = arguments_of(call, variant.kinds, variant.text)
    rest = Rest(variant, given._replace(query=None, key=None, value=None, rope=None, slots=(), operands=()))  # type: ignore[arg-type]
    return _Attention.apply(rest, forward, backward, *given.main, *given.slots, *given.operands)


def _no_jvp(ctx: Any, *tangents: Any) -> NoReturn:
    raise UnavailableError(
        "weft: forward-mode derivatives (torch.func.jvp, jacfwd) are not available; use .reference(...)"
    )


class _Attention(torch.autograd.Function):
    """(rest, the ops, tensors) -> out, lse."""

    jvp = staticmethod(_no_jvp)

    @staticmethod
    def forward(rest: Rest, forward: Any, backward: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return forward(*rest.arguments(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        rest, _, backward, *tensors = inputs
        names = rest.variant.tensor_names
        places = [*range(len(MAIN)), *range(OPERANDS, len(tensors))]
        ctx.flags = tuple(ctx.needs_input_grad[3 + place] for place in places)
        wanted = [n for n, flag in zip(names, ctx.flags) if flag]
        paged = tensors[len(MAIN) + SLOTS.index("block_table")] is not None
        check_trainable(rest.variant, tensors, wanted, paged)
        ctx.rest, ctx.op, ctx.places = rest, backward, places
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        found = iter(_Gradients.apply(ctx.rest, ctx.op, ctx.flags, dout, dlse, out, lse, *tensors))
        gradients: list[Tensor | None] = [None] * len(tensors)
        for place, flag in zip(ctx.places, ctx.flags):
            gradients[place] = next(found) if flag else None
        return None, None, None, *gradients

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rest: Rest, forward: Any, backward: Any, *tensors: Tensor | None
    ) -> Any:
        def attend(*given: Tensor | None) -> tuple[Tensor, Tensor]:
            return _Attention.apply(rest, forward, backward, *given)

        dims = in_dims[3:]
        axes = rest.batch_axes(tensors, dims)
        return _mapped(info.batch_size, dims, tensors, attend, axes, (0, rest.statistics_axis))


class _Gradients(torch.autograd.Function):
    """(rest, the op, which gradients, dout, dlse, out, lse, tensors) -> those gradients."""

    jvp = staticmethod(_no_jvp)

    @staticmethod
    def forward(
        rest: Rest, op: Any, flags: Sequence[bool], dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return tuple(op(dout, dlse, out, lse, *rest.arguments(tensors), list(flags)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rest, *_ = inputs
        ctx.name = rest.variant.name

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise second_derivative(ctx.name)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rest: Rest, op: Any, flags: Sequence[bool], *tensors: Tensor | None
    ) -> Any:
        def gradients(*given: Tensor | None) -> tuple[Tensor, ...]:
            return _Gradients.apply(rest, op, flags, *given)

        dims = in_dims[3:]
        wanted = frozenset(n for n, flag in zip(rest.variant.tensor_names, flags) if flag)
        axes = rest.batch_axes(tensors[4:], dims[4:], wanted)
        if axes is not None:
            axes = [0, rest.statistics_axis, 0, rest.statistics_axis, *axes]
        return _mapped(info.batch_size, dims, tensors, gradients, axes, (0,) * len(wanted))


def _mapped(
    size: int, dims: Sequence[Dim], tensors: Sequence[Tensor | None], call: Callable[..., tuple[Tensor, ...]],
    axes: Sequence[Dim] | None, of_results: Sequence[int],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
    """Results of a call over a mapped dimension, and where that lies in each.

    axes: of each tensor the axis that is its batch, None where it has none; None in all where nothing can be joined.
    of_results: the same of results.
    """
    if not size:  # of one call, what comes back is known; its numbers are not wanted
        none = [t if t is None or d is None else t.new_zeros(t.movedim(d, 0).shape[1:]) for t, d in zip(tensors, dims)]
        return tuple(t.new_empty((0, *t.shape)) for t in call(*none)), (0,) * len(of_results)
    if axes is None:
        each = [
            call(*(t if d is None or t is None else t.select(d, i) for t, d in zip(tensors, dims))) for i in range(size)
        ]
        return tuple(torch.stack(found) for found in zip(*each)), (0,) * len(of_results)
    given = [t if t is None or a is None else _joined(t, d, size, a) for t, d, a in zip(tensors, dims, axes)]
    found = call(*given)
    return tuple(t.unflatten(a, (size, -1)) for t, a in zip(found, of_results)), tuple(of_results)


def _joined(tensor: Tensor, dim: Dim, size: int, axis: int) -> Tensor:
    """With the mapped dimension, in front of the batch, as a part of it."""
    if dim is None:
        tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], size, *tensor.shape[axis:])
    else:
        tensor = tensor.movedim(dim, axis)
    return tensor.flatten(axis, axis + 1)
