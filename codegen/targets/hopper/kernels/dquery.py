"""The queries' pass of a backward in two, and of gradients of operands that a row of queries sums."""

from __future__ import annotations

from .....compiler.analysis.tiles.results import Traits
from .....compiler.planning import quantities as of
from .....compiler.planning.form import Form
from .....compiler.planning.kernel import Kernel, KernelId
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
from ...gluon.program import FIRST_BARRIER, Columns, Program
from ...triton.kernels.forward import OVER_KEYS
from ..features import OF_A_BACKWARD, SUMS_OF_QUERIES
from ..forms import ROWS, HopperBackwardForm
from ..held import ROLES, Held, columns_in, declared
from ..pieces import CONSUMERS, columns_of, key_pieces, piecewise
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


# -- the program -------------------------------------------------------------------------------------------------------
def program(form: HopperBackwardForm, held: Held, first_barrier: int = FIRST_BARRIER) -> Program:
    """Rows of two consumers, and the rings of K and V. first_barrier: behind those of the module's other kernel."""
    p = Program(
        "flash_dquery", _constants(form, held), held.letters_of_widths, spare=512, record="OwnSram",
        first_barrier=first_barrier,
        about=f"All shared memory of flash_dquery. Tiles keep the [{held.ones}, rows, columns] shape of the TMA boxes.",
    )  # fmt: skip
    pieces = columns_in(key_pieces(piecewise(held.widths.head_dim), held.widths))
    value = [Columns("VALUE_COLUMNS")]
    p.tile("query", f"CONSUMERS, {held.ones}, ROWS", pieces, of="query_rows")
    p.tile("dout", f"CONSUMERS, {held.ones}, ROWS", value, of="dout_rows")
    p.ring("key", f"STAGES, {held.ones}, SEEN_BLOCK_KV", pieces, of="seen_key")
    p.ring("value", f"STAGES, {held.ones}, SEEN_BLOCK_KV", value, of="seen_value")
    p.cards("cards", "CARDS * CARD_FIELDS, 1")
    p.mbarrier("query_ready", "CONSUMERS", about="mbarriers: one for each consumer")
    p.mbarrier("key_ready", "STAGES", about="one for each slot")
    p.mbarrier("value_ready", "STAGES", about="one for each slot")
    p.role("own_consumer", warps=4, count=CONSUMERS, registers=240, empties=["key", "value"],
           body=f"{ROLES}/dquery_consumer.py.jinja")  # fmt: skip
    p.role("own_producer", warps=1, registers=24, fills=["key", "value"], body=f"{ROLES}/dquery_producer.py.jinja")
    p.free("key", form.stages)
    p.free("value", form.stages)
    return p.check()


def _constants(form: HopperBackwardForm, held: Held) -> dict[str, str | int]:
    return {**held.letters(form), "CONSUMERS": f"bq / {ROWS}", "SEEN_BLOCK_KV": "bkv"}


def _refuses(form: Form, widths: Widths, traits: Traits) -> str | None:
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
    KernelId("hopper", "flash_dquery"), "backward", "backward_q", "kv", OVER_KEYS, _stages, programs=of.query_programs,
    read=of.flash_dquery_read, written=of.query_bytes, program=declared(program), refuses=_refuses,
    flops=of.flash_dquery_flops, exps=of.score_count,
    weighs=True, visits_measured=True, lists=("q",), features=(*OF_A_BACKWARD, *SUMS_OF_QUERIES),
)  # fmt: skip
