"""Schedule -> Plan: every kernel's loops, stages and predicted cost as data, for `explain`, the demo and the tests.

A plan needs no GPU and no tensors, only sizes and a Hardware record.
"""

from __future__ import annotations

from ..analysis.measured import MOST_POSITIONS, MOST_STEPS, Measurement
from ..analysis.records import Axis, TileCounts, TileProgram, Traits
from ..analysis.survey import Survey
from ..analysis.tiles import Environment, count_tiles
from .cost import CountTiles, KernelCost, predict
from .hardware import Hardware
from .kernels import Formula
from .records import KernelPlan, Plan, Quantity, Schedule, Shape
from .segments import Segments, for_heads
from .stages import Tiles, stages_of


def make_plan(
    name: str,
    shape: Shape,
    hardware: Hardware,
    schedule: Schedule,
    *,
    segments: Segments | None = None,
    traits: Traits = Traits(),  # noqa: B008  frozen
    count: CountTiles | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a variant under a schedule.

    count: tiles of the whole problem by class, see cost.CountTiles; where not given, every tile is visited.
    notes: what `explain` should say besides, such as why another target was not chosen.
    """
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    costs = predict(shape, schedule, hardware, segments=parts, traits=traits, count=count)
    return Plan(
        name=name,
        shape=shape,
        hardware=hardware.name,
        schedule=schedule,
        qk_segments=parts.qk,
        v_segments=parts.v,
        value_is_key=parts.value_is_key,
        kernels=tuple(_kernel_plan(cost, schedule.target, parts, traits) for cost in costs),
        notes=notes,
    )


_HEADS_COUNTED = 8  # where tiles differ by head or by batch row, this many of them stand for all
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
) -> CountTiles:
    """The tiles that kernels of a variant visit, over all heads and batches, from the programs that they run.

    env: values of the scalars and tensors that the mask reads. by_head, by_batch: tiles differ from head to head, from
    batch row to batch row; some are counted and stand for the others. survey: the kernels measure what the mask reads,
    and visit what is left then. Raises WeftError, at the latest when tiles are counted, naming a missing value.
    """
    length = shape.q_len + shape.kv_len
    most = max(1, min(_HEADS_COUNTED, MOST_POSITIONS // length)) if survey else _HEADS_COUNTED
    heads = [
        {**(env or {}), "batch": batch, "head": head, "kv_head": head // shape.group, "group": shape.group}
        for batch, head in _some_heads(shape.batch if by_batch else 1, shape.heads if by_head else 1, most)
    ]
    sizes = {"q_len": shape.q_len, "kv_len": shape.kv_len}
    measured = [Measurement(survey, head, q_offset=q_offset, **sizes) for head in heads] if survey else []

    def count(axis: Axis, block_q: int, block_kv: int) -> TileCounts:
        program = kv_tiles if axis == "kv" else q_tiles
        blocks = {"block_q": block_q, "block_kv": block_kv}
        if measured:
            found = [m.count(program, **blocks, most=MOST_STEPS // len(measured)) for m in measured]
        else:
            found = [count_tiles(program, q_offset=q_offset, env=head, **sizes, **blocks) for head in heads]
        share = shape.batch * shape.heads / len(found)
        return TileCounts(*(round(share * sum(getattr(c, part) for c in found)) for part in ("empty", "edge", "full")))

    return count


def _some_heads(batches: int, heads: int, most: int) -> list[tuple[int, int]]:
    """All pairs (batch row, head), or this many of them: evenly spaced heads, and batch rows in another order."""
    if batches * heads <= most:
        return [(batch, head) for batch in range(batches) for head in range(heads)]
    return [(int((k * _GOLDEN + 0.5) % 1 * batches), (2 * k + 1) * heads // (2 * most)) for k in range(most)]


def _kernel_plan(cost: KernelCost, target: str, parts: Segments, traits: Traits) -> KernelPlan:
    from .formulas import formula_text  # imports sympy, which a call that only runs kernels does without

    def quantity(formula: Formula) -> Quantity:
        return Quantity(formula_text(formula, cost.sizes), formula(cost.sizes))

    kernel = cost.kernel
    return KernelPlan(
        name=kernel.name,
        direction=kernel.direction,
        tiling=cost.tiling,
        programs=quantity(kernel.programs),
        loop=kernel.loop,
        tiles=cost.tiles,
        stages=stages_of(target, kernel.name, Tiles(cost.tiling.block_q, cost.tiling.block_kv, parts, traits)),
        sram_bytes=quantity(kernel.sram),
        hbm_read=quantity(kernel.read),
        hbm_written=quantity(kernel.written),
        flops=quantity(kernel.flops),
        seconds=cost.seconds,
        bound=cost.bound,
    )
