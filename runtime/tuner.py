"""Measured tilings: time the candidates once, keep the fastest on disk, find it again in any later process.

Tuning is optional and never happens by itself: without it the table and the cost model of schedule.py decide. The
caller supplies the clock, so that this module knows nothing of devices. A result is one small JSON file under the cache
folder, written to a temporary name and renamed; a torn or foreign file counts as absent.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiler.planning.kernels import Slot
from ..compiler.planning.records import Schedule, Shape, Tiling
from ..compiler.planning.schedule import SLOTS, parse_schedule, with_tiling
from ..ir.errors import WeftError
from . import cache

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = ".tuned"
Measure = Callable[[Schedule, Slot], float]  # seconds of the kernels that use this slot's tiling


@dataclass(frozen=True)
class TuneKey:
    """What a measured schedule holds for."""

    variant: str  # digest of the variant's canonical text
    shape: str  # class of shapes, see shape_class
    hardware: str  # name of the Hardware record
    target: str
    algorithm: str
    generator: str = field(default_factory=cache.generator_digest)
    triton: str = field(default_factory=lambda: _version("triton"))
    torch: str = field(default_factory=lambda: _version("torch"))

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.variant}-{self.shape}-{self.hardware}-{self.target}-{digest[:12]}.json"


@dataclass(frozen=True)
class Tuned:
    """What tuning found."""

    schedule: Schedule
    seconds: Mapping[Slot, float]  # of the fastest tiling of each slot
    tried: int
    failed: Mapping[str, str]  # schedule text -> why it could not be timed


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def shape_class(shape: Shape) -> str:
    """Shapes that share a tuned schedule: widths and dtype, never lengths, heads or batch.

    >>> shape_class(Shape(2, 8, 2, 100, 4096, 128, 128))
    'd128-bf16'
    """
    width = f"d{shape.head_dim}" if shape.head_dim == shape.value_dim else f"d{shape.head_dim}v{shape.value_dim}"
    return f"{width}-{shape.dtype}"


def remembered(key: TuneKey) -> Schedule | None:
    """The schedule that was measured to be fastest, if one was."""
    try:
        return _read(cache.cache_dir() / FOLDER / key.file_name, key)
    except WeftError:
        return None  # the cache folder cannot be used, which its own code warns about


def tune(
    key: TuneKey,
    start: Schedule,
    choices: Mapping[Slot, Sequence[Tiling]],
    measure: Measure,
    *,
    progress: bool = True,
    console: Console | None = None,
) -> Tuned:
    """Time every choice of one slot after the other, keep the fastest of each, and remember the result.

    start: the schedule of the slots that are not being timed. A choice that cannot be compiled or run is passed over.
    progress: show a bar on `console`, stderr where none is given. Of several processes that tune the same key, one
    measures and the others wait for its result.

    Raises WeftError if no choice of a slot could be timed, or the cache folder cannot be used.
    """
    from filelock import FileLock  # imports asyncio: not wanted in a process that only looks schedules up

    folder = _folder()
    with FileLock(str(folder / f"{key.file_name}.lock")):
        found = _measured(start, choices, measure, progress, console or _stderr())
        _write(folder / key.file_name, key, found)
    return found


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def forget(key: TuneKey) -> None:
    """Remove what was measured for this key."""
    (_folder() / key.file_name).unlink(missing_ok=True)


# -- measuring -------------------------------------------------------------------------------------------------------
def _measured(
    start: Schedule, choices: Mapping[Slot, Sequence[Tiling]], measure: Measure, progress: bool, console: Console
) -> Tuned:
    # a call that only looks a schedule up must not pay for this import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    best = start
    seconds: dict[Slot, float] = {}
    failed: dict[str, str] = {}
    columns = (TextColumn("tuning {task.fields[slot]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console, disable=not progress) as bar:
        task = bar.add_task("", total=sum(map(len, choices.values())), slot="", note="")
        for slot in (s for s in SLOTS if choices.get(s)):
            times: dict[Tiling, float] = {}
            for tiling in choices[slot]:
                bar.update(task, slot=slot, note=str(tiling))
                schedule = with_tiling(best, slot, tiling)
                times[tiling] = _timed(measure, schedule, slot, failed)
                bar.advance(task)
            fastest = min(times, key=lambda t: times[t])
            if math.isinf(times[fastest]):
                reason = list(failed.values())[-1]
                raise WeftError(f"tune: no tiling of {slot} could be timed; the last one failed with {reason}")
            best, seconds[slot] = with_tiling(best, slot, fastest), times[fastest]
    return Tuned(best, seconds, sum(map(len, choices.values())), failed)


def _timed(measure: Measure, schedule: Schedule, slot: Slot, failed: dict[str, str]) -> float:
    try:
        return measure(schedule, slot)
    except Exception as error:  # compilers and drivers raise what they like; a candidate that fails is no candidate
        failed[str(schedule)] = f"{type(error).__name__}: {error}"
        return math.inf


# -- on disk ---------------------------------------------------------------------------------------------------------
def _folder() -> Path:
    folder = cache.cache_dir() / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # known now, and not after minutes of measuring
    except OSError as error:
        raise WeftError(f"folder of tuned schedules {folder}: cannot be written ({error.strerror})") from error
    return folder


def _read(path: Path, key: TuneKey) -> Schedule | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return parse_schedule(kept["schedule"]) if kept["key"] == asdict(key) else None
    except (OSError, ValueError, KeyError, TypeError, WeftError):
        return None


def _write(path: Path, key: TuneKey, found: Tuned) -> None:
    text = json.dumps({"key": asdict(key), "schedule": str(found.schedule), "seconds": found.seconds}, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
