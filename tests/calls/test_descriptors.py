"""Tensor descriptors that are kept by address, sizes and strides are those that a launch would make anew.

Launches of target `hopper` on CPU tensors, which are written down: by the longer way, which makes a descriptor for each
launch, and by the shortest one, which keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import masks

pytest.importorskip("triton")
from weft.codegen.launch import launching
from weft.codegen.launch.binding import Launch
from weft.codegen.launch.descriptors import Box

from .without_gpu import go_without_a_gpu

Entry = tuple[str, str, int, tuple[int, ...], tuple[int, ...]]  # kernel, parameter, address, sizes, strides


class _Launches:
    """What was launched, and by which way."""

    def __init__(self) -> None:
        self.longer: list[Entry] = []
        self.shortest: list[Entry] = []
        self.made = 0  # descriptors that the direct way made
        self.is_heard = False

    @contextmanager
    def by_the_longer_way(self) -> Iterator[None]:
        self.is_heard = True
        yield
        self.is_heard = False

    def encoder(self, meta: Any) -> Any:
        def encode(address: int, places: launching.Places) -> tuple[object, ...]:
            self.made += 1
            return ((address, *map(tuple, places)),)

        return encode


class _Run:
    def __init__(self, binding: Any, described: dict[int, Any], launches: _Launches) -> None:
        self.binding, self.described, self.launches = binding, described, launches

    def __call__(self, programs: int, arguments: Any, stream: int) -> None:
        for name, box in zip(self.binding.parameters, arguments):
            if isinstance(box, Box):
                where = box.base.data_ptr(), tuple(box.shape), tuple(box.strides)
                self.launches.longer.append((self.binding.name, name, *where))

    @property
    def shortest(self) -> Launch:
        def launch(programs: int, _y: int, _z: int, stream: int, fixed: object, *arguments: Any) -> None:
            for place in self.described:
                entry = (self.binding.name, self.binding.parameters[place], *arguments[place])
                self.launches.shortest.append(entry)

        return Launch(launch, (None,), self.described)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    found = _Launches()

    def recorded(binding: Any, values: Any) -> _Run:
        return _Run(binding, {n: {} for n, value in enumerate(values) if isinstance(value, Box)}, found)

    go_without_a_gpu(monkeypatch, recorded)
    monkeypatch.setattr(launching, "is_heard", lambda: found.is_heard)
    monkeypatch.setattr(launching, "encoder", found.encoder)
    return found


def views(batch: int, heads: int, dim: int) -> list[Tensor]:
    """Tensors of several sizes and strides, all at one address."""
    whole = torch.zeros(batch * heads * 64 * dim, dtype=torch.bfloat16)
    found = []
    for rows, heads_last in ((64, False), (33, False), (64, True), (33, True), (1, False)):
        size = (batch, rows, heads, dim) if heads_last else (batch, heads, rows, dim)
        made = whole[: batch * heads * rows * dim].view(size)
        found.append(made.transpose(1, 2) if heads_last else made)
    padded = whole.view(batch, heads, 64, dim)[:, :, 7:40]  # at another address, its heads apart
    return [*found, padded, whole.view(batch, heads, 64, dim)[:, :, :33]]


CAUSAL = weft.Attention(mask=masks.causal, name="descriptors")
LATENT = weft.Attention(
    mask=masks.causal, latent=weft.Latent(512, 64), scale=192**-0.5, name="descriptors_of_a_latent_cache"
)
LENS = {"kv_lens": torch.tensor([3, 33], dtype=torch.int32)}
CALLS: dict[str, tuple[int, dict[str, Any]]] = {  # batch rows, options
    "dense": (2, {}),
    "one batch row": (1, {}),
    "lengths": (2, LENS),
    "packed": (1, {"cu_seqlens_q": torch.tensor([0, 3, 33])}),
    "two passes": (2, {"deterministic": True}),
}


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("name", CALLS)
def test_of_a_forward_and_a_backward(name: str, dim: int, launches: _Launches) -> None:
    batch, options = CALLS[name]
    variant = CAUSAL.replace(name=f"descriptors_{list(CALLS).index(name)}_{dim}")
    tensors = list(zip(views(batch, 4, dim), views(batch, 2, dim), views(batch, 2, dim)))
    for _ in range(2):
        for query, key, value in tensors:
            if query.shape[2] == 1 or (name == "packed" and query.shape[2] < 33):
                continue
            leaves = [t.detach().requires_grad_() for t in (query, key, value)]
            with launches.by_the_longer_way():
                _step(variant, leaves, options)
            _step(variant, leaves, options)
        _check(launches, {t.data_ptr() for three in tensors for t in three})
        launches.longer.clear()
        launches.shortest.clear()


def test_of_a_latent_cache(launches: _Launches) -> None:
    for query, cache in zip(views(2, 16, 576), views(2, 1, 576)):
        with launches.by_the_longer_way():
            LATENT(query[:, :, :1], cache, target="hopper")
        LATENT(query[:, :, :1], cache, target="hopper")
        _check(launches, {query.data_ptr(), cache.data_ptr()})
    assert launches.made


def test_of_chunks_over_latent_pages(launches: _Launches) -> None:
    lens = torch.tensor([40, 60], dtype=torch.int32)
    given = {"kv_lens": lens, "block_table": torch.arange(8, dtype=torch.int32).view(2, 4)}
    for heads in (16, 128):
        query, pool = (torch.zeros(*n, 576, dtype=torch.bfloat16) for n in ((1, heads, 70), (8, 1, 16)))
        for short in (1, 5, 30):
            starts = torch.tensor([0, short, 70], dtype=torch.int32)
            with launches.by_the_longer_way():
                LATENT(query, pool, cu_seqlens_q=starts, **given, target="hopper")
            LATENT(query, pool, cu_seqlens_q=starts, **given, target="hopper")
            _check(launches, {query.data_ptr(), pool.data_ptr()})
    assert launches.made


def _step(variant: weft.Attention, leaves: list[Tensor], options: dict[str, Any]) -> None:
    out = variant(*leaves, **options, target="hopper")
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def _check(launches: _Launches, operands: set[int]) -> None:
    """That both ways launch with the same descriptors. What a call makes lies elsewhere each time."""
    assert launches.longer and len(launches.longer) == len(launches.shortest)
    for long, short in zip(launches.longer, launches.shortest):
        assert long[:2] == short[:2] and long[3:] == short[3:], (long, short)
        assert long[2] == short[2] or long[2] not in operands, (long, short)


def test_few_are_kept_and_each_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_DESCRIPTORS", 3)
    made = []

    def encode(address: int, places: launching.Places) -> tuple[object, ...]:
        made.append(address)
        return address, *places

    kept = launching.Descriptors(encode, lambda *numbers: (numbers, numbers))
    for address in (1, 2, 1, 3, 2, 4, 1):
        assert kept[address, 5] == (address, (5,), (5,))
        assert len(kept) <= 3
    assert made == [1, 2, 3, 4, 1]
