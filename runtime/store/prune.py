"""What lies in the cache of modules, and what of it goes: by hand, or by itself after a publish, at most daily."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ...ir.errors import WeftError
from ..settings import CACHE, DEFAULT_CACHE_SIZE, cache_max_size, trace
from . import modules
from .files import Unsound, cache_dir, read_ours, remove, triton_version, version_of, warn_once
from .modules import DAY, LOCKS, META, SOURCE, STAGING, TEMPLATES, Key, generator_digest, read_entry

STALE_SECONDS = 3600  # a staging folder this old belongs to a process that died
SWEPT_SECONDS = 60  # so long after it looked for those, a process that publishes does not look again
UNUSED_SECONDS = 30 * DAY  # a stale entry this old goes by itself; a younger one may belong to another environment
_ENTRY_NAME = re.compile(r".+-[0-9a-f]{12}")
STAMP = ".pruned"


# --- what is there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryInfo:
    """One line of `weft cache list`."""

    folder: str  # readable name
    path: Path  # of the source
    size: int  # bytes of all its files
    created: float  # seconds since 1970
    used: float  # when it was last loaded, to a day; seconds since 1970
    stale: str  # why the code and the versions of today never look for it; "" if they do
    problem: str = ""  # why it would be built again; "" if it is sound, or was not read whole

    @property
    def edited_name(self) -> str:
        """`Key.edited_name` of its key."""
        return f"{self.folder.rpartition('-')[0]}.py"


def entries() -> list[EntryInfo]:
    """All entries of the cache folder, sound or not, by name."""
    return [replace(info, problem=_problem(info.path.parent)) for info in _survey(cache_dir())]


def size() -> int:
    """Bytes taken by all entries."""
    return sum(info.size for info in _survey(cache_dir()))


def _survey(root: Path) -> list[EntryInfo]:
    """All entries by name, without reading their sources."""
    infos = []
    for folder in _entry_folders(root):
        with suppress(FileNotFoundError):  # another process was removing it
            infos.append(_info(folder))
    return infos


def _entry_folders(root: Path) -> list[Path]:
    try:
        return sorted(
            path
            for path in root.iterdir()
            if _ENTRY_NAME.fullmatch(path.name) and any(os.path.lexists(path / name) for name in (SOURCE, META))
        )
    except OSError as error:
        raise WeftError(f"cache folder {root}: cannot be read ({error.strerror})") from error


def _info(folder: Path) -> EntryInfo:
    files = {} if folder.is_symlink() else {path.name: os.lstat(path) for path in folder.iterdir()}
    created = os.lstat(folder).st_mtime
    size = sum(info.st_size for info in files.values())
    return EntryInfo(folder.name, folder / SOURCE, size, created, _last_used(folder), _staleness(folder))


def _last_used(folder: Path) -> float:
    try:
        return os.lstat(folder / META).st_mtime
    except OSError:
        return os.lstat(folder).st_mtime


def _problem(folder: Path) -> str:
    try:
        read_entry(folder)
    except (OSError, ValueError, Unsound) as error:
        return str(error)
    return ""


def _staleness(folder: Path) -> str:
    """Why nothing that runs today looks for this entry."""
    try:
        key = Key(**json.loads(read_ours(folder / META)[0])["key"])
        name = key.folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Unsound):
        return "it has no key that can be read"
    if key.generator != generator_digest():
        return "made by other code of weft"
    for package, then, now in (("triton", key.triton, triton_version()), ("torch", key.torch, version_of("torch"))):
        if then != now:
            return f"made for {package} {then}, here is {now}"
    return "" if name == folder.name else "named after another key"


# --- pruning ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned:
    """What a prune removed."""

    stale: int  # entries that nothing of today would load
    over: int  # least recently used ones, beyond the size
    size: int  # bytes of both
    left_overs: int  # of processes that died, and locks that nobody holds


def prune(max_size: int | None = None) -> Pruned:
    """Remove entries that are stale or unsound, left-overs, and the least recently used ones beyond `max_size` bytes.

    Processes that run may go on: they hold the text of what they loaded, and build again what they find missing.
    Raises WeftError if the folder cannot be used or written.
    """
    root = cache_dir()
    with _writing(root):
        return _prune(root, entries(), lambda info: bool(info.stale or info.problem), max_size)


def clear() -> int:
    """Remove all entries, locks and left-overs, and nothing else; returns how many entries there were.

    Raises WeftError if the folder cannot be used or written.
    """
    root = cache_dir()
    with _writing(root):
        removed = sum(_take_away(root, folder) for folder in _entry_folders(root))
        for path in (*_named(root, STAGING), *_named(root, TEMPLATES), root / LOCKS, root / STAMP):
            remove(path)
    return removed


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeftError(f"cache folder {root}: cannot be written ({error.strerror or error})") from error


def _prune(root: Path, infos: list[EntryInfo], unwanted: Callable[[EntryInfo], bool], max_size: int | None) -> Pruned:
    stale = {info for info in infos if unwanted(info)}
    over = set() if max_size is None else _beyond(set(infos) - stale, max_size)
    removed = {info for info in stale | over if _retire(root, info)}
    left_overs = _sweep(_named(root, STAGING), (root / LOCKS).glob("*.lock"))
    _sweep(_named(root, TEMPLATES), older_than=UNUSED_SECONDS)
    return Pruned(len(stale & removed), len(over & removed), sum(info.size for info in removed), left_overs)


def _beyond(infos: set[EntryInfo], max_size: int) -> set[EntryInfo]:
    """The least recently used entries without which the others take at most `max_size` bytes."""
    excess = sum(info.size for info in infos) - max_size
    doomed = set()
    for info in sorted(infos, key=lambda info: (info.used, info.folder)):
        if excess <= 0:
            break
        doomed.add(info)
        excess -= info.size
    return doomed


def _retire(root: Path, info: EntryInfo) -> bool:
    """Remove an entry, unless another process used or replaced it since it was looked at."""
    try:
        return _last_used(info.path.parent) == info.used and _take_away(root, info.path.parent)
    except FileNotFoundError:
        return False


def _take_away(root: Path, folder: Path) -> bool:
    """Remove an entry; it leaves by one rename, so that nobody sees half of it. False: another process was faster."""
    aside = root / f"{STAGING}{os.urandom(6).hex()}.old"
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return False
    remove(aside)
    return True


def _named(root: Path, prefix: str) -> list[Path]:
    """What lies in the cache folder under such names."""
    return [root / name for name in os.listdir(root) if name.startswith(prefix)]


def _sweep(*left_overs: Iterable[Path], older_than: float = STALE_SECONDS) -> int:
    """Remove those that are old enough to belong to a process that died; returns how many."""
    removed = 0
    for path in chain(*left_overs):
        with suppress(OSError):  # its own process, or another sweep, was faster
            if _age(path) > older_than:
                remove(path)
                removed += 1
    return removed


def _age(path: Path) -> float:
    return time.time() - os.lstat(path).st_mtime


# --- by itself, after a publish -----------------------------------------------------------------------------------


_swept: dict[Path, float] = {}  # folders, and when this process looked for left-overs in them: it lists all entries


def _tidy(root: Path) -> None:
    """Sweep, and once a day prune. It reads no sources and holds no lock; what fails here can wait for another day."""
    try:
        if time.monotonic() - _swept.get(root, -SWEPT_SECONDS) >= SWEPT_SECONDS:
            _swept[root] = time.monotonic()
            _sweep(_named(root, STAGING))
        if _is_due(root / STAMP):
            (root / STAMP).touch(mode=0o600)  # first, so that processes that publish meanwhile do not prune too
            done = _prune(root, _survey(root), _is_long_unused, _size_limit())
            trace(CACHE, f"cache pruned {done.stale} stale entries and {done.over} beyond its size")
    except (OSError, WeftError) as error:
        trace(CACHE, f"cache was not pruned: {error}")


def _is_due(stamp: Path) -> bool:
    try:
        return abs(_age(stamp)) > DAY
    except FileNotFoundError:
        return True


def _is_long_unused(info: EntryInfo) -> bool:
    return bool(info.stale) and time.time() - info.used > UNUSED_SECONDS


def _size_limit() -> int:
    try:
        return cache_max_size()
    except WeftError as error:
        warn_once(f"{error}. The cache is kept below {DEFAULT_CACHE_SIZE // 10**6} MB")
        return DEFAULT_CACHE_SIZE


modules.tidy_after(_tidy)
