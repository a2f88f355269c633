"""Caches as state machines: whatever is done in whatever order, each sequence reads as a plain list of its rows, and
the accounts are those that counting by hand gives."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import weft
from weft.kv import DenseCache, OutOfBlocksError, PagedCache, Step

LAYERS, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 3, 2
LATENT = weft.Latent(rank=3, rope=2)


def rows_of(cache: Any, step: Step, index: int, pool: torch.Tensor) -> torch.Tensor:
    """[Hkv, tokens, D]: what a call reads of one sequence, by the tensors that it is given."""
    length = int(step.kv_lens[index])
    if step.block_table is None:
        return pool[index, :, :length]
    pages = step.block_table[index].long()
    return pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]


SALTS = (None, None, b"image", 1, True, ("adapter", 1))  # some equal to others, but not the same


def number_of(salt: object) -> int:
    """That tells it apart in a row, beside ids of 0 and 1."""
    return 10 * next(n for n, other in enumerate(SALTS) if type(other) is type(salt) and other == salt)


def ids(draw: random.Random, number: int) -> list[int]:
    """Token ids that often begin alike."""
    return [int(draw.random() < 0.15) for _ in range(number)]


class Machine(RuleBasedStateMachine):
    """Sequences of a cache beside lists of rows. Rows differ from one another, so that no mix-up goes unseen."""

    dense = False

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[int, list[list[torch.Tensor]]] = {}  # id -> pool -> rows [heads, width]
        self.ids: dict[int, list[int]] = {}  # id -> tokens
        self.salts: dict[int, int] = {}  # id -> number of its salt
        self.open: list[tuple[Step, list[int]]] = []
        self.freed: list[int] = []
        self.written = 0
        self.pending: dict[int, list[list[list[torch.Tensor]]]] = {}  # of open batches, the new rows of each sequence

    @initialize(page=st.sampled_from([1, 2, 4]), blocks=st.integers(6, 24), latent=st.booleans())
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
    @rule(seed=st.integers(0, 2**32))
    def act(self, seed: int) -> None:
        """Thirty actions, steps more often than others: drawn by weight, as rules of their own would be drawn alike."""
        draw = random.Random(seed)
        actions = {
            self.step: 6, self.begin: 1, self.end: 2, self.allocate: 3, self.fork: 2, self.truncate: 1, self.free: 2,
            self.swap_out: 1, self.swap_in: 2,
        }  # fmt: skip
        for action in draw.choices(list(actions), list(actions.values()), k=30):
            action(draw)
            self.sequences_read_as_lists()
            self.accounts_are_exact()

    def idle(self, swapped: bool = False) -> list[int]:
        busy = {s for step, _ in self.open for s in step.sequences}
        return [s for s in self.lists if s not in busy and self.cache.is_swapped(s) == swapped]

    def state(self) -> object:
        return self.cache.usage, [self.cache.blocks(s) for s in self.lists], [self.cache.length(s) for s in self.lists]

    def unchanged(self, action: Any) -> None:
        """An action that is refused, and changes nothing."""
        before = self.state()
        with pytest.raises(weft.WeftError):
            action()
        assert self.state() == before

    def allocate(self, draw: random.Random) -> None:
        if len(self.lists) > 4:
            return
        tokens = ids(draw, draw.randint(0, 10)) if draw.random() < 0.8 else None
        salt = draw.choice(SALTS)
        self.unchanged(lambda: self.cache.allocate(tokens, salt=[1]))
        try:
            made = self.cache.allocate(tokens, salt=salt)
        except OutOfBlocksError:
            assert self.dense and self.cache.usage.free == 0
            return
        length = self.cache.length(made)
        assert made not in self.lists and length <= max(len(tokens or ()) - 1, 0)
        assert length == 0 or not self.dense
        self.ids[made] = (tokens or [])[:length]
        self.salts[made] = number_of(salt)
        if not self.dense:
            self.lists[made] = self.read_back(made, length)
            last = [[int(row[0, -1]) for row in rows] for rows in self.lists[made]]
            # the last column of a row is its token, and the salt of its sequence
            assert last == [[self.salts[made] + token for token in self.ids[made]]] * len(self.pools)
        else:
            self.lists[made] = [[] for _ in self.pools]

    def read_back(self, sequence: int, length: int) -> list[list[torch.Tensor]]:
        blocks, page = self.cache.blocks(sequence), self.cache.page
        return [[pool[blocks[n // page], :, n % page].clone() for n in range(length)] for pool in self.pools]

    def step(self, draw: random.Random) -> None:
        if self.begin(draw):
            self.close(keeps=True, which=-1)

    def end(self, draw: random.Random) -> None:
        if self.open:
            self.close(keeps=draw.random() < 0.6, which=0)

    def begin(self, draw: random.Random) -> bool:
        if not (idle := self.idle()):
            return False
        chosen = draw.sample(idle, draw.randint(1, min(3, len(idle))))
        if self.dense:
            chosen = sorted(chosen, key=lambda s: self.cache.blocks(s)[0])
        lengths = [draw.choice([0, 1, 1, 2, 5]) for _ in chosen]
        tokens = [ids(draw, n) for n in lengths]
        given = [t if draw.random() < 0.9 else None for t in tokens]
        before = self.state()
        try:
            step = self.cache.extend(chosen, lengths, given)
        except weft.WeftError as error:
            assert isinstance(error, OutOfBlocksError) or self.dense  # whose rows may be no view, or full
            assert self.state() == before
            return False
        assert step.starts == tuple(len(self.lists[s][0]) for s in chosen)
        for s, t in zip(chosen, tokens):
            self.ids[s] = self.ids[s] + t
        self.open.append((step, lengths))
        self.write(step, tokens)
        return True

    def write(self, step: Step, tokens: list[list[int]]) -> None:
        """Rows of all layers; the last column of each is the token's id and the salt's number. NaN where no row is."""
        made = []
        for pool in self.pools:
            rows = torch.full((len(tokens), pool.shape[1], step.length, pool.shape[3]), torch.nan)
            for b, row_ids in enumerate(tokens):
                for n, token in enumerate(row_ids):
                    self.written += 1
                    rows[b, :, n] = float(self.written)
                    rows[b, :, n, -1] = token + self.salts[step.sequences[b]]
            made.append(rows)
        for layer in range(LAYERS):
            step.append(layer, made[layer], None if self.latent else made[LAYERS + layer])
        self.pending[id(step)] = [[list(rows[b, :, : len(row_ids)].unbind(1)) for rows in made]
                                   for b, row_ids in enumerate(tokens)]  # fmt: skip

    def close(self, keeps: bool, which: int) -> None:
        step, lengths = self.open.pop(which)
        rows = self.pending.pop(id(step))
        for refused in (
            lambda: self.cache.extend([step.sequences[0]], [1]),
            lambda: self.cache.free(step.sequences[-1]),
        ):
            self.unchanged(refused)  # two writers
        (step.commit if keeps else step.cancel)()
        self.unchanged(step.commit)
        for s, new, count in zip(step.sequences, rows, lengths):
            if keeps:
                for pool, more in zip(self.lists[s], new):
                    pool += more
            else:
                self.ids[s] = self.ids[s][: len(self.ids[s]) - count]

    def fork(self, draw: random.Random) -> None:
        if not (idle := self.idle()) or len(self.lists) > 5:
            return
        chosen = draw.choice(idle)
        try:
            made = self.cache.fork(chosen)
        except OutOfBlocksError:
            assert self.dense
            return
        self.lists[made] = [list(rows) for rows in self.lists[chosen]]
        self.ids[made], self.salts[made] = list(self.ids[chosen]), self.salts[chosen]

    def truncate(self, draw: random.Random) -> None:
        if not (idle := self.idle()):
            return
        chosen = draw.choice(idle)
        length = draw.randint(0, len(self.ids[chosen]))
        self.unchanged(lambda: self.cache.truncate(chosen, len(self.ids[chosen]) + 1))
        self.cache.truncate(chosen, length)
        self.lists[chosen] = [rows[:length] for rows in self.lists[chosen]]
        self.ids[chosen] = self.ids[chosen][:length]

    def free(self, draw: random.Random) -> None:
        if among := self.idle(swapped=draw.random() < 0.2):
            chosen = draw.choice(among)
            self.cache.free(chosen)
            del self.lists[chosen], self.ids[chosen]
            self.freed.append(chosen)
        if self.freed:
            self.unchanged(lambda: self.cache.extend([self.freed[-1]], [1]))
            self.unchanged(lambda: self.cache.free(self.freed[-1]))

    def swap_out(self, draw: random.Random) -> None:
        if not (idle := self.idle()):
            return
        chosen, held = draw.choice(idle), self.cache.usage.used
        alone = sum(self.cache._blocks.holders[b] == 1 for b in self.cache.blocks(chosen))
        self.cache.swap_out(chosen)
        assert self.cache.usage.used == held - alone
        self.unchanged(lambda: self.cache.extend([chosen], [1]))

    def swap_in(self, draw: random.Random) -> None:
        if not (swapped := self.idle(swapped=True)):
            return
        chosen = draw.choice(swapped)
        if self.cache.blocks(chosen).count(-1) > self.cache.usage.free:
            self.unchanged(lambda: self.cache.swap_in(chosen))
        else:
            self.cache.swap_in(chosen)

    # -- what holds --------------------------------------------------------------------------------------------------
    def sequences_read_as_lists(self) -> None:
        for s in self.idle():
            step = self.cache.view([s])
            assert self.cache.length(s) == len(self.ids[s]) == int(step.kv_lens[0])
            for p, rows in enumerate(self.lists[s]):
                layer = p % LAYERS
                pool = step.keys(layer) if p < LAYERS else step.values(layer)
                found = rows_of(self.cache, step, 0, pool)
                assert torch.equal(found, torch.stack(rows, 1) if rows else found[:, :0])

    def accounts_are_exact(self) -> None:
        usage, page = self.cache.usage, self.cache.page
        held = Counter(b for s in self.lists for b in self.cache.blocks(s) if b >= 0)
        filled: dict[int, int] = {}
        adding = {s: n for step, lengths in self.open for s, n in zip(step.sequences, lengths)}
        for s in self.lists:
            end = self.cache.length(s) + adding.get(s, 0)
            for n, b in enumerate(self.cache.blocks(s)):
                if b >= 0:
                    filled[b] = max(filled.get(b, 0), min(page, end - n * page))
        assert usage.used == len(held) and usage.free == usage.blocks - len(held) == self.cache.free_blocks
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
    max_examples=40, stateful_step_count=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes
)  # fmt: skip
TestPaged, TestDense = Machine.TestCase, DenseMachine.TestCase
TestPaged.settings, TestDense.settings = OPTIONS, settings(OPTIONS, max_examples=12)
