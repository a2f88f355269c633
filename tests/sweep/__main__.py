"""python -m tests.sweep [--jobs 2] [--only TEXT] [--record]: what becomes of each class; --record writes it down."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from multiprocessing import get_context

from .judge import classes, timed
from .record import write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    names = [name for name in classes() if options.only in name][:: options.every]
    results = []
    with get_context("spawn").Pool(options.jobs, maxtasksperchild=250) as pool:
        for found, seconds in pool.imap(timed, names):
            results.append(found)
            print(json.dumps([found.name, found.status, found.why, round(seconds, 1)]), flush=True)
    print(Counter(found.status for found in results))
    if options.record:
        write(results, whole=not options.only and options.every == 1)


if __name__ == "__main__":
    main()
