"""Gradients of operands on the direct way of a dense backward: what kernels leave sums in, and how these end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...compiler.analysis.tiles.results import OperandGradient
from ...compiler.planning.gradient_sums import Ways

# sizes of the dimensions of sums, [batch, head, rows or tiles], and of an operand, by what indexes them
_SIZES = {"batch": "batches", "head": "heads", "q_pos": "q_len", "kv_pos": "kv_len", "0": "1"}
_ROWS = {"row": "q_pos", "column": "kv_pos"}


class Finish(NamedTuple):
    """How the sums of one read become the gradient of its operand."""

    text: str  # an expression of the gradient
    conditions: Sequence[str]  # expressions that must hold for it


def finishes(gradients: Sequence[OperandGradient], ways: Ways, at_zero: str) -> dict[str, Finish] | None:
    """By name of the operand; None where some gradient takes more than a sum.

    at_zero: the condition that the first query of each batch row is at position 0.
    """
    names = [g.load.tensor.name for g in gradients]
    found = {}
    for n, (name, gradient, way) in enumerate(zip(names, gradients, ways.of_reads, strict=True)):
        if way is None:
            one = _summed(n, gradient, at_zero)
        elif way.finish != "list":
            one = Finish(f"typed(sum{n}, arg_{name}.dtype)", ())
        else:
            one = (
                Finish(f"typed(of_list(sum{n}, entry{n}, range{n}, arg_{name}), arg_{name}.dtype)", ())
                if way.owner == "diagonals"
                else None
            )
        if one is None or names.count(name) > 1:
            return None
        found[name] = one
    return found


class Read(NamedTuple):
    """An operand each of whose dimensions is one of sums [batch, head, rows or tiles], or of one entry."""

    over: tuple[int, ...]  # dimensions of the sums that it does not have
    order: tuple[int, ...]  # of those that are left, as the operand has them
    indices: Sequence[str]


def read_of(gradient: OperandGradient) -> Read | None:
    index = [i.text for i in gradient.load.index]
    places = ["batch", "head", _ROWS.get(gradient.kind, "tile")]
    indexed = [i for i in index if i != "0"]
    if not set(indexed) <= set(places) or len(set(indexed)) < len(indexed):
        return None
    left = [place for place in places if place in indexed]
    over = tuple(d for d, place in enumerate(places) if place not in indexed)
    return Read(over, tuple(left.index(i) for i in indexed), index)


def _summed(n: int, gradient: OperandGradient, at_zero: str) -> Finish | None:
    tensor, read = gradient.load.tensor.name, read_of(gradient)
    if read is None:
        return None
    shape = f"({''.join(f'{_SIZES[i]}, ' for i in read.indices)})"
    conditions = [f"arg_{tensor}.shape == {shape}"]
    conditions += [at_zero] if gradient.kind == "row" else []
    return Finish(f"as_read(sum{n}, {read.over}, {read.order}, arg_{tensor})", conditions)


def sizes_as_read(read: Read, batches: int, heads: int, rows: int) -> tuple[int, ...]:
    """Of the operand whose gradient `as_read` gives."""
    sizes = {"batch": batches, "head": heads, "q_pos": rows, "kv_pos": rows, "0": 1}
    return tuple(sizes[i] for i in read.indices)


def typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def as_read(sums: Tensor, over: tuple[int, ...], order: tuple[int, ...], operand: Tensor) -> Tensor:
    """The gradient of an operand: sums over some dimensions, the others in the order of its index.

    Tiles are added up before heads and batch rows: the longer way does it so, and gives the same bits.
    """
    if 2 in over:
        sums = sums.sum(2) if sums.shape[2] > 1 else sums.squeeze(2)
        over = over[:-1]
    sizes = sums.shape
    if over and max([sizes[d] for d in over]) > 1:
        sums = sums.sum(over)  # in one order
    else:
        sums = sums.view([size for d, size in enumerate(sizes) if d not in over])
    if order != tuple(range(len(order))):
        sums = sums.permute(order)
    return typed(sums if sums.shape == operand.shape else sums.reshape(operand.shape), operand.dtype)
