"""Many workers share the machine: what they compute on its CPU takes one core each."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A block in which waiting for the device raises. Torch's mode is off again after it, however it ends."""

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


Results = TypeVar("Results")


@pytest.fixture
def captured(
    no_waiting: Callable[[], AbstractContextManager[None]],
) -> Callable[[Callable[[], Results]], tuple[torch.cuda.CUDAGraph, Results]]:
    """The graph of a call, and what it returns there, after calls of which the first alone may wait for the device."""

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
