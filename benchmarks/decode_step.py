"""One decode step of a stack of layers shaped as Llama 3 8B's, as a CUDA graph over a paged cache of random rows.

    python benchmarks/decode_step.py                       16 sequences of 8k tokens, 32 layers
    python benchmarks/decode_step.py --batch 64 --tokens 2048

Three graphs are replayed in turns: the step; the step without its attention calls, which then hand on the query; and
the attention calls alone, over the same caches. What attention costs within the step (the first less the second) should
be what its kernels cost by themselves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import weft
from weft.kv import PagedCache, Step
from weft.tools.bench_serve import Decoder, Load, random_decoder

CAUSAL = weft.Attention(mask=weft.masks.causal, name="causal")


class Passing:
    """In place of a variant: hands on the query."""

    drops = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        return query


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches, after it ran once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graphs: list[torch.cuda.CUDAGraph], rounds: int = 15) -> list[float]:
    """The median of each, replayed in turns."""
    taken: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, times in zip(graphs, taken):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return [statistics.median(times[2:]) for times in taken]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("batch", 16), ("tokens", 8192), ("layers", 32), ("page", 16)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    load = Load(
        requests=1, prompts=(1, 1), shared=0, new_tokens=1, most=given.batch, chunk=1, blocks=None, page=given.page,
        layers=given.layers, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256, seed=0, inner=14_336,
    )  # fmt: skip
    device = torch.device("cuda")
    model = random_decoder(load, CAUSAL, {}, device, torch.bfloat16)
    pages = -(-(given.tokens + 1) // given.page)
    cache = PagedCache(
        given.batch * pages, layers=given.layers, kv_heads=8, head_dim=128, page=given.page, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    for layer in range(given.layers):
        cache.keys(layer).normal_()
        cache.values(layer).normal_()
    sequences = [cache.allocate() for _ in range(given.batch)]
    with cache.extend(sequences, [given.tokens] * given.batch):
        pass  # the rows are random already
    fixed = cache.fixed_step(given.batch, pages=pages)
    with cache.extend(sequences, [1] * given.batch) as step:
        fixed.fill(step)
    tokens = torch.zeros(given.batch, 1, dtype=torch.int32, device=device)
    last = torch.zeros(given.batch, dtype=torch.int32, device=device)
    query = torch.randn(given.batch, 32, 1, 128, dtype=torch.bfloat16, device=device)

    def attention_alone() -> None:
        for layer in range(given.layers):
            CAUSAL(query, fixed.keys(layer), fixed.values(layer), **fixed.options)

    whole = captured(lambda: model(tokens, fixed, last))
    alone = captured(attention_alone)
    without = captured(lambda: without_attention(model, tokens, fixed, last))
    step_ms, without_ms, alone_ms = milliseconds([whole, without, alone])
    read = 2 * 2 * 8 * 128 * given.batch * (given.tokens + 1) * given.layers
    share = step_ms - without_ms
    print(f"{given.batch} sequences of {given.tokens} tokens, {given.layers} layers, pages of {given.page}")
    print(f"step               {step_ms:8.3f} ms   {given.batch / step_ms * 1e3:,.0f} tokens/s")
    print(f"without attention  {without_ms:8.3f} ms")
    print(f"attention in it    {share:8.3f} ms   {share / step_ms:.0%} of the step")
    print(f"attention alone    {alone_ms:8.3f} ms   {read / alone_ms / 1e6:,.0f} GB/s of keys and values")
    print(f"in it over alone   {share / alone_ms:8.3f}")


def without_attention(model: Decoder, tokens: Tensor, step: Step, last: Tensor) -> None:
    """The same step, where each attention call hands on its query."""
    for attention in model.attentions:
        attention.variant = Passing()
    try:
        model(tokens, step, last)
    finally:
        for attention in model.attentions:
            attention.variant = CAUSAL


if __name__ == "__main__":
    main()
