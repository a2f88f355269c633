"""FSDP2, context parallel and tensor parallel on one mesh: loss and gradients of a model are those of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft import head, kv_pos, masks, q_pos
from weft.distributed import ContextParallel

from .on_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]

sinks = weft.tensor("sinks", 1)
recent = weft.Attention(mask=masks.causal & (q_pos - kv_pos < 11), sink=sinks[head], name="recent")
B, L, HEADS, KV_HEADS, D, WORDS = 4, 30, 4, 2, 8, 23


class Layer(nn.Module):
    """Attention whose call is handed in, and a network."""

    def __init__(self, head_dim: int = D) -> None:
        super().__init__()
        self.head_dim, width = head_dim, HEADS * head_dim
        self.q, self.k, self.v = (nn.Linear(width, n * head_dim, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(64, width)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        normed = self.before(x)
        projected = (f(normed).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        query, key, value = (t.transpose(1, 2) for t in projected)
        own = self.sinks.to_local() if hasattr(self.sinks, "to_local") else self.sinks
        x = x + self.o(attend(query, key, value, own).transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, head_dim: int = D) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, HEADS * head_dim), nn.Linear(HEADS * head_dim, WORDS)
        self.layers = nn.ModuleList(Layer(head_dim) for _ in range(2))

    def forward(self, tokens: Tensor, attend: Any) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def loss_of(model: Model, tokens: Tensor, labels: Tensor, attend: Any, length: int = L) -> Tensor:
    """Its part of the mean over all tokens of the whole batch."""
    logits = model(tokens, attend).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum") / (B * length)


def compare(rank: int, shapes: list[tuple[int, int, int]]) -> list[str]:
    wrong = []
    for shape in shapes:
        wrong += trained(shape)
    return wrong


def _over_hosts(rank: int) -> list[str]:
    return [wrong for strategy in ("heads+ring", "heads+exchange") for wrong in trained((2, 2, 1), strategy)]


def trained(
    shape: tuple[int, int, int], strategy: str = "auto", device: str = "cpu", length: int = L, head_dim: int = D,
    relative: float = 1e-4,
) -> list[str]:  # fmt: skip
    """strategy: one of two dimensions takes the first two for the sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp", "tp"))
    drawn = torch.Generator().manual_seed(4)
    tokens, labels = torch.randint(WORDS, (2, B, length), generator=drawn).to(device)
    torch.manual_seed(5)
    alone, divided = Model(head_dim).to(device), Model(head_dim).to(device)
    divided.load_state_dict(alone.state_dict())
    whole_loss = loss_of(
        alone, tokens, labels, lambda q, k, v, own: recent.reference(q, k, v, sinks=own), length
    )  # the definition
    whole_loss.backward()

    by_heads = {n: ColwiseParallel() for n in ("q", "k", "v", "up")} | {n: RowwiseParallel() for n in ("o", "down")}
    for layer in divided.layers:
        parallelize_module(layer, mesh["tp"], by_heads)
        layer.sinks = nn.Parameter(distribute_tensor(layer.sinks.detach(), mesh["tp"], [Shard(0)]))  # type: ignore[assignment]
        fully_shard(layer, mesh=mesh["dp", "cp"])
    fully_shard(divided, mesh=mesh["dp", "cp"])
    has_hosts = "+" in strategy
    cp = ContextParallel(mesh, dim=("dp", "cp") if has_hosts else "cp", strategy=strategy)
    groups, group = (1, 0) if has_hosts else (shape[0], mesh.get_local_rank("dp"))
    plan = cp.plan(recent, batch=B // groups, heads=HEADS // shape[2], kv_heads=KV_HEADS // shape[2], length=length,
                   head_dim=head_dim, dtype="fp32")  # fmt: skip

    def attend(query: Tensor, key: Tensor, value: Tensor, own: Tensor) -> Tensor:
        return cp.attention(recent, query, key, value, plan=plan, sinks=cp.share(own))

    mine = [cp.shard(t.chunk(groups)[group], plan, dim=1) for t in (tokens, labels)]
    loss = loss_of(divided, *mine, attend, length)
    (loss * (shape[0] * shape[1])).backward()  # FSDP takes the mean over these ranks, and the loss is their sum
    total = loss.detach() / shape[2]
    dist.all_reduce(total)
    label = f"{shape} {strategy}"
    wrong = [] if torch.allclose(total, whole_loss, atol=1e-5) else [f"{label}: loss {total} in place of {whole_loss}"]
    for (name, right), (_, parameter) in zip(alone.named_parameters(), divided.named_parameters(), strict=True):
        found = parameter.grad.full_tensor()  # type: ignore[union-attr]
        if not torch.allclose(found, right.grad, atol=1e-5, rtol=relative):  # type: ignore[arg-type]
            wrong.append(f"{label}: gradient of {name} is off by {(found - right.grad).abs().max():.1e}")  # type: ignore[operator]
    return wrong


def test_data_sequence_and_heads_are_divided_together(tmp_path: Path) -> None:
    """On four ranks, where one of the three dimensions has size 1."""
    wrong = on_ranks(4, partial(compare, shapes=[(1, 2, 2), (2, 2, 1), (2, 1, 2)]), tmp_path)
    assert not any(wrong), "\n".join(wrong)


def test_fsdp_and_two_dimensions_of_a_sequence(tmp_path: Path) -> None:
    """Devices of a host divide heads, keys travel between hosts, and parameters lie on all of them."""
    wrong = on_ranks(4, _over_hosts, tmp_path)
    assert not any(wrong), "\n".join(wrong)


def _after_a_group_of_some(rank: int) -> list[str]:
    """Ranks belong to different numbers of groups, and make the same ContextParallel twice."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "outer", "inner"))
    if rank in (0, 3):
        dist.new_group([rank], use_local_synchronization=True)
    variant = weft.Attention(mask=weft.masks.causal, name="in_a_mesh")
    wrong = []
    for _ in range(2):
        cp = weft.distributed.ContextParallel(mesh, dim=("outer", "inner"))
        plan = cp.plan(variant, batch=1, heads=2, length=12, head_dim=8, dtype="fp32")
        whole = [torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        found = cp.unshard(cp.attention(variant, *(cp.shard(t, plan) for t in whole), plan=plan), plan)
        if not torch.allclose(found, variant.reference(*whole), atol=1e-5):
            wrong.append(f"rank {rank}: another result")
    return wrong


def test_ranks_may_belong_to_different_numbers_of_groups(tmp_path: Path) -> None:
    wrong = on_ranks(4, _after_a_group_of_some, tmp_path, limit=60.0)
    assert not any(wrong), "\n".join(wrong)


@pytest.mark.thorough
def test_on_eight_ranks(tmp_path: Path) -> None:
    wrong = on_ranks(8, partial(compare, shapes=[(2, 2, 2)]), tmp_path)
    assert not any(wrong), "\n".join(wrong)
