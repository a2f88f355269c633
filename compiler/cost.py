"""Predicted traffic and time of each kernel of a schedule on a given machine.

The formulas are in kernels.py; here are the numbers of a problem that they need, and the model of the machine:

- **HBM passes** (`passes`). Programs run in order of their number, as many at once as SRAM and registers allow. If what
  the running ones read again (K and V of their heads; for `streaming` Q and the running rows) fits in L2, it comes from
  HBM once. If not, programs that share a head still walk over it together, one wave after the other, so it comes once a
  wave; a program that shares with nobody finds again only the part that fits.
- **Time** is the largest of four: matrix products, exponentials, bytes (HBM, or L2 for the algorithmic traffic), and the
  launch. Nothing of one hides behind another for free, so it is a lower limit that ranks schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from .hardware import Hardware
from .kernels import KERNELS, Axis, Kernel, Sizes
from .segments import Segments, for_heads
from .types import DTYPE_BYTES, Schedule, Shape, TileCounts, Tiling

Bound = Literal["matrix", "memory", "exp", "latency"]
CountTiles = Callable[[Axis, int, int], TileCounts]  # (axis of the loop, rows of a query tile, of a key tile)

L2_SHARE = 0.8  # of L2 that holds what is read again; outputs and one-time reads pass through the rest
L2_OVER_HBM = 1.8  # bytes/s that L2 delivers over those of HBM
HEADS_TOGETHER = 8  # heads whose tiles run side by side: HEAD_BUNCH of the templates
PROGRAMS_PER_SM = 8  # at most, whatever else would fit


@dataclass(frozen=True)
class Traits:
    """What the schedule and the cost depend on besides sizes."""

    linear: bool = True  # the score is a positive number times q.k
    masked: bool = True  # the mask is not True
    operand_gradients: int = 0  # tensor reads in the score that have a gradient


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


# -- the numbers of a problem ---------------------------------------------------------------------------------------------
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


def sizes_of(kernel: Kernel, tiling: Tiling, shape: Shape, hardware: Hardware, parts: Segments, visited: int) -> Sizes:
    """The letters of a problem; r is that of an endless L2 until `passes` is known."""
    size = element_bytes(shape.dtype)
    ahead, in_sram, score_bytes = _residence(kernel, tiling, hardware, size)
    return Sizes(
        B=shape.batch, Hq=shape.heads, Hkv=shape.kv_heads, L=shape.q_len, T=shape.kv_len,
        D=shape.head_dim, Dv=shape.value_dim, C=parts.qk_columns, Cv=0 if parts.value_is_key else parts.v_columns,
        e=size, bq=tiling.block_q, bkv=tiling.block_kv, s=ahead, h=in_sram, p=score_bytes, a=_stored(kernel, size),
        n=visited, nq=ceil(shape.q_len / tiling.block_q), nkv=ceil(shape.kv_len / tiling.block_kv), r=1,
    )  # fmt: skip


def _stored(kernel: Kernel, size: int) -> int:
    """Stored scores have the operands' dtype, running sums are float32."""
    return 4 if kernel.name.startswith("streaming") else size


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


# -- the model of the machine ---------------------------------------------------------------------------------------------
def programs_at_once(kernel: Kernel, tiling: Tiling, sram: float, hardware: Hardware, parts: Segments) -> int:
    """Programs that the machine runs at the same time."""
    if hardware.kind == "cpu":
        return hardware.sms
    registers = min(255, accumulator_registers(kernel, tiling, parts) + 64) * 32 * tiling.num_warps
    fit = min(hardware.sram_per_sm // max(sram, 1024), hardware.registers_per_sm // registers, PROGRAMS_PER_SM)
    return hardware.sms * max(1, int(fit))


def passes(kernel: Kernel, sizes: Sizes, at_once: int, hardware: Hardware) -> float:
    """How often re-read operands come from HBM: 1 if they stay in L2; less if parts of them are never read."""
    uncached = kernel.again.rows(sizes) / max(1.0, kernel.again.rows_once(sizes))
    query_heads = sizes.B * sizes.Hq
    programs_a_head = kernel.programs(sizes) / query_heads
    live = min(query_heads, at_once / programs_a_head)
    if programs_a_head > 1:
        live = min(query_heads, ceil(live / HEADS_TOGETHER) * HEADS_TOGETHER)
    sharing = sizes.Hq / sizes.Hkv if kernel.axis == "kv" else 1
    working_set = max(1.0, live / sharing) * kernel.again.head_bytes(sizes)
    fits = min(1.0, L2_SHARE * hardware.l2_bytes / working_set)
    if fits == 1.0:
        return min(uncached, 1.0)
    if programs_a_head > 1:
        return min(uncached, max(1.0, programs_a_head * HEADS_TOGETHER / at_once))
    return min(uncached, 1.0 + max(0.0, uncached - 1.0) * (1.0 - fits))


def cost_of(
    kernel: Kernel, tiling: Tiling, shape: Shape, hardware: Hardware, parts: Segments, tiles: TileCounts
) -> KernelCost:
    """Numbers of one kernel."""
    once = sizes_of(kernel, tiling, shape, hardware, parts, tiles.visited)
    sram = kernel.sram(once)
    at_once = programs_at_once(kernel, tiling, sram, hardware, parts)
    sizes = replace(once, r=passes(kernel, once, at_once, hardware))
    read, written = kernel.read(sizes), kernel.written(sizes)
    uncached = replace(once, r=kernel.again.rows(once) / max(1.0, kernel.again.rows_once(once)))
    traffic = kernel.read(uncached) + kernel.written(uncached)
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


def tiling_of(schedule: Schedule, kernel: Kernel) -> Tiling:
    match kernel.slot:
        case "forward":
            return schedule.forward
        case "backward_q":
            return schedule.backward_q
        case _:
            return schedule.backward_kv


def predict(
    shape: Shape,
    schedule: Schedule,
    hardware: Hardware,
    *,
    segments: Segments | None = None,
    count: CountTiles | None = None,
) -> tuple[KernelCost, ...]:
    """Cost of every kernel of a schedule, forward and backward, in order of execution.

    count: tiles of the whole problem by class; where not given, every tile is visited.
    """
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    counts = count or dense_counts(shape)
    costs = []
    for kernel in KERNELS[schedule.algorithm]:
        tiling = tiling_of(schedule, kernel)
        # The textbook algorithm stores every score, visible or not.
        counter = dense_counts(shape) if schedule.algorithm == "standard" else counts
        tiles = counter(kernel.axis, tiling.block_q, tiling.block_kv)
        costs.append(cost_of(kernel, tiling, shape, hardware, parts, tiles))
    return tuple(costs)


# -- the papers' results --------------------------------------------------------------------------------------------------
def paper_tiling(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """(rows of Q, rows of K) of FlashAttention's algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(Bc, d)."""
    rows = ceil(sram_elements / (4 * head_dim))
    return min(rows, head_dim), rows
