"""What the tests of the cache share: a key, builders, processes and the warnings that they wait for."""

import multiprocessing
import os
import signal
import warnings
from contextlib import contextmanager

import pytest

from weft.runtime.store.modules import Key

KEY = Key(
    "gemma_local", "flash_forward", "triton", "d128-bf16", "score=score mask=True", "flash 128x64", "g", "3.6", "2.11"
)
TEXT = "answer = 42\n"
forking = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def build() -> str:
    return TEXT


def never() -> str:
    raise AssertionError("built again although the entry is sound")


@contextmanager
def said_once():
    """The one warning that the block gives, in a list that is filled when it ends."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]
    assert [warning.category for warning in caught] == [RuntimeWarning], said


def start(function, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
