"""Tensor descriptors, by which the tensor memory accelerator (TMA) brings tiles: what they say of a tensor's memory.

A box is what a launch needs of one. Of which tensors kernels take descriptors, a target says by `Described`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiler.analysis.values.places import rows_of_boxes
from ...ir.expr import Load
from .binding import SHAPES, Binding
from .job import Job, Mode, Part

_ANY = 0x7FFF0000  # a size that no coordinate reaches


class Box:
    """What a launch needs of a tensor descriptor: far cheaper to build than the checked one.

    width: a stride where none is used, in elements.
    """

    __slots__ = ("base", "shape", "strides")
    padding, in_order = "zero", False
    round_f32_to_tf32 = False

    def __init__(self, tensor: Tensor, width: int) -> None:
        self.base = tensor
        self.shape, self.strides = self.places(width, *self.numbers(tensor))

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        """All that a descriptor depends on besides the address."""
        return *tensor.shape, *tensor.stride()[:3]

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        """Sizes and strides that the descriptor has, from `numbers`."""
        batches, heads, rows, dim, of_batch, of_head, of_row = numbers
        # multiples of 16 bytes even where, the size being 1, they are never used
        strides = [of_batch if batches > 1 else width, of_head if heads > 1 else width, of_row if rows > 1 else width]
        return [batches, heads, rows, dim], [*strides, 1]


class RaggedBox(Box):
    """The same of rows that end anywhere: [2**30 rows back, a sequence's end, head, row of 2**30, column].

    templates/hopper/parts/sequences.py.jinja has the coordinates.
    """

    __slots__ = ()

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        _, heads, _, dim, _, of_head, of_row = numbers
        strides = [(1 << 34) - of_row, of_row, of_head if heads > 1 else of_row, of_row, 1]
        return [_ANY, _ANY, heads, 1 << 30, dim], strides


class HeadsBox(Box):
    """The descriptor of a tensor [B, H, L, D] as [B, L, H, D], so that a tile has rows of several heads."""

    __slots__ = ()

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        batches, heads, rows, dim, of_batch, of_head, of_row = numbers
        return Box.places(width, batches, rows, heads, dim, of_batch, of_row, of_head)


class OperandBox(Box):
    """The same of an operand that pairs read: its dimension `width` is along queries, the last along keys."""

    __slots__ = ()

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        return *tensor.shape, *tensor.stride()

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        rank = len(numbers) // 2
        sizes, strides = numbers[:rank], numbers[rank:]
        order = [*(d for d in range(rank - 1) if d != width), width, rank - 1]
        # a stride of a dimension of one entry is never used
        return [sizes[d] for d in order], [*(strides[d] if sizes[d] > 1 else 16 for d in order[:-1]), 1]


class FlatBox(Box):
    """The same of memory of our own: rows of `width` floats, or one row of all of them."""

    __slots__ = ()
    in_order = True  # in SRAM as in memory

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        return (tensor.numel(),)

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        (floats,) = numbers
        return ([floats // width, width], [width, 1]) if width else ([floats], [1])


class WholeBox(Box):
    """The descriptor of a contiguous tensor of our own [B, H, rows, columns]."""

    __slots__ = ()

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        return tuple(tensor.shape)

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        _, heads, rows, columns = numbers
        return list(numbers), [heads * rows * columns, rows * columns, columns, 1]


_BOXES = {box.__name__: box for box in (Box, RaggedBox, HeadsBox, OperandBox, FlatBox, WholeBox)}
# `Box.numbers` of tensors that the function of a call has names for: sizes, and strides by the tensor's name
_OF_QUERY, _OF_KEY = "batches, heads, q_len", "key_batches, kv_heads, kv_len"
_EXTENTS = {
    "query": f"{_OF_QUERY}, q_dim", "out": f"{_OF_QUERY}, value_dim", "key": f"{_OF_KEY}, key_dim",
    "value": f"{_OF_KEY}, value_dim",
    **{name: ", ".join(sizes) for name, sizes in SHAPES.items() if name[-1].isdigit()},  # rotary keys
}  # fmt: skip


class Described(NamedTuple):
    """Which tensor a descriptor is of, by name, and how."""

    tensor: str
    box: type[Box]
    width: int = 0

    @property
    def text(self) -> str:
        """The box, as an expression."""
        return f"{self.box.__name__}({self.tensor}, {self.width})"

    @property
    def key(self) -> str:
        """Address and `numbers`, as an expression."""
        name = self.tensor
        if issubclass(self.box, FlatBox):
            return f"at_{name}, {name}_floats"
        if issubclass(self.box, WholeBox):
            return f"at_{name}, *{name}_sizes"
        if issubclass(self.box, OperandBox):
            is_given = name.startswith("arg_")
            sizes, strides = (f"{name}.shape", f"{name}.stride()") if is_given else (f"{name}_size", f"{name}_strides")
            return f"at_{name}, *{sizes}, *{strides}"
        return f"at_{name}, {_EXTENTS[name.removeprefix('d')]}, {name}_sb, {name}_sh, {name}_sl"

    @property
    def places(self) -> Callable[..., tuple[list[int], list[int]]]:
        """Sizes and strides that the descriptor has, from the numbers that `key` has after the address."""
        return partial(self.box.places, self.width)


def rows_described(job: Job, tensor: str, width: int) -> Described:
    """Of a tensor [B, H, rows, D]."""
    return Described(tensor, RaggedBox if job.sequences.ragged else Box, width)


def pairs_described(tensor: str, read: Load) -> Described:
    """Of a tensor in the shape of what pairs read."""
    rows = rows_of_boxes(read)
    assert rows is not None
    return Described(tensor, OperandBox, rows)


class Descriptors(Part):
    """The descriptors that kernels take, by the names of their parameters.

    blocks: the tile that each is of, for the constants of a kernel.
    """

    def __init__(
        self, job: Job, found: Mapping[str, Described], blocks: Callable[[Binding], Mapping[str, Sequence[int]]]
    ) -> None:
        self._job, self.found, self._blocks = job, found, blocks

    def tools(self) -> dict[str, Any]:
        return dict(_BOXES)

    def rows(self, mode: Mode) -> dict[str, str]:
        return {name: described.text for name, described in self.found.items()}

    def conditions(self, mode: Mode) -> list[str]:
        """`is_ragged_readable`, of what alignment says nothing of."""
        if not self._job.sequences.ragged or self._job.sequences.keys.packed:
            return []
        ragged = {described.tensor for described in self.found.values() if described.box is RaggedBox}
        rows = [n for n in self._job.given_names if n in ragged]
        whole = " == ".join([*(f"{n}_sb % {n}_sl" for n in rows), "0"])
        return [*(f"{n}_sl > 0" for n in rows), whole]

    def kept(self, parameter: str, meta: Mapping[str, Any]) -> tuple[str, Mapping[Any, Sequence[object]]]:
        """For a descriptor of a launch: an expression, and what the launch is handed by its value."""
        found = self.found[parameter]
        return found.key, self._job.device.descriptors(meta, found.places)

    def types(self, binding: Binding, types: Sequence[Any]) -> list[Any]:
        """Arguments as a compilation takes them: with descriptors in place of boxes."""
        names = [*binding.parameters, *binding.constants]
        if not any(isinstance(value, Box) for value in types):
            return list(types)
        blocks, device = self._blocks(binding), self._job.device
        return [
            device.descriptor(value, blocks[name]) if isinstance(value, Box) else value
            for name, value in zip(names, types)
        ]


# -- which tensors can be read so --------------------------------------------------------------------------------------
def readable(tensor: Tensor, ragged: bool = False) -> Tensor:
    """The tensor [B, H, rows, D], or a copy that the tensor memory accelerator can read."""
    is_fit = is_ragged_readable(tensor) if ragged else is_readable(tensor)
    return tensor if is_fit else tensor.clone(memory_format=torch.contiguous_format)


def is_ragged_readable(tensor: Tensor) -> bool:
    """The same of sequences with lengths: batch rows lie a whole number of rows of a head apart, whatever the sizes."""
    batch, _, row, _ = tensor.stride()
    whole = row > 0 and (tensor.shape[0] == 1 or batch % row == 0)
    return whole and row * tensor.element_size() % 16 == 0 and is_readable(tensor)


def is_readable(tensor: Tensor) -> bool:
    """Whether address and strides are multiples of 16 bytes."""
    # a stride in a dimension of one entry leads nowhere: Box gives another in its place
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()) if size > 1]
    return not any(n % 16 for n in (tensor.data_ptr(), *(tensor.element_size() * stride for stride in strides)))


_BOXED = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


def boxed_bytes(tensor: Tensor) -> int:
    """Bytes of an element where boxes of a float tensor may be brought by the tensor memory accelerator, else 0."""
    size = _BOXED.get(tensor.dtype)
    *steps, last = tensor.stride() or (0,)
    if size is None or not steps or last != 1 or tensor.data_ptr() & 15:
        return 0
    for extent, step in zip(tensor.shape, steps):  # a loop, for speed: at every call
        if extent == 0 or (extent > 1 and (step == 0 or step * size & 15)):
            return 0
    return size
