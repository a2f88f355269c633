"""Caches as state machines: whatever is done in whatever order, each sequence reads as a plain list of its rows, and the
accounts are those that counting by hand gives."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import weft
from weft.kv import Batch, DenseCache, OutOfBlocksError, PagedCache

LAYERS, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 3, 2
LATENT = weft.Latent(rank=3, rope=2)


def rows_of(cache: Any, batch: Batch, index: int, pool: torch.Tensor) -> torch.Tensor:
    """[Hkv, tokens, D]: what a call reads of one sequence, by the tensors that it is given."""
    length = int(batch.kv_lens[index])
    if batch.block_table is None:
        return pool[index, :, :length]
    pages = batch.block_table[index].long()
    return pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]


class Machine(RuleBasedStateMachine):
    """Sequences of a cache beside lists of rows. Rows differ from one another, so that no mix-up goes unseen."""

    dense = False

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[int, list[list[torch.Tensor]]] = {}  # id -> pool -> rows [heads, width]
        self.ids: dict[int, list[int]] = {}  # id -> tokens
        self.open: list[tuple[Batch, list[int]]] = []
        self.freed: list[int] = []
        self.written = 0

    @initialize(page=st.sampled_from([1, 2, 4]), blocks=st.integers(4, 12), latent=st.booleans())
    def start(self, page: int, blocks: int, latent: bool) -> None:
        sizes: dict[str, Any] = {"latent": LATENT} if latent else {
            "kv_heads": HEADS, "head_dim": WIDTH, "value_dim": VALUE_WIDTH
        }  # fmt: skip
        sizes |= {"layers": LAYERS, "dtype": torch.float32}
        self.latent = latent
        self.cache: Any = (
            DenseCache(blocks // 2, 3 * page + 1, **sizes) if self.dense else PagedCache(blocks, page=page, **sizes)
        )
        self.pools = [*self.cache._keys, *self.cache._values]

    # -- what is done ------------------------------------------------------------------------------------------------
    def pick(self, data: st.DataObject, among: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(among)))

    def idle(self, swapped: bool = False) -> list[int]:
        busy = {s for batch, _ in self.open for s in batch.sequences}
        return [s for s in self.lists if s not in busy and self.cache.is_swapped(s) == swapped]

    def unchanged(self, action: Any) -> None:
        """An action that is refused, and changes nothing."""
        before = self.cache.usage, [self.cache.blocks(s) for s in self.lists]
        with pytest.raises(weft.WeftError):
            action()
        assert (self.cache.usage, [self.cache.blocks(s) for s in self.lists]) == before

    @rule(tokens=st.none() | st.lists(st.integers(0, 1), max_size=9))
    def allocate(self, tokens: list[int] | None) -> None:
        try:
            made = self.cache.allocate(tokens)
        except OutOfBlocksError:
            assert self.dense and self.cache.usage.free == 0
            return
        length = self.cache.length(made)
        assert made not in self.lists and length <= max(len(tokens or ()) - 1, 0)
        assert length == 0 or not self.dense
        self.ids[made] = (tokens or [])[:length]
        # what is found again is what some sequence wrote for these tokens: the rows are told apart by their content
        self.lists[made] = [[pool[b, :, r] for b in self.cache.blocks(made) for r in range(self.cache.page)][:length]
                            for pool in self.copies()]  # fmt: skip
        for row in range(length):
            assert [int(self.lists[made][p][row][0, -1]) for p in range(len(self.pools))] == [
                self.ids[made][row]
            ] * len(self.pools)

    def copies(self) -> list[torch.Tensor]:
        return [pool.clone() for pool in self.pools]

    @rule(data=st.data(), seed=st.integers(0, 2**16), known=st.booleans())
    @precondition(lambda self: self.idle())
    def extend(self, data: st.DataObject, seed: int, known: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.idle()), unique=True, min_size=1, max_size=3))
        if self.dense:
            chosen = sorted(chosen, key=lambda s: self.cache.blocks(s)[0])
        draw = random.Random(seed)
        lengths = [draw.choice([0, 1, 1, 2, 5]) for _ in chosen]
        tokens = [[draw.randint(0, 1) for _ in range(n)] for n in lengths]
        given = [t if known else None for t in tokens]
        before = self.cache.usage, [self.cache.blocks(s) for s in self.lists]
        try:
            batch = self.cache.extend(chosen, lengths, given)
        except weft.WeftError:  # no room, or rows of a dense cache that are no view
            assert (self.cache.usage, [self.cache.blocks(s) for s in self.lists]) == before
            return
        assert batch.starts == tuple(len(self.lists[s][0]) for s in chosen)
        for s, t in zip(chosen, tokens):
            self.ids[s] = self.ids[s] + t
        self.open.append((batch, [len(t) for t in tokens]))
        self.write(batch, tokens)

    def write(self, batch: Batch, tokens: list[list[int]]) -> None:
        """Rows of all layers; the last column of each holds the token's id. NaN where no row is."""
        self.pending = getattr(self, "pending", {})
        made = []
        for pool in self.pools:
            rows = torch.full((len(tokens), pool.shape[1], batch.length, pool.shape[3]), torch.nan)
            for b, ids in enumerate(tokens):
                for n, token in enumerate(ids):
                    self.written += 1
                    rows[b, :, n] = float(self.written)
                    rows[b, :, n, -1] = token
            made.append(rows)
        for layer in range(LAYERS):
            batch.append(layer, made[layer], None if self.latent else made[LAYERS + layer])
        self.pending[id(batch)] = [[list(rows[b, :, : len(ids)].unbind(1)) for rows in made]
                                   for b, ids in enumerate(tokens)]  # fmt: skip

    @rule(keeps=st.booleans())
    @precondition(lambda self: self.open)
    def close(self, keeps: bool) -> None:
        batch, lengths = self.open.pop(0)
        rows = self.pending.pop(id(batch))
        self.unchanged(lambda: self.cache.extend([batch.sequences[0]], [1]))  # two writers
        self.unchanged(lambda: self.cache.free(batch.sequences[-1]))
        (batch.commit if keeps else batch.cancel)()
        self.unchanged(batch.commit)
        for s, new, count in zip(batch.sequences, rows, lengths):
            if keeps:
                for pool, more in zip(self.lists[s], new):
                    pool += more
            else:
                self.ids[s] = self.ids[s][: len(self.ids[s]) - count]

    @rule(data=st.data())
    @precondition(lambda self: self.idle())
    def fork(self, data: st.DataObject) -> None:
        chosen = self.pick(data, self.idle())
        try:
            made = self.cache.fork(chosen)
        except OutOfBlocksError:
            assert self.dense
            return
        self.lists[made] = [list(rows) for rows in self.lists[chosen]]
        self.ids[made] = list(self.ids[chosen])

    @rule(data=st.data())
    @precondition(lambda self: self.idle())
    def truncate(self, data: st.DataObject) -> None:
        chosen = self.pick(data, self.idle())
        length = data.draw(st.integers(0, len(self.ids[chosen])))
        self.cache.truncate(chosen, length)
        self.lists[chosen] = [rows[:length] for rows in self.lists[chosen]]
        self.ids[chosen] = self.ids[chosen][:length]
        self.unchanged(lambda: self.cache.truncate(chosen, length + 1))

    @rule(data=st.data(), swapped=st.booleans())
    def free(self, data: st.DataObject, swapped: bool) -> None:
        if among := self.idle(swapped):
            chosen = self.pick(data, among)
            self.cache.free(chosen)
            del self.lists[chosen], self.ids[chosen]
            self.freed.append(chosen)
        if self.freed:
            self.unchanged(lambda: self.cache.extend([self.freed[-1]], [1]))
            self.unchanged(lambda: self.cache.free(self.freed[-1]))

    @rule(data=st.data())
    @precondition(lambda self: self.idle())
    def swap_out(self, data: st.DataObject) -> None:
        chosen = self.pick(data, self.idle())
        held = self.cache.usage.used
        alone = sum(self.cache._blocks.holders[b] == 1 for b in self.cache.blocks(chosen))
        self.cache.swap_out(chosen)
        assert self.cache.usage.used == held - alone
        self.unchanged(lambda: self.cache.extend([chosen], [1]))

    @rule(data=st.data())
    @precondition(lambda self: self.idle(swapped=True))
    def swap_in(self, data: st.DataObject) -> None:
        chosen = self.pick(data, self.idle(swapped=True))
        pages = self.cache.blocks(chosen).count(-1)
        if pages > self.cache.usage.free:
            self.unchanged(lambda: self.cache.swap_in(chosen))
        else:
            self.cache.swap_in(chosen)

    # -- what holds --------------------------------------------------------------------------------------------------
    @invariant()
    def sequences_read_as_lists(self) -> None:
        for s in self.idle() if hasattr(self, "cache") else ():
            batch = self.cache.batch([s])
            assert self.cache.length(s) == len(self.ids[s]) == int(batch.kv_lens[0])
            for p, rows in enumerate(self.lists[s]):
                layer = p % LAYERS
                pool = batch.keys(layer) if p < LAYERS else batch.values(layer)
                found = rows_of(self.cache, batch, 0, pool)
                assert torch.equal(found, torch.stack(rows, 1) if rows else found[:, :0])

    @invariant()
    def accounts_are_exact(self) -> None:
        if not hasattr(self, "cache"):
            return
        usage, page = self.cache.usage, self.cache.page
        held = Counter(b for s in self.lists for b in self.cache.blocks(s) if b >= 0)
        filled: dict[int, int] = {}
        adding = {s: n for batch, lengths in self.open for s, n in zip(batch.sequences, lengths)}
        for s in self.lists:
            end = self.cache.length(s) + adding.get(s, 0)
            for n, b in enumerate(self.cache.blocks(s)):
                if b >= 0:
                    filled[b] = max(filled.get(b, 0), min(page, end - n * page))
        assert usage.used == len(held) and usage.free == usage.blocks - len(held)
        assert usage.shared == sum(n > 1 for n in held.values())
        assert usage.tokens == sum(filled.values())
        assert usage.fragmentation == pytest.approx(1 - usage.tokens / (usage.used * page) if usage.used else 0)
        assert usage.bytes == sum(p.numel() * p.element_size() for p in self.pools)
        assert usage.used_bytes * usage.blocks == usage.bytes * usage.used
        assert usage.swapped == sum(self.cache.blocks(s).count(-1) for s in self.lists)
        assert len(self.cache) == len(self.lists) and f"{usage.used} of {usage.blocks}" in repr(self.cache)


class DenseMachine(Machine):
    dense = True


OPTIONS = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestPaged, TestDense = Machine.TestCase, DenseMachine.TestCase
TestPaged.settings, TestDense.settings = OPTIONS, settings(OPTIONS, max_examples=30)
