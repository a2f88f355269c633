"""Tuning: time the forms of each kernel one after the other, until which is fastest lies outside the noise.

The forms of a kernel take turns in shuffled rounds, so that a busy moment meets all of them. After each round those
whose median is surely above the best one's leave; what is left after the last round is a tie, in which the form that
is used without tuning stays. The caller supplies the clock, so that this module knows nothing of devices. Tuning never
happens by itself: without it the tables and the cost model decide.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING

from ...ir.errors import WeftError
from .form import Form
from .schedule import Schedule

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Clock = Callable[[Schedule, str], float]  # (schedule, kernel whose form is being tried) -> seconds of one run
LEAST_ROUNDS = 9  # before a form may leave: an interval for the median of fewer runs says little
MOST_ROUNDS = 60  # after which what is left is a tie
SECONDS = 30.0  # for the rounds of one kernel; the least rounds are always run


@dataclass(frozen=True)
class Spread:
    """Seconds of the runs of one form."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.runs) < 2:
            return self.runs[0], self.runs[0]
        low, _, high = statistics.quantiles(self.runs, n=4, method="inclusive")
        return low, high

    @property
    def of_median(self) -> tuple[float, float]:
        """Between which the median of endless runs lies, nineteen times of twenty: by ranks, whatever the noise is."""
        ordered, count = sorted(self.runs), len(self.runs)
        below = max(0, int((count - 1.96 * sqrt(count)) / 2))
        return ordered[below], ordered[count - 1 - below]


@dataclass(frozen=True)
class Outcome:
    """What was found for one kernel."""

    chosen: Form
    default: Form  # what is used without tuning
    spreads: Mapping[Form, Spread]  # of every form that ran
    tied: tuple[
        Form, ...
    ]  # forms that the clock cannot tell from the best one, best median first; the only one if it can

    @property
    def is_tie(self) -> bool:
        return len(self.tied) > 1


@dataclass(frozen=True)
class Tuned:
    """What tuning found."""

    schedule: Schedule
    seconds: Mapping[str, float]  # median of the chosen form of each kernel
    tried: int
    failed: Mapping[str, str]  # schedule text -> why it could not be timed
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # of each kernel


def search(
    start: Schedule,
    choices: Mapping[str, Sequence[Form]],
    clock: Clock,
    *,
    progress: bool = True,
    console: Console | None = None,
) -> Tuned:
    """Time every choice of one kernel after the other and keep the fastest of each.

    start: the schedule of the kernels that are not being timed, and what ties keep. A choice that cannot be compiled or
    run is passed over. progress: show a bar on `console`, stderr where none is given, if it is a terminal. Raises
    WeftError if no choice of a kernel ran.
    """
    # lazy: a call that only looks a schedule up must not pay for this import
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    best = start
    outcomes: dict[str, Outcome] = {}
    failed: dict[str, str] = {}
    shown = console or Console(stderr=True)
    columns = (TextColumn("tuning {task.fields[kernel]}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("{task.fields[note]}"), console=shown, disable=not (progress and shown.is_terminal)
    ) as bar:
        task = bar.add_task("", total=sum(map(len, choices.values())), kernel="", note="")
        for kernel, forms in choices.items():
            runs = _first_runs(best, kernel, forms, clock, failed, bar, task)
            if not runs:
                reason = list(failed.values())[-1]
                raise WeftError(f"tune: no form of {kernel} could be timed; the last one failed with {reason}")
            outcomes[kernel] = _compared(best, kernel, runs, clock, bar, task)
            best = best.with_form(kernel, outcomes[kernel].chosen)
    seconds = {kernel: found.spreads[found.chosen].median for kernel, found in outcomes.items()}
    return Tuned(best, seconds, sum(map(len, choices.values())), failed, outcomes)


def _first_runs(
    best: Schedule, kernel: str, forms: Sequence[Form], clock: Clock, failed: dict[str, str], bar: Progress,
    task: TaskID,
) -> dict[Form, list[float]]:  # fmt: skip
    """The forms that run at all: each compiled, and run for the first time."""
    runs: dict[Form, list[float]] = {}
    for form in forms:
        bar.update(task, kernel=kernel, note=str(form))
        schedule = best.with_form(kernel, form)
        try:
            clock(schedule, kernel)
            runs[form] = []
        except Exception as error:  # compilers and drivers raise what they like; what fails is no candidate
            failed[str(schedule)] = f"{type(error).__name__}: {error}"
        bar.advance(task)
    return runs


def _compared(
    best: Schedule, kernel: str, runs: dict[Form, list[float]], clock: Clock, bar: Progress, task: TaskID
) -> Outcome:
    """Rounds in which the forms that may be the fastest take turns, until one is left or there were enough."""
    left, order, begun = list(runs), random.Random(0), time.perf_counter()
    for number in range(1, MOST_ROUNDS + 1):
        bar.update(task, kernel=kernel, note=f"round {number}, {len(left)} forms left")
        for form in order.sample(left, len(left)):
            runs[form].append(clock(best.with_form(kernel, form), kernel))
        if number < LEAST_ROUNDS:
            continue
        spreads = {form: Spread(tuple(seconds)) for form, seconds in runs.items()}
        left = _not_slower(left, spreads)
        if len(left) == 1 or time.perf_counter() - begun > SECONDS:
            break
    left.sort(key=lambda form: spreads[form].median)
    default = best.form(kernel)
    return Outcome(default if default in left else left[0], default, spreads, tuple(left))


def _not_slower(forms: Sequence[Form], spreads: Mapping[Form, Spread]) -> list[Form]:
    """The forms whose median may be as low as that of the best one."""
    fastest = min(forms, key=lambda form: spreads[form].median)
    limit = spreads[fastest].of_median[1]
    return [form for form in forms if form == fastest or spreads[form].of_median[0] <= limit]
