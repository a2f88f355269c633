"""Caches that two GPUs hold together, over NCCL: as on CPUs (`tests/distributed/test_decode.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from weft.distributed import ShardedPagedCache
from weft.serving import Graphed

from ..distributed.on_ranks import DV, D, H, on_ranks
from ..distributed.test_decode import CAUSAL, Ways, decoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


# What a rank does otherwise than one device does, once each: every case has kernels of its own, which take a second or
# more to compile. tests/distributed/test_decode.py has all variants, on CPUs.
BY_SEQUENCE = (("paged", "causal", 2), ("dense", "sink", 2), ("paged", "far", 2), ("dense", "sigmoid", 2),
               ("dense", "lengths", 1))  # fmt: skip
CASES = (*(("sequence of 2", *case) for case in BY_SEQUENCE), ("heads of 2", "paged", "heads", 2))


def _steps(rank: int) -> list[str]:
    ways, wrong = Ways(rank), list[str]()
    for seed, (way, kind, name, kv_heads) in enumerate(CASES):
        wrong += decoded(ways, way, kind, name, kv_heads, seed, "cuda")
    return wrong


def generated(device: str, wrap: Callable[..., Any]) -> Tensor:
    """Logits of a prompt and some steps of a model whose cache all ranks hold. wrap: (model, cache) -> model."""
    cache = ShardedPagedCache(60, sequence=dist.group.WORLD, page=8, kv_heads=2, head_dim=D, value_dim=DV,
                              dtype=torch.float32, device=device)  # fmt: skip
    columns = [H * D, 2 * D, 2 * DV]
    table = torch.randn(50, sum(columns), generator=torch.Generator().manual_seed(1)).to(device)

    def model(tokens: Tensor, step: Any, last: Tensor) -> Tensor:
        query, key, value = (t.unflatten(2, (n, -1)).transpose(1, 2)
                             for t, n in zip(table[tokens.long()].split(columns, 2), (H, 2, 2)))  # fmt: skip
        step.append(0, key, value)
        return step.attend(0, CAUSAL, query)[:, :, -1].flatten(1)

    found, ids, run = [], [cache.allocate(), cache.allocate()], wrap(model, cache)
    for n in (19, 1, 1, 1, 1):
        tokens = (torch.arange(2 * n, dtype=torch.int32).view(2, n) * 7 + len(found)) % 50
        with torch.no_grad(), cache.extend(ids, [n, n]) as step:
            last = torch.full((2,), n - 1, device=device)
            found.append(run(tokens.to(device), step, last).clone())
    return torch.stack(found)


def _in_graphs(rank: int) -> list[str]:
    one_by_one, graphs = generated("cuda", lambda model, cache: model), list[Graphed]()
    replayed = generated("cuda", lambda model, cache: graphs.append(Graphed(model, cache)) or graphs[0])
    if repr(graphs[0]).startswith("Graphed(0"):
        return ["nothing was captured"]
    return [] if torch.allclose(replayed, one_by_one, atol=1e-5) else [f"rank {rank}: graphs give others"]


def test_graphs_of_steps_over_two_gpus(tmp_path: Path) -> None:
    wrong = on_ranks(2, _in_graphs, tmp_path, timeout=100.0, backend="nccl", limit=90.0)
    assert not any(wrong), "\n".join(wrong)


def test_steps_over_two_gpus_give_what_the_definition_gives(tmp_path: Path) -> None:
    wrong = on_ranks(2, _steps, tmp_path, timeout=300.0, backend="nccl", limit=150.0)
    assert not any(wrong), "\n".join(wrong)
