"""Checks on concrete sizes and values, made where an op runs and remembered, so that a repeated call pays nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..compiler.analysis.facts import Facts
from ..compiler.analysis.ranges import Ranges, check_integers
from ..ir.errors import WeftError, collected
from ..ir.expr import INT32_MAX, Scalar, TensorOperand
from .launch import CallTensors

MAX_HEAD_DIM = 256
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(name: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], one dtype and device, last dim contiguous."""
    if value is None:
        raise WeftError(f"{name}: value: missing; call it with query, key and value")
    if _fit(query, key, value):
        return
    named = {"query": query, "key": key, "value": value}
    problems = list(rank_problems(named))
    if not problems:
        problems = [*_shape_problems(query, key, value), *kind_problems(named)]
    if problems:
        raise collected(name, problems)


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all is as it should be: one expression, because it runs at every call and torch.compile traces it."""
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if not (tensors and query.dim() == 4 and key.dim() == 4 and value.dim() == 4 and query.dtype in _FLOATS):
        return False
    batch, heads, q_len, dim = query.shape
    key_batch, kv_heads, kv_len, key_dim = key.shape
    value_batch, value_heads, value_len, value_dim = value.shape
    return (
        batch == key_batch == value_batch
        and dim == key_dim
        and kv_heads == value_heads
        and kv_len == value_len
        and heads > 0
        and kv_heads > 0
        and heads % kv_heads == 0
        and 0 < dim <= MAX_HEAD_DIM
        and 0 < value_dim <= MAX_HEAD_DIM
        and q_len <= INT32_MAX
        and kv_len <= INT32_MAX
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


def rank_problems(named: Mapping[str, Tensor]) -> Iterator[str]:
    for label, tensor in named.items():
        if not isinstance(tensor, Tensor):
            yield f"{label}: expected a tensor, got {type(tensor).__name__}"
        elif tensor.dim() != 4:
            yield (
                f"{label}: expected 4 dimensions [batch, heads, length, dim], got shape {list(tensor.shape)}; "
                "add a batch dimension with [None], or pass x.transpose(1, 2) of a [batch, length, heads, dim] tensor"
            )


def _shape_problems(query: Tensor, key: Tensor, value: Tensor) -> Iterator[str]:
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    for label, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != batch:
            yield f"{label}: expected batch {batch} as in query, got {tensor.shape[0]}"
    if key.shape[3] != dim:
        yield f"key: expected dim {dim} as in query, got {key.shape[3]}"
    if value.shape[1] != kv_heads:
        yield f"value: expected {kv_heads} heads as in key, got {value.shape[1]}"
    if value.shape[2] != kv_len:
        yield f"value: expected length {kv_len} as in key, got {value.shape[2]}"
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        yield f"query: expected a multiple of the key's {kv_heads} heads, got {heads} (grouped heads share a key head)"
    for label, width in (("query", dim), ("value", value.shape[3])):
        if not 0 < width <= MAX_HEAD_DIM:
            yield f"{label}: expected dim 1 to {MAX_HEAD_DIM}, got {width}; wider heads are for latent attention"
    for label, length in (("query", q_len), ("key", kv_len)):
        if length > INT32_MAX:
            yield f"{label}: integer overflow: expected a length below 2**31, got {length}"


def kind_problems(named: Mapping[str, Tensor]) -> Iterator[str]:
    query = named["query"]
    if query.dtype not in _FLOATS:
        yield f"query: expected bfloat16, float16 or float32, got {query.dtype}"
    for label, tensor in named.items():
        if tensor.dtype != query.dtype:
            yield f"{label}: expected dtype {query.dtype} as in query, got {tensor.dtype}; cast one of them"
        if tensor.device != query.device:
            yield f"{label}: expected device {query.device} as in query, got {tensor.device}"
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            strides = list(tensor.stride())
            yield f"{label}: expected a contiguous last dimension, got strides {strides}; call .contiguous()"


def check_call(facts: Facts, parameters: Sequence[Scalar | TensorOperand], call: CallTensors) -> None:
    """Raise WeftError where operands do not fit, an index could leave its tensor or an integer could leave 32 bits.

    The call makes some of these checks too, with all problems in one message; but a graph compiled or exported by torch
    reaches the op without them.
    """
    name = str(facts.attention.name)
    if call.value is not None and call.rope is None:
        check_tensors(name, call.query, call.key, call.value)
    check_q_offset(call.q_offset, call.query.shape[0], call.query.device)
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
        elif isinstance(parameter, Scalar) and parameter.dtype == "int":
            problems += range_problems(parameter, int(value))
            env[parameter.name] = (int(value), int(value))
    if not problems:
        attention = facts.attention
        for expression in (attention.folded_score, attention.folded_mask):
            problems += check_integers(expression, env, extents)
    if problems:
        raise collected(name, list(dict.fromkeys(problems)))


def check_q_offset(q_offset: object, batch: int, device: torch.device) -> None:
    """q_offset: an int, or int32 [B] on the operands' device."""
    if isinstance(q_offset, Tensor):
        if q_offset.dtype != torch.int32 or q_offset.dim() != 1 or q_offset.shape[0] != batch:
            raise WeftError(
                f"q_offset: expected an int or an int32 tensor [{batch}], got {q_offset.dtype} {list(q_offset.shape)}"
            )
        if q_offset.device != device:
            raise WeftError(f"q_offset: expected device {device} as in query, got {q_offset.device}")
    elif isinstance(q_offset, bool) or not isinstance(q_offset, (int, torch.SymInt)):
        raise WeftError(f"q_offset: expected an int or an int32 tensor [{batch}], got {q_offset!r}")
    elif isinstance(q_offset, int) and abs(q_offset) > INT32_MAX // 2:
        raise WeftError(f"q_offset: integer overflow: expected a value within 31 bits, got {q_offset}")


def range_problems(operand: Scalar, value: int) -> Iterator[str]:
    """What keeps an int scalar within the 32 bits that kernels take it in."""
    if not -INT32_MAX <= value <= INT32_MAX:
        yield f"{operand.name}: integer overflow: expected a value within 32 bits, got {value}"


def tensor_problems(operand: TensorOperand, value: Tensor, device: torch.device) -> Iterator[str]:
    """What a kernel needs of a tensor operand."""
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
