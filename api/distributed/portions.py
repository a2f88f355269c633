"""One portion of a call: a run of queries over a run of keys, forward and backward, and how portions are joined."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.attention import Attention
from ..ir.expr import TensorOperand
from ..ir.philox import TOGETHER
from ..runtime.call import MAIN, BackwardCall, Call, Choices, Dense, Packed, Sequences
from ..runtime.joining import join_results
from ..runtime.ops.library import as_read
from ..runtime.run.variant import Variant, variant_of
from .collectives import all_reduce
from .copies import copy_rows
from .latent import Keys
from .pieces import Pieces, fills
from .placed import names_beside, placed, positions_divided_by, without_sink
from .rows import Run, Runs, common, depth, joined, places, without
from .shardplan import ShardPlan


class Portion(NamedTuple):
    """A run of queries over a run of keys, rows of the whole sequence."""

    queries: Run
    keys: Run
    sink: bool  # whether the sink of these queries is counted here
    part: bool = False  # whether another portion has some of these queries


def _meet(run: Run, others: Sequence[Run]) -> int:
    """How many runs have rows of this one."""
    return sum(first < run[1] and run[0] < end for first, end in others)


class Most(NamedTuple):
    """How many results are joined in one row of a rank's, at most."""

    of_queries: int
    of_keys: list[int]  # at hand in each step
    of_own_keys: int  # from all ranks


class Portions:
    """The portions of a plan, and the variants that they are computed with."""

    def __init__(self, plan: ShardPlan) -> None:
        self.plan, self.names = plan, names_beside(plan.attention)
        own = plan.attention.canonical
        self.has_sink, self.drops = own.folded_sink is not None, own.drops
        self.multiple = positions_divided_by(plan.attention) if plan.starts is None else 1
        self.variant = cache(self._variant)
        self.portions, self.sinks, self.packed = cache(self._portions), cache(self._sinks), cache(self._packed)
        self.most = cache(self._most)

    def _most(self, rank: int) -> Most:
        steps = self.portions(rank)
        own = self.plan.keys.rows(rank)
        here = (run for step in steps for run in common(own, joined(p.keys for p in step)))
        sent = (run for r in range(self.plan.ranks) if r != rank for run in self.plan.received(r, rank))
        return Most(
            depth((*(p.queries for step in steps for p in step), *self.sinks(rank))),
            [depth(p.keys for p in step) for step in steps],
            depth((*here, *sent)),
        )

    def _variant(self, sink: bool, in_step: bool, multiple: int) -> Variant:
        """sink: with that of the variant. in_step, multiple: of all first keys, as `placed` takes them."""
        found: Attention = placed(
            self.plan.attention, group=self.plan.group, packed=self.plan.starts is not None, in_step=in_step,
            multiple=multiple,
        )  # fmt: skip
        return variant_of(found if sink else without_sink(found))

    def _portions(self, rank: int) -> list[list[Portion]]:
        """Of each step. The first portion that has all queries of a task has their sink."""
        found, without = (
            list[list[Portion]](),
            {task.queries for task in self.plan.tasks[rank]} if self.has_sink else set(),
        )
        for step in self.plan.portions(rank):
            portions = []
            for queries, (keys,) in step:
                portions.append(Portion(queries, keys, queries in without))
                without.discard(queries)
            found.append(portions)
        runs = [portion.queries for step in found for portion in step]
        return [[p._replace(part=_meet(p.queries, runs) > 1) for p in step] for step in found]

    def _sinks(self, rank: int) -> list[Run]:
        """Queries whose sink no portion has."""
        if not self.has_sink:
            return []
        have = {portion.queries for step in self.portions(rank) for portion in step if portion.sink}
        return [task.queries for task in self.plan.tasks[rank] if task.queries not in have]

    def call(
        self, portion: Portion, query: Tensor, keys: Keys, operands: Mapping[str, Any], choices: Choices
    ) -> tuple[Variant, Call]:
        """query, keys: of the portion. operands: with the number of the first head, where the plan is of some heads."""
        plan, names = self.plan, self.names
        beside: dict[str, Any]
        if plan.starts is None:
            beside = {names.first_key: portion.keys[0], names.q_len: plan.sizes.q_len, names.kv_len: plan.sizes.kv_len}
            sequences: Sequences = Dense(plan.q_offset + portion.queries[0] - portion.keys[0])
            in_step = portion.keys[0] % TOGETHER == 0
        else:
            sequences, beside, in_step = self.packed(portion, query.device)
        multiple = 1 if portion.keys[0] % self.multiple else self.multiple
        variant = self.variant(portion.sink, in_step and self.drops, multiple)
        given = {n: operands[n] if n in operands else beside[n] for n in variant.names}
        choices = replace(choices, part=True) if portion.part else choices
        return variant, Call(query, *keys, given, sequences, choices, plan.sizes.head_dim)

    def _packed(self, portion: Portion, device: torch.device) -> tuple[Packed, dict[str, Any], bool]:
        """Where the rows of packed sequences lie in a portion, what a placed variant reads of them, and `in_step`."""
        plan, names = self.plan, self.names
        assert plan.starts is not None
        (first, end), (first_key, end_key) = portion.queries, portion.keys
        number = max(0, bisect_right(plan.starts, min(first, first_key)) - 1)  # of the first with rows here
        behind = max(number, bisect_left(plan.starts, end))
        starts = plan.starts[number : behind + 1]
        of_queries = [min(max(s, first), end) - first for s in starts]
        of_keys = [min(max(s, first_key), end_key) - first_key for s in starts]
        firsts = [max(first_key, s) - s for s in starts[:-1]]
        offsets = [max(first, s) - s - n for s, n in zip(starts, firsts)]
        lengths = [b - a for a, b in pairwise(starts)]
        cu_q, cu_kv, q_offset, first_keys, all_rows = (
            torch.tensor(n, dtype=torch.int32, device=device) for n in (of_queries, of_keys, offsets, firsts, lengths)
        )
        beside = {names.first_key: first_keys, names.q_len: all_rows, names.kv_len: all_rows, names.batch: number}
        beside[names.last] = max(0, plan.longest - 1)
        return Packed(cu_q, cu_kv, q_offset), beside, all(n % TOGETHER == 0 for n in firsts)


class Joined:
    """out and lse of the queries of a rank, joined portion by portion.

    lse is as kernels give it: [B, Hq, L], or [2, B, Hq, L] where scores may lie far from 0. most: how many portions a
    row has, at most. Where that is two, their results are joined in place; more are summed in float32.
    """

    def __init__(self, query: Tensor, width: int, parts: Portions, most: int) -> None:
        facts = parts.variant(True, False, 1).facts
        self.is_far, self.sums = facts.scores_lie_far, not facts.attention.canonical.weighs.saves_lse
        self.query, self.shape = query, (*query.shape[:3], width)
        self.keeps_wide = most > 2
        self.pieces = Pieces(-2, -1, kept=_widened if self.keeps_wide else None)

    def add(self, rows: Run, out: Tensor, lse: Tensor) -> None:
        """Join a portion's result. rows: where its queries lie among the rank's."""
        for (so_far, known), (part, new) in self.pieces.put(rows, (out, lse)):
            if self.sums:
                so_far.add_(part)
                continue
            first = so_far, known if self.is_far else known[None]
            join_results(first, (part[None], new[None] if self.is_far else new[None, None]), first)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of the query, and lse."""
        if not self.keeps_wide and (found := self.pieces.alone(self.shape[2])) is not None:
            return found[0], found[1]
        lse = (2, *self.shape[:3]) if self.is_far else self.shape[:3]
        empty = self.query.new_empty(self.shape), self.query.new_empty(lse, dtype=wide(self.query))
        if self.pieces.rows < self.shape[2]:  # some saw nothing
            empty[0].zero_()
            empty[1].fill_(-torch.inf)
            if self.is_far:
                empty[1][1].zero_()
        out, lse_found = self.pieces.whole(empty)
        return out, lse_found


def wide(tensor: Tensor) -> torch.dtype:
    """What sums of such numbers are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _widened(tensor: Tensor) -> Tensor:
    """A copy, to which others are added."""
    return tensor.to(wide(tensor), copy=True)


class Sum:
    """A sum over portions of gradients [B, H, rows, width], in the dtype of `like`, which it is the gradient of.

    most: how many parts a row has, at most. Two are added as they are; of more the rows that they share are summed in
    float32. among: rows outside of which no part has any; all where not given. A first part that has all of these is
    taken as it is, and else they alone take memory.
    """

    def __init__(self, like: Tensor, most: int, among: Run | None = None) -> None:
        self.heads, self.rows, self.columns = like.shape[:2], like.shape[2], like.shape[3]
        self.like, self.keeps_wide = like.new_empty((*self.heads, 0, self.columns)), most > 2  # without the memory
        self.among = (0, self.rows) if among is None else among
        self.whole: Tensor | None = None  # these rows
        self.filled: Runs = ()
        self.wide = Pieces(-2, kept=_widened)  # rows of more than one part, where those are summed in float32

    def add(self, rows: Run, part: Tensor) -> None:
        """Add a part in these rows."""
        if self.whole is None and rows == self.among and fills(part):
            self.whole, self.filled = part, (rows,)
            return
        if self.whole is None:
            self.whole = part.new_empty((*part.shape[:2], self.among[1] - self.among[0], part.shape[3]))
        met = common((rows,), self.filled)
        for run in without((rows,), met) if met else (rows,):
            copy_rows(self._at(run), _cut(part, run, rows))
        for run in met:
            self._add_to_others(run, _cut(part, run, rows))
        if met != (rows,):
            self.filled = joined((*self.filled, rows))

    def _add_to_others(self, rows: Run, part: Tensor) -> None:
        if not self.keeps_wide:
            self._at(rows).add_(part)
            return
        for run in without((rows,), joined(run for run, _ in self.wide.found)):
            self.wide.put(run, (self._at(run),))
        for (so_far,), (more,) in self.wide.put(rows, (part,)):
            so_far.add_(more)

    def _at(self, rows: Run) -> Tensor:
        assert self.whole is not None
        return _cut(self.whole, rows, self.among)

    def parts(self, rows: Run) -> Iterator[tuple[Run, Tensor]]:
        """What there is of these rows, once nothing is added any more: runs that have parts, and the sums of those."""
        while self.wide.found:
            run, (part,) = self.wide.found.pop()
            copy_rows(self._at(run), part)
        for run in common((rows,), self.filled):
            yield run, self._at(run)

    def result(self, rows: Run | None = None) -> Tensor:
        """These rows, or all, in the dtype of what they are the gradient of; zeros where nothing came."""
        rows = (0, self.rows) if rows is None else rows
        if self.whole is not None and rows == self.among and self.filled == (rows,) and not self.wide.found:
            return self.whole.to(self.like.dtype)
        found = list(self.parts(rows))
        if self.whole is not None and rows == self.among:
            for run in without((rows,), self.filled):
                self._at(run).zero_()
            return self.whole.to(self.like.dtype)
        if len(found) == 1 and found[0][0] == rows:
            return found[0][1].to(self.like.dtype)
        whole = self.like.new_zeros((*self.heads, rows[1] - rows[0], self.columns))
        for run, part in found:
            copy_rows(_cut(whole, run, rows), part)
        return whole


def known(gradient: Tensor) -> Sum:
    """The sum that this is."""
    found = Sum(gradient, 1)
    found.add(found.among, gradient)
    return found


def _cut(tensor: Tensor, rows: Run, of: Run) -> Tensor:
    """Rows of a tensor that has those from of[0] on."""
    return tensor if rows == of else tensor.narrow(2, rows[0] - of[0], rows[1] - rows[0])


class OperandSums:
    """Gradients of operands, which all ranks share."""

    def __init__(self, query: Tensor, operands: Mapping[str, Tensor]) -> None:
        self.tensors = operands
        self.sums = {
            n: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, wide(query))) for n, t in operands.items()
        }

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Add those of a portion."""
        for name, total in self.sums.items():
            if name in found:
                total.add_(found[name])

    def result(self, group: Any) -> dict[str, Tensor]:
        """By name, summed over ranks."""
        for total in self.sums.values():
            all_reduce(total, group)
        return {n: t.to(self.tensors[n].dtype) for n, t in self.sums.items()}


def operand_names(variant: Attention) -> list[str]:
    """The tensor operands, in order."""
    return [p.name for p in variant.canonical.parameters if isinstance(p, TensorOperand)]


class Given(NamedTuple):
    """What a backward starts from. out, lse: of these queries over all keys, of all ranks."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def given_at(rows: Run, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Given:
    """These rows of all that a backward starts from."""
    first, end = rows
    return Given(
        out[:, :, first:end], lse[..., first:end], dout[:, :, first:end], None if dlse is None else dlse[..., first:end]
    )


def gradients(variant: Variant, call: Call, given: Given, wanted: frozenset[str]) -> dict[str, Tensor]:
    """A portion's part of the gradients. A pair weighs exp(score - lse), whoever computes it: with lse and out of all
    keys, the backward of a portion gives its part of all (Dao 2023, "FlashAttention-2", section 3.1)."""
    own = wanted & {*MAIN, *variant.names}
    if not own:
        return {}
    return variant.backward(as_read(BackwardCall(call, given.out, given.lse, given.dout, given.dlse, own)))


def sink_gradients(variant: Variant, call: Call, given: Given, wanted: frozenset[str]) -> dict[str, Tensor]:
    """Those of what the sinks of these queries read: a sink weighs exp(sink - lse), and has no value."""
    own = wanted & {*variant.names}
    if not own:
        return {}
    out, sink = variant.forward(call)
    lse, shown, dlse = given.lse, sink, given.dlse
    is_far = variant.facts.scores_lie_far
    if is_far:  # their sums are what callers see, and the gradient of either statistic is that of the sum
        lse, shown, dlse = lse.sum(0), shown.sum(0), None if dlse is None else dlse[0]
    weight = torch.where(shown == -torch.inf, 0.0, (shown - lse).exp())
    delta = (given.out.to(weight.dtype) * given.dout).sum(-1)
    dlse = weight * ((0.0 if dlse is None else dlse) - delta)
    if is_far:
        dlse = torch.stack([dlse, dlse])
    return variant.backward(BackwardCall(call, out, sink, torch.zeros_like(out), dlse, own))


def run_in(rows: Run, among: Runs) -> Run:
    """Where one run lies among rows that follow each other."""
    ((first, end),) = places((rows,), among)
    return first, end
