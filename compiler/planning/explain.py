"""A plan for a person: what moves where, how often the mask is looked at, and what bounds the time."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...ir.attention import Attention
from ..analysis.records import Bounds
from .plan import KernelPlan, Plan
from .records import Segment

WIDTH = 100
_GLOSSARY = (
    "B batch, Hq Hkv heads, L queries, T keys, D Dv head dimensions (C Cv those of a tile, padded), bq bkv tile rows, "
    "n tile pairs visited, nq nkv tiles of a head, k share of repeated reads that misses L2 (not shown where 0 or 1)"
)


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
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(explanation(plan, attention, kv_bounds, q_bounds, claim))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


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
    parts += ["", _kernel_table(plan), *_totals(plan)]
    for kernel in plan.kernels:
        parts += ["", _stage_table(kernel), _formulas(kernel)]
    parts += ["", Text(_GLOSSARY, style="dim")]
    if plan.notes:
        parts += ["", Text("Notes", style="bold"), *(Text(f"- {note}") for note in plan.notes)]
    return Group(*parts)


# -- what is computed ------------------------------------------------------------------------------------------------
def _header(plan: Plan, attention: Attention | None) -> Table:
    shape = plan.shape
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("variant", Text(plan.name))
    if attention is not None:
        table.add_row("score", Text(str(attention.score)))
        table.add_row("mask", Text(str(attention.mask)))
    sizes = f"B {shape.batch}  Hq {shape.heads}  Hkv {shape.kv_heads}  L {shape.q_len}  T {shape.kv_len}"
    table.add_row("problem", Text(f"{sizes}  D {shape.head_dim}  Dv {shape.value_dim}  {shape.dtype}"))
    parts = plan.segments
    value = "columns of the key" if parts.value_is_key else _segments(parts.v)
    table.add_row("tile columns", Text(f"query, key {_segments(parts.qk)}; value {value}"))
    table.add_row("hardware", Text(plan.hardware.title))
    table.add_row("schedule", Text(plan.schedule.algorithm))
    for name, choice in plan.schedule.kernels.items():
        table.add_row("", Text(f"{name}={choice}"))
    return table


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
    spans = f"{bounds.axis}_spans"
    notes = [f"by positions alone, {note}" for note in bounds.notes]
    if any(kernel.name == spans for kernel in plan.kernels):
        measured = f"what the mask reads is measured in each call by {spans}: tiles that cannot match are skipped"
        return [*notes, measured]
    if plan.codes[0].looks_first:
        evaluated = "the mask of each tile is evaluated first: the tile is skipped where nothing is visible"
        return [*notes, evaluated] if notes and bounds.axis == "kv" else notes  # it loops over tiles of keys only
    return [f"no closed form: {note}; every tile is visited and masked" for note in bounds.notes]


# -- what it costs ---------------------------------------------------------------------------------------------------
def _kernel_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("kernel", no_wrap=True)
    table.add_column("programs", justify="right", no_wrap=True)
    table.add_column("empty/edge/full", justify="right", no_wrap=True)
    for title in ("SRAM", "read", "written", "FLOP", "FLOP/B", "ms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for k in plan.kernels:
        moved = (bytes_text(k.sram_bytes.value), bytes_text(k.hbm_read.value), bytes_text(k.hbm_written.value))
        tiles = "/".join(count_text(n) for n in (k.tiles.empty, k.tiles.edge, k.tiles.full))
        numbers = (count_text(k.flops.value), f"{k.intensity:.0f}", f"{k.seconds * 1e3:.3f}", k.bound)
        table.add_row(k.name, count_text(k.programs.value), tiles, *moved, *numbers)
    return table


def _totals(plan: Plan) -> Iterator[Text]:
    for direction in ("forward", "backward"):
        flops = sum(k.flops.value for k in plan.kernels if k.direction == direction)
        seconds = plan.seconds(direction)
        if seconds > 0:
            work = f"{bytes_text(plan.hbm_bytes(direction))} through HBM, {count_text(flops)}FLOP"
            time = f"predicted {seconds * 1e3:.3f} ms if all overlaps ({count_text(flops / seconds)}FLOP/s)"
            yield Text(f"{direction}: {work}, {time}")


def _stage_table(kernel: KernelPlan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), title_justify="left", show_header=False)
    table.title = Text(
        f"{kernel.name} ({kernel.target} {kernel.form}): a program loops over {kernel.loop}", style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for stage in kernel.stages:
        table.add_row(Text(stage.kind), Text(stage.what), Text(stage.moves), Text(f"per {stage.per}"))
    return table


def _formulas(kernel: KernelPlan) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    rows = (
        ("SRAM bytes", kernel.sram_bytes),
        ("HBM read", kernel.hbm_read),
        ("HBM written", kernel.hbm_written),
        ("FLOPs", kernel.flops),
    )
    for title, quantity in rows:
        if quantity.value:
            table.add_row(Text(title), Text(f"{quantity.formula} = {quantity.value:,.0f}"))
    return Padding(table, (0, 0, 0, 2))


# -- numbers as text -------------------------------------------------------------------------------------------------
def bytes_text(value: float) -> str:
    """Three digits with a decimal unit.

    >>> bytes_text(541065216), bytes_text(65536), bytes_text(0)
    ('541MB', '65.5KB', '0B')
    """
    return f"{count_text(value)}B"


def count_text(value: float) -> str:
    """
    >>> count_text(16384), count_text(999), count_text(2.5e12)
    ('16.4K', '999', '2.50T')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            digits = value / size
            return f"{digits:.{2 if digits < 10 else 1 if digits < 100 else 0}f}{unit}"
    return f"{value:.0f}"
