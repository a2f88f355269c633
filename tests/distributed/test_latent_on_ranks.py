"""Latent attention over ranks of gloo: both forms are the definition's, and caches alone travel."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import weft
from weft import kv_pos, masks, q_pos
from weft.distributed import ContextParallel

from .on_ranks import error_of, made_once, on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]

H, RANK, ROPE, NOPE, DV = 4, 24, 8, 16, 20
MLA = weft.Attention(mask=masks.causal, latent=weft.Latent(RANK, ROPE), name="mla")
DROPPED = weft.Attention(
    mask=masks.causal & (q_pos - kv_pos < 20), latent=weft.Latent(RANK, 0), dropout=0.3, name="lone"
)


class Latents(NamedTuple):
    """Calls of latent attention: variants, and what else tells how they are made."""

    variants: tuple[weft.Attention, ...] = (MLA, DROPPED)
    nope: int = NOPE
    value_dim: int = DV
    projections: float = 1.0  # the size of numbers in uk and uv
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


SMALL = Latents()
LENGTHS: list[tuple[int, tuple[int, ...]]] = [(70, ()), (90, (0, 50, 57, 90)), (90, (0, 50, 80)), (5, ())]
FORMS = "expanded", "absorbed", "expanded"  # of ranks that do not agree
DIVIDED = [("ring", "zigzag"), ("exchange", "contiguous"), ("gather", "pairs"), ("ring", "contiguous")]


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compared(
    cp: ContextParallel, variant: weft.Attention, form: str | None, divided: tuple[str, str], length: int,
    starts: tuple[int, ...], of: Latents = SMALL,
) -> list[str]:  # fmt: skip
    """Of a call, what differs from the definition in float64."""
    assert variant.latent is not None
    batch, (_, nope, value_dim, scale, precision, device) = 1 if starts else 2, of
    rank, rope = variant.latent.rank, variant.latent.rope
    whole = {
        "query": _drawn(1, batch, H, length, nope + rope), "cache": _drawn(2, batch, 1, length, rank + rope),
        "uk": _drawn(3, H, rank, nope) * scale, "uv": _drawn(4, H, rank, value_dim) * scale,
    }  # fmt: skip
    whole = {n: t.to(precision) for n, t in whole.items()}
    for n in ("query", "cache"):  # what lies behind the last sequence is never read into a result
        whole[n][:, :, starts[-1] if starts else length :] = torch.nan
    dout, seed = _drawn(5, batch, H, length, value_dim), {"seed": 5} if variant.canonical.drops else {}
    where = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor(starts, dtype=torch.int32)) if starts else {}

    def defined(dtype: torch.dtype) -> dict[str, Tensor]:
        own = {n: t.to(dtype, copy=True).requires_grad_() for n, t in whole.items()}
        query, cache, uk, uv = own.values()
        out, lse = variant.reference(query, cache, uk=uk, uv=uv, return_lse=True, **where, **seed)
        (out * dout.to(dtype)).sum().backward()
        return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": t.grad for n, t in own.items()}}  # type: ignore[dict-item]

    made = ("latent", str(variant.name), length, starts, of[1:])
    exact, plain = made_once(made, lambda: (defined(torch.float64), defined(precision)))
    plan = cp.plan(
        variant, batch=batch, heads=H, length=length, head_dim=nope + rope, value_dim=value_dim, dtype="fp32",
        strategy=divided[0], balance=divided[1], **({"cu_seqlens": list(starts)} if starts else {}),
    )  # fmt: skip
    learns = form != "absorbed"
    own = {n: cp.shard(t, plan) if n in ("query", "cache") else t.clone() for n, t in whole.items()}
    own = {n: t.to(device) for n, t in own.items()}
    query, cache, uk, uv = (t.requires_grad_(learns) for t in own.values())
    out, lse = cp.attention(variant, query, cache, plan=plan, uk=uk, uv=uv, form=form, return_lse=True, **seed)
    found = {"out": out.detach(), "lse": lse.detach()}
    if learns:
        (out * cp.shard(dout.to(device, precision), plan)).sum().backward()
        found |= {f"d{n}": t.grad for n, t in own.items()}  # type: ignore[misc]
    wrong = []
    for n, got in found.items():
        want, beside = (t if n in ("duk", "duv") else cp.shard(t, plan) for t in (exact[n], plain[n]))
        if (off := error_of(got.cpu().double(), want, beside.double(), torch.finfo(precision).eps)) is not None:
            wrong.append(f"{variant.name} {form} {divided} {length} {starts} rank {cp.rank}: {n}: {off}")
    return wrong


def latent_already(
    cp: ContextParallel, of: Latents = SMALL, length: int = 40, scale: float = 0.2, off: float = 1e-5
) -> list[str]:
    """Queries that are latent, without uk and uv."""
    variant = of.variants[0].replace(scale=scale)
    assert variant.latent is not None
    rank, width = variant.latent.rank, variant.latent.rank + variant.latent.rope
    query, cache = (_drawn(n, 1, h, length, width).to(of.device, of.dtype) for n, h in ((1, H), (2, 1)))
    plan = cp.plan(variant, heads=H, length=length, head_dim=width, value_dim=rank, dtype="fp32", strategy="ring")
    out = cp.unshard(cp.attention(variant, cp.shard(query, plan), cp.shard(cache, plan), plan=plan), plan)
    return [] if torch.allclose(out, variant(query, cache), atol=off) else ["a latent query"]


def _refused(cp: ContextParallel) -> list[str]:
    plan = cp.plan(MLA, heads=H, length=40, head_dim=NOPE + ROPE, value_dim=DV, dtype="fp32", strategy="ring")
    query, cache = cp.shard(_drawn(1, 1, H, 40, NOPE + ROPE), plan), cp.shard(_drawn(2, 1, 1, 40, RANK + ROPE), plan)
    uk, uv = _drawn(3, H, RANK, NOPE), _drawn(4, H, RANK, DV)
    calls = {
        "the absorbed form has no backward": {"form": "absorbed", "uk": uk.clone().requires_grad_(), "uv": uv},
        "form: expected 'expanded' or 'absorbed', got 'other'": {"form": "other", "uk": uk, "uv": uv},
        "value: latent attention takes query and cache only": {"value": cache, "uk": uk, "uv": uv},
        "form: rank 1: absorbed; others: expanded": {"form": FORMS[cp.rank], "uk": uk, "uv": uv},
    }  # fmt: skip
    wrong = []
    for expected, given in calls.items():
        try:
            cp.attention(MLA, query, cache, plan=plan, **given)
        except weft.WeftError as error:
            wrong += [] if expected in str(error) else [f"expected {expected!r}, got {error}"]
        else:
            wrong.append(f"{expected!r} was not said")
    return wrong


def _work(rank: int) -> list[str]:
    cp, wrong = ContextParallel(), list[str]()
    calls = itertools.product((MLA, DROPPED), (None, "absorbed"), zip(DIVIDED, LENGTHS))
    for variant, form, (divided, (length, starts)) in calls:
        wrong += compared(cp, variant, form, divided, length, starts)
    return wrong + latent_already(cp) + _refused(cp)


def test_both_forms_are_the_definition(tmp_path: Path) -> None:
    wrong = on_ranks(3, _work, tmp_path)
    assert not any(wrong), "\n".join(wrong)


def test_rows_that_travel_are_those_of_a_cache() -> None:
    plan = weft.distributed.plan(
        MLA, ranks=4, heads=H, length=4096, head_dim=NOPE + ROPE, value_dim=DV, strategy="exchange",
        balance="contiguous", device="h100",
    )  # fmt: skip
    assert plan.columns == RANK + ROPE
    assert plan.predicted.bytes_in_host == 3 * 1024 * (RANK + ROPE) * 2
