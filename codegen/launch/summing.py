"""The kernel that adds up what flash_ddiagonals listed: its module, its arguments, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from .fixed import WIDE, Fixed, fixed

KERNEL = "sum_listed"
SHARES = 16  # of an entry's sums, so that few entries keep a GPU busy
_ENTRIES = 32


def sum_listed(kernels: Fixed, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
    """Listed sums and their entries to shares [SHARES, entries of the table]; ranges of groups of `group` sums."""
    n_groups, n_entries = ranges.shape[0], shares.shape[1]
    ready = kernels.runs.get((group, entries.dtype))
    if ready is None:
        made = kernels.prepared(KERNEL, types_of(entries.dtype), constants_of(group))
        ready = kernels.runs[group, entries.dtype] = made
    programs = -(-n_entries // _ENTRIES) * SHARES
    kernels.launch(ready, programs, (sums, entries, ranges, shares), (n_groups, sums.numel(), n_entries))


def types_of(entries: torch.dtype) -> list[object]:
    """Of the run-time arguments, as a compilation takes them."""
    return [torch.float32, entries, entries, torch.float32, 1, WIDE, WIDE]


def constants_of(group: int) -> dict[str, int]:
    return {"GROUP": group, "ENTRIES": _ENTRIES, "SHARES": SHARES, "TOGETHER": 1024}


@cache
def summing(device: int, interprets: bool) -> Callable[..., None]:
    return partial(sum_listed, fixed(KERNEL, device, interprets))
