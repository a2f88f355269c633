"""Operands that are drawn at random: tensors as large as a variant reads them in calls of given sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compiler.analysis.values.ranges import Ranges, range_of
from ..ir.attention import Attention
from ..ir.errors import Problem, WeftError
from ..ir.expr import Load, TensorOperand
from ..ir.walk import loads

LARGEST_INT = 7  # ints are drawn from 0 to it, so that ids are equal now and then
_MOST = 2**28  # entries of one tensor


def drawn_operands(
    attention: Attention,
    names: list[str],
    ranges: Ranges,
    values: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random tensors for these tensor operands, by name: floats are normal, ints 0 to 7, bools even odds.

    ranges: of symbols in the calls, by name. values: of scalars that indices read. dtype: that of floats.
    Raises WeftError where an index depends on a scalar without a value, or reaches too far.
    """
    generator = torch.Generator("cpu").manual_seed(seed)  # the same numbers on every device
    operands = {t.name: t for t in attention.canonical.tensors}
    found = {}
    for name in sorted(names):
        extents = _extents(attention, operands[name], ranges, values)
        if math.prod(extents) > _MOST:
            raise WeftError(
                f"{name}: calls of these sizes read {' x '.join(map(str, extents))} entries, which are too many to "
                "draw; clamp the index, or give smaller sizes"
            )
        found[name] = _drawn(operands[name].dtype, extents, generator, dtype).to(device)
    return found


def _extents(
    attention: Attention, operand: TensorOperand, ranges: Ranges, values: Mapping[str, Any]
) -> tuple[int, ...]:
    """The least shape in which every read stays inside."""
    ints = {
        s.name: (int(values[s.name]),) * 2 for s in attention.canonical.scalars if s.dtype == "int" and s.name in values
    }
    floats = {
        s.name: float(values[s.name]) for s in attention.canonical.scalars if s.dtype == "float" and s.name in values
    }
    extents = [1] * operand.rank
    for load in _reads(attention, operand):
        for axis, index in enumerate(load.index):
            try:
                high = range_of(index, ranges | ints, floats)[1]
            except KeyError as error:
                lacking = str(error.args[0])
                how = f"pass {lacking}=..., which `{load}` reads"
                raise WeftError.of(
                    str(attention.name), Problem(operand=lacking, what="missing", next_step=how)
                ) from error
            extents[axis] = max(extents[axis], high + 1)
    return tuple(extents)


def _reads(attention: Attention, operand: TensorOperand) -> Iterator[Load]:
    return (load for root in attention.canonical.expressions for load in loads(root) if load.tensor == operand)


def _drawn(kind: str, extents: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if kind == "float":
        return torch.randn(extents, generator=generator).to(dtype)
    drawn = torch.randint(0, LARGEST_INT + 1, extents, generator=generator, dtype=torch.int32)
    return drawn if kind == "int" else drawn % 2 == 0
