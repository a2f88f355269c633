"""A call: past torch's dispatcher, which takes the host longer than a launch does, where nothing watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...codegen.torch_private import PLAIN_TYPES, below_autograd, has_tangent, under_transform, unwatched
from ...ir.errors import UnavailableError, collected
from ..call import Call, arguments_of
from ..check import row_problems
from ..check.operands import operand_problems
from ..check.tensors import refuse_tracing
from ..run.variant import Variant
from .library import BACKWARD, FORWARD
from .recorded import record
from .transforms import call_under_transform


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
            return variant.forward_like(call, known)
        if known.record is not None and not wants_lse and (found := variant.own_again(call, known)) is not None:
            return found
        given = [v for v in call.operands.values() if isinstance(v, Tensor)] if call.operands else ()
        return record((variant, call, known), query, call.key, call.value, call.rope, *given)
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
        return record((variant, call, None), *tensors)
    present = [t for t in tensors if isinstance(t, Tensor)]
    _refuse_forward_mode(variant.name, present)
    problems = [*operand_problems(variant.attention, call.operands, query.device), *row_problems(call)]
    if problems:
        raise collected(variant.name, problems)
    if under_transform():
        return call_under_transform(variant, call, FORWARD, BACKWARD)
    arguments = arguments_of(call, variant.kinds, variant.text).flat
    if recorded:
        return FORWARD(*arguments)
    with below_autograd():
        return FORWARD(*arguments)


def again(variant: Variant, call: Call, grows: Callable[[], bool]) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call with FP8 operands that is like the one before, whose descales nobody has looked at yet.

    None, with nothing done, for any other. grows: whether more keys change nothing that is decided for the call.
    """
    known = variant.repeats.known
    if known is None or not known.fits(call):
        known = variant.repeats.growing
        if known is None or not known.fits(call) or not grows():
            return None
    if (known.recorded and torch.is_grad_enabled()) or not unwatched():
        return None
    return variant.forward_again(call, known)


def _refuse_forward_mode(name: str, tensors: Sequence[Tensor]) -> None:
    """What torch would drop or refuse in its own words: forward mode and torch.jit.trace."""
    refuse_tracing(name)
    if has_tangent(tensors):
        raise UnavailableError(f"{name}: forward-mode derivatives are not available; use {name}.reference(...)")
