"""What analysis hands on is checked before anything is planned from it."""

from __future__ import annotations

from collections.abc import Iterator

from ....ir.errors import InternalError
from ....ir.expr import SYMBOLS
from ....ir.walk import symbols
from .results import TileProgram

_ENDS = {"kv": ("q_first", "q_last"), "q": ("kv_first", "kv_last", "q_offset")}
_PAIR_SYMBOLS = {"qk", "q_pos", "kv_pos"}


def verify_tiles(program: TileProgram) -> TileProgram:
    """The program itself. Raise InternalError, listing all that is wrong, unless it makes every name before it is read,
    makes all of its outputs, and reads nothing that is different for each pair of a tile."""
    problems = list(_problems(program))
    if problems:
        raise InternalError(f"tile program of axis {program.axis}: {'; '.join(problems)}")
    return program


def _problems(program: TileProgram) -> Iterator[str]:
    known = (set(SYMBOLS) - _PAIR_SYMBOLS) | {"block", "length", *_ENDS[program.axis]}
    made: set[str] = set()
    for line in program.body:
        if unknown := symbols(line.value) - known - made:
            yield f"{line.name} reads {', '.join(sorted(unknown))}"
        if line.name in made or line.name in known:
            yield f"{line.name} is made twice"
        made.add(line.name)
    if missing := {"n_edge", "n_full", *program.outputs} - made:
        yield f"nothing makes {', '.join(sorted(missing))}"
    for what, tile in (("edge_tile", program.edge_tile), ("full_tile", program.full_tile)):
        if unknown := symbols(tile) - made - {"i"}:
            yield f"{what} reads {', '.join(sorted(unknown))}"
