"""The kernel that writes rows into caches, for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from weft.codegen.ahead import Compilation
from weft.codegen.launch.appending import KERNEL, STRIDES, constants_of
from weft.codegen.launch.fixed import WARPS, WIDE
from weft.codegen.loader import without_holes
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import starts_early

from .ahead import compile_ahead

pytestmark = pytest.mark.compiles

WIDTHS = [("h200", 128, 128), ("a100", 576, 0), ("mi300x", 128, 128)]


@pytest.mark.parametrize(("device", "width", "value_width"), WIDTHS)
def test_rows_move_many_bytes_at_a_time(device, width, value_width):
    kernel = without_holes(KERNEL, False).append_rows
    machine = by_name(device)
    early = starts_early(machine.arch)
    constants = constants_of((torch.bfloat16, width, value_width, True), early)
    sizes = dict(zip(("n_rows", "length", "heads", "page"), [1] * 4)) | dict.fromkeys(STRIDES, WIDE)
    tensors = dict.fromkeys(("key", "value", "keys", "values"), torch.bfloat16) | {"slots": torch.int32}
    made = compile_ahead(Compilation(kernel, tensors | sizes | constants, {"num_warps": WARPS}), machine)
    assert made.spilled == 0
    assert made.count(r"griddepcontrol\.wait") == made.count(r"griddepcontrol\.launch_dependents") == early
    wide = {"mi300x": r"(?:global|buffer)_store_dwordx2", "h200": r"st\.global\.v4", "a100": r"st\.global\.v4"}[device]
    assert made.count(wide) == made.count(r"(?:global|buffer)_store|st\.global") > 0
