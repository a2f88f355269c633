"""What docs/language.md says of operands that change between a forward and its backward, tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft import kv_pos, q_pos, score

BIASED = weft.Attention(score + weft.tensor("bias", 1)[kv_pos], kv_pos <= q_pos, name="replaced")
NAMES = ("query", "key", "value", "bias")


def backward(change: Callable[[Tensor], None], name: str) -> list[Tensor]:
    """Gradients of a call of which one operand changes before its backward."""
    torch.manual_seed(0)
    given = {n: torch.randn(1, 2, 8, 16, requires_grad=True) for n in NAMES[:3]}
    given["bias"] = torch.randn(8, requires_grad=True)
    out = BIASED(**given)
    change(given[name])
    return list(torch.autograd.grad(out.square().sum(), list(given.values())))


def unchanged(_: Tensor) -> None:
    pass


def replaced(x: Tensor) -> None:
    x.data = torch.zeros_like(x)


def scaled(x: Tensor) -> None:
    x.data.mul_(2)


def fewer(x: Tensor) -> None:
    x.data = x.data[:, :1].clone() if x.dim() > 1 else x.data[:3].clone()


def of_one_dimension(x: Tensor) -> None:
    x.data = torch.zeros(3)


def freed(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


def in_place(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [fewer, of_one_dimension, freed])
@pytest.mark.parametrize("before", [0, 3])
def test_other_sizes_are_told(change: Callable[[Tensor], None], name: str, before: int) -> None:
    """Also where calls before it made the direct way known."""
    for _ in range(before):
        backward(unchanged, name)
    with pytest.raises(weft.WeftError, match=r"replaced: .*(query|key|value|bias)"):
        backward(change, name)


@pytest.mark.parametrize("name", NAMES)
def test_changes_that_torch_counts_are_refused_by_it(name: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(in_place, name)


@pytest.mark.parametrize("change", [replaced, scaled])
def test_the_same_sizes_are_not_noticed(change: Callable[[Tensor], None]) -> None:
    """As of torch's own attention: gradients are those of the new values."""
    found, plain = backward(change, "key"), backward(unchanged, "key")
    assert not torch.allclose(found[0], plain[0])
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    change(k)
    out.sum().backward()  # torch says nothing either
