"""A window with the first tokens kept, over a sequence that is divided over ranks: forward, backward and memory.

Started by torchrun it runs on as many GPUs: `torchrun --nproc-per-node 2 examples/long_context.py --length 1048576`.
Started by Python it starts two processes of gloo itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Sequence
from multiprocessing import get_context

import torch
import torch.distributed as dist

import weft
from weft import kv_pos, masks, q_pos
from weft.distributed import ContextParallel

window, first = weft.scalar("window", int), weft.scalar("first", int)
streaming = weft.Attention(
    mask=masks.causal & ((q_pos - kv_pos < window) | (kv_pos < first)),
    name="streaming",
)


def run(length: int, heads: int, kv_heads: int, head_dim: int, near: int, kept: int, rank: int, device: str) -> None:
    """One forward and backward on this rank, and what it took."""
    cp = ContextParallel()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plan = cp.plan(
        streaming, heads=heads, kv_heads=kv_heads, length=length, head_dim=head_dim,
        dtype="bf16" if device == "cuda" else "fp32", window=near, first=kept,
    )  # fmt: skip
    if rank == 0:
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
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        took = time.perf_counter() - begin
    if rank == 0:
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
        print(f"{length:,} tokens over {cp.ranks} ranks: forward and backward {took * 1e3:,.1f} ms{memory}")


def _child(rank: int, ranks: int, port: int, settings: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    run(**vars(settings), rank=rank, device="cpu")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"length": 4096, "heads": 4, "kv-heads": 2, "head-dim": 32, "near": 512, "kept": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = parser.parse_args(arguments)
    if "LOCAL_RANK" in os.environ:
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        run(**vars(settings), rank=rank, device=device)
        dist.destroy_process_group()
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = [get_context("spawn").Process(target=_child, args=(rank, 2, port, settings)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
