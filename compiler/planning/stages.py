"""What each kernel loads, keeps, computes and stores, in words: printed by `explain`, and in the kernels themselves.

Every stage has a key. A template prints the words of a stage as the comment over the code that does it, by
`{{ stage("flash_forward", "load query") }}`, and places each stage of its kernels exactly once, which codegen checks.
A kernel whose steps differ in a family of templates has an entry of its own, `("hopper", "flash_forward")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ir.errors import InternalError
from ..analysis.records import Traits
from ..analysis.survey import CELL
from .forms import ROWS_OF_A_WARPGROUP
from .measures import STRETCH, ends_of
from .records import Segment, Stage
from .segments import Segments


@dataclass(frozen=True)
class Tiles:
    """Tiles of a kernel in words: "K tile [128, 64 + 16]"."""

    q: int  # rows of a query tile
    kv: int  # rows of a key tile
    parts: Segments
    traits: Traits
    wanted: frozenset[str] = frozenset(("query", "key", "value", "rope"))  # gradients that a backward computes
    sums: frozenset[str] = frozenset()  # how wanted gradients of reads by the score are summed: "total", "row", ...
    sinks: bool = False  # gradients of what the sink reads are wanted
    ragged: bool = False  # sequences have lengths of their own
    one_pass: bool = False  # whether one kernel computes all gradients, and adds to sums of dQ
    boxes: bool = False  # tiles of what each pair reads are brought to SRAM

    def query(self, what: str = "Q") -> str:
        return f"{what} tile [{self.q}, {_columns(self.parts.qk)}]"

    def output(self, what: str) -> str:
        return f"{what} tile [{self.q}, {_columns(self.parts.v)}]"

    def key(self, what: str = "K") -> str:
        return f"{what} tile [{self.kv}, {_columns(self.parts.qk)}]"

    def value(self, what: str = "V") -> str:
        return f"{what} tile [{self.kv}, {_columns(self.parts.v)}]"

    def dkey(self) -> str:
        """The gradient of the key: its own columns, the rotary ones, or both."""
        wanted = tuple(s for s in self.parts.qk if ("rope" if s.source == "rope" else "key") in self.wanted)
        return f"dK tile [{self.kv}, {_columns(wanted)}]"

    def scores(self, what: str = "S") -> str:
        return f"{what} tile [{self.q}, {self.kv}]"

    def rows(self, what: str) -> str:
        return f"{what} [{self.q}]"

    @property
    def wants_dkey(self) -> bool:
        return "key" in self.wanted or self.wants_shared_dkey

    @property
    def wants_shared_dkey(self) -> bool:
        """Whether the gradient of a key's rotary columns, a tensor that heads share, is computed."""
        return "rope" in self.wanted and any(s.source == "rope" for s in self.parts.qk)

    @property
    def wants_dscores(self) -> bool:
        """Whether a kernel that owns keys needs the gradients of scores."""
        return self.wants_dkey or "column" in self.sums

    @property
    def score_text(self) -> str:
        return "scale * Q K^T" if self.traits.linear else "score(Q K^T)"

    def kept(self, what: str) -> str:
        """Weights, or their gradients, where dropout takes some."""
        return f"drop({what})" if self.traits.drops else what

    @property
    def sink_text(self) -> str:
        return "; the sink is in both" if self.traits.sink else ""

    @property
    def running(self) -> list[str]:
        """What a forward keeps of each row besides the output."""
        return [self.rows("max"), self.rows("sum")] if self.traits.normalizer.saves_lse else []

    @property
    def results(self) -> str:
        """What a forward stores."""
        if self.traits.normalizer.saves_lse:
            return f"{self.output('O / sum')}, {self.rows('lse = max + log(sum)')}{self.sink_text}"
        return self.output("O")

    def saved(self, *names: str) -> list[str]:
        """Those of a row's statistics, lse and delta, that a backward has."""
        return [self.rows(name) for name in names] if self.traits.normalizer.saves_lse else []

    def weights(self, place: str = "") -> str:
        """How a forward finds the weights of a tile, and where they lie if that is worth a word."""
        weight = self.traits.normalizer.weight
        return f"P = {weight}{place}" if weight else f"new max; P = exp2(S - max){place}; sum and O rescaled"

    @property
    def mask_text(self) -> str:
        return "; mask on edge tiles only" if self.traits.masked else "; lengths checked on edge tiles only"


def _columns(segments: tuple[Segment, ...]) -> str:
    return " + ".join(f"{s.block}" if s.block == s.width else f"{s.block} ({s.width} used)" for s in segments)


_IN, _AHEAD, _OUT = "HBM -> SRAM", "HBM -> SRAM, ahead", "registers -> HBM"
_EACH_KV, _EACH_Q, _ONCE = "key tile", "query tile", "program"


def stages_of(family: str, kernel: str, tiles: Tiles) -> tuple[Stage, ...]:
    """What a program of a kernel loads, keeps, computes and stores, in order."""
    words = _STAGES.get((family, kernel)) or _STAGES.get(("", kernel))
    if words is None:
        raise InternalError(f"stages: no words for kernel {kernel} of family {family}")
    return tuple(words(tiles))


def _load(key: str, what: str, per: str, moves: str = _IN) -> Stage:
    return Stage(f"load {key}", "load", what, moves, per)


def _keep(key: str, what: str, per: str = _ONCE) -> Stage:
    return Stage(f"keep {key}", "keep", what, "registers", per)


def _compute(key: str, what: str, per: str) -> Stage:
    return Stage(f"compute {key}", "compute", what, "", per)


def _store(key: str, what: str, per: str = _ONCE) -> Stage:
    return Stage(f"store {key}", "store", what, _OUT, per)


def _flash_forward(t: Tiles) -> list[Stage]:
    value = [] if t.parts.value_is_key else [_load("value", t.value(), _EACH_KV, _AHEAD)]
    key = f"{t.key()}, used as V too" if t.parts.value_is_key else t.key()
    return [
        _load("query", t.query(), _ONCE),
        _keep("sums", ", ".join([f"{t.output('O')} float32", *t.running])),
        _load("key", key, _EACH_KV, _AHEAD),
        _compute("scores", f"{t.scores()} = {t.score_text}{t.mask_text}", _EACH_KV),
        _compute("weights", t.weights(), _EACH_KV),
        *value,
        _compute("output", f"O += {t.kept('P')} V", _EACH_KV),
        _store("output", t.results),
    ]


def _split_forward(t: Tiles) -> list[Stage]:
    """As of flash, of a part of the keys and of rows of all heads that share them."""
    found = {stage.key: stage for stage in _flash_forward(t)}
    rows = f"Q tile [up to {t.q}, {_columns(t.parts.qk)}], rows of all queries and heads that share the keys"
    parts = f"{t.results}; of one part of several: O / sum and lse, float32"
    return [
        _load("query", rows, _ONCE),
        *(found[key] for key in found if key not in ("load query", "store output")),
        _store("output", parts),
    ]


def _join_parts(t: Tiles) -> list[Stage]:
    return [
        _load("parts", "O and lse of each part of the row's keys, float32", _ONCE, "HBM -> registers"),
        _compute("output", "O = sum(O of a part * exp(its lse - max)), and of these factors the sum", _ONCE),
        _store("output", f"O / sum, lse = max + log(sum){t.sink_text}"),
    ]


def _hopper_flash_forward(t: Tiles) -> list[Stage]:
    """A persistent program: one producer warp loads, warpgroups of ROWS_OF_A_WARPGROUP rows compute."""
    consumers = f"{t.q // ROWS_OF_A_WARPGROUP} consumers of {ROWS_OF_A_WARPGROUP} rows"
    order = ", the longest first" if t.traits.masked else ""
    slot = "into a slot of its ring, by the producer's TMA"
    sums = f"{t.output('O')} float32, {t.rows('reference')}, {t.rows('sum')}, by {consumers}"
    beside = f"O += {t.kept('P')} V of the tile before; on full tiles beside the softmax of this one"
    weights = (
        "reference raised to the maximum, or a little less; P = exp2(S - reference), which waits in registers for its "
        "V; sum and O rescaled"
    )
    results = f"{t.output('O / sum')} by TMA, {t.rows('lse = reference + log(sum)')}{t.sink_text}"
    pairs = [_load("pairs", f"tile [{t.q}, {t.kv}] of what each pair reads, as K", _EACH_KV, _AHEAD)] if t.boxes else []
    return [
        _load("work", f"number of the next query tile, from an atomic counter{order}", _EACH_Q, "HBM -> registers"),
        _load("query", f"{t.query()}, for {consumers}", _EACH_Q, _AHEAD),
        Stage("keep sums", "keep", sums, "registers", _EACH_Q),
        *pairs,
        _load("key", f"{t.key()}, {slot}", _EACH_KV, _AHEAD),
        _load("value", f"{t.value()}, {slot}", _EACH_KV, _AHEAD),
        _compute("scores", f"{t.scores()} = {t.score_text}, asynchronous{t.mask_text}", _EACH_KV),
        _compute("output", beside, _EACH_KV),
        _compute("weights", weights, _EACH_KV),
        Stage("store output", "store", results, "registers -> SRAM -> HBM", _EACH_Q),
    ]


def _hopper_split_forward(t: Tiles) -> list[Stage]:
    """Of latent caches: a producer warp loads, one warpgroup finds weights, two sum values."""
    rows = f"{t.query()}, rows of all queries and heads that share the keys; half stays in SRAM, half in registers"
    rotary = "; P = exp2(S - reference) takes the place of the rotary columns"
    weights = f"reference raised to the maximum, or a little less{rotary}"
    parts = f"{t.output('O / sum')}, {t.rows('lse = reference + log(sum)')}; of one part of several in float32"
    early = "+prefetch: from contiguous keys to L2 before, where tiles of rows share them and all programs run at once"
    later = "+ordered: after the next tile's scores, where tiles of rows share keys"
    return [
        _load("query", rows, "part of a sequence", _AHEAD),
        _load("key", f"{t.key()}, in pieces, used as V too; {early}", _EACH_KV, _AHEAD),
        _compute("scores", f"{t.scores()} = {t.score_text}, asynchronous{t.mask_text}", _EACH_KV),
        _compute("weights", weights, _EACH_KV),
        Stage(
            "keep sums",
            "keep",
            f"{t.output('O')} float32, half of the columns a warpgroup",
            "registers",
            "part of a sequence",
        ),
        _compute(
            "output", f"sums rescaled where a row's reference moved; O += P V, beside the softmax; {later}", _EACH_KV
        ),
        _store("output", parts, "part of a sequence"),
    ]


def _hopper_row_statistics(t: Tiles) -> list[Stage]:
    """As of the portable kernels, and in one pass zeros for what the main kernel adds to."""
    load, compute, *_ = _row_statistics(t)
    zeros = Stage("store zeros", "store", f"{t.query('zeros for sums of dQ')} float32", "SRAM -> HBM", _ONCE)
    return [
        load,
        *([zeros] if t.one_pass else []),
        compute,
        _store("statistics", "-delta and -lse in base 2, of these rows, as products start from them"),
        *([_store("rows", "delta and lse in base 2, as flash_ddiagonals reads them")] if "diagonal" in t.sums else []),
        *_sink_sums(t, ragged=t.ragged),
    ]


def _hopper_flash_backward(t: Tiles) -> list[Stage]:
    """Of one pass, or of the keys' one of two. A producer warp loads; consumers of ROWS_OF_A_WARPGROUP keys compute.

    Where a program has no more keys than one consumer computes, each of two has some of the columns.
    """
    wants_dscores = t.one_pass or t.wants_dscores or "level" in t.sums
    consumers = f"{t.kv // ROWS_OF_A_WARPGROUP} consumers of {ROWS_OF_A_WARPGROUP} keys"
    if t.kv == ROWS_OF_A_WARPGROUP:
        consumers = "2 consumers of some columns each"
    slot = "into a slot of its ring, by the producer's TMA"
    product = "asynchronous"
    stored = t.boxes and "pair" in t.sums
    shared = "; of columns that heads share, float32 sums of each head or of all" if t.wants_shared_dkey else ""
    drawn = [_compute("dropped", "which pairs are dropped, a bit each in SRAM, ahead, by two warps", _EACH_Q)]
    drawn = drawn if t.traits.drops else []
    stages = [
        _load("key", t.key(), _ONCE),
        _load("value", t.value(), _ONCE),
        _keep("dkey", f"{', '.join(f'{x} float32' for x in _key_results(t))}, by {consumers}"),
        _load("query", f"{', '.join([t.query(), *t.saved('lse', 'delta')])}, {slot}", _EACH_Q, _AHEAD),
        *([_load("pairs", f"tile [{t.q}, {t.kv}] of what each pair reads, as Q", _EACH_Q, _AHEAD)] if t.boxes else []),
        _load("doutput", f"{t.output('dO')}, {slot}", _EACH_Q, _AHEAD),
        *drawn,
        _compute("scores", f"{t.scores()} = Q K^T, {product}", _EACH_Q),
        _compute("dweights", f"{t.scores('dP')} = dO V^T - delta, {product}", _EACH_Q),
        _compute("weights", f"{_weights_text(t)}{t.mask_text}", _EACH_Q),
        _compute("dscores", f"dS = P * {t.kept('dP')}" + ("" if t.traits.linear else " * score'"), _EACH_Q),
        *([_store("sums", _KEY_SUMS, "query head")] if t.sums & {"column", "level"} else []),
        _compute("dvalue", f"dV += {t.kept('P')}^T dO", _EACH_Q),
        _compute("dquery", f"{t.query('dQ share')} = dS K, with dS from SRAM, where all consumers left it", _EACH_Q),
        _compute("dkey", "dK += dS^T Q", _EACH_Q),
        *(
            [Stage("store pairs", "store", "dS, what pairs read has as its gradient", "SRAM -> HBM", _EACH_Q)]
            if stored
            else []
        ),
        Stage("store dquery", "store", "share of dQ, added to its sums by TMA", "registers -> SRAM -> HBM", _EACH_Q),
        Stage("store dkey", "store", ", ".join(_key_results(t)) + shared, "registers -> SRAM -> HBM", _ONCE),
    ]
    left_out = set() if t.one_pass else {"compute dquery", "store dquery"}
    left_out |= set() if t.wants_dkey else {"compute dkey"}
    left_out |= set() if "value" in t.wanted else {"compute dvalue"}
    left_out |= set() if wants_dscores else {"compute dweights", "compute dscores"}
    left_out |= set() if _key_results(t) else {"keep dkey", "store dkey"}
    return [stage for stage in stages if stage.key not in left_out]


def _hopper_flash_dquery(t: Tiles) -> list[Stage]:
    """A producer warp loads; two consumers of ROWS_OF_A_WARPGROUP queries compute."""
    consumers = f"{t.q // ROWS_OF_A_WARPGROUP} consumers of {ROWS_OF_A_WARPGROUP} rows"
    slot = "into a slot of its ring, by the producer's TMA"
    results = [t.query("dQ")] if "query" in t.wanted else []
    product = [_compute("dquery", "dQ += dS K", _EACH_KV)] if results else []
    results += ["sums for operands"] if t.sums & {"total", "row"} else []
    return [
        _load("query", f"{t.query()}, {t.output('dO')}, for {consumers}", _ONCE),
        _load("key", f"{t.key()}, {slot}", _EACH_KV, _AHEAD),
        _load("value", f"{t.value()}, {slot}", _EACH_KV, _AHEAD),
        _keep("dquery", f"{', '.join(results)} float32, by {consumers}; {', '.join(t.saved('lse', 'delta'))}"),
        _compute("scores", f"{t.scores()} = Q K^T, asynchronous", _EACH_KV),
        _compute("dweights", f"{t.scores('dP')} = dO V^T, asynchronous", _EACH_KV),
        _compute("weights", f"{_weights_text(t)}{t.mask_text}", _EACH_KV),
        _compute("dscores", f"dS = {_dscore(t)}", _EACH_KV),
        *product,
        Stage("store dquery", "store", ", ".join(results), "registers -> SRAM -> HBM", _ONCE),
    ]


def _round_dquery(t: Tiles) -> list[Stage]:
    return [
        _load("sums", f"{t.query('sums of dQ')} float32", _ONCE),
        _compute(
            "dquery", "rows from the order of registers" + (", times the factor" if t.traits.linear else ""), _ONCE
        ),
        Stage("store dquery", "store", t.query("dQ"), "registers -> SRAM -> HBM", _ONCE),
    ]


def _row_statistics(t: Tiles) -> list[Stage]:
    return [
        _load("rows", "rows of O, dO and lse", _ONCE, "HBM -> registers"),
        _compute("delta", "delta = rowsum(O * dO) - dlse", _ONCE),
        _store("statistics", "delta and lse in base 2 of these rows"),
        *_sink_sums(t),
    ]


_KEY_SUMS = "sums for operands, one a key"
_SINK_SUMS = "sums over these rows for what the sink reads: -exp(sink - lse) * delta"


def _sink_sums(t: Tiles, ragged: bool = False) -> list[Stage]:
    """Rows of sequences with lengths find their sink in the kernel that knows whose they are."""
    return [_store("sinks", _SINK_SUMS)] if t.sinks and t.ragged == ragged else []


_LEVEL_SUMS = "sums of dload over tiles whose pairs all read one entry, at either end of the distances; the entries"


def _flash_dquery(t: Tiles) -> list[Stage]:
    result = [t.query("dQ")] if "query" in t.wanted else []
    sums = ["sums for operands"] if not result and t.sums & {"total", "row"} else []
    product = [_compute("dquery", "dQ += dS K", _EACH_KV)] if result else []
    stored = [_store("pairs", f"dload = {_dload(t)}, to the entries that the tile read", _EACH_KV)]
    if not (result or sums or "stored" in t.sums):
        return _sink_sums(t, ragged=True)
    return [
        _load("query", ", ".join([t.query(), t.output("dO"), *t.saved("lse", "delta")]), _ONCE),
        *([_keep("dquery", ", ".join([f"{x} float32" for x in result] + sums))] if result + sums else []),
        _load("key", t.key(), _EACH_KV, _AHEAD),
        _compute("scores", f"{t.scores()} = Q K^T", _EACH_KV),
        _load("value", t.value(), _EACH_KV, _AHEAD),
        _compute("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", _EACH_KV),
        _compute("weights", _weights_text(t), _EACH_KV),
        _compute("dscores", f"dS = {_dscore(t)}{t.mask_text}", _EACH_KV),
        *(stored if "stored" in t.sums else []),
        *product,
        *([_store("dquery", ", ".join(result + sums))] if result + sums else []),
        *([_store("levels", _LEVEL_SUMS)] if "level" in t.sums else []),
        *_sink_sums(t, ragged=True),
    ]


def _pair_sums(t: Tiles, per: str, store: str) -> list[Stage]:
    """P and dS of tiles of pairs once more, for what is summed over heads or along a diagonal."""
    return [
        _keep("sums", f"{t.scores('sums for operands')} float32"),
        _load("query", ", ".join([t.query(), t.output("dO"), *t.saved("lse", "delta")]), per, _AHEAD),
        _load("key", f"{t.key()}, {t.value()}", per, _AHEAD),
        _compute("scores", f"{t.scores()} = Q K^T", per),
        _compute("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", per),
        _compute("weights", _weights_text(t), per),
        _compute("dscores", f"dload = {_dload(t)}{t.mask_text}", per),
        _store("sums", store),
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
    results = _key_results(t)
    dvalue = [_compute("dvalue", f"dV += {t.kept('P')}^T dO", _EACH_Q)] if "value" in t.wanted else []
    dkey = [_compute("dkey", "dK += dS^T Q", _EACH_Q)] if t.wants_dkey else []
    return [
        _load("key", f"{t.key()}, {t.value()}" if t.wants_dscores else t.key(), _ONCE),
        *([_keep("dkey", ", ".join(f"{x} float32" for x in results))] if results else []),
        *_weights_again(t, t.wants_dscores, _AHEAD),
        *dvalue,
        *dkey,
        *_column_sums(t, _ONCE),
        *([_store("dkey", ", ".join(results))] if results else []),
    ]


def _column_sums(t: Tiles, per: str) -> list[Stage]:
    return [_store("sums", f"sums for operands, one a key [{t.kv}]", per)] if "column" in t.sums else []


def _weights_again(t: Tiles, wants_dscores: bool, moves: str) -> list[Stage]:
    """P and dS of a tile of queries that a program of a tile of keys visits."""
    saved = t.saved("lse", "delta") if wants_dscores else t.saved("lse")
    dweights = [_compute("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", _EACH_Q)] if wants_dscores else []
    dscores = [_compute("dscores", f"dS = {_dscore(t)}{t.mask_text}", _EACH_Q)] if wants_dscores else []
    return [
        _load("query", ", ".join([t.query(), *saved]), _EACH_Q, moves),
        _compute("scores", f"{t.scores('S')} = Q K^T", _EACH_Q),
        _load("doutput", t.output("dO"), _EACH_Q, moves),
        *dweights,
        _compute("weights", _weights_text(t), _EACH_Q),
        *dscores,
    ]


def _weights_text(t: Tiles) -> str:
    if not t.traits.normalizer.saves_lse:
        return t.weights()
    return f"P = exp2({'scale * S' if t.traits.linear else 'score(S)'} - lse)"


def _key_results(t: Tiles) -> list[str]:
    return ([t.dkey()] if t.wants_dkey else []) + ([t.value("dV")] if "value" in t.wanted else [])


def _dscore(t: Tiles) -> str:
    dscore = "P * (dP - delta)" if t.traits.normalizer.saves_lse else "P' * dP"
    return dscore + ("" if t.traits.linear else " * score'")


def _streaming_forward(t: Tiles) -> list[Stage]:
    value = "" if t.parts.value_is_key else f", {t.value()}"
    running = f"running {t.output('O')} float32, {t.rows('max')}, {t.rows('sum')}"
    return [
        _load("key", f"{t.key()}{value}", _EACH_KV),
        _load("query", t.query(), _EACH_Q),
        _compute("scores", f"{t.scores()} = {t.score_text}{t.mask_text}", _EACH_Q),
        _load("running", running, _EACH_Q, "HBM -> registers"),
        _compute("weights", "new max; P = exp2(S - max); sum and O rescaled; O += P V", _EACH_Q),
        _store("running", running, _EACH_Q),
        _store("output", f"{t.output('O / sum')}, {t.rows('lse')}, from the running values{t.sink_text}", _EACH_Q),
    ]


def _streaming_backward(t: Tiles) -> list[Stage]:
    results = _key_results(t)
    running = [f"running {t.query('dQ')} float32"] if "query" in t.wanted else []
    running += ["running sums for operands"] if not running and t.sums - {"column"} else []
    wants_dscores = bool(t.wants_dscores or running)
    products = (["dV += P^T dO"] if "value" in t.wanted else []) + (["dK += dS^T Q"] if t.wants_dkey else [])
    stages = [
        _load("key", f"{t.key()}, {t.value()}" if wants_dscores else t.key(), _EACH_KV),
        *([_keep("dkey", ", ".join(f"{x} float32" for x in results), _EACH_KV)] if results else []),
        *_weights_again(t, wants_dscores, _IN),
        *([_compute("dkey", "; ".join(products), _EACH_Q)] if products else []),
    ]
    if running:
        stages += [
            _load("running", ", ".join(running), _EACH_Q, "HBM -> registers"),
            _store("running", f"{', '.join(running)}, with this tile's share added", _EACH_Q),
        ]
    stages += _column_sums(t, _EACH_KV)
    stages += [_store("dkey", ", ".join(results), _EACH_KV)] if results else []
    stages += [_store("dquery", f"{t.query('dQ')}, from the running one", _EACH_Q)] if "query" in t.wanted else []
    return stages


def _kv_spans(t: Tiles) -> list[Stage]:
    return _spans("queries", "keys", _EACH_KV)


def _q_spans(t: Tiles) -> list[Stage]:
    return _spans("keys", "queries", _EACH_Q)


def _kv_long_spans(t: Tiles) -> list[Stage]:
    return _long_spans(_kv_spans(t), "kv_ends", t)


def _q_long_spans(t: Tiles) -> list[Stage]:
    return _long_spans(_q_spans(t), "q_ends", t)


def _long_spans(by_tiles: list[Stage], wrote: str, t: Tiles) -> list[Stage]:
    """The same by stretches, whose ends another kernel wrote where they are not those of positions."""
    own, others, matches, ranges = by_tiles
    known = f"what {wrote} wrote of" if wrote in ends_of(t.traits.measured) else "least and greatest position of"
    what = f"{known} {STRETCH} tiles as one, then of each where that leaves it open"
    ends = _load("ends", what, others.per, others.moves)
    return [own, ends, matches, ranges]


def _kv_ends(t: Tiles) -> list[Stage]:
    return _ends("keys", _EACH_KV)


def _q_ends(t: Tiles) -> list[Stage]:
    return _ends("queries", _EACH_Q)


def _ends(others: str, each: str) -> list[Stage]:
    return [
        _load("values", f"what the mask reads at {others}; least and greatest of each", each, "HBM -> registers"),
        _store("ends", f"these, of each tile and of {STRETCH} tiles at once"),
    ]


def _spans(own: str, others: str, each: str) -> list[Stage]:
    """Spans are measured by one module for tiles of every size, so that no size is in the words."""
    return [
        _load("own", f"what the mask reads at {own} of a tile; least and greatest of each", _ONCE, "HBM -> registers"),
        _load("others", f"what the mask reads at {others}; least and greatest of each", each, "HBM -> registers"),
        _compute("matches", "by least and greatest: can any pair match, must every pair", each),
        _store("ranges", "first and last tile to visit, run of full ones; for each range"),
    ]


def _distance_tables(t: Tiles) -> list[Stage]:
    """One module makes the tables of kernels with tiles of any size."""
    return [
        _compute("values", "what the score adds or multiplies by q_pos - kv_pos alone, of each distance", _ONCE),
        _store("tables", "float32, a value a distance: of all heads, or of each where they differ"),
        *([_store("levels", "int32: from where on nothing changes with distance")] if "level" in t.sums else []),
    ]


def _kv_lists(t: Tiles) -> list[Stage]:
    return _lists("queries", "keys", _EACH_KV, t)


def _q_lists(t: Tiles) -> list[Stage]:
    return _lists("keys", "queries", _EACH_Q, t)


def _lists(own: str, others: str, each: str, t: Tiles) -> list[Stage]:
    measured = t.traits.measured
    looked = ["least and greatest of each"] + (
        ["blocks of pairs by one of each"] if measured and measured.cells else []
    )
    return [
        _load("own", f"what the mask reads at {own} of a tile; least and greatest of each", _ONCE, "HBM -> registers"),
        _load("others", f"what the mask reads at {others}; {', '.join(looked)}", each, "HBM -> registers"),
        _compute("matches", "can any pair match, must every pair", each),
        _store("list", "the tiles to visit, one by one, edge and full ones apart", each),
    ]


def _pair_cells(t: Tiles) -> list[Stage]:
    return [
        _compute("cells", f"the mask of {CELL} queries and {CELL} keys: does none, some or every pair match", _EACH_KV),
        _store("cells", "that, a byte", _EACH_KV),
    ]


def _query_work(t: Tiles) -> list[Stage]:
    return _work(f"[{t.q} queries]", "keys")


def _key_work(t: Tiles) -> list[Stage]:
    return _work(f"[{t.kv} keys]", "queries")


def _work(tile: str, others: str) -> list[Stage]:
    return [
        _load("lengths", "first rows and lengths of sequences", _ONCE, "HBM -> registers"),
        _compute("places", f"first slot of each sequence: those with more {others} come first", _ONCE),
        _store("work", f"sequence and number of each tile {tile}"),
    ]


def _standard_scores(t: Tiles) -> list[Stage]:
    return [
        _load("query", f"{t.query()}, {t.key()}", _ONCE),
        _compute("scores", f"{t.scores()} = {t.score_text}; -inf where masked", _ONCE),
        _store("scores", t.scores()),
    ]


def _standard_softmax(t: Tiles) -> list[Stage]:
    return [
        _keep("columns", "a max and a sum of every column of a tile of S"),
        _load("scores", "rows of S, in the first of two sweeps", _ONCE, "HBM -> registers"),
        _compute("sums", "max and sum of each row, joined from those of the columns", _ONCE),
        _store("weights", f"P = exp2(S - max) / sum over S, in the second sweep; lse{t.sink_text}"),
    ]


def _standard_output(t: Tiles) -> list[Stage]:
    return [
        _keep("output", f"{t.output('O')} float32"),
        _load("weights", f"{t.scores('P')}, {t.value()}", _EACH_KV, _AHEAD),
        _compute("output", "O += P V", _EACH_KV),
        _store("output", t.output("O")),
    ]


def _standard_weights(t: Tiles) -> list[Stage]:
    return [
        _load("query", f"{t.query()}, {t.key()}, {t.rows('lse')}", _ONCE),
        _compute("weights", f"{t.scores('P')} = exp2({t.score_text} - lse); 0 where masked", _ONCE),
        _store("weights", t.scores("P")),
    ]


def _standard_dvalue(t: Tiles) -> list[Stage]:
    return [
        _keep("dvalue", f"{t.value('dV')} float32"),
        _load("weights", f"{t.scores('P')}, {t.output('dO')}", _EACH_Q, _AHEAD),
        _compute("dvalue", "dV += P^T dO", _EACH_Q),
        _store("dvalue", t.value("dV")),
    ]


def _standard_dweights(t: Tiles) -> list[Stage]:
    return [
        _load("output", f"{t.output('dO')}, {t.value()}", _ONCE),
        _compute("dweights", f"{t.scores('dP')} = dO V^T", _ONCE),
        _store("dweights", t.scores("dP")),
    ]


def _standard_dscores(t: Tiles) -> list[Stage]:
    again = (
        [] if t.traits.linear and not t.sums else [_load("query", f"{t.query()}, {t.key()}, for Q K^T again", _ONCE)]
    )
    wanted = "query" in t.wanted or t.wants_dkey
    return [
        *again,
        _load("weights", f"{t.scores('P')}, {t.scores('dP')}, {t.rows('delta')}", _ONCE, "HBM -> registers"),
        _compute("dscores", f"dS = {_dscore(t)}", _ONCE),
        *([_store("dscores", f"{t.scores('dS')} over dP")] if wanted else []),
        *([_store("sums", "sums of the tile for operands")] if t.sums else []),
    ]


def _standard_dquery(t: Tiles) -> list[Stage]:
    return [
        _keep("dquery", f"{t.query('dQ')} float32"),
        _load("dscores", f"{t.scores('dS')}, {t.key()}", _EACH_KV, _AHEAD),
        _compute("dquery", "dQ += dS K", _EACH_KV),
        _store("dquery", t.query("dQ")),
    ]


def _standard_dkey(t: Tiles) -> list[Stage]:
    return [
        _keep("dkey", f"{t.key('dK')} float32"),
        _load("dscores", f"{t.scores('dS')}, {t.query()}", _EACH_Q, _AHEAD),
        _compute("dkey", "dK += dS^T Q", _EACH_Q),
        _store("dkey", t.key("dK")),
    ]


_RAM, _CACHE = "RAM -> cache", "cache -> RAM"


def _cpu_forward(t: Tiles) -> list[Stage]:
    """Calls of torch: every stage is done for all heads of a chunk at once."""
    value = "the first columns of the K tile" if t.parts.value_is_key else f"{t.value()}, a view"
    return [
        Stage("load query", "load", f"{t.query()} of each head of the chunk{_scaled(t)}", _RAM, _EACH_Q),
        Stage("keep sums", "keep", ", ".join([t.output("O"), *t.running]), "cache", _EACH_Q),
        Stage("load key", "load", f"{t.key()}, a view", _RAM, _EACH_KV),
        _compute("scores", f"{t.scores()} = {_cpu_score(t)}{t.mask_text}", _EACH_KV),
        Stage("load value", "load", value, _RAM, _EACH_KV),
        _compute("output", f"{t.weights(' over S')}; O += {t.kept('P')} V", _EACH_KV),
        Stage("store output", "store", t.results, _CACHE, _EACH_Q),
    ]


def _cpu_backward(t: Tiles) -> list[Stage]:
    """The wanted gradients in one pass: of five matrix products a tile, those that they need."""
    rows = ", ".join([f"{t.query()}{_scaled(t)}", t.output("dO"), *t.saved("lse")])
    saves_lse = t.traits.normalizer.saves_lse
    stages = [
        Stage("load query", "load", f"{rows} of each head of the chunk", _RAM, _EACH_Q),
        _compute("delta", "delta = rowsum(O * dO) - dlse", _EACH_Q),
        Stage("store sinks", "store", _SINK_SUMS, _CACHE, _EACH_Q),
        Stage("keep dquery", "keep", t.query("dQ"), "cache", _EACH_Q),
        Stage("load key", "load", f"{t.key()}, a view", _RAM, _EACH_KV),
        _compute("scores", f"{t.scores()} = {_cpu_score(t)}{t.mask_text}", _EACH_KV),
        _compute("weights", "P = exp2(S - lse) over S" if saves_lse else t.weights(), _EACH_KV),
        Stage("store dvalue", "store", f"dV += {t.kept('P')}^T dO, rows of the result", _CACHE, _EACH_KV),
        Stage("load value", "load", f"{t.value()}, a view", _RAM, _EACH_KV),
        _compute("dscores", f"dS = {_dscore(t)}, with dP = {t.kept('dO V^T')}", _EACH_KV),
        Stage("store sums", "store", "gradients of reads of operands, summed over the tile", _CACHE, _EACH_KV),
        _compute("dquery", "dQ += dS K", _EACH_KV),
        Stage("store dkey", "store", "dK += dS^T Q, rows of the result", _CACHE, _EACH_KV),
        Stage("store dquery", "store", t.query("dQ"), _CACHE, _EACH_Q),
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
    return t.traits.linear and not t.sums


def _scaled(t: Tiles) -> str:
    return ", scaled" if _rows_scaled(t) else ""


def _cpu_score(t: Tiles) -> str:
    return "Q K^T" if _rows_scaled(t) else t.score_text


_STAGES: dict[tuple[str, str], Callable[[Tiles], list[Stage]]] = {
    ("cpu", "flash_forward"): _cpu_forward,
    ("cpu", "flash_backward"): _cpu_backward,
    ("", "kv_spans"): _kv_spans,
    ("", "q_spans"): _q_spans,
    ("", "kv_long_spans"): _kv_long_spans,
    ("", "q_long_spans"): _q_long_spans,
    ("", "kv_ends"): _kv_ends,
    ("", "q_ends"): _q_ends,
    ("", "kv_lists"): _kv_lists,
    ("", "q_lists"): _q_lists,
    ("", "pair_cells"): _pair_cells,
    ("", "distance_tables"): _distance_tables,
    ("", "query_work"): _query_work,
    ("", "key_work"): _key_work,
    ("", "flash_forward"): _flash_forward,
    ("", "split_forward"): _split_forward,
    ("", "join_parts"): _join_parts,
    ("hopper", "flash_forward"): _hopper_flash_forward,
    ("hopper", "split_forward"): _hopper_split_forward,
    ("", "row_statistics"): _row_statistics,
    ("hopper", "row_statistics"): _hopper_row_statistics,
    ("hopper", "flash_backward"): _hopper_flash_backward,
    ("hopper", "flash_dkey_dvalue"): _hopper_flash_backward,
    ("hopper", "flash_dquery"): _hopper_flash_dquery,
    ("hopper", "round_dquery"): _round_dquery,
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
