"""What target hopper refuses, as lists: the first refusal that holds says why, in words for errors and `explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

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


class Case:
    """Calls of one signature of a variant, and what rules ask of them."""

    def __init__(self, signature: Signature, facts: Facts) -> None:
        self.signature, self.facts, self.attention = signature, facts, facts.attention
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
        return self.attention.canonical.weighs != SOFTMAX


class Refusal(NamedTuple):
    """A kind of calls that the target does not compute, and why."""

    holds: Callable[[Case], object]
    words: str | Callable[[Case], str]


def refused(refusals: Iterable[Refusal], case: Case) -> str | None:
    """The words of the first refusal that holds; None where none does."""
    for refusal in refusals:
        if refusal.holds(case):
            words = refusal.words if isinstance(refusal.words, str) else refusal.words(case)
            return f"hopper: {words}"
    return None


# -- FP8 ---------------------------------------------------------------------------------------------------------------
def no_fp8_products(c: Case) -> str | None:
    """For which calls there are products of FP8 operands, where this is none of them; None where it is one."""
    d, variant = c.signature.dtypes, c.attention.canonical
    is_narrow = max(c.widths.head_dim, c.widths.value_dim) <= TILE_COLUMNS[-1]
    pieces = [p.columns for p in key_pieces(piecewise(c.widths.head_dim), c.widths)] if is_narrow else []
    needs = (
        (not {d.query, d.key, d.value} - {E4M3.name}, "where query, key and value are all e4m3"),
        (d.out in HALVES, "with a bf16 or fp16 output"),
        (c.signature.direction == "forward" and not c.widths.value_is_key, "in forwards of heads"),
        (not c.sequences.keys.pooled, "with keys that lie in no blocks"),
        (not c.signature.scaled_rows, "with one k_descale and v_descale a head"),
        (not c.pairwise and not variant.drops, "with softmax weights, none dropped"),
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
    return widths.value_is_key and d.key == E4M3.name and halves and widths.rope_dim == _rotary(c) > 0


# -- all kernels -------------------------------------------------------------------------------------------------------
COMMON = (
    Refusal(
        lambda c: c.signature.arch == "cpu",
        "needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'",
    ),
    Refusal(lambda c: not has_triton(), "needs Triton; pip install triton"),
    Refusal(
        lambda c: c.signature.arch != "sm_90",
        lambda c: f"needs compute capability 9.0, this is {c.signature.arch}",
    ),
    Refusal(
        lambda c: c.signature.dtypes.quantized and not _is_latent_cache(c) and no_fp8_products(c),
        lambda c: (
            f"has FP8 products {no_fp8_products(c)}; leave target out, and operands become bf16 where many queries "
            "read a key"
        ),
    ),
    Refusal(
        lambda c: c.signature.dtype not in HALVES,
        lambda c: f"needs bf16 or fp16 operands, got {c.signature.dtype}",
    ),
    Refusal(
        lambda c: lacks(c.attention.canonical.weighs, "hopper"),
        lambda c: str(lacks(c.attention.canonical.weighs, "hopper")),
    ),
    Refusal(lambda c: c.attention.canonical.folded_origin, lambda c: f"parts of calls with dropout are {_BY_TRITON}"),
    Refusal(lambda c: not c.sequences.in_order, lambda c: f"{not_in_order(c.sequences)} are {_BY_TRITON}"),
    Refusal(
        lambda c: not c.sequences.keys.is_box or c.sequences.is_outside,
        lambda c: f"tiles of {c.sequences} sequences are no boxes that TMA is told of; they are {_BY_TRITON}",
    ),
)

# -- latent caches -----------------------------------------------------------------------------------------------------
LATENT = (
    Refusal(
        lambda c: softmax_only(c.attention.canonical.weighs),
        lambda c: f"for absorbed latent attention {softmax_only(c.attention.canonical.weighs)}",
    ),
    Refusal(
        lambda c: _rank(c) not in RANKS or _rotary(c) > ROTARY_COLUMNS or _rotary(c) % 8,
        lambda c: (
            f"latent caches have a rank of {alternatives(RANKS)} and a multiple of 8 rotary columns up to "
            f"{ROTARY_COLUMNS}, got {_rank(c)} and {_rotary(c)}; {_BY_TRITON}"
        ),
    ),
    Refusal(lambda c: c.signature.sequences.keys.packed, f"packed keys of latent caches are {_BY_TRITON}"),
    Refusal(
        lambda c: c.widths.rope_dim and not _is_latent_cache(c),
        f"latent caches of 16 bits with rotary columns apart are {_BY_TRITON}",
    ),
    Refusal(lambda c: c.attention.canonical.drops, f"latent caches with dropout are {_BY_TRITON}"),
    Refusal(
        lambda c: c.facts.traits.measured is not None,
        f"latent caches with a mask that reads tensors by position are {_BY_TRITON}",
    ),
    Refusal(
        lambda c: tiles_by_head(c.facts, c.facts.tile_source),
        f"latent caches with a mask whose tiles differ by head are {_BY_TRITON}",
    ),
)


def _rank(c: Case) -> int:
    return c.widths.value_dim


def _rotary(c: Case) -> int:
    return c.widths.head_dim - c.widths.value_dim


# -- heads -------------------------------------------------------------------------------------------------------------
def _pairwise(holds: Callable[[Case], object], words: str) -> Refusal:
    """Of a normalizer whose weights are found pair by pair."""
    return Refusal(
        lambda c: c.pairwise and holds(c), lambda c: f"{words} of {c.attention.canonical.weighs.name} are {_BY_TRITON}"
    )


def _misfits(width: int) -> bool:
    return not NARROWEST <= width <= TILE_COLUMNS[-1] or width % 8 > 0


_WIDTHS = (
    Refusal(lambda c: c.widths.value_is_key, "absorbed latent attention has schedule split_kv alone"),
    Refusal(
        lambda c: _misfits(c.widths.head_dim) or _misfits(c.widths.value_dim),
        lambda c: (
            f"needs D and Dv to be multiples of 8 from {NARROWEST} to {TILE_COLUMNS[-1]}, "
            f"got D {c.widths.head_dim}, Dv {c.widths.value_dim}"
        ),
    ),
    # statistics of rows in its templates are those of a softmax
    _pairwise(lambda c: c.attention.canonical.weighs.saves_lse, "calls"),
    _pairwise(lambda c: c.attention.canonical.drops, "weights that are dropped,"),
    _pairwise(lambda c: c.facts.boxed_read is not None, "scores that read a tensor by both positions,"),
)
_SHARED_KEY = Refusal(
    lambda c: c.widths.rope_dim and not has_pieces_apart(c.widths),
    lambda c: (
        "needs keys of 64 or 128 columns and fewer rotary ones for expanded latent attention, got "
        f"{c.widths.head_dim - c.widths.rope_dim} and {c.widths.rope_dim}; {_BY_TRITON}"
    ),
)
_MASKS = (
    Refusal(
        lambda c: c.facts.tile_source == "lists" and _no_cells(c),
        lambda c: f"a mask that reads a tensor by both positions {_no_cells(c)} is for the triton target",
    ),
    Refusal(
        lambda c: c.signature.sequences.is_mixed and c.facts.traits.measured is not None,
        f"masks that read tensors, of packed queries over pages, are {_BY_TRITON}",
    ),
)


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


FORWARD = (*_WIDTHS, _SHARED_KEY, *_MASKS)


# -- backwards ---------------------------------------------------------------------------------------------------------
def _drawn(holds: Callable[[Case], object], words: str) -> Refusal:
    """Where it does not draw what a backward drops."""
    return Refusal(
        lambda c: c.attention.canonical.drops and holds(c), f"the backward of dropout {words} is {_BY_TRITON}"
    )  # fmt: skip


def _distances(holds: Callable[[Case], object], words: str) -> Refusal:
    """Where its backwards do not read a score by distance, or sum such a gradient."""
    said = f"backwards of scores that are read by distance {words} are {_BY_TRITON}"
    return Refusal(lambda c: c.by_distance and holds(c), said)


def _splits_no_tables(c: Case) -> bool:
    tables = tables_of(c.facts, "flash", c.signature)
    return bool(tables) and c.facts.score_of_levels(tables) is None


def _sums_a_table_or_sink_alone(c: Case) -> bool:
    """Those of a sink need statistics of rows alone."""
    kinds = c.facts.gradient_kinds
    summed = {load.tensor.name for load, kind in kinds if kind not in ("sink", "diagonal")}
    return not c.signature.wanted & ({"query"} | OWNED_BY_KEYS | summed)


def _words_alone(c: Case) -> str:
    what = "a table's" if sums_diagonals(c.signature, c.facts) else "a sink's"
    return f"{what} gradient alone ({', '.join(sorted(c.signature.wanted))}) is {_BY_TRITON}"


def _words_by_pair(c: Case) -> str:
    names, read = c.read_by_pair, c.facts.boxed_read
    lacking = f"gradients of operands read by both positions ({', '.join(names)}) are {_BY_TRITON}"
    if read is None or [read.tensor.name] != names or not read_once(read):
        return lacking
    return (
        f"{lacking}, but in one pass, where {names[0]} has 16 or 32 bits an entry, rows a multiple of 16 bytes "
        "apart, and is added to a score that is a number times q.k"
    )


def _columns(c: Case) -> int:
    return piecewise(c.widths.head_dim) + piecewise(c.widths.value_dim)


def _hands_on_too_much(c: Case) -> bool:
    """One consumer hands gradients of scores to the other one, in the dtype of operands."""
    hands_on = not fits_by_rows(c.widths) and c.facts.linear_scale is None and dtype_named(c.signature.dtype).is_narrow
    return hands_on and c.facts.largest_slope > LARGEST_HANDED_ON


BACKWARD = (
    *_WIDTHS,
    _pairwise(lambda c: not fits_by_rows(c.widths), "backwards with D above 192 or Dv above 128,"),
    _pairwise(lambda c: c.by_distance, "backwards of scores that are read by distance,"),
    _drawn(lambda c: c.widths.rope_dim, "of expanded latent attention"),
    _drawn(lambda c: not fits_by_rows(c.widths), "with D above 192 or Dv above 128"),
    _drawn(lambda c: wanted_kinds(c.signature, c.facts), "with gradients of operands"),
    _drawn(lambda c: c.facts.boxed_read is not None, "beside what each pair reads"),  # which has no tiles there
    _SHARED_KEY,
    Refusal(
        lambda c: c.widths.rope_dim and not fits_by_rows(c.widths),
        lambda c: (
            "needs Dv of 128 or less for gradients of expanded latent attention, got "
            f"{c.widths.value_dim}; {_BY_TRITON}"
        ),
    ),
    *_MASKS,
    _distances(lambda c: max(c.widths.head_dim, c.widths.value_dim) > MOST_BY_DISTANCE, "with D or Dv above 128"),
    _distances(
        lambda c: c.widths.rope_dim or c.attention.canonical.drops, "of expanded latent attention, or with dropout,"
    ),
    _distances(_splits_no_tables, "and are no number times q.k plus what they have by distance"),
    Refusal(_sums_a_table_or_sink_alone, _words_alone),
    Refusal(lambda c: c.read_by_pair and not stores_boxes(c.signature, c.facts), _words_by_pair),
    Refusal(
        lambda c: c.read_by_pair and c.signature.boxed == 4 and _columns(c) > MOST_BESIDE_WORDS,
        lambda c: (
            f"tiles of {c.read_by_pair[0]}, 32 bits an entry, have SRAM beside {MOST_BESIDE_WORDS} columns of D "
            f"and Dv together, got {_columns(c)}: its gradient is {_BY_TRITON}"
        ),
    ),
    Refusal(
        lambda c: sums_of_keys(c.signature, c.facts) and not fits_by_rows(c.widths),
        f"gradients of operands read by kv_pos need D of 192 and Dv of 128 or less; {_BY_TRITON}",
    ),
    Refusal(
        _hands_on_too_much,
        "above D 192 or Dv 128 a backward in fp16 needs a score whose derivative is known to be below "
        f"{LARGEST_HANDED_ON:.0f}; {_BY_TRITON}",
    ),
)


def alternatives(numbers: Iterable[int]) -> str:
    """In words: "64 or 128"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
