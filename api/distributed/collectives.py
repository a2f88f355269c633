"""torch's collectives: names that differ by version, and what their errors leave out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import ending

_OF_A_COLLECTIVE = "_weft_collective"  # a mark of errors


def is_of_a_collective(error: BaseException) -> bool:
    """Whether it came while ranks sent each other something."""
    return getattr(error, _OF_A_COLLECTIVE, False)


@contextmanager
def under_way() -> Iterator[None]:
    """Around what sends or waits."""
    ending.sends()
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            setattr(error, _OF_A_COLLECTIVE, True)
        raise


def all_gather(every: Tensor, own: Tensor, group: Any) -> None:
    """Write each rank's `own` into `every`, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name first
    with under_way():
        gather(every, own, group=group)


def all_reduce(tensor: Tensor, group: Any) -> None:
    """Put the sum of the tensors of all ranks in the place of each."""
    with under_way():
        dist.all_reduce(tensor, group=group)
