"""A small model served from caches of FP8: half the bytes of bf16, and what that costs in quality.

    python examples/serve_fp8.py         half a minute on two cores; uses the GPU if there is one

The model is that of the server's example, trained for some seconds in float32. The same text is then read token by
token through caches of several dtypes, each of which answers how likely it found the next character. What differs is
the cache alone: its rows are quantised by the kernel that appends them, and read with their descales by attention.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from char_gpt import Text, python_manual
from rich.console import Console
from rich.table import Table
from server import Served, trained
from torch import Tensor, nn

from weft.kv import PagedCache

CACHES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "e4m3, by token": {"dtype": torch.float8_e4m3fn, "scale": "token"},
    "e4m3, by head": {"dtype": torch.float8_e4m3fn, "scale": "head"},
    "e5m2, by token": {"dtype": torch.float8_e5m2, "scale": "token"},
}


@torch.no_grad()
def read(model: Served, cache: PagedCache, tokens: Tensor) -> Tensor:
    """Logits [B, L - first, vocabulary] of texts [B, L] that go through the cache, the first half of each at once."""
    sequences = [cache.allocate() for _ in tokens]
    first, found = tokens.shape[1] // 2, []
    for at in (first, *range(first + 1, tokens.shape[1])):
        new = tokens[:, :first] if at == first else tokens[:, at - 1 : at]
        with cache.extend(sequences, [new.shape[1]] * len(sequences)) as step:
            found.append(model(new, step, step.last))
    return torch.stack(found, 1)


def report(text: Text, model: Served, device: torch.device, length: int) -> Table:
    """How each cache reads the end of the text, which the model may have seen."""
    made = Table("cache", "bytes a token", "bits a character", "lost", "likeliest character is the same")
    tokens = text.tokens[-8 * length :].view(8, length).to(device)
    expected = tokens[:, length // 2 :]
    first: tuple[float, Tensor] | None = None  # of the first cache: bits, and the likeliest characters
    config = model.model.config
    for name, how in CACHES.items():
        cache = PagedCache(
            8 * -(-length // 16), layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, page=16,
            device=device, **how,
        )  # fmt: skip
        logits = read(model, cache, tokens)
        bits = nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten()).item() / math.log(2)
        first = first or (bits, logits.argmax(-1))
        same = (logits.argmax(-1) == first[1]).float().mean().item()
        size = cache.usage.bytes / (cache.usage.blocks * cache.page)
        made.add_row(name, f"{size:.0f}", f"{bits:.4f}", f"{bits - first[0]:+.4f}", f"{same:.1%}")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, read, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--length", type=int, default=128, help="characters of a text")
    given = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the model is small: more threads spend their time waiting for each other
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, text = Console(), python_manual()
    console.print(f"training {given.steps} steps on {device}")
    console.print(report(text, Served(trained(text, given.steps, device)), device, given.length))


if __name__ == "__main__":
    main()
