"""What a call must satisfy: kinds and shapes of tensors, and numbers that kernels can take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from ..codegen.torch_private import is_traced
from ..compiler.planning.dtypes import named_by_torch
from ..ir.attention import Attention
from ..ir.errors import UnavailableError, WeftError, collected, counted, shown
from ..ir.expr import CALL_OPTIONS, INT32_MAX, Scalar, TensorOperand
from ..ir.foreign import option_hint
from .call import BackwardCall, Call, Dense, Lengths, Packed, PackedPaged, Paged, Pages

MAX_HEAD_DIM = 256
MAX_LENGTH = 2**30  # up to it tile programs are proven, in 32 bits where they compute in these
DTYPES = named_by_torch()
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # of float32
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, paged: bool = False, longest: int | None = MAX_LENGTH
) -> None:
    """query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], one dtype and device, last dim contiguous.

    paged: key [blocks, Hkv, page, D] and value [blocks, Hkv, page, Dv] are pools. longest: what L and T may be; None
    where torch traces them, and would hold an exported program to the answer.
    """
    if problems := main_problems(query, key, value, paged, longest):
        raise collected(name, problems)


def main_problems(
    query: Tensor, key: Tensor, value: Tensor | None, paged: bool = False, longest: int | None = MAX_LENGTH
) -> list[str]:
    """What `check_tensors` raises for."""
    if value is None:
        return ["value: missing; call it with query, key and value"]
    if _fit(query, key, value, paged, longest):
        return []
    named = {"query": query, "key": key, "value": value}
    return list(rank_problems(named)) or [*_shape_problems(query, key, value, paged), *kind_problems(named)]


def _fit(
    query: Tensor, key: Tensor, value: Tensor, paged: bool = False, longest: int | None = MAX_LENGTH
) -> bool:  # fmt: skip
    """Whether all is as it should be: one expression, because it runs at every call and torch.compile traces it."""
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if not tensors or query.is_nested or key.is_nested or value.is_nested:
        return False
    if not (query.dim() == 4 and key.dim() == 4 and value.dim() == 4 and query.dtype in _FLOATS):
        return False
    batch, heads, q_len, dim = query.shape
    key_batch, kv_heads, kv_len, key_dim = key.shape
    value_batch, value_heads, value_len, value_dim = value.shape
    return (
        (paged or batch == key_batch)
        and key_batch == value_batch
        and dim == key_dim
        and kv_heads == value_heads
        and kv_len == value_len
        and heads > 0
        and kv_heads > 0
        and heads % kv_heads == 0
        and 0 < dim <= MAX_HEAD_DIM
        and 0 < value_dim <= MAX_HEAD_DIM
        and (longest is None or (q_len <= longest and kv_len <= longest))
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


def form_problem(label: str, tensor: object) -> str | None:
    """What keeps a thing from being read as the tensors that kernels take: dense, with strides."""
    if not isinstance(tensor, Tensor):
        made = "torch.from_numpy(x)" if type(tensor).__module__ == "numpy" else "torch.tensor(x)"
        hint = f"; {made} makes one" if hasattr(tensor, "__len__") else ""
        return f"{label}: expected a tensor, got {type(tensor).__name__}{hint}"
    if tensor.is_nested:
        return f"{label}: expected a dense tensor, got a nested one; pad it, torch.nested.to_padded_tensor(x, 0.0)"
    if tensor.is_quantized:
        return f"{label}: expected a tensor of floats, got a quantized one ({tensor.dtype}); call x.dequantize()"
    if tensor.layout != torch.strided:
        return f"{label}: expected a dense tensor, got layout {tensor.layout}; call x.to_dense()"
    return None


def rank_problems(named: Mapping[str, Tensor]) -> Iterator[str]:
    for label, tensor in named.items():
        if (problem := form_problem(label, tensor)) is not None:
            yield problem
        elif tensor.dim() != 4:
            hint = "add a batch dimension with [None]"
            if tensor.dim() == 3:
                hint += (
                    ", or pass x.unflatten(2, (heads, dim)).transpose(1, 2) of [batch, length, heads * dim], "
                    "x.transpose(0, 1)[None] of packed [total, heads, dim]"
                )
            shape = list(tensor.shape)
            yield f"{label}: expected 4 dimensions [batch, heads, length, dim], got shape {shape}; {hint}"


def _shape_problems(query: Tensor, key: Tensor, value: Tensor, paged: bool = False) -> Iterator[str]:
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    for label, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != batch and not paged:
            yield f"{label}: expected batch {batch} as in query, got {tensor.shape[0]}"
    if paged and value.shape[0] != key.shape[0]:
        yield f"value: expected {counted(key.shape[0], 'block')} as in key, got {value.shape[0]}"
    if key.shape[3] != dim:
        yield f"key: expected dim {dim} as in query, got {key.shape[3]}"
    if value.shape[1] != kv_heads:
        yield f"value: expected {counted(kv_heads, 'head')} as in key, got {value.shape[1]}"
    if value.shape[2] != kv_len:
        what = "page" if paged else "length"
        yield f"value: expected {what} {kv_len} as in key, got {value.shape[2]}"
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        rows = (
            "pools are [blocks, heads, page, dim]: pass x.transpose(1, 2) of [blocks, page, heads, dim] pools" if paged
            else "dimensions are [batch, heads, length, dim]: pass x.transpose(1, 2) of [batch, length, heads, dim] "
            "tensors"
        )  # fmt: skip
        yield (
            f"query: expected a multiple of the key's {counted(kv_heads, 'head')}, got {heads} (grouped heads share "
            f"a key head); {rows}"
        )
    for label, width in (("query", dim), ("value", value.shape[3])):
        if not 0 < width <= MAX_HEAD_DIM:
            yield f"{label}: expected dim 1 to {MAX_HEAD_DIM}, got {width}; wider heads are for latent attention"
    for label, length in (("query", q_len), ("key", kv_len)):
        yield from length_problems(label, length)


def length_problems(label: str, length: int) -> Iterator[str]:
    if length > MAX_LENGTH:
        yield f"{label}: integer overflow: expected a length up to 2**30, got {length}"


def kind_problems(named: Mapping[str, Tensor]) -> Iterator[str]:
    query = named["query"]
    if query.dtype not in _FLOATS:
        yield f"query: expected bfloat16, float16 or float32, got {query.dtype}; cast it, query.to(torch.float32)"
    for label, tensor in named.items():
        if tensor.dtype != query.dtype:
            cast = f"cast one of them, {label}.to(query.dtype)"
            yield f"{label}: expected dtype {query.dtype} as in query, got {tensor.dtype}; {cast}"
        if tensor.device != query.device:
            yield f"{label}: expected device {query.device} as in query, got {tensor.device}"
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            strides = list(tensor.stride())
            yield f"{label}: expected a contiguous last dimension, got strides {strides}; call .contiguous()"


def fits(call: Call) -> bool:
    """Whether the main tensors fit each other: what may vary between calls that share what is prepared."""
    sequences = call.sequences
    if isinstance(sequences, Dense):
        if isinstance(sequences.q_offset, Tensor) and sequences.q_offset.shape[0] != call.query.shape[0]:
            return False
    elif not _rows_fit(call):
        return False
    if _without_memory({**call.tensors, **call.operands}):
        return False
    if call.value is None or call.rope is not None:
        return _latent_fits(call)
    return _fit(call.query, call.key, call.value, isinstance(sequences, Pages))


def _without_memory(given: Mapping[str, object]) -> list[str]:
    """The tensors whose storage was given back, `x.untyped_storage().resize_(0)`: kernels would read from 0 on."""
    return [
        n for n, t in given.items()
        if isinstance(t, Tensor) and not t.is_meta and t.numel()
        and t.data_ptr() == t.storage_offset() * t.element_size()
    ]  # fmt: skip


def _rows_fit(call: Call) -> bool:
    """Whether lengths are those of these operands, as far as shapes tell."""
    sequences, batches = call.sequences, (call.query.shape[0], call.key.shape[0])
    match sequences:
        case Lengths(q_lens, kv_lens):
            fit = all(t is None or t.shape[0] == batches[0] for t in (q_lens, kv_lens))
        case Packed(cu_q, cu_kv):
            fit = batches == (1, 1) and cu_q.shape == cu_kv.shape
        case Paged(q_lens, kv_lens, table):
            fit = all(t is None or t.shape[0] == batches[0] for t in (q_lens, kv_lens, table))
            fit = fit and call.kv_rows <= MAX_LENGTH
        case PackedPaged(cu_q, kv_lens, table):
            fit = batches[0] == 1 and cu_q.shape[0] - 1 == kv_lens.shape[0] == table.shape[0]
            fit = fit and call.kv_rows <= MAX_LENGTH
        case _:
            return False
    offset = sequences.q_offset
    return fit and (not isinstance(offset, Tensor) or offset.shape[0] == sequences.number(call.query))


def _latent_fits(call: Call) -> bool:
    query, key, value, rope = call.query, call.key, call.value, call.rope
    tensors = [t for t in (key, value, rope) if t is not None]
    kv_len, width = key.shape[2], key.shape[3] + (0 if rope is None else rope.shape[3])
    batch = key.shape[0] if isinstance(call.sequences, Pages) else query.shape[0]
    return (
        all(t.dim() == 4 and t.dtype == query.dtype and t.device == query.device for t in tensors)
        and all(t.shape[0] == batch and t.shape[2] == kv_len for t in tensors)
        and query.shape[3] == width
        and all(t.shape[3] == 1 or t.stride(3) == 1 for t in (query, *tensors))
        and all(t.shape[1] > 0 and query.shape[1] % t.shape[1] == 0 for t in tensors)
        and (value is None or value.shape[1] == key.shape[1])
        and query.shape[2] <= MAX_LENGTH
        and kv_len <= MAX_LENGTH
    )


def refuse_tracing(name: str) -> None:
    """Sizes are tensors there, and a trace would keep the numbers of one call."""
    if is_traced():
        raise UnavailableError(f"{name}: torch.jit.trace is not available; use torch.export or torch.compile")


def check_call(attention: Attention, call: Call) -> None:
    """Raise WeftError where the tensors of a call do not fit, or an operand is of another kind than declared.

    The api makes these checks too, with all problems in one message; but a graph compiled or exported by torch reaches
    the op without them.
    """
    name = str(attention.name)
    if call.value is not None and call.rope is None:
        check_tensors(name, call.query, call.key, call.value, isinstance(call.sequences, Pages))
    elif not _latent_fits(call):
        shapes = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in call.tensors.items())
        raise WeftError(f"{name}: the operands of latent attention do not fit each other: {shapes}")
    if isinstance(call.sequences, Dense):
        check_q_offset(call.q_offset, call.query.shape[0], call.query.device)
    problems = check_operand_kinds(attention, call.operands, call.query.device)
    if problems:
        raise collected(name, problems)
    if empty := _without_memory({**call.tensors, **call.operands}):
        if shards := [n for n, t in {**call.tensors, **call.operands}.items() if hasattr(t, "to_local")]:
            raise WeftError(
                f"{name}: {', '.join(shards)}: expected a plain tensor as query is, got a DTensor; distribute the "
                "query too, or call on local tensors, x.to_local()"
            )
        raise _freed(name, empty)


def _freed(name: str, tensors: Sequence[str]) -> WeftError:
    return WeftError(
        f"{name}: {', '.join(tensors)}: expected a tensor with memory, got one whose storage was resized to 0 bytes, "
        "as sharding frees parameters; call before it is freed, or after it is filled again"
    )


def check_operand_kinds(
    attention: Attention,
    given: Mapping[str, object],
    device: torch.device | None,
    all_of: Collection[str] | None = None,
) -> list[str]:
    """What is wrong with the variant's own operands: each must be there and of the declared kind.

    device: that tensors must be on; any where None. all_of: those that must be there; all where None.
    """
    declared = {p.name: p for p in attention.parameters}
    problems = [_unknown(n, declared) for n in given if n not in declared]
    for name, operand in declared.items():
        if all_of is not None and name not in all_of:
            continue
        if name not in given:
            problems.append(f"{name}: missing; pass {name}=... ({_kind(operand)}, declared at {operand.where})")
        else:
            problems += _operand_problems(operand, given[name], device)
    return problems


def _unknown(name: str, declared: Mapping[str, object]) -> str:
    names = ", ".join(sorted(declared)) or "none"
    hint = option_hint(name)
    close = get_close_matches(name, declared, 1) or get_close_matches(name, CALL_OPTIONS, 1, 0.8)
    if hint is None and close:
        hint = f"did you mean {close[0]}?"
    return f"{name}: unknown operand or option; this variant's operands are: {names}{'; ' + hint if hint else ''}"


def _kind(operand: Scalar | TensorOperand) -> str:
    if isinstance(operand, Scalar):
        return f"{'an' if operand.dtype == 'int' else 'a'} {operand.dtype}"
    return f"a tensor of {operand.dtype} with {_dimensions(operand.rank)}"


def _dimensions(rank: int) -> str:
    return f"{rank} dimension{'' if rank == 1 else 's'}"


def _operand_problems(operand: Scalar | TensorOperand, value: object, device: torch.device | None) -> Iterator[str]:
    if isinstance(operand, Scalar):
        yield from _scalar_problems(operand, value)
    elif not isinstance(value, Tensor):
        hint = "; torch.as_tensor(x) makes one" if hasattr(value, "__len__") and not isinstance(value, str) else ""
        yield f"{operand.name}: expected {_kind(operand)}, got {type(value).__name__}{hint}"
    else:
        yield from tensor_problems(operand, value, device)


def _scalar_problems(operand: Scalar, value: object) -> Iterator[str]:
    if isinstance(value, Tensor):
        kind, n = operand.dtype, operand.name
        number = "" if value.requires_grad else f"pass {n}={kind}({n}), or "
        yield (
            f"{n}: expected a Python number, got a tensor; {number}declare it with weft.tensor to pass a tensor: "
            f'{n} = weft.tensor("{n}", 0, {kind}), read as {n} and given as {n}={n}'
            + (".reshape(())" if value.dim() else "")
        )
    elif operand.dtype == "int":
        if isinstance(value, (bool, float)) or not isinstance(value, (int, torch.SymInt)):
            yield f"{operand.name}: expected an int, got {value!r}"
        elif isinstance(value, int):
            yield from range_problems(operand, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        yield f"{operand.name}: expected a number, got {value!r}"
    elif isinstance(value, (int, float)):
        yield from float_problems(operand, value)


def check_kept(name: str, b: BackwardCall) -> None:
    """Raise WeftError where an operand is no longer what the forward read, as far as dimensions and dtypes tell."""
    dtype = b.out.dtype
    changed = [
        f"{n}, of {f'shape {list(t.shape)}' if t.dim() != 4 else t.dtype}"
        for n, t in b.call.tensors.items()
        if t.dim() != 4 or t.dtype != dtype
    ]
    if changed:
        raise WeftError(
            f"{name}: {'; '.join(changed)}: expected what the forward read, got what was put in its place before the "
            "backward, as by x.data = ...; keep operands until the backward has run"
        )


def check_backward(name: str, b: BackwardCall, pair: bool) -> None:
    """Raise WeftError where what a backward starts from does not fit the forward."""
    if empty := _without_memory({"out": b.out, "lse": b.lse, "dout": b.dout, "dlse": b.dlse}):
        raise _freed(name, empty)
    query, value = b.call.query, b.call.value
    batch, heads, rows, _ = query.shape
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    if b.out.shape[:3] != (batch, heads, rows) or (value is not None and b.out.shape[3] != value.shape[3]):
        raise WeftError(f"{name}: out: expected [{batch}, {heads}, {rows}, Dv], got {list(b.out.shape)}")
    rows_shape = (*((2,) if pair else ()), *b.out.shape[:3])
    for label, tensor, shape, dtype in (
        ("dout", b.dout, b.out.shape, query.dtype), ("out", b.out, b.out.shape, query.dtype),
        ("lse", b.lse, rows_shape, statistics), ("dlse", b.dlse, rows_shape, statistics),
    ):  # fmt: skip
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != query.device:
            got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise WeftError(f"{name}: {label}: expected {list(shape)} {dtype} on {query.device}, got {got}")


def check_q_offset(q_offset: object, batch: int | None, device: torch.device | None) -> None:
    """q_offset: an int, or int32 [B] on the operands' device. No tensor for batch None; any device for device None."""
    if isinstance(q_offset, Tensor) and batch is None:
        raise WeftError("q_offset: expected an int, got a tensor; a picture is of one row of the batch")
    if isinstance(q_offset, Tensor):
        if (problem := form_problem("q_offset", q_offset)) is not None:
            raise WeftError(problem)
        if q_offset.dtype != torch.int32 or q_offset.dim() != 1 or q_offset.shape[0] != batch:
            how = "pass int(x)" if q_offset.dim() == 0 else "pass x.to(torch.int32), one for each batch row"
            got = f"{q_offset.dtype} {list(q_offset.shape)}"
            raise WeftError(f"q_offset: expected an int or an int32 tensor [{batch}], got {got}; {how}")
        if device is not None and q_offset.device != device:
            raise WeftError(f"q_offset: expected device {device} as in query, got {q_offset.device}")
    elif isinstance(q_offset, bool) or not isinstance(q_offset, (int, torch.SymInt)):
        kinds = "an int" if batch is None else f"an int or an int32 tensor [{batch}]"
        raise WeftError(f"q_offset: expected {kinds}, got {q_offset!r}")
    elif isinstance(q_offset, int) and abs(q_offset) > INT32_MAX // 2:
        raise WeftError(f"q_offset: integer overflow: expected a value within 31 bits, got {shown(q_offset)}")


def range_problems(operand: Scalar, value: int) -> Iterator[str]:
    """What keeps an int scalar within the 32 bits that kernels take it in."""
    if not -INT32_MAX <= value <= INT32_MAX:
        yield f"{operand.name}: integer overflow: expected a value within 32 bits, got {shown(value)}"


def float_problems(operand: Scalar, value: int | float, dtype: torch.dtype | None = None) -> Iterator[str]:
    """What keeps a float scalar within the floats that kernels compute in. dtype: of the query; None: not known."""
    most = 2**1023 if dtype in (None, torch.float64) else FLOAT32_MAX
    if value != value:
        yield f"{operand.name}: expected a number, got NaN"
    elif abs(value) > most and abs(value) != math.inf:
        bits = "64" if most != FLOAT32_MAX else "32"
        yield f"{operand.name}: float overflow: expected a number that {bits} bits hold, or inf, got {shown(value)}"


def tensor_problems(operand: TensorOperand, value: Tensor, device: torch.device | None) -> Iterator[str]:
    """What a kernel needs of a tensor operand."""
    if (problem := form_problem(operand.name, value)) is not None:
        yield problem
        return
    if value.dim() != operand.rank:
        yield (
            f"{operand.name}: expected {_dimensions(operand.rank)}, as declared at {operand.where}, got shape "
            f"{list(value.shape)}"
        )
    if device is not None and value.device != device:
        yield f"{operand.name}: expected device {device} as in query, got {value.device}"
    fits = {"float": value.dtype in _FLOATS, "int": value.dtype in _INTS, "bool": value.dtype == torch.bool}
    if not fits[operand.dtype]:
        cast = {"float": "float()", "int": "to(torch.int32)", "bool": "bool()"}[operand.dtype]
        how = f"cast it, {operand.name}.{cast}"
        if operand.dtype == "bool" and value.is_floating_point():
            how += ", or declare it with dtype float where it is to be added: score=score + x[...]"
        yield f"{operand.name}: expected a tensor of {operand.dtype}, got {value.dtype}; {how}"
