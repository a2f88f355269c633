"""Stages of the kernels of family hopper, whose steps differ from those of the portable ones."""

from __future__ import annotations

from .forms import ROWS_OF_A_WARPGROUP
from .records import Stage
from .steps import (
    AHEAD,
    EACH_KV,
    EACH_Q,
    KEY_SUMS,
    ONCE,
    Tiles,
    computes,
    dscore,
    error_of_delta,
    keeps,
    key_results,
    loads,
    row_statistics,
    sink_sums,
    stores,
    weights_text,
)


def hopper_flash_forward(t: Tiles) -> list[Stage]:
    """A persistent program: one producer warp loads, warpgroups of ROWS_OF_A_WARPGROUP rows compute."""
    consumers = f"{t.q // ROWS_OF_A_WARPGROUP} consumers of {ROWS_OF_A_WARPGROUP} rows"
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
    pairs = [loads("pairs", f"tile [{t.q}, {t.kv}] of what each pair reads, as K", EACH_KV, AHEAD)] if t.boxes else []
    bits = "which weights are dropped, half a word each in SRAM, ahead, by a warpgroup of its own"
    drawn = [computes("dropped", bits, EACH_KV)] if t.drawers else []
    return [
        loads("work", f"number of the next query tile, from an atomic counter{order}", EACH_Q, "HBM -> registers"),
        loads("query", f"{t.query()}, for {consumers}", EACH_Q, AHEAD),
        Stage("keep sums", "keep", sums, "registers", EACH_Q),
        *pairs,
        loads("key", f"{t.key()}, {slot}", EACH_KV, AHEAD),
        loads("value", f"{t.value()}, {slot}", EACH_KV, AHEAD),
        *drawn,
        computes("scores", f"{t.scores()} = {t.score_text}, asynchronous{t.mask_text}", EACH_KV),
        computes("output", beside, EACH_KV),
        computes("weights", weights, EACH_KV),
        Stage("store output", "store", results, "registers -> SRAM -> HBM", EACH_Q),
    ]


def hopper_split_forward(t: Tiles) -> list[Stage]:
    """Of latent caches: a producer warp loads, one warpgroup finds weights, two sum values."""
    rows = f"{t.query()}, rows of all queries and heads that share the keys; half stays in SRAM, half in registers"
    rotary = "; P = exp2(S - reference) takes the place of the rotary columns"
    weights = f"reference raised to the maximum, or a little less{rotary}"
    parts = f"{t.output('O / sum')}, {t.rows('lse = reference + log(sum)')}; of one part of several in float32"
    early = "+prefetch: to L2 two tiles before, where tiles of rows of few queries share them"
    later = "+ordered: after the next tile's scores, where tiles of rows share keys"
    return [
        loads("query", rows, "part of a sequence", AHEAD),
        loads("key", f"{t.key()}, in pieces, used as V too; {early}", EACH_KV, AHEAD),
        computes("scores", f"{t.scores()} = {t.score_text}, asynchronous{t.mask_text}", EACH_KV),
        computes("weights", weights, EACH_KV),
        Stage(
            "keep sums",
            "keep",
            f"{t.output('O')} float32, half of the columns a warpgroup",
            "registers",
            "part of a sequence",
        ),
        computes(
            "output", f"sums rescaled where a row's reference moved; O += P V, beside the softmax; {later}", EACH_KV
        ),
        stores("output", parts, "part of a sequence"),
    ]


def hopper_row_statistics(t: Tiles) -> list[Stage]:
    """As of the portable kernels, and in one pass zeros for what the main kernel adds to."""
    load, compute, *_ = row_statistics(t)
    where = ", where query heads share keys" if t.stores_first else ""
    zeros = Stage("store zeros", "store", f"{t.query('zeros for sums of dQ')} float32{where}", "SRAM -> HBM", ONCE)
    return [
        load,
        *([zeros] if t.one_pass else []),
        compute,
        stores("statistics", "-delta and -lse in base 2, of these rows, as products start from them"),
        *([stores("rows", "delta and lse in base 2, as flash_ddiagonals reads them")] if "diagonal" in t.sums else []),
        *sink_sums(t, ragged=t.ragged),
    ]


def hopper_flash_backward(t: Tiles) -> list[Stage]:
    """Of one pass, or of the keys' one of two. A producer warp loads; consumers of ROWS_OF_A_WARPGROUP keys compute.

    Where a program has no more keys than one consumer computes, each of two has some of the columns.
    """
    wants_dscores = t.one_pass or t.wants_dscores or "level" in t.sums
    consumers = f"{t.kv // ROWS_OF_A_WARPGROUP} consumers of {ROWS_OF_A_WARPGROUP} keys"
    if t.kv == ROWS_OF_A_WARPGROUP:
        consumers = "2 consumers of some columns each"
    own = EACH_KV if t.persistent else ONCE
    slot = "into a slot of its ring, by the producer's TMA"
    product = "asynchronous"
    less_delta, weight = (" - delta", "P") if t.traits.normalizer.saves_lse else ("", "P'")
    share = "share of dQ, added to its sums by TMA"
    if t.stores_first:
        share += " of a warp for each consumer; a head's first one is stored, where its keys are its own"
    stored = t.boxes and "pair" in t.sums
    shared = "; of columns that heads share, float32 sums of each head or of all" if t.wants_shared_dkey else ""
    bits = "which pairs are dropped, a bit each in SRAM, ahead, by a warp for 32 queries"
    drawn = [computes("dropped", bits, EACH_Q)] if t.traits.drops else []
    stages = [
        loads("key", t.key(), own),
        loads("value", t.value(), own),
        keeps("dkey", f"{', '.join(f'{x} float32' for x in key_results(t))}, by {consumers}", own),
        loads("query", f"{', '.join([t.query(), *t.saved('lse', 'delta')])}, {slot}", EACH_Q, AHEAD),
        *([loads("pairs", f"tile [{t.q}, {t.kv}] of what each pair reads, as Q", EACH_Q, AHEAD)] if t.boxes else []),
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
    left_out = set() if t.one_pass else {"compute dquery", "store dquery"}
    left_out |= set() if t.wants_dkey else {"compute dkey"}
    left_out |= set() if "value" in t.wanted else {"compute dvalue"}
    left_out |= set() if wants_dscores else {"compute dweights", "compute dscores"}
    left_out |= set() if key_results(t) else {"keep dkey", "store dkey"}
    return [stage for stage in stages if stage.key not in left_out]


def hopper_flash_dquery(t: Tiles) -> list[Stage]:
    """A producer warp loads; two consumers of ROWS_OF_A_WARPGROUP queries compute."""
    consumers = f"{t.q // ROWS_OF_A_WARPGROUP} consumers of {ROWS_OF_A_WARPGROUP} rows"
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


def round_dquery(t: Tiles) -> list[Stage]:
    return [
        loads("sums", f"{t.query('sums of dQ')} float32", ONCE),
        computes(
            "dquery", "rows from the order of registers" + (", times the factor" if t.traits.linear else ""), ONCE
        ),
        Stage("store dquery", "store", t.query("dQ"), "registers -> SRAM -> HBM", ONCE),
    ]
