"""Steps of decoding as CUDA graphs: the launches of a whole model are handed to the GPU as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir.errors import WeftError, counted
from ..kv import PagedCache, Step

# (tokens int32 [B, L], the step, the last new row of each sequence [B]) -> logits [B, vocabulary] after that row
Model = Callable[[Tensor, Step, Tensor], Tensor]


@dataclass(frozen=True)
class _Captured:
    """A graph, and the tensors that it reads and writes."""

    step: Step  # a fixed one
    tokens: Tensor  # int32 [most sequences, 1]
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [most sequences, vocabulary]


class Graphed:
    """A model whose steps of one token a sequence are CUDA graphs; other steps are computed as they come.

        server = weft.serving.Server(weft.serving.Graphed(model, cache), cache)

    One graph serves all steps with as many sequences and pages, both rounded up to powers of two. It is captured when
    the first of them comes, after that one was computed in these sizes. All graphs share their memory: logits,
    [B, vocabulary], hold until the next step. `model` must be as torch.cuda.graph wants it: it waits for nothing, and
    what it computes depends on the values of tensors alone. Raises WeftError for another cache than a
    weft.kv.PagedCache on a GPU.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        if not isinstance(cache, PagedCache) or cache.device.type != "cuda":
            got = f"one on {cache.device}" if isinstance(cache, PagedCache) else type(cache).__name__
            raise WeftError(f"Graphed: cache: expected a weft.kv.PagedCache on a GPU, got {got}")
        self.model, self.cache = model, cache
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, tokens: Tensor, step: Step, last: Tensor) -> Tensor:
        """Logits [B, vocabulary] of tokens int32 [B, L], as the model gives them."""
        if step.length > 1 or step.block_table is None or step.cu_seqlens_q is not None:
            return self.model(tokens, step, last)
        sizes = _power(len(tokens)), _power(step.block_table.shape[1])
        found = self._captured.get(sizes)
        if found is None:
            self._captured[sizes], logits = self._capture(tokens, step, *sizes)
            return logits[: len(tokens)]
        found.step.fill(step)
        found.tokens[: len(tokens)].copy_(tokens)
        found.graph.replay()
        return found.logits[: len(tokens)]

    def _capture(self, tokens: Tensor, step: Step, sequences: int, pages: int) -> tuple[_Captured, Tensor]:
        """The graph of steps of these sizes, and the logits of this step, [sequences, vocabulary]."""
        fixed = self.cache.fixed_step(sequences, pages=pages)
        fixed.fill(step)
        with torch.inference_mode(False):  # it is written in that mode and outside
            rows = torch.zeros(sequences, 1, dtype=torch.int32, device=self.cache.device)
        rows[: len(tokens)].copy_(tokens)
        first = self._run(rows, fixed)  # whatever is compiled or prepared at first must be so before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._run(rows, fixed)
        return _Captured(fixed, rows, graph, logits), first

    def _run(self, tokens: Tensor, fixed: Step) -> Tensor:
        return self.model(tokens, fixed, torch.zeros_like(fixed.q_lens))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{b} x {counted(p, 'page')}" for b, p in sorted(self._captured))
        return f"Graphed({counted(len(self._captured), 'graph')}{': ' if sizes else ''}{sizes})"


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
