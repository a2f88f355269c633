"""Forms of torch code: tiles that fit a core's cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from ....compiler.analysis.tiles.results import TileCounts, Traits
from ....compiler.planning.form import Form, Machine, Residence, number, register, switch
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.machines.torch_times import TorchCost
from ....compiler.planning.quantities import Formula, Sizes
from ....compiler.planning.segments import Segments
from ....compiler.planning.signature import Direction
from .cost import SCORE_BYTES, torch_cost

CACHE_KIB = 1024


@register
@dataclass(frozen=True)
class CpuForm(Form):
    """Tiles of torch code: a tile of scores is [heads of a group x block_q, block_kv].

    >>> from weft.compiler.planning.form import parse_form
    >>> parse_form("64x128")
    CpuForm(block_q=64, block_kv=128, cache_kib=1024, one_dnn=False, in_tiles=False)
    """

    block_q: int = number("")
    block_kv: int = number("x")
    # neighbours that need no mask are one tile, of at most as many KiB of scores in float32
    cache_kib: int = number("c", default=CACHE_KIB, left_out=CACHE_KIB)
    one_dnn: bool = switch("onednn")  # products of float32 by oneDNN, where it takes them, in place of torch's own
    in_tiles: bool = switch("tiles")  # also the calls that torch's own attention computes as they are
    looks_first: ClassVar[bool] = True

    @property
    def most_scores(self) -> int:
        """Scores of a tile of joined neighbours."""
        return self.cache_kib * 1024 // SCORE_BYTES

    def in_tiles_as(self, other: Form) -> Form:
        return replace(self, in_tiles=other.in_tiles) if isinstance(other, CpuForm) else self

    def sram(self, kernel: Kernel, parts: Segments, traits: Traits) -> Formula:
        return tile_bytes(max(self.most_scores, self.block_q * self.block_kv), kernel.direction)

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(1, 1, max(4, element))  # computed in float32 at least, one tile at a time

    def torch_work(
        self, kernel: Kernel, x: Sizes, tiles: TileCounts, traits: Traits, machine: Machine
    ) -> TorchCost:  # fmt: skip
        return torch_cost(kernel, self, x, tiles, traits, machine)


@lru_cache(maxsize=64)
def tile_bytes(scores: int, direction: Direction) -> Formula:
    """What a core goes over again and again: a tile of scores, its keys, values, queries and sums; backward also dP."""
    several = 1 if direction == "forward" else 2

    def found(x: Sizes) -> float:
        return several * SCORE_BYTES * (scores + (x.bq + scores / x.bq) * (x.C + x.Cv))

    return found
