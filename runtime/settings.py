"""The settings of Weft, read in this one place.

| setting | environment | `weft.settings(...)` | meaning |
| --- | --- | --- | --- |
| debug level | `WEFT_DEBUG` | `debug=` | prints: 0 nothing, 1 plan, 2 + cache, 3 + IR after each stage, 4 + source |
| cache folder | `WEFT_CACHE_DIR` | `cache_dir=` | where generated modules are kept; default: the user's cache folder |
| target | `WEFT_TARGET` | `target=` | target of calls that name none; default: from the operands' device |
| edited modules | `WEFT_EDITED_DIR` | | folder of modules to load in place of generated ones |
| size of the cache | `WEFT_CACHE_MAX_SIZE` | | what the cache folder is kept below, once a day; default: 256MB |

A block (`with weft.settings(debug=2):`) goes before the environment, and an argument of a call before both. Blocks
follow `contextvars`: they hold for the thread or task that opened them, so settings are read where a call is made and
not inside a backward pass, which autograd may run in another thread.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..ir.errors import WeftError
from .torch_private import constant_while_tracing

PLAN, CACHE, IR, SOURCE = 1, 2, 3, 4
DEFAULT_CACHE_SIZE = 256 * 10**6


@dataclass(frozen=True)
class Settings:
    """What is in force for one call."""

    debug: int = 0  # cumulative: see the table above
    cache_dir: Path | None = None  # None: the user's cache folder
    target: str | None = None  # None: from the device of the operands

    def __post_init__(self) -> None:
        if self.debug not in range(SOURCE + 1):
            raise _wrong_level(self.debug)


_block: ContextVar[Settings | None] = ContextVar("weft_settings", default=None)


def current() -> Settings:
    """The settings in force here: those of the innermost block, else those of the environment."""
    block = _block.get()
    if block is not None:
        return block
    get = os.environ.get
    return _from_text(get("WEFT_DEBUG", ""), get("WEFT_CACHE_DIR", ""), get("WEFT_TARGET", ""))


def default_target() -> str | None:
    """`current().target`, without reading what a call does not need."""
    block = _block.get()
    return (os.environ.get("WEFT_TARGET") or None) if block is None else block.target


@constant_while_tracing
def traced_target() -> str | None:
    """`default_target()` while torch.compile traces: what is in force there stays with the graph."""
    return default_target()


def edited_dir() -> Path | None:
    """Where edited modules are; of the environment alone, since a process loads a module once."""
    folder = os.environ.get("WEFT_EDITED_DIR")
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
        raise WeftError(f"{setting}: expected a size such as 200MB or 1GiB, got {text!r}")
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


@contextmanager
def settings(
    *, debug: int | None = None, cache_dir: str | os.PathLike[str] | None = None, target: str | None = None
) -> Iterator[Settings]:
    """Change settings inside a block; what is not given stays as it is outside.

    >>> with settings(debug=1), settings(target="cpu") as now:
    ...     now.debug, now.target
    (1, 'cpu')
    """
    now = current()
    inner = replace(
        now,
        debug=now.debug if debug is None else debug,
        cache_dir=now.cache_dir if cache_dir is None else Path(cache_dir),
        target=now.target if target is None else target,
    )
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
    return WeftError(f"setting debug (WEFT_DEBUG): expected a whole number from 0 to {SOURCE}, got {got!r}")


@lru_cache(maxsize=16)
def _from_text(debug: str, cache_dir: str, target: str) -> Settings:
    if debug and not debug.isdecimal():
        raise _wrong_level(debug)
    return Settings(int(debug or 0), Path(cache_dir) if cache_dir else None, target or None)
