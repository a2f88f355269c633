"""A call that autograd records and nothing else watches: what the op's autograd does, in half of its host time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...codegen.launch.fast.repeats import Known, Repeats
from ...codegen.torch_private import are_plain, called_by_the_engine, unwatched
from ...ir.errors import WeftError
from ..call import MAIN, BackwardCall, Call, Choices, Dense, arguments_of, length_tensors, sequences_of
from ..options import LENGTHS, PLAIN
from ..run.key import key_of, kinds_of
from ..run.variant import Variant, check_trainable
from .library import BACKWARD, as_read, refuse_many

Gradients = Sequence[Tensor | None]
_LOST_DIMENSIONS = (IndexError, ValueError)  # of an operand, through .data: the longer way tells what is wrong


class Kind(NamedTuple):
    """What all recorded calls have in common that were prepared as one, and that want the same gradients."""

    variant: Variant
    key: object
    names: tuple[str, ...]  # of the tensors: the main ones, then operands
    wanted: frozenset[str]
    operands: tuple[object, ...]  # what of the variant's own operands the key holds
    choices: Choices
    head_dim: int
    repeats: Repeats  # of their backwards

    @staticmethod
    def of(variant: Variant, call: Call, needed: tuple[bool, ...]) -> Kind:
        """That of a call. Raises WeftError where a gradient that is wanted cannot be computed."""
        key = key_of(call)
        found: Kind | None = variant.recorded.get((key, needed))
        if found is None:
            names = variant.tensor_names
            wanted = frozenset([n for n, need in zip(names, needed) if need])
            main = call.query, call.key, call.value
            check_trainable(variant, main, sorted(wanted), paged=call.sequences.kind.keys.pooled)
            own = kinds_of(call.operands)
            found = Kind(variant, key, names, wanted, own, call.choices, call.head_dim, Repeats())
            variant.recorded[key, needed] = found
        return found

    def gradients(self, b: BackwardCall, plain: bool) -> Gradients:
        """Of a call that is not like the last one. plain: nothing watches it."""
        call, variant = b.call, self.variant
        # a hook of the user may have brought back something else than what was saved
        if plain and (not call.operands or kinds_of(call.operands) == self.operands):
            try:
                found = variant.backward_directly(b, self.key, self.repeats)
            except WeftError:
                raise
            except _LOST_DIMENSIONS:
                found = None
            if found is not None:
                return found
        if plain and not _negated(_tensors(b)):
            by_name = variant.backward(as_read(b))
        else:
            flags = [n in self.wanted for n in self.names]
            arguments = arguments_of(call, variant.kinds, variant.text).flat
            given = BACKWARD(b.dout, b.dlse, b.out, b.lse, *arguments, flags)
            by_name = dict(zip([n for n in self.names if n in self.wanted], given))
        return [by_name.get(n) for n in self.names]


def _tensors(b: BackwardCall) -> list[Tensor | None]:
    """What a backward reads that may be watched."""
    call = b.call
    own = [t for t in call.operands.values() if isinstance(t, Tensor)]
    return [b.dout, b.dlse, call.query, call.key, call.value, call.rope, *own]


def _negated(tensors: Iterable[Any]) -> bool:
    """Whether one is a view that is negated when it is read: the dispatcher writes that out, a kernel does not."""
    return True in [isinstance(t, Tensor) and t.is_neg() for t in tensors]


class _Lengths(NamedTuple):
    """In the place of sequences that have lengths, whose tensors autograd keeps."""

    number: int | None  # their q_offset, where that is no tensor


@called_by_the_engine
class _Recorded(torch.autograd.Function):
    """Of a call, `ctx.rest` keeps its kind, its sequences and its operands by name, None in place of a tensor: tensors
    are kept by autograd alone, so that hooks see all of them."""

    @staticmethod
    def forward(
        ctx: Any, given: tuple[Variant, Call, Known | None], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        variant, call, known = given
        kind: Kind | None = None if known is None else known.kind
        if kind is None:
            _, *needed = ctx.needs_input_grad
            kind = Kind.of(variant, call, tuple(needed))
            if known is not None:
                known.kind = kind
        if known is None:
            out, lse, weights = variant.forward_keeping(call, kind.key)
        elif known.keeping is None:
            (out, lse), weights = variant.forward_like(call, known), None
        else:
            out, lse, weights = variant.forward_keeping_like(call, known)
        ctx.set_materialize_grads(False)
        sequences = call.sequences
        offset = sequences.q_offset
        operands = {n: None if isinstance(v, Tensor) else v for n, v in call.operands.items()} if call.operands else {}
        if type(sequences) is not Dense:
            per_row = offset if isinstance(offset, Tensor) else None
            ctx.save_for_backward(out, lse, *tensors, *length_tensors(sequences), per_row)
            ctx.rest = kind, _Lengths(None if isinstance(offset, Tensor) else offset), operands
        elif isinstance(offset, int):
            ctx.save_for_backward(out, lse, *tensors, *(() if weights is None else (weights,)))
            ctx.rest = kind, sequences, operands
        else:
            ctx.save_for_backward(out, lse, *tensors, offset)
            ctx.rest = kind, None, operands
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        b = _restored(ctx, dout, dlse)
        kind, _, _ = ctx.rest
        quiet = not torch.is_grad_enabled() and unwatched()
        if quiet and dout is not None and kind.repeats.known is not None:
            try:
                found = kind.variant.backward_like(b, kind.repeats)
            except WeftError:
                raise
            except _LOST_DIMENSIONS:
                found = None
            if found is not None:
                return None, *found
        refuse_many(kind.variant.name, dout, dlse)
        if dout is None:
            b.dout = torch.zeros_like(b.out)
        return None, *kind.gradients(b, quiet and are_plain(_tensors(b)))


def _restored(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> BackwardCall:
    """The call, of what was kept of it."""
    kind, sequences, operands = ctx.rest
    out, lse, query, key, value, rope, *tensors = ctx.saved_tensors
    weights = None
    if sequences is None:
        sequences = Dense(tensors.pop())
    elif type(sequences) is _Lengths:
        *tensors, per_row = tensors
        tensors, lengths = tensors[: -len(LENGTHS)], dict(zip(LENGTHS, tensors[-len(LENGTHS) :]))
        lengths["q_offset"] = sequences.number if per_row is None else per_row
        sequences = sequences_of(PLAIN.having(**lengths))
    elif len(tensors) + len(MAIN) > len(kind.names):
        weights = tensors.pop()
    if operands:
        own = iter(tensors)
        operands = {n: next(own) if v is None else v for n, v in operands.items()}
    call = Call(query, key, value, rope, operands, sequences, kind.choices, kind.head_dim)
    return BackwardCall(call, out, lse, dout, dlse, kind.wanted, weights)  # type: ignore[arg-type]


# Autograd's own entry: torch's unwraps what no plain tensor can be wrapped in.
record = super(torch.autograd.Function, _Recorded).apply
