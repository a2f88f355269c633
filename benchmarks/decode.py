"""Decode and chunks of prompts on one GPU: queries behind a cache, contiguous and paged, grouped heads and latent ones;
one query also beside cuDNN, and beside FlashInfer where that is installed (bench_flashinfer.py).

    python benchmarks/decode.py                      every row
    python benchmarks/decode.py --rows B16,MLA       rows whose name has one of these
    python benchmarks/decode.py --forms              also other forms and divisions of the keys, to calibrate with
    python benchmarks/decode.py --queries 1,2,4,8    tokens of a sequence that are decoded together
    python benchmarks/decode.py --fp8                also caches of FP8, with a descale a head and one a token

Time is that of a CUDA graph replayed over several inputs, which together are larger than L2; contenders take turns, in
another order each round; the median of seven. GB/s counts keys and values once, TFLOP/s the two products of visible
pairs. Errors are those of a few sequences against float64, relative; `differ` says how many of five more launches gave
other bits.

FlashInfer reads the same pools: `pip install flashinfer-python`, with nvcc and ninja, which compile it when it is first
called (two minutes on 16 cores; `--flashinfer ''` leaves it out).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_flashinfer import Builds, FlashInfer, is_installed
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft.codegen.launch import division
from weft.compiler.planning.splits import Parts
from weft.runtime.run.variant import forget

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
    Row("GQA 32/4 D128 B1 256k", 1, 1 << 18, kv_heads=4),
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


@dataclass(frozen=True)
class Given:
    """One set of inputs; all contenders read the same rows."""

    query: Tensor
    caches: list[Tensor]
    lens: Tensor
    paged: dict[int, tuple[list[Tensor], Tensor]]  # by rows of a page: pools and table

    @staticmethod
    def of(row: Row, q_len: int) -> Given:
        query, caches, lens = operands(row, q_len)
        return Given(query, caches, lens, {page: in_pages(caches, page) for page in (64, 16)})


def in_fp8(pool: Tensor, per: str) -> tuple[Tensor, Tensor]:
    """A pool [blocks, Hkv, page, D] as FP8, with a descale of each head or each row."""
    if per == "token":
        return weft.fp8.quantize(pool, per="token")
    rows = pool.transpose(0, 1).flatten(1, 2)[None]  # [1, Hkv, rows, D]
    data, descale = weft.fp8.quantize(rows, per="head")
    return data[0].unflatten(1, (pool.shape[0], pool.shape[2])).transpose(0, 1), descale


def columns_in_fp8(row: Row, caches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What of caches becomes FP8, and the option that has the rest."""
    if not row.latent:
        return caches, {}
    return [caches[0][..., :512]], {"rope": caches[0][..., 512:].clone()}


def of_fp8(row: Row, sets: list[Given]) -> dict[str, list[Call]]:
    """The same calls over caches of FP8; rotary columns of latent ones stay in bf16, a tensor of their own."""
    found: dict[str, list[Call]] = {}
    for own in sets:
        query, given = own.query, {"kv_lens": own.lens} if row.ragged else {}
        caches, rope = columns_in_fp8(row, own.caches)
        ways = {"FP8 head": ([weft.fp8.quantize(c, per="head") for c in caches], given | rope)}
        for page, (pools, table) in own.paged.items():
            stored, rope = columns_in_fp8(row, pools)
            paged = {"block_table": table, "kv_lens": own.lens} | rope
            for per in ("head", "token"):
                ways[f"FP8 {per}, page {page}"] = ([in_fp8(p, per) for p in stored], paged)
        for name, (stored, options) in ways.items():
            descales = dict(zip(("k_descale", "v_descale"), (descale for _, descale in stored)))
            found.setdefault(name, []).append(
                lambda q=query, c=[data for data, _ in stored], o={**options, **descales}: row.variant(q, *c, **o)
            )
    return found


def contenders(row: Row, q_len: int, schedule: str | None, sets: list[Given]) -> dict[str, list[Call]]:
    """For each a call for each set of inputs."""
    found: dict[str, list[Call]] = {"weft": [], "page 64": [], "page 16": []}
    if not row.latent and not row.ragged and row.variant is CAUSAL and q_len == 1 and schedule is None:
        found["cuDNN"] = []
    for own in sets:
        query, caches, lens = own.query, own.caches, own.lens
        given = {"kv_lens": lens} if row.ragged else {}
        found["weft"].append(lambda q=query, c=caches, g=given: row.variant(q, *c, schedule=schedule, **g))
        if row.latent:
            found.setdefault("lengths", []).append(
                lambda q=query, c=caches, n=lens: row.variant(q, *c, schedule=schedule, kv_lens=n)
            )
        for page, (pools, table) in own.paged.items():
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


def peers(row: Row, backends: list[str], peer: FlashInfer, sets: list[Given]) -> dict[str, list[Call]]:
    """FlashInfer's backends, of both sizes of pages."""
    found: dict[str, list[Call]] = {}
    scale = 192**-0.5 if row.latent else None
    for backend, page in itertools.product(backends, (64, 16)):
        name = f"FlashInfer {backend} {page}"
        try:
            calls = [peer.call(backend, own.query, *own.paged[page], row.lens, scale) for own in sets]
            calls[0]()
            torch.cuda.synchronize()
            found[name] = calls
        except Exception as problem:  # of its own, of any kind
            print(f"  {name}: {type(problem).__name__} {str(problem).strip()[:200]}", flush=True)
    return found


def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def graph_of(calls: list[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """All sets, several times, and how many calls that are."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 32 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def in_turns(calls: dict[str, list[Call]]) -> dict[str, float]:
    """Seconds of a call of each: their graphs replayed in turns, in another order each round."""
    graphs = {name: graph_of(own) for name, own in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order, names = random.Random(0), list(calls)
    for _ in range(8):
        order.shuffle(names)
        for name in names:
            graph, number = graphs[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(start.elapsed_time(end) / 1e3 / number)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def seconds(calls: list[Call]) -> float:
    """Of one call."""
    return in_turns({"": calls})[""]


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


def errors(row: Row, q_len: int, given: Given, calls: dict[str, Call]) -> dict[str, tuple[float, int]]:
    """Of each, for a few sequences against float64 (float32 where queries are many), and of five more launches those
    that differ in a bit."""
    exactly, some = torch.float64 if q_len <= 16 else torch.float32, sorted({0, row.batch // 2, row.batch - 1})
    exact = {}
    for b in some:
        own = [given.query[b : b + 1], *(c[b : b + 1, :, : row.lens[b]] for c in given.caches)]
        exact[b] = row.variant.reference(*(t.to(exactly) for t in own))
    found = {}
    for name, call in calls.items():
        out = call()
        width = out.shape[-1]
        out = out.transpose(1, 2).reshape(row.batch, q_len, row.heads, width).transpose(1, 2)
        worst = max(float((out[b : b + 1].to(exactly) - exact[b]).norm() / exact[b].norm()) for b in some)
        differ = sum(not torch.equal(call(), first) for first in [call()] for _ in range(5))
        found[name] = worst, differ
    return found


def shown(row: Row, q_len: int, taken: float, share: float = 1.0) -> str:
    """share: of the bytes of bf16."""
    rate = share * row.bytes / taken / 1e9
    return f"{taken * 1e6:8.1f} us {rate:5.0f} GB/s {row.flops(q_len) / taken / 1e12:5.0f} TF"


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


def other_forms(row: Row, q_len: int, sets: list[Given]) -> None:
    """Times of other tiles, and of other divisions of the keys."""
    plain = division.parts_of
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

            division.parts_of = divided_otherwise  # type: ignore[assignment]
            forget()
            try:
                made = in_turns(contenders(row, q_len, f"split_kv/split_forward={form}", sets))
                line = "  ".join(f"{name}: {shown(row, q_len, taken)}" for name, taken in made.items())
            except (weft.WeftError, RuntimeError) as problem:
                line = str(problem).splitlines()[0][:100]
            print(f"    {form:45} parts x{times:<4} {line}", flush=True)
            torch.cuda.empty_cache()
    division.parts_of = plain
    forget()


def compared(
    row: Row, q_len: int, backends: list[str], peer: FlashInfer | None, forms: bool, fp8: bool = False
) -> dict[str, object]:  # fmt: skip
    """One row: errors, then times in turns."""
    sets = [Given.of(row, q_len) for _ in range(max(2, min(16, int((1 + fp8) * COLD // row.bytes) + 1)))]
    calls = contenders(row, q_len, None, sets)
    if fp8:
        calls |= of_fp8(row, sets)
    if peer is not None and q_len == 1 and row.variant is not WINDOW:
        calls |= peers(row, backends, peer, sets)
    print(f"{row.name}, {q_len} queries: {divided(row, q_len)}", flush=True)
    checked = errors(row, q_len, sets[0], {name: own[0] for name, own in calls.items()})
    torch.cuda.empty_cache()
    found: dict[str, object] = {}
    for name, taken in in_turns(calls).items():
        host, (worst, differ) = on_the_host(calls[name][0]), checked[name]
        said = f"host {host * 1e6:6.1f} us, error {worst:.1e}, differ {differ}/5"
        share = (640 / 1152 if row.latent else 0.5) if name.startswith("FP8") else 1.0
        print(f"  {name:17} {shown(row, q_len, taken, share)}   {said}", flush=True)
        rate, flops = share * row.bytes / taken / 1e9, row.flops(q_len) / taken / 1e12
        found[name] = {"us": taken * 1e6, "gb_s": rate, "tflops": flops,
                       "host_us": host * 1e6, "error": worst, "differ": differ}  # fmt: skip
    if forms:
        other_forms(row, q_len, sets)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="")
    parser.add_argument("--queries", default="1")
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="also caches of FP8; errors are then those of the format")
    parser.add_argument("--flashinfer", default="fa2,fa3", help="its backends, where it is installed; '' for none")
    parser.add_argument("--patience", type=float, default=600, help="seconds that FlashInfer may take to compile")
    parser.add_argument("--json", help="a file for all figures")
    given = parser.parse_args()
    cases = [
        (row, q_len)
        for row in ROWS
        if not given.rows or any(part in row.name for part in given.rows.split(","))
        for q_len in ([row.queries] if row.queries else map(int, given.queries.split(",")))
    ]
    peer, builds, until = None, None, time.perf_counter() + given.patience
    asked = [part for part in given.flashinfer.split(",") if part]
    if asked and is_installed() and any(q_len == 1 for _, q_len in cases):
        peer, builds = FlashInfer(), Builds(asked, sorted({row.latent for row, q_len in cases if q_len == 1}))
        for row, q_len in cases:  # Weft's kernels meanwhile
            one = [Given.of(row, q_len)]
            for own in contenders(row, q_len, None, one).values():
                own[0]()
            del one
            torch.cuda.empty_cache()
    ready = {latent: builds.ready(latent, until) if builds else [] for latent in (False, True)}
    found = {}
    for row, q_len in cases:
        try:
            found[f"{row.name}, {q_len} queries"] = compared(
                row, q_len, ready[row.latent], peer, given.forms, given.fp8
            )  # fmt: skip
        except (weft.WeftError, RuntimeError) as problem:
            print(f"{row.name}, {q_len} queries: {str(problem)[:300]}", flush=True)
        torch.cuda.empty_cache()
        if given.json:
            Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
