"""Plans over ranks, by numbers alone: every visible pair is computed once, ranks are balanced, and words say so."""

from __future__ import annotations

import copy
import doctest
import pickle
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.analysis.tiles.measured import Table
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.records import Shape
from weft.distributed import Links, ShardPlan, changes, plan, rings, rows, shardplan
from weft.distributed.placed import placed
from weft.distributed.portions import Portions
from weft.distributed.rows import Deal, common, count
from weft.distributed.seen import PackedSight, Sight
from weft.ir.reference import dense_mask, positions

from .on_ranks import BALANCES, variants

window, slopes = weft.scalar("window", int), weft.tensor("slopes", 1)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
MLA = weft.Attention(mask=masks.causal, latent=weft.Latent(32, 8), name="mla")
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="recent")
SIZES: dict[str, Any] = {"heads": 8, "head_dim": 128, "device": "h100"}


def seen(variant: weft.Attention, length: int, kv_length: int, q_offset: int, operands: dict[str, Any]) -> Tensor:
    """Which pairs any head of any batch row sees, [L, T]."""
    own = positions(2, 4, 2, length, kv_length, q_offset, torch.device("cpu"))
    values = {**own, **operands, "q_len": length, "kv_len": kv_length, "head_dim": 16, "q_offset": q_offset}
    return dense_mask(variant, values, (2, 4, length, kv_length), torch.float32, torch.device("cpu")).any(0).any(0)


def test_examples_of_rows() -> None:
    assert doctest.testmod(rows).attempted == 7 and doctest.testmod(rows).failed == 0
    for module, examples in ((rings, 2), (changes, 1)):
        assert doctest.testmod(module) == (0, examples)


@pytest.mark.parametrize("lengths", [(96, 96), (70, 70), (3, 3), (45, 80)])
@pytest.mark.parametrize("name", variants(8))
def test_every_visible_pair_is_in_one_portion(name: str, lengths: tuple[int, int]) -> None:
    variant, operands = variants(max(lengths))[name]
    given = {n: v for n, v in operands.items() if n == "doc" or not isinstance(v, Tensor)}
    visible = seen(variant, *lengths, lengths[1] - lengths[0], operands)
    for ranks, balance, strategy in [(n, b, s) for n in (2, 3, 4) for b, s in zip(BALANCES, ("exchange", "ring") * 2)]:
        made = plan(variant, ranks=ranks, batch=2, heads=4, kv_heads=2, length=lengths[0], kv_length=lengths[1],
                    head_dim=16, dtype="fp32", strategy=strategy, balance=balance, device="h100", **given)  # fmt: skip
        times, owned, parts = (
            torch.zeros(lengths, dtype=torch.int),
            torch.zeros(lengths[0], dtype=torch.int),
            Portions(made),
        )
        for rank in range(ranks):
            own = made.queries.rows(rank)
            for first, end in own:
                owned[first:end] += 1
            for step, portions in enumerate(parts.portions(rank)):
                at_hand = made.step_rows(rank, step)
                for portion in portions:
                    assert common((portion.keys,), at_hand) == (portion.keys,) and common((portion.queries,), own)
                    times[slice(*portion.queries), slice(*portion.keys)] += 1
        assert bool((owned == 1).all()), "each row has one owner"
        assert int(times.max()) <= 1 and bool((times[visible] == 1).all()), (name, ranks, balance, strategy)


@pytest.mark.parametrize("rank", [-1, 4, 1.0, True, None])
@pytest.mark.parametrize("strategy", ["exchange", "gather"])
def test_what_is_no_rank_has_no_rows(strategy: Any, rank: Any) -> None:
    made = plan(weft.Attention(mask=masks.causal), ranks=4, heads=2, length=64, head_dim=16, strategy=strategy)
    for ask in (made.needed, made.queries.rows, made.keys.rows, lambda rank: made.received(rank, 0),
                lambda rank: made.received(0, rank)):  # fmt: skip
        with pytest.raises(weft.WeftError, match=r"^rank: expected an int from 0 to 3, got"):
            ask(rank)


def test_only_what_is_seen_is_received() -> None:
    made = plan(RECENT, ranks=8, length=8192, window=100, balance="contiguous", strategy="exchange", **SIZES)
    assert [count(made.needed(r)) for r in range(8)] == [1024, *[1024 + 99] * 7]
    assert made.received_rows(3) == (99, 0) and not made.overlaps  # so few are waited for
    wide = plan(RECENT, ranks=8, length=8192, window=8000, balance="contiguous", strategy="exchange", **SIZES)
    assert count(wide.needed(7)) == 8192
    far = plan(CAUSAL, ranks=4, length=4096, strategy="ring", balance="zigzag", links=Links(per_host=2), **SIZES)
    assert far.received_rows(0) == (1024, 2048) and [len(far.steps(r)) for r in range(4)] == [4] * 4


def test_few_keys_between_others_are_brought_too() -> None:
    """They travel in less time than one more call takes: a mask with holes is not computed hole by hole."""
    blocks = weft.tensor("blocks", 2, bool)
    table = torch.rand(512, 512, generator=torch.Generator().manual_seed(1)) < 0.05
    sparse = weft.Attention(mask=masks.block_sparse(blocks, 128), name="sparse")
    sizes: dict[str, Any] = {"ranks": 2, "length": 1 << 16, "strategy": "exchange", "blocks": table, **SIZES}
    found = plan(sparse, balance="contiguous", **sizes)
    assert [len(task.keys) for tasks in found.tasks for task in tasks] == [1, 1]
    striped = plan(sparse, balance="striped", **sizes)
    calls = [sum(map(len, striped.portions(rank))) for rank in range(2)]
    assert max(calls) <= 32 and striped.predicted.seconds > found.predicted.seconds + 30 * 100e-6
    holes = plan(sparse, balance="striped", links=Links(in_host=1.0), **sizes)
    assert min(sum(map(len, holes.portions(rank))) for rank in range(2)) > 200
    # keys that lie far apart are not worth bringing what lies between
    first = weft.Attention(mask=masks.causal & ((q_pos - kv_pos < 4096) | (kv_pos < 64)), name="first")
    far = plan(first, ranks=8, length=1 << 20, balance="contiguous", strategy="exchange", **SIZES)
    assert [far.received_rows(rank)[0] for rank in range(8)] == [0, *[64 + 4095] * 7]


def test_queries_that_see_own_keys_alone_come_first() -> None:
    """They are computed while keys of others travel, whether or not other rows are joined for that."""
    made = replace(plan(CAUSAL, ranks=2, length=4096, strategy="exchange", balance="zigzag", **SIZES))
    made.__dict__["overlaps"] = False
    chunk = 0, 1024
    first, then = made.portions(0)
    assert first == [(chunk, (chunk,))] and then == [((3072, 4096), ((0, 4096),))]
    assert made.portions(1) == [[], [((1024, 3072), ((0, 3072),))]]
    full = replace(plan(FULL, ranks=2, length=4096, strategy="exchange", balance="zigzag", **SIZES))
    full.__dict__["overlaps"] = False
    assert [len(full.portions(rank)) for rank in range(2)] == [1, 1], "a step without anything is none"


def test_a_plan_says_where_the_host_takes_longer() -> None:
    def text(length: int, device: str) -> str:
        return plan(CAUSAL, ranks=2, length=length, **{**SIZES, "device": device}).explain()

    said = "the host takes some 4 ms for eager calls: capture them in a CUDA graph"
    assert said in text(1 << 12, "h100") and said not in text(1 << 17, "h100") and said not in text(16, "cpu")


def test_balance_follows_visible_pairs() -> None:
    """Of causal masks half of a zigzag's rows see much; documents of uneven lengths are dealt by their pairs."""
    made = plan(CAUSAL, ranks=8, length=1 << 17, balance="zigzag", strategy="exchange", **SIZES)
    assert max(made.pairs) / min(made.pairs) < 1.0001 and sum(made.pairs) == (1 << 17) * ((1 << 17) + 1) // 2
    assert made.predicted.gain > 6.8  # the backward waits for keys
    uneven = plan(CAUSAL, ranks=8, length=1 << 17, balance="contiguous", strategy="exchange", **SIZES)
    assert max(uneven.pairs) > 14 * min(uneven.pairs) and uneven.predicted.gain < 4.5
    ends = torch.tensor([3_750, 4_125, 4_250, 7_500, 8_192])
    doc = torch.bucketize(torch.arange(8_192), ends, right=True)[None]
    documents = weft.Attention(mask=masks.causal & masks.document(weft.tensor("doc", 2, int)), name="documents")
    by_pairs = plan(documents, ranks=4, length=8_192, balance="pairs", strategy="exchange", doc=doc, **SIZES)
    assert max(by_pairs.pairs) < 1.2 * sum(by_pairs.pairs) / 4
    assert list(by_pairs.looked_at) == ["doc"]


def test_documents_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No id is looked at by itself, and the plan is that of the visible pairs."""
    doc = weft.tensor("doc", 2, int)
    ends = torch.tensor([[5, 90, 91, 400], [100, 200, 300, 400]])
    ids = torch.stack([torch.bucketize(torch.arange(512), e, right=True) * 3 - 4 for e in ends])
    variant = weft.Attention(
        mask=masks.causal & masks.document(doc) & (q_pos - kv_pos < window), name="recent_documents"
    )
    monkeypatch.setattr(Table, "_rows", property(lambda table: pytest.fail(f"{table.name} is looked at row by row")))
    sizes = Shape(2, 1, 1, 500, 512, 16, 16, "fp32")
    sight, given = Sight(variant, sizes, 12, {"doc": ids, "window": 60}), {"doc": ids, "window": torch.tensor(60)}
    visible = seen(variant, 500, 512, 12, given)
    by_row = [dense_mask(variant, {**positions(2, 1, 1, 500, 512, 12, torch.device("cpu")), **given}, (2, 1, 500, 512),
                         torch.float32, torch.device("cpu"))]  # fmt: skip
    runs = [(0, 30), (30, 93), (93, 94), (80, 500), (0, 500)]
    for run, keys, pairs in zip(runs, sight.keys_of(runs), sight.pairs_of(runs)):
        expected = visible[slice(*run)].any(0)
        found = torch.zeros(512, dtype=torch.bool)
        for first, end in keys:
            found[first:end] = True
        assert bool((found | ~expected).all()) and int(found.sum()) <= int(expected.sum()) + 60
        exactly = int(by_row[0][:, 0, slice(*run)].sum()) / 2
        assert abs(pairs - exactly) <= 0.02 * exactly + 2
        around = sight.queries((200, 210), run)
        who = visible[slice(*run), 200:210].any(1).nonzero()
        assert not len(who) or (around[0] <= run[0] + int(who.min()) and run[0] + int(who.max()) < around[1])


def test_ids_that_come_again_are_looked_at_one_by_one() -> None:
    doc = torch.tensor([[0] * 20 + [1] * 20 + [0] * 24])
    variant = weft.Attention(mask=masks.document(weft.tensor("doc", 2, int)), name="documents")
    sight = Sight(variant, Shape(1, 1, 1, 64, 64, 16, 16, "fp32"), 0, {"doc": doc})
    assert not sight.at_once and common(sight.keys((0, 16)), ((48, 64),)) == ((48, 64),)


def test_a_plan_of_the_same_numbers_is_made_once() -> None:
    packed: dict[str, Any] = {"ranks": 4, "length": 4096, "window": 64, **SIZES}
    starts = [0, 1000, 1000, 3000, 4096]
    one = plan(RECENT, cu_seqlens=starts, **packed)
    for same in (torch.tensor(starts), numpy.array(starts), [*map(numpy.int32, starts)]):
        assert plan(RECENT.replace(), cu_seqlens=same, **packed) is one
    assert plan(RECENT, cu_seqlens=starts, **{**packed, "window": 65}) is not one
    assert plan(RECENT, cu_seqlens=starts, **packed, balance="zigzag") is not one


def test_chosen_plans_leave_out_what_cannot_be_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks what travels where products alone take longer."""
    tried: set[tuple[str, str]] = set()
    travel = ShardPlan._travel

    def recorded(made: ShardPlan, rank: int) -> float:
        tried.add((made.strategy, made.balance))
        return travel(made, rank)

    monkeypatch.setattr(ShardPlan, "_travel", recorded)
    made = plan(CAUSAL, ranks=8, length=1 << 16, **SIZES)
    assert ("ring", "zigzag") in tried and ("ring", "contiguous") not in tried
    assert {name.split(",")[0] for name, _, _ in made.others} | {made.strategy} == {"exchange", "ring", "heads"}


def test_many_pieces_at_once_are_what_each_is() -> None:
    starts, rows = (0, 700, 700, 1500, 2048), [(0, 100), (650, 900), (0, 2048), (1500, 1501), (2000, 2048)]
    for variant, given in ((CAUSAL, {}), (RECENT, {"window": 70}), (weft.Attention(name="full"), {})):
        sizes = Shape(1, 4, 4, 2048, 2048, 16, 16, "fp32")
        at_once = PackedSight(variant, sizes, starts, given)
        for run, keys, pairs in zip(rows, at_once.keys_of(rows), at_once.pairs_of(rows)):
            assert keys == at_once.keys(run)
            assert abs(pairs - at_once.pairs(run)) <= 0.01 * pairs


def test_what_is_predicted_decides() -> None:
    local = plan(RECENT, ranks=16, length=1 << 19, window=4096, **SIZES)
    assert (local.strategy, local.balance) == ("exchange", "contiguous") and local.predicted.gain > 14
    assert plan(CAUSAL, ranks=16, length=1 << 19, heads=32, kv_heads=8, head_dim=128, device="h100").predicted.gain > 15
    slow = Links(per_host=1, in_host=1e9, between=1e9)
    made = plan(CAUSAL, ranks=8, length=4096, links=slow, **SIZES)
    assert made.predicted.bound == "links between hosts" and made.predicted.gain < 1


def test_keys_are_kept_where_they_take_little_memory_or_long_to_come() -> None:
    """Of 128k tokens with a head of keys for each of queries bringing them takes 1 % of a step."""
    long, short = 128 * 1024, 32 * 1024
    assert not plan(CAUSAL, ranks=2, length=long, strategy="exchange", **SIZES).keeps
    assert plan(CAUSAL, ranks=2, length=long, strategy="exchange", **{**SIZES, "heads": 32, "kv_heads": 8}).keeps
    assert plan(CAUSAL, ranks=2, length=short, strategy="exchange", **{**SIZES, "heads": 32}).keeps
    assert not plan(CAUSAL, ranks=2, length=short, strategy="ring", **SIZES).keeps
    assert plan(RECENT, ranks=2, length=long, window=64, **SIZES).keeps


def test_a_plan_says_what_it_does() -> None:
    text = plan(CAUSAL, ranks=32, length=1 << 17, strategy="ring", balance="zigzag", **SIZES).explain()
    for words in ("causal over 32 ranks, 8 a host, NVIDIA H100 SXM5", "131,072 queries, 131,072 keys; B 1 H 8 D 128",
                  "zigzag: 2 chunks of 2,048 queries a rank", "ring: every rank gets these keys from one rank after",
                  "0-2,047, 129,024-131,071", "and 16 more", "times one device, bound by"):  # fmt: skip
        assert words in text, text
    by_heads = plan(CAUSAL, ranks=8, length=1 << 17, strategy="heads", **SIZES).explain()
    assert "heads: every rank gets all rows of its share of the heads" in by_heads and "keys needed" not in by_heads


def test_heads_are_divided_among_neighbours() -> None:
    """Rows are those of the balance, whatever the strategy; ranks with the same heads have those of all neighbours."""
    sizes: dict[str, Any] = {**SIZES, "heads": 32, "kv_heads": 4, "length": 1 << 17}
    for balance in BALANCES:
        made = plan(CAUSAL, ranks=(4, 8), strategy="heads+ring", balance=balance, **sizes)
        flat = plan(CAUSAL, ranks=32, strategy="ring", balance=balance, **sizes)
        assert made.queries == flat.queries and made.pairs == flat.pairs
        few = made.of_some_heads
        assert (few.strategy, few.ranks, few.sizes.heads, few.sizes.kv_heads, few.group) == ("ring", 4, 4, 1, 8)
        for host in range(4):
            own = rows.joined(run for rank in range(8 * host, 8 * host + 8) for run in made.queries.rows(rank))
            assert few.queries.rows(host) == own and few.pairs[host] == sum(made.pairs[8 * host : 8 * host + 8])


def test_heads_are_divided_within_hosts_where_links_between_them_are_slow() -> None:
    sizes: dict[str, Any] = {**SIZES, "heads": 32, "kv_heads": 8, "length": 1 << 17}
    made = plan(CAUSAL, ranks=(4, 8), links=(links := Links(between=20e9)), **sizes)
    assert made.strategy in BOTH and made.predicted.gain > 26  # of 32, as two chunks are two calls
    assert {name.split(",")[0] for name, _, _ in made.others} == {"exchange", "ring", "heads", *BOTH} - {made.strategy}
    assert plan(CAUSAL, ranks=32, links=links, **sizes).predicted.gain < 24
    assert plan(RECENT, ranks=(4, 8), window=64, **sizes)
    inside, beyond, seconds = made._dealing
    assert beyond == 0 and seconds == pytest.approx(inside / made.links.in_host + 4 * MEETING)
    few = made.of_some_heads
    assert few.links.per_host == 1 and few.received_rows(0)[0] == 0
    alone = plan(CAUSAL, ranks=(1, 8), **sizes)  # of one dimension it is another strategy
    assert alone.strategy in ("exchange", "heads") and plan(CAUSAL, ranks=(4, 1), **sizes).strategy in (
        "exchange", "ring", "heads",
    )  # fmt: skip
    named = plan(CAUSAL, ranks=(2, 4), strategy="heads+ring", balance="zigzag", **sizes)
    text = named.explain()
    for words in ("causal over 8 ranks (2 x 4), 8 a host", "heads: every rank gets the rows of 4 neighbours, of its",
                  "\n           then ring: every rank gets these keys", "of 4 ranks together and a head",
                  "rank  queries", " 0-3  0-32,767, 98,304-131,071", " 4-7  32,768-98,303"):  # fmt: skip
        assert words in text, text
    assert named.told != plan(CAUSAL, ranks=(4, 2), strategy="heads+ring", balance="zigzag", **sizes).told


def test_positions_cancel_where_they_can() -> None:
    """Then the kernels are those of one device."""
    alibi = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
    for variant in (CAUSAL, RECENT, alibi):
        assert placed(variant) == variant
    far = placed(
        weft.Attention(score, (kv_pos // 64 <= q_pos // 64) & (weft.minimum(q_pos, kv_pos) * 2 > -kv_pos), name="x")
    )
    assert str(far.mask) == (
        "((kv_pos + first_key) // 64 <= (q_pos + first_key) // 64)"
        " & (minimum(q_pos, kv_pos) * 2 + 2 * first_key > -kv_pos + (-1) * first_key)"
    )
    own = weft.scalar("first_key", int)
    assert "first_key_" in str(placed(weft.Attention(score + own, kv_pos < own, name="taken")))


def test_a_superset_of_what_is_seen() -> None:
    sizes = Shape(1, 1, 1, 100, 100, 16, 16, "fp32")
    sight = Sight(RECENT, sizes, 0, {"window": 7})
    assert sight.keys((50, 60)) == ((44, 60),) and sight.queries((44, 50), (0, 100)) == (44, 56)
    assert sight.pairs((50, 60)) == 70 and sight.keys((5, 5)) == () and sight.stands_on == {"window"}


def test_deals() -> None:
    for length in (1, 5, 64, 1000):
        for ranks in (1, 2, 3, 8):
            for deal in (rows.contiguous(length, ranks), rows.zigzag(length, ranks), rows.striped(length, ranks)):
                held = [n for r in range(ranks) for a, b in deal.rows(r) for n in range(a, b)]
                assert sorted(held) == list(range(length)), deal
    assert rows.by_pairs(8, 2, [1, 2, 3, 10]) == Deal(8, 2, (0, 1, 1, 0), 2)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        (CAUSAL, {"ranks": 0}, r"plan: ranks: expected a positive int, or two of them, .*, got 0"),
        (
            CAUSAL,
            {"strategy": "tree"},
            r"strategy: expected one of auto, exchange, ring, gather, heads, heads\+exchange, .*, got 'tree'",
        ),
        (
            CAUSAL,
            {"nonsense": 3},
            r"causal: plan: nonsense: unknown operand or option; this variant's operands are: none",
        ),
        (CAUSAL, {"q_offset": 1.5}, r"q_offset: expected an int or None, got 1.5"),
        (CAUSAL, {"links": 3}, r"links: expected weft.distributed.Links or None, got 3"),
        (
            CAUSAL,
            {"cu_seqlens": [0, 3.7]},
            r"cu_seqlens: expected ints, the first row of each sequence and the end, got",
        ),
        (CAUSAL, {"cu_seqlens": "abc"}, r"cu_seqlens: expected ints, .*got 'abc'"),
        (CAUSAL, {"head_dim": 257}, r"head_dim: expected 1 to 256, got 257; wider heads are for latent attention"),
        (CAUSAL, {"value_dim": 300}, r"value_dim: expected 1 to 256, got 300"),
        (CAUSAL, {"cu_seqlens": {0: 5}}, r"cu_seqlens: expected ints, .*got \{0: 5\}"),
        (CAUSAL, {"cu_seqlens": 5}, r"cu_seqlens: expected ints, .*got 5"),
        ("causal", {}, r"plan: expected a weft.Attention, got str"),
        (CAUSAL, {"dtype": "e4m3"}, r"dtype: expected one of bf16, fp16, fp32, fp64, got 'e4m3'"),
        (CAUSAL, {"dtype": []}, r"dtype: expected one of bf16, fp16, fp32, fp64, got \[\]"),
        (CAUSAL, {"value_dim": 0}, r"value_dim: expected a positive int, got 0"),
        (CAUSAL, {"strategy": np.ones(2)}, r"strategy: expected one of auto, .*, got an ndarray"),
        (CAUSAL, {"balance": torch.ones(2)}, r"balance: expected one of auto, .*, got a tensor"),
        (CAUSAL, {"ranks": 10**30}, r"ranks: expected a positive int, .*, got 1000"),
        (CAUSAL, {"length": 10**30}, r"length: integer overflow: expected a length up to 2\*\*30"),
        (CAUSAL, {"q_offset": 10**30}, r"q_offset: integer overflow: expected a value within 31 bits"),
        (
            CAUSAL,
            {"cu_seqlens": torch.empty(2, device="meta", dtype=torch.int32)},
            r"cu_seqlens: expected ints, .*got a tensor",
        ),
        (CAUSAL, {"balance": 3}, r"balance: expected one of auto, contiguous, zigzag, striped, pairs, got 3"),
        (CAUSAL, {"kv_heads": 3}, r"heads: expected a multiple of kv_heads 3, got 8"),
        (
            CAUSAL,
            {"ranks": 3, "strategy": "heads"},
            r"strategy='heads': expected a number of heads that 3 ranks divide",
        ),
        (CAUSAL, {"ranks": (2, 2, 2)}, r"ranks: expected a positive int, or two of them, .*, got \(2, 2, 2\)"),
        (CAUSAL, {"strategy": "heads+ring"}, r"'heads\+ring': expected two dimensions: ranks=\(outer, inner\)"),
        (CAUSAL, {"ranks": (2, 3), "strategy": "heads+ring"}, r"a number of heads that 3 ranks divide, got 8"),
        (
            CAUSAL,
            {"ranks": (2, 4), "heads": 12, "kv_heads": 3, "strategy": "heads+ring"},
            r"key heads that divide 4 ranks, or the other way around, got 3",
        ),
        (RECENT, {"window": 5.5}, r"recent: plan: window: expected an int, got 5.5"),
        (
            RECENT,
            {"window": torch.tensor(5)},
            r"recent: plan: window: expected a Python number, got a tensor; pass window",
        ),
        (RECENT, {}, r"recent: plan: window: missing; pass window=\.\.\., which the mask reads"),
        (MLA, {"kv_heads": torch.ones(2)}, r"kv_heads: expected a positive int, got a tensor"),
        (MLA, {"kv_heads": 8}, r"kv_heads: expected 1, as a latent cache has, got 8"),
        (MLA, {"strategy": "heads"}, r"strategy='heads': expected a variant without latent="),
    ],
)
def test_what_is_refused(variant: weft.Attention, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        plan(variant, **{"ranks": 2, "length": 128, **SIZES, **changes})


def test_a_plan_is_data() -> None:
    made = plan(CAUSAL, ranks=1024, length=1 << 20, strategy="ring", balance="zigzag", **SIZES)
    assert isinstance(made, ShardPlan) and len(made.tasks) == 1024 and made.predicted.bound == "links between hosts"


@pytest.mark.parametrize(
    ("ranks", "balance", "starts"), [(4, "pairs", [0, 4, 8, 11, 17]), (2, "striped", [0, 35, 37, 38, 40])]
)
def test_keys_of_a_sequence_without_queries_may_come_first(ranks: int, balance: str, starts: list[int]) -> None:
    """Keys at hand are one run. Where no query sees the first of them, these are of a sequence before all queries."""
    thirds = weft.Attention(mask=masks.causal & (weft.kv_pos % 3 == 0), name="thirds")
    made = plan(thirds, ranks=ranks, length=starts[-1], strategy="ring", balance=balance, cu_seqlens=starts, **SIZES)
    parts, met = Portions(made), False
    for rank in range(ranks):
        for portion in (portion for step in parts.portions(rank) for portion in step):
            first = starts[bisect_right(starts, portion.queries[0]) - 1]
            met |= portion.keys[0] < first
            packed, _, _ = parts.packed(portion, torch.device("cpu"))
            assert packed.cu_q[0] == packed.cu_kv[0] == 0 and len(packed.cu_q) == len(packed.cu_kv), portion
    assert met


BY_DOCUMENT = weft.Attention(mask=masks.causal & masks.document(weft.tensor("doc", 2, int)), name="by_document")


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        (CAUSAL, {}), (CAUSAL, {"strategy": "ring"}), (CAUSAL, {"cu_seqlens": [0, 5, 5, 37]}),
        (CAUSAL, {"ranks": (2, 2)}), (BY_DOCUMENT, {"doc": torch.arange(37)[None] // 5}),
    ],
)  # fmt: skip
def test_a_plan_is_sent_to_other_processes(variant: weft.Attention, changes: dict[str, Any]) -> None:
    """Also once it was used, and has worked out what it had not before."""
    made = plan(variant, **{"ranks": 4, "length": 37, **SIZES, **changes})
    explained, portions = made.explain(), [made.portions(rank) for rank in range(made.ranks)]
    for found in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), copy.copy(made)):
        assert found.told == made.told and found.explain() == explained
        assert [found.portions(rank) for rank in range(made.ranks)] == portions


# -- predictions, beside numbers that are calculated by hand -----------------------------------------------------------
# A row of keys and values of 8 heads of 128 columns is 4096 bytes of bf16. NVLink brings 270 GB/s, a card 40 GB/s.
MEETING = 100e-6  # seconds of an exchange beside its bytes
BOTH = ("heads+ring", "heads+exchange")
GROUPED: dict[str, Any] = {**SIZES, "heads": 32, "kv_heads": 8}
FULL = weft.Attention(name="full")
PAIR = 2 * 32 * (128 + 128)  # operations of the products of a pair, of all heads


def seconds_of(pairs: float, made: ShardPlan) -> tuple[float, float]:
    """Of products, forward and backward: 0.8 and 0.65 of what long matrix products reach, five products for two."""
    rate = made.hardware.matrix_flops("bf16")
    return pairs * PAIR / (0.8 * rate), 2.5 * pairs * PAIR / (0.65 * rate)


def test_bytes_by_link() -> None:
    """64k tokens over 8, 64 and 1024 devices: 7 others in a host, the rest behind a card."""
    for ranks in (8, 64, 1024):
        rows = (1 << 16) // ranks
        for strategy in ("gather", "exchange", "ring"):
            found = plan(
                FULL, ranks=ranks, length=1 << 16, strategy=strategy, balance="contiguous", **GROUPED
            ).predicted
            assert (found.bytes_in_host, found.bytes_between) == (7 * rows * 4096, (ranks - 8) * rows * 4096)
    # of a window of 100 a rank lacks 99 keys; rank 8 has them from another host
    made = plan(RECENT, ranks=16, length=1 << 16, window=100, strategy="exchange", balance="contiguous", **GROUPED)
    assert made.received_rows(7) == (99, 0) and made.received_rows(8) == (0, 99) and made.received_rows(0) == (0, 0)
    # hosts that are larger than all ranks are one, and their size takes no time
    one = plan(RECENT, ranks=16, length=16384, window=100, balance="contiguous", strategy="ring",
               links=Links(per_host=10**12), **SIZES)  # fmt: skip
    assert one.received_rows(8) == (99, 0) and one._sources(8) == (1, 0) and one.predicted.bytes_between == 0
    # divided heads: 7 of 8 rows of 4 heads of queries and out, and 1 of keys and values, of 64k rows
    made = plan(FULL, ranks=8, length=1 << 16, strategy="heads", **GROUPED)
    moved = 7 * (1 << 13) * (4 * (128 + 128) + 1 * (128 + 128)) * 2
    assert (made.predicted.bytes_in_host, made.predicted.bytes_between) == (moved, 0)
    # of 32 ranks the same heads: each has 1 of queries, and 1 of keys that 4 of them share; 24 ranks are on other hosts
    made = plan(FULL, ranks=32, length=1 << 16, strategy="heads", **GROUPED)
    each = (1 << 11) * (1 * 256 + 1 * 256) * 2  # what a rank has from one other
    assert (made.predicted.bytes_in_host, made.predicted.bytes_between) == (7 * each, 24 * each)
    # both: heads within a host of 8, then keys of one head of 8 times as many rows from the 3 other hosts
    for strategy in ("heads+ring", "heads+exchange"):
        made = plan(FULL, ranks=(4, 8), length=1 << 16, strategy=strategy, balance="contiguous", **GROUPED)
        near = 7 * (1 << 11) * (4 * 256 + 256) * 2
        assert made.predicted.bytes_in_host == near
        assert made.predicted.bytes_between == 3 * (1 << 14) * 256 * 2


def test_seconds_of_each_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of 8, 32k tokens: travel is 7 and 8 shares of 2048 rows of 4096 bytes."""
    share = 2048 * 4096
    near, far = share / 270e9, share / 40e9
    travel = 7 * near + 8 * far + MEETING
    in_place = 2 * (1 << 15) * 4096 / by_name("h100").hbm_bytes_per_second  # keys of all, read and written
    sizes = {"ranks": 16, "length": 1 << 15, "balance": "contiguous", **GROUPED}
    made = plan(FULL, strategy="gather", **sizes)
    forward, backward = seconds_of((1 << 30) / 16, made)
    assert not made.keeps  # so a backward brings keys again
    assert made.predicted.forward == pytest.approx(travel + in_place + forward)
    assert made.predicted.backward == pytest.approx(2 * travel + in_place + backward)
    made = replace(plan(FULL, strategy="exchange", **sizes))
    made.__dict__.update(overlaps=True, keeps=False, _joining=lambda rank: (0.0, 0.0))
    assert made.predicted.forward == pytest.approx(max(forward / 16, travel) + forward * 15 / 16)
    assert made.predicted.backward == pytest.approx(travel + backward * 15 / 16 + max(backward / 16, travel))
    made = replace(made)
    made.__dict__.update(overlaps=False, keeps=True)
    assert made.predicted.backward == pytest.approx(backward + travel), "gradients alone travel"
    # a ring waits for each card while it computes one step; links of the host are hidden
    made = replace(plan(FULL, strategy="ring", **sizes))
    made.__dict__.update(_joining=lambda rank: (0.0, 0.0))
    each = replace(made).predicted.forward  # where each step meets, too
    monkeypatch.setattr(shardplan, "_MEETING", 0.0)
    assert each > made.predicted.forward + 8 * 0.9 * MEETING
    step, back = forward / 16, backward / 16
    assert near < step < far < back < 2 * far
    assert made.predicted.forward == pytest.approx(8 * step + 8 * far)
    # the first keys are waited for; 7 steps of the host, of which the last brings a card's; 8 of cards, both ways but
    # for the last, and the first of them whose gradients before are the host's; then its own
    steps = 6 * back + max(back, near + far) + max(back, far + near) + 6 * 2 * far + max(back, far)
    assert made.predicted.backward == pytest.approx(near + steps + max(back, far))


def test_seconds_where_heads_are_divided() -> None:
    sizes = {"ranks": (2, 8), "length": 1 << 16, "balance": "contiguous", **GROUPED}
    both = plan(FULL, strategy="heads+exchange", **sizes)
    few = replace(both.of_some_heads)
    forward, backward = seconds_of((1 << 32) / 16, both)
    dealt = 7 * 4096 * (4 * 256 + 256) * 2 / 270e9 + 4 * MEETING
    keys = (1 << 15) * 256 * 2 / 40e9 + MEETING  # of one head, from the other host
    in_place = 2 * (1 << 16) * 256 * 2 / by_name("h100").hbm_bytes_per_second
    assert few._travel(0) == pytest.approx(keys)
    few.__dict__.update(overlaps=False, keeps=True)
    both.__dict__["of_some_heads"] = few
    assert both.predicted.forward == pytest.approx(dealt + keys + in_place + forward)
    assert both.predicted.backward == pytest.approx(dealt + keys + backward)
    alone = plan(FULL, ranks=8, strategy="heads", length=1 << 16, **GROUPED)
    forward, backward = seconds_of((1 << 32) / 8, alone)
    assert alone.predicted.forward == pytest.approx(forward + 2 * dealt - 4 * MEETING)
    assert alone.predicted.backward == pytest.approx(backward + 2 * dealt - 4 * MEETING)
    ring = plan(FULL, strategy="heads+ring", **sizes)
    few = replace(ring.of_some_heads)
    few.__dict__.update(_joining=lambda rank: (0.0, 0.0))
    ring.__dict__["of_some_heads"] = few
    half = seconds_of((1 << 32) / 32, ring)
    assert ring.predicted.forward == pytest.approx(dealt + max(half[0], keys) + half[0])
    assert ring.predicted.backward == pytest.approx(dealt + keys + half[1] + max(half[1], keys))


def test_a_plan_of_the_same_tensors_is_made_once() -> None:
    """Until something is written to one, or the call is another."""
    doc = (torch.arange(512) // 100).contiguous()
    variant = weft.Attention(mask=masks.causal & masks.document(weft.tensor("doc", 1, int)), name="documents")
    sizes: dict[str, Any] = {"ranks": 2, "length": 512, **SIZES}
    one = plan(variant, doc=doc, **sizes)
    assert plan(variant, doc=doc, **sizes) is one and plan(variant, doc=doc.view(-1), **sizes) is one
    assert plan(variant, doc=doc, **{**sizes, "ranks": 4}) is not one
    assert plan(variant, doc=doc.clone(), **sizes) is not one
    doc[100:] += 7
    again = plan(variant, doc=doc, **sizes)
    assert again is not one and again.told == one.told, "the same documents by other ids"
    doc[50:] += 7
    assert plan(variant, doc=doc, **sizes).told != one.told
    with torch.inference_mode():
        of_inference = torch.arange(512) // 100
        assert plan(variant, doc=of_inference, **sizes) is not plan(variant, doc=of_inference, **sizes)
