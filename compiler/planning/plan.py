"""Plans: which kernels compute a variant, stage by stage, and what they cost. The plan is what is generated.

A plan has two halves. `CodePlan` says what code there is: kernels with their targets, forms and stages, and no lengths;
`generate` takes it, and prints its stages over the code that does them. `Plan` adds the figures of a shape.
Neither needs a GPU or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ...ir.errors import InternalError, WeftError
from ..analysis.tiles.measured import MOST_POSITIONS, MOST_STEPS, Blocks, Measurement
from ..analysis.tiles.programs import Environment, count_tiles
from ..analysis.tiles.results import Axis, TileCounts, TileProgram, TileSource, Traits
from ..analysis.tiles.survey import Survey
from .cost import CountLongest, CountTiles, KernelCost, PairWork, Times, busy_fraction, pair_bytes, predict, read_by
from .form import Form
from .kernel import Bound, Kernel, Module
from .machines.hardware import Hardware
from .machines.torch_times import CpuSpeed, CpuTimes, computed_whole
from .quantities import Formula, Sizes
from .records import Quantity, Shape, Stage
from .schedule import Schedule
from .segments import Segments
from .signature import Direction, Signature
from .stage_words import Tiles


# -- what code there is ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KernelCode:
    """One kernel: what it does, and in which form."""

    kernel: Kernel
    target: str
    form: Form
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        return self.kernel.name


@dataclass(frozen=True)
class CodePlan:
    """All kernels of one direction on one target: what one generated module holds."""

    signature: Signature
    target: str
    schedule: Schedule
    segments: Segments
    kernels: tuple[KernelCode, ...]  # in order of execution

    def form(self, kernel: str) -> Form:
        return next(k.form for k in self.kernels if k.name == kernel)

    def has(self, kernel: str) -> bool:
        return any(k.name == kernel for k in self.kernels)

    @property
    def own(self) -> tuple[KernelCode, ...]:
        """The kernels of the target's own module; those of others come from modules of their own."""
        return tuple(k for k in self.kernels if not k.kernel.module and k.target == self.target)

    @property
    def borrowed(self) -> KernelCode | None:
        """The kernel of another target that runs beside these, in a module of its own."""
        return next((k for k in self.kernels if not k.kernel.module and k.target != self.target), None)

    @property
    def beside(self) -> tuple[KernelCode, ...]:
        """The first kernel of each module that is loaded besides the target's own, in the order of their loading."""
        found = (self.of_module("measures"), self.of_module("tables"), self.borrowed)
        return tuple(kernel for kernel in found if kernel is not None)

    @property
    def is_lent(self) -> bool:
        """Whether the module holds kernels that are lent to another target's plan, and no others."""
        return self.borrowed is not None and all(k.kernel.is_lent for k in self.own)

    def of_module(self, module: Module) -> KernelCode | None:
        """The first kernel of a module that serves all targets."""
        return next((k for k in self.kernels if k.kernel.module == module), None)

    @property
    def tile_source(self) -> TileSource:
        """Where the kernels learn which tiles to visit."""
        found = {k.kernel.finds for k in self.kernels}
        return "lists" if "lists" in found else "spans" if "runs" in found else "program"

    @property
    def brings_boxes(self) -> bool:
        """Whether tiles of what each pair reads are brought to SRAM, `Facts.boxed_read`."""
        return any(k.form.pair_bytes > 0 for k in self.kernels)

    @property
    def looks_first(self) -> bool:
        """Whether the mask of each tile is evaluated before the tile is, which is skipped where nothing is visible."""
        return any(k.form.looks_first for k in self.kernels)


def code_plan(
    signature: Signature, target: str, measured_by: str, schedule: Schedule, kernels: Sequence[Kernel],
    parts: Segments, traits: Traits, sums: frozenset[str] = frozenset(),
) -> CodePlan:  # fmt: skip
    """The plan of the kernels that `schedule` gives to `target`, each with its stages.

    sums: how wanted gradients of operands are summed: "total", "row", "column", "sink".
    measured_by: the target whose kernels measure tiles for it, and lend it others.
    """

    def of(kernel: Kernel) -> KernelCode:
        own = measured_by if kernel.module or kernel.is_lent else target
        if kernel.own_form is not None:
            form = kernel.own_form(schedule.form(kernel.measures) if kernel.measures else None, signature.sequences)
        else:
            form = schedule.form(kernel.follows or kernel.name)
        tiles = Tiles(
            form.block_q, form.block_kv, parts, traits, signature.wanted, sums - {"sink"}, "sink" in sums,
            signature.sequences.ragged, form,
        )  # fmt: skip
        return KernelCode(kernel, own, form, tuple(kernel.stages(tiles)))

    made = CodePlan(signature, target, schedule, parts, tuple(map(of, kernels)))
    verify_code(made)
    return made


def verify_code(code: CodePlan) -> None:
    """Raise InternalError unless the kernels are different ones of this direction, each with different stages."""
    names = [k.name for k in code.kernels]
    if not names or len(set(names)) != len(names):
        raise InternalError(f"plan: expected different kernels, got {names}")
    for k in code.kernels:
        keys = [stage.key for stage in k.stages]
        if len(set(keys)) != len(keys) or not any(stage.kind == "store" for stage in k.stages):
            raise InternalError(f"plan: the stages of {k.name} are {keys}: expected different ones, and a store")
        if k.kernel.direction != code.signature.direction:
            raise InternalError(
                f"plan: {k.name} belongs to the {k.kernel.direction}, not the {code.signature.direction}"
            )


# -- what it costs ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OnCpu:
    """What target `cpu` spends time on besides."""

    speed: CpuSpeed
    passes: Quantity  # bytes that torch reads and writes as it goes over tiles of scores
    calls: Quantity  # operations of torch


@dataclass(frozen=True)
class Worked:
    """What a GPU computes besides products and exponentials, as its pace counts it."""

    pairs: PairWork
    other: Quantity  # instructions
    mask: Quantity
    tiles: Quantity  # microseconds of an SM


@dataclass(frozen=True)
class KernelPlan:
    """One generated kernel and its predicted cost."""

    code: KernelCode
    programs: Quantity  # size of the grid
    tiles: TileCounts
    sram_bytes: Quantity  # of one program
    hbm_read: Quantity  # bytes of the whole kernel
    hbm_written: Quantity
    l2_traffic: Quantity  # bytes between SRAM and what lies behind it, as if there were no L2
    flops: Quantity  # of all pairs in visited tiles and of all columns, padding included
    useful: Quantity | None  # FLOPs of visible pairs and columns that exist; None where pairs were not counted
    exps: Quantity
    sizes: Sizes  # all letters
    letters: Mapping[str, float]  # values of the letters of these formulas that are no sizes of the call
    at_once: int  # programs that run together
    times: Times | CpuTimes  # predicted
    on_cpu: OnCpu | None = None  # of target `cpu`
    work: Worked | None = None  # of other targets

    @property
    def name(self) -> str:
        return self.code.name

    @property
    def direction(self) -> Direction:
        return self.code.kernel.direction

    @property
    def target(self) -> str:
        return self.code.target

    @property
    def form(self) -> Form:
        return self.code.form

    @property
    def loop(self) -> str:
        """What one program iterates over."""
        return self.code.kernel.loop

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.code.stages

    @property
    def seconds(self) -> float:
        """Predicted: the launch, and the longest of what hides behind each other; on target `cpu` the sum of all."""
        return self.times.seconds

    @property
    def computed_whole(self) -> bool:
        """Whether torch's own kernel computes the call in place of tiles."""
        return isinstance(self.times, CpuTimes) and self.times.own > 0

    @property
    def bound(self) -> Bound:
        return self.times.bound

    @property
    def busy(self) -> float:
        """Share of the machine that works, averaged over the waves of programs."""
        return busy_fraction(self.programs.value, self.at_once)

    @property
    def intensity(self) -> float:
        """FLOPs per HBM byte."""
        return self.flops.value / max(1.0, self.hbm_read.value + self.hbm_written.value)


@dataclass(frozen=True)
class VisiblePairs:
    """Pairs of a query and a key that see each other, in the whole problem."""

    count: int
    looked_at: int  # rows of the mask that were looked at, of all heads and batch rows that differ
    rows: int  # such rows that there are: as many where the count is exact


@dataclass(frozen=True)
class Sums:
    """What a backward with gradients of operands takes besides kernels of its modules: see sum_times.py."""

    last: float  # seconds: of the sums that end all
    rows: Quantity  # sums of rows and keys that lie otherwise than the operand
    along: Quantity  # sums along diagonals
    listed: Quantity  # sums of pairs that are listed with their entries
    seconds: float  # of all


@dataclass(frozen=True, repr=False)
class Plan:
    """The schedule as data: everything code generation and `explain` need."""

    name: str
    shape: Shape
    hardware: Hardware
    codes: tuple[CodePlan, ...]  # of the forward, of its short sequences where these have their own, of the backward
    kernels: tuple[KernelPlan, ...]
    notes: tuple[str, ...] = ()  # why a target or closed form was not used
    visible: VisiblePairs | None = None  # None where operands that decide it were not given
    sums: Sums | None = None  # of the backward

    @property
    def schedule(self) -> Schedule:
        whole = self.codes[0].schedule
        for code in self.codes[1:]:
            if code.signature.serves == "short":  # a schedule of its own, of a call that asks for none
                continue
            whole = whole.joined(code.schedule)
        return whole

    @property
    def segments(self) -> Segments:
        return self.codes[0].segments

    def code(self, direction: Direction) -> CodePlan:
        """What is generated for one direction."""
        found = next((code for code in self.codes if code.signature.direction == direction), None)
        if found is None:
            raise WeftError(f"{self.name}: the absorbed form has no backward: call with form='expanded' to train")
        return found

    def _of(self, direction: str) -> tuple[KernelPlan, ...]:
        return tuple(k for k in self.kernels if k.direction == direction)

    def hbm_bytes(self, direction: str) -> float:
        """Predicted bytes read and written, "forward" or "backward"."""
        return sum(k.hbm_read.value + k.hbm_written.value for k in self._of(direction))

    def flops(self, direction: str) -> float:
        """FLOPs of visited tiles, padding included, "forward" or "backward"."""
        return sum(k.flops.value for k in self._of(direction))

    def useful(self, direction: str) -> float | None:
        """Those of pairs that see each other and of columns that exist; None where pairs were not counted."""
        found = [k.useful for k in self._of(direction)]
        return None if None in found else sum(q.value for q in found if q is not None)

    def seconds(self, direction: str) -> float:
        """Predicted time, "forward" or "backward"."""
        besides = self.sums.seconds if self.sums is not None and direction == "backward" else 0.0
        return besides + sum(k.seconds for k in self._of(direction))

    def __repr__(self) -> str:
        kernels = ", ".join(f"{k.name}={k.target}:{k.form}" for k in self.kernels)
        return f"<plan of {self.name} for {self.hardware.name}: {kernels}>"

    if TYPE_CHECKING:  # api/tools/notebook.py has them: what explains a plan imports this module

        def __str__(self) -> str: ...

        def _repr_html_(self) -> str: ...


def make_plan(
    name: str,
    shape: Shape,
    hardware: Hardware,
    codes: Sequence[CodePlan],
    traits: Traits,
    *,
    count: CountTiles | None = None,
    longest: CountLongest | None = None,
    notes: tuple[str, ...] = (),
    visible: VisiblePairs | None = None,
    sums: Sums | None = None,
    packed: int = 1,
    own: Mapping[Direction, float] | None = None,
) -> Plan:
    """The plan of a variant for these sizes.

    own: seconds of torch's own kernel, of the directions in which it computes the call in place of tiles.

    visible: pairs that see each other, for the useful part of the work. sums: what torch adds up in the backward.
    packed: how many sequences rows are packed of.
    count: tiles of the whole problem by class, see cost.CountTiles; where not given, every tile is visited.
    longest: those of the last queries of a sequence with all rows, by which keys are divided.
    notes: what `explain` should say besides, such as why another target was not chosen.
    """
    kernels = [(k, code.segments) for code in codes for k in code.kernels]
    costs = [
        cost for code in codes
        for cost in predict(
            shape, [(k.kernel, k.form) for k in code.kernels], hardware, code.segments, traits, count, longest,
            code.signature.sequences.ragged, code.signature.few_queries, packed,
        )
    ]  # fmt: skip
    whole = {name: computed_whole(seconds) for name, seconds in (own or {}).items()}
    found = (
        _kernel_plan(code, parts, cost, hardware, visible, traits, whole.get(code.kernel.direction, cost.times))
        for (code, parts), cost in zip(kernels, costs)
    )
    # parts are joined where there are several, and long axes are measured in another way
    plans = tuple(k for k in found if k.programs.value or not k.code.kernel.is_optional)
    return Plan(name, shape, hardware, tuple(codes), plans, notes, visible, sums)


def _kernel_plan(
    code: KernelCode, parts: Segments, cost: KernelCost, hardware: Hardware, visible: VisiblePairs | None,
    traits: Traits, times: Times | CpuTimes,
) -> KernelPlan:  # fmt: skip
    from .formulas import formula_text, useful_text  # lazy: imports sympy, which calls do without

    def quantity(formula: Formula, sizes: Sizes = cost.sizes) -> Quantity:
        return Quantity(formula_text(formula, sizes), formula(sizes))

    kernel, letters = code.kernel, cost.sizes
    useful = None
    if visible is not None:
        seen = letters._replace(n=visible.count, bq=1, bkv=1, C=letters.D, Cv=letters.Dv)
        useful = Quantity(useful_text(kernel.flops, letters), kernel.flops(seen))

    on_cpu = None
    if cost.on_cpu is not None:
        on_cpu = OnCpu(cost.on_cpu.speed, quantity(cost.on_cpu.work.passes), quantity(cost.on_cpu.work.calls))

    work = cost.work
    worked = Worked(work, quantity(work.other), quantity(work.mask), quantity(work.tiles)) if work else None

    def sram(x: Sizes) -> float:
        return code.form.sram(kernel, parts, traits)(x) + pair_bytes(kernel, code.form, x, traits, hardware)

    read = read_by(kernel, code.form)

    def moved(x: Sizes) -> float:
        return read(x) + kernel.written(x)

    return KernelPlan(
        code=code,
        programs=quantity(kernel.programs),
        tiles=cost.tiles,
        sram_bytes=quantity(sram),
        hbm_read=quantity(read),
        hbm_written=quantity(kernel.written),
        l2_traffic=quantity(moved, letters._replace(k=1, neighbours_miss=1)),
        flops=quantity(kernel.flops),
        useful=useful,
        exps=quantity(cost.exps),
        sizes=letters,
        letters={
            name: getattr(letters, name) for name in ("bq", "bkv", "n", "nq", "nkv", "C", "Cv", "k", "S", "m", "t", "u")
        },
        at_once=cost.at_once,
        times=times,
        on_cpu=on_cpu,
        work=worked,
    )


# -- tiles of a problem ----------------------------------------------------------------------------------------------
HEADS_COUNTED = 8  # where tiles differ by head or by batch row, this many of them stand for all
_GOLDEN = 0.618034  # multiples of it spread evenly over [0, 1), however many are taken


def counter(
    kv_tiles: TileProgram,
    q_tiles: TileProgram,
    shape: Shape,
    *,
    q_offset: int | None = None,
    env: Environment | None = None,
    by_head: bool = False,
    by_batch: bool = False,
    survey: Survey | None = None,
    first_batch: int = 0,
    blocks: Callable[[Mapping[str, int]], Blocks] | None = None,
    level_ends: Callable[[Mapping[str, int]], tuple[int, int] | None] | None = None,
) -> CountTiles:
    """The tiles that kernels of a variant visit, over all heads and batches, from the programs that they run.

    env: values of the scalars and tensors that the mask reads, and of the symbol head_dim where a call's differs from
    the kernels'. by_head, by_batch: tiles differ from head to head, from
    batch row to batch row; some are counted and stand for the others. survey: the kernels measure what the mask reads,
    and visit what is left then. first_batch: number of the
    first batch row. blocks: of a survey that looks at pairs, what is found of a head, by batch, head, kv_head, group.
    level_ends: the distances at which pairs of a head are level; of tiles that are measured it is not known.
    Raises WeftError, at the latest when tiles are counted, naming a missing value.
    """
    length = shape.q_len + shape.kv_len
    most = max(1, min(HEADS_COUNTED, MOST_POSITIONS // length)) if survey else HEADS_COUNTED
    own = {"head_dim": shape.head_dim, **(env or {})}
    heads = [
        {"batch": first_batch + batch, "head": head, "kv_head": head // shape.group, "group": shape.group}
        for batch, head in some_heads(shape.batch if by_batch else 1, shape.heads if by_head else 1, most)
    ]
    sizes = {"q_len": shape.q_len, "kv_len": shape.kv_len}
    measured = [
        Measurement(survey, {**own, **head}, q_offset=q_offset, **sizes, blocks=blocks(head) if blocks else None)
        for head in heads
    ] if survey else []  # fmt: skip

    level = [level_ends(head) if level_ends else None for head in heads]

    def count(axis: Axis, block_q: int, block_kv: int) -> TileCounts:
        program = kv_tiles if axis == "kv" else q_tiles
        tile = {"block_q": block_q, "block_kv": block_kv}
        if measured:
            found = [m.count(program, **tile, kv_tiles=kv_tiles, most=MOST_STEPS // len(measured)) for m in measured]
        else:
            found = [
                count_tiles(program, q_offset=q_offset, env={**own, **head}, level_ends=ends, **sizes, **tile)
                for head, ends in zip(heads, level)
            ]
        all_heads = shape.batch * shape.heads
        tiles = all_heads * ceil(shape.q_len / block_q) * ceil(shape.kv_len / block_kv)
        return summed([(each, all_heads / len(found)) for each in found], tiles)

    return count


def summed(found: Sequence[tuple[TileCounts, float]], tiles: int) -> TileCounts:
    """Tiles of parts, each so many times, of so many in all."""
    edge, full, level_edge, level_full = (
        round(sum(times * getattr(c, name) for c, times in found))
        for name in ("edge", "full", "level_edge", "level_full")
    )
    return TileCounts(max(0, tiles - edge - full), edge, full, level_edge, level_full)


def some_heads(batches: int, heads: int, most: int) -> list[tuple[int, int]]:
    """All pairs (batch row, head), or this many of them: evenly spaced heads, and batch rows in another order."""
    if batches * heads <= most:
        return [(batch, head) for batch in range(batches) for head in range(heads)]
    return [(int((k * _GOLDEN + 0.5) % 1 * batches), (2 * k + 1) * heads // (2 * most)) for k in range(most)]
