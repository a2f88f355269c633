"""A schedule and the facts about a variant -> source text of one module, through the templates of its target."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiler.analysis.affine import is_bool
from ..compiler.analysis.facts import Facts
from ..compiler.planning.cost import measures_tiles, tiling_in
from ..compiler.planning.kernels import KERNELS
from ..compiler.planning.records import Schedule, Segment, Specialisation
from ..compiler.planning.segments import Segments
from ..compiler.planning.stages import Tiles, stages_of
from ..ir.errors import InternalError
from ..ir.expr import Expr, Symbol
from ..ir.walk import symbols
from .functions import LANGUAGES, FunctionPrinter, parameter_names
from .stages import StageComments, wrapped

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parents[1] / "templates"
Context = dict[str, object]
_WITHOUT_STAGES = {"hopper/flash_forward.py.jinja", "cpu/flash_backward.py.jinja"}


def generate(facts: Facts, spec: Specialisation, schedule: Schedule, segments: Segments) -> str:
    """Source of the module that computes one direction of a variant on one target.

    Precondition: the schedule fits the hardware. Guarantee: the text parses, and equal inputs give equal bytes.
    """
    language = LANGUAGES[schedule.target]
    measured = measures_tiles(schedule, facts.traits)
    printer = FunctionPrinter(facts, language, approximate_tanh=_has_fast_tanh(spec), measured=measured)
    gradients = facts.operand_gradients(frozenset(spec.gradients)) if spec.direction == "backward" else ()
    functions = (
        printer.backward(gradients, schedule.algorithm)
        if spec.direction == "backward"
        else printer.forward(schedule.algorithm)
    )
    context: Context = {
        "name": facts.attention.name,
        "title": facts.attention.name,
        "attention_text": str(facts.attention),
        "schedule_text": str(schedule),
        "functions": functions,
        "env": printer.env,
        "params": ", ".join(parameter_names(facts.attention, strides=language.is_gpu)),
        "masked": facts.attention.is_masked,
        "measured": measured,
        "by_head": facts.mask_differs_by_head,
        "linear": facts.linear_scale is not None,
        "bounds": ", ".join(facts.kv_tiles.outputs),
        "q_bounds": ", ".join(facts.q_tiles.outputs),
        "grads": [{"i": i, "kind": g.kind, "name": g.load.tensor.name} for i, g in enumerate(gradients)],
        **_segment_context(segments),
        **_target_context(facts, spec, schedule),
    }
    name = f"{_family(schedule.target)}/{schedule.algorithm}_{spec.direction}.py.jinja"
    stages = _stages(facts, spec, schedule, segments, frozenset(g.kind for g in gradients))
    text = _environment().get_template(name).render(context, stage=stages)
    if name not in _WITHOUT_STAGES:
        stages.check()
    return _tidy(text, name)


def _stages(
    facts: Facts, spec: Specialisation, schedule: Schedule, segments: Segments, sums: frozenset[str]
) -> StageComments:
    """sums: how the gradients of operands that are wanted are summed."""
    kernels = [k for k in KERNELS[schedule.algorithm] if k.direction == spec.direction]
    tilings = {k.name: tiling_in(schedule, k.slot) for k in kernels}
    return StageComments({
        name: stages_of(schedule.target, name, Tiles(t.block_q, t.block_kv, segments, facts.traits, sums=sums))
        for name, t in tilings.items()
    })  # fmt: skip


def generate_spans(facts: Facts) -> str:
    """Source of the module that measures which tiles a call must visit, for kernels of any GPU target."""
    found = facts.survey
    if found is None:
        raise InternalError(f"generate: {facts.attention.name} has nothing to measure")
    language = LANGUAGES["triton"]
    printer = FunctionPrinter(facts, language)
    axes = (("kv", "q", facts.kv_tiles), ("q", "kv", facts.q_tiles))
    context: Context = {
        "name": facts.attention.name,
        "mask_text": str(facts.attention.mask),
        "functions": printer.survey(found),
        "env": printer.env,
        "params": ", ".join(parameter_names(facts.attention, strides=True)),
        "by_head": facts.mask_differs_by_head,
        "values": {"q": _measured(found.q_values), "kv": _measured(found.kv_values)},
        "finds_full": not is_bool(found.certain, False),
        "axes": [
            {"axis": axis, "other": other, "bounds": ", ".join(p.outputs), "ranges": len(p.outputs) // 4}
            for axis, other, p in axes
        ],
    }
    name = "triton/tile_spans.py.jinja"
    tiles = Tiles(0, 0, Segments((), ()), facts.traits)  # of any size and width
    stages = StageComments({kernel: stages_of("triton", kernel, tiles) for kernel in ("kv_spans", "q_spans")})
    text = _environment().get_template(name).render(context, stage=stages)
    stages.check()
    return _tidy(text, name)


def _measured(values: tuple[Expr, ...]) -> list[dict[str, object]]:
    """Which values a kernel must measure: a tile's ends are those of the positions in it."""
    return [{"i": i, "measured": not isinstance(value, Symbol)} for i, value in enumerate(values)]


def _family(target: str) -> str:
    """The folder of a target's templates: the interpreter runs the portable Triton source."""
    return "triton" if target == "interpret" else target


def _has_fast_tanh(spec: Specialisation) -> bool:
    return spec.arch.startswith("sm_") and spec.dtype in ("bf16", "fp16")


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


def _target_context(facts: Facts, spec: Specialisation, schedule: Schedule) -> Context:
    match schedule.target:
        case "hopper":
            return {"config": hopper_config(spec, facts)}
        case "cpu":
            return _cpu_context(facts)
        case "triton" | "interpret":
            return {}
        case _:
            raise InternalError(f"generate: unknown target {schedule.target}")


def _cpu_context(facts: Facts) -> Context:
    """Where the mask has parts without closed form, what it reads also decides which tiles are visited."""
    open_mask, by_head = not facts.kv_bounds.closed_form, facts.bounds_differ_by_head
    read = symbols(facts.attention.folded_mask) if open_mask and not by_head else frozenset()
    return {
        "bounds": list(facts.kv_tiles.outputs),
        "q_bounds": list(facts.q_tiles.outputs),
        "open_mask": open_mask,
        "per_head_bounds": by_head,
        "apart": "heads" if read & {"head", "kv_head"} else "rows" if "batch" in read else "",
    }


def hopper_config(spec: Specialisation, facts: Facts) -> dict[str, object]:
    """The form of the Hopper kernel that measured best for these widths (docs/performance.md).

    What reads positions needs registers for them: fewer consumers at D64, the query in SRAM at D128.
    """
    spare = not facts.traits.positional  # registers
    if spec.head_dim == 64:
        return {
            "head_dim": 64, "block_kv": 128, "consumers": 3 if spare else 2, "stages": 3,
            "query_buffers": 2 if spare else 1, "query_in_registers": not spare, "lazy_rescale": False,
            "pair_maximum": True, "overlap_edges": False, "loads_at_positions": facts.loads_at_positions,
        }  # fmt: skip
    return {
        "head_dim": 128, "block_kv": 128, "consumers": 2, "stages": 2, "query_buffers": 1,
        "query_in_registers": spare, "lazy_rescale": True, "pair_maximum": False,
        "overlap_edges": facts.score_reads_positions, "loads_at_positions": facts.loads_at_positions,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _tidy(text: str, template: str) -> str:
    """Blank lines as PEP 8 has them; and what does not parse is our mistake."""
    text = re.sub(r"[ \t]+\n", "\n", wrapped(text))
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"
    try:
        ast.parse(text)
    except SyntaxError as error:
        numbered = "\n".join(f"{i + 1:4} {line}" for i, line in enumerate(text.splitlines()))
        around = "\n".join(numbered.splitlines()[max(0, (error.lineno or 1) - 6) : (error.lineno or 1) + 3])
        raise InternalError(f"template {template} gave text that does not parse: {error.msg}\n{around}") from error
    return text
