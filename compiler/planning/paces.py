"""How fast a kernel of a target goes in a family of forms: what is fitted of the model of a GPU.

A visited tile has products, exponentials, other instructions, and at the edge of a mask those of the mask. How much of
each shows in a kernel's time, and what a tile and a program cost besides, are constants of the kernel's text: a share
below 1 is hidden behind something else. They were fitted on what one H200 measured (docs/performance.md) by
`python benchmarks/model.py --fit`, which prints PACES anew; other cards are taken to have the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.normalizer import RELU, SIGMOID
from ..analysis.records import Traits, Work
from .forms import Form, HopperBackwardForm, HopperForm, HopperLatentForm
from .kernels import DRAWN_KEYS, Kernel
from .measures import ENDS, LISTS, LONG_SPANS, SPANS
from .quantities import Sizes
from .tables import DDIAGONALS, DIAGONAL_PARTS

LANES = 8  # instructions that an SM issues for one result of its special units: 128 lanes, and 16 of those
WIDE = 128  # columns above which a Triton kernel's sums leave registers
# us: where rows are packed, a program of a Triton kernel reads its place, and then the ends of its sequence, before it
# reads a tile; of 16 sequences of 1024 tokens alone, whose programs are short
PACKED_PROGRAM = 2.7
NARROW = 64  # columns up to which products of a hopper forward are too short for all exponentials to hide behind


@dataclass(frozen=True)
class Pace:
    """Seconds of a kernel for a second of each part at the machine's own rate; microseconds of an SM."""

    matrix: float = 1.0
    exp: float = 1.0
    other: float = 0.0
    pair_reads: float = 0.0  # as many instructions
    gathers: float = 0.0  # likewise
    row_reads: float = 0.0  # likewise, of what a tile of the loop reads a row
    levels: float = 0.0  # instructions of a pair where level pairs are summed, spilled registers too
    mask: float = 0.0
    tile: float = 0.0  # us, a visited tile
    piece: float = 0.0  # us, each further piece of its columns
    program: float = 0.0  # us
    start: float = 0.0  # us, of the launch beyond the machine's
    step: float = 0.0  # us, each step of a program whose steps wait one for the other


UNFITTED = Pace()  # as if nothing hid behind products, and nothing else took time
# Steps that wait one for the other: of ends, two took 13.7, 14.0 and 15.4 us at 64k, 256k and 1M tokens, and four, of
# half as many positions by half as many warps, 22 at 64k. Spans have such steps as the four; 11 to 22 us were measured
# at 8192 tokens, where they take two. Lists are taken to have the same, and were not timed.
_SPANS = _ENDS = Pace(start=2.3, step=4.0)
# With ends 16.6, 19.5 and 31.5 us were measured.
_LONG_SPANS = Pace(program=0.113)
# Constants of row_reads and levels, and the family of narrow forwards, are those of two rows each (D64 and D128), found
# with all others held; so were gathers of flash_ddiagonals, of one kernel that was timed alone.
# fmt: off
PACES: dict[str, Pace] = {
    "hopper flash_backward": Pace(
        matrix=0.876, exp=0, other=1.56, pair_reads=5.66, gathers=5.47, row_reads=5, levels=3, tile=0.39, program=3.82,
    ),
    "hopper flash_backward next": Pace(matrix=1.06, exp=0.986, other=0.295, mask=0.216, tile=0.0786, program=2.37),
    "hopper flash_dkey_dvalue": Pace(
        matrix=0.82, exp=0, row_reads=16.5, levels=15, mask=3.29, tile=0.0428, piece=0.0865,
    ),
    "hopper flash_dquery": Pace(matrix=0.82, exp=0, row_reads=3.5, tile=0.851, program=5.87),
    "hopper flash_forward": Pace(
        matrix=0.821, exp=0, other=1.11, pair_reads=29.9,
        gathers=0.155, row_reads=6.5, mask=2.95, program=2.29,
    ),
    "hopper flash_forward narrow": Pace(
        matrix=0.821, exp=0.5, other=1.11, pair_reads=29.9,
        gathers=2, row_reads=6, mask=2.95, program=2.29,
    ),
    "hopper flash_forward of three": Pace(matrix=0.885, exp=0.325, other=0.0776, tile=0.135, program=2.14),
    "triton flash_ddiagonals": Pace(matrix=1.2, exp=0, other=1, gathers=100),
    "triton flash_dkey_dvalue": Pace(
        matrix=1.29, exp=0, other=1.58, pair_reads=188, gathers=49, row_reads=35,
        mask=16.9, tile=0.00334, piece=0.0435, program=2.19,
    ),
    "triton flash_dkey_dvalue wide": Pace(matrix=2.89, exp=0, tile=0.417),
    "triton flash_dquery": Pace(matrix=1.23, exp=0, pair_reads=54.6, gathers=9.34, row_reads=5, program=2.59),
    "triton flash_dquery wide": Pace(matrix=1.44, exp=0, tile=0.304),
    "triton flash_forward": Pace(
        matrix=1.51, exp=0, other=0.65, pair_reads=181,
        gathers=6.06, row_reads=7.7, mask=9.99, piece=0.0478, program=1.45,
    ),
    "triton flash_forward wide": Pace(matrix=1.21, exp=0.447, other=0.183, tile=0.282, piece=0.222, program=0.667),
}
# fmt: on


def family_of(kernel: Kernel, form: Form, columns: float) -> str:
    """The name of a kernel's family of forms. columns: of its wider tile."""
    if isinstance(form, HopperForm):
        narrow = form.consumers == 2 and columns <= NARROW and not form.lazy_rescale
        return f"hopper {kernel.name}" + " of three" * (form.consumers == 3) + " narrow" * narrow
    if isinstance(form, HopperBackwardForm):
        return f"hopper {kernel.name}" + " next" * form.next_scores
    if isinstance(form, HopperLatentForm):
        return f"hopper {kernel.name}"
    return f"triton {kernel.name}" + " wide" * (columns > WIDE)


def pace_of(family: str) -> Pace:
    if any(name in family for name in (*SPANS, *LISTS)):
        return _SPANS
    for names, pace in ((LONG_SPANS, _LONG_SPANS), (ENDS, _ENDS)):
        if any(name in family for name in names):
            return pace
    return PACES.get(family, UNFITTED)


# -- instructions ------------------------------------------------------------------------------------------------------
# Of a pair besides score and mask: maximum, scaling, sums and rounding in a forward; in a backward dP - delta, products
# and rounding.
_PLAIN = {"forward": 5.0, "backward": 4.0}
_WEIGHT = {SIGMOID: Work(2, 2), RELU: Work(0, 1)}  # of a normalizer; the softmax has its exponential
# Drawing and dropping a weight, by measured times: forwards have half as many instructions for it, which take as long.
_DROPPED = {"flash_dkey_dvalue": 27.0, "flash_backward": 10.0}
_DROPPED_ELSEWHERE = 8.0
AT_HAND = 4.0  # of a pair whose bias lies in SRAM: its load, its type and its scale; by one row
_EDGE = 2.0  # of a pair at the edge besides the mask: it is hidden, and the lengths are looked at


def weighs_pairs(kernel: Kernel) -> bool:
    """Whether its loop makes weights of the scores of pairs."""
    return kernel.reads_pairs or kernel.name == "flash_backward"


@dataclass(frozen=True)
class Instructions:
    """Of one pair."""

    special: float
    other: float
    pair_reads: float
    gathers: float
    row_reads: float
    levels: float
    mask: float  # in tiles that need it
    mask_reads: float


def instructions_of(kernel: Kernel, traits: Traits) -> Instructions:
    """What a kernel's loop computes for each pair besides products; nothing where it is not about pairs."""
    if not weighs_pairs(kernel):
        return Instructions(0, 0, 0, 0, 0, 0, 0, 0)
    weight = _WEIGHT.get(traits.normalizer, Work(1, 0))
    score = traits.score_work
    slope = traits.slope_work if kernel.direction == "backward" else Work()
    drawn_as = "flash_backward" if kernel == DRAWN_KEYS else kernel.name
    dropped = _DROPPED.get(drawn_as, _DROPPED_ELSEWHERE) if traits.drops else 0.0
    mask = traits.mask_work
    return Instructions(
        special=weight.special + score.special + slope.special,
        other=_PLAIN[kernel.direction] + weight.other + score.other + slope.other + dropped,
        pair_reads=score.reads,
        gathers=score.gathers,
        row_reads=score.key_reads if kernel.axis == "kv" else score.query_reads,
        levels=traits.level_reads if kernel.direction == "backward" and kernel.name != DDIAGONALS else 0,
        mask=(mask.special + mask.other + _EDGE) if traits.masked else 0.0,
        mask_reads=(mask.reads + mask.gathers) if traits.masked else 0.0,
    )


def longest_of(kernel: Kernel, x: Sizes, masked: bool) -> float:
    """Tiles that the longest program visits: under a mask twice the mean, if there are as many."""
    programs = kernel.programs(x)
    if not programs or not x.n:
        return 0.0
    if kernel.name == DDIAGONALS:  # most have no tile, those in the middle have all of theirs
        return min(x.nq, x.nkv) / DIAGONAL_PARTS
    mean = x.n / programs
    # programs of a key head visit the tiles of all its query heads
    most = x.nkv if kernel.axis == "kv" else x.nq * (x.Hq / x.Hkv)
    return max(mean, min(most, 2 * mean)) if masked else mean
