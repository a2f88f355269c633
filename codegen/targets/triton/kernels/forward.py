"""The forward of schedule flash: FlashAttention-2 (Dao, 2023, arXiv 2307.08691), a program for each tile of queries."""

from __future__ import annotations

from .....compiler.planning import quantities as of
from .....compiler.planning.kernel import DESCALES, Kernel, KernelId
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import AHEAD, EACH_KV, ONCE, Tiles, computes, keeps, loads, stores
from ..features import DISTANCES, DROPOUT, QUANTIZED, SINK

OVER_KEYS = "the key tiles that its queries see"


def forward_registers(block_q: int, block_kv: int, qk_columns: int, v_columns: int) -> float:
    """The output, scores, and P in half the width."""
    return block_q * v_columns + block_q * block_kv * 3 // 2


def forward_stages(t: Tiles) -> list[Stage]:
    value = [] if t.parts.value_is_key else [loads("value", t.value(), EACH_KV, AHEAD)]
    key = f"{t.key()}, used as V too" if t.parts.value_is_key else t.key()
    return [
        loads("query", t.query(), ONCE),
        keeps("sums", ", ".join([f"{t.output('O')} float32", *t.running])),
        loads("key", key, EACH_KV, AHEAD),
        computes("scores", f"{t.scores()} = {t.score_text}{t.mask_text}", EACH_KV),
        computes("weights", t.weights(), EACH_KV),
        *value,
        computes("output", f"O += {t.kept('P')} V", EACH_KV),
        stores("output", t.results),
    ]


FLASH_FORWARD = Kernel(
    KernelId("triton", "flash_forward"), "forward", "forward", "kv", OVER_KEYS, forward_stages,
    programs=of.query_programs, read=of.flash_forward_read, written=of.flash_forward_written,
    sram=of.flash_forward_sram, flops=of.forward_flops, exps=of.forward_exps, registers=forward_registers, weighs=True,
    visits_measured=True, lists=("q",), features=(DISTANCES, SINK, QUANTIZED, DROPOUT), options=DESCALES,
)  # fmt: skip
