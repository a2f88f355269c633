"""What one call is: built once in the api, checked once, passed on whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..compiler.planning.signature import SequenceKind
from ..ir.errors import InternalError, WeftError
from ..ir.sequences import Rows, packed_before_padded_rows, packed_rows, padded_rows

Operand = Tensor | int | float
MAIN = ("query", "key", "value", "rope")  # tensors that come before the variant's own operands


# -- sequences: where rows of a call lie, and which positions they have ----------------------------------------------
@dataclass(slots=True)  # not frozen, as Call is not
class Dense:
    """Every sequence fills its [L, D] rows of query and its [T, D] rows of key and value."""

    kind: ClassVar[SequenceKind] = "dense"
    q_offset: int | Tensor  # position of query row 0: a number, or int32 [B]


@dataclass(slots=True)  # not frozen, as Call is not
class Lengths:
    """Padded operands [B, H, L, D]: sequence b has the first q_lens[b] queries and kv_lens[b] keys of batch row b."""

    kind: ClassVar[SequenceKind] = "lengths"
    q_lens: Tensor | None  # int32 or int64 [B]; None: all L rows
    kv_lens: Tensor | None  # the same; None: all T rows
    q_offset: int | Tensor | None  # None: kv_len - q_len of each sequence

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """What kernels read, by the names that they have for it."""
        return {"q_lens": self.q_lens, "kv_lens": self.kv_lens}

    @property
    def on_host(self) -> bool:
        """Whether lengths lie on a CPU, where nobody waits for them."""
        return any(t.is_cpu for t in (self.q_lens, self.kv_lens) if t is not None)

    def number(self, query: Tensor) -> int:
        """How many sequences there are."""
        return query.shape[0]

    def rows(self, query: Tensor, key: Tensor) -> list[Rows]:
        """Which rows each has, within the operands. Waits for a device that holds the lengths."""
        q_lens, kv_lens = (None if t is None else t.tolist() for t in (self.q_lens, self.kv_lens))
        return padded_rows(query.shape[0], query.shape[2], key.shape[2], q_lens, kv_lens, numbers_of(self.q_offset))


@dataclass(frozen=True, slots=True)
class Packed:
    """Operands [1, heads, total, dim] with sequences one after the other: rows cu[b] to cu[b + 1] are those of b.

    Rows behind the last sequence belong to none.
    """

    kind: ClassVar[SequenceKind] = "packed"
    cu_q: Tensor  # int32 or int64 [B + 1], the first row of each sequence, and the end
    cu_kv: Tensor  # the same of keys
    q_offset: int | Tensor | None  # as of Lengths

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"cu_q": self.cu_q, "cu_kv": self.cu_kv}

    @property
    def on_host(self) -> bool:
        return self.cu_q.is_cpu

    def number(self, query: Tensor) -> int:
        return self.cu_q.shape[0] - 1

    def rows(self, query: Tensor, key: Tensor) -> list[Rows]:
        """As of Lengths."""
        starts = self.cu_q.tolist(), self.cu_kv.tolist()
        return packed_rows(query.shape[2], key.shape[2], *starts, numbers_of(self.q_offset))


LARGEST_PAGE = 256  # rows of a block


@dataclass(slots=True)  # not frozen, as Call is not
class Paged:
    """Padded queries, as of Lengths; keys and values in pools [blocks, Hkv, page, D].

    Rows page * i on of sequence b are those of block table[b, i]; entries behind a length are never read.
    """

    kind: ClassVar[SequenceKind] = "paged"

    q_lens: Tensor | None  # int32 or int64 [B]; None: all L rows
    kv_lens: Tensor  # the same of keys
    table: Tensor  # int32 [B, pages], the block of each page
    page: int  # rows of a block, a power of two
    q_offset: int | Tensor | None  # None: kv_len - q_len of each sequence

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"q_lens": self.q_lens, "kv_lens": self.kv_lens, "table": self.table}

    @property
    def on_host(self) -> bool:
        return self.kv_lens.is_cpu

    def number(self, query: Tensor) -> int:
        return query.shape[0]

    def rows(self, query: Tensor, key: Tensor) -> list[Rows]:
        """As of Lengths; rows of keys are counted as if pages lay one after the other."""
        q_lens = None if self.q_lens is None else self.q_lens.tolist()
        return padded_rows(
            query.shape[0],
            query.shape[2],
            key_rows(key, self),
            q_lens,
            self.kv_lens.tolist(),
            numbers_of(self.q_offset),
        )


@dataclass(slots=True)  # not frozen, as Call is not
class PackedPaged:
    """Packed queries, as of Packed; keys and values in pools, as of Paged: sequence b has row b of the table."""

    kind: ClassVar[SequenceKind] = "packed_paged"

    cu_q: Tensor  # int32 or int64 [B + 1], the first row of each sequence, and the end
    kv_lens: Tensor  # int32 or int64 [B]
    table: Tensor  # int32 [B, pages]
    page: int
    q_offset: int | Tensor | None  # None: kv_len - q_len of each sequence

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"cu_q": self.cu_q, "kv_lens": self.kv_lens, "table": self.table}

    @property
    def on_host(self) -> bool:
        return self.kv_lens.is_cpu

    def number(self, query: Tensor) -> int:
        return self.cu_q.shape[0] - 1

    def rows(self, query: Tensor, key: Tensor) -> list[Rows]:
        """As of Paged."""
        given = self.cu_q.tolist(), self.kv_lens.tolist(), numbers_of(self.q_offset)
        return packed_before_padded_rows(query.shape[2], key_rows(key, self), *given)


Pages = (Paged, PackedPaged)  # sequences whose keys lie in pools
Ragged = Lengths | Packed | Paged | PackedPaged  # sequences of their own lengths
Sequences = Dense | Lengths | Packed | Paged | PackedPaged


def key_rows(key: Tensor, sequences: Sequences) -> int:
    """T: the keys that a sequence can have."""
    if isinstance(sequences, Pages):
        return sequences.table.shape[1] * sequences.page if key.shape[0] else 0
    return key.shape[2]


def lengths_of(query: Tensor, key: Tensor, sequences: object) -> tuple[int, int]:
    """Queries and keys of a sequence, as far as the host knows them: of packed ones the mean, of a table its room."""
    q_rows = query.shape[2]
    if isinstance(sequences, Packed | PackedPaged):
        number = max(1, sequences.number(query))
        q_rows, kv_rows = q_rows // number, key_rows(key, sequences)
        return q_rows, kv_rows if isinstance(sequences, PackedPaged) else kv_rows // number
    return q_rows, key_rows(key, sequences) if isinstance(sequences, Paged) else key.shape[2]


def numbers_of(q_offset: int | Tensor | None) -> int | list[int] | None:
    return q_offset.tolist() if isinstance(q_offset, Tensor) else q_offset


# -- options ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Options:
    """How a call is to be computed. Part of what is prepared for it."""

    target: str | None = None  # None: the best that can
    schedule: str | None = None  # None, the name of an algorithm, or the text of a Schedule
    # gradients must be bitwise repeatable; None: those of operands, the query's where nothing else is faster
    deterministic: bool | None = None
    return_lse: bool = False
    form: Literal["expanded", "absorbed"] | None = None  # of latent attention; None: by cost

    @property
    def text(self) -> str:
        """The part that ops carry: `target=cpu;schedule=flash`; "" where all is as by default."""
        return options_text(self.target, self.schedule, self.deterministic)


_ANSWERS = {True: "yes", False: "no", None: None}


def options_text(target: str | None, schedule: str | None, deterministic: bool | None = None) -> str:
    """A separator in either would be read as another option: neither has one where it means anything."""
    parts = [("target", target), ("schedule", schedule), ("deterministic", _ANSWERS[deterministic])]
    return ";".join(f"{name}={value.replace(';', ',')}" for name, value in parts if value)


@lru_cache(maxsize=256)
def options_of(target: str | None, schedule: str | None, deterministic: bool | None = None) -> Options:
    """The same object for the same options, so that a repeated call makes none."""
    return Options(target, schedule, deterministic)


@lru_cache(maxsize=256)
def parse_options(text: str) -> Options:
    """Read back `Options.text`."""
    given = dict(part.partition("=")[::2] for part in text.split(";") if part)
    if not given.keys() <= {"target", "schedule", "deterministic"}:
        raise WeftError(f"options: expected text like 'target=cpu;schedule=flash', got {text!r}")
    deterministic = {"yes": True, "no": False}.get(given.get("deterministic", ""))
    return options_of(given.get("target"), given.get("schedule"), deterministic)


# -- the call --------------------------------------------------------------------------------------------------------
@dataclass(slots=True)  # nobody changes one; not frozen, because that triples what making it costs, at every call
class Call:
    """One call of a variant.

    query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv] (pools of blocks, where there are pages); None where
    the value is the first columns of the key (absorbed latent attention). rope [B, 1, T, R]: columns of the key that
    all heads share (expanded).
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    rope: Tensor | None
    operands: Mapping[str, Operand]  # the variant's own, by name, in the order of its parameters
    sequences: Sequences
    options: Options
    head_dim: int  # the value of the symbol head_dim

    @property
    def keys(self) -> list[Tensor]:
        return [self.key] if self.rope is None else [self.key, self.rope]

    @property
    def q_offset(self) -> int | Tensor:
        """Of a dense call."""
        sequences = self.sequences
        if isinstance(sequences, Dense):
            return sequences.q_offset
        raise InternalError(f"call: sequences of kind {sequences.kind} reached what knows only dense ones")

    @property
    def ragged(self) -> Ragged | None:
        """The sequences where they have lengths of their own."""
        sequences = self.sequences
        return None if isinstance(sequences, Dense) else sequences

    @property
    def kv_rows(self) -> int:
        """T: rows of the keys, or of the pages that a table has room for."""
        return key_rows(self.key, self.sequences)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The main tensors that there are, by name: those that a backward has gradients for."""
        found = {"query": self.query, "key": self.key, "value": self.value, "rope": self.rope}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(slots=True)  # not frozen, as Call is not
class BackwardCall:
    """What a backward starts from."""

    call: Call
    out: Tensor  # [B, Hq, L, Dv], as the forward gave it
    lse: Tensor  # [B, Hq, L], or [2, B, Hq, L] where scores may lie far from 0
    dout: Tensor  # like out
    dlse: Tensor | None  # like lse
    wanted: frozenset[str]  # "query", "key", "value", "rope" and names of operands
    weights: Tensor | None = None  # of a short call on a CPU, where the forward kept them


def sequences_of(
    q_offset: int | Tensor | None, q_lens: Tensor | None, kv_lens: Tensor | None, cu_q: Tensor | None,
    cu_kv: Tensor | None, table: Tensor | None = None, page: int = 0,
) -> Sequences:  # fmt: skip
    """The record of these options of a call. Kernels read what is one number a sequence one after the other.

    page: rows of a block of the key, which counts where there is a table.
    """
    if q_lens is kv_lens is cu_q is cu_kv is table is None:
        assert q_offset is not None
        return dense_offset(q_offset)
    q_offset = q_offset.contiguous() if isinstance(q_offset, Tensor) else q_offset
    if table is not None:
        if kv_lens is None or cu_kv is not None or not (q_lens is None or cu_q is None):
            raise WeftError("block_table: expected kv_lens with it, and q_lens or cu_seqlens_q at most")
        if not kv_lens.is_contiguous():
            kv_lens = kv_lens.contiguous()
        if table.stride(1) != 1 and table.shape[1] > 1:  # rows may lie apart, as of the first columns of a larger one
            table = table.contiguous()
        if cu_q is not None:
            return PackedPaged(cu_q.contiguous(), kv_lens, table, page, q_offset)
        q_lens = None if q_lens is None else q_lens.contiguous()
        return Paged(q_lens, kv_lens, table, page, q_offset)
    if cu_q is None and cu_kv is None:
        if q_lens is not None and not q_lens.is_contiguous():
            q_lens = q_lens.contiguous()
        if kv_lens is not None and not kv_lens.is_contiguous():
            kv_lens = kv_lens.contiguous()
        return Lengths(q_lens, kv_lens, q_offset)
    if cu_q is None or cu_kv is None or not q_lens is kv_lens is None:
        raise WeftError("expected cu_seqlens_q and cu_seqlens_kv, or q_lens and kv_lens, got some of both")
    return Packed(cu_q.contiguous(), cu_kv.contiguous(), q_offset)


def dense_offset(q_offset: int | Tensor) -> Dense:
    """Rows from this position on; kernels read an offset a row one after the other."""
    if isinstance(q_offset, Tensor) and not q_offset.is_contiguous():
        q_offset = q_offset.contiguous()
    return Dense(q_offset)


# -- the call as arguments of a torch op -----------------------------------------------------------------------------
def float_tensor(value: float) -> Tensor:
    """A float as ops take it. While torch.compile traces, only this form keeps the value out of the graph: its product
    with a tensor becomes arithmetic on the tensor that Dynamo has for the float, and a new value recompiles nothing."""
    if torch.compiler.is_compiling():
        return torch.ones((), dtype=torch.float64, device="cpu") * value
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def flat(call: Call, kinds: Sequence[str], text: str) -> tuple[Any, ...]:
    """The arguments of the op `weft::attention`. kinds: of the operands in order: "tensor", "float" or "int"."""
    values: dict[str, list[Any]] = {"tensor": [], "float": [], "int": []}
    for kind, value in zip(kinds, call.operands.values()):
        values[kind].append(float_tensor(float(value)) if kind == "float" else value)
    offset = call.sequences.q_offset
    number, tensor = (None, offset) if isinstance(offset, Tensor) else (offset, None)
    return (
        call.query, call.key, call.value, call.rope, values["tensor"], values["float"], values["int"], number, tensor,
        *sequence_tensors(call.sequences), call.head_dim, text, call.options.text,
    )  # fmt: skip


def sequence_tensors(sequences: Sequences) -> tuple[Tensor | None, ...]:
    """q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv and block_table, as the op takes them."""
    match sequences:
        case Dense():
            return None, None, None, None, None
        case Lengths(q_lens, kv_lens):
            return q_lens, kv_lens, None, None, None
        case Packed(cu_q, cu_kv):
            return None, None, cu_q, cu_kv, None
        case Paged(q_lens, kv_lens, table):
            return q_lens, kv_lens, None, None, table
        case PackedPaged(cu_q, kv_lens, table):
            return None, kv_lens, cu_q, None, table
        case _:
            raise InternalError(f"call: sequences of kind {sequences.kind} have no place in the op")


def call_of(
    names: Sequence[str], kinds: Sequence[str], options: str, query: Tensor, key: Tensor, value: Tensor | None,
    rope: Tensor | None, operands: Sequence[Tensor], floats: Sequence[Tensor], ints: Sequence[int],
    q_offset: int | None, q_offsets: Tensor | None, q_lens: Tensor | None, kv_lens: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None, block_table: Tensor | None, head_dim: int,
) -> Call:  # fmt: skip
    """The call that an op's arguments stand for."""
    of_kind = {"tensor": iter(operands), "float": (f.item() for f in floats), "int": iter(ints)}
    named: dict[str, Operand] = {name: next(of_kind[kind]) for name, kind in zip(names, kinds)}
    offset = q_offset if q_offsets is None else q_offsets
    lengths = (q_lens, kv_lens, cu_seqlens_q, cu_seqlens_kv, block_table)
    if offset is None and all(t is None for t in lengths):
        raise WeftError("weft::attention: q_offset: expected a number or q_offsets, where no lengths are given")
    sequences = sequences_of(offset, *lengths, page=key.shape[2])
    return Call(query, key, value, rope, named, sequences, parse_options(options), head_dim)
