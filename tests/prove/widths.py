"""In which width kernels compute tile programs, and whether everything fits.

Kernels for GPUs widen every symbol and scalar that a program reads to int64, and cut reads of tensors to 33 bits;
results are narrowed to int32, and looking up the i-th tile is arithmetic in int32. On a CPU ints have any size, but
dividing by 0 raises, also where the quotient would not matter; `where` computes the branch that it takes and no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import z3

import weft
from weft.codegen.dialects import TRITON
from weft.codegen.functions import FunctionPrinter
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import TileProgram
from weft.compiler.analysis.tiles.survey import Survey
from weft.ir.expr import Call, Const, Expr, Load, Scalar, Symbol
from weft.ir.operators import OPERATORS, Range
from weft.ir.walk import children, loads, nodes

from .programs import COUNTS
from .questions import LONGEST, SIZES, Question, defined, everywhere, fits, setting
from .questions import Call as Given
from .terms import INT31, INT32, INT64, Reader, read_limits

LEAST_BLOCK = 16  # of kernels for GPUs
_ENDS = {"q_first": (-INT31, INT32 - 1), "q_last": (-INT31, INT32 - 1), "kv_first": (0, INT32), "kv_last": (0, INT32)}


@dataclass(frozen=True)
class Place:
    """An operator of a program, and the conditions of `where` under which it is computed."""

    node: Call
    guards: tuple[tuple[Expr, bool], ...]
    line: str


def places(node: Expr, line: str, guards: tuple[tuple[Expr, bool], ...] = ()) -> Iterator[Place]:
    if isinstance(node, Call):
        yield Place(node, guards, line)
    match node:
        case Call("where", (condition, a, b)):
            yield from places(condition, line, guards)
            yield from places(a, line, (*guards, (condition, True)))
            yield from places(b, line, (*guards, (condition, False)))
        case _:
            for child in children(node):
                yield from places(child, line, guards)


# -- ranges without conditions ----------------------------------------------------------------------------------------
@dataclass
class Ranges:
    """Least and greatest values of ints in a program, by interval arithmetic."""

    known: dict[str, Range]

    def of(self, node: Expr) -> Range:
        match node:
            case Const(value):
                return int(value), int(value)
            case Symbol(name):
                return self.known[name]
            case Scalar():
                return -INT32 + 1, INT32 - 1
            case Load():
                return read_limits()
            case Call(op) if OPERATORS[op].makes_ints:
                return -INT32, INT32 - 1
            case Call("floordiv", (a, Symbol("block"))):  # whatever the size of tiles
                low, high = self.of(a)
                return min(low, 0), max(high, 0)
            case Call("mul", (Call("floordiv", (x, d)), other)) if d.text == other.text:  # x - x % d, or 0
                (low, high), size = self.of(x), max(map(abs, self.of(d)))
                return min(low - size, 0), max(high + size, 0)
            case Call("where", (_, a, b)):
                (c, d), (e, f) = self.of(a), self.of(b)
                return min(c, e), max(d, f)
            case Call(op, args):
                rule = OPERATORS[op].int_range
                assert rule is not None
                return rule(*map(self.of, args))
            case _:
                raise TypeError(node)


def width(node: Expr, lines: dict[str, int]) -> int:
    """Bits in which a GPU computes an int of a program: 64, or 32 where nothing in it was widened; 0 for a number."""
    match node:
        case Const():
            return 0
        case Symbol(name):
            return 0 if name == "block" else lines.get(name, 64)
        case Scalar() | Load():
            return 64
        case Call(op) if OPERATORS[op].makes_ints:
            return 32
        case Call("where", (_, a, b)):
            return max(width(a, lines), width(b, lines))
        case Call(_, args):
            return max(width(a, lines) for a in args)
        case _:
            raise TypeError(node)


# -- questions --------------------------------------------------------------------------------------------------------
def width_questions(mask: Expr, program: TileProgram) -> list[Question]:
    """An int beyond the width that it is computed in; a division by 0; an operand that loses its fraction."""
    return [_overflow(mask, program), _division(mask, program), _lookup_overflow(program), _cut_floats(mask, program)]


def _overflow(mask: Expr, program: TileProgram) -> Question:
    """What has no doubt by interval arithmetic is not asked for."""
    ranges = Ranges({**SIZES, **_ENDS, "length": (0, LONGEST)})
    widths: dict[str, int] = {}
    doubtful: list[tuple[Place, int]] = []
    for line in program.body:
        if line.name in COUNTS:
            continue
        for place in places(line.value, line.name):
            operator = OPERATORS[place.node.op]
            if place.node.dtype == "int" and not operator.makes_ints and not operator.chooses:
                low, high = ranges.of(place.node)
                bits = width(place.node, widths)
                if bits and not -(2 ** (bits - 1)) <= low <= high < 2 ** (bits - 1):
                    doubtful.append((place, bits))
        ranges.known[line.name] = ranges.of(line.value)
        widths[line.name] = width(line.value, widths)
        if line.name in program.outputs:  # in order, and no more than there are tiles: asked for by itself
            ranges.known[line.name] = (0, LONGEST)
    call, pair, reader = setting(mask, program)
    alternatives = []
    for place, bits in doubtful:
        value = reader.terms.term(reader.integer(place.node))
        beyond = _under(place, z3.Or(value < -(2 ** (bits - 1)), value >= 2 ** (bits - 1)), reader)
        label = f"{bits} bits in {place.line}: {place.node}"
        seen = z3.And(beyond, pair.truth(mask), z3.Int("kv_pos") < z3.Int("kv_len"))  # where it may do harm
        alternatives += [(label, seen), (label, beyond)]
    if not alternatives:
        return _asked("overflow", program, call, pair, [])
    inside = ("q_last", "<", "q_end") if program.axis == "kv" else ("kv_last", "<", "kv_len")
    call.require(inside)  # as kernels run programs
    question = _asked("overflow", program, call, pair, alternatives)
    return replace(question, accepted=(*question.accepted, *everywhere(mask, call, program.axis)))


def _under(place: Place, condition: z3.BoolRef, reader: Reader) -> z3.BoolRef:
    guards = [reader.truth(c) if taken else z3.Not(reader.truth(c)) for c, taken in place.guards]
    return z3.And(*guards, condition)


def _asked(
    kind: str, program: TileProgram, call: Given, pair: Reader, alternatives: list[tuple[str, z3.BoolRef]]
) -> Question:
    given = (*call.known, *defined(pair))
    different = tuple({wrong.get_id(): (label, wrong) for label, wrong in alternatives}.values())
    return Question(kind, program.axis, different, given, tuple(fits(pair)), call.terms)


def _division(mask: Expr, program: TileProgram) -> Question:
    call, pair, reader = setting(mask, program)
    alternatives = []
    for line in program.body:
        for place in places(line.value, line.name):
            divisor = place.node.args[-1]
            if place.node.op not in ("floordiv", "mod") or (isinstance(divisor, Symbol) and divisor.name == "block"):
                continue
            if not isinstance(divisor, Const):
                zero = reader.terms.term(reader.integer(divisor)) == 0
                alternatives.append((f"by 0 in {line.name}: {place.node}", _under(place, zero, reader)))
    return _asked("division", program, call, pair, alternatives)


def _lookup_overflow(program: TileProgram) -> Question:
    """Interval arithmetic is enough: there are at most 2**26 tiles."""
    most = LONGEST // LEAST_BLOCK
    ranges = Ranges({name: (0, most) for name in (*program.outputs, "i")})
    wrong = []
    for tile in (program.edge_tile, program.full_tile):
        for node in nodes(tile):
            if isinstance(node, Call) and node.dtype == "int":
                low, high = ranges.of(node)
                wrong += [] if -INT32 <= low <= high < INT32 else [(f"32 bits: {node}", z3.BoolVal(True))]
    return Question("overflow in lookups", program.axis, tuple(wrong), (), (), Given.of(Const(True)).terms)


def survey_width_question(found: Survey) -> Question:
    """Ends are widened to 64 bits before anything is computed with them; those of reads are compared only."""
    ends = {}
    for axis, values in (("q", found.q_values), ("kv", found.kv_values)):
        for n, value in enumerate(values):
            size = INT64 if loads(value) else INT32
            ends |= {f"{axis}{n}_{end}": (-size, size - 1) for end in ("low", "high")}
    ranges = Ranges({**SIZES, **ends})
    wrong = []
    for root in (found.possible, found.certain):
        for node in nodes(root):
            if isinstance(node, Call) and node.dtype == "int" and not OPERATORS[node.op].chooses:
                low, high = ranges.of(node)
                wrong += [] if -INT64 <= low <= high < INT64 else [(f"64 bits: {node}", z3.BoolVal(True))]
    return Question("overflow in surveys", "", tuple(wrong), (), (), Given.of(Const(True)).terms)


def _cut_floats(mask: Expr, program: TileProgram) -> Question:
    """What is printed: every int that is read is widened, no float is, and every result that is no number narrowed."""
    printer = FunctionPrinter(facts_of(weft.Attention(mask=mask)), TRITON)
    text = printer.tiles(program)
    widened = set(re.findall(r"^    (\w+) = tl\.cast\(\1, tl\.int64\)$", text, re.MULTILINE))
    made = {line.name for line in program.body}
    read = [n for line in program.body for n in nodes(line.value) if isinstance(n, (Scalar, Symbol))]
    ints, floats = set(), set()
    for node in read:
        if isinstance(node, Scalar):
            (ints if node.dtype == "int" else floats).add(f"arg_{node.name}")
        elif node.name not in made and node.name != "block":
            ints.add({"length": f"{program.axis}_len"}.get(node.name, node.name))
    wrong = [f"{name} stays in its width" for name in sorted(ints - widened)]
    wrong += [f"float {name} is cut to an int" for name in sorted(floats & widened)]
    alternatives = tuple((label, z3.BoolVal(True)) for label in wrong)
    return Question("casts", program.axis, alternatives, (), (), Given.of(Const(True)).terms)
