"""The kernel that adds up listed sums, for GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from weft.codegen.ahead import Compilation
from weft.codegen.launch.fixed import WARPS
from weft.codegen.launch.launching import parameters_of
from weft.codegen.launch.summing import KERNEL, constants_of, types_of
from weft.codegen.loader import without_holes
from weft.compiler.planning.machines.hardware import by_name

from .ahead import compile_ahead

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(("device", "group", "entries"), [
    ("h200", 128, torch.int32), ("h200", 64, torch.int64), ("a100", 128, torch.int32), ("mi300x", 128, torch.int32),
])  # fmt: skip
def test_it_compiles_without_spills(device: str, group: int, entries: torch.dtype) -> None:
    kernel = without_holes(KERNEL, False).sum_listed
    names, _ = parameters_of(kernel)
    given = {**dict(zip(names, types_of(entries))), **constants_of(group)}
    made = compile_ahead(Compilation(kernel, given, {"num_warps": WARPS}), by_name(device))
    assert made.spilled == 0 and not made.count(r"\batom|\bred\.|global_atomic")
