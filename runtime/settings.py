"""The settings of Weft, read in this one place.

| setting | environment | `weft.settings(...)` | meaning |
| --- | --- | --- | --- |
| debug level | `WEFT_DEBUG` | `debug=` | prints: 0 nothing, 1 plan, 2 + cache, 3 + IR after each stage, 4 + source |
| cache folder | `WEFT_CACHE_DIR` | `cache_dir=` | where generated modules are kept; default: the user's cache folder |
| target | `WEFT_TARGET` | `target=` | target of calls that name none; default: from the operands' device |
| check of values | `WEFT_CHECK` | `check=` | looks at what index tensors hold in each call; waits for the device |
| kept tiles | `WEFT_KEEP_TILES` | `keep_tiles=` | what is measured of tiles serves later calls too (kept.py) |
| edited modules | `WEFT_EDITED_DIR` | | folder of modules to load in place of generated ones |
| figures of the machine | `WEFT_CALIBRATION` | | file of `weft calibrate`; default: the one in the cache folder |
| size of the cache | `WEFT_CACHE_MAX_SIZE` | | what the cache folder is kept below, once a day; default: 256MB |

A block (`with weft.settings(debug=2):`) goes before the environment, and an argument of a call before both. Blocks
follow `contextvars`: they hold for the thread or task that opened them, so settings are read where a call is made and
not inside a backward pass, which autograd may run in another thread.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, Never

from ..codegen.targets import targets
from ..codegen.torch_private import constant_while_tracing
from ..ir.errors import WeftError, shown

PLAN, CACHE, IR, SOURCE = 1, 2, 3, 4
DEFAULT_CACHE_SIZE = 256 * 10**6
_KEEP = "setting keep_tiles (WEFT_KEEP_TILES)"


@dataclass(frozen=True)
class Settings:
    """What is in force for one call."""

    debug: int = 0  # cumulative: see the table above
    cache_dir: Path | None = None  # None: the user's cache folder
    target: str | None = None  # None: from the device of the operands

    check: bool = False  # whether what tensors hold is looked at in each call, see values.py
    keep_tiles: bool = False  # whether what is measured of tiles is kept for later calls, see kept.py

    def __post_init__(self) -> None:
        if type(self.debug) is not int or self.debug not in range(SOURCE + 1):
            raise _wrong_level(self.debug)
        if self.target is not None:
            _known_target(self.target, "setting target (WEFT_TARGET)")
        if not isinstance(self.check, bool):
            raise WeftError(f"setting check (WEFT_CHECK): expected True or False, got {shown(self.check)}")
        if not isinstance(self.keep_tiles, bool):
            raise WeftError(
                f"setting keep_tiles (WEFT_KEEP_TILES): expected True or False, got {shown(self.keep_tiles)}"
            )


# What os.environ looks names up in, which takes it an exception where there is none: longer than all checks of a call
_ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_TARGET = os.environ.encodekey("WEFT_TARGET") if hasattr(os.environ, "_data") else "WEFT_TARGET"

_block: ContextVar[Settings | None] = ContextVar("weft_settings", default=None)


def current() -> Settings:
    """The settings in force here: those of the innermost block, else those of the environment."""
    block = _block.get()
    if block is not None:
        return block
    get = os.environ.get
    return _from_text(
        get("WEFT_DEBUG", ""), get("WEFT_CACHE_DIR", ""), get("WEFT_TARGET", ""), get("WEFT_CHECK", ""),
        get("WEFT_KEEP_TILES", ""),
    )  # fmt: skip


def default_target() -> str | None:
    """`current().target`, without reading what a call does not need."""
    block = _block.get()
    if block is not None:
        return block.target
    if _ENVIRONMENT.get(_TARGET) is None:
        return None
    name = os.environ.get("WEFT_TARGET")
    return _known_target(name, "WEFT_TARGET") if name else None


@constant_while_tracing
def checks_values() -> bool:
    """`current().check`; the environment is read once, as reading it takes longer than the rest of a call's checks."""
    block = _block.get()
    return _check_in_environment() if block is None else block.check


@cache
def _check_in_environment() -> bool:
    return _flag(os.environ.get("WEFT_CHECK", ""), "setting check (WEFT_CHECK)")


def keeps_tiles() -> bool:
    """`current().keep_tiles`; the environment is read once."""
    block = _block.get()
    return _keep_in_environment() if block is None else block.keep_tiles


@cache
def _keep_in_environment() -> bool:
    return _flag(os.environ.get("WEFT_KEEP_TILES", ""), _KEEP)


@constant_while_tracing
def traced_target() -> str | None:
    """`default_target()` while torch.compile traces: what is in force there stays with the graph."""
    return default_target()


def calibration_file() -> Path | None:
    """The file of measured figures in place of the cache folder's; of the environment alone."""
    named = os.environ.get("WEFT_CALIBRATION")
    return Path(named) if named else None


def edited_dir() -> Path | None:
    """Where edited modules are; of the environment alone, since a process loads a module once."""
    folder = os.environ.get("WEFT_EDITED_DIR")
    if folder and not Path(folder).is_dir():
        raise WeftError(f"WEFT_EDITED_DIR: expected a folder of edited modules, got {shown(folder)}")
    return Path(folder) if folder else None


def cache_max_size() -> int:
    """Bytes that the cache folder is kept below; of the environment alone, since all processes share the folder."""
    text = os.environ.get("WEFT_CACHE_MAX_SIZE")
    return size_of(text, "WEFT_CACHE_MAX_SIZE") if text else DEFAULT_CACHE_SIZE


def size_of(text: str, setting: str) -> int:
    """Bytes that a text such as 200MB (10^6), 1.5GiB (2^30) or 4096 stands for; in the words of `setting` where none.

    >>> size_of("200MB", ""), size_of("2 kib", "")
    (200000000, 2048)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        raise WeftError(f"{setting}: expected a size such as 200MB or 1GiB, got {shown(text)}")
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def settings(
    *, debug: int | None = None, cache_dir: str | os.PathLike[str] | None = None, target: str | None = None,
    check: bool | None = None, keep_tiles: bool | None = None, **unknown: Never,
) -> AbstractContextManager[Settings]:  # fmt: skip
    """Change settings inside a block; what is not given stays as it is outside. Raises WeftError for wrong values.

    >>> with settings(debug=1), settings(target="cpu") as now:
    ...     now.debug, now.target
    (1, 'cpu')
    """
    if unknown:
        names = ", ".join(Settings.__dataclass_fields__)
        raise WeftError(f"settings: {', '.join(unknown)}: unknown setting, expected some of {names}")
    if not isinstance(cache_dir, (str, os.PathLike, NoneType)) or cache_dir == "":
        raise WeftError(f"setting cache_dir (WEFT_CACHE_DIR): expected a folder, got {shown(cache_dir)}")
    given = {
        "debug": debug,
        "cache_dir": None if cache_dir is None else Path(cache_dir),
        "target": target,
        "check": check,
        "keep_tiles": keep_tiles,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    Settings(**changes)  # type: ignore[arg-type]  # refuses wrong values here, where the block is written
    return _inside(changes)


@contextmanager
def _inside(changes: Mapping[str, Any]) -> Iterator[Settings]:
    inner = replace(current(), **changes)
    token = _block.set(inner)
    try:
        yield inner
    finally:
        _block.reset(token)


def trace(level: int, text: str) -> None:
    """Print text to stderr if the debug level in force is at least `level`."""
    if current().debug >= level:
        print(f"weft: {text}", file=sys.stderr)


def _wrong_level(got: int | str) -> WeftError:
    return WeftError(f"setting debug (WEFT_DEBUG): expected a whole number from 0 to {SOURCE}, got {shown(got)}")


@lru_cache(maxsize=16)
def _from_text(debug: str, cache_dir: str, target: str, check: str, keep: str) -> Settings:
    if debug and not debug.isdecimal():
        raise _wrong_level(debug)
    folder = Path(cache_dir) if cache_dir else None
    flags = _flag(check, "setting check (WEFT_CHECK)"), _flag(keep, _KEEP)
    return Settings(int(debug or 0), folder, target or None, *flags)


@lru_cache(maxsize=16)
def _flag(text: str, setting: str) -> bool:
    if text not in ("", "0", "1"):
        raise WeftError(f"{setting}: expected 0 or 1, got {shown(text)}")
    return text == "1"


@lru_cache(maxsize=16)
def _checked_target(name: str, setting: str) -> str:
    names = [target.name for target in targets()]
    if name not in names:
        raise WeftError(f"{setting}: expected one of {', '.join(names)}, got {shown(name)}")
    return name


def _known_target(name: object, setting: str) -> str:
    if not isinstance(name, str):
        raise WeftError(f"{setting}: expected the name of a target, got {shown(name)}")
    return _checked_target(name, setting)
