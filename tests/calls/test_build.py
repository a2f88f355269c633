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


def test_what_a_compiler_raises_is_the_problem_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(job: build.Job) -> tuple[str, ...]:
        if job.head_dim == 64:
            raise RuntimeError("at 3:4:\n    sram.store(tile)\nno such layout")
        return ("flash_forward",)

    monkeypatch.setattr(build, "_kernels", kernels)
    jobs = [build.Job("score", "forward", "bf16", dim, dim, "h200", "hopper") for dim in (64, 128)]
    bad, good = build.build(jobs, processes=1)
    assert bad.problem == "RuntimeError: no such layout"
    assert good.kernels == ("flash_forward",) and not good.problem


def test_every_combination_that_there_is() -> None:
    dense = weft.Attention(name="dense")
    sizes = {"device": "h200", "head_dims": [64], "page": 8}
    jobs = build.jobs_of([dense], sequences=["lengths", "packed", "paged"], decode=[1, 4], **sizes)
    assert [str(job) for job in jobs] == [
        "dense forward lengths bf16 D64 for h200",
        "dense backward lengths bf16 D64 for h200",
        "dense forward packed bf16 D64 for h200",
        "dense backward packed bf16 D64 for h200",
        "dense forward in pages of 8 bf16 D64 for h200",
        "dense decode of 1 head a key head lengths bf16 D64 for h200",
        "dense decode of 4 heads a key head lengths bf16 D64 for h200",
        "dense decode of 1 head a key head in pages of 8 bf16 D64 for h200",
        "dense decode of 4 heads a key head in pages of 8 bf16 D64 for h200",
    ]
    mixed = build.jobs_of([dense], sequences=["packed_paged"], decode=[4], **sizes)
    assert [str(job) for job in mixed] == [
        "dense forward packed queries in pages of 8 bf16 D64 for h200",
        "dense decode of 4 heads a key head packed queries in pages of 8 bf16 D64 for h200",
    ]
    with pytest.raises(weft.WeftError, match="build: page: expected a power of two from 1 to 256, got 12"):
        build.jobs_of([dense], device="h200", page=12)
