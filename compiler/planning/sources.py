"""How rows of a call lie: sources of rows of queries times sources of rows of keys.

A kind of sequences is a pair of these. Launchers, templates and planning read pointers, extents and conditions here,
and ask for fields, never for a name. One more way that keys lie is a record that `register` takes, and a template part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from ...ir.errors import WeftError

Side = Literal["q", "kv"]
_NONE: Mapping[str, str] = MappingProxyType({})


class Pointer(NamedTuple):
    """A tensor that says where rows of sequences lie, as kernels and records of a call name it."""

    name: str
    entries: str = "{number}"  # along its first dimension; {number}: of sequences. "": it says how many there are
    of_tiles: bool = False  # of kernels that read tiles of keys alone


@dataclass(frozen=True, eq=False)
class Source:
    """How rows of one side lie. Texts are over names of a call (codegen/launch/binding.py)."""

    name: str
    # templates/triton/sources has a file of this name; of a source from outside, the name of its own template
    part: str
    pointers: tuple[Pointer, ...] = ()
    room: str | None = None  # where sequences have lengths of their own: rows of a head in memory
    packed: bool = False  # one after the other in one batch row
    # what kernels are told besides, and where they have it from
    numbers: Mapping[str, str] = field(default_factory=lambda: _NONE)
    fits: tuple[str, ...] = ()  # what the direct way asks of a call, beside entries of pointers
    position: str = "row"  # of a row, counted from the sequence's first one, in words for messages
    # positions are those of all rows, in whatever order. Else they may lie beyond the number of rows, as those of a
    # shard do, and a variant that reads that number is refused.
    covers: bool = True
    beside: tuple[str, ...] = ()  # sources of the other side that it goes with
    side: ClassVar[Side]

    @property
    def ragged(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.room is not None

    @property
    def in_order(self) -> bool:
        """Whether positions are row numbers, so that what a mask says of positions bounds tiles of rows."""
        return self.position == "row"

    @property
    def extent(self) -> str:
        """The parameter of kernels that is the rows of a head in memory."""
        return f"{self.side}_extent" if self.ragged else f"{self.side}_len"

    @property
    def vocabulary(self) -> dict[str, str]:
        """Names that kernels have for sizes, and what they stand for."""
        return {**({self.extent: self.room} if self.room else {}), **self.numbers}

    def names(self, of_tiles: bool) -> list[str]:
        """Of pointers: those of all kernels, or those of kernels that read tiles of keys."""
        return [p.name for p in self.pointers if p.of_tiles == of_tiles]

    @property
    def template(self) -> str:
        """The name of its part, as templates import it."""
        return self.part if self.is_outside else f"triton/sources/{self.part}.py.jinja"

    @property
    def is_outside(self) -> bool:
        """Whether it is of another package."""
        return self.part.endswith(".jinja")


@dataclass(frozen=True, eq=False)
class RowSource(Source):
    """How rows of queries lie."""

    side: ClassVar[Side] = "q"


@dataclass(frozen=True, eq=False)
class KeySource(Source):
    """How rows of keys and values lie."""

    side: ClassVar[Side] = "kv"

    pooled: bool = False  # in blocks of a pool, whose rows are the `PAGE` of a call
    is_box: bool = True  # a tile of them is one box of a tensor, which TMA brings, or one for each block
    fits: tuple[str, ...] = ("batches == key_batches",)

    @property
    def rows(self) -> str:
        """Keys that a sequence has room for: of pools kv_len is that of a block."""
        return self.extent if self.pooled else "kv_len"


@dataclass(frozen=True, eq=False)
class SequenceKind:
    """A source of queries and one of keys. There is one object for each pair."""

    name: str
    rows: RowSource  # of queries
    keys: KeySource

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __reduce__(self) -> tuple[object, ...]:
        return kind_named, (self.name,)

    @cached_property
    def ragged(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.rows.ragged or self.keys.ragged

    @cached_property
    def in_order(self) -> bool:
        """Whether positions on both sides are row numbers."""
        return self.rows.in_order and self.keys.in_order

    @cached_property
    def is_outside(self) -> bool:
        """Whether a source comes from outside, with text for the kernels of `triton` alone."""
        return self.rows.is_outside or self.keys.is_outside

    @cached_property
    def alike(self) -> bool:
        """Whether rows of one number have one position in all sequences."""
        return self.in_order and not self.ragged

    def lengths_unknown(self) -> set[str]:
        """Symbols of lengths that kernels have no value for: they know the number of rows alone."""
        return {name for name, source in (("q_len", self.rows), ("kv_len", self.keys)) if not source.covers}

    @cached_property
    def is_mixed(self) -> bool:
        """Whether queries are packed and keys are not: steps of one query may lie beside prompts."""
        return self.rows.packed and not self.keys.packed

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """Names of the tensors that say where rows lie, as records of a call have them too."""
        return tuple(p.name for p in (*self.rows.pointers, *self.keys.pointers))

    @cached_property
    def number(self) -> str:
        """How many sequences there are."""
        return "n_sequences" if self.rows.packed else "batches"

    @cached_property
    def vocabulary(self) -> dict[str, str]:
        return self.rows.vocabulary | self.keys.vocabulary

    def conditions(self, given: list[str]) -> list[str]:
        """What the direct way asks of a call. given: the pointers that it has."""
        pointers = [p for p in (*self.rows.pointers, *self.keys.pointers) if p.name in given and p.entries]
        entries = [f"{p.name}.shape[0] == {p.entries.format(number=self.number)}" for p in pointers]
        return [*self.rows.fits, *entries]


def not_in_order(kind: SequenceKind) -> str:
    """Of a message: which rows have positions that are no row numbers.

    >>> not_in_order(SequenceKind("", RowSource("", ""), KeySource("gathered", "", position="indices[row]")))
    'gathered keys, whose positions are indices[row],'
    """
    source: Source = kind.rows if kind.keys.in_order else kind.keys
    return f"{source.name} {'keys' if source is kind.keys else 'queries'}, whose positions are {source.position},"


# -- the tables ------------------------------------------------------------------------------------------------------
_QUERIES: dict[str, RowSource] = {}
_KEYS: dict[str, KeySource] = {}
_kinds: dict[str, SequenceKind] = {}


def register(source: RowSource | KeySource) -> None:
    """Take a source, and pair it with those of the other side that it goes with.

    From outside the package too: then its part is the name of a template, in a folder that codegen/loader.py knows.
    Kinds are found by `kind_of`.
    """
    if source.name in (_KEYS if isinstance(source, KeySource) else _QUERIES):
        raise WeftError(f"sources: {source.name} is registered already")
    if isinstance(source, KeySource):
        _KEYS[source.name] = source
    else:
        _QUERIES[source.name] = source
    for rows, keys in product(_QUERIES.values(), _KEYS.values()):
        if source in (rows, keys) and (rows.name in keys.beside or keys.name in rows.beside):
            is_usual = keys.beside[:1] == (rows.name,)  # goes without saying
            name = keys.name if is_usual else f"{rows.name}_{keys.name}"
            _kinds[name] = SequenceKind(name, rows, keys)


def unregister(source: RowSource | KeySource) -> None:
    """Take a source back, with its pairs."""
    (_KEYS if isinstance(source, KeySource) else _QUERIES).pop(source.name)
    for name in [name for name, kind in _kinds.items() if source in (kind.rows, kind.keys)]:
        del _kinds[name]


def kinds() -> list[SequenceKind]:
    """All pairs, in the order of their registration."""
    return list(_kinds.values())


def kind_named(name: str) -> SequenceKind:
    if name not in _kinds:
        raise WeftError(f"sequences: expected one of {', '.join(_kinds)}, got {name!r}")
    return _kinds[name]


def kind_of(rows: str, keys: str) -> SequenceKind:
    """The pair of two sources, by their names."""
    for kind in _kinds.values():
        if (kind.rows.name, kind.keys.name) == (rows, keys):
            return kind
    raise WeftError(f"sequences: no {rows} queries go with {keys} keys")


def digest(kind: SequenceKind) -> str:
    """Of the records of sources from outside: "" of those in the package, whose text has a digest with all of it."""
    records = [repr(s) for s in (kind.rows, kind.keys) if s.is_outside]
    return hashlib.sha256("".join(records).encode()).hexdigest() if records else ""


for _own in (
    RowSource("dense", "dense"),
    RowSource("lengths", "lengths", (Pointer("q_lens"),), "q_len"),
    RowSource(
        "packed", "packed", (Pointer("cu_q", ""),), "q_len", packed=True,
        numbers={"n_sequences": "cu_q.shape[0] - 1"}, fits=("batches == 1", "n_sequences > 0"),
    ),
    KeySource("dense", "dense", beside=("dense",)),
    KeySource("lengths", "lengths", (Pointer("kv_lens"),), "kv_len", beside=("lengths",)),
    KeySource(
        "packed", "packed", (Pointer("cu_kv", "{number} + 1"),), "kv_len", packed=True, beside=("packed",),
    ),
    KeySource(
        "paged", "paged", (Pointer("kv_lens"), Pointer("table", of_tiles=True)), "table.shape[1] * kv_len", pooled=True,
        numbers={"table_row": "table.stride(0)", "n_blocks": "key_batches"}, beside=("lengths", "packed"),
        fits=("key_batches > 0", f"0 < table.shape[1] * kv_len <= {2**30}", "table.stride(1) == 1"),
    ),
):  # fmt: skip
    register(_own)

DENSE, LENGTHS, PACKED, PAGED, PACKED_PAGED = map(kind_named, ("dense", "lengths", "packed", "paged", "packed_paged"))
