"""What a score has by distance, from tables, on a GPU."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import masks

from ..attention.test_distances import SCORES, floats_of, operands_of
from ..support import check_variant, mostly, poisoned

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def given(name: str, q_len: int, kv_len: int, dim: int = 64, dtype: torch.dtype = BF16, batches: int = 2):
    attention = weft.Attention(SCORES[name], masks.causal, name=name)
    shapes = ((batches, 4, q_len, dim), (batches, 2, kv_len, dim), (batches, 2, kv_len, dim))
    tensors = [poisoned(shape, dtype, "cuda", seed=n) for n, shape in enumerate(shapes)]
    operands = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in operands_of(attention).items()}
    return attention, tensors, operands


@pytest.mark.slow(11)
@pytest.mark.sampled(29)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("rows", [(333, 333), (128, 1000), (1000, 129)])
@pytest.mark.parametrize("name", SCORES)
def test_out_and_all_gradients(name: str, rows: tuple[int, int], target: str) -> None:
    attention, tensors, operands = given(name, *rows)
    check_variant(attention, *tensors, operands=operands, differentiate=floats_of(attention), target=target)


@pytest.mark.parametrize("dtype", mostly([torch.float32], [torch.float32, torch.float16]))
def test_dtypes(dtype: torch.dtype) -> None:
    attention, tensors, operands = given("t5", 200, 260, dtype=dtype)
    check_variant(attention, *tensors, operands=operands, differentiate=("tables",), target="triton")


@pytest.mark.parametrize("dim", mostly([40], [40, 128, 192, 256]))
def test_widths(dim: int) -> None:
    attention, tensors, operands = given("t5", 300, 300, dim)
    check_variant(attention, *tensors, operands=operands, differentiate=("tables",))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", ["t5", "of_a_batch", "of_lengths"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_lengths(name: str, target: str) -> None:
    attention, tensors, operands = given(name, 300, 400)
    lens = {
        n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in (("q_lens", [300, 7]), ("kv_lens", [250, 399]))
    }
    check_variant(attention, *tensors, operands=operands | lens, differentiate=floats_of(attention), target=target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_packed_sequences(target: str) -> None:
    attention, tensors, operands = given("t5", 500, 600, batches=1)
    starts = {"cu_seqlens_q": [0, 133, 133, 500], "cu_seqlens_kv": [0, 200, 210, 600]}
    lens = {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in starts.items()}
    check_variant(attention, *tensors, operands=operands | lens, differentiate=("tables",), target=target)


def test_rows_that_are_not_aligned() -> None:
    attention, _, operands = given("t5", 1, 1)
    tensors = [
        torch.randn(2, h, n, 67, device="cuda", dtype=BF16)[..., 1:65] for h, n in ((4, 150), (2, 170), (2, 170))
    ]
    check_variant(attention, *tensors, operands=operands, differentiate=("tables",), target="triton")


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_repeated_calls_see_new_lengths_and_values(target: str) -> None:
    """The direct way: tables of other sizes, and of what their operand holds by now."""
    for n, length in enumerate((256, 512, 300, 256)):
        attention, tensors, operands = given("t5", length, length)
        operands["tables"] = operands["tables"] * n
        check_variant(attention, *tensors, operands=operands, gradients=False, target=target)


def test_a_graph_makes_its_tables_anew() -> None:
    attention, tensors, operands = given("t5", 256, 256)
    out = attention(*tensors, **operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*tensors, **operands)
    operands["tables"].mul_(2.0)
    graph.replay()
    assert torch.equal(out, attention(*tensors, **operands))
