"""The kernel that adds up what flash_ddiagonals listed: its module, its arguments, and its launch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..loader import without_holes
from .binding import Binding

KERNEL = "sum_listed"
SHARES = 16  # of an entry's sums, so that few entries keep a GPU busy
_ENTRIES = 32
_INT64 = 1 << 40  # numbers of sums and of entries are compiled as int64
OPTIONS = {"num_warps": 4}


class Summing:
    """Launches of the kernel on one device, or in Triton's interpreter."""

    def __init__(self, device: int, interprets: bool) -> None:
        from . import launching  # lazy: imports triton

        self._launching, self._device, self._interprets = launching, device, interprets
        self._kernel = getattr(without_holes(KERNEL, interprets), KERNEL)
        self._runs: dict[tuple[int, torch.dtype], tuple[Any, tuple[object, ...]]] = {}

    def __call__(self, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        """Listed sums and their entries to shares [SHARES, entries of the table]; ranges of groups of `group` sums."""
        n_groups, n_entries = ranges.shape[0], shares.shape[1]
        ready = self._runs.get((group, entries.dtype))
        if ready is None:
            ready = self._runs[group, entries.dtype] = self._prepared(group, entries.dtype)
        run, constants = ready
        places = (sums, entries, ranges, shares) if self._interprets else (
            sums.data_ptr(), entries.data_ptr(), ranges.data_ptr(), shares.data_ptr()
        )  # fmt: skip
        stream = 0 if self._interprets else self._launching.current_stream(self._device)
        programs = -(-n_entries // _ENTRIES) * SHARES
        run(programs, (*places, n_groups, sums.numel(), n_entries, *constants), stream)

    def _prepared(self, group: int, entries: torch.dtype) -> tuple[Any, tuple[object, ...]]:
        """What launches groups of one size, and the constants that a launch is handed."""
        binding = binding_of(self._launching.parameters_of(self._kernel)[0], group)
        if self._interprets:
            return self._launching.interpreted(self._kernel, binding, OPTIONS), ()
        with torch.cuda.device(self._device):
            run = self._launching.compiled(self._kernel, binding, types_of(entries), OPTIONS)
        return run, tuple(binding.constants.values())


def types_of(entries: torch.dtype) -> list[object]:
    """Of the run-time arguments, as a compilation takes them."""
    return [torch.float32, entries, entries, torch.float32, 1, _INT64, _INT64]


def binding_of(parameters: list[str], group: int) -> Binding:
    """What is constant for groups of one size."""
    constants = {"GROUP": group, "ENTRIES": _ENTRIES, "SHARES": SHARES, "TOGETHER": 1024}
    return Binding(KERNEL, parameters, "", constants)


@cache
def summing(device: int, interprets: bool) -> Summing:
    return Summing(device, interprets)
