"""Functions of the language on a GPU, far out: a row that sees one key has the score as its log-sum-exp."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import score

from ..language.test_advice import X

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FUNCTIONS = {"softplus": lambda x: -torch.nn.functional.logsigmoid(-x), "logsigmoid": torch.nn.functional.logsigmoid}


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_softplus_and_logsigmoid_far_out(name: str, target: str) -> None:
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    x = torch.tensor([value for value in X if abs(value) < 3e4], device="cuda").bfloat16()
    query = torch.zeros(1, 1, len(x), 64, dtype=torch.bfloat16, device="cuda")
    query[0, 0, :, 0] = x
    key = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    key[0, 0, 0, 0] = 1.0
    query.requires_grad_()
    variant = weft.Attention(getattr(weft, name)(score), scale=1.0, name=name)
    out, lse = variant(query, key, torch.ones_like(key), target=target, return_lse=True, q_offset=0)
    leaf = x.double().requires_grad_()
    exact = FUNCTIONS[name](leaf)
    (slope,) = torch.autograd.grad(exact.sum(), leaf)
    torch.testing.assert_close(lse.flatten().double(), exact.detach(), rtol=1e-5, atol=1e-6)
    (got,) = torch.autograd.grad(lse.sum(), query)
    torch.testing.assert_close(got[0, 0, :, 0].double(), slope, rtol=1e-2, atol=1e-6)
    assert bool((out == 1.0).all())
