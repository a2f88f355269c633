"""Target `cpu`: tiles of plain torch code. The default where operands are on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import OperandGradient
from ....compiler.analysis.values.cse import of_positions
from ....compiler.analysis.values.distances import of_distance
from ....compiler.planning.dtypes import FP32, FP64, HALVES, dtype_named
from ....compiler.planning.form import Form
from ....compiler.planning.kernel import Algorithm, Kernel
from ....compiler.planning.machines.hardware import CPU, Hardware
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.records import Shape
from ....compiler.planning.signature import Direction, Signature, Widths
from ....compiler.planning.sources import not_in_order
from ....compiler.planning.target import Launcher, PlannedCall, Printing, Said, Target
from ....ir.errors import UnavailableError, WeftError
from ....ir.expr import Expr, Load, Scalar, TensorOperand, call, symbol
from ....ir.normalizer import SOFTMAX
from ....ir.walk import nodes, symbols
from ... import at_once, products
from ...dialects import is_uniform
from ...functions import TORCH_LANGUAGE, surveyed_by_torch
from ...launch.allocating import keep_tiles_at_hand
from ...launch.fast.own import axes_of_mask, in_one_order, numbers_of_mask, records_with_mask
from ...loader import load
from ...normalizers import lacks
from ...products import one_dnn_linear, own_attention, own_backward
from ...subject import cells, starts_less_lse, values_of
from . import context
from .choice import USUAL, cpu_forms
from .forms import CpuForm
from .kernels import FLASH_BACKWARD, FLASH_FORWARD
from .launcher import CpuLauncher
from .words import OwnKernel, said

COMPUTED = HALVES | {FP32.name, FP64.name}


class CpuTarget(Target):
    name = measured_by = "cpu"
    by_name_only = interprets = partial = multiplies_fp8 = False
    serves = "cpu"
    language = TORCH_LANGUAGE
    family = "cpu"
    printing = Printing(adds=True)

    def says(self, call: PlannedCall) -> Said:
        known = computes_whole, short_heads, heads_with_mask, mask_numbers, keeps_weights, records_mask, kind_of_mask
        return said(call, OwnKernel(*known))

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm != "flash":
            return []
        return [FLASH_FORWARD if signature.direction == "forward" else FLASH_BACKWARD]

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return f"cpu: has schedule flash only; {algorithm} runs on targets triton and interpret"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch != "cpu":
            return "cpu: the operands are on a GPU"
        if signature.dtype not in COMPUTED:
            return f"cpu: expected {', '.join(sorted(COMPUTED))} operands, got {signature.dtype}"
        lacking, rows = lacks(facts.attention.canonical.weighs, self.family), signature.sequences
        if lacking is None and rows.is_outside:
            lacking = f"has no text for {rows} sequences; they are computed by targets triton and interpret"
        if not rows.in_order:
            lacking = f"{not_in_order(rows)} are computed by targets triton and interpret"
        return None if lacking is None else f"cpu: {lacking}"

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        machine = hardware if hardware.cpu else CPU
        widths, own = signature.widths, _own(kernel.direction)
        shape = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        return list(
            cpu_forms(
                kernel, shape, machine, self.parts(facts.attention, widths), facts.traits,
                whole=_needed(signature) if own is not None and _has_whole(facts, signature) else None,
                one_dnn=one_dnn_linear() is not None,
            )
        )  # fmt: skip

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if not isinstance(form, CpuForm) or min(form.block_q, form.block_kv, form.cache_kib) < 1:
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected <queries>x<keys> for target cpu, as in {USUAL}, "
                f"and perhaps c<KiB of joined scores>, +onednn, +tiles"
            )
        if form.one_dnn and one_dnn_linear() is None:
            raise UnavailableError(
                f"schedule: {kernel.name} {form}: this torch has no product of oneDNN that can be called; "
                "leave +onednn out"
            )

    def template(self, code: CodePlan) -> str:
        return f"cpu/flash_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> tuple[object, ...]:
        return _score_told(code, facts), _mask_told(facts), _ways_told(code, facts)

    def load(self, path: Path, source: str) -> ModuleType:
        keep_tiles_at_hand()
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: Any) -> Launcher:
        return CpuLauncher(modules[0], code, facts)


def _score_told(code: CodePlan, facts: Facts) -> context.Score:
    scale, read = _scale(facts), symbols(facts.attention.canonical.folded_score)
    return context.Score(
        uniform=scale is not None and is_uniform(scale),
        by_distance=_by_distance(facts),
        settles=_settles(facts, code.signature),
        score_by_batch="batch" in read,
        rows_first="head" in read and "batch" not in read,
        less_lse=starts_less_lse(facts, code, facts.scale_and_rest is not None),
    )


def _mask_told(facts: Facts) -> context.Mask:
    found = surveyed_by_torch(facts)
    return context.Mask(
        per_head_bounds=facts.bounds_differ_by_head,
        mask_reads=axes_of_mask(facts),
        remembers=all(
            not isinstance(p, TensorOperand) and p.dtype == "int" for p in facts.attention.canonical.parameters
        ),
        survey=found is not None,
        values={} if found is None else values_of(found),
        cells=() if found is None else cells(found.cells),
    )


def _ways_told(code: CodePlan, facts: Facts) -> context.Ways:
    signature, form = code.signature, code.kernels[-1].form
    assert isinstance(form, CpuForm)
    return context.Ways(
        kinds=_kinds(code, facts, form),
        most_scores=form.most_scores,
        widths=sorted({*_widths_of_tiles(signature.widths)}),
        in_tiles=form.in_tiles,
        whole=_has_whole(facts, signature),
        with_mask=_takes_a_mask(facts, signature),
        at_once=weighs_short(facts, signature),
        nothing=", None" * len(facts.attention.canonical.parameters),
        whole_rows=signature.direction == "backward" and bool(signature.widths.rope_dim),
    )


def _kinds(code: CodePlan, facts: Facts, form: CpuForm) -> context.Kinds:
    saved = "far" if facts.scores_lie_far else "near" if facts.attention.canonical.weighs.saves_lse else "unsaved"
    return context.Kinds(
        products="onednn" if form.one_dnn else "torch",
        sequence="ragged" if code.signature.sequences.ragged else "dense",
        statistics=saved,
        score=_kind_of_score(code, facts),
        mask=kind_of_mask(facts),
        sharing=_kind_of_sharing(facts),
    )


def _kind_of_score(code: CodePlan, facts: Facts) -> str:
    """By what is made of q.k: a number times it, the same with a rest, or anything."""
    scale = _scale(facts)
    if scale is None:
        return "general"
    if facts.scale_and_rest is None and any(g.kind != "sink" for g in _gradients(code, facts)):
        return "linear_by_pair"
    kind = "linear" if facts.scale_and_rest is None else "added"
    return kind if is_uniform(scale) else f"{kind}_by_head"


def kind_of_mask(facts: Facts) -> str:
    """By what a query sees, as bounds tell it."""
    if not facts.attention.canonical.is_masked:
        return "none"
    if not facts.kv_bounds.closed_form:
        return "open"
    if facts.attention.canonical.folded_mask.text == call("le", symbol("kv_pos"), symbol("q_pos")).text:
        return "causal"
    return "run" if len(facts.kv_tiles.outputs) == 4 else "runs"


def _kind_of_sharing(facts: Facts) -> str:
    """By what the mask differs by."""
    if _differs_by_head(facts):
        return "heads"
    return "rows" if "batch" in symbols(facts.attention.canonical.folded_mask) else "all"


def _gradients(code: CodePlan, facts: Facts) -> Sequence[OperandGradient]:
    backward = code.signature.direction == "backward"
    return facts.operand_gradients(code.signature.wanted) if backward else ()


def _widths_of_tiles(widths: Widths) -> tuple[int, ...]:
    """Columns of the products of a tile: those of key and value, and of a rotary part."""
    return widths.head_dim, widths.head_dim - widths.rope_dim, widths.value_dim, widths.rope_dim


def _scale(facts: Facts) -> Expr | None:
    """What q.k is multiplied by, where that is one number for a head."""
    return facts.linear_scale if facts.scale_and_rest is None else facts.scale_and_rest[0]


def _differs_by_head(facts: Facts) -> bool:
    return bool(symbols(facts.attention.canonical.folded_mask) & {"head", "kv_head"}) or facts.bounds_differ_by_head


def _settles(facts: Facts, signature: Signature) -> bool:
    """Whether something of what is added to scores follows from positions alone, and needs no operand."""
    if facts.scale_and_rest is None:
        return False
    derivatives = [g.derivative for g in facts.operand_gradients(signature.wanted)]
    parts, _ = of_positions([facts.scale_and_rest[1], *derivatives])
    return bool(parts) and not any(isinstance(n, (Load, Scalar)) for _, part in parts for n in nodes(part))


def computes_whole(code: CodePlan, facts: Facts) -> bool:
    """Whether torch's own attention, which is there, computes those calls of this code."""
    form = code.kernels[-1].form
    assert isinstance(form, CpuForm)
    return _has_whole(facts, code.signature) and not form.in_tiles and _own(code.signature.direction) is not None


def short_heads(code: CodePlan, facts: Facts) -> int:
    """Queries times keys times columns of a head below which it computes them although tiles are faster; or 0."""
    form, direction = code.kernels[-1].form, code.signature.direction
    assert isinstance(form, CpuForm)
    if not form.in_tiles or not _has_whole(facts, code.signature) or _own(direction) is None:
        return 0
    return products.short_head(direction == "backward", code.signature.dtype in HALVES)


def heads_with_mask(code: CodePlan, facts: Facts) -> int:
    """The same of heads that it computes where it is handed a mask; 0 where it is handed none."""
    if not _takes_a_mask(facts, code.signature) or not products.takes_masks():
        return 0
    backward_in = None if code.signature.direction == "forward" else dtype_named(code.signature.dtype).torch
    return products.short_head_with_mask(backward_in)


def mask_numbers(facts: Facts, sizes: at_once.Sizes) -> int:
    """Of the mask that torch's own attention is handed; 0 where it is handed none."""
    return numbers_of_mask(axes_of_mask(facts), sizes) if _adds_to_products(facts) else 0


def keeps_weights(code: CodePlan, facts: Facts, sizes: at_once.Sizes, free: bool) -> bool:
    """Whether the backward of a dense call takes the weights that its forward kept. free: no schedule is asked for."""
    dtype, signature = dtype_named(code.signature.dtype).torch, code.signature
    if not weighs_short(facts, signature):
        return False
    recorded = (
        not signature.wanted <= _PRODUCTS.keys()
        and _may_be_recorded(facts, signature, free)
        and in_one_order(facts, sizes)
        and at_once.records_at_once(sizes, dtype)
    )
    return recorded or at_once.weighs_at_once(sizes, dtype, keeps=True)


def records_mask(code: CodePlan, facts: Facts, sizes: at_once.Sizes, free: bool) -> bool:
    """Whether torch itself records a dense call whose output alone is wanted, as its own attention with a mask."""
    signature = code.signature
    if not (_may_be_recorded(facts, signature, free) and _takes_a_mask(facts, signature) and products.takes_masks()):
        return False
    numbers = mask_numbers(facts, sizes)
    return 0 < numbers <= products.MOST_OF_A_MASK and records_with_mask(dtype_named(signature.dtype).torch, sizes)


def _may_be_recorded(facts: Facts, signature: Signature, free: bool) -> bool:
    """Whether torch itself may record a call: not where tiles were asked for, or timed, or there is a sink."""
    return free and signature.lengths is None and facts.attention.canonical.folded_sink is None


def _by_distance(facts: Facts) -> bool:
    return facts.scale_and_rest is not None and of_distance(facts.scale_and_rest[1]) is not None


def _own(direction: Direction) -> Callable[..., Any] | None:
    return own_attention() if direction == "forward" else own_backward()


def _is_own(facts: Facts, signature: Signature) -> bool:
    """Whether it is a softmax of a multiple of q.k, and perhaps of what is added, as torch's own attention has it. Its
    backward gives the gradients of query, key and value alone."""
    widths = signature.widths
    fits = signature.wanted <= _PRODUCTS.keys() and widths.head_dim == widths.value_dim
    return fits and _is_plain_softmax(facts, widths)


def _is_plain_softmax(facts: Facts, widths: Widths) -> bool:
    """Whether it is a softmax without dropout, of scores with one factor of q.k; keys and values are two tensors."""
    scale = _scale(facts)
    return (
        not (widths.value_is_key or widths.rope_dim)
        and scale is not None
        and is_uniform(scale)
        and not facts.attention.canonical.drops
        and facts.attention.canonical.weighs == SOFTMAX
    )


def weighs_short(facts: Facts, signature: Signature) -> bool:
    """Whether short calls may be torch's product, softmax and product, whose weights are kept for the backward."""
    return (
        not signature.sequences.ragged
        and _is_plain_softmax(facts, signature.widths)
        and facts.attention.canonical.folded_sink is None
        and _adds_to_products(facts)
    )


def _adds_to_products(facts: Facts) -> bool:
    return facts.attention.canonical.is_masked or facts.scale_and_rest is not None


def _has_whole(facts: Facts, signature: Signature) -> bool:
    """Whether it computes some calls as they are: where every query sees all keys, or all up to its own."""
    return (
        _is_own(facts, signature)
        and facts.linear_scale is not None
        and facts.kv_bounds.closed_form
        and not _differs_by_head(facts)
        and "batch" not in symbols(facts.attention.canonical.folded_mask)
    )


def _takes_a_mask(facts: Facts, signature: Signature) -> bool:
    """Whether it computes short calls where it is handed a mask, to which what a score adds belongs."""
    return _is_own(facts, signature) and _adds_to_products(facts)


_PRODUCTS = {"query": {"dP", "dQ"}, "key": {"dP", "dK"}, "value": {"dV"}}  # that a gradient needs, besides scores


def _needed(signature: Signature) -> float:
    """Which share of torch's own products tiles need: torch's backward computes every gradient."""
    return (1 + len(set().union(*map(_PRODUCTS.__getitem__, signature.wanted)))) / 5 if signature.wanted else 1.0
