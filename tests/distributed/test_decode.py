"""Caches that 2, 3 and 4 ranks of gloo hold together: a step gives what the definition gives for whole sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import masks
from weft.distributed import ShardedDenseCache, ShardedPagedCache
from weft.kv import DenseCache, OutOfBlocksError, PagedCache

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

        two, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
        self.two = two
        self.found: dict[str, dict[str, Any]] = {
            "sequence of 3": {"sequence": three}, "heads of 2": {"heads": two}, "sequence of 2": {"sequence": two},
            "heads of 4": {"heads": dist.group.WORLD}, "sequence of 4": {"sequence": dist.group.WORLD},
            "both of 2": {"heads": mesh["heads"], "sequence": mesh["sequence"]},
        }  # fmt: skip
        self.members = {"sequence of 3": 3, "heads of 2": 2, "sequence of 2": 2}

    def of(self, name: str) -> dict[str, Any] | None:
        return self.found[name] if self.rank < self.members.get(name, 4) else None


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

    def call(self, function: Callable[..., Any], query: Tensor, lengths: list[int], dtype: torch.dtype, **given: Any):
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


def _decoded(ways: Ways, way: str, kind: str, name: str, kv_heads: int, seed: int, **target: Any) -> list[str]:
    """A prefill of two sequences, single tokens, a truncation and a fork, each beside the definition."""
    given = ways.of(way)
    if given is None:
        return []
    _generator.manual_seed(seed)
    variant, operands = variants(CAPACITY)[name]
    page = {} if kind == "dense" else {"page": (4, 16)[seed % 2] * dist.get_world_size(_group_of(given))}
    cache = KINDS[kind][0](**given, **page, kv_heads=kv_heads, head_dim=D, value_dim=DV, dtype=torch.float32)
    whole, ids, wrong = Whole(kv_heads), [cache.allocate(), cache.allocate()], list[str]()
    first = [_number(1, 60), _number(0, 4)]  # fewer tokens than ranks
    for turn, lengths in enumerate([first, [1, 1], [1, 1], [_number(0, 5), _number(1, 5)], [1, 1]]):
        rows = max(lengths)
        query, key, value = (_random(B, n, rows, w) for n, w in ((H, D), (kv_heads, D), (kv_heads, DV)))
        whole.append(key, value, lengths)
        lse = {"return_lse": True} if variant.normalizer == "softmax" else {}
        with torch.no_grad(), cache.extend(ids, lengths) as step:
            own = (key, value) if turn % 2 else (cache.own_heads(key), cache.own_heads(value))
            step.append(0, *own)
            found = step.attend(0, variant, cache.shard(query), **lse, **operands, **target)
        found = tuple(map(cache.unshard, found)) if lse else cache.unshard(found)
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
            cache.append([ids[0]], *(_random(1, kv_heads, 2, w) for w in (D, DV)))
            ids[0] = forked
    usage = cache.usage
    held = sum(t.numel() for t in cache._pools)
    if held != usage.bytes // 4 or (kind == "paged" and usage.tokens != sum(map(cache.length, (0, 1, 2))) - _shared(cache)):
        wrong.append(f"{way} {kind}: {usage}")
    return wrong


def _shared(cache: Any) -> int:
    """Tokens of a sequence and its fork that lie in the same blocks."""
    both = set(cache.blocks(0)) & set(cache.blocks(2))
    return len(both) * cache.page


def _group_of(given: dict[str, Any]) -> Any:
    found = given.get("sequence")
    if found is None:
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return found.get_group() if hasattr(found, "get_group") else found


def _every_variant(ways: Ways, number: int | None) -> list[str]:
    names, wrong = list(variants(8)), list[str]()
    every = list(itertools.product(names, WAYS, KINDS, (2, 4, 1)))
    step = 1 if number is None else len(every) // number | 1
    for seed, (name, way, kind, kv_heads) in enumerate(every[::step]):
        wrong += _decoded(ways, way, kind, name, kv_heads, seed)
    return wrong


def _some(rank: int) -> list[str]:
    ways = Ways(rank)
    return [*_every_variant(ways, 60)]


def test_steps_over_ranks_give_what_the_definition_gives(tmp_path: Path) -> None:
    wrong = on_ranks(4, _some, tmp_path)
    assert not any(wrong), "\n".join(wrong)
