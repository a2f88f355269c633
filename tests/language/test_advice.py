"""What messages and documents say to write is evaluated where it is hard: far out, near 0, at kinks, in every target.

A row that sees one key has the score as its log-sum-exp, so that kernels show values and slopes of any formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import kv_pos, q_pos, score
from weft.ir.foreign import FORMULAS, instead_of
from weft.ir.reference import evaluate

F = torch.nn.functional
TARGETS = pytest.mark.parametrize("target", ["cpu", "interpret"])
FAR = [0.0, 1e-6, 1e-3, 0.3, 0.5, 1.0, 2.5, 9.0, 17.0, 20.5, 88.0, 89.5, 104.5, 200.0, 1e4, 1e30]
X = [*FAR, *(-x for x in FAR[1:])]


def slopes_and_values(written: Any, target: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """A formula of `score` and its derivative at x [n], as kernels compute them."""
    if target == "interpret":
        pytest.importorskip("triton")
    variant = weft.Attention(written, scale=1.0, name="advice")
    query = torch.zeros(1, 1, len(x), 16)
    query[0, 0, :, 0] = x
    key = torch.zeros(1, 1, 1, 16)
    key[0, 0, 0, 0] = 1.0
    query.requires_grad_()
    out, lse = variant(query, key, torch.ones_like(key), target=target, return_lse=True, q_offset=0)
    assert bool((out[lse.isfinite()] == 1.0).all()), "one key has all of the weight"
    (slope,) = torch.autograd.grad(lse.sum(), query)
    return lse.detach().flatten().double(), slope[0, 0, :, 0].double()


def close(got: Tensor, wanted: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, wanted.double(), rtol=rtol, atol=atol, equal_nan=True)


@TARGETS
@pytest.mark.parametrize("name", ["softplus", "logsigmoid"])
def test_softplus_and_logsigmoid_far_out(name: str, target: str) -> None:
    """log(1 + exp(x)) is infinite from 89 on, and log(sigmoid(x)) -inf below -104."""
    x = torch.tensor(X, requires_grad=True)
    exact = {"softplus": lambda x: -F.logsigmoid(-x), "logsigmoid": F.logsigmoid}[name](x.double())
    (slope,) = torch.autograd.grad(exact.sum(), x)
    got = slopes_and_values(getattr(weft, name)(score), target, x.detach())
    close(got[0], exact.detach(), rtol=2e-6, atol=1e-37)  # what is small keeps its digits
    close(got[1], slope, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("name", ["softplus", "logsigmoid"])
def test_nothing_undoes_the_stable_form(name: str) -> None:
    """Simplified, scaled, differentiated and read back, it is the same function."""
    written = 2.0 * getattr(weft, name)(0.5 * score + 1.0) - 1.0
    variant = weft.Attention(written, scale=1.0, name="stable")
    assert f"{name}(0.5 * score + 1.0)" in str(variant) and weft.parse_attention(str(variant)) == variant
    assert f"{name}(" in variant.source(weft.shape(heads=1, q_len=9, head_dim=16, dtype="fp32"), target="cpu") or (
        "logsigmoid(" in variant.source(weft.shape(heads=1, q_len=9, head_dim=16, dtype="fp32"), target="cpu")
    )
    x = torch.tensor([-500.0, -210.0, 0.0, 210.0, 500.0])
    for target in ("cpu", "interpret"):
        exact = {"softplus": lambda x: -F.logsigmoid(-x), "logsigmoid": F.logsigmoid}[name]
        values, slopes = slopes_and_values(written, target, x)
        leaf = x.double().requires_grad_()
        wanted = 2.0 * exact(0.5 * leaf + 1.0) - 1.0
        close(values, wanted.detach())
        close(slopes, torch.autograd.grad(wanted.sum(), leaf)[0])


@pytest.mark.parametrize("name", ["softplus", "logsigmoid"])
def test_of_numbers(name: str) -> None:
    """Of what is one number for the call, too: a scalar, far out, and a constant."""
    far = weft.scalar("far")
    exact = {"softplus": lambda x: -F.logsigmoid(-x), "logsigmoid": F.logsigmoid}[name]
    variant = weft.Attention(score + getattr(weft, name)(far) + getattr(weft, name)(3.0), name="numbers")
    q = torch.zeros(1, 1, 3, 16)
    for value in (-1e30, -200.0, 0.0, 95.0, 1e30):
        wanted = exact(torch.tensor([value, 3.0], dtype=torch.float64)).sum()
        for target in ("cpu", "interpret"):
            _, lse = variant(q, q[:, :, :1], q[:, :, :1], far=value, target=target, return_lse=True, q_offset=0)
            close(lse.flatten().double(), wanted.expand(3))


# -- functions of others -----------------------------------------------------------------------------------------------
INSIDE = [x for x in X if abs(x) < 2**30]  # where floor gives an int
OTHERS: dict[str, tuple[Callable[..., Tensor], list[float]]] = {
    "clamp": (lambda x: x.clamp(-2.0, 3.0), X), "clip": (lambda x: x.clamp(-2.0, 3.0), X),
    "clamp_min": (lambda x: x.clamp(min=-2.0), X), "clamp_max": (lambda x: x.clamp(max=3.0), X),
    "relu": (torch.relu, X), "silu": (F.silu, X), "square": (torch.square, [x for x in X if abs(x) < 1e15]),
    "log1p": (torch.log1p, [x for x in X if x > -1.0]), "expm1": (torch.expm1, [x for x in X if x < 88.5]),
    "log10": (torch.log10, FAR[1:]), "reciprocal": (torch.reciprocal, [x for x in X if x]),
    "tan": (torch.tan, [x for x in X if abs(x) < 20]), "sinh": (torch.sinh, [x for x in X if abs(x) < 89.3]),
    "cosh": (torch.cosh, [x for x in X if abs(x) < 89.3]), "ceil": (torch.ceil, INSIDE), "trunc": (torch.trunc, INSIDE),
    "fix": (torch.fix, INSIDE), "int": (lambda x: x.long().double(), INSIDE), "long": (torch.trunc, INSIDE),
    "round": (lambda x: (x + 0.5).floor(), [*INSIDE, 0.49999997, 8388609.0, -8388609.0, 123456789.0]),
    "sign": (torch.sign, X), "masked_fill": (lambda x: x.masked_fill(x < 0.5, -7.0), X),
    "fmod": (lambda x: torch.fmod(x, 5), [float(n) for n in range(-12, 13)]),
}  # fmt: skip
AROUND = {"low": -2.0, "high": 3.0, "y": 5, "value": -7.0, "weft": weft}


def test_every_formula_is_tried_and_told() -> None:
    assert OTHERS.keys() == FORMULAS.keys()
    for name, formula in FORMULAS.items():
        assert instead_of(name).startswith(f"write {formula}"), name


@pytest.mark.parametrize("name", list(OTHERS))
def test_formulas_of_messages(name: str) -> None:
    """Against torch's own function in float64: of a float in kernels, of an int by the reference."""
    function, places = OTHERS[name]
    x = torch.tensor(places, dtype=torch.float32)
    wanted = function(x.double())
    if name == "fmod":  # of ints
        found = eval(FORMULAS[name], {**AROUND, "x": kv_pos})
        close(evaluate(found, {"kv_pos": x.long()}, torch.float32, torch.device("cpu")).double(), wanted)
        return
    written = 1.0 * eval(FORMULAS[name], {**AROUND, "x": score, "condition": score < 0.5})
    for target in ("cpu", "interpret"):
        values, slopes = slopes_and_values(written, target, x)
        close(values, wanted)
        assert not slopes.isnan().any()


def test_reversed_differences_keep_their_order() -> None:
    """torch.rsub(a, b) is b - a."""
    assert str(torch.rsub(torch.tensor(2.0), score)) == "score - 2.0"
    assert str(torch.sub(torch.tensor(2.0), score)) == "2.0 - score"
    with pytest.raises(weft.WeftError, match=r"weft.where\(x < 0, -\(-x % y\), x % y\) of ints"):
        torch.fmod(torch.tensor(-7), q_pos)


# -- formulas of documents, and of what they ship ----------------------------------------------------------------------
WRITTEN: dict[str, tuple[Any, Callable[[Tensor], Tensor], list[float]]] = {
    "softcap": (50.0 * weft.tanh(score / 50.0), lambda x: 50.0 * torch.tanh(x / 50.0), X),
    "x**0.5": (weft.sqrt(score), torch.sqrt, FAR),
    "x**-0.5": (weft.rsqrt(score), torch.rsqrt, FAR[1:]),
    "x**y": (weft.exp2(1.7 * weft.log2(score)), lambda x: x**1.7, [x for x in FAR if 0 < x < 1e15]),
    "guarded": (weft.log(weft.maximum(score, 1e-6)), lambda x: x.clamp(min=1e-6).log(), X),
    "where in place of c * a": (weft.where(score > 1.0, score, 0.0), lambda x: torch.where(x > 1.0, x, 0.0), X),
}


@TARGETS
@pytest.mark.parametrize("name", list(WRITTEN))
def test_formulas_of_documents(name: str, target: str) -> None:
    written, function, places = WRITTEN[name]
    x = torch.tensor(places, dtype=torch.float32)
    values, _ = slopes_and_values(written, target, x)
    close(values, function(x.double()), rtol=3e-5)


@pytest.mark.parametrize("bits", [0, 1, 5, -1, -8, 2**31 - 1, -(2**31) + 1])
def test_bits_by_division(bits: int) -> None:
    """`x // 2` for `x >> 1`, and `x % 2, x // 2 % 2, ...` for its bits, of negative ints too."""
    env = {"kv_pos": torch.tensor([bits])}
    of = lambda e: int(evaluate(e, env, torch.float32, torch.device("cpu")))  # noqa: E731
    assert of(kv_pos // 2) == bits >> 1 and of(kv_pos // 4) == bits >> 2
    assert [of(kv_pos // 2**n % 2) for n in range(6)] == [bits >> n & 1 for n in range(6)]


@TARGETS
def test_a_sink_that_is_none_for_some_heads(target: str) -> None:
    """`weft.where(c, 0.0, -math.inf)`, as the message says."""
    variant = weft.Attention(sink=weft.where(weft.head < 1, 0.0, -math.inf), name="some_sinks")
    q = torch.zeros(1, 2, 1, 16)
    _, lse = variant(q, q, q, return_lse=True, target=target)
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(2.0), 0.0]))


READY = {
    "softcap": weft.scores.softcap(50.0), "log_n": weft.scores.log_n(2048),
    "ssmax": weft.scores.ssmax(0.4), "yarn": weft.scores.yarn(4.0),
    "llama4": weft.scores.llama4_temperature(),
}  # fmt: skip


@pytest.mark.parametrize("name", list(READY))
def test_ready_scores_far_out(name: str) -> None:
    """From the first position to the last that a call may have, as in float64."""
    env: dict[str, Any] = {"q_pos": torch.tensor([0, 1, 2047, 8191, 2**20, 2**30 - 1]), "kv_pos": 0}
    for x in (-1e30, -1.0, 0.0, 1e30):
        env["score"] = torch.tensor(x)
        got, exact = (
            evaluate(READY[name](score), env, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float64)
        )
        close(got.double(), exact)
        assert bool(got.isfinite().all())
