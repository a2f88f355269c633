"""What one call is: built once in the api, checked once, passed on whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..compiler.planning import sources
from ..compiler.planning.sources import SequenceKind
from ..ir.errors import InternalError, Problem, WeftError
from ..ir.sequences import Rows, packed_before_padded_rows, packed_rows, padded_rows
from .options import IN_SCHEMA, LENGTHS, PLAIN, READ_BY_KERNELS, CallOptions

Operand = Tensor | int | float
MAIN = ("query", "key", "value", "rope")  # tensors that come before the variant's own operands


# -- sequences: where rows of a call lie, and which positions they have ----------------------------------------------
@dataclass(slots=True)  # not frozen, as Call is not
class Dense:
    """Every sequence fills its [L, D] rows of query and its [T, D] rows of key and value.

    Rows of one length that lie otherwise are records like it, of a class that inherits it.
    """

    kind: ClassVar[SequenceKind] = sources.DENSE
    q_offset: int | Tensor  # position of query row 0: a number, or int32 [B]

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """What kernels read, by the names that they have for it."""
        return {}

    def spans(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """What positions of rows of queries, counted from q_offset, and of keys lie below."""
        return q_len, kv_len

    def q_rows(self, q_len: int, device: torch.device) -> Tensor:
        """Positions of rows of queries, counted from q_offset: int64 [q_len] or [B, 1, q_len]."""
        return torch.arange(q_len, device=device)

    def kv_rows(self, kv_len: int, device: torch.device) -> Tensor:
        """Positions of rows of keys: int64 [kv_len] or [B, 1, kv_len]."""
        return torch.arange(kv_len, device=device)


@dataclass(slots=True)  # not frozen, as Call is not
class Lengths:
    """Padded operands [B, H, L, D]: sequence b has the first q_lens[b] queries and kv_lens[b] keys of batch row b."""

    kind: ClassVar[SequenceKind] = sources.LENGTHS
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

    kind: ClassVar[SequenceKind] = sources.PACKED
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


def is_page(rows: int) -> bool:
    """Whether blocks may have so many rows: a power of two."""
    return 0 < rows <= LARGEST_PAGE and rows & (rows - 1) == 0


@dataclass(slots=True)  # not frozen, as Call is not
class Paged:
    """Padded queries, as of Lengths; keys and values in pools [blocks, Hkv, page, D].

    Rows page * i on of sequence b are those of block table[b, i]; entries behind a length are never read.
    """

    kind: ClassVar[SequenceKind] = sources.PAGED

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

    kind: ClassVar[SequenceKind] = sources.PACKED_PAGED

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
class Choices:
    """How a call is to be computed. Part of what is prepared for it."""

    target: str | None = None  # None: the best that can
    schedule: str | None = None  # None, the name of an algorithm, or the text of a Schedule
    # gradients must be bitwise repeatable; None: those of operands, the query's where nothing else is faster
    deterministic: bool | None = None
    out: str | None = None  # the dtype of the output, by name; None: the usual one
    part: bool = False  # its queries see other keys too, which another call has: no call of ops is such a part

    @property
    def text(self) -> str:
        """The part that ops carry: `target=cpu;schedule=flash`; "" where all is as by default."""
        return choices_text(self.target, self.schedule, self.deterministic, self.out)


_ANSWERS = {True: "yes", False: "no", None: None}


def choices_text(
    target: str | None, schedule: str | None, deterministic: bool | None = None, out: str | None = None
) -> str:  # fmt: skip
    """A separator in either would be read as another option: neither has one where it means anything."""
    parts = [("target", target), ("schedule", schedule), ("deterministic", _ANSWERS[deterministic]), ("out", out)]
    return ";".join(f"{name}={value.replace(';', ',')}" for name, value in parts if value)


@lru_cache(maxsize=256)
def choices_of(
    target: str | None, schedule: str | None, deterministic: bool | None = None, out: str | None = None
) -> Choices:  # fmt: skip
    """The same object for the same choices, so that a repeated call makes none."""
    return Choices(target, schedule, deterministic, out)


@lru_cache(maxsize=256)
def parse_choices(text: str) -> Choices:
    """Read back `Choices.text`."""
    given = dict(part.partition("=")[::2] for part in text.split(";") if part)
    if not given.keys() <= {"target", "schedule", "deterministic", "out"}:
        raise WeftError(f"options: expected text like 'target=cpu;schedule=flash', got {text!r}")
    deterministic = {"yes": True, "no": False}.get(given.get("deterministic", ""))
    return choices_of(given.get("target"), given.get("schedule"), deterministic, given.get("out"))


# -- the call --------------------------------------------------------------------------------------------------------
@dataclass(slots=True)  # nobody changes one; not frozen, because that triples what making it costs, at every call
class Call:
    """One call of a variant.

    query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv] (pools of blocks, where there are pages); None where
    the value is the first columns of the key (absorbed latent attention). rope [B, 1, T, R]: columns of the key that
    all heads share (expanded), or that a latent cache has in a tensor of their own (absorbed).
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    rope: Tensor | None
    operands: Mapping[str, Operand]  # the variant's own, by name, in the order of its parameters
    sequences: Sequences
    choices: Choices
    head_dim: int  # the value of the symbol head_dim
    read: Mapping[str, Tensor] | None = None  # options that kernels read by their names

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


def sequences_of(options: CallOptions, page: int = 0) -> Sequences:
    """The record of these options of a call. Kernels read what is one number a sequence one after the other.

    page: rows of a block of the key, which counts where there is a table.
    """
    q_offset, table = options.q_offset, options.block_table
    q_lens, kv_lens, cu_q, cu_kv = options.q_lens, options.kv_lens, options.cu_seqlens_q, options.cu_seqlens_kv
    if q_lens is kv_lens is cu_q is cu_kv is table is None:
        assert q_offset is not None
        return dense_offset(q_offset)
    q_offset = q_offset.contiguous() if isinstance(q_offset, Tensor) else q_offset
    if table is not None and kv_lens is not None and cu_kv is None and (q_lens is None or cu_q is None):
        if not kv_lens.is_contiguous():
            kv_lens = kv_lens.contiguous()
        if table.stride(1) != 1 and table.shape[1] > 1:  # rows may have gaps, as of the first columns of a larger one
            table = table.contiguous()
        if cu_q is not None:
            return PackedPaged(cu_q.contiguous(), kv_lens, table, page, q_offset)
        q_lens = None if q_lens is None else q_lens.contiguous()
        return Paged(q_lens, kv_lens, table, page, q_offset)
    if table is cu_q is cu_kv is None:
        if q_lens is not None and not q_lens.is_contiguous():
            q_lens = q_lens.contiguous()
        if kv_lens is not None and not kv_lens.is_contiguous():
            kv_lens = kv_lens.contiguous()
        return Lengths(q_lens, kv_lens, q_offset)
    if table is None and q_lens is kv_lens is None and cu_q is not None and cu_kv is not None:
        return Packed(cu_q.contiguous(), cu_kv.contiguous(), q_offset)
    lacking = Problem(option="cu_seqlens_q" if cu_q is None else "cu_seqlens_kv", what="missing", next_step="pass both")
    raise WeftError.of("", mixed_problem(options) or lacking)


def mixed_problem(options: CallOptions) -> Problem | None:
    """What keeps options from saying where sequences lie: those of two kinds, and a table without lengths."""
    q_lens, kv_lens, cu_q, cu_kv = options.q_lens, options.kv_lens, options.cu_seqlens_q, options.cu_seqlens_kv
    if options.block_table is not None:
        if cu_kv is not None:
            how = "pass kv_lens=, and cu_seqlens_q= where queries are packed"
            return Problem(
                option="cu_seqlens_kv", expected="none with block_table, whose keys are not packed", next_step=how
            )
        if q_lens is not None and cu_q is not None:
            got = "both: q_lens is for padded queries [B, Hq, L, D], cu_seqlens_q for packed ones [1, Hq, total, D]"
            return Problem(option="q_lens", expected="q_lens or cu_seqlens_q", got=got, named=True)
        if kv_lens is None:
            how = "with block_table pass the length of each sequence, int32 [B]"
            return Problem(option="kv_lens", what="missing", next_step=how)
    elif not (q_lens is kv_lens is None or cu_q is cu_kv is None):
        got = (
            f"{', '.join(options.lengths)}: q_lens and kv_lens are for padded operands [B, heads, length, dim], "
            "cu_seqlens_q and cu_seqlens_kv for packed ones [1, heads, total, dim]"
        )
        return Problem(option=next(iter(options.lengths)), expected="lengths of one kind", got=got, named=True)
    return None


def dense_offset(q_offset: int | Tensor) -> Dense:
    """Rows from this position on; kernels read an offset a row one after the other."""
    if isinstance(q_offset, Tensor) and not q_offset.is_contiguous():
        q_offset = q_offset.contiguous()
    return Dense(q_offset)


def length_options(sequences: Sequences) -> dict[str, Tensor | None]:
    """What says where sequences lie, by the names that the options of a call have for it."""
    match sequences:
        case Dense() if sequences.kind is sources.DENSE:
            return {}
        case Lengths(q_lens, kv_lens):
            return {"q_lens": q_lens, "kv_lens": kv_lens}
        case Packed(cu_q, cu_kv):
            return {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        case Paged(q_lens, kv_lens, table):
            return {"q_lens": q_lens, "kv_lens": kv_lens, "block_table": table}
        case PackedPaged(cu_q, kv_lens, table):
            return {"cu_seqlens_q": cu_q, "kv_lens": kv_lens, "block_table": table}
        case _:
            raise InternalError(f"call: sequences of kind {sequences.kind} have no place in the op")


def length_tensors(sequences: Sequences) -> tuple[Tensor | None, ...]:
    """The same in the order of LENGTHS, None where there is none."""
    given = length_options(sequences)
    return tuple([given.get(name) for name in LENGTHS])


# -- the call as arguments of a torch op -----------------------------------------------------------------------------
SLOTS = ("q_offsets", *IN_SCHEMA)  # tensors of the op that a call may lack
_BEFORE, _BEHIND = 8, 3  # arguments in front of them, and behind


class Arguments(NamedTuple):
    """The arguments of the op `weft::attention`."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    rope: Tensor | None
    operands: Sequence[Tensor]  # of the variant, by kind and in their order: tensors, then floats, then ints
    floats: Sequence[Tensor]
    ints: Sequence[int]
    q_offset: int | None
    slots: tuple[Tensor | None, ...]  # in the order of SLOTS
    head_dim: int
    variant: str  # its canonical text
    choices: str  # the text of Choices

    @staticmethod
    def of(flat: Sequence[Any]) -> Arguments:
        """As the op gets them: one after the other."""
        end = len(flat) - _BEHIND
        return Arguments._make([*flat[:_BEFORE], tuple(flat[_BEFORE:end]), *flat[end:]])

    @property
    def flat(self) -> tuple[Any, ...]:
        """The same backwards."""
        return (*self[:_BEFORE], *self.slots, *self[_BEFORE + 1 :])

    def slot(self, name: str) -> Tensor | None:
        """The tensor of an option."""
        return self.slots[SLOTS.index(name)]

    @property
    def main(self) -> tuple[Tensor | None, ...]:
        """In the order of MAIN."""
        return self.query, self.key, self.value, self.rope


SCHEMA = (
    "Tensor query, Tensor key, Tensor? value, Tensor? rope, Tensor[] operands, Tensor[] floats, SymInt[] ints, "
    f"SymInt? q_offset, {', '.join(f'Tensor? {name}' for name in SLOTS)}, SymInt head_dim, str variant, str options"
)


def float_tensor(value: float) -> Tensor:
    """A float as ops take it. While torch.compile traces, only this form keeps the value out of the graph: its product
    with a tensor becomes arithmetic on the tensor that Dynamo has for the float, and a new value recompiles nothing."""
    if torch.compiler.is_compiling():
        return torch.ones((), dtype=torch.float64, device="cpu") * value
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def arguments_of(call: Call, kinds: Sequence[str], text: str) -> Arguments:
    """The call as an op takes it. kinds: of the operands in order: "tensor", "float" or "int"."""
    values: dict[str, list[Any]] = {"tensor": [], "float": [], "int": []}
    for kind, value in zip(kinds, call.operands.values()):
        values[kind].append(float_tensor(float(value)) if kind == "float" else value)
    offset = call.sequences.q_offset
    number, per_row = (None, offset) if isinstance(offset, Tensor) else (offset, None)
    given = {"q_offsets": per_row, **length_options(call.sequences), **(call.read or {})}
    return Arguments(
        call.query, call.key, call.value, call.rope, values["tensor"], values["float"], values["int"], number,
        tuple([given.get(name) for name in SLOTS]), call.head_dim, text, call.choices.text,
    )  # fmt: skip


def call_of(names: Sequence[str], kinds: Sequence[str], given: Arguments) -> Call:
    """The call that an op's arguments stand for. names, kinds: of the variant's operands."""
    of_kind = {"tensor": iter(given.operands), "float": (f.item() for f in given.floats), "int": iter(given.ints)}
    named: dict[str, Operand] = {name: next(of_kind[kind]) for name, kind in zip(names, kinds)}
    tensors = dict(zip(SLOTS, given.slots))
    per_row = tensors.pop("q_offsets")
    read = {name: tensor for name in READ_BY_KERNELS if (tensor := tensors.pop(name)) is not None}
    options = PLAIN.having(**{"q_offset": given.q_offset if per_row is None else per_row, **tensors})
    if options.q_offset is None and not options.are_ragged:
        raise WeftError("weft::attention: q_offset: expected a number or q_offsets, where no lengths are given")
    sequences = sequences_of(options, page=given.key.shape[2])
    return Call(
        given.query, given.key, given.value, given.rope, named, sequences, parse_choices(given.choices), given.head_dim,
        read or None,
    )  # fmt: skip
