"""Counts that tests hold to what was recorded: spilled bytes, instructions, calls of functions. More of any is wrong.

`pytest FILE --record` writes what is counted now; the difference is part of the change that made it. Counts depend on a
version: where another one is installed than those recorded there is nothing to compare with.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

FOLDER = Path(__file__).parent / "machine_code" / "recorded"
LOCK = Path(__file__).parents[1] / "build" / "recorded.lock"


class Recorded:
    """Of one case of a test."""

    def __init__(self, file: str, case: str, package: str, writes: bool) -> None:
        self.path, self.case, self.writes = FOLDER / f"{file}.json", case, writes
        self.version = f"{package} {'.'.join(version(package).split('.')[:2])}"
        if package == "torch":  # what calls Python, whose own modules count
            self.version += f", python {sys.version_info.major}.{sys.version_info.minor}"

    def __call__(self, what: str, **counts: int) -> None:
        """Hold these counts of something, as a kernel, to the recorded ones."""
        if self.writes:
            return self._write(what, counts)
        found = self._read()
        if self.version not in found:
            return None
        known = found[self.version].get(self.case, {}).get(what)
        assert known is not None, f"{what}: nothing is recorded; pytest with --record writes {counts}"
        more = {n: (count, known[n]) for n, count in counts.items() if count > known[n]}
        assert not more, f"{what}: more than recorded (found, recorded): {more}; if that is right, pytest with --record"
        return None

    def _read(self) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
        found: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
        return json.loads(self.path.read_text()) if self.path.exists() else found

    def _write(self, what: str, counts: dict[str, int]) -> None:
        FOLDER.mkdir(exist_ok=True)
        LOCK.parent.mkdir(exist_ok=True)
        with FileLock(LOCK):
            found = self._read()
            found.setdefault(self.version, {}).setdefault(self.case, {})[what] = counts
            self.path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
