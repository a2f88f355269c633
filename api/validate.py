"""What a call must satisfy, checked before any op runs; all problems of a call are raised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .ir.errors import collected
from .ir.expr import Scalar, TensorOperand
from .runtime.checks import kind_problems, range_problems, rank_problems, tensor_problems

if TYPE_CHECKING:
    from .ir.attention import Attention


def check_operands(attention: Attention, given: Mapping[str, object], device: torch.device) -> None:
    """The variant's own operands: all there, none unknown, each of the declared kind."""
    declared = {p.name: p for p in attention.parameters}
    problems = [_unknown(n, declared) for n in given if n not in declared]
    for name, operand in declared.items():
        if name not in given:
            problems.append(f"{name}: missing; pass {name}=... ({_kind(operand)}, declared at {operand.where})")
        else:
            problems += _operand_problems(operand, given[name], device)
    if problems:
        raise collected(str(attention.name), problems)


def _unknown(name: str, declared: Mapping[str, object]) -> str:
    names = ", ".join(sorted(declared)) or "none"
    return f"{name}: unknown operand or option; this variant's operands are: {names}"


def _kind(operand: Scalar | TensorOperand) -> str:
    if isinstance(operand, Scalar):
        return f"{'an' if operand.dtype == 'int' else 'a'} {operand.dtype}"
    return f"a tensor of {operand.dtype} with {operand.rank} dimension{'s' if operand.rank > 1 else ''}"


def _operand_problems(operand: Scalar | TensorOperand, value: object, device: torch.device) -> Iterator[str]:
    if isinstance(operand, Scalar):
        yield from _scalar_problems(operand, value)
    elif not isinstance(value, Tensor):
        yield f"{operand.name}: expected {_kind(operand)}, got {type(value).__name__}"
    else:
        yield from tensor_problems(operand, value, device)


def _scalar_problems(operand: Scalar, value: object) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{operand.name}: expected a Python number, got a tensor; declare it with weft.tensor to pass a tensor"
    elif operand.dtype == "int":
        if isinstance(value, (bool, float)) or not isinstance(value, (int, torch.SymInt)):
            yield f"{operand.name}: expected an int, got {value!r}"
        elif isinstance(value, int):
            yield from range_problems(operand, value)
    elif isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        yield f"{operand.name}: expected a number, got {value!r}"


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
    for label, tensor in (("uk", uk), ("uv", uv)):
        if tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[1] != rank:
            yield f"{label}: expected [{heads}, {rank}, width], got shape {list(tensor.shape)}"
        elif tensor.dtype != query.dtype or tensor.device != query.device:
            expected, got = (f"{t.dtype} on {t.device}" for t in (query, tensor))
            yield f"{label}: expected {expected} as in query, got {got}"
        elif label == "uk" and tensor.shape[2] != nope:
            yield f"uk: expected width {nope} (query's dim minus rope), got {tensor.shape[2]}"
