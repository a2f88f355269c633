"""The `cpu` target beside SDPA and compiled FlexAttention: one process, the least of rounds in which they take turns.

Turns are in another order in each round: what follows a call that fills caches would be slower for it.

    python benchmarks/cpu.py                      every row, one thread; make bench-cpu
    python benchmarks/cpu.py --only causal --threads 2 --seconds 5
    python benchmarks/cpu.py --short              short calls alone

Times in milliseconds. FlexAttention has no backward on a CPU, and is left out where there is no C++ compiler. In long
rows SDPA has causal masks alone (a mask as a tensor costs it every tile). In short rows SDPA has an attn_mask, and
"eager" is a product, a softmax and a product. Both are given a mask that was made before, as a model makes it once for
all of its layers; a learned bias they read from its table in every call.
"""

from __future__ import annotations

import argparse
import math
import random
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

DOC, SLOPES, VALID = weft.tensor("doc", 2, int), weft.tensor("slopes", 1), weft.tensor("valid", 2, bool)
BIAS, PAIRS, TABLE = weft.tensor("bias", 3), weft.tensor("pairs", 2, bool), weft.tensor("table", 2)
REGION = weft.tensor("region", 2, int)
CAUSAL = kv_pos <= q_pos
IN_WINDOW = 13 * (q_pos // 7 - kv_pos // 7 + 6) + q_pos % 7 - kv_pos % 7 + 6  # of 7 x 7 tokens
SAME_REGION = REGION[batch % 64, q_pos] == REGION[batch % 64, kv_pos]
VARIANTS = {
    "full": weft.Attention(name="full"),
    "causal": weft.Attention(mask=CAUSAL, name="causal"),
    "window": weft.Attention(mask=CAUSAL & (q_pos - kv_pos < 1024), name="window"),
    "documents": weft.Attention(mask=CAUSAL & (DOC[batch, q_pos] == DOC[batch, kv_pos]), name="documents"),
    "softcap": weft.Attention(20.0 * weft.tanh(score / 20.0), CAUSAL, name="softcap"),
    "alibi": weft.Attention(score + SLOPES[head] * (kv_pos - q_pos), CAUSAL, name="alibi"),
    "padded": weft.Attention(mask=VALID[batch, kv_pos], name="padded"),
    "padded causal": weft.Attention(mask=CAUSAL & VALID[batch, kv_pos], name="padded_causal"),
    "bool pairs": weft.Attention(mask=PAIRS[q_pos, kv_pos], name="bool_pairs"),
    "learned bias": weft.Attention(score + BIAS[head, q_pos, kv_pos], name="learned_bias"),
    "T5": weft.Attention(weft.scores.t5_bias(TABLE)(score), scale=1.0, name="t5"),
    "Swin": weft.Attention(score + TABLE[head, IN_WINDOW], SAME_REGION, name="swin"),
    "natten": weft.Attention(mask=weft.masks.natten_2d(16, 3), name="natten"),
}
LEARNED = {"learned bias": "bias", "T5": "table", "Swin": "table"}  # the operand that has a gradient


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
    """Those of the tables in docs/performance.md."""
    yield from (Row("causal", 2048), Row("causal", 8192, batch=1, heads=4, kv_heads=4))
    yield from (Row(name, 8192, batch=1, heads=4, kv_heads=4) for name in ("window", "documents"))
    yield from (Row(name, 2048) for name in ("softcap", "alibi"))
    yield from (Row("causal", 2048, dtype=torch.bfloat16), Row("causal", 2048, kv_heads=2))
    yield from (Row("causal", 2048, dim=dim) for dim in (32, 128))
    yield from (Row(name, length) for name in ("causal", "full") for length in (256, 128, 64))
    yield Row("full", 64, batch=1)
    yield Row("full", 64, batch=1, heads=4, kv_heads=4)


def short_rows() -> Iterator[Row]:
    """What SDPA takes as an attn_mask, at lengths at which its memory is no matter."""
    for length in (64, 128, 256):
        for name in ("padded", "padded causal", "bool pairs", "learned bias", "T5"):
            yield Row(name, length, batch=8, heads=12, kv_heads=12)
        yield Row("natten", length, batch=8, heads=4, kv_heads=4, dim=32)
    yield from (Row(name, length, batch=1) for length in (64, 128) for name in ("padded", "learned bias", "T5"))
    yield Row("Swin", 49, batch=64, heads=3, kv_heads=3, dim=32)
    yield Row("padded", 128, batch=8, heads=12, kv_heads=12, dtype=torch.bfloat16)


def operands(row: Row) -> dict[str, Tensor]:
    match row.variant:
        case "documents":
            return {"doc": (torch.arange(row.length) // 512).int()[None].repeat(row.batch, 1)}
        case "alibi":
            return {"slopes": torch.rand(row.heads) / 8}
        case "padded" | "padded causal":
            lengths = torch.linspace(row.length // 2, row.length, row.batch).int()
            return {"valid": torch.arange(row.length) < lengths[:, None]}
        case "bool pairs":
            return {"pairs": (torch.rand(row.length, row.length) < 0.5).fill_diagonal_(True)}
        case "learned bias":
            return {"bias": torch.randn(row.heads, row.length, row.length).to(row.dtype)}
        case "T5":
            return {"table": torch.randn(row.heads, 32)}
        case "Swin":
            return swin_operands(row)
    return {}


def swin_operands(row: Row) -> dict[str, Tensor]:
    """Windows of 7 x 7 on a grid of 56 x 56, shifted by 3: those at the last borders have several regions."""
    line = torch.bucketize(torch.arange(56), torch.tensor([49, 53]), right=True)
    grid = (3 * line[:, None] + line).view(8, 7, 8, 7).transpose(1, 2)
    return {"table": torch.randn(row.heads, 169), "region": grid.reshape(64, 49)}


def prepared(row: Row, given: dict[str, Tensor]) -> Tensor:
    """The mask of a short row as others take it, or its bias before its table is read: what models make once."""
    place = torch.arange(row.length)
    match row.variant:
        case "padded":
            return given["valid"][:, None, None]
        case "padded causal":
            return given["valid"][:, None, None] & (place <= place[:, None])
        case "bool pairs":
            return given["pairs"]
        case "natten":
            rows, columns = place // 16, place % 16
            return ((rows[:, None] - rows).abs() <= 3) & ((columns[:, None] - columns).abs() <= 3)
        case "T5":
            return t5_buckets(place - place[:, None])
        case "Swin":
            y, x = place // 7, place % 7
            return 13 * (y[:, None] - y + 6) + x[:, None] - x + 6
    return given["bias"]


def t5_buckets(distance: Tensor) -> Tensor:
    """32 buckets in both directions, up to a distance of 128."""
    far = (distance.abs().clamp(min=1) / 8).log() / math.log(128 / 8) * 8
    return 16 * (distance > 0) + torch.where(distance.abs() < 8, distance.abs(), (8 + far.long()).clamp(max=15))


def bias_of(row: Row, given: dict[str, Tensor], made: Tensor) -> Tensor:
    """What each call of the others adds to scores."""
    bias = given["table"][:, made] if "table" in given else made
    return bias + hidden_regions(given) if row.variant == "Swin" else bias


def hidden_regions(given: dict[str, Tensor]) -> Tensor:
    hidden = given["region"][:, :, None] != given["region"][:, None]
    return torch.where(hidden, -torch.inf, 0.0)[:, None]


def eager(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor) -> Tensor:
    scores = (query @ key.mT) * scale
    scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1) @ value


def calls(
    row: Row, tensors: list[Tensor], given: dict[str, Tensor], flex: Callable[..., Any] | None
) -> dict[str, Callable[[], Tensor]]:
    """The same attention by each of those that have it."""
    found: dict[str, Callable[[], Tensor]] = {"weft": lambda: VARIANTS[row.variant](*tensors, **given)}
    if row in short_rows():
        made, scale = prepared(row, given), 1.0 if row.variant == "T5" else row.dim**-0.5
        found["SDPA"] = lambda: F.scaled_dot_product_attention(
            *tensors, attn_mask=bias_of(row, given, made), scale=scale
        )
        found["eager"] = lambda: eager(*tensors, scale, bias_of(row, given, made))
        return found
    if row.variant in ("causal", "full"):
        causal, gqa = row.variant == "causal", row.heads != row.kv_heads
        found["SDPA"] = lambda: F.scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=gqa)
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
        "full": lambda b, h, q, k: q >= 0,
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
    end, rounds, turns = time.perf_counter() + seconds, 0, list(timed.items())
    while time.perf_counter() < end or rounds < 3:
        random.shuffle(turns)
        for name, call in turns:
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        rounds += 1
    return best


def measured(row: Row, flex: Callable[..., Any] | None, seconds: float) -> tuple[dict[str, float], ...]:
    """Forward without gradients, backward, and both together: a forward before a backward may be another one."""
    shapes = ((row.heads, row.length), (row.kv_heads, row.length), (row.kv_heads, row.length))
    tensors = [torch.randn(row.batch, *shape, row.dim).to(row.dtype).requires_grad_() for shape in shapes]
    given, learned = operands(row), LEARNED.get(row.variant)
    leaves = [*tensors, given[learned].requires_grad_()] if learned else tensors
    each = calls(row, tensors, given, flex)

    def without_gradients(call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                call()

        return run

    forward = least({name: without_gradients(call) for name, call in each.items()}, seconds)
    outs = {name: call() for name, call in each.items() if name != "Flex"}
    dout = torch.randn_like(outs["weft"])
    gradients = {
        name: (lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)) for name, out in outs.items()
    }
    backward = least(gradients, seconds)
    del outs, gradients  # and what they keep
    both = {
        name: (lambda call=call: torch.autograd.grad(call(), leaves, dout))
        for name, call in each.items()
        if name != "Flex"
    }
    return forward, backward, least(both, seconds)


def cells(times: dict[str, float]) -> str:
    """Weft's time, and its share of each other's."""
    shares = (f"{times['weft'] / t:.2f} of {name}'s {t:.1f}" for name, t in times.items() if name != "weft")
    return " | ".join([f"{times['weft']:8.2f}", f"{', '.join(shares):42}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of rounds, for each row and direction")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--short", action="store_true", help="short rows alone")
    parser.add_argument("--no-flex", action="store_true", help="compiling it takes half a minute")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'row':44} | forward  | {'':42} | backward | {'':42} | both")
    for row in short_rows() if options.short else (*rows(), *short_rows()):
        if options.only in str(row):
            torch.compiler.reset()  # else FlexAttention stops compiling after some rows
            flex = None if options.no_flex else torch.compile(flex_attention)
            print(f"{row!s:44} | {' | '.join(map(cells, measured(row, flex, options.seconds)))}", flush=True)


if __name__ == "__main__":
    main()
