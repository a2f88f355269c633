"""Checks on concrete sizes and values, made where an op runs and remembered, so that a repeated call pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from ..compiler.facts import Facts
from ..compiler.ranges import Extents, Ranges, check_integers
from ..ir.errors import collected
from ..ir.expr import Scalar, TensorOperand
from .launch import CallTensors


def check_indices_and_integers(facts: Facts, parameters: Sequence[Scalar | TensorOperand], call: CallTensors) -> None:
    """Raise WeftError where an index could leave its tensor or an integer could leave 32 bits in this call."""
    scalars = tuple(v for p, v in zip(parameters, call.operands) if isinstance(p, Scalar) and p.dtype == "int")
    shapes = tuple(tuple(v.shape) for v in call.operands if isinstance(v, Tensor))
    batch, heads, q_len = call.query.shape[:3]
    kv_heads, kv_len = call.key.shape[1:3]
    # Offsets on the device are promised to keep positions inside the keys' sequence.
    offset = None if isinstance(call.q_offset, Tensor) else call.q_offset
    _check(facts, tuple(parameters), scalars, shapes, batch, heads, kv_heads, q_len, kv_len, call.head_dim, offset)


@lru_cache(maxsize=16384)
def _check(
    facts: Facts, parameters: tuple[Scalar | TensorOperand, ...], scalars: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...], batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int,
    head_dim: int, offset: int | None,
) -> None:  # fmt: skip
    first = 0 if offset is None else offset
    last = max(kv_len - 1, 0) if offset is None else offset + q_len - 1
    env: Ranges = {
        "q_pos": (first, max(first, last)), "kv_pos": (0, max(kv_len - 1, 0)), "batch": (0, max(batch - 1, 0)),
        "head": (0, heads - 1), "kv_head": (0, kv_heads - 1), "group": (heads // kv_heads,) * 2,
        "q_len": (q_len, q_len), "kv_len": (kv_len, kv_len), "head_dim": (head_dim, head_dim),
    }  # fmt: skip
    ints = iter(scalars)
    env |= {p.name: (v, v) for p in parameters if isinstance(p, Scalar) and p.dtype == "int" for v in (next(ints),)}
    tensors = [p for p in parameters if isinstance(p, TensorOperand)]
    extents: Extents = {p.name: shape for p, shape in zip(tensors, shapes)}
    attention = facts.attention
    problems = [p for e in (attention.folded_score, attention.folded_mask) for p in check_integers(e, env, extents)]
    if problems:
        raise collected(str(attention.name), list(dict.fromkeys(problems)))


def hopper_misfit(call: CallTensors) -> str | None:
    """Why the Hopper kernel cannot read these tensors in place; None where it can."""
    if isinstance(call.q_offset, Tensor):
        return "a q_offset for each batch row is computed by the triton target"
    assert call.value is not None
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if (tensor.data_ptr() | tensor.element_size() * (tensor.stride(0) | tensor.stride(1) | tensor.stride(2))) % 16:
            return f"{name}: its address and strides must be multiples of 16 bytes for the tensor memory accelerator"
    return None
