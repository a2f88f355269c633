"""`weft.merge`: results over disjoint sets of keys are joined to that over all of them, with all gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.distributed import joins
from weft.runtime.joining import join_results

slopes, sinks = weft.tensor("slopes", 1), weft.tensor("sinks", 1)
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="merged_alibi")
FULL = weft.Attention(name="merged_full")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts_of(variant: weft.Attention, tensors: list[Tensor], cuts: list[int], **operands: Tensor) -> list:
    query, key, value = tensors
    ends = [0, *cuts, key.shape[2]]
    offset = key.shape[2] - query.shape[2]
    return [
        variant.reference(
            query, key[:, :, a:b], value[:, :, a:b], q_offset=offset - a, return_lse=True, **operands
        )
        for a, b in pairwise(ends)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ranks_join_rows_of_which_some_have_seen_nothing(dtype: torch.dtype) -> None:
    """Row 0 no rank has seen a key of, row 1 only the second one, row 2 all."""
    lses = drawn(3, 3, 1).float()
    lses[:, 0], lses[[0, 2], 1] = -torch.inf, -torch.inf
    outs = torch.where(lses == -torch.inf, 0.0, drawn(3, 3, 8, seed=1)).to(dtype)
    whole, lse = joins._of_all([outs, lses])
    exact, expected = weft.merge([(o[None, None].double(), l[None, None, :, 0].double()) for o, l in zip(outs, lses)])
    assert torch.allclose(whole.double(), exact[0, 0], atol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.allclose(lse[:, 0].double(), expected[0, 0]) and whole.dtype == dtype
    assert not whole[0].any() and torch.equal(whole[1], outs[1, 1])


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    ("dtype", "of_more", "width", "n"),
    [(torch.float32, torch.float32, 24, 1), (torch.bfloat16, torch.bfloat16, 64, 3),
     (torch.float32, torch.bfloat16, 128, 1), (torch.float16, torch.float16, 1, 0)],
)  # fmt: skip
def test_the_kernel_joins_what_torch_joins(
    dtype: torch.dtype, of_more: torch.dtype, width: int, n: int, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of any kind, and rows that some or all have seen nothing of, whose out may be anything then. Results to
    which more come are kept in float32."""
    pytest.importorskip("triton")
    results, statistics = (
        drawn(n + 1, 2, 7, 3, width).transpose(2, 3).to(dtype),
        drawn(n + 1, 2, 2, 3, 7, seed=1).float(),
    )
    statistics[:, 0] *= 1e9 if far else 5.0
    statistics[:, :, 0, 0, 0], statistics[:n, :, 1, 2, 6] = -torch.inf, -torch.inf
    statistics[:, 1] = torch.where(statistics[:, 0] == -torch.inf, 0.0, statistics[:, 1].abs())
    statistics = statistics[:, : 1 + far]
    unseen = statistics[:, 0] == -torch.inf
    outs = [torch.where(unseen[..., None], what, results) for what in (0.0, torch.nan)]
    found = []
    for target, out in (("cpu", outs[0]), ("interpret", outs[1])):
        monkeypatch.setenv("WEFT_TARGET", target)
        into = torch.empty_like(out[0]), torch.empty_like(statistics[0])
        more = out[1:].to(of_more), statistics[1:]
        join_results((out[0], statistics[0]), more, into)
        found.append(into)
        in_place = out[0].clone(), statistics[0].clone()
        join_results(in_place, more, in_place)
        assert all(map(torch.equal, in_place, into))
    (right, right_lse), (out, lse) = found
    torch.testing.assert_close(out, right, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(lse, right_lse, atol=1e-6, rtol=1e-6)
    assert bool(lse[0, 0, 0, 0] == -torch.inf) and not out[0, 0, 0].any()


def test_the_kernel_keeps_nan_and_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    out, lse = torch.ones(1, 1, 3, 2), torch.tensor([[[[torch.nan, torch.inf, 3e4]]]])
    for target in ("cpu", "interpret"):
        monkeypatch.setenv("WEFT_TARGET", target)
        for first, second in ((lse, torch.ones_like(lse)), (torch.ones_like(lse), lse)):
            into = torch.empty_like(out), torch.empty_like(lse)
            join_results((out, first), (2 * out[None], second[None]), into)
            assert into[1].isnan().flatten().tolist() == [True, False, False], target
            assert bool(into[0][0, 0, :2].isnan().all()) and into[1].flatten()[1:].tolist() == [torch.inf, 3e4], target


@pytest.mark.parametrize("cuts", [[], [7], [1, 2, 25], [3, 3, 30]])
@pytest.mark.parametrize("variant", [FULL, ALIBI], ids=["full", "alibi"])
def test_parts_join_to_the_whole_with_its_gradients(variant: weft.Attention, cuts: list[int]) -> None:
    operands = {"slopes": drawn(4, seed=9).abs().requires_grad_()} if variant is ALIBI else {}
    tensors = [drawn(2, 4, 20, 8).requires_grad_(), *(drawn(2, 2, 30, 8, seed=n).requires_grad_() for n in (1, 2))]
    dout, dlse = drawn(2, 4, 20, 8, seed=3), drawn(2, 4, 20, seed=4)
    wanted = [*tensors, *operands.values()]

    def gradients(out: Tensor, lse: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), wanted))

    whole = variant.reference(*tensors, return_lse=True, **operands)
    found = weft.merge(parts_of(variant, tensors, cuts, **operands))
    for a, b in zip((*found, *gradients(*found)), (*whole, *gradients(*whole))):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_rows_that_see_nothing_are_zero_and_get_no_gradient() -> None:
    outs = [drawn(1, 1, 3, 2, seed=n).requires_grad_() for n in (0, 1)]
    lses = [torch.tensor([[[0.0, -torch.inf, -torch.inf]]]), torch.tensor([[[1.0, 2.0, -torch.inf]]])]
    for lse in lses:
        lse.requires_grad_()
    out, lse = weft.merge(list(zip(outs, lses)))
    assert lse[0, 0].tolist()[1:] == [2.0, -torch.inf] and out[0, 0, 2].tolist() == [0.0, 0.0]
    assert torch.equal(out[0, 0, 1], outs[1][0, 0, 1].detach())
    out.sum().backward()
    for gradient in (*(o.grad for o in outs), *(s.grad for s in lses)):
        assert gradient is not None and bool(gradient.isfinite().all()) and not gradient[0, 0, 2].any()


def test_a_part_that_saw_no_key_may_hold_anything() -> None:
    """Kernels of others leave such rows as they find them."""
    out, lse = drawn(1, 2, 3, 4), drawn(1, 2, 3, seed=1)
    unseen = torch.full_like(out, torch.nan).requires_grad_(), torch.full_like(lse, -torch.inf).requires_grad_()
    found, found_lse = weft.merge([unseen, (out, lse)])
    assert torch.equal(found, out) and torch.equal(found_lse, lse)
    assert not any(grad.any() for grad in torch.autograd.grad(found.sum() + found_lse.sum(), unseen))


def test_parts_in_bf16_are_joined_in_float32() -> None:
    exact = [(drawn(1, 2, 9, 8, seed=n), drawn(1, 2, 9, seed=n + 5)) for n in range(3)]
    out, lse = weft.merge([(o.bfloat16(), s.float()) for o, s in exact])
    expected = weft.merge([(o.bfloat16().double(), s.float().double()) for o, s in exact])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, expected[0].bfloat16())
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-6, rtol=1e-6)


def test_parts_are_joined_in_float64_where_one_of_them_is() -> None:
    """It was asked of the first part alone, and of one part nothing was cast."""
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    wanted = weft.merge([(out.double(), lse.double())] * 2)
    for parts in ([(out, lse), (out, lse.double())], [(out, lse), (out.double(), lse)]):
        merged, joined = weft.merge(parts)
        assert (merged.dtype, joined.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(joined, wanted[1], atol=1e-14, rtol=0)
    for dtype, found in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        merged, joined = weft.merge([(out, lse.to(dtype))])
        assert merged is out and joined.dtype == found


def test_nan_and_large_numbers_stay() -> None:
    out, lse = torch.ones(1, 1, 2, 1), torch.tensor([[[torch.nan, 3e4]]])
    joined, total = weft.merge([(out, lse), (2 * out, lse)])
    assert bool(total[0, 0, 0].isnan()) and bool(joined[0, 0, 0].isnan().all())
    assert joined[0, 0, 1].item() == 1.5 and total[0, 0, 1].item() == pytest.approx(3e4 + 0.6931, abs=1e-2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"merge: expected a list of \(out, lse\), at least one, got \[\]"),
        (torch.ones(2), r"merge: expected a list of \(out, lse\)"),
        ([torch.ones(1)], r"part 0: expected \(out, lse\), as a call with return_lse=True gives them, got Tensor"),
        ([(torch.ones(1, 1, 2, 3), torch.ones(1, 2))], r"part 0: expected out \[B, Hq, L, Dv\] and lse \[B, Hq, L\]"),
        ([1, (torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2))], r"part 0: expected \(out, lse\), .* got int"),
        ([(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2)), (1, 2, 3)], r"part 1: expected .* got int, int, int"),
        (
            [(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, device="meta"))],
            "part 0: expected bf16, fp16, .* on one device, got torch.float32 on cpu and torch.float32 on meta",
        ),
        ([(torch.ones(1, 1, 2, 3).to(torch.float8_e4m3fn), torch.ones(1, 1, 2))], "part 0: .*, got torch.float8_e4m3"),
        (
            [(torch.ones(1, 1, 2, 3).int(), torch.ones(1, 1, 2))],
            "part 0: expected bf16, fp16, fp32 or fp64 on one device, got torch.int",
        ),
        (
            [(torch.ones(1, 1, n, 3), torch.ones(1, 1, n)) for n in (2, 4)],
            r"part 1: expected out like that of the first part, \[1, 1, 2, 3\] on cpu, got \[1, 1, 4, 3\] on cpu",
        ),
    ],
)
def test_what_is_refused(parts: list, message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        weft.merge(parts)
