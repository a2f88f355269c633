"""Kernels that are the same for every variant: what is made once of each kind of their launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ...compiler.planning.machines.hardware import for_device
from ...compiler.planning.signature import starts_early
from ..loader import without_holes
from .binding import Binding

WARPS = 4  # of a program, where a kernel wants no other number
WIDE = 1 << 40  # stands for a number that is compiled as int64
Ready = tuple[Any, tuple[object, ...]]  # what launches a kernel, and the constants that a launch is handed


class Fixed:
    """The kernels of a module without holes, on one device or in Triton's interpreter."""

    def __init__(self, module: str, device: int, interprets: bool) -> None:
        from . import launching  # lazy: imports triton

        self._launching, self.device, self.interprets = launching, device, interprets
        self.current_stream = launching.current_stream
        self._module = without_holes(module, interprets)
        self.runs: dict[object, Ready] = {}  # by all that their constants follow from

    @cached_property
    def starts_early(self) -> bool:
        """Whether a kernel may be launched before the one in front of it is done."""
        return not self.interprets and starts_early(for_device(torch.device("cuda", self.device)).arch)

    def prepared(
        self, name: str, types: Sequence[object], constants: Mapping[str, object], warps: int = WARPS
    ) -> Ready:  # fmt: skip
        """types: of the run-time arguments, as a compilation takes them."""
        kernel, options = getattr(self._module, name), {"num_warps": warps}
        binding = Binding(name, self._launching.parameters_of(kernel)[0], "", constants)
        if self.interprets:
            return self._launching.interpreted(kernel, binding, options), ()
        options |= {"launch_pdl": True} if constants.get("STARTS_EARLY") else {}
        with torch.cuda.device(self.device):
            run = self._launching.compiled(kernel, binding, types, options)
        return run, tuple(constants.values())

    def launch(self, ready: Ready, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """numbers: of the call, in the order of the kernel's parameters behind its tensors."""
        run, constants = ready
        places = tensors if self.interprets else [t.data_ptr() for t in tensors]
        stream = 0 if self.interprets else self.current_stream(self.device)
        run(programs, (*places, *numbers, *constants), stream)


@cache
def fixed(module: str, device: int, interprets: bool) -> Fixed:
    return Fixed(module, device, interprets)
