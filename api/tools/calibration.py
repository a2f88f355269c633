"""`weft calibrate`: what this machine does in the steps that kernels are made of.

Every figure is the least time of rounds in which all that is measured take turns, so that a busy moment meets all of it
and falls out. It takes less than a minute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import torch

from ..codegen import products
from ..compiler.planning.dtypes import FP64, ON_GPUS
from ..compiler.planning.machines import hardware
from ..compiler.planning.machines.rates import WIDTH, Calibration, CpuRates, GpuRates, Library, ProductRate
from ..ir.errors import WeftError, shown
from ..runtime.build import TORCH_DTYPES

Step = Callable[[], object]
SECONDS = 20.0  # of rounds on a CPU with one thread
LEAST_ROUNDS = 3
LEAST_SECONDS = 1e-4  # of a step as it is timed: shorter ones are repeated
TURN_SECONDS, MOST_RUNS = 5e-3, 16  # of a step's turn in a round
TILES = tuple((queries, keys) for queries in (64, 128, 256, 512) for keys in (64, 256, 1024, 4096))
MOST_BYTES = 1 << 30  # of a tensor that no cache holds
DTYPES = {**TORCH_DTYPES, FP64.name: FP64.torch}


def calibrate(device: torch.device | str | None = None, seconds: float = SECONDS) -> Calibration:
    """Measure a device: this machine's GPU if it has one and none is named, else its CPU.

    seconds: for the rounds with one thread of a CPU. Raises WeftError for a device that is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise WeftError(f"device: expected cpu or cuda, got {shown(device)}") from error
    if device.type not in ("cpu", "cuda"):
        raise WeftError(f"device: expected cpu or cuda, got {device}")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise WeftError(f"device: torch finds no {device} here; `weft doctor` says what there is")
    load, begun = _load(), time.perf_counter()
    with torch.no_grad():
        rates, spread = _cpu_rates(seconds) if device.type == "cpu" else _gpu_rates(device)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    spent = round(time.perf_counter() - begun, 1)
    return Calibration(
        hardware.machine_of(device), made, version("torch"), spent, rates, round(spread, 3), load, os.cpu_count() or 0
    )  # fmt: skip


def _load() -> float:
    """Processes that want to run, the average of a minute; 0 where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


# -- a CPU -------------------------------------------------------------------------------------------------------------
_FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults


def _cpu_rates(seconds: float) -> tuple[CpuRates, float]:
    """What was measured, and its spread."""
    cores, caches = hardware.usable_cores(), hardware.cpu_caches()
    with _threads(1):
        libraries: tuple[Library, ...] = ("torch", "onednn") if products.one_dnn_linear() else ("torch",)
        tiles = [(library, *tile) for library in libraries for tile in TILES]
        steps: dict[object, Step] = {tile: _two_products(*tile) for tile in tiles}
        attended = {dtype: _attention(DTYPES[dtype]) for dtype in DTYPES} if products.own_attention() else {}
        backwards = {f"{d} back": _attention_backward(DTYPES[d]) for d in DTYPES} if products.own_backward() else {}
        small = torch.ones(8, **_FLOATS)
        sizes = _sizes(caches)
        passes = {level: _pass(size) for level, size in sizes.items()}
        powers = torch.empty(max(1024, caches[1] // 16), **_FLOATS).uniform_(-10.0, 0.0)
        results = torch.empty_like(powers)
        side = max(32, math.isqrt(caches[1] // 16))  # of a tile of scores that a quarter of L2 holds
        operations = _operations(side)
        for more in (attended, backwards, passes):
            steps.update(more.items())
        steps |= {("operation", kind): step for kind, step in operations.items()}
        steps |= {"call": lambda: small.mul_(1.0), "exp": lambda: torch.exp2(powers, out=results)}
        found, spread = least(steps, seconds)
    call = found["call"]

    def alone(seconds: float) -> float:
        """Without the call itself."""
        return max(seconds - call, seconds * 7 / 8)

    rates = tuple(
        ProductRate(library, queries, keys, _digits(4 * WIDTH * queries * keys / found[library, queries, keys]))
        for library, queries, keys in tiles
    )
    attention = tuple((dtype, _digits(_ATTENTION_FLOPS / found[dtype])) for dtype in attended)
    backward = tuple((name.split()[0], _digits(2.5 * _ATTENTION_FLOPS / found[name])) for name in backwards)
    bandwidths = [_digits(sizes[level] / max(found[level] - call, found[level] / 8)) for level in sizes]
    all_products, all_ram = 1.0, bandwidths[3]
    if cores > 1:
        with _threads(1):
            one = least({"one": _heads(1)}, 0.5).seconds["one"]
        with _threads(cores):
            found_all = least({"all": _heads(cores), "ram": passes["RAM"]}, 2.0).seconds
        all_products = _digits(max(1.0, min(cores, cores * one / found_all["all"])))
        all_ram = max(all_ram, _digits(sizes["RAM"] / found_all["ram"]))
    in_l1, in_l2, in_l3, ram = bandwidths
    made = CpuRates(
        caches=caches, products=rates, attention=attention, bandwidths=(in_l1, in_l2, in_l3, ram),
        exp_per_second=_digits(powers.numel() / alone(found["exp"])),
        call_seconds=_digits(call), all_products=all_products, all_ram=all_ram, attention_backward=backward,
        operations=tuple((kind, _digits(side * side / alone(found["operation", kind]))) for kind in operations),
    )  # fmt: skip
    return made, spread


def _two_products(library: Library, queries: int, keys: int) -> Step:
    """S = K Q^T and O^T += V^T P of one head, as generated modules have them."""
    product, add = products.product, products.add_product
    if library == "onednn":
        product, add = products.one_dnn_product, products.add_one_dnn_product
    query, key, value = (torch.randn(1, n, WIDTH, **_FLOATS) for n in (queries, keys, keys))
    total = torch.zeros(1, WIDTH, queries, **_FLOATS)

    def step() -> None:
        add(total, value.mT, product(key, query).mT)

    return step


_HEADS, _LENGTH = 2, 1024
_ATTENTION_FLOPS = 4 * _HEADS * _LENGTH * _LENGTH * WIDTH


def _attention(dtype: torch.dtype) -> Step:
    """torch's own, of all pairs."""
    attend = products.own_attention()
    assert attend is not None
    x = torch.randn(1, _HEADS, _LENGTH, WIDTH, **_FLOATS).to(dtype)
    return lambda: attend(x, x, x, 0.0, False, scale=0.125)


def _attention_backward(dtype: torch.dtype) -> Step:
    """Its backward, likewise."""
    attend = products.own_backward()
    assert attend is not None
    x, lse = torch.randn(1, _HEADS, _LENGTH, WIDTH, **_FLOATS), torch.full((1, _HEADS, _LENGTH), 8.0, **_FLOATS)
    x, lse = x.to(dtype), lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return lambda: attend(x, x, x, x, x, lse, 0.0, False, scale=0.125)


def _heads(count: int) -> Step:
    """The products of tiles of as many heads at once."""
    query, key = (torch.randn(count, n, WIDTH, **_FLOATS) for n in (256, 1024))
    return lambda: products.product(key, query)


def _sizes(caches: tuple[int, int, int]) -> dict[str, int]:
    """Bytes of tensors that lie in L1, L2, L3 and RAM."""
    l1, l2, l3 = caches
    memory = hardware.for_device("cpu").memory_bytes // 8
    ram = max(4 * l2, min(MOST_BYTES, memory, 2 * max(l3, l2)))
    return {"L1": l1 // 2, "L2": l2 // 2, "L3": min(max(2 * l2, l3 // 8), ram) if l3 else ram, "RAM": ram}


def _pass(size: int) -> Step:
    """Reads half of as many bytes, and writes the other half."""
    x, y = torch.ones(2, size // 8, **_FLOATS)
    return lambda: torch.mul(x, 1.0, out=y)


def _operations(side: int) -> dict[str, Step]:
    """What takes longer than that, of a square tile of scores, by kind; choices by a causal mask, and mixed ones."""
    scores = torch.empty(side, side, **_FLOATS).uniform_(-10.0, 10.0)
    positive, zero = scores.abs(), torch.zeros((), **_FLOATS)
    rows = torch.arange(side, device="cpu")
    seen, above = rows[:, None] <= rows, scores > 0.0
    return {
        "exp": lambda: torch.exp(scores), "log": lambda: torch.log(positive), "tanh": lambda: torch.tanh(scores),
        "sigmoid": lambda: torch.sigmoid(scores), "root": lambda: torch.sqrt(positive),
        "sine": lambda: torch.sin(scores), "compare": lambda: torch.le(scores, 0.0),
        "choice": lambda: torch.where(seen, scores, zero), "mixed choice": lambda: torch.where(above, scores, zero),
    }  # fmt: skip


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Times(NamedTuple):
    """What was measured of steps that took turns."""

    seconds: dict[object, float]  # the least of each
    spread: float  # how much longer steps took in the middle one of their rounds, the middle one of all steps


def least(steps: Mapping[object, Step], seconds: float, clock: Callable[[], float] = time.perf_counter) -> Times:
    """The least time of each step in rounds in which they take turns, for so many seconds."""
    best: dict[object, float] = {}
    times: dict[object, int] = {}
    rounds: dict[object, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        step()
        best[name] = _timed(step, 1, clock)
        times[name] = max(1, int(LEAST_SECONDS / best[name]))
    end, done = clock() + seconds, 0
    while clock() < end or done < LEAST_ROUNDS:
        for name, step in steps.items():
            runs = max(1, min(MOST_RUNS, int(TURN_SECONDS / (times[name] * best[name]))))
            rounds[name].append(min(_timed(step, times[name], clock) for _ in range(runs)))
            best[name] = min(best[name], rounds[name][-1])
        done += 1
    return Times(best, median(median(rounds[name]) / best[name] - 1 for name in steps))


def _timed(step: Step, times: int, clock: Callable[[], float]) -> float:
    begun = clock()
    for _ in range(times):
        step()
    return (clock() - begun) / times


def _digits(value: float) -> float:
    """Four digits: more say nothing."""
    return float(f"{value:.4g}")


# -- a GPU -------------------------------------------------------------------------------------------------------------
def _gpu_rates(device: torch.device) -> tuple[GpuRates, float]:
    """What was measured, and its spread."""
    from ..runtime.calibration_kernels import exponentials, read_again  # lazy: imports Triton, which a CPU does without

    record = hardware.for_device(device)
    _spreads.clear()
    with torch.cuda.device(device):
        rates = [(dtype, _digits(_product_flops(DTYPES[dtype], device))) for dtype in ON_GPUS]
        hbm = _copied_bytes_per_second(min(MOST_BYTES, record.memory_bytes // 8), device)
        l2_bytes = read_again(record.l2_bytes // 4, record.sms, device)
        exps = exponentials(record.sms, device)
        found = GpuRates(
            products=tuple(rates),
            hbm=_digits(hbm),
            l2=_digits(l2_bytes.amount / _gpu_seconds(l2_bytes.run)),
            exp_per_second=_digits(exps.amount / _gpu_seconds(exps.run)),
            launch_seconds=_digits(_launch_seconds(device)),
        )  # fmt: skip
    return found, median(_spreads)


_spreads: list[float] = []  # of what was measured last


def _copied_bytes_per_second(size: int, device: torch.device) -> float:
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x)
    return 2 * size / _gpu_seconds(lambda: y.copy_(x))


def _product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a large product; fp32 in full precision, as kernels of Weft have it."""
    n = 4096 if dtype == torch.float32 else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return 2 * n**3 / _gpu_seconds(lambda: a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _launch_seconds(device: torch.device, launches: int = 200) -> float:
    """From one kernel to the next: a replayed graph of kernels that do nothing, so that no host shows."""
    x = torch.zeros(32, device=device)
    x.add_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            x.add_(1.0)
    return _gpu_seconds(graph.replay) / launches


def _gpu_seconds(run: Step, rounds: int = 15) -> float:
    """The median of CUDA events."""
    for _ in range(3):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for first, last in pairs:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    found = sorted(first.elapsed_time(last) for first, last in pairs)
    _spreads.append(found[rounds // 2] / found[0] - 1)
    return found[rounds // 2] / 1e3
