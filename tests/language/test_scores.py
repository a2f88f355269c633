"""The library of scores: values against numpy, text, and refusals."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import numpy as np
import pytest

import weft
from weft import scores
from weft.compiler.analysis.values.ranges import check_integers
from weft.ir.expr import Expr

from ..analysis.tiling import evaluate

score = weft.score
q, k = np.arange(7)[:, None], np.arange(9)[None, :]
raw = np.sin(np.arange(63.0)).reshape(7, 9) * 4


def value(expression: Expr, **operands: object) -> np.ndarray:
    return evaluate(expression, {"score": raw, "q_pos": q, "kv_pos": k, "head": 1, **operands})


def test_softcap_stays_within_its_cap() -> None:
    found = value(scores.softcap(2.0)(score))
    np.testing.assert_allclose(found, 2 * np.tanh(raw / 2))
    assert np.abs(found).max() < 2


def test_alibi_adds_a_slope_times_the_distance() -> None:
    slopes = np.array([0.5, 0.25])
    found = value(scores.alibi(weft.tensor("slopes", 1))(score), slopes=slopes)
    np.testing.assert_allclose(found, raw + 0.25 * (k - q))


def test_relative_bias_reads_clamped_distances() -> None:
    table = np.arange(14.0).reshape(2, 7)
    biased = scores.relative_bias(weft.tensor("table", 2), 3)(score)
    np.testing.assert_allclose(value(biased, table=table), raw + table[1][np.clip(k - q, -3, 3) + 3])


def test_relative_bias_is_proven_to_stay_in_its_table() -> None:
    biased = scores.relative_bias(weft.tensor("table", 2), 3)(score)
    env = {"q_pos": (0, 100_000), "kv_pos": (0, 100_000), "head": (0, 1)}
    assert check_integers(biased, env, {"table": (2, 7)}) == []
    (problem,) = check_integers(biased, env, {"table": (2, 6)})
    assert "ranges from 0 to 6" in problem


def test_forget_gates_are_those_between_key_and_query() -> None:
    gates = np.log(1 / (1 + np.exp(-np.cos(np.arange(36.0)).reshape(2, 2, 9))))
    found = value(scores.forgetting(weft.tensor("decay", 3))(score), decay=gates.cumsum(-1), batch=1)
    for i in range(7):
        for j in range(i + 1):
            assert math.isclose(found[i, j], raw[i, j] + gates[1, 1, j + 1 : i + 1].sum(), abs_tol=1e-9)


def test_temperature_divides_and_may_be_a_read() -> None:
    np.testing.assert_allclose(value(scores.temperature(2)(score)), raw / 2)
    by_head = weft.tensor("t", 1)
    np.testing.assert_allclose(value(scores.temperature(by_head[weft.head])(score), t=np.array([1.0, 4.0])), raw / 4)


def test_log_n_sharpens_beyond_the_length_of_training() -> None:
    factor = np.maximum(np.log(q + 1.0) / np.log(4), 1.0)
    np.testing.assert_allclose(value(scores.log_n(4)(score)), raw * factor)
    assert factor[3] == 1.0 < factor[4]


def test_scalable_softmax_grows_with_the_keys_that_a_query_sees() -> None:
    found = value(scores.ssmax(weft.tensor("s", 1)[weft.head])(score), s=np.array([0.4, 0.7]))
    np.testing.assert_allclose(found, raw * 0.7 * np.log(q + 1.0))


def test_yarn_has_the_square_of_the_factor_of_both_sides() -> None:
    np.testing.assert_allclose(value(scores.yarn(16)(score)), raw * (0.1 * np.log(16) + 1) ** 2)


def test_the_temperature_of_llama_4() -> None:
    found = value(scores.llama4_temperature(3, 0.25)(score))
    np.testing.assert_allclose(found, raw * (np.log(np.floor((q + 1) / 3) + 1) * 0.25 + 1))


def test_scores_compose_innermost_first() -> None:
    slopes = weft.tensor("slopes", 1)
    composed = scores.compose(scores.softcap(30.0), scores.alibi(slopes))(score)
    assert str(composed) == str(scores.alibi(slopes)(scores.softcap(30.0)(score)))
    assert str(composed) == "30.0 * tanh(score / 30.0) + slopes[head] * (kv_pos - q_pos)"
    assert weft.Attention(score=composed, name="composed").canonical.tensors[0].name == "slopes"
    assert str(scores.compose()(score)) == "score"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scores.softcap(0.0), "scores.softcap: expected cap to be above 0 and finite, got 0.0"),
        (lambda: scores.log_n(0), "scores.log_n: expected train_length to be above 0 and finite, got 0"),
        (lambda: scores.log_n(1), "scores.log_n: expected train_length to be above 1, got 1"),
        (lambda: scores.softcap(math.inf), "scores.softcap: expected cap to be above 0 and finite, got inf"),
        (lambda: scores.yarn(0.5), "scores.yarn: expected factor to be at least 1, as contexts become longer, got 0.5"),
        (lambda: scores.yarn(-2.0), "scores.yarn: expected factor to be above 0 and finite, got -2.0"),
        (lambda: scores.temperature(-1.0), "scores.temperature: expected value to be above 0 and finite, got -1.0"),
        (lambda: scores.alibi(weft.tensor("slopes", 2)), "scores.alibi: expected slopes to have rank 1"),
        (lambda: scores.relative_bias(weft.tensor("t", 1), 4), "scores.relative_bias: expected t to have rank 2"),
        (lambda: scores.relative_bias(weft.tensor("t", 2), 0), "expected max_distance to be at least 1, got 0"),
        (lambda: scores.relative_bias(weft.tensor("t", 2), 1.5), "expected max_distance"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_written(make: Callable[[], object], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        make()


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(scores)
    assert found.attempted >= 5
    assert found.failed == 0
