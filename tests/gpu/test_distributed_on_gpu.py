"""Calls on DTensors over two GPUs (NCCL): each computes its shard, and both what one GPU does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from ..models.test_distributed import OPERANDS, VARIANTS, address_of, compute, meeting_place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


def compare(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (2,))
    lens = torch.tensor([300, 7, 0, 210], device="cuda")
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        for name, variant in VARIANTS.items():
            generator = torch.Generator().manual_seed(3)
            shapes = {"query": (4, 8, 200, 64), "key": (4, 4, 300, 64), "value": (4, 4, 300, 64)}
            sizes = {n: tuple(300 if s == 30 else s for s in shape) for n, shape in OPERANDS[name].items()}
            whole = {n: torch.randn(s, generator=generator).cuda() for n, s in {**shapes, **sizes}.items()}
            whole = {n: t.to(dtype) if n in shapes else t for n, t in whole.items()}
            for placement, given in ((Shard(0), {}), (Shard(1), {}), (Shard(0), {"kv_lens": lens})):
                expected = compute(variant, {n: t.clone().requires_grad_() for n, t in whole.items()}, given)
                shards = {
                    n: distribute_tensor(t, mesh, [placement if n in ("query", "key") else Replicate()])
                    for n, t in whole.items()
                }
                found = compute(variant, {n: t.requires_grad_() for n, t in shards.items()}, given)
                for n, right in expected.items():
                    assert isinstance(found[n], DTensor), n
                    got, scale = found[n].full_tensor().float(), right.float().nan_to_num(neginf=0.0).abs().max()
                    close = torch.isclose(got, right.float(), atol=float(limit * scale), rtol=limit)
                    assert bool(close.all()), (dtype, name, placement, n, rank)


def child(rank: int, port: int, folder: Path) -> None:
    os.environ.update(address_of(port))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    compare(rank)
    torch.distributed.destroy_process_group()
    (folder / str(rank)).touch()


def test_two_gpus(tmp_path: Path) -> None:
    place = meeting_place()
    multiprocessing.spawn(child, (place.port, tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
