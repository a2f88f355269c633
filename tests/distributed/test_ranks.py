"""Calls over 2, 3 and 4 ranks of gloo on one CPU: every strategy computes what the definition does."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import kv_pos, masks, q_pos, score
from weft.distributed import ContextParallel

from .on_ranks import KV_HEADS, PACKED, STRATEGIES, B, D, H, cases, compare, is_taken, on_ranks, variants

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


def _contexts(rank: int) -> list[ContextParallel]:
    """Of 4, 3 and 2 ranks of the 4, those that this one belongs to."""
    groups = [dist.new_group(list(range(n))) for n in (4, 3, 2)]
    return [ContextParallel(g) for n, g in zip((4, 3, 2), groups) if rank < n]


def _compared(rank: int, number: int | None) -> list[str]:
    wrong = []
    for n, (name, strategy, balance, lengths, kv_heads) in enumerate(cases(number)):
        contexts = _contexts_of.get(rank) or _contexts_of.setdefault(rank, _contexts(rank))
        for cp in contexts if number is None else [c for c in contexts if c.ranks == (4, 2, 3)[n % 3]]:
            if is_taken(strategy, cp.ranks, kv_heads):
                overlaps = (None, True, False)[n % 3] if strategy == "exchange" else None
                wrong += compare(cp, name, strategy, balance, lengths, kv_heads, overlaps=overlaps)
    return wrong


def _packed(rank: int, number: int | None) -> list[str]:
    """Sequences that are packed: uneven ones, empty ones, rows behind the last, more ranks than sequences."""
    wrong, names = [], [n for n in variants(8) if n != "documents"]
    every = list(itertools.product(names, STRATEGIES, PACKED, KV_HEADS))
    step = 1 if number is None else len(every) // number | 1
    for n, (name, strategy, (length, starts), kv_heads) in enumerate(every[::step]):
        for cp in _contexts_of[rank]:
            if cp.ranks == (4, 2, 3)[n % 3] and is_taken(strategy[0], cp.ranks, kv_heads):
                wrong += compare(cp, name, *strategy, (length, length), kv_heads, starts=starts)
    return wrong


_contexts_of: dict[int, list[ContextParallel]] = {}


def _dropped(rank: int) -> list[str]:
    """Dropout where keys of a rank begin with those that share draws, and where they do not; a seed that is drawn."""
    wrong = []
    calls = itertools.product(
        ("dropout", "dropout of a share"), (("ring", "zigzag"), ("exchange", "pairs"), ("heads", "zigzag"))
    )
    for n, (name, strategy) in enumerate(calls):
        for cp in _contexts_of[rank]:
            if cp.ranks == (4, 3, 2)[n % 3] and is_taken(strategy[0], cp.ranks, 2):
                wrong += compare(cp, name, *strategy, (600, 600), 2, overlaps=True if n % 2 else None)
                wrong += compare(cp, name, *strategy, (600, 600), 2, starts=(0, 130, 500, 600))
    return wrong + seeds(_contexts_of[rank][0])


def seeds(
    cp: ContextParallel, device: str = "cpu", dtype: torch.dtype = torch.float32, length: int = 32, width: int = D,
    off: float = 1e-5,
) -> list[str]:  # fmt: skip
    """Seeds that are drawn, tensors, or not the same; and no dropout at all."""
    rank, wrong, dropped = cp.rank, list[str](), variants(32)["dropout"][0]
    plan = cp.plan(dropped, batch=B, heads=H, length=length, head_dim=width, dtype="fp32", strategy="ring")
    tensors = [torch.randn(B, H, length, width, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    tensors = [t.to(device, dtype) for t in tensors]
    shards = [cp.shard(t, plan) for t in tensors]
    torch.manual_seed(100 + rank)  # each draws another seed: the first rank's counts
    found = cp.unshard(cp.attention(dropped, *shards, plan=plan), plan)
    torch.manual_seed(100)
    if not torch.allclose(found, dropped(*tensors), atol=off):
        wrong.append(f"rank {rank}: a seed that is drawn")
    given = cp.unshard(cp.attention(dropped, *shards, plan=plan, seed=torch.tensor(rank, device=device)), plan)
    if not torch.allclose(given, dropped(*tensors, seed=0), atol=off):
        wrong.append(f"rank {rank}: a seed that is given as a tensor")
    whole = cp.unshard(cp.attention(dropped, *shards, plan=plan, train=False), plan)
    if not torch.allclose(whole, dropped(*tensors, train=False), atol=off):
        wrong.append(f"rank {rank}: train=False")
    try:
        cp.attention(dropped, *shards, plan=plan, seed=5 + (rank == 1))
    except weft.WeftError as error:
        return wrong if "seed: rank 1: 6; others: 5" in str(error) else [*wrong, str(error)]
    return [*wrong, "two seeds"]


def _some(rank: int) -> list[str]:
    return [
        *_compared(rank, 42),  # each strategy on each number of ranks
        *_dropped(rank),
        *_refused(rank),
        *_in_other_words(rank),
        *_of_two_dimensions(rank),
        *_packed(rank, 26),
        *_looked_at(rank),
        *whole_again(_contexts_of[rank]),
        *_without_one(rank),
    ]


def whole_again(contexts: list[ContextParallel], device: str = "cpu", rows: int = 37) -> list[str]:
    """`unshard` gives back tensors of every dtype, also of those that no backend sends; and what has no elements."""
    wrong, causal = [], weft.Attention(mask=masks.causal, name="causal")
    for cp in contexts:
        rank = dist.get_rank()
        plan = cp.plan(causal, heads=H, length=rows, head_dim=D, dtype="fp32", balance="striped")
        numbers = torch.arange(rows * 6, device=device).view(1, 2, rows, 3)
        drawn = torch.randn(1, 2, rows, 8, generator=torch.Generator().manual_seed(1)).to(device)
        key8 = weft.fp8.quantize(drawn, per="token")
        tensors = {str(t)[6:]: numbers.to(t) for t in (torch.int8, torch.int16, torch.bool, torch.bfloat16)}
        tensors |= {"e4m3": key8.data, "e5m2": numbers.to(torch.float8_e5m2), "descale": key8.descale}
        tensors |= {"complex": numbers * 1j, "conj": (numbers * 1j).conj()}
        tensors |= {"none": torch.zeros(0, 3, rows, 5, device=device), "turned": numbers.mT.contiguous().mT}
        tensors |= {"expanded": torch.rand(1, device=device)[0].expand(1, 2, rows, 3) * 0}
        for name, t in tensors.items():
            found, expected = cp.unshard(cp.shard(t, plan), plan), t.resolve_conj().contiguous()
            if found.dtype != t.dtype or not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                wrong.append(f"rank {rank}: unshard of {name}")
        positions = torch.arange(rows, device=device)
        if not torch.equal(cp.unshard(cp.shard(positions, plan, dim=0), plan, dim=0), positions):
            wrong.append(f"rank {rank}: unshard of one dimension")
        if copy.deepcopy({"cp": cp})["cp"] is not cp:
            wrong.append(f"rank {rank}: a copy of a model has other ranks")
        with pytest.raises(weft.WeftError, match="its groups belong to this process"):
            pickle.dumps(cp)
        with pytest.raises(weft.WeftError, match="plan: ranks: expected none, as the mesh has"):
            cp.plan(causal, ranks=9, heads=H, length=37, head_dim=D)
    return wrong


def _every(rank: int) -> list[str]:
    return [*_compared(rank, None), *_packed(rank, None)]


def _refused(rank: int) -> list[str]:
    """A mistake on one rank is an error on all, which says whose and what; the ranks can go on after it."""
    cp = _contexts_of[rank][0]
    causal, full = weft.Attention(mask=masks.causal, name="causal"), weft.Attention(name="full")
    sizes = {"batch": B, "heads": H, "length": 32, "head_dim": D, "dtype": "fp32"}
    plan, other = (cp.plan(causal, **sizes, strategy=s, balance="zigzag") for s in ("exchange", "ring"))
    of_full = cp.plan(full, **sizes, strategy="exchange", balance="zigzag")
    q, k, v = (cp.shard(torch.randn(B, H, 32, D), plan) for _ in range(3))
    is_odd, learned = rank == 2, q.clone().requires_grad_()

    def told(expected: str, call: object) -> list[str]:
        try:
            call()  # type: ignore[operator]
        except weft.WeftError as error:
            return [] if expected in str(error) else [f"rank {rank}: expected {expected!r}, got {error}"]
        return [f"rank {rank}: {expected!r} was not said"]

    wrong = told("variant: rank 2: full (", lambda: cp.attention(full if is_odd else causal, q, k, v,
                                                               plan=of_full if is_odd else plan))  # fmt: skip
    wrong += told(
        "plan: rank 2: ring, zigzag, 32 queries", lambda: cp.attention(causal, q, k, v, plan=other if is_odd else plan)
    )
    wrong += told(
        "dtypes: rank 2: float64",
        lambda: cp.attention(causal, *((t.double() for t in (q, k, v)) if is_odd else (q, k, v)), plan=plan),
    )
    short = "query: expected [2, 4, 8, 16], the rows of rank 2, got [2, 4, 7, 16]"
    wrong += told(short if is_odd else f"rank 2 cannot make this call: causal: {short}",
                  lambda: cp.attention(causal, q[:, :, :7] if is_odd else q, k, v, plan=plan))  # fmt: skip
    wrong += told("gradients: rank 2: query; others: none",
                  lambda: cp.attention(causal, learned if is_odd else q, k, v, plan=plan))  # fmt: skip
    window = weft.Attention(mask=masks.causal & (q_pos - kv_pos < weft.scalar("window", int)), name="recent")
    of_window = cp.plan(window, **sizes, window=8, strategy="exchange", balance="zigzag")
    wrong += told("window: the plan stands on another value; make a plan with this one",
                  lambda: cp.attention(window, q, k, v, plan=of_window, window=9))  # fmt: skip
    documents = weft.Attention(mask=masks.causal & masks.document(weft.tensor("doc", 2, int)), name="documents")
    doc = (torch.arange(32) // 9).expand(B, -1).contiguous()
    of_documents = cp.plan(documents, **sizes, doc=doc, strategy="exchange", balance="contiguous")
    cp.attention(documents, q, k, v, plan=of_documents, doc=doc)
    doc[:, 5:] += 1
    wrong += told("doc: the plan stands on another value",
                  lambda: cp.attention(documents, q, k, v, plan=of_documents, doc=doc))  # fmt: skip
    wrong += told("window: missing", lambda: cp.attention(window, q, k, v, plan=of_window))
    squashed = weft.Attention(mask=masks.causal, normalizer="sigmoid", name="squashed")
    of_squashed = cp.plan(squashed, **sizes, strategy="ring")
    wrong += told("return_lse: the normalizer sigmoid has no log-sum-exp" if is_odd else "rank 2 cannot make this call",
                  lambda: cp.attention(squashed, q, k, v, plan=of_squashed, return_lse=is_odd))  # fmt: skip
    wrong += told("attention: expected a weft.Attention, got str",
                  lambda: cp.attention("causal" if is_odd else causal, q, k, v, plan=plan))  # fmt: skip
    wrong += told("unshard: expected 8 rows, those of the queries of rank 2, got 7",
                  lambda: cp.unshard(q[:, :, :7] if is_odd else q, plan))  # fmt: skip
    wrong += told("call: rank 2: call unshard; others: variant causal (",  # as of a rank that prints, alone
                  lambda: cp.unshard(q, plan) if is_odd else cp.attention(causal, q, k, v, plan=plan))  # fmt: skip
    if not torch.equal(cp.attention(causal, q, k, v, plan=plan), cp.attention(causal, q, k, v, plan=plan)):
        wrong.append("a call that is repeated gives other bits")
    twice = cp.attention(causal, learned, k, v, plan=plan).sum()
    wrong += told("second derivatives are not available",
                  lambda: torch.autograd.grad(twice, learned, create_graph=True))  # fmt: skip
    return wrong


def _in_other_words(rank: int) -> list[str]:
    """A mesh with names, bf16, and no gradients wanted."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh, dim="cp", agree=False)
    wrong = compare(cp, "causal", "auto", "auto", (70, 70), 2, torch.bfloat16)
    wrong += compare(cp, "sink", "exchange", "zigzag", (96, 96), 2, torch.bfloat16, overlaps=True)
    causal = variants(32)["causal"][0]
    for strategy in ("heads", "exchange"):  # what a plan keeps may have been made without gradients
        plan = cp.plan(causal, heads=H, length=32, head_dim=D, dtype="fp32", strategy=strategy, cu_seqlens=[0, 9, 32])
        own = [torch.randn(1, H, 16, D, requires_grad=True) for _ in range(3)]
        with torch.inference_mode():
            cp.attention(causal, *own, plan=plan)
        cp.attention(causal, *own, plan=plan).sum().backward()
    tensors = [torch.randn(B, H, 32, D, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    for strategy in ("exchange", "ring", "gather", "heads"):  # one computed in bf16, and others in float32
        plan = cp.plan(causal, batch=B, heads=H, length=32, head_dim=D, dtype="fp32", strategy=strategy)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = cp.attention(causal, *(cp.shard(t, plan) for t in tensors), plan=plan), causal(*tensors)
        if found.dtype != torch.bfloat16 or not torch.allclose(found, cp.shard(expected, plan), atol=0.02):
            wrong.append(f"rank {rank}: {strategy} under autocast")
    refused = {"pass dim=, one of dp, cp, or two of them": None, "expected two of dp, cp, in this order": ("cp", "dp"),
               "dim: expected one of dp, cp, got 'tp'": "tp"}  # fmt: skip
    others: list[tuple[str, Any, Any]] = [(words, mesh, dim) for words, dim in refused.items()]
    others += [("dim='cp' is a dimension of a mesh; pass a DeviceMesh", None, "cp"),
               ("or a process group that this rank belongs to, got int; ranks outside", -100, None)]  # fmt: skip
    for expected, given, dim in others:
        try:
            ContextParallel(given, dim)
        except weft.WeftError as error:
            wrong += [] if expected in str(error) else [str(error)]
        else:
            wrong.append(f"{expected!r} was not said")
    return wrong


def _looked_at(rank: int) -> list[str]:
    """Which calls are looked at anew: those whose values, options or kinds of tensors differ."""
    cp, looked = ContextParallel(), list[int]()
    look = ContextParallel._problem
    ContextParallel._problem = lambda *given: looked.append(1) or look(*given)  # type: ignore[method-assign, func-returns-value]
    warmth = weft.Attention(score * weft.scalar("warmth", float), masks.causal, name="warm")
    sizes: dict[str, Any] = {"heads": 2, "length": 16, "head_dim": 8, "dtype": "fp32", "strategy": "exchange"}
    plan, like = (cp.plan(warmth, **sizes) for _ in range(2))
    q, k, v = (torch.randn(1, 2, len(cp.rows(plan)), 8) for _ in range(3))
    same: dict[str, Any] = {"plan": plan, "warmth": 0.0}
    calls: list[tuple[bool, Sequence[Tensor], dict[str, Any]]] = [
        (True, (q, k, v), same), (False, (q.clone(), k, v), same), (True, (q, k, v), same | {"warmth": -0.0}),
        (True, (q, k, v), same | {"warmth": 0}), (True, (q, k, v), same | {"return_lse": True}),
        (True, (q, k, v), same | {"deterministic": True}), (True, (q.clone().requires_grad_(), k, v), same),
        (True, [t.bfloat16() for t in (q, k, v)], same), (True, (q, k, v), same | {"seed": 1}),
        (plan is not like, (q, k, v), same | {"plan": like}), (False, (q, k, v), same),
    ]  # fmt: skip
    wrong = []
    for n, (anew, tensors, options) in enumerate(calls):
        looked.clear()
        cp.attention(warmth, *tensors, **options)
        if bool(looked) != anew:
            wrong.append(f"rank {rank}: call {n} is looked at: {bool(looked)}")
    ContextParallel._problem = look  # type: ignore[method-assign]
    ok = same | {"warmth": 1.0}
    cp.attention(warmth, q, k, v, **ok)
    columns, parts = torch.randn(1, 2, 8, q.shape[2]).transpose(2, 3), torch.nested.nested_tensor([q[0], q[0]])
    bad: tuple[tuple[Tensor, dict[str, Any], str], ...] = (  # equal to what is known, or of its shape
        (q, {"deterministic": 1}, "deterministic: expected"), (q, {"return_lse": 0}, "return_lse: expected"),
        (q, {"warmth": True}, "warmth: expected"), (q, {"target": []}, "target: expected"),
        (columns, {}, "query: expected a contiguous last dimension"), (parts, {}, "query: expected a dense tensor"),
        (q.to_sparse(), {}, "query: expected a dense tensor"),
    )  # fmt: skip
    for query, options, expected in bad:
        try:
            cp.attention(warmth, query, k, v, **{**ok, **options})
        except ValueError as error:
            if expected in str(error):
                continue
            wrong.append(f"rank {rank}: {error}")
        else:
            wrong.append(f"rank {rank}: {options} is taken, where {expected!r}")
    return wrong


def _of_two_dimensions(rank: int) -> list[str]:
    """Neighbours divide heads, and keys travel between the others."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "heads"))
    cp, wrong = ContextParallel(mesh, dim=("hosts", "heads")), list[str]()
    ring, exchange, packed = "heads+ring", "heads+exchange", PACKED[2]
    calls: list[tuple[str, str, str, tuple[int, int], int, dict[str, Any]]] = [
        ("sink", ring, "zigzag", (96, 96), 2, {}), ("alibi", exchange, "pairs", (45, 80), 1, {"overlaps": True}),
        ("heads", ring, "striped", (70, 70), 4, {}), ("sigmoid", exchange, "zigzag", (3, 3), 2, {}),
        ("dropout of a share", exchange, "contiguous", (96, 96), 1, {"overlaps": False}),
        ("documents", exchange, "pairs", (96, 96), 2, {}),
        ("dropout", ring, "zigzag", (70, 70), 4, {"starts": packed[1]}),
        ("bias", exchange, "striped", (70, 70), 1, {"starts": packed[1]}),
        ("causal", "auto", "auto", (70, 70), 2, {}),
    ]  # fmt: skip
    for name, strategy, balance, lengths, kv_heads, more in calls:
        wrong += compare(cp, name, strategy, balance, lengths, kv_heads, **more)
    causal = variants(8)["causal"][0]
    sizes: dict[str, Any] = {"heads": H, "length": 32, "head_dim": D, "dtype": "fp32", "strategy": ring}
    try:
        cp.attention(causal, *[torch.randn(1, H, 8, D)] * 3, plan=weft.distributed.plan(causal, ranks=(4, 1), **sizes))
    except weft.WeftError as error:
        expected = "expected a plan for ranks along (2, 2), got one for (4, 1); cp.plan makes it"
        return wrong if expected in str(error) else [*wrong, str(error)]
    return [*wrong, "a plan of another mesh"]


def _without_one(rank: int) -> list[str]:
    """Rank 3 ends: the others say so, and do not hang."""
    if rank == 3:
        return []
    cp, causal = _contexts_of[rank][0], variants(32)["causal"][0]
    plan = cp.plan(causal, batch=B, heads=H, length=32, head_dim=D, dtype="fp32", strategy="ring")
    try:
        cp.attention(causal, *(torch.randn(B, H, 8, D) for _ in range(3)), plan=plan)
    except weft.WeftError as error:
        expected = f"rank {rank} got no answer from all 4 ranks for call "
        return [] if expected in str(error) else [str(error)]
    return ["nothing was said of the rank that ended"]


@pytest.mark.slow(35)
def test_every_strategy_computes_the_definition(tmp_path: Path) -> None:
    """And what is refused is refused on all ranks, and a rank that ends is an error on the others."""
    wrong = on_ranks(4, _some, tmp_path)
    assert not any(wrong), "\n".join(wrong)


@pytest.mark.thorough
def test_every_strategy_with_every_variant(tmp_path: Path) -> None:
    wrong = on_ranks(4, _every, tmp_path, timeout=600.0)
    assert not any(wrong), "\n".join(wrong)
