"""Random declarations and calls over ranks: `python -m tests.distributed.fuzz --cases 200 --seed 7`.

With `--decode` keys lie in a cache that the ranks hold together, and some of the last rows are appended by a step.
Declarations and calls are those of the fuzzer, and so are the definition and the errors that it allows. Every rank
draws the same ones. What is drawn besides is how a call is divided.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.distributed import ContextParallel, ShardedDenseCache, ShardedPagedCache

from ..fuzz.calls import Built, Call, build
from ..fuzz.declare import draw_variant
from ..fuzz.dense import Undefined
from ..fuzz.expected import expected
from ..fuzz.invoke import draw_call
from ..fuzz.judge import compare, declaration, declared, refusal, start
from .on_ranks import on_ranks

DIVIDED = [(s, b) for s in ("exchange", "ring", "gather", "heads", "heads+ring", "heads+exchange", "auto")
           for b in ("contiguous", "zigzag", "striped", "pairs", "auto")]  # fmt: skip


def is_taken(call: Call) -> bool:
    """Whether calls over ranks have what this one has."""
    lens = call.lens
    packed = lens is not None and lens.packed and lens.q == lens.kv and call.q_len == call.kv_len
    if (
        0 in (call.q_len, call.kv_len)
        or call.fp8
        or call.pages
        or isinstance(call.q_offset, tuple)
        or "16" in call.dtype
    ):
        return False
    return lens is None or (packed and call.q_offset is None)


def drawn(seed: str, only: str = "") -> Iterator[Built]:
    """Calls whose tensors can be made. only: "latent", "dropout", or "plain", which has neither."""
    random = Random(seed)
    variant = draw_variant(random, "cpu")
    kinds = [n for n in ("latent", "dropout") if getattr(variant, n) is not None] or ["plain"]
    if only and only not in kinds:
        return
    for _ in range(40):
        try:
            call = draw_call(random, variant, "cpu")
            if is_taken(call):
                yield build(variant, call)
                return
        except Undefined:
            continue


def over_ranks(
    cp: ContextParallel, built: Built, random: Random, dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """out, lse and gradients, whole, of a call whose rows lie on several ranks."""
    call, variant = built.call, declared(built.variant)
    strategy, balance = random.choice(DIVIDED)
    if strategy.startswith("heads"):
        shares = cp.ranks if strategy == "heads" else cp.shape[1] if cp.shape else 0
        even = shares and not call.heads % shares and not (call.kv_heads % shares and shares % call.kv_heads)
        strategy = strategy if even and variant.latent is None else "exchange"
    numbers: dict[str, Any] = dict(call.scalars)
    operands = {n: t for n, t in built.tensors.items() if n not in built.names}
    read = {p.name for p in variant.canonical.parameters}
    looked_at = {n: t for n, t in operands.items() if n in read and random.random() < 0.5}
    decisive = weft.distributed.seen.decisive_tensors(variant)
    looked_at |= {n: t for n, t in operands.items() if n in decisive}
    where: dict[str, Any] = {} if call.q_offset is None else {"q_offset": call.q_offset}
    if call.lens is not None:
        where = {"cu_seqlens": call.lens.starts("q")}
        looked_at = {n: t for n, t in looked_at.items() if n in decisive}
    plan = cp.plan(
        variant, batch=call.batch, heads=call.heads, kv_heads=call.kv_heads, length=call.q_len, kv_length=call.kv_len,
        head_dim=call.dim, value_dim=call.value_dim, dtype="fp32", strategy=strategy, balance=balance, device="h100",
        **where, **{n: v for n, v in numbers.items() if n in read}, **looked_at,
    )  # fmt: skip
    plan = replace(plan)  # plans of the same numbers are one object
    travels = plan.of_some_heads if plan.divides_both else plan
    travels.__dict__["overlaps"] = random.random() < 0.5 if travels.strategy == "exchange" else travels.overlaps
    of_rows = [n for n in built.names if n not in ("uk", "uv")]
    main = {n: cp.shard(built.tensors[n].detach(), plan).requires_grad_(n in call.wanted) for n in of_rows}
    given = {n: t.detach().requires_grad_(n in call.wanted) for n, t in built.tensors.items() if n not in main}
    for n in looked_at:
        if n in plan.looked_at:
            plan.looked_at[n] = given[n]  # type: ignore[index]
    options: dict[str, Any] = {"form": call.form} if call.form in ("expanded", "absorbed") else {}
    if built.variant.dropout is not None:
        is_tensor = call.seed % 4 == 1
        options |= {"seed": torch.tensor([call.drop_seed]) if is_tensor else call.drop_seed, "train": call.train}
    found = cp.attention(variant, *main.values(), plan=plan, return_lse=call.lse, **options, **given, **numbers)
    out, lse = found if call.lse else (found, None)
    results = {"out": cp.unshard(out.detach(), plan)}
    if lse is not None:
        results["lse"] = cp.unshard(lse.detach(), plan)
    if call.wanted:
        leaves = {**main, **given}
        ends = [(out, cp.shard(dout, plan))]
        if lse is not None and dlse is not None:
            ends.append((lse, cp.shard(dlse, plan)))
        kept = [(o, w) for o, w in ends if o.requires_grad]
        gradients = torch.autograd.grad([o for o, _ in kept], [leaves[n] for n in call.wanted], [w for _, w in kept],
                                        allow_unused=True) if kept else [None] * len(call.wanted)  # fmt: skip
        for n, gradient in zip(call.wanted, gradients):
            whole = torch.zeros_like(leaves[n]) if gradient is None else gradient
            results[f"d{n}"] = cp.unshard(whole, plan, of="queries" if n == "query" else "keys") if n in main else whole
    return results


def is_decoded(built: Built) -> bool:
    """Whether the queries of a call are the last rows of its keys, as those of a step are."""
    call = built.call
    return call.lens is None and call.q_offset is None and call.q_len <= call.kv_len and call.dtype != "float64"


def from_a_cache(group: Any, built: Built, random: Random) -> dict[str, Tensor]:
    """out and lse of a call whose keys are appended to a cache over ranks, the last ones in the step of its queries."""
    call, variant, ranks = built.call, declared(built.variant), dist.get_world_size(group)
    by_heads = call.heads % ranks == 0 and (call.kv_heads % ranks == 0 or ranks % call.kv_heads == 0)
    divided: dict[str, Any] = {"heads" if by_heads and random.random() < 0.3 else "sequence": group}
    shares = ranks if "sequence" in divided else 1
    query, key, value = (built.tensors[n].detach() for n in built.names)
    sizes: dict[str, Any] = {"kv_heads": call.kv_heads, "head_dim": call.dim, "value_dim": call.value_dim,
                             "dtype": query.dtype}  # fmt: skip
    cache: Any
    if random.random() < 0.5:
        page = shares * random.choice([1, 4, 16, 64])
        cache = ShardedPagedCache(call.batch * -(-call.kv_len // page), page=page, **divided, **sizes)
    else:
        cache = ShardedDenseCache(call.batch, -(-call.kv_len // shares) * shares, **divided, **sizes)
    ids, before = [cache.allocate() for _ in range(call.batch)], call.kv_len - call.q_len
    if before:
        cache.append(ids, key[:, :, :before], value[:, :, :before])
    read = {n: t.detach() for n, t in built.tensors.items() if n not in built.names}
    with torch.no_grad(), cache.extend(ids, [call.q_len] * call.batch) as step:
        step.append(0, key[:, :, before:], value[:, :, before:])
        given = {"return_lse": True} if call.lse else {}
        found = step.attend(0, variant, cache.shard(query), **given, **read, **dict(call.scalars))
    out, lse = found if call.lse else (found, None)
    return {"out": cache.unshard(out)} | ({} if lse is None else {"lse": cache.unshard(lse)})


def work(rank: int, cases: int, seed: str, ranks: int, decodes: bool, only: str = "", first: int = 1) -> list[str]:
    """What is wrong, and a line of what was done."""
    groups = {str(n): dist.new_group(list(range(n))) for n in range(2, ranks + 1)}
    contexts = {n: ContextParallel(g) for n, g in groups.items() if rank < int(n)}
    if ranks == 4 and not decodes:
        groups["2x2"] = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        contexts["2x2"] = ContextParallel(mesh, dim=("outer", "inner"))
    wrong, done, number = [], Counter[str](), first - 1
    while sum(done.values()) < cases:
        number += 1
        for built in drawn(f"{seed}.{number}", "plain" if decodes else only):
            random = Random(f"{seed}.{number}.{built.call.seed}")
            if decodes and not is_decoded(built):
                continue
            cp = contexts.get(random.choice(list(groups)))
            dout, dlse = start(built)
            try:
                want = expected(built, dout, dlse)
            except Undefined:
                continue
            if cp is None:
                done["of fewer ranks"] += 1
                continue
            try:
                if decodes:
                    found = from_a_cache(cp.group, built, random)
                    want = {n: w for n, w in want.items() if n in ("out", "lse")}
                else:
                    found = over_ranks(cp, built, random, dout, dlse)
                verdict = compare(built, found, want)
            except weft.WeftError as error:
                verdict = refusal(built, error)
            done[verdict.kind] += 1
            if verdict.fails:
                wrong.append(
                    f"case {seed}.{number} rank {rank}: {verdict.message}\n{declaration(built.variant)}\n{built.call}"
                )
    if rank == 0:
        print(", ".join(f"{kind}: {count}" for kind, count in sorted(done.items())), flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", choices=["latent", "dropout", "plain"], help="variants of this kind")
    parser.add_argument("--first", type=int, default=1, help="the number of the first case, as failures have it")
    parser.add_argument("--decode", action="store_true", help="keys lie in a cache")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = partial(work, cases=given.cases, seed=given.seed, ranks=given.ranks, decodes=given.decode,
                      only=given.only, first=given.first)  # fmt: skip
        wrong = on_ranks(given.ranks, one, Path(folder), timeout=300.0)
    print("\n".join(filter(None, wrong)))
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
