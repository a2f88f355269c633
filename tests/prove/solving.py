"""Answers to questions: proven, unknown or refuted, within a time limit.

First with what is linear; where values seem to exist, they are tried in plain Python, and those that are real refute.
Else products are made exact, then tiles get sizes that are shipped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import z3

from .counterexample import Subject, Values
from .questions import Question

SECONDS = 30.0  # for each question
BLOCKS = (16, 32, 64, 128, 256, 512)  # tile sizes in the tables of forms, and of the cpu target
_SMALL = (16, 64, 1024, 2**20)  # sizes that counterexamples are looked for in, so that a person can follow them
Status = Literal["proven", "unknown", "refuted"]


@dataclass(frozen=True)
class Answer:
    question: str
    status: Status
    seconds: float
    how: str  # what settled it, or what did not
    counterexample: Values | None = None


@dataclass
class Clock:
    end: float

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())


def answer(question: Question, subject: Subject | None, seconds: float = SECONDS) -> Answer:
    """The answer; `subject` confirms values that seem to refute."""
    begun = time.monotonic()
    clock = Clock(begun + seconds)
    status, how, found = _settled(question, subject, clock)
    return Answer(question.title, status, time.monotonic() - begun, how, found)


def _settled(question: Question, subject: Subject | None, clock: Clock) -> tuple[Status, str, Values | None]:
    """Each alternative by itself; those that are proven impossible are known when the next is asked for."""
    hows: set[str] = set()
    unknown: list[str] = []
    known: list[z3.BoolRef] = []
    for label, wrong in question.alternatives:
        status, how, found = _Attempt(question, wrong, tuple(known), subject, clock).run()
        if status == "refuted":
            return status, _shortened([label]), found
        if status == "unknown":
            unknown.append(label)
        else:
            hows.add(how)
            known.append(z3.Not(wrong))
    if unknown:
        return "unknown", _shortened(unknown), None
    return "proven", ", ".join(sorted(hows)) or "nothing to ask", None


def _shortened(labels: list[str]) -> str:
    labels = list(dict.fromkeys(labels))
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return "; ".join(label[:70] for label in labels[:3]) + more


@dataclass(frozen=True)
class Step:
    """One way to ask."""

    name: str
    share: float  # of the time that is left
    accepted: bool = False  # with the ints of the mask in 32 bits
    exact: bool = False  # with products as they are
    facts: bool = True  # with what names stand for


EXACT = Step("exact", 1.0, accepted=True, exact=True)


@dataclass
class _Attempt:
    """One alternative of a question."""

    question: Question
    wrong: z3.BoolRef
    known: tuple[z3.BoolRef, ...]  # of the alternatives before
    subject: Subject | None
    clock: Clock

    def run(self) -> tuple[Status, str, Values | None]:
        steps: list[Step] = [
            Step("by itself", 0.05, facts=False),
            Step("linear", 0.4),
            Step("linear, ints of 32 bits", 0.5, accepted=True),
        ]
        if self.question.terms.products.seen:
            steps.append(Step("exact products", 0.7, accepted=True, exact=True))
        for step in steps:
            result, values = self.asked(step)
            if result == z3.unsat:
                return "proven", step.name, None
            if step.facts and result == z3.sat and (real := self.confirmed(values)):
                return "refuted", "", real
        return self.with_shipped_tiles()

    def with_shipped_tiles(self) -> tuple[Status, str, Values | None]:
        """Where the first row of a tile must be a multiple of its size."""
        start, block, tile = z3.Ints("start block tile")
        for n, size in enumerate(BLOCKS):
            sized = (block == size, start == size * tile)
            result, values = self.asked(replace(EXACT, share=1 / (len(BLOCKS) - n)), sized)
            if result == z3.sat and (real := self.confirmed(values, sized)):
                return "refuted", "", real
            if result != z3.unsat:
                return "unknown", "", None
        return "proven", "tile sizes that are shipped", None

    def asked(self, step: Step, more: tuple[z3.BoolRef, ...] = ()) -> tuple[z3.CheckSatResult, z3.ModelRef | None]:
        if self.clock.left < 0.05:
            return z3.unknown, None
        solver = z3.Solver()
        solver.set("timeout", max(1, int(1000 * self.clock.left * step.share)))
        q = self.question
        solver.add(self.wrong, *q.given, *more)
        if step.facts:
            solver.add(*self.known, *q.terms.everything(step.exact), *(q.accepted if step.accepted else ()))
        result = solver.check()
        return result, solver.model() if result == z3.sat else None

    # -- counterexamples ----------------------------------------------------------------------------------------------
    def confirmed(self, model: z3.ModelRef | None, more: tuple[z3.BoolRef, ...] = ()) -> Values | None:
        """Values of the model that refute in plain Python, smaller ones where there are."""
        if self.subject is None or model is None:
            return None
        values = Values.of(model, self.question.terms)
        found = values if self.subject.refuted_by(self.question, values) else None
        return self.smaller(more) or found

    def smaller(self, more: tuple[z3.BoolRef, ...]) -> Values | None:
        assert self.subject is not None
        start, block, tile = z3.Ints("start block tile")
        sized = more or (block == BLOCKS[0], start == BLOCKS[0] * tile)
        numbers = [z3.Int(n) for n in self.question.terms.numbers()]
        for size in _SMALL:
            small = [z3.And(n >= -size, n <= size) for n in numbers]
            result, model = self.asked(replace(EXACT, share=0.1), (*sized, *small))
            if result == z3.sat:
                assert model is not None
                values = Values.of(model, self.question.terms)
                if self.subject.refuted_by(self.question, values):
                    return values
        return None
