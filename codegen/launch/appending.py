"""The kernel that writes new rows into caches: its module, its arguments, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from ...ir.numbers import next_power
from .fixed import WIDE, Fixed, fixed

KERNEL = "append_rows"
_ROWS = 8  # of a program: few, as a step of decode has few rows
# a cache may have more elements than int32 counts
STRIDES = [f"{name}_s{axis}" for name in ("key", "value", "keys", "values") for axis in "bhl"]
Mode = tuple[torch.dtype, int, int, bool]  # width of a key, of a value or 0, whether everything is aligned


def append_rows(
    kernels: Fixed, key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor
) -> None:  # fmt: skip
    """Rows [B, H, L, D] of key and value to their places in caches [blocks, H, page, D]; slots int32 [B, L]."""
    batches, heads, length, width = key.shape
    if value is None or values is None:
        value, values, value_width = key, keys, 0
    else:
        value_width = value.shape[3]
    tensors = key, value, keys, values
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    steps = 0
    for stride in strides:
        steps |= stride
    addresses = key.data_ptr() | value.data_ptr() | keys.data_ptr() | values.data_ptr()
    mode = (key.dtype, width, value_width, (addresses | steps * key.element_size()) & 15 == 0)
    ready = kernels.runs.get(mode)
    if ready is None:
        types = [torch.int32, *[key.dtype] * 4, *[1] * 4, *[WIDE] * len(STRIDES)]
        ready = kernels.runs[mode] = kernels.prepared(KERNEL, types, constants_of(mode, kernels.starts_early))
    programs = -(-batches * length // _ROWS) * heads
    kernels.launch(ready, programs, (slots, *tensors), (batches * length, length, heads, keys.shape[2], *strides))


def constants_of(mode: Mode, starts_early: bool) -> dict[str, object]:
    """What is constant for rows of one kind on one machine."""
    _, width, value_width, aligned = mode
    return {
        "ROWS": _ROWS, "KEY_WIDTH": width, "KEY_BLOCK": next_power(width), "VALUE_WIDTH": value_width,
        "VALUE_BLOCK": next_power(value_width), "ALIGNED": aligned, "STARTS_EARLY": starts_early,
    }  # fmt: skip


@cache
def appending(device: int, interprets: bool) -> Callable[..., None]:
    return partial(append_rows, fixed(KERNEL, device, interprets))
