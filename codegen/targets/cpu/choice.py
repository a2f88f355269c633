"""Which forms a kernel of target `cpu` may get, best predicted first.

A choice depends on widths, dtype, machine and the variant's traits only, as in tilings.py: a new length must not
generate anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil

from ....compiler.analysis.tiles.results import Axis, TileCounts, Traits
from ....compiler.planning.cost import CountTiles, KernelCost, busy_fraction, cost_of, dense_counts
from ....compiler.planning.dtypes import FP32, dtype_named
from ....compiler.planning.form import Machine
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.records import Shape
from ....compiler.planning.segments import Segments
from ....compiler.planning.signature import Direction
from .cost import torch_cost, work_of
from .forms import CpuForm

USUAL = CpuForm(256, 256)  # what ties keep: measured beside others where this was written (docs/experiments)
WITHIN = 0.1  # of the best predicted: what the model cannot tell apart
TIMED = (CpuForm(64, 64), CpuForm(128, 256))  # whatever is predicted
PREDICTED = 2  # forms besides that are worth timing
_ROWS, _KIB = (64, 128, 256, 512), (128, 256, 512, 1024, 2048)
_NOMINAL, _DOCUMENT = 2048, 512  # tokens that forms are ranked on; where a mask reads tensors, in documents


def cpu_forms(
    kernel: Kernel, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits, *,
    whole: float | None = None, one_dnn: bool = True,
) -> list[CpuForm]:  # fmt: skip
    """Forms of one kernel worth timing, the one to use first.

    shape: widths and dtype are looked at, lengths are not. whole: where torch's own attention computes some calls of
    this variant as they are, the share of its products that tiles need for what is wanted; tiles compute these calls
    too where they are predicted to be faster. Both kinds are then worth timing: tiles, which say so, and one form that
    leaves these calls to torch. one_dnn: whether oneDNN's products can be called.
    """
    return list(
        _cpu_forms(kernel, shape.head_dim, shape.value_dim, shape.dtype, hardware, parts, traits, whole, one_dnn)
    )


@lru_cache(maxsize=1024)
def _cpu_forms(
    kernel: Kernel, head_dim: int, value_dim: int, dtype: str, hardware: Hardware, parts: Segments, traits: Traits,
    whole: float | None, one_dnn: bool,
) -> tuple[CpuForm, ...]:  # fmt: skip
    assert hardware.cpu is not None
    libraries = [False] + [True] * (
        one_dnn
        and dtype_named(dtype).sums == FP32.torch_name
        and any(r.library == "onednn" for r in hardware.cpu.products)
    )
    shape = Shape(1, max(8, hardware.sms), max(8, hardware.sms), _NOMINAL, _NOMINAL, head_dim, value_dim, dtype)
    found = [
        CpuForm(queries, keys, kib, own)
        for own in libraries for queries in _ROWS for keys in _ROWS for kib in _KIB
        if queries * keys * 4 <= kib * 1024
    ]  # fmt: skip
    predicted = _seconds(kernel, shape, hardware, parts, traits)
    seconds = {form: predicted(form) for form in found}
    found.sort(key=lambda form: seconds[form])  # of equals the first: torch's products, small tiles
    usual = next(form for form in (USUAL, *found) if seconds[form] <= seconds[found[0]] * (1 + WITHIN))
    pairs = (0.5 if traits.masked else 1.0) * shape.batch * shape.heads * shape.q_len * shape.kv_len
    own = own_seconds(kernel.direction, pairs, head_dim, dtype, hardware)
    if whole is None:
        return _first(usual, found)
    in_tiles = tuple(replace(form, in_tiles=True) for form in _first(usual, found))
    if own is not None and whole * seconds[usual] < own:
        return (in_tiles[0], usual, *in_tiles[1:])
    return (usual, *in_tiles)


def _seconds(
    kernel: Kernel, shape: Shape, hardware: Hardware, parts: Segments, traits: Traits
) -> Callable[[CpuForm], float]:  # fmt: skip
    """What a kernel takes in a form.

    Forms of equal tiles, up to ten, differ in what a core does alone: what else there is to them is worked out once.
    """
    assert hardware.cpu is not None
    count, work = _counts(shape, traits), work_of(kernel, traits, hardware.cpu)

    @cache
    def of_tiles(block_q: int, block_kv: int) -> tuple[KernelCost, float]:
        tiles = count(kernel.axis, block_q, block_kv)
        cost = cost_of(kernel, CpuForm(block_q, block_kv), shape, hardware, parts, tiles, traits)
        return cost, busy_fraction(kernel.programs(cost.sizes), cost.at_once)

    def found(form: CpuForm) -> float:
        cost, busy = of_tiles(form.block_q, form.block_kv)
        sram = form.sram(kernel, parts, traits)(cost.sizes)
        machine = Machine(hardware, shape.dtype, sram, busy)
        return torch_cost(kernel, form, cost.sizes, cost.tiles, traits, machine, work).times.seconds

    return found


def _first(usual: CpuForm, found: list[CpuForm]) -> tuple[CpuForm, ...]:
    """The one to use, and others: of every kind some, and those that are predicted to be the best."""
    others = [form for form in TIMED if form != usual]
    return (usual, *others, *[form for form in found if form not in (usual, *others)][:PREDICTED])


def own_seconds(direction: Direction, pairs: float, head_dim: int, dtype: str, hardware: Hardware) -> float | None:
    """What torch's own attention takes for so many visible pairs; None where that was not measured."""
    assert hardware.cpu is not None
    backward = direction == "backward"
    own = hardware.cpu.attention_flops(dtype, backward)
    flops = 2 * pairs * (5 if backward else 2) * head_dim
    return None if own is None else flops / (own * hardware.cpu.all_products)


def _counts(shape: Shape, traits: Traits) -> CountTiles:
    """Tiles of a causal mask where there is one, in documents where it reads tensors; all of them without a mask.

    Documents begin in the middle of one another's tiles, as real ones do not begin where tiles do.
    """
    if not traits.masked:
        return dense_counts(shape)
    heads = shape.batch * shape.heads

    def document(row: int) -> int:
        """The first row of the same document."""
        half = _DOCUMENT // 2
        return max(0, (row + half) // _DOCUMENT * _DOCUMENT - half) if traits.measured else 0

    def count(axis: Axis, block_q: int, block_kv: int) -> TileCounts:
        edge = full = 0
        for first in range(0, shape.q_len, block_q):
            end = min(first + block_q, shape.q_len)
            seen = ceil(end / block_kv) - document(first) // block_kv
            whole = max(0, (first + 1) // block_kv - ceil(document(end - 1) / block_kv))
            full, edge = full + whole, edge + seen - whole
        total = heads * ceil(shape.q_len / block_q) * ceil(shape.kv_len / block_kv)
        return TileCounts(max(0, total - heads * (edge + full)), heads * edge, heads * full)

    return count
