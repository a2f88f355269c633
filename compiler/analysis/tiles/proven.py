"""Which tile programs an SMT solver proved sound (`make prove`), by digest: what users read of it in `explain`.

A digest holds the canonical mask, the tile programs of both axes and the survey, with operands by number, so that it
makes no difference what a user calls them. Where the mask or what analysis makes of it changes, the digest is another,
and not in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from ....ir.expr import Call, Expr, Load, Scalar, TensorOperand
from ....ir.operators import OPERATORS
from ....ir.walk import children
from .facts import Facts
from .results import TileProgram
from .survey import Survey

FILE = Path(__file__).with_name("proven.json")
_PROVEN = (
    "tiles: proven for all positions, lengths to 2**30 and values of operands (z3: no visible pair skipped, no hidden "
    "pair in a full tile)"
)
_BY_CONSTRUCTION = "tiles: sound by construction; not among those proven by `make prove`"


def claim(facts: Facts) -> str:
    """What is known of the tiles of a variant, in words."""
    found = digest(facts.attention.canonical.folded_mask, facts.kv_tiles, facts.q_tiles, facts.survey)
    return _PROVEN if found in _digests() else _BY_CONSTRUCTION


def digest(mask: Expr, kv: TileProgram, q: TileProgram, survey: Survey | None) -> str:
    """Sixteen hex digits of all that was proven something about."""
    text = "\n".join(_lines(mask, kv, q, survey))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines(mask: Expr, kv: TileProgram, q: TileProgram, survey: Survey | None) -> Iterator[str]:
    numbers = _numbers(mask)
    yield _text(mask, numbers)
    for program in (kv, q):
        yield f"{program.axis} {' '.join(program.outputs)}"
        yield from (f"{line.name} = {_text(line.value, numbers)}" for line in program.body)
        yield f"{_text(program.edge_tile, numbers)} | {_text(program.full_tile, numbers)}"
    if survey is not None:
        found = (*survey.q_values, *survey.kv_values, survey.possible, survey.certain)
        yield from (_text(node, numbers) for node in found)
        yield from (f"cells {c.q} {c.kv} {_text(c.condition, numbers)}" for c in survey.cells)
        yield from (f"equal {n} {m}" for n, m in survey.equal)
        if survey.by_pair:
            yield "pairs"


# -- text in which names of operands change nothing -------------------------------------------------------------------
# Where order means nothing, what analysis writes is ordered by text, names included; here it is ordered anew.
_IN_ANY_ORDER = frozenset({"mul", "and", "or", "xor", "minimum", "maximum"})  # and however they are grouped


def _numbers(mask: Expr) -> dict[str, int]:
    """A number for each operand by where it is first read, whatever the operands are called."""
    numbers: dict[str, int] = {}

    def visit(node: Expr) -> None:
        operand = node.tensor if isinstance(node, Load) else node
        if isinstance(operand, (Scalar, TensorOperand)):
            numbers.setdefault(operand.name, len(numbers))
        for child in sorted(children(node), key=lambda c: _text(c, None)):
            visit(child)

    visit(mask)
    return numbers


def _text(node: Expr, numbers: Mapping[str, int] | None) -> str:
    """Prefix notation: terms of sums and operands of what commutes in order of their text; None: all operands alike."""

    def operand(name: str) -> str:
        return "operand" if numbers is None else f"operand {numbers.get(name, name)}"

    match node:
        case Scalar(name, dtype):
            return f"{operand(name)}: {dtype}"
        case Load(tensor, index):
            return f"{operand(tensor.name)}: {tensor.dtype}[{', '.join(_text(i, numbers) for i in index)}]"
        case Call("add" | "sub" | "neg") if node.dtype == "int":
            return f"sum({', '.join(sorted(_terms(node, '+', numbers)))})"
        case Call(op) if op in _IN_ANY_ORDER:
            return f"{op}({', '.join(sorted(_text(part, numbers) for part in _parts(node, op)))})"
        case Call(op, args):
            texts = [_text(a, numbers) for a in args]
            return f"{op}({', '.join(sorted(texts) if OPERATORS[op].commutative else texts)})"
        case _:
            return node.text


def _terms(node: Expr, sign: str, numbers: Mapping[str, int] | None) -> Iterator[str]:
    """The terms of a sum of ints, each with its sign."""
    opposite = "-" if sign == "+" else "+"
    match node:
        case Call("add" | "sub" as op, (a, b)):
            yield from _terms(a, sign, numbers)
            yield from _terms(b, sign if op == "add" else opposite, numbers)
        case Call("neg", (a,)):
            yield from _terms(a, opposite, numbers)
        case _:
            yield sign + _text(node, numbers)


def _parts(node: Expr, op: str) -> Iterator[Expr]:
    if isinstance(node, Call) and node.op == op:
        for argument in node.args:
            yield from _parts(argument, op)
    else:
        yield node


# -- the file ---------------------------------------------------------------------------------------------------------
@cache
def _digests() -> frozenset[str]:
    return frozenset(json.loads(FILE.read_text(encoding="utf-8"))["proven"])


def write(names: Mapping[str, str]) -> None:
    """Replace the file: names of variants, for people, by digest."""
    about = "Digests of tile programs that `make prove` proved sound (compiler/analysis/tiles/proven.py)."
    ordered = dict(sorted(names.items(), key=lambda item: item[::-1]))
    FILE.write_text(json.dumps({"about": about, "proven": ordered}, indent=1) + "\n", encoding="utf-8")
    _digests.cache_clear()
