"""What each kernel loads, keeps, computes and stores, in words: printed by `explain`, and in the kernels themselves.

Every stage has a key. A template prints the words of a stage as the comment over the code that does it, by
`{{ stage("flash_forward", "load query") }}`, and places each stage of its kernels exactly once, which codegen checks.
A kernel whose steps differ in a family of templates has an entry of its own, `("hopper", "flash_forward")`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ir.errors import InternalError
from .records import Stage
from .stages_cpu import cpu_backward, cpu_forward
from .stages_hopper import (
    hopper_flash_backward,
    hopper_flash_dquery,
    hopper_flash_forward,
    hopper_row_statistics,
    hopper_split_forward,
    round_dquery,
)
from .stages_measures import (
    distance_tables,
    key_work,
    kv_ends,
    kv_lists,
    kv_long_spans,
    kv_spans,
    pair_cells,
    q_ends,
    q_lists,
    q_long_spans,
    q_spans,
    query_work,
)
from .steps import (
    AHEAD,
    EACH_KV,
    EACH_Q,
    IN,
    ONCE,
    Tiles,
    columns,
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


def stages_of(family: str, kernel: str, tiles: Tiles) -> tuple[Stage, ...]:
    """What a program of a kernel loads, keeps, computes and stores, in order."""
    words = _STAGES.get((family, kernel)) or _STAGES.get(("", kernel))
    if words is None:
        raise InternalError(f"stages: no words for kernel {kernel} of family {family}")
    return tuple(words(tiles))


def _flash_forward(t: Tiles) -> list[Stage]:
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


def _split_forward(t: Tiles) -> list[Stage]:
    """As of flash, of a part of the keys and of rows of all heads that share them."""
    found = {stage.key: stage for stage in _flash_forward(t)}
    rows = f"Q tile [up to {t.q}, {columns(t.parts.qk)}], rows of all queries and heads that share the keys"
    parts = f"{t.results}; of one part of several: O / sum and lse, float32"
    return [
        loads("query", rows, ONCE),
        *(found[key] for key in found if key not in ("load query", "store output")),
        stores("output", parts),
    ]


def _join_parts(t: Tiles) -> list[Stage]:
    return [
        loads("parts", "O and lse of each part of the row's keys, float32", ONCE, "HBM -> registers"),
        computes("output", "O = sum(O of a part * exp(its lse - max)), and of these factors the sum", ONCE),
        stores("output", f"O / sum, lse = max + log(sum){t.sink_text}"),
    ]


_LEVEL_SUMS = "sums of dload over tiles whose pairs all read one entry, at either end of the distances; the entries"


def _flash_dquery(t: Tiles) -> list[Stage]:
    result = [t.query("dQ")] if "query" in t.wanted else []
    sums = ["sums for operands"] if not result and t.sums & {"total", "row"} else []
    product = [computes("dquery", "dQ += dS K", EACH_KV)] if result else []
    stored = [stores("pairs", f"dload = {_dload(t)}, to the entries that the tile read", EACH_KV)]
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


def _pair_sums(t: Tiles, per: str, store: str) -> list[Stage]:
    """P and dS of tiles of pairs once more, for what is summed over heads or along a diagonal."""
    return [
        keeps("sums", f"{t.scores('sums for operands')} float32"),
        loads("query", ", ".join([t.query(), t.output("dO"), *t.saved("lse", "delta")]), per, AHEAD),
        loads("key", f"{t.key()}, {t.value()}", per, AHEAD),
        computes("scores", f"{t.scores()} = Q K^T", per),
        computes("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", per),
        computes("weights", weights_text(t), per),
        computes("dscores", f"dload = {_dload(t)}{t.mask_text}", per),
        stores("sums", store),
    ]


def _dload(t: Tiles) -> str:
    dscore = "P * (dP - delta)" if t.traits.normalizer.saves_lse else "P' * dP"
    return f"{dscore} * d score / d read"


def _flash_dpairs(t: Tiles) -> list[Stage]:
    return _pair_sums(t, "head", "sums of the tile, to the entries that were read")


def _flash_ddiagonals(t: Tiles) -> list[Stage]:
    per = "tile of a diagonal whose pairs do not all read one entry" if "level" in t.sums else "tile of the diagonal"
    return _pair_sums(t, per, "a sum for each diagonal of the tile, and the entry that it read")


def _flash_dkey_dvalue(t: Tiles) -> list[Stage]:
    results = key_results(t)
    dvalue = [computes("dvalue", f"dV += {t.kept('P')}^T dO", EACH_Q)] if "value" in t.wanted else []
    dkey = [computes("dkey", "dK += dS^T Q", EACH_Q)] if t.wants_dkey else []
    return [
        loads("key", f"{t.key()}, {t.value()}" if t.wants_dscores else t.key(), ONCE),
        *([keeps("dkey", ", ".join(f"{x} float32" for x in results))] if results else []),
        *_weights_again(t, t.wants_dscores, AHEAD),
        *dvalue,
        *dkey,
        *_column_sums(t, ONCE),
        *([stores("dkey", ", ".join(results))] if results else []),
    ]


def _column_sums(t: Tiles, per: str) -> list[Stage]:
    return [stores("sums", f"sums for operands, one a key [{t.kv}]", per)] if "column" in t.sums else []


def _weights_again(t: Tiles, wants_dscores: bool, moves: str) -> list[Stage]:
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


def _streaming_forward(t: Tiles) -> list[Stage]:
    value = "" if t.parts.value_is_key else f", {t.value()}"
    running = f"running {t.output('O')} float32, {t.rows('max')}, {t.rows('sum')}"
    return [
        loads("key", f"{t.key()}{value}", EACH_KV),
        loads("query", t.query(), EACH_Q),
        computes("scores", f"{t.scores()} = {t.score_text}{t.mask_text}", EACH_Q),
        loads("running", running, EACH_Q, "HBM -> registers"),
        computes("weights", "new max; P = exp2(S - max); sum and O rescaled; O += P V", EACH_Q),
        stores("running", running, EACH_Q),
        stores("output", f"{t.output('O / sum')}, {t.rows('lse')}, from the running values{t.sink_text}", EACH_Q),
    ]


def _streaming_backward(t: Tiles) -> list[Stage]:
    results = key_results(t)
    running = [f"running {t.query('dQ')} float32"] if "query" in t.wanted else []
    running += ["running sums for operands"] if not running and t.sums - {"column"} else []
    wants_dscores = bool(t.wants_dscores or running)
    products = (["dV += P^T dO"] if "value" in t.wanted else []) + (["dK += dS^T Q"] if t.wants_dkey else [])
    stages = [
        loads("key", f"{t.key()}, {t.value()}" if wants_dscores else t.key(), EACH_KV),
        *([keeps("dkey", ", ".join(f"{x} float32" for x in results), EACH_KV)] if results else []),
        *_weights_again(t, wants_dscores, IN),
        *([computes("dkey", "; ".join(products), EACH_Q)] if products else []),
    ]
    if running:
        stages += [
            loads("running", ", ".join(running), EACH_Q, "HBM -> registers"),
            stores("running", f"{', '.join(running)}, with this tile's share added", EACH_Q),
        ]
    stages += _column_sums(t, EACH_KV)
    stages += [stores("dkey", ", ".join(results), EACH_KV)] if results else []
    stages += [stores("dquery", f"{t.query('dQ')}, from the running one", EACH_Q)] if "query" in t.wanted else []
    return stages


def _standard_scores(t: Tiles) -> list[Stage]:
    return [
        loads("query", f"{t.query()}, {t.key()}", ONCE),
        computes("scores", f"{t.scores()} = {t.score_text}; -inf where masked", ONCE),
        stores("scores", t.scores()),
    ]


def _standard_softmax(t: Tiles) -> list[Stage]:
    return [
        keeps("columns", "a max and a sum of every column of a tile of S"),
        loads("scores", "rows of S, in the first of two sweeps", ONCE, "HBM -> registers"),
        computes("sums", "max and sum of each row, joined from those of the columns", ONCE),
        stores("weights", f"P = exp2(S - max) / sum over S, in the second sweep; lse{t.sink_text}"),
    ]


def _standard_output(t: Tiles) -> list[Stage]:
    return [
        keeps("output", f"{t.output('O')} float32"),
        loads("weights", f"{t.scores('P')}, {t.value()}", EACH_KV, AHEAD),
        computes("output", "O += P V", EACH_KV),
        stores("output", t.output("O")),
    ]


def _standard_weights(t: Tiles) -> list[Stage]:
    return [
        loads("query", f"{t.query()}, {t.key()}, {t.rows('lse')}", ONCE),
        computes("weights", f"{t.scores('P')} = exp2({t.score_text} - lse); 0 where masked", ONCE),
        stores("weights", t.scores("P")),
    ]


def _standard_dvalue(t: Tiles) -> list[Stage]:
    return [
        keeps("dvalue", f"{t.value('dV')} float32"),
        loads("weights", f"{t.scores('P')}, {t.output('dO')}", EACH_Q, AHEAD),
        computes("dvalue", "dV += P^T dO", EACH_Q),
        stores("dvalue", t.value("dV")),
    ]


def _standard_dweights(t: Tiles) -> list[Stage]:
    return [
        loads("output", f"{t.output('dO')}, {t.value()}", ONCE),
        computes("dweights", f"{t.scores('dP')} = dO V^T", ONCE),
        stores("dweights", t.scores("dP")),
    ]


def _standard_dscores(t: Tiles) -> list[Stage]:
    again = [] if t.traits.linear and not t.sums else [loads("query", f"{t.query()}, {t.key()}, for Q K^T again", ONCE)]
    wanted = "query" in t.wanted or t.wants_dkey
    return [
        *again,
        loads("weights", f"{t.scores('P')}, {t.scores('dP')}, {t.rows('delta')}", ONCE, "HBM -> registers"),
        computes("dscores", f"dS = {dscore(t)}", ONCE),
        *([stores("dscores", f"{t.scores('dS')} over dP")] if wanted else []),
        *([stores("sums", "sums of the tile for operands")] if t.sums else []),
    ]


def _standard_dquery(t: Tiles) -> list[Stage]:
    return [
        keeps("dquery", f"{t.query('dQ')} float32"),
        loads("dscores", f"{t.scores('dS')}, {t.key()}", EACH_KV, AHEAD),
        computes("dquery", "dQ += dS K", EACH_KV),
        stores("dquery", t.query("dQ")),
    ]


def _standard_dkey(t: Tiles) -> list[Stage]:
    return [
        keeps("dkey", f"{t.key('dK')} float32"),
        loads("dscores", f"{t.scores('dS')}, {t.query()}", EACH_Q, AHEAD),
        computes("dkey", "dK += dS^T Q", EACH_Q),
        stores("dkey", t.key("dK")),
    ]


_STAGES: dict[tuple[str, str], Callable[[Tiles], list[Stage]]] = {
    ("cpu", "flash_forward"): cpu_forward,
    ("cpu", "flash_backward"): cpu_backward,
    ("", "kv_spans"): kv_spans,
    ("", "q_spans"): q_spans,
    ("", "kv_long_spans"): kv_long_spans,
    ("", "q_long_spans"): q_long_spans,
    ("", "kv_ends"): kv_ends,
    ("", "q_ends"): q_ends,
    ("", "kv_lists"): kv_lists,
    ("", "q_lists"): q_lists,
    ("", "pair_cells"): pair_cells,
    ("", "distance_tables"): distance_tables,
    ("", "query_work"): query_work,
    ("", "key_work"): key_work,
    ("", "flash_forward"): _flash_forward,
    ("", "split_forward"): _split_forward,
    ("", "join_parts"): _join_parts,
    ("hopper", "flash_forward"): hopper_flash_forward,
    ("hopper", "split_forward"): hopper_split_forward,
    ("", "row_statistics"): row_statistics,
    ("hopper", "row_statistics"): hopper_row_statistics,
    ("hopper", "flash_backward"): hopper_flash_backward,
    ("hopper", "flash_dkey_dvalue"): hopper_flash_backward,
    ("hopper", "flash_dquery"): hopper_flash_dquery,
    ("hopper", "round_dquery"): round_dquery,
    ("", "flash_dquery"): _flash_dquery,
    ("", "flash_dkey_dvalue"): _flash_dkey_dvalue,
    ("", "flash_dpairs"): _flash_dpairs,
    ("", "flash_ddiagonals"): _flash_ddiagonals,
    ("", "streaming_forward"): _streaming_forward,
    ("", "streaming_backward"): _streaming_backward,
    ("", "standard_scores"): _standard_scores,
    ("", "standard_softmax"): _standard_softmax,
    ("", "standard_output"): _standard_output,
    ("", "standard_weights"): _standard_weights,
    ("", "standard_dvalue"): _standard_dvalue,
    ("", "standard_dweights"): _standard_dweights,
    ("", "standard_dscores"): _standard_dscores,
    ("", "standard_dquery"): _standard_dquery,
    ("", "standard_dkey"): _standard_dkey,
}
