"""A schedule and the facts about a variant -> source text of one module, through the templates of its target."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING

from ..compiler.analysis.affine import is_bool
from ..compiler.analysis.facts import Facts
from ..compiler.analysis.measured import LIST_HEAD, LONG_AXIS, SPAN_ROOM
from ..compiler.analysis.places import differ_by_pair, read_once
from ..compiler.analysis.records import PAIR_KINDS, OperandGradient
from ..compiler.analysis.sizes import largest
from ..compiler.analysis.survey import CELL, Cells, Survey
from ..compiler.planning.distances import Levels, levels_in, tables_in
from ..compiler.planning.dtypes import HALVES
from ..compiler.planning.freed import is_freed
from ..compiler.planning.kernel import Algorithm
from ..compiler.planning.plan import CodePlan, KernelCode
from ..compiler.planning.records import Segment
from ..compiler.planning.segments import Segments
from ..compiler.planning.signature import MOST_SHORT, SequenceKind, Signature, starts_early
from ..compiler.planning.stage_words import Tiles
from ..compiler.planning.target import Context, Printing, Target
from ..ir.errors import InternalError
from ..ir.expr import Const, Expr, Load, Scalar, Symbol
from ..ir.walk import nodes, symbols
from .dialects import is_block
from .functions import BY_PAIR, TRITON_LANGUAGE, FunctionPrinter, parameter_names
from .loader import TEMPLATES, compiled
from .normalizers import SCORES, Blocks, Terms, blocks_of, with_sink
from .stages import StageComments, wrapped
from .targets import target_named
from .targets.triton.kernels.measures import words_of

if TYPE_CHECKING:
    import jinja2


def generate(facts: Facts, code: CodePlan, target: Target, beside: Context | None = None) -> str:
    """Source of the module that computes one direction of a variant on one target: the plan, written out.

    beside: of a module whose kernels run beside those of another target, what its template is told in other words.
    Guarantee: the text parses, defines every kernel of the plan, and says each of its stages once, over the code that
    does it; equal inputs give equal bytes.
    """
    signature, algorithm = code.signature, code.schedule.algorithm
    backward = signature.direction == "backward"
    tables = tables_in(code, facts)
    levels = levels_in(code, facts)
    apart = f"{target.printing.distance}, " if tables else ""
    stores_words = _stores_words(facts, signature)
    printer = FunctionPrinter(
        facts, target.language, approximate=_may_approximate(signature), source=code.tile_source,
        wide=signature.wide, floats="torch.float64" if signature.dtype == "fp64" else "torch.float32",
        tables=tables, levels=_score_of_tiles(facts, code, target.printing, beside is not None),
        boxed=facts.boxed_read if code.brings_boxes else None, places_boxed=stores_words,
        adds=target.printing.adds and facts.scale_and_rest is not None,
    )  # fmt: skip
    gradients = facts.operand_gradients(signature.wanted) if backward else ()
    sums_reads = any(g.kind != "sink" for g in gradients)  # over pairs; those of a sink are summed over rows
    less_lse = _less_lse(facts, sums_reads, printer.adds)
    elsewhere = _summed_elsewhere(facts, gradients, code, beside is not None)
    stages = StageComments({k.name: k.stages for k in code.own})
    found = printer.survey_of_torch
    context: Context = {
        "name": facts.attention.name,
        "title": facts.attention.name,
        "attention_text": str(facts.attention),
        "functions": _functions(printer, algorithm, gradients if backward else None, elsewhere),
        "env": printer.env,
        "params": ", ".join(parameter_names(facts.attention, target.language.is_gpu, tables)),
        "tables": bool(tables),
        "apart": apart,
        "levels": _of_levels(levels),
        "boxed": f"{BY_PAIR}, " if printer.boxed is not None else "",
        "stores_words": stores_words,
        "slope_at_end": backward and printer.boxed is not None and facts.scale_beside_box is not None,
        "box_rank": printer.boxed.tensor.rank if printer.boxed is not None else 0,
        "starts_early": starts_early(signature.arch),
        "fast_reads": signature.arch.startswith("sm_"),
        "masked": facts.attention.is_masked,
        "measured": code.tile_source != "program",
        "source": code.tile_source,
        "measures": {"program": "", "spans": "spans, ", "lists": "lists, room, "}[code.tile_source],
        "list_head": LIST_HEAD,
        "span_room": SPAN_ROOM,
        "few": LONG_AXIS,
        "survey": found is not None,
        **_looked_at(found),
        "tile_cells": _cells(printer.cells_of_tiles),
        "by_head": facts.mask_differs_by_head,
        "linear": facts.linear_scale is not None or printer.adds,
        "adds": printer.adds,
        "signed_scale": facts.scale_sign_unknown,
        "far": facts.scores_lie_far,
        "bounds": ", ".join(facts.kv_tiles.outputs),
        "q_bounds": ", ".join(facts.q_tiles.outputs),
        "bound_names": facts.kv_tiles.outputs,
        "q_bound_names": facts.q_tiles.outputs,
        "behind_rows": facts.behind_rows(tables),
        **_of_derivatives(facts, code, target.printing, gradients),
        "sink": facts.attention.folded_sink is not None,
        "drops": facts.attention.drops,
        "dropout_arguments": printer.dropout_arguments,
        "less_lse": less_lse,
        "wanted": signature.wanted,
        "sequences": signature.sequences,
        "share": signature.share,
        "most_short": MOST_SHORT,
        "stage": stages,
        "normalizer": facts.attention.weighs,
        "saves_lse": facts.attention.weighs.saves_lse,
        "texts": _normalizer_texts(facts, code, target, printer, less_lse, apart),
        **_segment_context(code.segments),
        **target.context(code, facts),
        "beside": False,
        **(beside or {}),
    }
    name = target.template(code)
    text = _tidy(_template(name).render(context))
    stages.check()
    _verify(text, name, [k.name for k in code.own] if target.language.is_gpu else [])
    return text


@lru_cache(maxsize=256)
def _functions(
    printer: FunctionPrinter, algorithm: Algorithm, gradients: tuple[OperandGradient, ...] | None,
    elsewhere: frozenset[int],
) -> str:  # fmt: skip
    """The variant's functions: of kinds of calls that differ by widths, lengths or where rows lie they are the same."""
    return printer.forward(algorithm) if gradients is None else printer.backward(gradients, algorithm, elsewhere)


def generate_all(facts: Facts, code: CodePlan, target: Target) -> str:
    """Source of all modules whose kernels a call launches, in the order of their first launches, for a person.

    Guarantee: where one module has them all, that module.
    """
    main = "the kernels themselves"
    texts = {main: generate(facts, code, target)}
    if code.of_module("measures"):
        measures = generate_measures(facts, code.signature.wide, code.signature.sequences)
        texts["what measures which tiles to visit"] = measures
    if code.of_module("tables"):
        texts["what makes tables by distance"] = generate_tables(facts, code)
    if code.borrowed:
        lender = target_named(code.borrowed.target)
        texts["what sums along diagonals"] = generate_diagonals(facts, code, lender)
    if len(texts) == 1:
        return texts[main]
    places = {title: _defined(text, [k.name for k in code.kernels]) for title, text in texts.items()}
    launched = [f"#   {k.name}{_only_if(k)}" for k in code.kernels]
    parts = ["\n".join([f"# {len(texts)} modules. A call launches, in this order:", *launched])]
    for number, title in enumerate(sorted(texts, key=lambda title: places[title]), 1):
        names = ", ".join(code.kernels[place].name for place in places[title])
        heading = f"# ==== module {number} of {len(texts)}: {title} "
        parts.append(f"{heading.ljust(120, '=')}\n# {names}\n{texts[title]}")
    return "\n\n".join(parts)


def _defined(text: str, kernels: Sequence[str]) -> list[int]:
    """Which of these kernels a module has, by number."""
    return [n for n, name in enumerate(kernels) if re.search(rf"^def {name}\(", text, re.MULTILINE)]


def _only_if(code: KernelCode) -> str:
    """Of which axes a kernel that measures runs of tiles is launched."""
    kernel = code.kernel
    if kernel.finds not in ("runs", "ends"):
        return ""
    keys = "keys" if kernel.axis == "kv" else "queries"
    return f", of {'more than' if kernel.of_long_axis else 'up to'} {LONG_AXIS:,} {keys}"


def _of_derivatives(
    facts: Facts, code: CodePlan, printing: Printing, gradients: Sequence[OperandGradient]
) -> Context:  # fmt: skip
    """What templates know of the derivatives of a score."""
    empty = printing.visits_empty and code.signature.sequences != "dense"
    backward = code.signature.direction == "backward"
    return {
        "slope_is_finite": not backward or facts.slope_is_finite(empty),
        "factor_is_defined": not (backward and empty) or facts.factor_is_defined(tables_in(code, facts)),
        **_of_gradients(facts, gradients, code.signature, empty),
    }


def _of_gradients(
    facts: Facts, gradients: Sequence[OperandGradient], signature: Signature, empty: bool = False
) -> Context:
    """What templates know of the sums of reads that have a gradient, and of a sink's. empty: lengths may be 0."""
    positions = {p.name: n for n, p in enumerate(facts.attention.parameters)}
    reads, sinks = [], []
    for i, g in enumerate(gradients):
        one = isinstance(g.derivative, Const) and g.derivative.value == 1
        known = {"i": i, "is_finite": largest(g.derivative, empty) < math.inf, "is_one": one}
        if g.kind == "sink":
            sinks.append(known)
            continue
        reads.append(
            {
                **known,
                "kind": g.kind,
                "is_freed": is_freed(g, signature, facts),
                "name": g.load.tensor.name,
                "of_pairs": g.kind in PAIR_KINDS,
                "rank": g.load.tensor.rank,
                "at": positions[g.load.tensor.name],
                "is_block": is_block(g.load),
                "settles": not any(isinstance(n, (Load, Scalar)) for i in g.load.index for n in nodes(i)),
                "by_batch": "batch" in symbols(g.derivative).union(*map(symbols, g.load.index)),
                "many_reads": not differ_by_pair(g.load),
                "read_once": read_once(g.load),
            }
        )
    return {"grads": reads, "sink_grads": sinks}


def _less_lse(facts: Facts, sums_reads: bool, adds: bool) -> bool:
    """Whether products of scores start from less the log-sum-exp: nothing else wants them then."""
    linear = facts.linear_scale is not None and not sums_reads
    return (linear or (adds and not facts.scores_lie_far)) and facts.attention.weighs.saves_lse


def _normalizer_texts(
    facts: Facts, code: CodePlan, target: Target, printer: FunctionPrinter, less_lse: bool, apart: str
) -> Blocks | None:
    """The normalizer's lines for this variant; None in a family whose templates hold the softmax themselves."""
    splits, env = code.schedule.algorithm == "split_kv", printer.env
    # rows of a tile may have scales of their own
    linear = (printer.adds and not facts.scores_lie_far) or (facts.linear_scale is not None and not splits)
    score = SCORES.get((target.family, code.signature.direction, linear))
    if score is None:
        return None
    sums = tuple(f"acc{i}" for i in range(len(code.segments.v)))
    widths = code.signature.widths
    terms = Terms(
        linear, facts.attention.is_masked, score.format(env=apart + env), sums, facts.scores_lie_far,
        less_lse and not splits, facts.attention.drops, code.brings_boxes,
        max(widths.head_dim, widths.value_dim) <= target.printing.narrow_columns,
    )  # fmt: skip
    blocks = blocks_of(facts.attention.weighs, target.family, terms)
    sinks = facts.attention.folded_sink is not None and not splits  # joined last, once
    if target.printing.joins_sink and code.signature.direction == "forward" and sinks:
        return with_sink(blocks, facts.scores_lie_far, env)
    return blocks


def _verify(text: str, template: str, kernels: Sequence[str]) -> None:
    """Raise InternalError unless the text parses and defines these kernels."""
    try:
        code = compiled(text)
    except SyntaxError as error:
        lines = [f"{i + 1:4} {line}" for i, line in enumerate(text.splitlines())]
        around = "\n".join(lines[max(0, (error.lineno or 1) - 6) : (error.lineno or 1) + 3])
        raise InternalError(f"template {template} gave text that does not parse: {error.msg}\n{around}") from error
    defined = {part.co_name for part in code.co_consts if isinstance(part, CodeType)}
    missing = sorted(set(kernels) - defined)
    if missing:
        raise InternalError(f"template {template} gave no kernel {', '.join(missing)}, which the plan has")


def generate_measures(facts: Facts, wide: bool, sequences: SequenceKind = "dense") -> str:
    """Source of the module that measures which tiles a call must visit, for kernels of any GPU target.

    They are runs of tiles, or lists, as `Facts.tile_source` says.
    """
    found = facts.survey
    if found is None:
        raise InternalError(f"generate: {facts.attention.name} has nothing to measure")
    printer = FunctionPrinter(facts, TRITON_LANGUAGE, wide=wide)
    axes = (("kv", "q", facts.kv_tiles), ("q", "kv", facts.q_tiles))
    context: Context = {
        "name": facts.attention.name,
        "mask_text": str(facts.attention.mask),
        "functions": printer.survey(found),
        "env": printer.env,
        "params": ", ".join(parameter_names(facts.attention, strides=True)),
        "by_head": facts.mask_differs_by_head,
        "sequences": sequences,
        **_looked_at(found),
        "finds_full": not is_bool(found.certain, False),
        "axes": [
            {"axis": axis, "other": other, "bounds": ", ".join(p.outputs), "ranges": len(p.outputs) // 4}
            for axis, other, p in axes
        ],
        "kv_bounds": ", ".join(facts.kv_tiles.outputs),
        "kv_ranges": len(facts.kv_tiles.outputs) // 4,
        "list_head": LIST_HEAD,
        "span_room": SPAN_ROOM,
        "few": LONG_AXIS,
    }
    name = f"triton/tile_{facts.tile_source}.py.jinja"
    tiles = Tiles(0, 0, Segments((), ()), facts.traits)  # of any size and width
    cells = found.by_pair and sequences != "packed"
    words = words_of(facts.traits.measured, ("kv", "q"), facts.tile_source == "lists", cells)
    stages = StageComments({kernel: of(tiles) for kernel, of in words.items()})
    text = _tidy(_template(name).render(context, stage=stages))
    stages.check()
    _verify(text, name, [*words])
    return text


def _of_levels(levels: Levels | None) -> Context | None:
    """What templates know of pairs at distances where nothing changes any more."""
    if levels is None:
        return None
    return {
        "by_batch": levels.by_batch, "by_head": levels.by_head, "have_loop": levels.score is not None, "by_keys": False,
    }  # fmt: skip


def generate_tables(facts: Facts, code: CodePlan) -> str:
    """Source of the module that makes the tables by distance of a plan's kernels, on any GPU."""
    tables = tables_in(code, facts)
    making = code.of_module("tables")
    if not tables or making is None:
        raise InternalError(f"generate: {facts.attention.name} reads nothing by distance")
    printer = FunctionPrinter(facts, TRITON_LANGUAGE, wide=code.signature.wide, tables=tables)
    levels = levels_in(code, facts)
    indices = levels.indices if levels else ()
    context: Context = {
        "name": facts.attention.name,
        "functions": printer.distance_values(indices),
        "env": replace(printer, tables=()).env,
        "params": ", ".join(parameter_names(facts.attention, strides=True)),
        "extents": ", ".join(printer.extents_with(indices)),
        "indices": len(indices),
        "levels": _of_levels(levels),
        "tables": [
            {"n": n, "by_batch": t.by_batch, "by_head": t.by_head, "title": str(t.part)} for n, t in enumerate(tables)
        ],
    }
    stages = StageComments({making.name: making.stages})
    name = "triton/distance_tables.py.jinja"
    text = _tidy(_template(name).render(context, stage=stages))
    stages.check()
    _verify(text, name, [making.name])
    return text


def generate_diagonals(facts: Facts, code: CodePlan, target: Target) -> str:
    """Source of the module of flash_ddiagonals alone, for a plan of another target's kernels.

    Level pairs are summed there a key, in place of a tile of queries.
    """
    own = replace(code, target=target.name, segments=target.parts(facts.attention, code.signature.widths))
    levels = _of_levels(levels_in(code, facts))
    if levels is not None:
        levels = {**levels, "have_loop": False, "by_keys": True}
    gradients = facts.operand_gradients(code.signature.wanted)
    reads = _of_gradients(facts, gradients, own.signature)["grads"]
    assert isinstance(reads, list)
    grads = [g for g in reads if g["kind"] == "diagonal"]
    given: Context = {"beside": True, "wanted": frozenset(), "grads": grads, "sink_grads": [], "levels": levels}
    return generate(facts, own, target, given)


def _summed_elsewhere(
    facts: Facts, gradients: Sequence[OperandGradient], code: CodePlan, beside: bool
) -> frozenset[int]:
    """The numbers of gradients that the kernels of another module sum, all of them."""
    of_diagonals = {n for n, g in enumerate(gradients) if g.kind == "diagonal"}
    if beside:
        return frozenset(range(len(gradients))) - of_diagonals
    return frozenset(of_diagonals if code.borrowed and levels_in(code, facts) is None else ())


def _stores_words(facts: Facts, signature: Signature) -> bool:
    """Whether the gradient of what pairs read is wanted, and has 32 bits an entry: it is stored entry by entry."""
    return signature.boxed == 4 and facts.boxed_read is not None and facts.boxed_read.tensor.name in signature.wanted


def _score_of_tiles(facts: Facts, code: CodePlan, printing: Printing, beside: bool) -> tuple[Expr, Expr | None] | None:
    """(c, rest) of the score c * qk + rest, where kernels want it; no rest where no tile is computed by it."""
    tables, levels = tables_in(code, facts), levels_in(code, facts)
    if beside or code.signature.direction == "forward":
        return None
    score = levels.score if levels else None
    if score is None and printing.splits_tables and tables:
        found = facts.score_of_levels(tables)
        return None if found is None else (found[0], None)
    return score


def _looked_at(found: Survey | None) -> Context:
    """What templates need of a survey."""
    if found is None:
        return {"values": {}, "equal": (), "cells": [], "by_pair": False, "decides": False, "cell": CELL}
    return {
        "values": {
            "q": _measured("q", found.q_values, {n for n, _ in found.equal}),
            "kv": _measured("kv", found.kv_values, {m for _, m in found.equal}),
        },
        "equal": found.equal,
        "cells": _cells(found.cells),
        "by_pair": found.by_pair,
        "decides": found.decides,
        "cell": CELL,
    }


def _cells(found: tuple[Cells, ...]) -> list[dict[str, int]]:
    return [{"i": i, "q": c.q, "kv": c.kv} for i, c in enumerate(found)]


def _measured(axis: str, values: tuple[Expr, ...], compared: set[int]) -> list[dict[str, object]]:
    """Which values a kernel must measure: a tile's ends are those of the positions in it. `name` is that of all.

    compared: those that must be equal to one of the other axis, of which kernels find `bits` too.
    """
    known = [(i, not isinstance(value, Symbol)) for i, value in enumerate(values)]
    return [{"i": i, "measured": own, "name": f"{axis}{i}" if own else f"{axis}_pos", "bits": i in compared}
            for i, own in known]  # fmt: skip


def _may_approximate(signature: Signature) -> bool:
    return signature.arch.startswith("sm_") and signature.dtype in HALVES


def _segment_context(segments: Segments) -> Context:
    """Segments as templates see them: `start` counts columns of the query and of the tensor they lie in."""

    def rows(items: tuple[Segment, ...]) -> list[dict[str, object]]:
        start = 0
        out: list[dict[str, object]] = []
        for i, s in enumerate(items):
            own = s.source == "rope"
            out.append({"i": i, "start": start, "width": s.width, "block": s.block, "own": own})
            start += s.width
        return out

    return {"qk_segments": rows(segments.qk), "v_segments": rows(segments.v), "v_is_k0": segments.value_is_key,
            "value_is_key": segments.value_is_key}  # fmt: skip


def _template(name: str) -> jinja2.Template:
    from .templates import environment  # lazy: imports jinja2

    return environment(TEMPLATES).get_template(name)


def _tidy(text: str) -> str:
    """Blank lines as PEP 8 has them, and stages as comments."""
    text = re.sub(r"[ \t]+\n", "\n", wrapped(text))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"
