"""Schedules to be compared with flash: the textbook's, and FlashAttention's first (Dao et al., 2022, arXiv 2205.14135).

`standard` stores every score (algorithms 0 and 3); `streaming` keeps keys and sweeps over queries (1 and 4).
"""

from __future__ import annotations

from .....compiler.planning.kernel import Again, Kernel, KernelId
from .....compiler.planning.quantities import (
    ROW_STATISTIC,
    RUNNING,
    Sizes,
    five_products_flops,
    forward_exps,
    forward_flops,
    head_programs,
    key_bytes,
    key_gradient_bytes,
    key_programs,
    key_value_bytes,
    key_value_gradient_bytes,
    key_visits,
    keys_again,
    kv_head_programs,
    matrix_bytes,
    output_bytes,
    pair_programs,
    queries_again,
    queries_beside,
    query_bytes,
    query_programs,
    query_visits,
    row_bytes,
    score_count,
    score_flops,
    value_bytes,
)
from .....compiler.planning.records import Stage
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
    running = query_visits(x) * x.k * running_output(x) + (query_visits(x) + 1) * x.k * 2 * row_bytes(x)
    return key_value_bytes(x) + queries_again(x) * query_bytes(x) + running


def streaming_forward_written(x: Sizes) -> float:
    """The running output at every visit, maximum and sum also before the first one; then the output and lse."""
    running = queries_again(x) * running_output(x) + (1 + query_visits(x) * x.k) * 2 * row_bytes(x)
    return running + output_bytes(x) + row_bytes(x)


def streaming_backward_sram(x: Sizes) -> float:
    owned = x.owned_in_sram * x.bkv * (x.C + x.Cv) * x.e
    return owned + x.s * x.bq * (x.C + x.Cv) * x.e + 2 * x.score_bytes * x.bq * x.bkv


def streaming_backward_read(x: Sizes) -> float:
    """K and V once; at every visit Q, dO, lse, delta and the running dQ, and that again at the end."""
    again = query_bytes(x) + output_bytes(x) + running_gradient(x) + 2 * row_bytes(x)
    return key_value_bytes(x) + queries_again(x) * again + x.k * running_gradient(x)


def streaming_backward_written(x: Sizes) -> float:
    """The running dQ as zeros and then at every visit; dQ, dK and dV."""
    return (1 + queries_again(x)) * running_gradient(x) + query_bytes(x) + key_value_gradient_bytes(x)


def product_sram(x: Sizes) -> float:
    """Tiles of both factors of a product over columns."""
    return (x.bq + x.bkv) * x.C * x.e


def weighing_sram(x: Sizes) -> float:
    """A stored tile and a tile of the operand that it multiplies, loaded ahead."""
    return x.s * (x.bq * x.bkv + x.bkv * x.C) * x.e


def gathering_sram(x: Sizes) -> float:
    """The same where the stored tile is transposed."""
    return x.s * (x.bq * x.bkv + x.bq * x.C) * x.e


def standard_scores_read(x: Sizes) -> float:
    return queries_beside(x) * query_bytes(x) + keys_again(x) * key_bytes(x)


def standard_softmax_written(x: Sizes) -> float:
    return matrix_bytes(x) + row_bytes(x)


def standard_softmax_exps(x: Sizes) -> float:
    """A running sum in the first sweep, two a score; the weights in the second."""
    return 3 * score_count(x)


def standard_output_read(x: Sizes) -> float:
    return matrix_bytes(x) + keys_again(x) * value_bytes(x)


def standard_weights_read(x: Sizes) -> float:
    return standard_scores_read(x) + queries_beside(x) * row_bytes(x)


def standard_dvalue_read(x: Sizes) -> float:
    return matrix_bytes(x) + queries_again(x) * output_bytes(x)


def standard_dweights_read(x: Sizes) -> float:
    return queries_beside(x) * output_bytes(x) + keys_again(x) * value_bytes(x)


def standard_dscores_read(x: Sizes) -> float:
    """P, dP and delta; Q and K again where the score is not linear."""
    return 2 * matrix_bytes(x) + queries_beside(x) * row_bytes(x) + x.nonlinear * standard_scores_read(x)


def standard_dquery_read(x: Sizes) -> float:
    return matrix_bytes(x) + keys_again(x) * key_bytes(x)


def standard_dkey_read(x: Sizes) -> float:
    return matrix_bytes(x) + queries_again(x) * query_bytes(x)


def value_flops(x: Sizes) -> float:
    """A product over the columns of the value, or into them."""
    return 2 * score_count(x) * x.Cv


def dscores_sram(x: Sizes) -> float:
    """Q and K, where the score is not linear."""
    return x.nonlinear * product_sram(x)


def dscores_flops(x: Sizes) -> float:
    return x.nonlinear * score_flops(x)


def head_running(x: Sizes) -> float:
    return (x.e * x.D + RUNNING * x.Dv + 2 * ROW_STATISTIC) * x.L


def head_running_gradient(x: Sizes) -> float:
    """Of all query heads of a kv head, since one program works on them."""
    return (x.e * (x.D + x.Dv) + RUNNING * x.D + 2 * ROW_STATISTIC) * x.L * x.Hq / x.Hkv


def one_head_key(x: Sizes) -> float:
    return x.e * x.T * x.D


def one_head_value(x: Sizes) -> float:
    return x.e * x.T * x.Du


def one_head_query(x: Sizes) -> float:
    return x.e * x.L * x.D


def one_head_output(x: Sizes) -> float:
    return x.e * x.L * x.Dv


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


_KEY = Again(key_visits, one_head_key)
_VALUE = Again(key_visits, one_head_value)
_QUERY = Again(query_visits, one_head_query)
_OUTPUT = Again(query_visits, one_head_output)

STREAMING = (
    Kernel(
        KernelId("triton", "streaming_forward"), "forward", "forward", "q", _SWEEPS, _streaming_forward,
        programs=head_programs, read=streaming_forward_read, written=streaming_forward_written,
        sram=streaming_forward_sram, flops=forward_flops, exps=forward_exps,
        again=Again(query_visits, head_running), registers=forward_registers, weighs=True, features=(SINK,),
    ),
    ROW_STATISTICS,
    Kernel(
        KernelId("triton", "streaming_backward"), "backward", "backward_q", "q", _SWEEPS, _streaming_backward,
        programs=kv_head_programs, read=streaming_backward_read, written=streaming_backward_written,
        sram=streaming_backward_sram, flops=five_products_flops, exps=score_count,
        again=Again(query_visits, head_running_gradient), registers=dkey_dvalue_registers, weighs=True,
    ),
)  # fmt: skip
STANDARD = (
    Kernel(
        KernelId("triton", "standard_scores"), "forward", "forward", "kv", _ONE_TILE, _standard_scores,
        programs=pair_programs, read=standard_scores_read, written=matrix_bytes, sram=product_sram,
        flops=score_flops, again=_KEY, visits="all",
    ),
    Kernel(
        KernelId("triton", "standard_softmax"), "forward", "forward", "kv", ROWS, _standard_softmax,
        programs=query_programs, read=matrix_bytes, written=standard_softmax_written, exps=standard_softmax_exps,
        again=_KEY, visits="all", features=(SINK,),
    ),
    Kernel(
        KernelId("triton", "standard_output"), "forward", "forward", "kv", _ALL_KEYS, _standard_output,
        programs=query_programs, read=standard_output_read, written=output_bytes, sram=weighing_sram,
        flops=value_flops, again=_VALUE, visits="all",
    ),
    ROW_STATISTICS,
    Kernel(
        KernelId("triton", "standard_weights"), "backward", "backward_q", "kv", _ONE_TILE, _standard_weights,
        programs=pair_programs, read=standard_weights_read, written=matrix_bytes, sram=product_sram,
        flops=score_flops, exps=score_count, again=_KEY, visits="all",
    ),
    Kernel(
        KernelId("triton", "standard_dvalue"), "backward", "backward_kv", "q", _ALL_QUERIES, _standard_dvalue,
        programs=key_programs, read=standard_dvalue_read, written=value_bytes, sram=gathering_sram,
        flops=value_flops, again=_OUTPUT, visits="all",
    ),
    Kernel(
        KernelId("triton", "standard_dweights"), "backward", "backward_q", "kv", _ONE_TILE, _standard_dweights,
        programs=pair_programs, read=standard_dweights_read, written=matrix_bytes, sram=product_sram,
        flops=value_flops, again=_VALUE, visits="all",
    ),
    Kernel(
        KernelId("triton", "standard_dscores"), "backward", "backward_q", "kv", _ONE_TILE, _standard_dscores,
        programs=pair_programs, read=standard_dscores_read, written=matrix_bytes, sram=dscores_sram,
        flops=dscores_flops, again=_KEY, visits="all",
    ),
    Kernel(
        KernelId("triton", "standard_dquery"), "backward", "backward_q", "kv", _ALL_KEYS, _standard_dquery,
        programs=query_programs, read=standard_dquery_read, written=query_bytes, sram=weighing_sram,
        flops=score_flops, again=_KEY, visits="all",
    ),
    Kernel(
        KernelId("triton", "standard_dkey"), "backward", "backward_kv", "q", _ALL_QUERIES, _standard_dkey,
        programs=key_programs, read=standard_dkey_read, written=key_gradient_bytes, sram=gathering_sram,
        flops=score_flops, again=_QUERY, visits="all",
    ),
)  # fmt: skip
