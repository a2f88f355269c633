"""Schedules that tuning found fastest, on disk, to be found again in any later process.

A result is one small JSON file under the cache folder, written to a temporary name and renamed; a torn or foreign file
counts as absent.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..compiler.planning.hardware import Hardware
from ..compiler.planning.schedule import Schedule, parse_schedule
from ..compiler.planning.signature import Signature
from ..compiler.planning.tuner import Tuned
from ..ir.attention import Attention
from ..ir.errors import WeftError
from . import cache

FOLDER = ".tuned"


@dataclass(frozen=True)
class TuneKey:
    """What a tuned schedule holds for."""

    variant: str  # digest of the variant's canonical text
    direction: str
    widths: str  # and dtype: "d128-bf16"; of short calls "d64-bf16-short"
    hardware: str  # name of the Hardware record
    target: str
    algorithm: str = "flash"
    generator: str = field(default_factory=cache.generator_digest)
    triton: str = field(default_factory=lambda: _version("triton"))
    torch: str = field(default_factory=lambda: _version("torch"))

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.variant}-{self.direction}-{self.widths}-{self.hardware}-{self.target}-{digest[:12]}.json"


def key_of(
    attention: Attention, signature: Signature, hardware: Hardware, target: str, algorithm: str = "flash"
) -> TuneKey:
    """Calls that share a tuned schedule: widths and dtype count, and whether short calls have a form of their own and
    these are such; never lengths, heads or batch."""
    return TuneKey(attention.digest, signature.direction, signature.label, hardware.name, target, algorithm)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def remembered(
    attention: Attention, signature: Signature, hardware: Hardware, target: str, algorithm: str = "flash"
) -> Schedule | None:
    """The schedule that was timed to be fastest, if one was."""
    try:
        folder = cache.cache_dir() / FOLDER
    except WeftError:
        return None  # the cache folder cannot be used, which its own code warns about
    if not folder.is_dir():
        return None
    key = key_of(attention, signature, hardware, target, algorithm)
    return _read(folder / key.file_name, key)


def remember(key: TuneKey, search: Callable[[], Tuned]) -> Tuned:
    """Keep what `search` finds. Of several processes that tune the same key, one does and the others wait.

    Raises WeftError if the cache folder cannot be used, before anything is timed.
    """
    from filelock import FileLock  # lazy: imports asyncio, not wanted in a process that only looks schedules up

    folder = _folder()
    with FileLock(str(folder / f"{key.file_name}.lock")):
        found = search()
        _write(folder / key.file_name, key, found)
    return found


def forget(key: TuneKey) -> None:
    """Remove what was found for this key."""
    (_folder() / key.file_name).unlink(missing_ok=True)


# -- on disk ---------------------------------------------------------------------------------------------------------
def _folder() -> Path:
    folder = cache.cache_dir() / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # known now, and not after minutes of timing
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
    ties = {
        kernel: [str(form) for form in outcome.tied] for kernel, outcome in found.outcomes.items() if outcome.is_tie
    }
    kept = {"key": asdict(key), "schedule": str(found.schedule), "seconds": dict(found.seconds), "ties": ties}
    text = json.dumps(kept, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
