"""The `cpu` target beside SDPA and compiled FlexAttention: one process, the least of rounds in which they take turns.

    python benchmarks/cpu.py                      every row, one thread; make bench-cpu
    python benchmarks/cpu.py --only causal --threads 2 --seconds 5

Times in milliseconds. FlexAttention has no backward on a CPU, and is left out where there is no C++ compiler; SDPA has
causal masks alone (a mask as a tensor costs it every tile).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import weft
from weft import batch, head, kv_pos, q_pos, score

DOC, SLOPES = weft.tensor("doc", 2, int), weft.tensor("slopes", 1)
CAUSAL = kv_pos <= q_pos
VARIANTS = {
    "causal": weft.Attention(mask=CAUSAL, name="causal"),
    "window": weft.Attention(mask=CAUSAL & (q_pos - kv_pos < 1024), name="window"),
    "documents": weft.Attention(mask=CAUSAL & (DOC[batch, q_pos] == DOC[batch, kv_pos]), name="documents"),
    "softcap": weft.Attention(20.0 * weft.tanh(score / 20.0), CAUSAL, name="softcap"),
    "alibi": weft.Attention(score + SLOPES[head] * (kv_pos - q_pos), CAUSAL, name="alibi"),
}


@dataclass(frozen=True)
class Row:
    """One problem."""

    variant: str
    length: int
    batch: int = 2
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        return f"{self.variant} B{self.batch} H{heads} S{self.length} D{self.dim} {str(self.dtype)[6:]}"


def rows() -> Iterator[Row]:
    """Those of the table in docs/performance.md."""
    yield from (Row("causal", 2048), Row("causal", 8192, batch=1, heads=4, kv_heads=4))
    yield from (Row(name, 8192, batch=1, heads=4, kv_heads=4) for name in ("window", "documents"))
    yield from (Row(name, 2048) for name in ("softcap", "alibi"))
    yield from (Row("causal", 2048, dtype=torch.bfloat16), Row("causal", 2048, kv_heads=2))
    yield from (Row("causal", 2048, dim=dim) for dim in (32, 128))
    yield from (Row("causal", length) for length in (256, 64))


def operands(row: Row) -> dict[str, Tensor]:
    if row.variant == "documents":
        return {"doc": (torch.arange(row.length) // 512).int()[None].repeat(row.batch, 1)}
    return {"slopes": torch.rand(row.heads) / 8} if row.variant == "alibi" else {}


def calls(row: Row, tensors: list[Tensor], flex: Callable[..., Any] | None) -> dict[str, Callable[[], Tensor]]:
    """The same attention by each of those that have it."""
    given = operands(row)
    found: dict[str, Callable[[], Tensor]] = {"weft": lambda: VARIANTS[row.variant](*tensors, **given)}
    if row.variant == "causal":
        gqa = row.heads != row.kv_heads
        found["SDPA"] = lambda: F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=gqa)
    if flex is not None and row.length >= 128:
        mask, change = flex_parts(row, given)
        blocks = create_block_mask(mask, row.batch, None, row.length, row.length, device="cpu")
        plain = [t.detach() for t in tensors]
        gqa = row.heads != row.kv_heads
        found["Flex"] = lambda: flex(*plain, score_mod=change, block_mask=blocks, enable_gqa=gqa)
    return found


def flex_parts(row: Row, given: dict[str, Tensor]) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """mask_mod and score_mod of a variant."""
    masks = {
        "window": lambda b, h, q, k: (k <= q) & (q - k < 1024),
        "documents": lambda b, h, q, k: (k <= q) & (given["doc"][b, q] == given["doc"][b, k]),
    }
    scores = {
        "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
        "alibi": lambda s, b, h, q, k: s + given["slopes"][h] * (k - q),
    }
    return masks.get(row.variant, lambda b, h, q, k: k <= q), scores.get(row.variant)


def least(timed: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Milliseconds of each: the least of rounds in which they take turns."""
    best = dict.fromkeys(timed, float("inf"))
    for call in timed.values():
        call()
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or rounds < 3:
        for name, call in timed.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        rounds += 1
    return best


def measured(row: Row, flex: Callable[..., Any] | None, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Forward and backward."""
    shapes = ((row.heads, row.length), (row.kv_heads, row.length), (row.kv_heads, row.length))
    tensors = [torch.randn(row.batch, *shape, row.dim).to(row.dtype).requires_grad_() for shape in shapes]
    each = calls(row, tensors, flex)

    def without_gradients(call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                call()

        return run

    forward = least({name: without_gradients(call) for name, call in each.items()}, seconds)
    outs = {name: call() for name, call in each.items() if name != "Flex"}
    dout = torch.randn_like(outs["weft"])
    gradients = {
        name: (lambda out=out: torch.autograd.grad(out, tensors, dout, retain_graph=True)) for name, out in outs.items()
    }
    return forward, least(gradients, seconds)


def cells(times: dict[str, float]) -> str:
    """Weft's time, and its share of each other's."""
    shares = (f"{times['weft'] / t:.2f} of {name}'s {t:.1f}" for name, t in times.items() if name != "weft")
    return " | ".join([f"{times['weft']:8.2f}", f"{', '.join(shares):42}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of rounds, for each row and direction")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--no-flex", action="store_true", help="compiling it takes half a minute")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'row':44} | forward  | {'':42} | backward |")
    for row in rows():
        if options.only in str(row):
            torch.compiler.reset()  # else FlexAttention stops compiling after some rows
            flex = None if options.no_flex else torch.compile(flex_attention)
            forward, backward = measured(row, flex, options.seconds)
            print(f"{row!s:44} | {cells(forward)} | {cells(backward)}", flush=True)


if __name__ == "__main__":
    main()
