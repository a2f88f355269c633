"""The tests keep their generated modules in the checkout, not in the cache of the user who runs them; and none leaves a
mode of torch on for those after it."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("WEFT_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-cache"))


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `sampled(n)` leaves to `make test-all`."""
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("thorough") is None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % sampled.args[0]:
                item.add_marker("thorough")
            seen[name] += 1


@pytest.fixture(autouse=True, scope="session")
def tiles_compute_short_calls_too() -> None:
    """Where tiles are the faster ones of a processor, tests want them to compute calls as short as theirs.

    test_cpu_ways.py has the other ways.
    """
    from weft.codegen import at_once, products

    at_once.MOST_OF_A_HEAD = 0
    products.SHORT_HEAD = products.SHORT_HEAD_BACKWARD = products.MOST_OF_A_HEAD = 0


@pytest.fixture(autouse=True)
def nothing_watches_after_a_test() -> Iterator[None]:
    from weft.codegen.torch_private import unwatched

    yield
    assert unwatched(), "the test left a mode, transform, tracer or profiler of torch on"
