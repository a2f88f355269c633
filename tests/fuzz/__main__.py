"""The fuzzer as a command: python -m tests.fuzz --cases 1000 --seed 1 --target cpu."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from random import Random

from .run import Failure, fuzz
from .script import script


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="calls to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="cpu,interpret", help="cpu, interpret, triton, hopper; several with commas")
    parser.add_argument("--only", default="", help="one variant again: its seed, as printed")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--most-failures", type=int, default=20)
    options = parser.parse_args()
    found: list[Failure] = []
    counts: Counter[str] = Counter()
    start = time.monotonic()
    for event in fuzz(options.seed, options.cases, options.target.split(","), options.only, not options.no_shrink):
        counts[f"{event.target} {event.kind}"] += 1
        if event.failure is not None:
            found.append(event.failure)
            print(f"\n# ---- variant seed {event.failure.seed}\n{event.failure.script}", flush=True)
        total = sum(counts.values())
        if total % 200 == 0:
            print(f"{total} calls, {len(found)} failures, {total / (time.monotonic() - start):.1f} a second", flush=True)
        if len(found) >= options.most_failures:
            break
    for name, count in sorted(counts.items()):
        print(f"{count:7} {name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["Random", "script"]
