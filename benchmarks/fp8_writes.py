"""What FP8 costs where it is made: a token appended to the caches of 64 sequences, and weft.fp8.quantize.

    python benchmarks/fp8_writes.py                  all rows, about two minutes on a GPU
    python benchmarks/fp8_writes.py --rows append    rows whose name has this
    python benchmarks/fp8_writes.py --list           names of rows; needs no GPU

Appends take turns, and a quantisation with a copy, in another order each round, with a cold L2 at each launch; medians.
An append writes one layer; `host` is the time of its call without the wait for the GPU. Bytes of a quantisation are
those of its operand and its results, each counted once, whatever the kernels read. A copy moves as many.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_measure import launch_times

import weft
from weft.fp8 import ROWS as ROWS_OF_A_DESCALE

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
SEQUENCES, HEADS, DIM, BEFORE = 64, 8, 128, 1000  # of a cache
ROUNDS, LAUNCHES, CALLS = 5, 5, 200


@dataclass(frozen=True)
class Appending:
    """A token of each of 64 sequences, 8 heads of 128 columns, or a latent vector of 512 + 64."""

    cache: str  # "pages" or "rows"
    scale: str | None  # of FP8; None: bf16
    latent: bool = False

    @property
    def name(self) -> str:
        dtype = "bf16" if self.scale is None else f"FP8, a descale a {self.scale}"
        kind = "latent " if self.latent else ""
        return f"append of a token, {SEQUENCES} sequences, {kind}{self.cache}, {dtype}"

    def made(self, device: str, rows: int = BEFORE) -> Callable[[], None]:
        """The call. rows: that each sequence has before."""
        given: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if self.scale is None else E4M3}
        given |= {} if self.scale is None else {"scale": self.scale}
        if self.latent:
            given["latent"] = weft.Latent(rank=512, rope=64)
        else:
            given |= {"kv_heads": HEADS, "head_dim": DIM}
        room = rows + 8
        pages = SEQUENCES * -(-room // 64)
        cache: Any = (
            weft.kv.PagedCache(pages, page=64, **given)
            if self.cache == "pages"
            else weft.kv.DenseCache(SEQUENCES, room, **given)
        )
        sequences = [cache.allocate() for _ in range(SEQUENCES)]

        def new(length: int) -> list[Tensor]:
            width, heads, number = (576, 1, 1) if self.latent else (DIM, HEADS, 2)
            size = (SEQUENCES, heads, length, width)
            return [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(number)]

        with cache.extend(sequences, [rows] * SEQUENCES) as step:
            step.append(0, *new(rows))
        step, token = cache.extend(sequences, [1] * SEQUENCES), new(1)
        return lambda: step.append(0, *token)


@dataclass(frozen=True)
class Quantizing:
    """A tensor of bf16 as e4m3."""

    size: tuple[int, int, int, int]
    per: Any
    layout: Any = "rows"

    @property
    def name(self) -> str:
        per = self.per if isinstance(self.per, str) else f"{self.per} rows"
        columns = ", in columns" if self.layout == "columns" else ""
        mib = 2 * torch.Size(self.size).numel() >> 20
        return f"quantize {mib} MiB, a descale a {per}{columns}"

    @property
    def bytes(self) -> int:
        """That have to be read and written."""
        batch, heads, rows, width = self.size
        of_one = ROWS_OF_A_DESCALE[self.per]
        descales = 1 if self.per == "tensor" else batch * heads * (1 if self.per == "head" else -(-rows // of_one))
        return 3 * batch * heads * rows * width + 4 * descales

    def made(self, device: str) -> Callable[[], object]:
        x = torch.randn(self.size, device=device, dtype=torch.bfloat16)
        return lambda: weft.fp8.quantize(x, self.per, layout=self.layout)

    def copy(self, device: str) -> Callable[[], object]:
        """What moves as many bytes."""
        source = torch.empty(self.bytes // 2, device=device, dtype=torch.int8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


APPENDS = (
    *(Appending(cache, scale) for cache in ("pages", "rows") for scale in (None, "token", "head")),
    *(Appending("pages", scale, latent=True) for scale in (None, "token", "head")),
)
SIZES = ((1, 8, 8192, 128), (32, 8, 8192, 128))
QUANTIZED = (
    *(Quantizing(size, per) for size in SIZES for per in ("tensor", "head", 128, 64, "token")),
    *(Quantizing(size, per, "columns") for size in SIZES for per in ("head", "token")),
)
ALL: tuple[Appending | Quantizing, ...] = (*APPENDS, *QUANTIZED)


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a launch of each, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order, names = random.Random(0), list(calls)
    for _ in range(ROUNDS):
        order.shuffle(names)
        for name in names:
            taken[name] += launch_times(calls[name], LAUNCHES)
    return {name: statistics.median(times) * 1e3 for name, times in taken.items()}


def on_the_host(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    for _ in range(CALLS // 10):
        call()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


@torch.no_grad()
def measured(rows: Sequence[Appending | Quantizing], device: str) -> Iterator[str]:
    """The line of each row: those of appends take turns, and a quantisation and its copy."""
    appends = {row.name: row.made(device) for row in rows if isinstance(row, Appending)}
    times = medians(appends)
    for name, call in appends.items():
        yield f"{name:72} {times[name]:8.1f} us   host {on_the_host(call):6.1f} us"
    for row in rows:
        if isinstance(row, Quantizing):
            found = medians({"own": row.made(device), "copy": row.copy(device)})
            rate, share = row.bytes / found["own"] / 1e3, found["copy"] / found["own"]
            yield f"{row.name:72} {found['own']:8.1f} us {rate:6.0f} GB/s   {share:4.0%} of a copy"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="TEXT", default="", help="only rows whose name has this")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and measure nothing")
    given = parser.parse_args(words)
    rows = [row for row in ALL if given.rows in row.name]
    if not rows:
        parser.error(f"--rows: no row has {given.rows!r}; the rows are {'; '.join(row.name for row in ALL)}")
    if not given.list and not torch.cuda.is_available():
        parser.exit(1, "benchmarks/fp8_writes.py: expected a CUDA device, found none\n")
    for line in [row.name for row in rows] if given.list else measured(rows, "cuda"):
        print(line, flush=True)


if __name__ == "__main__":
    main()
