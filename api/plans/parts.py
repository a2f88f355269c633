"""A described call as parts of equal lengths, each of which is counted as a dense one: its sequences, or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.analysis.tiles.results import TileCounts
from ..compiler.analysis.values.ranges import Ranges
from ..compiler.planning.cost import CountTiles
from ..compiler.planning.plan import VisiblePairs, summed
from ..compiler.planning.records import Shape
from ..ir.errors import Problem, WeftError, collected, counted
from ..ir.sequences import Rows
from ..runtime.call import Dense, Packed, PackedPaged, Pages, Ragged, sequences_of
from ..runtime.check.sequences import checked
from ..runtime.check.tensors import form_problem
from ..runtime.check.values import check_contents
from ..runtime.options import LENGTHS, PLAIN

NO_SEQUENCE = "no sequence is there"
MOST_PARTS = 64  # kinds of sequences that are counted; of more, some stand for all


class Part(NamedTuple):
    """Sequences of one kind."""

    sizes: Shape  # of them all, as batch rows
    q_offset: int | None
    number: int  # of the first one


class Described(NamedTuple):
    """The sequences of a call that is planned."""

    sequences: Ragged
    rows: list[Rows]


def described(name: str, query: Any, key: Any, options: Mapping[str, Any]) -> Described | None:
    """The sequences that options of a call give, checked as a call checks them; None where they give none.

    query, key: tensors, or sizes [batch, heads, length, dim] of these.
    """
    given = PLAIN.having(**{n: options.get(n) for n in ("q_offset", *LENGTHS)})
    if not given.are_ragged:
        return None
    if not isinstance(query, Tensor) or query.is_meta:
        query, key = (t.shape if isinstance(t, Tensor) else t for t in (query, key))
        device = next((t.device for t in given.lengths.values() if isinstance(t, Tensor)), torch.device("cpu"))
        query, key = (torch.empty(1, device=device).expand(size) for size in (query, key))
    sequences = sequences_of(checked(name, query, key, given), page=key.shape[2])
    assert not isinstance(sequences, Dense)
    if unread := [n for n, t in given.lengths.items() if t.is_meta]:
        expected, how = "a tensor with values, which a plan reads", "give it on a device that is here"
        raise collected(name, [Problem(option=n, expected=expected, got="one on meta", next_step=how) for n in unread])
    check_contents(name, query, key, sequences)
    return Described(sequences, sequences.rows(query, key))


def kv_rows(name: str, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> int:
    """The keys that a table of pages has room for. Raises WeftError where it is none."""
    found = described(name, query, key, options)
    assert found is not None and isinstance(found.sequences, Pages)
    return found.sequences.table.shape[1] * found.sequences.page if key.shape[0] else 0


def pool_of(name: str, sizes: Shape, table: Tensor) -> tuple[int, int, int, int]:
    """The pool that a table of a described call may be of: its pages hold the kv_len rows of `sizes`."""
    if (problem := form_problem("block_table", table)) is not None:
        raise collected(name, [problem])
    pages = table.shape[-1] if table.dim() else 0
    if pages == 0 or sizes.kv_len % pages:
        raise WeftError(
            f"{name}: shape: kv_len: expected a multiple of the {counted(pages, 'page')} of block_table, got "
            f"{sizes.kv_len}"
        )
    return 2**31 - 1, sizes.kv_heads, sizes.kv_len // pages, sizes.head_dim


def parts_of(sizes: Shape, q_offset: int | None, found: Described | None, by_batch: bool) -> list[tuple[Part, float]]:
    """Parts, and how many such there are. by_batch: sequences differ by their numbers too."""
    if found is None:
        return [(Part(sizes, q_offset, 0), 1.0)]
    computed = [r for r in found.rows if r.q_len and r.kv_len]
    first: dict[tuple[int, ...], Rows] = {}
    for r in computed:
        first.setdefault(_kind(r, by_batch), r)
    times = Counter(_kind(r, by_batch) for r in computed)
    kinds = sorted(times)
    if len(kinds) > MOST_PARTS:  # sorted by length: each stands for those near it
        n = len(kinds)
        chosen = [kinds[(2 * i + 1) * n // (2 * MOST_PARTS)] for i in range(MOST_PARTS)]
        share = sum(q * kv for q, kv, *_ in (k for k, m in times.items() for _ in range(m)))
        own = sum(q * kv for q, kv, *_ in chosen)
        times = Counter({kind: share / own for kind in chosen})
        kinds = chosen
    return [
        (Part(replace(sizes, batch=1, q_len=r.q_len, kv_len=r.kv_len), r.q_offset, r.number), float(times[kind]))
        for kind in kinds for r in [first[kind]]
    ]  # fmt: skip


def _kind(r: Rows, by_batch: bool) -> tuple[int, ...]:
    return r.q_len, r.kv_len, r.q_offset, r.number if by_batch else 0


def summed_counts(counters: Sequence[tuple[CountTiles, float]], sizes: Shape) -> CountTiles:
    """Tiles of all parts, of a call with these sizes: pairs of rows of different sequences are empty ones too."""
    if len(counters) == 1 and counters[0][1] == 1.0:
        return counters[0][0]

    def count(axis: Any, block_q: int, block_kv: int) -> TileCounts:
        tiles = sizes.batch * sizes.heads * ceil(sizes.q_len / block_q) * ceil(sizes.kv_len / block_kv)
        return summed([(each(axis, block_q, block_kv), times) for each, times in counters], tiles)

    return count


def summed_pairs(found: Sequence[tuple[VisiblePairs | None, float]]) -> VisiblePairs | None:
    """Visible pairs of all parts; None where those of one are not known."""
    if len(found) == 1 and found[0][1] == 1.0:
        return found[0][0]
    known = [(pairs, times) for pairs, times in found if pairs is not None]
    if len(known) < len(found):
        return None
    return VisiblePairs(
        round(sum(times * p.count for p, times in known)), sum(p.looked_at for p, _ in known),
        round(sum(times * p.rows for p, times in known)),
    )  # fmt: skip


def packed(found: Described | None) -> int:
    """How many sequences rows are packed of: 1 where they are not."""
    if found is None or not isinstance(found.sequences, Packed):
        return 1
    return max(1, sum(r.q_len > 0 for r in found.rows))


def ranges_of(found: Described) -> Ranges:
    """Of the symbols that lengths decide, where something is computed."""
    rows = [r for r in found.rows if r.q_len and r.kv_len] or [Rows(0, 0, 0, 1, 0, 1, 0)]
    return {
        "q_pos": (min(r.q_offset for r in rows), max(r.q_offset + r.q_len - 1 for r in rows)),
        "kv_pos": (0, max(r.kv_len for r in rows) - 1), "batch": (0, max(r.number for r in rows)),
        "q_len": (min(r.q_len for r in rows), max(r.q_len for r in rows)),
        "kv_len": (min(r.kv_len for r in rows), max(r.kv_len for r in rows)),
    }  # fmt: skip


def note(found: Described) -> str:
    """What a plan says of its sequences."""
    if not found.rows:
        return NO_SEQUENCE

    def span(lengths: list[int], noun: str) -> str:
        low, high = min(lengths), max(lengths)
        return counted(low, noun) if low == high else f"{low} to {counted(high, noun)}"

    q, kv = span([r.q_len for r in found.rows], "query"), span([r.kv_len for r in found.rows], "key")
    how = "packed one after the other" if isinstance(found.sequences, Packed) else "in padded operands"
    if isinstance(found.sequences, Pages):
        how = f"these in pages of {found.sequences.page}"
    if isinstance(found.sequences, PackedPaged):
        how += ", queries packed one after the other"
    number = counted(len(found.rows), "sequence")
    return f"{number} of {q} and {kv}, {how}: tiles and pairs are those of their lengths"
