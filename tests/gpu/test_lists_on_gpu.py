"""Lists of tiles on a GPU: right, without waiting for the device, in CUDA graphs, and no more work than is visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos
from weft.runtime.run import kept

from ..support import check_variant, mostly, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

blocks, few = weft.tensor("blocks", 4, bool), weft.tensor("few", 2, bool)
allowed, bits, doc = weft.tensor("allowed", 3, bool), weft.tensor("bits", 2, int), weft.tensor("doc", 2, int)
MASKS = {
    "blocks": masks.block_sparse(blocks),
    "causal_blocks": masks.causal & blocks[batch, head, q_pos // 64, kv_pos // 32],
    "wide_blocks": masks.causal & blocks[batch, head, q_pos // 72, kv_pos // 64],
    "odd_blocks": ~few[q_pos // 48, kv_pos // 24] & masks.document(doc),
    "bigbird": masks.bigbird(64, few),
    "allowed": allowed[batch, q_pos, kv_pos],
    "causal_allowed": masks.causal & (allowed[batch, q_pos, kv_pos] | few[q_pos // 64, kv_pos // 64]),
    "bits": masks.causal & masks.bit_packed(bits),
}


def operands(length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = length // 24 + 2
    pairs = torch.rand(2, length, length, generator=generator) < 0.0003
    pairs[:, 200:460, 64:700] = True
    pairs[:, :, 64:72] = True  # a gradient of a query that sees one key is 0, and all of it rounding
    return {
        "blocks": torch.rand(2, 4, n, n, generator=generator) < 0.2, "few": torch.rand(n, n, generator=generator) < 0.2,
        "allowed": pairs, "doc": torch.arange(length)[None].repeat(2, 1) // 150,
        "bits": torch.where(torch.rand(length, length // 8 + 1, generator=generator) < 0.002, 255, 0).to(torch.uint8),
    }  # fmt: skip


ON_HOPPER = ("blocks", "wide_blocks", "bigbird")  # the same in blocks of 64 keys and more


def variant_of(name: str) -> weft.Attention:
    return weft.Attention(mask=MASKS[name], name=name)


def given(variant: weft.Attention, length: int, seed: int = 0) -> dict[str, Tensor]:
    return {p.name: operands(length, seed)[p.name].cuda() for p in variant.canonical.parameters}


def rows(q_len: int, kv_len: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((2, 4, q_len, width), (2, 2, kv_len, width), (2, 2, kv_len, width))
    return [poisoned(shape, dtype, "cuda", blhd=True, seed=n) for n, shape in enumerate(shapes)]


@pytest.mark.sampled(38)
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)])
@pytest.mark.parametrize("name", ON_HOPPER)
def test_on_hopper(name: str, width: int, dtype: torch.dtype) -> None:
    variant = variant_of(name)
    for deterministic in (False, True):
        for q_len, kv_len in ((700, 1021), (1021, 1021), (1, 900)):
            check_variant(
                variant, *rows(q_len, kv_len, width, dtype), operands=given(variant, 1100), target="hopper",
                label=f"{name} {q_len} {kv_len} D{width}", deterministic=deterministic,
            )  # fmt: skip


@pytest.mark.sampled(38)
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (64, torch.float32)])
@pytest.mark.parametrize("name", MASKS)
def test_against_float64(name: str, width: int, dtype: torch.dtype) -> None:
    variant = variant_of(name)
    for q_len, kv_len in ((700, 1021), (1021, 1021), (1, 900)):
        check_variant(
            variant, *rows(q_len, kv_len, width, dtype), operands=given(variant, 1100), target="triton",
            label=f"{name} {q_len} {kv_len} D{width}",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "target"),
    [("blocks", "hopper"), ("wide_blocks", "hopper"), ("causal_blocks", "triton"), ("allowed", "triton")],
)
def test_who_computes_them(name: str, target: str) -> None:
    """Hopper's loops have no registers to look at pairs: masks that differ from pair to pair, or in narrow blocks."""
    variant = variant_of(name)
    plan = variant.plan(*rows(700, 1021, 64, torch.bfloat16), **given(variant, 1100))
    assert plan.code("forward").target == target and plan.code("forward").tile_source == "lists"


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(
    ("name", "target"),
    mostly(
        [("causal_allowed", "triton"), ("blocks", "hopper")],
        [("causal_blocks", "triton"), ("causal_allowed", "triton"), ("blocks", "hopper")],
    ),
)
def test_graphs_follow_what_the_tensors_hold(name: str, target: str) -> None:
    """Captured once, replayed with other contents in the same tensors; also inside a block that keeps tiles."""
    variant = variant_of(name)
    leaves, mine = [t.requires_grad_() for t in rows(700, 700, 64, torch.bfloat16)], given(variant, 800)

    def step() -> list[Tensor]:
        out = variant(*leaves, **mine, target=target, deterministic=True)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with weft.settings(keep_tiles=True), torch.cuda.graph(graph):
        captured = step()
    for seed in range(1, 5):
        for tensor, other in zip(mine.values(), given(variant, 800, seed).values()):
            tensor.copy_(other)
        graph.replay()
        for got, wanted in zip(captured, step()):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("keeps", [False, True])
def test_nothing_waits_for_the_device(keeps: bool, no_waiting: Any) -> None:
    variant = variant_of("causal_allowed")
    leaves, mine = [t.requires_grad_() for t in rows(700, 700, 64, torch.bfloat16)], given(variant, 800)
    with weft.settings(keep_tiles=keeps):
        out = variant(*leaves, **mine, target="triton")
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        with no_waiting():
            out = variant(*leaves, **mine, target="triton")
            torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_kept_tiles_are_those_of_what_a_tensor_holds_now() -> None:
    kept.forget()
    variant = variant_of("causal_allowed")
    tensors, mine = rows(700, 700, 64, torch.bfloat16), given(variant, 800)
    with weft.settings(keep_tiles=True):
        for seed in range(4):
            for tensor, other in zip(mine.values(), given(variant, 800, seed).values()):
                tensor.copy_(other)
            for _ in range(2):
                leaves = [t.detach().requires_grad_() for t in tensors]
                out = variant(*leaves, **mine, target="triton")
                found = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
                fresh = [t.detach().requires_grad_() for t in tensors]
                with weft.settings(keep_tiles=False):
                    again = variant(*fresh, **{n: t.clone() for n, t in mine.items()}, target="triton")
                wanted = [again, *torch.autograd.grad(again, fresh, torch.ones_like(again))]
                assert all(torch.equal(a, b) for a, b in zip(found, wanted))
        assert kept.any_kept()
    kept.forget()


def test_long_sequences_of_few_blocks(most_memory: Any) -> None:
    """Of 64k tokens each block sees 4 % of the blocks: sampled rows are right, and memory is not that of pairs."""
    length, variant = 65536, weft.Attention(mask=masks.causal & masks.block_sparse(few), name="long")
    table = (torch.rand(512, 512, device="cuda") < 0.04) | torch.eye(512, dtype=torch.bool, device="cuda")
    tensors = [torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    found: list[Tensor] = []
    assert most_memory(lambda: found.append(variant(*tensors, few=table))) < 10 * tensors[0].numel() * 2
    (out,) = found
    for row in (0, 127, 128, 40000, length - 1):
        q, k, v = (t.double() for t in (tensors[0][:, :, row : row + 1], *tensors[1:]))
        wanted = variant.reference(q, k, v, few=table, q_offset=row)
        torch.testing.assert_close(out[:, :, row : row + 1].double(), wanted, atol=2e-2, rtol=2e-2)
