"""What a user waits for at the first call: measured in processes of their own, with empty caches and with warm ones.

Run by attention.py; by hand: `python bench_first_call.py weft_triton` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CACHES = ("WEFT_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class FirstCall:
    """Seconds until the first forward and backward are done, beyond importing torch and starting CUDA."""

    cold_s: float | None  # nothing cached: analysis, generation, compilation
    warm_s: float | None  # a new process that finds all caches filled
    reason: str = ""  # why there is nothing to show


def first_call(column: str, timeout_s: float) -> FirstCall:
    """Two processes one after the other, over caches that begin empty."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        environment = {**os.environ, **{name: str(Path(folder, name)) for name in CACHES}}
        try:
            cold, warm = (_in_a_process(column, environment, timeout_s) for _ in range(2))
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            return FirstCall(None, None, _reason(error))
    return FirstCall(cold, warm)


def _in_a_process(column: str, environment: dict[str, str], timeout_s: float) -> float:
    command = [sys.executable, __file__, column]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        return lines[-1][:200] if lines else f"exit status {error.returncode}"
    return f"{type(error).__name__}: {error}"[:200]


def main() -> None:
    """Time the first call of one column in this process."""
    import torch

    torch.zeros(1, device="cuda").sum().item()
    begin = time.perf_counter()
    from bench_peers import contender, make_operands
    from bench_rows import Row

    row = Row("softcap", 1, 8, 1024, 128, 20)
    made = contender(sys.argv[1], row, make_operands(row, "cuda"))
    with made.context():
        made.backward(made.forward())
    torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
