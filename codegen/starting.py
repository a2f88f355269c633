"""What Triton does once in a process before it compiles, begun while the first module is generated.

It hashes all of itself, which its caches go by (0.4 s of a slow core), and compiles what calls the driver (0.3 s where
nothing is cached): neither holds Python's lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

_threads: list[threading.Thread] = []


def begin() -> None:
    """Return at once; the first call in a process starts the work."""
    if not _threads:
        _threads.extend(threading.Thread(target=_try, args=(step,), daemon=True) for step in (_hash, _reach_driver))
        for thread in _threads:
            thread.start()


def wait() -> None:
    """Return when what was begun is done: a compilation would do it once more, beside it."""
    for thread in _threads:
        thread.join()


def _try(step: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # done again where it is needed, which says why it cannot be
        step()


def _hash() -> None:
    from triton.runtime.cache import triton_key  # lazy: `import weft` does without Triton

    triton_key()


def _reach_driver() -> None:
    from triton.runtime import driver  # lazy: likewise

    getattr(driver.active, "utils")  # noqa: B009  it is made when it is asked for
