"""Calls whose keys grow launch what they would launch if nothing were known, and see everything else that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

pytest.importorskip("triton")
from weft.codegen import torch_private

from ..support import calls_of
from .written_launches import ALIBI, CAUSAL, LENS, WINDOW, Calls, Launches, bias, heads_last, ints, normal, written

pytestmark = pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return written(monkeypatch)


CACHES = [torch.randn(2, 2, 4200, 64).to(torch.bfloat16) for _ in range(2)]
ROOMY = weft.Attention(score + bias[batch, head, q_pos, kv_pos], masks.causal, name="repeated_roomy")
LENGTHS = sorted(
    {n + by for n in (1, 2, 16, 32, 64, 128, 256, 384, 512, 640, 1024, 1536, 2048, 4096) for by in (-1, 0, 1)}
)
# variant, rows of the query, options
GROWING: dict[str, tuple[weft.Attention, int, dict[str, Any]]] = {
    "one token": (CAUSAL, 1, {}),
    "tokens": (CAUSAL, 16, {}),
    "many rows": (CAUSAL, 200, {}),
    "from the first position on": (CAUSAL, 40, {"q_offset": 0}),
    "an offset a row": (CAUSAL, 1, {"q_offset": ints(0, 3)}),
    "one token, lengths": (CAUSAL, 1, {"kv_lens": ints(1, 1)}),
    "rows, lengths": (CAUSAL, 40, {"kv_lens": ints(1, 1)}),
    "rows, lengths, an offset": (CAUSAL, 40, {"kv_lens": ints(1, 1), "q_offset": 0}),
    "an operand": (ALIBI, 1, {"slopes": torch.rand(4)}),
    "a scalar, one token": (WINDOW, 1, {"window": 100}),
    "a scalar": (WINDOW, 40, {"window": 100}),
    "boxes of an operand": (ROOMY, 40, {"q_offset": 0, "bias": normal(2, 4, 40, 4200)}),
}


class _Growing(Calls):
    """The same, of keys that are the first ones of a cache; what is known of nothing is prepared anew for each call."""

    def __init__(
        self, launches: Launches, variant: weft.Attention, target: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(launches, variant, target)
        self.longer = 0  # calls that took the whole way, or the shortest one
        forward = self._with._variant.forward

        def counted(*given: Any) -> Any:
            self.longer += 1
            return forward(*given)

        monkeypatch.setattr(self._with._variant, "forward", counted)

    def __call__(self, tensors: list[Tensor], backward: bool, **given: Any) -> bool:
        """Whether what was found for another call served it."""
        self._without._variant.forget()
        longer, hits = self.longer, self.hits
        super().__call__(tensors, backward, **given)
        return self.longer == longer and self.hits <= hits and bool(self.launches.found)

    def of(self, query: Tensor, length: int, **given: Any) -> bool:
        return self([query, *(cache[:, :, :length] for cache in CACHES)], query.requires_grad, **given)


@pytest.fixture
def growing(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Growing]:
    return lambda variant, target: _Growing(launches, variant, target, monkeypatch)


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", GROWING)
def test_keys_that_grow_launch_what_is_launched_for_them_alone(
    name: str, target: str, growing: Callable[..., _Growing]
) -> None:
    variant, rows, given = GROWING[name]
    if target == "hopper" and name in ("one token, lengths", "a scalar, one token"):
        pytest.skip("no such way")
    calls, query = growing(variant, target), normal(2, 4, rows, 64)
    lengths = [n for n in LENGTHS if n > 0]
    for _ in range(2):  # the second time all kernels are compiled
        served = [calls.of(query, n, **given) for n in lengths]
    assert all(served[4:]), [n for n, is_served in zip(lengths, served) if not is_served]
    assert not calls.of(query, 0, **given) and not calls.launches.found
    assert calls.of(query, 777, **given)


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (1, 128), (2, 16), (40, 16), (70, 128)])
def test_a_latent_cache_that_grows(rows: int, heads: int, target: str, growing: Callable[..., _Growing]) -> None:
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=512, rope=64), scale=0.07, name="grown_latent")
    calls, query, cache = growing(variant, target), normal(2, heads, rows, 576), normal(2, 1, 4200, 576)
    lengths = [n for n in LENGTHS if n > 0]
    for _ in range(2):
        served = [calls([query, cache[:, :, :n]], False) for n in lengths]
    assert all(served[4:])


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "FP8"])
def test_a_latent_cache_that_grows_with_rotary_columns_apart(
    fp8: bool, rows: int, growing: Callable[..., _Growing]
) -> None:
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=512, rope=64), scale=0.07, name="grown_rotary")
    calls, query = growing(variant, "triton"), normal(2, 16, rows, 576)
    cache, rope = normal(2, 1, 4200, 512), normal(2, 1, 4200, 64)
    cache8 = weft.fp8.quantize(cache, per="token")

    def of(n: int, rotary: int | None = None) -> bool:
        given = {"rope": rope[:, :, : rotary or n]} | ({"k_descale": cache8.descale[:, :, :n]} if fp8 else {})
        return calls([query, (cache8.data if fp8 else cache)[:, :, :n]], False, **given)

    lengths = [n for n in LENGTHS if n > 1]
    for _ in range(2):
        served = [of(n) for n in lengths]
    assert all(served[4:])
    assert not of(300, 299) and not calls.launches.found
    assert of(301)


def test_one_descale_in_the_place_of_those_of_rows_is_seen(growing: Callable[..., _Growing]) -> None:
    """It lies as the first of them does."""
    calls, query = growing(CAUSAL, "triton"), normal(1, 2, 1, 64)
    key8, value8 = (weft.fp8.quantize(cache[:1], per="token") for cache in CACHES)

    def of(n: int, descales: int) -> bool:
        own = {f"{of}_descale": x.descale[:, :, :descales] for of, x in (("k", key8), ("v", value8))}
        return calls([query, key8.data[:, :, :n], value8.data[:, :, :n]], False, **own)

    assert [of(n, n) for n in range(600, 610)][4:] == [True] * 6
    assert not of(610, 1)
    assert not of(611, 610) and not calls.launches.found  # of a row that has none


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_keys_that_grow_beyond_an_axis_that_other_kernels_measure(
    target: str, growing: Callable[..., _Growing]
) -> None:
    document = weft.tensor("document", 1, int)
    variant = weft.Attention(mask=masks.causal & masks.document(document), name="grown_documents")
    calls, query, cache = growing(variant, target), normal(1, 4, 40, 64), normal(1, 2, 20_000, 64)
    documents = torch.zeros(20_000, dtype=torch.int32)
    for _ in range(2):
        for first in (100, 16_380, 19_000):
            served = [
                calls([query, *[cache[:, :, :n]] * 2], False, document=documents) for n in range(first, first + 9)
            ]
    assert all(served)


def test_keys_that_grow_are_served_where_a_gradient_is_wanted(growing: Callable[..., _Growing]) -> None:
    for target in ("triton", "hopper"):
        calls, query = growing(CAUSAL, target), normal(2, 4, 40, 64).requires_grad_()
        assert [calls.of(query, n) for n in range(60, 70)][4:] == [True] * 6
        assert not calls.of(query.detach(), 70) and calls.of(query, 71)


# of query, key and value, in place of those that a call would have whose keys grew
GROWN_OTHERWISE: dict[str, Any] = {
    "more values than keys": lambda q, k, v: (q, k, CACHES[1][:, :, : v.shape[2] + 1]),
    "rows": lambda q, k, v: (q[:, :, :20], k, v),
    "heads of keys": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "batch": lambda q, k, v: (q[:1], k[:1], v[:1]),
    "strides": lambda q, k, v: (q, k.contiguous(), v.contiguous()),
    "strides of keys": lambda q, k, v: (q, heads_last(k), v),
    "an address between": lambda q, k, v: (q, CACHES[0].flatten()[1:-63].view(-1, 64)[: 4 * 4199].view(4, 4199, 64), v),
    "every second row": lambda q, k, v: (q, CACHES[0][:, :, : 2 * k.shape[2] : 2], v),
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
    "dtype of values": lambda q, k, v: (q, k, v.half()),
    "negated keys": lambda q, k, v: (q, torch._neg_view(k), v),
    "a gradient of keys": lambda q, k, v: (q, k.detach().requires_grad_(), v),
    "other memory": lambda q, k, v: (q.clone(), CACHES[1][:, :, : k.shape[2]], CACHES[0][:, :, : k.shape[2]]),
    "rows from the middle on": lambda q, k, v: (
        q,
        CACHES[0][:, :, 7 : 7 + k.shape[2]],
        CACHES[1][:, :, 9 : 9 + k.shape[2]],
    ),
}


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("change", GROWN_OTHERWISE)
def test_what_differs_in_more_than_keys_is_seen(change: str, target: str, growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, target), normal(2, 4, 40, 64)
    for n in range(100, 106):
        calls.of(query, n)
    assert calls.of(query, 106)
    own = GROWN_OTHERWISE[change](query, *(cache[:, :, :107] for cache in CACHES))
    assert calls(list(own), False) == (change in ("other memory", "rows from the middle on"))
    for n in range(110, 116):
        calls.of(query, n)
    assert calls.of(query, 116)


OF_GROWN: list[dict[str, Any]] = [
    {"q_offset": 3}, {"q_offset": ints(3, 3)}, {"q_offset": 2**30}, {"q_offset": 2**40}, {"kv_lens": LENS},
    {"schedule": "flash"}, {"deterministic": True},
]  # fmt: skip


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("option", range(len(OF_GROWN)))
def test_options_of_keys_that_grow_are_seen(option: int, target: str, growing: Callable[..., _Growing]) -> None:
    calls, query, given = growing(CAUSAL, target), normal(2, 4, 40, 64), OF_GROWN[option]
    for n in range(100, 106):
        calls.of(query, n)
    assert calls.of(query, 106, **given) == (option == 0)  # a number of each call, given or not
    assert [calls.of(query, n) for n in range(107, 112)][-1]


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_keys_may_not_grow_beyond_what_kernels_count(target: str, growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, target), normal(2, 4, 40, 64)
    row = [cache[:, :, :1] for cache in CACHES]
    served = [
        calls([query, *(t.expand(2, 2, n, 64) for t in row)], False) for n in (*range(60, 66), 2**20 + 1, 2**30 - 1)
    ]
    assert served[4:] == [True] * 4
    for n in (2**30, 2**30 + 1):
        assert not calls([query, *(t.expand(2, 2, n, 64) for t in row)], False)


def test_a_kernel_that_grown_keys_need_is_compiled_and_served(growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, "triton"), normal(2, 4, 1, 64)
    assert all([calls.of(query, n) for n in range(100, 110)][4:])
    assert not calls.of(query, 1000)  # whose keys are in parts
    assert all([calls.of(query, n) for n in range(1001, 1010)][4:])
    assert calls.of(query, 120)


def test_layers_whose_keys_grow_have_a_layout_of_their_own_in_each_step(growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, "hopper"), normal(2, 4, 40, 64)
    for n in range(100, 104):
        served = [calls.of(query, n) for _ in range(8)]
        assert n < 102 or served == [True] + [False] * 7
        assert calls.hits >= 6


def test_keys_that_grow_are_forgotten_with_all_else(growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, "triton"), normal(2, 4, 1, 64)
    assert [calls.of(query, n) for n in range(100, 110)][-1]
    calls._with._variant.forget()
    assert not calls.of(query, 110)


def test_no_cache_is_kept(growing: Callable[..., _Growing]) -> None:
    import gc
    import weakref

    gc.freeze()  # what is older is not looked at, which takes seconds
    for target in ("triton", "hopper"):
        calls, tensors = growing(CAUSAL, target), [normal(2, heads, 80, 64) for heads in (4, 2, 2)]
        assert [calls([tensors[0], *(t[:, :, :n] for t in tensors[1:])], False) for n in range(40, 60)][-1]
        references = [weakref.ref(t) for t in tensors]
        calls.launches.addresses, tensors = {}, []
        gc.collect()
        assert not any(reference() is not None for reference in references)


def test_settings_count_for_keys_that_grow(growing: Callable[..., _Growing]) -> None:
    calls, query, lens = growing(CAUSAL, "triton"), normal(2, 4, 1, 64), {"kv_lens": ints(5, 7)}
    assert [calls.of(query, n, **lens) for n in range(100, 110)][-1]
    with weft.settings(check=True):
        assert not calls.of(query, 110, **lens) and calls.launches.found
        assert not calls.of(query, 110, kv_lens=ints(5, 500)) and not calls.launches.found
    assert calls.of(query, 111, **lens)


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_what_keys_that_grow_cost_the_host(target: str, launches: Launches) -> None:
    """In calls of functions, which no busy machine changes."""
    variant, query = CAUSAL.replace(name=f"repeated_cost_{target}"), normal(2, 4, 1, 64)
    lengths = iter(range(3000, 4000))

    def step(length: int | None = None) -> None:
        length = length or next(lengths)
        variant(query, *(cache[:, :, :length] for cache in CACHES), target=target)

    for _ in range(20):
        step(3001)
    repeated = calls_of(lambda: step(3001))
    for _ in range(20):
        step()
    assert sorted(calls_of(step) for _ in range(31))[15] <= repeated + 10
