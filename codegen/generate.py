"""A schedule and the facts about a variant -> source text of one module, through the templates of its target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.analysis.tiles.results import OperandGradient
from ..compiler.planning.kernel import Algorithm
from ..compiler.planning.plan import CodePlan
from ..compiler.planning.records import Stage
from ..compiler.planning.target import Target
from ..ir.errors import InternalError
from .compiling import compiled
from .context import Comments, spread
from .figures import figures
from .functions import FunctionPrinter
from .lines import fitted
from .loader import folders_of_templates
from .stages import StageComments, wrapped
from .subject import Subject, records_of

if TYPE_CHECKING:
    import jinja2

# Constants that split_kv_forward.py.jinja still prints for parts that decide without them; this goes with its lines.
_UNREAD = re.compile(r"^(?:LAZY_RESCALE|PAIR_MAXIMUM|LOADS_AT_POSITIONS|LINEAR|FAR) = gl\.constexpr.*\n", re.MULTILINE)


def generate(facts: Facts, code: CodePlan, target: Target) -> str:
    """Source of the module that computes one direction of a variant on one target: the plan, written out.

    Guarantee: the text parses, defines every kernel of the plan, and says each of its stages once, over the code that
    does it; equal inputs give equal bytes.
    """
    # Facts, CodePlan -> records
    subject = Subject(facts, code, target)
    gradients = subject.gradients if subject.is_backward else None
    functions = _functions(subject.printer, code.schedule.algorithm, gradients, subject.summed_elsewhere)
    records = (
        *records_of(subject, functions),
        figures(code, facts, target.language.is_gpu),
        *target.context(code, facts),
    )
    # -> source
    return written(target.template(code), records, {k.name: k.stages for k in code.own}, target.language.is_gpu)


def written(
    template: str, records: Sequence[object], kernels: Mapping[str, Sequence[Stage]], verified: bool = True
) -> str:
    """Source of the module of these kernels: a template, told of records. verified: the module must define them all."""
    stages = StageComments(kernels)
    text = _tidy(_template(template).render(spread(Comments(stages), *records)))
    stages.check()
    _verify(text, template, [*kernels] if verified else [])
    return text


@lru_cache(maxsize=256)
def _functions(
    printer: FunctionPrinter, algorithm: Algorithm, gradients: tuple[OperandGradient, ...] | None,
    elsewhere: frozenset[int],
) -> str:  # fmt: skip
    """The variant's functions: of kinds of calls that differ by widths, lengths or where rows lie they are the same."""
    return printer.forward(algorithm) if gradients is None else printer.backward(gradients, algorithm, elsewhere)


def _verify(text: str, template: str, kernels: Sequence[str]) -> None:
    """Raise InternalError unless the text parses and defines these kernels."""
    try:
        parts = compiled(text)
    except SyntaxError as error:
        lines = [f"{i + 1:4} {line}" for i, line in enumerate(text.splitlines())]
        around = "\n".join(lines[max(0, (error.lineno or 1) - 6) : (error.lineno or 1) + 3])
        raise InternalError(f"template {template} gave text that does not parse: {error.msg}\n{around}") from error
    defined = [found.co_name for _, code in parts for found in code.co_consts if isinstance(found, CodeType)]
    if twice := sorted({name for name in defined if defined.count(name) > 1}):
        raise InternalError(f"template {template} defined {', '.join(twice)} twice")
    missing = sorted(set(kernels) - {*defined})
    if missing:
        raise InternalError(f"template {template} gave no kernel {', '.join(missing)}, which the plan has")


def _template(name: str) -> jinja2.Template:
    from .templates import environment  # lazy: imports jinja2

    return environment(*folders_of_templates()).get_template(name)


def _tidy(text: str) -> str:
    """Blank lines as PEP 8 has them, stages as comments, and lines that fit."""
    text = _UNREAD.sub("", re.sub(r"[ \t]+\n", "\n", wrapped(text)))
    return fitted(re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n")
