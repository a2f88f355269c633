"""What Triton does once in a process before it compiles, begun while the first module is generated.

It hashes all of itself, which its caches go by (0.4 s of a slow core), and compiles what calls the driver (0.3 s where
nothing is cached): neither holds Python's lock.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable

_threads: list[threading.Thread] = []


def begin() -> None:
    """Return once Triton is imported; the first call in a process starts the rest of the work.

    Its modules import each other in circles: threads that import them at the same time may find them half made.
    """
    if not _threads:
        with contextlib.suppress(Exception):  # likewise
            importlib.import_module("triton.language")  # lazy: `import weft` does without Triton
        with contextlib.suppress(RuntimeError):  # the process ends, and Python starts no thread any more
            for step in (_hash, _reach_driver):
                # no daemon: Python waits for it at the end of the process, where one that computes would abort it
                thread = threading.Thread(target=_try, args=(step,))
                thread.start()
                _threads.append(thread)


def wait() -> None:
    """Return when what was begun is done: a compilation would do it once more, beside it."""
    for thread in _threads:
        thread.join()


def _try(step: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # done again where it is needed, which says why it cannot be
        step()


def _hash() -> None:
    from triton.runtime.cache import triton_key  # lazy, as above

    triton_key()


def _reach_driver() -> None:
    from triton.runtime import driver  # lazy, as above

    getattr(driver.active, "utils")  # noqa: B009  it is made when it is asked for
