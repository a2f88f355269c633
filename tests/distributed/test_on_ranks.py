"""What tests over ranks say of ranks that do not come to their end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .on_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


def _asleep(rank: int) -> list[str]:
    if rank == 1:
        time.sleep(60.0)
    dist.barrier()
    return []


def _gone(rank: int) -> list[str]:
    dist.barrier()  # a rank that is gone while another still connects ends both
    if rank == 1:
        os._exit(7)
    return []


def test_all_ranks_say_where_they_wait(tmp_path: Path) -> None:
    first, second = on_ranks(2, _asleep, tmp_path, limit=1.0)
    for rank, (said, where) in enumerate(((first, "in barrier"), (second, "in _asleep"))):
        assert f"rank {rank} has not come to its end" in said and where in said, said


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    said = on_ranks(2, _gone, tmp_path)
    assert said[0] == "process 1 terminated with exit code 7" and said[2] == "rank 1 ended"
