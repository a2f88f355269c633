"""Calls over two GPUs (NCCL), or four: every strategy computes what the definition does, in bf16 and in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from weft.distributed import ContextParallel

from ..distributed.on_ranks import PACKED, cases, compare, on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


SHARES = 8  # of the cases: processes of each compile kernels beside those of others


def _compared(share: int, rank: int) -> list[str]:
    cp, wrong = ContextParallel(), []
    for n, (name, strategy, balance, lengths, kv_heads) in list(enumerate(cases(40)))[share::SHARES]:
        long = tuple(5 * length for length in lengths)
        overlaps = (None, True, False)[n % 3] if strategy == "exchange" else None
        dtype = torch.float32 if n % 3 == 2 else torch.bfloat16
        wrong += compare(cp, name, strategy, balance, long, kv_heads, dtype, "cuda", overlaps, widths=(64, 64))  # type: ignore[arg-type]
    for n, (length, starts) in list(enumerate(PACKED))[share::SHARES]:
        strategy = ("exchange", "ring", "heads", "gather")[n]
        wrong += compare(cp, "sink", strategy, "zigzag", (length, length), 2, torch.bfloat16, "cuda", starts=starts,
                         widths=(64, 64))  # fmt: skip
    return wrong


@pytest.mark.parametrize("share", range(SHARES))
def test_two_gpus_compute_the_definition(share: int, tmp_path: Path) -> None:
    wrong = on_ranks(2, partial(_compared, share), tmp_path, timeout=300.0, backend="nccl", limit=280.0)
    assert not any(wrong), "\n".join(wrong)


def _of_two_dimensions(shape: tuple[int, int], rank: int) -> list[str]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", shape, mesh_dim_names=("hosts", "heads"))
    cp, wrong = ContextParallel(mesh, dim=("hosts", "heads")), list[str]()
    names = ("sink", "dropout", "heads", "bias")
    for n, (name, balance) in enumerate(zip(names, ("zigzag", "contiguous", "striped", "pairs"))):
        strategy, dtype = ("heads+ring", "heads+exchange")[n % 2], (torch.bfloat16, torch.float32)[n // 2]
        wrong += compare(cp, name, strategy, balance, (400, 400), (4, 2, 1)[n % 3], dtype, "cuda", widths=(64, 64))
    return wrong + compare(cp, "dropout", "heads+ring", "zigzag", (210, 210), 4, torch.bfloat16, "cuda",
                           starts=(0, 70, 140, 210), widths=(64, 64))  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)])
def test_neighbours_divide_heads(shape: tuple[int, int], tmp_path: Path) -> None:
    ranks = shape[0] * shape[1]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    wrong = on_ranks(ranks, partial(_of_two_dimensions, shape), tmp_path, timeout=300.0, backend="nccl", limit=280.0)
    assert not any(wrong), "\n".join(wrong)
