"""What makes the tables of what a score reads by distance, on any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .....compiler.analysis.values.distances import ByDistance
from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import Sizes, none
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import ONCE, Tiles, computes, stores
from ..forms import Tiling
from .measures import MEASURES

DISTANCE_TABLES = "distance_tables"
BESIDE = (*MEASURES, DISTANCE_TABLES)  # kernels of modules of their own
_FORM = Tiling(1, 256, 4, 1)  # distances of a program


def _words(t: Tiles) -> list[Stage]:
    """One module makes the tables of kernels with tiles of any size."""
    return [
        computes("values", "what the score adds or multiplies by q_pos - kv_pos alone, of each distance", ONCE),
        stores("tables", "float32, a value a distance: of all heads, or of each where they differ"),
        *([stores("levels", "int32: from where on nothing changes with distance")] if "level" in t.sums else []),
    ]


def with_tables_made(kernels: Sequence[Kernel], tables: Sequence[ByDistance]) -> list[Kernel]:
    """The kernels, and before them the one that makes their tables."""
    if not tables:
        return list(kernels)
    by_batch, by_head = any(t.by_batch for t in tables), any(t.by_head for t in tables)
    return [_tables_kernel(kernels[0], len(tables), by_batch, by_head), *kernels]


@lru_cache(maxsize=64)
def _tables_kernel(before: Kernel, number: int, by_batch: bool, by_head: bool) -> Kernel:
    def tables(x: Sizes) -> float:
        return (x.B if by_batch else 1) * (x.Hq if by_head or by_batch else 1)

    def programs(x: Sizes) -> float:
        return tables(x) * (x.L + x.T) / x.bkv

    def written(x: Sizes) -> float:
        return 4 * number * tables(x) * (x.L + x.T)

    return Kernel(
        KernelId("triton", DISTANCE_TABLES, f"{number} {by_batch} {by_head}"), before.direction, before.slot, "kv",
        "its distances", _words, programs=programs, read=none, written=written, again=before.again, visits="none",
        own_form=lambda visitor, sequences: _FORM, module="tables",
    )  # fmt: skip
