"""How the C library hands out memory for tiles on a CPU.

A tile of scores and what is computed of it are torch tensors of up to some MiB, made and given back hundreds of times a
call. glibc gives such blocks back to the system until it has seen a larger one come back. Each tile then waits for
fresh pages, which may take three times as long as what is computed in them (docs/experiments).
"""

from __future__ import annotations

from functools import lru_cache

import torch

LARGEST_KEPT = 31 << 20  # bytes; glibc learns from blocks of up to 32 MiB


@lru_cache(maxsize=1)
def keep_tiles_at_hand() -> None:
    """Once a process: make and give back one block, which nobody writes to, so that glibc keeps smaller ones."""
    torch.empty(LARGEST_KEPT, dtype=torch.uint8, device="cpu")
