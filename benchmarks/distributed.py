"""Attention over the GPUs of one host beside one of them, and beside torch's own context parallelism.

    torchrun --nproc-per-node 2 benchmarks/distributed.py
    torchrun --nproc-per-node 2 benchmarks/distributed.py --rows window,documents --json found.json
    torchrun --nproc-per-node 8 benchmarks/distributed.py --rows "causal 128k" --mesh 2x4 --strategy heads+ring
    python benchmarks/distributed.py --predicted      the table of docs/distributed.md, which needs no GPU
    torchrun --nproc-per-node 2 benchmarks/distributed.py --rows decode

Rows of decode are one step of single tokens over a paged cache that the ranks hold together, in one layer; `alone` is
the same step over a cache of one GPU. `compared` has the ranks compare each call before they join its results.

Each other figure is the median of several forwards and backwards, timed by events on rank 0 between barriers. `alone`
is the whole call on one GPU. `replayed` is a CUDA graph of either, so that the host takes no time. `torch` is its ring
over scaled_dot_product_attention, which has causal masks and none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import kv_pos, masks, q_pos
from weft.distributed import ContextParallel, ShardedPagedCache
from weft.kv import PagedCache

window, doc, blocks = weft.scalar("window", int), weft.tensor("doc", 2, int), weft.tensor("blocks", 2, bool)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="recent")
DOCUMENTS = weft.Attention(mask=masks.causal & masks.document(doc), name="documents")
BLOCK = 128
SPARSE = weft.Attention(mask=masks.causal & masks.block_sparse(blocks, BLOCK), name="sparse")


@dataclass(frozen=True)
class Row:
    name: str
    variant: weft.Attention
    length: int
    heads: int
    kv_heads: int
    operands: dict[str, Any] = field(default_factory=dict)
    starts: tuple[int, ...] = ()  # of packed sequences
    by_torch: bool = False  # whether torch's ring computes it too


def uneven(length: int, least: int, most: int) -> tuple[int, ...]:
    """Starts of packed sequences of random lengths."""
    generator, starts = torch.Generator().manual_seed(0), [0]
    while starts[-1] < length:
        starts.append(min(length, starts[-1] + int(torch.randint(least, most, (1,), generator=generator))))
    return tuple(starts)


K = 1 << 10
ROWS = [
    Row("causal 128k H8", CAUSAL, 128 * K, 8, 8, by_torch=True),
    Row("causal 32k H32/8", CAUSAL, 32 * K, 32, 8),
    Row("causal 32k H32", CAUSAL, 32 * K, 32, 32, by_torch=True),
    Row("causal 16k H32/8", CAUSAL, 16 * K, 32, 8),
    Row("causal 8k H32/8", CAUSAL, 8 * K, 32, 8),  # so short that the host decides
    Row("window 4096, 512k H8", RECENT, 512 * K, 8, 8, {"window": 4096}),
    Row("documents of 8k, 512k H8", DOCUMENTS, 512 * K, 8, 8, {"doc": 8 * K}),
    Row("block-sparse 5 %, 256k H8", SPARSE, 256 * K, 8, 8, {"blocks": 0.05}),
    Row("packed 1k to 64k, 512k H8", CAUSAL, 512 * K, 8, 8, starts=uneven(512 * K, K, 64 * K)),
]


@dataclass(frozen=True)
class DecodeRow:
    """A step of so many sequences of one length."""

    name: str
    variant: weft.Attention
    batch: int
    length: int
    heads: int
    kv_heads: int
    divide: str = "sequence"  # or "heads"
    operands: dict[str, Any] = field(default_factory=dict)


DECODE_ROWS = [
    DecodeRow("decode 1 x 1M H32/8", CAUSAL, 1, 1024 * K, 32, 8),
    DecodeRow("decode 8 x 128k H32/8", CAUSAL, 8, 128 * K, 32, 8),
    DecodeRow("decode 8 x 128k H32/8, by heads", CAUSAL, 8, 128 * K, 32, 8, "heads"),
    DecodeRow("decode 64 x 8k H32/8", CAUSAL, 64, 8 * K, 32, 8),
    DecodeRow("decode 64 x 8k H32/1", CAUSAL, 64, 8 * K, 32, 1),
    DecodeRow("decode 64 x 8k H32/8, window 4096", RECENT, 64, 8 * K, 32, 8, operands={"window": 4096}),
]
ROWS_OF_A_BLOCK = 64  # on each rank


def timed(call: Callable[[], Any], turns: int) -> float:
    """Seconds, the median of several, with all ranks."""
    for _ in range(3):
        call()
    found = []
    for _ in range(turns):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def both_ways(call: Callable[[], Tensor], tensors: list[Tensor], dout: Tensor) -> Callable[[], None]:
    def run() -> None:
        torch.autograd.grad(call(), tensors, dout)

    return run


def drawn(row: Row, rows: int) -> list[Tensor]:
    shapes = [(1, heads, rows, 128) for heads in (row.heads, row.kv_heads, row.kv_heads)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]


def both_and_memory(call: Callable[..., Tensor], row: Row, rows: int, turns: int) -> tuple[float, float, float, float]:
    """Forward alone, both ways, and both replayed, in ms, and GiB of those that are not replayed.

    call: of query, key and value with so many rows.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tensors = drawn(row, rows)
    dout = torch.randn_like(tensors[0])
    with torch.no_grad():
        forward = timed(lambda: call(*tensors), turns)
    both = timed(run := both_ways(lambda: call(*tensors), tensors, dout), turns)
    held = torch.cuda.max_memory_allocated() / 2**30
    return forward * 1e3, both * 1e3, timed(captured(run).replay, turns) * 1e3, held


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks it of what is captured with its backward
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks the device
        call()
    return graph


def context(mesh: str, strategy: str) -> ContextParallel:
    """Of all GPUs. mesh: empty, or as 2x4."""
    if not mesh:
        return ContextParallel(strategy=strategy)
    outer, inner = map(int, mesh.split("x"))
    made = torch.distributed.device_mesh.init_device_mesh("cuda", (outer, inner), mesh_dim_names=("outer", "inner"))
    return ContextParallel(made, ("outer", "inner"), strategy)


def operands_of(row: Row) -> dict[str, Any]:
    operands = dict(row.operands)
    if "doc" in operands:
        operands["doc"] = (torch.arange(row.length, device="cuda") // operands["doc"])[None].int()
    if "blocks" in operands:  # this share of the blocks, and those of the diagonal
        number, generator = row.length // BLOCK, torch.Generator().manual_seed(0)
        table = torch.rand(number, number, generator=generator) < operands["blocks"]
        operands["blocks"] = (table | torch.eye(number, dtype=torch.bool)).cuda()
    return operands


def measured(row: Row, turns: int, cp: ContextParallel) -> dict[str, Any]:
    """Times of one row."""
    operands = operands_of(row)
    packed = {"cu_seqlens": list(row.starts)} if row.starts else {}
    plan = cp.plan(row.variant, heads=row.heads, kv_heads=row.kv_heads, length=row.length, head_dim=128, **packed,
                   **operands)  # fmt: skip
    starts = torch.tensor(row.starts, dtype=torch.int32, device="cuda") if row.starts else None
    lengths = {} if starts is None else {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}

    def over_ranks(*tensors: Tensor) -> Tensor:
        return cp.attention(row.variant, *tensors, plan=plan, **operands)  # type: ignore[no-any-return]

    def alone(*tensors: Tensor) -> Tensor:
        return row.variant(*tensors, **operands, **lengths)  # type: ignore[no-any-return]

    found: dict[str, Any] = {"row": row.name, "strategy": plan.strategy, "balance": plan.balance,
                             "predicted": plan.predicted.gain}  # fmt: skip
    names = ("forward", "both", "replayed", "GiB")
    found |= zip(names, both_and_memory(over_ranks, row, len(cp.rows(plan)), turns))
    found |= zip([f"alone {n}" for n in names], both_and_memory(alone, row, row.length, turns))
    if row.by_torch:
        found["torch both"] = by_torch(row, turns)
    return found


def filled(cache: PagedCache, row: DecodeRow) -> Any:
    """A step that reads so many random rows."""
    for pool in (cache.keys(), cache.values()):
        pool.normal_()
    sequences = [cache.allocate() for _ in range(row.batch)]
    cache.extend(sequences, [row.length] * row.batch).commit()  # rows are there already
    return cache.view(sequences)


def decoded(row: DecodeRow, turns: int) -> dict[str, Any]:
    """Times of a step, in ms."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes: dict[str, Any] = {"kv_heads": row.kv_heads, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    query = torch.randn(row.batch, row.heads, 1, 128, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(query, 0)
    found: dict[str, Any] = {"row": row.name}
    for name, agree in (("step", "steps"), ("compared", True), ("alone", None)):
        shares = ranks if row.divide == "sequence" and agree is not None else 1
        page = ROWS_OF_A_BLOCK * shares
        blocks = row.batch * -(-row.length // page)
        if agree is None:
            step = filled(PagedCache(blocks, page=page, **sizes), row)
            own = query
        else:
            group = {row.divide: dist.group.WORLD}
            cache = ShardedPagedCache(blocks, page=page, agree=agree, **group, **sizes)  # type: ignore[arg-type]
            step, own = filled(cache, row), cache.shard(query)
        with torch.inference_mode():
            call = partial(step.attend, 0, row.variant, own, **row.operands)
            found[name] = timed(call, turns) * 1e3
            if name != "compared":
                found[f"{name} replayed"] = timed(captured(call).replay, turns) * 1e3
        found[f"{name} GiB"] = step.cache.usage.bytes / 2**30
    if rank == 0:
        print(
            f"{row.name:<34} step {found['step']:7.3f} ms ({found['compared']:.3f} compared), alone "
            f"{found['alone']:7.3f}: {found['alone'] / found['step']:.2f}x; replayed {found['step replayed']:.3f}, "
            f"alone {found['alone replayed']:.3f}: {found['alone replayed'] / found['step replayed']:.2f}x; "
            f"{found['step GiB']:.2f} of {found['alone GiB']:.2f} GiB",
            flush=True,
        )
    return found


def by_torch(row: Row, turns: int) -> float | str:
    """torch's own context parallelism, in ms; what it says where it fails."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        whole = [t.detach() for t in drawn(row, row.length)]

        def call() -> None:
            tensors = [t.clone() for t in whole]
            with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3, no_restore_buffers={*tensors}):
                leaves = [t.requires_grad_() for t in tensors]
                out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
                torch.autograd.grad(out, leaves, torch.ones_like(out))

        return timed(call, turns) * 1e3
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def predicted() -> None:
    """What the model says of more devices, as Markdown."""
    print("| mask, tokens | devices | strategy | balance | times one device | bound by | others |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    full = weft.Attention(name="full")
    packed = {"cu_seqlens": list(range(0, 512 * K + 1, 8 * K))}
    rows: list[tuple[str, weft.Attention, int, dict[str, Any]]] = [
        ("causal, 128k", CAUSAL, 128 * K, {}), ("causal, 1M", CAUSAL, K * K, {}), ("full, 128k", full, 128 * K, {}),
        ("window 4096, 1M", RECENT, K * K, {"window": 4096}), ("64 x 8k, causal", CAUSAL, 512 * K, packed),
    ]  # fmt: skip
    for name, variant, length, given in rows:
        for ranks in (8, 64, 1024):
            made = weft.distributed.plan(
                variant,
                ranks=(ranks // 8, 8),
                heads=32,
                kv_heads=8,
                length=length,
                head_dim=128,
                device="h100",
                **given,
            )
            others = "; ".join(f"{who.split(',')[0]} {gain:.1f}" for who, _, gain in made.others)
            found = made.predicted
            print(
                f"| {name} | {ranks} | {made.strategy} | {made.balance} | {found.gain:.1f} | {found.bound} | {others} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="rows whose name has one of these")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mesh", default="", help="OUTERxINNER: two dimensions")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--predicted", action="store_true", help="of more devices, by the model")
    given = parser.parse_args()
    if given.predicted:
        return predicted()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    wanted = [r for r in ROWS if any(part in r.name for part in given.rows.split(","))]
    results, cp = [], context(given.mesh, given.strategy)
    for row in wanted:
        found = measured(row, given.turns, cp)
        results.append(found)
        if dist.get_rank() == 0:
            gain = found["alone both"] / found["both"]
            torchs = found.get("torch both", "")
            print(
                f"{row.name:<28} {found['strategy']:<14} {found['balance']:<11} both {found['both']:8.2f} ms, alone "
                f"{found['alone both']:8.2f}: {gain:.2f}x (predicted {found['predicted']:.2f}), forward "
                f"{found['alone forward'] / found['forward']:.2f}x, replayed {found['replayed']:.2f}: "
                f"{found['alone replayed'] / found['replayed']:.2f}x, {found['GiB']:.2f} of {found['alone GiB']:.2f} "
                f"GiB {torchs}",
                flush=True,
            )
    results += [decoded(r, given.turns) for r in DECODE_ROWS if any(p in r.name for p in given.rows.split(","))]
    if given.json is not None and dist.get_rank() == 0:
        given.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": results}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
