"""A normalizer from outside the package on a GPU: right, and without memory for statistics that it has not."""

from __future__ import annotations

import pytest
import torch

from ..kernels.test_normalizers import toy, toys
from ..support import check_variant, poisoned

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures(toys.__name__),
]  # fmt: skip


@pytest.mark.parametrize("normalizer", ["toy_relu", "toy_sigmoid"])
def test_a_normalizer_from_outside(normalizer):
    tensors = [poisoned((2, heads, 200, 64), torch.bfloat16, "cuda", seed=n) for n, heads in enumerate((4, 2, 2))]
    check_variant(toy(normalizer=normalizer), *tensors, target="triton", lse=False)


def test_a_backward_takes_no_memory_for_statistics():
    """They would be a twelfth of the gradients here."""
    leaves = [torch.randn(1, 4, 4096, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    for turn in ("the first call", "one that is ready"):
        out = toy(normalizer="toy_sigmoid")(*leaves, target="triton")
        dout = torch.ones_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, leaves, dout)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra == sum(x.numel() * x.element_size() for x in leaves), turn
