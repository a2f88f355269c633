"""Ready masks, written in the public language: bool expressions that compose with `&`, `|` and `~`.

Arguments are numbers, scalar operands or int expressions of heads and lengths; a tensor is an operand of the variant.

>>> from weft import masks
>>> masks.causal & masks.sliding_window(1024)
(kv_pos <= q_pos) & ((q_pos - kv_pos < 1024) & (kv_pos - q_pos < 1024))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .ir.errors import WeftError
from .ir.expr import Const, Expr, Operand, TensorOperand, expression, symbol
from .ir.functions import abs as absolute
from .ir.functions import maximum, minimum

__all__ = [
    "block_causal", "block_diagonal", "block_diffusion", "causal", "dilated", "document", "global_window", "natten_2d",
    "prefix_lm", "sliding_window", "strided",
]  # fmt: skip
_q, _kv, _batch = symbol("q_pos"), symbol("kv_pos"), symbol("batch")


if not TYPE_CHECKING:  # a type checker knows which names there are

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")


def _size(function: str, argument: str, value: Operand, least: int = 1) -> Operand:
    """A number or an expression; a number below the least is refused here, what a call gives is checked there."""
    if isinstance(value, tuple):
        raise WeftError(
            f"masks.{function}: {argument}: expected one number, got {value!r}; a window of (left, right) neighbours "
            "is masks.sliding_window(left + 1, ahead=right + 1)"
        )
    node = expression(value)
    if node.dtype == "bool":
        raise WeftError(f"masks.{function}: expected {argument} to be a number, got {node}")
    if isinstance(node, Const) and node.value < least:
        raise WeftError(f"masks.{function}: expected {argument} to be at least {least}, got {node.value}")
    return node.value if isinstance(node, Const) else node


causal: Expr = _kv <= _q
"""A query sees the keys up to its own position."""


def sliding_window(size: Operand, ahead: Operand | None = None) -> Expr:
    """Keys less than `size` positions behind the query and less than `ahead` in front (`size` where not given).

    Longformer (arXiv 2004.05150); with `causal` the window of Mistral 7B (arXiv 2310.06825).

    >>> sliding_window(4, ahead=1)
    (q_pos - kv_pos < 4) & (kv_pos - q_pos < 1)
    """
    size = _size("sliding_window", "size", size)
    ahead = size if ahead is None else _size("sliding_window", "ahead", ahead)
    return (_q - _kv < size) & (_kv - _q < ahead)


def prefix_lm(size: Operand) -> Expr:
    """The first `size` keys are seen by all, the others causally (T5's prefix LM, arXiv 1910.10683).

    >>> prefix_lm(256)
    (kv_pos <= q_pos) | (kv_pos < 256)
    """
    return causal | (_kv < _size("prefix_lm", "size", size, least=0))


def dilated(step: Operand, window: Operand) -> Expr:
    """Every `step`-th key of the last `window` positions, causally (LongNet, arXiv 2307.02486; Longformer).

    The reach is written as the last multiple of `step` inside the window, so that tile bounds are tight.

    >>> dilated(2, 64)
    (kv_pos <= q_pos) & (q_pos - kv_pos <= 62) & ((q_pos - kv_pos) % 2 == 0)
    """
    step, window = _size("dilated", "step", step), _size("dilated", "window", window)
    return causal & (_q - _kv <= (window - 1) // step * step) & ((_q - _kv) % step == 0)


def document(ids: TensorOperand) -> Expr:
    """Pairs inside one document of a packed sequence; `ids` is an int tensor [length] or [batch, length].

    Positions index it, so it needs the length of the keys and q_offset must keep queries inside.

    >>> from weft import tensor
    >>> document(tensor("doc", 1, int))
    doc[q_pos] == doc[kv_pos]
    """
    if not isinstance(ids, TensorOperand):
        raise WeftError(
            "masks.document: expected a tensor operand such as weft.tensor('doc', 1, int), whose values the call gives,"
            f" got {type(ids).__name__}"
        )
    if ids.dtype != "int":
        raise WeftError(f"masks.document: expected {ids.name} to be of dtype int, got {ids.dtype}")
    if ids.rank == 1:
        return ids[_q] == ids[_kv]
    if ids.rank == 2:
        return ids[_batch, _q] == ids[_batch, _kv]
    raise WeftError(f"masks.document: expected {ids.name} to have rank 1 [length] or 2 [batch, length], got {ids.rank}")


def block_causal(size: Operand) -> Expr:
    """A query sees all keys of its own block and of the blocks before.

    >>> block_causal(32)
    kv_pos // 32 <= q_pos // 32
    """
    size = _size("block_causal", "size", size)
    return _kv // size <= _q // size


def block_diagonal(size: Operand) -> Expr:
    """A query sees the keys of its own block only.

    >>> block_diagonal(32)
    kv_pos // 32 == q_pos // 32
    """
    size = _size("block_diagonal", "size", size)
    return _kv // size == _q // size


def global_window(first: Operand, window: Operand) -> Expr:
    """The first `first` keys and the last `window` (attention sinks: StreamingLLM, arXiv 2309.17453), causally.

    >>> global_window(4, 512)
    (kv_pos <= q_pos) & ((kv_pos < 4) | (q_pos - kv_pos < 512))
    """
    first, window = _size("global_window", "first", first, least=0), _size("global_window", "window", window)
    return causal & ((_kv < first) | (_q - _kv < window))


def strided(local: Operand, stride: Operand) -> Expr:
    """The last `local` keys and every `stride`-th key, causally (Sparse Transformer, arXiv 1904.10509).

    >>> strided(128, 64)
    (kv_pos <= q_pos) & ((q_pos - kv_pos < 128) | ((q_pos - kv_pos) % 64 == 0))
    """
    local, stride = _size("strided", "local", local, least=0), _size("strided", "stride", stride)
    return causal & ((_q - _kv < local) | ((_q - _kv) % stride == 0))


def natten_2d(
    width: Operand, row_radius: Operand, column_radius: Operand | None = None, *, height: Operand | None = None
) -> Expr:
    """Neighbours on a grid `width` wide, flattened row by row (neighbourhood attention, arXiv 2204.07143).

    column_radius: that of rows where not given. height: rows of the grid; with it a query near a border keeps a whole
    neighbourhood, shifted inward, as the paper has it; without it the neighbourhood is cut off at the border.

    >>> natten_2d(32, 3)
    (abs(q_pos // 32 - kv_pos // 32) <= 3) & (abs(q_pos % 32 - kv_pos % 32) <= 3)
    >>> natten_2d(32, 1, height=8)  # doctest: +ELLIPSIS
    (abs(minimum(maximum(q_pos // 32, 1), 6) - kv_pos // 32) <= 1) & ...
    """
    width, row_radius = _size("natten_2d", "width", width), _size("natten_2d", "row_radius", row_radius, least=0)
    columns = row_radius if column_radius is None else _size("natten_2d", "column_radius", column_radius, least=0)
    row, column = _q // width, _q % width
    if height is not None:
        height = _size("natten_2d", "height", height)
        row = minimum(maximum(row, row_radius), height - 1 - row_radius)
        column = minimum(maximum(column, columns), width - 1 - columns)
    return (absolute(row - _kv // width) <= row_radius) & (absolute(column - _kv % width) <= columns)


def block_diffusion(length: Operand, block: Operand) -> Expr:
    """Training mask of block diffusion (BD3-LM, arXiv 2503.09573) over [noised ; clean], each half `length` long.

    A noised block sees itself and the clean blocks before it; a clean block sees itself and the clean ones before.

    >>> block_diffusion(64, 4)  # doctest: +ELLIPSIS
    (q_pos < 64) & (kv_pos < 64) & (kv_pos // 4 == q_pos // 4) | (q_pos < 64) & (kv_pos >= 64) & ...
    """
    length, block = _size("block_diffusion", "length", length), _size("block_diffusion", "block", block)
    noised_query, noised_key = _q < length, _kv < length
    clean_query, clean_key = _q >= length, _kv >= length
    clean_key_block = (_kv - length) // block
    within_noised = noised_query & noised_key & (_kv // block == _q // block)
    noised_to_clean = noised_query & clean_key & (clean_key_block < _q // block)
    within_clean = clean_query & clean_key & (clean_key_block <= (_q - length) // block)
    return within_noised | noised_to_clean | within_clean
