"""Backwards that torch's own attention on a CPU computes: which, that they are right, and that others have tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen import products
from weft.ir.errors import WeftError

from ..same.texts import recorded_machine
from ..support import check_variant, poisoned, through_python
from .test_cpu_target import EPSILON

pytestmark = pytest.mark.skipif(products.own_backward() is None, reason="torch's own backward is not there")
OWN = "flash/flash_backward=cpu:256x256"  # where torch's own will do
TILES = OWN + "+tiles"
CAUSAL = weft.Attention(mask=masks.causal, name="own_causal")
FULL = weft.Attention(name="own_full")
WINDOW = weft.Attention(mask=masks.causal & (q_pos - kv_pos < 50), scale=0.3, name="own_window")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PLACES = [
    (CAUSAL, 70, 70, {}, True), (CAUSAL, 1, 300, {}, True), (CAUSAL, 3, 300, {"q_offset": 299}, True),
    (CAUSAL, 300, 300, {}, True), (CAUSAL, 1, 1, {}, True), (CAUSAL, 70, 71, {}, False),
    (CAUSAL, 70, 70, {"q_offset": 1}, False), (CAUSAL, 71, 70, {}, False), (CAUSAL, 3, 300, {}, False),
    (FULL, 37, 90, {}, True), (FULL, 90, 37, {}, True), (WINDOW, 1, 40, {}, True), (WINDOW, 1, 200, {}, True),
    (WINDOW, 40, 40, {}, False), (WINDOW, 2, 90, {}, False),
]  # fmt: skip


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of torch's backward, from Python alone."""
    through_python(monkeypatch)
    found, calls = products.own_backward(), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return found(*arguments, **options)  # type: ignore[misc]

    monkeypatch.setattr(products, "own_backward", lambda: counted)
    return calls


def drawn(
    q_len: int, kv_len: int, dtype: torch.dtype = torch.float32, dim: int = 16, value_dim: int = 16
) -> list[Tensor]:
    """Query, key and value of two batch rows, two query heads for each key head."""
    shapes = ((4, q_len, dim), (2, kv_len, dim), (2, kv_len, value_dim))
    return [torch.randn(2, *shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(variant: weft.Attention, tensors: list[Tensor], dout: Tensor, schedule: str = OWN, **given: Any) -> Any:
    return torch.autograd.grad(variant(*tensors, target="cpu", schedule=schedule, **given), tensors, dout)


# -- which calls -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("variant", "q_len", "kv_len", "options", "whole"), PLACES)
def test_backwards_that_torch_computes_as_they_are(own, variant, q_len, kv_len, options, whole, dtype) -> None:
    """As of forwards; errors against float64 by the rule of tiles, in 16 bits at most twice those of torch's SDPA."""
    tensors = drawn(q_len, kv_len, dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    dout = torch.randn(2, 4, q_len, 16).to(dtype)
    exact = torch.autograd.grad(variant.reference(*wide, **options), wide, dout.double())
    found = gradients(variant, tensors, dout, **options)
    assert bool(own) == whole
    plain = torch.autograd.grad(variant.reference(*tensors, **options), tensors, dout)
    if whole and dtype.itemsize == 2:
        plain = torch_gradients(tensors, dout, found_mask(variant, q_len, kv_len, options), variant is WINDOW)
    for name, got, wanted, naive in zip(("dquery", "dkey", "dvalue"), found, exact, plain, strict=True):
        error, size = (got.double() - wanted).abs(), wanted.abs()
        allowed = 2 * (naive.double() - wanted).abs().amax() + EPSILON[dtype] * (
            4 * size + 16 * size.max().clamp(min=1.0)
        )
        assert bool((error <= allowed).all()), f"{variant.name}: {name} is off by {error.max().item()}"


def test_gradients_are_not_copied(own) -> None:
    """They are those of torch's kernel, [B, L, H, D] in memory; compiled code gets them as its trace has them."""
    tensors, dout = drawn(70, 70), torch.randn(2, 4, 70, 16)
    gradients(CAUSAL, tensors, dout)  # prepared
    own.clear()
    for gradient in gradients(CAUSAL, tensors, dout):
        assert gradient.transpose(1, 2).is_contiguous()
    compiled = torch.compile(lambda *x: CAUSAL(*x, target="cpu", schedule=OWN), backend="aot_eager", fullgraph=True)
    for gradient in torch.autograd.grad(compiled(*tensors), tensors, dout):
        assert gradient.is_contiguous()
    assert len(own) == 2


def found_mask(variant: weft.Attention, q_len: int, kv_len: int, options: dict[str, Any]) -> Tensor:
    offset = options.get("q_offset", kv_len - q_len)
    rows, keys = torch.arange(q_len)[:, None] + offset, torch.arange(kv_len)
    if variant is FULL:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    return (keys <= rows) & (rows - keys < (50 if variant is WINDOW else kv_len + q_len))


def torch_gradients(tensors: list[Tensor], dout: Tensor, mask: Tensor, scaled: bool) -> Any:
    scale = 0.3 if scaled else None
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=scale, enable_gqa=True)
    return torch.autograd.grad(out, tensors, dout)


def test_only_where_all_that_torch_computes_is_wanted(own) -> None:
    """Of one gradient tiles compute two or three products where torch always computes five.

    What tiles cost beside torch's products differs by processor: planned for the one of recorded texts.
    """
    with recorded_machine():
        check_one_by_one(own)


def check_one_by_one(own) -> None:
    for length, calls in ((300, 0), (20, 3)):  # of few scores, what the host takes counts for more
        tensors, dout = drawn(length, length, dim=64, value_dim=64), torch.randn(2, 4, length, 64)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        exact = torch.autograd.grad(CAUSAL.reference(*wide), wide, dout.double())
        for n in range(3):
            some = [x.detach().requires_grad_(n == m) for m, x in enumerate(tensors)]
            (found,) = torch.autograd.grad(CAUSAL(*some, target="cpu"), [some[n]], dout)
            torch.testing.assert_close(found.double(), exact[n], rtol=1e-4, atol=1e-5)
        assert len(own) == calls


def test_a_gradient_of_lse_is_of_tiles(own) -> None:
    check_variant(CAUSAL, *(x.detach() for x in drawn(90, 90)), target="cpu", schedule=OWN)
    assert not own
    check_variant(CAUSAL, *(x.detach() for x in drawn(90, 90)), target="cpu", schedule=OWN, lse=False)
    assert own


def test_what_torch_has_not_has_tiles(own) -> None:
    torch.manual_seed(0)
    slopes = weft.tensor("slopes", 1)
    sink, factor = weft.tensor("logit", 1), weft.scalar("factor", float)
    cases: list[tuple[weft.Attention, dict[str, Any], dict[str, int]]] = [
        (weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="own_alibi"),
         {"slopes": torch.rand(4)}, {}),
        (weft.Attention(5.0 * weft.tanh(score / 5.0), masks.causal, name="own_softcap"), {}, {}),
        (weft.Attention(mask=q_pos - kv_pos < 9 + head, name="own_by_head"), {}, {}),
        (weft.Attention(mask=masks.causal, sink=sink[head], name="own_sink"), {"logit": torch.randn(4)}, {}),
        (weft.Attention(mask=masks.causal, scale=factor, name="own_scaled"), {"factor": -0.25}, {}),
        (weft.Attention(mask=masks.causal, normalizer="sigmoid", name="own_sigmoid"), {}, {}),
        (CAUSAL, {}, {"value_dim": 24}),
    ]  # fmt: skip
    for variant, operands, widths in cases:
        tensors = [x.detach() for x in drawn(60, 60, **widths)]  # type: ignore[arg-type]
        trained = tuple(n for n, v in operands.items() if isinstance(v, Tensor))
        lse = variant.name != "own_sigmoid"
        check_variant(
            variant, *tensors, target="cpu", operands=operands, differentiate=trained, schedule=OWN, lse=lse
        )  # fmt: skip
        assert not own, variant.name
    dropped = weft.Attention(mask=masks.causal, dropout=0.2, name="own_dropped")
    gradients(dropped, drawn(60, 60), torch.randn(2, 4, 60, 16), seed=1)
    assert not own


def test_a_sink_that_is_not_trained(own) -> None:
    sink = weft.tensor("logit", 1)
    variant = weft.Attention(mask=masks.causal, sink=sink[head], name="own_fixed_sink")
    for length in (20, 90):
        tensors = [x.detach() for x in drawn(length, length)]
        check_variant(
            variant, *tensors, target="cpu", operands={"logit": torch.randn(4)}, schedule=OWN, lse=False
        )  # fmt: skip
    assert len(own) == 2


# -- how operands lie --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("blhd", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_between_nan(own, blhd, dtype) -> None:
    """Nothing beside the operands is read."""
    tensors = [poisoned((2, h, 70, 16), dtype, blhd=blhd, seed=h).requires_grad_() for h in (4, 2, 2)]
    dout = poisoned((2, 4, 70, 16), dtype, blhd=not blhd, seed=9)
    found, of_tiles = gradients(CAUSAL, tensors, dout), gradients(CAUSAL, tensors, dout, TILES)
    assert len(own) == 1
    for got, wanted in zip(found, of_tiles, strict=True):
        error = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, wanted, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", ["rows", "heads"])
def test_rows_that_overlap_have_tiles(own, across, dtype) -> None:
    """torch's kernels lay results out as operands are, and write rows of contiguous columns there in any case: an
    output of garbage, and in 16 bits an error."""
    others, dout = drawn(70, 70, dtype), torch.randn(2, 4, 70, 16).to(dtype)
    for which in range(4):
        *tensors, dout = (x.detach() for x in (*others, dout))
        given = [*tensors, dout]
        batch, heads, rows, width = given[which].shape
        if across == "rows":
            given[which] = torch.randn(batch, heads, rows + width).to(dtype).unfold(2, width, 1)[:, :, :rows]
        else:
            wide = torch.randn(batch, rows, heads + width).to(dtype)
            given[which] = wide.unfold(2, width, 1)[:, :, :heads].transpose(1, 2)
        *tensors, dout = given
        leaves = [x.detach().requires_grad_() for x in tensors]
        apart = [x.contiguous().requires_grad_() for x in map(torch.clone, tensors)]
        for variant in (FULL, CAUSAL):
            out, expected = variant(*leaves, target="cpu", schedule=OWN), variant(*apart, target="cpu", schedule=TILES)
            error = 0.1 if dtype.itemsize == 2 else 1e-5
            torch.testing.assert_close(out, expected, rtol=error, atol=error)
            found = torch.autograd.grad(out, leaves, dout)
            for got, wanted in zip(found, torch.autograd.grad(expected, apart, dout), strict=True):
                torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    assert not own


def test_a_gradient_that_is_one_number(own) -> None:
    """out.sum() gives a gradient without strides."""
    tensors = drawn(70, 70)
    found = torch.autograd.grad(CAUSAL(*tensors, target="cpu", schedule=OWN).sum(), tensors)
    for got, wanted in zip(found, gradients(CAUSAL, tensors, torch.ones(2, 4, 70, 16), TILES), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert own


def test_keys_outside_of_a_window_have_no_gradient(own) -> None:
    tensors = drawn(1, 200)
    _, dkey, dvalue = gradients(WINDOW, tensors, torch.randn(2, 4, 1, 16))
    assert own and own[0][0][2].shape[2] == 50
    assert not dkey[:, :, :150].any() and not dvalue[:, :, :150].any() and dkey[:, :, 150:].all()


def test_sequences_of_their_own_lengths(own) -> None:
    """Each run of equal ones is one call; rows that no sequence has get 0."""
    tensors, dout, lengths = drawn(70, 70), torch.randn(2, 4, 70, 16), [40, 70]
    found = gradients(FULL, tensors, dout, kv_lens=torch.tensor(lengths), q_lens=torch.tensor(lengths))
    assert len(own) == 2
    for row, length in enumerate(lengths):
        wide = [x.detach()[row : row + 1, :, :length].double().requires_grad_() for x in tensors]
        exact = torch.autograd.grad(FULL.reference(*wide), wide, dout[row : row + 1, :, :length].double())
        for got, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(got[row : row + 1, :, :length].double(), wanted, rtol=1e-5, atol=1e-5)
            assert not got[row, :, length:].any()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.randn(1, *x.shape[1:]), lambda x: torch.randn(2, 3, 70, 16), lambda x: torch.randn(2, 2, 70, 8),
        lambda x: torch.randn(3, *x.shape[1:]), lambda x: x.double(), lambda x: x.mT.contiguous().mT,
    ],
    ids=["fewer rows", "other heads", "narrower", "more rows", "other dtype", "other strides"],
)  # fmt: skip
def test_operands_that_were_replaced_are_named(own, change) -> None:
    """torch's kernel would read beyond them: it looks at sizes of the query alone."""
    for variant in (FULL, CAUSAL):
        for calls in range(3):  # those after the first have nothing between
            tensors, dout = drawn(70, 70), torch.randn(2, 4, 70, 16)
            for _ in range(calls):
                gradients(variant, tensors, dout)
            out, *_ = before = [variant(*tensors, target="cpu", schedule=OWN), *own]
            for x in tensors[1:]:
                x.data = change(x.data)
            with pytest.raises(WeftError, match="key"):
                torch.autograd.grad(out, tensors, dout)
            assert before[1:] == own


# -- what is not finite ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 9, 17, 70])
@pytest.mark.parametrize("variant", [CAUSAL, FULL], ids=str)
def test_nan_and_infinity_reach_what_they_reach_by_the_definition(variant, length, dtype) -> None:
    """And by tiles: beside their row they may also reach hidden pairs of a tile (0 * NaN), and an infinite log-sum-exp
    may leave finite gradients of values. AMX takes bf16 by pairs of rows: in dout they may reach a neighbour's dQ."""
    in_pairs = dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16", False)
    for which in range(4):
        for bad in (math.nan, math.inf, -math.inf):
            *tensors, dout = (
                x.detach().clone() for x in (*drawn(length, length, dtype), torch.randn(2, 4, length, 16))
            )
            dout = dout.to(dtype)
            (*tensors, dout)[which][0, 1, length // 2, 3] = bad
            leaves = [x.requires_grad_() for x in tensors]
            wide = [x.detach().double().requires_grad_() for x in tensors]
            exact = torch.autograd.grad(variant.reference(*wide), wide, dout.double())
            found, of_tiles = gradients(variant, leaves, dout), gradients(variant, leaves, dout, TILES)
            if in_pairs and which == 3:
                dquery, *others = of_tiles
                beside = (torch.arange(length) ^ 1).clamp(max=length - 1)
                of_tiles = (dquery + 0.0 * dquery[:, :, beside], *others)
            for got, least, most in zip(found, exact, of_tiles, strict=True):
                assert not (got.isfinite() & ~least.isfinite() & ~most.isfinite()).any()
                assert not (~got.isfinite() & least.isfinite() & most.isfinite()).any()


def test_a_row_whose_scores_are_all_minus_infinity_has_tiles(own) -> None:
    query, key, value = (x.detach() for x in drawn(20, 20))
    query[0, 0, 5] = 0.0
    query[0, 0, 5, 0] = -math.inf
    key[..., 0] = key[..., 0].abs() + 1.0
    tensors = [x.requires_grad_() for x in (query, key, value)]
    *_, dvalue = gradients(CAUSAL, tensors, torch.randn(2, 4, 20, 16))
    assert not own and dvalue.isfinite().all()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(own, q_len, kv_len) -> None:
    tensors = drawn(q_len, kv_len)
    for gradient in gradients(FULL, tensors, torch.randn(2, 4, q_len, 16)):
        assert not gradient.any()
    assert not own


# -- repeats, threads, and what torch puts around calls ----------------------------------------------------------------
def test_results_repeat_bit_for_bit_with_any_number_of_threads(own) -> None:
    tensors, dout = drawn(300, 300, dim=64, value_dim=64), torch.randn(2, 4, 300, 64)
    before, several = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            first, again = (gradients(CAUSAL, tensors, dout) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            several.append(first)
    finally:
        torch.set_num_threads(before)
    for found in several[1:]:
        for one, other in zip(several[0], found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(own) == 8


def test_a_second_derivative_is_refused_as_before() -> None:
    tensors = drawn(70, 70)
    first = torch.autograd.grad(CAUSAL(*tensors, target="cpu", schedule=OWN).sum(), tensors, create_graph=True)
    with pytest.raises((WeftError, RuntimeError), match="second|twice|once"):
        torch.autograd.grad(first[0].sum(), tensors)


@pytest.mark.parametrize("around", ["checkpoint", "compile", "autocast", "tiles forward"])
def test_the_same_within(own, around) -> None:
    tensors, dout = drawn(70, 70), torch.randn(2, 4, 70, 16)
    expected = gradients(CAUSAL, tensors, dout, TILES)

    def call(*tensors: Tensor) -> Tensor:
        return CAUSAL(*tensors, target="cpu", schedule=OWN)

    if around == "checkpoint":
        out = checkpoint(call, *tensors, use_reentrant=False)
    elif around == "compile":
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors)
    elif around == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(*tensors)
    else:
        out = CAUSAL(
            *tensors, target="cpu", schedule="flash/flash_forward=cpu:256x256+tiles/flash_backward=cpu:256x256"
        )
    for got, wanted in zip(torch.autograd.grad(out, tensors, dout.to(out.dtype)), expected, strict=True):
        error = 1e-5 if out.dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    assert len(own) == 1


# -- where it is not there, and where it is slower ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "op", [None, lambda *arguments, **options: (torch.zeros(1, 2, 2, 2),) * 3, lambda query: query],
    ids=["absent", "wrong", "another signature"],
)  # fmt: skip
def test_torchs_backward_is_tried_before_it_is_used(monkeypatch, op) -> None:
    class Packet:
        default = staticmethod(op) if op else None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", Packet, raising=False)
    products.own_backward.cache_clear()
    try:
        assert products.own_backward() is None
        check_variant(CAUSAL, *(x.detach() for x in drawn(20, 20)), target="cpu", lse=False)
        sizes = weft.shape(heads=2, q_len=64, head_dim=16, dtype="fp32")
        assert "its backward" not in CAUSAL.explain(sizes, device="cpu")
    finally:
        products.own_backward.cache_clear()


def test_a_short_call_is_torchs_whatever_makes_tiles_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(products, "SHORT_HEAD_BACKWARD", long := 1 << 23)
    short = long - 1
    assert products.whole_backward(products.VERY_SHORT, long, in_tiles=True) is products.own_backward()
    assert products.whole_backward(products.VERY_SHORT + 1, long, in_tiles=True) is None
    assert products.whole_backward(1 << 40, short, in_tiles=True) is products.own_backward()
    assert products.whole_backward(1 << 40, short, in_tiles=True, in_16_bits=True) is None
    assert products.whole_backward(1 << 40, 1 << 40) is products.own_backward()


def test_a_plan_says_what_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = weft.shape(heads=2, q_len=64, head_dim=16, dtype="fp32")
    words = "the forward and the backward of this call are torch's own kernel, which is the faster one"
    both = " ".join(CAUSAL.explain(sizes, device="cpu", schedule=OWN).split())
    assert words in both and "its backward has tiles where a gradient of the log-sum-exp arrives" in both
    plan = CAUSAL.plan(sizes, device="cpu", schedule=OWN)
    assert all(kernel.computed_whole and kernel.bound == "torch" for kernel in plan.kernels)
    assert "its backward" not in CAUSAL.explain(sizes, device="cpu", schedule=TILES)
    monkeypatch.setattr(products, "SHORT_HEAD_BACKWARD", 1 << 23)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    short = " ".join(CAUSAL.explain(sizes, device="cpu", schedule=TILES).split())
    if products.own_backward() is not None:
        assert "short heads" in short and "8,388,608 of a backward, are computed by torch's own kernel" in short
    many = weft.shape(heads=2, q_len=1024, head_dim=16, dtype="fp32")
    longer = " ".join(WINDOW.explain(many, device="cpu", schedule=OWN).split())
    assert "its backward" in longer and "figures are of tiles" in longer  # so many queries of a window have tiles
