"""Predicted traffic and time of each kernel of a schedule on a given machine.

The formulas are in kernels.py; here are the numbers of a problem that they need, and the model of the machine:

- **Repeated reads** (`share_from_hbm`). Programs run in order of their number, as many at once as SRAM and registers
  allow. If what the running ones read again (K and V of their heads; for `streaming` Q and the running rows) fits in
  L2, it comes from HBM once. If not, programs that share a head still walk over it together, one wave after the other,
  so it comes once a wave; a program that shares with nobody sweeps over its own rows and finds again what random
  replacement has left.
- **Time** is the largest of four: matrix products, exponentials, bytes (HBM, or L2 for the algorithmic traffic), and
  the launch. As if each hid behind the largest completely, so it is a lower limit; it ranks schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp
from typing import Literal

from ..analysis.records import Axis, TileCounts, Traits
from .hardware import Hardware
from .kernels import (
    KERNELS,
    ROW_STATISTICS,
    SPANS,
    Kernel,
    Sizes,
    Slot,
    hopper_forward_sram,
    hopper_forward_sram_two_queries,
    with_measuring,
)
from .records import DTYPE_BYTES, Schedule, Shape, Tiling
from .segments import Segments, for_heads

Bound = Literal["matrix", "memory", "exp", "latency"]
CountTiles = Callable[[Axis, int, int], TileCounts]  # (axis of the loop, rows of a query tile, of a key tile)

L2_SHARE = 0.8  # of L2 that holds what is read again; outputs and one-time reads pass through the rest
L2_OVER_HBM = 1.8  # bytes/s that L2 delivers over those of HBM
HEADS_TOGETHER = 8  # heads whose tiles run side by side: HEAD_BUNCH of the templates
PROGRAMS_PER_SM = 8  # at most, whatever else would fit
HOPPER_ROWS = 64  # query rows of a consumer of the Hopper forward, which has tiles of its own: ROWS of the template
SPANS_WARPS = 8  # of a program that measures tiles


@dataclass(frozen=True)
class KernelCost:
    """Numbers of one kernel; `sizes` are the letters that they came from."""

    kernel: Kernel
    tiling: Tiling
    tiles: TileCounts
    sizes: Sizes
    sram: float  # bytes of one program
    read: float  # bytes from HBM
    written: float  # bytes to HBM
    traffic: float  # algorithmic bytes, as if there were no L2
    seconds: float
    bound: Bound


# -- the numbers of a problem ----------------------------------------------------------------------------------------
def element_bytes(dtype: str) -> int:
    return 8 if dtype == "fp64" else DTYPE_BYTES[dtype]


def dense_counts(shape: Shape) -> CountTiles:
    """Tiles where nothing is masked: all are visited, and only ragged ones check lengths."""

    def count(axis: Axis, block_q: int, block_kv: int) -> TileCounts:
        heads = shape.batch * shape.heads
        visited = ceil(shape.q_len / block_q) * ceil(shape.kv_len / block_kv)
        # A kernel that owns query tiles checks the lengths of keys inside its loop, and the other way round.
        whole_q = ceil(shape.q_len / block_q) if axis == "kv" else shape.q_len // block_q
        whole_kv = shape.kv_len // block_kv if axis == "kv" else ceil(shape.kv_len / block_kv)
        return TileCounts(0, heads * (visited - whole_q * whole_kv), heads * whole_q * whole_kv)

    return count


def sizes_of(
    kernel: Kernel,
    tiling: Tiling,
    shape: Shape,
    hardware: Hardware,
    parts: Segments,
    visited: int,
    traits: Traits = Traits(),  # noqa: B008  frozen
) -> Sizes:
    """The letters of a problem, with k = 1: as if there were no L2."""
    size = element_bytes(shape.dtype)
    ahead, in_sram, score_bytes = _residence(kernel, tiling, hardware, size)
    own_value = not parts.value_is_key
    return Sizes(
        B=shape.batch, Hq=shape.heads, Hkv=shape.kv_heads, L=shape.q_len, T=shape.kv_len, D=shape.head_dim,
        Dv=shape.value_dim, C=parts.qk_columns, Cv=parts.v_columns, Du=shape.value_dim * own_value,
        Cu=parts.v_columns * own_value, e=size, bq=tiling.block_q, bkv=tiling.block_kv, s=ahead, h=in_sram,
        p=score_bytes, n=visited, nq=ceil(shape.q_len / tiling.block_q), nkv=ceil(shape.kv_len / tiling.block_kv),
        k=1, j=1, w=0 if traits.linear else 1,
    )  # fmt: skip


def _residence(kernel: Kernel, tiling: Tiling, hardware: Hardware, size: int) -> tuple[int, int, int]:
    """(buffers loaded ahead, owned tiles in SRAM?, bytes of a score in SRAM), as Triton 3.6 places them.

    Checked against `metadata.shared` of kernels compiled ahead of time for sm_80, sm_90, sm_100 and gfx942.
    """
    stages = max(1, tiling.num_stages)
    if hardware.kind == "hip":
        return max(1, stages - 1), 0, 0
    rows = tiling.block_q if kernel.axis == "kv" else tiling.block_kv
    # Asynchronous warpgroup products read SRAM while the next load is under way, so they need one buffer more.
    warpgroup = hardware.capability >= 90 and size == 2 and rows >= 64
    # A warp keeps its rows of P for the second product, unless several warps share rows or units are not matrix units.
    spread = size > 2 or (rows < 16 * tiling.num_warps and not warpgroup)
    blackwell = hardware.capability >= 100 and kernel.direction == "backward"
    return (stages if warpgroup else max(1, stages - 1)), 1, (size if spread or blackwell else 0)


def sram_bytes(kernel: Kernel, tiling: Tiling, shape: Shape, hardware: Hardware, parts: Segments) -> int:
    """SRAM of one program."""
    return int(kernel.sram(sizes_of(kernel, tiling, shape, hardware, parts, 1)))


def accumulator_registers(kernel: Kernel, tiling: Tiling, parts: Segments) -> int:
    """32-bit registers a thread for sums and scores; a compiler adds addresses and loads, so keep well below 255."""
    v_columns = parts.v_columns
    scores = tiling.block_q * tiling.block_kv
    match kernel.name:
        case "flash_forward" | "streaming_forward":
            kept = tiling.block_q * v_columns + scores * 3 // 2  # scores, and P in half the width
        case "flash_dquery":
            kept = tiling.block_q * parts.qk_columns + scores * 5 // 2  # S, dP, dS in half the width
        case "flash_dkey_dvalue" | "streaming_backward":
            kept = tiling.block_kv * (parts.qk_columns + v_columns) + scores * 5 // 2
        case _:
            kept = scores + tiling.block_q * max(parts.qk_columns, v_columns)
    return kept // (32 * tiling.num_warps)


# -- the model of the machine ----------------------------------------------------------------------------------------
def programs_at_once(kernel: Kernel, tiling: Tiling, sram: float, hardware: Hardware, parts: Segments) -> int:
    """Programs that the machine runs at the same time."""
    if hardware.kind == "cpu":
        return hardware.sms
    registers = min(255, accumulator_registers(kernel, tiling, parts) + 64) * 32 * tiling.num_warps
    fit = min(hardware.sram_per_sm // max(sram, 1024), hardware.registers_per_sm // registers, PROGRAMS_PER_SM)
    return hardware.sms * max(1, int(fit))


def share_from_hbm(kernel: Kernel, sizes: Sizes, at_once: int, hardware: Hardware) -> float:
    """The letter k: which share of repeated reads and writes misses L2 when `at_once` programs run together."""
    visits = kernel.again.visits(sizes)
    if visits <= 1:
        return 1.0  # nothing is repeated, and what no program visits is not read
    query_heads = sizes.B * sizes.Hq
    programs_a_head = kernel.programs(sizes) / query_heads
    live = min(query_heads, at_once / programs_a_head)
    if programs_a_head > 1:
        live = min(query_heads, ceil(live / HEADS_TOGETHER) * HEADS_TOGETHER)
    sharing = sizes.Hq / sizes.Hkv if kernel.axis == "kv" else 1
    pressure = max(1.0, live / sharing) * kernel.again.head_bytes(sizes) / (L2_SHARE * hardware.l2_bytes)
    if pressure <= 1:
        return 0.0
    if programs_a_head > 1:
        waves = max(1.0, programs_a_head * HEADS_TOGETHER / at_once)
        return min(1.0, (waves - 1) / (visits - 1))
    return 1.0 - _hits_of_a_sweep(pressure)


def _hits_of_a_sweep(pressure: float) -> float:
    """Hit rate h of sweeping again and again over `pressure` times the cache, with random replacement.

    Between two visits of a line (1 - h) * pressure lines per line of cache are brought in, and each spares it with
    probability 1 - 1/lines: h = exp(-(1 - h) * pressure), of which the root below 1 is wanted.
    """
    hits = 0.0
    for _ in range(64):
        hits = exp(-(1.0 - hits) * pressure)
    return hits


def cost_of(
    kernel: Kernel,
    tiling: Tiling,
    shape: Shape,
    hardware: Hardware,
    parts: Segments,
    tiles: TileCounts,
    traits: Traits = Traits(),  # noqa: B008  frozen
) -> KernelCost:
    """Numbers of one kernel."""
    once = sizes_of(kernel, tiling, shape, hardware, parts, tiles.visited, traits)
    sram = kernel.sram(once)
    at_once = programs_at_once(kernel, tiling, sram, hardware, parts)
    sizes = replace(once, k=share_from_hbm(kernel, once, at_once, hardware), j=0)
    read, written = kernel.read(sizes), kernel.written(sizes)
    traffic = kernel.read(once) + kernel.written(once)
    programs = kernel.programs(sizes)
    busy = programs / (ceil(programs / at_once) * at_once)  # the last wave leaves part of the machine idle
    bandwidth = hardware.hbm_bytes_per_second
    bounds: dict[Bound, float] = {
        "matrix": kernel.flops(sizes) / (hardware.matrix_flops(shape.dtype) * busy),
        "memory": max((read + written) / bandwidth, traffic / (bandwidth * L2_OVER_HBM)),
        "exp": kernel.exps(sizes) / (hardware.exp_per_second * busy),
        "latency": hardware.launch_seconds,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return KernelCost(kernel, tiling, tiles, sizes, sram, read, written, traffic, bounds[bound], bound)


def tiling_in(schedule: Schedule, slot: Slot) -> Tiling:
    """The tiling of one slot."""
    match slot:
        case "forward":
            return schedule.forward
        case "backward_q":
            return schedule.backward_q
        case _:
            return schedule.backward_kv


def measures_tiles(schedule: Schedule, traits: Traits) -> bool:
    """Whether kernels of this schedule read from memory which tiles to visit, as measured for the call."""
    return schedule.algorithm == "flash" and schedule.target != "cpu" and traits.measured is not None


def kernels_of(schedule: Schedule, traits: Traits) -> tuple[Kernel, ...]:
    """The kernels of a schedule, forward and backward, in order of execution."""
    kernels = KERNELS[schedule.algorithm]
    if traits.measured is None or not measures_tiles(schedule, traits):
        return kernels
    return with_measuring(kernels, traits.measured)


def _tiling(kernel: Kernel, schedule: Schedule) -> Tiling:
    """The tiling of a kernel; what measures tiles has that of the kernel that visits them."""
    tiling = tiling_in(schedule, kernel.slot)
    if kernel.name not in SPANS:
        return tiling
    by_consumer = schedule.target == "hopper" and kernel.direction == "forward"
    return Tiling(HOPPER_ROWS if by_consumer else tiling.block_q, tiling.block_kv, SPANS_WARPS, 1)


def _form(kernel: Kernel, schedule: Schedule, tiling: Tiling) -> Kernel:
    """The kernel as the schedule's target writes it: the Hopper forward holds its tiles in SRAM otherwise."""
    if schedule.target != "hopper" or kernel.name != "flash_forward":
        return kernel
    three_consumers = tiling.block_q == 3 * 64
    return replace(kernel, sram=hopper_forward_sram_two_queries if three_consumers else hopper_forward_sram)


def predict(
    shape: Shape,
    schedule: Schedule,
    hardware: Hardware,
    *,
    segments: Segments | None = None,
    traits: Traits = Traits(),  # noqa: B008  frozen
    count: CountTiles | None = None,
) -> tuple[KernelCost, ...]:
    """Cost of every kernel of a schedule, forward and backward, in order of execution.

    count: tiles of the whole problem by class; where not given, every tile is visited.
    """
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    counts = count or dense_counts(shape)
    costs = []
    for kernel in kernels_of(schedule, traits):
        tiling = _tiling(kernel, schedule)
        kernel = _form(kernel, schedule, tiling)
        # The textbook algorithm stores every score, visible or not.
        counter = dense_counts(shape) if schedule.algorithm == "standard" else counts
        visits = kernel.name not in (ROW_STATISTICS.name, *SPANS)
        tiles = counter(kernel.axis, tiling.block_q, tiling.block_kv) if visits else TileCounts(0, 0, 0)
        costs.append(cost_of(kernel, tiling, shape, hardware, parts, tiles, traits))
    return tuple(costs)


# -- the papers' results ---------------------------------------------------------------------------------------------
def paper_tiling(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """(rows of Q, rows of K) of FlashAttention's algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(Bc, d)."""
    rows = ceil(sram_elements / (4 * head_dim))
    return min(rows, head_dim), rows


def tile_moves(query_tiles: int, key_tiles: int, *, rows_stay: bool) -> int:
    """Tiles moved between HBM and SRAM by a blocked forward pass over all pairs of tiles.

    Where nothing stays, each pair fetches six: Q, K, V, and the running output, maximum and sum. Where the rows of a
    query tile stay until it is done, a pair fetches K and V, and each query tile moves twice: Q in, output out.

    >>> tile_moves(9, 5, rows_stay=False), tile_moves(9, 5, rows_stay=True)
    (270, 108)
    """
    pairs = query_tiles * key_tiles
    return 2 * pairs + 2 * query_tiles if rows_stay else 6 * pairs
