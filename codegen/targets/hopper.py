"""Target `hopper`: Gluon kernels for sm_90, warp-specialised: schedule flash, with a backward in one pass or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from ...compiler.analysis.facts import Facts
from ...compiler.planning.cost import sram_bytes
from ...compiler.planning.forms import Form, HopperBackwardForm, HopperForm, Tiling
from ...compiler.planning.hardware import Hardware
from ...compiler.planning.kernels import (
    FLASH,
    HOPPER_BACKWARD,
    HOPPER_STATISTICS,
    ROUND_DQUERY,
    SPANS,
    Algorithm,
    Kernel,
    hopper_statistics_sram,
    statistics_written,
    with_measuring,
)
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.records import Segment, Shape
from ...compiler.planning.segments import Segments, for_heads
from ...compiler.planning.signature import Direction, Signature, Widths
from ...compiler.planning.target import CallTensors, Context, Launcher, Named, Partition, Place
from ...ir.attention import Attention
from ...ir.errors import WeftError
from ...ir.expr import Call, Const, Expr, Load, Symbol
from ...ir.reference import evaluate
from ...ir.walk import nodes
from ..binding import Binding, rows_of
from ..functions import GLUON_LANGUAGE
from ..loader import load
from ..normalizers import softmax_only
from .triton import has_triton
from .triton_launcher import Mode, TritonLauncher, flat_place, spans_of, tiles_of

L2_BYTES = 40_000_000  # of an H100's or H200's 50 MB: what K and V of the heads in flight may take
TILE_COLUMNS = (64, 128, 256)  # narrower operands are filled up with zeros, by TMA
NARROWEST = 40  # below it tiles would be mostly zeros
_ROWS = 64  # of a consumer
CONSUMERS = 2  # of the backward
_LINE = 128  # floats of a line of a part


class HopperTarget:
    name = "hopper"
    measured_by = "triton"
    by_name_only = False
    partial = True
    language = GLUON_LANGUAGE
    family = "hopper"

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm != "flash":
            return []
        kernels: tuple[Kernel, ...] = FLASH[:1]
        if signature.direction == "backward":
            summed = sums_of_queries(signature, facts)
            kernels = ONE_PASS if is_one_pass(signature) and not summed else two_passes(signature.wanted, summed)
        return with_measuring(kernels, facts.traits.measured)

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return "hopper: has schedule flash only"

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
        if widths.rope_dim or widths.value_is_key:
            return "hopper: latent attention is computed by the triton target"
        most = TILE_COLUMNS[-1]
        if not all(NARROWEST <= width <= most and width % 8 == 0 for width in (widths.head_dim, widths.value_dim)):
            return (
                f"hopper: needs D and Dv to be multiples of 8 from {NARROWEST} to {most}, "
                f"got D {widths.head_dim}, Dv {widths.value_dim}"
            )
        if signature.sequences != "dense":
            return "hopper: sequences of their own lengths are computed by the triton target"
        return _no_backward(signature, facts) if kernel.direction == "backward" else None

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        """Tensors that the tensor memory accelerator cannot read in place."""
        assert call.value is not None
        for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
            if not _is_readable(tensor):
                return (
                    f"hopper: {name}: its address and strides must be multiples of 16 bytes for the tensor memory "
                    "accelerator"
                )
        return None

    def parts(self, attention: Attention, widths: Widths) -> Segments:
        """Tiles of query and key are one piece or two; those of value and output one, but in backwards."""
        keys = _two("key", _piecewise(widths.head_dim))
        own = (Segment(p.first, min(p.columns, widths.head_dim - p.first), "key") for p in keys)
        return Segments(tuple(own), (Segment(0, widths.value_dim, "value"),))

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        widths = signature.widths
        best: HopperForm | HopperBackwardForm = best_form(widths, facts)
        if kernel.direction == "backward":
            best = best_backward_form(kernel, widths, facts, sums_of_queries(signature, facts))
        others = [
            form for form in best.neighbours()
            if form != best and self._why_not(kernel, form, signature, hardware) is None
        ]  # fmt: skip
        return [best, *others]

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        best = self.forms(kernel, signature, hardware, facts)[0]
        if type(form) is not type(best):
            buffers = "" if kernel.direction == "backward" else "q<query buffers>"
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected a form like {best} "
                f"for target hopper (<queries>x<keys>s<stages>{buffers} and its switches)"
            )
        reason = self._why_not(kernel, form, signature, hardware)
        if reason is not None:
            raise WeftError(f"schedule: {kernel.name} {form}: {reason}")

    def _why_not(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware) -> str | None:
        widths = signature.widths
        reason = (
            _no_backward_form(kernel, form, widths) if isinstance(form, HopperBackwardForm) else _no_form(form, widths)
        )
        if reason is not None:
            return reason
        sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        needed = sram_bytes(kernel, form, sizes, hardware, for_heads(*columns_of_form(form, widths)))
        if needed + 2048 > hardware.sram_per_block:  # barriers and cards
            return f"it needs {needed} bytes of SRAM, a program of {hardware.title} has {hardware.sram_per_block}"
        return None

    def template(self, code: CodePlan) -> str:
        return f"hopper/flash_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        own = code.signature.widths
        columns, value_columns = columns_of(own)
        widths = {
            "head_dim": own.head_dim, "value_dim": own.value_dim, "columns": columns, "value_columns": value_columns,
            "loads_at_positions": facts.loads_at_positions,
        }  # fmt: skip
        per_row = code.signature.offset == "per_row"
        offset = {"per_row": per_row, "given_offset": "q_offset_ptr" if per_row else "q_offset"}
        if code.signature.direction == "forward":
            pieces = _two("key", columns_of_form(_forward_form(code), own)[0])
            return {"config": asdict(_forward_form(code)) | widths | {"pieces": pieces}, **offset}
        main, form = _main_form(code)
        pieces, value_pieces = pieces_of(form, own)
        part = {
            "part_columns": part_columns(form, own), "left_parts": left_parts(form, own),
            "parts": sums_of_a_tile(form, own) // (_ROWS * part_columns(form, own)), "consumers": CONSUMERS,
            "statistics": statistics_of_a_row(facts), "pieces": pieces, "value_pieces": value_pieces,
            "boxes": boxes_of(pieces), "value_boxes": boxes_of(value_pieces),
        }  # fmt: skip
        scale = facts.linear_scale
        return {
            **offset,
            "main": main,
            "config": asdict(form) | widths | part,
            "query_config": asdict(_backward_form(code, "flash_dquery")) if code.has("flash_dquery") else None,
            "folded": scale is not None and not facts.scores_lie_far and _is_plain(scale),
            "factor_at_end": scale is not None and not _differs_by_head(scale),
        }

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        kind = HopperForwardLauncher if code.signature.direction == "forward" else HopperBackwardLauncher
        return kind(modules, code, facts, device.index or 0, False)


def columns_of(widths: Widths) -> tuple[int, int]:
    """Columns of tiles of query and key, and of value and output."""
    columns, value_columns = (
        next((n for n in TILE_COLUMNS if n >= width), TILE_COLUMNS[-1]) for width in (widths.head_dim, widths.value_dim)
    )
    return columns, value_columns


@dataclass(frozen=True)
class Piece:
    """Columns of a tile that lie together in SRAM, of the operands of a backward."""

    of: Literal["key", "value"]
    columns: int
    name: str = ""  # of one of several
    first: int = 0  # column
    box: str = ""  # its descriptors are called <tensor><box>_desc

    # What generated code calls these:
    @property
    def is_whole(self) -> bool:
        return not self.name

    @property
    def width(self) -> str:
        return ("VALUE_COLUMNS" if self.of == "value" else "COLUMNS") if self.is_whole else str(self.columns)

    @property
    def sums(self) -> str:
        """The layout of sums of as many columns."""
        return f"{self.of.upper()}_GRADIENT" if self.is_whole else f"SUMS_OF_{self.columns}"

    @property
    def operand(self) -> str:
        """The layout of what is multiplied to them, in registers."""
        return f"{self.of.upper()}_OPERAND" if self.is_whole else f"gl.DotOperandLayout(0, {self.sums}, 2)"


def columns_of_form(form: Form, widths: Widths) -> tuple[int, int]:
    """Columns of the tiles of the kernel that has a form."""
    columns, value_columns = columns_of(widths)
    if isinstance(form, HopperBackwardForm):
        if form.by_columns:
            return max(128, columns), max(128, value_columns)
        if form.block_q != 128:  # flash_dquery, which has 128 queries, has whole tiles
            return _piecewise(widths.head_dim), _piecewise(widths.value_dim)
        return columns, value_columns
    return _piecewise(widths.head_dim), value_columns


def _piecewise(width: int) -> int:
    """The fewest columns, of 64 or 128 and 16, 32 or 64 more."""
    known = (64, 80, 96, 128, 144, 160, 192, 256)
    return next(columns for columns in known if columns >= width)


def _fits_by_rows(widths: Widths) -> bool:
    """Whether one consumer has registers for the sums of 64 keys."""
    return widths.value_dim <= 128 and widths.head_dim <= 192


def pieces_of(form: HopperBackwardForm, widths: Widths) -> tuple[list[Piece], list[Piece]]:
    """The pieces of tiles of query and key, and of value and output; by columns, those of either consumer."""
    columns, value_columns = columns_of_form(form, widths)
    if form.by_columns:
        return _halves("key", columns), _halves("value", value_columns)
    return _two("key", columns), _two("value", value_columns)


def _two(of: Literal["key", "value"], columns: int) -> list[Piece]:
    """One piece, or where that would not be a power of two columns, two."""
    left = 1 << (columns.bit_length() - 1)
    if columns == left:
        return [Piece(of, columns)]
    return [Piece(of, left, "_left", 0, "_left"), Piece(of, columns - left, "_right", left, "_right")]


def _halves(of: Literal["key", "value"], columns: int) -> list[Piece]:
    half = columns // 2
    return [Piece(of, half, "_left", 0, "_half"), Piece(of, half, "_right", half, "_half")]


def boxes_of(pieces: Sequence[Piece]) -> list[str]:
    return list(dict.fromkeys(piece.box for piece in pieces))


def is_one_pass(signature: Signature) -> bool:
    """Whether one kernel for all gradients is right, and faster.

    A query's gradient alone has three products without it, others have four. Beside the sums of more than 128 columns
    there is no room for dQ on its way out, and two passes are the faster (docs/performance.md).
    """
    wanted, widths = signature.wanted, signature.widths
    both = "query" in wanted and bool(wanted & {"key", "value"})
    return both and not signature.deterministic and max(widths.head_dim, widths.value_dim) <= 128


ONE_PASS: tuple[Kernel, ...] = (HOPPER_STATISTICS, HOPPER_BACKWARD, ROUND_DQUERY)


def sums_of_queries(signature: Signature, facts: Facts) -> bool:
    """Whether operands of the score have gradients, which the pass that owns queries sums."""
    return any(load.tensor.name in signature.wanted for load, kind in facts.gradient_kinds if kind != "sink")


def two_passes(wanted: frozenset[str], summed: bool = False) -> tuple[Kernel, ...]:
    """The kernels of wanted gradients, each sum with one owner; of both sides where only a sink has one.

    Statistics are as the keys' pass wants them, if it runs. summed: gradients of the score's operands are wanted too.
    """
    _, _, dquery, dkey_dvalue = FLASH
    owns_queries = "query" in wanted or summed
    passes = [*([dquery] if owns_queries else []), *([dkey_dvalue] if wanted & {"key", "value"} else [])]
    passes = passes or [dquery, dkey_dvalue]
    follows = passes[-1].name
    statistics = replace(HOPPER_STATISTICS, follows=follows, written=statistics_written, sram=hopper_statistics_sram)
    return statistics, *passes


LARGEST_HANDED_ON = 2.0**14  # of fp16, whose largest number is 65504: what one consumer may hand to another


def _no_backward(signature: Signature, facts: Facts) -> str | None:
    """Why it cannot compute these gradients. Those of a sink need statistics of rows alone."""
    wanted, kinds = signature.wanted, facts.gradient_kinds
    of_score = {load.tensor.name for load, kind in kinds if kind != "sink"}
    if not wanted & ({"query", "key", "value"} | of_score):
        return f"hopper: a sink's gradient alone ({', '.join(sorted(wanted))}) is computed by the triton target"
    by_row = sorted({load.tensor.name for load, kind in kinds if kind in ("row", "column")} & wanted)
    if by_row:
        return f"hopper: gradients of operands read by position ({', '.join(by_row)}) are computed by the triton target"
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
    left = _two("key", columns)[0].columns
    if form.consumers == 3 and value_columns > 64:
        return "three consumers have too few registers for D 128"
    if form.output_in_query and (form.query_buffers != 1 or left != value_columns or form.query_in_registers):
        return "the output takes the place of one query tile in SRAM, of as many columns"
    if value_columns == 256 and form.block_kv > 64:
        return "128 keys leave too few registers for Dv 256"
    if columns > 128 and form.query_in_registers:
        return "more than 128 columns of a query leave too few registers"
    return None


def _no_backward_form(kernel: Kernel, form: HopperBackwardForm, widths: Widths) -> str | None:
    """Why a kernel of the backward cannot have this form."""
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

    What reads positions needs registers for them: fewer consumers at D64, the query in SRAM at D128.
    """
    spare = not facts.traits.positional  # registers
    columns, value_columns = _piecewise(widths.head_dim), columns_of(widths)[1]
    if columns == 256 or value_columns == 256:
        return HopperForm(2, 64, 2, lazy_rescale=True, output_in_query=columns == value_columns)
    if columns > 128:
        in_place = value_columns == 128  # as many as of the query's left piece
        return HopperForm(
            2, 128, 2, lazy_rescale=True, output_in_query=in_place, overlap_edges=facts.score_reads_positions
        )
    if columns == value_columns == 64:
        return HopperForm(3 if spare else 2, 128, 3, 2 if spare else 1, query_in_registers=not spare, pair_maximum=True)
    return HopperForm(
        2, 128, 2, query_in_registers=spare, lazy_rescale=True, overlap_edges=facts.score_reads_positions
    )  # fmt: skip


def best_backward_form(kernel: Kernel, widths: Widths, facts: Facts, summed: bool) -> HopperBackwardForm:
    """The form that measured best for tiles of these widths (docs/performance.md).

    What a score's derivative computes, or a mask reads, needs registers that tiles of 128 queries leave to none.
    summed: gradients of the score's operands are wanted, for which the same holds.
    """
    width = max(columns_of(widths))
    spare = facts.linear_scale is not None and not facts.loads_at_positions  # registers
    if width == 256:
        if kernel.name == "flash_dquery":
            return HopperBackwardForm(128, 32 if columns_of(widths)[1] == 256 else 64)
        if not _fits_by_rows(widths):
            return HopperBackwardForm(64, 64, by_columns=True)
        return HopperBackwardForm(32 if _piecewise(widths.head_dim) == 192 else 64)  # or scores spill beside the sums
    if kernel.name == "flash_dquery":
        wide = spare or (width == 64 and not facts.loads_at_positions)
        return HopperBackwardForm(128, 128 if wide and not summed else 64)
    if width != 64 or not spare:
        return HopperBackwardForm(64)
    return HopperBackwardForm(128, next_scores=kernel.name == "flash_backward")


def statistics_of_a_row(facts: Facts) -> int:
    """-lse and -delta, and where scores may lie far from 0 the maximum that lse leaves out: a power of two for TMA."""
    return 4 if facts.scores_lie_far else 2


def part_columns(form: HopperBackwardForm, widths: Widths) -> int:
    """Columns of a part of dQ: half of a tile's, or all for half of its rows; those of the second of two pieces."""
    keys, _ = pieces_of(form, widths)
    if form.block_q == 128:
        return keys[0].columns
    return keys[-1].columns if len(keys) > 1 else keys[0].columns // 2


def left_parts(form: HopperBackwardForm, widths: Widths) -> int:
    """Parts of dQ that the first consumer computes; the other one computes one."""
    keys, _ = pieces_of(form, widths)
    return keys[0].columns // part_columns(form, widths) if len(keys) > 1 else 1


def sums_of_a_tile(form: HopperBackwardForm, widths: Widths) -> int:
    """Floats of the sums of dQ of a query tile."""
    return form.block_q * columns_of_form(form, widths)[0]


def _forward_form(code: CodePlan) -> HopperForm:
    form = code.form("flash_forward")
    assert isinstance(form, HopperForm)
    return form


def _backward_form(code: CodePlan, kernel: str) -> HopperBackwardForm:
    form = code.form(kernel)
    assert isinstance(form, HopperBackwardForm)
    return form


def _main_form(code: CodePlan) -> tuple[str, HopperBackwardForm]:
    """The kernel that owns keys, "" where there is none, and the form that statistics of rows lie by."""
    main = next((name for name in ("flash_backward", "flash_dkey_dvalue") if code.has(name)), "")
    return main, _backward_form(code, main or "flash_dquery")


# -- launching ---------------------------------------------------------------------------------------------------------
class Box:
    """What a launch needs of a tensor descriptor: far cheaper to build than the checked one, at every call."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, tensor: Tensor, width: int) -> None:
        self.base = tensor
        self.shape = sizes = list(tensor.shape)
        # multiples of 16 bytes even where, the size being 1, they are never used
        batch, head, row, _ = tensor.stride()
        self.strides = [
            batch if sizes[0] > 1 else width,
            head if sizes[1] > 1 else width,
            row if sizes[2] > 1 else width,
            1,
        ]


def sharing_l2(batch_heads: int, kv_bytes: float) -> int:
    """Query heads whose K and V fit L2 together, of as many equal groups as it takes."""
    groups = -(-batch_heads // max(1, int(L2_BYTES / max(1.0, kv_bytes))))
    return -(-batch_heads // groups)


class FlatBox:
    """The same of memory of our own: rows of `width` floats, or one row of all of them."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, tensor: Tensor, width: int = 0) -> None:
        self.base = tensor
        self.shape = [tensor.numel() // width, width] if width else [tensor.numel()]
        self.strides = [width, 1] if width else [1]


def readable(tensor: Tensor) -> Tensor:
    """The tensor [B, H, rows, D], or a copy that the tensor memory accelerator can read."""
    return tensor if _is_readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_readable(tensor: Tensor) -> bool:
    """Whether address and strides are multiples of 16 bytes."""
    # a stride in a dimension of one entry leads nowhere: Box gives another in its place
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()) if size > 1]
    return not any(n % 16 for n in (tensor.data_ptr(), *(tensor.element_size() * stride for stride in strides)))


class HopperLauncher(TritonLauncher):
    """What launches of both directions share: tensor descriptors, and forms of this target."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.columns, self.value_columns = columns_of(self.code.signature.widths)
        self.tools = {
            "box": Box, "flat": FlatBox, "sharing_l2": sharing_l2, "least": min, "counter": self._launching.counter,
        }  # fmt: skip

    def partition(self, call: CallTensors, results: Named) -> Partition:
        per_row = isinstance(call.q_offset, Tensor)
        return Partition(mode=Mode(True, per_row, results.get("dlse") is None, call.head_dim))

    def form(self, kernel: str, aligned: bool) -> Any:
        return self.code.form(kernel)

    def _options(self, form: Any) -> dict[str, int]:
        return super()._options(form) if isinstance(form, Tiling) else {"num_warps": 4, **self._rounding()}

    def _rows(self, aligned: bool) -> dict[str, str]:
        names = [*self._operand_names(), *(("dquery", "dkey", "dvalue") if self.backward else ())]
        names += [f"{name}{piece.box}" for name, piece in self._pieces]
        return {**super()._rows(aligned), **{f"{n}_desc": f"box({n.partition('_')[0]}, {self.columns})" for n in names}}

    @property
    def _head_bytes(self) -> str:
        """K and V of one query head, whose elements have two bytes."""
        return f"{(self.columns + self.value_columns) * 2} * kv_len / group"

    @property
    def _pieces(self) -> list[tuple[str, Piece]]:
        """Pieces of the tensors that the main kernel reads and writes by tiles."""
        raise NotImplementedError

    def _blocks(self) -> dict[str, list[int]]:
        """The tile that each descriptor is for, by its name."""
        raise NotImplementedError

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        blocks, types = self._blocks(), super()._types(binding, arguments)
        return [
            self._launching.descriptor(value, blocks[name]) if isinstance(value, Box | FlatBox) else value
            for name, value in zip([*binding.parameters, *binding.constants], types)
        ]


class HopperForwardLauncher(HopperLauncher):
    """Launches of the persistent forward: a counter for the work, and a grid of one program an SM."""

    def _given(self, call: CallTensors, results: Named) -> dict[str, Any]:
        given = super()._given(call, results)
        given["counter_ptr"] = self._counter()
        return given

    def _made(self, mode: Mode) -> dict[str, str]:
        return {**super()._made(mode), "counter_ptr": "counter(device)"}

    def _counter(self) -> Tensor:
        return self._launching.counter(self.device)

    def _processors(self) -> int:
        return processors(self.device)

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name in SPANS:
            return super()._programs(kernel, constants)
        return f"least({self._processors()}, query_tiles * batch_heads)"

    def _rows(self, aligned: bool) -> dict[str, str]:
        block_q = _forward_form(self.code).block_q
        return {
            **super()._rows(aligned),
            "lse_ptr": "lse",
            "n_heads": "heads",
            "query_tiles": f"(q_len + {block_q - 1}) // {block_q}",
            "kv_bytes": self._head_bytes,
            "heads_together": "sharing_l2(batch_heads, kv_bytes)",
        }  # fmt: skip

    @property
    def _pieces(self) -> list[tuple[str, Piece]]:
        pieces = _two("key", columns_of_form(_forward_form(self.code), self.code.signature.widths)[0])
        return [(name, piece) for name in ("query", "key") for piece in pieces]

    def _blocks(self) -> dict[str, list[int]]:
        block_kv = _forward_form(self.code).block_kv
        rows = {"query": _ROWS, "key": block_kv}
        blocks = {"value_desc": [1, 1, block_kv, self.value_columns], "out_desc": [1, 1, _ROWS, self.value_columns]}
        return blocks | {f"{n}{piece.box}_desc": [1, 1, rows[n], piece.columns] for n, piece in self._pieces}


class HopperBackwardLauncher(HopperLauncher):
    """Launches of the backward: the statistics of rows, the main kernel, and dQ from its sums."""

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        batches, heads, q_len, _ = call.query.shape
        tiles = batches * heads * tiles_of(q_len, self._form.block_q)
        own = {"statistics": flat_place(tiles, self._statistics_of_a_tile)}
        if self.code.has("flash_backward"):
            own["dquery_sums"] = flat_place(tiles, sums_of_a_tile(self._form, self.code.signature.widths))
        for n, gradient in enumerate(self.sums):
            own[f"sum{n}"] = flat_place(batches, heads, self._sums_of_a_head(gradient.kind, q_len))
        return spans_of(self, call, partition.mode) | own  # type: ignore[arg-type]

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        read = {name: readable(results[name]) for name in ("out", "dout")}  # hooks of the user may have made them
        return super().__call__(call, {**results, **read}, workspace, partition)

    def _sums_of_a_head(self, kind: str, q_len: int) -> int:
        """How many partial sums of an operand's gradient a query head has."""
        if kind == "sink":
            return tiles_of(q_len, self._form.block_q)
        return tiles_of(q_len, self._query_form.block_q) * CONSUMERS

    @property
    def _form(self) -> HopperBackwardForm:
        return _main_form(self.code)[1]

    @property
    def _statistics_of_a_tile(self) -> int:
        return statistics_of_a_row(self.facts) * self._form.block_q

    def _made(self, mode: Mode) -> dict[str, str]:
        tiles = "batches * heads * query_tiles"
        own = {"statistics": rows_of(tiles, str(self._statistics_of_a_tile), dtype="float32")}
        if self.code.has("flash_backward"):
            floats = sums_of_a_tile(self._form, self.code.signature.widths)
            own["dquery_sums"] = rows_of(tiles, str(floats), dtype="float32")
        return self._made_spans(mode) | self._made_gradients() | own

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name in SPANS:
            return super()._programs(kernel, constants)
        if kernel.axis == "q":
            return "key_tiles * batch_kv_heads"
        return "own_tiles * batch_heads" if kernel.name == "flash_dquery" else "query_tiles * batch_heads"

    def _renamed(self, kernel: Kernel) -> dict[str, str]:
        if kernel.name in SPANS or kernel.axis == "kv":
            own = {"heads_together": "heads_sharing_keys"} if kernel.name == "flash_dquery" else {}
            return super()._renamed(kernel) | {"n_heads": "heads"} | own
        return super()._renamed(kernel) | {"n_heads": "kv_heads", "batch_heads": "batch_kv_heads"}

    def _rows(self, aligned: bool) -> dict[str, str]:
        form = self._form
        return {
            **super()._rows(aligned),
            "n_rows": "batches * heads * q_len",
            "query_tiles": f"(q_len + {form.block_q - 1}) // {form.block_q}",
            "key_tiles": f"(kv_len + {form.block_kv - 1}) // {form.block_kv}",
            "statistics_desc": "flat(statistics)",
            "dquery_sums_desc": f"flat(dquery_sums, {_LINE})",
            # Q, dO and the sums of dQ of one head of keys
            "query_bytes": f"{(self.columns + self.value_columns) * 2 + self.columns * 4} * q_len * group",
            "heads_together": "sharing_l2(batch_kv_heads, query_bytes)",
        } | ({} if not self.code.has("flash_dquery") else {
            "own_tiles": f"(q_len + {self._query_form.block_q - 1}) // {self._query_form.block_q}",
            "kv_bytes": self._head_bytes,
            "heads_sharing_keys": "sharing_l2(batch_heads, kv_bytes)",
            "query_rows_desc": f"box(query, {self.columns})", "dout_rows_desc": f"box(dout, {self.columns})",
            "dquery_rows_desc": f"box(dquery, {self.columns})",
            "seen_key_desc": f"box(key, {self.columns})", "seen_value_desc": f"box(value, {self.columns})",
        })  # fmt: skip

    @property
    def _query_form(self) -> HopperBackwardForm:
        return _backward_form(self.code, "flash_dquery")

    @property
    def _pieces(self) -> list[tuple[str, Piece]]:
        of_keys, of_values = pieces_of(self._form, self.code.signature.widths)
        names = [(name, of_keys) for name in ("query", "key", "dkey")]
        names += [(name, of_values) for name in ("value", "dout", "dvalue")]
        return [(name, piece) for name, pieces in names for piece in pieces if piece.box]

    def _blocks(self) -> dict[str, list[int]]:
        form, columns = self._form, part_columns(self._form, self.code.signature.widths)
        rows = {"query": form.block_q, "dout": form.block_q, "out": form.block_q,
                "key": _ROWS, "value": _ROWS, "dkey": _ROWS, "dvalue": _ROWS,
                "query_rows": _ROWS, "dout_rows": _ROWS, "dquery_rows": _ROWS}  # fmt: skip
        if self.code.has("flash_dquery"):
            rows |= dict.fromkeys(("seen_key", "seen_value"), self._query_form.block_kv)
        narrow = {"dout", "out", "value", "dvalue", "dout_rows", "seen_value"}
        blocks = {n: [1, 1, count, self.value_columns if n in narrow else self.columns] for n, count in rows.items()}
        blocks |= {f"{name}{piece.box}": [1, 1, rows[name], piece.columns] for name, piece in self._pieces}
        return {f"{name}_desc": block for name, block in blocks.items()} | {
            "dquery_desc": [1, 1, _ROWS, columns],
            "statistics_desc": [self._statistics_of_a_tile],
            "dquery_sums_desc": [_ROWS * columns // _LINE, _LINE],
        }


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
