"""Caches that two GPUs hold together, over NCCL: as on CPUs (`tests/distributed/test_decode.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..distributed.on_ranks import on_ranks
from ..distributed.test_decode import Ways, every_variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


def _steps(rank: int) -> list[str]:
    return every_variant(Ways(rank), 24, "cuda")


def test_steps_over_two_gpus_give_what_the_definition_gives(tmp_path: Path) -> None:
    wrong = on_ranks(2, _steps, tmp_path, timeout=300.0, backend="nccl")
    assert not any(wrong), "\n".join(wrong)
