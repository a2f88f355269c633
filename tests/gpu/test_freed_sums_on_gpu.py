"""Gradients of operands read by head or by query, on a GPU in 16 bits: at most twice the error of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import head

from ..attention.test_freed_sums import SCORES, operands_of, variant
from ..support import check_operands, mostly, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TARGETS = ["triton", "hopper"] if HOPPER else ["triton"]
DTYPES = [torch.bfloat16, torch.float16]


def check(
    declared: weft.Attention, target: str, dtype: torch.dtype, length: int, dim: int, batches: int = 2,
    room: int | None = None, **options: Any,
) -> None:  # fmt: skip
    """room: entries of operands by position, and batch rows of them."""
    draws = []
    for draw in range(4):
        shapes = [(batches, heads, length, dim) for heads in (4, 2, 2)]
        tensors = [poisoned(shape, dtype, "cuda", seed=10 * draw + n) for n, shape in enumerate(shapes)]
        operands = operands_of(declared, room or length, 4, draw)
        draws.append((tensors, {n: t.cuda() for n, t in operands.items()}))
    check_operands(declared, draws, target=target, **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", mostly([64, 128], [40, 64, 80, 128, 192]))
@pytest.mark.parametrize("name", SCORES)
def test_errors(name: str, dim: int, dtype: torch.dtype, target: str) -> None:
    if target == "hopper" and name == "beside_a_table" and dim > 128:
        pytest.skip("triton computes it")
    check(variant(name), target, dtype, 300, dim)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("lse", [False, True])
def test_beside_a_sink(lse: bool, target: str) -> None:
    check(variant("positions", sink=weft.tensor("sinks", 1)[head]), target, torch.bfloat16, 300, 64, lse=lse)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("lse", [False, True])
def test_sequences(kind: str, lse: bool, target: str) -> None:
    lengths = torch.tensor([100, 1, 0, 300], device="cuda")
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    rows, batches = (401, 1) if kind == "packed" else (300, 4)
    if kind == "padded":
        given = {"q_lens": lengths.int(), "kv_lens": lengths.int()}
    for name in ("positions", "positions_of_rows"):
        check(
            variant(name), target, torch.bfloat16, rows, 64, batches, lse=lse, given=given, q_offset=0
        )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_long_rows(target: str) -> None:
    """Positions up to 4096, whose slopes were off by tens of times as much as those of plain torch."""
    check(variant("positions"), target, torch.bfloat16, 4096, 64, 1)
