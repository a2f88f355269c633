"""Tiles of target `hopper`: their columns and pieces, the parts of dQ, and what a plan's forms say of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.form import Form
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.signature import Widths
from .forms import ROWS, HopperBackwardForm, HopperForm

TILE_COLUMNS = (32, 64, 128, 256)  # narrower operands are filled up with zeros, by TMA
CONSUMERS = 2  # of the backward


def columns_of(widths: Widths) -> tuple[int, int]:
    """Columns of tiles of query and key, and of value and output."""
    columns, value_columns = (
        next((n for n in TILE_COLUMNS if n >= width), TILE_COLUMNS[-1]) for width in (widths.head_dim, widths.value_dim)
    )
    return columns, value_columns


@dataclass(frozen=True)
class Piece:
    """Columns of a tile that lie together in SRAM."""

    of: Literal["key", "value"]
    columns: int
    name: str = ""  # of one of several
    first: int = 0  # column
    box: str = ""  # its descriptors are called <tensor><box>_desc
    shared: bool = False  # of a key: columns of a tensor of its own, whose one head is that of all heads

    # What generated code calls these:
    @property
    def is_whole(self) -> bool:
        return not self.name

    @property
    def width(self) -> str:
        return ("VALUE_COLUMNS" if self.of == "value" else "COLUMNS") if self.is_whole else str(self.columns)

    def head(self, tensor: str, head: str) -> str:
        """The head of a tensor that has these columns."""
        return "0" if self.is_apart(tensor) else head

    def rows(self, tensor: str) -> str:
        """The tensor in whose rows they lie, as starts of sequences are named: the rotary key where it is apart."""
        return tensor.replace("key", "rope") if self.is_apart(tensor) else tensor

    def column(self, tensor: str) -> int:
        """Where they begin in a tensor."""
        return 0 if self.is_apart(tensor) else self.first

    def result(self, gradient: str) -> str:
        """Of what a gradient's columns are: "rope" of "dkey" where it is apart."""
        return "rope" if self.is_apart(gradient) else gradient.removeprefix("d")

    def is_apart(self, tensor: str) -> bool:
        return self.shared and tensor.endswith("key")

    @property
    def sums(self) -> str:
        """The layout of sums of as many columns."""
        return f"{self.of.upper()}_GRADIENT" if self.is_whole else f"SUMS_OF_{self.columns}"

    @property
    def operand(self) -> str:
        """The layout of what is multiplied to them, in registers."""
        return f"{self.of.upper()}_OPERAND" if self.is_whole else f"gl.DotOperandLayout(0, {self.sums}, 2)"


def columns_of_form(form: Form, widths: Widths) -> tuple[int, int]:
    """Columns of the tiles of the kernel that has a form."""
    columns, value_columns = columns_of(widths)
    if isinstance(form, HopperBackwardForm):
        if form.by_columns:
            return max(128, columns), max(128, value_columns)
        if form.block_q != 128:  # flash_dquery, which has 128 queries, has whole tiles of values
            return piecewise(widths.head_dim), piecewise(widths.value_dim)
    return piecewise(widths.head_dim), value_columns


def fits_by_rows(widths: Widths) -> bool:
    """Whether one consumer has registers for the sums of 64 keys."""
    return widths.value_dim <= 128 and widths.head_dim <= 192


def piecewise(width: int) -> int:
    """The fewest columns, of 32, 64 or 128, and to the last two 16, 32 or 64 more."""
    known = (32, 64, 80, 96, 128, 144, 160, 192, 256)
    return next(columns for columns in known if columns >= width)


def pieces_of(form: Form, widths: Widths) -> tuple[list[Piece], list[Piece]]:
    """The pieces of tiles of query and key, and of value and output; by columns, those of either consumer."""
    columns, value_columns = columns_of_form(form, widths)
    if isinstance(form, HopperBackwardForm) and form.by_columns:
        return _halves("key", columns), _halves("value", value_columns)
    return key_pieces(columns, widths), two_pieces("value", value_columns)


def key_pieces(columns: int, widths: Widths) -> list[Piece]:
    """The pieces of tiles of query and key, of which the second may be of a tensor that heads share."""
    *left, last = two_pieces("key", columns)
    return [*left, replace(last, shared=bool(widths.rope_dim))]


def has_pieces_apart(widths: Widths) -> bool:
    """Whether the columns of a key that heads share are a piece of its tiles, and its own columns the other."""
    columns = piecewise(widths.head_dim)
    return two_pieces("key", columns)[0].columns == widths.head_dim - widths.rope_dim < columns


def two_pieces(of: Literal["key", "value"], columns: int) -> list[Piece]:
    """One piece, or where that would not be a power of two columns, two."""
    left = 1 << (columns.bit_length() - 1)
    if columns == left:
        return [Piece(of, columns)]
    return [Piece(of, left, "_left", 0, "_left"), Piece(of, columns - left, "_right", left, "_right")]


def _halves(of: Literal["key", "value"], columns: int) -> list[Piece]:
    half = columns // 2
    return [Piece(of, half, "_left", 0, "_half"), Piece(of, half, "_right", half, "_half")]


def statistics_of_a_row(facts: Facts) -> int:
    """-lse and -delta, and where scores may lie far from 0 the maximum that lse leaves out: a power of two for TMA."""
    return 4 if facts.scores_lie_far else 2


def part_columns(form: HopperBackwardForm, widths: Widths) -> int:
    """Columns of a part of dQ: half of a tile's, or all for half of its rows; those of the second of two pieces."""
    keys, _ = pieces_of(form, widths)
    if form.block_q == 128:
        return keys[0].columns
    return keys[-1].columns if len(keys) > 1 else keys[0].columns // 2


def left_parts(form: HopperBackwardForm, widths: Widths) -> int:
    """Parts of dQ that the first consumer computes; the other one computes one."""
    keys, _ = pieces_of(form, widths)
    return keys[0].columns // part_columns(form, widths) if len(keys) > 1 else 1


def sums_of_a_tile(form: HopperBackwardForm, widths: Widths) -> int:
    """Floats of the sums of dQ of a query tile."""
    return form.block_q * columns_of_form(form, widths)[0]


def is_persistent(code: CodePlan, facts: Facts) -> bool:
    """Whether programs of the kernel that owns keys, where there is one, take one tile of them after another."""
    main, form = main_form(code)
    return bool(main) and form.is_persistent(facts.attention.canonical.drops)


def places_of_results(form: HopperBackwardForm, widths: Widths) -> dict[str, Any] | None:
    """Where a consumer's dK and dV lie in the place of its shares of dQ; None where one of them does not fit.

    By the name of a piece: how many tiles like it have room there (`number`), and which one it is (`first`). `shared`:
    whether both tensors have the same room, one after the other.
    """
    keys, values = pieces_of(form, widths)
    room = ROWS * part_columns(form, widths) * left_parts(form, widths) * 4
    own = [piece for piece in keys if not piece.shared]
    sizes = [sum(2 * ROWS * piece.columns for piece in pieces) for pieces in (values, own)]
    if max(sizes) > room:
        return None
    shared = sum(sizes) > room
    found: dict[str, Any] = {"shared": shared}
    at = 0
    for tensor, pieces in (("value", values), ("key", own)):
        at = 0 if shared else at
        for piece in pieces:
            size = 2 * ROWS * piece.columns
            if room % size or at % size:
                return None
            found[f"{tensor}{piece.name}"] = {"number": room // size, "first": at // size}
            at += size
    return found


def forward_form(code: CodePlan) -> HopperForm:
    form = code.form("flash_forward")
    assert isinstance(form, HopperForm)
    return form


def backward_form(code: CodePlan, kernel: str) -> HopperBackwardForm:
    form = code.form(kernel)
    assert isinstance(form, HopperBackwardForm)
    return form


def main_form(code: CodePlan) -> tuple[str, HopperBackwardForm]:
    """The kernel that owns keys, "" where there is none, and the form that statistics of rows lie by."""
    main = next((name for name in ("flash_backward", "flash_dkey_dvalue") if code.has(name)), "")
    return main, backward_form(code, main or "flash_dquery")
