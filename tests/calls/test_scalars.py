"""Numbers of calls at the ends of their types: what floats and ints of kernels do not hold is refused on every way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft import kv_pos, q_pos, score

sf, n = weft.scalar("sf", float), weft.scalar("n", int)
X = torch.randn(1, 1, 4, 16)
SCALED = weft.Attention(score * sf, kv_pos <= q_pos, name="scaled")
COUNTED = weft.Attention(score + 1e-9 * (kv_pos * n), kv_pos <= q_pos, name="counted")
TARGETS = pytest.mark.parametrize("target", ["cpu", "interpret"])
LENS = torch.tensor([3], dtype=torch.int32)


def backward(v: weft.Attention, **given: Any) -> None:
    q = X.clone().requires_grad_()
    v(q, X, X, **given).sum().backward()


def compiled(call: Callable[[], Any]) -> None:
    torch.compiler.reset()
    torch.compile(call, fullgraph=True, backend="eager")()


WAYS: dict[str, Callable[..., Any]] = {
    "dense": lambda v, **given: v(X, X, X, **given),
    "backward": backward,
    "lengths": lambda v, **given: v(X, X, X, q_lens=LENS, kv_lens=LENS, **given),
    "packed": lambda v, **given: v(X, X, X, cu_seqlens_q=torch.tensor([0, 1, 4]), **given),
    "long": lambda v, **given: v(*[torch.randn(1, 1, 300, 16)] * 3, **given),
    "compiled": lambda v, **given: compiled(lambda: v(X, X, X, **given)),
    "plan": lambda v, **given: v.plan(X, X, X, **given),
}
EVERY = pytest.mark.parametrize("way", list(WAYS))


@EVERY
@TARGETS
@pytest.mark.parametrize("value", [1e39, -1e39, 10**39, -(10**400), 1e308])
def test_a_float_beyond_float32_is_refused(way: str, target: str, value: float) -> None:
    """The second call, too, which finds all prepared."""
    if way == "compiled" and isinstance(value, int):
        pytest.skip("torch refuses ints of more than 64 bits in its own words")
    WAYS[way](SCALED, sf=2.0, target=target)
    for _ in range(2):
        with pytest.raises(Exception, match="sf: float overflow: expected a number that (32|64) bits hold") as caught:
            WAYS[way](SCALED, sf=value, target=target)
        assert isinstance(caught.value, weft.WeftError) or "WeftError" in str(caught.value) or way == "compiled"


@EVERY
def test_nan_is_no_number(way: str) -> None:
    with pytest.raises(weft.WeftError, match="sf: expected a number, got NaN"):
        WAYS[way](SCALED, sf=math.nan, target="cpu")


@EVERY
@TARGETS
@pytest.mark.parametrize("value", [2**31, -(2**31), 10**39])
def test_an_int_beyond_32_bits_is_refused(way: str, target: str, value: int) -> None:
    if way == "compiled" and abs(value) > 2**63:
        pytest.skip("torch refuses ints of more than 64 bits in its own words")
    with pytest.raises(Exception, match="n: integer overflow: expected a value within 32 bits"):
        WAYS[way](COUNTED, n=value, target=target)


def test_the_definition_refuses_the_same() -> None:
    for value, words in ((1e39, "float overflow"), (math.nan, "got NaN"), (10**400, "float overflow")):
        with pytest.raises(weft.WeftError, match=f"sf: .*{words}"):
            SCALED.reference(X, X, X, sf=value)
    with pytest.raises(weft.WeftError, match="n: integer overflow"):
        COUNTED.reference(X, X, X, n=2**31)


def test_float64_has_more() -> None:
    q = X.double()
    far = weft.Attention(weft.maximum(score, -sf), kv_pos <= q_pos, name="far")
    assert torch.equal(far(q, q, q, sf=1e39), far(q, q, q, sf=1e30))
    with pytest.raises(weft.WeftError, match="sf: float overflow"):
        far(X, X, X, sf=1e39)


@TARGETS
@pytest.mark.parametrize("value", [1e30, -1e30, 1e-45, -1e-46, math.inf, -math.inf, 0.0])
def test_the_ends_of_float32_are_computed_as_torch_computes_them(target: str, value: float) -> None:
    """Where products are far from the ends, so that all ways of rounding agree."""
    x = torch.tensor([1.0, 2.0, -1.0, 3.0]).view(1, 1, 4, 1).expand(1, 1, 4, 16) / 4
    v = weft.Attention(score * sf, scale=1.0, name="ends")
    got = v(x, x, x, sf=value, target=target)
    scores = (x.double() @ x.double().mT).float() * torch.tensor(value, dtype=torch.float32)
    seen = (scores != -math.inf).any(-1, keepdim=True)  # a row of -inf alone gives 0
    want = torch.where(seen, torch.softmax(scores, -1) @ x, 0.0)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-6)


@TARGETS
@pytest.mark.parametrize("value", [3.4028234e38, -3.4028234e38, 3e38, -2.4e38])
def test_the_largest_numbers_are_computed_with(target: str, value: float) -> None:
    assert SCALED(X, X, X, sf=value, target=target).shape == X.shape


@TARGETS
@pytest.mark.parametrize("length", [4, 300])
def test_numbers_that_overflow_together_are_infinite(target: str, length: int) -> None:
    x = torch.rand(1, 1, length, 16) + 0.1
    for factor in (sf * sf, -(sf * sf), 3e38 * sf, -3e38 * sf):
        v = weft.Attention(score * factor, kv_pos <= q_pos, name="together")
        got = v(x, x, x, sf=1e30, target=target)
        assert bool(got.isnan().any() or (got == 0).all())
