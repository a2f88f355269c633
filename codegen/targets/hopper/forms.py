"""Forms of the kernels of target hopper: consumers, slots of rings, and what else their texts vary by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ....compiler.planning.dtypes import E4M3
from ....compiler.planning.form import PROGRAMS_PER_SM, Form, Residence, number, register, switch
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.segments import Segments
from .paces import NARROW

ROWS = 64  # of a consumer: the height of a wgmma
PIECE_COLUMNS, NARROW_COLUMNS = 128, 64  # of the pieces of a latent tile


@register
@dataclass(frozen=True)
class HopperForm(Form):
    """The asynchronous forward: one producer warp, `consumers` warpgroups of 64 rows, tiles in a ring.

    >>> from weft.compiler.planning.form import parse_form
    >>> str(parse_form("192x128s3q2+pairs"))
    '192x128s3q2+pairs'
    """

    consumers: int = number("", unit=ROWS, others=(2, 3))  # warpgroups, which share K and V
    block_kv: int = number("x", others=(64, 128))
    stages: int = number("s", others=(2, 3, 4))  # slots for K, and as many for V
    # 2: the next query tile is loaded while one is worked on
    query_buffers: int = number("q", default=1, others=(1, 2))
    # of an element of what each pair reads, where tiles of it are brought to SRAM with keys
    pair_bytes: int = number("p", default=0, left_out=0)
    query_in_registers: bool = switch("regs")
    lazy_rescale: bool = switch("lazy")  # the softmax reference moves only when it is 2**8 too low
    pair_maximum: bool = switch("pairs")  # maxima of neighbours first
    overlap_edges: bool = switch("overlap")  # P V stays in flight under the mask code of edge tiles too
    output_in_query: bool = switch("inplace")  # the output leaves from the query's place in SRAM
    drawers: bool = switch("drawers")  # a warpgroup of its own draws which weights are dropped, a tile ahead
    fp8: bool = switch("fp8")  # products of 8 bits, values by columns

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    def products(self, dtype: str) -> str:
        return E4M3.name if self.fp8 else dtype

    @property
    def span_rows(self) -> int:
        return ROWS  # of a consumer

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(self.stages, 1, 0)

    # It is persistent, and takes most of an SM's SRAM and registers: one program an SM.

    def pace_family(self, kernel: Kernel, parts: Segments) -> str:
        if self.fp8:
            return f"hopper {kernel.name} of eighths" + ", parted" * (parts.v_columns > 128)
        is_narrow = max(parts.qk_columns, parts.v_columns) <= NARROW
        narrow = self.consumers == 2 and is_narrow and not self.lazy_rescale
        return f"hopper {kernel.name}" + " of three" * (self.consumers == 3) + " narrow" * narrow

    def neighbours(self) -> Iterator[HopperForm]:
        yield from super().neighbours()
        if self.pair_bytes:
            yield replace(self, pair_bytes=0)


@register
@dataclass(frozen=True)
class HopperBackwardForm(Form):
    """The asynchronous backward: two warpgroups keep sums of a program's own tile, of 64 rows each, or of some columns
    of 64 rows.
    """

    block_q: int = number("", others=(64, 128))
    block_kv: int = number("x", default=2 * ROWS, others=(64, 128))
    stages: int = number("s", default=2, others=(2, 3))  # slots for query tiles
    pair_bytes: int = number("p", default=0, left_out=0)  # as of HopperForm, with queries
    next_scores: bool = switch("next")  # Q K^T of the next query tile is begun beside the products of this one
    by_columns: bool = switch("columns")  # one warpgroup finds weights, the other dS, and each keeps some columns
    keys_ahead: bool = switch("ahead")  # a program's next keys are brought while consumers have those before

    def is_persistent(self, drops: bool) -> bool:
        """Whether programs of the kernel that owns keys take one tile of them after another; drawers know of one."""
        return not self.by_columns and not drops

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(self.stages, 1, 0)

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        """The main kernel takes most of an SM's SRAM and registers; those before and after it take little."""
        return min(PROGRAMS_PER_SM, int(hardware.sram_per_sm // max(sram, 1024))) if kernel.follows else 1

    def pace_family(self, kernel: Kernel, parts: Segments) -> str:
        return f"hopper {kernel.name}" + " next" * self.next_scores

    def neighbours(self) -> Iterator[HopperBackwardForm]:
        for form in super().neighbours():
            halves = form.by_columns != self.by_columns
            yield replace(form, block_kv=(2 if self.by_columns else 1) * ROWS) if halves else form


@register
@dataclass(frozen=True)
class HopperLatentForm(Form):
    """The asynchronous kernel of latent caches: one warpgroup finds weights, two sum half of the columns each.

    A tile of 64 keys lies in SRAM once, as pieces of PIECE_COLUMNS columns, and is both key and value.
    """

    slots: int = number("p", default=11)  # for pieces of keys
    stored: int = number("r", default=0, left_out=0)  # for pieces in FP8, of which the producer makes those above
    # where several tiles of rows share keys
    ordered: bool = switch("ordered")  # products with values wait for the scores of the next tile
    prefetch: bool = switch("prefetch")  # keys are brought to L2 two tiles early, where queries are few
    narrow: bool = switch("narrow")  # pieces of NARROW_COLUMNS columns: a rank has an even number of pieces
    prefix: ClassVar[str] = "64x64"
    block_q: ClassVar[int] = ROWS  # tiles are as high however few rows there are: a product has no fewer
    block_kv: ClassVar[int] = 64
    computes_bound: ClassVar[bool] = True

    @property
    def piece(self) -> int:
        return NARROW_COLUMNS if self.narrow else PIECE_COLUMNS

    @property
    def converters(self) -> int:
        """Warps that convert, of a warpgroup: each has slots of its own, of pieces in FP8."""
        return max(warps for warps in (1, 2, 3) if self.stored % warps == 0)

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(self.slots, 1, element)

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        return PROGRAMS_PER_SM if kernel.follows else 1

    def pace_family(self, kernel: Kernel, parts: Segments) -> str:
        return f"hopper {kernel.name}" + " of eighths" * (self.stored > 0 and not kernel.follows)
