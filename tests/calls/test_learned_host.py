"""Backwards of biases that learn cost the host little more than others: one way from a call to its gradients.

Launches are written down, and what kernels would leave in memory is made up, the same by either way.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import weft
from weft import batch, group, head, kv_pos, masks, q_pos, score, scores

pytest.importorskip("triton")
from weft.codegen.launch import launching
from weft.codegen.launch.device import Device
from weft.codegen.launch.fast.ways import nothing_yet
from weft.compiler.planning.target import Place
from weft.runtime.run import prepared
from weft.runtime.run.key import boxed_of

from .test_host_work import Ops
from .written_launches import Launches, written

HEADS, ROWS = 4, 64
vector, matrix = weft.tensor("vector", 1), weft.tensor("matrix", 2)
wide, bias = weft.tensor("wide", 3), weft.tensor("bias", 4)
bf16 = torch.bfloat16
# score, mask, sizes of its operand and dtype, torch ops of its gradient at most, launches beside those of a plain one
LEARNED: dict[str, tuple[Any, Any, tuple[int, ...], torch.dtype, int, int]] = {
    "slopes": (scores.alibi(vector)(score), masks.causal, (HEADS,), torch.float32, 2, 0),
    "t5": (scores.t5_bias(matrix, 8, 20, bidirectional=False)(score), masks.causal, (HEADS, 8), torch.float32, 5, 3),
    "by key": (score + matrix[head, kv_pos], masks.causal, (HEADS, ROWS), torch.float32, 2, 0),
    "by key, in turn": (score + wide[kv_pos, head, 0], True, (ROWS, HEADS, 1), bf16, 5, 0),
    "of a row by key": (score + bias[batch, 0, 0, kv_pos], True, (2, 1, 1, ROWS), torch.float32, 3, 0),
    "factor by query": (score * matrix[head, q_pos], masks.causal, (HEADS, ROWS), torch.float32, 1, 0),
    "full": (score + bias[batch, head, q_pos, kv_pos], True, (2, HEADS, ROWS, ROWS), bf16, 0, 0),
    "full, causal": (score + bias[batch, head, q_pos, kv_pos], masks.causal, (2, HEADS, ROWS, ROWS), bf16, 1, 0),
    "of all heads": (score + bias[batch, 0, q_pos, kv_pos], True, (2, 1, ROWS, ROWS), bf16, 0, 1),
    "of all rows": (score + bias[0, head, q_pos, kv_pos], True, (1, HEADS, ROWS, ROWS), bf16, 0, 1),
}  # fmt: skip
LONGER = {  # what takes the longer way: shorter operands than indices could reach are not among them
    "of key heads": (score + matrix[head // group, kv_pos], (2, ROWS)),
    "read twice": (score + vector[head] + score * vector[0], (HEADS,)),
    "larger": (score + matrix[head, kv_pos], (HEADS, ROWS + 8)),
}


def made_up(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():  # none of it is an op of the call
        found = torch.empty_strided(size, stride, dtype=dtype)
        return found.copy_(torch.arange(math.prod(size)).view(size).remainder(13).sub(5))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches written down on tensors that hold small numbers; boxes are brought, as on a GPU."""
    found = written(monkeypatch)
    made = Device.__init__

    def here(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.empty = made_up

    def beside(place: Place, tensor: Tensor) -> Tensor:
        new = made_up(place.size, place.stride, place.dtype)
        return new if place.fill is None else new.fill_(place.fill)

    def added(self: Any, sums: Tensor, entries: Tensor, ranges: Tensor, size: int, shares: Tensor) -> None:
        found.written("sum_listed", sums.numel(), (sums, entries, ranges, size, shares))
        shares.copy_(made_up(shares.shape, shares.stride(), shares.dtype))

    monkeypatch.setattr(Device, "__init__", here)
    monkeypatch.setattr(Place, "beside", beside)
    monkeypatch.setattr(Device, "sum_listed", added)
    monkeypatch.setattr(launching, "current_stream", lambda device: 0)
    signature = prepared.signature_of_call

    def as_on_a_gpu(facts: Any, direction: Any, call: Any, wanted: Any) -> Any:
        return replace(signature(facts, direction, call, wanted), boxed=boxed_of(facts, call.operands))

    monkeypatch.setattr(prepared, "signature_of_call", as_on_a_gpu)
    return found


def backward(
    name: str, target: str, given: Any, mask: Any, size: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Any:  # fmt: skip
    """A variant that nobody called yet, and its backward, which gives gradients by name."""
    attention = weft.Attention(given, mask, name="".join(c for c in f"host_{name}" if c.isalnum() or c == "_"))
    attention._variant.forget()
    (operand,) = attention.canonical.tensors
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(2, h, ROWS, 64, generator=generator).to(bf16).requires_grad_() for h in (HEADS, 2, 2)]
    learned = torch.randn(size, generator=generator).to(dtype).requires_grad_()
    out = attention(*leaves, **{operand.name: learned}, target=target)
    dout = torch.ones_like(out)
    return attention, lambda: torch.autograd.grad(out, [*leaves, learned], dout, retain_graph=True)


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", [*LEARNED, *LONGER])
def test_both_ways_launch_and_give_the_same(
    name: str, target: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = LEARNED[name][:4] if name in LEARNED else (LONGER[name][0], masks.causal, LONGER[name][1])
    attention, run = backward(name, target, *given)
    launches.found = []
    longer = run()
    of_longer, launches.found = launches.found, []
    found = run()
    assert launches.found == of_longer
    (ready,) = attention._variant._backwards.values()
    goes_directly = ready.launcher.fast.direct is not nothing_yet
    assert goes_directly == (name in LEARNED or name == "larger")  # which conditions turn away, call by call
    hits = sum(kind.repeats.hits for kind in attention._variant.recorded.values())
    for one, other in zip(found[3:], longer[3:], strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == bf16 else 1e-6, atol=0)
    for _ in range(3):  # what is known of such calls
        launches.found = []
        again = run()
        assert launches.found == of_longer
        assert all(torch.equal(a, b) for a, b in zip(again[3:], found[3:], strict=True))
    more = sum(kind.repeats.hits for kind in attention._variant.recorded.values()) - hits
    assert more >= 2 if name in LEARNED else more == 0


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", LEARNED)
def test_torch_ops_and_launches(name: str, target: str, launches: Launches) -> None:
    """Each takes the host 5 us and more, of 60 that such a backward may take beside a plain one."""
    given, mask, size, dtype, most, kernels = LEARNED[name]
    attention, run = backward(name, target, given, mask, size, dtype)
    for _ in range(4):
        run()
    (known,) = [kind.repeats.known for kind in attention._variant.recorded.values()]
    before, ops = known.launch, Ops()

    def watched(*arguments: Any) -> Any:
        with ops:
            return before(*arguments)

    known.launch, launches.found = watched, []
    run()
    assert len(ops.names) <= most, ops.names
    assert len(launches.found) == 3 + kernels
