"""Measured schedules: time the tilings worth trying on this machine, on random operands, and remember the fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .attention import Attention
from .compiler.analysis.facts import facts_of
from .compiler.planning import hardware
from .compiler.planning import target as targets
from .compiler.planning.kernels import Slot
from .compiler.planning.records import Schedule, Shape, Specialisation, Tiling
from .compiler.planning.schedule import SLOTS, Algorithm, alternatives, choose
from .compiler.planning.segments import Segments
from .ir.errors import WeftError
from .runtime import driver, tuner
from .runtime.tuner import Tuned, TuneKey

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CPU_TILINGS = tuple(Tiling(q, kv, 1, 1) for q, kv in ((64, 64), (128, 128), (128, 256), (256, 256), (256, 512)))
_REPEATS = 7


def tune(
    attention: Attention,
    shape: Shape,
    values: Mapping[str, Any],
    *,
    target: str | None = None,
    algorithm: Algorithm = "flash",
    progress: bool = True,
) -> Tuned:
    """The fastest schedule of a variant for calls like `shape`, forward and backward timed on this machine.

    values: of the scalar operands. Raises WeftError for variants with tensor operands or latent attention, whose
    operands cannot be made up from a shape.
    """
    name = str(attention.name)
    if attention.tensors or attention.latent is not None:
        raise WeftError(f"{name}: tune: expected a variant without tensor operands and latent attention")
    missing = sorted({s.name for s in attention.scalars} - set(values))
    if missing:
        raise WeftError(f"{name}: tune: missing values of {', '.join(missing)}")
    machine = hardware.this_machine()
    spec = Specialisation("forward", machine.arch, shape.dtype, shape.head_dim, shape.value_dim)
    chosen, _ = targets.choose(spec, target, algorithm)
    parts = driver.segments_of(attention, spec)
    start = choose(shape, machine, chosen, algorithm, segments=parts, traits=facts_of(attention).traits)
    key = TuneKey(attention.digest, tuner.shape_class(shape), machine.name, chosen, algorithm)
    choices = {slot: _choices(slot, shape, machine, start, parts) for slot in SLOTS}
    return tuner.tune(key, start, choices, _clock(attention, shape, values), progress=progress)


def _choices(slot: Slot, shape: Shape, machine: hardware.Hardware, start: Schedule, parts: Segments) -> list[Tiling]:
    if start.target == "cpu":
        return list(_CPU_TILINGS)
    return alternatives(slot, shape, machine, start.target, start.algorithm, parts)


def _clock(attention: Attention, shape: Shape, values: Mapping[str, Any]) -> tuner.Measure:
    """Seconds of the forward pass, or of forward and backward, under a schedule: the median of several runs."""
    query, key, value = _operands(shape)
    grad = torch.randn_like(query[..., :1]).expand(*query.shape[:3], shape.value_dim).contiguous()

    def forward(schedule: Schedule) -> Tensor:
        out = attention(query, key, value, target=schedule.target, schedule=schedule, **values)
        assert isinstance(out, Tensor)
        return out

    def measure(schedule: Schedule, slot: Slot) -> float:
        if slot == "forward":
            return _median(lambda: forward(schedule))
        return _median(lambda: forward(schedule).backward(grad))

    return measure


def _operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (
        (shape.batch, shape.heads, shape.q_len, shape.head_dim),
        (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim),
        (shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim),
    )
    query, key, value = (torch.randn(s, dtype=_DTYPES[shape.dtype], device=device, requires_grad=True) for s in sizes)
    return query, key, value


def _median(run: Callable[[], object]) -> float:
    run()  # generates and compiles
    times = []
    for _ in range(_REPEATS):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
