"""A window with the first tokens kept, over a sequence that is divided over ranks: forward, backward and memory.

Started by torchrun it runs on as many GPUs: `torchrun --nproc-per-node 2 examples/long_context.py --length 1048576`.
Started by Python it starts two processes of gloo itself.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from ranks import on_ranks

import weft
from weft import kv_pos, masks, q_pos
from weft.distributed import ContextParallel

window, first = weft.scalar("window", int), weft.scalar("first", int)
streaming = weft.Attention(
    mask=masks.causal & ((q_pos - kv_pos < window) | (kv_pos < first)),
    name="streaming",
)


def run(length: int, heads: int, kv_heads: int, head_dim: int, near: int, kept: int, device: torch.device) -> None:
    """One forward and backward on this rank, and what it took."""
    cp, on_gpu = ContextParallel(), device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    plan = cp.plan(
        streaming, heads=heads, kv_heads=kv_heads, length=length, head_dim=head_dim,
        dtype="bf16" if on_gpu else "fp32", window=near, first=kept,
    )  # fmt: skip
    if cp.rank == 0:
        print(plan.explain())
    rows = len(cp.rows(plan))
    query, key, value = (
        torch.randn(1, n, rows, head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    for _ in range(2):  # the first one compiles
        begin = time.perf_counter()
        out = cp.attention(streaming, query, key, value, plan=plan, window=near, first=kept)
        out.square().mean().backward()
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        took = time.perf_counter() - begin
    if cp.rank == 0:
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_gpu else ""
        print(f"{length:,} tokens over {cp.ranks} ranks: forward and backward {took * 1e3:,.1f} ms{memory}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"length": 4096, "heads": 4, "kv-heads": 2, "head-dim": 32, "near": 512, "kept": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = parser.parse_args(arguments)
    on_ranks(functools.partial(run, **vars(settings)), 2)


if __name__ == "__main__":
    main()
