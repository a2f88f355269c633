"""The queries' pass of a backward in two, and of gradients of operands that a row of queries sums."""

from __future__ import annotations

from .....compiler.planning.form import Form
from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import (
    flash_dquery_flops,
    flash_dquery_read,
    flash_dquery_sram,
    query_bytes,
    query_programs,
    score_count,
)
from .....compiler.planning.records import Stage
from .....compiler.planning.signature import Widths
from .....compiler.planning.stage_words import (
    AHEAD,
    EACH_KV,
    ONCE,
    Tiles,
    computes,
    dscore,
    error_of_delta,
    keeps,
    loads,
    weights_text,
)
from ...triton.kernels.forward import OVER_KEYS
from ..forms import ROWS, HopperBackwardForm
from ..pieces import columns_of
from .backward import BOXES, KEYS_AHEAD


def _stages(t: Tiles) -> list[Stage]:
    """A producer warp loads; two consumers of ROWS queries compute."""
    consumers = f"{t.q // ROWS} consumers of {ROWS} rows"
    slot = "into a slot of its ring, by the producer's TMA"
    results = [t.query("dQ")] if "query" in t.wanted else []
    product = [computes("dquery", "dQ += dS K", EACH_KV)] if results else []
    results += ["sums for operands"] if t.sums & {"total", "row"} else []
    return [
        loads("query", f"{t.query()}, {t.output('dO')}, for {consumers}", ONCE),
        loads("key", f"{t.key()}, {slot}", EACH_KV, AHEAD),
        loads("value", f"{t.value()}, {slot}", EACH_KV, AHEAD),
        keeps("dquery", f"{', '.join(results)} float32, by {consumers}; {', '.join(t.saved('lse', 'delta'))}"),
        computes("scores", f"{t.scores()} = Q K^T, asynchronous", EACH_KV),
        computes("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}, asynchronous", EACH_KV),
        computes("weights", f"{weights_text(t)}{t.mask_text}", EACH_KV),
        computes("dscores", f"dS = {dscore(t)}", EACH_KV),
        *product,
        *error_of_delta(t),
        Stage("store dquery", "store", ", ".join(results), "registers -> SRAM -> HBM", ONCE),
    ]


def _refuses(form: Form, widths: Widths) -> str | None:
    assert isinstance(form, HopperBackwardForm)
    if form.keys_ahead:
        return KEYS_AHEAD
    if form.pair_bytes:
        return BOXES
    sizes = form.block_q == 128 and form.block_kv in (32, 64, 128) and form.stages == 2
    if not sizes or form.next_scores or form.by_columns:
        return "expected 128 queries, 32, 64 or 128 keys and 2 stages"
    if form.block_kv == 128 and max(columns_of(widths)) == 256:
        return "128 keys leave too few registers for D 256"
    return None


FLASH_DQUERY = Kernel(
    KernelId("hopper", "flash_dquery"), "backward", "backward_q", "kv", OVER_KEYS, _stages, programs=query_programs,
    read=flash_dquery_read, written=query_bytes, sram=flash_dquery_sram, refuses=_refuses,
    flops=flash_dquery_flops, exps=score_count,
    weighs=True, visits_measured=True, lists=("q",),
)  # fmt: skip
