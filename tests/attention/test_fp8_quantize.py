"""`weft.fp8.quantize`, `dequantize` and `rotate`: numbers, descales, messages, transforms."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import weft

from ..support import poisoned
from .test_fp8 import E4M3, E5M2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("per", ["tensor", "head", 64, 128, "token"])
def test_the_largest_number_of_what_shares_a_descale_is_the_largest_stored(per, dtype: torch.dtype) -> None:
    x = poisoned((2, 3, 150, 24), torch.bfloat16)
    data, descale = weft.fp8.quantize(x, per=per, dtype=dtype)
    blocks = {"tensor": 1, "head": 1, 64: 3, 128: 2, "token": 150}[per]
    assert data.dtype == dtype and data.shape == x.shape
    assert descale.shape == ((1, 1, 1, 1) if per == "tensor" else (2, 3, blocks, 1)) and descale.dtype == torch.float32
    most = torch.finfo(dtype).max
    rows = {"tensor": 150, "head": 150, "token": 1}.get(per, per)
    for b in range(blocks):
        part = data[:, :, b * rows : (b + 1) * rows].float().abs()
        tops = part.amax((2, 3)) if per != "tensor" else part.amax()
        assert (tops == most).all()
    error = (weft.fp8.dequantize(weft.fp8.Quantized(data, descale)) - x.float()).abs()
    digits = {E4M3: 4, E5M2: 3}[dtype]
    spread = descale.repeat_interleave(rows, dim=2)[:, :, :150] if blocks > 1 else descale
    assert (error <= 2.0**-digits * x.float().abs() + 2.0**-10 * spread).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_was_quantised_is_saved_and_loaded(dtype: torch.dtype, tmp_path) -> None:
    """torch.load reads weights alone, if nothing else is said."""
    found = weft.fp8.quantize(torch.randn(2, 2, 9, 16), dtype=dtype)
    torch.save({"key": found}, tmp_path / "saved.pt")
    for one in (torch.load(tmp_path / "saved.pt")["key"], copy.deepcopy(found), copy.copy(found)):
        assert type(one) is weft.fp8.Quantized and torch.equal(one.descale, found.descale)
        assert one.data.dtype == dtype and torch.equal(one.data.float(), found.data.float())


def test_zeros_infinities_and_nan() -> None:
    x = torch.zeros(1, 3, 2, 4)
    x[0, 1] = torch.tensor([[1.0, math.inf, -math.inf, math.nan], [2.0, 0.0, -1.0, 0.5]])
    x[0, 2] = 2.0**-140
    data, descale = weft.fp8.quantize(x, per="head")
    assert descale[0, 0].item() == 1.0 and not data[0, 0].float().any()
    assert descale[0, 1].item() == pytest.approx(2 / 448)
    assert data[0, 1, 0].float()[:3].tolist() == [224.0, 448.0, -448.0] and data[0, 1, 0, 3].float().isnan()
    assert descale[0, 2].item() >= 2.0**-126
    key = data[:, 1:2]
    out = weft.Attention()(torch.ones(1, 1, 1, 4), key, key, k_descale=descale[:, 1:2])
    assert out.isnan().all()  # a NaN of a key that is seen is seen


def test_bad_input_of_quantize() -> None:
    x = torch.randn(1, 1, 4, 8)
    for given, message in (
        ({"per": 32}, "per: expected 'tensor', 'head', 64, 128 or 'token', got 32"),
        ({"dtype": torch.float16}, "dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16"),
        ({"layout": "cols"}, "layout: expected 'rows' or 'columns', got 'cols'"),
        ({"per": torch.ones(2)}, "per: expected 'tensor', 'head', 64, 128 or 'token', got a tensor"),
        ({"dtype": ["e4m3"]}, r"dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got \['e4m3'\]"),
    ):
        with pytest.raises(weft.WeftError, match=message):
            weft.fp8.quantize(x, **given)
    with pytest.raises(
        weft.WeftError, match=r"x: expected \[B, H, L, D\] of bf16, fp16, fp32 or fp64, got torch.float32 \[4"
    ):
        weft.fp8.quantize(x[0, 0])
    whole = weft.fp8.quantize(x)
    for call, message in (
        (lambda: weft.fp8.dequantize(x), "dequantize: expected Quantized.data, descale., got Tensor"),
        (lambda: weft.fp8.dequantize(whole, torch.int32), "dequantize: dtype: expected bf16, .*, got torch.int32"),
        (lambda: weft.fp8.dequantize((whole.data, torch.ones(3))), r"broadcasts to its rows, got .*8\] and \[3\]"),
        (
            lambda: weft.fp8.dequantize((x, whole.descale)),
            "expected data of FP8 .*, got torch.float32 and torch.float32",
        ),
        (lambda: weft.fp8.dequantize((whole.data, whole.descale.double())), "a descale of float32, .* torch.float64"),
        (
            lambda: weft.fp8.rotate(x[..., :0], x[..., :0]),
            r"rotate: expected one width, of a column or more, got .*0\]",
        ),
        (lambda: weft.fp8.rotate(whole.data, x), "rotate: query: expected .*e4m3fn; rotate, then quantise"),
        (lambda: weft.fp8.rotate(x, [1.0]), "rotate: key: expected a tensor of bf16, .*, got list"),
        (lambda: weft.fp8.rotate(x, x[..., :4]), r"rotate: expected one width, .*, got shapes \[1, 1, 4, 8\]"),
    ):
        with pytest.raises(weft.WeftError, match=message):
            call()


def test_quantize_has_no_gradient_and_a_message_says_what_to_do() -> None:
    """Else torch goes on with the gradient of the descale alone. A straight-through estimate is none of it."""
    x = torch.randn(1, 2, 9, 8)
    said = r"weft.fp8.quantize: rounding to FP8 has no gradient; pass x.detach\(\); x \+ .* has the numbers of FP8"

    def rounded(x):
        return weft.fp8.dequantize(weft.fp8.quantize(x))

    def through(x):
        return x + (rounded(x) - x).detach()

    def loss(x):
        return through(x).square().sum()

    with pytest.raises(weft.WeftError, match=said):
        rounded(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(weft.WeftError, match=said):
        torch.func.grad(lambda x: rounded(x).sum())(x)
    learned = x.clone().requires_grad_()
    loss(learned).backward()
    torch.testing.assert_close(learned.grad, 2 * rounded(x))
    torch.testing.assert_close(torch.func.grad(loss)(x), learned.grad)
    given = learned, 64, "e4m3", False
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(torch.ops.weft.quantize, given, test_utils=tests)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("per", ["tensor", "head", 64, "token"])
def test_quantize_under_vmap_is_that_of_each(per, layout: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And torch has nothing to say of a slow way."""
    x = torch.randn(2, 3, 2, 70, 8)
    found = torch.func.vmap(lambda x: weft.fp8.quantize(x, per=per, layout=layout), in_dims=1)(x)
    for n in range(3):
        one = weft.fp8.quantize(x[:, n], per=per, layout=layout)
        assert torch.equal(found.data[n].float(), one.data.float()) and torch.equal(found.descale[n], one.descale)
        assert found.data[n].stride(2 if layout == "columns" else 3) == 1
    assert "performance" not in capfd.readouterr().err


@pytest.mark.parametrize("width", [16, 64, 80, 192])
def test_a_rotation_leaves_scores_and_spreads_outliers(width: int) -> None:
    query, key = torch.randn(2, 1, 2, 20, width, dtype=torch.float64)
    key[..., 3] *= 30
    rotated = weft.fp8.rotate(query, key)
    torch.testing.assert_close(rotated[0] @ rotated[1].mT, query @ key.mT)
    assert rotated[1].abs().amax() < key.abs().amax()
    with pytest.raises(weft.WeftError, match="rotate: expected one width"):
        weft.fp8.rotate(query, key[..., :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_is_the_same_under_autocast_and_compiled(dtype: torch.dtype) -> None:
    """Not in the digits of autocast's dtype; nor is a warning printed where it is traced."""
    query, key = torch.randn(2, 1, 2, 9, 96).to(dtype)
    found = weft.fp8.rotate(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        other = weft.fp8.rotate(query, key)
    compiled = torch.compile(weft.fp8.rotate, fullgraph=True, backend="eager")(query, key)
    for tensors in (other, compiled):
        assert all(torch.equal(x, y) for x, y in zip(found, tensors))
