"""HBM traffic of the schedules: what the hardware counts beside what the plan predicts.

    python benchmarks/traffic.py --json out.json

The layer is GPT-2 medium's: B 64, H 16, S 1024, D 64, fp16, causal. Each schedule runs forward and backward in a
process of its own under `ncu`, which counts the bytes of every kernel between two marks. Kernels start with cold
caches there, as they would in a model whose layers are larger than the L2. Without `ncu` only predictions are shown.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    import weft

SCHEDULES = ("standard", "streaming", "flash")
DIRECTIONS = ("forward", "backward")
READ, WRITTEN, L2, L1 = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "l1tex__t_bytes.sum",
)
METRICS = (READ, WRITTEN, L2, L1)


@dataclass(frozen=True)
class Layer:
    """Sizes of the layer measured; fp16."""

    batch: int = 64
    heads: int = 16
    length: int = 1024
    dim: int = 64
    causal: bool = True


@dataclass(frozen=True)
class Traffic:
    """Bytes of one pass; a field is None where it is not known, and `reason` says why."""

    schedule: str
    direction: str
    predicted_read: float | None
    predicted_written: float | None
    read: float | None = None
    written: float | None = None
    l2: float | None = None
    l1: float | None = None
    kernels: int = 0
    reason: str = ""

    @property
    def predicted(self) -> float | None:
        return _sum(self.predicted_read, self.predicted_written)

    @property
    def measured(self) -> float | None:
        return _sum(self.read, self.written)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


# --- in the process under ncu -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCall:
    """The layer, ready to run."""

    attention: weft.Attention
    leaves: list[torch.Tensor]  # query, key, value
    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _layer_call(layer: Layer, schedule: str, target: str) -> LayerCall:
    import torch

    import weft
    from weft import kv_pos, q_pos

    attention = weft.Attention(mask=kv_pos <= q_pos if layer.causal else True, name="gpt2_medium")
    shape = (layer.batch, layer.heads, layer.length, layer.dim)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn(shape, device="cuda", dtype=torch.float16)

    def forward() -> torch.Tensor:
        return attention(*leaves, schedule=schedule, target=target)

    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return LayerCall(attention, leaves, forward, backward)


def run_marked(layer: Layer, schedule: str, direction: str, target: str) -> None:
    """One pass between the marks that ncu waits for, after one that compiles; prints the plan's prediction as JSON."""
    import torch

    call = _layer_call(layer, schedule, target)
    out = call.forward()
    call.backward(out)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    if direction == "forward":
        call.forward()
    else:
        call.backward(out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    plan = call.attention.plan(*call.leaves, schedule=schedule, target=target)
    print("PREDICTED " + json.dumps(predicted_bytes(plan, direction)))


def predicted_bytes(plan: weft.Plan, direction: str) -> dict[str, float]:
    """Bytes read and written by the kernels of one direction."""
    kernels = [kernel for kernel in plan.kernels if kernel.direction == direction]
    return {
        "read": sum(kernel.hbm_read.value for kernel in kernels),
        "written": sum(kernel.hbm_written.value for kernel in kernels),
    }


# --- around it ----------------------------------------------------------------------------------------------------


def measure(layer: Layer, schedule: str, direction: str, target: str, timeout_s: float) -> Traffic:
    """Run one pass in its own process, under ncu where there is one."""
    child = [sys.executable, __file__, "--marked", schedule, direction, "--target", target]
    child += [] if layer.causal else ["--full"]
    counted = [shutil.which("ncu"), "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    counted += ["--print-units", "base", "--metrics", ",".join(METRICS)]
    reason = "" if counted[0] else "ncu is not on the PATH"
    if counted[0]:
        text, reason = _output([*counted, *child], timeout_s)
        if not reason and (found := parse_ncu(text)):
            return _traffic(schedule, direction, text, found, "")
        reason = reason or "ncu counted no kernel: " + _last_line(text)
    text, failure = _output(child, timeout_s)
    return _traffic(schedule, direction, text, [], failure or reason)


def _output(command: Sequence[str | None], timeout_s: float) -> tuple[str, str]:
    """What a command printed, and why it failed or "" if it did not."""
    words = [word for word in command if word]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {timeout_s:.0f} s"
    return done.stdout, "" if done.returncode == 0 else _last_line(done.stderr or done.stdout)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def _traffic(schedule: str, direction: str, text: str, kernels: list[dict[str, float]], reason: str) -> Traffic:
    lines = [line for line in text.splitlines() if line.startswith("PREDICTED ")]
    predicted = json.loads(lines[-1].removeprefix("PREDICTED ")) if lines else {}
    total = {metric: sum(kernel[metric] for kernel in kernels) if kernels else None for metric in METRICS}
    return Traffic(
        schedule,
        direction,
        predicted.get("read"),
        predicted.get("written"),
        total[READ],
        total[WRITTEN],
        total[L2],
        total[L1],
        len(kernels),
        reason,
    )


def parse_ncu(text: str) -> list[dict[str, float]]:
    """Metrics of each kernel, in bytes, from `ncu --csv --page raw --print-units base`.

    >>> parse_ncu('==PROF== x\\n"ID","dram__bytes_read.sum"\\n"","byte"\\n"0","1,024"\\n')[0]["dram__bytes_read.sum"]
    1024.0
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    return [{metric: _number(line.get(metric)) for metric in METRICS} for line in table if line["ID"]]


def _number(text: str | None) -> float:
    """NaN where ncu has no such counter and says "n/a"."""
    if not text:
        return 0.0
    return float("nan") if text == "n/a" else float(text.replace(",", ""))


# --- the report ---------------------------------------------------------------------------------------------------


def as_table(found: Sequence[Traffic]) -> Table:
    table = Table(title="HBM bytes of one pass, MiB: measured (predicted)", title_justify="left")
    for name in (
        "schedule",
        "direction",
        "read",
        "written",
        "total",
        "measured / predicted",
        "of standard",
        "L2",
        "L1",
    ):
        table.add_column(name, justify="left" if name in ("schedule", "direction") else "right")
    for item in found:
        table.add_row(*_cells(item, found))
    return table


def _cells(item: Traffic, found: Sequence[Traffic]) -> tuple[str, ...]:
    standard = next((x for x in found if (x.schedule, x.direction) == ("standard", item.direction)), None)
    share = _ratio(item.measured, standard.measured if standard else None)
    return (
        item.schedule,
        item.direction,
        f"{_mib(item.read)} ({_mib(item.predicted_read)})",
        f"{_mib(item.written)} ({_mib(item.predicted_written)})",
        f"{_mib(item.measured)} ({_mib(item.predicted)})",
        _percent(_ratio(item.measured, item.predicted)),
        _percent(share if share is not None else _ratio(item.predicted, standard.predicted if standard else None)),
        _mib(item.l2),
        _mib(item.l1),
    )


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def verdicts(found: Sequence[Traffic]) -> list[str]:
    """The two promises: forward within 15 % of the plan, and flash under a fifth of standard."""
    by_name = {(item.schedule, item.direction): item for item in found}
    said = []
    for schedule in SCHEDULES:
        item = by_name.get((schedule, "forward"))
        ratio = _ratio(item.measured, item.predicted) if item else None
        if ratio is not None:
            said.append(f"{_word(abs(ratio - 1) <= 0.15)} {schedule} forward: {ratio:.3f} of the predicted bytes")
    for direction in DIRECTIONS:
        flash, standard = by_name.get(("flash", direction)), by_name.get(("standard", direction))
        ratio = _ratio(flash.measured, standard.measured) if flash and standard else None
        if ratio is not None:
            said.append(f"{_word(ratio < 0.2)} flash {direction} moves {ratio:.1%} of what standard moves")
    return said


def _word(kept: bool) -> str:
    return "kept:" if kept else "NOT KEPT:"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--target", default="triton")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one pass in its process")
    parser.add_argument("--marked", nargs=2, metavar=("SCHEDULE", "DIRECTION"), help="the pass that ncu watches")
    options = parser.parse_args(words)
    layer = Layer(causal=not options.full)
    if options.marked:
        schedule, direction = options.marked
        run_marked(layer, schedule, direction, options.target)
        return
    console, found = Console(width=None if sys.stdout.isatty() else 160), []
    for schedule in SCHEDULES:
        for direction in DIRECTIONS:
            found.append(measure(layer, schedule, direction, options.target, options.timeout))
            console.print(f"{schedule} {direction}: {found[-1].reason or 'counted'}", highlight=False, markup=False)
    console.print(as_table(found))
    for line in verdicts(found):
        console.print(line, highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(item) for item in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
