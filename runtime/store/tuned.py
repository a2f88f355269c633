"""Schedules that tuning found fastest, on disk, to be found again in any later process.

A form is fastest for lengths like those that it was timed at, and may be slow for others: what is found is kept for its
class of lengths (`class_of`). All classes of a key are one small JSON file under the cache folder, written to a
temporary name and renamed; a torn or foreign file counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...compiler.planning.machines.hardware import Hardware
from ...compiler.planning.schedule import Schedule, parse_schedule
from ...compiler.planning.signature import LengthClass, Signature
from ...compiler.planning.tuner import Tuned
from ...ir.attention import Attention
from ...ir.errors import WeftError
from .files import cache_dir, folder_of, lock_of, triton_version, version_of, write
from .modules import generator_digest

FOLDER = ".tuned"


@dataclass(frozen=True)
class TuneKey:
    """What tuned schedules hold for, those of all classes of lengths."""

    variant: str  # digest of the variant's canonical text
    direction: str
    widths: str  # and dtype: "d128-bf16"; of short calls "d64-bf16-short"
    hardware: str  # name of the Hardware record
    target: str
    algorithm: str = "flash"
    generator: str = field(default_factory=generator_digest)
    triton: str = field(default_factory=triton_version)
    torch: str = field(default_factory=lambda: version_of("torch"))

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.variant}-{self.direction}-{self.widths}-{self.hardware}-{self.target}-{digest[:12]}.json"


def key_of(
    attention: Attention, signature: Signature, hardware: Hardware, target: str, algorithm: str = "flash"
) -> TuneKey:
    """Calls that share a file: widths and dtype count, and whether short calls have a form of their own and these are
    such; never heads or batch."""
    return TuneKey(attention.canonical.digest, signature.direction, signature.label, hardware.name, target, algorithm)


def remembered(
    attention: Attention, signature: Signature, hardware: Hardware, target: str, algorithm: str = "flash"
) -> Mapping[LengthClass, Schedule]:
    """The schedules that were timed to be fastest, by the class of lengths that they were timed at."""
    try:
        folder = cache_dir() / FOLDER
    except WeftError:
        return {}  # the cache folder cannot be used, which its own code warns about
    if not folder.is_dir():
        return {}
    key = key_of(attention, signature, hardware, target, algorithm)
    try:
        kept = _read(folder / key.file_name, key)
        return {_class_of(text): parse_schedule(found["schedule"]) for text, found in kept.items()}
    except (ValueError, KeyError, TypeError, WeftError):
        return {}


def remember(key: TuneKey, lengths: LengthClass, search: Callable[[], Tuned]) -> Tuned:
    """Keep what `search` finds for a class of lengths. Of several processes that tune the same key, one does and the
    others wait.

    Raises WeftError if the cache folder cannot be used, before anything is timed.
    """
    folder = _folder()
    path = folder / key.file_name
    with lock_of(Path(f"{path}.lock")):
        found = search()
        _write(path, key, {**_read(path, key), _text_of(lengths): _record_of(found)})
    return found


def forget(key: TuneKey) -> None:
    """Remove what was found for this key."""
    (_folder() / key.file_name).unlink(missing_ok=True)


# -- on disk ---------------------------------------------------------------------------------------------------------
def _folder() -> Path:
    folder = folder_of(FOLDER, "tuned schedules")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # known now, and not after minutes of timing
    except OSError as error:
        raise WeftError(f"folder of tuned schedules {folder}: cannot be written ({error.strerror})") from error
    return folder


def _text_of(lengths: LengthClass) -> str:
    return "x".join(map(str, lengths))


def _class_of(text: str) -> LengthClass:
    q_len, kv_len = text.split("x")
    return int(q_len), int(kv_len)


def _read(path: Path, key: TuneKey) -> dict[str, Any]:
    """What was found for each class of lengths; nothing where the file is none of this key."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return dict(kept["lengths"]) if kept["key"] == asdict(key) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _record_of(found: Tuned) -> dict[str, Any]:
    ties = {
        kernel: [str(form) for form in outcome.tied] for kernel, outcome in found.outcomes.items() if outcome.is_tie
    }
    return {"schedule": str(found.schedule), "seconds": dict(found.seconds), "ties": ties}


def _write(path: Path, key: TuneKey, classes: Mapping[str, Any]) -> None:
    kept = {"key": asdict(key), "lengths": classes}
    write(path, json.dumps(kept, indent=1).encode())
