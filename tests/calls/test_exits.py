"""Processes of every kind end in order on a CPU; `python -m tests.gpu.exits` starts hundreds of them on a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import fresh

from ..gpu import exits
from ..support import mostly

ON_CPU = [name for name, kind in exits.KINDS.items() if kind.on_cpu]


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly(["called_at_exit", "thread_goes_on"], ON_CPU))
def test_processes_end_in_order(kind: str, tmp_path: Path) -> None:
    """Also while a thread computes, in which Python begins no work in pools of threads any more."""
    settings = {**os.environ, "OMP_NUM_THREADS": "2", "EXITS_DEVICE": "cpu", "EXITS_LONG_S": "1"}
    ended = exits.process(kind, 0, settings | {name: str(tmp_path / name) for name in exits.CACHES}, tmp_path)
    assert not ended.problem, f"{ended.problem}\n{(tmp_path / f'{kind}.0.log').read_text()}"


def test_one_that_aborts_is_found(tmp_path: Path) -> None:
    """What torch itself does where a daemon thread computes at the end, before Python 3.14."""
    kind = exits.Kind(print, 0, "", 1, True)
    for code, said in ((134, "terminate called without an active exception"), (0, "Fatal Python error: Aborted")):
        assert exits.problem_of(kind, subprocess.CompletedProcess([], code, "", said))
    assert exits.problem_of(kind, subprocess.CompletedProcess([], 1, "", ""))
    assert exits.problem_of(kind._replace(says="done"), subprocess.CompletedProcess([], 0, "", ""))
    assert not exits.problem_of(kind._replace(says="done"), subprocess.CompletedProcess([], 0, "done", ""))


def test_every_kind_gets_processes() -> None:
    options = exits.argparse.Namespace(kinds="", device="cuda", processes=300)
    assert {*exits.drawn(options)} == {*exits.KINDS} and len(exits.drawn(options)) == 300


def run(script: str) -> str:
    done = fresh.run(script)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.strip()


def test_threads_of_gloo_are_waited_for() -> None:
    """They let go of tensors after a collective has returned, and ask for Python's lock: then it must not be gone."""
    script = """
import time, torch, torch.distributed as dist
from weft.distributed import ContextParallel
from weft.runtime import ending
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert not ending._has_sent
cp = ContextParallel()
causal = __import__("weft").Attention(name="full")
plan = cp.plan(causal, heads=1, length=4, head_dim=8, dtype="fp32")
cp.unshard(torch.zeros(1, 1, 4, 8), plan)
ending.time = type("", (), {"sleep": lambda seconds: print("waits", seconds)})
"""
    assert run(script) == "waits 0.05"


def test_what_triton_does_once_is_done_before_a_process_ends() -> None:
    pytest.importorskip("triton")
    script = """
import time
from weft.codegen.launch import starting
starting._hash = starting._reach_driver = lambda: (time.sleep(0.2), print("done", flush=True))
starting.begin()
"""
    assert run(script).count("done") == 2  # of two threads, which may write one line


def test_kernels_are_compiled_at_the_end_of_a_process_too() -> None:
    pytest.importorskip("triton")
    script = """
import atexit
from weft.codegen.launch import launching
launching.compiled = lambda name, *rest: name
atexit.register(lambda: print(launching.compiled_together(-1, [("a",), ("b",)])))
"""
    assert run(script) == "['a', 'b']"
