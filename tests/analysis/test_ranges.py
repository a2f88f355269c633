"""Value ranges at call time: sound on random expressions, tight on the cases that users write, clear when refused."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft import head, kv_len, kv_pos, masks, q_pos, score
from weft.compiler.analysis.values.ranges import check_integers, range_of
from weft.ir.expr import Expr, call, expression
from weft.ir.operators import LARGEST_FLOOR

from .tiling import evaluate

n, size = weft.scalar("n", int), weft.scalar("size", int)
ids = weft.tensor("ids", 1, int)
table = weft.tensor("table", 1)
stretch = weft.scalar("stretch", float)
KEPT = weft.floor(table[head])
LENGTH = 100
RELATIVE = weft.maximum(q_pos - kv_pos, 0)
T5_BUCKET = weft.where(  # of T5 (Raffel 2020, section 2.1): half of the buckets exact, half of them on a log scale
    RELATIVE < 16, RELATIVE, weft.minimum(16 + weft.floor(weft.log(RELATIVE / 16) / math.log(8.0) * 16), 31)
)
ENV = {"q_pos": (0, 99), "kv_pos": (0, 99), "head": (0, 7), "n": (10, 10), "size": (3, 3), "kv_len": (100, 100)}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (q_pos - kv_pos, (-99, 99)),
        (q_pos - kv_pos + n, (-89, 109)),
        (q_pos + 1 - q_pos, (1, 1)),  # positions cancel
        (2 * (q_pos - kv_pos) - q_pos, (-198, 99)),
        (weft.minimum(weft.maximum(q_pos - kv_pos, -4), 4) + 4, (0, 8)),
        (abs(q_pos - kv_pos), (0, 99)),
        (abs(q_pos + 5), (5, 104)),
        (q_pos // size, (0, 33)),
        (-q_pos // 7, (-15, 0)),
        (q_pos % 8, (0, 7)),
        (q_pos % 200, (0, 99)),
        ((q_pos + 100) % 300, (100, 199)),
        ((q_pos - 50) % 8, (0, 7)),
        (q_pos % -8, (-7, 0)),
        (kv_len - 1 - kv_pos, (0, 99)),
        (weft.where(q_pos < 3, q_pos, -1), (-1, 2)),
        (weft.where((q_pos >= n) & (kv_pos < 5), q_pos - 1, kv_pos), (0, 99)),
        (weft.where((q_pos < n) | (kv_pos > 5), 9, q_pos + kv_pos), (9, 104)),
        (weft.floor(weft.sqrt(1.0 * q_pos)), (-1, 9)),
        (weft.floor(weft.log(q_pos / 8)), (-LARGEST_FLOOR, 2)),
        (weft.floor(weft.log(score)), (-LARGEST_FLOOR, LARGEST_FLOOR)),
        (weft.floor(0.5 * q_pos / (1 + kv_pos)), (0, 49)),
        (weft.floor(q_pos / stretch), (0, 39)),  # a float scalar of 2.5
        (weft.floor(8.0 * weft.sin(q_pos / 7) + 0.5), (-8, 8)),
        (weft.floor(8.0 * weft.rsqrt(1.0 + q_pos)), (0, 8)),
        (weft.floor(weft.rsqrt(1.0 * q_pos)), (0, LARGEST_FLOOR)),
        (weft.floor(weft.rsqrt(q_pos - 1.0)), (-LARGEST_FLOOR, LARGEST_FLOOR)),
        (weft.floor(weft.exp(1000.0 + q_pos)), (LARGEST_FLOOR, LARGEST_FLOOR)),
        (weft.where((KEPT > -8) & (KEPT < 8), KEPT, 0), (-7, 7)),
        (weft.where(~((KEPT <= -8) | (KEPT >= 8)), KEPT, 0), (-7, 7)),
        (weft.floor(1.0 / (1e-30 * (1 + q_pos) * 1e-30)), (-LARGEST_FLOOR, LARGEST_FLOOR)),  # divides by 0 in 32 bits
        (T5_BUCKET, (0, 30)),
        (ids[q_pos], (-(2**30) + 1, 2**30 - 1)),
        (weft.minimum(weft.maximum(ids[q_pos], 0), 9), (0, 9)),
        (head * n, (0, 70)),
    ],
)
def test_ranges_of_what_users_write(node: Expr, expected: tuple[int, int]) -> None:
    assert range_of(node, ENV, {"stretch": 2.5}) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (T5_BUCKET, (0, 0)),
        (weft.where(abs(q_pos - kv_pos) >= 4, 99, q_pos), (0, 0)),
        (weft.where((q_pos < 0) | (kv_pos > 0), 99, 3), (3, 99)),  # either of two could hold, for all that is looked at
        (weft.where((q_pos >= 0) & (kv_pos > 0), 99, 3), (3, 3)),
        (weft.where(~(q_pos == 0) & (q_pos > 0), 99, 3), (3, 3)),
        (weft.floor(weft.where(q_pos > 0, weft.log(1.0 * q_pos), 0.5)), (0, 0)),
    ],
)
def test_a_branch_that_is_never_taken_has_no_part_in_a_range(node: Expr, expected: tuple[int, int]) -> None:
    """Of the first token: one query and one key, at 0."""
    assert range_of(node, {**ENV, "q_pos": (0, 0), "kv_pos": (0, 0)}, {}) == expected


@pytest.mark.parametrize(
    "root",
    [
        masks.causal & (q_pos - kv_pos < n),
        table[q_pos] > 0.0,
        table[weft.minimum(weft.maximum(q_pos - kv_pos + 99, 0), 99)] > 0.0,
        table[weft.minimum(weft.maximum(ids[q_pos], 0), 99)] > 0.0,
        ids[q_pos] == ids[kv_pos],
        ids[q_pos] - ids[kv_pos] < 4,
        kv_pos // size <= q_pos // size,
        masks.natten_2d(10, 2, height=10),
        table[q_pos % 100] > 0.0,
        kv_pos + 3 * ids[kv_pos] <= ids[q_pos] + ids[kv_pos] + q_pos * ids[0],
        table[T5_BUCKET + 1] > 0.0,
        KEPT + weft.floor(4.0 * table[0]) <= 2 * KEPT,  # of two there is room in 32 bits
        abs(KEPT) - KEPT <= q_pos,
        3 * weft.minimum(weft.maximum(KEPT, 0), 99) <= q_pos,
        weft.floor(kv_pos / stretch) * weft.floor(q_pos / stretch) <= 99,
        table[weft.floor(kv_pos * stretch / 8)] > 0.0,
    ],
)
def test_nothing_is_said_where_all_is_proven(root: Expr) -> None:
    assert check_integers(root, ENV, {"table": (LENGTH,), "ids": (LENGTH,)}, {"stretch": 2.5}) == []


@pytest.mark.parametrize(
    ("root", "parts"),
    [
        (
            table[q_pos - kv_pos] > 0.0,
            ["`table[q_pos - kv_pos]`: index 0", "from -99 to 99", "100 entries",
             "weft.minimum(weft.maximum(q_pos - kv_pos, 0), 99)"],
        ),
        (table[q_pos + 1] > 0.0, ["ranges from 1 to 100", "is one entry short: pass a tensor with 101 entries"]),
        (table[q_pos + 2] > 0.0, ["ranges from 2 to 101", "pass a larger tensor"]),
        (table[ids[q_pos]] > 0.0, ["`ids[q_pos]`, is read from a tensor", "clamp the index"]),
        (table[ids[q_pos] % 128] > 0.0, ["ranges from 0 to 127"]),
        (q_pos * kv_pos * 10**6 < 5, ["integer overflow", "reaches 9801000000", "32 bits"]),
        (ids[q_pos] * ids[kv_pos] * ids[0] < 5, ["integer overflow: `ids[q_pos] * ids[kv_pos] * ids[0]`", "64 bits"]),
        (weft.floor(n * 0.5 * score) * 3 < 5, ["integer overflow: `floor(n * 0.5 * score) * 3`", "32 bits"]),
        (
            weft.floor(8.0 * weft.tanh(table[head])) * kv_pos < 5,  # of NaN there is no range
            ["integer overflow: `floor(8.0 * tanh(table[head])) * kv_pos`", "`floor(8.0 * tanh(table[head]))` may be",
             "clamp it, as in weft.minimum(weft.maximum(floor(8.0 * tanh(table[head])), 0), 99), or write 1.0 * ..."],
        ),
        (weft.floor(kv_pos / stretch) * 4 < 5, ["`floor(kv_pos / stretch)` may be anything"]),  # no value is given
        (weft.where(q_pos < 99, table[q_pos + 1], 0.0) > 0.0, ["ranges from 1 to 100"]),  # read where not taken, too
        (q_pos // (n - 10) < 5, ["the divisor `n - 10` can be 0", "from 0 to 0"]),
        (q_pos % kv_pos < 5, ["the divisor `kv_pos` can be 0", "from 0 to 99", "weft.maximum(kv_pos, 1)"]),
        (q_pos // ids[0] < 5, ["the divisor `ids[0]` can be 0"]),
    ],
)  # fmt: skip
def test_a_problem_names_the_read_the_range_and_the_cure(root: Expr, parts: list[str]) -> None:
    (problem,) = check_integers(root, ENV, {"table": (LENGTH,), "ids": (LENGTH,)})
    for part in parts:
        assert part in problem


def test_each_problem_is_told_once_and_all_are_told() -> None:
    root = (table[q_pos + 1] + table[q_pos + 1] > table[kv_pos - 1]) & (q_pos // (n - 10) < 3)
    assert len(check_integers(root, ENV, {"table": (LENGTH,)})) == 3


def test_each_value_of_a_float_scalar_is_looked_at() -> None:
    """Where ints are made of it; a call with another one may be unsound."""
    attention = weft.Attention(mask=weft.floor(kv_pos / stretch) * weft.floor(q_pos / stretch) <= 99, name="grid")
    q, k, v = torch.randn(3, 1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
    for value in (2.5, 3.0, 2.5):
        out = attention(q, k, v, stretch=value)
        torch.testing.assert_close(out, attention.reference(q, k, v, stretch=value), rtol=1e-5, atol=1e-5)
        for small in (1e-9, 0.0):
            with pytest.raises(weft.WeftError, match="integer overflow: `floor"):
                attention(q, k, v, stretch=small)
        with pytest.raises(weft.WeftError, match="grid: stretch: expected a number, got NaN"):
            attention(q, k, v, stretch=math.nan)


def test_an_empty_tensor_is_never_read() -> None:
    (problem,) = check_integers(table[head] > 0.0, {"head": (0, 0)}, {"table": (0,)})
    assert "0 entries" in problem


def test_a_new_length_costs_arithmetic_only() -> None:
    root = masks.causal & (q_pos - kv_pos < n) & (table[weft.minimum(weft.maximum(q_pos - kv_pos, 0), 9)] > 0.0)
    check_integers(root, ENV, {"table": (10,)})
    begun = time.perf_counter()
    for length in range(500):
        assert not check_integers(root, {**ENV, "q_pos": (0, length), "kv_pos": (0, length)}, {"table": (10,)})
    assert (time.perf_counter() - begun) / 500 < 5e-4


def random_int(draw: random.Random, depth: int) -> Expr:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([q_pos, kv_pos, n, head, expression(draw.randint(-5, 9))])
    op = draw.choice(["add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "abs", "neg", "where"])
    a, b = random_int(draw, depth - 1), random_int(draw, depth - 1)
    if op in ("abs", "neg"):
        return call(op, a)
    return call(op, a < b, a, b) if op == "where" else call(op, a, b)


@settings(max_examples=600, deadline=None, database=None)
@given(st.integers(0, 2**40))
def test_ranges_hold_every_value_of_random_expressions(seed: int) -> None:
    draw = random.Random(seed)
    node = random_int(draw, 3)
    ends = {name: draw.randint(-6, 6) for name in ("q_pos", "kv_pos", "n", "head")}
    env = {name: (low, low + draw.randint(0, 5)) for name, low in ends.items()}
    if any("can be 0" in problem for problem in check_integers(node, env, {})):
        return
    grids = np.meshgrid(*(np.arange(low, high + 1) for low, high in env.values()), indexing="ij")
    values = evaluate(node, dict(zip(env, grids)))
    low, high = range_of(node, env)
    assert low <= values.min()
    assert values.max() <= high
