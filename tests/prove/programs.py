"""A tile program as conditions on one tile, whatever the size of tiles.

With S the first row of tile T (S = T * block), T is below `x // block` where S + block <= x, and below
`(x + block - 1) // block` where S < x. Ends of ranges of tiles are such quotients, joined by min, max and where; so
whether T lies in a range is a condition on S and block that is linear where the rows are, and T * block, which is not,
never occurs. S is any int here: more than the multiples of block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import z3

from weft.compiler.analysis.tiles.results import TileProgram
from weft.ir.expr import Call, Const, Expr, Symbol

from .polynomials import Polynomial
from .terms import Reader

START, BLOCK = Polynomial.of_name("start"), Polynomial.of_name("block")
COUNTS = ("n_edge", "n_full")


class Unsupported(Exception):
    """A tile program of another shape than analysis writes."""


@dataclass
class Tile:
    """The tile that begins at row `start`, and a tile program that runs for a tile of the other axis."""

    program: TileProgram
    reader: Reader  # its symbols, with the lines of the program as far as they were read
    ends: dict[str, Expr] = field(default_factory=dict)  # lines that are numbers of tiles
    _below: dict[str, z3.BoolRef] = field(default_factory=dict)

    @staticmethod
    def of(program: TileProgram, reader: Reader) -> Tile:
        tile = Tile(program, reader)
        for line in program.body:
            if line.name in program.outputs:
                tile.ends[line.name] = line.value
            elif line.name not in COUNTS:
                reader.values[line.name] = reader.integer(line.value)  # type: ignore[index]
        return tile

    def below(self, end: str | Expr) -> z3.BoolRef:
        """Whether the tile's number is less than this one."""
        if isinstance(end, str):
            if end not in self._below:
                self._below[end] = self._compared(self.ends[end])
            return self._below[end]
        return self._compared(end)

    def _compared(self, node: Expr) -> z3.BoolRef:
        terms = self.reader.terms
        match node:
            case Const(0):
                return terms.term(START) < 0
            case Symbol(name) if name in self.ends:
                return self.below(name)
            case Call("floordiv", (x, Symbol("block"))):
                return terms.term(START + BLOCK - self.reader.integer(x)) <= 0
            case Call("minimum", (a, b)):
                return z3.And(self._compared(a), self._compared(b))
            case Call("maximum", (a, b)):
                return z3.Or(self._compared(a), self._compared(b))
            case Call("where", (condition, a, b)):
                return z3.If(self.reader.truth(condition), self._compared(a), self._compared(b))
            case _:
                raise Unsupported(f"a number of tiles that is written {node}")

    @property
    def ranges(self) -> list[tuple[str, str, str, str]]:
        """Names of lo, full_lo, full_hi, hi of each range."""
        return list(zip(*[iter(self.program.outputs)] * 4))

    def within(self, lo: str, hi: str) -> z3.BoolRef:
        return z3.And(z3.Not(self.below(lo)), self.below(hi))

    def visited(self) -> z3.BoolRef:
        return z3.Or([self.within(lo, hi) for lo, _, _, hi in self.ranges])

    def full(self) -> z3.BoolRef:
        return z3.Or([self.within(full_lo, full_hi) for _, full_lo, full_hi, _ in self.ranges])

    def in_order(self, length: Polynomial) -> list[tuple[str, z3.BoolRef]]:
        """What must not be: the tile shows that two ends are out of order, or that a range leaves the axis."""
        chain = self.program.outputs
        found = [(f"0 <= {chain[0]}", z3.And(z3.Not(self.below(chain[0])), self.below(Const(0))))]
        for a, b in pairwise(chain):
            found.append((f"{a} <= {b}", z3.And(z3.Not(self.below(b)), self.below(a))))
        term = self.reader.terms.term
        past = term(START) >= term(length)
        return [*found, (f"{chain[-1]} <= tiles", z3.And(past, self.below(chain[-1])))]
