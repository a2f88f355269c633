"""Decode and chunks of prompts on one GPU: queries behind a cache, contiguous and paged, grouped heads and latent ones;
one query also beside cuDNN.

    python benchmarks/decode.py                      every row
    python benchmarks/decode.py --rows B16,MLA       rows whose name has one of these
    python benchmarks/decode.py --forms              also other forms and divisions of the keys, to calibrate with
    python benchmarks/decode.py --queries 1,2,4,8    tokens of a sequence that are decoded together

Time is that of a CUDA graph replayed over several inputs, which together are larger than L2; the median of seven. GB/s
counts keys and values once, TFLOP/s the two products of visible pairs. Errors are those of a few sequences against
float32, relative; `differ` says how many of ten more launches gave other bits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft.codegen.targets import split_launcher
from weft.compiler.planning.splits import Parts
from weft.runtime.variant import forget

Tensor = torch.Tensor
CAUSAL = weft.Attention(mask=weft.masks.causal, name="decode")
WINDOW = weft.Attention(mask=weft.masks.sliding_window(1024), name="decode_in_a_window")
MLA = weft.Attention(mask=weft.masks.causal, latent=weft.Latent(512, 64), scale=192**-0.5, name="decode_latent")
COLD = 300 << 20  # bytes of inputs that are gone through before one comes again


@dataclass(frozen=True)
class Row:
    name: str
    batch: int
    length: int  # of the longest sequence
    heads: int = 32
    kv_heads: int = 8
    variant: weft.Attention = CAUSAL
    ragged: bool = False
    visible: int = 0  # keys that a query sees, where that is a window
    queries: int = 0  # of a chunk of a prompt; 0: as many as --queries says

    @property
    def latent(self) -> bool:
        return self.variant is MLA

    @property
    def lens(self) -> list[int]:
        if not self.ragged:
            return [self.length] * self.batch
        generator = torch.Generator().manual_seed(1)
        return torch.randint(1, self.length + 1, (self.batch,), generator=generator).tolist()

    @property
    def keys(self) -> int:
        """That are read, of all sequences."""
        return sum(min(n, self.visible or n) for n in self.lens)

    @property
    def bytes(self) -> float:
        return 2.0 * self.keys * (576 if self.latent else self.kv_heads * 256)

    def flops(self, q_len: int) -> float:
        """Of visible pairs."""
        pairs = self.keys * q_len - self.batch * q_len * (q_len - 1) / 2
        return 2.0 * pairs * self.heads * (576 + 512 if self.latent else 256)


ROWS = [
    Row("GQA 32/8 D128 B16 8k", 16, 8192),
    Row("GQA 32/8 D128 B64 8k", 64, 8192),
    Row("GQA 32/8 D128 B1 128k", 1, 1 << 17),
    Row("GQA 32/8 D128 B1 4k", 1, 4096),
    Row("GQA 32/8 D128 64 x 1..16k", 64, 16384, ragged=True),
    Row("window 1024 of B1 128k", 1, 1 << 17, variant=WINDOW, visible=1024),
    Row("MLA 128 heads B64 4k", 64, 4096, 128, 1, MLA),
    Row("MLA 128 heads B128 8k", 128, 8192, 128, 1, MLA),
    Row("MLA 128 heads B1 64k", 1, 65536, 128, 1, MLA),
    Row("MLA 64 heads B64 8k", 64, 8192, 64, 1, MLA),
    Row("chunk of 512 behind 32k", 1, 32768 + 512, queries=512),
    Row("chunks of 512 behind 8k, B8", 8, 8192 + 512, queries=512),
    Row("prompt of 8k", 1, 8192, queries=8192),
    Row("MLA 128 heads chunk of 512 behind 4k", 1, 4096 + 512, 128, 1, MLA, queries=512),
    Row("MLA 16 heads chunk of 512 behind 32k", 1, 32768 + 512, 16, 1, MLA, queries=512),
    Row("MLA 128 heads prompt of 2k", 1, 2048, 128, 1, MLA, queries=2048),
]


def operands(row: Row, q_len: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """query, keys (and values) [B, Hkv, T, D] as views of [B, T, Hkv, D], and lengths."""
    made = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    width = 576 if row.latent else 128
    query = made(row.batch, q_len, row.heads, width).transpose(1, 2)
    caches = [made(row.batch, row.length, row.kv_heads, width).transpose(1, 2) for _ in range(1 if row.latent else 2)]
    return query, caches, torch.tensor(row.lens, device="cuda", dtype=torch.int32)


def in_pages(caches: list[Tensor], page: int) -> tuple[list[Tensor], Tensor]:
    """The same rows in pools [blocks, Hkv, page, D], as views of [blocks, page, Hkv, D], blocks in any order."""
    batch, heads, rows, width = caches[0].shape
    pages = rows // page
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages)
    pools = []
    for cache in caches:
        pool = torch.empty(batch * pages, page, heads, width, device="cuda", dtype=cache.dtype)
        pool[table.view(-1)] = cache.transpose(1, 2).reshape(batch * pages, page, heads, width)
        pools.append(pool.transpose(1, 2))
    return pools, table.int()


Call = Callable[[], Tensor]


def contenders(row: Row, q_len: int, schedule: str | None) -> dict[str, list[Call]]:
    """For each a call for each set of inputs."""
    sets = max(2, min(16, int(COLD // row.bytes) + 1))
    found: dict[str, list[Call]] = {"weft": [], "page 64": [], "page 16": []}
    if not row.latent and not row.ragged and row.variant is CAUSAL and q_len == 1 and schedule is None:
        found["cuDNN"] = []
    for _ in range(sets):
        query, caches, lens = operands(row, q_len)
        given = {"kv_lens": lens} if row.ragged else {}
        found["weft"].append(lambda q=query, c=caches, g=given: row.variant(q, *c, schedule=schedule, **g))
        for page in (64, 16):
            pools, table = in_pages(caches, page)
            found[f"page {page}"].append(
                lambda q=query, p=pools, t=table, n=lens: row.variant(
                    q, *p, block_table=t, kv_lens=n, schedule=schedule
                )
            )
            if row.latent and page == 64:
                packed = query.transpose(1, 2).reshape(1, -1, row.heads, 576).transpose(1, 2)
                starts = torch.arange(row.batch + 1, device="cuda", dtype=torch.int32) * query.shape[2]
                found.setdefault("packed 64", []).append(
                    lambda q=packed, s=starts, p=pools, t=table, n=lens: row.variant(
                        q, *p, cu_seqlens_q=s, block_table=t, kv_lens=n, schedule=schedule
                    )
                )
        if "cuDNN" in found:
            found["cuDNN"].append(lambda q=query, c=caches: cudnn(q, *c))
    return found


def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def seconds(calls: list[Call]) -> float:
    """Of one call: a graph of all sets, several times, replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 32 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    taken = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return statistics.median(taken[1:])


def on_the_host(call: Call) -> float:
    """Seconds that the host takes for a call."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        call()
    taken = (time.perf_counter() - start) / 200
    torch.cuda.synchronize()
    return taken


def error(row: Row, q_len: int) -> tuple[float, int]:
    """Of a few sequences against float32, and of ten launches those that differ in a bit."""
    torch.manual_seed(0)
    query, caches, lens = operands(row, q_len)
    pools, table = in_pages(caches, 16)
    worst, calls = 0.0, []
    given = {"kv_lens": lens} if row.ragged else {}
    calls.append(lambda: row.variant(query, *caches, **given))
    calls.append(lambda: row.variant(query, *pools, block_table=table, kv_lens=lens))
    for call in calls:
        out = call()
        for b in sorted({0, row.batch // 2, row.batch - 1}):
            n = row.lens[b]
            own = [query[b : b + 1].float(), *(c[b : b + 1, :, :n].float() for c in caches)]
            exact = row.variant.reference(*own)
            worst = max(worst, float((out[b : b + 1].float() - exact).norm() / exact.norm()))
    differ = sum(not torch.equal(call(), first) for call in calls for first in [call()] for _ in range(5))
    return worst, differ


def shown(row: Row, q_len: int, taken: float) -> str:
    return f"{taken * 1e6:8.1f} us {row.bytes / taken / 1e9:5.0f} GB/s {row.flops(q_len) / taken / 1e12:5.0f} TF"


def divided(row: Row, q_len: int) -> str:
    """What is planned."""
    width = 192 if row.latent else 128  # of the heads that a latent cache is expanded to
    sizes = weft.shape(
        batch=row.batch, heads=row.heads, kv_heads=row.kv_heads, q_len=q_len, kv_len=row.length, head_dim=width,
        value_dim=128,
    )  # fmt: skip
    if row.queries:
        return ""
    kernel = row.variant.plan(sizes, device="h200").kernels[0]
    return f"S {kernel.letters['S']:.0f}, {kernel.target}:{kernel.form}"


def other_forms(row: Row, q_len: int) -> None:
    """Times of other tiles, and of other divisions of the keys."""
    plain = split_launcher.parts_of
    forms = ["triton:64x64w4s3", "triton:64x64w4s4", "triton:64x128w4s2", "triton:64x128w4s3", "triton:64x32w4s4",
             "triton:64x128w8s3", "triton:32x64w4s3"]  # fmt: skip
    if row.latent:
        switches = itertools.product(("", "+ordered"), ("", "+prefetch"))
        forms = ["triton:64x64w8s2", "triton:64x32w8s2", *(f"hopper:64x64p11{''.join(s)}" for s in switches)]
    for form in forms:
        for times in (0.5, 1.0, 2.0, 4.0):

            def divided_otherwise(*given: object, times: float = times) -> Parts:
                found, tiles = plain(*given), given[3]
                parts = max(1, min(128, round(found.parts * times), int(tiles)))  # type: ignore[call-overload]
                return Parts(parts, max(1, -(-int(tiles) // parts)))  # type: ignore[call-overload]

            split_launcher.parts_of = divided_otherwise  # type: ignore[assignment]
            forget()
            try:
                made = contenders(row, q_len, f"split_kv/split_forward={form}")
                line = "  ".join(f"{n}: {shown(row, q_len, seconds(calls))}" for n, calls in made.items())
            except (weft.WeftError, RuntimeError) as problem:
                line = str(problem).splitlines()[0][:100]
            print(f"    {form:45} parts x{times:<4} {line}", flush=True)
            torch.cuda.empty_cache()
    split_launcher.parts_of = plain
    forget()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="")
    parser.add_argument("--queries", default="1")
    parser.add_argument("--forms", action="store_true")
    given = parser.parse_args()
    for row in ROWS:
        if given.rows and not any(part in row.name for part in given.rows.split(",")):
            continue
        for q_len in [row.queries] if row.queries else map(int, given.queries.split(",")):
            worst, differ = error(row, q_len)
            said = f"error {worst:.1e}, differ {differ}/10, {divided(row, q_len)}"
            print(f"{row.name}, {q_len} queries: {said}", flush=True)
            torch.cuda.empty_cache()
            for name, calls in contenders(row, q_len, None).items():
                host = on_the_host(calls[0])
                print(f"  {name:8} {shown(row, q_len, seconds(calls))}   host {host * 1e6:.1f} us", flush=True)
            if given.forms:
                other_forms(row, q_len)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
