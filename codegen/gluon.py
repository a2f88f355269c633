"""What generated Gluon modules import: an operation of the hardware for which Gluon has no name, and a decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from . import triton_versions

triton_versions.check("hopper")  # before what it looks for is imported

from triton._C.libtriton import ir  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language._core import builtin  # noqa: E402


@builtin  # type: ignore[untyped-decorator]
def tma_reduce_add(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Begin to add a tile in SRAM to a tensor in HBM (cp.reduce.async.bulk.tensor, PTX ISA 8.0).

    `tma.store_wait` waits for it as for a store. Additions are atomic, in no order.
    """
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, places, source.handle)


def run_time_program(function: Callable[..., None]) -> Any:
    """`gluon.jit` that specialises on no run-time value: a new length, stride, window or batch compiles nothing."""
    parameters = inspect.signature(function).parameters.values()
    return gluon.jit(function, do_not_specialize=[p.name for p in parameters if p.annotation is not gl.constexpr])
