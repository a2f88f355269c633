"""Calls of Weft inside torch's region `context_parallel` compute over ranks, or say why not; never a shard alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.distributed import ContextParallel

from .on_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]

slopes, sinks = weft.tensor("slopes", 1), weft.tensor("sinks", 1)
window = weft.scalar("window", int)
causal = weft.Attention(mask=masks.causal, name="causal")
recent = weft.Attention(score - slopes[head] * (q_pos - kv_pos), masks.causal & (q_pos - kv_pos < window),
                        sink=sinks[head], name="recent")  # fmt: skip
LEARNED = {"slopes": torch.tensor([0.1, 0.2, 0.0, 0.3]), "sinks": torch.tensor([1.0, -2.0, 0.0, 0.5])}
dropped = causal.replace(dropout=0.5, name="dropped")
CASES: list[tuple[weft.Attention, dict[str, Any]]] = [
    (causal, {}), (recent, {"window": 11, **LEARNED}), (dropped, {"seed": 7}), (dropped, {"train": False}),
]  # fmt: skip
L = 32


def compared(
    rank: int, device: str = "cpu", length: int = L, width: int = 16, latent: tuple[int, int] = (8, 8),
    off: float = 1e-5,
) -> list[str]:  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options  # type: ignore[attr-defined]

    mesh, wrong = init_device_mesh(device, (2,)), []
    cp, options = ContextParallel(mesh, balance="zigzag"), _cp_options
    whole = torch.randn(3, 2, 4, length, width, generator=torch.Generator().manual_seed(3)).to(device)
    dout = torch.randn(2, 4, length, width, generator=torch.Generator().manual_seed(4)).to(device)
    for balance in ("zigzag", "contiguous"):
        cp.balance = balance
        options.enable_load_balance = balance == "zigzag"
        for variant, given_operands in CASES:
            operands = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in given_operands.items()}
            plan = cp.plan(causal, batch=2, heads=4, length=length, head_dim=width, dtype="fp32")
            right = [t.clone().requires_grad_() for t in whole]
            (variant.reference(*right, **operands) * dout).sum().backward()
            local = whole.clone()
            given = dout.clone()
            with context_parallel(mesh, buffers=[local, given], buffer_seq_dims=[3, 2]):
                tensors = [t.clone().requires_grad_() for t in local]
                out = variant(*tensors, **operands)
                (out * given).sum().backward()
                assert torch.equal(given, cp.shard(dout, plan))  # torch deals rows as Weft does
            for name, found, exact in zip("qkv", tensors, right, strict=True):
                if not torch.allclose(found.grad, cp.shard(exact.grad, plan), atol=off):  # type: ignore[arg-type]
                    wrong.append(f"{variant.name} {balance}: gradient of {name}")
        wrong += _of_a_cache(mesh, balance, device, length, weft.Latent(*latent), off)
    options.enable_load_balance = True
    return wrong + refused(mesh, whole[0])


def _of_a_cache(mesh: Any, balance: str, device: str, length: int, latent: weft.Latent, off: float) -> list[str]:
    """Latent attention, of queries that are latent already and of others."""
    from torch.distributed.tensor.experimental import context_parallel

    rank, rope = latent.rank, latent.rope
    plain = weft.Attention(mask=masks.causal, latent=latent, scale=0.3 if rank == 8 else 0.1, name="mla")
    generator, wrong = torch.Generator().manual_seed(5), list[str]()
    query, cache = (torch.randn(2, n, length, rank + rope, generator=generator).to(device) for n in (4, 1))
    projections = {n: torch.randn(4, rank, rank, generator=generator).to(device) for n in ("uk", "uv")}
    if rank != 8:
        projections = {n: t / rank**0.5 for n, t in projections.items()}
    for given in ({}, projections):
        own = {n: t.clone().requires_grad_() for n, t in given.items()}
        expected, right = (
            plain(query, cache, **given).detach(),
            {n: t.clone().requires_grad_() for n, t in given.items()},
        )
        if given:
            plain(query, cache, **right).sum().backward()
        rows = [query.clone(), cache.clone(), expected]
        with context_parallel(mesh, buffers=rows, buffer_seq_dims=[2] * 3):
            out = plain(*rows[:2], **own)
            if own:
                out.sum().backward()
            same = torch.allclose(out, rows[2], atol=off)
        same = same and all(torch.allclose(own[n].grad, right[n].grad, atol=100 * off) for n in own)  # type: ignore[arg-type]
        wrong += [] if same else [f"latent attention {balance} {[*given]}"]
    return wrong


def refused(mesh: Any, whole: Tensor) -> list[str]:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    compiled = torch.compile(causal.__call__, backend="eager")
    compiled(whole, whole, whole)  # a graph of whole sequences
    biased = weft.Attention(score + weft.tensor("bias", 2)[batch, kv_pos], name="biased")
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=8, rope=8), scale=1.0, name="mla")
    wrong, local, rows = [], whole.clone(), whole.shape[2]
    with context_parallel(mesh, buffers=[local], buffer_seq_dims=[2]):
        lens = torch.tensor([rows // 2] * 2, dtype=torch.int32, device=whole.device)
        bias = local[..., 0, :, 0].contiguous()
        calls: dict[str, Any] = {
            "kv_lens: not known where the sequence is sharded": lambda: causal(local, local, local, kv_lens=lens),
            f"as many queries as keys on each rank, got 3 and {rows // 2}": lambda: causal(
                local[:, :, :3], local, local
            ),
            f"ranges from 0 to {rows - 1} in this call, but bias has": lambda: biased(local, local, local, bias=bias),
            "torch's context parallel is on, and deals rows": lambda: causal(
                *[DTensor.from_local(local, mesh, [Shard(2)], run_check=False)] * 3
            ),
            f"as many queries as keys on each rank, got {rows // 2} and 3": lambda: mla(
                local[..., :16], local[:, :1, :3, :16]
            ),
            "reference has this rank's rows alone": lambda: causal.reference(local, local, local),
            "calls over ranks are not traced by torch.compile": lambda: compiled(local, local, local),
        }
        for expected, call in calls.items():
            try:
                call()
                wrong.append(f"nothing was said: {expected}")
            except Exception as error:
                if expected not in str(error):
                    wrong.append(f"expected {expected!r}, got {type(error).__name__}: {error}")
    if causal(whole, whole, whole).shape != whole.shape:
        wrong.append("a call after the region")
    return wrong


def test_calls_inside_compute_over_ranks_or_are_refused(tmp_path: Path) -> None:
    wrong = on_ranks(2, compared, tmp_path)
    assert not any(wrong), "\n".join(wrong)


def test_another_function_in_the_place_of_torchs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 2, 8, 16)
    expected = causal(query, query, query)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *given, **options: given[0])
    assert torch.equal(causal(query, query, query), expected)
    causal.reference(query, query, query)
