"""Rules of where sequences lie: lengths, first rows of packed ones, tables of pages. What they hold: values.py."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ...ir.errors import Problem, collected, counted
from ..call import LARGEST_PAGE, Ragged, Sequences, is_page, length_options, mixed_problem, sequences_of
from ..options import CallOptions
from .operands import offset_problems
from .tensors import MAX_LENGTH, form_problem, missing, place_problems, wrong

LENS, STARTS = ("q_lens", "kv_lens"), ("cu_seqlens_q", "cu_seqlens_kv")
_INTS = (torch.int32, torch.int64)


def checked(name: str, query: Tensor, key: Tensor, options: CallOptions) -> CallOptions:
    """The options of a call that has lengths, of which kinds and shapes are checked; one cu_seqlens stands for both.

    query and key must have four dimensions. torch.compile traces this.
    """
    if (problem := mixed_problem(options)) is not None:
        raise collected(name, [problem])
    cu_q, cu_kv = options.cu_seqlens_q, options.cu_seqlens_kv
    if options.block_table is None and (cu_q is None) != (cu_kv is None):
        if query.shape[2] != key.shape[2]:
            lacking, other = STARTS if cu_q is None else reversed(STARTS)
            rows = f"query has {counted(query.shape[2], 'row')} and key {key.shape[2]}"
            raise collected(name, [missing(lacking, f"it may be left out where it is {other}, but {rows}")])
        cu_q = cu_kv = cu_kv if cu_q is None else cu_q
        options = options.having(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    if problems := ragged_problems(query, key, options.lengths, options.q_offset):
        raise collected(name, problems)
    return options


def given_sequences(name: str, query: Tensor, key: Tensor, options: CallOptions) -> Sequences:
    """The record of the options of a call that is not traced.

    Of padded queries, as every step of a decode has them, and of packed ones over pages, only what is given with what
    is checked here: kinds and shapes are where the call is prepared, whose key has the kinds, and in each call of such
    a kind (`fits`).
    """
    q_lens, kv_lens, table, cu_q = options.q_lens, options.kv_lens, options.block_table, options.cu_seqlens_q
    has_table = table is not None and type(table) is Tensor and table.dim() == 2
    if options.cu_seqlens_kv is None and type(kv_lens) is Tensor and (table is None or has_table):
        if cu_q is None and (q_lens is None or type(q_lens) is Tensor):
            try:
                return sequences_of(options, key.shape[2])
            except RuntimeError:
                given = options.lengths.items()
                if problems := [p for n, t in given if (p := form_problem(n, t)) is not None]:
                    raise collected(name, problems) from None
                raise
        if q_lens is None and has_table and type(cu_q) is Tensor and cu_q.dim() == 1:
            return sequences_of(options, key.shape[2])
    return sequences_of(checked(name, query, key, options), page=key.shape[2])


def check_ragged(name: str, query: Tensor, key: Tensor, sequences: Ragged) -> None:
    """Raise WeftError where the lengths of a call do not fit its operands; what a device holds is not looked at."""
    if problems := sequence_problems(query, key, sequences):
        raise collected(name, problems)


def sequence_problems(query: Tensor, key: Tensor, sequences: Ragged) -> list[Problem]:
    """The same of a record."""
    return ragged_problems(query, key, length_options(sequences), sequences.q_offset)


def ragged_problems(
    query: Tensor, key: Tensor, given: Mapping[str, Tensor | None], q_offset: object = None
) -> list[Problem]:
    """given: what says where sequences lie, by name, of one kind."""
    number, each, found, table = query.shape[0], "batch row", [], given.get("block_table")
    if "cu_seqlens_q" in given or "cu_seqlens_kv" in given:
        starts = {n: t for n, t in given.items() if n in STARTS and t is not None}
        if found := _starts_problems(query, key, starts, table is not None):
            return found  # how many sequences there are is not known
        number, each = next(iter(starts.values())).shape[0] - 1, "sequence of cu_seqlens_q"
    for label in LENS:
        if (lens := given.get(label)) is not None:
            found += _lens_problems(query, label, lens, number, each)
    if table is not None:
        found += _table_problems(query, key, table, number, each)
    return found or ([] if q_offset is None else offset_problems(q_offset, number, query.device))


# Texts are made of what is wrong alone: a size that torch.compile traces becomes a constant where it is written out.
def _kind_problems(
    query: Tensor, label: str, tensor: object, kind: str, dtypes: tuple[torch.dtype, ...], rank: int
) -> list[Problem]:
    """What keeps a thing from being lengths, first rows or a table. kind: what it must be, in words."""
    if not isinstance(tensor, Tensor):
        made = "torch.tensor(x, dtype=torch.int32) makes one" if hasattr(tensor, "__len__") else ""
        return [wrong(label, kind, type(tensor).__name__, made)]
    if (problem := form_problem(label, tensor)) is not None:
        return [problem]
    if tensor.dtype not in dtypes or tensor.dim() != rank:
        how = "pass x.to(torch.int32)" if tensor.dtype == torch.int64 and tensor.dtype not in dtypes else ""
        return [wrong(label, kind, f"{tensor.dtype} {list(tensor.shape)}", how)]
    return place_problems(label, tensor, query.device)


def _starts_problems(query: Tensor, key: Tensor, starts: Mapping[str, Tensor], paged: bool) -> list[Problem]:
    """What first rows must be, and what is packed."""
    found, kind = [], "a tensor int32 or int64 [sequences + 1]"
    for label, tensor in starts.items():
        if problems := _kind_problems(query, label, tensor, kind, _INTS, 1):
            found += problems
        elif tensor.shape[0] < 1:
            found.append(wrong(label, f"{kind}, the first row of each sequence and the end", "no entry"))
    for label, tensor in (("query", query),) if paged else (("query", query), ("key", key)):
        if tensor.shape[0] != 1:
            how = f"pass padded ones with q_lens={'' if paged else ' and kv_lens='}"
            packed = "packed queries [1, Hq, total, D]" if paged else "packed operands [1, heads, total, dim]"
            packed += " with cu_seqlens_q"
            found.append(wrong(label, packed, list(tensor.shape), how))
    if not found and any(one.shape[0] != other.shape[0] for one, other in pairwise(starts.values())):
        got = ", ".join(f"{tensor.shape[0]} in {label}" for label, tensor in starts.items())
        found.append(wrong(STARTS[1], f"as many entries as in {STARTS[0]}, one a sequence and the end", got))
    return found


def _lens_problems(query: Tensor, label: str, tensor: Tensor, number: int, each: str) -> list[Problem]:
    """What lengths must be. number: of sequences; each: what one is in the call."""
    if isinstance(tensor, Tensor) and tensor.dtype in _INTS and tensor.dim() == 1 and tensor.shape[0] == number:
        return place_problems(label, tensor, query.device)
    kind = f"a tensor int32 or int64 [{number}]"
    return _kind_problems(query, label, tensor, kind, _INTS, 1) or [
        wrong(label, f"{kind}, one for each {each}", list(tensor.shape))
    ]


def _table_problems(query: Tensor, key: Tensor, table: Tensor, number: int, each: str) -> list[Problem]:
    """What a table of pages, and a pool of blocks, must be."""
    rows, found = key.shape[2], []
    if isinstance(rows, int) and not is_page(rows):
        how = "pass x.transpose(1, 2) of a pool [blocks, page, Hkv, D]"
        pages = f"a page of 1, 2, 4 ... {LARGEST_PAGE} rows in the pool [blocks, Hkv, page, D]"
        found.append(wrong("key", pages, f"{rows} (shape {list(key.shape)})", how))
    label = "block_table"
    is_table = isinstance(table, Tensor) and table.dtype == torch.int32 and table.dim() == 2
    if not is_table or table.shape[0] != number:
        kind = f"an int32 tensor [{number}, pages]"
        problems = _kind_problems(query, label, table, kind, (torch.int32,), 2)
        return found + (problems or [wrong(label, f"{kind}, one row for each {each}", list(table.shape))])
    # not asked while torch traces sizes, which would hold an exported program to the answer: the op asks again
    if not torch.compiler.is_compiling() and rows * table.shape[1] > MAX_LENGTH:
        got = f"{table.shape[1]} pages of {rows}"
        found.append(wrong(label, "room for up to 2**30 keys", got, what="integer overflow"))
    return found + place_problems(label, table, query.device)
