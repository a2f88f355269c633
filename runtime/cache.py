"""The cache of generated modules: source text, kept under a readable key and shared by any number of processes.

One entry is one folder, `<cache>/<key.folder>/`, with `source.py` and `meta.json`. An entry appears by a rename, so a
process killed at any point leaves either nothing or a staging folder that is swept later. An entry is believed only
if its files are ours and whole (owner, mode, checksum, the key in full), since loading it runs code; else it is built
again.
Nothing here may stop a calculation: where the cache cannot be used, one warning says why, and the source goes to a
temporary folder of this process.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..ir.errors import WeftError
from .settings import CACHE, current, edited_dir, trace

SOURCE, META = "source.py", "meta.json"
STAGING, LOCKS = ".tmp-", ".locks"
STALE_SECONDS = 3600  # a staging folder this old belongs to a process that died
LOCK_SECONDS = 60  # a build takes a second or two; past this, build without waiting for the other process
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ENTRY_NAME = re.compile(r".+-[0-9a-f]{12}")


# --- keys ---------------------------------------------------------------------------------------------------------


def _version(*distributions: str) -> str:
    """Version of the first installed one, without importing it."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


@functools.cache
def generator_digest() -> str:
    """Digest of all code and templates that take part in generating a module."""
    root = Path(__file__).parents[1]
    files = [
        path
        for folder in ("ir", "compiler", "codegen", "templates")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".jinja")
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def _triton_version() -> str:
    return _version("triton", "pytorch-triton", "pytorch-triton-rocm")


@functools.cache
def _torch_version() -> str:
    return _version("torch")


@dataclass(frozen=True)
class Key:
    """Everything that a generated module depends on. Equal keys mean equal source."""

    name: str  # of the variant, for people: "gemma_local"
    kernel: str  # "flash_forward"
    target: str  # "triton"
    layout: str  # dtype and layout class, what kernels specialise on: "d128-bf16"
    variant: str  # canonical text of the variant
    schedule: str  # text of the schedule
    generator: str = field(default_factory=generator_digest)
    triton: str = field(default_factory=_triton_version)
    torch: str = field(default_factory=_torch_version)

    @functools.cached_property
    def label(self) -> str:
        """`gemma_local-flash_forward-triton-d128-bf16`: for people; different keys may share it."""
        label = "-".join((self.name, self.kernel, self.target, self.layout))
        return re.sub(r"[^A-Za-z0-9_.-]", "_", label)[:120].lstrip(".")

    @functools.cached_property
    def folder(self) -> str:
        """The label, made unique by a digest of the key."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.label}-{digest[:12]}"


# --- reading and building -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Source of a generated module. `source` was checked; the file at `path` may change later."""

    path: Path
    source: str
    built: bool  # False: found in the cache, or read from a file named by the user


def load_or_build(key: Key, build: Callable[[], str]) -> Entry:
    """The module of this key: the user's edit of it; else from the cache if it is there and sound; else from `build()`,
    which is then kept.

    Processes that want the same key at once wait for the one that builds it. Whatever `build` raises is passed on.
    """
    own = _edited(key)
    if own is not None:
        return own
    root = _usable_root()
    if root is None:
        return _temporary(key, build())
    found = _find(root, key)
    return found or _build(root, key, build)


def _edited(key: Key) -> Entry | None:
    """The module that the user wrote in place of this one: `<label>.py` in the folder WEFT_EDITED_DIR names.

    Loaded as it is, with no checksum, and never without saying so. Raises WeftError if it is there and cannot be read.
    """
    folder = edited_dir()
    path = None if folder is None else folder.absolute() / f"{key.label}.py"
    if path is None or not path.exists():
        return None
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(f"{path}: expected an edited module to load, got {error}") from error
    _warn_once(f"{key.name} runs the edited module {path}")
    return Entry(path, source, built=False)


def _find(root: Path, key: Key) -> Entry | None:
    folder = root / key.folder
    try:
        kept_key, source = _read_entry(folder)
        if kept_key != asdict(key):
            raise _Unsound("belongs to another key")
    except FileNotFoundError:
        trace(CACHE, f"cache miss {key.folder}")
        return None
    except (OSError, ValueError, _Unsound) as error:
        trace(CACHE, f"cache entry {key.folder} is built again: {error}")
        return None
    trace(CACHE, f"cache hit {key.folder}")
    return Entry(folder / SOURCE, source, built=False)


def _build(root: Path, key: Key, build: Callable[[], str]) -> Entry:
    with _one_process_at_a_time(root, key):
        found = _find(root, key)  # another process may have built it while this one waited
        if found:
            return found
        source = build()
        try:
            _publish(root, key, source)
        except OSError as error:
            _warn_once(f"cache folder {root}: cannot be written ({error.strerror or error}). {_RUNS_UNCACHED}")
            return _temporary(key, source)
    trace(CACHE, f"cache wrote {key.folder}")
    return Entry(root / key.folder / SOURCE, source, built=True)


@contextmanager
def _one_process_at_a_time(root: Path, key: Key) -> Iterator[None]:
    """Saves work and is not needed for soundness: entries are renamed into place, so without the lock both build."""
    from filelock import FileLock, Timeout  # imports asyncio: not wanted in a process that finds all its entries

    lock = FileLock(root / LOCKS / f"{key.folder}.lock", timeout=LOCK_SECONDS, mode=0o600)
    try:
        (root / LOCKS).mkdir(mode=0o700, exist_ok=True)
        lock.acquire(poll_interval=0.02)
    except (Timeout, OSError, NotImplementedError) as error:
        trace(CACHE, f"cache builds {key.folder} without a lock: {error}")
    try:
        yield
    finally:
        lock.release()


class _Unsound(Exception):
    """A cache entry that must not be loaded; the text says why."""


def _read_entry(folder: Path) -> tuple[dict[str, str], str]:
    """Key and source of an entry that is ours and whole. Raises FileNotFoundError, OSError, ValueError or _Unsound."""
    _require_ours(os.lstat(folder), stat.S_ISDIR)
    meta = json.loads(_read_ours(folder / META))
    source = _read_ours(folder / SOURCE)
    if not isinstance(meta, dict) or meta.get("sha256") != hashlib.sha256(source).hexdigest():
        raise _Unsound("source and checksum do not match: torn or edited")
    return meta.get("key", {}), source.decode()


def _read_ours(path: Path) -> bytes:
    # O_NONBLOCK so that a pipe put here cannot hang the open
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _require_ours(os.fstat(file.fileno()), stat.S_ISREG)
        return file.read()


def _require_ours(info: os.stat_result, right_kind: Callable[[int], bool]) -> None:
    if not right_kind(info.st_mode):
        raise _Unsound("not a plain file in a plain folder")
    if info.st_uid != os.geteuid() or info.st_mode & _WRITABLE_BY_OTHERS:
        raise _Unsound("others own it or may write to it")


# --- writing ------------------------------------------------------------------------------------------------------


def _publish(root: Path, key: Key, source: str) -> None:
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=root))
    try:
        content = source.encode()
        meta = {"weft": _version("weft"), "sha256": hashlib.sha256(content).hexdigest(), "key": asdict(key)}
        _write(staging / SOURCE, content)
        _write(staging / META, json.dumps(meta, indent=1).encode())
        _rename_over(staging, root / key.folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _sweep(root)


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)


def _rename_over(staging: Path, final: Path) -> None:
    """Put staging at final. A folder with files cannot be renamed over, so an unsound one is moved away first."""
    try:
        os.rename(staging, final)
    except OSError:
        if not os.path.lexists(final):
            raise
        aside = Path(f"{staging}.old")
        os.rename(final, aside)
        os.rename(staging, final)
        _remove(aside)


def _sweep(root: Path) -> None:
    """Remove what processes that died left behind."""
    for path in root.glob(f"{STAGING}*"):
        try:
            if time.time() - os.lstat(path).st_mtime > STALE_SECONDS:
                _remove(path)
        except OSError:
            continue  # its own process, or another sweep, was faster


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- where the cache is, and where it cannot be -------------------------------------------------------------------

_RUNS_UNCACHED = "Kernels run, but are generated again in every process; set WEFT_CACHE_DIR to a folder that you own"
_warned: set[str] = set()


def _user_cache_dir() -> Path:
    try:
        from platformdirs import user_cache_path
    except ImportError:  # optional; this is what it answers on Linux
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "weft"
    return user_cache_path("weft")


def cache_dir() -> Path:
    """The cache folder, made (mode 0700) if missing.

    Raises WeftError if it cannot be made, or if somebody else owns it or may write to it: loading an entry runs code.
    """
    path = (current().cache_dir or _user_cache_dir()).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise WeftError(f"cache folder {path}: cannot be made ({error.strerror})") from error
    if info.st_uid != os.geteuid():
        raise WeftError(f"cache folder {path}: expected a folder of user {os.geteuid()}, got one of user {info.st_uid}")
    if info.st_mode & _WRITABLE_BY_OTHERS:
        raise WeftError(
            f"cache folder {path}: expected one that only its owner may write to, got mode {info.st_mode & 0o777:o}; "
            "look at what is in it, then run `chmod 700` on it"
        )
    return path


def _usable_root() -> Path | None:
    try:
        return cache_dir()
    except WeftError as error:
        _warn_once(f"{error}. {_RUNS_UNCACHED}")
        return None


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


@functools.cache
def _temporary_root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="weft-")


def _temporary(key: Key, source: str) -> Entry:
    """The source in a folder that ends with this process; on a full disk, in memory only, which the loader accepts."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{key.folder}-", dir=_temporary_root().name)) / SOURCE
        _write(path, source.encode())
    except OSError:
        path = Path(f"<weft {key.folder}>")
    return Entry(path, source, built=True)


# --- for the command line -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryInfo:
    """One line of `weft cache list`."""

    folder: str  # readable name
    path: Path  # of the source
    size: int  # bytes of all its files
    created: float  # seconds since 1970
    problem: str  # why it would be built again; "" if it is sound


def entries() -> list[EntryInfo]:
    """All entries of the cache folder, sound or not, by name."""
    return [_info(folder) for folder in _entry_folders(cache_dir())]


def size() -> int:
    """Bytes taken by all entries."""
    return sum(info.size for info in entries())


def clear() -> int:
    """Remove all entries, locks and left-overs, and nothing else; returns how many entries there were."""
    root = cache_dir()
    folders = _entry_folders(root)
    for path in (*folders, *root.glob(f"{STAGING}*"), root / LOCKS):
        _remove(path)
    return len(folders)


def _entry_folders(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.iterdir()
        if _ENTRY_NAME.fullmatch(path.name) and any(os.path.lexists(path / name) for name in (SOURCE, META))
    )


def _info(folder: Path) -> EntryInfo:
    try:
        _read_entry(folder)
        problem = ""
    except (OSError, ValueError, _Unsound) as error:
        problem = str(error)
    files = [os.lstat(path) for path in folder.iterdir()] if not folder.is_symlink() else []
    created = os.lstat(folder).st_mtime
    return EntryInfo(folder.name, folder / SOURCE, sum(info.st_size for info in files), created, problem)
