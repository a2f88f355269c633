"""What runs before and after the backward: statistics of rows, and dQ from its float32 sums."""

from __future__ import annotations

from functools import lru_cache, partial

from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import (
    RUNNING,
    Formula,
    Sizes,
    query_bytes,
    query_programs,
    statistics_read,
    statistics_written,
)
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import ONCE, Tiles, computes, loads, sink_sums, stores
from ...triton.kernels.backward import ROWS, statistics_stages
from .backward import FLASH_BACKWARD, sums_of_dquery

REORDERING = 8192  # bytes that Triton takes to change the order of a tile's registers


def statistics_and_zeros(x: Sizes) -> float:
    """lse and delta, and zeros for the sums of dQ."""
    return statistics_written(x) + sums_of_dquery(x)


def statistics_and_group_zeros(x: Sizes) -> float:
    """lse and delta, and zeros for the sums of dQ where query heads share keys."""
    return statistics_written(x) + x.z * sums_of_dquery(x)


def statistics_sram(x: Sizes) -> float:
    """O and dO."""
    return 2 * x.bq * x.Cv * x.e


def statistics_and_zeros_sram(x: Sizes) -> float:
    """The same, and zeros for the half of a tile's sums that one consumer adds to."""
    return statistics_sram(x) + RUNNING * x.bq * x.C / 2


def round_dquery_sram(x: Sizes) -> float:
    """The sums, dQ, and room to change their order."""
    return x.bq * x.C * (RUNNING + x.e) + REORDERING


def _stages(t: Tiles, one_pass: bool = False, stores_first: bool = False) -> list[Stage]:
    """As of the portable kernels, and in one pass zeros for what the main kernel adds to."""
    _, compute, *_ = statistics_stages(t)
    where = ", where query heads share keys" if stores_first else ""
    zeros = Stage("store zeros", "store", f"{t.query('zeros for sums of dQ')} float32{where}", "SRAM -> HBM", ONCE)
    return [
        loads("rows", "rows of O and dO by TMA, and lse", ONCE),
        *([zeros] if one_pass else []),
        compute,
        stores("statistics", "-delta and -lse in base 2, of these rows, as products start from them"),
        *([stores("rows", "delta and lse in base 2, as flash_ddiagonals reads them")] if "diagonal" in t.sums else []),
        *sink_sums(t, ragged=t.ragged),
    ]


def _rounding_stages(t: Tiles) -> list[Stage]:
    return [
        loads("sums", f"{t.query('sums of dQ')} float32", ONCE),
        computes(
            "dquery", "rows from the order of registers" + (", times the factor" if t.traits.linear else ""), ONCE
        ),
        Stage("store dquery", "store", t.query("dQ"), "registers -> SRAM -> HBM", ONCE),
    ]


def _statistics(
    variant: str, follows: str, written: Formula, sram: Formula, one_pass: bool = False, stores_first: bool = False
) -> Kernel:  # fmt: skip
    words = partial(_stages, one_pass=one_pass, stores_first=stores_first)
    return Kernel(
        KernelId("hopper", "row_statistics", variant), "backward", "backward_q", "kv", ROWS, words,
        programs=query_programs, read=statistics_read, written=written, sram=sram, follows=follows, visits="none",
        lists=("q",),
    )  # fmt: skip


ROW_STATISTICS = _statistics(
    "one pass", FLASH_BACKWARD.name, statistics_and_zeros, statistics_and_zeros_sram, one_pass=True
)
FIRST_STORED = _statistics(  # where a head's first shares of dQ are stored
    "first stored", FLASH_BACKWARD.name, statistics_and_group_zeros, statistics_and_zeros_sram, one_pass=True,
    stores_first=True,
)  # fmt: skip


@lru_cache(maxsize=8)
def statistics_for(follows: str) -> Kernel:
    """Those of two passes, in tiles as those of the last one."""
    return _statistics(follows, follows, statistics_written, statistics_sram)


ROUND_DQUERY = Kernel(
    KernelId("hopper", "round_dquery"), "backward", "backward_q", "kv", ROWS, _rounding_stages, programs=query_programs,
    read=sums_of_dquery, written=query_bytes, sram=round_dquery_sram, follows=FLASH_BACKWARD.name, visits="none",
)  # fmt: skip
