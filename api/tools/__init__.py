"""What the shell's `tune`, `build` and `calibrate` do, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compiler.planning.kernel import Algorithm
from ..compiler.planning.records import Shape
from ..compiler.planning.signature import Direction
from ..compiler.planning.tuner import Tuned
from ..ir.errors import WeftError, shown
from ..ir.numbers import is_int
from ..runtime import build as ahead
from ..runtime.store import calibrated

if TYPE_CHECKING:
    from ..attention import Attention
    from ..compiler.planning.machines.rates import Calibration


def tune(
    attention: Attention, shape: Shape, *, target: str | None = None, algorithm: Algorithm = "flash",
    progress: bool = False, **operands: Any,
) -> Tuned:  # fmt: skip
    """Time the forms of a variant's kernels on this machine, and keep the fastest for calls of about these lengths.

    shape: of `weft.shape`. operands: the variant's own, by name; tensors that are not given are drawn. progress: a bar.
    What is found is kept in the cache folder. Raises WeftError for latent attention.
    """
    from .tuning import tune as search  # lazy: few programs tune

    return search(attention, shape, operands, target=target, algorithm=algorithm, progress=progress)


def build(
    *variants: Attention, device: str, head_dims: Sequence[int] = (64, 128), dtypes: Sequence[str] = ("bf16",),
    directions: Sequence[Direction] = ("forward", "backward"), sequences: Sequence[str] = ("dense",),
    page: int = 16, decode: Sequence[int] = (), target: str | None = None, jobs: int | None = None,
) -> list[ahead.Built]:  # fmt: skip
    """Generate and compile kernels ahead of time, so that a first call compiles nothing. The GPU need not be here.

    device: "h100"-style name. sequences: how rows lie; page: rows of a block. decode: steps of few queries too, for so
    many query heads a key head. jobs: processes; all cores where not given. Raises WeftError for what is not known;
    what could not be built says why in `problem`.
    """
    if jobs is not None and not is_int(jobs, least=1):
        raise WeftError(f"build: jobs: expected a positive int, or None for all cores, got {shown(jobs)}")
    work = ahead.jobs_of(
        variants, device=device, head_dims=head_dims, dtypes=dtypes, directions=directions, target=target,
        sequences=sequences, page=page, decode=decode,
    )  # fmt: skip
    return list(ahead.build(work, jobs))


def calibrate(device: str | None = None, path: str | Path | None = None) -> Calibration:
    """Measure what this machine does, in less than a minute, and keep it for plans and for the choice of forms.

    device: "cpu", "cuda" or "cuda:1"; the GPU if there is one. path: a file for `WEFT_CALIBRATION`; the cache folder
    where not given. `doubts` of the result says why figures are not to be trusted.
    """
    from .calibration import calibrate as measure  # lazy: few programs measure

    if path is not None and (not isinstance(path, (str, PathLike)) or not str(path) or "\0" in str(path)):
        raise WeftError(f"calibrate: path: expected a file, or None, got {shown(path)}")
    where = None if path is None else Path(path)
    if where is not None and not where.parent.is_dir():
        raise WeftError(f"calibrate: path: {where.parent} is no folder")
    found = measure(device)
    calibrated.write(found, where or calibrated.file_of(found.machine))
    return found
