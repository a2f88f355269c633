"""Target `hopper`: Gluon kernels for sm_90, warp-specialised: schedule flash, with a backward in one pass or two, and
split_kv of latent caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.by_distance import tables_of
from ....compiler.planning.cost import sram_bytes
from ....compiler.planning.form import Form
from ....compiler.planning.kernel import Algorithm, Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.records import Segment, Shape
from ....compiler.planning.segments import Segments, segments_of
from ....compiler.planning.signature import Direction, Signature, Widths
from ....compiler.planning.target import CallTensors, Launcher, Printing, Target
from ....ir.attention import Attention
from ....ir.errors import WeftError, counted
from ...dialects import GLUON
from ...launch.descriptors import is_ragged_readable, is_readable
from ...loader import load
from ..triton.kernels.measures import with_measuring
from ..triton.kernels.pair_sums import FLASH_DDIAGONALS
from ..triton.kernels.tables import with_tables_made
from ..triton.kernels.work import with_work
from ..triton.target import TritonTarget
from . import paces
from .context import records_of
from .form_rules import best_backward_form, best_form, no_boxes, no_cells_form, with_boxes
from .forms import HopperBackwardForm, HopperForm, HopperLatentForm
from .gradients import (
    OWNED_BY_KEYS,
    is_lean,
    is_one_pass,
    stores_boxes,
    stores_first,
    sums_diagonals,
    sums_of_keys,
    sums_of_queries,
)
from .kernels.backward import FIRST_STORED_BACKWARD, FLASH_BACKWARD, FLASH_DKEY_DVALUE
from .kernels.dquery import FLASH_DQUERY
from .kernels.forward import FLASH_FORWARD, TURN_VALUES
from .kernels.latent import JOIN_PARTS, SPLIT_FORWARD
from .kernels.statistics import FIRST_STORED, ROUND_DQUERY, ROW_STATISTICS, statistics_for
from .latent import LEAST_PAGE, best_latent_form, no_latent_form, uneven_group
from .launcher import launcher_of
from .pieces import key_pieces, piecewise
from .rules import Case, of_all, of_backwards, of_forwards, of_latent_caches, refused

ONE_PASS: tuple[Kernel, ...] = (ROW_STATISTICS, FLASH_BACKWARD, ROUND_DQUERY)
ONE_PASS_STORED: tuple[Kernel, ...] = (FIRST_STORED, FIRST_STORED_BACKWARD, ROUND_DQUERY)
DIAGONAL_SUMS = FLASH_DDIAGONALS  # of another target, in a module of its own
_LENDER = TritonTarget()  # of kernels that run beside those of a backward


def two_passes(wanted: frozenset[str], summed: bool = False, by_keys: bool = False) -> tuple[Kernel, ...]:
    """The kernels of wanted gradients, each sum with one owner; of both sides where only a sink has one.

    Statistics are as the keys' pass wants them, if it runs. summed, by_keys: gradients of the score's operands, which
    the queries' or the keys' pass sums, are wanted too.
    """
    owns_queries, owns_keys = "query" in wanted or summed, bool(wanted & OWNED_BY_KEYS) or by_keys
    both = not (owns_queries or owns_keys)
    passes = [FLASH_DQUERY] if owns_queries or both else []
    passes += [FLASH_DKEY_DVALUE] if owns_keys or both else []
    return statistics_for(passes[-1].name), *passes


class HopperTarget(Target):
    name = "hopper"
    measured_by = "triton"
    by_name_only = interprets = False
    serves = ""
    partial = multiplies_fp8 = True
    language = GLUON
    family = "hopper"
    printing = Printing("apart", visits_empty=True, narrow_columns=paces.NARROW, splits_tables=True)

    def remarks(self, code: CodePlan, facts: Facts) -> Sequence[str]:
        return (*_many_rows(code), *_boxes(facts, code))

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm == "split_kv" and signature.direction == "forward" and signature.widths.value_is_key:
            return SPLIT_FORWARD, JOIN_PARTS
        if algorithm != "flash":
            return []
        kernels: tuple[Kernel, ...] = (TURN_VALUES, FLASH_FORWARD) if signature.dtypes.quantized else (FLASH_FORWARD,)
        if signature.direction == "backward":
            summed = sums_of_queries(signature, facts)
            if is_one_pass(signature) and not summed:
                kernels = ONE_PASS_STORED if stores_first(signature, facts) else ONE_PASS
            else:
                kernels = two_passes(signature.wanted, summed, sums_of_keys(signature, facts))
            if not facts.attention.canonical.weighs.saves_lse:
                kernels = tuple(k for k in kernels if k.name != "row_statistics")
            kernels += (DIAGONAL_SUMS,) if sums_diagonals(signature, facts) else ()
        found = with_measuring(kernels, facts.traits.measured)
        found = with_work(found) if signature.sequences.rows.packed else found
        return with_tables_made(found, tables_of(facts, algorithm, signature))

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return "hopper: has schedule flash only, and split_kv of latent caches"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        case, of_heads = Case(signature, facts), of_backwards if kernel.direction == "backward" else of_forwards
        absorbed = kernel.shares_keys or signature.widths.value_is_key
        lacking = refused(of_all(case), of_latent_caches(case)) if absorbed else None
        return lacking if kernel.shares_keys else lacking or refused(of_all(case), of_heads(case))

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        """Tensors that the tensor memory accelerator cannot read in place."""
        is_latent, sequences = call.value is None, signature.sequences
        if is_latent and (uneven := uneven_group(call.query.shape[1] // call.key.shape[1])):
            return uneven
        tensors, in_any_rows = {"query": call.query, "key": call.key}, {"query"} if is_latent else set()
        if call.value is not None:
            tensors["value"] = call.value
            if signature.dtypes.quantized:  # it may lie in columns, which `turn_values` reads too
                tensors["value"] = call.value.mT if call.value.stride(2) == 1 else call.value
                in_any_rows = {"value"}
        if call.rope is not None:
            tensors["rotary key"] = call.rope
        for name, tensor in tensors.items():
            if not is_readable(tensor):
                return (
                    f"hopper: {name}: its address and strides must be multiples of 16 bytes for the tensor memory "
                    "accelerator"
                )
            if sequences.ragged and not is_ragged_readable(tensor) and name not in in_any_rows:
                rows = "blocks" if sequences.keys.pooled and name != "query" else "batch rows"
                return (
                    f"hopper: {name}: with lengths, {rows} must lie a whole number of rows of a head apart; its "
                    f"strides are {list(tensor.stride())}"
                )
        if call.rope is not None and call.rope.shape[1] != 1 and not is_latent:
            return f"hopper: a rotary key of {counted(call.rope.shape[1], 'head')} is for the triton target"
        page = call.key.shape[2]
        if sequences.keys.pooled and page < LEAST_PAGE:
            return (
                f"hopper: pages of {page} rows are too small for the tensor memory accelerator, which wants "
                f"{LEAST_PAGE} or more"
            )
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
            chosen = best_latent_form(signature)
            near = chosen.neighbours()
            return [chosen, *(form for form in near if self._why_not(kernel, form, signature, hardware, facts) is None)]
        is_fp8 = bool(signature.dtypes.quantized)
        best: HopperForm | HopperBackwardForm = best_form(widths, facts, signature.short_call, is_fp8)
        if kernel.direction == "backward":
            summed = sums_of_queries(signature, facts)
            best = best_backward_form(kernel, widths, facts, summed, is_lean(signature, facts))
        if signature.boxed and not is_fp8:
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
        reason = kernel.refuses(form, widths, facts.traits) or no_boxes(form, signature)
        reason = reason or no_cells_form(kernel, form, facts)
        if bool(signature.dtypes.quantized) != getattr(form, "fp8", False):
            reason = reason or "+fp8 is for calls whose operands are all FP8, and these have no other"
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

    def context(self, code: CodePlan, facts: Facts) -> tuple[object, ...]:
        return records_of(code, facts, self.printing)

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        return launcher_of(modules, code, facts, device.index or 0)


# -- a rotary key that heads share -------------------------------------------------------------------------------------
def _key_segments(widths: Widths) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            piece.column("key"), min(piece.columns, widths.head_dim - piece.first), "rope" if piece.shared else "key"
        )
        for piece in key_pieces(piecewise(widths.head_dim), widths)
    )


def _many_rows(code: CodePlan) -> Iterator[str]:
    """How a schedule for few queries computes many, since the target has no other."""
    if code.schedule.algorithm == "split_kv" and not code.signature.few_queries:
        how = (
            "programs that run at once have equal shares of the keys that all rows see"
            if code.signature.sequences.rows.packed
            else "a program has all keys of a tile of rows, or a part of them where tiles of rows are few"
        )
        yield f"many queries of a latent cache are computed by split_kv too, which hopper has alone: {how}"


def _boxes(facts: Facts, code: CodePlan) -> Iterator[str]:
    """How what pairs read is read: tiles of it may be brought."""
    read = facts.boxed_read
    if read is None:
        return
    if code.brings_boxes:
        yield f"tiles of {read} are brought to SRAM with keys"
    elif code.signature.boxed:
        yield f"{read} is read pair by pair: tiles of it have no room in SRAM beside those of keys and values"
    else:
        yield (
            f"{read} is read pair by pair: tiles of it want 16 or 32 bits an entry, and an address and strides that "
            "are multiples of 16 bytes, that of the last dimension 1"
        )
