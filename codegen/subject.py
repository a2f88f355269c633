"""What one generated module is about, and the records of it that templates of all families read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.analysis.tiles.measured import LIST_HEAD, SPAN_ROOM
from ..compiler.analysis.tiles.results import PAIR_KINDS, Axis, OperandGradient
from ..compiler.analysis.tiles.survey import Cells, Survey
from ..compiler.analysis.values.defined import largest
from ..compiler.analysis.values.places import differ_by_pair, read_once
from ..compiler.planning.by_distance import Levels, Planned, gradients_in
from ..compiler.planning.dtypes import HALVES, dtype_named
from ..compiler.planning.freed import is_freed
from ..compiler.planning.plan import CodePlan
from ..compiler.planning.signature import MOST_SHORT, Signature
from ..compiler.planning.target import Target
from ..ir.expr import Const, Expr, Load, Scalar, Symbol
from ..ir.walk import nodes, symbols
from .context import Cell, Gradients, LevelPairs, Printed, Read, Rows, SinkRead, Softmax, Value, Variant, Visits
from .dialects import is_block
from .functions import FunctionPrinter, parameter_names
from .normalizers import SCORES, Blocks, Terms, blocks_of, with_sink


@dataclass(frozen=True)
class Subject(Planned):
    """One direction of a variant on one target."""

    facts: Facts
    code: CodePlan
    target: Target

    @property
    def summed_elsewhere(self) -> frozenset[int]:
        """The numbers of gradients that the kernels of another module sum, all of them."""
        of_diagonals = {n for n, g in enumerate(self.gradients) if g.kind == "diagonal"}
        if self.code.is_lent:
            return frozenset(range(len(self.gradients))) - of_diagonals
        return frozenset(of_diagonals if self.code.borrowed and self.levels is None else ())

    @property
    def apart(self) -> str:
        return f"{self.target.printing.distance}, " if self.tables else ""

    @property
    def visits_empty(self) -> bool:
        """Whether rows of sequences without a pair are computed."""
        return self.target.printing.visits_empty and self.signature.sequences.ragged

    @property
    def descales(self) -> bool:
        """Whether scores are handed products of FP8 numbers; a factor of all of a score has descales in it."""
        is_fp8 = "query" in self.signature.dtypes.quantized and self.target.multiplies_fp8
        return is_fp8 and self.facts.linear_scale is None

    @cached_property
    def printer(self) -> FunctionPrinter:
        facts, signature = self.facts, self.signature
        return FunctionPrinter(
            facts, self.target.language, approximate=signature.arch.startswith("sm_") and signature.dtype in HALVES,
            source=self.code.tile_source, offsets_64=signature.offsets_64,
            floats=f"torch.{dtype_named(signature.dtype).sums}", tables=self.tables, levels=self._score_of_tiles,
            boxed=facts.boxed_read if self.code.brings_boxes else None, places_boxed=stores_words(facts, signature),
            descales=self.descales, adds=self.target.printing.adds and facts.scale_and_rest is not None,
        )  # fmt: skip

    @property
    def _score_of_tiles(self) -> tuple[Expr, Expr | None] | None:
        """(c, rest) of the score c * qk + rest, where kernels want it; no rest where no tile is computed by it."""
        if self.code.is_lent or not self.is_backward:
            return None
        score = self.levels.score if self.levels else None
        if score is None and self.target.printing.splits_tables and self.tables:
            found = self.facts.score_of_levels(self.tables)
            return None if found is None else (found[0], None)
        return score


def stores_words(facts: Facts, signature: Signature) -> bool:
    """Whether the gradient of what pairs read is wanted, and has 32 bits an entry: it is stored entry by entry."""
    return signature.boxed == 4 and facts.boxed_read is not None and facts.boxed_read.tensor.name in signature.wanted


def starts_less_lse(facts: Facts, code: CodePlan, adds: bool) -> bool:
    """Whether products of scores start from less the log-sum-exp: nothing else wants them then."""
    sums_reads = any(g.kind != "sink" for g in gradients_in(code, facts))  # over pairs; of a sink, over rows
    linear = facts.linear_scale is not None and not sums_reads
    return (linear or (adds and not facts.scores_lie_far)) and facts.attention.canonical.weighs.saves_lse


# -- records -----------------------------------------------------------------------------------------------------------
def records_of(subject: Subject, functions: str) -> tuple[object, ...]:
    """What templates of all families are told of a module."""
    found = (printed(subject, functions), variant(subject), rows(subject), visits(subject), softmax(subject))
    return (*found, gradients(subject)) if subject.is_backward else found


def printed(subject: Subject, functions: str) -> Printed:
    attention, language = subject.facts.attention, subject.target.language
    names = parameter_names(attention, language.is_gpu, subject.tables)
    return Printed(str(attention.name), functions, subject.printer.env, subject.printer.here, ", ".join(names))


def variant(subject: Subject) -> Variant:
    facts, adds = subject.facts, subject.printer.adds
    return Variant(
        masked=facts.attention.canonical.is_masked,
        by_head=facts.mask_differs_by_head,
        linear=facts.linear_scale is not None or adds,
        adds=adds,
        signed_scale=facts.scale_sign_unknown,
        far=facts.scores_lie_far,
        tables=bool(subject.tables),
        apart=subject.apart,
        drops=facts.attention.canonical.drops,
        dropout_arguments=subject.printer.dropout_arguments,
        draws=subject.printer.draws,
    )


def rows(subject: Subject) -> Rows:
    return Rows(subject.signature.sequences, subject.signature.serves, MOST_SHORT)


def visits(subject: Subject) -> Visits:
    source, keys, queries = subject.code.tile_source, subject.facts.kv_tiles.outputs, subject.facts.q_tiles.outputs
    return Visits(
        source=source,
        measured=source != "program",
        bounds=", ".join(keys),
        q_bounds=", ".join(queries),
        bound_names=keys,
        list_head=LIST_HEAD,
        span_room=SPAN_ROOM,
        tile_cells=cells(subject.printer.cells_of_tiles),
    )


def softmax(subject: Subject) -> Softmax:
    attention = subject.facts.attention
    return Softmax(
        attention.canonical.weighs,
        attention.canonical.weighs.saves_lse,
        _texts(subject),
        attention.canonical.folded_sink is not None,
    )


def gradients(subject: Subject) -> Gradients:
    """Of a lent module, those of diagonals alone."""
    is_lent, numbered = subject.code.is_lent, list(enumerate(subject.gradients))
    if is_lent:
        numbered = [(i, g) for i, g in numbered if g.kind == "diagonal"]
    return Gradients(
        wanted=frozenset() if is_lent else subject.signature.wanted,
        slope_is_finite=subject.facts.slope_is_finite(subject.visits_empty),
        grads=[_read(subject, i, g) for i, g in numbered if g.kind != "sink"],
        sink_grads=[SinkRead(i, _is_finite(subject, g)) for i, g in numbered if g.kind == "sink"],
        levels=level_pairs(subject.levels, is_lent),
    )


def _read(subject: Subject, i: int, g: OperandGradient) -> Read:
    positions = {p.name: n for n, p in enumerate(subject.facts.attention.canonical.parameters)}
    return Read(
        i=i,
        is_finite=_is_finite(subject, g),
        is_one=isinstance(g.derivative, Const) and g.derivative.value == 1,
        kind=g.kind,
        is_freed=is_freed(g, subject.signature, subject.facts),
        name=g.load.tensor.name,
        both_positions=g.kind in PAIR_KINDS,
        rank=g.load.tensor.rank,
        at=positions[g.load.tensor.name],
        is_block=is_block(g.load),
        settles=not any(isinstance(n, (Load, Scalar)) for index in g.load.index for n in nodes(index)),
        by_batch="batch" in symbols(g.derivative).union(*map(symbols, g.load.index)),
        many_reads=not differ_by_pair(g.load),
        read_once=read_once(g.load),
    )


def _is_finite(subject: Subject, g: OperandGradient) -> bool:
    return largest(g.derivative, subject.visits_empty) < math.inf


def level_pairs(levels: Levels | None, is_lent: bool = False) -> LevelPairs | None:
    """What templates know of pairs at distances where nothing changes any more."""
    if levels is None:
        return None
    have_loop = levels.score is not None and not is_lent
    return LevelPairs(levels.by_batch, levels.by_head, have_loop, by_keys=is_lent)


def cells(found: Sequence[Cells]) -> tuple[Cell, ...]:
    return tuple(Cell(i, c.q, c.kv) for i, c in enumerate(found))


def values_of(found: Survey) -> dict[Axis, tuple[Value, ...]]:
    """Which values a kernel must measure, by axis: a tile's ends are those of the positions in it."""
    compared = {n for n, _ in found.equal}, {m for _, m in found.equal}
    return {"q": _values("q", found.q_values, compared[0]), "kv": _values("kv", found.kv_values, compared[1])}


def _values(axis: Axis, values: Sequence[Expr], compared: set[int]) -> tuple[Value, ...]:
    read = [not isinstance(value, Symbol) for value in values]
    return tuple(Value(i, own, f"{axis}{i}" if own else f"{axis}_pos", i in compared) for i, own in enumerate(read))


def _texts(subject: Subject) -> Blocks | None:
    """The normalizer's lines for this variant; None in a family whose templates hold the softmax themselves."""
    facts, target, printer = subject.facts, subject.target, subject.printer
    splits = subject.code.schedule.algorithm == "split_kv"
    # rows of a tile may have scales of their own
    linear = (printer.adds and not facts.scores_lie_far) or (facts.linear_scale is not None and not splits)
    score = SCORES.get((target.family, subject.signature.direction, linear))
    if score is None:
        return None
    blocks = blocks_of(facts.attention.canonical.weighs, target.family, _terms(subject, linear, splits, score))
    sinks = facts.attention.canonical.folded_sink is not None and not splits  # joined last, once
    if target.printing.joins_sink and not subject.is_backward and sinks:
        return with_sink(blocks, facts.scores_lie_far, printer.env)
    return blocks


def _terms(subject: Subject, linear: bool, splits: bool, score: str) -> Terms:
    facts, code, printer, widths = subject.facts, subject.code, subject.printer, subject.signature.widths
    return Terms(
        linear=linear,
        masked=facts.attention.canonical.is_masked,
        score=score.format(env=subject.apart + printer.env),
        sums=tuple(f"acc{i}" for i in range(len(code.segments.v))),
        far=facts.scores_lie_far,
        less_lse=starts_less_lse(facts, code, printer.adds) and not splits,
        drops=facts.attention.canonical.drops,
        boxed=code.brings_boxes,
        narrow=max(widths.head_dim, widths.value_dim) <= subject.target.printing.narrow_columns,
        shared=splits and bool(subject.signature.dtypes.quantized),  # of 16 bits it gains 1 %, and spills
        fp8=bool(subject.signature.dtypes.quantized),
        by_tiles="v_descale" in subject.signature.scaled_tiles,
    )
