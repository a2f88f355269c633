"""The processes of an example: those that torchrun started, or some of gloo that are started here."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Work = Callable[..., None]  # what a rank does, given `device=`


def on_ranks(work: Work, ranks: int) -> None:
    """Do the work in each process of torchrun, on a GPU each where there are some; else in `ranks` processes of a CPU.

    work: a function of a module, or a partial of one, because processes import it.
    """
    if "LOCAL_RANK" in os.environ:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        work(device=device)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_child, (ranks, f"file://{folder}/ranks", work), nprocs=ranks)


def _child(rank: int, ranks: int, meeting: str, work: Work) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    work(device=torch.device("cpu"))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads that torch.compile has left may abort a process that ends in order
