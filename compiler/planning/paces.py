"""How fast a kernel of a target goes in a family of forms: what is fitted of the model of a GPU.

A visited tile has products, exponentials, other instructions, and at the edge of a mask those of the mask. How much of
each shows in a kernel's time, and what a tile and a program cost besides, are constants of the kernel's text: a share
below 1 is hidden behind something else. They were fitted on what one H200 measured (docs/performance.md) by
`python benchmarks/model.py --fit`, which prints them anew (targets/<family>/paces.py), but for those that name another
card; other cards are taken to have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ir.normalizer import RELU, SIGMOID
from ..analysis.tiles.results import Traits, Work
from .quantities import Sizes

if TYPE_CHECKING:
    from .kernel import Kernel

LANES = 8  # instructions that an SM issues for one result of its special units: 128 lanes, and 16 of those


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
    fitted: str = "H200"  # the card that it was fitted on


UNFITTED = Pace()  # as if nothing hid behind products, and nothing else took time
PACES: dict[str, Pace] = {}  # by family; rooms of targets fill it


def pace_of(kernel: Kernel, family: str) -> Pace:
    return PACES.get(family, UNFITTED) if kernel.pace is None else kernel.pace


# -- instructions ------------------------------------------------------------------------------------------------------
# Of a pair besides score and mask: maximum, scaling, sums and rounding in a forward; in a backward dP - delta, products
# and rounding.
_PLAIN = {"forward": 5.0, "backward": 4.0}
_WEIGHT = {SIGMOID: Work(2, 2), RELU: Work(0, 1)}  # of a normalizer; the softmax has its exponential
AT_HAND = 4.0  # of a pair whose bias lies in SRAM: its load, its type and its scale; by one row
_EDGE = 2.0  # of a pair at the edge besides the mask: it is hidden, and the lengths are looked at


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
    if not kernel.weighs:
        return Instructions(0, 0, 0, 0, 0, 0, 0, 0)
    weight = _WEIGHT.get(traits.normalizer, Work(1, 0))
    score = traits.score_work
    slope = traits.slope_work if kernel.direction == "backward" else Work()
    dropped = kernel.drop_work if traits.drops else 0.0
    mask = traits.mask_work
    return Instructions(
        special=weight.special + score.special + slope.special,
        other=_PLAIN[kernel.direction] + weight.other + score.other + slope.other + dropped,
        pair_reads=score.reads,
        gathers=score.gathers,
        row_reads=score.key_reads if kernel.axis == "kv" else score.query_reads,
        levels=traits.level_reads if kernel.sums_levels else 0,
        mask=(mask.special + mask.other + _EDGE) if traits.masked else 0.0,
        mask_reads=(mask.reads + mask.gathers) if traits.masked else 0.0,
    )


def longest_of(kernel: Kernel, x: Sizes, masked: bool) -> float:
    """Tiles that the longest program visits: under a mask twice the mean, if there are as many."""
    programs = kernel.programs(x)
    if not programs or not x.n:
        return 0.0
    if kernel.longest is not None:
        return kernel.longest(x)
    mean = x.n / programs
    # programs of a key head visit the tiles of all its query heads
    most = x.nkv if kernel.axis == "kv" else x.nq * (x.Hq / x.Hkv)
    return max(mean, min(most, 2 * mean)) if masked else mean
