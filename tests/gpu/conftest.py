"""Many workers share the machine: what they compute on its CPU takes one core each."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    import torch  # not in the process that starts workers, which wait for it

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes for each test of torch.compile


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A block in which waiting for the device raises. Torch's mode is off again after it, however it ends."""
    import torch

    @contextmanager
    def block() -> Iterator[None]:
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings():  # torch warns that its mode does not see every wait
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return block


@pytest.fixture
def most_memory() -> Callable[[Callable[[], object]], int]:
    """Bytes that a call takes at most, beyond those that were taken before it.

    Garbage goes first: what is freed while the call runs would count as if it took less.
    """
    import torch

    def of(call: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    return of


Results = TypeVar("Results")


@pytest.fixture
def captured(
    no_waiting: Callable[[], AbstractContextManager[None]],
) -> Callable[[Callable[[], Results]], tuple[torch.cuda.CUDAGraph, Results]]:
    """The graph of a call, and what it returns there, after calls of which the first alone may wait for the device."""
    import torch

    def capture(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            with no_waiting():
                step()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph, found

    return capture
