"""Runs the tests that cover a file of the package, in under a minute: `make near FILE=ir/expr.py`.

Which those are is recorded in near.json: of each file the test functions that reach most of its lines a second, or of a
template most of the modules that are made of it. `--record FOLDER` records that anew, from what the runs of pytest left
in the folder that had `-p tests.near --near FOLDER`, with `coverage` installed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("near.json")
ROOMS = ("api", "ir", "compiler", "codegen", "runtime")
SECONDS = 40.0  # of the tests of a file, on an idle core; starting takes some more


def recorded_for(path: str) -> list[str]:
    """The tests that are recorded for a file and still there, the most telling first; else those named after it."""
    found = json.loads(RECORDED.read_text())
    tests = [found["tests"][number] for number in found["files"].get(path, ())]
    named = ROOT.glob(f"tests/*/test_{Path(path).name.partition('.')[0]}*.py")
    return [t for t in tests if is_there(t)] or sorted(p.relative_to(ROOT).as_posix() for p in named)


def is_there(test: str) -> bool:
    """Whether a test was not renamed or taken away since it was recorded."""
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    return bool(re.search(rf"\b{name.rpartition('::')[2]}\b", text))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.near", description=__doc__)
    parser.add_argument("file", nargs="?", help="from the root of the checkout")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    if asked.record:
        RECORDED.write_text(json.dumps(chosen(asked.record), indent=0, sort_keys=True) + "\n")
        return 0
    if asked.file is None:
        parser.error("expected a file")
    tests = recorded_for(Path(asked.file).resolve().relative_to(ROOT).as_posix())
    if not tests:
        parser.error(f"{asked.file}: no test is recorded for it; record anew, as tests/near.py says")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "not thorough", *tests], env=environment).returncode


# -- what was seen -> near.json ----------------------------------------------------------------------------------------
def chosen(folder: Path) -> dict[str, Any]:
    """Of each file the tests that tell most about it in SECONDS."""
    seconds: dict[str, float] = defaultdict(float)
    reached: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))  # by file and test
    made = {}
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for run in seen:
        made |= run["made"]
    for run in seen:
        for test, taken in run["seconds"].items():
            seconds[test] += taken
        for test, texts in run["loaded"].items():
            for text in texts:
                for template in made.get(text, ()):
                    reached[f"templates/{template}"][test].add(text)
        for path, tests in run["lines"].items():
            for test, lines in tests.items():
                reached[path][test].update(lines)
    picks = {path: picked(reached[path], seconds) for path in sorted(reached)}
    names = sorted({test for tests in picks.values() for test in tests})
    number = {name: at for at, name in enumerate(names)}
    return {
        "tests": names,
        "seconds": [round(seconds[name], 2) for name in names],
        "files": {path: [number[test] for test in tests] for path, tests in picks.items() if (ROOT / path).exists()},
    }


def picked(reached: dict[str, set[Any]], seconds: dict[str, float]) -> list[str]:
    """Those that reach most of what is left a second, until all is reached or the time is up."""
    found: list[str] = []
    left, budget = set().union(*reached.values()), SECONDS
    while left:
        fit = {
            test: len(lines & left) / (seconds[test] + 0.1)
            for test, lines in reached.items()
            if seconds[test] <= budget
        }
        best = max(sorted(fit), key=fit.__getitem__, default=None)
        if best is None or not fit[best]:
            break
        found.append(best)
        left -= reached[best]
        budget -= seconds[best]
    return found


# -- a run of pytest -> what was seen ----------------------------------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--near", type=Path, metavar="FOLDER", help="write what each test reaches to a folder")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("near"):
        config.pluginmanager.register(Seen(config.getoption("near")))


class Seen:
    """What each test function reaches: lines inside functions of the package, and modules made of templates."""

    def __init__(self, folder: Path) -> None:
        import coverage

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}.json"
        os.environ["WEFT_CACHE_DIR"] = str(folder / self.path.stem)  # nothing is made yet
        sources = [str(ROOT / room) for room in ROOMS]
        data = str(self.path.with_suffix(".coverage"))
        self.coverage = coverage.Coverage(data_file=data, branch=True, source=sources, config_file=False)
        self.coverage.start()
        self.test = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self.loaded: dict[str, set[str]] = defaultdict(set)
        self.made: dict[str, list[str]] = {}
        self.rendered: set[str] = set()

    def pytest_collection_finish(self) -> None:
        import jinja2

        from weft.codegen import generate, loader
        from weft.codegen.targets.triton import modules

        execute, written, load = loader._execute, generate.written, jinja2.Environment._load_template

        def executed(path: Path, text: str, *more: Any) -> Any:
            self.loaded[self.test].add(_mark(text))
            return execute(path, text, *more)

        def rendered(environment: Any, name: str, given: Any) -> Any:
            self.rendered.add(str(name))
            return load(environment, name, given)

        def made(*given: Any, **more: Any) -> str:
            self.rendered.clear()
            text = written(*given, **more)
            self.made[_mark(text)] = sorted(self.rendered)
            self.loaded[self.test].add(_mark(text))
            return text

        loader._execute = executed
        jinja2.Environment._load_template = rendered  # type: ignore[method-assign]
        generate.written = modules.written = made  # type: ignore[attr-defined]
        self.forget = loader._modules.clear

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        test = item.nodeid.partition("[")[0]
        if test != self.test:
            self.test = test
            self.coverage.switch_context(test)
            self.forget()
        begun = sum(os.times()[:4])  # of processes that it starts, too
        result = yield
        self.seconds[test] += sum(os.times()[:4]) - begun
        return result

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        data = self.coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {}
        for path in sorted(data.measured_files()):
            inside, tests = _inside_functions(Path(path)), defaultdict(list)
            for line, contexts in data.contexts_by_lineno(path).items():
                for test in contexts if line in inside else ():
                    if test:
                        tests[test].append(line)
            lines[Path(path).relative_to(ROOT).as_posix()] = dict(tests)
        loaded = {test: sorted(texts) for test, texts in self.loaded.items() if test}
        found = {"seconds": self.seconds, "loaded": loaded, "made": self.made, "lines": lines}
        self.path.write_text(json.dumps(found))


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _inside_functions(path: Path) -> set[int]:
    """Lines that do not run when the module is imported."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    bodies = [f.body if isinstance(f.body, list) else [f.body] for f in functions]
    return {line for body in bodies for line in range(body[0].lineno, (body[-1].end_lineno or 0) + 1)}


if __name__ == "__main__":
    sys.exit(main())
