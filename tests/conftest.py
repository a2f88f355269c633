"""The tests keep their generated modules in the checkout, not in the cache of the user who runs them; and none leaves a
mode of torch on for those after it."""

import contextlib
import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recorded import Recorded

os.environ.setdefault("WEFT_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-cache"))


def pytest_configure() -> None:
    """Nothing that is imported is garbage."""
    gc.disable()
    inspect.getblock = block_of_text(inspect.getblock)


def block_of_text(tokenized: Callable[[list[str]], list[str]]) -> Callable[[list[str]], list[str]]:
    """inspect.getblock, which reads each text of a function once.

    Triton asks it for every function of every module that is loaded, and most of these are the same in all modules.
    """
    known: dict[str, int] = {}

    def found(lines: list[str]) -> list[str]:
        text = "".join(lines[: end_of_function(lines)])
        if text not in known:
            block = tokenized(lines)
            if len("".join(block)) > len(text):  # what looks like its end is in a text of many lines
                return block
            known[text] = len(block)
        return lines[: known[text]]

    return found


def end_of_function(lines: list[str]) -> int:
    """Where the first line begins that is no part of the function at the top."""
    begun = False
    for at, line in enumerate(lines):
        if begun and line[:1] not in " )#\n":
            return at
        begun = begun or line.startswith("def ")
    return len(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what tests count to tests/machine_code/recorded")


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """Holds counts to those of tests/machine_code/recorded."""
    package = "triton" if request.node.get_closest_marker("compiles") else "torch"
    return Recorded(request.path.stem, request.node.name, package, request.config.getoption("record"))


SOURCE = "source.py"  # the file of a generated module

# Folders whose cases take seconds: `make test` runs a part of their cases, `make test-all` every one.
COMPUTES = {"attention", "calls", "models"}


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before -m looks at markers, and when it has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark as thorough what `make test` leaves out, and begin with what is slow."""
    mark_as_thorough(items)
    yield
    begin_with_slow(items)


def mark_as_thorough(items: list[pytest.Item]) -> None:
    """Of tests that compute, cases whose parameters all have values that other cases have; of tests that compile, all
    cases but one; and those between every n-th of `sampled(n)`."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        for item in left_out(cases):
            item.add_marker("thorough")


def begin_with_slow(items: list[pytest.Item]) -> None:
    """The share of every worker begins with its part of the tests that are marked slow, in which all parts take about
    as long, and the longest comes first: at the end no worker waits for one of them.

    Shares of --dist worksteal lie one after the other. All other tests stay in order: neighbours launch the same
    kernels, which a worker makes once.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    if workers == 1 or len(slow) > len(others):
        return
    number, parts = len(items), divided(slow, workers)
    items.clear()
    for worker, first in enumerate(parts):
        share = (number - len(items)) // (workers - worker)
        items += first + others[: share - len(first)]
        del others[: share - len(first)]


def divided(slow: list[pytest.Item], workers: int) -> list[list[pytest.Item]]:
    """Each test, the longest first, to whoever has least to do so far."""
    loads, parts = [0.0] * workers, [[] for _ in range(workers)]  # type: tuple[list[float], list[list[pytest.Item]]]
    for item in sorted(slow, key=seconds_of, reverse=True):
        worker = loads.index(min(loads))
        loads[worker] += seconds_of(item)
        parts[worker].append(item)
    return parts


def seconds_of(item: pytest.Item) -> float:
    """What the mark `slow` says that a test takes."""
    marker = item.get_closest_marker("slow")
    return float(marker.args[0]) if marker is not None and marker.args else 10.0


def pytest_collection_finish() -> None:
    """Python looks for circles of garbage seldom, and not among what is imported: it took a twelfth of the time.

    Of what torch compiles it does not time the guards: that was a tenth of each compilation.

    Hypothesis draws constants of all modules of a project that are imported. It reads each one for them: not the
    thousands that are generated here, which took a tenth.
    """
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "is_local_module_file"):
        is_local = providers.is_local_module_file
        providers.is_local_module_file = lambda path: Path(path).name != SOURCE and is_local(path)
    dynamo = sys.modules.get("torch._dynamo.guards")
    if hasattr(dynamo, "profile_guard_manager"):  # times guards, for which it empties the caches of the processor
        dynamo.profile_guard_manager = lambda *_: 0.0
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)


def left_out(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of one test."""
    sampled = cases[0].get_closest_marker("sampled")
    if cases[0].get_closest_marker("every"):
        return []
    if cases[0].get_closest_marker("compiles"):
        return cases[1:]
    if cases[0].path.parent.name in COMPUTES and len(values_of(cases[0])) > 1:
        values, seen, kept = {id(c): values_of(c) for c in cases}, set[object](), set[int]()
        while (best := max(cases, key=lambda c: len(values[id(c)] - seen))) and values[id(best)] - seen:
            seen |= values[id(best)]
            kept.add(id(best))
        return [c for c in cases if id(c) not in kept]
    return [c for at, c in enumerate(cases) if sampled is not None and at % sampled.args[0]]


def values_of(case: pytest.Item) -> set[object]:
    """The values of a case's parameters; those that one `parametrize` names together are one."""
    given = getattr(case, "callspec", None)
    names = [m.args[0] for m in case.iter_markers("parametrize")]
    rows = [re.split(r"\s*,\s*", n) if isinstance(n, str) else [*n] for n in names]
    return {(row[0], *(id(given.params[n]) for n in row)) for row in rows} if given else set()


@pytest.fixture(autouse=True)
def only_what_is_marked_compiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds: it belongs to tests that are about machine code."""
    if not any(map(request.node.get_closest_marker, ("compiles", "gpu"))):
        with contextlib.suppress(ImportError):  # no Triton: nothing compiles
            monkeypatch.setattr("triton.compile", refused)


def refused(*_: object) -> None:
    pytest.fail("this test compiles a kernel: it is no test of machine code, nor marked `compiles`")


@pytest.fixture(autouse=True, scope="session")
def tiles_compute_short_calls_too() -> None:
    """Where tiles are the faster ones of a processor, tests want them to compute calls as short as theirs.

    test_cpu_ways.py has the other ways.
    """
    from weft.codegen import at_once, products

    at_once.MOST_OF_A_HEAD = at_once.MOST_RECORDED = 0
    products.SHORT_HEAD = products.SHORT_HEAD_BACKWARD = products.MOST_OF_A_HEAD = 0


@pytest.fixture(autouse=True)
def nothing_watches_after_a_test() -> Iterator[None]:
    from weft.codegen.torch_private import unwatched

    yield
    assert unwatched(), "the test left a mode, transform, tracer or profiler of torch on"
