"""What `weft bench-serve` measures: random prompts through a decoder with random weights, behind a paged cache."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention as Variant
from ..compiler.analysis.values.ranges import Ranges
from ..ir.errors import WeftError, counted
from ..kv import PagedCache, Step
from ..nn import Attention, Rotary
from ..serving import Graphed, Model, Request, Server


@dataclass(frozen=True)
class Load:
    """What comes in, and through what. prompts: shortest and longest prompt; shared: tokens that all begin with."""

    requests: int
    prompts: tuple[int, int]
    shared: int
    new_tokens: int
    most: int  # sequences at once
    chunk: int  # prompt tokens of a step
    blocks: int | None  # None: room for `most` of the longest requests
    page: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    seed: int
    graphs: bool = False  # decode by CUDA graphs
    mixed: bool = False  # prompts and single tokens in one packed step
    inner: int | None = None  # width of the gated networks; four times that of the model where None
    cache_dtype: torch.dtype | None = None  # of the cache; that of the model where None

    @property
    def pages(self) -> int:
        """Of the longest request."""
        return math.ceil((self.prompts[1] + self.new_tokens) / self.page)

    @property
    def ranges(self) -> Ranges:
        """Of symbols in all calls: graphs have up to twice as many sequences, and pages of each, as there are."""
        keys = 2 * self.pages * self.page
        return {
            "q_pos": (0, keys - 1), "kv_pos": (0, keys - 1), "q_len": (1, keys), "kv_len": (1, keys),
            "batch": (0, 2 * self.most - 1), "head": (0, self.heads - 1), "kv_head": (0, self.kv_heads - 1),
            "group": (self.heads // self.kv_heads,) * 2, "head_dim": (self.head_dim,) * 2,
        }  # fmt: skip


class Decoder(nn.Module):
    """A decoder with grouped heads, rotary embeddings and gated networks, as Llama's are."""

    def __init__(self, load: Load, variant: Variant, operands: dict[str, Any]) -> None:
        super().__init__()
        width = load.heads * load.head_dim
        self.operands, self.rope = operands, Rotary(load.head_dim // 2 * 2)
        self.embedding = nn.Embedding(load.vocabulary, width)
        self.attentions = nn.ModuleList(
            Attention(width, load.heads, load.kv_heads, load.head_dim, variant=variant, rope=self.rope, layer=n)
            for n in range(load.layers)
        )
        inner = load.inner or 4 * width
        self.gates = nn.ModuleList(nn.Linear(width, 2 * inner, bias=False) for _ in range(load.layers))
        self.downs = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(load.layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * load.layers + 1))
        self.head = nn.Linear(width, load.vocabulary, bias=False)

    def forward(self, tokens: Tensor, step: Step, last: Tensor) -> Tensor:
        """tokens [B, L] -> logits [B, vocabulary] after row `last` of each."""
        x, rotation = self.embedding(tokens), self.rope(step.positions)
        for n, attention in enumerate(self.attentions):
            x = x + attention(self.norms[2 * n](x), cache=step, rotation=rotation, **self.operands)
            gate, up = self.gates[n](self.norms[2 * n + 1](x)).chunk(2, -1)
            x = x + self.downs[n](nn.functional.silu(gate) * up)
        rows = x[torch.arange(len(x), device=x.device), last]
        logits: Tensor = self.head(self.norms[-1](rows))
        return logits


@torch.no_grad()
def measure(
    load: Load, variant: Variant, operands: dict[str, Any], device: torch.device, dtype: torch.dtype,
    finished: Callable[[], None],
) -> Iterator[str]:  # fmt: skip
    """Lines of the report. finished: called once a request is done. A first, short run compiles, and does not count."""
    if load.shared >= load.prompts[0]:
        raise WeftError(f"--shared: expected less than the shortest prompt, {load.prompts[0]}, got {load.shared}")
    model: Model = random_decoder(load, variant, operands, device, dtype)
    blocks = load.most * load.pages if load.blocks is None else load.blocks
    cache = PagedCache(
        blocks, layers=load.layers, kv_heads=load.kv_heads, head_dim=load.head_dim, page=load.page,
        dtype=load.cache_dtype or dtype, device=device,
    )  # fmt: skip
    if load.graphs:
        model = Graphed(model, cache)
    prompts = list(_prompts(load))
    warm = Server(model, cache, most=load.most, chunk=load.chunk, mixed=load.mixed)
    for prompt in prompts[: load.most]:
        warm.submit(reversed(prompt), 2)
    warm.run()
    server = Server(model, cache, most=load.most, chunk=load.chunk, mixed=load.mixed)
    start, done = time.perf_counter(), 0
    requests = [server.submit(prompt, load.new_tokens) for prompt in prompts]
    while server.is_busy:
        server.step()
        now_done = sum(r.state == "done" for r in requests)
        for _ in range(now_done - done):
            finished()
        done = now_done
    yield from _report(load, server, cache, requests, time.perf_counter() - start)


def random_decoder(
    load: Load, variant: Variant, operands: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Made where it runs, as the weights of a large one are too many for the host."""
    with torch.device("meta"):
        model = Decoder(load, variant, operands).to(dtype)
    model.to_empty(device=device)
    random = torch.Generator(device).manual_seed(load.seed)
    for weight in model.parameters():
        if weight.dim() == 1:  # of a norm
            weight.fill_(1.0)
        else:
            weight.normal_(std=0.02, generator=random)
    return model


def _prompts(load: Load) -> Iterator[list[int]]:
    draw = random.Random(load.seed)
    start = [draw.randrange(load.vocabulary) for _ in range(load.shared)]
    for _ in range(load.requests):
        rest = draw.randint(*load.prompts) - load.shared
        yield [*start, *(draw.randrange(load.vocabulary) for _ in range(rest))]


def _report(
    load: Load, server: Server, cache: PagedCache, requests: Sequence[Request], seconds: float
) -> Iterator[str]:
    totals, usage = server.totals, cache.usage
    first = [r.times[0] - r.arrived for r in requests]
    between = [b - a for r in requests for a, b in zip(r.times, r.times[1:])]
    written = sum(len(r.written) for r in requests)
    prefill = _rate(totals.prefill_tokens, totals.prefill_seconds)
    whole = f"{len(requests)} in {seconds:.2f} s, {counted(totals.steps, 'step')}"
    yield f"requests   {whole}, {written / seconds:,.0f} new tokens/s in all"
    yield f"prefill    {prefill}; {totals.reused_tokens} more found in the cache"
    yield f"decode     {_rate(totals.decode_tokens, totals.decode_seconds)}"
    yield f"first token after {percentiles(first)}"
    yield f"next token after  {percentiles(between)}"
    yield (
        f"cache      at most {totals.most_used} of {counted(usage.blocks, 'block')} of {usage.page} used "
        f"({totals.most_used / usage.blocks:.0%}), {usage.bytes / 2**20:.1f} MiB; {totals.swaps} swapped out, "
        f"{totals.restarts} computed again"
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{counted(tokens, 'token')} in {seconds:.2f} s, {tokens / seconds if seconds else 0:,.0f} tokens/s"


def percentiles(seconds: Sequence[float]) -> str:
    """Of at least so many of them, the least that is enough."""
    if not seconds:
        return "nothing measured"
    ordered = sorted(seconds)
    found = [ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 90, 99)]
    return ", ".join(f"p{p} {value * 1e3:.1f} ms" for p, value in zip((50, 90, 99), found))
