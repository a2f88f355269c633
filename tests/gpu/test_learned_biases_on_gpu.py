"""Gradients of what pairs read on a GPU: right in every way of summing, bit for bit repeatable, bounded in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft.codegen.targets.triton.parts import sums

from ..attention.test_learned_biases import SCORES, operands_of, variant
from ..calls.test_learned_host import LEARNED, ROWS
from ..support import check_variant, mostly, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def given(
    name: str, length: int, more: int, dtype: torch.dtype, width: int = 64
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Query, key and value with NaN around them, and operands that are large enough for these lengths."""
    shapes = ((2, 4, length, width), (2, 2, length + more, width), (2, 2, length + more, width))
    tensors = [poisoned(shape, dtype, "cuda", blhd=True, seed=n) for n, shape in enumerate(shapes)]
    return tensors, {n: t.cuda() for n, t in enlarged(name, length + more).items()}


def enlarged(name: str, length: int, number: int = 2) -> dict[str, Tensor]:
    """As of the tests on a CPU, for more positions."""
    generator = torch.Generator().manual_seed(12)
    made: dict[str, Tensor] = {}
    for n, t in operands_of(variant(name), max(2, number)).items():
        grown = {64: length, 128: 2 * length + 64, 17 * 17: (length // 8 + 9) * 40}
        shape = [grown.get(extent, extent) for extent in t.shape]
        made[n] = torch.randn(shape, generator=generator) * 0.5
        if not t.is_floating_point():
            made[n] = torch.randint(0, 6, shape, generator=generator)
    return made


def wanted(operands: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(n for n, t in operands.items() if t.is_floating_point())


# indices that lie in tables of 64 positions alone
SHORT = ("shaw", "distance", "swin")


@pytest.mark.slow(10)
@pytest.mark.sampled(50)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SCORES)
def test_every_read(name: str, dtype: torch.dtype) -> None:
    length = 37 if name in SHORT else 300
    tensors, operands = given(name, length, 8, dtype)
    if name in SHORT:
        operands = {n: t.cuda() for n, t in operands_of(variant(name)).items()}
    check_variant(variant(name), *tensors, operands=operands, differentiate=wanted(operands))


@pytest.mark.slow(12)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("width", [64, 128, 80, 256])
@pytest.mark.parametrize("name", ["full", "of_heads", "t5_causal", "graphormer"])
def test_head_dimensions(name: str, width: int) -> None:
    tensors, operands = given(name, 200, 0, torch.bfloat16, width)
    check_variant(variant(name), *tensors, operands=operands, differentiate=wanted(operands))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("name", mostly(["full", "t5", "graphormer"], ["full", "pairs", "t5", "graphormer"]))
def test_lengths(name: str, length: int) -> None:
    for more in (0, 5):
        tensors, operands = given(name, length, more, torch.bfloat16)
        check_variant(variant(name), *tensors, operands=operands, differentiate=wanted(operands))


@pytest.mark.slow(12)
@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", ["full", "t5", "clamped"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_sequences(name: str, kind: str) -> None:
    lens = ([100, 1, 0, 129, 70], [130, 1, 7, 129, 0])
    if kind == "packed":
        sizes = [(1, h, sum(x) + 11, 64) for h, x in zip((4, 2, 2), (lens[0], lens[1], lens[1]))]
        starts = [torch.tensor([0, *x], device="cuda").cumsum(0).to(torch.int32) for x in lens]
        more = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
    else:
        sizes = [(5, h, max(x) + 3, 64) for h, x in zip((4, 2, 2), (lens[0], lens[1], lens[1]))]
        more = {"q_lens": torch.tensor(lens[0], device="cuda"), "kv_lens": torch.tensor(lens[1], device="cuda")}
    tensors = [poisoned(size, torch.bfloat16, "cuda", seed=n) for n, size in enumerate(sizes)]
    rows = 290  # what lengths a device holds is not looked at: tables have an entry for each row that there is
    operands = {n: t.cuda() for n, t in enlarged(name, rows, 5).items()}
    if name == "full":
        operands["full"] = torch.randn(5, 4, rows, rows, device="cuda")
    check_variant(variant(name), *tensors, operands=operands | more, differentiate=wanted(operands))


@pytest.mark.slow(12)
@pytest.mark.parametrize("name", mostly(["graphormer"], ["of_heads", "graphormer"]))
def test_packed_sequences_that_share_entries(name: str) -> None:
    starts = torch.tensor([0, 100, 101, 230], device="cuda", dtype=torch.int32)
    tensors = [poisoned((1, h, 230, 64), torch.bfloat16, "cuda", seed=h) for h in (4, 2, 2)]
    operands = {n: t.cuda() for n, t in enlarged(name, 230, 3).items()}
    more = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    check_variant(
        variant(name), *tensors, operands=operands | more, differentiate=wanted(operands), deterministic=False
    )


@pytest.mark.slow(12)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["graphormer", "of_half_the_heads", "both_ways"])
def test_additions_in_any_order(name: str) -> None:
    tensors, operands = given(name, 300, 8, torch.bfloat16)
    check_variant(variant(name), *tensors, operands=operands, differentiate=wanted(operands), deterministic=False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize(
    "name", mostly(["full", "of_heads", "graphormer"], ["full", "of_heads", "t5", "graphormer", "both_ways"])
)
def test_gradients_repeat(name: str, deterministic: bool | None) -> None:
    tensors, operands = given(name, 600, 0, torch.bfloat16)
    leaves = {n: operands[n].requires_grad_() for n in wanted(operands)}
    dout = torch.randn(2, 4, 600, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(3):
        out = variant(name)(*tensors, **{**operands, **leaves}, deterministic=deterministic)
        found.append(torch.autograd.grad(out, list(leaves.values()), dout))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", mostly(["graphormer"], ["graphormer", "of_half_the_heads"]))
def test_lists_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "MOST_LISTED", 5 * 64 * 64)
    tensors, operands = given(name, 300, 0, torch.bfloat16)
    check_variant(variant(name), *tensors, operands=operands, differentiate=wanted(operands))


@pytest.mark.slow(10)
def test_memory_of_a_t5_table_is_linear_in_length(most_memory: Callable[[Callable[[], object]], int]) -> None:
    """The lists of a diagonal's sums are some numbers a row: no tensor of pairs is made."""
    used = []
    for length in (4096, 8192):
        tensors = [
            torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        ]
        table = torch.randn(4, 16, device="cuda", requires_grad=True)
        out = variant("t5_causal")(*tensors, tables=table)
        used.append(most_memory(lambda out=out: out.backward(torch.randn_like(out))))
    assert used[1] < 2.5 * used[0] and used[1] < 8192 * 8192


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", LEARNED)
def test_calls_after_the_first(name: str, target: str) -> None:
    """Those that go the direct way, and those that are known to be alike, are right too; so is another layout."""
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")
    given, mask, size, dtype, *_ = LEARNED[name]
    attention = weft.Attention(given, mask, name="learned_" + "".join(c for c in name if c.isalnum()))
    (operand,) = attention.canonical.tensors
    for seed, rows in enumerate([264, 264, 264, 264, 136, 264]):
        tensors = [poisoned((2, h, rows, 64), torch.bfloat16, "cuda", seed=seed * 3 + h) for h in (4, 2, 2)]
        extents = [rows if extent == ROWS else extent for extent in size]
        generator = torch.Generator("cuda").manual_seed(seed)
        learned = (torch.randn(extents, generator=generator, device="cuda") * 0.5).to(dtype)
        check_variant(attention, *tensors, operands={operand.name: learned}, differentiate=(operand.name,),
                      target=target, lse=seed % 2 == 0)  # fmt: skip


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_sums_by_tile_of_a_full_bias(target: str) -> None:
    """Each 64 x 64 tile of a gradient that is stored, of a call that is repeated on other values."""
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")
    attention, rows = variant("full"), 1024
    generator = torch.Generator("cuda").manual_seed(5)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16)

    for _ in range(4):
        tensors, bias = [random(1, 2, rows, 64) for _ in "qkv"], random(1, 2, rows, rows)
        dout, found = random(1, 2, rows, 64), []
        for call, dtype in ((attention, torch.bfloat16), (attention.reference, torch.float64)):
            own = [t.to(dtype).requires_grad_() for t in (*tensors, bias)]
            more = {"target": target} if call is attention else {}
            found.append(torch.autograd.grad(call(*own[:3], full=own[3], **more), own, dout.to(dtype)))
        for got, wanted in zip(*found, strict=True):
            tiles = [t.double().unflatten(2, (-1, 64)).unflatten(4, (-1, min(64, t.shape[3]))) for t in (got, wanted)]
            error, size = [t.norm(dim=(3, 5)) for t in (tiles[0] - tiles[1], tiles[1])]
            assert (error <= 0.02 * size + 0.002 * size.mean()).all()


def test_hopper_leaves_wide_heads_to_triton() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")
    text = str(variant("t5").explain(weft.shape(heads=4, q_len=200, head_dim=192)))
    assert "backwards of scores that are read by distance with D or Dv above 128" in text


def test_in_a_graph() -> None:
    """A table's gradient is captured with the rest, and replayed with other values."""
    tensors, operands = given("t5", 256, 0, torch.bfloat16)
    table = operands["tables"].requires_grad_()
    query = tensors[0].clone().requires_grad_()
    dout = torch.randn_like(query)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(variant("t5")(query, *tensors[1:], tables=table), [query, table], dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        query.copy_(torch.randn_like(query))
    graph.replay()
    expected = step()
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
