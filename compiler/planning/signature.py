"""The static half of a call: all that generated code depends on. Never a batch size, a stride or a value.

Of lengths it has no more than whether queries are few, whether a call is short, and, where forms were timed, the class
of lengths that they were timed for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .dtypes import BF16, EIGHTHS, FP16, FP32, HALVES, product_dtype
from .sources import DENSE, SequenceKind

Direction: TypeAlias = Literal["forward", "backward"]
Offset: TypeAlias = Literal["bottom_right", "number", "per_row"]
# Which sequences a module computes: with up to MOST_SHORT queries; with more, and rows that no sequence has; or all
Serves: TypeAlias = Literal["all", "short", "long"]
LengthClass: TypeAlias = tuple[int, int]  # queries and keys, each as the nearest power of two

FEW_QUERIES = 16  # up to it a call is bound by the keys that it reads, and its tiles by the rows that they do not have
# The same of a packed sequence over pages. A step of a server has prompts beside sequences of one query, of which a
# tile of flash would be nearly empty, and read the keys of a group once for each of its heads.
MOST_SHORT = 64
MOST_SHARED = 16384  # sequences of a call that are shared out: a list of the tiles of more has gaps
TALL, LOW = 192, 128  # queries of a tile: of the form that is fastest where all rows are queries, and of the other one
ALWAYS_SHORT = 256  # queries
MOST_OF_A_SHORT_CALL = 1024  # the same under a mask that hides about half of the pairs


def has_few_queries(direction: Direction, sequences: SequenceKind, q_len: int, number: int = 1) -> bool:
    """Whether a forward has few queries a sequence; of packed ones the host knows their sum and number alone.

    Then no sequence has more than MOST_SHORT, as long as each has one. q_len: rows of the query. number: of sequences,
    where their queries are packed.
    """
    if direction == "backward" or sequences.keys.packed:
        return False
    if not sequences.is_mixed:
        return q_len <= FEW_QUERIES
    return q_len < number + MOST_SHORT or (number > MOST_SHARED and q_len <= number * MOST_SHORT)


def serves_of(direction: Direction, sequences: SequenceKind, q_len: int, number: int = 1) -> Serves:
    """Long where a forward may have both kinds of sequences: the short ones are then those of another module."""
    mixed = sequences.is_mixed and not has_few_queries(direction, sequences, q_len, number)
    return "long" if direction == "forward" and mixed and 1 < number <= MOST_SHARED else "all"


def is_short_call(q_len: int, kv_len: int, masked: bool) -> bool:
    """Whether a dense forward is better off with low tiles of queries: tall ones would have more rows without a query.

    Where a mask hides about half of the pairs, low tiles also waste less of it, and as many rows are enough.
    (docs/experiments has what was measured.)
    """
    if q_len <= ALWAYS_SHORT:
        return True
    if not masked or kv_len > q_len or q_len > MOST_OF_A_SHORT_CALL:
        return False
    return -(-q_len // TALL) * TALL >= -(-q_len // LOW) * LOW


def class_of(q_len: int, kv_len: int) -> LengthClass:
    """The calls that a form serves which was timed at these lengths of a sequence.

    >>> class_of(256, 4096), class_of(182, 5792), class_of(181, 5793)
    ((256, 4096), (256, 4096), (128, 8192))
    """
    return _nearest_power(q_len), _nearest_power(kv_len)


def _nearest_power(length: int) -> int:
    """The power of two whose ratio to a length is the smallest: its exponent is the root of 2 * length**2's, halved."""
    return 1 << ((2 * length * length).bit_length() - 1) // 2 if length > 0 else 0


def in_words(lengths: LengthClass) -> str:
    """A class, as people read it."""
    return " x ".join(map(str, lengths))


def starts_early(arch: str) -> bool:
    """Whether a kernel can be launched before the one in front of it is done, and waits by itself for what it reads
    (programmatic dependent launch, CUDA programming guide): from compute capability 9.0 on."""
    return arch.startswith("sm_") and int(arch[3:]) >= 90


@dataclass(frozen=True)
class Dtypes:
    """Names of dtypes (dtypes.py)."""

    query: str
    key: str
    value: str
    out: str
    products: str  # of query and key, as they go into their product
    weights: str  # of the softmax weights and the values, as these go into theirs

    @staticmethod
    def all(name: str) -> Dtypes:
        return Dtypes(name, name, name, name, name, name)

    @staticmethod
    def of(query: str, key: str, value: str | None, out: str | None = None, *, bounded: bool = True) -> Dtypes:
        """Those of a call. value: None where the values are columns of the key. out: None for the usual one.

        bounded: weights are those of a softmax, the largest of a row near 1, so that they fit fp16. Others may all be
        large, or smaller than fp16 has numbers for.
        """
        own = key if value is None else value
        if not EIGHTHS & {query, key, own}:
            return Dtypes(query, key, own, out or query, query, query)
        products = product_dtype(query, key)
        if value is None and not bounded and {query, key} <= EIGHTHS:
            products = BF16.name  # in which weights are then too
        if query == BF16.name and key in EIGHTHS and (bounded or value is not None):
            products = FP16.name  # of rows that a power of two brings into its range
        weights = own
        if own in EIGHTHS:
            weights = FP32.name if products == FP32.name else FP16.name if bounded else BF16.name
        if value is None:
            weights = products
        return Dtypes(query, key, own, out or usual_out(query, key, own), products, weights)

    @property
    def quantized(self) -> frozenset[str]:
        """Which of query, key and value are FP8."""
        given = {"query": self.query, "key": self.key, "value": self.value}
        return frozenset(name for name, dtype in given.items() if dtype in EIGHTHS)

    @property
    def fp8_key(self) -> str | None:
        """The dtype of the key where that is FP8."""
        return self.key if self.key in EIGHTHS else None

    @property
    def smallest(self) -> str:
        """Of the operands, the one with the fewest bytes."""
        return next(iter(sorted(self.quantized and {self.query, self.key, self.value} & EIGHTHS)), self.query)

    @property
    def scales_rows(self) -> bool:
        """Whether rows of the query are scaled by powers of two, so that bf16 numbers fit fp16."""
        return self.query == BF16.name and self.products == FP16.name


def usual_out(query: str, key: str, value: str) -> str:
    """The dtype of an output where a call names none: the query's, else that of its other operands, else bf16."""
    return next((name for name in (query, key, value) if name not in EIGHTHS), BF16.name)


@dataclass(frozen=True)
class Widths:
    """Columns of the operands as a kernel sees them."""

    head_dim: int  # of the query
    value_dim: int
    rope_dim: int = 0  # columns of the key that come from a tensor of their own (latent attention)
    value_is_key: bool = False  # the value is the first columns of the key (absorbed latent attention)


@dataclass(frozen=True)
class Signature:
    """What one generated module is specialised on."""

    direction: Direction
    arch: str  # "sm_90", "gfx942", "cpu"
    dtypes: Dtypes
    widths: Widths
    sequences: SequenceKind = DENSE
    offset: Offset = "number"  # dense kernels take bottom right as the number that it is
    wanted: frozenset[str] = frozenset()  # of a backward: "query", "key", "value", "rope" and names of operands
    deterministic: bool = False  # of a backward: gradients must be bitwise repeatable
    atomics: bool = False  # of a backward: gradients of operands may be summed in any order
    few_queries: bool = False  # of a forward: has_few_queries, for which keys are divided where a target can
    offsets_64: bool = False  # places in a tensor operand lie 2**31 elements apart, so that offsets need 64 bits
    doubles: bool = False  # a float operand has 64 bits, which tiles of what pairs read then have room for
    boxed: int = 0  # bytes of an element of what `Facts.boxed_read` reads, where tiles of it may be brought to SRAM
    serves: Serves = "all"  # of a forward of packed queries over pages: the others are those of another module
    short_call: bool = False  # of a dense forward: is_short_call, where the target has a form for these
    lengths: LengthClass | None = None  # of the call (class_of), where forms were timed for calls of its class
    options: frozenset[str] = frozenset()  # of the call, which kernels read by their names
    scaled_rows: frozenset[str] = frozenset()  # those of them that are numbers a row, or a block of rows
    scaled_tiles: frozenset[str] = frozenset()  # of all FP8 operands: those of these that are one for 128 rows
    part: bool = False  # of a backward: queries see other keys too, so that no sum over a row's keys is all of it

    @property
    def dtype(self) -> str:
        """Of products: that of query, key and value, where they are one."""
        return self.dtypes.products

    @property
    def rounds_output(self) -> bool:
        """Whether the output has 16 bits, so that delta, which a backward makes of it, has an error."""
        return self.dtypes.out in HALVES

    @property
    def label(self) -> str:
        """A short name for cache folders: "d128-bf16"."""
        head, value = self.widths.head_dim, self.widths.value_dim
        widths = f"d{head}" if head == value else f"d{head}v{value}"
        return f"{widths}-{self.stored}" + "-short" * self.short_call

    @property
    def stored(self) -> str:
        """The dtypes of a call, as people read them: "bf16", or "bf16.e4m3.e4m3" of query, key and value."""
        d = self.dtypes
        if not d.quantized:
            return d.query
        usual = usual_out(d.query, d.key, d.value)
        return ".".join([d.query, d.key, d.value, *(["to", d.out] if d.out != usual else [])])

    def __str__(self) -> str:
        wanted = f" wanted {','.join(sorted(self.wanted))}" if self.direction == "backward" else ""
        w = self.widths
        latent = (f" rope {w.rope_dim}" if w.rope_dim else "") + (" value is key" if w.value_is_key else "")
        besides = (" few" if self.few_queries else "") + (" wide" if self.offsets_64 else "")
        besides += " doubles" if self.doubles else ""
        besides += f" boxed {self.boxed}" if self.boxed else ""
        besides += f" {self.serves}" if self.serves != "all" else ""
        besides += f" with {','.join(sorted(self.options))}" if self.options else ""
        besides += f" by rows {','.join(sorted(self.scaled_rows))}" if self.scaled_rows else ""
        besides += f" by tiles {','.join(sorted(self.scaled_tiles))}" if self.scaled_tiles else ""
        besides += " part" if self.part else ""
        besides = (" deterministic" if self.deterministic else " atomics" if self.atomics else "") + besides
        return f"{self.direction} {self.arch} {self.label}{latent} {self.sequences} {self.offset}{wanted}{besides}"


@dataclass(frozen=True)
class Described:
    """What a signature is made of: a call's, or that of sizes which somebody describes."""

    direction: Direction
    arch: str
    dtype: str  # of query, key and value, where `dtypes` does not tell them apart
    widths: Widths
    sequences: SequenceKind = DENSE
    offset: Offset = "number"
    wanted: frozenset[str] = frozenset()  # gradients
    deterministic: bool | None = None  # gradients must repeat bit for bit; False: they need not, in any sum
    rows: tuple[int, int] = (FEW_QUERIES + 1, FEW_QUERIES + 1)  # of query and key
    number: int = 1  # of sequences
    lengths: tuple[int, int] | None = None  # queries and keys of a sequence, where they are known
    offsets_64: bool = False
    doubles: bool = False
    boxed: int = 0
    options: frozenset[str] = frozenset()
    scaled_rows: frozenset[str] = frozenset()
    scaled_tiles: frozenset[str] = frozenset()
    dtypes: Dtypes | None = None
    part: bool = False


def signature_of(call: Described, *, masked: bool, sums_pairs: bool) -> Signature:
    """The static half of a call of a variant.

    masked: the variant hides pairs. sums_pairs: a wanted gradient may be summed faster in any order.
    """
    kind, q_len, kv_len = call.sequences, *call.rows
    forward = call.direction == "forward"
    dtypes = call.dtypes or Dtypes.all(call.dtype)
    return Signature(
        direction=call.direction, arch=call.arch, dtypes=dtypes, widths=call.widths,
        sequences=kind, offset=call.offset, wanted=call.wanted,
        deterministic=not forward and call.deterministic is True,
        atomics=not forward and call.deterministic is False and sums_pairs,
        few_queries=has_few_queries(call.direction, kind, q_len, call.number),
        serves=serves_of(call.direction, kind, q_len, call.number),
        offsets_64=call.offsets_64, doubles=call.doubles, boxed=call.boxed, options=call.options,
        scaled_rows=call.scaled_rows,
        scaled_tiles=call.scaled_tiles if dtypes.query in EIGHTHS else frozenset(), part=not forward and call.part,
        short_call=forward and not kind.ragged and is_short_call(q_len, kv_len, masked),
        lengths=class_of(*call.lengths) if call.lengths else None,
    )  # fmt: skip
