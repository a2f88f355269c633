"""The kernel that joins results over disjoint keys: its module, its arguments, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from ...ir.numbers import next_power
from .fixed import WIDE, Fixed, fixed

KERNEL = "join_results"
_ELEMENTS = 2048  # of a program: two loads of 16 bytes a thread and result
# of first, more and the joined result: strides of out without columns, and of statistics
STRIDES = [
    f"{name}_s{axis}"
    for name, axes in (("first", "bhl"), ("first_lse", "sbhl"), ("more", "nbhl"), ("more_lse", "nsbhl"),
                       ("out", "bhl"), ("lse", "sbhl"))
    for axis in axes
]  # fmt: skip
Pair = tuple[Tensor, Tensor]  # out, with contiguous columns, and float32 statistics
Mode = tuple[tuple[torch.dtype, torch.dtype, torch.dtype], int, bool, bool]  # of the outs; width, far, aligned


def join_results(kernels: Fixed, first: Pair, more: Pair, into: Pair) -> None:
    """first and into: [B, H, L, Dv] and [1 or 2, B, H, L]; more: n of them, [n, ...]. into may be first."""
    statistics, batches, heads, length = first[1].shape
    rows, width = batches * heads * length, first[0].shape[3]
    outs, numbers, addresses = (first[0], more[0], into[0]), list[int](), 0
    for out, lse in (first, more, into):
        steps = out.stride()[:-1]
        numbers += [*steps, *lse.stride()]
        addresses |= out.data_ptr()
        for step in steps:
            addresses |= step * out.element_size()
    mode = ((outs[0].dtype, outs[1].dtype, outs[2].dtype), width, statistics == 2, addresses & 15 == 0)
    ready = kernels.runs.get(mode)
    if ready is None:
        types = [t for dtype in mode[0] for t in (dtype, torch.float32)]
        ready = kernels.prepared(KERNEL, [*types, *[1] * 4, *[WIDE] * len(STRIDES)], constants_of(mode))
        kernels.runs[mode] = ready
    programs = -(-rows // rows_of(width))
    kernels.launch(ready, programs, (*first, *more, *into), (rows, heads, length, len(more[0]), *numbers))


def rows_of(width: int) -> int:
    """Of a program."""
    return max(1, _ELEMENTS // next_power(width))


def constants_of(mode: Mode) -> dict[str, object]:
    """What is constant for results of one kind."""
    _, width, far, aligned = mode
    return {"ROWS": rows_of(width), "WIDTH": width, "BLOCK": next_power(width), "FAR": far, "ALIGNED": aligned}


@cache
def joining(device: int, interprets: bool) -> Callable[[Pair, Pair, Pair], None]:
    return partial(join_results, fixed(KERNEL, device, interprets))
