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
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...ir.errors import WeftError
from ..settings import CACHE, edited_dir, trace
from .files import (
    RUNS_UNCACHED,
    Unsound,
    lock_of,
    read_ours,
    remove,
    require_ours,
    triton_version,
    usable_root,
    version_of,
    warn_once,
    write_new,
)

SOURCE, META = "source.py", "meta.json"
STAGING, LOCKS, TEMPLATES = ".tmp-", ".locks", ".templates-"
DAY = 86400  # between two automatic prunes, and how exact the time of an entry's last use is
LOCK_SECONDS = 60  # a build takes a second or two; past this, build without waiting for the other process


# --- keys ---------------------------------------------------------------------------------------------------------


@functools.cache
def generator_digest() -> str:
    """Digest of all code and templates that take part in generating a module."""
    root = Path(__file__).parents[2]
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
    triton: str = field(default_factory=triton_version)
    torch: str = field(default_factory=lambda: version_of("torch"))

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
    warn_once(f"{key.name} runs the edited module {path}")
    return Entry(path, source, built=False)


def _warn_of_similar_names(folder: Path, key: Key) -> None:
    """Say which files look meant for this key and are not loaded: those with its label and another variant, or none."""
    reasons = {folder / f"{key.label}.py": "does not say of which variant"}
    reasons |= {path: "is of another variant" for path in folder.glob(f"{key.label}-{'[0-9a-f]' * 8}.py")}
    for path in sorted(filter(Path.exists, reasons)):
        warn_once(
            f"{path} is not loaded: its name {reasons[path]}, and {key.name} runs as generated. "
            f"If it is an edit of this variant, rename it to {key.edited_name}"
        )


def _find(root: Path, key: Key) -> Entry | None:
    folder = root / key.folder
    try:
        kept_key, source, used = read_entry(folder)
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
            warn_once(f"cache folder {root}: cannot be written ({error.strerror or error}). {RUNS_UNCACHED}")
            return _temporary(key, source)
    trace(CACHE, f"cache wrote {key.folder}")
    for tidy in _after_publish:
        tidy(root)
    return Entry(root / key.folder / SOURCE, source, built=True)


@contextmanager
def _one_process_at_a_time(root: Path, key: Key) -> Iterator[None]:
    """Saves work and is not needed for soundness: entries are renamed into place, so without the lock both build."""
    from filelock import Timeout  # lazy: as in `lock_of`

    lock = lock_of(root / LOCKS / f"{key.folder}.lock", LOCK_SECONDS)
    try:
        (root / LOCKS).mkdir(mode=0o700, exist_ok=True)
        lock.acquire(poll_interval=0.02)
    except (Timeout, OSError, NotImplementedError) as error:
        trace(CACHE, f"cache builds {key.folder} without a lock: {error}")
    try:
        yield
    finally:
        lock.release()


def read_entry(folder: Path) -> tuple[dict[str, str], str, float]:
    """Key, source and time of last use of an entry that is ours and whole.

    Raises FileNotFoundError, OSError, ValueError or Unsound.
    """
    require_ours(os.lstat(folder), stat.S_ISDIR)
    content, used = read_ours(folder / META)
    source, _ = read_ours(folder / SOURCE)
    meta = json.loads(content)
    if not isinstance(meta, dict) or meta.get("sha256") != hashlib.sha256(source).hexdigest():
        raise Unsound("source and checksum do not match: torn or edited")
    return meta.get("key", {}), source.decode(), used


def _touch(meta: Path, used: float) -> None:
    """Note that the entry was used today. Its meta.json holds the time, because many disks do not keep access times."""
    if abs(time.time() - used) > DAY:  # abs: a clock that was wrong must not keep an entry for ever
        with suppress(OSError):  # a folder that may only be read, or an entry that another process removed
            os.utime(meta, follow_symlinks=False)


# --- writing ------------------------------------------------------------------------------------------------------


def _publish(root: Path, key: Key, source: str) -> None:
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=root))
    try:
        content = source.encode()
        meta = {"weft": version_of("weft-attention"), "sha256": hashlib.sha256(content).hexdigest(), "key": asdict(key)}
        write_new(staging / SOURCE, content)
        write_new(staging / META, json.dumps(meta, indent=1).encode())
        _rename_over(staging, root / key.folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


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
        remove(aside)


@functools.cache
def _temporary_root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="weft-")


def _temporary(key: Key, source: str) -> Entry:
    """The source in a folder that ends with this process; on a full disk, in memory only, which the loader accepts."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{key.folder}-", dir=_temporary_root().name)) / SOURCE
        write_new(path, source.encode())
    except OSError:
        path = Path(f"<weft {key.folder}>")
    return Entry(path, source, built=True)


_after_publish: list[Callable[[Path], None]] = []


def tidy_after(tidy: Callable[[Path], None]) -> None:
    """Call this with the cache folder after each publish."""
    _after_publish.append(tidy)
