"""The cache of generated modules: source text, kept under a readable key and shared by any number of processes.

One entry is one folder, `<cache>/<key.folder>/`, with `source.py` and `meta.json`. An entry appears by a rename, so a
process killed at any point leaves either nothing or a staging folder that is swept later. An entry is believed only
if its files are ours and whole (owner, mode, checksum, the key in full), since loading it runs code; else it is built
again.
Nothing here may stop a calculation: where the cache cannot be used, one warning says why, and the source goes to a
temporary folder of this process.
What later code and versions never look for is stale. It is pruned by hand, or by itself after a publish, at most daily.
"""

import errno
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

from ..ir.caller import warn
from ..ir.errors import WeftError
from .settings import CACHE, DEFAULT_CACHE_SIZE, cache_max_size, current, edited_dir, trace

SOURCE, META = "source.py", "meta.json"
STAGING, LOCKS, STAMP, TEMPLATES = ".tmp-", ".locks", ".pruned", ".templates-"
STALE_SECONDS = 3600  # a staging folder this old belongs to a process that died
DAY = 86400  # between two automatic prunes, and how exact the time of an entry's last use is
UNUSED_SECONDS = 30 * DAY  # a stale entry this old goes by itself; a younger one may belong to another environment
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


@functools.cache
def _own_version() -> str:
    return _version("weft-attention")


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
    def edited_name(self) -> str:
        """File name of an edited module that takes the place of this one: the label and a digest of the variant."""
        return f"{self.label}-{hashlib.sha256(self.variant.encode()).hexdigest()[:8]}.py"

    @functools.cached_property
    def folder(self) -> str:
        """The edited module's name, made unique by a digest of the whole key."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.edited_name.removesuffix('.py')}-{digest[:12]}"


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
    root = usable_root()
    if root is None:
        return _temporary(key, build())
    found = _find(root, key)
    return found or _build(root, key, build)


def _edited(key: Key) -> Entry | None:
    """The module that the user wrote in place of this one: `<key.edited_name>` in the folder WEFT_EDITED_DIR names.

    Loaded as it is, with no checksum, and never without saying so. Raises WeftError if it is there and cannot be read.
    """
    folder = edited_dir()
    if folder is None:
        return None
    path = folder / key.edited_name
    try:
        path = path.absolute()
        if not path.exists():
            _warn_of_similar_names(path.parent, key)
            return None
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(f"{path}: expected an edited module to load, got {error}") from error
    _warn_once(f"{key.name} runs the edited module {path}")
    return Entry(path, source, built=False)


def _warn_of_similar_names(folder: Path, key: Key) -> None:
    """Say which files look meant for this key and are not loaded: those with its label and another variant, or none."""
    reasons = {folder / f"{key.label}.py": "does not say of which variant"}
    reasons |= {path: "is of another variant" for path in folder.glob(f"{key.label}-{'[0-9a-f]' * 8}.py")}
    for path in sorted(filter(Path.exists, reasons)):
        _warn_once(
            f"{path} is not loaded: its name {reasons[path]}, and {key.name} runs as generated. "
            f"If it is an edit of this variant, rename it to {key.edited_name}"
        )


def _find(root: Path, key: Key) -> Entry | None:
    folder = root / key.folder
    try:
        kept_key, source, used = _read_entry(folder)
        if kept_key != asdict(key):
            raise Unsound("belongs to another key")
    except FileNotFoundError:
        trace(CACHE, f"cache miss {key.folder}")
        return None
    except (OSError, ValueError, Unsound) as error:
        trace(CACHE, f"cache entry {key.folder} is built again: {error}")
        return None
    _touch(folder / META, used)
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
    _tidy(root)
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


class Unsound(Exception):
    """A cache entry that must not be loaded; the text says why."""


def _read_entry(folder: Path) -> tuple[dict[str, str], str, float]:
    """Key, source and time of last use of an entry that is ours and whole.

    Raises FileNotFoundError, OSError, ValueError or Unsound.
    """
    _require_ours(os.lstat(folder), stat.S_ISDIR)
    content, used = read_ours(folder / META)
    source, _ = read_ours(folder / SOURCE)
    meta = json.loads(content)
    if not isinstance(meta, dict) or meta.get("sha256") != hashlib.sha256(source).hexdigest():
        raise Unsound("source and checksum do not match: torn or edited")
    return meta.get("key", {}), source.decode(), used


def read_ours(path: Path) -> tuple[bytes, float]:
    """Content and time of change."""
    # O_NONBLOCK so that a pipe put here cannot hang the open
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        _require_ours(info, stat.S_ISREG)
        return file.read(), info.st_mtime


def _touch(meta: Path, used: float) -> None:
    """Note that the entry was used today. Its meta.json holds the time, because many disks do not keep access times."""
    if abs(time.time() - used) > DAY:  # abs: a clock that was wrong must not keep an entry for ever
        with suppress(OSError):  # a folder that may only be read, or an entry that another process removed
            os.utime(meta, follow_symlinks=False)


def _require_ours(info: os.stat_result, right_kind: Callable[[int], bool]) -> None:
    if not right_kind(info.st_mode):
        raise Unsound("not a plain file in a plain folder")
    if info.st_uid != os.geteuid() or info.st_mode & _WRITABLE_BY_OTHERS:
        raise Unsound("others own it or may write to it")


# --- writing ------------------------------------------------------------------------------------------------------


def _publish(root: Path, key: Key, source: str) -> None:
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=root))
    try:
        content = source.encode()
        meta = {"weft": _own_version(), "sha256": hashlib.sha256(content).hexdigest(), "key": asdict(key)}
        write(staging / SOURCE, content)
        write(staging / META, json.dumps(meta, indent=1).encode())
        _rename_over(staging, root / key.folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)


def _rename_over(staging: Path, final: Path) -> None:
    """Put staging at final. A folder with files cannot be renamed over, so an unsound one is moved away first."""
    try:
        os.rename(staging, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        aside = Path(f"{staging}.old")
        with suppress(FileNotFoundError):  # pruned since
            os.rename(final, aside)
        os.rename(staging, final)
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- where the cache is, and where it cannot be -------------------------------------------------------------------

_RUNS_UNCACHED = "Kernels run, but are generated again in every process; set WEFT_CACHE_DIR to a folder that you own"
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
        _warn_once(
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
        _warn_once(f"{error}. {_RUNS_UNCACHED}")
        return None


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warn(text)


@functools.cache
def _temporary_root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="weft-")


def _temporary(key: Key, source: str) -> Entry:
    """The source in a folder that ends with this process; on a full disk, in memory only, which the loader accepts."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{key.folder}-", dir=_temporary_root().name)) / SOURCE
        write(path, source.encode())
    except OSError:
        path = Path(f"<weft {key.folder}>")
    return Entry(path, source, built=True)


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
        _read_entry(folder)
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
    for package, then, now in (("triton", key.triton, _triton_version()), ("torch", key.torch, _torch_version())):
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
            _remove(path)
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
    _remove(aside)
    return True


def _named(root: Path, prefix: str) -> list[Path]:
    """What lies in the cache folder under such names. Asked after each publish: a glob takes ten times as long."""
    return [root / name for name in os.listdir(root) if name.startswith(prefix)]


def _sweep(*left_overs: Iterable[Path], older_than: float = STALE_SECONDS) -> int:
    """Remove those that are old enough to belong to a process that died; returns how many."""
    removed = 0
    for path in chain(*left_overs):
        with suppress(OSError):  # its own process, or another sweep, was faster
            if _age(path) > older_than:
                _remove(path)
                removed += 1
    return removed


def _age(path: Path) -> float:
    return time.time() - os.lstat(path).st_mtime


# --- by itself, after a publish -----------------------------------------------------------------------------------


def _tidy(root: Path) -> None:
    """Sweep, and once a day prune. It reads no sources and holds no lock; what fails here can wait for another day."""
    try:
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
        _warn_once(f"{error}. The cache is kept below {DEFAULT_CACHE_SIZE // 10**6} MB")
        return DEFAULT_CACHE_SIZE
