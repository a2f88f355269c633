"""What a call must satisfy, checked before any op runs; all problems of a call are raised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .ir.errors import collected
from .runtime.checks import check_operand_kinds, kind_problems, rank_problems

if TYPE_CHECKING:
    from .ir.attention import Attention


def check_operands(attention: Attention, given: Mapping[str, object], device: torch.device) -> None:
    """The variant's own operands: all there, none unknown, each of the declared kind."""
    problems = check_operand_kinds(attention, given, device)
    if problems:
        raise collected(str(attention.name), problems)


def check_latent(attention: Attention, query: Tensor, cache: Tensor, uk: Tensor | None, uv: Tensor | None) -> None:
    """query [B, H, L, nope + rope], cache [B, 1, T, rank + rope], uk [H, rank, nope], uv [H, rank, Dv]."""
    latent, name = attention.latent, str(attention.name)
    assert latent is not None
    problems = list(rank_problems({"query": query, "cache": cache}))
    if problems:
        raise collected(name, problems)
    if cache.shape[1] != 1:
        problems.append(f"cache: expected 1 head [B, 1, T, rank + rope], got {cache.shape[1]}")
    if cache.shape[3] != latent.rank + latent.rope:
        problems.append(f"cache: expected dim {latent.rank + latent.rope} (rank + rope), got {cache.shape[3]}")
    if cache.shape[0] != query.shape[0]:
        problems.append(f"cache: expected batch {query.shape[0]} as in query, got {cache.shape[0]}")
    problems += kind_problems({"query": query, "cache": cache})
    if (uk is None) != (uv is None):
        problems.append("uk, uv: expected both or neither")
    elif uk is None:
        if attention.scale is None:
            problems.append(
                "scale: without uk and uv the query is latent and its true width is unknown; declare scale="
            )
        if query.shape[3] != latent.rank + latent.rope:
            problems.append(
                f"query: expected dim {latent.rank + latent.rope} (rank + rope) without uk, got {query.shape[3]}"
            )
    else:
        problems += _projection_problems(latent.rank, latent.rope, query, uk, uv)  # type: ignore[arg-type]
    if problems:
        raise collected(name, problems)


def _projection_problems(rank: int, rope: int, query: Tensor, uk: Tensor, uv: Tensor) -> Iterator[str]:
    heads, nope = query.shape[1], query.shape[3] - rope
    if nope < 1:
        yield f"query: expected dim above {rope}, the latent's rope, got {query.shape[3]}"
    for label, tensor in (("uk", uk), ("uv", uv)):
        if tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[1] != rank:
            yield f"{label}: expected [{heads}, {rank}, width], got shape {list(tensor.shape)}"
        elif tensor.dtype != query.dtype or tensor.device != query.device:
            expected, got = (f"{t.dtype} on {t.device}" for t in (query, tensor))
            yield f"{label}: expected {expected} as in query, got {got}"
        elif label == "uk" and tensor.shape[2] != nope:
            yield f"uk: expected width {nope} (query's dim minus rope), got {tensor.shape[2]}"
