"""Predicted traffic and time of each kernel of a schedule on a given machine.

The formulas are in quantities.py; here are the numbers of a problem that they need, and the model of the machine:

- **Repeated reads** (`share_from_hbm`). Programs run in order of their number, as many at once as SRAM and registers
  allow. If what the running ones read again (K and V of their heads; for `streaming` Q and the running rows) fits in
  L2, it comes from HBM once. If not, programs that share a head still walk over it together, one wave after the other,
  so it comes once a wave. A program that shares with nobody sweeps over its own rows and finds again what random
  replacement has left.
- **Time** of a GPU is the launch, and then the longest of HBM, L2 and what SMs compute: products, exponentials, other
  instructions, masks and tiles, one after the other, each as far as it shows in that kernel's form (paces.py). Where
  the longest program has more than an SM's share, it is the tail that counts. Of target `cpu` see cpu_cost.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp

from ..analysis.tiles.measured import LONG_AXIS
from ..analysis.tiles.results import PLAIN, Axis, TileCounts, Traits
from .dtypes import BF16, copies_values
from .form import Form, Machine
from .kernel import Bound, Kernel
from .machines.hardware import Hardware
from .machines.torch_times import CpuTimes, TorchCost
from .paces import AT_HAND, LANES, Instructions, Pace, instructions_of, longest_of, pace_of
from .quantities import Formula, Sizes, key_elements, score_count, uneven_count
from .records import Shape
from .segments import Segments
from .splits import LATENCY, LONE, MOST_PARTS, Parts, divided

CountLongest = Callable[[int, int], int]  # (rows of a query tile, of a key tile) -> tiles of keys
CountTiles = Callable[[Axis, int, int], TileCounts]  # (axis of the loop, rows of a query tile, of a key tile)

L2_FRACTION = 0.8  # of L2 that holds what is read again; outputs and one-time reads pass through the rest
L2_OVER_HBM = 1.8  # bytes/s that L2 delivers over those of HBM
RESERVED = 1024  # bytes of SRAM that a program takes besides its own
CONVERTED = 22e9  # bytes of FP8 keys and values that a program converts in a second, at the most
CONVERTED_BY_SM = 29e9  # the same of all programs that share an SM
MOST_ON_AN_SM = 3  # programs that divide keys: of more, each has fewer registers than its loop wants
MEASURING_AT_ONCE = 8  # programs on an SM that measure tiles: of 8 warps each
REACHED = 0.75  # share of the rate of products that a kernel of latent caches reaches
INTERPRETED = 1 << 20  # programs at once that the interpreter divides keys for, so that it does what a GPU does
HEADS_TOGETHER = 8  # heads whose tiles run side by side: HEAD_BUNCH of the templates


@dataclass(frozen=True)
class Times:
    """Seconds of one kernel on a GPU, each part as its pace lets it show."""

    matrix: float  # products
    exp: float  # exponentials and what else special units compute
    other: float  # other instructions of scores and weights
    mask: float  # of masks, in tiles that need them
    tiles: float  # tiles, pieces and programs, whatever they compute
    memory: float  # bytes from and to HBM
    l2: float  # bytes between L2 and SRAM
    units: float  # all exponentials, hidden ones too: special units are no faster
    latency: float  # of the launch, which nothing hides
    roofline: float  # were there nothing to wait for but the longest of matrix, exp, memory and L2

    @property
    def parts(self) -> dict[Bound, float]:
        """All but the launch."""
        return {
            "matrix": self.matrix, "exp": self.exp, "other": self.other, "mask": self.mask, "tiles": self.tiles,
            "memory": self.memory, "L2": self.l2,
        }  # fmt: skip

    @property
    def computing(self) -> float:
        """What SMs do one after the other."""
        return self.matrix + self.exp + self.other + self.mask + self.tiles

    @property
    def seconds(self) -> float:
        """The launch, and the longest of computing, special units, HBM and L2, which the others hide behind."""
        return self.latency + max(self.computing, self.units, self.memory, self.l2)

    @property
    def bound(self) -> Bound:
        """What takes most of that."""
        found = self._bounds
        longest = max(found, key=lambda name: found[name])
        return longest if found[longest] >= self.latency else "latency"

    @property
    def share(self) -> float:
        """Of the kernel's time, of what bounds it."""
        return (self.latency if self.bound == "latency" else self._bounds[self.bound]) / self.seconds

    @property
    def _bounds(self) -> dict[Bound, float]:
        """What the kernel may wait for: parts of computing where that takes longest, else what takes longer."""
        if self.computing >= max(self.units, self.memory, self.l2):
            return {"matrix": self.matrix, "exp": self.exp, "other": self.other, "mask": self.mask, "tiles": self.tiles}
        return {"exp": self.units, "memory": self.memory, "L2": self.l2}


@dataclass(frozen=True)
class KernelCost:
    """Numbers of one kernel; `sizes` are the letters that they came from."""

    kernel: Kernel
    tiles: TileCounts
    sizes: Sizes
    sram: float  # bytes of one program
    read: float  # bytes from HBM
    written: float  # bytes to HBM
    traffic: float  # algorithmic bytes, as if there were no L2
    at_once: int  # programs that run together
    times: Times | CpuTimes
    exps: Formula
    on_cpu: TorchCost | None = None  # of operations of torch
    work: PairWork | None = None  # of kernels for GPUs

    @property
    def seconds(self) -> float:
        return self.times.seconds

    @property
    def bound(self) -> Bound:
        return self.times.bound


# -- the numbers of a problem ----------------------------------------------------------------------------------------
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
    kernel: Kernel, form: Form, shape: Shape, hardware: Hardware, parts: Segments, visited: int, traits: Traits = PLAIN
) -> Sizes:
    """The letters of a problem, with k = 1: as if there were no L2."""
    size = shape.element_bytes
    block_q, tiles = form.block_q, ceil(shape.q_len / form.block_q)
    if kernel.shares_keys:
        rows = shape.group * shape.q_len
        block_q = form.of_rows(rows).block_q
        tiles = ceil(rows / block_q)
    columns = max(parts.qk_columns, parts.v_columns)
    ahead, in_sram, score_bytes = form.residence(kernel, hardware, size, columns)
    own_value = not parts.value_is_key
    copies = kernel.shares_keys and copies_values(shape.v_dtype or shape.kv_dtype or shape.dtype, hardware.arch)
    return Sizes(
        B=shape.batch, Hq=shape.heads, Hkv=shape.kv_heads, L=shape.q_len, T=shape.kv_len, D=shape.head_dim,
        Dv=shape.value_dim, C=parts.qk_columns, Cv=parts.v_columns, Du=shape.value_dim * own_value,
        Cu=parts.v_columns * own_value, e=size, bq=block_q, bkv=form.block_kv, s=ahead, owned_in_sram=in_sram,
        score_bytes=score_bytes, n=visited, nq=tiles, nkv=ceil(shape.kv_len / form.block_kv),
        k=1, neighbours_miss=1, nonlinear=0 if traits.linear else 1, begins_zero=int(shape.group > 1),
        R=sum(s.width for s in parts.qk if s.source == "rope"),
        long_axis=int((shape.kv_len if kernel.axis == "kv" else shape.q_len) > LONG_AXIS),
        kv_share=shape.kv_share, q_share=shape.q_share, v_share=shape.v_share,
        v_copy=2 * copies,
    )  # fmt: skip


def sram_bytes(
    kernel: Kernel, form: Form, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits = PLAIN
) -> int:
    """SRAM of one program."""
    sizes = sizes_of(kernel, form, shape, hardware, parts, 1, traits)
    return int(form.sram(kernel, parts, traits)(sizes) + pair_bytes(kernel, form, sizes, traits, hardware))


def pair_bytes(kernel: Kernel, form: Form, x: Sizes, traits: Traits, hardware: Hardware) -> float:
    """SRAM of what a tile reads of operands for each pair, key or query: Triton loads it ahead, as keys and values."""
    if hardware.kind != "cuda" or not kernel.weighs or not form.loads_reads:
        return 0
    of_heads = traits.head_bytes
    of_a_pair = traits.pair_bytes + (of_heads if kernel.shares_keys else 0)
    of_keys = traits.key_bytes + (0 if kernel.shares_keys else of_heads)
    of_rows = of_keys * x.bkv if kernel.axis == "kv" else traits.query_bytes * x.bq
    return (of_a_pair * x.bq * x.bkv + of_rows) * x.s


@lru_cache(maxsize=256)
def read_by(kernel: Kernel, form: Form) -> Formula:
    """Bytes that a kernel reads in this form: where boxes of what pairs read are brought, those too.

    A head of a batch row is taken to have boxes of its own, as a bias of each pair and head has.
    """
    brought = form.pair_bytes if kernel.weighs else 0
    if not brought:
        return kernel.read

    def read(x: Sizes) -> float:
        return kernel.read(x) + brought * score_count(x)

    return read


# -- the model of the machine ----------------------------------------------------------------------------------------
def of_sequences(x: Sizes, packed: int) -> Sizes:
    """Rows of so many packed sequences as those of a batch: of equal ones, since lengths differ from call to call.

    No sequence has less than a tile, or a formula such as nq + nkv - 1 would count no programs.
    """
    if packed <= 1:
        return x
    nq, nkv = max(x.nq / packed, 1), max(x.nkv / packed, 1)
    return x._replace(B=x.B * packed, L=x.L / packed, T=x.T / packed, nq=nq, nkv=nkv)


def hbm_fraction(kernel: Kernel, sizes: Sizes, at_once: int, hardware: Hardware) -> float:
    """The letter k: which share of repeated reads and writes misses L2 when `at_once` programs run together."""
    visits = kernel.again.visits(sizes)
    if visits <= 1:
        return 1.0  # nothing is repeated, and what no program visits is not read
    if kernel.shares_keys:
        return 0.0  # programs that share keys are neighbours
    query_heads = sizes.B * sizes.Hq
    programs_a_head = kernel.programs(sizes) / query_heads
    live = min(query_heads, at_once / programs_a_head)
    if programs_a_head > 1:
        live = min(query_heads, ceil(live / HEADS_TOGETHER) * HEADS_TOGETHER)
    sharing = sizes.Hq / sizes.Hkv if kernel.axis == "kv" else 1
    pressure = max(1.0, live / sharing) * kernel.again.head_bytes(sizes) / (L2_FRACTION * hardware.l2_bytes)
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
    form: Form,
    shape: Shape,
    hardware: Hardware,
    parts: Segments,
    tiles: TileCounts,
    traits: Traits = PLAIN,
    longest: int | None = None,
    uneven: bool = False,
    few_queries: bool = True,
    packed: int = 1,
) -> KernelCost:
    """Numbers of one kernel. longest: tiles of keys that the last queries visit in a sequence of all T keys. uneven:
    sequences have lengths of their own. few_queries: a sequence has few, and keys are divided. packed: how many
    sequences rows are packed of."""
    if kernel.shares_keys:
        tiles = _by_key_head(tiles, form, shape) if kernel.divides else tiles
        form = form.of_rows(shape.group * shape.q_len)
    once = sizes_of(kernel, form, shape, hardware, parts, tiles.visited, traits)
    sram = form.sram(kernel, parts, traits)(once) + pair_bytes(kernel, form, once, traits, hardware)
    at_once = hardware.sms * (1 if hardware.kind == "cpu" else form.programs_per_sm(kernel, parts, sram, hardware))
    if kernel.shares_keys:
        if kernel.divides:
            at_once = hardware.sms * split_programs_per_sm(kernel, form, once, hardware, parts)
        most = ceil(once.nkv) if longest is None else longest
        found = parts_of(kernel.divider, form, once, most, hardware, parts, uneven, few_queries)
        once = once._replace(S=found.parts, joined=int(found.parts > 1))
    sizes = once._replace(k=hbm_fraction(kernel, of_sequences(once, packed), at_once, hardware), neighbours_miss=0)
    reads = read_by(kernel, form)
    read, written = reads(sizes), kernel.written(sizes)
    moved = reads(once) + kernel.written(once)
    busy = busy_fraction(kernel.programs(sizes), at_once)
    by_torch = form.torch_work(kernel, sizes, tiles, traits, Machine(hardware, shape.dtype, sram, busy))
    if by_torch is not None:
        return KernelCost(
            kernel, tiles, by_torch.sizes, sram, read, written, moved, at_once, by_torch.times, by_torch.work.exps,
            by_torch,
        )  # fmt: skip
    sizes = sizes._replace(m=tiles.edge, u=tiles.visited - tiles.level_full)
    work = pair_work(kernel, form, sizes, parts, traits, hardware, packed > 1)
    pace, tail = work.pace, work.tail
    matrix = kernel.flops(sizes) / hardware.matrix_flops(form.products(shape.dtype))
    plain, special = (exps(sizes) / hardware.exp_per_second for exps in (kernel.exps, work.exps))
    instructions = instructions_per_second(hardware)
    latency = (hardware.launch_seconds + 1e-6 * (pace.start + pace.step * work.steps)) * (kernel.programs(sizes) > 0)
    memory, l2 = (read + written) / hardware.hbm_bytes_per_second, moved / l2_bytes_per_second(hardware)
    times = Times(
        matrix=pace.matrix * matrix * tail,
        exp=pace.exp * special * tail,
        other=work.other(sizes) / instructions * tail,
        mask=work.mask(sizes) / instructions * tail,
        tiles=1e-6 * work.tiles(sizes) / hardware.sms * tail,
        memory=memory,
        l2=l2,
        units=special * tail,
        latency=latency,
        roofline=latency + max(matrix / busy, plain / busy, memory, l2),
    )
    return KernelCost(kernel, tiles, sizes, sram, read, written, moved, at_once, times, work.exps, work=work)


@dataclass(frozen=True)
class PairWork:
    """What a kernel computes besides products, as formulas: exponentials, and instructions as its pace counts them."""

    family: str
    pace: Pace
    exps: Formula
    other: Formula  # instructions of scores and weights, reads of pairs as so many
    mask: Formula  # likewise of masks
    tiles: Formula  # microseconds of an SM
    longest: float  # tiles of the longest program
    tail: float  # of computing over that of SMs that all have as much to do
    steps: float  # of programs whose steps wait one for the other, of all that run one after the other


def pair_work(
    kernel: Kernel, form: Form, x: Sizes, parts: Segments, traits: Traits, hardware: Hardware, packed: bool = False
) -> PairWork:  # fmt: skip
    """x: the letters of the problem, of which n, m and the number of programs decide the tail. packed: rows are."""
    family = form.pace_family(kernel, parts)
    longest = longest_of(kernel, x, traits.masked)
    tail = max(1.0, longest * hardware.sms / x.n) if x.n else 1.0
    pieces = len(parts.qk) + len(parts.v) - 2
    one = instructions_of(kernel, traits)
    if form.pair_bytes:
        one = replace(one, pair_reads=max(0.0, one.pair_reads - 1), other=one.other + AT_HAND)
    pace = pace_of(kernel, family)
    if packed and kernel.weighs:
        pace = replace(pace, program=pace.program + form.packed_program)
    formulas = work_formulas(kernel, one, pace, pieces, traits.level_steps and kernel.has_level_loop)
    waves = max(1.0, kernel.programs(x) / (MEASURING_AT_ONCE * hardware.sms))
    return PairWork(family, pace, *formulas, longest, tail, kernel.steps(x) * waves if pace.step else 0.0)


@lru_cache(maxsize=256)
def work_formulas(
    kernel: Kernel, one: Instructions, pace: Pace, pieces: int, level_steps: bool = False
) -> tuple[Formula, Formula, Formula, Formula]:  # fmt: skip
    """Exponentials, other instructions, those of the mask, and microseconds of tiles and programs.

    level_steps: full tiles of level pairs have a loop without tables.
    """
    each = pace.other * one.other + pace.pair_reads * one.pair_reads
    each += pace.row_reads * one.row_reads + pace.levels * one.levels
    looked_up = round(pace.gathers * one.gathers, 3)
    at_edge = pace.mask * one.mask + pace.pair_reads * one.mask_reads

    def other(x: Sizes) -> float:
        if level_steps:
            return round(each, 3) * score_count(x) + looked_up * uneven_count(x)
        return round(each + pace.gathers * one.gathers, 3) * score_count(x)

    def mask(x: Sizes) -> float:
        return round(at_edge, 3) * x.m * x.bq * x.bkv

    def tiles(x: Sizes) -> float:
        return round(pace.tile + pace.piece * pieces, 4) * x.n + pace.program * kernel.programs(x)

    return exps_of(kernel, one.special), other, mask, tiles


@lru_cache(maxsize=256)
def exps_of(kernel: Kernel, special: float) -> Formula:
    """Exponentials and the like; special: of a pair, in kernels that weigh pairs."""

    def exps(x: Sizes) -> float:
        return special * score_count(x)

    return exps if kernel.weighs else kernel.exps


def instructions_per_second(hardware: Hardware) -> float:
    return LANES * hardware.exp_per_second


def busy_fraction(programs: float, at_once: int) -> float:
    """Share of the machine that works: the last wave leaves part of it idle."""
    if not programs:
        return 1.0
    return programs / (ceil(programs / at_once) * at_once)


def l2_bytes_per_second(hardware: Hardware) -> float:
    return hardware.hbm_bytes_per_second * L2_OVER_HBM


def predict(
    shape: Shape,
    kernels: Sequence[tuple[Kernel, Form]],
    hardware: Hardware,
    parts: Segments,
    traits: Traits = PLAIN,
    count: CountTiles | None = None,
    longest: CountLongest | None = None,
    uneven: bool = False,
    few_queries: bool = True,
    packed: int = 1,
) -> tuple[KernelCost, ...]:
    """Cost of every kernel, in order of execution.

    count: tiles of the whole problem by class; where not given, every tile is visited. longest: those that a
    tile of the last queries of a sequence with all rows visits; all where not given. The others: as of cost_of.
    """
    every = dense_counts(shape)
    costs = []
    for kernel, form in kernels:
        counter = every if count is None or kernel.visits == "all" else count
        tiles = TileCounts(0, 0, 0)
        if kernel.visits != "none":
            tiles = counter(kernel.axis, form.block_q, form.block_kv)
        tiles = tiles.uneven if kernel.visits == "uneven" else tiles
        most = longest(form.block_q, form.block_kv) if longest and kernel.shares_keys else None
        costs.append(cost_of(kernel, form, shape, hardware, parts, tiles, traits, most, uneven, few_queries, packed))
    return tuple(costs)


def _by_key_head(tiles: TileCounts, form: Form, shape: Shape) -> TileCounts:
    """Tiles of all query heads as those that rows of heads with the same keys visit together."""
    rows = shape.group * shape.q_len
    of_head = ceil(rows / form.of_rows(rows).block_q)
    share = of_head / (shape.group * ceil(shape.q_len / form.block_q))
    edge, full = ceil(tiles.edge * share), ceil(tiles.full * share)
    total = shape.batch * shape.kv_heads * of_head * ceil(shape.kv_len / form.block_kv)
    return TileCounts(max(0, total - edge - full), edge, full)


def split_programs_per_sm(kernel: Kernel, form: Form, x: Sizes, hardware: Hardware, parts: Segments) -> int:
    """Programs of split_forward that are meant to share an SM: kernels are compiled for as many, by their registers."""
    most = MOST_ON_AN_SM if x.e < 4 and x.kv_share == 1 else 2  # products of fp32, and conversions, want registers
    return min(form.programs_per_sm(kernel, parts, kernel.sram(x) + RESERVED, hardware), most)


def parts_of(
    kernel: Kernel, form: Form, x: Sizes, longest: int, hardware: Hardware, parts: Segments, uneven: bool = False,
    few_queries: bool = True,
) -> Parts:  # fmt: skip
    """Into how many parts a call's keys are divided; calls and plans ask here. Arguments as of cost_of."""
    slots = hardware.sms * split_programs_per_sm(kernel, form, x, hardware, parts)
    tile_bytes = x.e * x.bkv * (key_elements(x) + x.v_share * x.kv_share * x.Du)
    units = int(x.B * x.Hkv * x.nq)
    busy, most, together = 0.0, MOST_PARTS, 0.0
    if form.computes_bound:
        busy = 2 * x.bq * x.bkv * (x.C + x.Cv) * hardware.sms / (REACHED * hardware.matrix_flops(BF16.name))
        tile_bytes /= x.nq  # programs that share keys are neighbours
        uneven = False  # the kernel evens out lengths by itself
        if not few_queries:  # parts take memory: as many as programs that run at once, or twice as many
            most = max(1, 2 * slots // units)
    rate, uneven = hardware.hbm_bytes_per_second, uneven and x.B > 1
    if x.kv_share < 1 and hardware.kind != "cpu" and not uneven:
        busy, together = max(busy, tile_bytes / CONVERTED), tile_bytes / CONVERTED_BY_SM
    slots = INTERPRETED if hardware.kind == "cpu" else slots
    enough = slots / LONE
    if hardware.kind != "cpu" and not uneven:  # the divisions of uneven ones are those that were timed
        enough = min(enough, rate * LATENCY / tile_bytes)
    return divided(units, longest, slots, enough, tile_bytes, rate, uneven, busy, most, hardware.sms, together)
