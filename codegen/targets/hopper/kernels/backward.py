"""The backward of target hopper, or the keys' pass of two: programs own keys, and dQ leaves by additions to its sums.

FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), with five products a pair in one pass.
"""

from __future__ import annotations

from functools import partial

from .....compiler.analysis.tiles.results import Traits
from .....compiler.planning import quantities as of
from .....compiler.planning.form import Form
from .....compiler.planning.kernel import QUERIES_AGAIN, Kernel, KernelId
from .....compiler.planning.quantities import RUNNING, Sizes
from .....compiler.planning.records import Stage
from .....compiler.planning.signature import Widths
from .....compiler.planning.stage_words import (
    AHEAD,
    EACH_KV,
    EACH_Q,
    KEY_SUMS,
    ONCE,
    Tiles,
    computes,
    keeps,
    key_results,
    loads,
    stores,
    weights_text,
)
from ...gluon.program import HARDWARE_BARRIERS, Program, plain
from ...triton.kernels.backward import OVER_QUERIES
from ..features import OF_A_BACKWARD
from ..forms import ROWS, HopperBackwardForm
from ..held import ROLES, Held, columns_in, declared
from ..pieces import CONSUMERS, columns_of, fits_by_rows, left_parts, part_columns, pieces_of, places_of_results

HANDSHAKES = 512  # bytes of cards and mbarriers, each aligned to 16
DQ_SHARE_BARRIERS = HARDWARE_BARRIERS - CONSUMERS  # the last hardware barriers, by which shares of dQ are handed over


def sums_of_dquery(x: Sizes) -> float:
    """The sums of dQ, float32, of all columns of tiles."""
    return RUNNING * x.B * x.Hq * x.L * x.C


def _written(x: Sizes) -> float:
    """dK and dV once; additions to the sums of dQ at every visit."""
    return of.key_value_gradient_bytes(x) + of.queries_again(x) * sums_of_dquery(x)


# -- the program -------------------------------------------------------------------------------------------------------
def program(form: HopperBackwardForm, held: Held, one_pass: bool) -> Program:
    """A program's keys and values, the ring of what it visits, and what consumers hand to each other."""
    p = Program(
        "flash_backward" if one_pass else "flash_dkey_dvalue", _constants(form, held), held.letters_of_widths,
        besides=HANDSHAKES, spare=512,
        about=f"All shared memory. Tiles keep the [{held.ones}, rows, columns] shape of the TMA boxes.",
    )  # fmt: skip
    _add_tiles(p, form, held)
    _add_exchanged(p, form, held, one_pass)
    if held.drops:
        p.ring("dropped", "STAGES, DRAWERS, BLOCK_KV", dtype="gl.uint32", layout=plain(2),
               about="of each key, words of bits of queries")  # fmt: skip
    p.cards("cards", "CARDS * CARD_FIELDS, 1")
    if form.is_persistent(held.drops):
        p.cards("own_cards", "OWN_CARDS * OWN_CARD_FIELDS, 1")
    _add_mbarriers(p, form, held, one_pass)
    _add_roles(p, form, held, one_pass)
    for ring in ("query", "dout") if form.next_scores or form.by_columns else ("query",):
        p.free(ring, form.stages)
    if one_pass and held.stores_first:
        p.named("DQ_BARRIER", CONSUMERS, meets=("consumer", "sender"), first=DQ_SHARE_BARRIERS)
    return p.check()


def _constants(form: HopperBackwardForm, held: Held) -> dict[str, str | int]:
    tiles = "bkv / 64"
    found = {**held.letters(form), "CONSUMERS": tiles, "KEY_TILES": tiles, "STATISTICS": 4 if held.far else 2}
    found |= {"ROWS": "bkv", "CONSUMERS": CONSUMERS, "KEY_TILES": 1} if form.by_columns else {}
    return {**found, "LINES": lines_of(form, held, "(2 * bkv)"), "DRAWERS": "bq / 32"}


def lines_of(form: HopperBackwardForm, held: Held, divisor: str) -> str | int:
    """Lines of 128 floats of a part of dQ: where a tile is one piece, in letters, of which `divisor` is 256."""
    keys, _ = pieces_of(form, held.widths)
    if len(keys) > 1:
        return part_columns(form, held.widths) // 2
    return f"{held.letters(form)['COLUMNS']} * bq / {divisor}"


def _add_tiles(p: Program, form: HopperBackwardForm, held: Held) -> None:
    """What the producer brings. With two rooms for keys those of the next tile come while consumers have this one."""
    keys, values = (columns_in(pieces) for pieces in pieces_of(form, held.widths))
    rooms = "2 * KEY_TILES" if form.keys_ahead else "KEY_TILES"
    p.ring("key", f"{rooms}, {held.ones}, ROWS", keys)
    p.ring("value", f"{rooms}, {held.ones}, ROWS", values)
    p.ring("query", f"STAGES, {held.ones}, BLOCK_Q", keys)
    p.ring("dout", f"STAGES, {held.ones}, BLOCK_Q", values)
    if held.saves_lse:
        p.ring("statistics", "STAGES, STATISTICS * BLOCK_Q", dtype="gl.float32")
    if form.pair_bytes:
        p.ring(
            "pairs", f"STAGES * CONSUMERS, {_ones_of_box(held)}BLOCK_Q, ROWS", dtype="pairs_desc.dtype",
            element=form.pair_bytes, about="what pairs read, for each consumer",
        )  # fmt: skip


def _ones_of_box(held: Held) -> str:
    return "1, " * (held.box_rank - 2)


STRAIGHT = "gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_Q], dtype)"


def _add_exchanged(p: Program, form: HopperBackwardForm, held: Held, one_pass: bool) -> None:
    """What consumers hand to each other, and what is on its way out."""
    if form.by_columns:
        p.tile("weights", "2, ROWS, BLOCK_Q", layout=STRAIGHT, about="of two tiles in turn")
        if held.wants_dscores:
            p.tile("dscores", "2, ROWS, BLOCK_Q", layout=STRAIGHT)
    elif one_pass:
        rows = f"{_ones_of_box(held)}BLOCK_Q, ROWS" if held.stores_pairs else "ROWS, BLOCK_Q"
        p.tile("dscores", f"2 * CONSUMERS, {rows}", layout="" if held.stores_pairs else STRAIGHT, of="dpairs",
               about="of each consumer, two tiles in turn")  # fmt: skip
        parts = left_parts(form, held.widths)
        p.tile("dquery", f"CONSUMERS, {'LINES' if parts == 1 else f'{parts} * LINES'}, 128", dtype="gl.float32",
               of="dquery_sums", about="a consumer's share on its way out")  # fmt: skip
    last = pieces_of(form, held.widths)[0][-1]
    if last.shared and "rope" in held.wanted:
        p.tile("dkey_shared", f"CONSUMERS, {held.ones}, ROWS, {last.width}", dtype="gl.float32", of=f"dkey{last.box}",
               about="on its way out")  # fmt: skip


def _add_mbarriers(p: Program, form: HopperBackwardForm, held: Held, one_pass: bool) -> None:
    persistent = form.is_persistent(held.drops)
    rooms, many = ("2", " for each of the two rooms") if form.keys_ahead else ("1", "")
    released = dict(number=rooms, arrivals="CONSUMERS", about="one: the next tiles of keys and values may come")
    p.mbarrier("key_ready", rooms, about=f"mbarriers: one{many}")
    p.mbarrier("value_ready", rooms, about="likewise" if many else "one")
    if persistent and form.keys_ahead:
        p.mbarrier("keys_released", **released | {"about": "likewise: the next tiles of keys and values may come"})
    p.mbarrier("query_ready", "STAGES", about="one for each slot")
    p.mbarrier("dout_ready", "STAGES", about="one for each slot")
    if held.drops:
        p.mbarrier("card_ready", "STAGES", about="likewise")
        p.mbarrier("dropped_ready", "STAGES", arrivals="DRAWERS", about="likewise")
    if one_pass and not (persistent and places_of_results(form, held.widths)):
        p.mbarrier("finished", rooms, arrivals="CONSUMERS", about="one: no consumer reads keys any more")
    if persistent and not form.keys_ahead:
        p.mbarrier("keys_released", **released)
    if form.by_columns:
        p.mbarrier("weights_ready", "2", about="one for each of the two tiles")
    if (form.by_columns and held.wants_dscores) or one_pass:
        said = "likewise" if form.by_columns else "one for each of the two tiles"
        p.mbarrier("dscores_ready", "2", arrivals="1" if form.by_columns else "CONSUMERS", about=said)
    if one_pass and held.stores_first:
        p.mbarrier("dq_share_left", "CONSUMERS", about="one for each consumer: its share has left its place")


def _add_roles(p: Program, form: HopperBackwardForm, held: Held, one_pass: bool) -> None:
    rings = list(dict.fromkeys(t.whole for t in p.tiles if t.kind == "ring"))
    brought = [ring for ring in rings if ring != "dropped"]
    of_columns = "_of_columns" if form.by_columns else ""
    computing, others = (232, 40) if held.drops else (240, 24)
    p.role("consumer", warps=4, count=CONSUMERS, registers=computing, empties=rings,
           body=f"{ROLES}/backward_consumer{of_columns}.py.jinja")  # fmt: skip
    p.role("producer", warps=1, registers=others, fills=brought, body=f"{ROLES}/backward_producer.py.jinja")
    if held.drops:
        p.role("drawer", warps=1, count=form.block_q // 32, registers=others, fills=["dropped"], awaits=["query"],
               body=f"{ROLES}/backward_drawer.py.jinja")  # fmt: skip
    if one_pass and held.stores_first:
        p.role("sender", warps=1, count=CONSUMERS, registers=others, body=f"{ROLES}/backward_sender.py.jinja")


# -- words -------------------------------------------------------------------------------------------------------------
def _stages(t: Tiles, one_pass: bool = False, stores_first: bool = False) -> list[Stage]:
    """Of one pass, or of the keys' one of two. A producer warp loads; consumers of ROWS keys compute.

    Where a program has no more keys than one consumer computes, each of two has some of the columns.
    """
    form = t.form
    assert isinstance(form, HopperBackwardForm)
    wants_dscores = one_pass or t.wants_dscores or "level" in t.sums
    consumers = f"{t.kv // ROWS} consumers of {ROWS} keys"
    if t.kv == ROWS:
        consumers = "2 consumers of some columns each"
    own = EACH_KV if form.is_persistent(t.traits.drops) else ONCE
    slot = "into a slot of its ring, by the producer's TMA"
    product = "asynchronous"
    less_delta, weight = (" - delta", "P") if t.traits.normalizer.saves_lse else ("", "P'")
    share = "share of dQ, added to its sums by TMA"
    if stores_first:
        share += " of a warp for each consumer; a head's first one is stored, where its keys are its own"
    stored = form.pair_bytes > 0 and "pair" in t.sums
    shared = "; of columns that heads share, float32 sums of each head or of all" if t.wants_shared_dkey else ""
    bits = "which pairs are dropped, a bit each in SRAM, ahead, by a warp for 32 queries"
    pairs = [loads("pairs", f"tile [{t.q}, {t.kv}] of what each pair reads, as Q", EACH_Q, AHEAD)]
    drawn = [computes("dropped", bits, EACH_Q)] if t.traits.drops else []
    stages = [
        loads("key", t.key(), own),
        loads("value", t.value(), own),
        keeps("dkey", f"{', '.join(f'{x} float32' for x in key_results(t))}, by {consumers}", own),
        loads("query", f"{', '.join([t.query(), *t.saved('lse', 'delta')])}, {slot}", EACH_Q, AHEAD),
        *(pairs if form.pair_bytes else []),
        loads("doutput", f"{t.output('dO')}, {slot}", EACH_Q, AHEAD),
        *drawn,
        computes("scores", f"{t.scores()} = Q K^T, {product}", EACH_Q),
        computes("dweights", f"{t.scores('dP')} = dO V^T{less_delta}, {product}", EACH_Q),
        computes("weights", f"{weights_text(t)}{t.mask_text}", EACH_Q),
        computes("dscores", f"dS = {weight} * {t.kept('dP')}" + ("" if t.traits.linear else " * score'"), EACH_Q),
        *([stores("sums", KEY_SUMS, "query head")] if t.sums & {"column", "level"} else []),
        computes("dvalue", f"dV += {t.kept('P')}^T dO", EACH_Q),
        computes("dquery", f"{t.query('dQ share')} = dS K, with dS from SRAM, where all consumers left it", EACH_Q),
        computes("dkey", "dK += dS^T Q", EACH_Q),
        *(
            [Stage("store pairs", "store", "dS, what pairs read has as its gradient", "SRAM -> HBM", EACH_Q)]
            if stored
            else []
        ),
        Stage("store dquery", "store", share, "registers -> SRAM -> HBM", EACH_Q),
        Stage("store dkey", "store", ", ".join(key_results(t)) + shared, "registers -> SRAM -> HBM", own),
    ]
    left_out = set() if one_pass else {"compute dquery", "store dquery"}
    left_out |= set() if t.wants_dkey else {"compute dkey"}
    left_out |= set() if "value" in t.wanted else {"compute dvalue"}
    left_out |= set() if wants_dscores else {"compute dweights", "compute dscores"}
    left_out |= set() if key_results(t) else {"keep dkey", "store dkey"}
    return [stage for stage in stages if stage.key not in left_out]


KEYS_AHEAD = "keys are brought ahead in one pass, where results leave by the room of shares of dQ"
BOXES = "tiles of what pairs read are brought in one pass, with 64 queries"
_COLUMNS = "sums of 256 columns have no room but by columns"


def _one_pass_refuses(form: Form, widths: Widths, traits: Traits) -> str | None:
    assert isinstance(form, HopperBackwardForm)
    if traits.drops and (form.block_q != 64 or form.next_scores or form.keys_ahead or form.pair_bytes):
        return "with dropout, expected 64 queries, whose bits two warps draw"
    if form.keys_ahead and places_of_results(form, widths) is None:
        return KEYS_AHEAD
    if form.pair_bytes and (form.block_q != 64 or form.next_scores):
        return BOXES
    if form.by_columns:
        return "one pass has no form by columns"
    if max(columns_of(widths)) == 256:
        return _COLUMNS
    if form.block_kv != 128 or form.block_q not in (64, 128) or form.stages not in (2, 3):
        return "expected 64 or 128 queries, 128 keys and 2 or 3 stages"  # dQ's tiles have 64 rows or more
    return _too_few_registers(form, widths)


def _keys_refuse(form: Form, widths: Widths, traits: Traits) -> str | None:
    assert isinstance(form, HopperBackwardForm)
    if traits.drops and (form.block_q not in (32, 64) or form.next_scores or form.by_columns):
        return "with dropout, expected 32 or 64 queries, whose bits a warp draws or two, and 128 keys"
    if form.keys_ahead:
        return KEYS_AHEAD
    if form.pair_bytes:
        return BOXES
    if form.by_columns:
        plain = form.block_q == form.block_kv == 64 and form.stages == 2 and not form.next_scores
        return None if plain else "by columns, expected 64 queries, 64 keys and 2 stages"
    if max(columns_of(widths)) == 256 and not fits_by_rows(widths):
        return _COLUMNS
    if form.block_kv != 128 or form.block_q not in (32, 64, 128) or form.stages != 2:
        return "expected 32, 64 or 128 queries, 128 keys and 2 stages"  # slots of two kernels share hardware barriers
    return _too_few_registers(form, widths)


def _too_few_registers(form: HopperBackwardForm, widths: Widths) -> str | None:
    if (form.block_q == 128 or form.next_scores) and max(columns_of(widths)) > 128:
        return "128 queries, and scores of the next tile, leave too few registers for D 192"
    if form.block_q == 128 and max(columns_of(widths)) > 64:
        return "128 queries leave too few registers for D 128"
    return None


def _one_pass(variant: str = "", stores_first: bool = False) -> Kernel:
    return Kernel(
        KernelId("hopper", "flash_backward", variant), "backward", "backward_kv", "q", OVER_QUERIES,
        partial(_stages, one_pass=True, stores_first=stores_first), programs=of.key_programs,
        read=of.flash_dkey_dvalue_read, written=_written, program=declared(program, one_pass=True),
        refuses=_one_pass_refuses, flops=of.five_products_flops, exps=of.score_count, again=QUERIES_AGAIN, weighs=True,
        visits_measured=True, lists=("q", "kv"), sums_levels=True, has_level_loop=True, drop_work=10.0,
        features=OF_A_BACKWARD,
    )  # fmt: skip


FLASH_BACKWARD = _one_pass()
FIRST_STORED_BACKWARD = _one_pass("first stored", stores_first=True)  # a head's first shares of dQ are stored
FLASH_DKEY_DVALUE = Kernel(
    KernelId("hopper", "flash_dkey_dvalue"), "backward", "backward_kv", "q", OVER_QUERIES, _stages,
    programs=of.key_programs, read=of.flash_dkey_dvalue_read, written=of.key_value_gradient_bytes,
    program=declared(program, one_pass=False), refuses=_keys_refuse, flops=of.flash_dkey_dvalue_flops,
    exps=of.score_count, again=QUERIES_AGAIN, weighs=True, visits_measured=True, lists=("kv",), sums_levels=True,
    has_level_loop=True, drop_work=10.0, features=OF_A_BACKWARD,
)  # fmt: skip
