"""The torch ops that make FP8 numbers of others, and others of FP8 ones: a Triton kernel on a GPU, torch on a CPU.

weft::quantize(x, rows, dtype, columns) -> (data, descale)
weft::dequantize(data, descales, dtype) -> x, of each
weft::dequantize_pages(pools, descales, table, kv_lens, dtype) -> x, of each
weft::dequantize_latent(parts, descale, table, kv_lens, dtype) -> x, of all columns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...codegen.launch.quantizing import OF_HEAD as OF_HEAD
from ...codegen.launch.quantizing import OF_TENSOR as OF_TENSOR
from ...codegen.launch.quantizing import quantizing
from ...codegen.launch.scaled import Scaled, by_rows
from ...codegen.targets import target_named
from ...codegen.torch_private import PLAIN_TYPES, under_transform, unwatched
from ...compiler.planning.dtypes import dtype_named, named_by_torch
from ...ir.errors import Problem, WeftError
from ..call import LARGEST_PAGE
from ..check.tensors import THROUGH
from ..settings import default_target

LEAST = 2.0**-126  # of descales: smaller ones are 0 in some units
PADDED = 16  # rows that columns of a value begin at multiples of, so that they are read 16 bytes at a time

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(
    "quantize(Tensor x, SymInt rows, str dtype, bool columns) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "dequantize(Tensor[] data, Tensor?[] descales, str dtype) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)

_LIBRARY.define(
    "dequantize_pages(Tensor[] pools, Tensor?[] descales, Tensor table, Tensor kv_lens, str dtype) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


_LIBRARY.define(
    "dequantize_latent(Tensor[] parts, Tensor? descale, Tensor? table, Tensor? kv_lens, str dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def quantize(x: Tensor, rows: int, dtype: torch.dtype, columns: bool) -> tuple[Tensor, Tensor]:
    """FP8 numbers of x [B, H, L, D], and descales. rows: of a block that has one, or OF_TENSOR or OF_HEAD."""
    given = x, rows, named_by_torch()[dtype], columns
    if not torch.compiler.is_compiling() and under_transform():
        return _UnderTransform.apply(*given)
    found: tuple[Tensor, Tensor] = torch.ops.weft.quantize(*given)
    return found


def made(x: Tensor, rows: int, dtype: str, columns: bool) -> tuple[Tensor, Tensor]:
    """Room for both."""
    batch, heads, length, width = x.shape
    kind = dtype_named(dtype).torch
    if columns:
        padded = -(-length // PADDED) * PADDED
        data = x.new_empty((batch, heads, width, padded), dtype=kind)[..., :length].transpose(2, 3)
    else:
        data = x.new_empty((batch, heads, length, width), dtype=kind)
    sizes = (1, 1, 1) if rows == OF_TENSOR else (batch, heads, 1 if rows == OF_HEAD else -(-length // rows))
    return data, x.new_empty((*sizes, 1), dtype=torch.float32)


def largest(x: Tensor, rows: int) -> Tensor:
    """The largest finite number of each block, [B, H, blocks, 1] or [1, 1, 1, 1]; 0 where there is none."""
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    if not x.numel():
        return size.new_zeros((1, 1, 1, 1) if rows == OF_TENSOR else (*x.shape[:2], 1, 1))
    if rows == OF_TENSOR:
        return size.amax().view(1, 1, 1, 1)
    if rows == OF_HEAD:
        return size.amax((2, 3), keepdim=True)
    blocks = -(-x.shape[2] // rows)
    padded = torch.nn.functional.pad(size, (0, 0, 0, blocks * rows - x.shape[2]))
    return padded.unflatten(2, (blocks, rows)).amax((3, 4))[..., None]


def descale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that makes the largest stored number of these: 1 where all are 0."""
    most = torch.finfo(dtype).max
    return torch.where(largest == 0.0, 1.0, (largest / most).clamp(min=LEAST))


def stored(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / descale as FP8 numbers: what is too large is the largest one, NaN is NaN."""
    most = torch.finfo(dtype).max
    return (x.float() / descale).clamp(-most, most).to(dtype)


def _on_cpu(x: Tensor, rows: int, dtype: str, columns: bool) -> tuple[Tensor, Tensor]:
    data, descale = made(x, rows, dtype, columns)
    name = default_target()
    if name is not None and target_named(name).interprets and x.numel():
        return _by_kernel(x, rows, data, descale, -1, True)
    descale.copy_(descale_of(largest(x.float(), rows), data.dtype).expand(descale.shape))
    spread = descale
    if rows > 1:
        spread = descale.repeat_interleave(rows, dim=2)[:, :, : x.shape[2]]
    data.copy_(stored(x, spread, data.dtype))
    return data, descale


def _on_gpu(x: Tensor, rows: int, dtype: str, columns: bool) -> tuple[Tensor, Tensor]:
    data, descale = made(x, rows, dtype, columns)
    if not x.numel():
        return data, descale.fill_(1.0)
    with torch.cuda.device(x.device):  # Triton launches on the current one
        return _by_kernel(x, rows, data, descale, x.get_device(), False)


def _by_kernel(
    x: Tensor, rows: int, data: Tensor, descale: Tensor, device: int, interprets: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    quantizing(device, interprets).tensor(x, rows, data, descale)
    return data, descale


def _fake(x: Tensor, rows: int, dtype: str, columns: bool) -> tuple[Tensor, Tensor]:
    return made(x, rows, dtype, columns)


def _has_no_gradient(ctx: Any, *gradients: Any) -> NoReturn:
    """Else torch would go on with the gradient of descales alone, which is wrong."""
    raise WeftError.of(
        "weft.fp8.quantize", Problem(what="rounding to FP8 has no gradient", next_step=f"pass x.detach(); {THROUGH}")
    )


class _UnderTransform(torch.autograd.Function):
    """The op where torch.func differentiates: it takes no op that torch.library makes differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int, dtype: str, columns: bool) -> tuple[Tensor, Tensor]:
        return torch.ops.weft.quantize(x, rows, dtype, columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Nothing is kept."""

    backward = jvp = staticmethod(_has_no_gradient)


def _mapped(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, rows: int, dtype: str, columns: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """A mapped dimension joins the batch, but for one descale of all: that takes a call for each."""
    mapped, *_ = in_dims
    x = x.movedim(mapped, 0)
    if rows != OF_TENSOR:
        data, descale = torch.ops.weft.quantize(x.flatten(0, 1), rows, dtype, columns)
        return (data.unflatten(0, x.shape[:2]), descale.unflatten(0, x.shape[:2])), (0, 0)
    found = [torch.ops.weft.quantize(one, rows, dtype, columns) for one in x.unbind()]
    data = torch.stack([one.mT for one, _ in found]).mT if columns else torch.stack([one for one, _ in found])
    return (data, torch.stack([descale for _, descale in found])), (0, 0)


_LIBRARY.impl("quantize", _on_cpu, "CPU")
_LIBRARY.impl("quantize", _on_gpu, "CUDA")
torch.library.register_fake("weft::quantize", _fake, lib=_LIBRARY)
torch.library.register_vmap("weft::quantize", _mapped, lib=_LIBRARY)
torch.library.register_autograd("weft::quantize", _has_no_gradient, lib=_LIBRARY)


# -- the way back ------------------------------------------------------------------------------------------------------
def dequantize(data: Sequence[Tensor], descales: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Each data [B, H, L, D] times its descale [B, H, 1 or blocks, 1], contiguous. dtype: bf16, fp16 or fp32."""
    if not torch.compiler.is_compiling() and unwatched() and all(type(t) in PLAIN_TYPES and t.is_cuda for t in data):
        return _real_on_gpu(data, descales, named_by_torch()[dtype])
    found: list[Tensor] = torch.ops.weft.dequantize(list(data), list(descales), named_by_torch()[dtype])
    return found


def _real_on_cpu(data: Sequence[Tensor], descales: Sequence[Tensor | None], dtype: str) -> list[Tensor]:
    kind, name = dtype_named(dtype).torch, default_target()
    if name is not None and target_named(name).interprets:
        return [_real_by_kernel(t, d, kind, -1, True) for t, d in zip(data, descales, strict=True)]
    rows = [None if d is None else by_rows(d, t.shape) for t, d in zip(data, descales, strict=True)]
    return [Scaled(t, r, torch.float32).real().to(kind).contiguous() for t, r in zip(data, rows, strict=True)]


def _real_on_gpu(data: Sequence[Tensor], descales: Sequence[Tensor | None], dtype: str) -> list[Tensor]:
    first, *_ = data
    kind, device = dtype_named(dtype).torch, first.get_device()
    if device == torch.cuda.current_device():
        return [_real_by_kernel(t, d, kind, device, False) for t, d in zip(data, descales, strict=True)]
    with torch.cuda.device(device):  # Triton launches on the current one
        return [_real_by_kernel(t, d, kind, device, False) for t, d in zip(data, descales, strict=True)]


def _real_by_kernel(
    data: Tensor, descale: Tensor | None, dtype: torch.dtype, device: int, interprets: bool
) -> Tensor:  # fmt: skip
    made = torch.empty(data.shape, dtype=dtype, device=data.device)
    if data.numel():
        quantizing(device, interprets).real(data, descale, made)
    return made


def _fake_real(data: Sequence[Tensor], descales: Sequence[Tensor | None], dtype: str) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=dtype_named(dtype).torch, device=t.device) for t in data]


# -- of pages ----------------------------------------------------------------------------------------------------------
def dequantize_pages(
    pools: Sequence[Tensor], descales: Sequence[Tensor | None], table: Tensor, kv_lens: Tensor, dtype: torch.dtype
) -> list[Tensor]:  # fmt: skip
    """What a table says of each pool [blocks, H, page, D], times its descale [1 or blocks, H, 1 or page, 1].

    They come in pages of LARGEST_PAGE rows, as many for each sequence as hold what its row of the table does, in order:
    [sequences * pages, H, LARGEST_PAGE, D]. What lies behind the last key of a sequence is undefined.
    """
    given = (*pools, table, kv_lens)
    if not torch.compiler.is_compiling() and unwatched() and all(type(t) in PLAIN_TYPES and t.is_cuda for t in given):
        return _pages_on_gpu(pools, descales, table, kv_lens, named_by_torch()[dtype])
    found: list[Tensor] = torch.ops.weft.dequantize_pages(
        list(pools), list(descales), table, kv_lens, named_by_torch()[dtype]
    )
    return found


def large_table(table: Tensor, page: int) -> tuple[Tensor, int]:
    """The table of pages of LARGEST_PAGE rows, which lie in order, and their number."""
    pages = large_pages(table, page)
    number = table.shape[0] * pages
    return torch.arange(number, dtype=torch.int32, device=table.device).view(-1, pages), number


def large_pages(table: Tensor, page: int) -> int:
    """How many pages of LARGEST_PAGE rows hold what a row of the table does."""
    return -(-table.shape[1] * page // LARGEST_PAGE)


def _room_for_pages(pools: Sequence[Tensor], table: Tensor, dtype: str) -> list[Tensor]:
    kind, number = dtype_named(dtype).torch, table.shape[0]
    return [
        torch.empty(
            (number * large_pages(table, t.shape[2]), t.shape[1], LARGEST_PAGE, t.shape[3]), dtype=kind, device=t.device
        )
        for t in pools
    ]


def _pages_by_kernel(
    pools: Sequence[Tensor], descales: Sequence[Tensor | None], table: Tensor, kv_lens: Tensor, dtype: str, device: int
) -> list[Tensor]:  # fmt: skip
    made = _room_for_pages(pools, table, dtype)
    for pool, descale, x in zip(pools, descales, made, strict=True):
        if x.numel():
            quantizing(device, device < 0).real_pages(pool, descale, table, kv_lens, x)
    return made


def _pages_on_gpu(
    pools: Sequence[Tensor], descales: Sequence[Tensor | None], table: Tensor, kv_lens: Tensor, dtype: str
) -> list[Tensor]:  # fmt: skip
    device = table.get_device()
    if device == torch.cuda.current_device():
        return _pages_by_kernel(pools, descales, table, kv_lens, dtype, device)
    with torch.cuda.device(device):  # Triton launches on the current one
        return _pages_by_kernel(pools, descales, table, kv_lens, dtype, device)


def _pages_on_cpu(
    pools: Sequence[Tensor], descales: Sequence[Tensor | None], table: Tensor, kv_lens: Tensor, dtype: str
) -> list[Tensor]:  # fmt: skip
    name = default_target()
    if name is not None and target_named(name).interprets:
        return _pages_by_kernel(pools, descales, table, kv_lens, dtype, -1)
    made = _room_for_pages(pools, table, dtype)
    for pool, descale, x in zip(pools, descales, made, strict=True):
        blocks, heads, page, _ = pool.shape
        rows = None if descale is None else descale.expand(blocks, heads, page, 1)
        real = Scaled(pool, rows, torch.float32).real()
        for number, length in enumerate(kv_lens.clamp(0, table.shape[1] * page).tolist()):
            own = real[table[number, : -(-length // page)].long()].transpose(0, 1).flatten(1, 2)[:, :length]
            pages = large_pages(table, page)
            target = x[number * pages : (number + 1) * pages].transpose(0, 1)
            for first in range(0, length, LARGEST_PAGE):
                part = own[:, first : first + LARGEST_PAGE]
                target[:, first // LARGEST_PAGE, : part.shape[1]] = part
    return made


def _fake_pages(
    pools: Sequence[Tensor], descales: Sequence[Tensor | None], table: Tensor, kv_lens: Tensor, dtype: str
) -> list[Tensor]:  # fmt: skip
    return _room_for_pages(pools, table, dtype)


# -- of latent caches --------------------------------------------------------------------------------------------------
def dequantize_latent(
    parts: Sequence[Tensor], descale: Tensor | None, table: Tensor | None, kv_lens: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Columns of a latent cache beside each other, in one tensor: parts[0] in FP8 times its descale, then rotary ones.

    table, kv_lens: of pools; else None. Then x is as `dequantize_pages` gives it.
    """
    found: Tensor = torch.ops.weft.dequantize_latent(list(parts), descale, table, kv_lens, named_by_torch()[dtype])
    return found


def _room_for_latent(
    parts: Sequence[Tensor], descale: Tensor | None, table: Tensor | None, kv_lens: Tensor | None, dtype: str
) -> Tensor:  # fmt: skip
    first, *_ = parts
    blocks, heads, rows, _ = first.shape
    if table is not None:
        blocks, rows = table.shape[0] * large_pages(table, rows), LARGEST_PAGE
    width = sum(t.shape[3] for t in parts)
    return torch.empty((blocks, heads, rows, width), dtype=dtype_named(dtype).torch, device=first.device)


def _latent_by_kernel(
    parts: Sequence[Tensor], descale: Tensor | None, table: Tensor | None, kv_lens: Tensor | None, dtype: str,
    device: int,
) -> Tensor:  # fmt: skip
    made, first, kernels = _room_for_latent(parts, descale, table, kv_lens, dtype), 0, quantizing(device, device < 0)
    for part, factor in zip(parts, (descale, None)):
        x = made[..., first : first + part.shape[3]]
        first += part.shape[3]
        if x.numel() and table is not None and kv_lens is not None:
            kernels.real_pages(part, factor, table, kv_lens, x)
        elif x.numel():
            kernels.real(part, factor, x)
    return made


def _latent_on_gpu(
    parts: Sequence[Tensor], descale: Tensor | None, table: Tensor | None, kv_lens: Tensor | None, dtype: str
) -> Tensor:  # fmt: skip
    first, *_ = parts
    with torch.cuda.device(first.device):  # Triton launches on the current one
        return _latent_by_kernel(parts, descale, table, kv_lens, dtype, first.get_device())


def _latent_on_cpu(
    parts: Sequence[Tensor], descale: Tensor | None, table: Tensor | None, kv_lens: Tensor | None, dtype: str
) -> Tensor:  # fmt: skip
    name, factors = default_target(), (descale, None)[: len(parts)]
    if name is not None and target_named(name).interprets:
        return _latent_by_kernel(parts, descale, table, kv_lens, dtype, -1)
    if table is None or kv_lens is None:
        return torch.cat(_real_on_cpu(parts, factors, dtype), dim=3)
    return torch.cat(_pages_on_cpu(parts, factors, table, kv_lens, dtype), dim=3)


_LIBRARY.impl("dequantize_latent", _latent_on_cpu, "CPU")
_LIBRARY.impl("dequantize_latent", _latent_on_gpu, "CUDA")
torch.library.register_fake("weft::dequantize_latent", _room_for_latent, lib=_LIBRARY)
_LIBRARY.impl("dequantize_pages", _pages_on_cpu, "CPU")
_LIBRARY.impl("dequantize_pages", _pages_on_gpu, "CUDA")
torch.library.register_fake("weft::dequantize_pages", _fake_pages, lib=_LIBRARY)
_LIBRARY.impl("dequantize", _real_on_cpu, "CPU")
_LIBRARY.impl("dequantize", _real_on_gpu, "CUDA")
torch.library.register_fake("weft::dequantize", _fake_real, lib=_LIBRARY)
