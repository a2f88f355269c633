"""Building ahead where a system lacks something."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from weft.runtime import build


@pytest.mark.parametrize("holds_signals", [True, False], ids=["posix", "windows"])
def test_several_processes_build_where_signals_cannot_be_held(
    holds_signals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holds_signals:
        monkeypatch.delattr(signal, "pthread_sigmask")
    monkeypatch.setattr(build, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    jobs = build.jobs_of([weft.Attention(name="dense")], device="cpu", dtypes=["fp32"])  # which compiles nothing
    done = list(build.build(jobs, processes=2))
    assert {d.job for d in done} == set(jobs) and len(jobs) == 4
    assert all("the cpu target compiles nothing" in d.problem for d in done)
