"""Draws variants and calls of them, judges each, and makes failures small."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random

from torch import Tensor

from .calls import Built, Call, Variant, build
from .declare import draw_variant
from .dense import Undefined
from .invoke import draw_call
from .judge import Verdict, actual, declared, judge, start
from .kinds import kinds
from .script import script
from .shrink import shrunk

CALLS = {"cpu": 8, "reference": 8, "interpret": 2, "triton": 4, "hopper": 4}  # of one variant
ALIKE = 4  # one after the other that the same kernels serve: generating them is most of the time of a first call
TRIES = 8  # at a call that is defined
ENDS = "ends-"  # begins the seeds of variants whose scores have no value behind an end
FP8 = "fp8-"  # begins those of variants whose calls have FP8 operands
THREADED = 0.06  # share of the variants that are called from several threads at once, the first time and again
THREADS = 3


@dataclass(frozen=True)
class Failure:
    seed: str  # of the variant, to draw it again
    target: str
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
    seed: str = ""  # of the variant
    kinds: tuple[str, ...] = ()  # what the call has in it


@dataclass(frozen=True)
class Plan:
    """What to do with failures."""

    shrink: bool = True
    skip: str = ""  # failures to pass over: an expression that their script matches
    kind: str = ""  # of what is drawn alone: ENDS or FP8


def fuzz(seed: int, cases: int, targets: Sequence[str], plan: Plan, only: str = "") -> Iterator[Event]:
    """`cases` calls, or those of one variant; the same for the same seed."""
    made = number = 0
    while made < cases:
        name = only or f"{plan.kind}{seed}.{number}"
        for event in variant_calls(name, targets[number % len(targets)], plan):
            yield replace(event, seed=name)
            made += event.kind != "unused"
        number += 1
        if only:
            return


def variant_calls(name: str, target: str, plan: Plan) -> Iterator[Event]:
    """The calls of the variant that a seed stands for; none after the first that fails, as they would fail alike."""
    random = Random(f"{name} {target}")
    fp8 = name.startswith(FP8)
    variant = draw_variant(random, target, name.startswith(ENDS))
    try:
        declared(variant)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Event(target, "declaration raised", message=message)
        return
    calls = list(_defined_calls(random, variant, target, fp8))
    threaded = target != "interpret" and random.random() < THREADED
    given = _from_threads(calls) if threaded else [None] * len(calls)
    for built, result in zip(calls, given):
        try:
            verdict = judge(built, result)
        except Undefined:
            yield Event(target, "unused")
            continue
        if verdict.fails:
            yield _failed(name, built, verdict, plan, threaded)
            return
        found = (*kinds(variant, built.call), *(["from several threads"] if threaded else []))
        yield Event(target, verdict.kind, verdict.ratio, message=verdict.message, kinds=found)
    if not calls:
        yield Event(target, "unused")


def _defined_calls(random: Random, variant: Variant, target: str, fp8: bool) -> Iterator[Built]:
    like: Call | None = None
    for number in range(CALLS[target]):
        built = _defined_call(random, variant, target, like if number % ALIKE else None, fp8)
        if built is None:
            return
        like = built.call
        yield built


def _defined_call(
    random: Random, variant: Variant, target: str, like: Call | None = None, fp8: bool = False
) -> Built | None:  # fmt: skip
    """A call whose tensors can be made."""
    for _ in range(TRIES):
        try:
            return build(variant, draw_call(random, variant, target, like, fp8), device_of(target))
        except Undefined:
            continue
    return None


def device_of(target: str) -> str:
    return "cuda" if target in ("triton", "hopper") else "cpu"


# -- several threads -------------------------------------------------------------------------------------------------
def _from_threads(calls: Sequence[Built]) -> list[dict[str, Tensor] | Exception]:
    """Every call made twice, several at a time; the results of the second."""

    def make(built: Built) -> dict[str, Tensor] | Exception:
        try:
            return actual(built, *start(built))
        except Exception as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(make, [*calls, *calls]))[len(calls) :]


# -- failures ----------------------------------------------------------------------------------------------------------
def _failed(name: str, built: Built, verdict: Verdict, plan: Plan, threaded: bool) -> Event:
    target = built.call.target
    if plan.skip and re.search(plan.skip, script(built, verdict), re.DOTALL):
        return Event(target, "skipped", message=verdict.message)
    if verdict.ends_the_process:
        return Event(target, verdict.kind, failure=Failure(name, target, verdict, script(built, verdict)))
    if threaded and not judge(built).fails:
        verdict = replace(verdict, message=f"from {THREADS} threads only: {verdict.message}")
    elif plan.shrink:
        built, verdict = shrunk(built, verdict)
    return Event(target, verdict.kind, verdict.ratio, Failure(name, target, verdict, script(built, verdict)))


__all__ = ["ENDS", "FP8", "Event", "Failure", "Plan", "fuzz", "variant_calls"]
