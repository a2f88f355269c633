"""A rank that does something else than the others is an error on all, which says which one and what."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import masks
from weft.distributed import ContextParallel, ShardedPagedCache, ShardPlan, sharded
from weft.runtime.run.variant import Variant

from .on_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]
RANKS, ODD, LENGTH = 3, 1, 24
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
DOCUMENTS = weft.Attention(mask=masks.document(weft.tensor("doc", 1, int)), name="documents")


class Rank:
    """One of the ranks, and what was wrong with what it heard."""

    def __init__(
        self, rank: int, ranks: int = RANKS, device: str = "cpu", length: int = LENGTH, width: int = 8,
        hasty: float = 2.0,
    ) -> None:  # fmt: skip
        self.rank, self.ranks, self.is_odd, self.wrong = rank, ranks, rank == ODD, list[str]()
        self.device, self.length, self.width = device, length, width  # width: of a head
        self.timeout = hasty  # seconds
        self.group, *self.hasty = (
            dist.new_group(list(range(ranks)), timeout=timedelta(seconds=n)) for n in (60.0, hasty, hasty, hasty)
        )
        self.sizes: dict[str, Any] = {
            "batch": 1, "heads": ranks, "length": length, "head_dim": width, "dtype": "fp32",
        }  # fmt: skip

    def drawn(self, learns: bool = False) -> list[Tensor]:
        """query, key and value, whole."""
        generator, shape = torch.Generator().manual_seed(3), (1, self.ranks, self.length, self.width)
        return [torch.randn(shape, generator=generator).to(self.device).requires_grad_(learns) for _ in range(3)]

    def told(self, expected: str, call: Callable[[], object], own: str | None = None) -> None:
        """own: what the odd rank hears, where that differs."""
        wanted = own if own is not None and self.is_odd else expected
        try:
            call()
        except (RuntimeError, ValueError, MemoryError) as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            if wanted not in text:
                self.wrong.append(f"rank {self.rank}: expected {wanted!r}, got {text}")
        else:
            self.wrong.append(f"rank {self.rank}: {wanted!r} was not said")

    def same(self, what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.allclose(found, expected, atol=1e-5 if self.device == "cpu" else 1e-4):
            self.wrong.append(f"rank {self.rank}: {what} differs by {(found - expected).abs().max()}")


# -- calls -------------------------------------------------------------------------------------------------------------
def calls(here: Rank) -> None:
    """What differs before a call."""
    cp, is_odd = ContextParallel(here.group), here.is_odd
    plan = cp.plan(CAUSAL, **here.sizes, strategy="ring")
    q, k, v = (cp.shard(t, plan) for t in here.drawn())
    others = f"rank {ODD} cannot make this call: "
    none = "causal: plan: expected a ShardPlan, as cp.plan makes it, got NoneType"
    here.told(others + none, lambda: cp.attention(CAUSAL, q, k, v, plan=None if is_odd else plan), none)  # type: ignore[arg-type]
    real, q8 = "query: expected real numbers over ranks, got torch.float8_e4m3fn", q.to(torch.float8_e4m3fn)
    here.told(others + f"causal: {real}", lambda: cp.attention(CAUSAL, q8 if is_odd else q, k, v, plan=plan), real)
    unknown = "target: expected one of hopper"
    here.told(others, lambda: cp.attention(CAUSAL, q, k, v, plan=plan, target="gpu" if is_odd else None), unknown)
    here.told(f"options: rank {ODD}: target=interpret, deterministic=None; others: target=None",
              lambda: cp.attention(CAUSAL, q, k, v, plan=plan, target="interpret" if is_odd else None))  # fmt: skip
    torch.use_deterministic_algorithms(is_odd)
    here.told(f"options: rank {ODD}: target=None, deterministic=True; others: target=None, deterministic=None",
              lambda: cp.attention(CAUSAL, q, k, v, plan=plan))  # fmt: skip
    torch.use_deterministic_algorithms(False)
    cast = torch.autocast(here.device, torch.bfloat16, enabled=is_odd)
    words = f"{ODD}: bfloat16, bfloat16, bfloat16; others: float32"
    here.told(f"dtypes: rank {words}", lambda: cast(cp.attention)(CAUSAL, q, k, v, plan=plan))
    length = here.length
    packed = [cp.plan(CAUSAL, **here.sizes, strategy="gather", cu_seqlens=[0, n, length]) for n in (4, 5)]
    here.told(f"plan: rank {ODD}: gather", lambda: cp.attention(CAUSAL, q, k, v, plan=packed[is_odd]))
    docs = [(torch.arange(length, device=here.device) >= n).long() for n in (3, 4)]
    looked = [cp.plan(DOCUMENTS, **here.sizes, strategy="gather", doc=doc) for doc in docs]
    here.told(
        f"plan: rank {ODD}: gather", lambda: cp.attention(DOCUMENTS, q, k, v, plan=looked[is_odd], doc=docs[is_odd])
    )
    for option, value in (("return_lse", "no"), ("deterministic", 3), ("train", None), ("target", []), ("form", "x")):
        told, odd = f"causal: {option}: expected", {option: value} if is_odd else {}
        here.told(others + told, lambda: cp.attention(CAUSAL, q, k, v, plan=plan, **odd), told)  # noqa: B023
    recent = weft.Attention(mask=weft.q_pos - weft.kv_pos < weft.scalar("window", int), name="recent")
    of_window = cp.plan(recent, **here.sizes, strategy="ring", window=numpy.int64(5))
    window = numpy.int64(5) if is_odd else 5  # the same number
    here.same("a number of numpy", *(cp.attention(recent, q, k, v, plan=of_window, window=w) for w in (window, 5)))
    here.told("window: expected an int, got 5.5", lambda: cp.attention(recent, q, k, v, plan=of_window, window=5.5))
    for wrong, call in (
        ("rows: of: expected 'queries' or 'keys', got 'both'", lambda: cp.rows(plan, of="both")),
        (f"shard: expected a tensor with a dimension 9, got {[*q.shape]}", lambda: cp.shard(q, plan, dim=9)),
        ("shard: tensor: expected a tensor, got NoneType", lambda: cp.shard(None, plan)),  # type: ignore[arg-type]
        ("shard: plan: expected a ShardPlan, as cp.plan makes it, got NoneType", lambda: cp.shard(q, None)),  # type: ignore[arg-type]
    ):
        here.told(wrong, call)
    here.told(others, lambda: cp.unshard(q, plan, dim="rows" if is_odd else 2), "a tensor with a dimension 'rows'")  # type: ignore[arg-type]
    here.told(others, lambda: cp.unshard(q, plan, of="query" if is_odd else "queries"), "of: expected 'queries' or")
    here.told(others, lambda: cp.unshard(q, plan, dim=7 if is_odd else 2), "expected a tensor with a dimension 7")
    here.told(f"tensor: rank {ODD}: {[1, here.ranks, here.width]} float64",
              lambda: cp.unshard(q.double() if is_odd else q, plan))  # fmt: skip


def of_dtensors(here: Rank) -> None:
    """What differs before a call on DTensors: they have rows as cp.shard gives neighbours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(here.device, (here.ranks,))
    window = weft.Attention(mask=weft.q_pos - weft.kv_pos < weft.scalar("window", int), name="recent")
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in here.drawn())
    others = f"rank {ODD} cannot make this call: recent: plan: window: missing"
    here.told("x: expected a plain tensor, got a DTensor; quantise what", lambda: weft.fp8.quantize(q))
    here.told(others, lambda: window(q, k, v, **({} if here.is_odd else {"window": 5})), "window: missing")
    here.told(f"plan: rank {ODD}: ", lambda: window(q, k, v, window=6 if here.is_odd else 7))
    here.told(
        f"backward: rank {ODD}: recent of call", _in_other_order(here, lambda: window(*_learned(q, k, v), window=5))
    )


def _learned(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def _in_other_order(here: Rank, call: Callable[[], Tensor]) -> Callable[[], object]:
    """The backward of one of two calls, another one on the odd rank."""
    outs = [call() for _ in range(2)]
    return outs[here.is_odd].sum().backward


def backwards(here: Rank) -> None:
    """Backward passes in another order, with other gradients, or not at all."""
    cp, is_odd = ContextParallel(here.group), here.is_odd
    tensors = here.drawn(learns=True)
    right = torch.autograd.grad(CAUSAL(*tensors, return_lse=True)[0].sum(), tensors)

    def called(plan: ShardPlan, **more: Any) -> tuple[Any, list[Tensor]]:
        shards = [cp.shard(t.detach(), plan).requires_grad_() for t in tensors]
        return cp.attention(CAUSAL, *shards, plan=plan, **more), shards

    for strategy in ("ring", "heads"):
        plan = cp.plan(CAUSAL, **here.sizes, strategy=strategy)
        here.told(f"backward: rank {ODD}: causal of call", _in_other_order(here, partial(lambda p: called(p)[0], plan)))
        again = partial(called, plan) if is_odd else called(plan)[0].sum().backward
        if is_odd:
            called(plan)
        here.told(f"call: rank {ODD}: variant causal (", again)
        (out, lse), shards = called(plan, return_lse=True)  # the odd rank makes no use of lse, and that is no mistake
        (out.sum() + (0.0 if is_odd else 0.0 * lse.sum())).backward()
        for t, gradient in zip(shards, right):
            here.same(f"{strategy}: a gradient", t.grad, cp.shard(gradient, plan))  # type: ignore[arg-type]
    out, _ = called(cp.plan(CAUSAL, **here.sizes, strategy="ring"))
    loss = out.sum()
    loss.backward(retain_graph=not is_odd)
    here.told(f"rank {ODD} cannot make this call: ", loss.backward, "Trying to backward through the graph a second")


# -- ranks that do not come ------------------------------------------------------------------------------------------
def unanswered(here: Rank) -> None:
    """One that fails before it has heard what others call: they hear of what differs, and not of a timeout."""

    def fails(*given: object) -> None:
        raise MemoryError("no memory")

    cp, right = ContextParallel(here.group), sharded._Work
    window = weft.Attention(mask=weft.q_pos - weft.kv_pos < weft.scalar("window", int), name="recent")
    plans = [cp.plan(window, **here.sizes, strategy="exchange", window=n) for n in (5, 6)]
    q, k, v = (cp.shard(t, plans[0]) for t in here.drawn())
    sharded._Work = fails if here.is_odd else right  # type: ignore[assignment, misc]
    call = partial(cp.attention, window, q, k, v, plan=plans[here.is_odd], window=5 + here.is_odd)
    here.told(f"plan: rank {ODD}: exchange", call, "no memory")
    sharded._Work = right  # type: ignore[misc]
    found = cp.attention(window, q, k, v, plan=plans[0], window=5)
    here.same("a call after that", cp.unshard(found, plans[0]), window(*here.drawn(), window=5))


def absent(here: Rank) -> None:
    """One that fails within a call, or calls nothing: others wait until the timeout of the group, and say for whom."""

    contexts = [ContextParallel(group) for group in here.hasty[:2]]
    forward = Variant.forward

    def called(cp: ContextParallel) -> Tensor:
        plan = cp.plan(CAUSAL, **here.sizes, strategy="ring")
        out: Tensor = cp.attention(CAUSAL, *(cp.shard(t, plan).requires_grad_() for t in here.drawn()), plan=plan)
        return out

    def fails(variant: Any, call: Any) -> Any:
        raise MemoryError("no memory")

    if here.is_odd:
        Variant.forward = fails  # type: ignore[method-assign]
    failed = f"rank {ODD} failed in the forward of causal, call 1: MemoryError: no memory"
    # one of two has sent all its keys before it fails: the other hears of it when it asks for a backward
    call = called if here.ranks > 2 else lambda cp: called(cp).sum().backward()
    here.told(failed, lambda: call(contexts[0]), "no memory")
    Variant.forward = forward  # type: ignore[method-assign]
    dist.barrier()
    out = called(contexts[1])
    if here.is_odd:
        time.sleep(2 * here.timeout)
    else:
        here.told(f"for call 2; rank {ODD}: ended, or does something else", out.sum().backward)
    dist.barrier()
    if here.is_odd:
        time.sleep(2 * here.timeout)
    else:
        here.told(f"ContextParallel: rank {here.rank} did not meet all {here.ranks} ranks of its group within "
                  f"{here.timeout:g} s, each of which has to make one; rank {ODD}: ended",
                  lambda: ContextParallel(here.hasty[2]))  # fmt: skip


# -- caches ----------------------------------------------------------------------------------------------------------
def caches(here: Rank, dim: str) -> None:
    """Sequences that were changed otherwise, other steps, and ranks that make no cache."""
    is_odd, others, heads, width = here.is_odd, f"rank {ODD} cannot make this call: ", here.ranks, here.width
    sizes = {"kv_heads": heads, "head_dim": width, "dtype": torch.float32, "device": here.device}

    def made(**more: Any) -> ShardedPagedCache:
        page = 4 * here.ranks if dim == "sequence" else 8
        return ShardedPagedCache(16, **{dim: here.group}, page=page, **{**sizes, **more})

    here.told(others, lambda: made(kv_heads=heads + is_odd, head_dim=width - width * is_odd), "expected")
    eighths: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "scale": "head"}
    ones = torch.ones(1, heads, device=here.device)
    for what, differs in (
        ("scale: ", {**eighths, "scale": "token"} if is_odd else eighths),
        ("k_descale: ", eighths | {"k_descale": 2.0 if is_odd else 1.0}),
        ("v_descale: ", eighths | {"v_descale": ones * (1 + is_odd)}),
        ("latent: ", {"latent": weft.Latent(8 - 4 * is_odd, 4 + 4 * is_odd), "kv_heads": None, "head_dim": None}),
    ):
        if dim == "sequence" or what != "latent: ":  # a latent cache has one head
            here.told(what, lambda: made(**differs))  # noqa: B023
    cache = made()
    key = torch.randn(1, heads, 20, width, generator=torch.Generator().manual_seed(1)).to(here.device)
    query = cache.shard(key[:, :, :1])
    ids = list(range(20))
    a, b = cache.allocate(), cache.allocate()
    for n, sequence in enumerate((a, b)):
        cache.append([sequence], key[:, :, :20], key[:, :, :20], tokens=[[t + 100 * n for t in ids]])
    word = f"rank {ODD}: "

    def attend(sequence: int) -> Callable[[], object]:
        return lambda: cache.view([sequence]).attend(0, CAUSAL, query)

    cast = torch.autocast(here.device, torch.bfloat16, enabled=is_odd)
    here.told(f"query: {word}[1, {query.shape[1]}, 1, {width}] bfloat16; others", lambda: cast(attend(a))())
    here.told(f"step: {word}read only, 0 layers appended, 1: 20 + 0", attend(b if is_odd else a))
    here.told(others, lambda: cache.append([a], key[:, :, :2], None if is_odd else key[:, :, :2]), "append: ")
    with cache.extend([a], [1]) as step:
        if not is_odd:
            step.append(0, *[key[:, :, :1]] * 2)
        here.told(f"step: {word}open, 0 layers appended", lambda: step.attend(0, CAUSAL, query))
        step.append(0, *[key[:, :, :1]] * 2)
    here.told("call: rank", lambda: cache.extend([a], [1]) if is_odd else attend(a)())
    if dim == "heads":
        here.told(f"out: {word}[1, 1, 1, {width}] float64", lambda: cache.unshard(query.double() if is_odd else query))
        here.told(others, lambda: cache.unshard(None if is_odd else query), "unshard: out: expected a tensor")  # type: ignore[arg-type]
        here.told(f"call: {word}call unshard", lambda: cache.unshard(query) if is_odd else attend(a)())
    here.same("after mistakes", attend(a)(), attend(a)())  # type: ignore[arg-type]
    prompts = [[t + 100 * n for t in ids] for n in (0, 1)]
    of_equal_length: list[tuple[str, Callable[[], object]]] = [  # the next step alone would not tell them apart
        ("fork", lambda: cache.fork(b if is_odd else a)), ("allocate", lambda: cache.allocate(prompts[is_odd])),
        ("swap_out", lambda: (cache.swap_out(b if is_odd else a), cache.swap_in(b if is_odd else a))),
    ]  # fmt: skip
    for what, change in of_equal_length:  # of the cache that these names mean now
        cache = made()
        a, b = cache.allocate(), cache.allocate()
        for n, sequence in enumerate((a, b)):
            cache.append([sequence], key[:, :, :20], key[:, :, :20], tokens=[prompts[n]])
        change()
        here.told(f"changes: {word}", lambda: cache.extend([a], [1]))  # noqa: B023
        if cache.length(a) != 20:
            here.wrong.append(f"{what}: a step that ranks did not agree on is left open")


def every_fault(here: Rank) -> list[str]:
    calls(here)
    of_dtensors(here)
    backwards(here)
    for dim in ("sequence", "heads"):
        caches(here, dim)
    unanswered(here)
    absent(here)
    return here.wrong


def _work(rank: int) -> list[str]:
    return every_fault(Rank(rank))


def test_each_fault_of_a_rank_is_an_error_on_all(tmp_path: Path) -> None:
    wrong = on_ranks(RANKS, _work, tmp_path, limit=240.0)
    assert not any(wrong), "\n".join(wrong)
