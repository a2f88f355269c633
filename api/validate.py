"""What a call must satisfy, checked before any op runs; all problems of a call are raised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codegen.checks import tensor_problems
from .ir.errors import WeftError, collected
from .ir.expr import INT32_MAX, Scalar, TensorOperand

if TYPE_CHECKING:
    from .ir.attention import Attention

MAX_HEAD_DIM = 256
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_tensors(name: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], one dtype and device, last dim contiguous."""
    if value is None:
        raise WeftError(f"{name}: value: missing; call it with query, key and value")
    if _fit(query, key, value):
        return
    named = {"query": query, "key": key, "value": value}
    problems = list(_rank_problems(named))
    if not problems:
        problems = [*_shape_problems(query, key, value), *_kind_problems(named)]
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


def _rank_problems(named: Mapping[str, Tensor]) -> Iterator[str]:
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


def _kind_problems(named: Mapping[str, Tensor]) -> Iterator[str]:
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


def check_operands(attention: Attention, given: Mapping[str, object], device: torch.device) -> None:
    """The variant's own operands: all there, none unknown, each of the declared kind."""
    declared = {p.name: p for p in attention.parameters}
    problems = [_unknown(n, declared) for n in given if n not in declared]
    for name, operand in declared.items():
        if name not in given:
            problems.append(f"{name}: missing; pass {name}=... ({_kind(operand)}, declared at {operand.where})")
        else:
            problems += _operand_problems(operand, given[name], device)
    if problems:
        raise collected(str(attention.name), problems)


def _unknown(name: str, declared: Mapping[str, object]) -> str:
    names = ", ".join(sorted(declared)) or "none"
    return f"{name}: unknown operand or option; this variant's operands are: {names}"


def _kind(operand: Scalar | TensorOperand) -> str:
    if isinstance(operand, Scalar):
        return f"{'an' if operand.dtype == 'int' else 'a'} {operand.dtype}"
    return f"a tensor of {operand.dtype} with {operand.rank} dimension{'s' if operand.rank > 1 else ''}"


def _operand_problems(operand: Scalar | TensorOperand, value: object, device: torch.device) -> Iterator[str]:
    if isinstance(operand, Scalar):
        yield from _scalar_problems(operand, value)
    elif not isinstance(value, Tensor):
        yield f"{operand.name}: expected {_kind(operand)}, got {type(value).__name__}"
    else:
        yield from tensor_problems(operand, value, device)


def _scalar_problems(operand: Scalar, value: object) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{operand.name}: expected a Python number, got a tensor; declare it with weft.tensor to pass a tensor"
    elif operand.dtype == "int":
        if isinstance(value, (bool, float)) or not isinstance(value, (int, torch.SymInt)):
            yield f"{operand.name}: expected an int, got {value!r}"
        elif isinstance(value, int) and not -INT32_MAX <= value <= INT32_MAX:
            yield f"{operand.name}: integer overflow: expected a value within 32 bits, got {value}"
    elif isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        yield f"{operand.name}: expected a number, got {value!r}"


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


def check_latent(attention: Attention, query: Tensor, cache: Tensor, uk: Tensor | None, uv: Tensor | None) -> None:
    """query [B, H, L, nope + rope], cache [B, 1, T, rank + rope], uk [H, rank, nope], uv [H, rank, Dv]."""
    latent, name = attention.latent, str(attention.name)
    assert latent is not None
    problems = list(_rank_problems({"query": query, "cache": cache}))
    if problems:
        raise collected(name, problems)
    if cache.shape[1] != 1:
        problems.append(f"cache: expected 1 head [B, 1, T, rank + rope], got {cache.shape[1]}")
    if cache.shape[3] != latent.rank + latent.rope:
        problems.append(f"cache: expected dim {latent.rank + latent.rope} (rank + rope), got {cache.shape[3]}")
    if cache.shape[0] != query.shape[0]:
        problems.append(f"cache: expected batch {query.shape[0]} as in query, got {cache.shape[0]}")
    problems += _kind_problems({"query": query, "cache": cache})
    if (uk is None) != (uv is None):
        problems.append("uk, uv: expected both or neither")
    elif uk is None:
        if attention.scale is None:
            problems.append(
                "scale: without uk and uv the query is latent and its true width is unknown; declare scale="
            )
        if query.shape[3] != latent.rank + latent.rope:
            problems.append(
                f"query: expected dim {latent.rank + latent.rope} (rank + rope) without uk, got {query.shape[3]}"
            )
    else:
        problems += _projection_problems(latent.rank, latent.rope, query, uk, uv)  # type: ignore[arg-type]
    if problems:
        raise collected(name, problems)


def _projection_problems(rank: int, rope: int, query: Tensor, uk: Tensor, uv: Tensor) -> Iterator[str]:
    heads, nope = query.shape[1], query.shape[3] - rope
    for label, tensor in (("uk", uk), ("uv", uv)):
        if tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[1] != rank:
            yield f"{label}: expected [{heads}, {rank}, width], got shape {list(tensor.shape)}"
        elif tensor.dtype != query.dtype or tensor.device != query.device:
            expected, got = (f"{t.dtype} on {t.device}" for t in (query, tensor))
            yield f"{label}: expected {expected} as in query, got {got}"
        elif label == "uk" and tensor.shape[2] != nope:
            yield f"uk: expected width {nope} (query's dim minus rope), got {tensor.shape[2]}"
