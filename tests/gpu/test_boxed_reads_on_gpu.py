"""Tiles of what pairs read, brought to SRAM: right in every form, mask and kind of sequences, and in every launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import masks

from ..attention.test_boxed_reads import SCORES, variant
from ..support import check_errors, check_variant, poisoned

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
pytestmark = [pytest.mark.gpu, hopper]

BATCHES, HEADS, KEY_HEADS = 2, 4, 2
ONE_PASS = ("full", "further_on_alone", "beside_a_slope")


def given(q_len: int, kv_len: int, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Query, key and value with NaN around them."""
    shapes = ((HEADS, q_len), (KEY_HEADS, kv_len), (KEY_HEADS, kv_len))
    return [poisoned((BATCHES, h, n, width), dtype, "cuda", blhd=True, seed=s) for s, (h, n) in enumerate(shapes)]


def biases(name: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """With entries for as many queries and keys; rows lie a multiple of 16 bytes apart."""
    generator, made = torch.Generator().manual_seed(5), {}
    extents = {"batch": BATCHES, "kv_head": KEY_HEADS}
    for read in variant(name).canonical.gradient_loads:
        texts = [i.text for i in read.index]
        shape = [rows + 8 if "q_pos" in t else columns + 8 if "kv_pos" in t else extents.get(t, HEADS) for t in texts]
        whole = torch.randn(*shape[:-1], -(-shape[-1] // 8) * 8, generator=generator) * 0.5
        made[read.tensor.name] = whole.to("cuda", dtype)[..., : shape[-1]]
    return made


def planned(name: str, tensors: list[Tensor], operands: dict[str, Tensor], mask: Any = masks.causal) -> str:
    return str(variant(name, mask).plan(*tensors, **operands).schedule)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [n for n in SCORES if n != "twice"])
def test_indices(name: str) -> None:
    operands = biases(name, 300, 304)
    tensors = given(300, 304)
    assert "p2" in planned(name, tensors, operands)
    check_variant(variant(name), *tensors, operands=operands, gradients=False)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("width", [40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", [True, masks.causal])
def test_head_dimensions(width: int, dtype: torch.dtype, mask: Any) -> None:
    operands, differentiate = biases("full", 520, 520, dtype), ("bias4",)
    for lens in ((513, 513), (129, 520)):
        check_variant(variant("full", mask), *given(*lens, width), operands=operands, differentiate=differentiate)


@pytest.mark.sampled(162)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", [True, masks.causal, masks.sliding_window(50)])
@pytest.mark.parametrize("length", [1000, 1, 17, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("name", ONE_PASS)
def test_gradients(name: str, length: int, mask: Any, dtype: torch.dtype) -> None:
    for more in (0, 40):
        tensors, operands = given(length, length + more), biases(name, length + more, length + more, dtype)
        check_variant(variant(name, mask), *tensors, operands=operands, differentiate=("bias4",))


def test_every_entry_is_written_where_there_are_as_many_as_pairs() -> None:
    for length in (64, 192, 200, 1024):
        operands = {"bias4": torch.randn(BATCHES, HEADS, length, length, device="cuda").bfloat16()}
        filler = torch.full((BATCHES, HEADS, length, length), torch.nan, device="cuda").bfloat16()
        del filler  # what is not written is likely NaN
        check_variant(variant("full", True), *given(length, length), operands=operands, differentiate=("bias4",))


def test_the_plan_is_that_of_one_pass() -> None:
    operands = biases("full", 200, 200)
    operands["bias4"].requires_grad_()
    text = planned("full", given(200, 200), operands)
    assert "flash_backward=hopper" in text and text.count("p2") == 2
    operands = {"bias4": operands["bias4"].detach().float().requires_grad_()}
    text = planned("full", given(200, 200), operands)
    assert "flash_backward=hopper" in text and text.count("p4") == 2
    text = planned("full", given(200, 200, 128), operands)  # no SRAM beside 128 columns
    assert text.count("p4") == 1 and "flash_dquery=triton" in text


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("differentiate", [(), ("bias4",)], ids=["", "dbias"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_sequences(kind: str, differentiate: tuple[str, ...], dtype: torch.dtype) -> None:
    lens = ([100, 1, 0, 129, 70], [130, 1, 7, 129, 0])
    if kind == "packed":
        sizes = [(1, h, sum(x) + 11, 64) for h, x in zip((4, 2, 2), (lens[0], lens[1], lens[1]))]
        starts = [torch.tensor([0, *x], device="cuda").cumsum(0).to(torch.int32) for x in lens]
        more = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
    else:
        sizes = [(5, h, max(x) + 3, 64) for h, x in zip((4, 2, 2), (lens[0], lens[1], lens[1]))]
        more = {"q_lens": torch.tensor(lens[0], device="cuda"), "kv_lens": torch.tensor(lens[1], device="cuda")}
    tensors = [poisoned(size, torch.bfloat16, "cuda", seed=n) for n, size in enumerate(sizes)]
    bias = torch.randn(5, 4, 296, 296, device="cuda").to(dtype)
    check_variant(variant("full"), *tensors, operands={"bias4": bias} | more, differentiate=differentiate)


@pytest.mark.slow(15)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_offsets(kind: str) -> None:
    tensors, operands = given(70, 300), biases("full", 300, 300)
    of_rows = torch.tensor([0, 230], device="cuda", dtype=torch.int32)
    for offset in (0, 100, 230) if kind == "number" else (of_rows,):
        check_variant(variant("full"), *tensors, operands=operands, q_offset=offset, differentiate=("bias4",))


def test_entries_that_no_pair_reads_may_be_nan() -> None:
    length, room = 150, 160
    tensors = given(length, length)
    bias = torch.randn(BATCHES, HEADS, room, room, device="cuda").bfloat16()
    hidden = ~torch.ones(room, room, device="cuda", dtype=torch.bool).tril()
    hidden[length:], hidden[:, length:] = True, True
    shown = torch.where(hidden, 0.0, bias).requires_grad_()
    poisoned_bias = torch.where(hidden, torch.nan, bias).requires_grad_()
    found = []
    for own in (shown, poisoned_bias):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = variant("full")(*leaves, bias4=own)
        found.append([out, *torch.autograd.grad(out, [*leaves, own], torch.ones_like(out))])
    for a, b in zip(*found, strict=True):
        assert not b.isnan().any()
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][-1], found[1][-1])


@pytest.mark.parametrize("case", ["unaligned", "expanded", "columns_first"])
def test_other_tensors_are_read_as_before(case: str) -> None:
    length = 200
    bias = torch.randn(BATCHES, HEADS, length + 8, length + 8, device="cuda").bfloat16()
    bias = {
        "unaligned": bias[:, :, 1:, 1:],
        "expanded": bias[:1].expand(BATCHES, -1, -1, -1),
        "columns_first": bias.transpose(2, 3),
    }[case]
    tensors = given(length, length)
    exact, plain = (
        variant("full").reference(*(t.to(d) for t in tensors), bias4=bias.to(d), q_offset=0)
        for d in (torch.float64, torch.bfloat16)
    )
    check_errors(variant("full")(*tensors, bias4=bias), exact, plain, case)
    assert "p2" not in planned("full", tensors, {"bias4": bias})


@pytest.mark.slow(11)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32)])
@pytest.mark.parametrize("mask", [True, masks.causal])
def test_launches_repeat(mask: Any, width: int, dtype: torch.dtype) -> None:
    """Bit for bit, but for dQ of one pass: what is read from a slot of SRAM is read before it is filled again."""
    torch.manual_seed(1)
    tensors = [torch.randn(2, 8, 2048, width, device="cuda").bfloat16().requires_grad_() for _ in "qkv"]
    bias = torch.randn(2, 8, 2048, 2048, device="cuda").to(dtype).requires_grad_()
    dout, first = torch.randn_like(tensors[0]), []
    for _ in range(20):
        out, lse = variant("full", mask)(*tensors, bias4=bias, return_lse=True)
        _, dkey, dvalue, dbias = torch.autograd.grad(out, [*tensors, bias], dout)
        found = [out, lse, dkey, dvalue, dbias]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


FORMS = ["128x128s2q1p2+regs", "192x128s2q1p2+pairs", "128x64s3q1p2", "128x128s3q1p2+lazy+overlap", "128x128s3q1"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    tensors, operands = given(712, 712), biases("full", 712, 712)
    schedule = f"flash/flash_forward=hopper:{form}"
    check_variant(variant("full"), *tensors, operands=operands, schedule=schedule, gradients=False)


def test_a_form_for_tiles_that_cannot_be_brought_is_refused() -> None:
    tensors, operands = given(200, 200), {"bias4": torch.randn(BATCHES, HEADS, 201, 201, device="cuda").bfloat16()}
    with pytest.raises(weft.WeftError, match="p2 is for a float operand of 2 bytes an element"):
        variant("full")(*tensors, **operands, schedule="flash/flash_forward=hopper:128x128s3q1p2")
