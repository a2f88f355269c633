"""The fuzzer as a command: python -m tests.fuzz --cases 1000 --seed 1 --target cpu."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections import Counter

from .run import Failure, Plan, fuzz

EVERY = 20.0  # seconds between lines of progress


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
    options = parser.parse_args()
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
    plan = Plan(not options.no_shrink, options.skip)
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


def _headed(failure: Failure) -> str:
    again = f"python -m tests.fuzz --only {failure.seed} --target {failure.target}"
    return f"\n# -------- again: {again}\n{failure.script}"


if __name__ == "__main__":
    sys.exit(main())
