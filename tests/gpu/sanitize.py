"""Kernels on small operands under compute-sanitizer, which watches each access: python -m tests.gpu.sanitize.

memcheck finds reads and writes outside of what was allocated (torch allocates each tensor by itself there), synccheck
barriers that are not met by all, and initcheck reads of global memory that nothing wrote. Every case computes a
forward, and where it says so a backward, of lengths that end inside of a tile. Results are not looked at: the tests do
that. Cases run once without a tool first, which compiles their kernels; then each tool gets them, in several processes.

racecheck is of no use for target hopper: it does not follow mbarriers, by which warps hand each other what lies in
shared memory, and reports every such word.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
import weft.kv
from weft import head, kv_pos, masks, q_pos, score, scores
from weft.runtime.ops.quantize import dequantize, dequantize_pages

ALL_TARGETS = ("hopper", "triton", "cpu")  # cpu: to see that cases run, where there is no GPU
TOOLS = ("memcheck", "synccheck", "initcheck")
# Cases of a tool in which it takes for an error what is none (docs/experiments): several warps that wait at one
# hardware barrier; a word that is read beside one that says that it means nothing, and what TMA wrote.
LEFT_OUT = {"synccheck": "dropout.*hopper", "initcheck": "^packed-|dropout-hopper-dim=192-deterministic"}
BF16 = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Q_LEN, KV_LEN = 150, 203  # neither ends with a tile

slopes, by_key, full = weft.tensor("slopes", 1), weft.tensor("by_key", 2), weft.tensor("full", 4)
table, docs = weft.tensor("table", 2), weft.tensor("docs", 2, int)
blocks, allowed = weft.tensor("blocks", 4, bool), weft.tensor("allowed", 3, bool)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
VARIANTS = {
    "dense": weft.Attention(name="dense"),
    "causal": CAUSAL,
    "window": weft.Attention(mask=masks.causal & (q_pos - kv_pos < 70), name="window"),
    "prefix": weft.Attention(mask=masks.causal | (kv_pos < 90), name="prefix"),
    "softcap": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="softcap"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi"),
    "by_key": weft.Attention(score + by_key[head, kv_pos], masks.causal, name="by_key"),
    "full_bias": weft.Attention(score + full[weft.batch, head, q_pos, kv_pos], name="full_bias"),
    "t5": weft.Attention(scores.t5_bias(table)(score), masks.causal, name="t5"),
    "documents": weft.Attention(mask=masks.causal & masks.document(docs), name="documents"),
    "blocks": weft.Attention(mask=masks.causal & masks.block_sparse(blocks), name="blocks"),
    "allowed": weft.Attention(mask=allowed[weft.batch, q_pos, kv_pos], name="allowed"),
    "sink": CAUSAL.replace(sink=slopes[head], name="sunk"),
    "dropout": CAUSAL.replace(dropout=0.2, name="dropped"),
    "sigmoid": weft.Attention(mask=masks.causal, normalizer="sigmoid", name="sigmoids"),
}  # fmt: skip
LATENT = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=128, rope=64), name="latents")


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def operands_of(variant: weft.Attention, batch: int, heads: int, length: int) -> dict[str, Tensor]:
    made = {
        "slopes": lambda: torch.rand(heads, device=DEVICE),
        "by_key": lambda: random(heads, length, dtype=torch.float32),
        "full": lambda: random(batch, heads, length, -(-length // 8) * 8),
        "table": lambda: random(heads, 32, dtype=torch.float32),
        "docs": lambda: (torch.arange(length, device=DEVICE) // 37).repeat(batch, 1),
        "blocks": lambda: torch.rand(batch, heads, length // 128 + 1, length // 128 + 1, device=DEVICE) < 0.5,
        "allowed": lambda: torch.rand(batch, length, length, device=DEVICE) < 0.05,
    }
    return {p.name: made[p.name]() for p in variant.canonical.parameters if p.name in made}


def differentiated(
    variant: weft.Attention, tensors: Sequence[Tensor], backward: bool = True, **options: object
) -> None:
    """A forward, and the backward of everything that can have a gradient."""
    leaves = [t for t in (*tensors, *options.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_(backward)
    out = variant(*tensors, **options)
    if backward:
        torch.autograd.grad(out, leaves, torch.randn_like(out), allow_unused=True)


def dense(
    name: str, target: str, dim: int = 64, value_dim: int = 0, dtype: torch.dtype = BF16, **options: object
) -> None:
    variant = VARIANTS[name]
    tensors = [random(2, h, n, d, dtype=dtype)
               for h, n, d in ((4, Q_LEN, dim), (2, KV_LEN, dim), (2, KV_LEN, value_dim or dim))]  # fmt: skip
    differentiated(variant, tensors, target=target, **operands_of(variant, 2, 4, KV_LEN), **options)


def padded(name: str, target: str, dim: int = 64, **options: object) -> None:
    variant = VARIANTS[name]
    tensors = [random(3, h, n, dim) for h, n in ((4, Q_LEN), (2, KV_LEN), (2, KV_LEN))]
    lens = {"q_lens": numbers(Q_LEN, 0, 33), "kv_lens": numbers(KV_LEN, 50, 40)}
    differentiated(variant, tensors, target=target, **operands_of(variant, 3, 4, KV_LEN), **lens, **options)


def packed(name: str, target: str, dim: int = 64, **options: object) -> None:
    variant = VARIANTS[name]
    tensors = [random(1, h, 300, dim) for h in (4, 2, 2)]
    starts = numbers(0, 130, 130, 131, 290)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, **options}
    differentiated(variant, tensors, target=target, **operands_of(variant, 4, 4, 300), **options)


def pools(page: int, width: int, heads: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    pages = -(-KV_LEN // page)
    order = torch.randperm(3 * pages, device=DEVICE).view(3, pages).int()
    lens = {"kv_lens": numbers(KV_LEN, 1, 64), "block_table": order}
    return random(3 * pages, heads, page, width), random(3 * pages, heads, page, width), lens


def paged(target: str, queries: int, page: int = 16, **options: object) -> None:
    key, value, lens = pools(page, 128)
    differentiated(CAUSAL, [random(3, 8, queries, 128), key, value], False, target=target, **lens, **options)


def packed_pages(target: str, page: int = 16, **options: object) -> None:
    key, value, lens = pools(page, 128)
    starts = numbers(0, 150, 151, 160)
    tensors = [random(1, 8, 160, 128), key, value]
    differentiated(CAUSAL, tensors, False, target=target, cu_seqlens_q=starts, **lens, **options)


def cached(target: str, queries: int = 1, **options: object) -> None:
    tensors = [random(2, 8, queries, 128), random(2, 2, 1500, 128), random(2, 2, 1500, 128)]
    differentiated(CAUSAL, tensors, False, target=target, **options)


def absorbed(target: str, queries: int, heads: int = 64, page: int = 0, **options: object) -> None:
    variant = LATENT.replace(scale=0.1, latent=weft.Latent(rank=512, rope=64))
    query, cache = random(3, heads, queries, 576), random(3, 1, KV_LEN, 576)
    more: dict[str, object] = {}
    if page:
        cache, _, lens = pools(page, 576, 1)
        more |= lens
    differentiated(variant, [query, cache], False, target=target, form="absorbed", **more, **options)


def expanded(target: str, **options: object) -> None:
    tensors = [random(2, 4, Q_LEN, 192), random(2, 1, KV_LEN, 192)]
    weights = {"uk": random(4, 128, 128), "uv": random(4, 128, 128)}
    differentiated(LATENT, tensors, target=target, form="expanded", **weights, **options)


def appended(target: str) -> None:
    """Rows that the kernel of weft.kv writes to pages."""
    cache = weft.kv.PagedCache(32, kv_heads=2, head_dim=64, dtype=BF16, device=DEVICE)
    sequences = [cache.allocate() for _ in range(2)]
    for tokens in (37, 1):
        cache.append(sequences, random(2, 2, tokens, 64), random(2, 2, tokens, 64))


# -- FP8 ---------------------------------------------------------------------------------------------------------------
def quantized(per: Any, layout: Any, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """FP8 numbers of the last two or three of query, key and value, and their descales; values in this layout."""
    made = [
        weft.fp8.quantize(t, per, layout=layout if i == len(tensors) - 1 else "rows") for i, t in enumerate(tensors)
    ]
    names = ("q_descale", "k_descale", "v_descale")[3 - len(made) :]
    return [q.data for q in made], {n: q.descale for n, q in zip(names, made, strict=True)}


def fp8(
    name: str, target: str, per: Any = "head", layout: Any = "rows", queries: int = Q_LEN, all_of: bool = False,
    width: int = 80,
) -> None:  # fmt: skip
    variant, shapes = VARIANTS[name], ((4, queries), (2, KV_LEN), (2, KV_LEN))
    query, *rest = (random(2, h, n, width) for h, n in shapes)
    tensors, descales = quantized(per, layout, *([query] if all_of else []), *rest)
    tensors = tensors if all_of else [query, *tensors]
    differentiated(variant, tensors, False, target=target, **operands_of(variant, 2, 4, KV_LEN), **descales)


def fp8_pages(target: str, queries: int, page: int, per: Any = "token") -> None:
    key, value, lens = pools(page, 128)
    tensors, descales = quantized(per, "rows", key, value)
    differentiated(CAUSAL, [random(3, 8, queries, 128), *tensors], False, target=target, **lens, **descales)


def fp8_latent(target: str, queries: int, page: int) -> None:
    variant = LATENT.replace(scale=0.1, latent=weft.Latent(rank=512, rope=64))
    cache, rope, lens = pools(page, 512, 1)
    latent = weft.fp8.quantize(cache, "token")
    more = {**lens, "rope": rope[..., :64].contiguous(), "k_descale": latent.descale}
    differentiated(variant, [random(3, 16, queries, 576), latent.data], False, target=target, form="absorbed", **more)


def fp8_appended(target: str, scale: Any = "token") -> None:
    cache = weft.kv.PagedCache(32, kv_heads=2, head_dim=64, dtype=torch.float8_e4m3fn, device=DEVICE, scale=scale)
    sequences = [cache.allocate() for _ in range(2)]
    for tokens in (37, 1):
        cache.append(sequences, random(2, 2, tokens, 64), random(2, 2, tokens, 64))


def fp8_real(target: str, per: Any, layout: Any) -> None:
    """The kernels that make bf16 copies, of rows and of pages."""
    (data,), descales = quantized(per, layout, random(2, 2, KV_LEN, 80))
    blocks = descales["v_descale"].expand(2, 2, -1, 1)
    dequantize([data, data], [blocks, None], BF16)
    for page in (1, 16, 256):
        pool, _, lens = pools(page, 80)
        (stored,), factors = quantized("token", "rows", pool)
        dequantize_pages([stored], [factors["v_descale"]], lens["block_table"], lens["kv_lens"], BF16)


def cases(targets: Sequence[str]) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}

    def add(case: Callable[..., None], *names: str, **options: object) -> None:
        for target in targets:
            words = [case.__name__, *names, target, *(f"{n}={v}" for n, v in options.items())]
            found["-".join(map(str, words))] = partial(case, *names, target=target, **options)

    for name in VARIANTS:
        add(dense, name)
        add(dense, name, dim=128)
    for dim, value_dim in ((80, 80), (192, 128), (256, 256), (64, 128)):
        add(dense, "causal", dim=dim, value_dim=value_dim)
    for dim in (64, 128, 192):
        for name in ("causal", "alibi", "dropout"):
            add(dense, name, dim=dim, deterministic=True)
    for kind in (padded, packed):
        for name in ("causal", "alibi", "dropout", "t5"):
            add(kind, name)
            add(kind, name, dim=128)
        add(kind, "causal", dim=192)
        add(kind, "causal", dim=128, deterministic=True)
    add(dense, "causal", dtype=torch.float16)
    for queries in (1, 5, 100):
        for page in (1, 16, 64):
            add(paged, queries=queries, page=page)
        add(cached, queries=queries)
    add(packed_pages)
    for heads, queries, page in ((64, 1, 0), (128, 2, 64), (16, 1, 16), (16, 70, 0), (64, 70, 64)):
        add(absorbed, heads=heads, queries=queries, page=page)
    add(appended)
    add(expanded)
    add(expanded, deterministic=True)
    for name in ("causal", "alibi", "window", "sink", "sigmoid", "dropout"):
        add(fp8, name)
        add(fp8, name, all_of=True, layout="columns", per="token")
        add(fp8, name, all_of=True, layout="columns", width=128)  # of hopper's products
        add(fp8, name, all_of=True, width=96)
    for per in ("tensor", 64, "token"):
        add(fp8, "causal", per=per)
        add(fp8, "causal", per=per, queries=1)
        add(fp8_real, per=per, layout="rows")
    add(fp8_real, per="head", layout="columns")
    for page in (1, 16, 64):
        for queries in (1, 5, 100):
            add(fp8_pages, queries=queries, page=page, per="token" if page > 1 else "tensor")
    for queries in (1, 70):
        add(fp8_latent, queries=queries, page=16)
    add(fp8_appended)
    add(fp8_appended, scale="head")
    return found


def run(names: Sequence[str]) -> int:
    """Cases one after the other in this process. Returns how many raised anything but a refusal."""
    torch.manual_seed(0)
    every, failed = cases(ALL_TARGETS), 0
    for name in names:
        try:
            every[name]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            print(f"ran {name}", flush=True)
        except weft.WeftError as refused:  # a target that leaves a case to another one
            print(f"refused {name}: {str(refused).splitlines()[0]}", flush=True)
        except Exception as error:
            failed += 1
            print(f"failed {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
    return failed


def started(names: Sequence[str], tool: str, log: Path) -> str:
    """What one process with a tool, or without, says of some cases."""
    command = [sys.executable, "-m", "tests.gpu.sanitize", "--run", ",".join(names)]
    if tool:
        own = ["--leak-check", "no"] if tool == "memcheck" else []
        found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        command = [found, "--tool", tool, "--print-limit", "10000", *own, *command]
    settings = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    if tool and " SUMMARY: " not in done.stdout:
        return f"{done.stdout}\nfailed {tool} ended without a sum, with {done.returncode}\n"
    return done.stdout


def reports(text: str) -> Counter[str]:
    """What a tool found, without addresses and threads."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    found: Counter[str] = Counter()
    for what, where in itertools.pairwise(lines):
        if (at := re.match(r"at (\S+?)\+0x\S+ in (\S+)", where)) is not None:
            found[f"{what} {at[1]}, {at[2]}"] += 1
        elif "Race reported" in what:
            found[re.sub(r"\+0x[0-9a-f]+", "", f"{what} {where}")] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--targets", default="hopper,triton")
    parser.add_argument("--match", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--jobs", type=int, default=16, help="processes at once")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"))
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return 1 if run(options.run.split(",")) else 0
    options.logs.mkdir(parents=True, exist_ok=True)
    every = [n for n in cases(options.targets.split(",")) if re.search(options.match, n)]
    bad = 0
    for tool in ["", *filter(None, options.tools.split(","))]:
        names = [n for n in every if not re.search(LEFT_OUT.get(tool, "^$"), n)]
        parts = [names[i :: options.jobs] for i in range(min(options.jobs, len(names)))]
        logs = [options.logs / f"{tool or 'alone'}.{i}.log" for i in range(len(parts))]
        with ThreadPoolExecutor(options.jobs) as workers:
            said = "\n".join(workers.map(started, parts, [tool] * len(parts), logs))
        found, failed = reports(said), re.findall(r"^failed .*", said, re.M)
        counts = [f"{len(re.findall(rf'^{word} ', said, re.M))} {word}" for word in ("ran", "refused")]
        print(
            f"{tool or 'without a tool'}: {', '.join(counts)}, {len(failed)} failed, {len(found)} reports", flush=True
        )
        print("".join(f"  {line[:200]}\n" for line in failed), end="")
        print("".join(f"  {number} times: {what}\n" for what, number in found.most_common()), end="", flush=True)
        bad += len(failed) + len(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
