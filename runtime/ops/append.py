"""The torch op that writes new rows into caches: a Triton kernel on a GPU, vectorised torch on a CPU.

    weft::append_rows(key, value, keys, values, slots)
    weft::append_quantized(key, value, keys, values, slots, k_descale, v_descale, by_token)

They change `keys` and `values` in place, and neither read nor wait for what lies in `slots`. The second one is of
caches of FP8: by token it writes descales too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...codegen.launch.appending import appending
from ...codegen.launch.quantizing import quantizing
from ...codegen.targets import target_named
from ..settings import default_target
from .quantize import descale_of, largest, stored

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(
    "append_rows(Tensor key, Tensor? value, Tensor(a!) keys, Tensor(b!)? values, Tensor slots) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "append_quantized(Tensor key, Tensor? value, Tensor(a!) keys, Tensor(b!)? values, Tensor slots, "
    "Tensor(c!) k_descale, Tensor(d!)? v_descale, bool by_token) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def append_rows(key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
    """Rows key [B, H, L, D] and value [B, H, L, Dv] to caches [blocks, H, page, D], at slots int32 [B, L].

    A slot is block * page + row of the block; a row with slot -1 goes nowhere. No two rows may have one slot.
    """
    if torch.compiler.is_compiling():
        torch.ops.weft.append_rows(key, value, keys, values, slots)
    elif key.is_cuda:
        _on_gpu(key, value, keys, values, slots)
    else:
        _on_cpu(key, value, keys, values, slots)


def _on_gpu(key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
    if not slots.numel():
        return
    device = key.get_device()
    if device == torch.cuda.current_device():
        return appending(device, False)(key, value, keys, values, slots)
    with torch.cuda.device(device):  # Triton launches on the current one
        appending(device, False)(key, value, keys, values, slots)


def _on_cpu(key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
    name = default_target()
    if name is not None and target_named(name).interprets and slots.numel():
        return appending(-1, True)(key, value, keys, values, slots)
    batch, row = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[batch, row].long()
    page = keys.shape[2]
    block, place = slot // page, slot % page
    keys[block, :, place] = key[batch, :, row]
    if value is not None and values is not None:
        values[block, :, place] = value[batch, :, row]


def _nothing(key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
    """Results have the shapes of what is changed."""


# -- caches of FP8 -----------------------------------------------------------------------------------------------------
def append_quantized(
    key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor, k_descale: Tensor,
    v_descale: Tensor | None, by_token: bool,
) -> None:  # fmt: skip
    """The same into caches of FP8. by_token: descales [blocks, H, page, 1] are those of rows, and written; else they
    are [1, H, 1, 1], and what exceeds the largest number with them becomes it. A value without descale is stored as it
    is: rotary columns of latent vectors."""
    given = (key, value, keys, values, slots, k_descale, v_descale, by_token)
    if torch.compiler.is_compiling():
        torch.ops.weft.append_quantized(*given)
    elif key.is_cuda:
        _quantized_on_gpu(*given)
    else:
        _quantized_on_cpu(*given)


def _quantized_on_gpu(
    key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor, k_descale: Tensor,
    v_descale: Tensor | None, by_token: bool,
) -> None:  # fmt: skip
    if not slots.numel():
        return
    device = key.get_device()
    given = (key, value), (keys, values), slots, (k_descale, v_descale), by_token
    if device == torch.cuda.current_device():
        return quantizing(device, False).append(*given)
    with torch.cuda.device(device):  # Triton launches on the current one
        quantizing(device, False).append(*given)


def _quantized_on_cpu(
    key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor, k_descale: Tensor,
    v_descale: Tensor | None, by_token: bool,
) -> None:  # fmt: skip
    name = default_target()
    if name is not None and target_named(name).interprets and slots.numel():
        return quantizing(-1, True).append((key, value), (keys, values), slots, (k_descale, v_descale), by_token)
    batch, row = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[batch, row].long()
    block, place = slot // keys.shape[2], slot % keys.shape[2]
    for rows, pool, descale in ((key, keys, k_descale), (value, values, v_descale)):
        if rows is None or pool is None:
            continue
        if descale is None:
            pool[block, :, place] = rows[batch, :, row].to(pool.dtype)
            continue
        new = rows[batch, :, row].float()
        factor = descale[0, :, 0]
        if by_token:
            factor = descale_of(largest(new[:, :, None], 1)[:, :, 0], pool.dtype)
            descale[block, :, place] = factor
        pool.view(torch.uint8)[block, :, place] = stored(new, factor, pool.dtype).view(torch.uint8)


def _quantizes_nothing(
    key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor, k_descale: Tensor,
    v_descale: Tensor | None, by_token: bool,
) -> None:  # fmt: skip
    """As `_nothing`."""


_LIBRARY.impl("append_quantized", _quantized_on_gpu, "CUDA")
_LIBRARY.impl("append_quantized", _quantized_on_cpu, "CPU")
_LIBRARY.impl("append_quantized", _quantizes_nothing, "Meta")
_LIBRARY.impl("append_rows", _on_gpu, "CUDA")
_LIBRARY.impl("append_rows", _on_cpu, "CPU")
_LIBRARY.impl("append_rows", _nothing, "Meta")
