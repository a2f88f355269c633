"""Files of all stores: what is believed, one way to write, one lock, and the folder that all of them lie in.

A file appears whole or not at all: it is written beside its place, and renamed into it. What is loaded as code is
believed only if it is ours: its owner, its mode and its kind are looked at on the file that is read.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...ir.caller import warn
from ...ir.errors import WeftError
from ..settings import current

if TYPE_CHECKING:
    from filelock import BaseFileLock

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@functools.cache
def version_of(*distributions: str) -> str:
    """Version of the first installed one, without importing it; "none" where none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def triton_version() -> str:
    """Also that of a build that has a name of its own."""
    return version_of("triton", "pytorch-triton", "pytorch-triton-rocm")


# -- reading -----------------------------------------------------------------------------------------------------------
class Unsound(Exception):
    """What must not be loaded; the text says why."""


def read_ours(path: Path) -> tuple[bytes, float]:
    """Content and time of change."""
    # O_NONBLOCK so that a pipe put here cannot hang the open
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        require_ours(info, stat.S_ISREG)
        return file.read(), info.st_mtime


def require_ours(info: os.stat_result, right_kind: Callable[[int], bool]) -> None:
    if not right_kind(info.st_mode):
        raise Unsound("not a plain file in a plain folder")
    if info.st_uid != os.geteuid() or info.st_mode & _WRITABLE_BY_OTHERS:
        raise Unsound("others own it or may write to it")


# -- writing -----------------------------------------------------------------------------------------------------------
def write_new(path: Path, content: bytes) -> None:
    """A file that nobody else has made. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)


def write(path: Path, content: bytes) -> None:
    """Put this in the place of what is there, in one step. Raises OSError."""
    staging = path.parent / f".{path.name}.{os.urandom(6).hex()}.tmp"
    try:
        write_new(staging, content)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def lock_of(path: Path, timeout: float = -1.0) -> BaseFileLock:
    """What one process at a time holds. timeout: seconds to wait for another one; negative: for ever."""
    from filelock import FileLock  # lazy: imports asyncio, not wanted in a process that only looks up

    return FileLock(path, timeout=timeout, mode=0o600)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- where they lie ----------------------------------------------------------------------------------------------------

RUNS_UNCACHED = "Kernels run, but are generated again in every process; set WEFT_CACHE_DIR to a folder that you own"
_warned: set[str] = set()


def cache_dir() -> Path:
    """The cache folder, made (mode 0700) if missing.

    Raises WeftError if it cannot be made, or if somebody else owns it or may write to it: loading an entry runs code.
    """
    path = _expanded(current().cache_dir or _user_cache_dir())
    info = _made(path)
    if not stat.S_ISDIR(info.st_mode):
        raise WeftError(f"cache folder {path}: expected a folder, got a file")
    if info.st_uid != os.geteuid():
        raise WeftError(f"cache folder {path}: expected a folder of user {os.geteuid()}, got one of user {info.st_uid}")
    if info.st_mode & _WRITABLE_BY_OTHERS:
        raise WeftError(
            f"cache folder {path}: expected one that only its owner may write to, got mode {info.st_mode & 0o777:o}; "
            "look at what is in it, then run `chmod 700` on it"
        )
    return path


def _user_cache_dir() -> Path:
    own = os.environ.get("XDG_CACHE_HOME")
    if own and os.path.isabs(own):
        return Path(own) / "weft"
    home = _default_cache_home()
    if own:  # an empty one counts as not set, by its specification
        warn_once(
            f"XDG_CACHE_HOME: expected an absolute path, got {own!r}; generated kernels are kept in {home} instead. "
            "Give it an absolute path, or set WEFT_CACHE_DIR"
        )
    return home


def _default_cache_home() -> Path:
    try:
        from platformdirs import user_cache_path
    except ImportError:  # optional; this is what it answers on Linux
        return Path("~/.cache/weft")
    try:
        return user_cache_path("weft")
    except RuntimeError:  # no home: `_expanded` says so
        return Path("~/.cache/weft")


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        user = path.parts[0][1:] or f"{os.geteuid()} (HOME is not set)"
        raise WeftError(f"cache folder {path}: no home folder is known of user {user}") from error
    except OSError as error:
        raise WeftError(f"cache folder {path}: the working folder is gone ({error.strerror})") from error


def _made(path: Path) -> os.stat_result:
    try:
        with suppress(FileNotFoundError):
            return path.stat()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path.stat()
    except OSError as error:
        raise WeftError(f"cache folder {path}: cannot be made ({error.strerror})") from error
    except ValueError as error:  # a NUL in the name
        raise WeftError(f"cache folder {str(path)!r}: cannot be made ({error})") from error


def usable_root() -> Path | None:
    try:
        return cache_dir()
    except WeftError as error:
        warn_once(f"{error}. {RUNS_UNCACHED}")
        return None


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn(text)


def folder_of(name: str, what: str) -> Path:
    """A folder of one store, made if it is missing. what: it holds, for errors. Raises WeftError."""
    folder = cache_dir() / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise WeftError(f"folder of {what} {folder}: cannot be written ({error.strerror})") from error
    return folder
