"""Calls that repeat launch what they would launch if nothing were known of them, and see everything that changes.

Launches of the GPU targets on CPU tensors, which are written down: each call once with guards of its tensors, by which
a call like the last one is found, and once without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

pytest.importorskip("triton")
from weft.codegen import launching
from weft.codegen.binding import Launch
from weft.codegen.targets.hopper_launcher import Box
from weft.codegen.targets.triton_launcher import TritonLauncher
from weft.runtime import torch_private
from weft.runtime.repeated import MOST_PATIENCE, WORTH, Repeats
from weft.runtime.variant import Variant

from .without_gpu import go_without_a_gpu

pytestmark = pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")

FAR = 1 << 32  # addresses lie beyond


class _Launches:
    def __init__(self) -> None:
        self.found: list[tuple[object, ...]] = []
        self.addresses: dict[int, str] = {}  # of operands

    def written(self, name: str, programs: int, arguments: Any) -> None:
        self.found.append((name, programs, *map(self._named, arguments)))

    def _named(self, value: Any) -> object:
        if isinstance(value, Tensor):
            value = value.data_ptr()
        if isinstance(value, tuple):
            return tuple(map(self._named, value))
        return self.addresses.get(value, "made") if isinstance(value, int) and value > FAR else value


class _Run:
    """A kernel of which nothing is launched."""

    def __init__(self, binding: Any, values: Any, launches: _Launches) -> None:
        self.name, self.launches = binding.name, launches
        self.described = {n: {} for n, value in enumerate(values) if isinstance(value, Box)}

    def __call__(self, programs: int, arguments: Any, stream: int) -> None:
        boxes = [(v.base.data_ptr(), tuple(v.shape), tuple(v.strides)) if isinstance(v, Box) else v for v in arguments]
        self.launches.written(self.name, programs, boxes)

    @property
    def shortest(self) -> Launch:
        def launch(programs: int, _y: int, _z: int, stream: int, fixed: object, *arguments: Any) -> None:
            self.launches.written(self.name, programs, arguments)

        return Launch(launch, (None,), self.described)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    found = _Launches()
    go_without_a_gpu(monkeypatch, lambda binding, values: _Run(binding, values, found))
    monkeypatch.setattr(
        launching, "encoder", lambda meta: lambda address, places: ((address, *map(tuple, places)),)
    )
    monkeypatch.setattr(launching, "is_heard", lambda: False)
    return found


slopes, window, bias = weft.tensor("slopes", 1), weft.scalar("window", int), weft.tensor("bias", 4)
CAUSAL = weft.Attention(mask=masks.causal, name="repeated")
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="repeated_alibi")
WINDOW = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="repeated_window")
BIAS = weft.Attention(score + bias[batch, head, q_pos, kv_pos], name="repeated_bias")


def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size).to(dtype)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(rows: int = 64, kv_rows: int = 64) -> list[Tensor]:
    return [normal(2, heads, n, 64) for heads, n in ((4, rows), (2, kv_rows), (2, kv_rows))]


def packed(rows: int = 64) -> list[Tensor]:
    return [normal(1, heads, rows, 64) for heads in (4, 2, 2)]


def pools(blocks: int = 16, rows: int = 1) -> list[Tensor]:
    return [normal(2, 4, rows, 64), normal(blocks, 2, 16, 64), normal(blocks, 2, 16, 64)]


LENS, TABLE = ints(3, 50), torch.arange(8, dtype=torch.int32).view(2, 4)
CALLS: dict[str, tuple[weft.Attention, list[Tensor], dict[str, Any]]] = {
    "dense": (CAUSAL, dense(), {}),
    "one token": (CAUSAL, dense(1), {}),
    "an offset a row": (CAUSAL, dense(), {"q_offset": ints(0, 3)}),
    "lengths": (CAUSAL, dense(), {"kv_lens": LENS}),
    "both lengths": (CAUSAL, dense(), {"kv_lens": LENS, "q_lens": LENS}),
    "one token, lengths": (CAUSAL, dense(1), {"kv_lens": LENS}),
    "packed": (CAUSAL, packed(), {"cu_seqlens_q": ints(0, 3, 64)}),
    "pages": (CAUSAL, pools(), {"kv_lens": LENS, "block_table": TABLE}),
    "an operand": (ALIBI, dense(), {"slopes": torch.rand(4)}),
    "a scalar": (WINDOW, dense(), {"window": 20}),
    "a scalar, one token": (WINDOW, dense(1), {"window": 20}),
    "boxes of an operand": (BIAS, dense(), {"bias": normal(2, 4, 64, 64)}),
}


class _Calls:
    """One variant, called with guards and without, and what both launched and gave."""

    def __init__(self, launches: _Launches, variant: weft.Attention, target: str) -> None:
        self.launches, self.target = launches, target
        self.variant = variant
        self._with, self._without = Variant(variant), Variant(variant)

    def __call__(self, tensors: list[Tensor], backward: bool, **given: Any) -> bool:
        """Whether it was found to be like the last one, both ways alike."""
        hits = self.hits
        found = [self._one(own, tensors, backward, given) for own in (self._with, self._without)]
        assert found[0] == found[1]
        assert found[0][0] or found[0][1]
        return self.hits > hits

    @property
    def hits(self) -> int:
        return self._with.repeats.hits + sum(kind.repeats.hits for kind in self._with.recorded.values())

    def _one(self, own: Variant, tensors: list[Tensor], backward: bool, given: dict[str, Any]) -> tuple[Any, str]:
        self.launches.found = []
        operands = [t for t in (*tensors, *given.values()) if isinstance(t, Tensor)]
        self.launches.addresses = {t.data_ptr(): f"operand {n}" for n, t in enumerate(operands)}
        kept, self.variant._variant = self.variant._variant, own
        try:
            with _guards(own is self._with):
                out = self.variant(*tensors, **{"target": self.target, **given})
                if backward:
                    torch.autograd.grad(out, [t for t in tensors if t.requires_grad], torch.ones_like(out))
        except weft.WeftError as error:
            return self.launches.found, str(error)
        finally:
            self.variant._variant = kept
        return self.launches.found, ""


@contextmanager
def _guards(are_used: bool) -> Iterator[None]:
    """What is bound while they are not used knows of none."""
    init = TritonLauncher.__init__

    def here(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.guard = torch_private.guard if are_used else None

    TritonLauncher.__init__ = here  # type: ignore[method-assign]
    try:
        yield
    finally:
        TritonLauncher.__init__ = init  # type: ignore[method-assign]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", CALLS)
def test_what_repeats_launches_the_same(name: str, target: str, backward: bool, launches: _Launches) -> None:
    variant, tensors, given = CALLS[name]
    if (backward and "pages" in name) or (target == "hopper" and "token" in name + "pages"):
        pytest.skip("no such way")
    calls = _Calls(launches, variant, target)
    tensors = leaves(tensors) if backward else tensors
    found = [calls(tensors, backward, **given) for _ in range(5)]
    assert found[-2:] == [True, True], found
    for _ in range(3):  # at other addresses
        others = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        moved = {n: t.clone() if isinstance(t, Tensor) else t for n, t in given.items()}
        assert calls(others, backward, **moved)
