"""A slice of the fuzzer (tests/fuzz): random declarations and calls against a definition that shares nothing with Weft.

A failure prints a script that repeats it; `python -m tests.fuzz --only <seed> --target <target>` draws it again.
"""

from random import Random

import pytest
import torch

from tests.fuzz.calls import build
from tests.fuzz.declare import draw_variant
from tests.fuzz.dense import FP32, Environment, Undefined, evaluate
from tests.fuzz.invoke import draw_call
from tests.fuzz.judge import Verdict, actual, judge, start
from tests.fuzz.run import Plan, variant_calls
from tests.fuzz.script import script
from tests.fuzz.tree import Num, Op, Scalar, Sym, text

CPU = [f"suite.{n}" for n in range(110)]  # a variant each, of eight calls
INTERPRET = [f"suite.{n}" for n in range(10)]  # of two calls: the interpreter is slow


def check(seed: str, target: str) -> None:
    for event in variant_calls(seed, target, Plan()):
        assert event.failure is None, f"\n{event.failure.script}"
        assert event.kind != "declaration raised", event.message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", CPU)
def test_cpu(seed):
    check(seed, "cpu")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", INTERPRET)
def test_interpret(seed):
    check(seed, "interpret")


def environment(**scalars):
    positions = {"q_pos": torch.arange(4), "kv_pos": torch.arange(4)}
    return Environment(positions, None, scalars, {}, 4, torch.float64, FP32)


def test_text_of_expressions():
    tree = Op("mul", (Op("sub", (Sym("q_pos"), Num(-3)), "int"), Op("tanh", (Scalar("x", "float"),), "float")), "float")
    assert text(tree) == "(q_pos - (-3)) * weft.tanh(x)"


def test_ints_round_down():
    found = evaluate(Op("floordiv", (Op("sub", (Sym("q_pos"), Num(2)), "int"), Num(2)), "int"), environment())
    assert found.value.tolist() == [-1, -1, 0, 0]


def test_where_evaluates_what_is_taken():
    log = Op("log", (Op("mul", (Num(1.0), Sym("q_pos")), "float"),), "float")
    tree = Op("where", (Op("lt", (Num(0), Sym("q_pos")), "bool"), log, Num(7.0)), "float")
    assert evaluate(tree, environment()).value[:2].tolist() == [7.0, 0.0]


def test_comparisons_near_a_tie_are_no_calls_to_judge_by():
    third = Op("div", (Scalar("x", "float"), Num(3.0)), "float")
    with pytest.raises(Undefined, match="near a tie"):
        evaluate(Op("lt", (Op("mul", (third, Num(3.0)), "float"), Scalar("x", "float")), "bool"), environment(x=0.7))


@pytest.mark.parametrize("seed", range(6))
def test_scripts_repeat_the_call(seed, capsys):
    built = next(b for n in range(99) if (b := first_call(f"script.{seed}.{n}")) is not None)
    found = actual(built, *start(built))
    name, result = list(found.items())[-1]
    at = (0,) * result.dim()
    exec(script(built, Verdict("wrong", place=(name, at, 0.5, 0.0))), {})
    assert capsys.readouterr().out == f"{name}{list(at)}: got {result[at].item()} expected 0.5\n"


def first_call(seed):
    """A call that Weft computes, or None."""
    random = Random(seed)
    variant = draw_variant(random)
    try:
        built = build(variant, draw_call(random, variant, "cpu"))
        return built if judge(built).kind == "right" and built.call.pairs else None
    except Undefined:
        return None
