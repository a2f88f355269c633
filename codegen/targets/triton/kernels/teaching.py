"""Schedules to be compared with flash: the textbook's, and FlashAttention's first (Dao et al., 2022, arXiv 2205.14135).

`standard` stores every score (algorithms 0 and 3); `streaming` keeps keys and sweeps over queries (1 and 4).
"""

from __future__ import annotations

from typing import Any

from .....compiler.analysis.tiles.results import Axis
from .....compiler.planning import quantities as of
from .....compiler.planning.kernel import Again, Kernel, KernelId, Slot, Words
from .....compiler.planning.quantities import ROW_STATISTIC, RUNNING, Sizes
from .....compiler.planning.records import Stage
from .....compiler.planning.signature import Direction
from .....compiler.planning.stage_words import (
    AHEAD,
    EACH_KV,
    EACH_Q,
    IN,
    ONCE,
    Tiles,
    computes,
    dscore,
    keeps,
    key_results,
    loads,
    stores,
)
from ..features import SINK
from .backward import ROW_STATISTICS, ROWS, column_sums, dkey_dvalue_registers, weights_again
from .forward import forward_registers

_ONE_TILE, _ALL_KEYS, _ALL_QUERIES = "nothing: one tile of scores", "all key tiles", "all query tiles"
_SWEEPS = "key tiles, and for each of them the query tiles that see it"


# -- streaming ---------------------------------------------------------------------------------------------------------
def streaming_forward_sram(x: Sizes) -> float:
    """K and V stay; Q is loaded ahead; the running output is in registers while a tile is worked on."""
    return x.owned_in_sram * x.bkv * (x.C + x.Cv) * x.e + x.s * x.bq * x.C * x.e + x.score_bytes * x.bq * x.bkv


def running_output(x: Sizes) -> float:
    """The running output of all rows, float32."""
    return RUNNING * x.B * x.Hq * x.L * x.Dv


def running_gradient(x: Sizes) -> float:
    """The running gradient of the query, float32."""
    return RUNNING * x.B * x.Hq * x.L * x.D


def streaming_forward_read(x: Sizes) -> float:
    """K and V once. At every visit Q, the running output, maximum and sum, and the last three again at the end.

    A running row is there because the program wrote it, so its first read is a repeated one.
    """
    running = of.query_visits(x) * x.k * running_output(x) + (of.query_visits(x) + 1) * x.k * 2 * of.row_bytes(x)
    return of.key_value_bytes(x) + of.queries_again(x) * of.query_bytes(x) + running


def streaming_forward_written(x: Sizes) -> float:
    """The running output at every visit, maximum and sum also before the first one; then the output and lse."""
    running = of.queries_again(x) * running_output(x) + (1 + of.query_visits(x) * x.k) * 2 * of.row_bytes(x)
    return running + of.output_bytes(x) + of.row_bytes(x)


def streaming_backward_sram(x: Sizes) -> float:
    owned = x.owned_in_sram * x.bkv * (x.C + x.Cv) * x.e
    return owned + x.s * x.bq * (x.C + x.Cv) * x.e + 2 * x.score_bytes * x.bq * x.bkv


def streaming_backward_read(x: Sizes) -> float:
    """K and V once; at every visit Q, dO, lse, delta and the running dQ, and that again at the end."""
    again = of.query_bytes(x) + of.output_bytes(x) + running_gradient(x) + 2 * of.row_bytes(x)
    return of.key_value_bytes(x) + of.queries_again(x) * again + x.k * running_gradient(x)


def streaming_backward_written(x: Sizes) -> float:
    """The running dQ as zeros and then at every visit; dQ, dK and dV."""
    return (1 + of.queries_again(x)) * running_gradient(x) + of.query_bytes(x) + of.key_value_gradient_bytes(x)


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
        *weights_again(t, wants_dscores, IN),
        *([computes("dkey", "; ".join(products), EACH_Q)] if products else []),
    ]
    if running:
        stages += [
            loads("running", ", ".join(running), EACH_Q, "HBM -> registers"),
            stores("running", f"{', '.join(running)}, with this tile's share added", EACH_Q),
        ]
    stages += column_sums(t, EACH_KV)
    stages += [stores("dkey", ", ".join(results), EACH_KV)] if results else []
    stages += [stores("dquery", f"{t.query('dQ')}, from the running one", EACH_Q)] if "query" in t.wanted else []
    return stages


def _head_running_gradient(x: Sizes) -> float:
    """Of all query heads of a kv head, since one program works on them."""
    return (x.e * (x.D + x.Dv) + RUNNING * x.D + 2 * ROW_STATISTIC) * x.L * x.Hq / x.Hkv


STREAMING = (
    Kernel(
        KernelId("triton", "streaming_forward"), "forward", "forward", "q", _SWEEPS, _streaming_forward,
        programs=of.head_programs, read=streaming_forward_read, written=streaming_forward_written,
        sram=streaming_forward_sram, flops=of.forward_flops, exps=of.forward_exps,
        again=Again(of.query_visits, lambda x: (x.e * x.D + RUNNING * x.Dv + 2 * ROW_STATISTIC) * x.L),
        registers=forward_registers, weighs=True, features=(SINK,),
    ),
    ROW_STATISTICS,
    Kernel(
        KernelId("triton", "streaming_backward"), "backward", "backward_q", "q", _SWEEPS, _streaming_backward,
        programs=of.kv_head_programs, read=streaming_backward_read, written=streaming_backward_written,
        sram=streaming_backward_sram, flops=of.five_products_flops, exps=of.score_count,
        again=Again(of.query_visits, _head_running_gradient), registers=dkey_dvalue_registers, weighs=True,
    ),
)  # fmt: skip


# -- standard ----------------------------------------------------------------------------------------------------------
def _product_sram(x: Sizes) -> float:
    """Tiles of both factors of a product over columns."""
    return (x.bq + x.bkv) * x.C * x.e


def _weighing_sram(x: Sizes) -> float:
    """A stored tile and a tile of the operand that it multiplies, loaded ahead."""
    return x.s * (x.bq * x.bkv + x.bkv * x.C) * x.e


def _gathering_sram(x: Sizes) -> float:
    """The same where the stored tile is transposed."""
    return x.s * (x.bq * x.bkv + x.bq * x.C) * x.e


def _scores_read(x: Sizes) -> float:
    return of.queries_beside(x) * of.query_bytes(x) + of.keys_again(x) * of.key_bytes(x)


def _value_flops(x: Sizes) -> float:
    """A product over the columns of the value, or into them."""
    return 2 * of.score_count(x) * x.Cv


def _dscores_words(t: Tiles) -> list[Stage]:
    again = [] if t.traits.linear and not t.sums else [loads("query", f"{t.query()}, {t.key()}, for Q K^T again", ONCE)]
    wanted = "query" in t.wanted or t.wants_dkey
    return [
        *again,
        loads("weights", f"{t.scores('P')}, {t.scores('dP')}, {t.rows('delta')}", ONCE, "HBM -> registers"),
        computes("dscores", f"dS = {dscore(t)}", ONCE),
        *([stores("dscores", f"{t.scores('dS')} over dP")] if wanted else []),
        *([stores("sums", "sums of the tile for operands")] if t.sums else []),
    ]


_KEY = Again(of.key_visits, lambda x: x.e * x.T * x.D)
_VALUE = Again(of.key_visits, lambda x: x.e * x.T * x.Du)
_QUERY = Again(of.query_visits, lambda x: x.e * x.L * x.D)
_OUTPUT = Again(of.query_visits, lambda x: x.e * x.L * x.Dv)


def _standard(name: str, slot: Slot, loop: str, words: Words, **formulas: Any) -> Kernel:
    direction: Direction = "forward" if slot == "forward" else "backward"
    axis: Axis = "q" if loop == _ALL_QUERIES else "kv"
    found = {"again": _KEY, **formulas}
    return Kernel(KernelId("triton", f"standard_{name}"), direction, slot, axis, loop, words, visits="all", **found)


STANDARD = (
    _standard(
        "scores", "forward", _ONE_TILE,
        lambda t: [
            loads("query", f"{t.query()}, {t.key()}", ONCE),
            computes("scores", f"{t.scores()} = {t.score_text}; -inf where masked", ONCE),
            stores("scores", t.scores()),
        ],
        programs=of.pair_programs, read=_scores_read, written=of.matrix_bytes, sram=_product_sram,
        flops=of.score_flops,
    ),
    _standard(  # a running sum in the first sweep, two exponentials a score; the weights in the second
        "softmax", "forward", ROWS,
        lambda t: [
            keeps("columns", "a max and a sum of every column of a tile of S"),
            loads("scores", "rows of S, in the first of two sweeps", ONCE, "HBM -> registers"),
            computes("sums", "max and sum of each row, joined from those of the columns", ONCE),
            stores("weights", f"P = exp2(S - max) / sum over S, in the second sweep; lse{t.sink_text}"),
        ],
        features=(SINK,),
        programs=of.query_programs, read=of.matrix_bytes, written=lambda x: of.matrix_bytes(x) + of.row_bytes(x),
        exps=lambda x: 3 * of.score_count(x),
    ),
    _standard(
        "output", "forward", _ALL_KEYS,
        lambda t: [
            keeps("output", f"{t.output('O')} float32"),
            loads("weights", f"{t.scores('P')}, {t.value()}", EACH_KV, AHEAD),
            computes("output", "O += P V", EACH_KV),
            stores("output", t.output("O")),
        ],
        programs=of.query_programs, read=lambda x: of.matrix_bytes(x) + of.keys_again(x) * of.value_bytes(x),
        written=of.output_bytes, sram=_weighing_sram, flops=_value_flops, again=_VALUE,
    ),
    ROW_STATISTICS,
    _standard(
        "weights", "backward_q", _ONE_TILE,
        lambda t: [
            loads("query", f"{t.query()}, {t.key()}, {t.rows('lse')}", ONCE),
            computes("weights", f"{t.scores('P')} = exp2({t.score_text} - lse); 0 where masked", ONCE),
            stores("weights", t.scores("P")),
        ],
        programs=of.pair_programs, read=lambda x: _scores_read(x) + of.queries_beside(x) * of.row_bytes(x),
        written=of.matrix_bytes, sram=_product_sram, flops=of.score_flops, exps=of.score_count,
    ),
    _standard(
        "dvalue", "backward_kv", _ALL_QUERIES,
        lambda t: [
            keeps("dvalue", f"{t.value('dV')} float32"),
            loads("weights", f"{t.scores('P')}, {t.output('dO')}", EACH_Q, AHEAD),
            computes("dvalue", "dV += P^T dO", EACH_Q),
            stores("dvalue", t.value("dV")),
        ],
        programs=of.key_programs, read=lambda x: of.matrix_bytes(x) + of.queries_again(x) * of.output_bytes(x),
        written=of.value_bytes, sram=_gathering_sram, flops=_value_flops, again=_OUTPUT,
    ),
    _standard(
        "dweights", "backward_q", _ONE_TILE,
        lambda t: [
            loads("output", f"{t.output('dO')}, {t.value()}", ONCE),
            computes("dweights", f"{t.scores('dP')} = dO V^T", ONCE),
            stores("dweights", t.scores("dP")),
        ],
        programs=of.pair_programs, written=of.matrix_bytes, sram=_product_sram, flops=_value_flops, again=_VALUE,
        read=lambda x: of.queries_beside(x) * of.output_bytes(x) + of.keys_again(x) * of.value_bytes(x),
    ),
    _standard(  # Q and K again where the score is not linear
        "dscores", "backward_q", _ONE_TILE, _dscores_words, programs=of.pair_programs, written=of.matrix_bytes,
        read=lambda x: 2 * of.matrix_bytes(x) + of.queries_beside(x) * of.row_bytes(x) + x.nonlinear * _scores_read(x),
        sram=lambda x: x.nonlinear * _product_sram(x), flops=lambda x: x.nonlinear * of.score_flops(x),
    ),
    _standard(
        "dquery", "backward_q", _ALL_KEYS,
        lambda t: [
            keeps("dquery", f"{t.query('dQ')} float32"),
            loads("dscores", f"{t.scores('dS')}, {t.key()}", EACH_KV, AHEAD),
            computes("dquery", "dQ += dS K", EACH_KV),
            stores("dquery", t.query("dQ")),
        ],
        programs=of.query_programs, read=lambda x: of.matrix_bytes(x) + of.keys_again(x) * of.key_bytes(x),
        written=of.query_bytes, sram=_weighing_sram, flops=of.score_flops,
    ),
    _standard(
        "dkey", "backward_kv", _ALL_QUERIES,
        lambda t: [
            keeps("dkey", f"{t.key('dK')} float32"),
            loads("dscores", f"{t.scores('dS')}, {t.query()}", EACH_Q, AHEAD),
            computes("dkey", "dK += dS^T Q", EACH_Q),
            stores("dkey", t.key("dK")),
        ],
        programs=of.key_programs, read=lambda x: of.matrix_bytes(x) + of.queries_again(x) * of.query_bytes(x),
        written=of.key_gradient_bytes, sram=_gathering_sram, flops=of.score_flops, again=_QUERY,
    ),
)  # fmt: skip
