"""What a change of structure must leave as it is: sources, stages, plans and machine code of a corpus of calls.

python -m tests.same                 compare with tests/same/recorded.json; exit 1 where something differs, and where a
                                     function that generated code calls has more than 8 parameters
python -m tests.same --record        write that file, in the commit that means to change what is generated
python -m tests.same --machine-code  also compile kernels of `triton` and `hopper`, and compare hashes of their PTX
python -m tests.same --texts FOLDER  write the texts there, to be compared with those of another commit by `diff -r`
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from .corpus import corpus
from .texts import CORES, machine_code, machine_code_without_holes, texts_of, without_holes

MOST_PARAMETERS = 8  # of a function that generated code calls
RECORDED = Path(__file__).with_name("recorded.json")
Found = dict[str, dict[str, str]]  # by triple, by part: text


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Processes in which torch has as many threads as on the machine of the record: plans of a CPU count them."""
    spawned = multiprocessing.get_context("spawn")  # torch has threads, which no fork survives
    return ProcessPoolExecutor(jobs, spawned, torch.set_num_threads, (CORES,))


def generated(jobs: int, only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The texts of each triple whose name has `only` in it."""
    names = [t.name for t in corpus() if only in t.name]
    with _pool(jobs) as pool:
        yield from zip(names, pool.map(texts_of, names, chunksize=4))


def compiled(jobs: int, only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """PTX of the kernels of the triples that have some, likewise."""
    names = [t.name for t in corpus() if only in t.name]
    with _pool(jobs) as pool:
        yield from zip(names, pool.map(machine_code, names))


def hashes(found: Mapping[str, Mapping[str, str]]) -> Found:
    """The same with a short digest in place of each text."""
    return {
        name: {part: hashlib.sha256(text.encode()).hexdigest()[:16] for part, text in parts.items()}
        for name, parts in found.items()
    }


def differences(recorded: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each part that differs, is new or is gone."""
    lines = []
    for name in sorted(recorded.keys() | found.keys()):
        before, after = recorded.get(name, {}), found.get(name, {})
        for part in sorted(before.keys() | after.keys()):
            if before.get(part) != after.get(part):
                word = "is new" if part not in before else "is gone" if part not in after else "differs"
                lines.append(f"{name}: {part} {word}")
    return lines


def write(found: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Each text as a file of its own."""
    for name, parts in found.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part, text in parts.items():
            (folder / name / part.replace(" ", "_")).write_text(text)


def long_signatures(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each function with more parameters than MOST_PARAMETERS that generated code calls on a GPU.

    Kernels that are launched may have more, and modules of torch code have a limit of their own.
    """
    lines: dict[str, str] = {}
    for name, parts in found.items():
        for text in (text for part, text in parts.items() if part in ("forward", "backward")):
            for function in [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)]:
                number = len(function.args.args) + len(function.args.kwonlyargs)
                if number > MOST_PARAMETERS and _is_called_on_a_gpu(function):
                    lines.setdefault(function.name, f"{name}: {function.name} has {number} parameters")
    return [*lines.values()]


def _is_called_on_a_gpu(function: ast.FunctionDef) -> bool:
    return [ast.unparse(d) for d in function.decorator_list] in (["triton.jit"], ["gluon.jit"])


def merged(*groups: Iterable[tuple[str, dict[str, str]]]) -> Found:
    """The parts of each triple together; a triple without parts is left out."""
    found: Found = {}
    for name, parts in (each for group in groups for each in group):
        if parts:
            found.setdefault(name, {}).update(parts)
    return found


def main() -> None:
    """Generate, then record, compare or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--machine-code", action="store_true")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--only", default="", help="triples whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    groups = [generated(asked.jobs, asked.only), without_holes(asked.only)]
    groups += [compiled(asked.jobs, asked.only), machine_code_without_holes(asked.only)] if asked.machine_code else []
    found = merged(*groups)
    if asked.texts:
        write(found, asked.texts)
    recorded: Found = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if asked.record:
        kept = {name: dict(parts) for name, parts in recorded.items()} if asked.only or not asked.machine_code else {}
        for name, parts in hashes(found).items():
            kept[name] = ({} if asked.machine_code else _machine_code_of(kept.get(name, {}))) | parts
        RECORDED.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
        print(f"recorded {len(kept)} triples, {sum(map(len, kept.values()))} texts")
        return
    known = {n: parts for n, parts in recorded.items() if asked.only in n}
    if not asked.machine_code:
        known = {n: {p: h for p, h in parts.items() if not p.startswith("ptx ")} for n, parts in known.items()}
    lines = differences(known, hashes(found))
    defects = long_signatures(found)
    said = f"{len(found)} triples, {sum(map(len, found.values()))} texts, {len(lines)} differ"
    print(*lines, *defects, said, sep="\n")
    sys.exit(bool(lines or defects))


def _machine_code_of(parts: Mapping[str, str]) -> dict[str, str]:
    return {part: text for part, text in parts.items() if part.startswith("ptx ")}


if __name__ == "__main__":
    main()
