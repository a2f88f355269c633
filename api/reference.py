"""The definition of a call: dense, differentiable torch, in any dtype; each sequence by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .calls.internals import Internals, Main, dequantized
from .calls.nested import are_jagged, lengths_given_twice, packed
from .ir.attention import Attention as Declaration
from .ir.reference import expand_latent, ragged_reference, reference
from .runtime import descales
from .runtime.call import Lengths, Packed, PackedPaged, Pages, sequences_of
from .runtime.check.operands import as_number, check_no_latent, check_operands, check_q_offset
from .runtime.check.sequences import checked
from .runtime.check.tensors import check_latent, check_no_value, check_tensors, known_memory_problems
from .runtime.check.values import check_contents, check_reads
from .runtime.options import CallOptions
from .runtime.pages import gathered, packed_of_pages
from .runtime.rows import cleared


def defined(
    attention: Declaration, own: Internals, main: Main, options: CallOptions, operands: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse by the definition."""
    query, key, value, _ = main
    uk, uv, q_offset, name = options.uk, options.uv, options.q_offset, str(attention.name)
    rope = options.rope
    if are_jagged(query, key, value):
        if options.are_ragged:
            raise lengths_given_twice(name, options)
        made = packed(name, query, key, value)
        cu_q, cu_kv = made.starts
        inner = options.having(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
        out, lse = defined(attention, own, Main(*made.tensors), inner, operands)
        return made.nested(out), made.nested(lse)
    paged = options.block_table is not None
    if attention.latent is not None:
        check_no_value(attention, value)
        check_latent(attention, query, key, uk, uv, paged, rope)
    else:
        check_no_latent(attention, uk, uv, rope=rope)
        check_tensors(name, query, key, value, paged)
    if options.are_read or descales.are_quantized((query, key, value)):
        real, options, dtype = dequantized(name, main, options)
        out, lse = defined(attention, own, real, options, operands)
        return out.to(dtype), lse
    if rope is not None:  # from here on one cache
        key, options = torch.cat([key, rope], dim=-1), options.having(rope=None)
    if paged:  # from here on padded or packed rows, of which those behind a length belong to nobody
        key, value, options = _out_of_pages(name, query, key, value, options)
    if attention.latent is not None:
        head_dim = query.shape[3]
        if options.are_ragged:
            sequences = sequences_of(checked(name, query, key, options))
            key = cleared(key, sequences, query)  # type: ignore[arg-type]
        if uk is not None and uv is not None:
            query, key, value = expand_latent(attention, query, key, uk, uv)
        else:
            value = key[..., : attention.latent.rank]
    else:
        assert value is not None
        head_dim = query.shape[3]
    operands = {name: as_number(given, dict(own.numbers).get(name)) for name, given in operands.items()}
    operands = own.read(operands)
    named = {"query": query, "key": key, "value": value, **operands}
    check_operands(attention, operands, query.device, known_memory_problems(named), query.dtype)
    if q_offset is not None:
        q_offset = as_number(q_offset, int)
        if not options.are_ragged:
            check_q_offset(name, q_offset, query.shape[0], query.device)
    elif not options.are_ragged:
        own.variant.first_key.dense(query.shape[2], key.shape[2])
    if options.are_ragged:
        return _of_sequences(attention, own, (query, key, value), operands, options.having(q_offset=q_offset), head_dim)
    check_reads(attention, query, key, operands, q_offset, head_dim)
    return reference(attention, query, key, value, operands, q_offset, head_dim)


def _of_sequences(
    attention: Declaration, own: Internals, main: tuple[Tensor, Tensor, Tensor], operands: Mapping[str, Any],
    options: CallOptions, head_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """main: query, key and value."""
    name, (query, key, value) = str(attention.name), main
    sequences = sequences_of(checked(name, query, key, options))
    assert isinstance(sequences, (Lengths, Packed))
    check_contents(name, query, key, sequences)
    own.variant.first_key.ragged(sequences, query, key)
    rows = sequences.rows(query, key)
    for r in rows:
        q_part = query[r.row : r.row + 1, :, r.q_first : r.q_first + r.q_len]
        kv_part = key[r.row : r.row + 1, :, r.kv_first : r.kv_first + r.kv_len]
        if r.q_len and (r.kv_len or attention.canonical.folded_sink is not None):
            check_reads(attention, q_part, kv_part, operands, r.q_offset, head_dim, r.number)
    return ragged_reference(attention, query, key, value, operands, rows, head_dim)


def _out_of_pages(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, options: CallOptions
) -> tuple[Tensor, Tensor | None, CallOptions]:
    """Keys and values of a paged call as padded or packed rows, and the lengths of these."""
    options = checked(name, query, key, options)
    pages = sequences_of(options, page=key.shape[2])
    assert isinstance(pages, Pages)
    check_contents(name, query, key, pages)
    options = options.having(block_table=None)
    if isinstance(pages, PackedPaged):  # rows of queries that no sequence has, none of keys
        rows, starts = packed_of_pages(key, pages)
        values, _ = (None, None) if value is None else packed_of_pages(value, pages)
        return rows, values, options.having(kv_lens=None, cu_seqlens_kv=starts)
    return gathered(key, pages), None if value is None else gathered(value, pages), options
