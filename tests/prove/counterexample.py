"""Values that refute a claim: confirmed in plain Python, and printed as a script that anyone can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import z3

import weft
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import TileProgram
from weft.compiler.analysis.tiles.survey import Survey
from weft.compiler.analysis.values.ranges import check_integers
from weft.ir.canonical import canonical
from weft.ir.expr import SYMBOLS, Call, Const, Expr, Load, Scalar, Symbol, symbol
from weft.ir.operators import OPERATORS
from weft.ir.walk import nodes, scalars, substitute, tensors

from .questions import Question
from .terms import INT32, INT64, Terms, read_limits, trusted_reads
from .widths import Place, places, width

Number = int | bool
TEXTUAL = (
    "casts",
    "overflow in lookups",
    "overflow in surveys",
)  # questions about text, which hold for all values or for none
BY_ZERO = (0, -1, 1, INT32 - 1, -INT32)  # what a GPU may give for x // 0


@dataclass(frozen=True)
class Values:
    """Values of symbols, operands, reads of tensors by index, and conditions over floats by their text."""

    symbols: Mapping[str, int]
    scalars: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, Mapping[tuple[int, ...], Number]] = field(default_factory=dict)
    opaque: Mapping[str, Number] = field(default_factory=dict)

    @staticmethod
    def of(model: z3.ModelRef, terms: Terms) -> Values:
        def number(term: z3.ExprRef) -> Number:
            value = model.eval(term, model_completion=True)
            return z3.is_true(value) if z3.is_bool(value) else value.as_long()  # type: ignore[attr-defined]

        reads: dict[str, dict[tuple[int, ...], Number]] = {}
        for node, index, read in terms.reads.values():
            place = tuple(int(number(terms.term(i))) for i in index)
            reads.setdefault(node.tensor.name, {})[place] = number(read)
        symbols, scalars = {}, {}
        for declared in model.decls():
            name = declared.name()
            if declared.arity() == 0 and declared.range() == z3.IntSort():
                if "*" in name:
                    continue
                if name.startswith("arg "):
                    scalars[name.removeprefix("arg ")] = int(number(declared()))
                elif name.isidentifier():
                    symbols[name] = int(number(declared()))
        opaque = {text: number(term) for text, term in terms.opaque.items()}
        return Values(symbols, scalars, reads, opaque)


@dataclass(frozen=True)
class Subject:
    """What questions are about."""

    mask: Expr
    program: TileProgram | None = None
    survey: Survey | None = None

    def refuted_by(self, question: Question, values: Values) -> bool:
        return any(self._refuted(question, values, by_zero) for by_zero in BY_ZERO)

    def _refuted(self, question: Question, values: Values, by_zero: int) -> bool:
        if question.kind in TEXTUAL:
            return True
        at = Evaluator(values, by_zero, trusted_reads(self.mask))
        if question.kind != "lookup" and not at.accepts(self.mask):
            return False
        if question.kind in ("impossible", "certain"):
            assert self.survey is not None
            return wrong_survey(self.survey, self.mask, question.kind, at)
        assert self.program is not None
        return any(wrong_with(self.program, self.mask, question.kind, at, bounded) for bounded in (True, False))


@dataclass
class Evaluator:
    values: Values
    by_zero: int
    trusted: frozenset[str]
    lines: dict[str, Number] = field(default_factory=dict)  # of a tile program
    axis: str = ""  # of the program
    bounded: bool = False  # reads are cut, as in a program
    wraps: bool = False  # ints have the width that a GPU computes them in

    def value(self, node: Expr, compared: bool = False) -> Number:
        match node:
            case Const(value):
                return value  # type: ignore[return-value]
            case Symbol(name):
                return self.lines[name] if name in self.lines else self.values.symbols.get(name, 0)
            case Scalar(name):
                return self.values.scalars.get(name, 0)
            case Load(tensor, index):
                place = tuple(int(self.value(i)) for i in index)
                found = self.values.reads.get(tensor.name, {}).get(place, 0)
                cut = self.bounded and not compared and tensor.dtype == "int" and node.text not in self.trusted
                return min(max(found, read_limits()[0]), read_limits()[1]) if cut else found
            case Call() if self._is_opaque(node):
                return self.values.opaque.get(self._text(node), 0)
            case Call("floordiv" | "mod" as op, (a, b)):
                x, y = self.value(a), self.value(b)
                return OPERATORS[op].python(x, y) if y else self.by_zero if op == "floordiv" else x
            case Call("where", (condition, a, b)):
                return self.value(a if self.value(condition) else b, compared)
            case Call(op, args):
                inside = compared if OPERATORS[op].chooses else OPERATORS[op].gives == "bool"
                value = OPERATORS[op].python(*(self.value(a, inside) for a in args))
                return _wrapped(value, width(node, {})) if self.wraps and node.dtype == "int" else value
            case _:
                raise TypeError(node)

    def accepts(self, mask: Expr) -> bool:
        """Whether a call is accepted with these sizes and scalars, and its tensors are read inside."""
        s = self.values.symbols
        if any(isinstance(n, Load) and any(not 0 <= self.value(i) < INT32 for i in n.index) for n in nodes(mask)):
            return False
        ranges = {name: (s.get(name, 1), s.get(name, 1)) for name in SYMBOLS}
        ranges["q_pos"] = s["q_offset"], s["q_offset"] + max(s["q_len"], 1) - 1
        ranges["kv_pos"] = 0, max(s["kv_len"], 1) - 1
        ranges |= {n.name: (self.values.scalars.get(n.name, 0),) * 2 for n in scalars(mask)}
        problems = check_integers(mask, ranges, {t.name: (INT64,) * t.rank for t in tensors(mask)})
        return not any("overflow" in problem or "divisor" in problem for problem in problems)

    def _is_opaque(self, node: Call) -> bool:
        floats = any(a.dtype == "float" for a in node.args)
        return OPERATORS[node.op].makes_ints or (node.dtype == "bool" and floats)

    def _text(self, node: Expr) -> str:
        own = {"length": symbol(f"{self.axis}_len")} if self.axis else {}
        return canonical(substitute(node, own)).text


def _wrapped(value: Number, bits: int) -> Number:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) if bits else value


def wrong_survey(survey: Survey, mask: Expr, kind: str, at: Evaluator) -> bool:
    if kind == "impossible":
        equal = all(at.value(survey.q_values[n]) == at.value(survey.kv_values[m]) for n, m in survey.equal)
        return bool(at.value(mask)) and not (equal and at.value(survey.possible))
    return not at.value(mask) and bool(at.value(survey.certain))


def wrong_with(program: TileProgram, mask: Expr, kind: str, at: Evaluator, bounded: bool = True) -> str:
    """What is wrong with the tiles at these values; "" where nothing is. `bounded`: as a kernel for GPUs reads ints."""
    s = at.values.symbols
    if kind == "lookup":
        return _wrong_lookup(program, at)
    if s["start"] % s["block"] and kind not in ("overflow", "division"):
        return ""
    length = s["kv_len"] if program.axis == "kv" else s["q_len"]
    run = Evaluator(at.values, at.by_zero, at.trusted, {"length": length, "block": s["block"]}, program.axis, bounded)
    if kind == "overflow":
        return _wrong_overflow(program, run)
    for line in program.body:
        divides = kind == "division" and any(_by_zero(place, run) for place in places(line.value, line.name))
        if divides:
            return f"{line.name} divides by 0: {line.value}"
        run.lines[line.name] = run.value(line.value)
    ends = [int(run.lines[name]) for name in program.outputs]
    return "" if kind == "division" else _wrong_ends(program, mask, kind, at, ends, length)


def _by_zero(place: Place, run: Evaluator) -> bool:
    """Whether a division by 0 is computed."""
    taken = all(bool(run.value(condition)) == wanted for condition, wanted in place.guards)
    return taken and place.node.op in ("floordiv", "mod") and run.value(place.node.args[1]) == 0


def _wrong_overflow(program: TileProgram, run: Evaluator) -> str:
    """Where other tiles are found with ints that wrap around than with ints of any size."""
    found = []
    for at in (run, replace(run, lines=dict(run.lines), wraps=True)):
        for line in program.body:
            at.lines[line.name] = at.value(line.value)
        found.append([at.lines[name] for name in program.outputs])
    return "" if found[0] == found[1] else f"the ends are {found[1]} where ints wrap around, and should be {found[0]}"


def _wrong_lookup(program: TileProgram, at: Evaluator) -> str:
    s = dict(at.values.symbols)
    ranges = list(zip(*[iter([s.get(name, 0) for name in program.outputs])] * 4))
    edges = [t for lo, full_lo, full_hi, hi in ranges for t in (*range(lo, full_lo), *range(full_hi, hi))]
    fulls = [t for _, full_lo, full_hi, _ in ranges for t in range(full_lo, full_hi)]
    lines = {line.name: line.value for line in program.body}
    for what, tiles, node in (("edge", edges, program.edge_tile), ("full", fulls, program.full_tile)):
        found = [Evaluator(Values({**s, "i": i}), 0, frozenset()).value(node) for i in range(len(tiles))]
        if found != tiles or at.value(lines[f"n_{what}"]) != len(tiles):
            return f"the {what} tiles are {tiles}, and were found as {found}"
    return ""


def _wrong_ends(program: TileProgram, mask: Expr, kind: str, at: Evaluator, ends: list[int], length: int) -> str:
    s = at.values.symbols
    tile = s["start"] // s["block"]
    if kind == "order":
        chain = [0, *ends, -(-length // s["block"])]
        return f"ends are out of order: {chain}" if chain != sorted(chain) else ""
    ranges = list(zip(*[iter(ends)] * 4))
    in_full = any(full_lo <= tile < full_hi for _, full_lo, full_hi, _ in ranges)
    if kind == "skipped":
        skipped = not any(lo <= tile < hi for lo, *_, hi in ranges)
        return "a visible pair lies in a tile that is skipped" if skipped and at.value(mask) else ""
    if in_full and s["start"] + s["block"] > length:
        return "a full tile reaches past the end"
    row = s["kv_pos"] if program.axis == "kv" else s["q_pos"] - s["q_offset"]
    hidden = row < length and not at.value(mask)
    return "a hidden pair lies in a tile that is called full" if in_full and hidden else ""


# -- as a script ------------------------------------------------------------------------------------------------------
def script(mask: Expr, axis: str, kind: str, values: Values) -> str:
    """Python that shows the counterexample, from the top folder of the project."""
    text = str(weft.Attention(mask=mask, name="refuted"))
    return f"""import weft
from tests.prove.counterexample import Values, show

refuted = weft.parse_attention('''
{text}
''')
show(refuted, {axis!r}, {kind!r}, {values!r})
"""


def show(attention: weft.Attention, axis: str, kind: str, values: Values, say: Callable[[str], None] = print) -> bool:
    """Say what is wrong with a variant at these values; whether something is."""
    facts = facts_of(attention)
    mask = attention.canonical.folded_mask
    if not axis:
        question = Question(kind, "", (), (), (), Terms())  # type: ignore[arg-type]
        wrong = Subject(mask, survey=facts.survey).refuted_by(question, values)
        say(f"{kind}: {'wrong' if wrong else 'nothing is wrong'}")
        return wrong
    program = facts.kv_tiles if axis == "kv" else facts.q_tiles
    runs = [(Evaluator(values, by_zero, trusted_reads(mask)), cut) for by_zero in BY_ZERO for cut in (True, False)]
    said = next(filter(None, (wrong_with(program, mask, kind, at, cut) for at, cut in runs)), "")
    say(said or "nothing is wrong")
    return bool(said)
