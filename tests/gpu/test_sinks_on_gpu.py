"""Attention sinks on a GPU: right on both targets, in each schedule and backward, and bit for bit repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import head, masks

from ..attention.test_sinks import LEARNED, VARIANTS, operands_of
from ..support import check_variant, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def _has_the_target(request: pytest.FixtureRequest) -> None:
    target = request.node.callspec.params.get("target") if hasattr(request.node, "callspec") else None
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")


def check(
    variant: weft.Attention, target: str, length: int, width: int, dtype: torch.dtype = torch.bfloat16,
    around: float = 0.0, **options: object,
) -> None:  # fmt: skip
    shapes = ((2, 4, length, width), (2, 2, length + 6, width), (2, 2, length + 6, width))
    tensors = [poisoned(shape, dtype, "cuda", seed=n) for n, shape in enumerate(shapes)]
    found = operands_of(variant, length + 6, around=around).items()
    operands = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in found}
    # of what the score reads hopper has no gradient
    ours = {"sinks", "by_row"} if target == "triton" or variant.name != "shared" else set()
    wanted = tuple(n for n in operands if n in ours or (n == "bias" and target == "triton"))
    check_variant(variant, *tensors, operands=operands, differentiate=wanted, target=target, **options)


@pytest.mark.slow(10)
@pytest.mark.sampled(43)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, width: int, deterministic: bool, target: str) -> None:
    check(VARIANTS[name], target, 300, width, deterministic=deterministic)


@pytest.mark.slow(10)
@pytest.mark.sampled(19)
@pytest.mark.parametrize(("name", "width"), [("learned", 128), ("first_rows_empty", 64)])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 250])
def test_lengths(length: int, target: str, name: str, width: int) -> None:
    check(VARIANTS[name], target, length, width)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("around", [1e4, -1e4, 1e9, -1e9])
@pytest.mark.parametrize("name", ["learned", "far", "first_rows_empty"])
def test_a_sink_far_from_0(name: str, around: float, target: str) -> None:
    check(VARIANTS[name], target, 200, 64, around=around)


@pytest.mark.slow(9)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("width", [40, 80, 96])
def test_other_head_dimensions(width: int, target: str) -> None:
    check(LEARNED, target, 150, width)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", ["learned", "far", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
def test_portable_schedules(schedule: str, dtype: torch.dtype, name: str) -> None:
    if (schedule, dtype, name) == ("standard", torch.float16, "far"):
        pytest.skip("keeps scores in 16 bits, where -1e9 is -inf")
    check(VARIANTS[name], "triton", 130, 64, dtype, schedule=schedule)


@pytest.mark.slow(8)
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_the_gradient_of_a_sink_repeats(target: str) -> None:
    """Also in one pass, whose dQ does not."""
    tensors = [torch.randn(2, 16, 1500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    table = torch.randn(16, device="cuda", requires_grad=True)
    out = LEARNED(*tensors, sinks=table, target=target)
    dout = torch.randn_like(out)
    found = [torch.autograd.grad(out, [table, *tensors], dout, retain_graph=True)[0] for _ in range(5)]
    assert all(torch.equal(found[0], again) for again in found[1:])


@pytest.mark.slow(9)
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_rows_that_see_nothing(target: str) -> None:
    variant = weft.Attention(mask=weft.kv_pos < weft.q_pos - 1000, sink=weft.tensor("sinks", 1)[head], name="unseen")
    tensors = [torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    table = torch.tensor([1.5, -torch.inf], device="cuda", requires_grad=True)
    out, lse = variant(*tensors, sinks=table, target=target, return_lse=True)
    assert not out.any() and torch.equal(lse, table.detach().view(1, 2, 1).expand(1, 2, 200))
    found = torch.autograd.grad([out, lse], [*tensors, table], [torch.ones_like(out), torch.ones_like(lse)])
    assert not any(g.any() for g in found[:3]) and found[3].tolist() == [200.0, 0.0]


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_sinks_that_are_no_numbers(value: float, target: str) -> None:
    tensors = [torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    out, lse = LEARNED(*tensors, sinks=torch.tensor([value, 0.5], device="cuda"), target=target, return_lse=True)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan().all()
    assert out[0, 1].isfinite().all() and lse[0, 1].isfinite().all()


@pytest.mark.slow(9)
def test_a_layer_of_gpt_oss_in_a_graph() -> None:
    """A window and learned sinks, captured in a CUDA graph: what it replays is what is computed."""
    variant = weft.Attention(
        mask=masks.causal & masks.sliding_window(128), sink=weft.tensor("sinks", 1)[head], name="gpt_oss"
    )
    tensors = [torch.randn(1, n, 600, 64, device="cuda", dtype=torch.bfloat16) for n in (16, 2, 2)]
    table = torch.randn(16, device="cuda")
    wanted = variant(*tensors, sinks=table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = variant(*tensors, sinks=table)
    graph.replay()
    assert torch.equal(out, wanted)
    table.add_(1.0)
    graph.replay()
    assert torch.equal(out, variant(*tensors, sinks=table))
