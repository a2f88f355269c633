"""What one call is: built once in the api, checked once, passed on whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..ir.errors import InternalError, WeftError

Operand = Tensor | int | float
MAIN = ("query", "key", "value", "rope")  # tensors that come before the variant's own operands


# -- sequences: where rows of a call lie, and which positions they have ----------------------------------------------
@dataclass(slots=True)  # not frozen, as Call is not
class Dense:
    """Every sequence fills its [L, D] rows of query and its [T, D] rows of key and value."""

    q_offset: int | Tensor  # position of query row 0: a number, or int32 [B]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Padded operands: sequence b has q_lens[b] queries and kv_lens[b] keys. No target computes it yet."""

    q_lens: Tensor | None  # int32 [B]; None: all L rows
    kv_lens: Tensor | None  # int32 [B]; None: all T rows
    q_offset: int | Tensor | None  # None: kv_len - q_len of each sequence


@dataclass(frozen=True, slots=True)
class Packed:
    """Operands [1, heads, total, dim] with sequences one after the other. No target computes it yet."""

    cu_q: Tensor  # int32 [B + 1], the first row of each sequence, and the end
    cu_kv: Tensor  # int32 [B + 1]
    q_offset: int | Tensor | None


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values in pools [blocks, Hkv, page, D]. No target computes it yet."""

    kv_lens: Tensor  # int32 [B]
    table: Tensor  # int32 [B, pages], the block of each page
    page: int  # rows of a block
    q_offset: int | Tensor | None


Sequences = Dense | Lengths | Packed | Paged


# -- options ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Options:
    """How a call is to be computed. Part of what is prepared for it."""

    target: str | None = None  # None: the best that can
    schedule: str | None = None  # None, the name of an algorithm, or the text of a Schedule
    deterministic: bool = False  # gradients must be bitwise repeatable
    return_lse: bool = False
    form: Literal["expanded", "absorbed"] | None = None  # of latent attention; None: by cost
    seed: int | Tensor | None = None  # of dropout, which no target has yet
    train: bool = True

    @property
    def text(self) -> str:
        """The part that ops carry: `target=cpu;schedule=flash`; "" where all is as by default."""
        return options_text(self.target, self.schedule, self.deterministic)


def options_text(target: str | None, schedule: str | None, deterministic: bool = False) -> str:
    """A separator in either would be read as another option: neither has one where it means anything."""
    parts = [("target", target), ("schedule", schedule), ("deterministic", "yes" if deterministic else None)]
    return ";".join(f"{name}={value.replace(';', ',')}" for name, value in parts if value)


@lru_cache(maxsize=256)
def options_of(target: str | None, schedule: str | None, deterministic: bool = False) -> Options:
    """The same object for the same options, so that a repeated call makes none."""
    return Options(target, schedule, deterministic)


@lru_cache(maxsize=256)
def parse_options(text: str) -> Options:
    """Read back `Options.text`."""
    given = dict(part.partition("=")[::2] for part in text.split(";") if part)
    if not given.keys() <= {"target", "schedule", "deterministic"}:
        raise WeftError(f"options: expected text like 'target=cpu;schedule=flash', got {text!r}")
    return options_of(given.get("target"), given.get("schedule"), "deterministic" in given)


# -- the call --------------------------------------------------------------------------------------------------------
@dataclass(slots=True)  # nobody changes one; not frozen, because that triples what making it costs, at every call
class Call:
    """One call of a variant.

    query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv]; None where the value is the first columns of the key
    (absorbed latent attention). rope [B, 1, T, R]: columns of the key that all heads share (expanded).
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
        sequences = self.sequences
        if isinstance(sequences, Dense):
            return sequences.q_offset
        raise InternalError(
            f"call: sequences of kind {type(sequences).__name__} reached a target that has only dense ones"
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The main tensors that there are, by name: those that a backward has gradients for."""
        found = {"query": self.query, "key": self.key, "value": self.value, "rope": self.rope}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_target(self, target: str | None) -> Call:
        return replace(self, options=replace(self.options, target=target))


@dataclass(slots=True)  # not frozen, as Call is not
class BackwardCall:
    """What a backward starts from."""

    call: Call
    out: Tensor  # [B, Hq, L, Dv], as the forward gave it
    lse: Tensor  # [B, Hq, L], or [2, B, Hq, L] where scores may lie far from 0
    dout: Tensor  # like out
    dlse: Tensor | None  # like lse
    wanted: frozenset[str]  # "query", "key", "value", "rope" and names of operands


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
    offset = call.q_offset
    number, tensor = (0, offset) if isinstance(offset, Tensor) else (offset, None)
    return (
        call.query, call.key, call.value, call.rope, values["tensor"], values["float"], values["int"], number, tensor,
        call.head_dim, text, call.options.text,
    )  # fmt: skip


def call_of(
    names: Sequence[str], kinds: Sequence[str], options: str, query: Tensor, key: Tensor, value: Tensor | None,
    rope: Tensor | None, operands: Sequence[Tensor], floats: Sequence[Tensor], ints: Sequence[int], q_offset: int,
    q_offsets: Tensor | None, head_dim: int,
) -> Call:  # fmt: skip
    """The call that an op's arguments stand for."""
    of_kind = {"tensor": iter(operands), "float": (f.item() for f in floats), "int": iter(ints)}
    named: dict[str, Operand] = {name: next(of_kind[kind]) for name, kind in zip(names, kinds)}
    sequences = dense_offset(q_offset if q_offsets is None else q_offsets)
    return Call(query, key, value, rope, named, sequences, parse_options(options), head_dim)
