"""Plans over ranks, by numbers alone: every visible pair is computed once, ranks are balanced, and words say so."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.planning.records import Shape
from weft.distributed import Links, ShardPlan, plan, rows
from weft.distributed.placed import placed
from weft.distributed.portions import Portions
from weft.distributed.rows import Deal, common, count
from weft.distributed.seen import Sight
from weft.ir.reference import dense_mask, positions

from .on_ranks import BALANCES, variants

window, slopes = weft.scalar("window", int), weft.tensor("slopes", 1)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="recent")
SIZES: dict[str, Any] = {"heads": 8, "head_dim": 128, "device": "h100"}


def seen(variant: weft.Attention, length: int, kv_length: int, q_offset: int, operands: dict[str, Any]) -> Tensor:
    """Which pairs any head of any batch row sees, [L, T]."""
    own = positions(2, 4, 2, length, kv_length, q_offset, torch.device("cpu"))
    values = {**own, **operands, "q_len": length, "kv_len": kv_length, "head_dim": 16, "q_offset": q_offset}
    return dense_mask(variant, values, (2, 4, length, kv_length), torch.float32, torch.device("cpu")).any(0).any(0)


def test_examples_of_rows() -> None:
    assert doctest.testmod(rows).attempted == 6 and doctest.testmod(rows).failed == 0


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


def test_only_what_is_seen_is_received() -> None:
    made = plan(RECENT, ranks=8, length=8192, window=100, balance="contiguous", strategy="exchange", **SIZES)
    assert [count(made.needed(r)) for r in range(8)] == [1024, *[1024 + 99] * 7]
    assert made._received(3) == (99, 0) and not made.overlaps  # so few are waited for
    wide = plan(RECENT, ranks=8, length=8192, window=8000, balance="contiguous", strategy="exchange", **SIZES)
    assert count(wide.needed(7)) == 8192
    far = plan(CAUSAL, ranks=4, length=4096, strategy="ring", balance="zigzag", links=Links(per_host=2), **SIZES)
    assert far._received(0) == (1024, 2048) and [len(far.steps(r)) for r in range(4)] == [4] * 4


def test_balance_follows_visible_pairs() -> None:
    """Of causal masks half of a zigzag's rows see much; documents of uneven lengths are dealt by their pairs."""
    made = plan(CAUSAL, ranks=8, length=1 << 17, balance="zigzag", strategy="exchange", **SIZES)
    assert max(made.pairs) / min(made.pairs) < 1.0001 and sum(made.pairs) == (1 << 17) * ((1 << 17) + 1) // 2
    assert made.predicted.gain > 7.2
    uneven = plan(CAUSAL, ranks=8, length=1 << 17, balance="contiguous", strategy="exchange", **SIZES)
    assert max(uneven.pairs) > 14 * min(uneven.pairs) and uneven.predicted.gain < 4.5
    ends = torch.tensor([3_750, 4_125, 4_250, 7_500, 8_192])
    doc = torch.bucketize(torch.arange(8_192), ends, right=True)[None]
    documents = weft.Attention(mask=masks.causal & masks.document(weft.tensor("doc", 2, int)), name="documents")
    by_pairs = plan(documents, ranks=4, length=8_192, balance="pairs", strategy="exchange", doc=doc, **SIZES)
    assert max(by_pairs.pairs) < 1.2 * sum(by_pairs.pairs) / 4
    assert list(by_pairs.looked_at) == ["doc"]


def test_what_is_predicted_decides() -> None:
    local = plan(RECENT, ranks=16, length=1 << 19, window=4096, **SIZES)
    assert (local.strategy, local.balance) == ("exchange", "contiguous") and local.predicted.gain > 14
    assert plan(CAUSAL, ranks=16, length=1 << 19, heads=32, kv_heads=8, head_dim=128, device="h100").predicted.gain > 15
    slow = Links(per_host=1, in_host=1e9, between=1e9)
    made = plan(CAUSAL, ranks=8, length=4096, links=slow, **SIZES)
    assert made.predicted.bound == "links between hosts" and made.predicted.gain < 1


def test_a_plan_says_what_it_does() -> None:
    text = plan(CAUSAL, ranks=32, length=1 << 17, strategy="ring", balance="zigzag", **SIZES).explain()
    for words in ("causal over 32 ranks, 8 a host, NVIDIA H100 SXM5", "131,072 queries, 131,072 keys; B 1 H 8 D 128",
                  "zigzag: 2 chunks of 2,048 queries a rank", "ring: every rank gets these keys from one rank after",
                  "0-2,047, 129,024-131,071", "and 16 more", "times one device, bound by"):  # fmt: skip
        assert words in text, text
    by_heads = plan(CAUSAL, ranks=8, length=1 << 17, strategy="heads", **SIZES).explain()
    assert "heads: every rank gets all rows of its share of the heads" in by_heads and "keys needed" not in by_heads


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
        (CAUSAL, {"ranks": 0}, r"plan: ranks: expected a positive int, got 0"),
        (CAUSAL, {"strategy": "tree"}, r"strategy: expected one of auto, exchange, ring, gather, heads, got 'tree'"),
        (CAUSAL, {"balance": 3}, r"balance: expected one of auto, contiguous, zigzag, striped, pairs, got 3"),
        (CAUSAL, {"kv_heads": 3}, r"heads: expected a multiple of kv_heads 3, got 8"),
        (
            CAUSAL,
            {"ranks": 3, "strategy": "heads"},
            r"strategy='heads': expected a number of heads that 3 ranks divide",
        ),
        (RECENT, {}, r"recent: plan: window: missing; pass window=\.\.\., which the mask reads"),
        (CAUSAL.replace(dropout=0.1), {}, r"causal: dropout is not divided over ranks by sequence"),
        (weft.Attention(mask=masks.causal, latent=weft.Latent(32, 8), name="mla"), {}, r"mla: latent attention is not"),
    ],
)
def test_what_is_refused(variant: weft.Attention, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        plan(variant, **{"ranks": 2, "length": 128, **SIZES, **changes})


def test_a_plan_is_data() -> None:
    made = plan(CAUSAL, ranks=1024, length=1 << 20, strategy="ring", balance="zigzag", **SIZES)
    assert isinstance(made, ShardPlan) and len(made.tasks) == 1024 and made.predicted.bound == "links between hosts"
