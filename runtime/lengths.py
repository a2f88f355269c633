"""What the lengths of a call must satisfy: `q_lens` and `kv_lens`, or `cu_seqlens_q` and `cu_seqlens_kv`; and pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..codegen.launch.adding import by_sequence
from ..compiler.analysis.tiles.results import GradientKind
from ..ir.errors import WeftError, collected, counted
from .call import Packed, PackedPaged, Paged, Pages, Ragged, Sequences, key_rows, length_options, sequences_of
from .checks import MAX_LENGTH, check_q_offset, form_problem
from .options import PLAIN, CallOptions
from .settings import checks_values

_INTS = (torch.int32, torch.int64)
LENS, STARTS = ("q_lens", "kv_lens"), ("cu_seqlens_q", "cu_seqlens_kv")
MOST_ROWS = 256  # of a page


def checked(name: str, query: Tensor, key: Tensor, options: CallOptions) -> CallOptions:
    """The options of a call that has lengths, of which kinds and shapes are checked; one cu_seqlens stands for both.

    query and key must have four dimensions. torch.compile traces this.
    """
    if options.block_table is not None:
        return _checked_pages(name, query, key, options)
    q_lens, kv_lens, cu_q, cu_kv = options.q_lens, options.kv_lens, options.cu_seqlens_q, options.cu_seqlens_kv
    if not (q_lens is kv_lens is None or cu_q is cu_kv is None):
        raise WeftError(
            f"{name}: expected lengths of one kind, got {', '.join(options.lengths)}: q_lens and kv_lens are for "
            "padded operands [B, heads, length, dim], cu_seqlens_q and cu_seqlens_kv for packed ones [1, heads, total, "
            "dim]"
        )
    packed = q_lens is kv_lens is None
    if packed and (cu_q is None or cu_kv is None):
        if query.shape[2] != key.shape[2]:
            missing, other = STARTS if cu_q is None else reversed(STARTS)
            raise WeftError(
                f"{name}: {missing}: missing; it may be left out where it is {other}, but query has "
                f"{counted(query.shape[2], 'row')} and key {key.shape[2]}"
            )
        cu_q = cu_kv = cu_kv if cu_q is None else cu_q
        options = options.having(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    problems = list(_problems(query, key, options.lengths))
    if problems:
        raise collected(name, problems)
    if options.q_offset is not None:
        check_q_offset(options.q_offset, query.shape[0] if cu_q is None else cu_q.shape[0] - 1, query.device)
    return options


def given_sequences(name: str, query: Tensor, key: Tensor, options: CallOptions) -> Sequences:
    """The record of the options of a call that is not traced.

    Of padded queries, as every step of a decode has them, and of packed ones over pages, only what is given with what
    is checked here: kinds and shapes are where the call is prepared, whose key has the kinds, and in each call of such
    a kind (checks.fits).
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


def _pages_fit(query: Tensor, key: Tensor, options: CallOptions) -> bool:
    """Whether all is as it should be: one expression, because it runs at every step of a decode."""
    lens, cu_q, table = options.kv_lens, options.cu_seqlens_q, options.block_table
    none = options.q_lens is options.cu_seqlens_kv is options.q_offset is None
    if not (none and isinstance(lens, Tensor) and isinstance(table, Tensor)):
        return False
    batch, rows, device = query.shape[0], key.shape[2], query.device
    if cu_q is not None:
        is_packed = isinstance(cu_q, Tensor) and cu_q.dtype in _INTS and cu_q.dim() == 1 and cu_q.device == device
        if not is_packed or batch != 1 or cu_q.shape[0] < 1:
            return False
        batch = cu_q.shape[0] - 1
    return (
        lens.dtype in _INTS
        and table.dtype == torch.int32
        and lens.shape == (batch,)
        and table.dim() == 2
        and table.shape[0] == batch
        and lens.device == device == table.device
        and 0 < rows <= MOST_ROWS
        and rows & (rows - 1) == 0
        and not _is_too_long(rows, table)
    )


def _checked_pages(name: str, query: Tensor, key: Tensor, options: CallOptions) -> CallOptions:
    """The same of a call with pages."""
    if _pages_fit(query, key, options):
        return options
    q_lens, kv_lens, cu_q = options.q_lens, options.kv_lens, options.cu_seqlens_q
    if options.cu_seqlens_kv is not None:
        raise WeftError(
            f"{name}: cu_seqlens_kv: expected none with block_table, whose keys are not packed; pass kv_lens=, and "
            "cu_seqlens_q= where queries are packed"
        )
    if not (q_lens is None or cu_q is None):
        raise WeftError(
            f"{name}: expected q_lens or cu_seqlens_q, got both: q_lens is for padded queries [B, Hq, L, D], "
            "cu_seqlens_q for packed ones [1, Hq, total, D]"
        )
    if kv_lens is None:
        raise WeftError(f"{name}: kv_lens: missing; with block_table pass the length of each sequence, int32 [B]")
    problems = list(_page_problems(query, key, options))
    if problems:
        raise collected(name, problems)
    if options.q_offset is not None:
        check_q_offset(options.q_offset, query.shape[0] if cu_q is None else cu_q.shape[0] - 1, query.device)
    return options


def _page_problems(query: Tensor, key: Tensor, options: CallOptions) -> Iterator[str]:
    """What is wrong with lengths, first rows and a table of a call with pages."""
    cu_q, kv_lens, table = options.cu_seqlens_q, options.kv_lens, options.block_table
    if cu_q is None:
        lens = {n: t for n, t in options.lengths.items() if n in LENS}
        yield from _problems(query, key, lens)
        yield from _table_problems(query, key, table, query.shape[0], "batch row")
        return
    found = list(_starts_problems(query, cu_q))
    if found:  # how many sequences there are is not known
        yield from found
        return
    number = cu_q.shape[0] - 1
    yield from _lens_problems(query, {"kv_lens": kv_lens}, number, "sequence of cu_seqlens_q")
    yield from _table_problems(query, key, table, number, "sequence of cu_seqlens_q")


def _is_too_long(rows: int, table: Tensor) -> bool:
    """Not asked while torch traces sizes, which would hold an exported program to the answer: the op asks again."""
    return not torch.compiler.is_compiling() and rows * table.shape[1] > MAX_LENGTH


def _starts_problems(query: Tensor, cu_q: object) -> Iterator[str]:
    """What first rows of packed queries over pages must be."""
    yield from _packed_problems(query, {STARTS[0]: cu_q})
    if query.shape[0] != 1:
        yield (
            f"query: expected packed queries [1, Hq, total, D] with cu_seqlens_q, got {list(query.shape)}; pass padded "
            "ones with q_lens="
        )


def _table_problems(query: Tensor, key: Tensor, table: object, number: int, each: str) -> Iterator[str]:
    """What a table of pages, and a pool of blocks, must be. number: of sequences; each: what one is in the call."""
    rows = key.shape[2]
    if isinstance(rows, int) and not (0 < rows <= MOST_ROWS and rows & (rows - 1) == 0):
        yield (
            f"key: expected a page of 1, 2, 4 ... {MOST_ROWS} rows in the pool [blocks, Hkv, page, D], got {rows} "
            f"(shape {list(key.shape)}); pass x.transpose(1, 2) of a pool [blocks, page, Hkv, D]"
        )
    if not isinstance(table, Tensor):
        made = "; torch.tensor(x, dtype=torch.int32) makes one" if hasattr(table, "__len__") else ""
        yield f"block_table: expected {_table_of(number)}, got {type(table).__name__}{made}"
        return
    if (problem := form_problem("block_table", table)) is not None:
        yield problem
        return
    if table.dtype != torch.int32 or table.dim() != 2:
        how = "; pass x.to(torch.int32)" if table.dtype == torch.int64 else ""
        yield f"block_table: expected {_table_of(number)}, got {table.dtype} {list(table.shape)}{how}"
    elif table.shape[0] != number:
        yield f"block_table: expected {_table_of(number)}, one row for each {each}, got {list(table.shape)}"
    elif _is_too_long(rows, table):
        yield f"block_table: integer overflow: expected room for up to 2**30 keys, got {table.shape[1]} pages of {rows}"
    if table.device != query.device:
        yield f"block_table: expected device {query.device} as in query, got {table.device}"


# Texts are made of what is wrong alone: a size that torch.compile traces becomes a constant where it is written out.
def _table_of(number: int) -> str:
    return f"an int32 tensor [{number}, pages]"


def _numbers_of(entries: object) -> str:
    return f"a tensor int32 or int64 [{entries}]"


def check_ragged(name: str, query: Tensor, key: Tensor, sequences: Ragged) -> None:
    """Raise WeftError where the lengths of a call do not fit its operands; what a device holds is not looked at."""
    options = PLAIN.having(**length_options(sequences))
    if isinstance(sequences, Pages):
        problems = list(_page_problems(query, key, options))
    else:
        problems = list(_problems(query, key, options.lengths))
    if problems:
        raise collected(name, problems)
    if sequences.q_offset is not None:
        check_q_offset(sequences.q_offset, sequences.number(query), query.device)


def _names(sequences: Ragged) -> tuple[str, str]:
    """The options that say where queries lie, and where keys."""
    if isinstance(sequences, PackedPaged):
        return STARTS[0], LENS[1]
    return STARTS if isinstance(sequences, Packed) else LENS


def _kind_problem(query: Tensor, label: str, tensor: object, entries: object) -> str | None:
    """What keeps a thing from being lengths, or first rows. entries: how many it has."""
    if not isinstance(tensor, Tensor):
        made = "; torch.tensor(x, dtype=torch.int32) makes one" if hasattr(tensor, "__len__") else ""
        return f"{label}: expected {_numbers_of(entries)}, got {type(tensor).__name__}{made}"
    if (problem := form_problem(label, tensor)) is not None:
        return problem
    if tensor.dtype not in _INTS or tensor.dim() != 1:
        return f"{label}: expected {_numbers_of(entries)}, got {tensor.dtype} {list(tensor.shape)}"
    if tensor.device != query.device:
        return f"{label}: expected device {query.device} as in query, got {tensor.device}"
    return None


def _packed_problems(query: Tensor, given: Mapping[str, Any]) -> Iterator[str]:
    """What first rows must be, by themselves."""
    entries = "sequences + 1"
    for label, tensor in given.items():
        if (problem := _kind_problem(query, label, tensor, entries)) is not None:
            yield problem
        elif tensor.shape[0] < 1:
            yield f"{label}: expected {_numbers_of(entries)}, the first row of each sequence and the end, got no entry"


def _lens_problems(query: Tensor, given: Mapping[str, Any], number: int, each: str) -> Iterator[str]:
    """What lengths must be. number: of sequences; each: what one is in the call."""
    for label, tensor in given.items():
        if (problem := _kind_problem(query, label, tensor, number)) is not None:
            yield problem
        elif tensor.shape[0] != number:
            yield f"{label}: expected {_numbers_of(number)}, one for each {each}, got {list(tensor.shape)}"


def _problems(query: Tensor, key: Tensor, given: Mapping[str, Tensor]) -> Iterator[str]:
    if not any(n in STARTS for n in given):
        yield from _lens_problems(query, given, query.shape[0], "batch row")
        return
    yield from _packed_problems(query, given)
    for label, operand in (("query", query), ("key", key)):
        if operand.shape[0] != 1:
            yield (
                f"{label}: expected packed operands [1, heads, total, dim] with cu_seqlens_q, got "
                f"{list(operand.shape)}; pass padded ones with q_lens= and kv_lens="
            )
    sizes = {n: t.shape[0] for n, t in given.items() if isinstance(t, Tensor) and t.dim() == 1}
    if any(size != other for size, other in pairwise(sizes.values())):  # tensors while torch.jit.trace watches
        got = ", ".join(f"{size} in {n}" for n, size in sizes.items())
        yield f"cu_seqlens_kv: expected as many entries as in cu_seqlens_q, one a sequence and the end, got {got}"


# -- what lies in them -------------------------------------------------------------------------------------------------
def check_contents(name: str, query: Tensor, key: Tensor, sequences: Ragged) -> None:
    """Raise WeftError, naming the place, for lengths that no operands can have.

    Looked at on a CPU, and on a device where that is asked for: unasked, kernels cut them to what there is.
    """
    problems: list[str] = []
    rows = (query.shape[2], key_rows(key, sequences))
    of_keys = f"{counted(sequences.table.shape[1], 'page')} of {sequences.page}" if isinstance(sequences, Pages) else ""
    for label, tensor, most in zip(_names(sequences), sequences.tensors.values(), rows):
        if tensor is not None and (tensor.is_cpu or checks_values()):
            if label in STARTS:
                problem = _starts_problem(label, tensor.tolist(), most)
            else:
                problem = _lens_problem(label, tensor.tolist(), most, of_keys if label == "kv_lens" else "")
            problems += [] if problem is None else [problem]
    if not problems and isinstance(sequences, Pages) and (sequences.table.is_cpu or checks_values()):
        problem = _page_problem(sequences, key.shape[0])
        problems += [] if problem is None else [problem]
    if problems:
        raise collected(name, problems)


def _page_problem(sequences: Paged | PackedPaged, blocks: int) -> str | None:
    """The first block that a sequence would read and that no pool has."""
    table, page = sequences.table, sequences.page
    used = torch.arange(table.shape[1], device=table.device) < used_pages(sequences)
    wrong = (((table < 0) | (table >= blocks)) & used).nonzero()
    if not len(wrong):
        return None
    b, i = wrong[0].tolist()
    return (
        f"block_table[{b}, {i}]: expected a block from 0 to {blocks - 1}, as key has {blocks}, got "
        f"{table[b, i].item()}; it holds rows {i * page} on of a sequence of "
        f"{counted(int(sequences.kv_lens[b]), 'key')}"
    )


def used_pages(sequences: Paged | PackedPaged) -> Tensor:
    """How many entries of its row of the table each sequence has, [B, 1], on the device."""
    most = sequences.table.shape[1]
    return (((sequences.kv_lens.long() + sequences.page - 1) // sequences.page).clamp(0, most))[:, None]


def gathered(pool: Tensor, sequences: Paged | PackedPaged) -> Tensor:
    """The keys of a pool [blocks, Hkv, page, D] as padded rows [B, Hkv, pages * page, D]: a copy.

    What no sequence has is that of some block, and what lies in the table there is not looked at.
    """
    table = sequences.table
    used = torch.arange(table.shape[1], device=table.device) < used_pages(sequences)
    blocks = torch.where(used, table, 0).long()
    if pool.shape[0] == 0:
        return pool.new_zeros(table.shape[0], pool.shape[1], 0, pool.shape[3])
    return pool[blocks].transpose(1, 2).flatten(2, 3)


def packed_of_pages(pool: Tensor, sequences: PackedPaged) -> tuple[Tensor, Tensor]:
    """The keys of a pool as packed rows [1, Hkv, total, D], a copy, and their cu_seqlens. Waits for the lengths."""
    rows, lens = gathered(pool, sequences), sequences.kv_lens.tolist()
    starts = torch.tensor([0, *accumulate(lens)], dtype=sequences.cu_q.dtype, device=sequences.cu_q.device)
    parts = [row[None, :, :length] for row, length in zip(rows, lens)]
    return torch.cat([rows.new_zeros(1, rows.shape[1], 0, rows.shape[3]), *parts], 2), starts


def _lens_problem(label: str, lens: list[int], most: int, room: str = "") -> str | None:
    operand = "query" if label == "q_lens" else "key"
    if room:
        for b, length in enumerate(lens):
            if not 0 <= length <= most:
                return f"{label}[{b}]: expected a length from 0 to {most}, {room} in block_table, got {length}"
    for b, length in enumerate(lens):
        if not 0 <= length <= most:
            return f"{label}[{b}]: expected a length from 0 to {most}, the rows of {operand}, got {length}"
    return None


def _starts_problem(label: str, starts: list[int], most: int) -> str | None:
    operand = "query" if label == "cu_seqlens_q" else "key"
    if starts[0] != 0:
        return f"{label}[0]: expected 0, where the first sequence begins, got {starts[0]}"
    for b, (first, end) in enumerate(pairwise(starts)):
        if end < first:
            return f"{label}[{b + 1}]: expected at least {first}, where sequence {b} begins, got {end}"
        if end > most:
            return f"{label}[{b + 1}]: expected at most {most}, the rows of {operand}, got {end}"
    return None


# -- which sequence a row belongs to, on the device --------------------------------------------------------------------
def rows_of(
    sequences: Ragged, kind: GradientKind, query: Tensor, key: Tensor, with_sink: bool = False
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    """Symbols of what a read's gradient was summed for, and which of it exists; both broadcast over [B, Hq, rows].

    kind "total" and "sink": one for each sequence; "row": for each query; "column": for each key. What has nothing to
    see does not exist; queries that see a sink (kind "sink", or `with_sink`) do without keys. Nothing waits for the
    device.
    """
    device, number = query.device, sequences.number(query)
    (q_first, q_len), (kv_first, kv_len) = _extents(sequences, query, key)
    offset = sequences.q_offset
    if not isinstance(offset, Tensor):
        offset = kv_len - q_len if offset is None else torch.full_like(q_len, offset)
    batch = torch.arange(number, device=device)
    sees = q_len > 0 if with_sink or kind == "sink" else (q_len > 0) & (kv_len > 0)
    if kind in ("total", "sink"):
        own = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
        return {n: t.view(-1, 1, 1) for n, t in own.items()}, sees.view(-1, 1, 1)
    first, length = (q_first, q_len) if kind == "row" else (kv_first, kv_len)
    rows = torch.arange((query if kind == "row" else key).shape[2], device=device)
    if isinstance(sequences, Packed | PackedPaged):
        # the last sequence that begins at a row or before it, past those without rows; then [1, 1, rows]
        batch = torch.searchsorted(first + length, rows, right=True).clamp(max=number - 1)[None]
    else:
        batch = batch[:, None]
    exists = (rows >= first[batch]) & (rows - first[batch] < length[batch]) & sees[batch]
    at = rows - first[batch]
    position = at + offset[batch] if kind == "row" else at
    own = {
        "batch": batch,
        "q_len": q_len[batch],
        "kv_len": kv_len[batch],
        "q_pos" if kind == "row" else "kv_pos": position,
    }
    return {n: t[:, None] for n, t in own.items()}, exists[:, None]


def queries_of(sequences: Ragged, query: Tensor, key: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Symbols of the sequence of each query, and which queries one has: they see its sink, with or without keys."""
    return rows_of(sequences, "row", query, key, with_sink=True)


def summed_by_sequence(
    rows: Tensor, sequences: Ragged, query: Tensor, key: Tensor
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Numbers of queries [B, Hq, L] as sums [sequences, Hq]; symbols of these sequences, and which have queries."""
    own, exists = rows_of(sequences, "sink", query, key)
    if isinstance(sequences, Packed):
        owner = queries_of(sequences, query, key)[0]["batch"].flatten()
        return by_sequence(rows, owner, sequences.number(query)), own, exists
    return rows.sum(-1), own, exists


def cleared(tensor: Tensor, sequences: Ragged, query: Tensor) -> Tensor:
    """Rows of keys [B, heads, T, width] with 0 in place of what no sequence has, which no product may then spread."""
    _, exists = rows_of(sequences, "column", query, tensor)
    return torch.where(exists[..., None], tensor, 0.0)


def _extents(sequences: Ragged, query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(first row, length) of the queries and of the keys of all sequences, int64 on the device, within the operands."""
    found = []
    number = sequences.number(query)
    for label, tensor, rows in zip(
        _names(sequences), sequences.tensors.values(), (query.shape[2], key_rows(key, sequences))
    ):
        if label in STARTS:
            assert tensor is not None
            starts = tensor.long().clamp(0, rows)
            found.append((starts[:-1], (starts[1:] - starts[:-1]).clamp(min=0)))
        else:
            zeros = torch.zeros(number, dtype=torch.int64, device=query.device)
            found.append((zeros, zeros + rows if tensor is None else tensor.long().clamp(0, rows)))
    return found
