"""Tuned schedules: time the forms worth trying on this machine, on random operands, and remember the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .attention import Attention
from .compiler.analysis.facts import Facts, facts_of
from .compiler.planning import hardware
from .compiler.planning.forms import Form
from .compiler.planning.kernels import Algorithm
from .compiler.planning.measures import BESIDE
from .compiler.planning.records import Shape
from .compiler.planning.schedule import Schedule
from .compiler.planning.signature import Direction, Dtypes, Signature, Widths, class_of, is_short_call
from .compiler.planning.tuner import Clock, Tuned, search
from .ir.errors import WeftError
from .runtime import driver, tuned
from .runtime.variant import forget

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WANTED: dict[Direction, frozenset[str]] = {"forward": frozenset(), "backward": frozenset({"query", "key", "value"})}
_LEAST_SECONDS = 2e-3  # of one run on the clock: shorter calls are repeated, so that the clock's own noise is small


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
    found = [_direction(attention, shape, values, d, target, algorithm, progress) for d in ("forward", "backward")]
    forget()
    forward, backward = found
    return Tuned(
        forward.schedule.joined(backward.schedule), {**forward.seconds, **backward.seconds},
        forward.tried + backward.tried, {**forward.failed, **backward.failed},
        {**forward.outcomes, **backward.outcomes},
    )  # fmt: skip


def _direction(
    attention: Attention, shape: Shape, values: Mapping[str, Any], direction: Direction, target: str | None,
    algorithm: Algorithm, progress: bool,
) -> Tuned:  # fmt: skip
    chosen, machine, facts = resolved_for(attention, shape, direction, None, target, algorithm)
    choices = choices_of(chosen, machine, facts)
    key = tuned.key_of(attention, chosen.code.signature, machine, chosen.target.name, algorithm)
    clock = _clock(attention, shape, values, direction, target)
    return tuned.remember(
        key,
        class_of(shape.q_len, shape.kv_len),
        lambda: search(chosen.code.schedule, choices, clock, progress=progress),
    )


def resolved_for(
    attention: Attention, shape: Shape, direction: Direction, device: str | None = None, target: str | None = None,
    algorithm: Algorithm = "flash",
) -> tuple[driver.Resolved, hardware.Hardware, Facts]:  # fmt: skip
    """What calls like `shape` get on a machine, this one where no device is named."""
    machine = hardware.this_machine() if device is None else hardware.by_name(device)
    widths, dtypes = Widths(shape.head_dim, shape.value_dim), Dtypes.all(shape.dtype)
    short = direction == "forward" and is_short_call(shape.q_len, shape.kv_len, attention.is_masked)
    lengths = class_of(shape.q_len, shape.kv_len)
    signature = Signature(
        direction, machine.arch, dtypes, widths, wanted=_WANTED[direction], short_call=short, lengths=lengths
    )  # fmt: skip
    return driver.resolve(attention, signature, machine, target, algorithm), machine, facts_of(attention)


def choices_of(chosen: driver.Resolved, machine: hardware.Hardware, facts: Facts) -> dict[str, list[Form]]:
    """The forms to time of each kernel that has several: not of those that are cut as another one is."""
    choices: dict[str, list[Form]] = {}
    for code in chosen.code.kernels:
        if code.name in BESIDE or code.kernel.follows:
            continue
        forms = list(chosen.target.forms(code.kernel, chosen.code.signature, machine, facts))
        if len(forms) > 1:
            choices[code.name] = forms
    return choices


def _clock(
    attention: Attention, shape: Shape, values: Mapping[str, Any], direction: Direction, target: str | None
) -> Clock:
    """Seconds of the forward pass, or of forward and backward, under a schedule: one run, of as many as it takes."""
    query, key, value = _operands(attention, shape)
    grad = torch.randn_like(query[..., :1]).expand(*query.shape[:3], shape.value_dim).contiguous()

    def forward(schedule: Schedule) -> Tensor:
        out = attention(query, key, value, target=target, schedule=schedule, **values)
        assert isinstance(out, Tensor)
        return out

    repeats: dict[str, int] = {}

    def seconds(schedule: Schedule, kernel: str) -> float:
        run = (lambda: forward(schedule)) if direction == "forward" else (lambda: forward(schedule).backward(grad))
        if str(schedule) not in repeats:
            run()  # generates and compiles
            repeats[str(schedule)] = max(1, round(_LEAST_SECONDS / max(1e-9, _timed(run, 1))))
        return _timed(run, repeats[str(schedule)])

    return seconds


def _timed(run: Callable[[], object], times: int) -> float:
    """Seconds of one of so many runs."""
    _wait()
    start = time.perf_counter()
    for _ in range(times):
        run()
    _wait()
    return (time.perf_counter() - start) / times


def _operands(attention: Attention, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (
        (shape.batch, shape.heads, shape.q_len, shape.head_dim),
        (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim),
        (shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim),
    )
    make = lambda s: torch.randn(s, dtype=_DTYPES[shape.dtype], device=device, requires_grad=True)  # noqa: E731
    try:
        query, key, value = map(make, sizes)
    except (RuntimeError, MemoryError) as error:  # torch has no error of its own for this on a CPU
        size = shape.element_bytes * sum(a * b * c * d for a, b, c, d in sizes) / 2**30
        raise WeftError(
            f"{attention.name}: tune: query, key and value of these sizes take {size:,.0f} GiB and cannot be made "
            f"on the {device}; give smaller ones"
        ) from error
    return query, key, value


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
