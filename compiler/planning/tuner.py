"""Tuning: time the forms of each kernel one after the other, keep the fastest.

The caller supplies the clock, so that this module knows nothing of devices. Tuning never happens by itself: without it
the tables and the cost model decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ir.errors import WeftError
from .forms import Form
from .schedule import Schedule

if TYPE_CHECKING:
    from rich.console import Console

Clock = Callable[[Schedule, str], float]  # (schedule, kernel whose form is being tried) -> seconds


@dataclass(frozen=True)
class Tuned:
    """What tuning found."""

    schedule: Schedule
    seconds: Mapping[str, float]  # of the fastest form of each kernel
    tried: int
    failed: Mapping[str, str]  # schedule text -> why it could not be timed


def search(
    start: Schedule,
    choices: Mapping[str, Sequence[Form]],
    clock: Clock,
    *,
    progress: bool = True,
    console: Console | None = None,
) -> Tuned:
    """Time every choice of one kernel after the other and keep the fastest of each.

    start: the schedule of the kernels that are not being timed. A choice that cannot be compiled or run is passed over.
    progress: show a bar on `console`, stderr where none is given. Raises WeftError if no choice of a kernel ran.
    """
    # lazy: a call that only looks a schedule up must not pay for this import
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    best = start
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    shown = console or Console(stderr=True)
    columns = (TextColumn("tuning {task.fields[kernel]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=shown, disable=not progress) as bar:
        task = bar.add_task("", total=sum(map(len, choices.values())), kernel="", note="")
        for kernel, forms in choices.items():
            times: dict[Form, float] = {}
            for form in forms:
                bar.update(task, kernel=kernel, note=str(form))
                times[form] = _timed(clock, best.with_form(kernel, form), kernel, failed)
                bar.advance(task)
            fastest = min(times, key=lambda f: times[f])
            if math.isinf(times[fastest]):
                reason = list(failed.values())[-1]
                raise WeftError(f"tune: no form of {kernel} could be timed; the last one failed with {reason}")
            best, seconds[kernel] = best.with_form(kernel, fastest), times[fastest]
    return Tuned(best, seconds, sum(map(len, choices.values())), failed)


def _timed(clock: Clock, schedule: Schedule, kernel: str, failed: dict[str, str]) -> float:
    try:
        return clock(schedule, kernel)
    except Exception as error:  # compilers and drivers raise what they like; a candidate that fails is no candidate
        failed[str(schedule)] = f"{type(error).__name__}: {error}"
        return math.inf
