"""Seconds that each kernel of a first call takes to compile, with an empty cache, for a GPU that need not be there.

    python benchmarks/compiling.py                      a table of D128, bf16, for an H200

All in one process, one kernel after the other, after one that is not counted (Triton prepares much the first time).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

STAGES = ("Python", "Triton", "LLVM", "ptxas")
_OF_STAGE = {"ttir": "Triton", "ttgir": "Triton", "llir": "LLVM", "ptx": "LLVM", "cubin": "ptxas"}


def rows(head_dim: int) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(what is called, kernel, seconds of each stage)."""
    import triton

    import weft
    from weft.runtime import build

    doc = weft.tensor("doc", 2, int)
    causal = weft.Attention(mask=weft.masks.causal, name="causal")
    documents = weft.Attention(mask=weft.masks.causal & weft.masks.document(doc), name="documents")
    directions: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    found: dict[str, float] = {}

    def heard(*, times: Any, cache_hit: bool, **rest: Any) -> None:
        if cache_hit:
            return
        found["Python"] = times.ir_initialization / 1e6
        for stage, microseconds in times.lowering_stages:
            name = _OF_STAGE[stage]
            found[name] = found.get(name, 0.0) + microseconds / 1e6

    triton.knobs.compilation.listener = heard
    warm = build.Job(causal.canonical.text, "forward", "bf16", 32, 32, "h200", "hopper")
    build.build_one(warm)
    for attention in (causal, documents):
        for target in ("triton", "hopper"):
            for direction in directions:
                job = build.Job(
                    attention.canonical.text, direction, "bf16", head_dim, head_dim, "h200", target
                )  # fmt: skip
                machine, compilations = build.compilations_of(job)
                for compilation in compilations:
                    found.clear()
                    compilation.compile(machine)
                    if not found:
                        continue  # of a direction before
                    yield f"{attention.name}, {target} {direction}", compilation.name, dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        for name in ("WEFT_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(Path(folder, name))  # before either is imported
        print(f"| | kernel | {' | '.join(STAGES)} | seconds |\n| --- | --- {'| --- ' * len(STAGES)}| --- |")
        for what, kernel, found in rows(options.head_dim):
            each = [f"{found.get(stage, 0.0):.2f}" for stage in STAGES]
            print(f"| {what} | `{kernel}` | {' | '.join(each)} | {sum(found.values()):.2f} |", flush=True)
    print(f"{time.perf_counter() - begin:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
