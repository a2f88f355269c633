"""Scores that have no value behind the last row or key, and quotients that decide, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import kv_pos, q_pos

from ..attention.test_undefined_ends import ALL, PAIRWISE, operands_of
from ..support import check_variant, mostly, poisoned

pytestmark = pytest.mark.gpu
KEPT = ["factor", "added", "table", "of_a_head"]
LENS = {"padded": ([70, 33], [70, 33]), "empty": ([70, 33, 0, 9], [70, 0, 40, 9])}
HOPPER = pytest.param("hopper", marks=pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
))  # fmt: skip


def check(name: str, target: str, rows: int, dim: int, lens: str = "", **options: object) -> None:
    """Rows behind lengths are NaN, and so are entries of operands that nobody reads."""
    counts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in LENS[lens]] if lens else []
    batches = len(counts[0]) if lens else 2
    shapes = ((batches, heads, rows, dim) for heads in (4, 2, 2))
    tensors = [poisoned(shape, torch.bfloat16, "cuda", seed=n) for n, shape in enumerate(shapes)]
    operands = {n: t.cuda() for n, t in operands_of(ALL[name], rows, batches).items()}
    learned = tuple(n for n in operands if n != "pad")
    given: dict[str, object] = {**operands, **({"seed": 7} if name == "dropped" else {})}
    given |= dict(zip(("q_lens", "kv_lens"), counts))
    check_variant(
        ALL[name], *tensors, operands=given, differentiate=learned, target=target,
        lse=ALL[name].canonical.weighs.saves_lse, **options,
    )  # fmt: skip


@pytest.mark.parametrize("lens", ["", *LENS])
@pytest.mark.parametrize("dim", mostly([64], [64, 128]))
@pytest.mark.parametrize("name", mostly(KEPT, [n for n in ALL if n not in PAIRWISE and n != "dropped"]))
@pytest.mark.parametrize("target", ["triton", HOPPER])
def test_rows_that_are_not_there(target: str, name: str, dim: int, lens: str) -> None:
    for deterministic in (False, True) if target == "hopper" else (None,):
        check(name, target, 70, dim, lens, deterministic=deterministic)


@pytest.mark.parametrize("name", mostly(["added"], ["added", "infinite", "of_keys"]))
@pytest.mark.parametrize("target", [HOPPER])
def test_keys_by_columns(target: str, name: str) -> None:
    check(name, target, 130, 256)


def quotients(rows: int, divisor: int, device: str) -> Tensor:
    at = torch.arange(rows, device=device)
    return (at[:, None] - at).div(divisor, rounding_mode="floor") % 2 == 0


@pytest.mark.parametrize("divisor", mostly([7], [3, 7, 25, 49]))
@pytest.mark.parametrize("target", ["cpu", "triton", HOPPER])
def test_one_variant_has_one_mask(target: str, divisor: int) -> None:
    """Among 1,000 positions quotients by a reciprocal are wrong at many multiples."""
    device, rows = "cpu" if target == "cpu" else "cuda", 1000
    variant = weft.Attention(mask=weft.floor((q_pos - kv_pos) / divisor) % 2 == 0, name="quotient")
    query, key = (torch.zeros(1, 1, rows, 64, device=device, dtype=torch.float16) for _ in range(2))
    seen = quotients(rows, divisor, device)
    numbers = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    exact = (seen.double() / seen.sum(1, keepdim=True).clamp(min=1)) @ numbers.double()
    out = variant(query, key, numbers[None, None], target=target)[0, 0]
    assert torch.allclose(out.double(), exact, atol=2e-3)
    assert torch.allclose(variant.reference(query, key, numbers[None, None])[0, 0].double(), exact, atol=2e-3)
