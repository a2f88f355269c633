"""Many workers share the machine: what they compute on its CPU takes one core each."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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
