"""The two torch ops of Weft, one a direction for all variants, registered when this module is imported.

    weft::attention(query, key, value, rope, operands, floats, ints, q_offset, <tensors of options>, head_dim, variant,
                    options)
    weft::attention_backward(dout, dlse, out, lse, <the same>, wanted)

`Arguments` (call.py) has them by name; which tensors of options there are follows from the list of these (options.py).

`variant` is the canonical text of the variant, which reads back: declaring registers nothing, an exported program runs
in a process that never saw the declaration, and a graph shows what it computes. Floats are 0-d float64 tensors, so that
a new value recompiles nothing. `options` is the text of Choices, `wanted` says for query, key, value, rope and each
tensor operand whether it needs a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...codegen.torch_private import named, stands_for_many
from ...compiler.planning.target import Place
from ...ir.errors import UnavailableError, WeftError, collected, second_derivative
from ...ir.expr import Scalar
from .. import ending, flops
from ..call import MAIN, SCHEMA, SLOTS, Arguments, BackwardCall, Call, call_of, length_options, parse_choices
from ..check.operands import share_problems
from ..descales import unseen_problems
from ..run.gradients import contiguous_like, rows_like
from ..run.variant import Variant, check_trainable, variant_of_text
from ..settings import default_target

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(f"attention({SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SCHEMA}, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def refuse_many(name: str, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Before anything reads them, and before a dispatcher that something watches does."""
    if (dout is not None and stands_for_many(dout)) or (dlse is not None and stands_for_many(dlse)):
        raise UnavailableError(
            f"{name}: is_grads_batched=True, as in torch.autograd.functional.jacobian(vectorize=True), is not "
            "available; call torch.autograd.grad for each gradient, or put them into the batch dimension"
        )


def as_read(b: BackwardCall) -> BackwardCall:
    """With tensors as kernels read them: rows contiguous, statistics contiguous."""
    if b.out.stride(-1) != 1:
        b.out = b.out.contiguous()
    if b.dout.stride(-1) != 1:
        b.dout = b.dout.contiguous()
    if b.lse.untyped_storage().data_ptr():  # else it was given back, which is told of what the caller has
        b.lse = b.lse.contiguous()
    if b.dlse is not None:
        b.dlse = b.dlse.contiguous()
    return b


# -- implementations of the ops --------------------------------------------------------------------------------------
def _call(variant: Variant, given: Arguments) -> Call:
    call = call_of(variant.names, variant.kinds, given)
    target = call.choices.target or default_target()
    return call if target == call.choices.target else replace(call, choices=replace(call.choices, target=target))


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    given = Arguments.of(flat)
    variant = variant_of_text(given.variant)
    call, share = _call(variant, given), variant.attention.dropout
    if isinstance(share, Scalar) and (problems := share_problems(share.name, float(call.operands[share.name]))):
        raise collected(variant.name, problems)  # unseen while a call is traced
    if call.read and (problems := unseen_problems(call.read, given.main, length_options(call.sequences))):
        raise collected(variant.name, problems)
    with named(f"weft::{variant.name}"):
        out, lse = variant.forward(call)
    return out, lse.contiguous()  # as fake tensors have it


def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor]:
    given = Arguments.of(flat)
    out, lse = variant_of_text(given.variant).forward_places(
        given.query, given.key, given.value, parse_choices(given.choices)
    )
    return out.beside(given.query), lse.beside(given.query)


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *flat: Any) -> list[Tensor]:
    *of_call, flags = flat
    given = Arguments.of(of_call)
    variant = variant_of_text(given.variant)
    names = variant.tensor_names
    wanted = [n for n, flag in zip(names, flags, strict=True) if flag]
    check_trainable(variant, given.main, wanted, paged=given.slot("block_table") is not None)
    call = _call(variant, given)
    with named(f"weft::{variant.name}_backward"):
        found = variant.backward(as_read(BackwardCall(call, out, lse, dout, dlse, frozenset(wanted))))
    return [_laid_out(found[n], place) for n, place in zip(wanted, _places(given, flags), strict=True)]


def _fake_backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *flat: Any) -> list[Tensor]:
    *of_call, flags = flat
    return [place.beside(dout) for place in _places(Arguments.of(of_call), flags)]


def _places(given: Arguments, flags: Sequence[bool]) -> list[Place]:
    """Of the gradients that are wanted."""
    places = [None if t is None else rows_like(t, t.shape[1], t.shape[3]) for t in given.main]
    places += [contiguous_like(t) for t in given.operands]
    return [place for place, flag in zip(places, flags) if flag and place is not None]


def _laid_out(found: Tensor, place: Place) -> Tensor:
    """As fake tensors have it, which compiled code relies on: torch's own kernels have a layout of their own."""
    strides = zip(found.shape, found.stride(), place.stride)
    if all([size == 1 or own == wanted for size, own, wanted in strides]):
        return found
    return place.beside(found).copy_(found)


# -- autograd --------------------------------------------------------------------------------------------------------
def _setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    given = Arguments.of(inputs)
    variant, choices = variant_of_text(given.variant), given.choices
    names = variant.tensor_names  # an exported program may have one more operand, which nobody reads
    flags = list(ctx.needs_input_grad[: len(names)])  # flat here, nested in a backward
    wanted = [n for n, flag in zip(names, flags) if flag]
    check_trainable(variant, given.main, wanted, paged=given.slot("block_table") is not None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *given.main, *given.slots, *given.operands, *given.floats)
    target = default_target()  # of the caller's thread; a backward runs in another
    if target and "target=" not in choices:
        choices = f"target={target};{choices}" if choices else f"target={target}"
    ctx.rest = flags, len(given.operands), given.ints, given.q_offset, given.head_dim, given.variant, choices


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Of every input of the op; that of a list is a list."""
    flags, n_operands, ints, q_offset, head_dim, text, choices = ctx.rest
    refuse_many(variant_of_text(text).name, dout, dlse)
    out, lse, *more = ctx.saved_tensors
    main, slots, more = more[: len(MAIN)], more[len(MAIN) :][: len(SLOTS)], more[len(MAIN) + len(SLOTS) :]
    operands, floats = more[:n_operands], more[n_operands:]
    dout = torch.zeros_like(out) if dout is None else dout
    given = Arguments.of([*main, operands, floats, ints, q_offset, *slots, head_dim, text, choices])
    found = iter(BACKWARD(dout, dlse, out, lse, *given.flat, flags))
    gradients = [next(found) if flag else None for flag in flags]
    gradients += [None] * (len(MAIN) + n_operands - len(flags))
    no_ints: Any = None if ints else []  # an empty list is a node of torch's trees: [] and not None
    of_lists = gradients[len(MAIN) :], [None] * len(floats), no_ints
    behind = (q_offset, *slots, head_dim, text, choices)  # without gradients
    return *gradients[: len(MAIN)], *of_lists, *[None] * len(behind)


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
