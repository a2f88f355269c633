"""Dropout on a GPU: the pairs that the definition drops, in every kernel, and right numbers with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft

from ..attention.test_dropout import ALL, CAUSAL, VARIANTS, operands_of
from ..support import check_variant, mostly, poisoned
from .test_hopper_lengths_on_gpu import DOCUMENTS, documents
from .test_lengths_on_gpu import given

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def check(
    variant: weft.Attention, length: int, width: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    shapes = ((2, 4, length, width), (2, 2, length + 6, width), (2, 2, length + 6, width))
    tensors = [poisoned(shape, dtype, "cuda", seed=n) for n, shape in enumerate(shapes)]
    operands = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in operands_of(variant, length + 6).items()}
    floats = tuple(n for n, value in operands.items() if isinstance(value, Tensor))
    check_variant(variant, *tensors, operands=operands, differentiate=floats, **options)


@pytest.fixture(autouse=True)
def _has_the_target(request: pytest.FixtureRequest) -> None:
    target = request.node.callspec.params.get("target") if hasattr(request.node, "callspec") else None
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")


BOTH = pytest.mark.parametrize("target", ["triton", "hopper"])


@pytest.mark.slow(10)
@BOTH
@pytest.mark.sampled(37)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, width: int, dtype: torch.dtype, target: str) -> None:
    check(VARIANTS[name], 300, width, dtype, target=target)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", VARIANTS)
def test_full_precision(name: str) -> None:
    # four sums of slopes: over twelve seeds 0.6e-4 to 4e-4 off, those of plain torch 0.2e-4 to 13e-4
    check(VARIANTS[name], 300, 64, torch.float32, of_few=4.0)


@BOTH
@pytest.mark.sampled(110)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 513])
@pytest.mark.parametrize("width", [40, 64, 96, 192, 256])
def test_lengths_and_head_dimensions(length: int, width: int, target: str) -> None:
    check(CAUSAL, length, width, target=target)


@BOTH
@pytest.mark.parametrize("seed", [0, -1, 1 << 62])
@pytest.mark.parametrize("q_offset", [None, 0, -7, 1 << 20])
def test_the_pairs_are_those_of_the_definition(q_offset: Any, seed: int, target: str) -> None:
    """Bit for bit: the weights of a call, each key's value in a column of its own."""
    query, key = (torch.zeros(2, 2, n, 64, dtype=torch.bfloat16) for n in (200, 256))
    value = torch.eye(256, dtype=torch.bfloat16).expand(2, 2, 256, 256)
    found = ALL(query.cuda(), key.cuda(), value.cuda(), seed=seed, q_offset=q_offset, target=target)
    expected = ALL.reference(query.float(), key.float(), value.float(), seed=seed, q_offset=q_offset)
    assert torch.equal(found.cpu() > 0, expected > 0)


def operands(length: int = 300) -> list[Tensor]:
    return [torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]


def test_seeds() -> None:
    given = operands()
    out = CAUSAL(*given, seed=7)
    assert torch.equal(CAUSAL(*given, seed=torch.tensor(7, device="cuda")), out)
    assert not torch.equal(CAUSAL(*given, seed=8), out)
    torch.manual_seed(4)
    first, second = CAUSAL(*given), CAUSAL(*given)
    torch.manual_seed(4)
    assert torch.equal(CAUSAL(*given), first) and not torch.equal(first, second)
    with pytest.raises(weft.WeftError, match="seed: expected an int, or an int64 tensor with one element on cuda"):
        CAUSAL(*given, seed=torch.tensor(7))


def test_gradients_repeat_and_a_checkpoint_drops_the_same() -> None:
    given = operands()
    found = []
    for run in (CAUSAL, lambda *x: checkpoint(CAUSAL, *x, use_reentrant=False)):
        torch.manual_seed(4)
        out = run(*given)
        torch.rand(3, device="cuda")
        found.append(torch.autograd.grad(out.square().sum(), given))
    for x, y in zip(*found):  # in one pass those of queries are added to in any order
        torch.testing.assert_close(x, y, atol=1e-2, rtol=2e-2)
    assert torch.equal(found[0][2], found[1][2])


# -- on hopper: in two passes, and of sequences with lengths ----------------------------------------------------------
@pytest.mark.slow(21)
@pytest.mark.sampled(73)
@pytest.mark.parametrize("target", ["hopper"])
@pytest.mark.parametrize(("width", "value_dim"), [(64, 64), (128, 128), (192, 128), (144, 80), (192, 192)])
@pytest.mark.parametrize("length", [65, 300, 513])
@pytest.mark.parametrize("name", VARIANTS)
def test_two_passes(name: str, length: int, width: int, value_dim: int, target: str) -> None:
    shapes = ((2, 4, length, width), (2, 2, length + 6, width), (2, 2, length + 6, value_dim))
    tensors = [poisoned(shape, torch.bfloat16, "cuda", seed=n) for n, shape in enumerate(shapes)]
    operands = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in operands_of(VARIANTS[name], length + 6).items()}
    check_variant(VARIANTS[name], *tensors, operands=operands, target=target, deterministic=True)


@pytest.mark.slow(20)
@pytest.mark.sampled(96)
@pytest.mark.parametrize("target", ["hopper"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize(("width", "value_dim"), [(64, 64), (128, 128), (80, 80), (192, 128)])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "capped", "few_rows_see", "documents"])
def test_sequences_on_hopper(
    name: str, width: int, value_dim: int, kind: str, deterministic: bool, target: str
) -> None:
    made, lengths = given(kind, width, value_dim=value_dim)
    # Half, since sequences are short: the output of a row that sees one key is then not rounded, and its gradient 0, as
    # plain torch has it.
    variant = (DOCUMENTS if name == "documents" else VARIANTS[name]).replace(dropout=0.5)
    operands = lengths | {"seed": 1 << 40 | 7} | ({"doc": documents()} if name == "documents" else {})
    check_variant(variant, *made, operands=operands, target=target, deterministic=deterministic)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", ["dense", "padded", "packed"])
@pytest.mark.parametrize(("width", "value_dim"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("target", ["hopper"])
def test_two_passes_repeat_bit_for_bit(target: str, width: int, value_dim: int, kind: str) -> None:
    made, lengths = given("padded" if kind == "dense" else kind, width, value_dim=value_dim)
    if kind == "dense":
        made, lengths = [t.nan_to_num() for t in made], {}
    leaves = [t.requires_grad_() for t in made]
    out = CAUSAL(*leaves, **lengths, seed=5, target=target, deterministic=True)
    dout = torch.randn_like(out)
    runs = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(30)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))
    assert not any(t.isnan().any() for t in runs[0])


@pytest.mark.parametrize("width", mostly([64], [64, 128]))
def test_launches_repeat_bit_for_bit(width: int) -> None:
    """A bit that is read before it is drawn, or drawn over before it is read, would be another number."""
    shapes = [(2, 8, 700, width), (2, 2, 700, width), (2, 2, 700, width)]
    given = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    out = CAUSAL(*given, seed=5, target="hopper")
    dout = torch.randn_like(out)
    runs = [torch.autograd.grad(out, given, dout, retain_graph=True) for _ in range(30)]
    for run in runs[1:]:
        assert torch.equal(run[1], runs[0][1]) and torch.equal(run[2], runs[0][2])
        torch.testing.assert_close(run[0], runs[0][0], atol=1e-2, rtol=2e-2)


def test_the_backward_drops_the_pairs_of_the_forward() -> None:
    """dV of one column of dO: the weights of a query, whose keys' rows tell them apart."""
    query, key, value = (torch.zeros(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    value.requires_grad_()
    query.requires_grad_()
    out = ALL(query, key, value, seed=3, target="hopper")
    dout = torch.eye(128, device="cuda", dtype=torch.bfloat16)[:, :64].expand(1, 2, 128, 64)  # query n in column n
    _, dvalue = torch.autograd.grad(out, [query, value], dout)
    whole = torch.eye(128, device="cuda", dtype=torch.bfloat16).expand(1, 2, 128, 128)
    kept = ALL.reference(query.float(), key.float(), whole.float(), seed=3) > 0
    assert torch.equal(dvalue > 0, kept[:, :, :64].transpose(2, 3))


def test_a_graph_draws_anew_and_takes_a_seed_from_a_tensor() -> None:
    given = [x.detach() for x in operands()]
    seed = torch.tensor([1], device="cuda")
    for options in ({"seed": seed}, {}):
        CAUSAL(*given, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = CAUSAL(*given, **options)
        graph.replay()
        first = out.clone()
        seed.fill_(2)
        graph.replay()
        assert not torch.equal(out, first)
        if options:
            assert torch.equal(out, CAUSAL(*given, seed=2)) and torch.equal(first, CAUSAL(*given, seed=1))


def test_nothing_waits_for_the_device(no_waiting: Any) -> None:
    given = operands()
    CAUSAL(*given, seed=3).sum().backward()
    CAUSAL(*given).sum().backward()
    with no_waiting():
        CAUSAL(*given, seed=4).sum().backward()
        CAUSAL(*given).sum().backward()


@pytest.mark.slow(13)
def test_sequences_with_lengths() -> None:
    lens = torch.tensor([300, 0, 17, 133], device="cuda")
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cuda"), lens.cumsum(0)])
    padded = [torch.randn(4, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    packed = [torch.cat([x[b : b + 1, :, :n] for b, n in enumerate(lens.tolist())], 2) for x in padded]
    whole = CAUSAL.reference(*(x.float() for x in padded), seed=11, q_lens=lens, kv_lens=lens)
    out = CAUSAL(*padded, seed=11, q_lens=lens, kv_lens=lens)
    torch.testing.assert_close(out.float(), whole, atol=0.03, rtol=0.03)
    rows = torch.cat([out[b : b + 1, :, :n] for b, n in enumerate(lens.tolist())], 2)
    assert torch.equal(CAUSAL(*packed, seed=11, cu_seqlens_q=starts), rows)
