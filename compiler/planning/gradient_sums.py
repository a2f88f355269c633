"""Which kernel sums the gradient of a read whose index has both positions, and how its sums reach the entries.

Every way has one order of additions, so that gradients repeat bit for bit, unless a call allows atomic additions.

    read once       no two pairs read one entry: the kernel that owns queries stores each tile where it was read
    summed          pairs of one head read different entries, heads share them: a program owns a tile of pairs, goes
                    through the heads that share it, and stores the sum where it was read. Two more products a pair
    by difference   a diagonal of pairs reads one entry: a program owns a part of a diagonal of tiles of one head, adds
                    them up as they are, and lists one sum and entry for each of its diagonals, which a last kernel adds
                    to the entries. Two more products a pair
    listed          anything else: as summed, but each program lists its sums and their entries, which are sorted and
                    added up, part after part of the programs so that memory is bounded
    added           the same where atomic additions are allowed: no list
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...ir.expr import Load
from ..analysis.tiles.results import PAIR_KINDS, GradientKind
from ..analysis.values.places import differ_by_head, differ_by_pair, read_once, summed_over
from .signature import Signature

Owner = Literal["queries", "pairs", "diagonals"]
Finish = Literal["store", "list", "add"]
DIAGONAL_PARTS = 2  # programs of a diagonal of tiles: where a table levels off, few diagonals have anything to sum
DIAGONAL_PROGRAMS = 1024  # are enough, where a table levels off: they go through the diagonals of a head
DIAGONAL_REGISTERS = 168  # of its threads, at most, so that three programs run on an SM
MOST_LISTED = 1 << 24  # sums that are listed at once: 12 bytes each, and what sorts them


@dataclass(frozen=True)
class Way:
    """How the gradient of one read is summed."""

    owner: Owner  # what the programs of the kernel that sums it own
    finish: Finish


@dataclass(frozen=True)
class Ways:
    """Those of all reads with a gradient, in their order; None for reads of other kinds."""

    of_reads: tuple[Way | None, ...]
    over: frozenset[str]  # what a program of that owns pairs sums over: "batch", "head" or "group"
    refused: Load | None = None  # a read that is only summed by atomic additions, which the call does not allow

    @property
    def owners(self) -> frozenset[Owner]:
        return frozenset(way.owner for way in self.of_reads if way is not None)


def ways_of(reads: Sequence[tuple[Load, GradientKind]], signature: Signature) -> Ways:
    """The ways of the reads that a backward sums; reads whose operand needs no gradient are left out before."""
    together = signature.sequences.alike and signature.offset != "per_row"  # rows have one position in any batch
    left = [load for load, kind in reads if kind == "pair" and not read_once(load)]
    over = summed_over(left) if left else frozenset()
    over = over if together else over - {"batch"}
    found: list[Way | None] = []
    refused = None
    for load, kind in reads:
        if kind not in PAIR_KINDS:
            found.append(None)
        elif kind == "diagonal":
            found.append(Way("diagonals", "list"))
        elif read_once(load):
            found.append(Way("queries", "store"))
        elif together and differ_by_pair(load) and differ_by_head(load) and summed_over([load]) == over:
            found.append(Way("pairs", "store"))
        elif signature.atomics:
            found.append(Way("pairs" if over and together else "queries", "add"))
        else:
            refused = load if signature.sequences.keys.packed else refused
            found.append(Way("pairs", "list"))
    return Ways(tuple(found), over, refused)
