"""The kernel that joins results over disjoint keys, for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from weft.codegen.ahead import Compilation
from weft.codegen.launch.fixed import WARPS, WIDE
from weft.codegen.launch.joining import KERNEL, STRIDES, constants_of
from weft.codegen.loader import without_holes
from weft.compiler.planning.machines.hardware import by_name

from .ahead import compile_ahead
from .fixed import JOINED

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(("device", "width"), [("h200", 128), ("a100", 512), ("mi300x", 128)])
def test_rows_move_many_bytes_at_a_time(device: str, width: int) -> None:
    kernel = without_holes(KERNEL, False).join_results
    constants = constants_of(((torch.bfloat16,) * 3, width, False, True))
    sizes = dict.fromkeys(("n_rows", "heads", "length", "n_more"), 1) | dict.fromkeys(STRIDES, WIDE)
    made = compile_ahead(Compilation(kernel, JOINED | sizes | constants, {"num_warps": WARPS}), by_name(device))
    assert made.spilled == 0
    wide = {"mi300x": r"(?:global|buffer)_store_dwordx4", "h200": r"st\.global\.v4", "a100": r"st\.global\.v4"}[device]
    assert made.count(wide) >= 1
