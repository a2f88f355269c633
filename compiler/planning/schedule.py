"""The schedule: an algorithm, and for each of its kernels a target and a form. Its text reads back.

A user names an algorithm, or writes a schedule's text, whole or in part: kernels that it leaves out are chosen for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, get_args

from ...ir.errors import WeftError, shown
from .form import Form, parse_form
from .kernel import Algorithm

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
EXAMPLE = "flash/flash_forward=triton:128x64w4s3/flash_dquery=triton:128x64w8s3/flash_dkey_dvalue=triton:64x128w8s3"


class Choice(NamedTuple):
    """What one kernel got."""

    target: str
    form: Form

    def __str__(self) -> str:
        return f"{self.target}:{self.form}"


def _is_choice(kernel: object, choice: object) -> bool:
    return isinstance(kernel, str) and isinstance(choice, tuple) and len(choice) == 2 and isinstance(choice[0], str)


@dataclass(frozen=True, eq=False)
class Schedule:
    """An algorithm, and a target and a form for each kernel by name."""

    algorithm: Algorithm
    kernels: Mapping[str, Choice]  # in order of execution

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHMS:
            raise WeftError(f"Schedule: algorithm: expected {', '.join(ALGORITHMS)}, got {shown(self.algorithm)}")
        if not isinstance(self.kernels, Mapping) or not all(_is_choice(*item) for item in self.kernels.items()):
            expected = "a target and a form for each kernel, as a schedule that a plan shows has"
            raise WeftError(f"Schedule: kernels: expected {expected}, got {shown(self.kernels)}")
        choices = {name: Choice(*choice) for name, choice in self.kernels.items()}
        object.__setattr__(self, "kernels", MappingProxyType(choices))

    def __str__(self) -> str:
        return "/".join([self.algorithm, *(f"{name}={choice}" for name, choice in self.kernels.items())])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return Schedule, (self.algorithm, dict(self.kernels))

    def form(self, kernel: str) -> Form:
        return self.kernels[kernel].form

    def with_form(self, kernel: str, form: Form) -> Schedule:
        return Schedule(self.algorithm, {**self.kernels, kernel: Choice(self.kernels[kernel].target, form)})

    def of(self, kernels: Iterable[str]) -> Schedule:
        """The part that concerns these kernels, in their order."""
        return Schedule(self.algorithm, {name: self.kernels[name] for name in kernels if name in self.kernels})

    def joined(self, other: Schedule) -> Schedule:
        """Both: of a forward and of the backward behind it."""
        return Schedule(self.algorithm, {**self.kernels, **other.kernels})


def parse_schedule(text: str) -> Schedule:
    """Read back the text of a Schedule: parse_schedule(str(schedule)) == schedule.

    Raises WeftError for any other text.
    """
    algorithm, *parts = text.split("/")
    choices: dict[str, Choice] = {}
    for part in parts:
        kernel, _, choice = part.partition("=")
        target, _, form_text = choice.partition(":")
        form = parse_form(form_text)
        if not (kernel.isidentifier() and target.isidentifier() and form) or kernel in choices:
            raise _no_schedule(text)
        choices[kernel] = Choice(target, form)
    if algorithm not in ALGORITHMS:
        raise _no_schedule(text)
    return Schedule(algorithm, choices)


def _no_schedule(text: str) -> WeftError:
    return WeftError(
        f"schedule: expected {', '.join(ALGORITHMS)}, or text like '{EXAMPLE}' (kernels with target and form; a tiling "
        f"is <queries>x<keys>w<warps>s<stages>; kernels left out are chosen), got {text!r}"
    )


def asked(given: str | Schedule | None) -> Schedule:
    """What `schedule=` asks for, as a schedule of the kernels that it names: None and an algorithm's name name none."""
    if given is None:
        return Schedule("flash", {})
    if isinstance(given, str):
        return parse_schedule(given)
    if not isinstance(given, Schedule):
        raise WeftError(f"schedule: expected a name, a Schedule or its text, got {type(given).__name__}")
    return given
