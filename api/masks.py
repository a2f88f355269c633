"""Ready masks, written in the public language: bool expressions that compose with `&`, `|` and `~`.

Arguments are numbers, scalar operands or int expressions of heads and lengths; a tensor is an operand of the variant.

>>> from weft import masks
>>> masks.causal & masks.sliding_window(1024)
(kv_pos <= q_pos) & ((q_pos - kv_pos < 1024) & (kv_pos - q_pos < 1024))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .ir.errors import WeftError, shown
from .ir.expr import Const, Expr, Operand, TensorOperand, expression, symbol
from .ir.functions import abs as absolute
from .ir.functions import maximum, minimum, where

__all__ = [
    "bigbird", "bit_packed", "block_causal", "block_diagonal", "block_diffusion", "block_sparse", "causal", "chunked",
    "compressed", "dilated", "document", "fixed", "global_window", "longformer", "natten_1d", "natten_2d", "natten_3d",
    "padding_left", "padding_right", "prefix_document", "prefix_lm", "registers", "sliding_window", "strided", "swin",
    "tree",
]  # fmt: skip
_q, _kv, _batch, _head = symbol("q_pos"), symbol("kv_pos"), symbol("batch"), symbol("head")


if not TYPE_CHECKING:  # a type checker knows which names there are

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")


_BY_POSITION = {1: "[length]", 2: "[batch, length]"}


def _size(function: str, argument: str, value: Operand, least: int = 1) -> Operand:
    """A number or an expression; a number below the least is refused here, what a call gives is checked there."""
    if isinstance(value, tuple):
        raise WeftError(
            f"masks.{function}: {argument}: expected one number, got {shown(value)}; a window of (left, right) "
            "neighbours is masks.sliding_window(left + 1, ahead=right + 1)"
        )
    node = expression(value)
    if node.dtype == "bool":
        raise WeftError(f"masks.{function}: expected {argument} to be a number, got {node}")
    if isinstance(node, Const) and node.value < least:
        raise WeftError(f"masks.{function}: expected {argument} to be at least {least}, got {node.value}")
    return node.value if isinstance(node, Const) else node


def _read(function: str, operand: TensorOperand, dtype: str, ranks: dict[int, str], *index: Expr) -> Expr:
    """An operand read at the last of the indices that it has dimensions for; one of another kind is refused."""
    expected = " or ".join(f"{rank} {dimensions}" for rank, dimensions in ranks.items())
    if not isinstance(operand, TensorOperand):
        raise WeftError(
            f"masks.{function}: expected a tensor operand such as weft.tensor('x', {next(iter(ranks))}, {dtype}), "
            f"whose values the call gives, got {type(operand).__name__}"
        )
    if operand.dtype != dtype:
        raise WeftError(f"masks.{function}: expected {operand.name} to be of dtype {dtype}, got {operand.dtype}")
    if operand.rank not in ranks:
        raise WeftError(f"masks.{function}: expected {operand.name} to have rank {expected}, got {operand.rank}")
    return operand[index[len(index) - operand.rank :]]


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


def prefix_document(ids: TensorOperand, prefix: TensorOperand) -> Expr:
    """Documents of a packed sequence, each with a prefix that all of it sees; the rest is causal (T5's prefix LM).

    ids: int [length] or [batch, length], as of `document`. prefix: bool, likewise; whether a token is of a prefix.

    >>> from weft import tensor
    >>> prefix_document(tensor("doc", 1, int), tensor("prompt", 1, bool))
    (doc[q_pos] == doc[kv_pos]) & ((kv_pos <= q_pos) | prompt[kv_pos])
    """
    seen = _read("prefix_document", prefix, "bool", _BY_POSITION, _batch, _kv)
    return document(ids) & (causal | seen)


def padding_left(counts: TensorOperand) -> Expr:
    """Hides the first counts[batch] keys of each batch row, int [batch]: what stands before a prompt.

    >>> from weft import tensor
    >>> padding_left(tensor("pads", 1, int))
    kv_pos >= pads[batch]
    """
    return _kv >= _read("padding_left", counts, "int", {1: "[batch]"}, _batch)


def padding_right(lengths: TensorOperand) -> Expr:
    """Shows the first lengths[batch] keys of each batch row, int [batch].

    A call with `kv_lens=` does the same and reads nothing behind them; it also moves q_offset to the length.

    >>> from weft import tensor
    >>> padding_right(tensor("lengths", 1, int))
    kv_pos < lengths[batch]
    """
    return _kv < _read("padding_right", lengths, "int", {1: "[batch]"}, _batch)


def tree(ancestors: TensorOperand) -> Expr:
    """Verification of a tree of drafted tokens (SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774).

    The queries are the drafted tokens, and the last q_len keys are theirs; each sees all keys before these, and of the
    drafted tokens its ancestors. ancestors: bool [q_len, q_len] or [batch, q_len, q_len], of a token those that it
    sees, itself too. For the q_offset that calls have unless they give one.

    >>> from weft import tensor
    >>> tree(tensor("ancestors", 2, bool))
    where(kv_pos < kv_len - q_len, True, ancestors[q_pos - (kv_len - q_len), maximum(kv_pos - (kv_len - q_len), 0)])
    """
    first = symbol("kv_len") - symbol("q_len")
    ranks = {2: "[drafted, drafted]", 3: "[batch, drafted, drafted]"}
    own = _read("tree", ancestors, "bool", ranks, _batch, _q - first, maximum(_kv - first, 0))
    return where(_kv < first, True, own)


def chunked(size: Operand) -> Expr:
    """Causal inside chunks of `size` positions, and nothing across them: the local layers of Llama 4.

    >>> chunked(8192)
    (kv_pos <= q_pos) & (kv_pos // 8192 == q_pos // 8192)
    """
    return causal & block_diagonal(_size("chunked", "size", size))


def compressed(block: Operand, stride: Operand | None = None) -> Expr:
    """Causal over keys that each stand for a block of tokens, as in the compressed branch of NSA (arXiv 2502.11089).

    Key i stands for tokens i * stride to i * stride + block - 1. A query sees it once it stands at the last of them, or
    behind. stride: the block where not given. Queries count tokens and keys count blocks, so that a call gives
    `q_offset`, the position of its first query: 0 in training.

    >>> compressed(32, 16)
    kv_pos * 16 + 31 <= q_pos
    """
    block = _size("compressed", "block", block)
    stride = block if stride is None else _size("compressed", "stride", stride)
    return _kv * stride + (block - 1) <= _q


def registers(count: Operand = 1) -> Expr:
    """Causal, with `count` registers behind each token, which no other row sees (MuToR, arXiv 2505.10518); 0 for none.

    Rows 0, count + 1, 2 * (count + 1) and so on are tokens. A register sees the tokens up to its own, and itself.
    Tokens are computed as without registers, which are therefore left out when the model is used.

    >>> registers()
    (kv_pos <= q_pos) & ((kv_pos % 2 == 0) | (kv_pos == q_pos))
    """
    return causal & ((_kv % (1 + _size("registers", "count", count, least=0)) == 0) | (_kv == _q))


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


def fixed(stride: Operand, summary: Operand) -> Expr:
    """Causal inside blocks of `stride`, and the last `summary` keys of each block before (Sparse Transformer's fixed
    pattern, arXiv 1904.10509).

    >>> fixed(128, 8)
    (kv_pos <= q_pos) & ((kv_pos // 128 == q_pos // 128) | (kv_pos % 128 >= 120))
    """
    stride, summary = _size("fixed", "stride", stride), _size("fixed", "summary", summary)
    return causal & (block_diagonal(stride) | (_kv % stride >= stride - summary))


def longformer(size: Operand, shared: Operand | TensorOperand) -> Expr:
    """A window both ways, and tokens that see all and are seen by all (Longformer, arXiv 2004.05150).

    size: keys less than this far away are seen. shared: how many tokens at the beginning, or a bool tensor [length] or
    [batch, length].

    >>> longformer(256, 4)
    (q_pos - kv_pos < 256) & (kv_pos - q_pos < 256) | (kv_pos < 4) | (q_pos < 4)
    """
    local = sliding_window(_size("longformer", "size", size))
    if isinstance(shared, TensorOperand):
        key, query = (_read("longformer", shared, "bool", _BY_POSITION, _batch, position) for position in (_kv, _q))
        return local | key | query
    shared = _size("longformer", "shared", shared, least=0)
    return local | (_kv < shared) | (_q < shared)


def block_sparse(blocks: TensorOperand, block: Operand = 128, kv_block: Operand | None = None) -> Expr:
    """Blocks of pairs that see each other, by a table that a call gives (block-sparse FlashAttention, arXiv 2205.14135,
    section 3.3).

    blocks: bool [blocks of queries, blocks of keys], [heads, ...] or [batch, heads, ...]. block: queries of a block.
    kv_block: keys of it, as many where not given. Positions index it, so that q_offset must keep queries inside.

    >>> from weft import tensor
    >>> block_sparse(tensor("blocks", 2, bool), 64)
    blocks[q_pos // 64, kv_pos // 64]
    """
    rows = _size("block_sparse", "block", block)
    columns = rows if kv_block is None else _size("block_sparse", "kv_block", kv_block)
    ranks = {2: "[q blocks, kv blocks]", 3: "[heads, q blocks, kv blocks]", 4: "[batch, heads, q blocks, kv blocks]"}
    return _read("block_sparse", blocks, "bool", ranks, _batch, _head, _q // rows, _kv // columns)


def bit_packed(bits: TensorOperand) -> Expr:
    """Pairs by a table of one bit each: bit kv_pos % 8 of the byte kv_pos // 8 of a query's row.

    bits: int [q_len, kv_len / 8], [heads, ...] or [batch, heads, ...], uint8 as numpy.packbits(allowed, axis=-1,
    bitorder="little") makes it; an eighth of the memory of a bool tensor. Positions index it.

    >>> from weft import tensor
    >>> bit_packed(tensor("bits", 2, int))  # doctest: +ELLIPSIS
    where(kv_pos % 8 // 4 == 1, where(...) // 16, where(...)) % 2 == 1
    """
    ranks = {2: "[q_len, bytes]", 3: "[heads, q_len, bytes]", 4: "[batch, heads, q_len, bytes]"}
    found = _read("bit_packed", bits, "int", ranks, _batch, _head, _q, _kv // 8)
    place = _kv % 8
    for bit in (1, 2, 4):  # the byte is moved right by `bit` places where `place` has that bit
        has_bit = (place // bit if bit == 4 else place // bit % 2) == 1
        found = where(has_bit, found // 2**bit, found)
    return found % 2 == 1


def bigbird(block: Operand, drawn: TensorOperand, *, window: Operand = 1, shared: Operand = 1) -> Expr:
    """Blocks of a window, shared ones and random ones (BigBird, arXiv 2007.14062, its internal form).

    block: tokens of a block. drawn: bool [blocks, blocks] or [heads, blocks, blocks], the random blocks of keys that a
    block of queries sees. window: neighbours on each side. shared: blocks at the beginning that see all and are seen
    by all.

    >>> from weft import tensor
    >>> bigbird(64, tensor("drawn", 2, bool))  # doctest: +ELLIPSIS
    (abs(q_pos // 64 - kv_pos // 64) <= 1) | (kv_pos // 64 < 1) | (q_pos // 64 < 1) | drawn[q_pos // 64, kv_pos // 64]
    """
    block, window = _size("bigbird", "block", block), _size("bigbird", "window", window, least=0)
    shared = _size("bigbird", "shared", shared, least=0)
    query, key = _q // block, _kv // block
    ranks = {2: "[blocks, blocks]", 3: "[heads, blocks, blocks]"}
    near = absolute(query - key) <= window
    return near | (key < shared) | (query < shared) | _read("bigbird", drawn, "bool", ranks, _head, query, key)


def swin(width: Operand, window: Operand, shift: Operand = 0) -> Expr:
    """Windows of window x window on a grid `width` wide, flattened row by row (Swin, arXiv 2103.14030).

    shift: that of the windows, less than `window`. Tokens keep their places: what Swin rolls around the border, and
    then masks from its new neighbours, are the windows that the border cuts.

    >>> swin(56, 7)
    (kv_pos // 56 // 7 == q_pos // 56 // 7) & (kv_pos % 56 // 7 == q_pos % 56 // 7)
    >>> swin(56, 7, shift=3)  # doctest: +ELLIPSIS
    ((kv_pos // 56 + 4) // 7 == (q_pos // 56 + 4) // 7) & ...
    """
    width, window, shift = (
        _size("swin", name, value, least)
        for name, value, least in (("width", width, 1), ("window", window, 1), ("shift", shift, 0))
    )
    if isinstance(shift, int) and isinstance(window, int) and shift >= window:
        raise WeftError(f"masks.swin: expected shift to be less than the window, {window}, got {shift}")

    def of(place: Expr) -> Expr:
        return (place if isinstance(shift, int) and shift == 0 else place + (window - shift)) // window

    return (of(_kv // width) == of(_q // width)) & (of(_kv % width) == of(_q % width))


def _near(query: Expr, key: Expr, radius: Operand, size: Operand | None, dilation: Operand) -> Expr:
    """Neighbours on one axis of a grid: `size` long where the neighbourhood is shifted inward at borders.

    With a dilation they are those among the places that have the query's remainder, which are an axis of their own.
    """
    if isinstance(dilation, int) and dilation == 1:
        if size is not None:
            query = minimum(maximum(query, radius), size - 1 - radius)
        return absolute(query - key) <= radius
    place, remainder = query // dilation, query % dilation
    if size is not None:
        last = (size - 1 - remainder) // dilation
        place = minimum(maximum(place, radius), last - radius)
    return (key % dilation == remainder) & (absolute(place - key // dilation) <= radius)


def natten_1d(radius: Operand, *, length: Operand | None = None, dilation: Operand = 1) -> Expr:
    """Neighbours in a sequence (neighbourhood attention, arXiv 2204.07143; dilated, arXiv 2209.15001).

    length: of the sequence; with it a query near an end keeps a whole neighbourhood, shifted inward, as the papers have
    it; without it the neighbourhood is cut off there. dilation: neighbours are so far apart.

    >>> natten_1d(3)
    abs(q_pos - kv_pos) <= 3
    >>> natten_1d(3, dilation=2)
    (kv_pos % 2 == q_pos % 2) & (abs(q_pos // 2 - kv_pos // 2) <= 3)
    """
    radius, dilation = _size("natten_1d", "radius", radius, least=0), _size("natten_1d", "dilation", dilation)
    return _near(_q, _kv, radius, None if length is None else _size("natten_1d", "length", length), dilation)


def natten_3d(
    height: Operand, width: Operand, radius: Operand, *, depth: Operand | None = None, dilation: Operand = 1
) -> Expr:
    """Neighbours in a volume of planes height x width, flattened plane by plane (NATTEN; video).

    radius, dilation: of each of the three axes. depth: planes; with it neighbourhoods are shifted inward at borders.

    >>> natten_3d(16, 16, 1)  # doctest: +ELLIPSIS
    (abs(q_pos // 256 - kv_pos // 256) <= 1) & (abs(q_pos // 16 % 16 - kv_pos // 16 % 16) <= 1) & ...
    """
    height, width = _size("natten_3d", "height", height), _size("natten_3d", "width", width)
    radius, dilation = _size("natten_3d", "radius", radius, least=0), _size("natten_3d", "dilation", dilation)
    sizes: tuple[Operand | None, ...] = (None, None, None)
    if depth is not None:
        sizes = (_size("natten_3d", "depth", depth), height, width)
    plane = height * width
    axes = ((_q // plane, _kv // plane), (_q // width % height, _kv // width % height), (_q % width, _kv % width))
    first, second, third = (_near(*axis, radius, size, dilation) for axis, size in zip(axes, sizes))
    return first & second & third


def natten_2d(
    width: Operand, row_radius: Operand, column_radius: Operand | None = None, *, height: Operand | None = None,
    dilation: Operand = 1,
) -> Expr:  # fmt: skip
    """Neighbours on a grid `width` wide, flattened row by row (neighbourhood attention, arXiv 2204.07143).

    column_radius: that of rows where not given. height: rows of the grid; with it a query near a border keeps a whole
    neighbourhood, shifted inward, as the paper has it; without it the neighbourhood is cut off at the border.
    dilation: neighbours are so far apart, in rows and in columns (arXiv 2209.15001).

    >>> natten_2d(32, 3)
    (abs(q_pos // 32 - kv_pos // 32) <= 3) & (abs(q_pos % 32 - kv_pos % 32) <= 3)
    >>> natten_2d(32, 1, height=8)  # doctest: +ELLIPSIS
    (abs(minimum(maximum(q_pos // 32, 1), 6) - kv_pos // 32) <= 1) & ...
    """
    width, row_radius = _size("natten_2d", "width", width), _size("natten_2d", "row_radius", row_radius, least=0)
    columns = row_radius if column_radius is None else _size("natten_2d", "column_radius", column_radius, least=0)
    dilation = _size("natten_2d", "dilation", dilation)
    height = None if height is None else _size("natten_2d", "height", height)
    rows = _near(_q // width, _kv // width, row_radius, height, dilation)
    return rows & _near(_q % width, _kv % width, columns, None if height is None else width, dilation)


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
