"""What is settled once for a layout of operands: later calls are right, checked, and keep nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from weft import kv_pos, masks, q_pos, score
from weft.runtime.prepared import MOST_REMEMBERED, Recent, layout_of

pytest.importorskip("triton")

window, gain, doc = weft.scalar("window", int), weft.tensor("gain", 1), weft.tensor("doc", 1, int)
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="layouts_recent")
SCALED = weft.Attention(score=score * weft.exp(gain[weft.head]), mask=masks.causal, name="layouts_scaled")
PACKED = weft.Attention(mask=masks.causal & masks.document(doc), name="layouts_packed")


def rows(length: int, heads: int = 2, dim: int = 16) -> Tensor:
    return torch.randn(1, heads, length, dim)


def check(variant: weft.Attention, target: str, tensors: tuple[Tensor, ...], **operands: object) -> None:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = variant(*leaves, target=target, **operands)
    found = [out, *torch.autograd.grad(out.sum(), leaves)]
    exact_leaves = [t.detach().double().requires_grad_() for t in tensors]
    exact_out = variant.reference(*exact_leaves, **operands)
    exact = [exact_out, *torch.autograd.grad(exact_out.sum(), exact_leaves)]
    for got, wanted in zip(found, exact):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.fixture
def prepared() -> Iterator[list[str]]:
    """Names of the kernels that a generated module prepares a launch of, in order."""
    names: list[str] = []

    def watch(module: object) -> object:
        kernel = getattr(module, "Kernel", None)
        if kernel is not None:
            prepare = kernel.prepare

            def counted(self, grid, *arguments, **constants):  # type: ignore[no-untyped-def]
                names.append(self.jitted.__name__)
                return prepare(self, grid, *arguments, **constants)

            kernel.prepare = counted
        return module

    from weft.codegen import loader

    execute = loader._execute
    with mock.patch.object(loader, "_execute", lambda *a: watch(execute(*a))):
        yield names


def test_a_repeated_layout_is_prepared_once_and_computes_each_call(prepared: list[str]) -> None:
    variant = PACKED.replace(name="layouts_prepared")
    for length in (10, 1, 40):
        ids = torch.arange(40) // length
        check(variant, "interpret", (rows(40), rows(40), rows(40)), doc=ids)
    assert sorted(prepared) == sorted(
        ["flash_forward", "kv_spans", "row_statistics", "flash_dquery", "flash_dkey_dvalue", "kv_spans", "q_spans"]
    )


@pytest.mark.parametrize("target", ["interpret", "cpu"])
def test_calls_that_differ_in_layout_alone(target: str) -> None:
    length = 35
    q, k, v = rows(length), rows(length), rows(length)
    check(RECENT, target, (q, k, v), window=7)
    check(RECENT, target, (q, k, v), window=20)
    check(RECENT, target, tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)), window=7)
    check(RECENT, target, (rows(12), k, v), window=7)
    check(RECENT, target, (q, rows(length, heads=1), rows(length, heads=1)), window=7)
    # the same shapes and strides at addresses that are no multiples of 16 bytes
    shifted = tuple(torch.randn(t.numel() + 1)[1:].view(t.shape) for t in (q, k, v))
    assert layout_of(shifted)[:-1] == layout_of((q, k, v))[:-1] and layout_of(shifted) != layout_of((q, k, v))
    check(RECENT, target, shifted, window=7)
    check(SCALED, target, (q, k, v), gain=torch.randn(2))
    check(SCALED, target, (q, k, v), gain=torch.randn(4)[::2])


def test_a_sound_call_makes_no_other_call_sound() -> None:
    q, k, v = rows(8), rows(8), rows(8)
    RECENT(q, k, v, window=1)
    for wrong in (True, 1.0, torch.tensor(1)):
        with pytest.raises(weft.WeftError, match="window: expected"):
            RECENT(q, k, v, window=wrong)
    with pytest.raises(weft.WeftError, match="expected dtype torch.float32 as in query"):
        RECENT(q, k, v.half(), window=1)
    with pytest.raises(weft.WeftError, match="q_offset: expected an int"):
        RECENT(q, k, v, window=1, q_offset=False)
    with pytest.raises(weft.WeftError, match="target: expected one of"):
        RECENT(q, k, v, window=1, target="tpu")
    SCALED(q, k, v, gain=torch.ones(2))
    with pytest.raises(weft.WeftError, match="gain: expected a tensor of float"):
        SCALED(q, k, v, gain=torch.ones(2, dtype=torch.int64))
    with pytest.raises(weft.WeftError, match=r"gain\[head\]"):
        SCALED(q, k, v, gain=torch.ones(1))


@pytest.mark.parametrize("target", ["interpret", "cpu"])
def test_no_tensor_of_a_call_is_kept(target: str) -> None:
    made = [rows(20).requires_grad_() for _ in range(3)]
    ids = torch.zeros(20, dtype=torch.int64)
    PACKED(*made, doc=ids, target=target).sum().backward()
    seen = [weakref.ref(t) for t in (*made, ids)]
    del made, ids
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_old_layouts_make_room() -> None:
    recent: Recent[int] = Recent()
    for n in range(MOST_REMEMBERED + 10):
        assert recent.keep(n, n) == n
    assert len(recent) == MOST_REMEMBERED
    assert 9 not in recent and 10 in recent


def test_who_watches_ops_sees_a_call_that_is_ready() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    variant = RECENT.replace(name="layouts_watched")
    q, k, v = rows(8), rows(8), rows(8)
    for _ in range(2):
        variant(q, k, v, window=3)
    with Seen() as seen:
        variant(q, k, v, window=3)
    assert any(name.startswith("weft.layouts_watched") for name in seen.names)
    with torch.profiler.profile() as profile:
        variant(q, k, v, window=3)
    assert any(event.key.startswith("weft::layouts_watched") for event in profile.key_averages())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(variant(q, k, v, window=3), FakeTensor)
    with pytest.raises(weft.WeftError, match="vmap is not available"):
        torch.func.vmap(lambda x: variant(x[None], k, v, window=3))(q)


def test_gradients_of_a_call_that_is_ready_are_those_of_the_op() -> None:
    variant = SCALED.replace(name="layouts_recorded")
    leaves = [rows(12).requires_grad_() for _ in range(3)] + [torch.randn(2, requires_grad=True)]

    def attend(query: Tensor, key: Tensor, value: Tensor, gain: Tensor) -> Tensor:
        out, lse = variant(query, key, value, gain=gain, return_lse=True)
        return (out * out).sum() + lse.sin().sum()

    def watched() -> list[Tensor]:
        with torch.profiler.profile():
            return list(torch.autograd.grad(attend(*leaves), leaves))

    through_op = watched()  # the first call, and under a profiler: dispatched by torch
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(attend(*leaves), leaves), through_op))
    some = torch.autograd.grad(attend(*leaves), [leaves[1], leaves[3]])
    assert torch.equal(some[0], through_op[1]) and torch.equal(some[1], through_op[3])
    kept = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False), leaves)
    assert all(map(torch.equal, kept, through_op))
    frozen = [leaves[0].detach(), *leaves[1:3], leaves[3].detach()]
    assert torch.equal(torch.autograd.grad(attend(*frozen), leaves[1])[0], through_op[1])
    (first,) = torch.autograd.grad(attend(*leaves), leaves[0], create_graph=True)
    with pytest.raises(weft.WeftError, match="second derivatives are not available"):
        first.sum().backward()
