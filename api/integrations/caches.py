"""A cache of transformers in FP8: rows are quantised as they come, and read by attention with their descales.

A row is packed, its numbers and then its descale, so that all that transformers does to a cache by rows (growing,
cropping, reordering, moving to the host) does it to both. A packed row is a multiple of 16 bytes long.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import fp8
from ..ir.errors import UnavailableError, WeftError, shown
from ..runtime.descales import FP8, is_fp8

DESCALE = "_weft_descale"  # the attribute of a tensor that such a cache gives: its descales [B, H, T, 1]
_ROOM = 16  # bytes of a row for its descale, and what keeps rows apart evenly


def fp8_cache(config: Any, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """A cache of transformers for `model(..., cache=)` and `model.generate(..., cache=)`: past_key_values= before 5.24.

    config: of the model, whose attention is "weft". dtype: torch.float8_e4m3fn or torch.float8_e5m2. Each row of each
    head has a descale of its own. Raises UnavailableError for layers whose cache is neither one that grows nor one of a
    sliding window.
    """
    if not is_fp8(dtype):
        raise WeftError(f"fp8_cache: dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {shown(dtype)}")
    if not hasattr(config, "get_text_config"):
        raise WeftError(f"fp8_cache: config: expected the config of a model, model.config, got {type(config).__name__}")
    if getattr(config, "kv_lora_rank", None):
        raise UnavailableError("fp8_cache: a model with kv_lora_rank computes with the rows of its cache; use the "
                               "model's own cache")  # fmt: skip
    made = importlib.import_module("transformers").DynamicCache(config=config)
    if not made.layers:
        raise WeftError("fp8_cache: config: expected the config of a model, model.config, got one without layers")
    own = _layers(dtype)
    if others := sorted({type(layer).__name__ for layer in made.layers if type(layer) not in own}):
        raise UnavailableError(f"fp8_cache: {', '.join(others)}: not to be had in FP8; use the model's own cache")
    windows = ({"sliding_window": layer.sliding_window} if layer.is_sliding else {} for layer in made.layers)
    made.layers = [own[type(layer)](**window) for layer, window in zip(made.layers, windows)]
    return made


@cache
def _layers(dtype: torch.dtype) -> dict[type, type]:
    """By the class of a layer's cache in transformers, that of one in FP8."""
    known = importlib.import_module("transformers.cache_utils")

    class Packing:
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
            given = (key_states, value_states)
            found = super().update(*(packed(x, dtype) for x in given), *args, **more)  # type: ignore[misc]
            return tuple(unpacked(x, new.shape[-1], dtype) for x, new in zip(found, given))  # type: ignore[return-value]

    class FP8Layer(Packing, known.DynamicLayer):  # type: ignore[misc, name-defined]
        pass

    class FP8SlidingLayer(Packing, known.DynamicSlidingWindowLayer):  # type: ignore[misc, name-defined]
        pass

    return {known.DynamicLayer: FP8Layer, known.DynamicSlidingWindowLayer: FP8SlidingLayer}


def packed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [B, H, L, D] as bytes [B, H, L, D + _ROOM or a little more]."""
    data, descale = fp8.quantize(rows.detach(), per="token", dtype=dtype)
    width = rows.shape[-1]
    place = -(-width // 4) * 4  # float32 begins at multiples of its size
    made = data.new_zeros(*rows.shape[:3], -(-(width + 4) // _ROOM) * _ROOM, dtype=torch.uint8)
    made[..., :width] = data.view(torch.uint8)
    made[..., place : place + 4] = descale.contiguous().view(torch.uint8)
    return made


def unpacked(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The numbers of packed rows, with their descales as an attribute: views of both."""
    place = -(-width // 4) * 4
    data = rows[..., :width].view(dtype)
    setattr(data, DESCALE, rows[..., place : place + 4].view(torch.float32))
    return data


def descales_of(key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Options of a call over what such a cache gave. Raises WeftError for FP8 that lost its descales on the way."""
    found = {}
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype in FP8:
            descale = getattr(tensor, DESCALE, None)
            if descale is None:
                raise WeftError(
                    f"{name}: got {tensor.dtype} without the descales of fp8_cache(): this model changes what its "
                    "cache gives before attention reads it; use the model's own cache"
                )
            found[f"{name[0]}_descale"] = descale
    return found
