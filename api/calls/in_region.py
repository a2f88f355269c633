"""Calls inside torch's region `context_parallel`, whose tensors hold the rows of one rank.

torch puts a function that computes over ranks in the place of its own attention there. A call of Weft does the same.
What would be computed of one rank's rows alone is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..codegen.torch_private import Region, region
from ..ir.attention import Attention
from ..ir.errors import UnavailableError
from ..runtime.options import OPTIONS, PLAIN, CallOptions
from .internals import Main

WHERE = "inside torch's context_parallel"
OVER_ROWS = frozenset(  # known there
    {"return_lse", "q_offset", "target", "deterministic", "seed", "train", "uk", "uv", "form"}
)


def unknown_over_rows(options: CallOptions) -> list[str]:
    """Options of a call that are not known where a sequence is divided over ranks."""
    return [n for n in OPTIONS if n not in OVER_ROWS and getattr(options, n) is not getattr(PLAIN, n)]


def over_ranks(attention: Attention, main: Main, options: CallOptions, operands: Mapping[str, Any]) -> Any:
    """out, or (out, lse), of this rank's rows over those of all; None where this is no region of torch.

    Raises UnavailableError for what is not divided over ranks.
    """
    found = region()
    if found is None:
        return None
    query, key, value, _ = main
    problem = _problem(attention, found, main, options)
    if problem:
        raise UnavailableError(
            f"{attention.name}: {WHERE}: {problem}; leave the region, and divide the call by "
            "weft.distributed.ContextParallel"
        )
    from ..distributed.over_mesh import over_mesh  # lazy: it imports torch.distributed

    ranks = found.mesh.size()
    lengths = query.shape[2] * ranks, key.shape[2] * ranks
    balance = "zigzag" if found.deals_pairs_of_chunks() else "contiguous"
    return over_mesh(found.mesh, 0, attention, (query, key, value), lengths, operands, options, balance)


def _problem(attention: Attention, found: Region, main: Main, options: CallOptions) -> str:
    """Why a call is not computed; empty where it is."""
    if found.mesh is None:
        return "this version of torch does not say how the sequence is divided"
    if torch.compiler.is_compiling():
        return "calls over ranks are not traced by torch.compile"
    if unknown := unknown_over_rows(options):
        return f"{', '.join(unknown)}: not known where the sequence is sharded"
    if isinstance(options.q_offset, Tensor):
        return "q_offset: expected an int, got a tensor"
    tensors = (main.query, main.key, *(() if attention.latent else (main.value,)))
    if any(not isinstance(t, Tensor) or t.dim() != 4 or t.is_nested for t in tensors):
        return "expected tensors [B, H, rows, D]"
    if main.query.shape[2] != main.key.shape[2]:
        return f"expected as many queries as keys on each rank, got {main.query.shape[2]} and {main.key.shape[2]}"
    return ""


def refuse(attention: Attention, what: str) -> None:
    """Raise where a call would be of one rank's rows alone."""
    if region() is not None:
        raise UnavailableError(f"{attention.name}: {WHERE}: {what} has this rank's rows alone; leave the region for it")
