"""Tuned schedules: time the forms worth trying on this machine, on random operands, and remember the fastest.

A value that a caller gives is used as it is; what no one gives is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention import Attention
from ..compiler.analysis.tiles.facts import Facts, facts_of
from ..compiler.planning.dtypes import dtype_named
from ..compiler.planning.form import Form
from ..compiler.planning.kernel import Algorithm
from ..compiler.planning.machines import hardware
from ..compiler.planning.records import Shape
from ..compiler.planning.schedule import ALGORITHMS, Schedule
from ..compiler.planning.signature import Direction, class_of
from ..compiler.planning.tuner import Clock, Tuned, search
from ..ir.attention import SEED
from ..ir.errors import Problem, WeftError, collected, shown
from ..plans import describe
from ..plans.request import Request, ranges_of, request_of
from ..plans.stored import Stored
from ..runtime import driver
from ..runtime.run.variant import forget
from ..runtime.store import tuned
from .drawn import drawn_operands

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

    values: of operands, by name; tensors that are not given are drawn, as of `with_drawn`. The backward gives all
    gradients that a call can want. What is found serves calls of about these lengths (`class_of`).
    Raises WeftError for latent attention, whose operands cannot be made up from a shape.
    """
    _check_asked(attention, shape, algorithm, progress)
    name = str(attention.name)
    if attention.latent is not None:
        raise WeftError(f"{name}: tune: expected a variant without latent attention")
    if isinstance(shape, Stored):
        raise WeftError(f"{name}: tune: expected a shape without FP8 operands, whose forms are not timed")
    values = with_drawn(attention, shape, values)
    missing = sorted({s.name for s in attention.canonical.scalars} - {*values, SEED.name})
    if missing:
        problems = [Problem(operand=n, what="missing", next_step=f"pass {n}=...") for n in missing]
        raise collected(f"{name}: tune", problems)
    found = [_direction(attention, shape, values, d, target, algorithm, progress) for d in ("forward", "backward")]
    forget()
    forward, backward = found
    return Tuned(
        forward.schedule.joined(backward.schedule), {**forward.seconds, **backward.seconds},
        forward.tried + backward.tried, {**forward.failed, **backward.failed},
        {**forward.outcomes, **backward.outcomes},
    )  # fmt: skip


def _check_asked(attention: object, shape: object, algorithm: object, progress: object) -> None:
    """Raise WeftError for what is no variant, no shape, no algorithm or no flag."""
    for name, value, expected, is_right in (
        ("attention", attention, "a weft.Attention", isinstance(attention, Attention)),
        ("shape", shape, "weft.shape(heads=..., q_len=..., head_dim=...)", isinstance(shape, Shape)),
        ("algorithm", algorithm, f"one of {', '.join(ALGORITHMS)}", isinstance(algorithm, str)),
        ("progress", progress, "True or False", isinstance(progress, bool)),
    ):
        if not is_right:
            raise WeftError(f"tune: {name}: expected {expected}, got {shown(value)}")


def with_drawn(attention: Attention, shape: Shape, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and random tensors in the place of tensor operands that were not given, as large as calls read them.

    Those of floats that a score reads want a gradient. Raises WeftError as `drawn_operands` does.
    """
    lacking = [t.name for t in attention.canonical.tensors if t.name not in values and t.name != SEED.name]
    numbers = {n: value for n, value in values.items() if not isinstance(value, Tensor)}
    drawn = drawn_operands(
        attention, lacking, ranges_of(shape, None), numbers, device=_device(), dtype=dtype_named(shape.dtype).torch
    )  # fmt: skip
    with_gradients = {load.tensor.name for load, _ in facts_of(attention).gradient_kinds}
    return {**values, **{n: tensor.requires_grad_(n in with_gradients) for n, tensor in drawn.items()}}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _direction(
    attention: Attention, shape: Shape, values: Mapping[str, Any], direction: Direction, target: str | None,
    algorithm: Algorithm, progress: bool,
) -> Tuned:  # fmt: skip
    r = request_of(attention, [shape], None, target, algorithm, None, values)
    chosen = _resolved(r, direction)
    clock = _clock(attention, shape, values, direction, target)  # first: it refuses what no memory holds
    choices = choices_of(chosen, r.machine, facts_of(attention), whole=describe.may_be_whole(attention, r, values))
    key = tuned.key_of(attention, chosen.code.signature, r.machine, chosen.target.name, algorithm)
    lengths = class_of(shape.q_len, shape.kv_len)
    return tuned.remember(key, lengths, lambda: search(chosen.code.schedule, choices, clock, progress=progress))


def resolved_for(
    attention: Attention, shape: Shape, direction: Direction, device: str | None = None, target: str | None = None,
    algorithm: Algorithm = "flash",
) -> tuple[driver.Resolved, hardware.Hardware, Facts]:  # fmt: skip
    """What calls like `shape` get on a machine, this one where no device is named."""
    r = request_of(attention, [shape], device, target, algorithm, None, {})
    return _resolved(r, direction), r.machine, facts_of(attention)


def _resolved(r: Request, direction: Direction) -> driver.Resolved:
    found = r.forward if direction == "forward" else r.backward
    assert found is not None
    return found


def choices_of(
    chosen: driver.Resolved, machine: hardware.Hardware, facts: Facts, whole: bool = True
) -> dict[str, list[Form]]:
    """The forms to time of each kernel that has several: not of those that are cut as another one is.

    whole: whether torch's own attention may compute the call, so that leaving it to torch is a form of its own.
    """
    choices: dict[str, list[Form]] = {}
    for code in chosen.code.kernels:
        if not code.kernel.has_choice:
            continue
        forms = list(chosen.target.forms(code.kernel, chosen.code.signature, machine, facts))
        forms = forms if whole else _as_the_first(forms)
        if len(forms) > 1:
            choices[code.name] = forms
    return choices


def _as_the_first(forms: list[Form]) -> list[Form]:
    """All in tiles, or none, as the first form is: to a call that torch's own attention never computes it is the same,
    but others of its class of lengths may be such that it does."""
    return list(dict.fromkeys(form.in_tiles_as(forms[0]) for form in forms))


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
    device = _device()
    sizes = (
        (shape.batch, shape.heads, shape.q_len, shape.head_dim),
        (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim),
        (shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim),
    )
    make = lambda s: torch.randn(s, dtype=dtype_named(shape.dtype).torch, device=device, requires_grad=True)  # noqa: E731
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
