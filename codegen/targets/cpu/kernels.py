"""The kernels of target cpu: whole passes of torch, in cache; queries outer in both directions, one backward pass."""

from __future__ import annotations

from ....compiler.planning import quantities as of
from ....compiler.planning.kernel import DESCALES, Kernel, KernelId
from ....compiler.planning.quantities import RUNNING, Sizes
from ....compiler.planning.records import Stage
from ....compiler.planning.stage_words import EACH_KV, EACH_Q, SINK_SUMS, Tiles, computes, dscore, error_of_delta

_RAM, _CACHE = "RAM -> cache", "cache -> RAM"
_OVER_KEYS = "the key tiles that its queries see"


def key_value_sums(x: Sizes) -> float:
    """The running gradients of key and value, float32."""
    return RUNNING * x.B * x.Hkv * x.T * (x.D + x.Du)


def cpu_backward_read(x: Sizes) -> float:
    """Q, O, dO and the statistics once; K, V and the sums of their gradients at every visit."""
    rows = of.query_bytes(x) + 2 * of.output_bytes(x) + of.row_bytes(x)
    return rows + of.keys_again(x) * (of.key_value_bytes(x) + key_value_sums(x))


def cpu_backward_written(x: Sizes) -> float:
    """dQ once; the sums at every visit, then dK and dV from them."""
    return of.query_bytes(x) + of.keys_again(x) * key_value_sums(x) + of.key_value_gradient_bytes(x)


def _forward_stages(t: Tiles) -> list[Stage]:
    """Calls of torch: every stage is done for all heads of a chunk at once."""
    value = "the first columns of the K tile" if t.parts.value_is_key else f"{t.value()}, a view"
    return [
        Stage("load query", "load", f"{t.query()} of each head of the chunk{_scaled(t)}", _RAM, EACH_Q),
        Stage("keep sums", "keep", ", ".join([t.output("O"), *t.running]), "cache", EACH_Q),
        Stage("load key", "load", f"{t.key()}, a view", _RAM, EACH_KV),
        computes("scores", f"{t.scores()} = {_cpu_score(t)}{t.mask_text}", EACH_KV),
        Stage("load value", "load", value, _RAM, EACH_KV),
        computes("output", f"{t.weights(' over S')}; O += {t.kept('P')} V", EACH_KV),
        Stage("store output", "store", t.results, _CACHE, EACH_Q),
    ]


def _backward_stages(t: Tiles) -> list[Stage]:
    """The wanted gradients in one pass: of five matrix products a tile, those that they need."""
    rows = ", ".join([f"{t.query()}{_scaled(t)}", t.output("dO"), *t.saved("lse")])
    saves_lse = t.traits.normalizer.saves_lse
    stages = [
        Stage("load query", "load", f"{rows} of each head of the chunk", _RAM, EACH_Q),
        computes("delta", "delta = rowsum(O * dO) - dlse", EACH_Q),
        Stage("store sinks", "store", SINK_SUMS, _CACHE, EACH_Q),
        Stage("keep dquery", "keep", t.query("dQ"), "cache", EACH_Q),
        Stage("load key", "load", f"{t.key()}, a view", _RAM, EACH_KV),
        computes("scores", f"{t.scores()} = {_cpu_score(t)}{t.mask_text}", EACH_KV),
        computes("weights", "P = exp2(S - lse) over S" if saves_lse else t.weights(), EACH_KV),
        Stage("store dvalue", "store", f"dV += {t.kept('P')}^T dO, rows of the result", _CACHE, EACH_KV),
        Stage("load value", "load", f"{t.value()}, a view", _RAM, EACH_KV),
        computes("dscores", f"dS = {dscore(t)}, with dP = {t.kept('dO V^T')}", EACH_KV),
        Stage("store sums", "store", "gradients of reads of operands, summed over the tile", _CACHE, EACH_KV),
        computes("dquery", "dQ += dS K", EACH_KV),
        Stage("store dkey", "store", "dK += dS^T Q, rows of the result", _CACHE, EACH_KV),
        *error_of_delta(t, EACH_Q),
        Stage("store dquery", "store", t.query("dQ"), _CACHE, EACH_Q),
    ]
    left_out = set() if "query" in t.wanted else {"keep dquery", "compute dquery", "store dquery"}
    left_out |= set() if "value" in t.wanted else {"store dvalue"}
    left_out |= set() if saves_lse else {"compute delta"}
    left_out |= set() if t.wants_dkey else {"store dkey"}
    left_out |= set() if t.sums else {"store sums"}
    left_out |= set() if t.sinks else {"store sinks"}
    if not ({"query", "key", "rope"} & t.wanted or t.sums):
        left_out |= {"load value", "compute dscores"}
        if "value" not in t.wanted:  # a sink's alone
            left_out |= {"load key", "compute scores", "compute weights"}
    return [stage for stage in stages if stage.key not in left_out]


def _rows_scaled(t: Tiles) -> bool:
    """A score that is linear in q.k scales rows and not tiles, unless gradients of operands want q.k itself."""
    return t.traits.adds or (t.traits.linear and not t.sums)


def _scaled(t: Tiles) -> str:
    return ", scaled" if _rows_scaled(t) else ""


def _cpu_score(t: Tiles) -> str:
    if t.traits.adds:
        return "Q K^T + what the score adds"
    return "Q K^T" if _rows_scaled(t) else t.score_text


FLASH_FORWARD = Kernel(
    KernelId("cpu", "flash_forward"), "forward", "forward", "kv", _OVER_KEYS, _forward_stages,
    programs=of.query_programs, read=of.flash_forward_read, written=of.flash_forward_written, flops=of.forward_flops,
    exps=of.forward_exps, weighs=True, options=DESCALES,
)  # fmt: skip
FLASH_BACKWARD = Kernel(
    KernelId("cpu", "flash_backward"), "backward", "backward_q", "kv", _OVER_KEYS, _backward_stages,
    programs=of.query_programs, read=cpu_backward_read, written=cpu_backward_written, flops=of.five_products_flops,
    exps=of.score_count, weighs=True,
)  # fmt: skip
