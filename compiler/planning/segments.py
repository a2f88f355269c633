"""Head dimensions as runs of power-of-two tiles, so that 80 columns cost 80 and not 128."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ...ir.attention import Attention
from ...ir.errors import InternalError
from .records import Segment
from .signature import Widths

SEGMENT_COLUMNS = 8  # what one more dot and one more accumulator cost, in columns of padding


class Segments(NamedTuple):
    """The columns of a variant's tiles.

    The query's columns are those of the key segments, one after the other; `Segment.start` counts in the key's tensor.
    """

    qk: tuple[Segment, ...]  # of query and key
    v: tuple[Segment, ...]  # of value and output
    value_is_key: bool = False  # the value tile is key segment 0, loaded once

    @property
    def qk_columns(self) -> int:
        """Columns of a query or key tile, padding included."""
        return sum(s.block for s in self.qk)

    @property
    def v_columns(self) -> int:
        """Columns of a value or output tile, padding included."""
        return sum(s.block for s in self.v)


def split(width: int, source: Literal["key", "rope", "value"] = "key", start: int = 0) -> tuple[Segment, ...]:
    """Segments that cover `width` columns from `start` with little padding and few pieces.

    >>> [(s.start, s.width, s.block) for s in split(96)]
    [(0, 64, 64), (64, 32, 32)]
    >>> [s.block for s in split(40)], [s.block for s in split(120)], [s.block for s in split(8)]
    ([32, 16], [128], [16])
    """
    if width < 1:
        raise InternalError(f"segments: expected a positive width, got {width}")
    whole = (Segment(start, width, source),)
    head = 1 << (width.bit_length() - 1)
    if head == width or head < 16:
        return whole
    pieces = (Segment(start, head, source), *split(width - head, source, start + head))
    return pieces if _cost(pieces) < _cost(whole) else whole


def _cost(pieces: tuple[Segment, ...]) -> int:
    return sum(p.block for p in pieces) + SEGMENT_COLUMNS * (len(pieces) - 1)


def for_heads(head_dim: int, value_dim: int) -> Segments:
    """Segments of ordinary attention: query and key of `head_dim` columns, value and output of `value_dim`."""
    return Segments(split(head_dim, "key"), split(value_dim, "value"))


def for_latent(
    form: Literal["expanded", "absorbed"], rank: int, rope: int, nope: int, value_dim: int, apart: bool = False
) -> Segments:  # fmt: skip
    """Segments of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    expanded: each head has its own key of `nope` columns and value of `value_dim`; the rotary key of `rope` columns is
    a tensor of its own, shared by all heads. absorbed: the key is one cached vector a token, `rank` latent columns
    and then `rope` rotary ones, and the value is its latent part, held as one tile because it is used whole. apart: the
    rotary columns of that vector are a tensor of their own.
    """
    match form:
        case "expanded":
            rotary = split(rope, "rope") if rope else ()
            return Segments((*split(nope, "key"), *rotary), split(value_dim, "value"))
        case "absorbed":
            rotary = () if not rope else split(rope, "rope") if apart else split(rope, "key", rank)
            return Segments((Segment(0, rank, "key"), *rotary), (Segment(0, rank, "value"),), value_is_key=True)
        case _:
            raise InternalError(f"segments: unknown form {form!r}")


def segments_of(attention: Attention, widths: Widths) -> Segments:
    """The head dimensions of a variant as its kernels' tiles hold them."""
    latent = attention.latent
    if latent is None:
        return for_heads(widths.head_dim, widths.value_dim)
    nope = widths.head_dim - latent.rope
    form: Literal["absorbed", "expanded"] = "absorbed" if widths.value_is_key else "expanded"
    return for_latent(form, latent.rank, latent.rope, nope, widths.value_dim, apart=widths.rope_dim > 0)
