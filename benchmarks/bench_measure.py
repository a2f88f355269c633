"""Measuring one row: every contender in turn, in shuffled rounds, forward and backward apart."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from bench_peers import REFERENCES, Contender, Operands, contender, make_operands, start_row
from bench_rows import Row

Tensor = torch.Tensor
L2_FLUSH_BYTES = 256 << 20  # several times the L2 of the cards compared
HEAD_START_CYCLES = 2_000_000  # about 1 ms in which the host queues launches, so that its own time is not measured
BAD_ERROR = 0.02  # of bf16 results against a peer; a right one is near 0.004
# of FP8 ones: weights in e4m3 are off by up to 1 / 16, at random, and so is an output that is e4m3 itself
BAD_FP8_ERROR = 0.08


@dataclass
class Cell:
    """One column on one row. What is None was not measured, and `forward_reason` or `backward_reason` says why."""

    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_reason: str = ""
    backward_reason: str = ""
    out_error: float | None = None  # relative to the row's reference
    grad_error: float | None = None  # the worst of dq, dk, dv
    setup_ms: float | None = None  # Flex's mask build
    extra_mib: float | None = None  # peak of forward and backward beyond operands, output and gradients
    bad_error: float = BAD_ERROR  # one from here on is wrong
    by: str = ""  # the target that Weft chose

    def milliseconds(self, direction: str) -> float | None:
        return self.forward_ms if direction == "forward" else self.backward_ms

    def reason(self, direction: str) -> str:
        return self.forward_reason if direction == "forward" else self.backward_reason

    @property
    def is_wrong(self) -> bool:
        """True for NaN too."""
        return any(e is not None and not e < self.bad_error for e in (self.out_error, self.grad_error))


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 3
    launches: int = 5  # timed launches in a round
    deadline: float = float("inf")  # time.monotonic() after which nothing new is started


@dataclass
class RowResult:
    row: Row
    reference: str = ""  # the column that errors are relative to
    cells: dict[str, Cell] = field(default_factory=dict)

    def tflops(self, column: str, direction: str) -> float | None:
        """TFLOP/s of visible work, None where not measured."""
        milliseconds = self.cells[column].milliseconds(direction)
        return None if milliseconds is None else self.row.flops(direction) / milliseconds / 1e9


def measure_row(row: Row, columns: Iterable[str], effort: Effort, device: str = "cuda") -> RowResult:
    """Prepare, check and time all columns of one row."""
    start_row()
    operands = make_operands(row, device)
    result, at_work = RowResult(row), {}
    for column in columns:
        cell = result.cells[column] = Cell(bad_error=BAD_FP8_ERROR if row.fp8 else BAD_ERROR)
        if time.monotonic() > effort.deadline:
            cell.forward_reason = cell.backward_reason = "not run: the time budget was used up"
        elif made := _prepared(column, row, operands, cell):
            at_work[column] = made
    _compare(result, at_work)
    _time_rounds(at_work, result.cells, effort)
    return result


def reason_of(error: BaseException) -> str:
    """One line for the report."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def _prepared(column: str, row: Row, operands: Operands, cell: Cell) -> Contender | None:
    """The contender after its first forward and backward, which compile; failures are noted in the cell."""
    try:
        made = contender(column, row, operands)
        with made.context():
            out = made.forward()
            _synchronize(out.device)
    except Exception as error:
        cell.forward_reason = cell.backward_reason = reason_of(error)
        return None
    cell.by = made.by
    if not made.trains:
        cell.backward_reason = "no backward of FP8 operands"
        return made
    try:
        with made.context():
            made.backward(out)
            _synchronize(out.device)
        del out
        cell.extra_mib = _extra_mib(made)
        cell.setup_ms = _setup_ms(made)
    except Exception as error:
        cell.backward_reason = reason_of(error)
    return made


# --- correctness --------------------------------------------------------------------------------------------------


def _compare(result: RowResult, at_work: dict[str, Contender]) -> None:
    expected: tuple[Tensor, ...] | None = None
    for name in REFERENCES:
        expected = _results(name, result, at_work)
        if expected:
            result.reference = name
            break
    for name in at_work:
        found = _results(name, result, at_work) if expected and name != result.reference else None
        if expected and found:
            errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
            result.cells[name].out_error = errors[0]
            result.cells[name].grad_error = _worst(errors[1:]) if errors[1:] else None


def _results(name: str, result: RowResult, at_work: dict[str, Contender]) -> tuple[Tensor, ...] | None:
    """Output and gradients, or None where the column cannot give them; a new failure is noted in its cell."""
    if name not in at_work or at_work[name].own_numbers:
        return None
    if at_work[name].trains and result.cells[name].backward_reason:
        return None
    try:
        return at_work[name].results()
    except Exception as error:
        result.cells[name].backward_reason = reason_of(error)
        return None


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in the 2-norm over all elements; NaN if either has one."""
    difference = found.float() - expected.float()
    return (difference.norm() / expected.float().norm()).item()


def _worst(errors: list[float]) -> float:
    return next((e for e in errors if e != e), max(errors))  # NaN does not order


# --- time ---------------------------------------------------------------------------------------------------------


def _time_rounds(at_work: dict[str, Contender], cells: dict[str, Cell], effort: Effort) -> None:
    """Rounds in shuffled order, so that clocks and heat treat all columns alike; medians over all launches."""
    times: dict[tuple[str, str], list[float]] = {}
    shuffle = random.Random(0).shuffle
    for number in range(effort.rounds):
        names = list(at_work)
        shuffle(names)
        for name in names:
            if name == "math" and number > 0:
                continue  # slow, and only there for scale
            _time_both(at_work[name], cells[name], effort.launches, times, name)
    for (name, direction), found in times.items():
        setattr(cells[name], f"{direction}_ms", statistics.median(found))


def _time_both(
    made: Contender, cell: Cell, launches: int, times: dict[tuple[str, str], list[float]], name: str
) -> None:
    try:
        with made.context():
            times.setdefault((name, "forward"), []).extend(launch_times(made.forward, launches))
            if cell.backward_reason:
                return
            out = made.forward()
            times.setdefault((name, "backward"), []).extend(launch_times(lambda: made.backward(out), launches))
    except Exception as error:
        cell.forward_reason = cell.forward_reason or reason_of(error)
        cell.backward_reason = cell.backward_reason or reason_of(error)


def launch_times(launch: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` launches, each with a cold L2, after one that is not counted."""
    if not torch.cuda.is_available():
        return [_host_ms(launch) for _ in range(count)]
    flush = torch.empty(L2_FLUSH_BYTES, device="cuda", dtype=torch.int8)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    launch()
    torch.cuda._sleep(HEAD_START_CYCLES)
    for start, end in events:
        flush.zero_()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _host_ms(launch: Callable[[], object]) -> float:
    begin = time.perf_counter()
    launch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _setup_ms(made: Contender) -> float | None:
    """Median of three, after the build that came with the contender."""
    return statistics.median(_host_ms(made.setup) for _ in range(3)) if made.setup else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- memory and host time -----------------------------------------------------------------------------------------


def _extra_mib(made: Contender) -> float | None:
    """Peak of one forward and backward, beyond the operands, the output and the gradients."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with made.context():
        out = made.forward()
        gradients = made.backward(out)
    torch.cuda.synchronize()
    asked_for = sum(x.numel() * x.element_size() for x in (out, *gradients))
    return (torch.cuda.max_memory_allocated() - before - asked_for) / 2**20


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a call in each round. Other work on the host's cores only adds, so that the least counts too."""

    forward: tuple[float, ...]  # without gradients
    both: tuple[float, ...]  # forward and backward


def host_times(
    columns: Iterable[str], rounds: int = 15, calls: int = 60, device: str = "cuda"
) -> dict[str, HostTime | str]:
    """Host time of a call at a tiny shape for each column, or why there is none.

    The GPU needs a few microseconds a kernel there, so that the host is what a run of calls waits for. Columns take
    turns in shuffled rounds: what else the host is doing changes from second to second.
    """
    row = Row("causal", 1, 1, 16, 64)
    found: dict[str, HostTime | str] = {}
    ready: dict[str, tuple[Contender, list[float], list[float]]] = {}
    start_row()
    for column in columns:
        try:
            made = contender(column, row, make_operands(row, device))
            for _ in range(2):
                _host_round(made, 20)
            ready[column] = (made, [], [])
        except Exception as error:  # shown in the table
            found[column] = reason_of(error)
    order = random.Random(0)
    for _ in range(rounds):
        for column in order.sample(sorted(ready), len(ready)):
            made, forward, both = ready[column]
            for times, microseconds in zip((forward, both), _host_round(made, calls), strict=True):
                times.append(microseconds)
    return found | {column: HostTime(tuple(f), tuple(b)) for column, (_, f, b) in ready.items()}


def _host_round(made: Contender, calls: int) -> tuple[float, float]:
    def forwards() -> None:
        with torch.no_grad():
            for _ in range(calls):
                made.forward()

    def both() -> None:
        for _ in range(calls):
            torch.autograd.grad(made.forward(), (*made.leaves, *made.learned), made.grad_out)

    with made.context():
        return _host_ms(forwards) * 1e3 / calls, _host_ms(both) * 1e3 / calls


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches on the two simplest programs."""

    matmul_tflops: float  # bf16, 8192 x 8192 x 8192
    copy_gbs: float  # device to device, bytes read plus bytes written


def ceilings() -> Ceilings:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(launch_times(lambda: a @ b, 10))
    source = torch.empty(2 << 30, device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    copy = statistics.median(launch_times(lambda: target.copy_(source), 10))
    return Ceilings(2 * 8192**3 / matmul / 1e9, 2 * source.numel() / copy / 1e6)
