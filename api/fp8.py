"""FP8: numbers of 8 bits, each with a factor beside it that makes it real. Quantising, and what makes it exact enough.

key8, value8 = weft.fp8.quantize(key), weft.fp8.quantize(value)
out = variant(query, key8.data, value8.data, k_descale=key8.descale, v_descale=value8.descale)
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .calls.dtensors import is_sharded
from .calls.nested import are_jagged
from .ir.errors import WeftError, collected, shown
from .runtime import descales
from .runtime.check.tensors import form_problem, known_memory_problems
from .runtime.descales import ROWS, Per
from .runtime.ops import quantize as op

Layout: TypeAlias = Literal["rows", "columns"]
_FROM = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

__all__ = ["Quantized", "dequantize", "quantize", "rotate"]


class Quantized(NamedTuple):
    """An FP8 operand: a real number is an element of `data` times its `descale`."""

    data: Tensor  # [B, H, L, D]
    descale: Tensor  # float32: [1, 1, 1, 1], [B, H, 1, 1], or [B, H, blocks, 1]


torch.serialization.add_safe_globals([Quantized])  # torch.load reads it with weights_only=True


def quantize(
    x: Tensor, per: Per = "head", dtype: torch.dtype = torch.float8_e4m3fn, layout: Layout = "rows"
) -> Quantized:  # fmt: skip
    """x [B, H, L, D] as FP8 numbers with the descales of what `per` names, so that the largest of them fits exactly.

    per: one descale for the "tensor", for each "head" of each batch row, for each block of 64 or 128 rows, or for each
    "token". dtype: torch.float8_e4m3fn or torch.float8_e5m2. layout: "columns" stores a value so that its length is
    contiguous, as products of FP8 want it, and gives a view [B, H, L, D] of that.

    What is all 0 has descale 1. Infinite numbers become the largest finite ones, and NaN stays NaN. Numbers of fp64 are
    taken as float32 has them: beyond 3.4e38 they are infinite.

    >>> data, descale = quantize(torch.tensor([[[[1.0, -2.0]]]]))
    >>> data.float(), descale.item() == 2 / 448
    (tensor([[[[ 224., -448.]]]]), True)
    """
    problems = []
    if are_jagged(x):
        how = "quantise its rows, x.values()[None], which calls take with cu_seqlens_kv=x.offsets()"
        problems.append(f"x: expected a dense tensor, got a nested one; {how}")
    elif (problem := form_problem("x", x)) is not None:
        problems.append(str(problem))
    elif is_sharded(x):
        problems.append("x: expected a plain tensor, got a DTensor; quantise what this process has, x.to_local()")
    elif x.dim() != 4 or x.dtype not in _FROM:
        problems.append(f"x: expected [B, H, L, D] of bf16, fp16, fp32 or fp64, got {x.dtype} {list(x.shape)}")
    if not descales.is_per(per):
        problems.append(f"per: expected 'tensor', 'head', 64, 128 or 'token', got {shown(per)}")
    if not descales.is_fp8(dtype):
        problems.append(f"dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {shown(dtype)}")
    if not isinstance(layout, str) or layout not in get_args(Layout):
        problems.append(f"layout: expected 'rows' or 'columns', got {shown(layout)}")
    if problems := problems or [str(problem) for problem in known_memory_problems({"x": x})]:
        raise collected("weft.fp8.quantize", problems)
    return Quantized(*op.quantize(x, ROWS[per], dtype, layout == "columns"))


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The real numbers, [B, H, L, D]."""
    if not isinstance(quantized, tuple) or [isinstance(t, Tensor) for t in quantized] != [True, True]:
        raise WeftError(f"dequantize: expected Quantized(data, descale), got {type(quantized).__name__}")
    if not isinstance(dtype, torch.dtype) or dtype not in _FROM:
        raise WeftError(f"dequantize: dtype: expected bf16, fp16, fp32 or fp64, got {shown(dtype)}")
    quantized = Quantized(*quantized)
    _check_read("dequantize", {"data": quantized.data, "descale": quantized.descale})
    kinds = quantized.data.dtype, quantized.descale.dtype
    if kinds[0] not in descales.FP8 or kinds[1] != torch.float32:
        raise WeftError(f"dequantize: expected data of FP8 and a descale of float32, got {kinds[0]} and {kinds[1]}")
    if quantized.data.dim() != 4 or not descales.fits("key", quantized.data, quantized.descale, pooled=False):
        got = f"{list(quantized.data.shape)} and {list(quantized.descale.shape)}"
        raise WeftError(f"dequantize: expected data [B, H, L, D] and a descale that broadcasts to its rows, got {got}")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return descales.dequantized(quantized.data, quantized.descale, wide).to(dtype)


def _check_read(function: str, named: dict[str, Tensor]) -> None:
    """Raise WeftError for tensors that cannot be read: no dense ones, or without memory."""
    forms = list(filter(None, map(form_problem, named.keys(), named.values())))
    if problems := forms or known_memory_problems(named):
        raise collected(function, problems)


def rotate(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Both times one orthonormal Hadamard matrix, in the columns: q.k is the same, and outliers are spread out.

    Rotate, then quantise: a column that is ten times as large as others no longer decides the descale of its row. Where
    the width is no power of two, the largest power of two that divides it is rotated at a time.

    >>> q, k = torch.randn(2, 1, 1, 4, 64).double()
    >>> torch.allclose(q @ k.mT, torch.matmul(*(x.mT if i else x for i, x in enumerate(rotate(q, k)))))
    True
    """
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor) or x.dtype not in _FROM:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise WeftError(
                f"rotate: {name}: expected a tensor of bf16, fp16, fp32 or fp64, got {got}; rotate, then quantise"
            )
    _check_read("rotate", {"query": query, "key": key})
    if query.shape[-1:] != key.shape[-1:] or not query.dim() or not query.shape[-1]:
        shapes = f"{list(query.shape)} and {list(key.shape)}"
        raise WeftError(f"rotate: expected one width, of a column or more, got shapes {shapes}")
    return _rotated(query), _rotated(key)


def _rotated(x: Tensor) -> Tensor:
    width = x.shape[-1]
    block = width & -width
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    kind = x.device.type
    if kind == "meta":
        return torch.empty_like(x)
    with torch.autocast(kind, enabled=False):  # it would multiply with the digits of 16 bits
        matrix = _hadamard(block, x.device).to(wide) * block**-0.5
        return (x.to(wide).unflatten(-1, (-1, block)) @ matrix).flatten(-2).to(x.dtype)


def _hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix, of 1 and -1: symmetric, and its own inverse times `size`, which is a power of two."""
    places = torch.arange(size, device=device)
    parity = places[:, None] & places
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return 1 - 2 * (parity & 1)
