"""weft.bucket against T5's formula, in the precision of kernels and of the definition; tensors without dimensions."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from torch import Tensor

import weft
from weft import buckets, kv_pos, q_pos, score
from weft.compiler.analysis.values.ranges import check_integers
from weft.ir.reference import evaluate


def of_t5(distance: Tensor, number: int, most: int, bidirectional: bool) -> Tensor:
    """As written in T5: relative position -> bucket, with logarithms that are exact where they hit an int."""
    found = torch.zeros_like(distance)
    if bidirectional:
        number //= 2
        found = torch.where(distance > 0, number, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = number // 2
    far = (distance.double() / exact).log() / math.log(most / exact) * (number - exact)
    far = exact + (far + 1e-9).long()
    return found + torch.where(distance < exact, distance, far.clamp(max=number - 1))


SIZES = [
    (32, 128, True), (32, 128, False), (64, 1000, False), (8, 20, True), (4, 8, False), (16, 9, False), (2, 3, False),
    (320, 800, True), (256, 100_000, False), (34, 128, True), (7, 50, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("number", "most", "bidirectional"), SIZES)
def test_buckets_are_those_of_t5(number: int, most: int, bidirectional: bool, dtype: torch.dtype) -> None:
    distance = torch.arange(-1500, 1501)
    expression = weft.bucket(kv_pos - q_pos, number, most, bidirectional)
    env = {"kv_pos": distance, "q_pos": torch.tensor(0)}
    found = evaluate(expression, env, dtype, torch.device("cpu"))
    assert torch.equal(found, of_t5(distance, number, most, bidirectional))


@pytest.mark.parametrize(("number", "most", "bidirectional"), SIZES[:2] + SIZES[7:9])
def test_buckets_are_proven_to_lie_in_a_table(number: int, most: int, bidirectional: bool) -> None:
    table = weft.tensor("table", 1)
    read = table[weft.bucket(kv_pos - q_pos, number, most, bidirectional)]
    env = {"q_pos": (-5, 100_000), "kv_pos": (0, 100_000)}
    assert check_integers(read, env, {"table": (number,)}) == []
    assert check_integers(read, env, {"table": (number - 1,)}) != []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distance": score}, "expected an int distance such as kv_pos - q_pos, got float"),
        ({"buckets": 5}, "expected buckets to be an even number of at least 4, got 5"),
        ({"buckets": 2}, "expected buckets to be an even number of at least 4, got 2"),
        ({"buckets": 1, "bidirectional": False}, "expected buckets to be at least 2, got 1"),
        ({"buckets": 32.0}, "expected buckets to be an int, got 32.0"),
        ({"max_distance": 8}, "expected max_distance above 8, the distances in buckets of one, got 8"),
    ],
)
def test_what_are_no_buckets(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        weft.bucket(**{"distance": kv_pos - q_pos, **arguments})  # type: ignore[arg-type]


def test_examples_of_the_docs() -> None:
    assert doctest.testmod(buckets).failed == 0


# -- tensors without dimensions ----------------------------------------------------------------------------------------
one = weft.tensor("one", 0)


def test_a_tensor_without_dimensions_is_a_number() -> None:
    for bare, read in (
        (score * one, score * one[()]), (one - 1, one[()] - 1), (2.0 / one, 2.0 / one[()]), (-one, -one[()]),
        (one < 2.0, one[()] < 2.0), (one == 2.0, one[()] == 2.0), (one != 2.0, one[()] != 2.0),
        (weft.exp(one), weft.exp(one[()])), (weft.minimum(one, score), weft.minimum(one[()], score)),
    ):  # fmt: skip
        assert str(bare) == str(read) and "one[()]" in str(bare)
    assert one == weft.tensor("one", 0) and one != weft.tensor("one", 1)


def test_it_reads_back() -> None:
    attention = weft.Attention(score / one, kv_pos <= q_pos, sink=one, name="warm")
    assert str(attention).startswith('one = weft.tensor("one", 0, float)\n')
    assert weft.parse_attention(str(attention)) == attention
    assert weft.parse_attention(attention.canonical.text) == attention
    assert str(weft.parse("one * 2.0", {"one": one})) == "one[()] * 2.0"


def test_others_still_want_an_index() -> None:
    table = weft.tensor("table", 1)
    for wrong in (lambda: table * 2, lambda: -table, lambda: table < 1, lambda: score + table, lambda: table == 3):
        with pytest.raises(weft.WeftError, match=r"table is a tensor: index it, e.g. table\[head\]"):
            wrong()
    with pytest.raises(weft.WeftError, match="one: expected 0 indices, got 1"):
        one[q_pos]
    with pytest.raises(weft.WeftError, match="expected a rank from 0 to 4, got 5"):
        weft.tensor("wide", 5)


def test_a_scalar_that_is_given_as_a_tensor_says_how_to_declare_it() -> None:
    scaled = weft.Attention(score * weft.scalar("rate"), name="scaled")
    query = torch.randn(1, 1, 4, 8)
    with pytest.raises(
        weft.WeftError, match=r'rate = weft.tensor\("rate", 0, float\), read as rate and given as rate='
    ):
        scaled(query, query, query, rate=torch.tensor(2.0, requires_grad=True))
    with pytest.raises(weft.WeftError, match=r"given as rate=rate.reshape\(\(\)\)"):
        scaled(query, query, query, rate=torch.tensor([2.0]))
