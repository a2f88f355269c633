"""An override of torchtitan's attention with Weft: its debug model trains with each sequence over two ranks.

Named in torchtitan's own configuration it gives any model a window on one sequence a rank:
`--override.imports torchtitan_attention.weft_attention`. Over ranks, torchtitan refuses attentions that it does not
know (`context_parallel_degree`), and its trainer wants a GPU. So this program trains by itself: two processes of gloo,
or those of torchrun, with torchtitan's model, configuration, FSDP and initial values. Needs torchtitan 0.3.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from char_gpt import python_manual
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torchtitan.config.override import OverrideConfig, apply_overrides, override
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

import weft
from weft import kv_pos, masks, q_pos
from weft.distributed import ContextParallel, ShardPlan

window = weft.scalar("window", int)
recent = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="recent")
ALL = 2**30  # a window that hides nothing


class WeftAttention(Module):
    """Causal attention in a window, in torchtitan's layout [B, L, heads, dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int = ALL

    def __init__(self, config: WeftAttention.Config) -> None:
        super().__init__()
        self.window = config.window
        self.over: tuple[ContextParallel, int] | None = None  # ranks, and the length of the whole sequence

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: object = None, scale: float | None = None, **_: Any
    ) -> Tensor:
        """[B, rows, Hq, D] of q [B, rows, Hq, D], k and v [B, rows, Hkv, D]."""
        if attention_masks is not None or scale not in (None, q.shape[-1] ** -0.5):
            raise ValueError("expected no mask, which the variant has, and the usual scale")
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        if self.over is None:
            out = recent(query, key, value, window=self.window)
        else:
            cp, length = self.over
            plan = planned(cp, length, tuple(query.shape), key.shape[1], self.window)
            out = cp.attention(recent, query, key, value, plan=plan, window=self.window)
        return out.transpose(1, 2)


@functools.lru_cache(maxsize=8)
def planned(cp: ContextParallel, length: int, shape: tuple[int, ...], kv_heads: int, window: int) -> ShardPlan:
    batch, heads, _, head_dim = shape
    return cp.plan(recent, batch=batch, heads=heads, kv_heads=kv_heads, length=length, head_dim=head_dim, dtype="fp32",
                   window=window)  # fmt: skip


@override(target=FlexAttention.Config, description="Weft's attention")
def weft_attention(config: FlexAttention.Config, window: int = ALL) -> WeftAttention.Config:
    """The configuration that takes the place of torchtitan's."""
    return WeftAttention.Config(window=window)


def made(near: int) -> Any:
    """torchtitan's debug model, with its own initial values, and attention that is overridden."""
    config = model_registry("debugmodel").model
    apply_overrides(OverrideConfig(imports=[("torchtitan_attention.weft_attention", {"window": near})]), config)
    torch.manual_seed(1)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def train(settings: argparse.Namespace, device: torch.device) -> None:
    """Train on this rank."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, balance="zigzag")
    model = made(settings.near).to(device)
    plan = planned(cp, settings.length, (settings.batch, 16, 0, 16), 16, settings.near)
    for module in model.modules():
        if isinstance(module, WeftAttention):
            module.over = cp, settings.length
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo does not scale gradients while it adds them
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    text, random = python_manual(), torch.Generator().manual_seed(2)
    positions = cp.rows(plan).to(device).expand(settings.batch, -1)
    for step in range(settings.steps):
        tokens = text.batch(random, settings.batch, settings.length).to(device)
        inputs, labels = (cp.shard(t, plan, dim=1) for t in (tokens[:, :-1], tokens[:, 1:]))
        logits = model(inputs, positions)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / inputs.numel()
        loss = loss / cp.ranks  # torchtitan's FSDP adds gradients up
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if cp.rank == 0:
            print(f"step {step + 1}   loss {mean:.5f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"ranks": 2, "steps": 20, "batch": 2, "length": 128, "near": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = parser.parse_args(arguments)
    on_ranks(functools.partial(train, settings), settings.ranks)


if __name__ == "__main__":
    importlib.import_module("torchtitan_attention").main()  # the module that torchtitan finds the override in
