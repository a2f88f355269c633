"""What lies in tensors that kernels compute positions and indices with.

Looked at where it is on the host, and elsewhere where `weft.settings(check=True)` or WEFT_CHECK=1 asks for it: then a
call waits for its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compiler.analysis.values.ranges import Ranges, cure_of_index
from ..ir.attention import Attention
from ..ir.errors import WeftError, collected, counted
from ..ir.expr import INT32_MAX, SYMBOLS, Call, Expr, Load
from ..ir.operators import OPERATORS, Range
from ..ir.reference import dense_mask, evaluate, positions
from ..ir.walk import loads, nodes
from .checks import form_problem
from .settings import checks_values
from .torch_private import under_transform

LARGEST_OFFSET = INT32_MAX // 2  # of q_offset, in size
_TRUSTED = 2**30  # ints read from a tensor are below it in size where ranges.py computes with them


def known_offsets(offset: int | Tensor) -> Range | None:
    """The lowest and the highest q_offset of a call; None where they lie on a device and no check was asked for, where
    torch.func maps over them, and where they are complex, which is refused with what else is wrong."""
    if not isinstance(offset, Tensor):
        return offset, offset
    if not (offset.is_cpu or checks_values()) or under_transform():
        return None
    if offset.is_complex():
        return None
    if offset.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(offset)
    return int(low), int(high)


def check_offsets(name: str, offset: int | Tensor) -> None:
    """Raise WeftError for positions that no kernel can compute with; what a device holds is not looked at unasked."""
    if isinstance(offset, Tensor) and (problem := form_problem("q_offset", offset)) is not None:
        raise WeftError(f"{name}: {problem}")
    found = known_offsets(offset)
    if found is None or (-LARGEST_OFFSET <= found[0] and found[1] <= LARGEST_OFFSET):
        return
    if isinstance(offset, Tensor):
        row, value = next((r, v) for r, v in enumerate(offset.tolist()) if abs(v) > LARGEST_OFFSET)
        raise WeftError(f"{name}: q_offset[{row}]: integer overflow: expected a value within 31 bits, got {value}")
    raise WeftError(f"{name}: q_offset: integer overflow: expected a value within 31 bits, got {offset}")


def computed_with(attention: Attention) -> tuple[str, ...]:
    """The int tensors whose entries take part in int arithmetic: beyond comparing, choosing and turning into floats."""
    found: set[str] = set()
    for root in attention.expressions:
        for node in nodes(root):
            if isinstance(node, Call) and node.dtype == "int" and not OPERATORS[node.op].chooses:
                found |= {n.tensor.name for n in nodes(node) if isinstance(n, Load) and n.dtype == "int"}
    return tuple(sorted(found))


def check_entries(name: str, operands: Mapping[str, object], computed: Iterable[str]) -> None:
    """Raise WeftError, naming the place, where an int tensor holds what arithmetic in 32 bits is not sound for."""
    problems = []
    for operand in computed:
        tensor = operands[operand]
        assert isinstance(tensor, Tensor)
        wrong = ((tensor >= _TRUSTED) | (tensor <= -_TRUSTED)).nonzero()
        if len(wrong):
            place = wrong[0].tolist()
            problems.append(
                f"{operand}{place}: integer overflow: expected entries below 2**30 in size, as they are computed with, "
                f"got {tensor[tuple(place)].item()}"
            )
    if problems:
        raise collected(name, problems)


# -- the reference, which reads wherever its index leads ---------------------------------------------------------------
def check_reads(
    attention: Attention, query: Tensor, key: Tensor, operands: Mapping[str, Any], q_offset: int | Tensor | None,
    head_dim: int, first_batch: int = 0,
) -> None:  # fmt: skip
    """Raise WeftError where the mask, or the score of a visible pair, reads outside of an operand.

    On a CPU alone, where torch would take an index of -5 from the end; and not while torch traces.
    """
    if not attention.tensors or not query.is_cpu or torch.compiler.is_compiling() or type(query) is not Tensor:
        return
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    env = positions(batch, heads, kv_heads, q_len, kv_len, q_offset, query.device, first_batch)
    env |= {"head_dim": head_dim, **operands}
    ranges = {name: _range_of(value) for name, value in env.items() if type(value) is int or name in SYMBOLS}
    if attention.folded_sink is not None:
        _check_loads(attention, attention.folded_sink, env, ranges, None)
    if kv_len == 0:  # no pair reads
        return
    _check_loads(attention, attention.folded_mask, env, ranges, None)
    if loads(attention.folded_score):
        mask = dense_mask(attention, env, (batch, heads, q_len, kv_len), query.dtype, query.device)
        _check_loads(attention, attention.folded_score, env, ranges, mask)


def _range_of(value: Tensor | float) -> Range:
    if not isinstance(value, Tensor):
        return int(value), int(value)
    return (int(value.min()), int(value.max())) if value.numel() else (0, 0)


def _check_loads(
    attention: Attention, root: Expr, env: Mapping[str, Any], ranges: Ranges, visible: Tensor | None
) -> None:
    for load in sorted(loads(root), key=lambda load: len(load.text)):  # those inside an index first
        for axis, index in enumerate(load.index):
            extent = env[load.tensor.name].shape[axis]
            places = evaluate(index, env, torch.float64, torch.device("cpu"), visible)
            outside = (places < 0) | (places >= extent)
            if visible is not None:
                outside = outside & visible
            if bool(outside.any()):
                got = int(places.expand(outside.shape)[outside][0])
                cure = cure_of_index(index, _range_of(places), extent, ranges)
                raise WeftError(
                    f"{attention.name}: `{load}`: index {axis}, `{index}`, is {got} in this call, but "
                    f"{load.tensor.name} has {counted(extent, 'entry')} there; {cure}"
                )
