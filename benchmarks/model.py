"""Predicted times beside measured ones: every stored row of an H200 that names a kernel of Weft.

    python benchmarks/model.py              each row, then median and worst error
    python benchmarks/model.py --cpu        calls of target cpu on this machine, timed now, on one thread and on two
    python benchmarks/model.py --fit        constants of the model, found anew for codegen/targets/<family>/paces.py

No GPU is needed: plans are made for an H200, on which the rows were measured. Calibrate a CPU before.
The error of a row is the larger of measured / predicted and predicted / measured, less 1.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from statistics import median
from typing import Any

import torch
from bench_results import FITTED, Result, stored
from bench_rows import ROWS, Row
from bench_variants import weft_variant
from torch import Tensor

import weft
from weft.codegen.targets.triton.paces import PACKED_PROGRAM
from weft.codegen.targets.triton.target import KERNELS
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import Traits
from weft.compiler.planning.cost import instructions_per_second, pair_work
from weft.compiler.planning.form import Form
from weft.compiler.planning.kernel import Kernel
from weft.compiler.planning.machines.hardware import Hardware, usable_cores
from weft.compiler.planning.paces import Pace, instructions_of
from weft.compiler.planning.plan import Plan
from weft.compiler.planning.quantities import Sizes, score_count, uneven_count
from weft.compiler.planning.segments import Segments

FLASH = KERNELS["flash"]

DEVICE = "h200"
BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True)
class Measured:
    """A time that was measured: of a call as the benchmark has it, or of kernels alone."""

    name: str
    row: Row
    direction: str
    target: str
    seconds: float
    deterministic: bool | None = None

    def __str__(self) -> str:
        return f"{self.target:6} {self.direction:8} {self.name}" + " repeats" * bool(self.deterministic)


TARGETS = {"weft_hopper": ("hopper", None), "weft_triton": ("triton", None), "weft_repeats": ("hopper", True)}


def measured(results: Sequence[Result]) -> list[Measured]:
    """All times, from the rates that they are stored as; of rows of several runs the newest counts."""
    found: dict[tuple[str, str, str, bool | None], Measured] = {}

    def add(name: str, row: Row, target: str, rates: Sequence[float | None], repeats: bool | None = None) -> None:
        for direction, rate in zip(("forward", "backward"), rates):
            if rate is not None and not (repeats and direction == "forward"):  # a forward repeats in any case
                seconds = row.flops(direction) / (rate * 1e12)
                each = Measured(name, row, direction, target, seconds, repeats)
                found.setdefault((row.name, direction, target, repeats), each)

    for result in (r for r in results if r.short_card == DEVICE and r.date <= FITTED):
        for name, cells in result.rates.items():
            for column in TARGETS.keys() & cells.keys() if name in BY_NAME else ():
                target, repeats = TARGETS[column]
                add(name, BY_NAME[name], target, cells[column], repeats)
        for title, target, rates in _heads(result):
            dims = [int(n) for n in re.findall(r"\d+", title)]
            heads = 2048 // dims[0] if dims[0] in (64, 128, 256) else 16
            row = Row("causal", 4, heads, 4096, dims[0], own_value_dim=dims[1] if len(dims) > 1 else 0)
            add(f"{title} S4096 causal", row, target, rates)
    return list(found.values())


def _heads(result: Result) -> Iterator[tuple[str, str, list[float]]]:
    """Kernels alone by head dimensions, causal, S4096, B4."""
    if table := result.tables.get("heads"):
        for target, *cells in table.rows:
            for title, cell in zip(table.columns[1:], cells):
                yield title, target.removeprefix("Weft "), [float(rate) for rate in cell.split("/")]


def plan_of(each: Measured) -> Plan:
    """The plan of a row on the target that was timed."""
    row = each.row
    declared, operands = weft_variant(row, "cpu")
    options: dict[str, Any] = dict(operands)
    options.pop("seed", None)
    if row.variant == "latent":
        options["form"] = "expanded"
    batch, length = row.batch, row.length
    sizes = weft.shape(
        batch=batch,
        heads=row.heads,
        kv_heads=row.kv_heads,
        q_len=length,
        head_dim=row.dim,
        value_dim=row.value_dim,
        dtype="bf16",
    )
    return declared.plan(sizes, device=DEVICE, target=each.target, deterministic=each.deterministic, **options)


def error(one: float, other: float) -> float:
    return max(one / other, other / one) - 1


# -- target cpu --------------------------------------------------------------------------------------------------------
ON_A_CPU = {
    "full": weft.Attention(name="model_full"),
    "causal": weft.Attention(mask=weft.masks.causal, name="model_causal"),
    "softcap": weft.Attention(weft.scores.softcap(20.0)(weft.score), weft.masks.causal, name="model_softcap"),
    "exponentials": weft.Attention(
        weft.score + weft.exp(-weft.exp(-weft.score)) + weft.log(1.0 + weft.exp(weft.score)),
        weft.masks.causal,
        name="model_exponentials",
    ),
    "sigmoid": weft.Attention(mask=weft.masks.causal, normalizer="sigmoid", name="model_sigmoid"),
    "alibi": weft.Attention(
        weft.score - (weft.q_pos - weft.kv_pos) * weft.exp2(-(weft.head + 1.0)), weft.masks.causal, name="model_alibi"
    ),
    "window": weft.Attention(mask=weft.masks.causal & (weft.q_pos - weft.kv_pos < 256), name="model_window"),
}
ROUNDS = 6


def on_a_cpu(only: str, length: int) -> Iterator[tuple[str, float, float]]:
    """(row, measured, predicted), seconds of forward and backward: the least of rounds."""
    before = torch.get_num_threads()
    for threads, dtype, (name, variant) in product((1, 2), (torch.float32, torch.bfloat16), ON_A_CPU.items()):
        row = f"{threads} thread{'s' * (threads > 1)} {str(dtype).removeprefix('torch.'):8} {name:12}"
        if only not in row or threads > usable_cores():
            continue
        torch.set_num_threads(threads)
        query, key, value = (torch.randn(1, 4, length, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        made, grad = variant.plan(query, key, value), torch.randn(1, 4, length, 64, dtype=dtype)
        runs = [_timed_on_a_cpu(variant, query, key, value, grad) for _ in range(ROUNDS + 1)][1:]
        for k, direction in enumerate(("forward", "backward")):
            yield f"{row} {direction:8}", min(run[k] for run in runs), made.seconds(direction)
    torch.set_num_threads(before)


def _timed_on_a_cpu(
    variant: weft.Attention, query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> tuple[float, float]:
    begun = time.perf_counter()
    out = variant(query, key, value)
    between = time.perf_counter()
    out.backward(grad)
    return between - begun, time.perf_counter() - between


# -- the fit -----------------------------------------------------------------------------------------------------------
PARTS = tuple(f.name for f in fields(Pace) if f.name not in ("start", "step", "fitted"))
LEAST = {"matrix": 0.82}  # products are not faster than the peak
FIXED = {"matrix": 1.2, "other": 1.0}  # of a kernel that one row alone has
RIDGE = 1e-4  # parts that rise and fall together share what they explain
LEAST_SHOWN = 2e-3
KERNELS_ALONE = 0.7  # weight of kernels that were timed alone, beside calls of the benchmark


@dataclass(frozen=True)
class Example:
    """A measured time, and how much of each part its kernels have: seconds at the machine's rates, and of SMs."""

    name: str
    seconds: float  # measured, less what is not fitted
    parts: dict[str, dict[str, float]]  # by family
    weight: float = 1.0


def parts_of(
    kernel: Kernel, form: Form, x: Sizes, segments: Segments, traits: Traits, hardware: Hardware, dtype: str
) -> tuple[str, dict[str, float]]:  # fmt: skip
    """The family of a kernel, and what a second (or microsecond) of each constant of its pace stands for."""
    work = pair_work(kernel, form, x, segments, traits, hardware)
    one, pairs, edge = instructions_of(kernel, traits), score_count(x), x.m * x.bq * x.bkv
    looked_up = uneven_count(x) if traits.level_steps and kernel.has_level_loop else pairs
    rate, sm = instructions_per_second(hardware), 1e-6 / hardware.sms
    found = {
        "matrix": kernel.flops(x) / hardware.matrix_flops(form.products(dtype)),
        "exp": work.exps(x) / hardware.exp_per_second,
        "other": one.other * pairs / rate,
        "pair_reads": (one.pair_reads * pairs + one.mask_reads * edge) / rate,
        "gathers": one.gathers * looked_up / rate,
        "row_reads": one.row_reads * pairs / rate,
        "levels": one.levels * pairs / rate,
        "mask": one.mask * edge / rate,
        "tile": x.n * sm,
        "piece": (len(segments.qk) + len(segments.v) - 2) * x.n * sm,
        "program": kernel.programs(x) * sm,
    }
    return work.family, {name: value * work.tail for name, value in found.items()}


def example_of(each: Measured, plan: Plan, traits: Traits) -> Example:
    rest, parts = each.seconds, {}
    if plan.sums is not None and each.direction == "backward":
        rest -= plan.sums.seconds
    for k in plan.kernels:
        if k.direction != each.direction:
            continue
        if k.code.kernel.flops(k.sizes):
            family, found = parts_of(
                k.code.kernel, k.form, k.sizes, plan.code(k.direction).segments, traits, plan.hardware, "bf16"
            )
            beside = PACKED_PROGRAM * found["program"] if each.row.lens and each.target == "triton" else 0.0
            parts[family], rest = found, rest - k.times.latency - beside
        else:
            rest -= k.seconds
    return Example(str(each), rest, parts)


def alone(results: Sequence[Result]) -> Iterator[Example]:
    """Kernels of target triton by themselves, in forms of all kinds: the table of tilings."""
    for result in results:
        for dim, mask, *cells in result.tables["tilings"].rows if "tilings" in result.tables else ():
            row = Row(mask, 2, 2048 // int(dim), 8192, int(dim))
            declared, _ = weft_variant(row, "cpu")
            sizes = weft.shape(batch=2, heads=row.heads, q_len=8192, head_dim=row.dim, dtype="bf16")
            for kernel, share, cell in zip((FLASH[0], FLASH[2], FLASH[3]), (1, 1.5, 2), cells):
                for rate, form in re.findall(r"(\d+) (\d+x\d+w\d+s\d+)", cell):
                    plan = declared.plan(
                        sizes, device=DEVICE, target="triton", schedule=f"flash/{kernel.name}=triton:{form}"
                    )
                    k = next(k for k in plan.kernels if k.name == kernel.name)
                    found = parts_of(
                        kernel, k.form, k.sizes, plan.segments, facts_of(declared).traits, plan.hardware, "bf16"
                    )
                    seconds = share * row.flops("forward") / (float(rate) * 1e12)
                    yield Example(
                        f"alone {kernel.name} {form} D{dim} {mask}",
                        seconds - k.times.latency,
                        dict([found]),
                        KERNELS_ALONE,
                    )


def fitted(examples: Sequence[Example]) -> dict[str, Pace]:
    """Paces with the least squares of relative errors, none below LEAST; a row has kernels of several families.

    What one row alone has cannot be told apart: all of it is taken to be reads.
    """
    rows_of = Counter(family for e in examples for family in e.parts)
    names = [(f, p) for f in sorted(rows_of) for p in PARTS if rows_of[f] > 1 or p in FIXED or p == "gathers"]
    rows = [[e.parts.get(f, {}).get(p, 0.0) * e.weight / e.seconds for f, p in names] for e in examples]
    a = torch.tensor(rows, dtype=torch.float64)
    least = torch.tensor(
        [FIXED.get(p, 0.0) if rows_of[f] == 1 else LEAST.get(p, 0.0) for f, p in names], dtype=torch.float64
    )
    free = [rows_of[f] > 1 or p not in FIXED for f, p in names]
    b = torch.tensor([e.weight for e in examples], dtype=torch.float64)
    gram, right, x = a.T @ a, a.T @ b, least.clone()
    size = gram.diagonal() * (1 + RIDGE)
    for _ in range(3000):  # coordinate by coordinate: the problem is small
        for i in range(len(x)):
            if free[i] and size[i] > 0:
                step = (right[i] - gram[i] @ x - RIDGE * gram[i, i] * x[i]) / size[i]
                x[i] = torch.maximum(least[i], x[i] + step)
    found: dict[str, dict[str, float]] = {}
    for (family, part), value in zip(names, x.tolist()):
        digits = float(f"{value:.3g}")
        found.setdefault(family, {"exp": 0.0})
        if digits > LEAST_SHOWN:
            found[family][part] = digits
    return {family: Pace(**parts) for family, parts in found.items()}


def text_of(pace: Pace) -> str:
    default = Pace()
    return ", ".join(
        f"{f.name}={getattr(pace, f.name):g}" for f in fields(Pace) if getattr(pace, f.name) != getattr(default, f.name)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--fit", action="store_true", help="print PACES of codegen/targets/<family>/paces.py, fitted on all rows"
    )
    parser.add_argument("--cpu", action="store_true", help="time calls of target cpu here")
    parser.add_argument("--length", type=int, default=2048, help="tokens of these calls")
    options = parser.parse_args()
    if options.cpu:
        found = []
        for row, seconds, predicted in on_a_cpu(options.only, options.length):
            found.append(error(seconds, predicted))
            print(
                f"{row} {seconds * 1e3:8.2f} ms, predicted {predicted * 1e3:8.2f}: {predicted / seconds:5.2f}",
                flush=True,
            )
        print(f"{len(found)} rows, median error {median(found):.1%}, worst {max(found):.1%}")
        return
    results, errors, examples = stored(), [], []
    for each in measured(results):
        if options.only not in str(each):
            continue
        plan = plan_of(each)
        predicted = plan.seconds(each.direction)
        errors.append(error(each.seconds, predicted))
        examples.append(example_of(each, plan, facts_of(weft_variant(each.row, "cpu")[0]).traits))
        times = f"{each.seconds * 1e6:9.1f} us, predicted {predicted * 1e6:9.1f}: {predicted / each.seconds:5.2f}"
        print(f"{each!s:72} {times}", flush=True)
    print(f"{len(errors)} rows, median error {median(errors):.1%}, worst {max(errors):.1%}")
    if options.fit:
        for family, pace in fitted([*examples, *alone(results)]).items():
            print(f'    "{family}": Pace({text_of(pace)}),')


if __name__ == "__main__":
    main()
