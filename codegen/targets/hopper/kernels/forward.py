"""The forward of target hopper, persistent and warp-specialised: FlashAttention-3 (arXiv 2407.08608)."""

from __future__ import annotations

from .....compiler.analysis.tiles.results import Traits
from .....compiler.planning import quantities as of
from .....compiler.planning.form import Form
from .....compiler.planning.kernel import DESCALES, Kernel, KernelId
from .....compiler.planning.records import Stage
from .....compiler.planning.signature import Widths
from .....compiler.planning.stage_words import AHEAD, EACH_KV, EACH_Q, ONCE, Tiles, computes, loads
from ...gluon.program import Columns, Program, plain
from ...triton.kernels.forward import OVER_KEYS
from ..forms import ROWS, HopperForm
from ..held import ROLES, Held, columns_in, declared
from ..pieces import columns_of_form, pieces_of

CARDS_AND_BARRIERS = 2048  # bytes that a form must leave to them, and that the sum leaves out


def program(form: HopperForm, held: Held) -> Program:
    """Consumers share the rings of K and V. O leaves by a place of its own, or by the query's."""
    p = Program(
        "flash_forward", _constants(form, held), held.letters_of_widths, spare=CARDS_AND_BARRIERS,
        about=f"All shared memory. Tiles keep the [{held.ones}, rows, columns] shape of the TMA boxes.",
    )  # fmt: skip
    _add_tiles(p, form, held)
    _add_mbarriers(p, form, held)
    _add_roles(p, form, held)
    p.free("key", form.stages)
    p.free("value", form.stages)
    if form.drawers:
        p.named("FIRST_FREE_DROPPED", form.consumers, meets=("consumer", "drawers"))
    return p.check()


def _constants(form: HopperForm, held: Held) -> dict[str, str | int]:
    return {**held.letters(form), "CONSUMERS": f"bq / {ROWS}", "QUERY_BUFFERS": form.query_buffers, "SUM_COLUMNS": 8}


def _add_tiles(p: Program, form: HopperForm, held: Held) -> None:
    pieces, value = columns_in(pieces_of(form, held.widths)[0]), [Columns("VALUE_COLUMNS")]
    element = 1 if form.fp8 else ""
    p.ring("query", f"QUERY_BUFFERS * CONSUMERS, {held.ones}, ROWS", pieces, element=element)
    p.ring("key", f"STAGES, {held.ones}, BLOCK_KV", pieces, element=element)
    if form.fp8:
        p.ring("value", "STAGES, 1, 1, VALUE_COLUMNS", [Columns("BLOCK_KV")], about="columns in rows", element=element)
        swizzled = "gl.NVMMASharedLayout.get_default_for([SUM_COLUMNS, BLOCK_KV], dtype)"
        said = "whose product with weights is their sum"
        p.tile("ones", "SUM_COLUMNS", [Columns("BLOCK_KV")], layout=swizzled, about=said, element=1)
    else:
        p.ring("value", f"STAGES, {held.ones}, BLOCK_KV", value)
    if form.pair_bytes:
        shape = f"STAGES * CONSUMERS, {'1, ' * (held.box_rank - 2)}ROWS, BLOCK_KV"
        said = "what pairs read; slots are those of keys"
        p.ring("pairs", shape, dtype="pairs_desc.dtype", element=form.pair_bytes, about=said)
    if form.drawers:
        said = "words that say which weights are dropped, by the threads that have these"
        p.ring("dropped", "CONSUMERS, BLOCK_KV // 16, 128, 4", dtype="gl.int32", layout=plain(3), about=said)
    place = f"query{pieces[0].name}" if form.output_in_query else ""
    dtype, bytes_of = ("out_desc.dtype", 2) if form.fp8 else ("dtype", "")
    p.tile("out", f"CONSUMERS, {held.ones}, ROWS", value, place=place, dtype=dtype, element=bytes_of)
    p.cards("cards", "CARDS * CARD_FIELDS, 1")


def _add_mbarriers(p: Program, form: HopperForm, held: Held) -> None:
    others = ["drawers'"] * form.drawers + ["value producer's"] * held.paged
    queries, arrivals = "QUERY_BUFFERS * CONSUMERS", f"1 if i % CONSUMERS else {1 + len(others)}" if others else "1"
    why = f"the first consumer's is the {' and the '.join(others)}, too" if others else ""
    p.mbarrier("query_ready", queries, about="mbarriers, one for each buffer above")
    p.mbarrier("query_free", queries, arrivals=arrivals, why=why)
    p.mbarrier("key_ready", "STAGES")
    p.mbarrier("value_ready", "STAGES")
    if form.pair_bytes:
        p.mbarrier("pairs_ready", "STAGES", about="one for each slot")
    if form.drawers:
        p.mbarrier("dropped_ready", "CONSUMERS", about="one for each consumer")


def _add_roles(p: Program, form: HopperForm, held: Held) -> None:
    """Registers of two consumers leave 24 a thread to the others; drawers take some of theirs. Warps that look keys up
    in a table want 32."""
    bringing = 32 if held.paged or form.consumers == 3 else 24
    computing = 160 if form.consumers == 3 else 208 if form.drawers else 240
    boxes = ["pairs"] * (form.pair_bytes > 0)
    p.role("consumer", warps=4, count=form.consumers, registers=computing, body=f"{ROLES}/forward_consumer.py.jinja",
           empties=["query", "key", "value", *boxes, *["dropped"] * form.drawers])  # fmt: skip
    if form.drawers:
        p.role("drawers", warps=4, registers=64 if held.paged else 72, fills=["dropped"],
               body=f"{ROLES}/forward_drawers.py.jinja")  # fmt: skip
    p.role("producer", warps=1, registers=bringing, body=f"{ROLES}/forward_producer.py.jinja",
           fills=["query", "key", *["value"] * (not held.paged), *boxes])  # fmt: skip
    if held.paged:
        # Tiles of keys in blocks: one warp would take longer to issue the copies of K and V than consumers take.
        p.role("value_producer", warps=1, registers=bringing, body=f"{ROLES}/forward_value_producer.py.jinja",
               fills=["value"])  # fmt: skip


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
    if form.fp8:
        where = "on full tiles beside the maxima of this one"
        if t.parts.v_columns > 128:
            where = "64 columns after another, before Q K^T of this one"
        beside = f"P V and P times ones of the tile before, which join O and sum in full precision; {where}"
        weights = "reference raised to the maximum less 8; P = exp2(S - reference) in e4m3, which waits for its V"
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


def _refuses(form: Form, widths: Widths, traits: Traits) -> str | None:
    assert isinstance(form, HopperForm)
    if form.consumers not in (2, 3) or form.block_kv not in (64, 128) or not 2 <= form.stages <= 4:
        return "expected 2 or 3 consumers of 64 rows, 64 or 128 keys and 2 to 4 stages"
    if form.query_buffers not in (1, 2):
        return "expected 1 or 2 query buffers"
    columns, value_columns = columns_of_form(form, widths)
    left = pieces_of(form, widths)[0][0].columns
    if form.drawers and not traits.drops:
        return "no weights are dropped"
    if form.fp8 and (reason := _refuses_fp8(form)):
        return reason
    if (form.lazy_rescale or form.pair_maximum) and not traits.normalizer.saves_lse:
        return "rows have no maximum"
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


def _refuses_fp8(form: HopperForm) -> str | None:
    """Two sums of a tile of output, and the tile of scores, take most registers; weights want the true maximum."""
    if form.consumers != 2:
        return "FP8 products want 2 consumers"
    if form.lazy_rescale:
        return "FP8 weights have no room above the maximum of a row"
    if form.query_in_registers or form.output_in_query or form.pair_bytes or form.drawers:
        return "FP8 products take queries from SRAM, have a place for the output, and bring nothing of pairs"
    return None


FLASH_FORWARD = Kernel(
    KernelId("hopper", "flash_forward"), "forward", "forward", "kv", OVER_KEYS, _stages, programs=of.query_programs,
    read=of.flash_forward_read, written=of.flash_forward_written, program=declared(program), refuses=_refuses,
    flops=of.forward_flops, exps=of.forward_exps,
    weighs=True, visits_measured=True, lists=("q",), options=DESCALES,
)  # fmt: skip


# -- values by columns, for FP8 products -------------------------------------------------------------------------------
TURNED_KEYS = 128  # of a program: its rows in the result are whole lines of memory


def turning_warps(value_columns: int) -> int:
    """Of a program: more columns would not fit the registers of four."""
    return 8 if value_columns == 256 else 4


def _turning_stages(t: Tiles) -> list[Stage]:
    order = "columns in rows, keys in the order in which a consumer holds weights"
    return [
        loads("tile", f"[{TURNED_KEYS}, Dv] of V", ONCE, "HBM -> registers"),
        Stage("store columns", "store", f"[Dv, {TURNED_KEYS}] of V: {order}", "registers -> SRAM -> HBM", ONCE),
    ]


TURN_VALUES = Kernel(
    KernelId("hopper", "turn_values"), "forward", "forward", "kv", OVER_KEYS, _turning_stages,
    programs=lambda x: x.B * x.Hkv * x.T / TURNED_KEYS, read=of.value_bytes, written=of.value_bytes,
    follows=FLASH_FORWARD.name, visits="none",
)  # fmt: skip
