"""Schedule split_kv: Flash-Decoding (Dao, Haziza, Massa and Sizov 2023), parts of the keys and what joins them."""

from __future__ import annotations

from .....compiler.planning import quantities as of
from .....compiler.planning.kernel import DESCALES, Kernel, KernelId
from .....compiler.planning.quantities import ROW_STATISTIC, Sizes
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import ONCE, Tiles, columns, computes, loads, stores
from ..features import QUANTIZED, SINK
from .forward import forward_registers, forward_stages


def split_programs(x: Sizes) -> float:
    """Tiles of the rows that share a key head, and parts of the keys."""
    return x.B * x.Hkv * x.nq * x.S


def parts_bytes(x: Sizes) -> float:
    """An output and a log-sum-exp of each part, float32."""
    return x.joined * x.S * ROW_STATISTIC * x.B * x.Hq * x.L * (x.Dv + 1)


def split_written(x: Sizes) -> float:
    return parts_bytes(x) + (1 - x.joined) * (of.output_bytes(x) + of.row_bytes(x))


def _split_forward(t: Tiles) -> list[Stage]:
    """As of flash, of a part of the keys and of rows of all heads that share them."""
    found = {stage.key: stage for stage in forward_stages(t)}
    rows = f"Q tile [up to {t.q}, {columns(t.parts.qk)}], rows of all queries and heads that share the keys"
    parts = f"{t.results}; of one part of several: O / sum and lse, float32"
    return [
        loads("query", rows, ONCE),
        *(found[key] for key in found if key not in ("load query", "store output")),
        stores("output", parts),
    ]


def join_stages(t: Tiles) -> list[Stage]:
    return [
        loads("parts", "O and lse of each part of the row's keys, float32", ONCE, "HBM -> registers"),
        computes("output", "O = sum(O of a part * exp(its lse - max)), and of these factors the sum", ONCE),
        stores("output", f"O / sum, lse = max + log(sum){t.sink_text}"),
    ]


SPLIT_FORWARD = Kernel(
    KernelId("triton", "split_forward"), "forward", "forward", "kv", "its part of the key tiles that its rows see",
    _split_forward, programs=split_programs, read=of.flash_forward_read, written=split_written,
    sram=of.flash_forward_sram, flops=of.forward_flops, exps=of.forward_exps, registers=forward_registers, weighs=True,
    visits_measured=True, divides=True, is_optional=True, features=(SINK, QUANTIZED), options=DESCALES,
)  # fmt: skip


def joining(divider: Kernel) -> Kernel:
    """The kernel that joins what a divider leaves of each part."""
    return Kernel(
        KernelId(divider.id.family, "join_parts"), "forward", "forward", "kv", "the parts of its row", join_stages,
        programs=lambda x: x.joined * x.B * x.Hq * x.L, read=parts_bytes,  # a row, where there is something to join
        written=lambda x: x.joined * (of.output_bytes(x) + of.row_bytes(x)), follows=divider.name, visits="none",
        joins=divider, is_optional=True, features=(SINK,),
    )  # fmt: skip


JOIN_PARTS = joining(SPLIT_FORWARD)
