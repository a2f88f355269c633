"""The backward of target hopper, or the keys' pass of two: programs own keys, and dQ leaves by additions to its sums.

FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608), with five products a pair in one pass.
"""

from __future__ import annotations

from functools import lru_cache, partial

from .....compiler.planning.form import Form
from .....compiler.planning.kernel import QUERIES_AGAIN, Kernel, KernelId
from .....compiler.planning.quantities import (
    ROW_STATISTIC,
    RUNNING,
    Formula,
    Sizes,
    five_products_flops,
    flash_dkey_dvalue_flops,
    flash_dkey_dvalue_read,
    key_programs,
    key_value_gradient_bytes,
    queries_again,
    score_count,
)
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
from ...triton.kernels.backward import OVER_QUERIES
from ..forms import ROWS, HopperBackwardForm
from ..pieces import columns_of, fits_by_rows, places_of_results

HANDSHAKES = 512  # bytes of cards and mbarriers, each aligned to 16


def sums_of_dquery(x: Sizes) -> float:
    """The sums of dQ, float32, of all columns of tiles."""
    return RUNNING * x.B * x.Hq * x.L * x.C


def loaded_sram(x: Sizes) -> float:
    """K and V; Q, dO and the statistics in s slots each; cards and barriers."""
    ahead = x.s * (x.bq * (x.C + x.Cv) * x.e + 2 * x.bq * ROW_STATISTIC)
    return x.bkv * (x.C + x.Cv) * x.e + ahead + HANDSHAKES + shared_dkey_sram(x)


def shared_dkey_sram(x: Sizes) -> float:
    """The gradient of key columns that heads share, float32, on its way out."""
    return x.bkv * x.R * RUNNING


def drawn_sram(x: Sizes) -> float:
    """A bit for each pair of visited tiles, whether it is dropped."""
    return x.s * x.bq * x.bkv / 8


def _written(x: Sizes) -> float:
    """dK and dV once; additions to the sums of dQ at every visit."""
    return key_value_gradient_bytes(x) + queries_again(x) * sums_of_dquery(x)


@lru_cache(maxsize=256)
def _sram(form: Form, one_pass: bool, drawn: bool) -> Formula:
    """What is loaded; of one pass dS twice, and dQ on its way out; by columns P and dS, twice each."""
    assert isinstance(form, HopperBackwardForm)

    def found(x: Sizes) -> float:
        size = loaded_sram(x) + form.pair_bytes * x.s * x.bq * x.bkv
        size += drawn_sram(x) if drawn else 0
        if one_pass:
            size += 2 * x.bq * x.bkv * x.e + x.bq * x.C * RUNNING
            return size + (x.bkv * (x.C + x.Cv) * x.e if form.keys_ahead else 0)
        return size + (4 * x.bq * x.bkv * x.e if form.by_columns else 0)

    return found


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


def _one_pass_refuses(form: Form, widths: Widths, drawn: bool) -> str | None:
    assert isinstance(form, HopperBackwardForm)
    if drawn and (form.block_q != 64 or form.next_scores or form.keys_ahead or form.pair_bytes):
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


def _keys_refuse(form: Form, widths: Widths, drawn: bool) -> str | None:
    assert isinstance(form, HopperBackwardForm)
    if drawn and (form.block_q not in (32, 64) or form.next_scores or form.by_columns):
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


def _one_pass(variant: str = "", drawn: bool = False, stores_first: bool = False) -> Kernel:
    return Kernel(
        KernelId("hopper", "flash_backward", variant), "backward", "backward_kv", "q", OVER_QUERIES,
        partial(_stages, one_pass=True, stores_first=stores_first), programs=key_programs, read=flash_dkey_dvalue_read,
        written=_written, sram_in=partial(_sram, one_pass=True, drawn=drawn),
        refuses=partial(_one_pass_refuses, drawn=drawn), flops=five_products_flops,
        exps=score_count, again=QUERIES_AGAIN, weighs=True, visits_measured=True, lists=("q", "kv"), sums_levels=True,
        has_level_loop=True, drop_work=10.0,
    )  # fmt: skip


def _keys(variant: str = "", drawn: bool = False) -> Kernel:
    return Kernel(
        KernelId("hopper", "flash_dkey_dvalue", variant), "backward", "backward_kv", "q", OVER_QUERIES, _stages,
        programs=key_programs, read=flash_dkey_dvalue_read, written=key_value_gradient_bytes,
        sram_in=partial(_sram, one_pass=False, drawn=drawn), refuses=partial(_keys_refuse, drawn=drawn),
        flops=flash_dkey_dvalue_flops, exps=score_count,
        again=QUERIES_AGAIN, weighs=True, visits_measured=True, lists=("kv",), sums_levels=True, has_level_loop=True,
        drop_work=10.0,
    )  # fmt: skip


FLASH_BACKWARD, DRAWN_BACKWARD = _one_pass(), _one_pass("drawn", drawn=True)  # drawn: where weights are dropped
FIRST_STORED_BACKWARD = _one_pass("first stored", stores_first=True)  # a head's first shares of dQ are stored
FLASH_DKEY_DVALUE, DRAWN_KEYS = _keys(), _keys("drawn", drawn=True)
