"""The tensors of a workspace, from one record of each: as places, and as text that allocates them.

The longer way of a call makes every buffer a tensor. On the direct way, where allocations take the host longer than
addresses, those that only kernels see lie one after the other in one allocation, or two where some begin as zeros:

    lse2_end = (4 * batches * heads * padded_len + 127) // 128 * 128
    delta_end = lse2_end + (4 * batches * heads * padded_len + 127) // 128 * 128
    room = empty((delta_end // 4,), (1,), float32)
    lse2 = at_room
    delta = at_room + lse2_end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compiler.planning.buffer import ALWAYS, NEVER, Buffer
from ...compiler.planning.target import Place
from ...ir.errors import InternalError

ROOM, ZEROS = ROOMS = "room", "zeros"
DTYPES = {
    "float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
_LINE = 128  # bytes of a line of L2: each buffer begins with one


# -- tensors -----------------------------------------------------------------------------------------------------------
def flat(size: Sequence[int], dtype: torch.dtype, fill: float | None, pitch: int = 0) -> Place:
    """A contiguous tensor, or one of rows that lie `pitch` elements apart."""
    strides, step = [1], pitch or size[-1]
    for extent in reversed(size[:-1]):
        strides.append(step)
        step *= extent
    return Place(tuple(size), tuple(reversed(strides)), dtype, fill)


def place_text(buffer: Buffer) -> str:
    """The place of a buffer, as an expression over names of a call."""
    fill = {NEVER: "None", ALWAYS: "0.0"}.get(buffer.fill, f"0.0 if {buffer.fill} else None")
    size = _tuple(buffer.shape)
    if buffer.when != ALWAYS:
        size = f"{size} if {buffer.when} else {_tuple(['1'] * len(buffer.shape))}"
    return f"flat({size}, {buffer.dtype}, {fill}{f', {buffer.pitch}' if buffer.pitch else ''})"


PLACING: Mapping[str, Any] = {"flat": flat, **DTYPES}  # what `place_text` calls


# -- text --------------------------------------------------------------------------------------------------------------
def rows_of(*sizes: str, dtype: str) -> str:
    """An expression that makes a contiguous tensor of these sizes."""
    return f"empty({_tuple(sizes)}, {_tuple(_strides(sizes))}, {dtype})"


def strides_of(buffer: Buffer) -> str:
    """The strides of a buffer, as an expression."""
    return _tuple(_strides([*buffer.shape[:-1], buffer.pitch or buffer.shape[-1]]))


def apart(buffer: Buffer) -> dict[str, str]:
    """The expressions of a buffer that is a tensor of its own, and of its sizes and strides."""
    if buffer.when != ALWAYS:
        raise InternalError(f"{buffer.name}: expected a tensor that every call has")
    name = buffer.name
    made = f"empty({name}_size, {name}_strides, {buffer.dtype})"
    if buffer.fill == ALWAYS:
        made += ".zero_()"
    elif buffer.fill != NEVER:
        made = f"zeroed({made}, {buffer.fill})"
    return {f"{name}_size": _tuple(buffer.shape), f"{name}_strides": strides_of(buffer), name: made}


def in_rooms(buffers: Sequence[Buffer]) -> dict[str, str]:
    """The expressions of buffers that lie together: their addresses. Those that begin as zeros have a room of their
    own, in which the one that does so in some calls alone is the first."""
    filled = sorted((b for b in buffers if b.fill != NEVER), key=lambda buffer: buffer.fill == ALWAYS)
    return _one_room(ROOM, [b for b in buffers if b.fill == NEVER]) | _one_room(ZEROS, filled)


def _one_room(room: str, buffers: Sequence[Buffer]) -> dict[str, str]:
    if not buffers:
        return {}
    made, addresses, end = {}, {}, ""
    for buffer in buffers:
        addresses[buffer.name] = f"at_{room} + {end}" if end else f"at_{room}"
        made[f"{buffer.name}_end"] = (f"{end} + " if end else "") + _bytes_of(buffer)
        end = f"{buffer.name}_end"
    made[room] = _filled(f"empty(({end} // 4,), (1,), float32)", buffers)
    if all(buffer.when != ALWAYS for buffer in buffers):
        made[room] = f"{made[room]} if {end} else lse"  # which is there in any case
    return made | addresses


def _filled(room: str, buffers: Sequence[Buffer]) -> str:
    """The expression of a room, with zeros where its buffers begin so."""
    if buffers[0].fill == NEVER:
        return room
    asked = [buffer for buffer in buffers if buffer.fill != ALWAYS]
    if not asked:
        return f"{room}.zero_()"
    if len(asked) > 1:
        raise InternalError(f"expected one buffer that begins as zeros or not, got {[b.name for b in asked]}")
    return f"cleared({room}, 0 if {asked[0].fill} else {asked[0].name}_end // 4)"


def _bytes_of(buffer: Buffer) -> str:
    if buffer.dtype not in DTYPES or buffer.pitch:
        raise InternalError(f"{buffer.name}: expected a contiguous buffer of {', '.join(DTYPES)}")
    sizes = [*map(_factor, buffer.shape)]
    found = f"({' * '.join([str(DTYPES[buffer.dtype].itemsize), *sizes])} + {_LINE - 1}) // {_LINE} * {_LINE}"
    return found if buffer.when == ALWAYS else f"({found} if {buffer.when} else 0)"


def _factor(size: str) -> str:
    return size if size.replace("_", "").isalnum() else f"({size})"


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)},)"


def _strides(sizes: Sequence[str]) -> list[str]:
    factors = [*map(_factor, sizes)]
    return [*(" * ".join(factors[n:]) for n in range(1, len(factors))), "1"]


def zeroed(tensor: Tensor, is_wanted: bool) -> Tensor:
    """The tensor, 0 where that is wanted."""
    return tensor.zero_() if is_wanted else tensor


def cleared(tensor: Tensor, kept: int) -> Tensor:
    """The tensor, 0 behind the first `kept` elements."""
    (tensor[kept:] if kept else tensor).zero_()
    return tensor


ALLOCATING: Mapping[str, Any] = {"zeroed": zeroed, "cleared": cleared, **DTYPES}  # what these texts call
