"""Where kernels are launched: a GPU, or Triton's interpreter. All that a launcher asks of a machine, in one object.

Whoever wants to see what would be compiled or launched, without a GPU, gives a launcher another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiler.planning.machines.hardware import Hardware, for_device
from .. import torch_private
from .adding import add_listed
from .binding import Binding
from .summing import summing


class Asked(NamedTuple):
    """A kernel that is to be compiled."""

    function: Any  # what triton.jit made
    binding: Binding
    arguments: Sequence[Any]  # of a call, with tensors
    types: Callable[[Sequence[Any]], list[Any]]  # from arguments to what a compilation takes
    options: Mapping[str, int]


class Device:
    """A GPU, by its number, or the interpreter."""

    launches_all = False  # whether kernels without programs are launched, too

    def __init__(self, number: int, interprets: bool) -> None:
        from . import launching  # lazy: imports triton

        self._launching = launching
        self.number, self.interprets = number, interprets
        self.goes_directly = not interprets  # whether calls may take the direct way
        self.empty: Callable[..., Tensor] = torch_private.empty_on_gpu or self._empty  # contiguous or not
        self.current = torch_private.current_gpu
        self.guard = None if interprets else torch_private.guard  # None: no call is known to be like another

    def _empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", self.number))

    # -- what it is ----------------------------------------------------------------------------------------------------
    def hardware(self) -> Hardware:
        return for_device("cpu" if self.interprets else torch.device("cuda", self.number))

    def processors(self) -> int:
        """Programs that run at a time, one an SM."""
        return _processors(self.number)

    def stream(self) -> int:
        """The stream of the caller."""
        return 0 if self.interprets else self._launching.current_stream(self.number)

    def counter(self) -> Tensor:
        """A zero that a persistent kernel hands out work with."""
        return self._launching.counter(self.number)

    # -- kernels -------------------------------------------------------------------------------------------------------
    def parameters_of(self, function: Any) -> tuple[list[str], dict[str, object]]:
        return self._launching.parameters_of(function)

    def types_of(self, arguments: Sequence[Any]) -> list[Any]:
        return self._launching.types_of(arguments)

    def descriptor(self, box: Any, block: Sequence[int]) -> Any:
        """The tensor descriptor of tiles of these sizes, as a compilation takes it."""
        return self._launching.descriptor(box, block)

    def descriptors(self, meta: Mapping[str, Any], places: Callable[..., Any]) -> Mapping[Any, Sequence[object]]:
        """What launches are handed for a tensor descriptor, by address and numbers."""
        return self._launching.Descriptors(self._launching.encoder(meta), places)

    def compiled(self, asked: Sequence[Asked]) -> list[Any]:
        """The kernels, ready to be launched: (programs, arguments, stream)."""
        if self.interprets:
            return [self._launching.interpreted(a.function, a.binding, a.options) for a in asked]
        given = [(a.function, a.binding, a.types(a.arguments), a.options) for a in asked]
        return self._launching.compiled_together(self.number, given)

    # -- what is called besides ----------------------------------------------------------------------------------------
    def add_listed(self, table: Tensor, entries: Tensor, sums: Tensor) -> None:
        """Add listed sums to the entries that they belong to."""
        add_listed(table, entries, sums)

    def sum_listed(self, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        """Add up what flash_ddiagonals listed, in shares."""
        summing(self.number, self.interprets)(sums, entries, ranges, group, shares)

    def tools(self) -> dict[str, object]:
        """What the direct way calls of it."""
        launching = self._launching
        return {
            "device": self.number, "empty": self.empty, "current_device": self.current,
            "is_heard": launching.is_heard, "current_stream": launching.stream_function(),
            "counter": launching.counter,
        }  # fmt: skip


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
