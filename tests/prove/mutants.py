"""Wrong bounds, one mistake each: a prover that proves one of them proves nothing.

A mutant is a piece of the text of a function of analysis and what takes its place while `planted`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType

import weft
from weft import kv_pos, masks, q_pos
from weft.compiler.analysis.tiles import bounds, intervals, programs, survey
from weft.compiler.analysis.values import affine, interval_arithmetic
from weft.ir.canonical import canonical
from weft.ir.expr import Expr, expression

window, prefix, size = (weft.scalar(n, int) for n in ("window", "prefix", "size"))
ids = weft.tensor("ids", 1, int)
recent = masks.causal & (q_pos - kv_pos < 40)
sinks = masks.global_window(prefix, window)


@dataclass(frozen=True)
class Mutant:
    mistake: str
    place: str  # module.function or module.class.method, of analysis
    old: str
    new: str
    made: Expr | bool  # a mask that shows it
    shown: str  # the question that it fails

    @property
    def mask(self) -> Expr:
        return canonical(expression(self.made))


_MODULES: dict[str, ModuleType] = {
    m.__name__.rsplit(".", 1)[-1]: m for m in (affine, bounds, interval_arithmetic, intervals, survey, programs)
}


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Analysis with the mistake in it."""
    module = _MODULES[mutant.place.split(".")[0]]
    *path, name = mutant.place.split(".")[1:]
    owner: object = getattr(module, path[0]) if path else module
    kept = inspect.getattr_static(owner, name)
    setattr(owner, name, _mutated(kept, mutant, module))
    affine._KNOWN.clear()
    try:
        yield
    finally:
        setattr(owner, name, kept)
        affine._KNOWN.clear()


def _mutated(function: FunctionType, mutant: Mutant, module: ModuleType) -> object:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.mistake}: {mutant.place} holds {mutant.old!r} {source.count(mutant.old)} times")
    made: dict[str, object] = {}
    text = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(text, f"<{mutant.mistake}>", "exec"), module.__dict__, made)
    return made[function.__name__]


MUTANTS = (
    Mutant("the last visible key is left out", "bounds._Solver.limited",
           "value = limit.shifted(1) if upper else limit", "value = limit", masks.causal, "kv skipped"),
    Mutant("`<` is taken for `<=`", "bounds._Solver.comparison",
           "return self.at_most_zero(below.shifted(1), assume, node)", "return self.at_most_zero(below, assume, node)",
           kv_pos < q_pos, "kv hidden in full"),
    Mutant("a negative coefficient keeps its direction", "bounds._Solver.solved",
           "scaled(-1), False\n    # upper", "scaled(-1), True\n    # upper", q_pos - kv_pos < 40, "kv skipped"),
    Mutant("a quotient is rounded the wrong way", "bounds._Solver.limited",
           "limit.shifted(1 if upper else 0)", "limit", masks.block_causal(12), "kv skipped"),
    Mutant("a union is taken for an intersection", "bounds._Solver.terms",
           'self.both if (op == "and") == wanted', 'self.both if (op == "and") or wanted', masks.prefix_lm(7),
           "kv skipped"),
    Mutant("a conjunct is left out of what is full", "bounds._Piece.add",
           "self.full_lo.append(_assumed(literal, every[1], axis.end))", "pass", recent, "kv hidden in full"),
    Mutant("a negation flips nothing", "bounds._Solver.terms",
           "return self.terms(a, not wanted)", "return self.terms(a, wanted)", ~masks.block_diagonal(12), "kv skipped"),
    Mutant("the nearest query stands for the farthest", "bounds._Piece.add",
           "self.lo.append(_assumed(literal, some[0], axis.start))",
           "self.lo.append(_assumed(literal, some[1], axis.start))", recent, "kv skipped"),
    Mutant("the transpose has the tile's ends exchanged", "bounds.q_bounds",
           'symbol("kv_first"), symbol("kv_last"), start', 'symbol("kv_last"), symbol("kv_first"), start',
           masks.causal, "q skipped"),
    Mutant("rows of queries are taken for positions", "programs._rows",
           'return position if axis == "kv" else _minus(position, symbol("q_offset"))', "return position",
           masks.causal, "q skipped"),
    Mutant("full parts are not clipped at the length", "programs._rows",
           "minimum(full_hi, _LENGTH)", "full_hi", masks.causal, "kv hidden in full"),
    Mutant("the end of the full part is rounded up", "programs._full",
           "_downward(maximum(rows.full_hi, _ZERO))", "_upward(maximum(rows.full_hi, _ZERO))", masks.causal,
           "q hidden in full"),
    Mutant("the start is rounded up", "programs._tiles",
           'choose(make("lt", begin, end), _downward(begin), hi)', 'choose(make("lt", begin, end), _upward(begin), hi)',
           recent, "kv skipped"),
    Mutant("the end is rounded down", "programs._tiles", "_upward(maximum(rows.hi, _ZERO))",
           "_downward(maximum(rows.hi, _ZERO))", masks.causal, "kv skipped"),
    Mutant("a range begins in the one before", "programs._later_tiles",
           "_at_least(_downward(rows.lo), before), hi", "_downward(rows.lo), hi", sinks, "kv order"),
    Mutant("ranges that overlap are not cut", "programs._separated",
           "choose(apart, a.hi, cut)", "choose(apart, a.hi, a.lo)", sinks, "kv skipped"),
    Mutant("the last edge tile before a gap is taken twice", "programs._nth",
           'make("lt", _I, before.expr)', 'make("le", _I, before.expr)', sinks, "kv lookup"),
    Mutant("a divisor is taken for positive", "bounds._assumed",
           "choose(_assumption(literal), value, default)", "value", masks.block_causal(size), "kv skipped"),
    Mutant("a remainder is taken to grow over the tile", "interval_arithmetic._mod_range",
           'make("eq", *periods) if periods[0].text != periods[1].text else const(True)', "const(True)",
           kv_pos <= q_pos % 12, "kv skipped"),
    Mutant("a size is taken to grow over the tile", "interval_arithmetic._abs_range",
           "maximum(low, minus_high, const(0)), maximum(minus_low, high)", "low, high", kv_pos <= abs(q_pos),
           "kv skipped"),
    Mutant("a factor of unknown sign is taken for positive", "interval_arithmetic._times",
           "sign.value is not None or _positive(sign, tile)", "True", kv_pos <= window * q_pos, "kv skipped"),
    Mutant("a hull ends with the first of its intervals", "bounds.few",
           "hi = maximum(", "hi = minimum(", (kv_pos == q_pos) | (kv_pos == q_pos + 40) | (kv_pos == q_pos + 80)
           | (kv_pos == q_pos + 120) | (kv_pos == q_pos + 160), "kv skipped"),
    Mutant("what is hidden at the end stays in the full part", "intervals._sides",
           "choose(condition, hidden.lo, axis.end)", "axis.end",
           (kv_pos < prefix) | (q_pos < prefix) | (abs(q_pos - kv_pos) < window), "kv hidden in full"),
    Mutant("only queries of one kind are looked at", "bounds._tile_part",
           "last = minimum(last, _assumed(l, plus(l.value, -1), axis.last))",
           "last = minimum(first, _assumed(l, plus(l.value, -1), axis.last))",
           (q_pos < prefix) & (kv_pos <= q_pos), "kv skipped"),
    Mutant("a proof believes what is not so", "affine._lower",
           'if least < 0:\n                return float("-inf")', "if False:\n                pass",
           weft.minimum(q_pos, 5) >= kv_pos, "kv order"),
    Mutant("measured ends are exchanged", "survey._compared",
           "_holds(op, a[0], b[1])", "_holds(op, a[1], b[0])", masks.document(ids), "impossible"),
    Mutant("one of two alternatives must be equal", "survey._equalities",
           'case Call("and", (a, b)):', 'case Call("and" | "or", (a, b)):', masks.document(ids) | masks.prefix_lm(40),
           "impossible"),
    Mutant("measured conditions are negated each by itself", "survey._negated",
           'make("or" if op == "and" else "and"', "make(op", ~(masks.document(ids) & masks.causal), "impossible"),
)  # fmt: skip
