"""Caches that two GPUs hold together, over NCCL: as on CPUs (`tests/distributed/test_decode.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..distributed.on_ranks import on_ranks
from ..distributed.test_decode import Ways, decoded

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


def test_steps_over_two_gpus_give_what_the_definition_gives(tmp_path: Path) -> None:
    wrong = on_ranks(2, _steps, tmp_path, timeout=300.0, backend="nccl", limit=150.0)
    assert not any(wrong), "\n".join(wrong)
