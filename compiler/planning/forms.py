"""How a kernel is cut and launched: tile sizes and what else may vary, one record for each kind of kernel.

Every form knows its tile (`block_q`, `block_kv`), where its tiles lie (`residence`), the formula of its SRAM, how many
programs an SM runs, its text, which reads back, and its neighbours, for the tuner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

from ...ir.errors import WeftError
from .hardware import Hardware
from .kernels import Kernel
from .quantities import (
    NARROW_COLUMNS,
    PIECE_COLUMNS,
    Formula,
    Sizes,
    flash_dkey_dvalue_sram,
    hopper_ahead_sram,
    hopper_backward_sram,
    hopper_by_columns_sram,
    hopper_forward_sram,
    hopper_forward_sram_in_place,
    hopper_forward_sram_two_queries,
    hopper_latent_sram,
    hopper_loaded_sram,
    hopper_narrow_latent_sram,
)
from .segments import Segments
from .signature import Direction
from .splits import tile_rows

PROGRAMS_PER_SM = 8  # at most, whatever else would fit
ROWS_OF_A_WARPGROUP = 64  # the height of a wgmma
SCORE_BYTES = 4  # of a score on a CPU: float32


class Residence(NamedTuple):
    """Where a kernel keeps its tiles."""

    ahead: int  # SRAM buffers of a tile that is loaded ahead
    owned_in_sram: int  # 1 where the tiles that a program owns lie in SRAM, 0 where registers hold them
    score_bytes: int  # SRAM bytes of a score between its two matrix products; 0 where registers hold it


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch settings of one Triton kernel."""

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}w{self.num_warps}s{self.num_stages}"

    @property
    def span_rows(self) -> int:
        """Queries for which tiles are measured together."""
        return self.block_q

    def of_rows(self, rows: int) -> Tiling:
        """The same for tiles of as few queries as hold so many rows that share keys."""
        return replace(self, block_q=tile_rows(self.block_q, rows))

    def sram(self, kernel: Kernel) -> Formula:
        return kernel.sram

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        """As Triton 3.6 places tiles; columns: of the widest result of a product.

        Checked against `metadata.shared` of kernels compiled for sm_80 to gfx942.
        """
        stages = max(1, self.num_stages)
        if hardware.kind == "hip":
            return Residence(max(1, stages - 1), 0, 0)
        rows = self.block_q if kernel.axis == "kv" else self.block_kv
        # Asynchronous warpgroup products read SRAM while the next load is under way, so they need one buffer more.
        warpgroup = hardware.capability >= 90 and element == 2 and rows >= ROWS_OF_A_WARPGROUP
        # A warp keeps its rows of P for the second product, unless warps share rows or units are not matrix units.
        # Before sm_90 they share them where a result has twice as many columns as rows, or more.
        shared = rows < 16 * self.num_warps or (hardware.capability < 90 and columns >= 2 * rows)
        spread = element > 2 or (shared and not warpgroup)
        blackwell = hardware.capability >= 100 and kernel.direction == "backward"
        return Residence(stages if warpgroup else max(1, stages - 1), 1, element if spread or blackwell else 0)

    def registers(self, kernel: Kernel, parts: Segments) -> int:
        """32-bit registers a thread for sums and scores; a compiler adds addresses and loads: keep well below 255."""
        scores = self.block_q * self.block_kv
        qk_columns, v_columns = parts.qk_columns, parts.v_columns
        match kernel.name:
            case "flash_forward" | "split_forward" | "streaming_forward":
                kept = self.block_q * v_columns + scores * 3 // 2  # scores, and P in half the width
            case "flash_dquery":
                kept = self.block_q * qk_columns + scores * 5 // 2  # S, dP, dS in half the width
            case "flash_dkey_dvalue" | "streaming_backward":
                kept = self.block_kv * (qk_columns + v_columns) + scores * 5 // 2
            case "flash_dpairs" | "flash_ddiagonals":
                kept = scores * 4  # the sum, S, dP, dload
            case _:
                kept = scores + self.block_q * max(qk_columns, v_columns)
        return kept // (32 * self.num_warps)

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        registers = min(255, self.registers(kernel, parts) + 64) * 32 * self.num_warps
        fit = min(hardware.sram_per_sm // max(sram, 1024), hardware.registers_per_sm // registers, PROGRAMS_PER_SM)
        return max(1, int(fit))


@dataclass(frozen=True)
class HopperForm:
    """The asynchronous kernels of sm_90: one producer warp, `consumers` warpgroups of 64 rows, tiles in a ring."""

    consumers: int  # warpgroups, which share K and V
    block_kv: int
    stages: int  # slots for K, and as many for V
    query_buffers: int = 1  # 2: the next query tile is loaded while one is worked on
    query_in_registers: bool = False
    lazy_rescale: bool = False  # the softmax reference moves only when it is 2**8 too low
    pair_maximum: bool = False  # maxima of neighbours first
    overlap_edges: bool = False  # P V stays in flight under the mask code of edge tiles too
    output_in_query: bool = False  # the output leaves from the query's place in SRAM
    drawers: bool = False  # a warpgroup of its own draws which weights are dropped, a tile ahead
    pair_bytes: int = 0  # of an element of what each pair reads, where tiles of it are brought to SRAM with keys

    _FLAGS: ClassVar[dict[str, str]] = {
        "query_in_registers": "regs", "lazy_rescale": "lazy", "pair_maximum": "pairs", "overlap_edges": "overlap",
        "output_in_query": "inplace", "drawers": "drawers",
    }  # fmt: skip

    @property
    def block_q(self) -> int:
        return ROWS_OF_A_WARPGROUP * self.consumers

    @property
    def span_rows(self) -> int:
        """Queries for which tiles are measured together: those of a consumer."""
        return ROWS_OF_A_WARPGROUP

    def __str__(self) -> str:
        buffers = f"q{self.query_buffers}{_pairs_text(self)}"
        return f"{self.block_q}x{self.block_kv}s{self.stages}{buffers}{_flags_text(self)}"

    def sram(self, kernel: Kernel) -> Formula:
        if kernel.follows:
            return kernel.sram
        found: Formula = hopper_forward_sram if self.query_buffers == 1 else hopper_forward_sram_two_queries
        found = hopper_forward_sram_in_place if self.output_in_query else found
        found = _with_drawn(found) if self.drawers else found
        return _with_boxes(found, self.pair_bytes) if self.pair_bytes else found

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(self.stages, 1, 0)

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        return 1  # persistent, and it takes most of an SM's SRAM and registers

    def neighbours(self) -> Iterator[HopperForm]:
        """Forms that differ in one choice."""
        for name in self._FLAGS:
            yield replace(self, **{name: not getattr(self, name)})
        for stages in (2, 3, 4):
            yield replace(self, stages=stages)
        for consumers in (2, 3):
            yield replace(self, consumers=consumers)
        for block_kv in (64, 128):
            yield replace(self, block_kv=block_kv)
        yield replace(self, query_buffers=3 - self.query_buffers)
        if self.pair_bytes:
            yield replace(self, pair_bytes=0)


@lru_cache(maxsize=64)
def _with_drawn(formula: Formula) -> Formula:
    """And half a word for each weight of a tile: whether it is kept."""

    def found(x: Sizes) -> float:
        return formula(x) + 2 * x.bq * x.bkv

    return found


@lru_cache(maxsize=64)
def _with_boxes(formula: Formula, pair_bytes: int) -> Formula:
    """And a tile of what pairs read in each slot of visited tiles."""

    def found(x: Sizes) -> float:
        return formula(x) + pair_bytes * x.s * x.bq * x.bkv

    return found


@dataclass(frozen=True)
class HopperBackwardForm:
    """The asynchronous backward of sm_90: two warpgroups keep sums of a program's own tile, of 64 rows each, or of some
    columns of 64 rows.
    """

    block_q: int
    block_kv: int = 2 * ROWS_OF_A_WARPGROUP
    stages: int = 2  # slots for query tiles
    next_scores: bool = False  # Q K^T of the next query tile is begun beside the products of this one
    by_columns: bool = False  # one warpgroup finds weights, the other gradients of scores, and each keeps some columns
    keys_ahead: bool = False  # a program's next keys are brought while consumers have those before
    pair_bytes: int = 0  # as of HopperForm, with queries

    _FLAGS: ClassVar[dict[str, str]] = {"next_scores": "next", "by_columns": "columns", "keys_ahead": "ahead"}

    @property
    def span_rows(self) -> int:
        return self.block_q

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}s{self.stages}{_pairs_text(self)}{_flags_text(self)}"

    def sram(self, kernel: Kernel) -> Formula:
        found = kernel.sram
        if kernel.sram is flash_dkey_dvalue_sram:
            found = hopper_by_columns_sram if self.by_columns else hopper_loaded_sram
        if self.keys_ahead and kernel.sram is hopper_backward_sram:
            found = hopper_ahead_sram
        return _with_boxes(found, self.pair_bytes) if self.pair_bytes and not kernel.follows else found

    def is_persistent(self, drops: bool) -> bool:
        """Whether programs of the kernel that owns keys take one tile of them after another; drawers know of one."""
        return not self.by_columns and not drops

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(self.stages, 1, 0)

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        """The main kernel takes most of an SM's SRAM and registers; those before and after it take little."""
        return min(PROGRAMS_PER_SM, int(hardware.sram_per_sm // max(sram, 1024))) if kernel.follows else 1

    def neighbours(self) -> Iterator[HopperBackwardForm]:
        """Forms that differ in one choice."""
        yield replace(self, next_scores=not self.next_scores)
        yield replace(self, keys_ahead=not self.keys_ahead)
        block_kv = (2 if self.by_columns else 1) * ROWS_OF_A_WARPGROUP
        yield replace(self, by_columns=not self.by_columns, block_kv=block_kv)
        for block_q in (64, 128):
            yield replace(self, block_q=block_q)
        for block_kv in (64, 128):
            yield replace(self, block_kv=block_kv)
        for stages in (2, 3):
            yield replace(self, stages=stages)


@dataclass(frozen=True)
class HopperLatentForm:
    """The asynchronous kernel of latent caches on sm_90: one warpgroup finds weights, two sum half of the columns each.

    A tile of 64 keys lies in SRAM once, as pieces of PIECE_COLUMNS columns, and is both key and value.
    """

    slots: int = 11  # for pieces of keys
    # where several tiles of rows share keys
    ordered: bool = False  # products with values wait for the scores of the next tile
    prefetch: bool = False  # keys are brought to L2 two tiles early, where queries are few
    narrow: bool = False  # pieces of NARROW_COLUMNS columns: a rank has an even number of pieces
    block_q: ClassVar[int] = ROWS_OF_A_WARPGROUP
    block_kv: ClassVar[int] = 64

    _FLAGS: ClassVar[dict[str, str]] = {"ordered": "ordered", "prefetch": "prefetch", "narrow": "narrow"}

    @property
    def span_rows(self) -> int:
        return self.block_q

    @property
    def piece(self) -> int:
        return NARROW_COLUMNS if self.narrow else PIECE_COLUMNS

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}p{self.slots}{_flags_text(self)}"

    def of_rows(self, rows: int) -> HopperLatentForm:
        """Tiles are as high however few rows there are: a product has no fewer."""
        return self

    def sram(self, kernel: Kernel) -> Formula:
        own = hopper_narrow_latent_sram if self.narrow else hopper_latent_sram
        return kernel.sram if kernel.follows else own

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(self.slots, 1, element)

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        return PROGRAMS_PER_SM if kernel.follows else 1

    def neighbours(self) -> Iterator[HopperLatentForm]:
        """Forms that differ in one choice."""
        for name in self._FLAGS:
            yield replace(self, **{name: not getattr(self, name)})


def _pairs_text(form: HopperForm | HopperBackwardForm) -> str:
    return f"p{form.pair_bytes}" if form.pair_bytes else ""


def _flags_text(form: HopperForm | HopperBackwardForm | HopperLatentForm | CpuForm) -> str:
    return "".join(f"+{short}" for name, short in form._FLAGS.items() if getattr(form, name))


@dataclass(frozen=True)
class CpuForm:
    """Tiles of torch code: a tile of scores is [heads of a group x block_q, block_kv]."""

    block_q: int
    block_kv: int
    cache_kib: int = 1024  # neighbours that need no mask are one tile, of at most as many KiB of scores in float32
    one_dnn: bool = False  # products of float32 by oneDNN, where it takes them, in place of torch's own
    in_tiles: bool = False  # also the calls that torch's own attention computes as they are

    _FLAGS: ClassVar[dict[str, str]] = {"one_dnn": "onednn", "in_tiles": "tiles"}

    @property
    def span_rows(self) -> int:
        return self.block_q

    @property
    def most_scores(self) -> int:
        """Scores of a tile of joined neighbours."""
        return self.cache_kib * 1024 // SCORE_BYTES

    def __str__(self) -> str:
        joined = "" if self.cache_kib == CpuForm.cache_kib else f"c{self.cache_kib}"
        return f"{self.block_q}x{self.block_kv}{joined}{_flags_text(self)}"

    def sram(self, kernel: Kernel) -> Formula:
        return cpu_tile_bytes(max(self.most_scores, self.block_q * self.block_kv), kernel.direction)

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        return Residence(1, 1, max(4, element))  # computed in float32 at least, one tile at a time

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        return 1


@lru_cache(maxsize=64)
def cpu_tile_bytes(scores: int, direction: Direction) -> Formula:
    """What a core goes over again and again: a tile of scores, its keys, values, queries and sums; backward also dP."""
    several = 1 if direction == "forward" else 2

    def found(x: Sizes) -> float:
        return several * SCORE_BYTES * (scores + (x.bq + scores / x.bq) * (x.C + x.Cv))

    return found


Form = Tiling | HopperForm | HopperBackwardForm | HopperLatentForm | CpuForm
_TILING = re.compile(r"(\d{1,5})x(\d{1,5})w(\d{1,2})s(\d{1,2})")
_HOPPER = re.compile(r"(\d{1,4})x(\d{1,4})s(\d)q(\d)(?:p(\d))?((?:\+[a-z]+)*)")
_HOPPER_BACKWARD = re.compile(r"(\d{1,4})x(\d{1,4})s(\d)(?:p(\d))?((?:\+[a-z]+)*)")
_HOPPER_LATENT = re.compile(r"64x64p(\d{1,2})((?:\+[a-z]+)*)")
_CPU = re.compile(r"(\d{1,7})x(\d{1,7})(?:c(\d{1,7}))?((?:\+[a-z]+)*)")


def parse_form(text: str) -> Form | None:
    """Read back the text of a form: parse_form(str(form)) == form; None for any other text.

    >>> parse_form("128x64w8s3"), parse_form("64x128")
    (Tiling(block_q=128, block_kv=64, num_warps=8, num_stages=3), CpuForm(block_q=64, block_kv=128))
    >>> str(parse_form("192x128s3q2+pairs"))
    '192x128s3q2+pairs'
    """
    if found := _TILING.fullmatch(text):
        return Tiling(*map(int, found.groups()))
    if found := _CPU.fullmatch(text):
        chosen = _flags(CpuForm._FLAGS, found[4])
        cache = CpuForm.cache_kib if found[3] is None else int(found[3])
        return None if chosen is None else CpuForm(int(found[1]), int(found[2]), cache, **chosen)
    if found := _HOPPER.fullmatch(text):
        block_q, block_kv, stages, buffers = map(int, found.groups()[:4])
        chosen, pair_bytes = _flags(HopperForm._FLAGS, found[6]), int(found[5] or 0)
        if block_q % ROWS_OF_A_WARPGROUP == 0 and chosen is not None:
            return HopperForm(
                block_q // ROWS_OF_A_WARPGROUP, block_kv, stages, buffers, pair_bytes=pair_bytes, **chosen
            )  # fmt: skip
    if found := _HOPPER_LATENT.fullmatch(text):
        chosen = _flags(HopperLatentForm._FLAGS, found[2])
        return None if chosen is None else HopperLatentForm(int(found[1]), **chosen)
    if found := _HOPPER_BACKWARD.fullmatch(text):
        chosen = _flags(HopperBackwardForm._FLAGS, found[5])
        block_q, block_kv, stages, pair_bytes = (int(number or 0) for number in found.groups()[:4])
        return None if chosen is None else HopperBackwardForm(
            block_q, block_kv, stages, pair_bytes=pair_bytes, **chosen
        )  # fmt: skip
    return None


def _flags(known: Mapping[str, str], text: str) -> dict[str, bool] | None:
    """The switches that "+regs+lazy" names; None where one is unknown."""
    names = {short: name for name, short in known.items()}
    flags = [f for f in text.split("+") if f]
    return {names[f]: True for f in flags} if names.keys() >= set(flags) else None


def check_tiling(kernel: str, tiling: Tiling) -> None:
    """Raise WeftError for numbers that no Triton kernel can have."""
    for name, rows in (("block_q", tiling.block_q), ("block_kv", tiling.block_kv)):
        if rows < 16 or rows & (rows - 1):
            raise WeftError(
                f"schedule: {kernel} {tiling}: expected {name} to be a power of two of at least 16, got {rows}"
            )
    if tiling.num_warps not in (1, 2, 4, 8, 16):
        raise WeftError(f"schedule: {kernel} {tiling}: expected 1, 2, 4, 8 or 16 warps, got {tiling.num_warps}")
    if tiling.num_stages < 1:
        raise WeftError(f"schedule: {kernel} {tiling}: expected at least 1 stage, got {tiling.num_stages}")
