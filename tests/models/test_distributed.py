"""Calls on DTensors: four processes on one CPU compute what one does, by batch rows, by heads, and by both."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

import weft
from weft import batch, head, kv_head, kv_pos, masks, q_pos, score

from .. import fresh

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]

slopes, table, bias = weft.tensor("slopes", 1), weft.tensor("table", 2), weft.tensor("bias", 2)
warmth, sinks = weft.tensor("warmth", 0), weft.tensor("sinks", 1)
VARIANTS = {
    "causal": weft.Attention(mask=masks.causal, name="causal"),
    "of everything": weft.Attention(
        score * warmth + slopes[head] * (kv_pos - q_pos) + table[batch, kv_head] + bias[batch, kv_pos],
        masks.causal, sink=sinks[head], name="of_everything",
    ),
}  # fmt: skip
OPERANDS = {
    "causal": {},
    "of everything": {"slopes": (8,), "table": (4, 4), "bias": (4, 30), "warmth": (), "sinks": (8,)},
}
# (shape of the mesh, placements, kv heads)
MESHES = [
    ((4,), ["S0"], 4), ((4,), ["S1"], 4), ((2, 2), ["S0", "S1"], 4), ((2, 2), ["S1", "S1"], 4), ((4,), ["R"], 2),
    ((4,), ["S1"], 1), ((2, 2), ["S0", "S1"], 1), ((4,), ["S2"], 2), ((2, 2), ["S0", "S2"], 4),
    ((2, 2), ["S2", "S1"], 4), ((1, 2, 2), ["S0", "S2", "S1"], 4), ((2, 2, 1), ["S1", "S2", "S0"], 4),
]  # fmt: skip


# What a server of processes imports once for all that it forks, of all tests over ranks: torch and Weft take seconds.
PRELOADED = ["tests.warm"]


def meeting_place() -> torch.distributed.TCPStore:
    """A store for ranks to find each other by. This process keeps it: a rank that ends first takes it from none."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def address_of(port: int) -> dict[str, str]:
    """What `init_process_group` of a rank reads from the environment, of a store that another process keeps."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def compute(variant: weft.Attention, tensors: dict[str, Tensor], given: dict[str, Any]) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    own = {n: t for n, t in tensors.items() if n not in names}
    out, lse = variant(*(tensors[n] for n in names), **own, **given, return_lse=True)
    (out.square().sum() + lse.sum()).backward()
    return {"out": out, "lse": lse} | {f"d{n}": t.grad for n, t in tensors.items()}  # type: ignore[dict-item]


def drawn(name: str, kv_heads: int, device: str = "cpu", times: int = 1, width: int = 16) -> dict[str, Tensor]:
    """times: how many more rows."""
    generator, rows = torch.Generator().manual_seed(3), 30 * times
    shapes = {"query": (4, 8, 20 * times, width), "key": (4, kv_heads, rows, width),
              "value": (4, kv_heads, rows, width + 8 * (width == 16)),
              **{n: tuple(rows if s == 30 else s for s in shape) for n, shape in OPERANDS[name].items()}}  # fmt: skip
    made = {n: torch.randn(shape, generator=generator).to(device) for n, shape in shapes.items()}
    if "table" in made:
        made["table"] = made["table"][:, :kv_heads].clone()
    return {n: t.requires_grad_() for n, t in made.items()}


def compare(
    meshes: list[Any] = MESHES, device: str = "cpu", times: int = 1, width: int = 16, limit: float | None = None
) -> None:
    """limit: of errors beside the largest number."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    lens = torch.tensor([30, 7, 0, 21], device=device)
    options: list[dict[str, Any]] = [{}, {"kv_lens": lens}, {"q_offset": lens.int()}]
    for number, (shape, written, kv_heads) in enumerate(meshes):
        mesh = init_device_mesh(device, shape)
        placements = [Replicate() if p == "R" else Shard(int(p[1])) for p in written]
        for name, variant in VARIANTS.items():
            if kv_heads == 2 and name != "causal":
                continue
            whole = drawn(name, kv_heads, device, times, width)
            given = {} if "S2" in written else options[number % 3]
            expected = compute(variant, {n: t.detach().requires_grad_() for n, t in whole.items()}, given)
            shards: dict[str, Tensor] = {}
            for n, t in whole.items():
                own = [Replicate() if n == "key" and kv_heads == 1 and p == Shard(1) else p for p in placements]
                if n not in ("query", "key"):  # others are put in their places by the call
                    own = [Replicate()] * mesh.ndim
                shards[n] = distribute_tensor(t.detach(), mesh, own).requires_grad_()
            found = compute(variant, shards, given)
            for n, right in expected.items():
                got = found[n]
                assert isinstance(got, DTensor), n
                assert n not in ("out", "lse") or list(got.placements) == placements
                scale = 1.0 if limit is None else float(right.detach().nan_to_num(neginf=0.0).abs().max())
                off = 1e-4 if limit is None else limit
                assert torch.allclose(got.full_tensor(), right, atol=off * scale, rtol=off), (shape, name, n)


def refusals() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    whole = drawn("causal", 4)

    def call(variant: weft.Attention, dim: int, message: str, **given: Any) -> None:
        with pytest.raises(weft.WeftError, match=message):
            variant(*(distribute_tensor(t.detach(), mesh, [Shard(dim)]) for t in whole.values()), **given)

    causal = VARIANTS["causal"]
    call(causal, 3, r"by batch \(Shard\(0\)\), heads \(Shard\(1\)\) or sequence \(Shard\(2\)\), got S.*3")
    call(causal, 2, r"causal: kv_lens: not known where the sequence is sharded", kv_lens=torch.tensor([3, 4, 5, 6]))
    call(weft.Attention(score + 0.1 * head, name="numbered"), 1, "head: a shard counts from 0")
    call(weft.Attention(score, q_pos + batch > kv_pos, name="shifted"), 0, "batch: a shard counts from 0")
    call(causal.replace(dropout=0.1), 0, "dropout: which weights are dropped follows from batch row and head")
    twice = weft.Attention(score + table[head, head], name="twice")
    call(twice, 1, "table: expected one dimension that is read at head", table=torch.ones(8, 8))
    query, key, value = (
        whole["query"].detach(),
        *(distribute_tensor(whole[n].detach(), mesh, [Shard(0)]) for n in ("key", "value")),
    )
    with pytest.raises(
        weft.WeftError,
        match=r"(?s)key: expected a plain tensor as query is, got a DTensor; dist.*value: expected a plain",
    ):
        causal(query, key, value)
    wide = [distribute_tensor(torch.ones(4, h, 6, 16), mesh, [Shard(1) if h == 8 else Shard(0)]) for h in (8, 2, 2)]
    with pytest.raises(weft.WeftError, match="key: expected one head, or a number that 4 shards divide, got 2"):
        causal(*wide)
    weft.Attention(score + 0.1 * head, name="numbered")(
        *(distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in whole.values())
    )


def over_sequences(
    ranks: int = 4, device: str = "cpu", times: int = 1, width: int = 16, latents: tuple[int, int] = (12, 4),
    limit: float = 1e-5,
) -> None:  # fmt: skip
    """Dropout and latent attention of a sharded sequence: the numbers of one process, whatever the others divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dropped, mla = (
        VARIANTS["of everything"].replace(dropout=0.3, name="dropped"),
        weft.Attention(mask=masks.causal, latent=weft.Latent(*latents), name="mla"),
    )
    whole = {n: t.detach() for n, t in drawn("of everything", 4, device, times, width).items()}
    generator = torch.Generator().manual_seed(5)
    rank, rope = latents
    shapes = {"query": (4, 8, 20 * times, 8 + rope), "cache": (4, 1, 30 * times, rank + rope), "uk": (8, rank, 8),
              "uv": (8, rank, 24)}  # fmt: skip
    if times > 1:
        shapes |= {"query": (4, 8, 20 * times, 32 + rope), "uk": (8, rank, 32), "uv": (8, rank, 32)}
    latent = {n: torch.randn(shape, generator=generator).to(device) for n, shape in shapes.items()}
    latent = {n: t / rank**0.5 if times > 1 and n in ("uk", "uv") else t for n, t in latent.items()}
    calls: list[tuple[weft.Attention, dict[str, Tensor], dict[str, Any], list[int]]] = [
        (dropped, whole, {"seed": 9}, [2]), (dropped, whole, {"train": False}, [0, 2]), (mla, latent, {}, [2]),
        (mla, latent, {}, [2, 1]), (mla, latent, {}, [0, 2]), (mla.replace(dropout=0.2), latent, {"seed": 3}, [2]),
    ]  # fmt: skip
    for variant, tensors, given, dims in calls:
        mesh = init_device_mesh(device, (ranks,) if len(dims) == 1 else (2, ranks // 2))
        right = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        main = [n for n in ("query", "key", "value", "cache") if n in tensors]
        expected = variant(*(right[n] for n in main), **{n: right[n] for n in right if n not in main}, **given)
        expected.square().sum().backward()
        own = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        shards = {
            n: distribute_tensor(
                own[n].detach(), mesh, [Shard(d) if n != "cache" or d != 1 else Replicate() for d in dims]
            ).requires_grad_()
            for n in main
        }
        out = variant(*shards.values(), **{n: own[n] for n in own if n not in main}, **given)
        out.square().sum().backward()
        assert isinstance(out, DTensor) and torch.allclose(out.full_tensor(), expected, atol=10 * limit, rtol=1e-4)
        for n, t in right.items():
            gradient = shards[n].grad.full_tensor() if n in main else own[n].grad  # type: ignore[union-attr]
            error = (gradient - t.grad).abs().max() / t.grad.abs().max()  # type: ignore[operator, union-attr]
            assert error < limit, (variant.name, dims, n, error)
    already = mla.replace(scale=0.2)
    lone = [torch.randn(1, n, 12 * times, rank + rope, generator=generator).to(device) for n in (8, 1)]
    rows = [distribute_tensor(t, mesh, [Shard(2)]) for t in lone]  # that are latent already
    assert torch.allclose(already(*rows).full_tensor(), already(*lone), atol=limit)


def parallelized() -> None:
    """weft.nn under torch's own tensor parallelism: what is computed, and its gradients, are those of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (4,))
    causal, rope = VARIANTS["causal"], weft.nn.Rotary(16)
    alibi = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
    x = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(1))

    def apart(module: torch.nn.Module, local: bool, names: str = "q k v") -> torch.nn.Module:
        plan: dict[str, Any] = {f"{n}_proj": ColwiseParallel(use_local_output=local) for n in names.split()}
        return parallelize_module(copy.deepcopy(module), mesh, {**plan, "o_proj": RowwiseParallel()})

    torch.manual_seed(2)  # every process has the same numbers
    for options, given in (({"rope": rope, "qk_norm": True}, {}), ({"variant": alibi}, {"slopes": torch.rand(8)})):
        whole = weft.nn.Attention(128, 8, 4, **{"variant": causal, **options})
        rows = torch.randn(2, 10, 128)
        parts = apart(whole, local=False)
        out, found = whole(rows, **given), parts(rows, **given)
        assert torch.allclose(found, out, atol=1e-5)
        out.square().sum().backward()
        found.square().sum().backward()
        for (n, p), (_, right) in zip(parts.named_parameters(), whole.named_parameters(), strict=True):
            gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert torch.allclose(gradient, right.grad, atol=1e-4, rtol=1e-4), n
    grouped = weft.nn.Attention(64, 8, 4, variant=causal, rope=weft.nn.Rotary(8))
    assert torch.allclose(apart(grouped, local=True)(x), grouped(x), atol=1e-5)
    with pytest.raises(weft.WeftError, match=r"2 heads and 1 key head of 8 and 4, and alibi reads.*module\.shard\("):
        apart(weft.nn.Attention(64, 8, 4, variant=alibi), local=True)(x, slopes=torch.rand(8))
    with pytest.raises(weft.WeftError, match=r"2 heads and 4 key heads of 8 and 4, which belong.*module\.shard\("):
        apart(grouped, True, "q")(x)
    store = weft.kv.PagedCache(16, kv_heads=4, head_dim=8, dtype=torch.float32)
    step = store.extend([store.allocate(), store.allocate()], [10, 10])
    with torch.no_grad(), pytest.raises(weft.WeftError, match=r"plain tensor, got a DTensor; .*module\.shard\("):
        apart(grouped, False)(x, cache=step)
    latent = weft.nn.LatentAttention(64, 8, kv_lora=16, nope=8, rope_dim=8)
    for local in (False, True):
        with pytest.raises(weft.WeftError, match=r"parallelize_module; use module\.shard\("):
            apart(latent, local, "q kv_b")(x)


def child(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(address_of(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=4)
    compare()
    refusals()
    over_sequences()
    parallelized()
    torch.distributed.destroy_process_group()
    (folder / str(rank)).touch()


@pytest.mark.slow(12)
def test_four_processes_compute_what_one_does_and_refuse_what_they_cannot(tmp_path: Path) -> None:
    how = "forkserver"  # which imports torch once for all four
    multiprocessing.get_context(how).set_forkserver_preload(PRELOADED)
    place = meeting_place()
    multiprocessing.start_processes(child, (place.port, tmp_path), nprocs=4, start_method=how)  # type: ignore[no-untyped-call]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_what_is_no_tensor_of_a_call_on_dtensors_is_refused_in_words() -> None:
    """Before anything is divided, on one process: shapes of such things cannot be read."""
    script = """
import numpy, pytest, torch, weft
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
window, table = weft.scalar("window", int), weft.tensor("table", 1)
causal = weft.Attention(mask=weft.masks.causal, name="causal")
recent = weft.Attention(weft.score + table[weft.head], mask=weft.q_pos - weft.kv_pos < window, name="recent")
nested = torch.nested.nested_tensor([torch.randn(4, 3, 16), torch.randn(4, 2, 16)])
plain = torch.randn(2, 4, 8, 16)
for place in (Shard(2), Shard(1), Replicate()):
    q = distribute_tensor(plain, mesh, [place])
    for call, said in (
        (lambda: causal(q, 3, q), "key: expected a tensor, got int"),
        (lambda: causal(q, plain[0], q), "key: expected 4 dimensions"),
        (lambda: causal(q, q, True), "value: expected a tensor, got bool"),
        (lambda: causal(q, nested, q), "key: expected a dense tensor, got a nested one"),
        (lambda: causal(q > 0, q > 0, q > 0), "query: expected bfloat16, float16 or float32, got torch.bool"),
        (lambda: causal(q, q, q, kv_lens={}), "kv_lens: expected a tensor, got dict"),
        (lambda: causal(q, q, q, q_offset={}), "q_offset: expected an int"),
        (lambda: recent(q, q, q, window=[1], table=torch.ones(4)), "window: expected an int, got"),
        (lambda: recent(q, q, q, window=3, table=torch.ones(4).to_sparse()), "table: expected a dense tensor"),
    ):
        with pytest.raises(weft.WeftError, match=said):
            call()
    found = recent(q, q, q, window=numpy.int64(3), table=torch.ones(4)).full_tensor()
    assert torch.allclose(found, recent(plain, plain, plain, window=3, table=torch.ones(4)), atol=1e-6)
"""
    done = fresh.run(script)
    assert done.returncode == 0, done.stderr
