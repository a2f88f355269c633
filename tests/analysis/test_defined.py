"""Which scores have a value at rows that are not there, and which factors in a sequence without rows."""

from __future__ import annotations

import math
import random

import pytest
import torch

import weft
from weft import exp, head, kv_len, kv_pos, log, q_len, q_pos, rsqrt, score, sqrt
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.values import defined, floats
from weft.compiler.analysis.values.defined import is_below_inf, is_below_inf_at_last, is_number
from weft.ir.expr import Expr
from weft.ir.operators import OPERATORS
from weft.ir.reference import _torch_function

slopes, bias, rate = weft.tensor("slopes", 1), weft.tensor("bias", 4), weft.scalar("rate", float)
AWAY = q_pos - kv_pos
SCORES: list[tuple[Expr, bool]] = [
    (score, True),
    (score + slopes[head] * AWAY, True),
    (score + bias[weft.batch, head, q_pos, kv_pos], True),
    (50.0 * weft.tanh(score / 50.0), True),
    (score - slopes[head] * log(1.0 + abs(AWAY)), True),
    (score * exp(-0.01 * abs(AWAY)), True),
    (weft.where(AWAY < 9, score, -math.inf), True),
    (score - 3.4e38, True),
    (score + log(1.0 * weft.maximum(AWAY + 1, 0)), True),  # -inf weighs 0
    (score * sqrt(abs(score)), True),
    (score / (slopes[head] * slopes[head] + 1.0), True),
    (weft.minimum(score, exp(score)), True),
    (score / abs(slopes[head]), True),  # one number for a head, of which all of its rows know
    (score + log(1.0 * (kv_len - q_pos)), False),
    (score * rsqrt(1.0 * (kv_len - q_pos)), False),
    (score / (kv_len - q_pos), False),
    (score - log(1.0 * weft.maximum(AWAY + 1, 0)), False),  # inf
    (slopes[head] * log(1.0 * weft.maximum(AWAY + 1, 0)) + score, False),
    (score + exp(0.1 * q_pos), False),
    (5.0 * weft.tanh(score / slopes[head]), False),  # 0 / 0 where q.k is 0, as it is of no row
    (-0.5 * log(abs(score)), False),
    (score + weft.sin(exp(score)), False),
]


@pytest.mark.parametrize(("given", "known"), SCORES, ids=[str(s) for s, _ in SCORES])
def test_scores_that_have_a_value_everywhere(given: Expr, known: bool) -> None:
    assert (facts_of(weft.Attention(given)).behind_rows() == "numbers") == known


AT_LAST: list[tuple[Expr, bool]] = [
    (score + log(1.0 * (kv_len - q_pos)), True),
    (score * rsqrt(1.0 * (kv_len - q_pos)), True),
    (score / (kv_len - q_pos), True),
    (weft.where(q_pos < 9, score * exp(0.1 * q_pos), 0.5 * score), True),
    (5.0 * weft.tanh(score) * log(1.0 * (kv_len - q_pos)), True),
    (5.0 * weft.tanh(score * log(1.0 * (kv_len - q_pos)) / 5.0), False),  # a row may have the score of an infinity
    (5.0 * weft.tanh(score / slopes[head]), False),
    (weft.where(score < 0, score, score / (kv_len - q_pos)), False),
    (-0.5 * log(abs(score)) + log(1.0 * (kv_len - q_pos)), False),
    (score * (1.0 / (score * log(1.0 * q_pos))), False),
    (log(score * log(1.0 * q_pos) * (score * rsqrt(1.0 * q_pos))), False),
]


@pytest.mark.parametrize(("given", "known"), AT_LAST, ids=[str(s) for s, _ in AT_LAST])
def test_scores_that_have_a_value_at_the_last_row(given: Expr, known: bool) -> None:
    """If that row has one. Where q.k is not, it need have none, as of a row that does not exist it is 0."""
    folded = weft.Attention(given).canonical.folded_score
    assert not is_below_inf(folded) and is_below_inf_at_last(folded) == known


FACTORS: list[tuple[Expr, bool]] = [
    (score * 0.3, True),
    (score * slopes[head], True),
    (score / slopes[head], True),  # of any length
    (score * (1.0 + 0.002 * q_len), True),
    (score * log(1.0 + kv_len), True),
    (score * log(1.0 * kv_len), False),
    (score * rsqrt(1.0 * q_len), False),
    (score * (slopes[head] / q_len), False),
]


@pytest.mark.parametrize(("given", "known"), FACTORS, ids=[str(s) for s, _ in FACTORS])
def test_factors_of_sequences_without_rows(given: Expr, known: bool) -> None:
    assert facts_of(weft.Attention(given)).factor_is_defined() == known


def test_tables_go_on_behind_the_last_distance() -> None:
    table = weft.tensor("table", 1)
    facts = facts_of(weft.Attention(score + 0.5 * table[weft.minimum(abs(AWAY), 30)]))
    assert facts.behind_rows() == "numbers" and facts.score_by_distance
    assert facts.behind_rows(facts.score_by_distance) == "anything"


def test_somebodys_own_operator_may_give_anything() -> None:
    assert floats.applied("of_somebody", [floats.Interval(0.0, 1.0)], lambda found, *_: found) is None


# -- against numbers ---------------------------------------------------------------------------------------------------
FLOATS = (-math.inf, -3e38, -7.5, -1.0, -0.25, -1e-30, 0.0, 1e-30, 0.3, 1.0, 2.0, 60.0, 3e38, math.inf)
OPS = [n for n, op in OPERATORS.items() if op.gives in ("float", "same") and n != "where"]


def number_of(op: str, *operands: float) -> float:
    """As torch has it in 32 bits."""
    function = _torch_function(OPERATORS[op].torch)
    return float(function(*(torch.tensor(x, dtype=torch.float32) for x in operands)))


@pytest.mark.parametrize("op", OPS)
def test_intervals_hold_every_number(op: str) -> None:
    drawn = random.Random(op)
    for _ in range(2000):
        ends = [sorted(drawn.choices(FLOATS, k=2)) for _ in range(OPERATORS[op].arity)]
        found = floats.applied(op, [floats.Interval(*e) for e in ends], defined._as_float32)
        if found is None:
            continue
        found = defined._as_float32(found)
        operands = [drawn.choice([x for x in FLOATS if low <= x <= high]) for low, high in ends]
        value = number_of(op, *operands)
        room = 1e-6 * abs(value) + 1e-37 if math.isfinite(value) else 0.0
        assert found.low - room <= value <= found.high + room, (op, operands, ends, found)


def test_lengths_are_0_in_factors_alone() -> None:
    assert is_below_inf(rsqrt(1.0 * kv_len)) and not is_number(rsqrt(1.0 * kv_len)) and is_number(1.0 + rate)
