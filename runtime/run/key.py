"""What of a call the prepared kernels depend on: the key that finds them, and the signature that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...codegen.launch.descriptors import boxed_bytes
from ...compiler.analysis.tiles.facts import Facts
from ...compiler.planning.machines import hardware
from ...compiler.planning.signature import (
    FEW_QUERIES,
    Described,
    Direction,
    Dtypes,
    Offset,
    Signature,
    Widths,
    has_few_queries,
    serves_of,
    signature_of,
)
from ...compiler.planning.sources import PACKED_PAGED
from ...ir.attention import Attention
from ...ir.expr import INT32_MAX
from .. import descales
from ..call import Call, Dense, Packed, PackedPaged, Paged, lengths_of
from ..check.tensors import DTYPES


def key_of(call: Call) -> tuple[object, ...]:
    """What of a call the prepared kernels depend on."""
    query, key, value, rope, options = call.query, call.key, call.value, call.rope, call.choices
    sequences = call.sequences
    offset = sequences.q_offset
    _, _, rows, width = query.shape
    kind = type(sequences)  # quicker than isinstance, as names are than a loop: these are of every step of a decode
    few_queries: object = rows <= FEW_QUERIES
    if kind is PackedPaged:
        number = sequences.number(query)  # type: ignore[union-attr]
        few_queries = has_few_queries("forward", PACKED_PAGED, rows, number) or serves_of(
            "forward", PACKED_PAGED, rows, number
        )
    found: tuple[object, ...] = (
        query.dtype, key.dtype, query.get_device(), key.get_device(), width, call.head_dim,
        type(offset), options.target, options.schedule, options.deterministic, options.out, few_queries,
    )  # fmt: skip
    if isinstance(offset, Tensor):
        found += (offset.dtype, offset.get_device(), offset.is_meta, offset.dim())
    if kind is not Dense:
        found += (sequences.kind,)
        if kind is Packed:
            found += _kind_of(sequences.cu_q) + _kind_of(sequences.cu_kv)  # type: ignore[union-attr]
        elif kind is PackedPaged:
            found += _kind_of(sequences.cu_q) + _kind_of(sequences.kv_lens)  # type: ignore[union-attr]
            found += (sequences.page, *_kind_of(sequences.table))  # type: ignore[union-attr]
        elif isinstance(sequences, Dense):
            found += tuple([each for t in sequences.tensors.values() for each in _kind_of(t)])
        else:
            found += _kind_of(sequences.kv_lens) + _kind_of(sequences.q_lens)  # type: ignore[union-attr]
            if kind is Paged:
                found += (sequences.page, *_kind_of(sequences.table))  # type: ignore[union-attr]
    if value is not None:
        sizes = value.shape
        found += (value.dtype, value.get_device(), len(sizes), sizes[-1])
    if rope is not None:
        found += (rope.dtype, rope.get_device(), rope.dim(), rope.shape[-1])
    if call.read is not None:
        for name, tensor in call.read.items():
            found += (name, *_kind_of(tensor))
        found += (descales.rows_read(call.read),)
    return found + kinds_of(call.operands) if call.operands else found


def _kind_of(lengths: Tensor | None) -> tuple[object, ...]:
    """What of lengths, a table of blocks or descales the prepared kernels depend on."""
    return (None,) if lengths is None else (lengths.dtype, lengths.get_device(), lengths.dim())


def offset_kind(q_offset: object) -> Offset:
    if q_offset is None:
        return "bottom_right"
    return "per_row" if isinstance(q_offset, Tensor) else "number"


def _number(call: Call) -> int:
    """How many sequences there are."""
    return call.query.shape[0] if call.ragged is None else call.ragged.number(call.query)


def kinds_of(operands: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a variant's own operands the prepared kernels depend on."""
    found: list[object] = []
    for operand in operands.values():
        if isinstance(operand, Tensor):
            found += (
                operand.dtype, operand.dim(), operand.get_device(), operand.is_meta, _reach(operand) > INT32_MAX,
            )  # fmt: skip
            found += (boxed_bytes(operand),) if operand.is_cuda and operand.dim() > 1 else ()
        else:
            found.append(type(operand))
    return tuple(found)


def has_doubles(operands: Mapping[str, Any]) -> bool:
    """Whether one is a tensor of float64."""
    return torch.float64 in [v.dtype for v in operands.values() if isinstance(v, Tensor)]


def boxed_of(facts: Facts, operands: Mapping[str, Any], otherwise: int = 0) -> int:
    """Bytes of an element of what pairs read, where tiles of it may be brought; `otherwise`: if it is not given."""
    read = facts.boxed_read
    if read is None:
        return 0
    operand = operands.get(read.tensor.name)
    return boxed_bytes(operand) if isinstance(operand, Tensor) else otherwise


def needs_offsets_64(operands: Mapping[str, object]) -> bool:
    """Whether places in a tensor operand lie so far apart that offsets need 64 bits."""
    return any(isinstance(v, Tensor) and _reach(v) > INT32_MAX for v in operands.values())


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last place of a tensor, or of its gradient, which repeats none."""
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
    return max(last, tensor.numel() - 1)


def dtypes_of(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor | None, out: str | None = None
) -> Dtypes:  # fmt: skip
    """Those of a call, of its products and of its output."""
    given = (DTYPES[query.dtype], DTYPES[key.dtype], None if value is None else DTYPES[value.dtype])
    return Dtypes.of(*given, out, bounded=attention.canonical.weighs.weight is None)


def signature_of_call(
    facts: Facts, direction: Direction, call: Call, wanted: frozenset[str] = frozenset()
) -> Signature:
    """The static half of a call."""
    query, value, attention = call.query, call.value, facts.attention
    value_dim = value.shape[3] if value is not None else attention.latent.rank  # type: ignore[union-attr]
    rope_dim = 0 if call.rope is None else call.rope.shape[3]
    described = Described(
        direction, hardware.for_device(query.device).arch, DTYPES[query.dtype],
        Widths(query.shape[3], value_dim, rope_dim, value is None), call.sequences.kind,
        offset_kind(call.sequences.q_offset), wanted, call.choices.deterministic,
        rows=(query.shape[2], call.key.shape[2]), number=_number(call),
        lengths=lengths_of(query, call.key, call.sequences),
        offsets_64=needs_offsets_64(call.operands),
        doubles=query.is_cuda and has_doubles(call.operands),
        boxed=boxed_of(facts, call.operands) if query.is_cuda else 0,
        options=frozenset(call.read or ()), scaled_rows=descales.rows_read(call.read or {}),
        scaled_tiles=descales.tiles_read(call.read or {}, call.key.shape[2]),
        dtypes=dtypes_of(attention, query, call.key, value, call.choices.out), part=call.choices.part,
    )  # fmt: skip
    sums_pairs = facts.with_order(call.sequences.kind.in_order).sums_pairs(wanted)
    return signature_of(described, masked=attention.canonical.is_masked, sums_pairs=sums_pairs)
