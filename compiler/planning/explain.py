"""A plan for a person: what moves where, how often the mask is looked at, and what bounds the time.

Every figure can be worked out again from what is printed. Kernels have formulas with the values of their letters. Times
follow from these and the rates of the hardware, and directions are sums of their kernels.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...ir.attention import Attention
from ...ir.errors import counted
from ...ir.normalizer import SOFTMAX
from ..analysis.tiles.measured import LIST_HEAD, LIST_ROOM
from ..analysis.tiles.results import Bounds
from ..analysis.tiles.survey import CELL
from .cost import PairWork, Times, instructions_per_second, l2_bytes_per_second
from .machines.hardware import Hardware
from .machines.rates import CACHE_LEVELS
from .machines.torch_times import CpuSpeed
from .paces import PACES
from .plan import KernelPlan, Plan, Sums
from .records import Segment
from .sum_times import DIAGONAL, LISTED, PUT

WIDTH = 100
_GLOSSARY = (
    "B batch, Hq Hkv heads, L queries, T keys, D Dv head dimensions (C Cv those of a tile, padded), bq bkv tile rows, "
    "n tile pairs visited, nq nkv tiles of a head, v pairs of a query and a key that see each other, k share of "
    "repeated reads that misses {l2} (not shown where 0 or 1)"
)
_LEVEL = (
    "level tiles: full ones so far from the diagonal that their pairs read alike by distance, in a loop that reads no "
    "table; u tiles are not. flash_ddiagonals does not visit them"
)
_PARTS = "S parts of a sequence's keys, which programs of their own compute; a tile has rows of all heads of a key head"
_TIMES = (
    "ms is launch (and start) + the longest of {hbm}, {l2}, exps / rate * tail and the sum of the others: "
    "matrix = pace * FLOPs / rate * tail, exp = pace * exps / rate * tail, "
    "other and mask = instructions / rate * tail, tiles = tile us / {core}s * tail, "
    "{hbm} = bytes read and written / rate, {l2} = {l2} traffic / rate. "
    "Instructions are counted with their pace, as a share of them hides. "
    "tail = longest program * {core}s / n where that is more than 1; m tiles that need the mask"
)
_CPU_TIMES = (
    "ms is the sum of the others, as nothing hides, or torch, its own kernel, where that computes the call: "
    "matrix = FLOPs / products of a core / speedup / busy, "
    "RAM = bytes read and written / rate, passes = bytes / passes of a core / speedup / busy, "
    "exp = exps / rate / speedup / busy, "
    "with other functions as so many exps as they take as long, "
    "calls = calls * time of one; m tiles that need the mask, t tiles where others are joined"
)


class Places(NamedTuple):
    """What the memories of a machine are called, from the fastest."""

    core: str
    sram: str
    l2: str
    hbm: str


_GPU, _CPU = Places("SM", "SRAM", "L2", "HBM"), Places("core", "cache", "L3", "RAM")


def places(hardware: Hardware) -> Places:
    return _CPU if hardware.kind == "cpu" else _GPU


def explain(
    plan: Plan,
    attention: Attention | None = None,
    kv_bounds: Bounds | None = None,
    q_bounds: Bounds | None = None,
    claim: str = "",
    *,
    width: int = WIDTH,
) -> str:
    """The plan as plain text of `width` columns, the same every time.

    attention, kv_bounds, q_bounds, claim: the variant, where its tiles must look, and what is proven of that, to be
    printed too.
    """
    return _plain(explanation(plan, attention, kv_bounds, q_bounds, claim), width)


def _plain(text: RenderableType, width: int) -> str:
    """What a console of this width shows, without colour."""
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(text)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def explain_short(plan: Plan, *, width: int = WIDTH) -> str:
    """What a person wants first: the schedule, and of each kernel its tiles, time and bound. `explain` has the rest."""
    names = places(plan.hardware)
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold")
    head.add_column(overflow="fold")
    head.add_row("variant", Text(plan.name))
    head.add_row("problem", Text(_problem_text(plan)))
    head.add_row("hardware", Text(f"{plan.hardware.title}, figures {plan.hardware.figures}"))
    head.add_row("schedule", Text(str(plan.schedule.algorithm)))
    text = _plain(Group(head, "", _short_table(plan, names), "", *_totals(plan, names)), width)
    return f"{text}\n{counted(len(plan.notes), 'note')} more without --short" if plan.notes else text


def _short_table(plan: Plan, names: Places) -> Table:
    """A line a kernel."""
    table = _table(("kernel", "form"), ("empty/edge/full", "ms"), "bound", apart=2)
    for k in plan.kernels:
        form = f"{k.target} {k.form}"
        table.add_row(k.name, form, _tile_classes(k), _ms_text(k.seconds), _bound_text(k, names))
    return table


def _table(titles: Sequence[str], numbers: Sequence[str], *last: str, apart: int = 1) -> Table:
    """A table without lines: columns of texts, then of numbers, then of texts."""
    table = Table(box=None, pad_edge=False, padding=(0, apart, 0, 0), header_style="bold")
    for title in (*titles, *numbers, *last):
        table.add_column(title, justify="right" if title in numbers else "left", no_wrap=True)
    return table


def _tile_classes(kernel: KernelPlan) -> str:
    return "/".join(count_text(n) for n in (kernel.tiles.empty, kernel.tiles.edge, kernel.tiles.full))


def _problem_text(plan: Plan) -> str:
    shape = plan.shape
    sizes = f"B {shape.batch}  Hq {shape.heads}  Hkv {shape.kv_heads}  L {shape.q_len}  T {shape.kv_len}"
    return f"{sizes}  D {shape.head_dim}  Dv {shape.value_dim}  {_dtypes_text(plan)}"


def _dtypes_text(plan: Plan) -> str:
    """The dtype of products, and operands that are stored in another."""
    shape, products = plan.shape, _products(plan)
    stored = {"queries": shape.q_dtype, "keys": shape.kv_dtype, "values": shape.v_dtype or shape.kv_dtype}
    found: dict[str, list[str]] = {}
    for name, dtype in stored.items():
        if dtype not in (None, products):
            found.setdefault(str(dtype), []).append(name)
    return products + "".join(f", {_joined(names)} {dtype}" for dtype, names in found.items())


def _joined(names: Sequence[str]) -> str:
    """As people list them."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _products(plan: Plan) -> str:
    """The dtype in which the forward multiplies."""
    dtype = plan.shape.dtype
    found = {kernel.form.products(dtype) for kernel in plan.kernels if kernel.direction == "forward"}
    return next(iter(found - {dtype}), dtype)


def explanation(
    plan: Plan,
    attention: Attention | None = None,
    kv_bounds: Bounds | None = None,
    q_bounds: Bounds | None = None,
    claim: str = "",
) -> RenderableType:
    """The same for a rich console, with colour."""
    parts: list[RenderableType] = [_header(plan, attention)]
    if kv_bounds or q_bounds:
        parts += ["", Text("Where tiles look", style="bold"), *_bounds_lines(plan, kv_bounds, q_bounds)]
        parts += [Padding(Text(claim), (0, 0, 0, 2))] if claim else []
    names = places(plan.hardware)
    parts += ["", _kernel_table(plan, names), "", *_time_tables(plan, names), "", *_totals(plan, names)]
    for kernel in plan.kernels:
        parts += ["", _stage_table(kernel, names), _formulas(plan, kernel, names)]
    splits = (_PARTS,) if any(kernel.code.kernel.divides for kernel in plan.kernels) else ()
    models = [_CPU_TIMES] * any(k.on_cpu for k in plan.kernels) + [_TIMES] * any(not k.on_cpu for k in plan.kernels)
    level = (_LEVEL,) if any(map(_has_level_steps, plan.kernels)) else ()
    words = (_GLOSSARY, *splits, *level, *models)
    parts += ["", *(Text(line.format(**names._asdict()), style="dim") for line in words)]
    if plan.notes:
        parts += ["", Text("Notes", style="bold"), *(Text(f"- {note}") for note in plan.notes)]
    return Group(*parts)


# -- what is computed ------------------------------------------------------------------------------------------------
def _header(plan: Plan, attention: Attention | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("variant", Text(plan.name))
    if attention is not None:
        table.add_row("score", Text(str(attention.score)))
        table.add_row("mask", Text(str(attention.mask)))
        if attention.sink is not None:
            table.add_row("sink", Text(str(attention.sink)))
        if attention.canonical.weighs != SOFTMAX:
            table.add_row("normalizer", Text(attention.normalizer))
        if attention.canonical.drops:
            table.add_row("dropout", Text(f"{attention.dropout} of the weights, where the plan says drop(...)"))
    table.add_row("problem", Text(_problem_text(plan)))
    parts = plan.segments
    value = "columns of the key" if parts.value_is_key else _segments(parts.v)
    table.add_row("tile columns", Text(f"query, key {_segments(parts.qk)}; value {value}"))
    if plan.visible is not None:
        table.add_row("visible", Text(_visible_text(plan)))
    table.add_row("hardware", Text(plan.hardware.title))
    table.add_row("figures", Text(plan.hardware.figures))
    table.add_row("rates", Text(_rates_text(plan)))
    table.add_row("schedule", Text(plan.schedule.algorithm))
    for name, choice in plan.schedule.kernels.items():
        table.add_row("", Text(f"{name}={choice}"))
    return table


def _visible_text(plan: Plan) -> str:
    found, shape = plan.visible, plan.shape
    assert found is not None
    pairs = shape.batch * shape.heads * shape.q_len * shape.kv_len
    about = "" if found.looked_at == found.rows else f", by {found.looked_at:,} of {found.rows:,} rows of the mask"
    return f"v = {found.count:,} of B*Hq*L*T = {pairs:,} pairs{about}"


def _rates_text(plan: Plan) -> str:
    """What times are worked out from, with four digits."""
    hardware, names = plan.hardware, places(plan.hardware)
    if all(kernel.on_cpu for kernel in plan.kernels):
        return (
            f"RAM {_digits(hardware.hbm_bytes_per_second)}B/s, exp {_digits(hardware.exp_per_second / hardware.sms)}/s "
            "of a core"
        )
    rates = (
        f"matrix {_digits(hardware.matrix_flops(_products(plan)))}FLOP/s",
        f"{names.hbm} {_digits(hardware.hbm_bytes_per_second)}B/s",
        f"{names.l2} {_digits(l2_bytes_per_second(hardware))}B/s",
        f"exp {_digits(hardware.exp_per_second)}/s",
        f"other {_digits(instructions_per_second(hardware))}/s",
        f"launch {hardware.launch_seconds * 1e6:g} us",
        f"{hardware.sms} {names.core}s",
    )
    return ", ".join(rates)


def _segments(segments: tuple[Segment, ...]) -> str:
    texts = []
    for s in segments:
        used = "" if s.width == s.block else f" ({s.width} used)"
        own = " (rotary, a tensor of its own)" if s.source == "rope" else ""
        texts.append(f"{s.block}{used}{own}")
    return " + ".join(texts)


def _bounds_lines(plan: Plan, kv_bounds: Bounds | None, q_bounds: Bounds | None) -> Iterator[RenderableType]:
    owners = ("queries q_first..q_last see keys", "keys kv_first..kv_last are seen by queries")
    for bounds, owner in zip((kv_bounds, q_bounds), owners, strict=True):
        if bounds is None:
            continue
        for interval in bounds.intervals:
            yield Padding(Text(f"{owner} [{interval.lo}, {interval.hi})"), (0, 0, 0, 2))
            yield Padding(Text(f"all of them in [{interval.full_lo}, {interval.full_hi})"), (0, 0, 0, 4))
        for line in _open_parts(plan, bounds):
            yield Padding(Text(line), (0, 0, 0, 2))


def _open_parts(plan: Plan, bounds: Bounds) -> list[str]:
    """The parts of the mask without a closed form, and which tiles are left out nevertheless."""
    notes = [f"by positions alone, {note}" for note in bounds.notes]
    found = [k for k in plan.kernels if k.code.kernel.axis == bounds.axis]
    for kernel in (k for k in found if k.code.kernel.finds == "runs"):
        measured = f"what the mask reads is measured in each call by {kernel.name}: tiles that cannot match are skipped"
        return [*notes, measured]
    lists = next((k for k in found if k.code.kernel.finds == "lists"), None)
    if lists is not None:
        return [*notes, *_listed(plan, lists)]
    if plan.codes[0].looks_first:
        evaluated = "the mask of each tile is evaluated first: the tile is skipped where nothing is visible"
        return [*notes, evaluated] if notes and bounds.axis == "kv" else notes  # it loops over tiles of keys only
    return [f"no closed form: {note}; every tile is visited and masked" for note in bounds.notes]


def _listed(plan: Plan, kernel: KernelPlan) -> list[str]:
    """How tiles are listed, and the memory that lists have, which follows from shapes alone."""
    axis, letters = kernel.code.kernel.axis, kernel.letters
    tile, most = ("queries", letters["nkv"]) if axis == "kv" else ("keys", letters["nq"])
    room = min(most, LIST_ROOM)
    bytes_of_lists = 4 * (LIST_HEAD + room) * kernel.programs.value
    full = f"; tiles beyond {LIST_ROOM:,} of a list are visited as one run" if most > LIST_ROOM else ""
    lines = [
        f"tiles are listed in each call by {kernel.name}, those without a visible pair left out: room for "
        f"{room:,.0f} for each tile of {tile}, {bytes_text(bytes_of_lists)} in all{full}"
    ]
    cells = next((k for k in plan.kernels if k.code.kernel.finds == "cells"), None)
    if cells is not None and axis == "kv":
        size = bytes_text(cells.hbm_written.value)
        lines.append(f"before that {cells.name} looks at the mask of every {CELL} x {CELL} pairs once: {size}")
    return lines


# -- what it costs ---------------------------------------------------------------------------------------------------
def _kernel_table(plan: Plan, names: Places) -> Table:
    """How much each kernel does."""
    titles = ("programs", "empty/edge/full", names.sram, "read", "written", "FLOP", "useful", "FLOP/B")
    table = _table(["kernel"], titles)
    for k in plan.kernels:
        moved = (bytes_text(k.sram_bytes.value), bytes_text(k.hbm_read.value), bytes_text(k.hbm_written.value))
        work = (count_text(k.flops.value), "?" if k.useful is None else count_text(k.useful.value))
        table.add_row(k.name, count_text(k.programs.value), _tile_classes(k), *moved, *work, f"{k.intensity:.0f}")
    return table


def _time_tables(plan: Plan, names: Places) -> Iterator[Table]:
    """How long that takes, and what it waits for: milliseconds. Kernels of target `cpu` wait for other things."""
    for on_cpu in (True, False):
        kernels = [k for k in plan.kernels if (k.on_cpu is not None) == on_cpu]
        if kernels:
            titles: tuple[str, ...] = ("matrix", "RAM", "passes", "exp", "calls", "torch")
            if not on_cpu:
                titles = ("matrix", "exp", "other", "mask", "tiles", names.hbm, names.l2, "launch")
            yield _time_table(kernels, titles, names)


def _time_table(kernels: Sequence[KernelPlan], titles: Sequence[str], names: Places) -> Table:
    table = _table(["kernel"], [*titles, "ms"], "bound")
    for k in kernels:
        parts = list(k.times.parts.values()) + ([k.times.latency] if isinstance(k.times, Times) else [])
        table.add_row(k.name, *(_ms_text(seconds) for seconds in (*parts, k.seconds)), _bound_text(k, names))
    return table


def _ms_text(seconds: float) -> str:
    """Milliseconds: a tenth of a microsecond, or five digits."""
    return f"{seconds * 1e3:.{4 if seconds < 1e-2 else 3 if seconds < 0.1 else 1}f}"


def _bound_text(kernel: KernelPlan, names: Places) -> str:
    """What bounds it, and that share of its time."""
    bound = {"memory": names.hbm, "L2": names.l2, "latency": "launch"}.get(kernel.bound, kernel.bound)
    return f"{bound} {kernel.times.share:.0%}"


def _totals(plan: Plan, names: Places) -> Iterator[Text]:
    """The sums of each direction, and the rate of what is useful of its work."""
    for direction in ("forward", "backward"):
        kernels = [k for k in plan.kernels if k.direction == direction]
        flops, useful = plan.flops(direction), plan.useful(direction)
        seconds = plan.seconds(direction)
        if kernels:
            part = "" if useful is None else f", {count_text(useful)} useful"
            work = f"{bytes_text(plan.hbm_bytes(direction))} through {names.hbm}, {count_text(flops)}FLOP{part}"
            rate = (flops if useful is None else useful) / seconds
            said = "" if useful is None else " useful"
            yield Text(f"{direction}: {work}, predicted {seconds * 1e3:.4f} ms ({count_text(rate)}FLOP/s{said})")
        if direction == "backward" and plan.sums is not None:
            yield Text(_sums_text(plan.sums))


def _sums_text(sums: Sums) -> str:
    """What adding up takes of that, term by term."""
    terms = [f"{sums.last * 1e3:.4g} of the last sums"]
    for quantity, each, how in (
        (sums.rows, PUT, "rows and keys"), (sums.along, DIAGONAL, "sums along diagonals"),
        (sums.listed, LISTED, "listed sums"),
    ):  # fmt: skip
        if quantity.value:
            terms.append(f"{quantity.formula} = {quantity.value:,.0f} {how} at {each * 1e9:.4g} ns")
    return f"  of which adding up gradients of operands takes {sums.seconds * 1e3:.4f} ms: " + ", ".join(terms)


def _stage_table(kernel: KernelPlan, names: Places) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), title_justify="left", show_header=False)
    table.title = Text(
        f"{kernel.name} ({kernel.target} {kernel.form}): a program loops over {kernel.loop}", style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for stage in kernel.stages:
        moves = stage.moves.replace("HBM", names.hbm).replace("SRAM", names.sram)  # of kernels in Triton's interpreter
        table.add_row(Text(stage.kind), Text(stage.what), Text(moves), Text(f"per {stage.per}"))
    return table


def _formulas(plan: Plan, kernel: KernelPlan, names: Places) -> Padding:
    """The kernel's figures in full, each with the formula that gives it."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    work = kernel.work
    rows = [
        (f"{names.sram} bytes", kernel.sram_bytes),
        (f"{names.hbm} read", kernel.hbm_read),
        (f"{names.hbm} written", kernel.hbm_written),
        (f"{names.l2} traffic", kernel.l2_traffic),
        ("FLOPs", kernel.flops),
        *([("useful FLOPs", kernel.useful)] if kernel.useful else []),
        ("exps", kernel.exps),
        *([("passes", kernel.on_cpu.passes), ("calls", kernel.on_cpu.calls)] if kernel.on_cpu else []),
        *([("other", work.other), ("mask", work.mask), ("tile us", work.tiles)] if work else []),
    ]
    shown = [(title, quantity) for title, quantity in rows if quantity.value]
    table.add_row(Text("programs"), Text(_programs_text(kernel)))
    if _has_tiles(kernel):
        table.add_row(Text("tiles"), Text(_tiles_text(plan, kernel)))
    texts = " ".join([kernel.programs.formula, *(quantity.formula for _, quantity in shown)])
    if letters := _letters_text(kernel, texts):
        table.add_row(Text("letters"), Text(letters))
    for title, quantity in shown:
        table.add_row(Text(title), Text(f"{quantity.formula} = {quantity.value:,.0f}"))
    if work and (work.pairs.pace.start or kernel.flops.value):
        table.add_row(Text("pace"), Text(_pace_text(work.pairs, names)))
    if kernel.on_cpu:
        table.add_row(Text("a core"), Text(_core_text(kernel.on_cpu.speed)))
    return Padding(table, (0, 0, 0, 2))


def _pace_text(work: PairWork, names: Places) -> str:
    """The constants of a kernel's form, and its tail."""
    pace, fitted = work.pace, f"fitted on an {work.pace.fitted}" if work.family in PACES else "not fitted"
    start = f", start {pace.start:g} us" if pace.start else ""
    start += f", {work.steps:,.4g} steps of {pace.step:g} us" if pace.step else ""
    tail = f"the longest program visits {work.longest:,.6g} tiles: tail {work.tail:.4f}"
    return f"{work.family} ({fitted}): matrix {pace.matrix:g}, exp {pace.exp:g}{start}; {tail}"


def _core_text(speed: CpuSpeed) -> str:
    """What a core does in the form of a kernel, and which cache its tiles find room in."""
    library = {"torch": "torch", "onednn": "oneDNN"}[speed.library]
    held = ", ".join(
        f"{share:.0%} in {level}" for level, share in zip(CACHE_LEVELS, speed.shares, strict=True) if share
    )
    cores = f"{speed.cores} core{'s' * (speed.cores > 1)}"
    return (
        f"products of {library} {_digits(speed.products)}FLOP/s, speedup {speed.speedup:.4g} of {cores}; "
        f"passes {_digits(speed.passes)}B/s over tiles of {bytes_text(speed.working_set)}: {held}; "
        f"call {speed.call_seconds * 1e6:.4g} us"
    )


def _has_tiles(kernel: KernelPlan) -> bool:
    return kernel.tiles.visited + kernel.tiles.empty > 0


def _programs_text(kernel: KernelPlan) -> str:
    programs, waves = kernel.programs, ceil(kernel.programs.value / kernel.at_once)
    together = f"{kernel.at_once:,} at once in {waves:,} wave{'s' * (waves != 1)}: busy {kernel.busy:.4f}"
    return f"{programs.formula} = {programs.value:,.0f}, {together}"


def _tiles_text(plan: Plan, kernel: KernelPlan) -> str:
    tiles = kernel.tiles
    grouped = kernel.code.kernel.shares_keys
    heads = plan.shape.kv_heads if grouped else plan.shape.heads
    total = plan.shape.batch * heads * kernel.letters["nq"] * kernel.letters["nkv"]
    classes = f"{tiles.empty:,} empty + {tiles.edge:,} edge + {tiles.full:,} full"
    level = f", of which level {tiles.level_full:,}, not u = {kernel.sizes.u:,}" if _has_level_steps(kernel) else ""
    counted = tiles.empty + tiles.visited
    formula = f"B*{'Hkv' if grouped else 'Hq'}*nq*nkv = " if counted == total else ""  # else those of each sequence
    return f"{formula}{counted:,} = {classes}; visited n = {tiles.visited:,}{level}"


def _has_level_steps(kernel: KernelPlan) -> bool:
    return kernel.work is not None and bool(re.search(r"\bu\b", kernel.work.other.formula))


def _letters_text(kernel: KernelPlan, formulas: str) -> str:
    """Values of the letters that the formulas have and that are no sizes of the call, nor the number of tiles."""
    read = set(re.findall(r"[A-Za-z]+", formulas)) | ({"bq", "bkv", "nq", "nkv"} if _has_tiles(kernel) else set())
    values = {name: value for name, value in kernel.letters.items() if name in read and name != "n"}
    return ", ".join(f"{name} {value:{'.0f' if value >= 1e6 else '.6g'}}" for name, value in values.items())


# -- numbers as text -------------------------------------------------------------------------------------------------
def bytes_text(value: float) -> str:
    """Three digits with a decimal unit.

    >>> bytes_text(541065216), bytes_text(65536), bytes_text(0)
    ('541MB', '65.5KB', '0B')
    """
    return f"{count_text(value)}B"


def _digits(value: float) -> str:
    """Four digits with a decimal unit.

    >>> _digits(794e12), _digits(2.9609e12)
    ('794T', '2.961T')
    """
    unit, size = next((u for u in _UNITS if value >= u[1]), ("", 1.0))
    return f"{value / size:.4g}{unit}"


_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3))


def count_text(value: float) -> str:
    """
    >>> count_text(16384), count_text(999), count_text(2.5e12)
    ('16.4K', '999', '2.50T')
    """
    for unit, size in _UNITS:
        if value >= size:
            digits = value / size
            return f"{digits:.{2 if digits < 10 else 1 if digits < 100 else 0}f}{unit}"
    return f"{value:.0f}"
