"""Names of torch's collectives, which differ by version."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather(every: Tensor, own: Tensor, group: Any) -> None:
    """Write each rank's `own` into `every`, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name first
    gather(every, own, group=group)
