"""The tests keep their generated modules in the checkout, not in the cache of the user who runs them; and none leaves a
mode of torch on for those after it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("WEFT_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-cache"))


@pytest.fixture(autouse=True)
def nothing_watches_after_a_test() -> Iterator[None]:
    from weft.runtime.torch_private import unwatched

    yield
    assert unwatched(()), "the test left a mode, transform, tracer or profiler of torch on"
