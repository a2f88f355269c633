"""A server: prompts of different lengths, batched step by step through a paged cache, in one process or in several.

    python examples/server.py            well under a minute on two cores; uses the GPU if there is one
    torchrun --nproc-per-node 2 examples/server.py --divide sequence

Several processes hold the cache together, by tokens or by key heads, and write the same answers as one.
The model is the demo's, trained for some seconds. All prompts begin with the same text, whose pages they share; the
cache is too small for all of them at once, so that some are swapped to the host and come back. In the end each answer
is compared with what the model writes when it is asked alone, without a cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from char_gpt import Block, CharGPT, Config, Text, capped_window, python_manual
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from weft.distributed import ShardedPagedCache
from weft.kv import PagedCache, Step
from weft.nn import Rotary
from weft.serving import Request, Server

WINDOW = 64
START = "The following sections describe the standard way of writing such a statement. "
QUESTIONS = (
    "A function is", "The import statement", "If the object has a method named __len__, then", "Strings",
    "The for statement is used to iterate over the elements of a sequence, and", "A class", "The value of",
    "An exception is raised when", "When a generator",
    "Names refer to objects. Names are introduced by name binding operations. In",
)  # fmt: skip


class Served:
    """The weights of a CharGPT behind a paged cache: the same layers, with keys and values in its pages."""

    def __init__(self, model: CharGPT) -> None:
        self.model = model
        self.rope = Rotary(model.config.head_dim, interleaved=True)

    def __call__(self, tokens: Tensor, step: Step, last: Tensor) -> Tensor:
        """tokens [B, L], or of a packed step [1, total] -> logits [B, vocabulary] after row `last` of each sequence."""
        model, c = self.model, self.model.config
        x, rotation = model.embedding(tokens), self.rope(step.positions)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            heads = block.qkv(block.before_attention(x)).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
            query, key, value = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
            step.append(layer, self.rope.rotate(key, rotation), value)
            query, cache = self.rope.rotate(query, rotation), step.cache
            if isinstance(cache, ShardedPagedCache):  # this model has all heads on every rank
                query = cache.shard(query)
            out = step.attend(layer, capped_window, query, window=WINDOW)
            if isinstance(cache, ShardedPagedCache):
                out = cache.unshard(out)
            x = x + block.out(out.transpose(1, 2).flatten(2))
            x = x + block.network(block.before_network(x))
        logits: Tensor = model.head(model.norm(x[torch.arange(len(x), device=x.device), last]))
        return logits


def trained(text: Text, steps: int, device: torch.device) -> CharGPT:
    """A small model that has seen a little of the text."""
    torch.manual_seed(1)
    model = CharGPT(Config(len(text.characters)), lambda q, k, v: capped_window(q, k, v, window=WINDOW)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(text.batch(random, 2, 128).to(device)).backward()
        optimizer.step()
    return model.eval()


def table(server: Server, requests: Sequence[Request], text: Text, seconds: float) -> Table:
    """What each request is at, and what the server did so far."""
    totals, usage = server.totals, server.cache.usage
    made = Table("request", "state", "prompt", "shared", "new", "text", title=repr(server.cache), title_justify="left")
    for r in requests:
        written = text.decode(torch.tensor(r.written)) if r.written else ""
        shown = repr(written[-28:])[1:-1]
        made.add_row(str(r.number), r.state, str(len(r.prompt)), str(r.reused), f"{len(r.written)}/{r.count}", shown)
    rate = totals.decode_tokens / totals.decode_seconds if totals.decode_seconds else 0
    made.caption = (
        f"{totals.steps} steps in {seconds:.1f} s; prefill {totals.prefill_tokens} tokens, {totals.reused_tokens} more "
        f"shared; decode {rate:,.0f} tokens/s; cache {usage.used / usage.blocks:.0%} used; {totals.swaps} swapped out"
    )
    return made


@torch.no_grad()
def alone(model: CharGPT, request: Request, device: torch.device) -> bool:
    """Whether the model, asked alone and for everything at once, finds each token that was written the likeliest."""
    tokens = torch.tensor([request.tokens], device=device)
    logits = model(tokens[:, :-1])[0, len(request.prompt) - 1 :]
    written = tokens[0, len(request.prompt) :]
    best, chosen = logits.max(-1).values, logits.gather(1, written[:, None])[:, 0]
    return bool((best - chosen <= 1e-3).all())  # equal but for rounding


def cache_of(given: argparse.Namespace, config: Config, device: torch.device) -> PagedCache:
    """A cache of this process, or one that the processes of torchrun hold together."""
    sizes: dict[str, Any] = {
        "layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim,
        "dtype": getattr(torch, given.cache_dtype), "device": device,
    }  # fmt: skip
    if not dist.is_initialized():
        return PagedCache(given.blocks, page=16, **sizes)
    ranks = dist.get_world_size() if given.divide == "sequence" else 1  # a block has 16 tokens of each rank
    group: dict[str, Any] = {given.divide: dist.group.WORLD}
    return ShardedPagedCache(-(-given.blocks // ranks), **group, **sizes)


def device_of_this_process() -> torch.device:
    """Its GPU if there is one. Joins the other processes that torchrun started."""
    has_gpu, local = torch.cuda.is_available(), os.environ.get("LOCAL_RANK")
    if local is None:
        return torch.device("cuda" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(int(local))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    return torch.device("cuda", int(local)) if has_gpu else torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, serve, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new", type=int, default=80, help="characters to write for each")
    parser.add_argument("--blocks", type=int, default=40, help="of 16 characters: the cache")
    parser.add_argument("--cache-dtype", default="float32", choices=["float32", "float8_e4m3fn", "float8_e5m2"])
    parser.add_argument("--mixed", action="store_true", help="prompts and single tokens in one packed step")
    parser.add_argument("--divide", default="sequence", choices=["sequence", "heads"], help="under torchrun")
    given = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the model is small: more threads spend their time waiting for each other
    device = device_of_this_process()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    console, text = Console(quiet=not is_first), python_manual()
    console.print(f"training {given.steps} steps on {device}")
    model = trained(text, given.steps, device)
    if dist.is_initialized():
        for weight in model.parameters():  # the same bits on every rank, so that all write the same tokens
            dist.broadcast(weight.data, 0)
    cache = cache_of(given, model.config, device)
    server = Server(Served(model), cache, most=8, chunk=256, mixed=given.mixed)
    prompts = [START + QUESTIONS[n % len(QUESTIONS)] for n in range(given.requests)]
    requests = [server.submit(text.encode(p)[0].tolist(), given.new) for p in prompts]
    begun = time.perf_counter()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while server.is_busy:
            server.step()
            if console.is_terminal:
                live.update(table(server, requests, text, time.perf_counter() - begun), refresh=True)
    console.print(table(server, requests, text, time.perf_counter() - begun))
    same = sum(alone(model, r, device) for r in requests)
    console.print(f"answers that the model gives alone, without a cache, too: {same} of {len(requests)}")
    digest = hashlib.sha256(repr([r.written for r in requests]).encode()).hexdigest()[:16]
    console.print(f"digest of all answers: {digest}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
