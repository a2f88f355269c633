"""Kernels that do one thing over and over, for `weft calibrate`: read what L2 holds, take exponentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Work(NamedTuple):
    """A launch, and how much it does: bytes, or exponentials."""

    run: Callable[[], object]
    amount: float


@triton.jit
def _read_again(x, out, n, BLOCK: tl.constexpr):
    """Every program reads all n numbers, each from another place on, past L1."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0) * BLOCK
    for step in range(0, n, BLOCK):
        total += tl.load(x + (first + step) % n + columns, cache_modifier=".cg")
    tl.store(out + first + columns, total)


@triton.jit
def _exponentials(out, steps, BLOCK: tl.constexpr):
    """x = 2 ** -x, from numbers between 0 and 1: they stay there."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = (columns % 97) / 97.0
    for _ in range(steps):
        x = tl.exp2(-x)
    tl.store(out + columns, x)


def read_again(size: int, sms: int, device: torch.device) -> Work:
    """size: bytes that every program reads, which L2 holds."""
    block, programs = 4096, 8 * sms
    n = max(1, size // 4 // block) * block
    x, out = torch.ones(n, device=device), torch.empty(programs * block, device=device)
    return Work(lambda: _read_again[(programs,)](x, out, n, block, num_warps=8), 4.0 * n * programs)


def exponentials(sms: int, device: torch.device) -> Work:
    block, programs, steps = 1024, 16 * sms, 4096
    out = torch.empty(programs * block, device=device)
    return Work(lambda: _exponentials[(programs,)](out, steps, block, num_warps=4), float(programs) * block * steps)
