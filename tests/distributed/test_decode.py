"""Caches that 2, 3 and 4 ranks of gloo hold together: a step gives what the definition gives for whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import masks
from weft.distributed import ShardedDenseCache, ShardedPagedCache, decode
from weft.kv import DenseCache, OutOfBlocksError, PagedCache

from .fuzz import work as drawn_at_random
from .on_ranks import DV, B, D, H, error_of, on_ranks, variants

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]
CAPACITY = 96  # tokens of a sequence
CAUSAL = weft.Attention(mask=masks.causal, name="causal")


@dataclass
class Ways:
    """How ranks divide a cache, of those that this rank belongs to: by name, what constructors take."""

    rank: int

    def __post_init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.two = dist.new_group([0, 1])
        self.found: dict[str, dict[str, Any]] = {
            "sequence of 2": {"sequence": self.two}, "heads of 2": {"heads": self.two},
        }  # fmt: skip
        self.members = {"sequence of 3": 3, "heads of 2": 2, "sequence of 2": 2}
        if dist.get_world_size() == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
            self.found |= {
                "sequence of 3": {"sequence": dist.new_group([0, 1, 2])}, "heads of 4": {"heads": dist.group.WORLD},
                "sequence of 4": {"sequence": dist.group.WORLD},
                "both of 2": {"heads": mesh["heads"], "sequence": mesh["sequence"]},
            }  # fmt: skip

    def of(self, name: str) -> dict[str, Any] | None:
        return self.found.get(name) if self.rank < self.members.get(name, 4) else None


WAYS = ("sequence of 2", "sequence of 3", "both of 2", "heads of 2", "sequence of 4", "heads of 4")
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "paged": (lambda **more: ShardedPagedCache(60, **more), lambda **more: PagedCache(60, **more)),
    "dense": (lambda **more: ShardedDenseCache(4, CAPACITY, **more), lambda **more: DenseCache(4, CAPACITY, **more)),
}
_generator = torch.Generator()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator)


def _number(low: int, high: int) -> int:
    return int(torch.randint(low, high, (1,), generator=_generator))


class Whole:
    """Keys and values of two sequences, whole, and what is expected of steps over them."""

    def __init__(self, kv_heads: int) -> None:
        self.keys = [torch.zeros(kv_heads, 0, D) for _ in range(B)]
        self.values = [torch.zeros(kv_heads, 0, DV) for _ in range(B)]

    def append(self, key: Tensor, value: Tensor, lengths: list[int]) -> None:
        for kept, new in ((self.keys, key), (self.values, value)):
            kept[:] = [torch.cat([old, rows[:, :n]], 1) for old, rows, n in zip(kept, new, lengths)]

    def call(
        self, function: Callable[..., Any], query: Tensor, lengths: list[int], dtype: torch.dtype, **given: Any
    ) -> Any:  # fmt: skip
        """In padded tensors."""
        ends = [t.shape[1] for t in self.keys]
        key, value = (
            torch.stack([torch.nn.functional.pad(t, (0, 0, 0, max(ends) - t.shape[1])) for t in kept]).to(dtype)
            for kept in (self.keys, self.values)
        )
        given = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}
        lens = {"q_lens": torch.tensor(lengths, dtype=torch.int32), "kv_lens": torch.tensor(ends, dtype=torch.int32)}
        return function(query.to(dtype), key, value, **lens, **given)


def _wrong(name: str, found: Any, exact: Any, plain: Any, lengths: list[int]) -> Iterator[str]:
    """What differs between results, (out, lse) or out alone, in rows that there are."""
    triples = zip(("out", "lse"), *(r if isinstance(r, tuple) else (r,) for r in (found, exact, plain)))
    for what, own, right, beside in triples:
        for b, n in enumerate(lengths):
            off = error_of(own[b, :, :n].double(), right[b, :, :n], beside[b, :, :n].double(), 2**-23)
            if off is not None:
                yield f"{name}: sequence {b}: {what}: {off}"
        if what == "out" and own[lengths.index(min(lengths)), :, min(lengths) :].any():
            yield f"{name}: rows behind a length are not 0"


def decoded(
    ways: Ways, way: str, kind: str, name: str, kv_heads: int, seed: int, device: str = "cpu"
) -> list[str]:  # fmt: skip
    """A prefill of two sequences, single tokens, a truncation and a fork, each beside the definition."""
    given = ways.of(way)
    if given is None:
        return []
    _generator.manual_seed(seed)
    variant, operands = variants(CAPACITY)[name]
    page = {} if kind == "dense" else {"page": (4, 16)[seed % 2] * _ranks_of_a_sequence(given)}
    cache = KINDS[kind][0](
        **given, **page, kv_heads=kv_heads, head_dim=D, value_dim=DV, dtype=torch.float32, device=device
    )
    there = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in operands.items()}
    whole, ids, wrong = Whole(kv_heads), [cache.allocate(), cache.allocate()], list[str]()
    first = [_number(1, 60), _number(0, 4)]  # fewer tokens than ranks
    for turn, lengths in enumerate([first, [1, 1], [1, 1], [_number(0, 5), _number(1, 5)], [1, 1]]):
        rows = max(lengths)
        query, key, value = (_random(B, n, rows, w) for n, w in ((H, D), (kv_heads, D), (kv_heads, DV)))
        whole.append(key, value, lengths)
        lse = {"return_lse": True} if variant.normalizer == "softmax" and (turn + seed) % 2 else {}
        with torch.no_grad(), cache.extend(ids, lengths) as step:
            own = [t.to(device) for t in (key, value)]
            step.append(0, *(own if turn % 2 else map(cache.own_heads, own)))
            found = step.attend(0, variant, cache.shard(query.to(device)), **lse, **there)
        found = tuple(cache.unshard(t).cpu() for t in found) if lse else cache.unshard(found).cpu()
        exact = whole.call(variant.reference, query, lengths, torch.float64, **lse, **operands)
        plain = whole.call(variant.reference, query, lengths, torch.float32, **lse, **operands)
        label = f"{way} {kind} {name} Hkv {kv_heads} seed {seed} step {turn} rank {ways.rank}"
        wrong += _wrong(label, found, exact, plain, lengths)
        if turn == 2:  # drafts that were not accepted; then the copy goes on, and the sequence that it was copied from
            short = _number(0, cache.length(ids[0]))
            cache.truncate(ids[0], short)
            whole.keys[0], whole.values[0] = whole.keys[0][:, :short], whole.values[0][:, :short]
        if turn == 3 and kind == "paged":
            forked = cache.fork(ids[0])
            cache.append([ids[0]], *(_random(1, kv_heads, 2, w).to(device) for w in (D, DV)))
            ids[0] = forked
    usage = cache.usage
    held = sum(t.numel() for t in cache._pools)
    if held != usage.bytes // 4 or (
        kind == "paged" and usage.tokens != sum(map(cache.length, (0, 1, 2))) - _shared(cache)
    ):
        wrong.append(f"{way} {kind}: {usage}")
    return wrong


def _shared(cache: Any) -> int:
    """Tokens of a sequence and its fork that lie in the same blocks."""
    both = set(cache.blocks(0)) & set(cache.blocks(2))
    return len(both) * cache.page


def _ranks_of_a_sequence(given: dict[str, Any]) -> int:
    found = given.get("sequence")
    if found is None:
        return 1
    return dist.get_world_size(found.get_group() if hasattr(found, "get_group") else found)


def every_variant(ways: Ways, number: int | None, device: str = "cpu") -> list[str]:
    """All variants, ways, kinds of caches and key heads; about so many of them, or all."""
    names, wrong = [n for n, (v, _) in variants(8).items() if not v.canonical.drops], list[str]()
    every = list(itertools.product(names, [way for way in WAYS if way in ways.found], KINDS, (2, 4, 1)))
    step = 1 if number is None else len(every) // number | 1
    for seed, (name, way, kind, kv_heads) in enumerate(every[::step]):
        wrong += decoded(ways, way, kind, name, kv_heads, seed, device)
    return wrong


def _close(name: str, found: Tensor, expected: Tensor, most: float = 1e-5) -> list[str]:
    """What differs by more."""
    off = float((found - expected).abs().max()) if found.shape == expected.shape else torch.inf
    return [] if off <= most else [f"{name}: {off}"]


# -- what caches have beside padded steps ------------------------------------------------------------------------------
def _as_one(ways: Ways) -> list[str]:
    """Kinds of caches and steps beside the same of one process: packed steps, FP8, latent vectors, fixed steps."""
    if ways.rank > 2:
        return []
    wrong, group = [], ways.found["sequence of 3"]["sequence"]
    _generator.manual_seed(11)
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": D, "dtype": torch.float32}
    shared, alone = ShardedPagedCache(20, sequence=group, page=12, **sizes), PagedCache(20, page=4, **sizes)
    both = [(cache, [cache.allocate() for _ in range(3)]) for cache in (shared, alone)]
    for lengths in ([7, 1, 2], [1, 30, 1], [1, 1, 4]):
        query, key, value = (_random(1, n, sum(lengths), D) for n in (H, 2, 2))
        found = []
        for cache, ids in both:
            with torch.no_grad(), cache.extend(ids, lengths, packed=True) as step:
                step.append(0, key, value)
                found.append(step.attend(0, CAUSAL, query))
        wrong += _close(f"packed {lengths}", *found)
    query = _random(3, H, 2, D)
    with torch.no_grad():  # rows that are read again, as of drafts
        wrong += _close("view", *(cache.view(ids).attend(0, CAUSAL, query) for cache, ids in both))
        wrong += _close("interpreted", *(cache.view(ids).attend(0, CAUSAL, query, target="interpret")
                                         for cache, ids in both))  # fmt: skip
    steps = []
    for cache, ids in both:
        with torch.no_grad(), cache.extend(ids, [1, 1, 1]) as step:
            step.append(0, *(torch.ones(3, 2, 1, D) for _ in range(2)))
            fixed = cache.fixed_step(4, pages=16)
            fixed.fill(step)
            steps.append(fixed.attend(0, CAUSAL, torch.ones(4, H, 1, D)))
    wrong += _close("fixed", *steps)
    for scale, dtype in (("token", torch.float8_e4m3fn), ("head", torch.float8_e5m2)):
        more: dict[str, Any] = {**sizes, "dtype": dtype, "scale": scale}
        found, query = [], _random(2, H, 1, D)
        rows = [[_random(2, 2, n, D) * n for _ in range(2)] for n in (1, 8, 1)]  # at first no row for most ranks
        for cache in (ShardedPagedCache(9, sequence=group, page=12, **more), PagedCache(9, page=4, **more)):
            ids = [cache.allocate(), cache.allocate()]
            for pair in rows:
                cache.append(ids, *pair)
            found.append(cache.view(ids).attend(0, CAUSAL, query, out_dtype=torch.float32))
        wrong += _close(f"FP8 by {scale}", *found)
    latent = weft.Latent(rank=16, rope=8)
    mla = weft.Attention(mask=masks.causal, latent=latent, name="mla")
    query, uk, uv = _random(2, H, 3, 20), _random(H, 16, 12), _random(H, 16, 10)
    for kind, page in (("paged", {"page": 12}), ("dense", {})):
        vectors, found = _random(2, 1, 8, 24), []
        for which, make in enumerate(KINDS[kind]):
            own = {"sequence": group, **page} if which == 0 else {}
            cache = make(**own, latent=latent, dtype=torch.float32)
            ids = [cache.allocate(), cache.allocate()]
            cache.append(ids, vectors)
            with torch.no_grad():
                found.append(cache.view(ids).attend(0, mla, query, uk=uk, uv=uv))
        wrong += _close(f"latent {kind}", *found)
    return wrong


def _prefixes(ways: Ways) -> list[str]:
    """Equal prompts share blocks of whole sequences, a fork copies its last block, and what is swapped comes back."""
    if ways.rank > 1:
        return []
    wrong: list[str] = []
    cache = ShardedPagedCache(6, sequence=ways.two, page=8, kv_heads=2, head_dim=D, dtype=torch.float32)
    prompt, rows = list(range(19)), [_random(1, 2, 19, D) for _ in range(2)]
    first = cache.allocate(prompt)
    cache.append([first], *rows, tokens=[prompt])
    again = cache.allocate(prompt)
    if cache.length(again) != 16 or cache.blocks(again) != cache.blocks(first)[:2]:
        wrong.append(f"{cache.length(again)} tokens are found again")
    with torch.no_grad():
        cache.append([again], *(t[:, :, 16:] for t in rows))
        copy, query = cache.fork(first), _random(1, H, 1, D)
        expected = CAUSAL(query, *rows)
        cache.append([first], *(torch.full((1, 2, 2, D), 9.0) for _ in range(2)))
        cache.free(first)
        cache.swap_out(copy)
        cache.swap_in(copy)
        for name, sequence in (("found again", again), ("a copy that was swapped", copy)):
            wrong += _close(name, cache.view([sequence]).attend(0, CAUSAL, query), expected)
    try:
        cache.extend([again], [60])
        wrong.append("there is no room")
    except OutOfBlocksError as error:
        if "ShardedPagedCache.extend: expected 7 free blocks" not in str(error):
            wrong.append(str(error))
    return wrong


def _large(ways: Ways) -> list[str]:
    """A long prefill, whose rows each rank joins a part of; all ranks have the same bits."""
    if ways.rank > 2:
        return []
    from weft.distributed import joins

    group = ways.found["sequence of 3"]["sequence"]
    wrong: list[str] = []
    _generator.manual_seed(5)
    tensors = [_random(2, n, 37, D) for n in (H, 2, 2)]
    far = weft.Attention(weft.score - 1e6, masks.causal, name="far_away")
    squashed = weft.Attention(mask=masks.causal, normalizer="sigmoid", name="squashed")
    for variant in (CAUSAL, far, squashed):
        lse = {"return_lse": True} if variant is not squashed else {}
        for most in (0, 1 << 20):
            joins.MOST_GATHERED = most
            cache = ShardedDenseCache(2, 39, sequence=group, kv_heads=2, head_dim=D, dtype=torch.float32)
            with torch.no_grad(), cache.extend([cache.allocate(), cache.allocate()], [37, 37]) as step:
                step.append(0, *tensors[1:])
                found = step.attend(0, variant, tensors[0], **lse)
            expected = variant(*tensors, **lse)
            if not lse:
                found, expected = (found,), (expected,)
            for part, right in zip(found, expected):
                wrong += _close(f"{variant.name} {most}", part, right, 1e-5 if right.abs().max() < 1e3 else 0.07)
            every = [torch.empty_like(found[0]) for _ in range(3)]
            dist.all_gather(every, found[0].contiguous(), group=group)
            if not all(torch.equal(part, every[0]) for part in every):
                wrong.append(f"{variant.name}: ranks have other bits")
    joins.MOST_GATHERED = 1 << 20
    return wrong


# -- mistakes ----------------------------------------------------------------------------------------------------------
def _said(rank: int, expected: str, call: Callable[[], object]) -> list[str]:
    try:
        call()
    except (weft.WeftError, MemoryError) as error:
        return [] if expected in str(error) else [f"rank {rank}: expected {expected!r}, got {error}"]
    return [f"rank {rank}: {expected!r} was not said"]


def _no_memory(*given: object) -> Any:
    raise MemoryError("no memory")


def _mistakes(ways: Ways) -> list[str]:
    """One rank's mistake is an error on all, also on those of the other dimension of a mesh; then they go on."""
    rank, given = ways.rank, ways.found["both of 2"]
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": D, "dtype": torch.float32}
    is_odd = rank == 2
    wrong = _said(rank, "page: rank", lambda: ShardedPagedCache(9, **given, page=8 if is_odd else 16, **sizes))
    cache = ShardedPagedCache(9, **given, page=8, **sizes)
    a, b = cache.allocate(), cache.allocate()
    wrong += _said(rank, "sequences: ", lambda: cache.extend([a], [2 if is_odd else 1]))
    wrong += _said(rank, "tokens: ", lambda: cache.extend([a], [1], [[7 if is_odd else 5]]))
    wrong += _said(rank, "extend: lengths: expected 1 ints", lambda: cache.extend([a], [1, 1] if is_odd else [1]))
    key, query = torch.ones(1, 2, 3, D), torch.ones(1, 2, 3, D)
    cache.append([a], key, key)
    full = weft.Attention(name="full")
    window = weft.Attention(mask=weft.q_pos - weft.kv_pos < weft.scalar("window", int), name="recent")
    dropped = weft.Attention(dropout=0.5, name="dropped")

    def attend(variant: weft.Attention, rows: Tensor = query, **more: Any) -> Callable[[], Any]:
        return lambda: cache.view([a]).attend(0, variant, rows, **more)

    wrong += _said(rank, "variant: ", attend(full if is_odd else CAUSAL))
    wrong += _said(rank, "query: ", attend(CAUSAL, query[:, :, :2] if is_odd else query))
    wrong += _said(rank, "operands: ", attend(window, window=4 if is_odd else 5))
    wrong += _said(rank, "window: missing", attend(window, **({} if is_odd else {"window": 4})))
    wrong += _said(rank, "kv_lens: the step says where rows lie", attend(CAUSAL, kv_lens=torch.tensor([1])))
    wrong += _said(rank, "seed: not over ranks; leave it out", attend(CAUSAL, seed=1))
    wrong += _said(rank, "dropout: a cache drops no weights; pass train=False", attend(dropped, seed=1))
    wrong += _said(rank, "query: a cache keeps no gradients", attend(CAUSAL, query.clone().requires_grad_()))
    wrong += _said(rank, "call step.attend(layer, variant, query, ...)", lambda: cache.view([a]).options)
    wrong += _said(rank, "query: expected [B, Hq, L, D] with a multiple of 2 heads", lambda: cache.shard(query[:, :1]))
    wrong += _said(rank, "shard: query: expected a tensor [B, Hq, L, D], got NoneType", lambda: cache.shard(None))  # type: ignore[arg-type]
    with cache.extend([a], [2]) as new:
        new.append(0, key[:, :, :2], key[:, :, :2])
        wrong += _said(rank, "query: expected 2 rows, the new ones of the step, got 3",
                       lambda: new.attend(0, CAUSAL, query))  # fmt: skip
    cache.truncate(a, 3)
    wrong += _said(
        rank, "step: sequence 0 was truncated or swapped out", lambda: new.attend(0, CAUSAL, query[:, :, :2])
    )
    wrong += _said(rank, "sequence: expected ranks that have the same key heads", lambda: ShardedPagedCache(
        9, **{**given, "heads": dist.group.WORLD, "sequence": dist.group.WORLD}, **sizes))  # fmt: skip
    for number in (0, "2", 1.0):
        wrong_heads: dict[str, Any] = {**given, **sizes, "kv_heads": number}
        said = f"kv_heads: expected a positive int, got {number!r}"
        wrong += _said(rank, said, partial(ShardedPagedCache, 9, **wrong_heads))
        wrong += _said(rank, said, partial(ShardedDenseCache, 9, 8, **wrong_heads))
    wrong += _said(rank, "expected heads=, sequence= or both", lambda: ShardedPagedCache(9, **sizes))
    wrong += _said(rank, "kv_heads: expected a multiple or a divisor of the 2 ranks",
                   lambda: ShardedPagedCache(9, **given, **{**sizes, "kv_heads": 3}))  # fmt: skip
    wrong += _said(
        rank, "page: expected 2 tokens times a power of two", lambda: ShardedPagedCache(9, **given, page=6, **sizes)
    )
    wrong += _said(
        rank, "capacity: expected a multiple of the 2 ranks", lambda: ShardedDenseCache(9, 7, **given, **sizes)
    )
    wrong += _said(rank, "sequence: expected a process group", lambda: ShardedPagedCache(9, sequence=2, **sizes))
    captured, decode._is_captured = decode._is_captured, lambda query: True  # as inside of Graphed
    wrong += _said(rank, "sequence= is a group of gloo; make the cache with a group of NCCL, or serve without Graphed",
                   attend(CAUSAL))  # fmt: skip
    decode._is_captured = captured
    step = cache.view([a])
    if is_odd:
        step._own = _no_memory  # type: ignore[method-assign]
    wrong += _said(rank, "no memory", lambda: step.attend(0, CAUSAL, query))
    with torch.no_grad():
        out = attend(CAUSAL)()
    wrong += _close("after mistakes", out, torch.ones_like(out))
    if cache.length(a) != 3 or cache.length(b) != 0:
        wrong.append("a step that ranks did not agree on is left open")
    return wrong


def _without_one(ways: Ways) -> list[str]:
    """Rank 3 ends: the others say so, and do not hang."""
    sizes: dict[str, Any] = {"kv_heads": 1, "head_dim": D, "dtype": torch.float32}
    cache = ShardedPagedCache(9, sequence=dist.group.WORLD, **sizes)
    if ways.rank == 3:
        return []
    expected = f"extend: rank {ways.rank} got no answer from all 4 ranks"
    return _said(ways.rank, expected, lambda: cache.extend([cache.allocate()], [1]))


# -- a server ----------------------------------------------------------------------------------------------------------
def _served(ways: Ways) -> list[str]:
    """Requests that share prompts and are swapped: the same tokens as from a cache of one process."""
    if ways.rank > 1:
        return []
    from weft.serving import Server

    from ..models.test_serving import Model, prompts_of

    class Heads(Model):
        """All heads on every rank, of which each attends with its own."""

        def hidden(self, tokens: Tensor, cache: Any) -> Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                query, key, value = (p(x).unflatten(2, (-1, 8)).transpose(1, 2)
                                     for p in (layer.q_proj, layer.k_proj, layer.v_proj))  # fmt: skip
                rotation = layer.rope(cache.positions)
                query, key = layer.rope.rotate(query, rotation), layer.rope.rotate(key, rotation)
                cache.append(layer.layer, key, value)
                out = cache.attend(layer.layer, layer.variant, cache.cache.shard(query))
                x = x + layer.o_proj(cache.cache.unshard(out).transpose(1, 2).flatten(2))
            return x

    wrong: list[str] = []
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    prompts, counts = prompts_of([9, 6, 7, 10], shared=range(5)), [22, 20, 18, 14]
    alone = [Model().alone(p, n) for p, n in zip(prompts, counts)]
    for divide, mixed in (("sequence", False), ("sequence", True), ("heads", True)):
        cache = ShardedPagedCache(14, page=4, **{divide: ways.two}, agree="steps" if mixed else True, **sizes)
        server = Server(Heads() if divide == "heads" else Model(), cache, most=4, chunk=8, mixed=mixed)
        requests = [server.submit(p, n) for p, n in zip(prompts, counts)]
        server.run()
        if [r.written for r in requests] != alone or not server.totals.swaps or not server.totals.reused_tokens:
            wrong.append(f"{divide} {mixed}: {[r.written for r in requests]} {alone} {server.totals}")
    return wrong


def _modules(ways: Ways) -> list[str]:
    """Modules with a cache of two ranks give what they give with one of this process."""
    if ways.rank > 1:
        return []
    from weft import nn

    torch.manual_seed(3)
    x, wrong, slopes = torch.randn(1, 9, 32), list[str](), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    biased = weft.Attention(weft.scores.alibi(weft.tensor("slopes", 1))(weft.score), masks.causal, name="biased")
    plain = nn.Attention(32, 4, 2, variant=biased, rope=nn.Rotary(8))
    latent = nn.LatentAttention(32, heads=4, kv_lora=16, nope=8, rope_dim=8)
    heads: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    vectors: dict[str, Any] = {"latent": weft.Latent(rank=16, rope=8), "dtype": torch.float32}
    by_rank = plain.shard(ways.rank, 2)

    def decoded(module: Any, cache: Any, **more: Any) -> Tensor:
        a, parts = cache.allocate(), []
        for rows in x.split([7, 1, 1], 1):
            with torch.no_grad(), cache.extend([a], [rows.shape[1]]) as step:
                parts.append(module(rows, cache=step, **more))
        return torch.cat(parts, 1)

    given = {"slopes": slopes}
    expected = decoded(plain, PagedCache(4, **heads), **given)
    for name, division, module in (("sequence", "sequence", plain), ("shard", "heads", by_rank)):
        found = decoded(module, ShardedPagedCache(4, **{division: ways.two}, **heads), **given)
        if module is by_rank:
            dist.all_reduce(found, group=ways.two)
        wrong += _close(f"nn.Attention {name}", found, expected)
    for module in (latent, latent.absorb()):
        for kind in KINDS:
            shared, one = KINDS[kind]
            found = decoded(module, shared(sequence=ways.two, **vectors))
            wrong += _close(f"{type(module).__name__} {kind}", found, decoded(module, one(**vectors)))
    return wrong


class _Differences(TorchDispatchMode):
    """How often lengths are subtracted from lengths."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lengths = [t for t in args if isinstance(t, Tensor) and t.dtype == torch.int32 and t.shape == (1,)]
        self.number += func is torch.ops.aten.sub.Tensor and len(lengths) == 2
        return func(*args, **(kwargs or {}))


def _once_a_step(ways: Ways) -> list[str]:
    """Positions are the same in all layers of a step, and others in the next one."""
    cache = ShardedPagedCache(4, sequence=dist.group.WORLD, layers=3, kv_heads=1, head_dim=8, dtype=torch.float32)
    a, wrong = cache.allocate(), list[str]()
    for _ in range(2):
        rows = torch.ones(1, 1, 3, 8)
        with torch.no_grad(), cache.extend([a], [3]) as step, _Differences() as found:
            for layer in range(3):
                step.append(layer, rows, rows)
                step.attend(layer, CAUSAL, rows)
        wrong += [f"{found.number} differences of lengths"] if found.number != 1 else []
    return wrong


PARTS = (_as_one, _prefixes, _large, _mistakes, _served, _modules, _once_a_step)


def _some(rank: int) -> list[str]:
    ways = Ways(rank)
    wrong = [*every_variant(ways, 30), *itertools.chain(*(part(ways) for part in PARTS))]
    return [*wrong, *drawn_at_random(rank, 10, "steps", 4, decodes=True), *_without_one(ways)]


def _every(rank: int) -> list[str]:
    return every_variant(Ways(rank), None)


@pytest.mark.slow(19)
def test_steps_over_ranks_give_what_the_definition_gives(tmp_path: Path) -> None:
    """And what one cache gives; what is refused is refused on all ranks, and a rank that ends is an error on others."""
    wrong = on_ranks(4, _some, tmp_path)
    assert not any(wrong), "\n".join(wrong)


@pytest.mark.thorough
def test_steps_over_ranks_with_every_variant(tmp_path: Path) -> None:
    wrong = on_ranks(4, _every, tmp_path, timeout=600.0)
    assert not any(wrong), "\n".join(wrong)
