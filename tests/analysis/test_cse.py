"""Straight-line form: nothing is computed twice, and the value stays the same."""

import doctest

import pytest
import torch

from weft.compiler.analysis.values import cse
from weft.compiler.analysis.values.cse import shared
from weft.ir.expr import scalar, tensor
from weft.ir.parse import parse
from weft.ir.reference import evaluate
from weft.ir.walk import nodes

OPERANDS = {"slopes": tensor("slopes", 1), "t0": scalar("t0", float), "w": scalar("w", float)}


def lines(*texts):
    assignments, results = shared([parse(t, OPERANDS) for t in texts])
    return [*(f"{name} = {value}" for name, value in assignments), *(str(r) for r in results)]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["score * 2.0"], ["score * 2.0"]),
        (["score + w", "score - w"], ["score + w", "score - w"]),
        (["tanh(score) * tanh(score)"], ["t0 = tanh(score)", "t0 * t0"]),
        (["exp(tanh(score))", "exp(tanh(score)) + 1.0"], ["t0 = exp(tanh(score))", "t0", "t0 + 1.0"]),
        (["exp(tanh(score))", "exp(tanh(score)) + tanh(score)"],
         ["t0 = tanh(score)", "t1 = exp(t0)", "t1", "t1 + t0"]),
        (["slopes[head] + slopes[head]"], ["t0 = slopes[head]", "t0 + t0"]),
        (["slopes[head // 2] + head // 2"], ["t0 = head // 2", "slopes[t0] + t0"]),
        (["t0 + exp(score) * exp(score)"], ["t1 = exp(score)", "t0 + t1 * t1"]),
        (["where(q_pos < 3, score, 0.0)", "where(q_pos < 3, 1.0, 0.0)"],
         ["t0 = q_pos < 3", "where(t0, score, 0.0)", "where(t0, 1.0, 0.0)"]),
    ],
)  # fmt: skip
def test_text(texts, expected):
    assert lines(*texts) == expected


def test_every_operator_occurs_once_and_values_stay():
    texts = ["tanh(score * w) + slopes[head] * (score * w)", "1.0 - tanh(score * w) * tanh(score * w)"]
    exprs = [parse(t, OPERANDS) for t in texts]
    assignments, results = shared(exprs)
    everything = [value for _, value in assignments] + results
    operators = [n.text for e in everything for n in nodes(e) if hasattr(n, "op")]
    assert len(operators) == len(set(operators))
    env = {"score": 0.75, "w": 1.25, "slopes": torch.tensor([0.5, 0.25], dtype=torch.float64), "head": 1}

    def value(expr):
        return evaluate(expr, env, torch.float64, torch.device("cpu"))

    before = [value(e) for e in exprs]
    for name, assigned in assignments:
        env[name] = value(assigned)
    assert [value(e) for e in results] == before


def test_doctests():
    assert doctest.testmod(cse).failed == 0
