"""Which tile programs an SMT solver proved sound (`make prove`), by digest: what users read of it in `explain`.

A digest holds the canonical mask, the tile programs of both axes and the survey, with operands by number, so that a
name of the user's changes nothing. Where the mask or what analysis makes of it changes, its digest is not in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from ...ir.expr import Expr, Load, Scalar, TensorOperand
from ...ir.walk import nodes, rewrite
from .facts import Facts
from .records import TileProgram
from .survey import Survey

FILE = Path(__file__).with_name("proven.json")
_PROVEN = (
    "tiles: proven for all positions, lengths to 2**30 and values of operands (z3: no visible pair skipped, no hidden "
    "pair in a full tile)"
)
_BY_CONSTRUCTION = "tiles: sound by construction; not among those proven by `make prove`"


def claim(facts: Facts) -> str:
    """What is known of the tiles of a variant, in words."""
    found = digest(facts.attention.folded_mask, facts.kv_tiles, facts.q_tiles, facts.survey)
    return _PROVEN if found in _digests() else _BY_CONSTRUCTION


def digest(mask: Expr, kv: TileProgram, q: TileProgram, survey: Survey | None) -> str:
    """Sixteen hex digits of all that was proven something about."""
    text = "\n".join(_lines(mask, kv, q, survey))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines(mask: Expr, kv: TileProgram, q: TileProgram, survey: Survey | None) -> Iterator[str]:
    numbers, kinds = _numbers(mask)
    yield from kinds

    def text(node: Expr) -> str:
        return rewrite(node, lambda n: _numbered(n, numbers)).text

    yield text(mask)
    for program in (kv, q):
        yield f"{program.axis} {' '.join(program.outputs)}"
        yield from (f"{line.name} = {text(line.value)}" for line in program.body)
        yield f"{text(program.edge_tile)} | {text(program.full_tile)}"
    if survey is not None:
        yield from map(text, (*survey.q_values, *survey.kv_values, survey.possible, survey.certain))


def _numbers(mask: Expr) -> tuple[dict[str, str], list[str]]:
    """A name for each operand by the order in which the mask reads them, and what they are."""
    numbers: dict[str, str] = {}
    kinds: list[str] = []
    for node in nodes(mask):
        operand = node.tensor if isinstance(node, Load) else node if isinstance(node, Scalar) else None
        if operand is not None and operand.name not in numbers:
            numbers[operand.name] = f"operand{len(numbers)}"
            rank = f" of rank {operand.rank}" if isinstance(operand, TensorOperand) else ""
            kinds.append(f"{numbers[operand.name]}: {operand.dtype}{rank}")
    return numbers, kinds


def _numbered(node: Expr, numbers: Mapping[str, str]) -> Expr | None:
    match node:
        case Scalar(name, dtype):
            return Scalar(numbers[name], dtype)
        case Load(tensor, index):
            return Load(TensorOperand(numbers[tensor.name], tensor.rank, tensor.dtype), index)
        case _:
            return None


# -- the file ---------------------------------------------------------------------------------------------------------
@cache
def _digests() -> frozenset[str]:
    return frozenset(json.loads(FILE.read_text(encoding="utf-8"))["proven"])


def write(names: Mapping[str, str]) -> None:
    """Replace the file: names of variants, for people, by digest."""
    about = "Digests of tile programs that `make prove` proved sound (compiler/analysis/proven.py); written by it."
    ordered = dict(sorted(names.items(), key=lambda item: item[::-1]))
    FILE.write_text(json.dumps({"about": about, "proven": ordered}, indent=1) + "\n", encoding="utf-8")
    _digests.cache_clear()
