"""Calls over ranks against the definition in float64, for processes of gloo on one CPU, and of NCCL on GPUs."""

from __future__ import annotations

import faulthandler
import io
import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import weft
from weft import batch, group, head, kv_head, kv_len, kv_pos, masks, q_len, q_pos, score, scores
from weft.distributed import ContextParallel, Links
from weft.distributed.portions import Portions

from ..models.test_distributed import PRELOADED, address_of, meeting_place

Result = TypeVar("Result")
slopes, bias, table = weft.tensor("slopes", 1), weft.tensor("bias", 2), weft.tensor("table", 2)
pad, doc, sinks = weft.tensor("pad", 2), weft.tensor("doc", 2, int), weft.tensor("sinks", 1)
blocks = weft.tensor("blocks", 2, bool)
window, warmth, share = weft.scalar("window", int), weft.scalar("warmth", float), weft.scalar("share", float)
B, H, D, DV = 2, 4, 16, 24
_recent = masks.causal & (q_pos - kv_pos < window)


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def variants(length: int) -> dict[str, tuple[weft.Attention, dict[str, Any]]]:
    """Variants of every kind, and their operands in calls of this length; the same objects, as users have."""
    rows = torch.arange(length).expand(B, -1)
    return {
        "full": (weft.Attention(name="full"), {}),
        "causal": (weft.Attention(mask=masks.causal, name="causal"), {}),
        "window": (weft.Attention(mask=_recent, name="recent"), {"window": 13}),
        "first keys": (weft.Attention(mask=_recent | (masks.causal & (kv_pos < 5)), name="first_keys"), {"window": 13}),
        "alibi": (weft.Attention(scores.alibi(slopes)(score), masks.causal, name="alibi"),
                  {"slopes": _drawn(H, seed=1).abs()}),
        "bias": (weft.Attention(score * warmth + bias[batch, kv_pos] + table[q_pos, kv_pos],
                                kv_pos // 16 <= q_pos // 16, name="biased"),
                 {"bias": _drawn(B, length, seed=2), "table": _drawn(length, length, seed=3), "warmth": 0.7}),
        "documents": (weft.Attention(mask=masks.causal & masks.document(doc), name="documents"),
                      {"doc": (rows // 17).contiguous()}),
        "sparse": (weft.Attention(mask=masks.causal & masks.block_sparse(blocks, 8), name="sparse"),
                   {"blocks": _drawn(-(-length // 8), -(-length // 8), seed=5) > 0.3}),
        "sink": (weft.Attention(scores.softcap(5.0)(score), _recent, sink=sinks[head], name="sinks"),
                 {"sinks": _drawn(H, seed=4), "window": 20}),
        "sink of nothing": (weft.Attention(mask=kv_pos + 30 <= q_pos, sink=sinks[head], name="lonely"),
                            {"sinks": _drawn(H, seed=4)}),
        "far sink": (weft.Attention(score + pad[batch, kv_pos], kv_pos + 9 <= q_pos, sink=sinks[head], name="far_sink"),
                     {"sinks": _drawn(H, seed=4), "pad": torch.where(rows % 5 == 3, -1e9, 0.0).contiguous()}),
        "sigmoid": (weft.Attention(score - weft.log(kv_len * 1.0), masks.causal, normalizer="sigmoid", name="sigmoids"),
                    {}),
        "far": (weft.Attention(score + pad[batch, kv_pos], masks.causal, name="far"),
                {"pad": torch.where(rows % 5 == 3, -1e9, 0.0).contiguous()}),
        "heads": (weft.Attention(score + 0.1 * head * (kv_head + 1) - 0.01 * group, masks.causal | (kv_pos < 4 * head),
                                 name="counted"), {}),
        "lengths": (weft.Attention(score * (1.0 + 0.001 * q_len) + 0.01 * kv_pos, (kv_pos < kv_len - 3) & masks.causal,
                                   name="lengths"), {}),
        "dropout": (weft.Attention(mask=masks.causal, dropout=0.3, name="dropped"), {"seed": 1 << 40 | 7}),
        "dropout of a share": (weft.Attention(score + bias[batch, kv_pos], _recent, sink=sinks[head], dropout=share,
                                              name="dropped_share"),
                               {"bias": _drawn(B, length, seed=2), "sinks": _drawn(H, seed=4), "window": 20,
                                "share": 0.25, "seed": -5}),
    }  # fmt: skip


STRATEGIES = [
    ("exchange", "zigzag"), ("ring", "zigzag"), ("gather", "contiguous"), ("heads", "contiguous"), ("ring", "pairs"),
    ("exchange", "striped"), ("exchange", "contiguous"), ("heads", "zigzag"), ("gather", "pairs"),
    ("ring", "contiguous"), ("ring", "striped"), ("exchange", "pairs"), ("gather", "zigzag"), ("gather", "striped"),
]  # fmt: skip
LENGTHS = [(96, 96), (70, 70), (45, 80), (3, 3), (1, 40), (80, 45)]
PACKED = [(90, (0, 50, 50, 57, 90)), (64, (0, 3, 40)), (70, (0, 10, 20, 30, 40, 50, 60, 70)), (96, (0, 96))]
BALANCES = ("contiguous", "zigzag", "striped", "pairs")
LINKS = None, Links(in_host=1.0, between=1.0)  # so slow that no key is brought which is not seen
KV_HEADS = [4, 2, 1]


@dataclass
class Drawn:
    """A call, whole, and what it is compared with."""

    variant: weft.Attention
    shapes: dict[str, tuple[int, ...]]  # of query, key and value
    whole: dict[str, Tensor]  # these, and tensor operands
    numbers: dict[str, Any]
    ends: tuple[Tensor, Tensor]  # gradients of out and lse
    where: dict[str, Any]  # options that say where rows lie

    @property
    def learned(self) -> list[str]:
        return [n for n, t in self.whole.items() if t.is_floating_point() and n != "pad"]

    @property
    def lse(self) -> dict[str, bool]:
        return {"return_lse": True} if self.variant.normalizer == "softmax" else {}

    def leaves(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.detach().clone().requires_grad_(n in self.learned) for n, t in tensors.items()}

    def run(
        self, call: Callable[..., Any], tensors: dict[str, Tensor], dout: Tensor, dlse: Tensor
    ) -> dict[str, Tensor]:
        """out, lse and gradients of a call of these tensors."""
        operands = {n: t for n, t in tensors.items() if n not in self.shapes}
        found = call(*(tensors[n] for n in self.shapes), **operands, **self.numbers, **self.lse)
        out, lse = found if self.lse else (found, None)
        loss = (out * dout.to(out.dtype)).sum()
        if lse is not None:
            loss = loss + (torch.where(lse == -torch.inf, 0.0, lse) * dlse.to(lse.dtype)).sum()
        loss.backward()
        gradients = {f"d{n}": tensors[n].grad for n in self.learned}
        return {"out": out.detach(), **({} if lse is None else {"lse": lse.detach()}), **gradients}  # type: ignore[dict-item]

    def defined(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """By the definition, in this dtype."""
        tensors = self.leaves({n: t.to(dtype) if t.is_floating_point() else t for n, t in self.whole.items()})
        return self.run(partial(self.variant.reference, **self.where), tensors, *self.ends)

    def on_one(self, device: str) -> dict[str, Tensor]:
        """By a plain call, whole on this device, in float64 on the host."""
        tensors = self.leaves({n: t.to(device) for n, t in self.whole.items()})
        where = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in self.where.items()}
        found = self.run(partial(self.variant, **where), tensors, *(t.to(device) for t in self.ends))
        return {n: t.cpu().double() for n, t in found.items()}


def drawn(
    name: str,
    lengths: tuple[int, int],
    kv_heads: int,
    dtype: torch.dtype,
    starts: Sequence[int],
    widths: tuple[int, int],
) -> Drawn:
    """A call of a variant. starts: of packed sequences, with lengths of the packed row."""
    variant, operands = variants(max(lengths))[name]
    rows, (width, value_width) = 1 if starts else B, widths
    shapes = {"query": (rows, H, lengths[0], width), "key": (rows, kv_heads, lengths[1], width),
              "value": (rows, kv_heads, lengths[1], value_width)}  # fmt: skip
    whole = {n: _drawn(*shape, seed=k + 10).to(dtype) for k, (n, shape) in enumerate(shapes.items())}
    whole |= {n: t for n, t in operands.items() if isinstance(t, Tensor)}
    numbers = {n: v for n, v in operands.items() if n not in whole}
    where: dict[str, Any] = {"q_offset": 7} if lengths == (45, 80) else {}
    if name in ("bias", "documents", "sparse") and lengths[0] > lengths[1]:
        where = {"q_offset": 0}  # their tables have no entries before the first key
    if starts:  # a row of an operand is that of a sequence
        whole |= {n: _drawn(len(starts) - 1, lengths[0], seed=5) * (n == "bias") for n in ("bias", "pad") if n in whole}
        where = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor(starts, dtype=torch.int32))
    ends = _drawn(rows, H, lengths[0], value_width, seed=20), _drawn(rows, H, lengths[0], seed=21)
    return Drawn(variant, shapes, whole, numbers, ends, where)


def compare(
    cp: ContextParallel, name: str, strategy: str, balance: str, lengths: tuple[int, int], kv_heads: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu", overlaps: bool | None = None, starts: Sequence[int] = (),
    widths: tuple[int, int] = (D, DV), beside_one: bool = False,
) -> list[str]:  # fmt: skip
    """out, lse and every gradient of a call over ranks, beside the definition in float64: what differs.

    beside_one: also beside the same call on one device.
    """
    call = drawn(name, lengths, kv_heads, dtype, starts, widths)
    exact, plain = made_once(
        ("defined", name, lengths, kv_heads, dtype, starts, widths),
        lambda: (call.defined(torch.float64), call.defined(dtype)),
    )
    looked_at = {n: call.whole[n].to(device) for n in ("doc", "blocks") if n in call.whole and not starts}
    where = {"cu_seqlens": list(starts)} if starts else call.where
    plan = cp.plan(call.variant, **where, batch=1 if starts else B, heads=H, kv_heads=kv_heads, length=lengths[0],
                   kv_length=lengths[1], head_dim=widths[0], value_dim=widths[1], dtype="fp32", strategy=strategy,
                   balance=balance, links=LINKS[(len(name) + lengths[0]) % 2], **call.numbers, **looked_at)  # fmt: skip
    plan = replace(plan)  # plans of equal numbers are one
    if overlaps is not None:
        (plan.of_some_heads if plan.divides_both else plan).__dict__["overlaps"] = overlaps
        (plan.of_some_heads if plan.divides_both else plan).__dict__["keeps"] = lengths[0] % 3 == 0
    label = f"{name} {strategy} {balance} {lengths} Hkv {kv_heads}"
    return differing(cp, call, plan, label, (exact, plain), device, beside_one)


def differing(
    cp: ContextParallel, call: Drawn, plan: weft.distributed.ShardPlan, label: str,
    made: tuple[dict[str, Tensor], dict[str, Tensor]], device: str = "cpu", beside_one: bool = False, **options: Any,
) -> list[str]:  # fmt: skip
    """What of a call over ranks differs from the definition, and beside_one also from the same call on one device.

    made: by the definition, in float64 and in the dtype of the call. options: of the call over ranks alone.
    """
    (exact, plain), unit = made, torch.finfo(call.whole["query"].dtype).eps
    # of a sum of a rank's, each of which is rounded: of rows, and of operands, to which each portion and rank adds
    parts = of_operands = 1
    if plan.strategy != "heads" and not plan.divides_both:
        portions = Portions(plan)
        most = portions.most(cp.rank)
        parts = max(most.of_queries, most.of_own_keys, *most.of_keys)
        of_operands = max(sum(map(len, portions.portions(rank))) for rank in range(cp.ranks)) + cp.ranks
    shards = call.leaves({n: (cp.shard(t, plan) if n in call.shapes else t).to(device) for n, t in call.whole.items()})
    for n in plan.looked_at:
        if n in shards:
            plan.looked_at[n] = shards[n]  # type: ignore[index]
    ends = (cp.shard(t, plan).to(device) for t in call.ends)
    found = call.run(partial(cp.attention, call.variant, plan=plan, **options), shards, *ends)
    of_rows, wrong = {"out", "lse", *(f"d{n}" for n in call.shapes)}, []
    one = call.on_one(device) if beside_one else {}
    for who, rights in {"the definition": exact, "one device": one}.items():
        for n, right in rights.items():
            expected, beside = (cp.shard(t, plan) if n in of_rows else t for t in (right, plain[n]))
            off = error_of(
                found[n].cpu().double(), expected, beside.double(), unit, parts if n in of_rows else of_operands
            )
            if off is not None:
                ranks = f"rank {cp.rank} of {cp.ranks}"
                wrong.append(f"{label} {ranks}: {n}: {off} from {who}")
    whole_out = cp.unshard(found["out"], plan)
    if not torch.equal(cp.shard(whole_out, plan), found["out"]) or whole_out.shape[2] != plan.sizes.q_len:
        wrong.append(f"{label}: unshard")
    return wrong


def error_of(found: Tensor, expected: Tensor, plain: Tensor, unit: float, parts: int = 1) -> float | None:
    """The largest error, where one is more than twice that of plain torch and some roundings; None where none is.

    parts: that sums have, where those are more than these roundings.
    """
    if not expected.numel():
        return None
    error = torch.where(found == expected, 0.0, (found - expected).abs())  # of infinities
    allowed = 2 * torch.where(plain == expected, 0.0, (plain - expected).abs()).max()
    scale = expected.nan_to_num(neginf=0.0).abs().max()
    if bool((error <= allowed + max(8, parts) * unit * (scale + 1e-3)).all()):
        return None
    return float(error.nan_to_num(torch.inf).max())


def is_taken(strategy: str, ranks: int, kv_heads: int) -> bool:
    """Whether heads can be dealt."""
    return strategy != "heads" or (H % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0))


def cases(number: int | None) -> list[tuple[Any, ...]]:
    """name, strategy, balance, lengths, kv heads: each with others in turn; all of them where number is None."""
    names = list(variants(8))
    every = list(itertools.product(names, STRATEGIES, LENGTHS, KV_HEADS))
    if number is None:
        return [(name, *strategy, lengths, heads) for name, strategy, lengths, heads in every]
    found = []
    for n in range(number):
        strategy = STRATEGIES[n * 5 % len(STRATEGIES)]
        lengths = LENGTHS[n % len(LENGTHS) if n % 4 == 3 else n % 2]
        found.append((names[n % len(names)], *strategy, lengths, KV_HEADS[n % 3]))
    return found


# -- processes ---------------------------------------------------------------------------------------------------------
def _child(
    rank: int, ranks: int, port: int, folder: Path, work: Callable[[int], Sequence[str]], timeout: float, backend: str,
    environment: dict[str, str], limit: float | None,
) -> None:  # fmt: skip
    from datetime import timedelta

    where = (folder / f"{rank}.where").open("w")
    if limit is not None:
        faulthandler.dump_traceback_later(limit, file=where)
    os.environ.clear()  # a forked process has that of the server
    os.environ.update(environment)
    os.environ.update(address_of(port))
    _notes.append(dist.PrefixStore("made once", dist.TCPStore("127.0.0.1", port, is_master=False)))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    try:
        wrong = list(work(rank))
    except Exception:
        wrong = [f"rank {rank}: {traceback.format_exc()}"]
    (folder / str(rank)).write_text("\n".join(wrong))
    os._exit(0)  # a process group of a rank that is gone cannot be ended in order


_MOST_OF_A_NOTE = 4 << 20  # bytes: a store takes 8 MiB at once
_notes: list[dist.Store] = []  # of a rank: where one of them writes what the others read


def made_once(name: object, make: Callable[[], Result]) -> Result:
    """What is the same on every rank, as the definition of a call: made by the first that asks for it by this name."""
    (notes,), key = _notes, repr(name)
    if notes.add(f"asked for {key}", 1) == 1:
        kept = io.BytesIO()
        try:
            torch.save(made := make(), kept)
        except Exception:
            notes.set(key, "0")  # others wait for it
            raise
        whole = kept.getvalue()
        parts = [whole[n : n + _MOST_OF_A_NOTE] for n in range(0, len(whole), _MOST_OF_A_NOTE)]
        for n, part in enumerate(parts):
            notes.set(f"{key} part {n}", part)
        notes.set(key, str(len(parts)))
        return made
    number = int(notes.get(key))
    if not number:
        raise RuntimeError(f"another rank could not make {key}")
    return torch.load(io.BytesIO(b"".join(notes.get(f"{key} part {n}") for n in range(number))))


def on_ranks(
    ranks: int, work: Callable[[int], Sequence[str]], folder: Path, timeout: float = 120.0, backend: str = "gloo",
    limit: float | None = None,
) -> list[str]:  # fmt: skip
    """What the work of each rank says is wrong. A rank that says nothing has not come to its end.

    timeout: of collectives. limit: seconds after which all ranks say where they are, and are ended.
    """
    place = meeting_place()
    given = (ranks, place.port, folder, work, timeout, backend, dict(os.environ), limit)
    how = "spawn" if backend == "nccl" else "forkserver"
    multiprocessing.get_context(how).set_forkserver_preload(PRELOADED)
    started = multiprocessing.start_processes(_child, given, nprocs=ranks, join=False, start_method=how)  # type: ignore[no-untyped-call]
    problem = list[str]()
    try:
        while not started.join(timeout=None if limit is None else 1.0):
            if all((folder / str(r)).exists() or _where(folder, r) for r in range(ranks)):
                for process in started.processes:
                    process.kill()
                    process.join()
                break
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
        problem = [str(error)]
    return problem + [_said_by(folder, r) for r in range(ranks)]


def _said_by(folder: Path, rank: int) -> str:
    if (folder / str(rank)).exists():
        return (folder / str(rank)).read_text()
    where = _where(folder, rank)
    return f"rank {rank} has not come to its end\n{where}" if where else f"rank {rank} ended"


def _where(folder: Path, rank: int) -> str:
    """Where a rank was at the limit; "" before it."""
    file = folder / f"{rank}.where"
    return file.read_text() if file.exists() else ""
