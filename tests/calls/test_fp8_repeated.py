"""Calls with FP8 operands that repeat: what they cost the host, and that what is decided for them is decided anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import weft

pytest.importorskip("triton")
from weft.calls import conversion
from weft.codegen import torch_private

from ..recorded import Recorded
from ..support import calls_of
from .written_launches import CAUSAL, Launches, ints, normal, written

pytestmark = pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")

E4M3 = torch.float8_e4m3fn
# rows of query, sequences, whether the query is FP8 too, what shares a descale, options
KINDS: dict[str, tuple[int, int, bool, Any, dict[str, Any]]] = {
    "products": (128, 2, True, "head", {}),
    "decode": (1, 2, False, "head", {}),
    "pages": (1, 8, False, "token", {"kv_lens": ints(3, 200), "block_table": torch.arange(8).view(2, 4).int()}),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return written(monkeypatch)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were copied, of each call that takes copies."""
    found, own = [], conversion.dequantize

    def dequantize(data: list[Tensor], *rest: Any) -> list[Tensor]:
        found.append(len(data))
        return own(data, *rest)

    monkeypatch.setattr(conversion, "dequantize", dequantize)
    return found


def operands(kind: str) -> tuple[dict[str, Tensor], dict[str, weft.fp8.Quantized], dict[str, Any]]:
    """In bf16, those that are FP8, and options."""
    rows, number, every, per, options = KINDS[kind]
    sizes = (2, 4, rows, 128), *[(number, 2, 64 if kind == "pages" else 128, 128)] * 2
    given = dict(zip("qkv", [normal(*size) for size in sizes]))
    return given, {n: weft.fp8.quantize(t, per) for n, t in given.items() if every or n != "q"}, options


def descales(made: dict[str, weft.fp8.Quantized]) -> dict[str, Any]:
    return {f"{n}_descale": x.descale for n, x in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_does_little_more_than_of_bf16(kind: str, launches: Launches, recorded: Recorded) -> None:
    """68, 59 and 71 calls of functions in November 2026, where bf16 has 40, 40 and 59.

    155, 155 and 190 while descales were made ready, and all was decided, at each call.
    """
    launches.written = lambda *launch: None  # type: ignore[method-assign]
    given, made, options = operands(kind)
    calls = {"bf16": (given, options), "fp8": (given | {n: x.data for n, x in made.items()}, descales(made) | options)}
    counts = {}
    for name, (main, own) in calls.items():
        variant = CAUSAL.replace(name=f"host_{kind}_{name}")
        with torch.no_grad():
            for _ in range(4):
                variant(*main.values(), **own)
        counts[name] = calls_of(partial(variant, *main.values(), **own))
        assert variant._variant.repeats.hits > 4
    recorded("calls", **counts)


def test_copies_are_taken_once_they_are_faster(launches: Launches, copies: list[int]) -> None:
    """As keys grow, though calls before took none."""
    variant = CAUSAL.replace(name="grown_until")
    query, key8 = normal(4, 64, 128, 64), weft.fp8.quantize(normal(4, 4, 1800, 64))
    found = []
    for n in (1000, 1001, 1002, 1003, 1004, 1700, 1701, 1005):
        key = key8.data[:, :, :n]
        variant(query, key, key, k_descale=key8.descale, v_descale=key8.descale)
        found.append(len(copies))
        assert n != 1004 or variant._variant.repeats.growing is not None
    assert found == [0] * 5 + [1, 2, 2]


def test_operands_between_addresses_take_copies_as_ever(launches: Launches, copies: list[int]) -> None:
    """The layout says that they are multiplied as they are stored, the address that they cannot be."""
    variant = CAUSAL.replace(name="fp8_between")
    made = {n: weft.fp8.quantize(normal(8, 16, 2048, 128)) for n in "qkv"}
    main = {n: x.data for n, x in made.items()}
    for _ in range(4):
        variant(*main.values(), **descales(made))
    hits = variant._variant.repeats.hits
    assert hits and not copies
    memory = torch.empty(main["k"].numel() + 1, dtype=torch.uint8)[1:].view(E4M3)
    main["k"] = memory.view(main["k"].shape).copy_(main["k"])
    variant(*main.values(), **descales(made))
    assert copies == [3] and variant._variant.repeats.hits <= hits


def test_descales_left_behind_are_missed_in_a_call_like_one_before(launches: Launches) -> None:
    """A tensor of a cache looks like any other."""
    cache = weft.kv.DenseCache(2, 64, kv_heads=2, head_dim=128, dtype=E4M3, scale="head", k_descale=1.0, v_descale=1.0)
    sequences = [cache.allocate(), cache.allocate()]
    with cache.extend(sequences, [64, 64]) as step:
        step.append(0, normal(2, 2, 64, 128), normal(2, 2, 64, 128))
    query, variant = normal(2, 4, 1, 128), CAUSAL.replace(name="fp8_bare")
    key, value = step.keys(0), step.values(0)
    for _ in range(4):
        variant(query, key.clone(), value.clone())
    assert variant._variant.repeats.hits
    with pytest.raises(weft.WeftError, match="k_descale: missing, and the cache that the key comes from has some"):
        variant(query, key, value)
    with pytest.raises(weft.WeftError, match="v_descale: missing"):
        variant(query, key, value, k_descale=step.options_of(0)["k_descale"])


def test_values_are_looked_at_where_that_is_asked_for(launches: Launches) -> None:
    given, made, _ = operands("decode")
    main, variant = given | {n: x.data for n, x in made.items()}, CAUSAL.replace(name="fp8_checked")
    for _ in range(4):
        variant(*main.values(), **descales(made))
    wrong = descales(made) | {"v_descale": torch.full((2, 2, 1, 1), -1.0)}
    variant(*main.values(), **wrong)
    assert variant._variant.repeats.hits
    with weft.settings(check=True), pytest.raises(weft.WeftError, match="v_descale: expected positive numbers, got -1"):
        variant(*main.values(), **wrong)


def test_a_gradient_of_a_descale_is_refused_in_a_call_like_one_before(launches: Launches) -> None:
    given, made, _ = operands("decode")
    main, variant = given | {n: x.data for n, x in made.items()}, CAUSAL.replace(name="fp8_learned")
    own = {n: d.clone().requires_grad_() for n, d in descales(made).items()}
    with torch.no_grad():
        for _ in range(4):
            variant(*main.values(), **own)
    with pytest.raises(weft.WeftError, match="a descale has no gradient; pass k_descale.detach"):
        variant(*main.values(), **own)
