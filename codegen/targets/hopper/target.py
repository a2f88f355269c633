"""Target `hopper`: Gluon kernels for sm_90, warp-specialised: schedule flash, with a backward in one pass or two, and
split_kv of latent caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import torch

from ....compiler.analysis.facts import Facts
from ....compiler.planning.cost import sram_bytes
from ....compiler.planning.distances import tables_in, tables_of
from ....compiler.planning.form import Form
from ....compiler.planning.hardware import Hardware
from ....compiler.planning.kernel import Algorithm, Kernel
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.records import Segment, Shape
from ....compiler.planning.segments import Segments, segments_of
from ....compiler.planning.signature import Direction, Signature, Widths
from ....compiler.planning.target import CallTensors, Context, Launcher, Printing
from ....ir.attention import Attention
from ....ir.errors import WeftError, counted
from ....ir.expr import Expr, Load, Symbol
from ....ir.walk import nodes
from ...functions import GLUON_LANGUAGE
from ...launch.descriptors import is_ragged_readable, is_readable
from ...loader import load
from ..gluon.program import FIRST_BARRIER, Program
from ..triton.kernels.measures import with_measuring
from ..triton.kernels.tables import with_tables_made
from ..triton.kernels.work import with_work
from ..triton.target import TritonTarget
from . import paces
from .form_rules import (
    best_backward_form,
    best_form,
    is_plain,
    no_boxes,
    no_cells_form,
    with_boxes,
)
from .forms import PIECE_COLUMNS, ROWS, HopperBackwardForm, HopperForm, HopperLatentForm
from .gradients import (
    is_lean,
    is_one_pass,
    stores_boxes,
    stores_first,
    sums_diagonals,
    sums_of_keys,
    sums_of_queries,
)
from .held import held_by
from .kernels.backward import FLASH_BACKWARD
from .kernels.backward import program as program_of_keys
from .kernels.dquery import program as program_of_queries
from .kernels.forward import FLASH_FORWARD
from .kernels.forward import program as forward_program
from .kernels.latent import JOIN_PARTS, SPLIT_FORWARD
from .kernels.statistics import round_dquery_program, statistics_program
from .latent import LEAST_PAGE, latent_context, latent_misfit, no_latent_form, small_pages
from .launcher import launcher_of
from .passes import DIAGONAL_SUMS, ONE_PASS, ONE_PASS_DRAWN, ONE_PASS_STORED, two_passes
from .pieces import (
    CONSUMERS,
    backward_form,
    columns_of,
    forward_form,
    is_persistent,
    key_pieces,
    left_parts,
    main_form,
    part_columns,
    pieces_of,
    piecewise,
    places_of_results,
    statistics_of_a_row,
    sums_of_a_tile,
)
from .rules import BACKWARD, COMMON, FORWARD, LATENT, Case, refused

_LENDER = TritonTarget()  # of kernels that run beside those of a backward


class HopperTarget:
    name = "hopper"
    measured_by = "triton"
    by_name_only = False
    partial = True
    language = GLUON_LANGUAGE
    family = "hopper"
    printing = Printing("apart", visits_empty=True, narrow_columns=paces.NARROW, splits_tables=True)

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm == "split_kv" and signature.direction == "forward" and signature.widths.value_is_key:
            return SPLIT_FORWARD, JOIN_PARTS
        if algorithm != "flash":
            return []
        kernels: tuple[Kernel, ...] = (FLASH_FORWARD,)
        if signature.direction == "backward":
            summed = sums_of_queries(signature, facts)
            if is_one_pass(signature) and not summed:
                stored = ONE_PASS_STORED if stores_first(signature, facts) else ONE_PASS
                kernels = ONE_PASS_DRAWN if facts.attention.drops else stored
            else:
                by_keys = sums_of_keys(signature, facts)
                kernels = two_passes(signature.wanted, summed, by_keys, facts.attention.drops)
            if not facts.attention.weighs.saves_lse:
                kernels = tuple(k for k in kernels if k.name != "row_statistics")
            kernels += (DIAGONAL_SUMS,) if sums_diagonals(signature, facts) else ()
        found = with_measuring(kernels, facts.traits.measured)
        found = with_work(found) if signature.sequences.rows.packed else found
        return with_tables_made(found, tables_of(facts, algorithm, signature))

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return "hopper: has schedule flash only, and split_kv of latent caches"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        case, of_heads = Case(signature, facts), BACKWARD if kernel.direction == "backward" else FORWARD
        absorbed = kernel.shares_keys or signature.widths.value_is_key
        lacking = refused((*COMMON, *LATENT), case) if absorbed else None
        return lacking if kernel.shares_keys else lacking or refused((*COMMON, *of_heads), case)

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        """Tensors that the tensor memory accelerator cannot read in place."""
        if call.value is None:
            return latent_misfit(signature, call)
        ragged = signature.sequences.ragged
        shared = {} if call.rope is None else {"rotary key": call.rope}
        for name, tensor in {"query": call.query, "key": call.key, "value": call.value, **shared}.items():
            if not is_readable(tensor):
                return (
                    f"hopper: {name}: its address and strides must be multiples of 16 bytes for the tensor memory "
                    "accelerator"
                )
            if ragged and not is_ragged_readable(tensor):
                rows = "blocks" if signature.sequences.keys.pooled and name != "query" else "batch rows"
                return (
                    f"hopper: {name}: with lengths, {rows} must lie a whole number of rows of a head apart; its "
                    f"strides are {list(tensor.stride())}"
                )
        if call.rope is not None and call.rope.shape[1] != 1:
            return f"hopper: a rotary key of {counted(call.rope.shape[1], 'head')} is for the triton target"
        page = call.key.shape[2]
        if signature.sequences.keys.pooled and page < LEAST_PAGE:
            return small_pages(page)
        return None

    def parts(self, attention: Attention, widths: Widths) -> Segments:
        """Tiles of query and key are one piece or two; those of value and output one, but in backwards."""
        if widths.value_is_key:
            return segments_of(attention, widths)
        return Segments(_key_segments(widths), (Segment(0, widths.value_dim, "value"),))

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        widths = signature.widths
        if kernel is DIAGONAL_SUMS:
            return _LENDER.forms(kernel, signature, hardware, facts)
        if kernel.shares_keys:
            narrow = widths.value_dim % (2 * PIECE_COLUMNS) > 0
            chosen = HopperLatentForm(HopperLatentForm.slots * (1 + narrow), ordered=True, prefetch=True, narrow=narrow)
            near = chosen.neighbours()
            return [chosen, *(form for form in near if self._why_not(kernel, form, signature, hardware, facts) is None)]
        best: HopperForm | HopperBackwardForm = best_form(widths, facts, signature.short_call)
        if kernel.direction == "backward":
            summed = sums_of_queries(signature, facts)
            best = best_backward_form(kernel, widths, facts, summed, is_lean(signature, facts))
        if signature.boxed:
            brought = with_boxes(best, signature.boxed)
            fit = (form for form in brought if self._why_not(kernel, form, signature, hardware, facts) is None)
            best = next(fit, best)
        if isinstance(best, HopperBackwardForm):
            ahead = replace(best, keys_ahead=True)
            best = best if self._why_not(kernel, ahead, signature, hardware, facts) else ahead
        others = [
            form for form in best.neighbours()
            if form != best and self._why_not(kernel, form, signature, hardware, facts) is None
        ]  # fmt: skip
        return [best, *others]

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if kernel is DIAGONAL_SUMS:
            return _LENDER.check(kernel, form, signature, hardware, facts)
        best = self.forms(kernel, signature, hardware, facts)[0]
        if kernel.shares_keys and not isinstance(form, HopperLatentForm):
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected a form like {best} "
                "for target hopper (64x64p<slots> and its switches)"
            )
        if type(form) is not type(best):
            buffers = "" if kernel.direction == "backward" else "q<query buffers>"
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected a form like {best} "
                f"for target hopper (<queries>x<keys>s<stages>{buffers} and its switches)"
            )
        reason = self._why_not(kernel, form, signature, hardware, facts)
        if kernel is FLASH_BACKWARD and stores_boxes(signature, facts) and not getattr(form, "pair_bytes", 0):
            reason = f"expected p{signature.boxed}, tiles of the operand whose gradient is wanted"
        if reason is not None:
            raise WeftError(f"schedule: {kernel.name} {form}: {reason}")

    def _why_not(
        self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts
    ) -> str | None:
        widths = signature.widths
        if isinstance(form, HopperLatentForm):
            return no_latent_form(kernel, form, signature, hardware)
        assert kernel.refuses is not None
        reason = kernel.refuses(form, widths) or no_boxes(form, signature)
        if isinstance(form, HopperForm):
            if (form.lazy_rescale or form.pair_maximum) and not facts.attention.weighs.saves_lse:
                reason = "rows have no maximum"
            if form.drawers and not facts.attention.drops:
                reason = "no weights are dropped"
        reason = reason or no_cells_form(kernel, form, facts)
        if reason is not None:
            return reason
        sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        parts = self.parts(facts.attention, widths)
        needed = sram_bytes(kernel, form, sizes, hardware, parts, facts.traits)
        assert kernel.program is not None
        if needed + kernel.program(form, parts, facts.traits).spare > hardware.sram_per_block:
            return f"it needs {needed} bytes of SRAM, a program of {hardware.title} has {hardware.sram_per_block}"
        return None

    def template(self, code: CodePlan) -> str:
        return f"hopper/{code.schedule.algorithm}_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        own = code.signature.widths
        if code.schedule.algorithm == "split_kv":
            return latent_context(code, facts) | _offset_context(code)
        columns, value_columns = columns_of(own)
        widths = {
            "head_dim": own.head_dim, "value_dim": own.value_dim, "columns": columns, "value_columns": value_columns,
            "loads_at_positions": facts.loads_at_positions,
        }  # fmt: skip
        offset = _offset_context(code)
        if code.signature.direction == "forward":
            pieces, _ = pieces_of(forward_form(code), own)
            program = forward_program(forward_form(code), held_by(code, facts))
            return {"config": asdict(forward_form(code)) | widths | {"pieces": pieces}, "program": program, **offset}
        main, form = main_form(code)
        persistent = is_persistent(code, facts)
        pieces, value_pieces = pieces_of(form, own)
        part = {
            "part_columns": part_columns(form, own), "left_parts": left_parts(form, own),
            "parts": sums_of_a_tile(form, own) // (ROWS * part_columns(form, own)), "consumers": CONSUMERS,
            "statistics": statistics_of_a_row(facts), "pieces": pieces, "value_pieces": value_pieces,
            "own_pieces": key_pieces(piecewise(own.head_dim), own),
        }  # fmt: skip
        scale = facts.linear_scale
        # Products that start from a row's statistics wait for these: of the next tile's scores nothing could hide that.
        folds = not form.next_scores and not facts.scores_lie_far and facts.attention.weighs.saves_lse
        return {
            **offset,
            "main": main, "programs": _programs(code, facts),
            "wants_dscores": main == "flash_backward" or (bool(main) and held_by(code, facts).wants_dscores),
            "adds_up_shared": not code.signature.deterministic,
            "config": asdict(form) | widths | part,
            "query_config": asdict(backward_form(code, "flash_dquery")) if code.has("flash_dquery") else None,
            "folded": scale is not None and folds and is_plain(scale),
            "factor_at_end": _has_factor_at_end(code, facts),
            "stored": _stored(code, facts),
            "diagonals": code.borrowed is not None,
            "persistent": persistent,
            "stores_first": main == "flash_backward" and stores_first(code.signature, facts),
            "places": places_of_results(form, own) if persistent and main == "flash_backward" else None,
        } | ({"slope_at_end": True} if tables_in(code, facts) else {})  # fmt: skip

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        return launcher_of(modules, code, facts, device.index or 0)


def _programs(code: CodePlan, facts: Facts) -> dict[str, Program]:
    """Those of a backward's kernels, by name. Of two with rings, the second has hardware barriers behind the first."""
    held, (main, form) = held_by(code, facts), main_form(code)
    one_pass = main == "flash_backward"
    found = {main: program_of_keys(form, held, one_pass)} if main else {}
    if code.has("flash_dquery"):
        first = max((b.numbers.stop for p in found.values() for b in p.ring_barriers), default=FIRST_BARRIER)
        found["flash_dquery"] = program_of_queries(backward_form(code, "flash_dquery"), held, first)
    found["row_statistics"] = statistics_program(form, held, one_pass)
    found["round_dquery"] = round_dquery_program(form, held)
    return found


def _has_factor_at_end(code: CodePlan, facts: Facts) -> bool:
    """Whether sums are multiplied by the factor of q.k, in place of each pair's gradient."""
    if facts.linear_scale is not None:
        return not _differs_by_head(facts.linear_scale)
    if tables_in(code, facts):
        return True
    return code.brings_boxes and facts.scale_beside_box is not None


def _stored(code: CodePlan, facts: Facts) -> int | None:
    """The number of the read whose gradient is stored tile by tile, of those that have one."""
    if not stores_boxes(code.signature, facts):
        return None
    kinds = [kind for load, kind in facts.gradient_kinds if load.tensor.name in code.signature.wanted]
    return kinds.index("pair")


def _offset_context(code: CodePlan) -> Context:
    per_row = code.signature.offset == "per_row"
    return {
        "per_row": per_row, "given_offset": "q_offset_ptr" if per_row else "q_offset",
        "offset_kind": code.signature.offset,
    }  # fmt: skip


# -- a rotary key that heads share -------------------------------------------------------------------------------------
def _key_segments(widths: Widths) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            piece.column("key"), min(piece.columns, widths.head_dim - piece.first), "rope" if piece.shared else "key"
        )
        for piece in key_pieces(piecewise(widths.head_dim), widths)
    )


def _differs_by_head(scale: Expr) -> bool:
    return any(
        isinstance(n, Load) or (isinstance(n, Symbol) and n.name in ("batch", "head", "kv_head")) for n in nodes(scale)
    )
