"""What is proven about a score: whether it is linear in q.k, and what it reads for each pair."""

from __future__ import annotations

import pytest

from tests import fresh
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import TorchWork, Traits, Work
from weft.ir.attention import Attention
from weft.ir.expr import Expr, scalar, symbol, tensor
from weft.ir.functions import exp, sqrt, tanh, where

SCORE, HEAD, BATCH = symbol("score"), symbol("head"), symbol("batch")
Q_POS, KV_POS = symbol("q_pos"), symbol("kv_pos")
PER_HEAD, BIAS, FACTOR = tensor("t", 1), tensor("bias", 4), scalar("factor", float)
PAIR = BIAS[BATCH, HEAD, Q_POS, KV_POS]
ONE = {"scale": 1.0}  # so that factors are those that are written


def linear(score: Expr, **options: object) -> str | None:
    """The factor of q.k as text; None where the score is not linear in it."""
    found = facts_of(Attention(score, **options)).linear_scale  # type: ignore[arg-type]
    return None if found is None else str(found)


# -- scores linear in q.k ----------------------------------------------------------------------------------------------
LINEAR = [  # score, its factor at scale 1, whether that may be negative or 0
    (SCORE, "1.0", False),
    (2.0 * SCORE, "2.0", False),
    (SCORE / 2.0, "1.0 / 2.0", False),
    (SCORE * PER_HEAD[HEAD], "t[head]", True),
    (SCORE + SCORE, "2.0", False),
    (-SCORE, "-1.0", True),
    (SCORE * 0.0, "0.0", True),
    (SCORE * FACTOR, "factor", True),
    (SCORE * exp(FACTOR), "exp(factor)", True),
    (3.0 * SCORE - SCORE, "2.0", False),
    (SCORE - 2.0 * SCORE, "-1.0", True),
]


@pytest.mark.parametrize(("score", "factor", "sign_unknown"), LINEAR, ids=[str(score) for score, _, _ in LINEAR])
def test_linear_scores(score: Expr, factor: str, sign_unknown: bool) -> None:
    assert linear(score, **ONE) == factor
    facts = facts_of(Attention(score, **ONE))  # type: ignore[arg-type]
    assert facts.scale_sign_unknown == sign_unknown and facts.traits.linear


def test_the_scale_is_part_of_the_factor() -> None:
    assert linear(SCORE) == "rsqrt(head_dim)"
    assert not facts_of(Attention()).scale_sign_unknown
    assert linear(2.0 * SCORE) is not None and not facts_of(Attention(2.0 * SCORE)).scale_sign_unknown
    assert linear(SCORE + SCORE) is not None and not facts_of(Attention(SCORE + SCORE)).scale_sign_unknown
    assert linear(SCORE, scale=PER_HEAD[HEAD]) == "t[head]"
    assert facts_of(Attention(scale=PER_HEAD[HEAD])).scale_sign_unknown
    assert facts_of(Attention(-SCORE)).scale_sign_unknown


@pytest.mark.parametrize(
    "score",
    [
        tanh(SCORE), 30.0 * tanh(SCORE / 30.0), SCORE + PER_HEAD[HEAD], SCORE + PAIR, SCORE + 1.0, SCORE * KV_POS,
        SCORE * PER_HEAD[KV_POS], SCORE * SCORE, 1.0 / SCORE, where(Q_POS < 3, SCORE, 2.0 * SCORE),
        SCORE * PER_HEAD[Q_POS], SCORE + KV_POS, SCORE * SCORE / 2.0 + SCORE,
    ],
    ids=str,
)  # fmt: skip
def test_scores_that_are_not_linear(score: Expr) -> None:
    facts = facts_of(Attention(score))
    assert facts.linear_scale is None and not facts.scale_sign_unknown and not facts.traits.linear


def test_products_are_seen_to_be_linear_without_sympy() -> None:
    code = (
        "import sys; from weft.ir.attention import Attention; from weft.ir.expr import symbol, tensor; "
        "from weft.compiler.analysis.tiles.facts import facts_of; "
        "SCORE, HEAD, T = symbol('score'), symbol('head'), tensor('t', 1); before = 'sympy' in sys.modules; "
        "found = [facts_of(Attention(s)) for s in (2.0 * SCORE, SCORE / 2.0, SCORE * T[HEAD])]; "
        "print(*(f.linear_scale is not None for f in found), *(f.scale_sign_unknown for f in found)); "
        "print(before, 'sympy' in sys.modules)"
    )
    ran = fresh.run(code, check=True)
    assert ran.stdout.split() == ["True"] * 3 + ["False", "False", "True"] + ["False"] * 2


# -- what is read for each pair ----------------------------------------------------------------------------------------
SEEN, IDS = tensor("seen", 2, bool), tensor("ids", 2, int)


@pytest.mark.parametrize(
    ("attention", "size"),
    [
        (Attention(), 0),
        (Attention(SCORE + PER_HEAD[HEAD] * KV_POS), 0),
        (Attention(SCORE + PER_HEAD[KV_POS]), 0),
        (Attention(SCORE + PER_HEAD[Q_POS - KV_POS]), 4),
        (Attention(SCORE + PAIR), 4),
        (Attention(SCORE + PAIR * PAIR), 4),  # the same read once
        (Attention(SCORE + PAIR + BIAS[0, HEAD, Q_POS, KV_POS]), 8),
        (Attention(mask=SEEN[Q_POS, KV_POS]), 1),
        (Attention(mask=IDS[Q_POS, KV_POS] > 0), 8),
        (Attention(SCORE + PAIR, SEEN[Q_POS, KV_POS]), 5),
        (Attention(mask=IDS[BATCH, Q_POS] == IDS[BATCH, KV_POS]), 0),  # a read for each position, none for each pair
    ],
    ids=lambda value: str(value).splitlines()[-1] if isinstance(value, Attention) else None,
)
def test_bytes_that_are_read_for_each_pair(attention: Attention, size: int) -> None:
    assert facts_of(attention).traits.pair_bytes == size


def test_traits_of_variants() -> None:
    assert facts_of(Attention()).traits == Traits(linear=True, masked=False)
    causal = facts_of(Attention(mask=KV_POS <= Q_POS)).traits
    compared = TorchWork(shared=(("compare", 1),))
    assert causal == Traits(linear=True, masked=True, mask_work=Work(other=1), mask_torch=compared)
    biased = facts_of(Attention(SCORE + PAIR)).traits
    assert biased == Traits(
        linear=False, adds=True, masked=False, operand_gradients=1, positional=True, pair_bytes=4, far=True,
        score_work=Work(other=biased.score_work.other, reads=1), score_torch=biased.score_torch,
    )  # fmt: skip


# -- derivatives that may be infinite ----------------------------------------------------------------------------------
SLOPES = [  # score, whether its slope is finite at any values of tensors and scalars
    (SCORE, True),
    (SCORE * FACTOR, True),  # linear: no score is -inf alone
    (SCORE + PAIR, True),
    (SCORE + PER_HEAD[HEAD] * (KV_POS - Q_POS), True),
    (30.0 * tanh(SCORE / 30.0), True),
    (SCORE * KV_POS / symbol("kv_len"), True),
    (SCORE / (1.0 + Q_POS), False),  # q_offset may be negative
    (where(PAIR > 0.0, SCORE, 0.05), True),
    (tanh(exp(tanh(SCORE))), True),  # an exponential of what is bounded
    (FACTOR * tanh(SCORE / FACTOR), False),
    (30.0 * tanh((SCORE + PAIR) / 30.0), False),  # NaN
    (PAIR * where(KV_POS < 4, SCORE, 0.05), False),
    (SCORE * PAIR, False),
    (SCORE / (KV_POS - Q_POS), False),
    (exp(SCORE), False),
    (sqrt(abs(SCORE)), False),
    (SCORE * SCORE * 1e30, False),  # beyond float32
]


@pytest.mark.parametrize(("score", "finite"), SLOPES, ids=[str(score) for score, _ in SLOPES])
def test_slopes_that_are_finite(score: Expr, finite: bool) -> None:
    assert facts_of(Attention(score)).slope_is_finite() == finite


# -- masks -------------------------------------------------------------------------------------------------------------
WINDOW, TABLE = scalar("window", int), tensor("table", 1, int)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (True, True),
        (KV_POS <= Q_POS, True),
        (Q_POS >= KV_POS, True),
        (KV_POS < Q_POS + 1, True),
        (~(KV_POS > Q_POS), True),
        ((KV_POS <= Q_POS) | (KV_POS < WINDOW), True),
        (KV_POS - Q_POS < 3, True),
        (KV_POS < Q_POS, False),
        (KV_POS <= Q_POS - 1, False),
        (KV_POS >= Q_POS, False),
        ((KV_POS <= Q_POS) & (Q_POS - KV_POS < WINDOW), False),
        ((KV_POS <= Q_POS) & (TABLE[Q_POS] == TABLE[KV_POS]), False),
        (KV_POS < WINDOW, False),
    ],
    ids=str,
)
def test_whether_all_queries_see_the_first_key(mask: Expr, seen: bool) -> None:
    """Only where it is certain: a query that does not would be waited for (templates/hopper/README.md)."""
    assert facts_of(Attention(mask=mask)).first_key_is_seen == seen
