"""What launches make of forms: options of a compilation, and other tiles where operands are not aligned."""

from __future__ import annotations

from typing import Any

from ....launch.job import Job
from ..forms import UNALIGNED, Tiling
from ..kernels.measures import MEASURES, PAIR_CELLS
from ..kernels.tables import DISTANCE_TABLES
from ..tilings import FIXED


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
