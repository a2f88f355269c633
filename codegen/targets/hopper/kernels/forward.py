"""The forward of target hopper, persistent and warp-specialised: FlashAttention-3 (arXiv 2407.08608)."""

from __future__ import annotations

from functools import lru_cache

from .....compiler.planning.form import Form
from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import (
    Formula,
    Sizes,
    flash_forward_read,
    flash_forward_written,
    forward_exps,
    forward_flops,
    query_programs,
)
from .....compiler.planning.records import Stage
from .....compiler.planning.signature import Widths
from .....compiler.planning.stage_words import AHEAD, EACH_KV, EACH_Q, Tiles, computes, loads
from ...triton.kernels.forward import OVER_KEYS
from ..forms import ROWS, HopperForm
from ..pieces import columns_of_form, pieces_of


@lru_cache(maxsize=256)
def _sram(form: Form) -> Formula:
    """Q, K and V in s slots each, and O on its way out; barriers add less than 1 KiB."""
    assert isinstance(form, HopperForm)
    queries, outputs = form.query_buffers, 0 if form.output_in_query else 1
    drawn = 2 * form.drawers  # half a word for each weight of a tile: whether it is kept

    def found(x: Sizes) -> float:
        tiles = x.e * (queries * x.bq * x.C + x.s * x.bkv * (x.C + x.Cv) + outputs * x.bq * x.Cv)
        return tiles + drawn * x.bq * x.bkv + form.pair_bytes * x.s * x.bq * x.bkv

    return found


def _stages(t: Tiles) -> list[Stage]:
    """A persistent program: one producer warp loads, warpgroups of ROWS rows compute."""
    form = t.form
    assert isinstance(form, HopperForm)
    consumers = f"{t.q // ROWS} consumers of {ROWS} rows"
    order = ", the longest first" if t.traits.masked else ""
    slot = "into a slot of its ring, by a producer's TMA"
    sums = f"{t.output('O')} float32, {t.rows('reference')}, {t.rows('sum')}, by {consumers}"
    beside = f"O += {t.kept('P')} V of the tile before; on full tiles beside the softmax of this one"
    weights = (
        "reference raised to the maximum, or a little less; P = exp2(S - reference), which waits in registers for its "
        "V; sum and O rescaled"
    )
    results = f"{t.output('O / sum')} by TMA, {t.rows('lse = reference + log(sum)')}{t.sink_text}"
    if not t.traits.normalizer.saves_lse:
        sums = f"{t.output('O')} float32, by {consumers}"
        beside = "O += P V of the tile before; on full tiles beside the weights of this one"
        weights = f"{t.weights()}, which waits in registers for its V"
        results = f"{t.output('O')} by TMA"
    pairs = [loads("pairs", f"tile [{t.q}, {t.kv}] of what each pair reads, as K", EACH_KV, AHEAD)]
    bits = "which weights are dropped, half a word each in SRAM, ahead, by a warpgroup of its own"
    drawn = [computes("dropped", bits, EACH_KV)] if form.drawers else []
    return [
        loads("work", f"number of the next query tile, from an atomic counter{order}", EACH_Q, "HBM -> registers"),
        loads("query", f"{t.query()}, for {consumers}", EACH_Q, AHEAD),
        Stage("keep sums", "keep", sums, "registers", EACH_Q),
        *(pairs if form.pair_bytes else []),
        loads("key", f"{t.key()}, {slot}", EACH_KV, AHEAD),
        loads("value", f"{t.value()}, {slot}", EACH_KV, AHEAD),
        *drawn,
        computes("scores", f"{t.scores()} = {t.score_text}, asynchronous{t.mask_text}", EACH_KV),
        computes("output", beside, EACH_KV),
        computes("weights", weights, EACH_KV),
        Stage("store output", "store", results, "registers -> SRAM -> HBM", EACH_Q),
    ]


def _refuses(form: Form, widths: Widths) -> str | None:
    assert isinstance(form, HopperForm)
    if form.consumers not in (2, 3) or form.block_kv not in (64, 128) or not 2 <= form.stages <= 4:
        return "expected 2 or 3 consumers of 64 rows, 64 or 128 keys and 2 to 4 stages"
    if form.query_buffers not in (1, 2):
        return "expected 1 or 2 query buffers"
    columns, value_columns = columns_of_form(form, widths)
    left = pieces_of(form, widths)[0][0].columns
    if form.drawers and (form.consumers == 3 or form.stages > 3):
        return "drawers leave registers to 2 consumers, and hardware barriers to 3 stages"
    if form.consumers == 3 and value_columns > 64:
        return "three consumers have too few registers for D 128"
    if form.output_in_query and (form.query_buffers != 1 or left != value_columns or form.query_in_registers):
        return "the output takes the place of one query tile in SRAM, of as many columns"
    if value_columns == 256 and form.block_kv > 64:
        return "128 keys leave too few registers for Dv 256"
    if columns > 128 and form.query_in_registers:
        return "more than 128 columns of a query leave too few registers"
    return None


FLASH_FORWARD = Kernel(
    KernelId("hopper", "flash_forward"), "forward", "forward", "kv", OVER_KEYS, _stages, programs=query_programs,
    read=flash_forward_read, written=flash_forward_written, sram_in=_sram, refuses=_refuses,
    flops=forward_flops, exps=forward_exps,
    weighs=True, visits_measured=True, lists=("q",),
)  # fmt: skip
