"""Target `hopper`: Gluon kernels for sm_90, warp-specialised: schedule flash, with a backward in one pass or two, and
split_kv of latent caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import torch

from ...compiler.analysis.facts import Facts
from ...compiler.analysis.places import read_once
from ...compiler.planning.cost import sram_bytes
from ...compiler.planning.distances import levels_of, tables_in, tables_of, with_tables_made
from ...compiler.planning.forms import Form, HopperBackwardForm, HopperForm, HopperLatentForm
from ...compiler.planning.hardware import Hardware
from ...compiler.planning.kernels import (
    DRAWN_BACKWARD,
    FLASH,
    HOPPER_BACKWARD,
    HOPPER_STATISTICS,
    PAIR_SUMS,
    ROUND_DQUERY,
    SPLIT_KV,
    Algorithm,
    Kernel,
)
from ...compiler.planning.measures import with_measuring, with_work
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.quantities import PIECE_COLUMNS, ROTARY_COLUMNS, hopper_statistics_sram, statistics_written
from ...compiler.planning.records import Segment, Shape
from ...compiler.planning.segments import Segments, for_heads, segments_of
from ...compiler.planning.signature import PACKED, PAGED, Direction, Signature, Widths
from ...compiler.planning.target import CallTensors, Context, Launcher
from ...ir.attention import Attention
from ...ir.errors import WeftError
from ...ir.expr import Call, Const, Expr, Load, Symbol
from ...ir.reference import evaluate
from ...ir.walk import nodes
from ..functions import GLUON_LANGUAGE
from ..loader import load
from ..normalizers import softmax_only
from .hopper_launcher import HopperBackwardLauncher, HopperForwardLauncher, is_ragged_readable, is_readable
from .hopper_tiles import (
    CONSUMERS,
    ROWS,
    TILE_COLUMNS,
    backward_form,
    columns_of,
    columns_of_form,
    forward_form,
    has_pieces_apart,
    key_pieces,
    left_parts,
    main_form,
    part_columns,
    pieces_of,
    piecewise,
    statistics_of_a_row,
    sums_of_a_tile,
)
from .latent_launcher import LatentLauncher
from .triton import TritonTarget, has_triton, tiles_by_head

NARROWEST = 16  # below it tiles would be mostly zeros
RANKS = (128, 256, 384, 512)  # of latent caches: two warpgroups have as many whole pieces
LEAST_PAGE = 8  # rows of the pattern in which tiles are swizzled in SRAM


class HopperTarget:
    name = "hopper"
    measured_by = "triton"
    by_name_only = False
    partial = True
    language = GLUON_LANGUAGE
    family = "hopper"

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm == "split_kv" and signature.direction == "forward" and signature.widths.value_is_key:
            return SPLIT_KV
        if algorithm != "flash":
            return []
        kernels: tuple[Kernel, ...] = FLASH[:1]
        if signature.direction == "backward":
            summed = sums_of_queries(signature, facts)
            one_pass = ONE_PASS_DRAWN if facts.attention.drops else ONE_PASS
            whole = is_one_pass(signature) and not summed
            kernels = one_pass if whole else two_passes(signature.wanted, summed, sums_of_keys(signature, facts))
            kernels += (DIAGONAL_SUMS,) if sums_diagonals(signature, facts) else ()
        found = with_measuring(kernels, facts.traits.measured)
        found = with_work(found) if signature.sequences in PACKED else found
        return with_tables_made(found, tables_of(facts, algorithm, signature))

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return "hopper: has schedule flash only, and split_kv of latent caches"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        widths = signature.widths
        if signature.arch == "cpu":
            return "hopper: needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'"
        if not has_triton():
            return "hopper: needs Triton; pip install triton"
        if signature.arch != "sm_90":
            return f"hopper: needs compute capability 9.0, this is {signature.arch}"
        if signature.dtype not in ("bf16", "fp16"):
            return f"hopper: needs bf16 or fp16 operands, got {signature.dtype}"
        if lacking := softmax_only(facts.attention.weighs):
            return f"hopper: {lacking}"
        if kernel in SPLIT_KV:
            return _undivided(signature, facts)
        if facts.attention.drops and kernel.direction == "backward" and (lacking := _no_drawn(signature, facts)):
            return f"hopper: the backward of dropout {lacking} is computed by the triton target"
        if widths.value_is_key:
            return "hopper: absorbed latent attention is computed by the triton target, but for a few queries"
        if widths.rope_dim and (lacking := _no_shared_key(kernel, signature, facts)):
            return f"hopper: {lacking}; computed by the triton target"
        most = TILE_COLUMNS[-1]
        if not all(NARROWEST <= width <= most and width % 8 == 0 for width in (widths.head_dim, widths.value_dim)):
            return (
                f"hopper: needs D and Dv to be multiples of 8 from {NARROWEST} to {most}, "
                f"got D {widths.head_dim}, Dv {widths.value_dim}"
            )
        if facts.tile_source == "lists":
            return "hopper: lists of tiles, of a mask that reads a tensor by both positions, are for the triton target"
        if signature.sequences == "packed_paged" and facts.traits.measured is not None:
            return "hopper: masks that read tensors, of packed queries over pages, are computed by the triton target"
        if kernel.direction == "backward" and (lacking := _no_distances(signature, facts)):
            return f"hopper: backwards of scores that are read by distance {lacking} are computed by the triton target"
        return _no_backward(signature, facts) if kernel.direction == "backward" else None

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        """Tensors that the tensor memory accelerator cannot read in place."""
        if call.value is None:
            return _latent_misfit(signature, call)
        ragged = signature.sequences != "dense"
        shared = {} if call.rope is None else {"rotary key": call.rope}
        for name, tensor in {"query": call.query, "key": call.key, "value": call.value, **shared}.items():
            if not is_readable(tensor):
                return (
                    f"hopper: {name}: its address and strides must be multiples of 16 bytes for the tensor memory "
                    "accelerator"
                )
            if ragged and not is_ragged_readable(tensor):
                rows = "blocks" if signature.sequences in PAGED and name != "query" else "batch rows"
                return (
                    f"hopper: {name}: with lengths, {rows} must lie a whole number of rows of a head apart; its "
                    f"strides are {list(tensor.stride())}"
                )
        if call.rope is not None and call.rope.shape[1] != 1:
            return f"hopper: a rotary key of {call.rope.shape[1]} heads is for the triton target"
        page = call.key.shape[2]
        if signature.sequences in PAGED and page < LEAST_PAGE:
            return _small_pages(page)
        return None

    def parts(self, attention: Attention, widths: Widths) -> Segments:
        """Tiles of query and key are one piece or two; those of value and output one, but in backwards."""
        if widths.value_is_key:
            return segments_of(attention, widths)
        return Segments(_key_segments(widths), (Segment(0, widths.value_dim, "value"),))

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        widths = signature.widths
        if kernel == DIAGONAL_SUMS:
            return _LENDER.forms(kernel, signature, hardware, facts)
        if kernel in SPLIT_KV:
            narrow = widths.value_dim % (2 * PIECE_COLUMNS) > 0
            chosen = HopperLatentForm(HopperLatentForm.slots * (1 + narrow), ordered=True, prefetch=True, narrow=narrow)
            near = chosen.neighbours()
            return [chosen, *(form for form in near if self._why_not(kernel, form, signature, hardware) is None)]
        best: HopperForm | HopperBackwardForm = best_form(widths, facts)
        if kernel.direction == "backward":
            best = best_backward_form(kernel, widths, facts, sums_of_queries(signature, facts))
        if signature.boxed:
            with_boxes = _with_boxes(best, signature.boxed)
            fit = (form for form in with_boxes if self._why_not(kernel, form, signature, hardware) is None)
            best = next(fit, best)
        others = [
            form for form in best.neighbours()
            if form != best and self._why_not(kernel, form, signature, hardware) is None
        ]  # fmt: skip
        return [best, *others]

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if kernel == DIAGONAL_SUMS:
            return _LENDER.check(kernel, form, signature, hardware, facts)
        best = self.forms(kernel, signature, hardware, facts)[0]
        if kernel in SPLIT_KV and not isinstance(form, HopperLatentForm):
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
        reason = self._why_not(kernel, form, signature, hardware)
        if kernel == HOPPER_BACKWARD and stores_boxes(signature, facts) and not getattr(form, "pair_bytes", 0):
            reason = f"expected p{signature.boxed}, tiles of the operand whose gradient is wanted"
        if reason is not None:
            raise WeftError(f"schedule: {kernel.name} {form}: {reason}")

    def _why_not(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware) -> str | None:
        widths = signature.widths
        if isinstance(form, HopperLatentForm):
            return _no_latent_form(kernel, form, signature, hardware)
        if isinstance(form, HopperBackwardForm):
            reason = _no_backward_form(kernel, form, widths) or _no_boxes(form, signature)
        else:
            assert isinstance(form, HopperForm)
            reason = _no_form(form, widths) or _no_boxes(form, signature)
        if reason is not None:
            return reason
        sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        parts = for_heads(*columns_of_form(form, widths))
        if widths.rope_dim:
            parts = parts._replace(qk=_key_segments(widths))
        needed = sram_bytes(kernel, form, sizes, hardware, parts)
        if needed + _beside_tiles(form, widths) > hardware.sram_per_block:
            return f"it needs {needed} bytes of SRAM, a program of {hardware.title} has {hardware.sram_per_block}"
        return None

    def template(self, code: CodePlan) -> str:
        return f"hopper/{code.schedule.algorithm}_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        own = code.signature.widths
        if code.schedule.algorithm == "split_kv":
            return _latent_context(code, facts)
        columns, value_columns = columns_of(own)
        widths = {
            "head_dim": own.head_dim, "value_dim": own.value_dim, "columns": columns, "value_columns": value_columns,
            "loads_at_positions": facts.loads_at_positions,
        }  # fmt: skip
        offset = _offset_context(code)
        if code.signature.direction == "forward":
            pieces, _ = pieces_of(forward_form(code), own)
            return {"config": asdict(forward_form(code)) | widths | {"pieces": pieces}, **offset}
        main, form = main_form(code)
        pieces, value_pieces = pieces_of(form, own)
        part = {
            "part_columns": part_columns(form, own), "left_parts": left_parts(form, own),
            "parts": sums_of_a_tile(form, own) // (ROWS * part_columns(form, own)), "consumers": CONSUMERS,
            "statistics": statistics_of_a_row(facts), "pieces": pieces, "value_pieces": value_pieces,
            "own_pieces": key_pieces(piecewise(own.head_dim), own),
        }  # fmt: skip
        scale = facts.linear_scale
        # Products that start from a row's statistics wait for these: of the next tile's scores nothing could hide that.
        folds = not form.next_scores and not facts.scores_lie_far
        return {
            **offset,
            "main": main,
            "adds_up_shared": not code.signature.deterministic,
            "config": asdict(form) | widths | part,
            "query_config": asdict(backward_form(code, "flash_dquery")) if code.has("flash_dquery") else None,
            "folded": scale is not None and folds and _is_plain(scale),
            "factor_at_end": _has_factor_at_end(code, facts),
            "stored": _stored(code, facts),
            "diagonals": code.borrows_diagonals,
        } | ({"slope_at_end": True} if tables_in(code, facts) else {})  # fmt: skip

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        if code.schedule.algorithm == "split_kv":
            return LatentLauncher(modules, code, facts, device.index or 0, False)
        kind = HopperForwardLauncher if code.signature.direction == "forward" else HopperBackwardLauncher
        return kind(modules, code, facts, device.index or 0, False)


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


# -- latent caches -----------------------------------------------------------------------------------------------------
def _latent_context(code: CodePlan, facts: Facts) -> Context:
    form, widths = code.form(SPLIT_KV[0].name), code.signature.widths
    assert isinstance(form, HopperLatentForm)
    config = {
        **asdict(form), "head_dim": widths.head_dim, "rank": widths.value_dim,
        "rope": widths.head_dim - widths.value_dim, "piece": form.piece, "rotary": ROTARY_COLUMNS,
        "loads_at_positions": facts.loads_at_positions,
    }  # fmt: skip
    return {"config": config, "tiles_by_head": False, **_offset_context(code)}


def _undivided(signature: Signature, facts: Facts) -> str | None:
    """Why it does not divide the keys of such calls."""
    widths, attention = signature.widths, facts.attention
    rank, rope = widths.value_dim, widths.head_dim - widths.value_dim
    if rank not in RANKS or rope > ROTARY_COLUMNS or rope % 8:
        return (
            f"hopper: latent caches have a rank of {alternatives(RANKS)} and a multiple of 8 rotary columns up to "
            f"{ROTARY_COLUMNS}, got {rank} and {rope}; computed by the triton target"
        )
    if signature.sequences == "packed":
        return "hopper: schedule split_kv has no packed keys; use schedule='flash'"
    lacking = {
        "dropout": attention.drops,
        "a mask that reads tensors by position": facts.traits.measured is not None,
        "a mask whose tiles differ by head": tiles_by_head(facts, facts.tile_source),
    }
    found = next((what for what, is_there in lacking.items() if is_there), None)
    return None if found is None else f"hopper: latent caches with {found} are computed by the triton target"


def _latent_misfit(signature: Signature, call: CallTensors) -> str | None:
    """Why a call's tensors are not brought by tiles."""
    group = call.query.shape[1] // call.key.shape[1]
    if ROWS % group and group % ROWS:
        return (
            f"hopper: of a latent cache the query heads of a key head must divide {ROWS} or be a multiple of it, got "
            f"{group}"
        )
    if not is_readable(call.query):
        return "hopper: query: its address and strides must be multiples of 16 bytes for the tensor memory accelerator"
    ragged = signature.sequences != "dense"
    if not (is_ragged_readable(call.key) if ragged else is_readable(call.key)):
        return (
            "hopper: key: its address and strides must be multiples of 16 bytes for the tensor memory accelerator"
            + (", and blocks or batch rows must lie a whole number of rows apart" if ragged else "")
        )
    page = call.key.shape[2]
    if signature.sequences in PAGED and page < LEAST_PAGE:
        return _small_pages(page)
    return None


def _small_pages(page: int) -> str:
    return (
        f"hopper: pages of {page} rows are too small for the tensor memory accelerator, which wants "
        f"{LEAST_PAGE} or more"
    )


def _no_latent_form(kernel: Kernel, form: HopperLatentForm, signature: Signature, hardware: Hardware) -> str | None:
    """Why the kernel of latent caches cannot have this form."""
    widths = signature.widths
    least = 2 * (widths.value_dim // form.piece)
    if widths.value_dim % (2 * form.piece):
        return f"expected +narrow: a rank of {widths.value_dim} has no even number of pieces of {form.piece} columns"
    if form.slots < least:
        return f"expected {least} slots or more, for two tiles of keys"
    sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
    parts = Segments((Segment(0, widths.value_dim, "key"), Segment(widths.value_dim, ROTARY_COLUMNS, "key")),
                     (Segment(0, widths.value_dim, "value"),), value_is_key=True)  # fmt: skip
    needed = sram_bytes(kernel, form, sizes, hardware, parts)
    if needed > hardware.sram_per_block:
        return f"it needs {needed} bytes of SRAM, a program of {hardware.title} has {hardware.sram_per_block}"
    return None


# -- a rotary key that heads share -------------------------------------------------------------------------------------
def _key_segments(widths: Widths) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            piece.column("key"), min(piece.columns, widths.head_dim - piece.first), "rope" if piece.shared else "key"
        )
        for piece in key_pieces(piecewise(widths.head_dim), widths)
    )


def _no_shared_key(kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
    """Why it cannot have a piece of keys from a tensor that heads share."""
    widths = signature.widths
    if not has_pieces_apart(widths):
        return (
            "needs keys of 64 or 128 columns and fewer rotary ones for expanded latent attention, got "
            f"{widths.head_dim - widths.rope_dim} and {widths.rope_dim}"
        )
    if kernel.direction == "forward":
        return None
    if signature.sequences != "dense":
        return "needs sequences of one length for gradients of expanded latent attention"
    if not _fits_by_rows(widths):
        return f"needs Dv of 128 or less for gradients of expanded latent attention, got {widths.value_dim}"
    return None


# -- backwards ---------------------------------------------------------------------------------------------------------
def _fits_by_rows(widths: Widths) -> bool:
    """Whether one consumer has registers for the sums of 64 keys."""
    return widths.value_dim <= 128 and widths.head_dim <= 192


def is_one_pass(signature: Signature) -> bool:
    """Whether one kernel for all gradients is right, and faster.

    A query's gradient alone has three products without it, others have four. Beside the sums of more than 128 columns
    there is no room for dQ on its way out, and two passes are the faster (docs/performance.md).
    """
    wanted, widths = signature.wanted, signature.widths
    both = "query" in wanted and bool(wanted & OWNED_BY_KEYS)
    return both and not signature.deterministic and max(widths.head_dim, widths.value_dim) <= 128


OWNED_BY_KEYS = {"key", "value", "rope"}  # what the pass that owns keys has gradients of
ONE_PASS: tuple[Kernel, ...] = (HOPPER_STATISTICS, HOPPER_BACKWARD, ROUND_DQUERY)
_LENDER = TritonTarget()  # of kernels that run beside those of a backward
DIAGONAL_SUMS = PAIR_SUMS[1]  # of another target, in a module of its own
ONE_PASS_DRAWN: tuple[Kernel, ...] = (HOPPER_STATISTICS, DRAWN_BACKWARD, ROUND_DQUERY)


MOST_BY_DISTANCE = 128  # columns beside which a tile's reads have registers


def _no_distances(signature: Signature, facts: Facts) -> str | None:
    """Where its backwards do not read a score by distance, or sum such a gradient."""
    tables, widths = tables_of(facts, "flash", signature), signature.widths
    if not tables and not sums_diagonals(signature, facts):
        return None
    if max(widths.head_dim, widths.value_dim) > MOST_BY_DISTANCE:
        return f"with D or Dv above {MOST_BY_DISTANCE}"
    if widths.rope_dim or facts.attention.drops:
        return "of expanded latent attention, or with dropout,"
    if tables and facts.score_of_levels(tables) is None:
        return "and are no number times q.k plus what they have by distance"
    return None


def _no_drawn(signature: Signature, facts: Facts) -> str | None:
    """Where it does not draw what a backward drops."""
    if signature.sequences != "dense":
        return "of sequences of their own lengths"
    if signature.widths.rope_dim:
        return "of expanded latent attention"
    if not is_one_pass(signature):
        return "in two passes"
    if _wanted_kinds(signature, facts):
        return "with gradients of operands"
    return None if facts.boxed_read is None else "beside what each pair reads"  # which has no tiles there


def sums_of_queries(signature: Signature, facts: Facts) -> bool:
    """Whether reads of the score have gradients that the pass that owns queries sums."""
    return not _wanted_kinds(signature, facts).keys().isdisjoint(("total", "row"))


def sums_of_keys(signature: Signature, facts: Facts) -> bool:
    """The same of the pass that owns keys, which has level pairs of tables too."""
    return "column" in _wanted_kinds(signature, facts) or levels_of(facts, "flash", signature) is not None


def sums_diagonals(signature: Signature, facts: Facts) -> bool:
    """Whether the kernel that sums along diagonals runs beside these."""
    return "diagonal" in _wanted_kinds(signature, facts)


def _wanted_kinds(signature: Signature, facts: Facts) -> Counter[str]:
    """How the wanted gradients of reads of the score are summed, and how many are so."""
    return Counter(
        kind for load, kind in facts.gradient_kinds if kind != "sink" and load.tensor.name in signature.wanted
    )


def stores_boxes(signature: Signature, facts: Facts) -> bool:
    """Whether one pass stores the gradient of what each pair reads: tiles of dS, which lie in SRAM for dQ.

    So it is where it is added to the score, each entry once, and q.k has one factor, with which sums are multiplied.
    """
    read = facts.boxed_read
    if read is None or signature.boxed != 2 or not is_one_pass(signature):
        return False
    alone = read.tensor.name in signature.wanted and _wanted_kinds(signature, facts).total() == 1
    return alone and read_once(read) and facts.scale_beside_box is not None


def two_passes(wanted: frozenset[str], summed: bool = False, by_keys: bool = False) -> tuple[Kernel, ...]:
    """The kernels of wanted gradients, each sum with one owner; of both sides where only a sink has one.

    Statistics are as the keys' pass wants them, if it runs. summed, by_keys: gradients of the score's operands, which
    the queries' or the keys' pass sums, are wanted too.
    """
    _, _, dquery, dkey_dvalue = FLASH
    owns_queries, owns_keys = "query" in wanted or summed, bool(wanted & OWNED_BY_KEYS) or by_keys
    passes = [*([dquery] if owns_queries else []), *([dkey_dvalue] if owns_keys else [])]
    passes = passes or [dquery, dkey_dvalue]
    follows = passes[-1].name
    statistics = replace(HOPPER_STATISTICS, follows=follows, written=statistics_written, sram=hopper_statistics_sram)
    return statistics, *passes


LARGEST_HANDED_ON = 2.0**14  # of fp16, whose largest number is 65504: what one consumer may hand to another


def _no_backward(signature: Signature, facts: Facts) -> str | None:
    """Why it cannot compute these gradients. Those of a sink need statistics of rows alone."""
    wanted, kinds = signature.wanted, facts.gradient_kinds
    summed = {load.tensor.name for load, kind in kinds if kind not in ("sink", "diagonal")}
    if not wanted & ({"query"} | OWNED_BY_KEYS | summed):
        what = "a table's" if sums_diagonals(signature, facts) else "a sink's"
        return f"hopper: {what} gradient alone ({', '.join(sorted(wanted))}) is computed by the triton target"
    by_pair = sorted({load.tensor.name for load, kind in kinds if kind == "pair"} & wanted)
    if by_pair and not stores_boxes(signature, facts):
        lacking = (
            f"hopper: gradients of operands read by both positions ({', '.join(by_pair)}) are computed by the triton "
            "target"
        )
        read = facts.boxed_read
        if read is None or [read.tensor.name] != by_pair or not read_once(read):
            return lacking
        return (
            f"{lacking}, but in one pass, where {by_pair[0]} has 16 bits an entry, rows a multiple of 16 bytes apart, "
            "and is added to a score that is a number times q.k"
        )
    if sums_of_keys(signature, facts) and not _fits_by_rows(signature.widths):
        return (
            "hopper: gradients of operands read by kv_pos need D of 192 and Dv of 128 or less; computed by the triton "
            "target"
        )
    hands_on = not _fits_by_rows(signature.widths) and facts.linear_scale is None and signature.dtype == "fp16"
    if hands_on and facts.largest_slope > LARGEST_HANDED_ON:
        return (
            "hopper: above D 192 or Dv 128 a backward in fp16 needs a score whose derivative is known to be below "
            f"{LARGEST_HANDED_ON:.0f}; computed by the triton target"
        )
    return None


def _no_form(form: Form, widths: Widths) -> str | None:
    """Why a forward cannot have this form."""
    assert isinstance(form, HopperForm)
    if form.consumers not in (2, 3) or form.block_kv not in (64, 128) or not 2 <= form.stages <= 4:
        return "expected 2 or 3 consumers of 64 rows, 64 or 128 keys and 2 to 4 stages"
    if form.query_buffers not in (1, 2):
        return "expected 1 or 2 query buffers"
    columns, value_columns = columns_of_form(form, widths)
    left = pieces_of(form, widths)[0][0].columns
    if form.consumers == 3 and value_columns > 64:
        return "three consumers have too few registers for D 128"
    if form.output_in_query and (form.query_buffers != 1 or left != value_columns or form.query_in_registers):
        return "the output takes the place of one query tile in SRAM, of as many columns"
    if value_columns == 256 and form.block_kv > 64:
        return "128 keys leave too few registers for Dv 256"
    if columns > 128 and form.query_in_registers:
        return "more than 128 columns of a query leave too few registers"
    return None


def _beside_tiles(form: HopperForm | HopperBackwardForm, widths: Widths) -> int:
    """Bytes that the formulas of SRAM leave out: barriers and cards of a forward; of a backward two statistics more of
    far scores, and that a consumer's share of dQ has room for the wider piece of columns."""
    if isinstance(form, HopperForm):
        return 2048
    keys, _ = pieces_of(form, widths)
    narrower = 0 if len(keys) == 1 or form.by_columns else keys[0].columns - keys[1].columns
    return 128 + 8 * form.block_q * form.stages + 4 * form.block_q * narrower


def _no_boxes(form: Form, signature: Signature) -> str | None:
    """Why tiles of what pairs read cannot be brought."""
    assert isinstance(form, HopperForm | HopperBackwardForm)
    if form.pair_bytes in (0, signature.boxed):
        return None
    return (
        f"p{form.pair_bytes} is for a float operand of {form.pair_bytes} bytes an element whose last index is kv_pos, "
        "and another one q_pos, and whose address and strides are multiples of 16 bytes"
    )


def _no_backward_form(kernel: Kernel, form: HopperBackwardForm, widths: Widths) -> str | None:
    """Why a kernel of the backward cannot have this form."""
    if kernel == DRAWN_BACKWARD and (form.block_q != 64 or form.next_scores or form.pair_bytes):
        return "with dropout, expected 64 queries, whose bits two warps draw"
    if form.pair_bytes and (kernel.name != "flash_backward" or form.block_q != 64 or form.next_scores):
        return "tiles of what pairs read are brought in one pass, with 64 queries"
    if kernel.name == "flash_dquery":
        sizes = form.block_q == 128 and form.block_kv in (32, 64, 128) and form.stages == 2
        if not sizes or form.next_scores or form.by_columns:
            return "expected 128 queries, 32, 64 or 128 keys and 2 stages"
        if form.block_kv == 128 and max(columns_of(widths)) == 256:
            return "128 keys leave too few registers for D 256"
        return None
    if form.by_columns:
        if kernel.name == "flash_backward":
            return "one pass has no form by columns"
        if form.block_q != 64 or form.block_kv != 64 or form.stages != 2 or form.next_scores:
            return "by columns, expected 64 queries, 64 keys and 2 stages"
        return None
    if max(columns_of(widths)) == 256 and not (_fits_by_rows(widths) and kernel.name == "flash_dkey_dvalue"):
        return "sums of 256 columns have no room but by columns"
    one_pass = kernel.name == "flash_backward"
    stages = (2, 3) if one_pass else (2,)  # slots of two kernels share hardware barriers
    queries = (64, 128) if one_pass else (32, 64, 128)  # dQ's tiles have 64 rows or more
    if form.block_kv != 128 or form.block_q not in queries or form.stages not in stages:
        return f"expected {alternatives(queries)} queries, 128 keys and {alternatives(stages)} stages"
    if (form.block_q == 128 or form.next_scores) and max(columns_of(widths)) > 128:
        return "128 queries, and scores of the next tile, leave too few registers for D 192"
    if form.block_q == 128 and max(columns_of(widths)) > 64:
        return "128 queries leave too few registers for D 128"
    return None


def alternatives(numbers: Sequence[int]) -> str:
    """In words: "64 or 128"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _is_plain(scale: Expr) -> bool:
    """Whether the score's factor is a positive number that only the head dimension decides, and far from underflow."""
    leaves = [n for n in nodes(scale) if not isinstance(n, Call)]
    plain = all(isinstance(n, Const) or (isinstance(n, Symbol) and n.name == "head_dim") for n in leaves)
    if not plain:
        return False
    value = float(evaluate(scale, {"head_dim": 128}, torch.float64, torch.device("cpu")))
    return 2.0**-40 < value < 2.0**40


def _differs_by_head(scale: Expr) -> bool:
    return any(
        isinstance(n, Load) or (isinstance(n, Symbol) and n.name in ("batch", "head", "kv_head")) for n in nodes(scale)
    )


def best_form(widths: Widths, facts: Facts) -> HopperForm:
    """The form that measured best for tiles of these widths (docs/performance.md).

    What reads positions needs registers for them, and so does dropout: fewer consumers at D64, the query in SRAM at
    D128.
    """
    spare = not (facts.traits.positional or facts.traits.drops)  # registers
    columns, value_columns = piecewise(widths.head_dim), columns_of(widths)[1]
    if columns == 256 or value_columns == 256:
        return HopperForm(2, 64, 2, lazy_rescale=True, output_in_query=columns == value_columns)
    if columns > 128:
        in_place = value_columns == 128  # as many as of the query's left piece
        return HopperForm(
            2, 128, 2, lazy_rescale=True, output_in_query=in_place, overlap_edges=facts.score_reads_positions
        )
    if max(columns, value_columns) <= 64:
        return HopperForm(3 if spare else 2, 128, 3, 2 if spare else 1, query_in_registers=not spare, pair_maximum=True)
    return HopperForm(
        2, 128, 2, query_in_registers=spare, lazy_rescale=True, overlap_edges=facts.score_reads_positions
    )  # fmt: skip


def _with_boxes(best: HopperForm | HopperBackwardForm, pair_bytes: int) -> Iterator[HopperForm | HopperBackwardForm]:
    """The form with tiles of what pairs read in SRAM, then others that take less of it."""
    if isinstance(best, HopperBackwardForm):
        for stages in (3, 2):
            yield replace(best, stages=stages, pair_bytes=pair_bytes)
        return
    for block_kv in dict.fromkeys((best.block_kv, 64)):
        for in_place in dict.fromkeys((best.output_in_query, True)):
            for stages in range(best.stages, 1, -1):
                yield replace(
                    best, block_kv=block_kv, output_in_query=in_place, stages=stages, pair_bytes=pair_bytes,
                    lazy_rescale=True,
                )  # fmt: skip


def best_backward_form(kernel: Kernel, widths: Widths, facts: Facts, summed: bool) -> HopperBackwardForm:
    """The form that measured best for tiles of these widths (docs/performance.md).

    What a score's derivative computes, or a mask reads, needs registers that tiles of 128 queries leave to none.
    summed: gradients of the score's operands are wanted, for which the same holds.
    """
    width = max(columns_of(widths))
    busy = facts.loads_at_positions or facts.traits.drops
    spare = facts.linear_scale is not None and not busy  # registers
    if width == 256:
        if kernel.name == "flash_dquery":
            return HopperBackwardForm(128, 32 if columns_of(widths)[1] == 256 else 64)
        if not _fits_by_rows(widths):
            return HopperBackwardForm(64, 64, by_columns=True)
        return HopperBackwardForm(32 if piecewise(widths.head_dim) == 192 else 64)  # or scores spill beside the sums
    if kernel.name == "flash_dquery":
        wide = spare or (width <= 64 and not facts.loads_at_positions)
        return HopperBackwardForm(128, 128 if wide and not summed else 64)
    if width > 64 or not spare:
        return HopperBackwardForm(64)
    return HopperBackwardForm(128, next_scores=kernel.name == "flash_backward")
