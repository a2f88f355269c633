"""Sequences of their own lengths on `hopper`: gradients in two passes and of operands, tiles that are measured."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

from ..support import check_variant, mostly
from .test_lengths_on_gpu import CAUSAL, VARIANTS, cumulated, given, operands_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

KINDS = ["padded", "packed"]
slopes, sinks_of, doc, bias = (weft.tensor(n, r, k) for n, r, k in (
    ("slopes", 2, float), ("sinks_of", 2, float), ("doc", 2, int), ("bias", 4, float)
))  # fmt: skip
OWN_DOC = doc[batch, weft.maximum(q_pos, 0)]  # queries before the first key read nothing before it
DOCUMENTS = weft.Attention(mask=masks.causal & (OWN_DOC == doc[batch, kv_pos]), name="own_documents")
PADDING = weft.Attention(mask=doc[batch, kv_pos] > 0, name="padding_by_key")


def documents(rows=1000, each=70):
    return (torch.arange(rows, device="cuda") // each).repeat(6, 1)


@pytest.mark.slow(12)
@pytest.mark.sampled(57)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(192, 128), (256, 256), (144, 144), (192, 192), (64, 256), (128, 128), (64, 64)]
)
@pytest.mark.parametrize("name", ["causal", "cap", "window", "far"])
def test_two_passes(name, dim, value_dim, kind):
    made, lengths = given(kind, dim, value_dim=value_dim)
    check_variant(VARIANTS[name], *made, operands=operands_of(name) | lengths, target="hopper", deterministic=True)


@pytest.mark.slow(11)
@pytest.mark.sampled(11)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [None, 7, -5, "tensor"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (6, 3)])
def test_offsets_and_groups_of_heads(heads, kv_heads, offset, kind):
    made, lengths = given(kind, 192, heads=heads, kv_heads=kv_heads, value_dim=128)
    if offset == "tensor":
        offset = torch.arange(5 if kind == "padded" else 6, dtype=torch.int32, device="cuda") * 9 - 4
    check_variant(CAUSAL, *made, operands=lengths, q_offset=offset, target="hopper", deterministic=True)


@pytest.mark.slow(11)
@pytest.mark.sampled(38)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["documents", "padding"])
def test_measured_tiles(name, deterministic, dim, kind):
    made, lengths = given(kind, dim)
    ids = documents() if name == "documents" else (torch.arange(1000, device="cuda") % 300 > 60).long().repeat(6, 1)
    variant = DOCUMENTS if name == "documents" else PADDING
    check_variant(variant, *made, operands={"doc": ids} | lengths, target="hopper", deterministic=deterministic)


@pytest.mark.slow(12)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("value", ["gain", "slope"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 192])
def test_gradients_of_operands(dim, kind, value):
    made, lengths = given(kind, dim)
    gain = 1.0 + slopes[batch, head]
    declared = (score * gain, masks.causal) if value == "gain" else (score + gain * kv_pos * 0.01, True)
    variant = weft.Attention(*declared, sink=sinks_of[batch, head], name="summed")
    operands = {n: torch.randn(6, 4, device="cuda") * 0.3 for n in ("slopes", "sinks_of")}
    check_variant(variant, *made, operands=operands | lengths, differentiate=tuple(operands), target="hopper")


@pytest.mark.slow(23)
@pytest.mark.parametrize("kind", mostly(["packed"], KINDS))
def test_gradients_of_biases(kind):
    made, lengths = given(kind, 64)
    variant = weft.Attention(score + bias[batch, head, q_pos, kv_pos], masks.causal, name="biased")
    table = torch.randn(6, 4, 720, 920, device="cuda").bfloat16()  # as many entries as rows leave room for
    operands = {"bias": table} | lengths
    check_variant(variant, *made, operands=operands, differentiate=("bias",), q_offset=0, target="hopper")


@pytest.mark.sampled(17)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("variant", [CAUSAL, DOCUMENTS], ids=["causal", "documents"])
def test_two_passes_repeat_bit_for_bit(variant, dim, value_dim, kind):
    made, lengths = given(kind, dim, value_dim=value_dim)
    operands = {"doc": documents()} if variant is DOCUMENTS else {}
    leaves, found = [t.requires_grad_() for t in made], []
    for _ in range(30):
        out = variant(*leaves, **operands, **lengths, target="hopper", deterministic=True)
        found.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again))
    assert not any(t.isnan().any() for t in found[0])


@pytest.mark.slow(18)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (256, 256)])
def test_lengths_at_the_edges_of_tiles(dim, value_dim):
    generator = torch.Generator().manual_seed(5)
    edges = torch.tensor([0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
    for _ in range(4):
        q_lens, kv_lens = (edges[torch.randint(0, len(edges), (9,), generator=generator)].tolist() for _ in range(2))
        sizes = (dim, q_lens), (dim, kv_lens), (value_dim, kv_lens)
        made = [torch.randn(1, 2, sum(lens) + 11, d, device="cuda", dtype=torch.bfloat16) for d, lens in sizes]
        for tensor, (_, lens) in zip(made, sizes):
            tensor[:, :, sum(lens) :] = torch.nan
        starts = {"cu_seqlens_q": cumulated(q_lens), "cu_seqlens_kv": cumulated(kv_lens)}
        check_variant(CAUSAL, *made, operands=starts, target="hopper")
