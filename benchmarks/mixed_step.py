"""Steps of a server on one GPU: chunks of prompts beside single tokens, packed over a paged cache of pages of 16.

    python benchmarks/mixed_step.py                  every row
    python benchmarks/mixed_step.py --rows decode    rows whose name has this

Time is that of a CUDA graph, replayed; the median of seven. `own choice` is the call as it comes, then each schedule by
name, and the same work in two padded calls: single tokens, and all others; where there are both, own choice is both
schedules in one call. Errors are those of two sequences against
float32, relative.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from decode import seconds

import weft

Tensor = torch.Tensor
CAUSAL = weft.Attention(mask=weft.masks.causal, name="mixed_step")
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCHEDULES = {
    "own choice": {}, "split_kv": {"schedule": "split_kv"}, "flash": {"schedule": "flash"},
    "flash on triton": {"schedule": "flash", "target": "triton"},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def bytes(self) -> float:
        """Of the keys and values, each read once."""
        return 4.0 * KV_HEADS * DIM * sum(self.kv_lens)

    @property
    def flops(self) -> float:
        """Of visible pairs."""
        pairs = sum(q * k - q * (q - 1) / 2 for q, k in zip(self.q_lens, self.kv_lens))
        return 4.0 * HEADS * DIM * pairs


def beside(chunk: int, tokens: int, behind: int = 8192) -> Row:
    """A chunk of a prompt beside so many single tokens."""
    lens = (max(chunk, behind), *[behind] * tokens)
    return Row(f"chunk of {chunk} beside {tokens}, {behind} keys", (chunk, *[1] * tokens), lens)


ROWS = [
    Row("decode of 64 behind 8k", (1,) * 64, (8192,) * 64),
    Row("decode of 8 behind 32k", (1,) * 8, (32768,) * 8),
    Row("decode of 64 behind 256 to 16k", (1,) * 64, tuple(256 * n for n in range(1, 65))),
    Row("decode of 4 x 64 behind 8k", (4,) * 64, (8192,) * 64),
    *(beside(chunk, tokens) for chunk in (512, 2048, 8192) for tokens in (15, 63)),
    Row("32 chunks of 32 behind 8k", (32,) * 32, (8192,) * 32),
    Row("64 prompts of 64", (64,) * 64, (64,) * 64),
    Row("8 chunks of 512 behind 2k", (512,) * 8, (2048,) * 8),
]


@dataclass
class Made:
    """The operands of a row, and those of two padded calls."""

    query: Tensor  # [1, Hq, total, D]
    pools: list[Tensor]
    options: dict[str, Tensor]
    apart: list[tuple[Tensor, dict[str, Tensor]]]  # queries [B, Hq, L, D] and options

    @staticmethod
    def of(row: Row) -> Made:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

        def ints(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device="cuda", dtype=torch.int32)

        number, pages = len(row.q_lens), -(-max(row.kv_lens) // PAGE)
        table = torch.randperm(number * pages, device="cuda").int().view(number, pages)
        pools = [normal(number * pages, PAGE, KV_HEADS, DIM).transpose(1, 2) for _ in range(2)]
        options = {"cu_seqlens_q": ints([0, *accumulate(row.q_lens)]), "kv_lens": ints(list(row.kv_lens))}
        apart = []
        for single in (True, False):
            own = [b for b, n in enumerate(row.q_lens) if (n == 1) == single]
            if own:
                lens = [row.q_lens[b] for b in own]
                given = {"kv_lens": options["kv_lens"][own].contiguous(), "block_table": table[own].contiguous()}
                given |= {} if single else {"q_lens": ints(lens)}
                apart.append((normal(len(own), max(lens), HEADS, DIM).transpose(1, 2), given))
        query = normal(1, sum(row.q_lens), HEADS, DIM).transpose(1, 2)
        return Made(query, pools, {**options, "block_table": table}, apart)


def contenders(made: Made) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        name: lambda how=how: CAUSAL(made.query, *made.pools, **made.options, **how)  # type: ignore[misc]
        for name, how in SCHEDULES.items()
    }
    return found | {"two padded calls": lambda: [CAUSAL(q, *made.pools, **given) for q, given in made.apart]}


def error(row: Row, made: Made) -> float:
    """Of the first sequence's last queries, and of the last sequence."""
    out, worst = CAUSAL(made.query, *made.pools, **made.options), 0.0
    starts, table = made.options["cu_seqlens_q"].tolist(), made.options["block_table"]
    for b in (0, len(row.q_lens) - 1):
        rows = slice(max(starts[b], starts[b + 1] - 16), starts[b + 1])
        keys = [p[table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, : row.kv_lens[b]].float() for p in made.pools]
        exact = CAUSAL.reference(made.query[:, :, rows].float(), *keys)
        worst = max(worst, float((out[:, :, rows].float() - exact).norm() / exact.norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="")
    given = parser.parse_args()
    for row in ROWS:
        if given.rows not in row.name:
            continue
        made = Made.of(row)
        average = sum(row.q_lens) / len(row.q_lens)
        print(f"{row.name}: {average:.1f} queries on average, error {error(row, made):.1e}", flush=True)
        for name, call in contenders(made).items():
            taken = seconds([call])
            rates = f"{row.bytes / taken / 1e9:5.0f} GB/s {row.flops / taken / 1e12:5.0f} TF"
            print(f"  {name:17}{taken * 1e6:9.1f} us {rates}", flush=True)


if __name__ == "__main__":
    main()
