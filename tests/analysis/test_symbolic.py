"""The symbolic border against numbers: values stay, derivatives are autograd's, and the text is what we mean."""

import doctest
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.compiler.analysis.values import symbolic
from weft.compiler.analysis.values.symbolic import _Border, derivative, simplify
from weft.ir.attention import Attention
from weft.ir.errors import InternalError
from weft.ir.expr import call, expression, scalar, symbol, tensor
from weft.ir.parse import parse
from weft.ir.reference import evaluate
from weft.ir.walk import loads, substitute

SLOPES, BIAS, TABLE, DOC = tensor("slopes", 1), tensor("bias", 2), tensor("table", 1), tensor("doc", 1, int)
CAP, WINDOW = scalar("cap", float), scalar("window", int)
OPERANDS = {"slopes": SLOPES, "bias": BIAS, "table": TABLE, "doc": DOC, "cap": CAP, "window": WINDOW}
QK = symbol("qk")


def read(text):
    """An expression of the language in which `score` means the raw dot product."""
    return substitute(parse(text, OPERANDS), {"score": QK})


# -- golden texts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("score", "simple", "slope"),
    [
        ("score", "qk * rsqrt(head_dim)", "rsqrt(head_dim)"),
        ("50.0 * tanh(score / 50.0)", "50.0 * tanh(0.02 * rsqrt(head_dim) * qk)",
         "(1.0 - tanh(0.02 * rsqrt(head_dim) * qk) * tanh(0.02 * rsqrt(head_dim) * qk)) * rsqrt(head_dim)"),
        ("score + slopes[head] * (kv_pos - q_pos)", "(kv_pos - q_pos) * slopes[head] + qk * rsqrt(head_dim)",
         "rsqrt(head_dim)"),
        ("score + bias[head, q_pos - kv_pos]", "bias[head, q_pos - kv_pos] + qk * rsqrt(head_dim)", "rsqrt(head_dim)"),
        ("score / slopes[head]", "qk * (rsqrt(head_dim) / slopes[head])", "rsqrt(head_dim) / slopes[head]"),
        ("sigmoid(score)", "sigmoid(qk * rsqrt(head_dim))",
         "(1.0 - sigmoid(qk * rsqrt(head_dim))) * rsqrt(head_dim) * sigmoid(qk * rsqrt(head_dim))"),
        ("minimum(score, 30.0)", "minimum(30.0, qk * rsqrt(head_dim))",
         "where(30.0 < qk * rsqrt(head_dim), 0.0, "
         "where(30.0 == qk * rsqrt(head_dim), 0.5 * rsqrt(head_dim), rsqrt(head_dim)))"),
        ("where(kv_pos < q_pos, score, -inf)", "where(kv_pos < q_pos, qk * rsqrt(head_dim), -inf)",
         "where(kv_pos < q_pos, rsqrt(head_dim), 0.0)"),
    ],
)  # fmt: skip
def test_common_scores(score, simple, slope):
    attention = Attention(score=parse(score, OPERANDS))
    assert str(simplify(attention.canonical.folded_score)) == simple
    assert str(derivative(attention.canonical.folded_score, QK)) == slope


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("score * score", "qk * qk"),
        ("score * score * score * score", "qk * qk * (qk * qk)"),
        ("1.0 / score / score", "1.0 / (qk * qk)"),
        ("score * 2 - score", "qk"),
        ("-(score * 2.0)", "(-2.0) * qk"),
        ("rsqrt(score) * 3.0", "3.0 * rsqrt(qk)"),
        ("exp(score) * exp(-score)", "exp(-qk) * exp(qk)"),
        ("tanh(-score)", "tanh(-qk)"),
        ("score / 0.0", "1.0 / 0.0 * qk"),
        ("1.0 * kv_pos", "1.0 * kv_pos"),
        ("1.0 * kv_pos * q_pos", "1.0 * kv_pos * q_pos"),
        ("kv_pos / 3", "kv_pos / 3"),
        ("floor(q_pos / 49) + 0", "floor(q_pos / 49)"),
        ("floor(1.0 * q_pos / 49.0) + 0", "floor(1.0 * q_pos / 49.0)"),
        ("where(1.0 * q_pos / 7.0 < 2.0, 1.0, 0.0) + 0.0", "where(1.0 * q_pos / 7.0 < 2.0, 1.0, 0.0)"),
        ("floor(q_pos)", "q_pos"),
        ("(q_pos - kv_pos) * 2 + kv_pos * 2", "2 * q_pos"),
        ("(q_pos // 4) * 4 + q_pos % 4", "4 * (q_pos // 4) + q_pos % 4"),
        ("(0 - 7) // 2 + (0 - 7) % 2", "-3"),
        ("q_pos // 1 + q_pos % 1", "q_pos"),
        ("q_pos // 0", "q_pos // 0"),
        ("(q_pos - q_pos < 1) & (kv_pos <= q_pos + 0)", "kv_pos <= q_pos"),
        ("where(q_pos - q_pos == 0, kv_pos, q_pos)", "kv_pos"),
        ("doc[q_pos + 0] == doc[kv_pos * 1]", "doc[kv_pos] == doc[q_pos]"),
        ("maximum(score, score)", "qk"),
        ("score - inf", "qk - inf"),
    ],
)
def test_simplify_text(text, simple):
    assert str(simplify(read(text))) == simple


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("abs(score)", "where(0.0 < qk, 1.0, where(qk < 0.0, -1.0, 0.0))"),
        ("maximum(score, 0.0)", "where(qk < 0.0, 0.0, where(0.0 == qk, 0.5, 1.0))"),
        ("exp(score)", "exp(qk)"),
        ("exp2(score)", "0.6931471805599453 * exp2(qk)"),
        ("log(score)", "1.0 / qk"),
        ("log2(score)", "1.4426950408889634 / qk"),
        ("sqrt(score)", "0.5 / sqrt(qk)"),
        ("rsqrt(score)", "(-0.5) * (rsqrt(qk) * (rsqrt(qk) * rsqrt(qk)))"),
        ("sin(score)", "cos(qk)"),
        ("cos(score)", "-sin(qk)"),
        ("floor(score) * 1.0", "0.0"),
        ("where(score < 1.0, score, 0.0)", "where(qk < 1.0, 1.0, 0.0)"),
        ("q_pos + kv_pos", "0.0"),
    ],
)
def test_derivative_text(text, slope):
    assert str(derivative(read(text), QK)) == slope


def test_derivative_of_reads():
    score = read("score + slopes[head] * (kv_pos - q_pos) + slopes[0] * slopes[head + 0]")
    assert str(derivative(score, SLOPES[symbol("head")])) == "kv_pos - q_pos + slopes[0]"
    assert str(derivative(score, SLOPES[expression(0)])) == "slopes[head]"
    assert str(derivative(score, SLOPES[expression(1)])) == "0.0"


def test_derivative_refuses_ints():
    with pytest.raises(InternalError, match="expected a float symbol or a read of a float tensor, got `q_pos`"):
        derivative(read("score"), symbol("q_pos"))


def test_unknown_head_is_named():
    import sympy

    with pytest.raises(InternalError, match="sympy gave back gamma, which the language lacks"):
        _Border().leave(sympy.gamma(sympy.Symbol("x")), "float")


# -- random expressions -----------------------------------------------------------------------------------------------
# Values are multiples of 1/4, so that ties occur and everything but smooth functions is exact. Kinks and jumps only
# take exact operands: a rounding error before a jump is no error of the rewriting.
def leaf_ints():
    return st.one_of(
        st.integers(-3, 5).map(expression),
        st.sampled_from([symbol("q_pos"), symbol("kv_pos"), symbol("head"), WINDOW, DOC[symbol("kv_pos")]]),
    )


def binary(names, operands):
    return st.builds(call, st.sampled_from(names), operands, operands)


def extend_ints(ints):
    positive = st.one_of(st.integers(1, 5).map(expression), st.just(WINDOW))
    return st.one_of(
        binary(["add", "sub", "mul", "minimum", "maximum"], ints),
        st.builds(call, st.sampled_from(["floordiv", "mod"]), ints, positive),
        st.builds(call, st.sampled_from(["neg", "abs"]), ints),
    )


INTS = st.recursive(leaf_ints(), extend_ints, max_leaves=4)


def conditions(exact):
    compare = ["lt", "le", "gt", "ge", "eq", "ne"]
    simple = st.one_of(binary(compare, INTS), binary(compare, exact))
    return st.one_of(simple, binary(["and", "or", "xor"], simple), st.builds(call, st.just("not"), simple))


def leaf_floats():
    positions = [SLOPES[symbol("head")], BIAS[symbol("head"), call("abs", symbol("q_pos") - symbol("kv_pos"))]]
    return st.one_of(
        st.integers(-8, 8).map(lambda n: expression(n / 4)), st.sampled_from([QK, QK, CAP, *positions]), INTS
    )


def extend_exact(floats):
    def kinks(inner):
        return st.one_of(
            binary(["minimum", "maximum"], inner),
            st.builds(call, st.just("abs"), inner),
            st.builds(call, st.just("where"), conditions(inner), inner, inner),
        )

    halves = st.builds(lambda x, c: x / c, floats, st.sampled_from([2.0, 4, -0.5]))
    return st.one_of(
        binary(["add", "sub", "mul"], floats), halves, kinks(floats), st.builds(call, st.just("neg"), floats)
    )


EXACT = st.recursive(leaf_floats(), extend_exact, max_leaves=6)


def extend_smooth(floats):
    positive = floats.map(lambda x: 1.0 + x * x)
    return st.one_of(
        binary(["add", "sub", "mul"], floats),
        st.builds(call, st.sampled_from(["tanh", "sigmoid", "sin", "cos", "neg"]), floats),
        floats.map(lambda x: call("exp", call("tanh", x))),
        floats.map(lambda x: call("exp2", call("sin", x))),
        st.builds(call, st.sampled_from(["log", "log2", "sqrt", "rsqrt"]), positive),
        st.builds(call, st.just("div"), floats, positive),
        st.builds(lambda x, c: x / c, floats, st.sampled_from([3.0, 50.0, 7])),
    )


SMOOTH = st.recursive(EXACT, extend_smooth, max_leaves=5)
QUICK = settings(max_examples=150, deadline=None)


def environment():
    """12 quadruples of values; ties and zeros among them."""
    grid = torch.tensor([-2.0, -0.75, -0.25, 0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 1.25, 2.0, 3.5], dtype=torch.float64)
    return {
        "qk": grid.clone().requires_grad_(),
        "slopes": torch.tensor([0.25, -1.0, 0.0], dtype=torch.float64, requires_grad=True),
        "bias": (torch.arange(36, dtype=torch.float64).view(3, 12) % 7 / 4 - 0.5).requires_grad_(),
        "cap": 1.25, "window": 2, "doc": torch.arange(12) // 3,
        "q_pos": torch.arange(12), "kv_pos": torch.arange(12) * 5 % 11, "head": torch.arange(12) % 3,
    }  # fmt: skip


def value_of(expr, env):
    return evaluate(expr, env, torch.float64, torch.device("cpu")).expand(12)


def assert_same(got, wanted):
    assume(bool((wanted.abs() < 1e6).all()))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-7)


@QUICK
@given(SMOOTH)
def test_simplify_keeps_values(expr):
    env = environment()
    simple = simplify(expr)
    assert simple.dtype == expr.dtype
    assert_same(value_of(simple, env).detach(), value_of(expr, env).detach())


@QUICK
@given(INTS)
def test_simplify_keeps_ints(expr):
    assert simplify(expr).dtype == "int"
    assert torch.equal(value_of(simplify(expr), environment()), value_of(expr, environment()))


@QUICK
@given(conditions(EXACT))
def test_simplify_keeps_conditions(expr):
    assert simplify(expr).dtype == "bool"
    assert torch.equal(value_of(simplify(expr), environment()), value_of(expr, environment()))


@settings(max_examples=80, deadline=None)
@given(SMOOTH)
def test_simplify_twice_is_once(expr):
    assert simplify(simplify(expr)).text == simplify(expr).text


def test_a_number_beside_a_sum_in_a_product_is_written_one_way():
    cap = scalar("cap", float)
    once = simplify(call("tanh", symbol("qk") * (0.25 + cap) / 3.0))
    assert once.text == simplify(once).text == "tanh((0.25 + cap) * 0.3333333333333333 * qk)"
    assert simplify((0.25 + cap) * 0.5).text == "0.125 + 0.5 * cap"


def autograd(expr, env, name):
    """d expr[i] / d leaf[j] summed over i, as torch has it."""
    if expr.dtype != "float":
        return torch.zeros_like(env[name])
    value = value_of(expr, env)
    if not value.requires_grad:
        return torch.zeros_like(env[name])
    (grad,) = torch.autograd.grad(value.sum(), env[name], allow_unused=True)
    return torch.zeros_like(env[name]) if grad is None else grad


@QUICK
@given(SMOOTH)
def test_derivative_is_autograd(expr):
    env = environment()
    assert_same(value_of(derivative(expr, QK), env).detach(), autograd(expr, env, "qk"))


@QUICK
@given(SMOOTH)
def test_derivative_of_reads_is_autograd(expr):
    env = environment()
    grads = {"slopes": torch.zeros(3, dtype=torch.float64), "bias": torch.zeros(3, 12, dtype=torch.float64)}
    for load in loads(expr):
        if load.dtype == "float":
            places = torch.broadcast_tensors(*(value_of(i, env) for i in load.index))
            slope = value_of(derivative(expr, load), env).detach()
            grads[load.tensor.name].index_put_(places, slope, accumulate=True)
    for name, got in grads.items():
        assert_same(got, autograd(expr, env, name))


KINKS = ["abs(score)", "minimum(score, 1.0)", "maximum(1.0, score)", "minimum(score, score * score)",
         "abs(minimum(score, -score))", "where(score <= 0.0, score * 3.0, score * 5.0)"]  # fmt: skip


@pytest.mark.parametrize("text", KINKS)
def test_ties_are_shared_as_torch_does(text):
    env = environment()
    torch.testing.assert_close(value_of(derivative(read(text), QK), env).detach(), autograd(read(text), env, "qk"))


def test_softcap_derivative_shares_its_tanh():
    score = read("cap * tanh(score / cap)")
    inner = "tanh(1.0 / cap * qk)"
    assert inner in str(simplify(score)) and inner in str(derivative(score, QK))


def test_infinity_survives():
    masked = simplify(read("where(kv_pos < q_pos, score, -inf)"))
    assert value_of(masked, environment()).min().item() == -math.inf


def test_doctests():
    assert doctest.testmod(symbolic).failed == 0
