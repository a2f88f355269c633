"""How a process ends: whoever computes for a call is done before Python goes.

Until Python 3.14 a thread that asks for Python's lock while the interpreter ends is cancelled. Where it has C++ frames,
as all of torch, that aborts the process ("terminate called without an active exception", exit code 134). Who could:

- Threads of ours are no daemons (codegen/products.py, launching.py, starting.py), so that Python waits for them.
- Threads of autograd, one a GPU, run Python for our gradients, and torch never ends them. A backward returns when its
  results are there. What its thread still holds goes a moment later, and asks for the lock if it is a Python object.
- Threads of gloo, with which ranks on CPUs send. A collective returns when its results are there. Its thread lets go
  of the tensors a moment later, and asks for the lock, as for autograd.
- Daemon threads of users that compute: torch itself cannot be used in one while the process ends.
"""

from __future__ import annotations

import atexit
import time

import torch

SECONDS = 0.05  # what is waited for takes microseconds where a core is free
_has_sent = False  # to other ranks


def sends() -> None:
    """From now on there may be threads of gloo."""
    global _has_sent
    _has_sent = True


def let_threads_finish() -> None:
    """Give up Python's lock for a moment, where there may be threads of autograd or gloo that want it."""
    if _has_sent or torch.cuda.is_initialized():
        time.sleep(SECONDS)


def in_order() -> None:
    """From now on the process ends in order. What others registered earlier, torch's own among it, runs later."""
    atexit.register(let_threads_finish)
