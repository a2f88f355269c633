"""The two torch ops of Weft, one a direction for all variants, registered when this module is imported.

    weft::attention(query, key, value, rope, operands, floats, ints, q_offset, <tensors of options>, head_dim, variant,
                    options)
    weft::attention_backward(dout, dlse, out, lse, <the same>, wanted)

`Arguments` (call.py) has them by name; which tensors of options there are follows from the list of these (options.py).

`variant` is the canonical text of the variant, which reads back: declaring registers nothing, an exported program runs
in a process that never saw the declaration, and a graph shows what it computes. Floats are 0-d float64 tensors, so that
a new value recompiles nothing. `options` is the text of Choices, `wanted` says for query, key, value, rope and each
tensor operand whether it needs a gradient.

Where nothing watches a call, `run` goes past torch's dispatcher, which takes the host longer than the launch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..ir.errors import UnavailableError, WeftError, collected
from ..ir.expr import Scalar
from . import ending, flops
from .call import (
    MAIN,
    SCHEMA,
    SLOTS,
    Arguments,
    BackwardCall,
    Call,
    Choices,
    Dense,
    arguments_of,
    call_of,
    length_tensors,
    sequences_of,
)
from .checks import check_operand_kinds, check_q_offset, refuse_tracing
from .lengths import check_ragged
from .options import LENGTHS, PLAIN
from .repeated import Known, Repeats
from .settings import default_target
from .torch_private import (
    PLAIN_TYPES,
    are_plain,
    below_autograd,
    called_by_the_engine,
    has_tangent,
    named,
    stands_for_many,
    under_transform,
    unwatched,
)
from .transforms import call_under_transform, second_derivative
from .variant import Variant, check_trainable, contiguous_like, key_of, kinds_of, rows_like, variant_of_text

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(f"attention({SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SCHEMA}, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# -- a call, past the dispatcher or through it -----------------------------------------------------------------------
def run(variant: Variant, call: Call, wants_lse: bool) -> tuple[Tensor, Any]:
    """out and lse of a call, recorded for autograd where gradients are wanted; of lse no more than is wanted."""
    query, repeats = call.query, variant.repeats
    known = repeats.known
    if known is None or not known.fits(call):
        known = repeats.growing
        if known is not None and not known.fits(call):
            known = None
    if known is not None and unwatched():
        if not (known.recorded and torch.is_grad_enabled()):
            return variant.forward_again(call, known)
        if known.record is not None and not wants_lse and (found := variant.own_again(call, known)) is not None:
            return found
        given = [v for v in call.operands.values() if isinstance(v, Tensor)] if call.operands else ()
        return _record((variant, call, known), query, call.key, call.value, None, *given)
    tensors = [query, call.key, call.value, call.rope]
    if call.operands:
        tensors += [v for v in call.operands.values() if isinstance(v, Tensor)]
    recording = torch.is_grad_enabled()
    recorded, is_plain = False, not query.is_meta
    for t in tensors:
        if t is not None:
            recorded = recorded or (recording and t.requires_grad)
            is_plain = is_plain and type(t) in PLAIN_TYPES and not t.is_neg()
    if is_plain and unwatched() and not (recorded and call.read):
        if not recorded:
            return variant.forward(call)
        if query.is_cpu and not wants_lse and (own := variant.forward_own(call)) is not None:
            return own
        return _record((variant, call, None), *tensors)
    present = [t for t in tensors if isinstance(t, Tensor)]
    _refuse_forward_mode(variant.name, present)
    problems = check_operand_kinds(variant.attention, call.operands, query.device)
    if problems:
        raise collected(variant.name, problems)
    if isinstance(call.sequences, Dense):
        check_q_offset(call.q_offset, query.shape[0], query.device)
    else:
        check_ragged(variant.name, query, call.key, call.sequences)
    if under_transform():
        return call_under_transform(variant, call, FORWARD, BACKWARD)
    arguments = arguments_of(call, variant.kinds, variant.text).flat
    if recorded:
        return FORWARD(*arguments)
    with below_autograd():
        return FORWARD(*arguments)


def _negated(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one is a view that is negated when it is read: the dispatcher writes that out, a kernel does not."""
    return True in [t is not None and t.is_neg() for t in tensors]


def _refuse_forward_mode(name: str, tensors: Sequence[Tensor]) -> None:
    """What torch would drop or refuse in its own words: forward mode and torch.jit.trace."""
    refuse_tracing(name)
    if has_tangent(tensors):
        raise UnavailableError(f"{name}: forward-mode derivatives are not available; use {name}.reference(...)")


class _Kind(NamedTuple):
    """What all recorded calls have in common that were prepared as one, and that want the same gradients."""

    variant: Variant
    key: tuple[object, ...]
    names: tuple[str, ...]  # of the tensors: the main ones, then operands
    wanted: frozenset[str]
    operands: tuple[object, ...]  # what of the variant's own operands the key holds
    choices: Choices
    head_dim: int
    repeats: Repeats  # of their backwards


def _kind_of(variant: Variant, call: Call, key: tuple[object, ...], needed: tuple[bool, ...]) -> _Kind:
    """Raises WeftError where a gradient that is wanted cannot be computed."""
    names = variant.tensor_names
    wanted = frozenset([n for n, need in zip(names, needed[1:]) if need])
    check_trainable(variant, call.value is not None, sorted(wanted), paged=call.sequences.kind.keys.pooled)
    own = kinds_of(call.operands)
    return _Kind(variant, key, names, wanted, own, call.choices, call.head_dim, Repeats())


@called_by_the_engine
class _Recorded(torch.autograd.Function):
    """A call that nothing watches, and its gradients: what the op's autograd does, in half of its time on the host.

    Of a call, `ctx.rest` keeps its kind, its q_offset and its operands by name, None in place of a tensor: tensors are
    kept by autograd alone, so that hooks see all of them.
    """

    @staticmethod
    def forward(
        ctx: Any, given: tuple[Variant, Call, Known | None], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        variant, call, known = given
        kind = None if known is None else known.kind
        if kind is None:
            key = key_of(call)
            needed = ctx.needs_input_grad
            kind = variant.recorded.get((key, needed))
            if kind is None:
                kind = variant.recorded[key, needed] = _kind_of(variant, call, key, needed)
            if known is not None:
                known.kind = kind
        weights = None
        if known is None:
            out, lse, weights = variant.forward_recorded(call, kind.key)
        else:
            out, lse, weights = variant.forward_recorded_again(call, known)
        ctx.set_materialize_grads(False)
        sequences = call.sequences
        offset = sequences.q_offset
        operands = {n: None if isinstance(v, Tensor) else v for n, v in call.operands.items()} if call.operands else {}
        if type(sequences) is not Dense:
            ctx.save_for_backward(out, lse, *tensors, *length_tensors(sequences), _tensor_in(offset))
            ctx.rest = kind, _Ragged(None if isinstance(offset, Tensor) else offset), operands
        elif isinstance(offset, int):
            ctx.save_for_backward(out, lse, *tensors, *(() if weights is None else (weights,)))
            ctx.rest = kind, offset, operands
        else:
            ctx.save_for_backward(out, lse, *tensors, offset)
            ctx.rest = kind, None, operands
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        kind, offset, operands = ctx.rest
        out, lse, *tensors = ctx.saved_tensors
        sequences = None
        weights: tuple[Tensor, ...] = ()
        if offset is None:
            offset = tensors.pop()
        elif isinstance(offset, _Ragged):
            *tensors, per_row = tensors
            tensors, lengths = tensors[: -len(LENGTHS)], dict(zip(LENGTHS, tensors[-len(LENGTHS) :]))
            lengths["q_offset"] = offset.number if per_row is None else per_row
            offset = sequences = sequences_of(PLAIN.having(**lengths))
        elif len(tensors) > len(kind.names):
            weights = (tensors.pop(),)
        if operands:
            named = dict(zip(kind.names, tensors))
            operands = {n: named[n] if v is None else v for n, v in operands.items()}
        variant, repeats = kind.variant, kind.repeats
        query, key, value, rope = tensors[:4]
        known = repeats.known
        if known is not None and dout is not None and not torch.is_grad_enabled() and unwatched():
            given = (query, key, value, operands, offset, out, lse, dout, dlse, *weights)
            try:
                found = variant.backward_again(repeats, known, *given)
            except WeftError:
                raise
            except (IndexError, ValueError):  # an operand lost dimensions through .data: told below
                found = None
            if found is not None:
                return None, *found
        _refuse_many(variant.name, dout, dlse)
        if dout is None:
            dout = torch.zeros_like(out)
        watched = torch.is_grad_enabled() or not (unwatched() and are_plain((dout, dlse, *tensors)))
        # a hook of the user may have brought back something else than what was saved
        if not watched and (not operands or kinds_of(operands) == kind.operands):
            given = (query, key, value, operands, offset, out, lse, dout, dlse, *weights)
            try:
                found = variant.backward_of(kind.key, kind.wanted, repeats, *given)
            except WeftError:
                raise
            except (IndexError, ValueError):
                found = None
            if found is not None:
                return None, *found
        call = Call(query, key, value, rope, operands, sequences or Dense(offset), kind.choices, kind.head_dim)
        if watched or _negated((dout, dlse, *tensors)):
            gradients = _through_op(kind, call, out, lse, dout, dlse)
        else:
            gradients = variant.backward(_backward_call(call, out, lse, dout, dlse, kind.wanted, *weights))
        return None, *[gradients.get(n) for n in kind.names]


class _Ragged(NamedTuple):
    """In the place of a q_offset: the call has lengths, whose tensors autograd keeps."""

    number: int | None  # its q_offset, where that is no tensor


def _tensor_in(offset: int | Tensor | None) -> Tensor | None:
    return offset if isinstance(offset, Tensor) else None


# Autograd's own entry: torch's unwraps what no plain tensor can be wrapped in.
_record = super(torch.autograd.Function, _Recorded).apply


def _refuse_many(name: str, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Before anything reads them, and before a dispatcher that something watches does."""
    if (dout is not None and stands_for_many(dout)) or (dlse is not None and stands_for_many(dlse)):
        raise UnavailableError(
            f"{name}: is_grads_batched=True, as in torch.autograd.functional.jacobian(vectorize=True), is not "
            "available; call torch.autograd.grad for each gradient, or put them into the batch dimension"
        )


def _through_op(
    kind: _Kind, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    flags = [n in kind.wanted for n in kind.names]
    found = BACKWARD(dout, dlse, out, lse, *arguments_of(call, kind.variant.kinds, kind.variant.text).flat, flags)
    return dict(zip([n for n in kind.names if n in kind.wanted], found))


def _backward_call(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: frozenset[str],
    weights: Tensor | None = None,
) -> BackwardCall:  # fmt: skip
    """With tensors as kernels read them: rows contiguous, statistics contiguous."""
    if out.stride(-1) != 1:
        out = out.contiguous()
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if lse.untyped_storage().data_ptr():  # else it was given back, which is told of what the caller has
        lse = lse.contiguous()
    return BackwardCall(call, out, lse, dout, None if dlse is None else dlse.contiguous(), wanted, weights)


# -- implementations of the ops --------------------------------------------------------------------------------------
def _call(variant: Variant, given: Arguments) -> Call:
    call = call_of(variant.names, variant.kinds, given)
    target = call.choices.target or default_target()
    return call if target == call.choices.target else replace(call, choices=replace(call.choices, target=target))


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    given = Arguments.of(flat)
    variant = variant_of_text(given.variant)
    call, share = _call(variant, given), variant.attention.dropout
    if isinstance(share, Scalar) and not 0.0 <= call.operands[share.name] < 1.0:  # unseen while a call is traced
        raise WeftError(
            f"{variant.name}: {share.name}: expected a dropout from 0 on and below 1, got {call.operands[share.name]}"
        )
    with named(f"weft::{variant.name}"):
        out, lse = variant.forward(call)
    return out, lse.contiguous()  # as fake tensors have it


def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor]:
    given = Arguments.of(flat)
    out, lse = variant_of_text(given.variant).forward_places(given.query, given.value)
    return out.beside(given.query), lse.beside(given.query)


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *flat: Any) -> list[Tensor]:
    *of_call, flags = flat
    given = Arguments.of(of_call)
    variant = variant_of_text(given.variant)
    names = variant.tensor_names
    wanted = [n for n, flag in zip(names, flags, strict=True) if flag]
    check_trainable(variant, given.value is not None, wanted, paged=given.slot("block_table") is not None)
    call = _call(variant, given)
    with named(f"weft::{variant.name}_backward"):
        found = variant.backward(_backward_call(call, out, lse, dout, dlse, frozenset(wanted)))
    return [found[n] for n in wanted]


def _fake_backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *flat: Any) -> list[Tensor]:
    *of_call, flags = flat
    given = Arguments.of(of_call)
    places = [None if t is None else rows_like(t, t.shape[1], t.shape[3]) for t in given.main]
    places += [contiguous_like(t) for t in given.operands]
    return [place.beside(dout) for place, flag in zip(places, flags) if flag and place is not None]


# -- autograd --------------------------------------------------------------------------------------------------------
def _setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    given = Arguments.of(inputs)
    variant, choices = variant_of_text(given.variant), given.choices
    names = variant.tensor_names  # an exported program may have one more operand, which nobody reads
    flags = list(ctx.needs_input_grad[: len(names)])  # flat here, nested in a backward
    wanted = [n for n, flag in zip(names, flags) if flag]
    check_trainable(variant, given.value is not None, wanted, paged=given.slot("block_table") is not None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *given.main, *given.slots, *given.operands, *given.floats)
    target = default_target()  # of the caller's thread; a backward runs in another
    if target and "target=" not in choices:
        choices = f"target={target};{choices}" if choices else f"target={target}"
    ctx.rest = flags, len(given.operands), given.ints, given.q_offset, given.head_dim, given.variant, choices


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Of every input of the op; that of a list is a list."""
    flags, n_operands, ints, q_offset, *tail = ctx.rest
    _refuse_many(variant_of_text(tail[1]).name, dout, dlse)
    out, lse, *more = ctx.saved_tensors
    main, slots, more = more[: len(MAIN)], more[len(MAIN) :][: len(SLOTS)], more[len(MAIN) + len(SLOTS) :]
    operands, floats = more[:n_operands], more[n_operands:]
    dout = torch.zeros_like(out) if dout is None else dout
    given = Arguments.of([*main, operands, floats, ints, q_offset, *slots, *tail])
    found = iter(BACKWARD(dout, dlse, out, lse, *given.flat, flags))
    gradients = [next(found) if flag else None for flag in flags]
    gradients += [None] * (len(MAIN) + n_operands - len(flags))
    no_ints: Any = None if ints else []  # an empty list is a node of torch's trees: [] and not None
    of_lists = gradients[len(MAIN) :], [None] * len(floats), no_ints
    return *gradients[: len(MAIN)], *of_lists, *[None] * (1 + len(slots) + len(tail))


def _refuse_double_backward(ctx: Any, *gradients: Any) -> NoReturn:
    raise second_derivative(variant_of_text(ctx.text).name)


def _keep_text(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.text = Arguments.of(inputs[4:-1]).variant


def _refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
    text = next(a for a in arguments[-3:] if isinstance(a, str) and "weft.Attention(" in a)
    raise WeftError(
        f"{variant_of_text(text).name}: vmap is not available under torch.compile; "
        "put the mapped dimension into the batch dimension of the operands"
    )


for _name, _implementation, _fake in (
    ("attention", _forward, _fake_forward),
    ("attention_backward", _backward, _fake_backward),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _device)
    torch.library.register_fake(f"weft::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_vmap(f"weft::{_name}", _refuse_vmap, lib=_LIBRARY)
FORWARD = torch.ops.weft.attention.default
BACKWARD = torch.ops.weft.attention_backward.default
torch.library.register_autograd("weft::attention", _gradients, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd(
    "weft::attention_backward", _refuse_double_backward, setup_context=_keep_text, lib=_LIBRARY
)
flops.register(torch.ops.weft.attention, torch.ops.weft.attention_backward)
ending.in_order()
