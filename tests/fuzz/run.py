"""Draws variants and calls of them, judges each, and makes failures small."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from .calls import Built, Call, Variant, build
from .declare import draw_variant
from .dense import Undefined
from .invoke import draw_call
from .judge import Verdict, declared, judge
from .script import script
from .shrink import shrunk

CALLS = 6  # of one variant: generating is most of the time of a first call
TRIES = 8  # at a call that is defined


@dataclass(frozen=True)
class Failure:
    seed: str  # of the variant, to draw it again
    variant: Variant
    call: Call
    verdict: Verdict
    script: str


@dataclass(frozen=True)
class Event:
    """One call, or a variant that could not be used."""

    target: str
    kind: str
    ratio: float = 0.0
    failure: Failure | None = None
    message: str = ""


def fuzz(
    seed: int, cases: int, targets: Sequence[str], only: str = "", shrink: bool = True, skip: str = ""
) -> Iterator[Event]:
    """`cases` calls, or those of one variant; the same for the same seed. skip: failures to pass over, by their text."""
    made = number = 0
    while made < cases:
        name = only or f"{seed}.{number}"
        for event in variant_calls(name, targets[number % len(targets)], shrink, skip):
            yield event
            made += event.kind != "unused"
        number += 1
        if only:
            return


def variant_calls(name: str, target: str, shrink: bool = True, skip: str = "") -> Iterator[Event]:
    """The calls of the variant that a seed stands for."""
    random = Random(f"{name} {target}")
    variant = draw_variant(random)
    try:
        declared(variant)
    except Exception as error:
        verdict = Verdict("raised", f"{type(error).__name__}: {' '.join(str(error).split())}")
        yield Event(target, "declaration raised", message=verdict.message)
        return
    for _ in range(CALLS):
        built = defined_call(random, variant, target)
        if built is None:
            yield Event(target, "unused")
            return
        try:
            verdict = judge(built)
        except Undefined:
            yield Event(target, "unused")
            continue
        if not verdict.fails:
            yield Event(target, verdict.kind, verdict.ratio, message=verdict.message)
            continue
        if skip and re.search(skip, script(built, verdict), re.DOTALL):
            yield Event(target, "skipped", message=verdict.message)
        else:
            yield Event(target, verdict.kind, verdict.ratio, _failure(name, built, verdict, shrink))
        return  # the next calls of this variant would mostly fail alike


def defined_call(random: Random, variant: Variant, target: str) -> Built | None:
    """A call whose tensors can be made."""
    for _ in range(TRIES):
        try:
            return build(variant, draw_call(random, variant, target), device_of(target))
        except Undefined:
            continue
    return None


def device_of(target: str) -> str:
    return "cuda" if target in ("triton", "hopper") else "cpu"


def _failure(name: str, built: Built, verdict: Verdict, shrink: bool) -> Failure:
    if shrink:
        built, verdict = shrunk(built, verdict)
    return Failure(name, built.variant, built.call, verdict, script(built, verdict))
