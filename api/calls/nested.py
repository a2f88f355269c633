"""torch's jagged nested tensors as operands: the rows of [B, heads, j, dim] lie one after the other, and are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.errors import WeftError, collected, counted
from ..runtime.options import LENGTHS, PLAIN, CallOptions


class Packed(NamedTuple):
    """A call's operands as packed ones."""

    tensors: tuple[Tensor, Tensor, Tensor]  # query, key and value, [1, heads, total, dim]: views
    starts: tuple[Tensor, Tensor]  # cu_seqlens_q, cu_seqlens_kv

    def nested(self, rows: Tensor) -> Tensor:
        """[1, heads, total, ...] with a row for each query, as a nested tensor like the query."""
        return torch.nested.nested_tensor_from_jagged(rows[0].transpose(0, 1), offsets=self.starts[0]).transpose(1, 2)


def are_jagged(*tensors: Any) -> bool:
    return all(isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged for t in tensors)


def lengths_given_twice(name: str, options: CallOptions) -> WeftError:
    """Of a call of nested tensors, whose offsets are the lengths, that gives lengths too."""
    got = ", ".join(options.lengths)
    return WeftError(
        f"{name}: {got}: expected none with nested tensors, which have lengths of their own; leave it out, or pass "
        "packed operands, x.values()[None] with cu_seqlens_q=x.offsets()"
    )


def described(
    name: str, operands: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:  # fmt: skip
    """What is planned of a call with these operands and options: of nested tensors the packed ones."""
    if len(operands) != 3 or not are_jagged(*operands):
        return operands, options
    lengths = PLAIN.having(**{n: options.get(n) for n in LENGTHS})
    if lengths.are_ragged:
        raise lengths_given_twice(name, lengths)
    made = packed(name, *operands)
    return made.tensors, {**options, **dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), made.starts))}


def packed(name: str, query: Any, key: Any, value: Any) -> Packed:
    """Operands that are all jagged, packed. Raises WeftError for other ragged dimensions, holes, and other lengths."""
    named = {"query": query, "key": key, "value": value}
    problems = []
    for label, tensor in named.items():
        ragged = [n for n, size in enumerate(tensor.shape) if not isinstance(size, int)]
        if tensor.dim() != 4 or ragged != [2]:
            problems.append(
                f"{label}: expected a nested tensor [batch, heads, length, dim] whose lengths differ, got one of "
                f"{counted(tensor.dim(), 'dimension')} with dimension {ragged[0]} ragged; pass x.transpose(1, 2) of "
                "[batch, length, heads, dim]"
            )
        elif tensor.lengths() is not None:
            problems.append(
                f"{label}: expected a nested tensor without holes, got one with lengths; copy it, "
                "x.transpose(1, 2).contiguous().transpose(1, 2)"
            )
    if problems:
        raise collected(name, problems)
    if key.offsets() is not value.offsets() and key.shape[2] != value.shape[2]:
        raise WeftError(f"{name}: value: expected the lengths of key, made from the same offsets, got others")
    rows = (query.values()[None], key.values()[None], value.values()[None])
    return Packed(rows, (query.offsets(), key.offsets()))
