"""The torch op that writes new rows into caches: a Triton kernel on a GPU, vectorised torch on a CPU.

    weft::append_rows(key, value, keys, values, slots)

It changes `keys` and `values` in place, and neither reads nor waits for what lies in `slots`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...codegen.launch.appending import appending
from ...codegen.targets import target_named
from ..settings import default_target

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(
    "append_rows(Tensor key, Tensor? value, Tensor(a!) keys, Tensor(b!)? values, Tensor slots) -> ()",
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


_LIBRARY.impl("append_rows", _on_gpu, "CUDA")
_LIBRARY.impl("append_rows", _on_cpu, "CPU")
_LIBRARY.impl("append_rows", _nothing, "Meta")
