"""What tests over ranks say of ranks that do not come to their end."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft

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


def _without_a_backward(rank: int, strategy: str, agree: bool) -> list[str]:
    """Rank 1 ends in place of a backward."""
    cp = weft.distributed.ContextParallel(agree=agree)
    variant = weft.Attention(mask=weft.masks.causal, name="causal")
    plan = cp.plan(variant, batch=1, heads=2, length=8, head_dim=4, dtype="fp32", strategy=strategy)
    out = cp.attention(variant, *(torch.randn(1, 2, 4, 4, requires_grad=True) for _ in "qkv"), plan=plan)
    if rank == 1:
        return []
    try:
        out.sum().backward()
    except (RuntimeError, weft.WeftError) as error:
        return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    return ["a backward of one rank"]


@pytest.mark.parametrize(("strategy", "agree"), [("ring", False), ("exchange", True), ("heads", False)])
def test_a_backward_without_another_rank_says_what_it_waited_for(strategy: str, agree: bool, tmp_path: Path) -> None:
    said = on_ranks(2, partial(_without_a_backward, strategy=strategy, agree=agree), tmp_path)
    expected = (
        "for call 2; rank 1: ended, or does something else" if agree else "rank 0 waits in the backward of causal"
    )
    assert expected in said[0] and said[1] == "", said


def test_all_ranks_say_where_they_wait(tmp_path: Path) -> None:
    first, second = on_ranks(2, _asleep, tmp_path, limit=1.0)
    for rank, (said, where) in enumerate(((first, "in barrier"), (second, "in _asleep"))):
        assert f"rank {rank} has not come to its end" in said and where in said, said


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    said = on_ranks(2, _gone, tmp_path)
    assert said[0] == "process 1 terminated with exit code 7" and said[2] == "rank 1 ended"
