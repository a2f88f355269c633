"""How often the form that a kernel has without tuning, and the one that the cost model would take, is the fastest.

    python benchmarks/forms.py --json forms.json --markdown forms.md     two minutes on an H200
    python benchmarks/forms.py --list                                    which forms there are, without a GPU

Each kernel that has several forms is timed in every one, the other kernels of its schedule being as they are without
tuning: medians of calls with a cold L2, in shuffled rounds in which all forms take turns. Kernels are compiled before,
in a pool of processes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from bench_measure import launch_times, reason_of
from bench_rows import Row
from bench_variants import weft_variant

import weft
from weft.compiler.planning.schedule import Choice, Schedule
from weft.runtime import build
from weft.tools.tuning import choices_of, resolved_for

NEAR = 0.05  # how much slower than the fastest form a chosen one may be to count as the best
ROUNDS, LAUNCHES = 3, 5
DEVICE = "h200"
Direction = Literal["forward", "backward"]
ROWS = (
    Row("causal", 2, 32, 8192, 64),
    Row("full", 2, 32, 8192, 64),
    Row("causal", 8, 16, 2048, 128),
    Row("causal", 2, 16, 8192, 128),
    Row("full", 2, 16, 8192, 128),
    Row("causal", 2, 8, 8192, 256),
    Row("causal", 4, 21, 4096, 96),
    Row("softcap", 2, 16, 8192, 128, 20),
    Row("alibi", 2, 16, 8192, 128),
    Row("window", 2, 16, 8192, 128, 1024),
    Row("documents", 2, 16, 8192, 128, 1024),
    Row("softcap", 2, 32, 8192, 64, 20),
    Row("dropout", 2, 16, 8192, 128, 10),
    Row("dropout", 2, 32, 8192, 64, 10),
    Row("blocks", 1, 16, 65536, 128, 5),
    Row("blocks", 1, 16, 65536, 64, 5),
    Row("causal", 64, 16, 512, 64),  # short calls, which have forms of their own
    Row("full", 64, 12, 256, 64),
)


@dataclass
class Case:
    """The forms of one kernel in one row."""

    row: str
    target: str
    direction: Direction
    kernel: str
    chosen: str  # without tuning
    predicted: dict[str, float]  # us of the kernel, by form
    schedules: dict[str, str]  # of a call, by form
    measured: dict[str, float] = field(default_factory=dict)  # us of the call, by form
    failed: dict[str, str] = field(default_factory=dict)  # why a form was not timed

    @property
    def of_model(self) -> str:
        """The form that the cost model ranks first; of equals the one that comes first."""
        return min(self.predicted, key=lambda form: self.predicted[form])

    def over_best(self, form: str) -> float | None:
        """Its time over that of the fastest form; None where it was not timed."""
        return self.measured[form] / min(self.measured.values()) if form in self.measured else None


def cases_of(row: Row, targets: Sequence[str]) -> Iterator[Case]:
    """The kernels of a row that have several forms, on targets that compute it themselves."""
    declared, operands = weft_variant(row, "cpu")
    sizes = weft.shape(
        batch=row.batch, heads=row.heads, kv_heads=row.kv_heads, q_len=row.length, head_dim=row.dim,
        value_dim=row.value_dim, dtype="bf16",
    )  # fmt: skip
    directions: tuple[Direction, ...] = ("forward", "backward")
    for target in targets:
        for direction in directions:
            try:
                chosen, machine, facts = resolved_for(declared, sizes, direction, DEVICE, target)
            except weft.UnavailableError:
                continue
            if chosen.target.name != target:
                continue
            for kernel, forms in choices_of(chosen, machine, facts).items():
                start = chosen.code.schedule
                schedules = {
                    str(f): str(Schedule(start.algorithm, {**start.kernels, kernel: Choice(target, f)})) for f in forms
                }
                predicted = {}
                for form, schedule in schedules.items():
                    plan = declared.plan(sizes, device=DEVICE, target=target, schedule=schedule, **operands)
                    (found,) = (k for k in plan.kernels if k.code.name == kernel)
                    predicted[form] = found.times.seconds * 1e6
                yield Case(row.name, target, direction, kernel, str(forms[0]), predicted, schedules)


def jobs_of(row: Row, cases: Sequence[Case]) -> list[build.Job]:
    """What is compiled ahead; forwards of timed backwards are those of the schedule without tuning."""
    declared, _ = weft_variant(row, "cpu")
    text = declared.canonical.text
    jobs = [
        build.Job(text, case.direction, "bf16", row.dim, row.value_dim, DEVICE, case.target, schedule)
        for case in cases
        for schedule in case.schedules.values()
    ]
    targets = {case.target for case in cases}
    return jobs + [build.Job(text, "forward", "bf16", row.dim, row.value_dim, DEVICE, target) for target in targets]


def calls_of(row: Row, case: Case) -> dict[str, Callable[[], object]]:
    """A call in each form, that only launches; forms that cannot be run are passed over."""
    declared, operands = weft_variant(row, "cuda")
    # ints as what was compiled ahead has them
    operands = {
        n: v.long() if isinstance(v, torch.Tensor) and v.dtype == torch.int32 else v for n, v in operands.items()
    }
    sizes = ((row.heads, row.dim), (row.kv_heads, row.dim), (row.kv_heads, row.value_dim))
    made = [torch.randn(row.batch, h, row.length, d, device="cuda", dtype=torch.bfloat16) for h, d in sizes]
    calls: dict[str, Callable[[], object]] = {}
    for form, schedule in case.schedules.items():
        leaves = [t.detach().requires_grad_(case.direction == "backward") for t in made]
        try:
            given: dict[str, Any] = {"target": case.target, "schedule": schedule, **operands}
            calls[form] = _call(declared, leaves, given, case.direction)
            calls[form]()
            torch.cuda.synchronize()
        except Exception as error:  # whatever one form does, the others are timed
            calls.pop(form, None)
            case.failed[form] = reason_of(error)
    return calls


def _call(
    declared: weft.Attention, leaves: list[torch.Tensor], given: dict[str, Any], direction: Direction
) -> Callable[[], object]:
    if direction == "forward":
        return lambda: declared(*leaves, **given)
    out = declared(*leaves, **given)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def time_case(row: Row, case: Case) -> None:
    """Fill in what the forms of a kernel take."""
    calls = calls_of(row, case)
    times: dict[str, list[float]] = {form: [] for form in calls}
    for _ in range(ROUNDS):
        for form in random.sample(list(calls), len(calls)):
            times[form] += launch_times(calls[form], LAUNCHES)
    case.measured = {form: statistics.median(found) * 1e3 for form, found in times.items()}


def markdown(cases: Sequence[Case]) -> str:
    """A line a kernel, then how often which choice is near the best."""
    lines = ["| row | kernel | chosen | by the model | fastest | chosen / fastest | by the model / fastest |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    near: dict[str, list[bool]] = {"chosen": [], "by the model": []}
    for case in cases:
        if len(case.measured) < 2:
            continue
        best = min(case.measured, key=lambda form: case.measured[form])
        ratios = {"chosen": case.over_best(case.chosen), "by the model": case.over_best(case.of_model)}
        for which, ratio in ratios.items():
            near[which] += [] if ratio is None else [ratio <= 1 + NEAR]
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values()]
        name = f"{case.target} {case.kernel}"
        lines.append(f"| {' | '.join([case.row, name, case.chosen, case.of_model, best, *shown])} |")
    counts = (f"{which}: {sum(found)} of {len(found)}" for which, found in near.items())
    return "\n".join([*lines, "", f"Within {NEAR:.0%} of the fastest form: {', '.join(counts)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--list", action="store_true", help="print the forms and what the model says, and time nothing")
    parser.add_argument("--rows", metavar="REGEX", default="", help="only rows whose name matches")
    parser.add_argument("--targets", default="hopper,triton")
    parser.add_argument("--seconds", type=float, default=140, help="begin no row after so many")
    options = parser.parse_args()
    begin = time.perf_counter()
    rows = [row for row in ROWS if re.search(options.rows, row.name)]
    cases = {row: list(cases_of(row, options.targets.split(","))) for row in rows}
    if options.list:
        for case in (case for found in cases.values() for case in found):
            print(f"{case.row}: {case.target} {case.kernel}: {len(case.predicted)} forms, chosen {case.chosen}, "
                  f"by the model {case.of_model}")  # fmt: skip
        return
    jobs = list(dict.fromkeys(job for row in rows for job in jobs_of(row, cases[row])))
    problems = [done for done in build.build(jobs) if done.problem]
    print(f"{len(jobs)} modules built in {time.perf_counter() - begin:.0f} s, {len(problems)} not", flush=True)
    timed: list[Case] = []
    for row in rows:
        if time.perf_counter() - begin > options.seconds:
            print(f"not timed: {row.name} and what follows")
            break
        for case in cases[row]:
            time_case(row, case)
            timed.append(case)
        torch.cuda.empty_cache()
    text = markdown(timed)
    print(text)
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        found = {"device": device, "torch": torch.__version__, "cases": [asdict(case) for case in timed]}
        options.json.write_text(json.dumps(found, indent=1))
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
