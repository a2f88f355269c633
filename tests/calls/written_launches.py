"""Launches of the GPU targets on CPU tensors, written down: each call with guards of its tensors, and without."""

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
from weft.codegen import torch_private
from weft.codegen.launch import launching
from weft.codegen.launch.binding import Launch
from weft.codegen.launch.descriptors import Box
from weft.codegen.launch.device import Device

from .without_gpu import go_without_a_gpu

FAR = 1 << 32  # addresses lie beyond


class Launches:
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

    def __init__(self, binding: Any, values: Any, launches: Launches) -> None:
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


def written(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Where all that would be launched is written down from now on."""
    found = Launches()
    go_without_a_gpu(monkeypatch, lambda binding, values: _Run(binding, values, found))
    monkeypatch.setattr(launching, "encoder", lambda meta: lambda address, places: ((address, *map(tuple, places)),))
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


def heads_last(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


LENS = ints(3, 50)


class Calls:
    """One variant, called with guards and without, and what both launched and gave."""

    def __init__(self, launches: Launches, variant: weft.Attention, target: str) -> None:
        self.launches, self.target = launches, target
        self._with, self._without = (variant.replace(name=f"{variant.name}_{n}") for n in ("known", "never"))
        for own in (self._with, self._without):
            own._variant.forget()

    def __call__(self, tensors: list[Tensor], backward: bool, **given: Any) -> bool:
        """Whether it was found to be like the last one, both ways alike."""
        hits = self.hits
        found = [self._one(own, tensors, backward, given) for own in (self._with, self._without)]
        assert found[0] == found[1]
        assert found[0][0] or found[0][1] or 0 in tensors[1].shape
        return self.hits > hits

    @property
    def hits(self) -> int:
        known = self._with._variant
        return known.repeats.hits + sum(kind.repeats.hits for kind in known.recorded.values())

    def _one(
        self, own: weft.Attention, tensors: list[Tensor], backward: bool, given: dict[str, Any]
    ) -> tuple[Any, str]:
        self.launches.found = []
        operands = [t for t in (*tensors, *given.values()) if isinstance(t, Tensor)]
        self.launches.addresses = {t.data_ptr(): f"operand {n}" for n, t in enumerate(operands)}
        try:
            with _guards(own is self._with):
                out = own(*tensors, **{"target": self.target, **given})
                if backward:
                    found = out if isinstance(out, tuple) else (out,)
                    wanted = [t for t in tensors if t.requires_grad]
                    torch.autograd.grad(found, wanted, [torch.ones_like(t) for t in found])
        except weft.WeftError as error:
            return self.launches.found, str(error).replace(str(own.name), "it")
        return self.launches.found, ""


@contextmanager
def _guards(are_used: bool) -> Iterator[None]:
    """What is bound while they are not used knows of none."""
    init = Device.__init__

    def here(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.guard = torch_private.guard if are_used else None

    Device.__init__ = here  # type: ignore[method-assign]
    try:
        yield
    finally:
        Device.__init__ = init  # type: ignore[method-assign]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]
