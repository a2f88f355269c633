"""Checks on concrete sizes and values, made where an op runs and remembered, so that a repeated call pays nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..compiler.facts import Facts
from ..compiler.ranges import Ranges, check_integers
from ..ir.errors import collected
from ..ir.expr import Scalar, TensorOperand
from .launch import CallTensors

_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_call(facts: Facts, parameters: Sequence[Scalar | TensorOperand], call: CallTensors) -> None:
    """Raise WeftError where an index could leave its tensor or an integer could leave 32 bits in this call."""
    batch, heads, q_len = call.query.shape[:3]
    kv_heads, kv_len = call.key.shape[1:3]
    if isinstance(call.q_offset, Tensor):
        first, last = 0, max(kv_len - 1, 0)  # offsets on the device are promised to keep positions inside the keys
    else:
        first, last = call.q_offset, call.q_offset + max(q_len - 1, 0)
    env: Ranges = {
        "q_pos": (first, last), "kv_pos": (0, max(kv_len - 1, 0)), "batch": (0, max(batch - 1, 0)),
        "head": (0, heads - 1), "kv_head": (0, kv_heads - 1), "group": (heads // kv_heads,) * 2,
        "q_len": (q_len, q_len), "kv_len": (kv_len, kv_len), "head_dim": (call.head_dim, call.head_dim),
    }  # fmt: skip
    extents: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for parameter, value in zip(parameters, call.operands, strict=True):
        if isinstance(value, Tensor):
            extents[parameter.name] = tuple(value.shape)
            assert isinstance(parameter, TensorOperand)
            problems += tensor_problems(parameter, value, call.query.device)
        elif parameter.dtype == "int":
            env[parameter.name] = (int(value), int(value))
    if not problems:
        attention = facts.attention
        for expression in (attention.folded_score, attention.folded_mask):
            problems += check_integers(expression, env, extents)
    if problems:
        raise collected(str(facts.attention.name), list(dict.fromkeys(problems)))


def tensor_problems(operand: TensorOperand, value: Tensor, device: torch.device) -> Iterator[str]:
    """What a kernel needs of a tensor operand.

    Asked at the call, and again by the op: a graph compiled by torch reaches the op without the checks of the call.
    """
    if value.dim() != operand.rank:
        yield f"{operand.name}: expected {operand.rank} dimensions, got shape {list(value.shape)}"
    if value.device != device:
        yield f"{operand.name}: expected device {device} as in query, got {value.device}"
    fits = {"float": value.is_floating_point(), "int": value.dtype in _INTS, "bool": value.dtype == torch.bool}
    if not fits[operand.dtype]:
        yield f"{operand.name}: expected a tensor of {operand.dtype}, got {value.dtype}"


def hopper_misfit(call: CallTensors) -> str | None:
    """Why the Hopper kernel cannot read these tensors in place; None where it can."""
    if isinstance(call.q_offset, Tensor):
        return "a q_offset for each batch row is computed by the triton target"
    if call.value is None or call.rope is not None:
        return None  # latent attention: refused by its widths
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if (tensor.data_ptr() | tensor.element_size() * (tensor.stride(0) | tensor.stride(1) | tensor.stride(2))) % 16:
            return f"{name}: its address and strides must be multiples of 16 bytes for the tensor memory accelerator"
    return None
