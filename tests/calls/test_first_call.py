"""What the first call of a process compiles at the same time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests import fresh

pytest.importorskip("triton")
from weft.codegen.launch import launching, starting
from weft.codegen.launch.fast.direct import Prepared
from weft.codegen.launch.job import Mode
from weft.codegen.launch.launcher import KernelLauncher


def asked(name: str) -> launching.Asked:
    return name, None, (), {}  # type: ignore[return-value]


def test_kernels_are_compiled_at_the_same_time_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def compiled(kernel: str, *rest: Any) -> str:
        both.wait()
        return f"{kernel} is ready"

    monkeypatch.setattr(launching, "compiled", compiled)
    assert launching.compiled_together(-1, [asked("a"), asked("b")]) == ["a is ready", "b is ready"]


def test_what_two_threads_cannot_parse_at_once_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(kernel: str, *rest: Any) -> str:
        if kernel == "b" and threading.current_thread() is not threading.main_thread():
            raise SystemError("AST constructor recursion depth mismatch (before=63, after=60)")
        return f"{kernel} is ready"

    monkeypatch.setattr(launching, "compiled", compiled)
    assert launching.compiled_together(-1, [asked("a"), asked("b")]) == ["a is ready", "b is ready"]


def test_a_kernel_that_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(kernel: str, *rest: Any) -> str:
        if kernel == "b":
            raise weft.UnavailableError("b: out of resources")
        return kernel

    monkeypatch.setattr(launching, "compiled", compiled)
    with pytest.raises(weft.UnavailableError, match="b: out of resources"):
        launching.compiled_together(-1, [asked("a"), asked("b"), asked("c")])


def test_what_triton_does_once_is_begun_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, done = threading.Event(), []

    def hashes() -> None:
        assert goes_on.wait(60)
        done.append("hash")

    def fails() -> None:
        done.append("driver")
        raise RuntimeError("no GPU")

    monkeypatch.setattr(starting, "_threads", [])
    monkeypatch.setattr(starting, "_hash", hashes)
    monkeypatch.setattr(starting, "_reach_driver", fails)
    starting.begin()
    starting.begin()
    goes_on.set()
    monkeypatch.setattr(launching, "compiled", lambda kernel, *rest: [kernel, *sorted(done)])
    assert launching.compiled_together(-1, [asked("a")]) == [["a", "driver", "hash"]]


def test_threads_find_triton_imported() -> None:
    """Modules that import each other in circles are half made for a second thread that imports them meanwhile."""
    script = """
import sys
from weft.codegen.launch import starting

def seen():
    found.append([sys.modules[name].__spec__._initializing for name in ("triton", "triton.language", "triton.runtime")])

found, starting._hash, starting._reach_driver = [], seen, seen
assert "triton" not in sys.modules
starting.begin()
starting.wait()
assert found == [[False] * 3] * 2, found
"""
    fresh.run(script, check=True)


def test_nothing_of_triton_is_begun_by_a_call_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "begin", lambda: pytest.fail("begun"))
    query = torch.randn(1, 1, 4, 16)
    weft.Attention(name="on_a_cpu")(query, query, query)


class _Launcher(KernelLauncher):
    """Of which the direct way is the kernels that it is made of, and takes long to be made of the first one."""

    def __init__(self) -> None:
        self.began = threading.Event()
        device = SimpleNamespace(goes_directly=True, compiled=lambda asked: [one.binding for one in asked])
        self.job = SimpleNamespace(device=device)  # type: ignore[assignment]

    def _function(self, name: str) -> None:
        return None

    def _go_directly(self, mode: Mode, ready: Any) -> None:
        kernels = set(ready.runs)
        if not self.began.is_set():
            self.began.set()
            time.sleep(0.2)
        self.fast = kernels  # type: ignore[assignment]


def test_threads_that_want_different_kernels_leave_a_direct_way_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.codegen.launch.launcher.may_go_directly", lambda job: True)
    mode, bindings = Mode(True, False, True, 64), [SimpleNamespace(name=name) for name in "ab"]
    ready: Any = Prepared(bindings, ({}, {}), (), {}, len, lambda given: [(1, ())] * 2, {})  # type: ignore[arg-type]
    launcher = _Launcher()
    first = threading.Thread(target=launcher._compile_these, args=([0], ready, mode, {}))
    first.start()
    assert launcher.began.wait(60)
    launcher._compile_these([1], ready, mode, {})
    first.join()
    assert launcher.fast == {0, 1}  # type: ignore[comparison-overlap]


def _crashing(most_stages: int):
    """A compilation that ptxas fails at with more stages."""

    def made(options) -> int:
        if options["num_stages"] > most_stages:
            raise launching.triton.runtime.errors.PTXASError("`ptxas` failed with error code -11\nRepro command: ...")
        return options["num_stages"]

    return made


def test_where_ptxas_crashes_a_kernel_is_compiled_without_loads_ahead() -> None:
    options = {"num_stages": 3, "num_warps": 8}
    assert launching.assembled("kernel", _crashing(3), options) == 3
    with pytest.warns(RuntimeWarning, match="kernel: .*error code -11; it was compiled with one stage in place of 3"):
        assert launching.assembled("kernel", _crashing(1), options) == 1
    for stages in (3, 1):
        with pytest.raises(weft.UnavailableError, match="kernel: .*error code -11; pass schedule= with other tiles"):
            launching.assembled("kernel", _crashing(0), options | {"num_stages": stages})
