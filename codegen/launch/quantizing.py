"""The kernels that make FP8 numbers, of a tensor and of the new rows of a cache, and real ones: arguments, launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from ...ir.numbers import next_power
from .fixed import WARPS, WIDE, Fixed, Ready, fixed
from .scaled import shift_of

MODULE, QUANTIZE, APPEND = "quantize", "quantize_rows", "append_quantized"
DEQUANTIZE, OF_PAGES = "dequantize_rows", "dequantize_pages"
OF_TENSOR, OF_HEAD = -1, 0  # in place of the rows of a block: one descale for all, or for each head
_ROWS, _ROWS_OF_STEP = 32, 8  # of a program, of a tensor, new rows of a cache
_REAL = 4096  # real numbers of a program: two loads of 16 bytes a thread


class Quantizing:
    """Launches of the kernels."""

    def __init__(self, kernels: Fixed) -> None:
        self._kernels = kernels

    # -- a tensor ------------------------------------------------------------------------------------------------------
    def tensor(self, x: Tensor, rows: int, data: Tensor, descale: Tensor) -> None:
        """Fill data and descale from x [B, H, L, D]. rows: that share a descale, or OF_TENSOR or OF_HEAD."""
        if x.stride(3) != 1 and x.shape[3] > 1:
            x = x.contiguous()
        batches, heads, length, _ = x.shape
        block = rows if rows > 1 else _ROWS
        columns = data.stride(3) != 1
        largest = descale
        if rows < 1:
            largest = x.new_zeros(1 if rows == OF_TENSOR else batches * heads, dtype=torch.float32)
        given = (x, data, descale, largest)
        strides = (*x.stride()[:3], *data.stride())
        programs = -(-length // block) * batches * heads
        for each in (0,) if rows > 0 else (1, 2):
            constants = {
                "ROWS": block, "SHARE": 1 if rows == 1 else block, "WIDTH": x.shape[3], "BLOCK": next_power(x.shape[3]),
                "MOST": torch.finfo(data.dtype).max, "PASS": each, "OF_TENSOR": rows == OF_TENSOR, "COLUMNS": columns,
                "ALIGNED": (x.data_ptr() | _joined(strides[:3]) * x.element_size()) & 15 == 0,
            }  # fmt: skip
            self._launch(
                QUANTIZE, given, (heads, length), strides, constants, programs, warps=8 if block > 32 else WARPS
            )

    def real(self, data: Tensor, descale: Tensor | None, x: Tensor) -> None:
        """Fill x [B, H, L, D] with data times descale [B, H, 1 or blocks, 1]; without one, with data.

        Rows of x lie one after the other, each as long or longer.
        """
        columns = data.stride(3) != 1 and data.stride(2) == 1
        if data.stride(3) != 1 and not columns:
            data = data.contiguous()
        batches, heads, length, width = data.shape
        scales = x.new_ones((1, 1, 1, 1), dtype=torch.float32) if descale is None else descale
        share = 1 << shift_of(scales.shape[2], length) if scales.shape[2] > 1 else length
        of_scales = scales.expand(batches, heads, scales.shape[2], 1).stride()[:3]
        strides = (*data.stride(), *of_scales, x.stride(2))
        steps = _joined([*data.stride()[:2], data.stride(3 if columns else 2)])
        constants = {
            "ROWS": _rows_of_real(width), "SHARE": share, "WIDTH": width, "BLOCK": next_power(width),
            "COLUMNS": columns, "ALIGNED": (data.data_ptr() | steps) & 15 == 0, "SCALED": descale is not None,
            "EVEN": _is_even(x),
        }  # fmt: skip
        programs = -(-length // _rows_of_real(width)) * batches * heads
        self._launch(DEQUANTIZE, (data, x, scales), (heads, length), strides, constants, programs)

    def real_pages(
        self, pool: Tensor, descale: Tensor | None, table: Tensor, kv_lens: Tensor, x: Tensor
    ) -> None:  # fmt: skip
        """Fill x [sequences * pages, H, rows, D] from a pool [blocks, H, page, D] times descale, which is
        [1 or blocks, H, 1 or page, 1]. What is behind the last key of a sequence is left as it is.

        Rows of x lie as those of `real`.
        """
        if pool.stride(3) != 1:
            pool = pool.contiguous()
        blocks, heads, page, width = pool.shape
        many, _, large, _ = x.shape
        rows = min(_rows_of_real(width), large)
        scales = x.new_ones((1, 1, 1, 1), dtype=torch.float32) if descale is None else descale
        steps = pool.stride()[:3]
        constants = {
            "ROWS": rows, "LARGE": large, "WIDTH": width, "BLOCK": next_power(width),
            "ALIGNED": (pool.data_ptr() | _joined(steps)) & 15 == 0, "SCALED": descale is not None,
            "EVEN": _is_even(x),
        }  # fmt: skip
        sizes = heads, many // table.shape[0], page, page * table.shape[1]
        strides = (table.stride(0), *steps, *scales.expand(blocks, heads, page, 1).stride()[:3], x.stride(2))
        programs = many * heads * (large // rows)
        self._launch(OF_PAGES, (table, kv_lens, pool, x, scales), sizes, strides, constants, programs)

    # -- new rows of a cache -------------------------------------------------------------------------------------------
    def append(
        self, rows: tuple[Tensor, Tensor | None], caches: tuple[Tensor, Tensor | None], slots: Tensor,
        descales: tuple[Tensor, Tensor | None], by_token: bool,
    ) -> None:  # fmt: skip
        """Rows [B, H, L, D] of key and value into caches [blocks, H, page, D] of FP8, at slots int32 [B, L].

        descales: [blocks, H, page, 1], which get those of the rows, or [1, H, 1, 1], which are read. A value without
        one is stored as it is: rotary columns of latent vectors.
        """
        key, keys, k_descale = rows[0], caches[0], descales[0]
        value, values, v_descale = rows[1], caches[1], descales[1]
        batches, heads, length, width = key.shape
        value_width = 0
        if value is None or values is None:
            value, values = key, keys
        else:
            value_width = value.shape[3]
        rotary = value_width > 0 and v_descale is None
        v_descale = k_descale if v_descale is None else v_descale
        given = (slots, key, value, keys, values, k_descale, v_descale)
        of_key, of_value = key.stride()[:3], value.stride()[:3]
        strides = (
            *of_key, *of_value, *keys.stride()[:3], *values.stride()[:3], *k_descale.stride()[:3],
            *v_descale.stride()[:3],
        )  # fmt: skip
        steps = of_key[0] | of_key[1] | of_key[2] | of_value[0] | of_value[1] | of_value[2]
        is_aligned = (key.data_ptr() | value.data_ptr() | steps * key.element_size()) & 15 == 0
        dtypes = key.dtype, value.dtype, keys.dtype, values.dtype
        kind = (APPEND, *dtypes, width, value_width, by_token, rotary, is_aligned)
        ready = self._kernels.runs.get(kind)
        if ready is None:  # a step of a decode makes none of this again
            constants = {
                "ROWS": _ROWS_OF_STEP, "KEY_WIDTH": width, "KEY_BLOCK": next_power(width), "VALUE_WIDTH": value_width,
                "VALUE_BLOCK": next_power(value_width), "MOST": torch.finfo(keys.dtype).max, "BY_TOKEN": by_token,
                "ALIGNED": is_aligned, "STARTS_EARLY": self._kernels.starts_early, "ROTARY": rotary,
            }  # fmt: skip
            ready = self._kernels.runs[kind] = self._of_kind(APPEND, given, 4, len(strides), constants)
        programs = -(-batches * length // _ROWS_OF_STEP) * heads
        sizes = batches * length, length, heads, keys.shape[2]
        self._kernels.launch(ready, programs, given, (*sizes, *strides))

    def _launch(
        self, name: str, tensors: Sequence[Tensor], sizes: Sequence[int], strides: Sequence[int],
        constants: Mapping[str, object], programs: int, warps: int = 4,
    ) -> None:  # fmt: skip
        kind = (name, *[t.dtype for t in tensors], *constants.values())
        ready = self._kernels.runs.get(kind)
        if ready is None:
            ready = self._kernels.runs[kind] = self._of_kind(name, tensors, len(sizes), len(strides), constants, warps)
        self._kernels.launch(ready, programs, tensors, (*sizes, *strides))

    def _of_kind(
        self, name: str, tensors: Sequence[Tensor], n_sizes: int, n_strides: int, constants: Mapping[str, object],
        warps: int = WARPS,
    ) -> Ready:  # fmt: skip
        """What launches a kernel for tensors of one kind."""
        types = [*[t.dtype for t in tensors], *[1] * n_sizes, *[WIDE] * n_strides]
        return self._kernels.prepared(name, types, constants, warps)


def _rows_of_real(width: int) -> int:
    return max(8, min(64, _REAL // next_power(width)))


def _is_even(x: Tensor) -> bool:
    """Whether rows of 16-bit numbers begin at multiples of 16 bytes, and are as long."""
    return (x.shape[3] | x.stride(2)) % 8 == 0 and x.data_ptr() % 16 == 0


def _joined(values: Sequence[int]) -> int:
    """The bits of all of them."""
    found = 0
    for value in values:
        found |= value
    return found


@cache
def quantizing(device: int, interprets: bool) -> Quantizing:
    return Quantizing(fixed(MODULE, device, interprets))
