"""What could be wrong with the tiles of a variant, each as a condition that must hold for no values.

What is known of a call: lengths are at most 2**30, q_offset lies within 30 bits, int scalars within 32; the mask
divides by nothing that is 0, and no index is negative. The tile that runs a program is any range of positions, of any
size: of queries from q_first (row 0 or later) to q_last, of keys from kv_first to kv_last, possibly past the end. The
tile that may be visited has `block` rows from `start` on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import z3

from weft.compiler.analysis.tiles.results import TileProgram
from weft.compiler.analysis.tiles.survey import Survey
from weft.ir.expr import Expr, Load, Symbol
from weft.ir.walk import nodes

from .polynomials import Polynomial
from .programs import BLOCK, START, Tile
from .terms import INT32, Reader, Terms, trusted_reads

LONGEST, FARTHEST, LARGEST_TILE = 2**30, 2**30 - 1, 10**7
SIZES = {  # symbols of a call besides positions: least and greatest value
    "q_len": (0, LONGEST), "kv_len": (0, LONGEST), "q_offset": (-FARTHEST, FARTHEST), "head": (0, INT32 - 1),
    "kv_head": (0, INT32 - 1), "batch": (0, INT32 - 1), "group": (1, INT32 - 1), "head_dim": (1, INT32 - 1),
    "start": (-LARGEST_TILE, 2 * LONGEST), "block": (1, LARGEST_TILE),
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """Whether values exist for which one of the alternatives holds."""

    kind: str  # skipped, hidden in full, order, lookup, overflow, division, casts, impossible, certain, ...
    axis: str  # of the tiles that are visited; "" for both
    alternatives: tuple[tuple[str, z3.BoolRef], ...]  # with a label each
    given: tuple[z3.BoolRef, ...]  # what is known of the values
    accepted: tuple[z3.BoolRef, ...]  # known too, seldom needed: the mask's own ints have 32 bits
    terms: Terms

    @property
    def title(self) -> str:
        return f"{self.axis} {self.kind}".strip()


@dataclass
class Call:
    """What a call gives, as names of the solver, and one pair of positions in it."""

    terms: Terms
    known: list[z3.BoolRef] = field(default_factory=list)
    values: dict[str, Polynomial] = field(default_factory=dict)

    @staticmethod
    def of(mask: Expr) -> Call:
        call = Call(Terms(trusted_reads(mask)))
        for name, (low, high) in SIZES.items():
            call.name(name)
            call.known += [z3.Int(name) >= low, z3.Int(name) <= high]
        call.name("q_pos"), call.name("kv_pos")
        call.require(("q_offset", "<=", "q_pos"), ("q_pos", "<", "q_end"), ("kv_pos", ">=", 0))
        return call

    def name(self, text: str) -> None:
        self.values[text] = Polynomial.of_name(text)

    def require(self, *conditions: tuple[str, str, str | int]) -> None:
        for a, sign, b in conditions:
            self.known.append(compared(a, sign, b))


def _int(text: str | int) -> z3.ArithRef:
    if text == "q_end":
        return z3.Int("q_offset") + z3.Int("q_len")
    return z3.IntVal(text) if isinstance(text, int) else z3.Int(text)


def everywhere(mask: Expr, call: Call, axis: str) -> list[z3.BoolRef]:
    """The ints of the mask have 32 bits at every pair of the call: here at the corners of a tile's pairs."""
    ends = {"q": ("q_first", "q_last"), "kv": ("kv_least", "kv_most")}
    if axis == "q":
        ends = {"q": ("q_offset", "q_most"), "kv": ("kv_first", "kv_last")}
    kv_len = z3.Int("kv_len")
    known = [z3.Int("kv_least") == 0, z3.Int("kv_most") == z3.If(kv_len > 0, kv_len - 1, z3.IntVal(0))]
    known.append(z3.Int("q_most") == _int("q_end") - 1)
    for q, kv in product(ends["q"], ends["kv"]):
        corner = {"q_pos": Polynomial.of_name(q), "kv_pos": Polynomial.of_name(kv)}
        reader = Reader(call.terms, {**call.values, **corner})
        reader.truth(mask)
        known += fits(reader)
    return known


def compared(a: str | int, sign: str, b: str | int) -> z3.BoolRef:
    x, y = _int(a), _int(b)
    return {"<=": x <= y, "<": x < y, ">=": x >= y, ">": x > y}[sign]


def fits(reader: Reader) -> list[z3.BoolRef]:
    """The ints that the mask computes have 32 bits: what a call is checked for."""
    terms = [reader.terms.term(value) for value in reader.computed]
    return [z3.And(term >= -INT32, term < INT32) for term in terms]


def defined(reader: Reader) -> list[z3.BoolRef]:
    """No divisor is 0 and no index negative."""
    divisors = [reader.terms.term(d) != 0 for d in reader.divisors if d.value is None]
    indices = [reader.terms.term(i) for i in reader.indices if i.value is None]
    return divisors + [z3.And(i >= 0, i < INT32) for i in indices]


def tile_questions(mask: Expr, program: TileProgram) -> list[Question]:
    """A visible pair in a tile that is skipped; a hidden pair in a tile that is called full; ranges out of order.

    Twice where it makes a difference that kernels for GPUs cut ints that they read from tensors, and others do not.
    """
    found = []
    for bounded in (True, False) if _reads_untrusted(mask, program) else (True,):
        for make in (_visible_and_skipped, _hidden_in_full, _out_of_order):
            found.append(make(mask, program, bounded))
    return found


def _reads_untrusted(mask: Expr, program: TileProgram) -> bool:
    trusted = trusted_reads(mask)
    read = [n for line in program.body for n in nodes(line.value) if isinstance(n, Load) and n.dtype == "int"]
    return any(node.text not in trusted for node in read)


def setting(mask: Expr, program: TileProgram) -> tuple[Call, Reader, Reader]:
    """The call, the mask at a pair, and the program's lines for a tile of the other axis that holds its position."""
    call, pair, tile = _setting(mask, program)
    pair.truth(mask)
    reader = tile.reader
    for name in program.outputs:  # as numbers, for what reads them
        reader.values[name] = Polynomial.of_name(name)  # type: ignore[index]
    return call, pair, reader


def _setting(mask: Expr, program: TileProgram, bounded: bool = True) -> tuple[Call, Reader, Tile]:
    call = Call.of(mask)
    pair = Reader(call.terms, call.values)
    own = "kv_len" if program.axis == "kv" else "q_len"
    values = {**call.values, "length": Polynomial.of_name(own), "block": BLOCK, "start": START}
    if program.axis == "kv":
        ends, first = ("q_first", "q_last"), "q_offset"
        call.require((first, "<=", ends[0]), (ends[0], "<=", "q_pos"), ("q_pos", "<=", ends[1]))
    else:
        ends = ("kv_first", "kv_last")
        call.require(
            (0, "<=", ends[0]), (ends[0], "<=", "kv_pos"), ("kv_pos", "<=", ends[1]), ("kv_pos", "<", "kv_len")
        )
    call.require((ends[1], "<", INT32))
    for end in ends:
        call.name(end)
        values[end] = Polynomial.of_name(end)
    multiple = z3.Or(z3.Int("start") >= 0, z3.Int("start") <= -z3.Int("block"))
    call.known.append(multiple)
    reader = Reader(call.terms, values, {"length": own}, bounded=bounded)
    return call, pair, Tile.of(program, reader)


def _row(program: TileProgram) -> z3.ArithRef:
    """The row on the program's axis of the pair."""
    return z3.Int("kv_pos") if program.axis == "kv" else z3.Int("q_pos") - z3.Int("q_offset")


def _in_tile(program: TileProgram) -> list[z3.BoolRef]:
    row, start, block = _row(program), z3.Int("start"), z3.Int("block")
    return [start >= 0, start <= row, row < start + block]


def _question(kind: str, axis: str, call: Call, pair: Reader, alternatives: list[tuple[str, z3.BoolRef]]) -> Question:
    given = (*call.known, *defined(pair))
    return Question(kind, axis, tuple(alternatives), given, tuple(fits(pair)), call.terms)


def _visible_and_skipped(mask: Expr, program: TileProgram, bounded: bool) -> Question:
    call, pair, tile = _setting(mask, program, bounded)
    visible = pair.truth(mask)
    in_range = compared("kv_pos", "<", "kv_len")
    wrong = z3.And(visible, in_range, z3.Not(tile.visited()), *_in_tile(program))
    return _question("skipped", program.axis, call, pair, [("a visible pair in a tile that is skipped", wrong)])


def _hidden_in_full(mask: Expr, program: TileProgram, bounded: bool) -> Question:
    """Of a tile that is called full every row exists, and every pair with a real position of the other axis is seen."""
    call, pair, tile = _setting(mask, program, bounded)
    hidden = z3.Not(pair.truth(mask))
    row, length = _row(program), z3.Int("kv_len" if program.axis == "kv" else "q_len")
    # The last row of a tile is the first to lie past the end; here the pair's own row may, if it is a row of keys.
    past = z3.And(z3.Int("start") + z3.Int("block") > length, row == z3.Int("start"))
    alternatives = []
    for k, (_, full_lo, full_hi, _) in enumerate(tile.ranges):
        inside = z3.And(tile.within(full_lo, full_hi), *_in_tile(program))
        alternatives.append((f"a hidden pair in a full tile of range {k}", z3.And(hidden, row < length, inside)))
        alternatives.append((f"a full tile of range {k} past the end", z3.And(past, inside)))
    return _question("hidden in full", program.axis, call, pair, alternatives)


def _out_of_order(mask: Expr, program: TileProgram, bounded: bool) -> Question:
    call, pair, tile = _setting(mask, program, bounded)
    length = Polynomial.of_name("kv_len" if program.axis == "kv" else "q_len")
    return _question("order", program.axis, call, pair, [(f"not {a}", b) for a, b in tile.in_order(length)])


# -- where the i-th tile is -------------------------------------------------------------------------------------------
def lookup_question(program: TileProgram) -> Question:
    """edge_tile and full_tile number the tiles of ranges in order, each once, and n_edge and n_full count them.

    Then no tile is visited twice: the i-th ones grow with i, and there are as many as tiles.
    """
    terms = Terms()
    lines = {line.name: line.value for line in program.body}
    values = {name: Polynomial.of_name(name) for name in (*program.outputs, "i", "later")}
    known = [compared(a, "<=", b) for a, b in zip((0, *program.outputs), (*program.outputs, LONGEST))]
    reader = Reader(terms, values)
    for name in program.outputs:
        if not any(isinstance(n, Symbol) and n.name not in program.outputs for n in nodes(lines[name])):
            known.append(z3.Int(name) == terms.term(reader.integer(lines[name])))
    alternatives = []
    ranges = list(zip(*[iter(program.outputs)] * 4))
    parts = {
        "edge": [run for lo, full_lo, full_hi, hi in ranges for run in ((lo, full_lo), (full_hi, hi))],
        "full": [(full_lo, full_hi) for _, full_lo, full_hi, _ in ranges],
    }
    for what, runs in parts.items():
        tile, count = (program.edge_tile if what == "edge" else program.full_tile), lines[f"n_{what}"]
        number = terms.term(reader.integer(count))
        later = Reader(terms, {**values, "i": Polynomial.of_name("later")}).integer(tile)
        first = reader.integer(tile)
        inside = z3.Or([z3.And(z3.Int(a) <= terms.term(first), terms.term(first) < z3.Int(b)) for a, b in runs])
        index = z3.And(z3.Int("i") >= 0, z3.Int("i") < number)
        following = z3.And(z3.Int("later") > z3.Int("i"), z3.Int("later") < number)
        total = z3.Sum([z3.Int(b) - z3.Int(a) for a, b in runs])
        alternatives += [
            (f"n_{what} is another number", number != total),
            (f"an {what} tile outside the ranges", z3.And(index, z3.Not(inside))),
            (f"an {what} tile twice", z3.And(index, following, terms.term(later - first) <= 0)),
        ]
    return Question("lookup", program.axis, tuple(alternatives), tuple(known), (), terms)


# -- measured tiles ---------------------------------------------------------------------------------------------------
def survey_questions(mask: Expr, found: Survey) -> list[Question]:
    """A visible pair of two tiles that are called impossible; a hidden one of two that are called certain.

    Impossible are also tiles none of whose values are equal where they must be: bits show no more than that.
    """
    questions = [_cells_question(mask, found)] if found.cells else []
    for kind in ("impossible", "certain"):
        call = Call.of(mask)
        call.require(("kv_pos", "<", "kv_len"))
        pair = Reader(call.terms, call.values)
        visible = pair.truth(mask)
        decision = Reader(call.terms, {**call.values, **_ends(found, pair, call), **_cells(found, pair, call)})
        if kind == "impossible":
            equal = [_as_int(found.q_values[n], pair) == _as_int(found.kv_values[m], pair) for n, m in found.equal]
            wrong = z3.And(visible, z3.Not(z3.And(decision.truth(found.possible), *equal)))
        else:
            wrong = z3.And(z3.Not(visible), decision.truth(found.certain))
        questions.append(_question(kind, "", call, pair, [(f"a pair that shows {kind} wrong", wrong)]))
    return questions


def _ends(found: Survey, pair: Reader, call: Call) -> dict[str, Polynomial]:
    """Least and greatest value in the tiles that the pair lies in: the pair's own value lies between."""
    ends: dict[str, Polynomial] = {}
    for axis, values in (("q", found.q_values), ("kv", found.kv_values)):
        for n, value in enumerate(values):
            low, high = f"{axis}{n}_low", f"{axis}{n}_high"
            own = _as_int(value, pair)
            call.known += [z3.Int(low) <= own, own <= z3.Int(high)]
            ends |= {name: Polynomial.of_name(name) for name in (low, high)}
    return ends


def _cells(found: Survey, pair: Reader, call: Call) -> dict[str, z3.BoolRef]:
    """What conditions on blocks say of the tiles that the pair lies in: the pair's own block is among the blocks."""
    known: dict[str, z3.BoolRef] = {}
    for n, cells in enumerate(found.cells):
        some, every = z3.Bool(f"cells{n}_any"), z3.Bool(f"cells{n}_all")
        own = pair.truth(cells.condition)
        call.known += [z3.Implies(own, some), z3.Implies(every, own)]
        known |= {f"cells{n}_any": some, f"cells{n}_all": every}
    return known


def _cells_question(mask: Expr, found: Survey) -> Question:
    """Two pairs of one block for which the condition is not the same."""
    call = Call.of(mask)
    other = {"q_pos": Polynomial.of_name("q_other"), "kv_pos": Polynomial.of_name("kv_other")}
    first, second = Reader(call.terms, call.values), Reader(call.terms, {**call.values, **other})
    alternatives = []
    for n, cells in enumerate(found.cells):
        same = [
            _block(a, size) == _block(b, size)
            for a, b, size in (("q_pos", "q_other", cells.q), ("kv_pos", "kv_other", cells.kv))
        ]
        differ = first.truth(cells.condition) != second.truth(cells.condition)
        alternatives.append((f"condition {n} differs in a block", z3.And(differ, *same)))
    return _question("blocks", "", call, first, alternatives)


def _block(position: str, size: int) -> z3.ArithRef:
    """The number of the block of a position, rounded down as z3's division by a positive number is."""
    return z3.Int(position) / size


def _as_int(value: Expr, pair: Reader) -> z3.ArithRef:
    if value.dtype == "bool":
        return z3.If(pair.truth(value), z3.IntVal(1), z3.IntVal(0))
    return pair.terms.term(pair.integer(value, compared=True))
