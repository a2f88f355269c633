"""What generated Gluon modules import: an operation of the hardware for which Gluon has no name."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin  # type: ignore[untyped-decorator]
def tma_reduce_add(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Begin to add a tile in SRAM to a tensor in HBM (cp.reduce.async.bulk.tensor, PTX ISA 8.0).

    `tma.store_wait` waits for it as for a store. Additions are atomic, in no order.
    """
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, places, source.handle)
