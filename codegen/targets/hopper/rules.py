"""What target hopper refuses, as lists: the first refusal that holds says why, in words for errors and `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.values.places import read_once
from ....compiler.planning.by_distance import tables_of
from ....compiler.planning.dtypes import E4M3, HALVES, dtype_named
from ....compiler.planning.signature import Signature, Widths
from ....compiler.planning.sources import SequenceKind, not_in_order
from ....ir.normalizer import SOFTMAX
from ...normalizers import lacks, softmax_only
from ..triton.context import tiles_by_head
from ..triton.target import has_triton
from .forms import ROWS
from .gradients import OWNED_BY_KEYS, stores_boxes, sums_diagonals, sums_of_keys, wanted_kinds
from .kernels.latent import ROTARY_COLUMNS
from .pieces import TILE_COLUMNS, fits_by_rows, has_pieces_apart, key_pieces, piecewise

NARROWEST = 16  # below it tiles would be mostly zeros
MOST_BESIDE_WORDS = 192  # columns of D and Dv beside which tiles of 32 bits an entry have SRAM
MOST_BY_DISTANCE = 128  # columns beside which a tile's reads have registers
LARGEST_HANDED_ON = 2.0**14  # of fp16, whose largest number is 65504: what one consumer may hand to another
RANKS = (128, 256, 384, 512)  # of latent caches: two warpgroups have as many whole pieces
_BY_TRITON = "computed by the triton target"
Refusal = str  # why calls of a kind are not computed


class Case:
    """Calls of one signature of a variant, and what rules ask of them."""

    def __init__(self, signature: Signature, facts: Facts) -> None:
        self.signature, self.facts, self.variant = signature, facts, facts.attention.canonical
        self.widths: Widths = signature.widths

    @property
    def sequences(self) -> SequenceKind:
        return self.signature.sequences

    @cached_property
    def by_distance(self) -> bool:
        """Whether a score is read by distance, or such a gradient is summed."""
        return bool(tables_of(self.facts, "flash", self.signature)) or sums_diagonals(self.signature, self.facts)

    @cached_property
    def read_by_pair(self) -> list[str]:
        """The wanted operands that are read by both positions."""
        kinds = self.facts.gradient_kinds
        return sorted({load.tensor.name for load, kind in kinds if kind == "pair"} & self.signature.wanted)

    @property
    def pairwise(self) -> bool:
        """Whether weights are found pair by pair, by a normalizer that is no softmax."""
        return self.variant.weighs != SOFTMAX

    @property
    def rank(self) -> int:
        """Columns of a latent vector that are the value."""
        return self.widths.value_dim

    @property
    def rotary(self) -> int:
        """Its columns behind these."""
        return self.widths.head_dim - self.widths.value_dim


def refused(*refusals: Iterable[Refusal]) -> str | None:
    """The words of the first refusal; None where there is none."""
    return next((f"hopper: {words}" for some in refusals for words in some), None)


# -- FP8 ---------------------------------------------------------------------------------------------------------------
def no_fp8_products(c: Case) -> str | None:
    """For which calls there are products of FP8 operands, where this is none of them; None where it is one."""
    d = c.signature.dtypes
    is_narrow = max(c.widths.head_dim, c.widths.value_dim) <= TILE_COLUMNS[-1]
    pieces = [p.columns for p in key_pieces(piecewise(c.widths.head_dim), c.widths)] if is_narrow else []
    needs = (
        (not {d.query, d.key, d.value} - {E4M3.name}, "where query, key and value are all e4m3"),
        (d.out in HALVES, "with a bf16 or fp16 output"),
        (c.signature.direction == "forward" and not c.widths.value_is_key, "in forwards of heads"),
        (not c.sequences.keys.pooled, "with keys that lie in no blocks"),
        (c.signature.scaled_rows <= c.signature.scaled_tiles, "with one k_descale and v_descale a head or 128 rows"),
        (not c.signature.scaled_rows or not c.sequences.keys.packed, "of packed keys with one descale a head"),
        (not c.pairwise and not c.variant.drops, "with softmax weights, none dropped"),
        (not c.facts.scores_lie_far, "with scores that are known to lie near 0"),
        (not c.facts.scale_sign_unknown, "where the factor of a score is positive"),
        (not c.widths.rope_dim, "with keys of one tensor"),
        (c.widths.head_dim % 16 == 0 and not any(n % 32 for n in pieces), "with D a multiple of 16, not 80 or 144"),
    )  # fmt: skip
    return next((words for holds, words in needs if not holds), None)


def _is_latent_cache(c: Case) -> bool:
    """Whether the call reads latent vectors in e4m3, with rotary columns in 16 bits beside them."""
    d, widths = c.signature.dtypes, c.widths
    halves = d.query in HALVES and d.out in HALVES
    return widths.value_is_key and d.key == E4M3.name and halves and widths.rope_dim == c.rotary > 0


# -- all kernels -------------------------------------------------------------------------------------------------------
def of_all(c: Case) -> Iterator[Refusal]:
    """Of kernels of latent caches, and of those of heads."""
    signature, kind = c.signature, c.sequences
    if signature.arch == "cpu":
        yield "needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'"
    if not has_triton():
        yield "needs Triton; pip install triton"
    if signature.arch != "sm_90":
        yield f"needs compute capability 9.0, this is {signature.arch}"
    if signature.dtypes.quantized and not _is_latent_cache(c) and (lacking := no_fp8_products(c)):
        yield f"has FP8 products {lacking}; leave target out, and operands become bf16 where many queries read a key"
    if signature.dtype not in HALVES:
        yield f"needs bf16 or fp16 operands, got {signature.dtype}"
    if normalizers := lacks(c.variant.weighs, "hopper"):
        yield normalizers
    if c.variant.folded_origin:
        yield f"parts of calls with dropout are {_BY_TRITON}"
    if not kind.in_order:
        yield f"{not_in_order(kind)} are {_BY_TRITON}"
    if not kind.keys.is_box or kind.is_outside:
        yield f"tiles of {kind} sequences are no boxes that TMA is told of; they are {_BY_TRITON}"


# -- latent caches -----------------------------------------------------------------------------------------------------
def of_latent_caches(c: Case) -> Iterator[Refusal]:
    if softmax := softmax_only(c.variant.weighs):
        yield f"for absorbed latent attention {softmax}"
    if c.rank not in RANKS or c.rotary > ROTARY_COLUMNS or c.rotary % 8:
        yield (
            f"latent caches have a rank of {alternatives(RANKS)} and a multiple of 8 rotary columns up to "
            f"{ROTARY_COLUMNS}, got {c.rank} and {c.rotary}; {_BY_TRITON}"
        )
    if c.sequences.keys.packed:
        yield f"packed keys of latent caches are {_BY_TRITON}"
    if c.widths.rope_dim and not _is_latent_cache(c):
        yield f"latent caches of 16 bits with rotary columns apart are {_BY_TRITON}"
    if c.variant.drops:
        yield f"latent caches with dropout are {_BY_TRITON}"
    if c.facts.traits.measured is not None:
        yield f"latent caches with a mask that reads tensors by position are {_BY_TRITON}"
    if tiles_by_head(c.facts, c.facts.tile_source):
        yield f"latent caches with a mask whose tiles differ by head are {_BY_TRITON}"


# -- heads -------------------------------------------------------------------------------------------------------------
def of_forwards(c: Case) -> Iterator[Refusal]:
    yield from _of_widths(c)
    yield from _of_shared_keys(c)
    yield from _of_masks(c)


def _of_widths(c: Case) -> Iterator[Refusal]:
    """Of columns of operands, and of normalizers."""
    head_dim, value_dim = c.widths.head_dim, c.widths.value_dim
    if c.widths.value_is_key:
        yield "absorbed latent attention has schedule split_kv alone"
    if any(not NARROWEST <= width <= TILE_COLUMNS[-1] or width % 8 for width in (head_dim, value_dim)):
        yield (
            f"needs D and Dv to be multiples of 8 from {NARROWEST} to {TILE_COLUMNS[-1]}, got D {head_dim}, "
            f"Dv {value_dim}"
        )
    if c.pairwise:  # statistics of rows in its templates are those of a softmax
        by_pair = f"of {c.variant.weighs.name} are {_BY_TRITON}"
        if c.variant.weighs.saves_lse:
            yield f"calls {by_pair}"
        if c.variant.drops:
            yield f"weights that are dropped, {by_pair}"
        if c.facts.boxed_read is not None:
            yield f"scores that read a tensor by both positions, {by_pair}"


def _of_shared_keys(c: Case) -> Iterator[Refusal]:
    if c.widths.rope_dim and not has_pieces_apart(c.widths):
        yield (
            "needs keys of 64 or 128 columns and fewer rotary ones for expanded latent attention, got "
            f"{c.widths.head_dim - c.widths.rope_dim} and {c.widths.rope_dim}; {_BY_TRITON}"
        )


def _of_masks(c: Case) -> Iterator[Refusal]:
    if c.facts.tile_source == "lists" and (why := _no_cells(c)):
        yield f"a mask that reads a tensor by both positions {why} is for the triton target"
    if c.sequences.is_mixed and c.facts.traits.measured is not None:
        yield f"masks that read tensors, of packed queries over pages, are {_BY_TRITON}"


def _no_cells(c: Case) -> str | None:
    """Why it does not look at the pairs of a mask in a few numbers a tile, in words after "a mask that reads ..."."""
    found = c.facts.survey
    assert found is not None
    if found.by_pair:
        return "pair by pair"
    for cells in found.cells:
        if cells.q < ROWS or cells.kv % ROWS:
            return f"in blocks of {cells.q} x {cells.kv}, and not {ROWS} queries or more and a multiple of {ROWS} keys,"
    return None


# -- backwards ---------------------------------------------------------------------------------------------------------
def of_backwards(c: Case) -> Iterator[Refusal]:
    yield from _of_widths(c)
    by_rows, rope, signature, facts = fits_by_rows(c.widths), c.widths.rope_dim, c.signature, c.facts
    if c.pairwise:
        by_pair = f"of {c.variant.weighs.name} are {_BY_TRITON}"
        if not by_rows:
            yield f"backwards with D above 192 or Dv above 128, {by_pair}"
        if c.by_distance:
            yield f"backwards of scores that are read by distance, {by_pair}"
    if c.variant.drops:
        yield from _of_dropout(c)
    yield from _of_shared_keys(c)
    if rope and not by_rows:
        got = f"got {c.widths.value_dim}; {_BY_TRITON}"
        yield f"needs Dv of 128 or less for gradients of expanded latent attention, {got}"
    yield from _of_masks(c)
    if c.by_distance:
        yield from _of_distances(c)
    if _sums_a_table_or_sink_alone(c):
        what = "a table's" if sums_diagonals(signature, facts) else "a sink's"
        yield f"{what} gradient alone ({', '.join(sorted(signature.wanted))}) is {_BY_TRITON}"
    if c.read_by_pair:
        yield from _of_gradients_by_pair(c)
    if sums_of_keys(signature, facts) and not by_rows:
        yield f"gradients of operands read by kv_pos need D of 192 and Dv of 128 or less; {_BY_TRITON}"
    # one consumer hands gradients of scores to the other one, in the dtype of operands
    hands_on = not by_rows and facts.linear_scale is None and dtype_named(signature.dtype).is_narrow
    if hands_on and facts.largest_slope > LARGEST_HANDED_ON:
        yield (
            "above D 192 or Dv 128 a backward in fp16 needs a score whose derivative is known to be below "
            f"{LARGEST_HANDED_ON:.0f}; {_BY_TRITON}"
        )


def _of_dropout(c: Case) -> Iterator[Refusal]:
    """Where it does not draw what a backward drops."""
    said = f"is {_BY_TRITON}"
    if c.widths.rope_dim:
        yield f"the backward of dropout of expanded latent attention {said}"
    if not fits_by_rows(c.widths):
        yield f"the backward of dropout with D above 192 or Dv above 128 {said}"
    if wanted_kinds(c.signature, c.facts):
        yield f"the backward of dropout with gradients of operands {said}"
    if c.facts.boxed_read is not None:  # which has no tiles there
        yield f"the backward of dropout beside what each pair reads {said}"


def _of_distances(c: Case) -> Iterator[Refusal]:
    """Where backwards do not read a score by distance, or sum such a gradient."""
    said, tables = "backwards of scores that are read by distance", tables_of(c.facts, "flash", c.signature)
    if max(c.widths.head_dim, c.widths.value_dim) > MOST_BY_DISTANCE:
        yield f"{said} with D or Dv above 128 are {_BY_TRITON}"
    if c.widths.rope_dim or c.variant.drops:
        yield f"{said} of expanded latent attention, or with dropout, are {_BY_TRITON}"
    if tables and c.facts.score_of_levels(tables) is None:
        yield f"{said} and are no number times q.k plus what they have by distance are {_BY_TRITON}"


def _sums_a_table_or_sink_alone(c: Case) -> bool:
    """Those of a sink need statistics of rows alone."""
    kinds = c.facts.gradient_kinds
    summed = {load.tensor.name for load, kind in kinds if kind not in ("sink", "diagonal")}
    return not c.signature.wanted & ({"query"} | OWNED_BY_KEYS | summed)


def _of_gradients_by_pair(c: Case) -> Iterator[Refusal]:
    """Of operands that are read by both positions."""
    names, read = c.read_by_pair, c.facts.boxed_read
    if not stores_boxes(c.signature, c.facts):
        lacking = f"gradients of operands read by both positions ({', '.join(names)}) are {_BY_TRITON}"
        if read is not None and [read.tensor.name] == names and read_once(read):
            lacking += (
                f", but in one pass, where {names[0]} has 16 or 32 bits an entry, rows a multiple of 16 bytes apart, "
                "and is added to a score that is a number times q.k"
            )
        yield lacking
    columns = piecewise(c.widths.head_dim) + piecewise(c.widths.value_dim)
    if c.signature.boxed == 4 and columns > MOST_BESIDE_WORDS:
        yield (
            f"tiles of {names[0]}, 32 bits an entry, have SRAM beside {MOST_BESIDE_WORDS} columns of D and Dv "
            f"together, got {columns}: its gradient is {_BY_TRITON}"
        )


def alternatives(numbers: Iterable[int]) -> str:
    """In words: "64 or 128"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
