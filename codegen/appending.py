"""The kernel that writes new rows into caches: its module, its arguments, and its launch."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .binding import Binding
from .generate import TEMPLATES
from .loader import load

KERNEL = "append_rows"
_ROWS = 8  # of a program: few, as a step of decode has few rows
_STRIDES = [f"{name}_s{axis}" for name in ("key", "value", "keys", "values") for axis in "bhl"]
_WIDE = 1 << 40  # strides are compiled as int64: a cache may have more elements than int32 counts


class Appending:
    """Launches of the kernel on one device, or in Triton's interpreter."""

    def __init__(self, device: int, interprets: bool) -> None:
        from . import launching  # lazy: imports triton

        self._launching, self._device, self._interprets = launching, device, interprets
        self._kernel = getattr(module(interprets), KERNEL)
        self._runs: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, key: Tensor, value: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor
    ) -> None:  # fmt: skip
        """Rows [B, H, L, D] of key and value to their places in caches [blocks, H, page, D]; slots int32 [B, L]."""
        batches, heads, length, width = key.shape
        tensors = (slots, key, key if value is None else value, keys, keys if values is None else values)
        strides = [stride for t in tensors[1:] for stride in t.stride()[:3]]
        bits = 0
        for tensor in tensors[1:]:
            bits |= tensor.data_ptr()
        for stride in strides:
            bits |= stride * key.element_size()
        value_width = 0 if value is None else value.shape[3]
        mode = (key.dtype, width, value_width, bits & 15 == 0)
        run = self._runs.get(mode)
        if run is None:
            run = self._runs[mode] = self._prepared(mode, tensors)
        constants = run[1]
        sizes = (batches * length, length, heads, keys.shape[2])
        programs = -(-batches * length // _ROWS) * heads
        if self._interprets:
            return run[0](programs, (*tensors, *sizes, *strides), 0)
        addresses = [t.data_ptr() for t in tensors]
        stream = self._launching.current_stream(self._device)
        run[0](programs, (*addresses, *sizes, *strides, *constants), stream)

    def _prepared(self, mode: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[Any, tuple[object, ...]]:
        binding = binding_of(self._launching.parameters_of(self._kernel)[0], mode)
        values = tuple(binding.constants.values())
        options = {"num_warps": 4}
        if self._interprets:
            return self._launching.interpreted(self._kernel, binding, options), values
        types = [t.dtype for t in tensors] + [1] * 4 + [_WIDE] * len(_STRIDES)
        with torch.cuda.device(self._device):
            return self._launching.compiled(self._kernel, binding, types, options), values


def binding_of(parameters: list[str], mode: tuple[Any, ...]) -> Binding:
    """What is constant for rows of one kind: (dtype, width of a key, of a value or 0, all aligned?)."""
    _, width, value_width, aligned = mode
    constants = {
        "ROWS": _ROWS, "KEY_WIDTH": width, "KEY_BLOCK": _power(width), "VALUE_WIDTH": value_width,
        "VALUE_BLOCK": _power(value_width), "ALIGNED": aligned,
    }  # fmt: skip
    return Binding(KERNEL, parameters, "", constants)


def _power(width: int) -> int:
    return 1 << max(width - 1, 0).bit_length()


@cache
def module(interprets: bool) -> ModuleType:
    """The kernel's module: its template has no holes, so that its file is what is loaded."""
    path = TEMPLATES / "triton" / f"{KERNEL}.py.jinja"
    text = path.read_text(encoding="utf-8")
    return load(path.with_suffix(""), interpret=interprets, source=text[text.index('"""') :])


@cache
def appending(device: int, interprets: bool) -> Appending:
    return Appending(device, interprets)
