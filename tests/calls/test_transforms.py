"""torch.func: gradients as functions, and calls over a mapped dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

slopes, bias, doc = weft.tensor("slopes", 1), weft.tensor("bias", 2), weft.tensor("doc", 2, int)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
FAR = weft.Attention(score + bias[head, kv_pos], masks.causal, name="far")
DOCUMENTS = weft.Attention(mask=masks.causal & (doc[batch, q_pos] == doc[batch, kv_pos]), name="documents")
SIZE = 3  # of the mapped dimension


def qkv(*front: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(*front, 2, heads, 10, 8) for heads in (4, 2, 2))  # type: ignore[return-value]


def plain(*x: Tensor) -> Tensor:
    return CAUSAL(*x)


def both(*x: Tensor) -> Tensor:
    out, lse = CAUSAL(*x, return_lse=True)
    return torch.cat([out, lse[..., None]], -1)


def alibi(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    return ALIBI(query, key, value, slopes=table)


def far(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    out, lse = FAR(query, key, value, bias=table, return_lse=True)
    return torch.cat([out, lse[..., None]], -1)


def documents(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    return DOCUMENTS(query, key, value, doc=ids)


def squared(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *x: call(*x).square().sum()


@pytest.mark.parametrize(
    ("call", "more", "argnums"),
    [
        (plain, (), (0, 1, 2)),
        (plain, (), (1,)),
        (both, (), (0, 1, 2)),
        (alibi, (torch.rand(4),), (0, 2, 3)),
        (far, (torch.randn(4, 10),), (0, 1, 2, 3)),
    ],
)
def test_gradients(call: Callable[..., Tensor], more: tuple[Tensor, ...], argnums: tuple[int, ...]) -> None:
    """grad, vjp and jacrev give what autograd gives."""
    given = (*qkv(), *more)
    found = torch.func.grad(squared(call), argnums=argnums)(*given)
    leaves = [x.clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(squared(call)(*leaves), [leaves[n] for n in argnums])
    _, pull = torch.func.vjp(squared(call), *given)
    pulled = [pull(torch.ones(()))[n] for n in argnums]
    for one, other, third in zip(found, expected, pulled):
        assert torch.equal(one, other) and torch.equal(third, other)


def test_jacobians() -> None:
    given = qkv()
    found = torch.func.jacrev(lambda q: CAUSAL(q, *given[1:])[0, 0, 3])(given[0])
    query = given[0].clone().requires_grad_()
    row = CAUSAL(query, *given[1:])[0, 0, 3]
    expected = torch.stack([torch.autograd.grad(x, query, retain_graph=True)[0] for x in row])
    torch.testing.assert_close(found, expected)


IDS = torch.randint(0, 3, (SIZE, 2, 10)).sort(-1).values
OFFSETS = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
MAPPED: dict[str, tuple[Any, ...]] = {
    "plain": (plain, qkv(SIZE), 0),
    "both": (both, qkv(SIZE), 0),
    "shared keys": (plain, (qkv(SIZE)[0], *qkv()[1:]), (0, None, None)),
    "other places": (plain, tuple(x.movedim(0, d) for x, d in zip(qkv(SIZE), (3, 0, 4))), (3, 0, 4)),
    "negative places": (plain, tuple(x.movedim(0, -1) for x in qkv(SIZE)), -1),
    "shared table": (alibi, (*qkv(SIZE), torch.rand(4)), (0, 0, 0, None)),
    "tables": (alibi, (*qkv(SIZE), torch.rand(SIZE, 4)), 0),
    "far": (far, (*qkv(SIZE), torch.randn(4, 10)), (0, 0, 0, None)),
    "documents": (documents, (*qkv(SIZE), IDS), 0),
    "shared documents": (documents, (*qkv(SIZE), IDS[0]), (0, 0, 0, None)),
    "offsets": (lambda q, k, v, o: CAUSAL(q[:, :, :4], k, v, q_offset=o), (*qkv(SIZE), OFFSETS), 0),
    "lengths": (lambda q, k, v, n: CAUSAL(q, k, v, kv_lens=n, q_lens=n), (*qkv(SIZE), OFFSETS), 0),
    "twice": (torch.func.vmap(lambda *x: CAUSAL(*(t[None] for t in x))[0]), qkv(SIZE), 0),
}


def one_by_one(call: Callable[..., Any], given: tuple[Tensor, ...], dims: Any) -> list[Any]:
    dims = dims if isinstance(dims, tuple) else (dims,) * len(given)
    return [call(*(x if d is None else x.select(d, n) for x, d in zip(given, dims))) for n in range(SIZE)]


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_calls(name: str) -> None:
    call, given, dims = MAPPED[name]
    found = torch.func.vmap(call, in_dims=dims)(*given)
    assert torch.equal(found, torch.stack(one_by_one(call, given, dims)))
    found = torch.func.vmap(call, in_dims=dims, out_dims=2)(*given)
    assert torch.equal(found, torch.stack(one_by_one(call, given, dims), 2))


@pytest.mark.parametrize("name", ["plain", "other places", "tables", "lengths"])
def test_no_mapped_call_gives_what_has_the_shape_of_none(name: str) -> None:
    call, given, dims = MAPPED[name]
    own = dims if isinstance(dims, tuple) else (dims,) * len(given)
    none = [x.narrow(d, 0, 0) for x, d in zip(given, own)]
    assert torch.func.vmap(call, in_dims=dims)(*none).shape == torch.func.vmap(call, in_dims=dims)(*given)[:0].shape
    gradient = torch.func.vmap(torch.func.grad(squared(call)), in_dims=dims)(*none)
    assert gradient.shape == torch.func.vmap(torch.func.grad(squared(call)), in_dims=dims)(*given)[:0].shape


@pytest.mark.parametrize("name", ["plain", "both", "shared keys", "shared table", "tables", "far", "documents"])
def test_gradients_of_each_mapped_call(name: str) -> None:
    """Also of what all of them share, as torch has it: one gradient for each."""
    call, given, dims = MAPPED[name]
    floats = tuple(n for n, x in enumerate(given) if x.is_floating_point())
    gradient = torch.func.grad(squared(call), argnums=floats)
    found = torch.func.vmap(gradient, in_dims=dims)(*given)
    for one, other in zip(found, zip(*one_by_one(gradient, given, dims))):
        torch.testing.assert_close(one, torch.stack(other))


@pytest.mark.parametrize("name", ["plain", "shared keys", "shared table", "tables", "far", "documents", "twice"])
def test_gradients_through_mapped_calls(name: str) -> None:
    """By torch.func and by autograd."""
    call, given, dims = MAPPED[name]
    floats = tuple(n for n, x in enumerate(given) if x.is_floating_point())

    def loss(mapped: bool) -> Callable[..., Tensor]:
        whole = torch.func.vmap(call, in_dims=dims) if mapped else lambda *x: torch.stack(one_by_one(call, x, dims))
        return lambda *x: whole(*x).square().sum()

    leaves = [x.clone().requires_grad_() if n in floats else x for n, x in enumerate(given)]
    wanted = [leaves[n] for n in floats]
    expected = torch.autograd.grad(loss(False)(*leaves), wanted)
    for found in (
        torch.autograd.grad(loss(True)(*leaves), wanted),
        torch.func.grad(loss(True), argnums=floats)(*given),
    ):
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other)


def test_random_weights_of_mapped_calls() -> None:
    """As torch has it: asked for, a seed for all or one for each; a seed that is given serves all."""
    dropped = weft.Attention(dropout=0.5, name="dropped")
    given = [x[:1].expand(SIZE, *x.shape[1:]) for x in qkv(SIZE)]
    same = torch.func.vmap(dropped, randomness="same")(*given)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(dropped, randomness="different")(*given)
    assert not torch.equal(different[0], different[1])
    seeded = torch.func.vmap(lambda *x: dropped(*x, seed=4))(*given)
    assert torch.equal(seeded[2], dropped(*(x[2] for x in given), seed=4))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.func.vmap(dropped)(*given)


def test_what_is_wrong_is_said_as_ever() -> None:
    query, key, value = qkv(SIZE)
    with pytest.raises(weft.WeftError, match="key: expected dim 8 as in query, got 7"):
        torch.func.vmap(plain)(query, key[..., :7], value)
    with pytest.raises(weft.WeftError, match="slopes: missing"):
        torch.func.vmap(lambda *x: ALIBI(*x))(query, key, value)
