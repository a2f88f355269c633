"""What a sequence over two GPUs (NCCL) computes beside its strategies: dropout, latents, regions, models, faults.

Each test starts two processes once, and checks several things inside: these starts, and kernels, take most of the time.
tests/distributed has all this on CPUs, whose functions compute here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos
from weft.distributed import ContextParallel

from ..distributed import on_ranks as ranks
from ..distributed import test_faults as faults
from ..distributed import test_in_region as region
from ..distributed import test_latent_on_ranks as latents
from ..distributed import test_three_ways as three_ways
from ..distributed.on_ranks import B, Drawn, H, compare, differing, drawn, made_once, on_ranks, variants
from ..distributed.test_ranks import seeds, whole_again
from ..models import test_distributed as dtensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]

WIDTH = 64  # of a head
BF16, FP32 = torch.bfloat16, torch.float32
SKIPPED = "skipped: "
sinks = weft.tensor("sinks", 1)


def said(work: Callable[..., Sequence[str]], folder: Path, limit: float = 200.0) -> list[str]:
    """What two ranks with a GPU each say is wrong. work: (device, rank)."""
    return on_ranks(2, partial(work, "cuda"), folder, timeout=limit + 20.0, backend="nccl", limit=limit)


def check(work: Callable[..., Sequence[str]], folder: Path) -> None:
    wrong = said(work, folder)
    assert not any(wrong), "\n".join(wrong)


# -- dropout -----------------------------------------------------------------------------------------------------------
def same_pairs(cp: ContextParallel, device: str, length: int = 256) -> list[str]:
    """Bit for bit: weights of all pairs are alike, and a key's value has a column of its own."""
    wrong, dropped = list[str](), variants(32)["dropout"][0]
    query, key = (torch.zeros(B, h, length, WIDTH, dtype=BF16, device=device) for h in (H, 2))
    values = torch.eye(length, dtype=BF16, device=device).expand(B, 2, -1, -1).split(WIDTH, 3)
    for strategy, balance in (("ring", "zigzag"), ("exchange", "pairs"), ("heads", "zigzag"), ("gather", "contiguous")):
        plan = cp.plan(dropped, batch=B, heads=H, kv_heads=2, length=length, head_dim=WIDTH, dtype="bf16",
                       strategy=strategy, balance=balance)  # fmt: skip
        for seed in (1 << 40 | 7, -1):
            for value in (v.contiguous() for v in values):
                own = (cp.shard(t, plan) for t in (query, key, value))
                found = cp.unshard(cp.attention(dropped, *own, plan=plan, seed=seed), plan)
                one = dropped(query, key, value, seed=seed)
                if not torch.equal(found > 0, one > 0) or not (one == 0).any():
                    wrong.append(f"{strategy} {balance} seed {seed} rank {cp.rank}: other pairs than on one device")
    return wrong


def _dropped(name: str, device: str, rank: int) -> list[str]:
    cp, wrong = ContextParallel(), list[str]()
    for n, strategy in enumerate((("ring", "zigzag"), ("exchange", "pairs"), ("heads", "zigzag"))):
        overlaps = True if n % 2 else None
        wrong += compare(cp, name, *strategy, (900, 900), 2, BF16, device, overlaps, (), (WIDTH, WIDTH), n < 2)
        if name == "dropout":  # of packed sequences it has kernels of its own
            starts = (0, 330, 800, 900)
            wrong += compare(cp, name, *strategy, (900, 900), 2, BF16, device, None, starts, (WIDTH, WIDTH), n < 2)
    if name == "dropout":
        wrong += same_pairs(cp, device) + seeds(cp, device, BF16, 256, WIDTH, 0.06)
    return wrong


@pytest.mark.slow(35)
@pytest.mark.parametrize("name", ["dropout", "dropout of a share"])
def test_two_gpus_drop_the_pairs_of_one(name: str, tmp_path: Path) -> None:
    check(partial(_dropped, name), tmp_path)


# -- latent attention --------------------------------------------------------------------------------------------------
def of_latents(name: str, device: str) -> latents.Latents:
    """A model's in bf16, also with dropout and without a rotary part; small ones in float32."""
    if name == "small":
        small = weft.Attention(mask=masks.causal, latent=weft.Latent(64, 32), name="mla_small")
        return latents.Latents((small,), 32, 32, 0.125, FP32, device)
    found = weft.Attention(mask=masks.causal, latent=weft.Latent(128, 64), name="mla_wide")
    if name == "dropped":
        near = masks.causal & (q_pos - kv_pos < 130)
        found = weft.Attention(mask=near, latent=weft.Latent(128, 0), dropout=0.3, name="mla_lone")
    return latents.Latents((found,), 128, 128, 128**-0.5, BF16, device)


def _latents(names: Sequence[str], device: str, rank: int) -> list[str]:
    cp, wrong = ContextParallel(), list[str]()
    lengths: list[tuple[int, tuple[int, ...]]] = [(700, ()), (900, (0, 500, 570, 900)), (600, (0, 300, 500)), (5, ())]
    for name in names:
        of = of_latents(name, device)
        for divided, (length, starts) in zip(latents.DIVIDED, lengths):
            if starts and name != "wide":
                continue
            for form in (None, "absorbed"):
                wrong += latents.compared(cp, of.variants[0], form, divided, length, starts, of)
        if name == "wide":
            wrong += latents.latent_already(cp, of, 400, 0.07, 0.05)
    return wrong


@pytest.mark.slow(35)
@pytest.mark.parametrize("names", [("wide",), ("dropped", "small")], ids=["wide", "dropped and small"])
def test_latent_attention(names: tuple[str, ...], tmp_path: Path) -> None:
    """Expanded with gradients of query, cache, uk and uv; absorbed without."""
    check(partial(_latents, names), tmp_path)


# -- torch's own ways of dividing a sequence, and models ---------------------------------------------------------------
def _in_a_region(device: str, rank: int) -> list[str]:
    return region.compared(rank, device, 256, WIDTH, (64, 32), 5e-4)


@pytest.mark.slow(40)
def test_calls_in_the_region_of_torch(tmp_path: Path) -> None:
    check(_in_a_region, tmp_path)


def _of_dtensors(device: str, rank: int) -> list[str]:
    meshes = [((2,), ["S2"], 2), ((2, 1), ["S2", "S1"], 4), ((1, 2), ["S0", "S2"], 4)]
    dtensors.compare(meshes, device, 10, WIDTH, 1e-3)
    return []


def _of_dropped_dtensors(device: str, rank: int) -> list[str]:
    dtensors.over_sequences(2, device, 10, WIDTH, (64, 32), 1e-3)
    return []


@pytest.mark.slow(40)
@pytest.mark.parametrize("work", [_of_dtensors, _of_dropped_dtensors], ids=["all operands", "dropout and latents"])
def test_dtensors_with_a_sharded_sequence(work: Callable[..., Sequence[str]], tmp_path: Path) -> None:
    check(work, tmp_path)


def _trained(device: str, rank: int) -> list[str]:
    """On two ranks one of three dimensions is larger than 1; of two of a sequence either."""
    shapes = [((1, 2, 1), "auto"), ((2, 1, 1), "auto"), ((1, 1, 2), "auto"), ((1, 2, 1), "heads+ring"),
              ((2, 1, 1), "heads+exchange")]  # fmt: skip
    wrong = list[str]()
    for shape, strategy in shapes:
        wrong += three_ways.trained(shape, strategy, device, 301, WIDTH, 1e-3)
    return wrong


@pytest.mark.slow(30)
def test_data_sequence_and_heads(tmp_path: Path) -> None:
    """FSDP2, context parallel and tensor parallel on one mesh."""
    check(_trained, tmp_path)


def _of_transformers(device: str, rank: int) -> list[str]:
    from weft.integrations import transformers as door

    try:
        from ..distributed import test_transformers_over_ranks as of_transformers

        door.register()
        sizes = {"hidden_size": 128, "head_dim": WIDTH, "max_position_embeddings": 1024}
        made = of_transformers.models(sizes, 12)
    except (ImportError, weft.UnavailableError, pytest.skip.Exception) as error:
        return [f"{SKIPPED}{error}"]
    cp, wrong = ContextParallel(), list[str]()
    for name in ("mistral", "gpt-oss"):  # windows; windows in turn with all keys, and sinks
        wrong += of_transformers.compared_model(cp, name, *made[name], device, 401, 1e-4, 1e-3)
    return wrong


@pytest.mark.slow(40)
def test_models_of_transformers_train(tmp_path: Path) -> None:
    wrong = said(_of_transformers, tmp_path)
    if all(text.startswith(SKIPPED) for text in wrong):
        pytest.skip(wrong[0].removeprefix(SKIPPED))
    assert not any(wrong), "\n".join(wrong)


# -- rows, operands and bits -------------------------------------------------------------------------------------------
def _gradients_of_rows(cp: ContextParallel, device: str) -> list[str]:
    """`unshard` gives each rank the gradient of its own use of its rows; `share` counts an operand's once."""
    wrong, length = list[str](), 600
    variant = weft.Attention(mask=masks.causal, sink=sinks[head], name="shared_sinks")
    plan = cp.plan(variant, heads=H, kv_heads=2, length=length, head_dim=WIDTH, dtype="fp32", strategy="exchange")
    whole = [torch.randn(1, h, length, WIDTH, generator=torch.Generator().manual_seed(h)) for h in (H, 2, 2)]
    tensors = [t.to(device) for t in whole]
    for dtype in (BF16, FP32):
        rows = cp.shard(tensors[0], plan).to(dtype).requires_grad_()
        (cp.unshard(rows, plan) * tensors[0].to(dtype)).sum().backward()
        if not torch.equal(rows.grad, cp.shard(tensors[0].to(dtype), plan)):  # type: ignore[arg-type]
            wrong.append(f"rank {cp.rank}: a gradient of unshard in {dtype}")
    one, own = (torch.linspace(-1, 1, H, device=device).requires_grad_() for _ in range(2))
    variant(*tensors, sinks=one).square().sum().backward()
    out = cp.attention(variant, *(cp.shard(t, plan) for t in tensors), plan=plan, sinks=cp.share(own))
    out.square().sum().backward()
    assert one.grad is not None and own.grad is not None
    dist.all_reduce(own.grad)
    if not torch.allclose(own.grad, one.grad, rtol=1e-3, atol=1e-3 * float(one.grad.abs().max())):
        wrong.append(f"rank {cp.rank}: gradients of shared sinks: {own.grad} in place of {one.grad}")
    return wrong


def _repeated(cp: ContextParallel, device: str) -> list[str]:
    """deterministic=True: results and gradients have the same bits each time, and are right."""
    wrong, lengths, widths = list[str](), (1300, 1300), (WIDTH, WIDTH)
    for name, strategy, balance in (("causal", "ring", "zigzag"), ("alibi", "exchange", "striped"),
                                    ("dropout", "heads", "contiguous"), ("causal", "gather", "pairs")):  # fmt: skip
        call = drawn(name, lengths, 2, BF16, (), widths)
        made = made_once(("repeated", name), lambda: (call.defined(torch.float64), call.defined(BF16)))  # noqa: B023
        plan = cp.plan(call.variant, batch=B, heads=H, kv_heads=2, length=lengths[0], head_dim=WIDTH, dtype="bf16",
                       strategy=strategy, balance=balance, **call.numbers)  # fmt: skip
        label = f"deterministic {name} {strategy} {balance}"
        wrong += differing(cp, call, plan, label, made, device, deterministic=True)
        runs = []
        for _ in range(6):
            own = {n: (cp.shard(t, plan) if n in call.shapes else t).to(device) for n, t in call.whole.items()}
            ends = (cp.shard(t, plan).to(device) for t in call.ends)
            attend = partial(cp.attention, call.variant, plan=plan, deterministic=True)
            runs.append(call.run(attend, call.leaves(own), *ends))
        other = {n for run in runs[1:] for n, t in run.items() if not torch.equal(t, runs[0][n])}
        wrong += [f"{label} rank {cp.rank}: other bits of {', '.join(sorted(other))}"] if other else []
    return wrong


def _rows(device: str, rank: int) -> list[str]:
    cp = ContextParallel()
    return whole_again([cp], device, 701) + _gradients_of_rows(cp, device) + _repeated(cp, device)


@pytest.mark.slow(35)
def test_rows_shares_and_bits(tmp_path: Path) -> None:
    """`unshard` of every dtype, its gradients and those of `share`, and calls that repeat bit for bit."""
    check(_rows, tmp_path)


# -- documents -----------------------------------------------------------------------------------------------------
def _documents(device: str, rank: int) -> list[str]:
    """Packed documents by ids that lie on the device: those of an even length, uneven ones, ids that come again."""
    cp, wrong, length = ContextParallel(), list[str](), 1500
    variant = variants(8)["documents"][0]
    uneven = torch.repeat_interleave(torch.arange(9), torch.tensor([700, 3, 1, 90, 256, 200, 50, 130, 70]))
    for name, ids in {"even": torch.arange(length) // 128, "uneven": uneven, "again": torch.arange(length) // 100 % 4
                      }.items():  # fmt: skip
        call = _of_ids(variant, ids[None].contiguous(), length)
        made = made_once(("documents", name), lambda: (call.defined(torch.float64), call.defined(BF16)))  # noqa: B023
        for strategy, balance in (("auto", "auto"), ("exchange", "pairs"), ("ring", "zigzag"), ("heads", "contiguous")):
            doc = call.whole["doc"].clone().to(device)
            plan = cp.plan(variant, batch=1, heads=H, kv_heads=2, length=length, head_dim=WIDTH, dtype="bf16",
                           strategy=strategy, balance=balance, doc=doc)  # fmt: skip
            label = f"documents {name} {strategy} {balance}"
            own_plan = replace(plan, looked_at=dict(plan.looked_at))
            wrong += differing(cp, call, own_plan, label, made, device, beside_one=balance == "pairs")
            own = [cp.shard(call.whole[n], plan).to(device) for n in call.shapes]
            cp.attention(variant, *own, plan=plan, doc=doc)  # the very tensor that was looked at
            doc += 1
            try:
                cp.attention(variant, *own, plan=plan, doc=doc)
                wrong.append(f"{label}: other ids are taken")
            except weft.WeftError as error:
                wrong += [] if "doc: the plan stands on another value" in str(error) else [str(error)]
    return wrong + compare(cp, "documents", "auto", "auto", (1000, 1000), 4, BF16, device, widths=(WIDTH, WIDTH))


def _of_ids(variant: weft.Attention, ids: Tensor, length: int) -> Drawn:
    shapes = {n: (1, h, length, WIDTH) for n, h in (("query", H), ("key", 2), ("value", 2))}
    whole = {n: ranks._drawn(*shape, seed=k).to(BF16) for k, (n, shape) in enumerate(shapes.items())}
    ends = ranks._drawn(1, H, length, WIDTH, seed=20), ranks._drawn(1, H, length, seed=21)
    return Drawn(variant, shapes, {**whole, "doc": ids}, {}, ends, {})


@pytest.mark.slow(25)
def test_documents_are_measured_from_a_tensor_on_the_device(tmp_path: Path) -> None:
    check(_documents, tmp_path)


# -- CUDA graphs -------------------------------------------------------------------------------------------------------
def _captured(device: str, rank: int) -> list[str]:
    """Replays read what stands in their tensors then: rows, operands and a seed."""
    cp, wrong, length, packed = ContextParallel(), list[str](), 600, (0, 90, 350, 600)
    given: list[tuple[str, str, tuple[int, ...]]] = [
        ("window", "exchange", ()), ("dropout", "ring", ()), ("sink", "gather", ()), ("causal", "heads", packed),
        ("dropout", "exchange", packed), ("alibi", "heads", ()),
    ]  # fmt: skip
    for name, strategy, starts in given:
        call = drawn(name, (length, length), 2, BF16, starts, (WIDTH, WIDTH))
        asked = {n: v for n, v in call.numbers.items() if n != "seed"} | ({"cu_seqlens": starts} if starts else {})
        plan = cp.plan(call.variant, batch=1 if starts else B, heads=H, kv_heads=2, length=length, head_dim=WIDTH,
                       strategy=strategy, **asked)  # fmt: skip
        numbers = {n: torch.tensor(v, device=device) if n == "seed" else v for n, v in call.numbers.items()}
        tensors = {n: (cp.shard(t, plan) if n in call.shapes else t).to(device) for n, t in call.whole.items()}
        leaves = [t.requires_grad_() for t in tensors.values()]
        dout = cp.shard(call.ends[0], plan).to(device, BF16)

        def run() -> list[Tensor]:
            out = cp.attention(call.variant, *leaves[:3], plan=plan, **dict([*tensors.items()][3:]), **numbers)  # noqa: B023
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]  # noqa: B023

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks the device
            found = run()
        for turn in range(2):
            with torch.no_grad():
                for tensor in leaves:
                    tensor.mul_(-0.7)
                if "seed" in numbers:
                    numbers["seed"] += 1
            graph.replay()
            for n, (replayed, right) in enumerate(zip(found, run())):
                if not torch.allclose(replayed.float(), right.float(), atol=2e-2, rtol=2e-2) or not right.any():
                    off = float((replayed.float() - right.float()).abs().max())
                    wrong.append(f"{name} {strategy} {starts} rank {rank} replay {turn}, result {n}: off by {off}")
        if name == "dropout":  # a seed that is drawn is another one in each replay, the same on both ranks
            del numbers["seed"]
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                found = run()
            outs = []
            for _ in range(2):
                graph.replay()
                outs.append(found[0].clone())
            if torch.equal(*outs):
                wrong.append(f"{name} {strategy}: two replays drop the same pairs")
    return wrong


@pytest.mark.slow(35)
def test_replays_of_a_cuda_graph(tmp_path: Path) -> None:
    """Forward and backward over two GPUs in one graph, of every strategy."""
    check(_captured, tmp_path)


# -- faults ------------------------------------------------------------------------------------------------------------
def _faults(device: str, rank: int) -> list[str]:
    return faults.every_fault(faults.Rank(rank, 2, device, 64, WIDTH, 5.0))


@pytest.mark.slow(60)
def test_a_fault_of_one_is_an_error_on_both(tmp_path: Path) -> None:
    """It says who and what, and no rank hangs."""
    check(_faults, tmp_path)


WORKS: dict[str, Any] = {  # by what they check, as (device, rank) -> what is wrong
    "dropout": partial(_dropped, "dropout"), "dropout of a share": partial(_dropped, "dropout of a share"),
    "latents": partial(_latents, ("wide",)), "other latents": partial(_latents, ("dropped", "small")),
    "region": _in_a_region, "dtensors": _of_dtensors, "dropped dtensors": _of_dropped_dtensors, "trained": _trained,
    "transformers": _of_transformers, "rows": _rows, "documents": _documents, "faults": _faults,
}  # fmt: skip
