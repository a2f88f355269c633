"""What decides which tiles a program of target hopper holds, besides the form of its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import Traits
from ....compiler.planning.form import Form
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.segments import Segments
from ....compiler.planning.signature import Widths
from ..gluon.program import Columns, Program
from .forms import ROWS
from .gradients import OWNED_BY_KEYS, stores_boxes, stores_first, sums_of_keys
from .pieces import Piece, columns_of, columns_of_form

ROLES = "hopper/roles"  # templates


@dataclass(frozen=True)
class Held:
    """Of a call: what planning knows of it, then what generated code knows besides.

    The latter are by default as of the program that holds most, which is the one that planning counts.
    """

    widths: Widths
    qk_columns: int  # what the letters C and Cv stand for
    v_columns: int
    drops: bool = False
    saves_lse: bool = True
    far: bool = False  # rows have two statistics more
    # -- what generated code knows --
    ones: str = "1, 1"  # extents of a tile before its rows
    paged: bool = False
    box_rank: int = 2  # of what pairs read
    scaled_rows: bool = True  # keys in FP8 have a descale a row
    wanted: frozenset[str] = frozenset({"query", *OWNED_BY_KEYS})
    sums_keys: bool = False  # the kernel that owns keys sums gradients of operands
    stores_pairs: bool = False  # dS leaves as tiles: it is the gradient of what pairs read
    stores_first: bool = False  # a head's first shares of dQ are stored

    @property
    def wants_dscores(self) -> bool:
        """Of a kernel that owns keys, whether it has gradients of scores."""
        return "key" in self.wanted or (self.widths.rope_dim > 0 and "rope" in self.wanted) or self.sums_keys

    def letters(self, form: Form) -> Mapping[str, str | int]:
        """The constants of tiles in letters, or numbers where tiles of a kernel have columns of their own."""
        columns, value_columns = columns_of_form(form, self.widths)
        return {
            "STAGES": "s", "BLOCK_Q": "bq", "BLOCK_KV": "bkv", "ROWS": ROWS,
            "COLUMNS": "C" if columns == self.qk_columns else columns,
            "VALUE_COLUMNS": "Cv" if value_columns == self.v_columns else value_columns,
        }  # fmt: skip

    @property
    def letters_of_widths(self) -> dict[int, str]:
        """The letters of tiles that are several pieces, by their columns together."""
        return {self.v_columns: "Cv", self.qk_columns: "C"}

    @property
    def value_letter(self) -> str | int:
        """Columns of a whole tile of values, which is one piece."""
        whole = columns_of(self.widths)[1]
        return "Cv" if whole == self.v_columns else whole


def planned(parts: Segments, traits: Traits) -> Held:
    """As planning knows it."""
    rope = sum(s.width for s in parts.qk if s.source == "rope")
    widths = Widths(sum(s.width for s in parts.qk), sum(s.width for s in parts.v), rope, parts.value_is_key)
    saves_lse = traits.normalizer.saves_lse
    return Held(widths, parts.qk_columns, parts.v_columns, traits.drops, saves_lse, traits.far)


def declared(program: Callable[..., Program], **more: Any) -> Callable[[Form, Segments, Traits], Program]:
    """What planning asks of a kernel's program, again and again: so programs are remembered."""
    remembered = lru_cache(maxsize=256)(partial(program, **more))
    return lambda form, parts, traits: remembered(form, planned(parts, traits))


def held_by(code: CodePlan, facts: Facts) -> Held:
    """As generated code knows it."""
    signature = code.signature
    found = planned(code.segments, facts.traits)
    read = facts.boxed_read if code.brings_boxes else None
    found = replace(
        found, ones="1, 1, 1" if signature.sequences.ragged else "1, 1", paged=signature.sequences.keys.pooled,
        box_rank=read.tensor.rank if read is not None else 2, scaled_rows="k_descale" in signature.scaled_rows,
    )  # fmt: skip
    if signature.direction == "forward":
        return found
    return replace(
        found, wanted=signature.wanted, sums_keys=sums_of_keys(signature, facts),
        stores_pairs=stores_boxes(signature, facts) and signature.boxed != 4,
        stores_first=stores_first(signature, facts),
    )  # fmt: skip


def columns_in(pieces: list[Piece]) -> list[Columns]:
    """Pieces of a tile as a program declares them."""
    return [Columns(piece.width, piece.name, piece.box) for piece in pieces]
