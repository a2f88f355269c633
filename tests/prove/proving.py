"""All that is asked of a mask, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.compiler.analysis.tiles import bounds
from weft.compiler.analysis.tiles.programs import tile_program, verify_tiles
from weft.compiler.analysis.tiles.results import TileProgram
from weft.compiler.analysis.tiles.survey import Survey, survey
from weft.ir.expr import Expr
from weft.ir.walk import loads, symbols

from . import gallery
from .counterexample import TEXTUAL, Subject, script
from .questions import Question, lookup_question, survey_questions, tile_questions
from .solving import SECONDS, Answer, Status, answer
from .terms import has_floats
from .widths import survey_width_question, width_questions

Asked = tuple[Question, Subject]


@dataclass(frozen=True)
class Tiles:
    """What analysis made of a mask, and what questions are about."""

    mask: Expr
    kv: TileProgram
    q: TileProgram
    survey: Survey | None  # where the mask reads a tensor by position

    @staticmethod
    def of(mask: Expr) -> Tiles:
        kv, q = (verify_tiles(tile_program(solve(mask))) for solve in (bounds.kv_bounds, bounds.q_bounds))
        reads = (symbols(index) for load in loads(mask) for index in load.index)
        positional = any(names & {"q_pos", "kv_pos"} for names in reads)
        return Tiles(mask, kv, q, survey(mask) if positional else None)

    def questions(self, widths: bool = True) -> Iterator[Asked]:
        for program in (self.kv, self.q):
            subject = Subject(self.mask, program)
            own = [*tile_questions(self.mask, program), lookup_question(program)]
            own += width_questions(self.mask, program) if widths else []
            yield from ((question, subject) for question in own)
        if self.survey is not None:
            subject = Subject(self.mask, survey=self.survey)
            own = [*survey_questions(self.mask, self.survey), survey_width_question(self.survey)]
            yield from ((question, subject) for question in own)


@dataclass(frozen=True)
class Proof:
    """The answers for one mask."""

    name: str
    mask: Expr
    answers: tuple[Answer, ...]
    seconds: float
    floats: bool  # what computes with floats was taken for anything
    scripts: tuple[str, ...] = field(default=())  # of counterexamples

    @property
    def status(self) -> Status:
        found = {a.status for a in self.answers}
        return "refuted" if "refuted" in found else "unknown" if "unknown" in found else "proven"

    @property
    def text(self) -> str:
        said = [f"{a.status} {a.question}: {a.how} ({a.seconds:.1f} s)" for a in self.answers if a.status != "proven"]
        head = f"{self.status:8} {self.seconds:6.1f} s  {self.name}"
        return "\n".join([head, *(f"    {line}" for line in said), *self.scripts])


def prove_named(name: str, seconds: float) -> Proof:
    """The proof of a mask of the gallery. Not in __main__, which a spawned process does not read."""
    return prove(name, gallery.named(name), seconds)


def prove(name: str, mask: Expr, seconds: float = SECONDS, wanted: Callable[[Question], bool] = bool) -> Proof:
    """Ask everything that is `wanted`, each within so many seconds."""
    begun = time.monotonic()
    answers, scripts = [], []
    for question, subject in Tiles.of(mask).questions():
        if not wanted(question):
            continue
        given = answer(question, subject, seconds)
        answers.append(given)
        if given.counterexample is not None and question.kind not in TEXTUAL:
            scripts.append(script(mask, question.axis, question.kind, given.counterexample))
    spent = time.monotonic() - begun
    return Proof(name, mask, tuple(answers), spent, has_floats(mask), tuple(scripts))


def summary(proofs: list[Proof]) -> list[str]:
    """Masks and questions by their answer."""
    lines = []
    groups = Counter(p.status for p in proofs)
    questions = Counter((a.question.split(" ", 1)[-1], a.status) for p in proofs for a in p.answers)
    lines.append(f"{len(proofs)} masks: " + _counted(groups))
    for kind in sorted({k for k, _ in questions}):
        lines.append(f"  {kind:20} " + _counted(Counter({s: n for (k, s), n in questions.items() if k == kind})))
    floats = sum(p.floats for p in proofs)
    seconds, slowest = sum(p.seconds for p in proofs), max((p.seconds for p in proofs), default=0.0)
    lines.append(f"  {floats} of them compute with floats, which are taken for anything")
    lines.append(f"  {seconds:.0f} s of one core, {slowest:.1f} s the slowest mask")
    return lines


def _counted(counts: Counter[Status]) -> str:
    return ", ".join(f"{counts[s]} {s}" for s in ("proven", "unknown", "refuted"))
