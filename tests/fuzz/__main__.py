"""The fuzzer as a command: python -m tests.fuzz --cases 1000 --seed 1 --target cpu."""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from .run import ENDS, FP8, Failure, Plan, fuzz

EVERY = 20.0  # seconds between lines of progress
COUNTED = re.compile(r" *(\d+) ((?:cpu|reference|interpret|triton|hopper|right,) .*)")  # lines that a run prints
PROGRESS = re.compile(r"\d+ calls, ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="calls to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target", default="cpu,cpu,cpu,cpu,interpret", help="one, or several in turn; also triton, hopper"
    )
    parser.add_argument("--only", default="", help="one variant again: its seed, as it was printed")
    parser.add_argument("--skip", default="", help="pass over failures whose script matches this regular expression")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they were drawn")
    parser.add_argument("--failures", type=int, default=20, help="stop after so many")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, at the next call")
    parser.add_argument("--kinds", action="store_true", help="count what the calls that were right had in them")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument(
        "--ends", dest="kind", action="store_const", const=ENDS, default="",
        help="scores that are NaN or infinite behind the last row or key alone",
    )  # fmt: skip
    alone.add_argument("--fp8", dest="kind", action="store_const", const=FP8, help="calls with FP8 operands alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a share of the calls and a seed")
    options = parser.parse_args()
    if options.jobs > 1:
        return _in_processes(options)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:  # thousands of kernels that nobody calls again
        os.environ.setdefault("WEFT_CACHE_DIR", folder)
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    found: list[Failure] = []
    counts: Counter[str] = Counter()
    had: Counter[str] = Counter()  # of kinds of the calls that were right
    variants: set[tuple[str, str]] = set()  # targets and seeds of those that a call was computed of
    start = said = time.monotonic()
    plan = Plan(not options.no_shrink, options.skip, options.kind)
    for event in fuzz(options.seed, options.cases, options.target.split(","), plan, options.only):
        counts[f"{event.target:10} {event.kind}"] += 1
        if event.kind == "right":
            variants.add((event.target, event.seed))
            had += Counter(event.kinds)
        if event.failure is not None:
            found.append(event.failure)
            print(_headed(event.failure), flush=True)
        if event.kind == "declaration raised":
            print(f"\n# {event.message}", flush=True)
        if time.monotonic() - said > EVERY:
            said = time.monotonic()
            total = counts.total()
            print(f"{total} calls, {total / (said - start):.1f} a second, {len(found)} failures", flush=True)
        if found and (len(found) >= options.failures or found[-1].verdict.ends_the_process):
            print(f"stopped after {len(found)} failures")
            break
        if time.monotonic() - start > 60 * options.minutes:
            break
    counts += Counter(f"{target:10} variants computed" for target, _ in variants)
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    for name, count in sorted(had.items()) if options.kinds else ():
        print(f"{count:8} right, {name}")
    return 1 if found else 0


def _in_processes(options: argparse.Namespace) -> int:
    """Each process has a seed of its own; what they print comes at the end, and the sums of their counts."""
    command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:], "--jobs", "1"]
    share = -(-options.cases // options.jobs)
    running = [
        subprocess.Popen(
            [*command, "--cases", str(share), "--seed", str(options.seed * options.jobs + n)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for n in range(options.jobs)
    ]  # fmt: skip
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for text, _ in pool.map(subprocess.Popen.communicate, running):
            for line in text.splitlines():
                counted = COUNTED.match(line)
                counts += Counter({counted[2]: int(counted[1])} if counted else {})
                if not counted and not PROGRESS.match(line):
                    print(line, flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    return max(abs(process.returncode) for process in running)


def _headed(failure: Failure) -> str:
    again = f"python -m tests.fuzz --only {failure.seed} --target {failure.target}"
    return f"\n# -------- again: {again}\n{failure.script}"


if __name__ == "__main__":
    sys.exit(main())
