"""A call while torch.compile traces: the op in a graph, with what can be traced of the checks of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..codegen.torch_private import is_surely_negative
from ..ir.attention import Attention as Declaration
from ..ir.errors import WeftError, shown
from ..runtime.call import SLOTS, Arguments, choices_text, float_tensor
from ..runtime.check.sequences import checked
from ..runtime.check.tensors import check_tensors
from ..runtime.descales import out_name, refuse_bare
from ..runtime.ops.library import FORWARD
from ..runtime.options import CallOptions
from ..runtime.run.variant import say_of_first_key
from ..runtime.settings import traced_target
from .internals import Internals, Main, read_by_kernels


def traced(
    attention: Declaration, own: Internals, main: Main, options: CallOptions, operands: Mapping[str, Any],
    head_dim: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in a graph of torch.compile: what it can trace of the checks here, the others when the op runs."""
    query, key, value, rope = main
    is_ragged, paged = options.are_ragged, options.block_table is not None
    if attention.latent is None:
        check_tensors(str(attention.name), query, key, value, paged, longest=None)
    if set(operands) != set(own.names):
        unknown = [f"{n}: unknown operand or option" for n in operands if n not in own.names]
        missing = [f"{n}: missing; pass {n}=..." for n in own.names if n not in operands]
        raise WeftError(f"{attention.name}: {'; '.join([*unknown, *missing])}; the operands are {own.names}")
    tensors, floats, ints = _by_kind(attention, own, operands)
    if torch.compiler.is_exporting():  # packages of AOTInductor give None in place of an empty list
        tensors, floats, ints = tensors or [query], floats or [query], ints or [0]  # which nobody reads
    offset = options.q_offset
    if offset is None and not is_ragged:
        offset = before = key.shape[2] - query.shape[2]
        if own.counts_rows and is_surely_negative(before):
            say_of_first_key(attention.canonical.line)
    if isinstance(offset, (bool, float)):
        raise WeftError(f"{attention.name}: q_offset: expected an int or an int32 tensor, got {shown(offset)}")
    number, per_row = (None, offset) if isinstance(offset, Tensor) else (offset, None)
    if is_ragged:
        options = checked(str(attention.name), query, key, options.having(q_offset=offset))
    refuse_bare(str(attention.name), {"key": key, "value": value}, options)
    read = read_by_kernels(str(attention.name), query, key, value, options) if options.are_read else None
    own_slots = {"q_offsets": per_row, **(read or {})}
    slots = tuple([own_slots[name] if name in own_slots else getattr(options, name) for name in SLOTS])
    target = traced_target() if options.target is None else options.target
    schedule = None if options.schedule is None else str(options.schedule)
    arguments = Arguments(
        query, key, value, rope, tensors, floats, ints, number, slots, head_dim or query.shape[3],
        attention.canonical.line, choices_text(target, schedule, options.deterministic, out_name(options)),
    )  # fmt: skip
    return FORWARD(*arguments.flat)


def _by_kind(
    attention: Declaration, own: Internals, operands: Mapping[str, Any]
) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Tensors, floats and ints, as an op takes them."""
    tensors: list[Tensor] = []
    floats: list[Any] = []
    ints: list[Any] = []
    for name, kind in zip(own.names, own.kinds):
        given = operands[name]
        if isinstance(given, bool) or (kind == "int" and isinstance(given, float)):
            raise WeftError(
                f"{attention.name}: {name}: expected {'an int' if kind == 'int' else 'a ' + kind}, got {shown(given)}"
            )
        if isinstance(given, Tensor) != (kind == "tensor") or given is None or isinstance(given, str):
            raise WeftError(f"{attention.name}: {name}: expected a {kind}, got {type(given).__name__}")
        if kind == "tensor":
            tensors.append(given)
        elif kind == "float":
            floats.append(float_tensor(given))
        else:
            ints.append(given)
    return tensors, floats, ints
