"""The kernel that writes new rows into caches: its module, its arguments, and its launch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...ir.numbers import next_power
from .fixed import WIDE, Fixed, Ready

KERNEL = "append_rows"
_ROWS = 8  # of a program: few, as a step of decode has few rows
# a cache may have more elements than int32 counts
STRIDES = [f"{name}_s{axis}" for name in ("key", "value", "keys", "values") for axis in "bhl"]
Mode = tuple[torch.dtype, int, int, bool]  # width of a key, of a value or 0, whether everything is aligned


class Appending:
    """Launches of the kernel."""

    def __init__(self, kernels: Fixed) -> None:
        self._kernels = kernels

    def __call__(
        self, key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor
    ) -> None:  # fmt: skip
        """Rows [B, H, L, D] of key and value to their places in caches [blocks, H, page, D]; slots int32 [B, L]."""
        batches, heads, length, width = key.shape
        if value is None or values is None:
            value, values, value_width = key, keys, 0
        else:
            value_width = value.shape[3]
        key_sb, key_sh, key_sl, _ = key.stride()
        value_sb, value_sh, value_sl, _ = value.stride()
        keys_sb, keys_sh, keys_sl, _ = keys.stride()
        values_sb, values_sh, values_sl, _ = values.stride()
        key_at, value_at, keys_at, values_at = key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr()
        steps = key_sb | key_sh | key_sl | value_sb | value_sh | value_sl | keys_sb | keys_sh | keys_sl
        steps = (steps | values_sb | values_sh | values_sl) * key.element_size()
        mode = (key.dtype, width, value_width, (key_at | value_at | keys_at | values_at | steps) & 15 == 0)
        ready = self._kernels.runs.get(mode)
        if ready is None:
            ready = self._kernels.runs[mode] = self._of_kind(mode)
        run, constants = ready
        places = (slots, key, value, keys, values) if self._kernels.interprets else (
            slots.data_ptr(), key_at, value_at, keys_at, values_at
        )  # fmt: skip
        arguments = (
            *places, batches * length, length, heads, keys.shape[2], key_sb, key_sh, key_sl, value_sb, value_sh,
            value_sl, keys_sb, keys_sh, keys_sl, values_sb, values_sh, values_sl, *constants,
        )  # fmt: skip
        stream = 0 if self._kernels.interprets else self._kernels.current_stream(self._kernels.device)
        run(-(-batches * length // _ROWS) * heads, arguments, stream)

    def _of_kind(self, mode: Mode) -> Ready:
        """What launches rows of one kind."""
        types = [torch.int32, *[mode[0]] * 4, *[1] * 4, *[WIDE] * len(STRIDES)]
        return self._kernels.prepared(KERNEL, types, constants_of(mode, self._kernels.starts_early))


def constants_of(mode: Mode, starts_early: bool) -> dict[str, object]:
    """What is constant for rows of one kind on one machine."""
    _, width, value_width, aligned = mode
    return {
        "ROWS": _ROWS, "KEY_WIDTH": width, "KEY_BLOCK": next_power(width), "VALUE_WIDTH": value_width,
        "VALUE_BLOCK": next_power(value_width), "ALIGNED": aligned, "STARTS_EARLY": starts_early,
    }  # fmt: skip


@cache
def appending(device: int, interprets: bool) -> Appending:
    return Appending(Fixed(KERNEL, device, interprets))
