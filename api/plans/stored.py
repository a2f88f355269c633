"""Sizes of a call with FP8 operands, and the tensors that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compiler.planning.dtypes import BF16, EIGHTHS, ON_GPUS, dtype_named
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.errors import Problem, WeftError, shown
from ..runtime import descales
from ..runtime.descales import ROWS, Per
from ..runtime.ops.quantize import OF_HEAD, OF_TENSOR
from . import parts

LATENT = "a plan of a latent cache in FP8 wants its tensors; those of device='meta' take no memory"
STORED = (*ON_GPUS, *sorted(EIGHTHS))


@dataclass(frozen=True)
class Stored(Shape):
    """Sizes of a call with FP8 operands. dtype: of those that are not FP8, bf16 where all are."""

    descale: Per = "head"  # what shares a descale, as in `weft.fp8.quantize`


def stored_problems(dtype: object, kv_dtype: object | None, descale: object) -> Iterator[Problem]:
    """What keeps these from being the dtypes of a query and of keys, and what shares a descale."""
    names = f"{', '.join(map(repr, STORED[:-1]))} or {STORED[-1]!r}"
    named = {"dtype": dtype} | ({} if kv_dtype is None else {"kv_dtype": kv_dtype})
    unknown = {n: d for n, d in named.items() if not isinstance(d, str) or d not in STORED}
    for option, name in unknown.items():
        meant = descales.DTYPES.get(name) if isinstance(name, torch.dtype) else None
        how = f"write {meant!r}" if meant in STORED else ""
        yield Problem(option=option, expected=names, got=shown(name), next_step=how)
    if unknown:
        return
    given = {str(name) for name in named.values()}
    if len(given - EIGHTHS) > 1:
        yield Problem(option="kv_dtype", expected=f"{dtype!r} as the query has, or FP8", got=shown(kv_dtype))
    elif descale is not None and not given & EIGHTHS:
        how = "name kv_dtype='e4m3'"
        yield Problem(option="descale", expected="None, as nothing is FP8", got=shown(descale), next_step=how)
    elif descale is not None and not descales.is_per(descale):
        yield Problem(option="descale", expected="'tensor', 'head', 64, 128 or 'token'", got=shown(descale))


def stored(sizes: Shape, kv_dtype: str | None, descale: Per | None) -> Shape:
    """The sizes with the dtypes of operands that are FP8, if any is. sizes: their dtype is the query's."""
    kv_dtype = kv_dtype or sizes.dtype
    if not EIGHTHS & {sizes.dtype, kv_dtype}:
        return sizes
    own = {name: getattr(sizes, name) for name in Shape.__dataclass_fields__}
    wide = next((name for name in (sizes.dtype, kv_dtype) if name not in EIGHTHS), BF16.name)
    own |= {"dtype": wide, "q_dtype": _eighth(sizes.dtype), "kv_dtype": _eighth(kv_dtype)}
    return Stored(**own, descale=descale or "head")


def _eighth(name: str) -> str | None:
    return name if name in EIGHTHS else None


def as_tensors(
    attention: Attention, sizes: Stored, options: Mapping[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:  # fmt: skip
    """What these sizes stand for, in no memory, and the options with descales of what is FP8.

    Raises WeftError for latent attention, and for descales of rows that pages do not have.
    """
    if attention.latent is not None:
        raise WeftError(f"{attention.name}: shape: {LATENT}")
    table, pool = options.get("block_table"), None
    if isinstance(table, Tensor):
        _, *own = parts.pool_of(str(attention.name), sizes, table)
        pool = (max(1, table.numel()), *own[:2])
        if sizes.descale in (64, 128):
            got = f"expected 'tensor', 'head' or 'token' with pages, got {sizes.descale}"
            raise WeftError(f"{attention.name}: shape: descale: {got}")
    of_keys = (sizes.batch, sizes.kv_heads, sizes.kv_len) if pool is None else pool
    rows = {"query": (sizes.batch, sizes.heads, sizes.q_len), "key": of_keys, "value": of_keys}
    widths = {"query": sizes.head_dim, "key": sizes.head_dim, "value": sizes.value_dim}
    dtypes = {"query": sizes.q_dtype, "key": sizes.kv_dtype, "value": sizes.kv_dtype}
    made, own_descales = [], {}
    for name, size in rows.items():
        dtype = dtype_named(dtypes[name] or sizes.dtype).torch
        made.append(torch.empty(*size, widths[name], dtype=dtype, device="meta"))
        if dtypes[name] is not None:
            numbers = _numbers(sizes.descale, size, pool is not None and name != "query")
            own_descales[descales.OF[name]] = torch.empty(numbers, dtype=torch.float32, device="meta")
    return tuple(made), {**own_descales, **{n: v for n, v in options.items() if v is not None}}


def _numbers(per: Per, rows: tuple[int, ...], pooled: bool) -> tuple[int, int, int, int]:
    """The shape of the descales of an operand. rows: [B, H, rows]. pooled: of pages."""
    batch, heads, length = rows
    each = ROWS[per]
    if each in (OF_TENSOR, OF_HEAD):
        return (1, 1, 1, 1) if each == OF_TENSOR else (1 if pooled else batch, heads, 1, 1)
    return batch, heads, -(-length // each), 1
