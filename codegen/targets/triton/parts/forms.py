"""What launches make of forms: options of a compilation, and other tiles where operands are not aligned."""

from __future__ import annotations

from typing import Any

from ....launch.job import Job
from ..forms import Tiling
from ..kernels.measures import MEASURES, PAIR_CELLS
from ..kernels.tables import DISTANCE_TABLES
from ..tilings import FIXED

# Operands that go through registers on their way to SRAM: Triton 3.6 gives wrong results for large tiles on sm_90 (two
# asynchronous products in a row whose right operands come from registers); tiles of 32 rows use plain mma.
UNALIGNED = Tiling(32, 32, 4, 2)


def unaligned(kernel: str, form: Any) -> Any:
    """The form of a kernel where operands are not aligned."""
    if kernel in (*FIXED, PAIR_CELLS, DISTANCE_TABLES):
        return form
    return Tiling(UNALIGNED.block_q, UNALIGNED.block_kv, form.num_warps, 1) if kernel in MEASURES else UNALIGNED


def options_of(job: Job, form: Any) -> dict[str, int]:
    """Of the compilation of a portable kernel, which may have the form of a kernel of another target."""
    if isinstance(form, Tiling):
        return {"num_warps": form.num_warps, "num_stages": form.num_stages, **job.rounding}
    return {"num_warps": 4, **job.rounding}
