"""torch's collectives: names that differ by version, and what their errors leave out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ir.errors import WeftError


def all_gather(every: Tensor, own: Tensor, group: Any) -> None:
    """Write each rank's `own` into `every`, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name first
    gather(every, own, group=group)


def in_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an autograd function, whose errors of collectives say what ranks may have waited for.

    No comparison comes before it, as before a call: a rank that lacks a backward cannot be asked.
    """

    @wraps(backward)
    def noted(ctx: Any, *gradients: Tensor | None) -> Any:
        try:
            return backward(ctx, *gradients)
        except RuntimeError as error:
            if not isinstance(error, WeftError | torch.OutOfMemoryError):
                error.add_note(
                    f"rank {dist.get_rank()} is in a backward over ranks; it waits until the timeout of its group for "
                    "a rank that has ended, or calls no backward"
                )
            raise

    return noted
