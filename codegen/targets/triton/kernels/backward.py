"""The backward of schedule flash (FlashAttention-2, arXiv 2307.08691): statistics of rows, then two passes over pairs.

One pass owns queries and sums dQ, the other owns keys and sums dK and dV: every sum has one owner and one order.
"""

from __future__ import annotations

from .....compiler.planning import quantities as of
from .....compiler.planning.kernel import QUERIES_AGAIN, Kernel, KernelId
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import (
    AHEAD,
    EACH_KV,
    EACH_Q,
    ONCE,
    Tiles,
    computes,
    dscore,
    error_of_delta,
    keeps,
    key_results,
    loads,
    sink_sums,
    stores,
    weights_text,
)
from ..features import OF_A_BACKWARD, SUMS_OF_KEYS, SUMS_OF_QUERIES
from .forward import OVER_KEYS

ROWS, OVER_QUERIES = "its rows", "the query tiles that see its keys"


def statistics_stages(t: Tiles) -> list[Stage]:
    return [
        loads("rows", "rows of O, dO and lse", ONCE, "HBM -> registers"),
        computes("delta", "delta = rowsum(O * dO) - dlse", ONCE),
        stores("statistics", "delta and lse in base 2 of these rows"),
        *sink_sums(t),
    ]


_LEVEL_SUMS = "sums of dload over tiles whose pairs all read one entry, at either end of the distances; the entries"


def _flash_dquery(t: Tiles) -> list[Stage]:
    result = [t.query("dQ")] if "query" in t.wanted else []
    sums = ["sums for operands"] if not result and t.sums & {"total", "row"} else []
    product = [computes("dquery", "dQ += dS K", EACH_KV)] if result else []
    stored = [stores("pairs", f"dload = {dload(t)}, to the entries that the tile read", EACH_KV)]
    if not (result or sums or "stored" in t.sums):
        return sink_sums(t, ragged=True)
    return [
        loads("query", ", ".join([t.query(), t.output("dO"), *t.saved("lse", "delta")]), ONCE),
        *([keeps("dquery", ", ".join([f"{x} float32" for x in result] + sums))] if result + sums else []),
        loads("key", t.key(), EACH_KV, AHEAD),
        computes("scores", f"{t.scores()} = Q K^T", EACH_KV),
        loads("value", t.value(), EACH_KV, AHEAD),
        computes("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", EACH_KV),
        computes("weights", weights_text(t), EACH_KV),
        computes("dscores", f"dS = {dscore(t)}{t.mask_text}", EACH_KV),
        *(stored if "stored" in t.sums else []),
        *product,
        *error_of_delta(t),
        *([stores("dquery", ", ".join(result + sums))] if result + sums else []),
        *([stores("levels", _LEVEL_SUMS)] if "level" in t.sums else []),
        *sink_sums(t, ragged=True),
    ]


def dload(t: Tiles) -> str:
    dscore = "P * (dP - delta)" if t.traits.normalizer.saves_lse else "P' * dP"
    return f"{dscore} * d score / d read"


def _flash_dkey_dvalue(t: Tiles) -> list[Stage]:
    results = key_results(t)
    dvalue = [computes("dvalue", f"dV += {t.kept('P')}^T dO", EACH_Q)] if "value" in t.wanted else []
    dkey = [computes("dkey", "dK += dS^T Q", EACH_Q)] if t.wants_dkey else []
    return [
        loads("key", f"{t.key()}, {t.value()}" if t.wants_dscores else t.key(), ONCE),
        *([keeps("dkey", ", ".join(f"{x} float32" for x in results))] if results else []),
        *weights_again(t, t.wants_dscores, AHEAD),
        *dvalue,
        *dkey,
        *column_sums(t, ONCE),
        *([stores("dkey", ", ".join(results))] if results else []),
    ]


def column_sums(t: Tiles, per: str) -> list[Stage]:
    return [stores("sums", f"sums for operands, one a key [{t.kv}]", per)] if "column" in t.sums else []


def weights_again(t: Tiles, wants_dscores: bool, moves: str) -> list[Stage]:
    """P and dS of a tile of queries that a program of a tile of keys visits."""
    saved = t.saved("lse", "delta") if wants_dscores else t.saved("lse")
    dweights = [computes("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", EACH_Q)] if wants_dscores else []
    dscores = [computes("dscores", f"dS = {dscore(t)}{t.mask_text}", EACH_Q)] if wants_dscores else []
    return [
        loads("query", ", ".join([t.query(), *saved]), EACH_Q, moves),
        computes("scores", f"{t.scores('S')} = Q K^T", EACH_Q),
        loads("doutput", t.output("dO"), EACH_Q, moves),
        *dweights,
        computes("weights", weights_text(t), EACH_Q),
        *dscores,
    ]


def dquery_registers(block_q: int, block_kv: int, qk_columns: int, v_columns: int) -> float:
    """dQ; S, dP, and dS in half the width."""
    return block_q * qk_columns + block_q * block_kv * 5 // 2


def dkey_dvalue_registers(block_q: int, block_kv: int, qk_columns: int, v_columns: int) -> float:
    """dK and dV; S, dP, and dS in half the width."""
    return block_kv * (qk_columns + v_columns) + block_q * block_kv * 5 // 2


ROW_STATISTICS = Kernel(
    KernelId("triton", "row_statistics"), "backward", "backward_q", "kv", ROWS, statistics_stages,
    programs=of.query_programs, read=of.statistics_read, written=of.statistics_written, visits="none",
    features=OF_A_BACKWARD,
)  # fmt: skip
FLASH_DQUERY = Kernel(
    KernelId("triton", "flash_dquery"), "backward", "backward_q", "kv", OVER_KEYS, _flash_dquery,
    programs=of.query_programs, read=of.flash_dquery_read, written=of.query_bytes, sram=of.flash_dquery_sram,
    flops=of.flash_dquery_flops, exps=of.score_count, registers=dquery_registers, weighs=True, sums_levels=True,
    has_level_loop=True, visits_measured=True, lists=("q",), features=(*OF_A_BACKWARD, *SUMS_OF_QUERIES),
)  # fmt: skip
FLASH_DKEY_DVALUE = Kernel(
    KernelId("triton", "flash_dkey_dvalue"), "backward", "backward_kv", "q", OVER_QUERIES, _flash_dkey_dvalue,
    programs=of.key_programs, read=of.flash_dkey_dvalue_read, written=of.key_value_gradient_bytes,
    sram=of.flash_dkey_dvalue_sram, flops=of.flash_dkey_dvalue_flops, exps=of.score_count, again=QUERIES_AGAIN,
    registers=dkey_dvalue_registers, weighs=True, has_level_loop=True, drop_work=27.0, visits_measured=True,
    lists=("kv",), features=(*OF_A_BACKWARD, *SUMS_OF_KEYS),
)  # fmt: skip
DQUERY = FLASH_DQUERY.name
