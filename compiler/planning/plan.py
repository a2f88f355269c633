"""Schedule -> Plan: every kernel's loops, stages and predicted cost as data, for `explain`, the demo and the tests.

A plan needs no GPU and no tensors, only sizes and a Hardware record.
"""

from __future__ import annotations

from ..analysis.measured import MOST_POSITIONS, MOST_STEPS, Measurement
from ..analysis.records import Axis, TileCounts, TileProgram, Traits
from ..analysis.survey import Survey
from ..analysis.tiles import Environment, count_tiles
from .cost import CountTiles, KernelCost, predict
from .hardware import Hardware
from .kernels import Formula
from .records import KernelPlan, Plan, Quantity, Schedule, Segment, Shape, Stage
from .segments import Segments, for_heads


def make_plan(
    name: str,
    shape: Shape,
    hardware: Hardware,
    schedule: Schedule,
    *,
    segments: Segments | None = None,
    traits: Traits = Traits(),  # noqa: B008  frozen
    count: CountTiles | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a variant under a schedule.

    count: tiles of the whole problem by class, see cost.CountTiles; where not given, every tile is visited.
    notes: what `explain` should say besides, such as why another target was not chosen.
    """
    parts = segments or for_heads(shape.head_dim, shape.value_dim)
    costs = predict(shape, schedule, hardware, segments=parts, traits=traits, count=count)
    return Plan(
        name=name,
        shape=shape,
        hardware=hardware.name,
        schedule=schedule,
        qk_segments=parts.qk,
        v_segments=parts.v,
        value_is_key=parts.value_is_key,
        kernels=tuple(_kernel_plan(cost, parts, traits) for cost in costs),
        notes=notes,
    )


_HEADS_COUNTED = 8  # where tiles differ by head or by batch row, this many of them stand for all
_GOLDEN = 0.618034  # multiples of it spread evenly over [0, 1), however many are taken


def counter(
    kv_tiles: TileProgram,
    q_tiles: TileProgram,
    shape: Shape,
    *,
    q_offset: int | None = None,
    env: Environment | None = None,
    by_head: bool = False,
    by_batch: bool = False,
    survey: Survey | None = None,
) -> CountTiles:
    """The tiles that kernels of a variant visit, over all heads and batches, from the programs that they run.

    env: values of the scalars and tensors that the mask reads. by_head, by_batch: tiles differ from head to head, from
    batch row to batch row; some are counted and stand for the others. survey: the kernels measure what the mask reads,
    and visit what is left then. Raises WeftError, at the latest when tiles are counted, naming a missing value.
    """
    length = shape.q_len + shape.kv_len
    most = max(1, min(_HEADS_COUNTED, MOST_POSITIONS // length)) if survey else _HEADS_COUNTED
    heads = [
        {**(env or {}), "batch": batch, "head": head, "kv_head": head // shape.group, "group": shape.group}
        for batch, head in _some_heads(shape.batch if by_batch else 1, shape.heads if by_head else 1, most)
    ]
    sizes = {"q_len": shape.q_len, "kv_len": shape.kv_len}
    measured = [Measurement(survey, head, q_offset=q_offset, **sizes) for head in heads] if survey else []

    def count(axis: Axis, block_q: int, block_kv: int) -> TileCounts:
        program = kv_tiles if axis == "kv" else q_tiles
        blocks = {"block_q": block_q, "block_kv": block_kv}
        if measured:
            found = [m.count(program, **blocks, most=MOST_STEPS // len(measured)) for m in measured]
        else:
            found = [count_tiles(program, q_offset=q_offset, env=head, **sizes, **blocks) for head in heads]
        share = shape.batch * shape.heads / len(found)
        return TileCounts(*(round(share * sum(getattr(c, part) for c in found)) for part in ("empty", "edge", "full")))

    return count


def _some_heads(batches: int, heads: int, most: int) -> list[tuple[int, int]]:
    """All pairs (batch row, head), or this many of them: evenly spaced heads, and batch rows in another order."""
    if batches * heads <= most:
        return [(batch, head) for batch in range(batches) for head in range(heads)]
    return [(int((k * _GOLDEN + 0.5) % 1 * batches), (2 * k + 1) * heads // (2 * most)) for k in range(most)]


def _kernel_plan(cost: KernelCost, parts: Segments, traits: Traits) -> KernelPlan:
    from .formulas import formula_text  # imports sympy, which a call that only runs kernels does without

    def quantity(formula: Formula) -> Quantity:
        return Quantity(formula_text(formula, cost.sizes), formula(cost.sizes))

    kernel = cost.kernel
    return KernelPlan(
        name=kernel.name,
        direction=kernel.direction,
        tiling=cost.tiling,
        programs=quantity(kernel.programs),
        loop=kernel.loop,
        tiles=cost.tiles,
        stages=stages_of(kernel.name, _Tiles(cost, parts, traits)),
        sram_bytes=quantity(kernel.sram),
        hbm_read=quantity(kernel.read),
        hbm_written=quantity(kernel.written),
        flops=quantity(kernel.flops),
        seconds=cost.seconds,
        bound=cost.bound,
    )


# -- stages ----------------------------------------------------------------------------------------------------------
class _Tiles:
    """Tiles of a kernel in words: "K tile [128, 64 + 16]"."""

    def __init__(self, cost: KernelCost, parts: Segments, traits: Traits) -> None:
        self.q, self.kv = cost.tiling.block_q, cost.tiling.block_kv
        self.parts, self.traits = parts, traits

    def query(self, what: str = "Q") -> str:
        return f"{what} tile [{self.q}, {_columns(self.parts.qk)}]"

    def output(self, what: str) -> str:
        return f"{what} tile [{self.q}, {_columns(self.parts.v)}]"

    def key(self, what: str = "K") -> str:
        return f"{what} tile [{self.kv}, {_columns(self.parts.qk)}]"

    def value(self, what: str = "V") -> str:
        return f"{what} tile [{self.kv}, {_columns(self.parts.v)}]"

    def scores(self, what: str = "S") -> str:
        return f"{what} tile [{self.q}, {self.kv}]"

    def rows(self, what: str) -> str:
        return f"{what} [{self.q}]"

    @property
    def score_text(self) -> str:
        return "scale * Q K^T" if self.traits.linear else "score(Q K^T)"

    @property
    def mask_text(self) -> str:
        return "; mask on edge tiles only" if self.traits.masked else "; lengths checked on edge tiles only"


def _columns(segments: tuple[Segment, ...]) -> str:
    return " + ".join(f"{s.block}" if s.block == s.width else f"{s.block} ({s.width} used)" for s in segments)


_IN, _AHEAD, _OUT = "HBM -> SRAM", "HBM -> SRAM, ahead", "registers -> HBM"
_EACH_KV, _EACH_Q, _ONCE = "key tile", "query tile", "program"


def stages_of(kernel: str, t: _Tiles) -> tuple[Stage, ...]:
    """What a program of a kernel loads, keeps, computes and stores, in order."""
    return tuple(_STAGES[kernel](t))


def _load(what: str, per: str, moves: str = _IN) -> Stage:
    return Stage("load", what, moves, per)


def _keep(what: str) -> Stage:
    return Stage("keep", what, "registers", _ONCE)


def _compute(what: str, per: str) -> Stage:
    return Stage("compute", what, "", per)


def _store(what: str, per: str = _ONCE) -> Stage:
    return Stage("store", what, _OUT, per)


def _flash_forward(t: _Tiles) -> list[Stage]:
    value = [] if t.parts.value_is_key else [_load(t.value(), _EACH_KV, _AHEAD)]
    key = f"{t.key()}, used as V too" if t.parts.value_is_key else t.key()
    return [
        _load(t.query(), _ONCE),
        _keep(f"{t.output('O')} float32, {t.rows('max')}, {t.rows('sum')}"),
        _load(key, _EACH_KV, _AHEAD),
        *value,
        _compute(f"{t.scores()} = {t.score_text}{t.mask_text}", _EACH_KV),
        _compute("new max; P = exp2(S - max); sum and O rescaled", _EACH_KV),
        _compute("O += P V", _EACH_KV),
        _store(f"{t.output('O / sum')}, {t.rows('lse = max + log(sum)')}"),
    ]


def _row_statistics(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.output('O')}, {t.output('dO')}, {t.rows('lse')}", _ONCE, "HBM -> registers"),
        _compute("delta = rowsum(O * dO) - dlse", _ONCE),
        _store(f"{t.rows('delta')}, {t.rows('lse in base 2')}"),
    ]


def _flash_dquery(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.query()}, {t.output('dO')}, {t.rows('lse')}, {t.rows('delta')}", _ONCE),
        _keep(f"{t.query('dQ')} float32"),
        _load(f"{t.key()}, {t.value()}", _EACH_KV, _AHEAD),
        _compute(f"{t.scores('P')} = exp2({t.score_text} - lse){t.mask_text}", _EACH_KV),
        _compute(f"dP = dO V^T; dS = {_dscore(t)}", _EACH_KV),
        _compute("dQ += dS K", _EACH_KV),
        _store(t.query("dQ")),
    ]


def _flash_dkey_dvalue(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.key()}, {t.value()}", _ONCE),
        _keep(f"{t.key('dK')} float32, {t.value('dV')} float32"),
        _load(f"{t.query()}, {t.output('dO')}, {t.rows('lse')}, {t.rows('delta')}", _EACH_Q, _AHEAD),
        _compute(f"{t.scores('P')} = exp2({t.score_text} - lse){t.mask_text}", _EACH_Q),
        _compute(f"dV += P^T dO; dP = dO V^T; dS = {_dscore(t)}", _EACH_Q),
        _compute("dK += dS^T Q", _EACH_Q),
        _store(f"{t.key('dK')}, {t.value('dV')}"),
    ]


def _dscore(t: _Tiles) -> str:
    return "P * (dP - delta)" + ("" if t.traits.linear else " * score'")


def _streaming_forward(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.key()}, {t.value()}", _EACH_KV),
        _load(f"{t.query()}, running {t.output('O')} float32, {t.rows('max')}, {t.rows('sum')}", _EACH_Q),
        _compute(f"{t.scores()} = {t.score_text}{t.mask_text}", _EACH_Q),
        _compute("new max; P = exp2(S - max); sum and O rescaled; O += P V", _EACH_Q),
        _store(f"running {t.output('O')} float32, {t.rows('max')}, {t.rows('sum')}", _EACH_Q),
        _store(f"{t.output('O / sum')}, {t.rows('lse')}"),
    ]


def _streaming_backward(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.key()}, {t.value()}", _EACH_KV),
        _keep(f"{t.key('dK')} float32, {t.value('dV')} float32"),
        _load(f"{t.query()}, {t.output('dO')}, {t.rows('lse')}, {t.rows('delta')}", _EACH_Q),
        _compute(f"{t.scores('P')} = exp2({t.score_text} - lse){t.mask_text}", _EACH_Q),
        _compute(f"dV += P^T dO; dP = dO V^T; dS = {_dscore(t)}; dK += dS^T Q", _EACH_Q),
        _load(f"running {t.query('dQ')} float32", _EACH_Q),
        _store(f"running {t.query('dQ')} float32, with dS K added", _EACH_Q),
        _store(f"{t.key('dK')}, {t.value('dV')}", _EACH_KV),
    ]


def _kv_spans(t: _Tiles) -> list[Stage]:
    return _spans("queries", t.q, "keys", t.kv, _EACH_KV)


def _q_spans(t: _Tiles) -> list[Stage]:
    return _spans("keys", t.kv, "queries", t.q, _EACH_Q)


def _spans(own: str, rows: int, others: str, other_rows: int, each: str) -> list[Stage]:
    values = "what the mask reads at"
    return [
        _load(f"{values} {rows} {own}", _ONCE, "HBM -> registers"),
        _load(f"{values} {other_rows} {others}", each, "HBM -> registers"),
        _compute("least and greatest values; can any pair match, must every pair", each),
        _store("first and last tile that can match, first and last full one; for each range"),
    ]


def _standard_scores(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.query()}, {t.key()}", _ONCE),
        _compute(f"{t.scores()} = {t.score_text}; -inf where masked", _ONCE),
        _store(t.scores()),
    ]


def _standard_softmax(t: _Tiles) -> list[Stage]:
    return [
        _load("rows of S, twice", _ONCE, "HBM -> registers"),
        _compute("max and sum in the first sweep, P = exp2(S - max) / sum in the second", _ONCE),
        _store("rows of P over those of S, lse"),
    ]


def _standard_output(t: _Tiles) -> list[Stage]:
    return [
        _keep(f"{t.output('O')} float32"),
        _load(f"{t.scores('P')}, {t.value()}", _EACH_KV, _AHEAD),
        _compute("O += P V", _EACH_KV),
        _store(t.output("O")),
    ]


def _standard_weights(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.query()}, {t.key()}, {t.rows('lse')}", _ONCE),
        _compute(f"{t.scores('P')} = exp2({t.score_text} - lse); 0 where masked", _ONCE),
        _store(t.scores("P")),
    ]


def _standard_dvalue(t: _Tiles) -> list[Stage]:
    return [
        _keep(f"{t.value('dV')} float32"),
        _load(f"{t.scores('P')}, {t.output('dO')}", _EACH_Q, _AHEAD),
        _compute("dV += P^T dO", _EACH_Q),
        _store(t.value("dV")),
    ]


def _standard_dweights(t: _Tiles) -> list[Stage]:
    return [
        _load(f"{t.output('dO')}, {t.value()}", _ONCE),
        _compute(f"{t.scores('dP')} = dO V^T", _ONCE),
        _store(t.scores("dP")),
    ]


def _standard_dscores(t: _Tiles) -> list[Stage]:
    again = [] if t.traits.linear else [_load(f"{t.query()}, {t.key()}, for score'", _ONCE)]
    return [
        _load(f"{t.scores('P')}, {t.scores('dP')}, {t.rows('delta')}", _ONCE, "HBM -> registers"),
        *again,
        _compute(f"dS = {_dscore(t)}", _ONCE),
        _store(f"{t.scores('dS')} over dP"),
    ]


def _standard_dquery(t: _Tiles) -> list[Stage]:
    return [
        _keep(f"{t.query('dQ')} float32"),
        _load(f"{t.scores('dS')}, {t.key()}", _EACH_KV, _AHEAD),
        _compute("dQ += dS K", _EACH_KV),
        _store(t.query("dQ")),
    ]


def _standard_dkey(t: _Tiles) -> list[Stage]:
    return [
        _keep(f"{t.key('dK')} float32"),
        _load(f"{t.scores('dS')}, {t.query()}", _EACH_Q, _AHEAD),
        _compute("dK += dS^T Q", _EACH_Q),
        _store(t.key("dK")),
    ]


_STAGES = {
    "kv_spans": _kv_spans,
    "q_spans": _q_spans,
    "flash_forward": _flash_forward,
    "row_statistics": _row_statistics,
    "flash_dquery": _flash_dquery,
    "flash_dkey_dvalue": _flash_dkey_dvalue,
    "streaming_forward": _streaming_forward,
    "streaming_backward": _streaming_backward,
    "standard_scores": _standard_scores,
    "standard_softmax": _standard_softmax,
    "standard_output": _standard_output,
    "standard_weights": _standard_weights,
    "standard_dvalue": _standard_dvalue,
    "standard_dweights": _standard_dweights,
    "standard_dscores": _standard_dscores,
    "standard_dquery": _standard_dquery,
    "standard_dkey": _standard_dkey,
}
