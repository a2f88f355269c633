"""The kernel that adds up what flash_ddiagonals listed: its module, its arguments, and its launch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .fixed import WIDE, Fixed

KERNEL = "sum_listed"
SHARES = 16  # of an entry's sums, so that few entries keep a GPU busy
_ENTRIES = 32


class Summing:
    """Launches of the kernel."""

    def __init__(self, kernels: Fixed) -> None:
        self._kernels = kernels

    def __call__(self, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        """Listed sums and their entries to shares [SHARES, entries of the table]; ranges of groups of `group` sums."""
        n_groups, n_entries = ranges.shape[0], shares.shape[1]
        ready = self._kernels.runs.get((group, entries.dtype))
        if ready is None:
            made = self._kernels.prepared(KERNEL, types_of(entries.dtype), constants_of(group))
            ready = self._kernels.runs[group, entries.dtype] = made
        run, constants = ready
        places = (sums, entries, ranges, shares) if self._kernels.interprets else (
            sums.data_ptr(), entries.data_ptr(), ranges.data_ptr(), shares.data_ptr()
        )  # fmt: skip
        stream = 0 if self._kernels.interprets else self._kernels.current_stream(self._kernels.device)
        programs = -(-n_entries // _ENTRIES) * SHARES
        run(programs, (*places, n_groups, sums.numel(), n_entries, *constants), stream)


def types_of(entries: torch.dtype) -> list[object]:
    """Of the run-time arguments, as a compilation takes them."""
    return [torch.float32, entries, entries, torch.float32, 1, WIDE, WIDE]


def constants_of(group: int) -> dict[str, int]:
    """What is constant for groups of one size."""
    return {"GROUP": group, "ENTRIES": _ENTRIES, "SHARES": SHARES, "TOGETHER": 1024}


@cache
def summing(device: int, interprets: bool) -> Summing:
    return Summing(Fixed(KERNEL, device, interprets))
