"""Modules over caches on a GPU: token by token against float64, in a CUDA graph, compiled, and behind the server."""

from __future__ import annotations

import copy

import pytest
import torch
from click.testing import CliRunner

from weft import nn
from weft.kv import DenseCache, PagedCache
from weft.serving import Graphed, Server
from weft.tools.cli import main

from ..support import mostly

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTH = 256


def module_of(kind):
    torch.manual_seed(0)
    if kind == "plain":
        return nn.Attention(WIDTH, 8, 2, 64, rope=nn.Rotary(64), qk_norm=True)
    return nn.LatentAttention(WIDTH, 8, q_lora=64, kv_lora=128, nope=64, rope_dim=32)


def cache_of(kind, module, dtype):
    sizes = {"dtype": dtype, "device": "cuda"}
    sizes |= {"latent": module.variant.latent} if isinstance(module, nn.LatentAttention) else {
        "kv_heads": 2, "head_dim": 64
    }  # fmt: skip
    return PagedCache(200, page=16, **sizes) if kind == "paged" else DenseCache(3, 400, **sizes)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("kind", ["plain", "latent"])
@pytest.mark.parametrize("place", ["paged", "dense"])
@torch.no_grad()
@pytest.mark.sampled(7)
def test_prefill_and_decode_are_the_whole_forward(place, kind, dtype, limit):
    exact = module_of(kind).to(dtype).double()
    module = copy.deepcopy(exact).to("cuda", dtype)
    module = module.absorb() if kind == "latent" else module
    totals, chunks = [300, 17, 129], [[200, 10, 64], [90, 1, 60], *[[1, 1, 1]] * 4, [6, 2, 1]]
    x = torch.randn(3, 300, WIDTH).to(dtype)
    whole = [exact(x[b : b + 1, :n].double())[0] for b, n in enumerate(totals)]
    cache = cache_of(place, module, dtype)
    sequences, done = [cache.allocate() for _ in totals], [0, 0, 0]
    for lengths in chunks:
        with cache.extend(sequences, lengths) as step:
            rows = torch.zeros(3, step.length, WIDTH, dtype=dtype)
            for b, (start, n) in enumerate(zip(done, lengths)):
                rows[b, :n] = x[b, start : start + n]
            out = module(rows.cuda(), cache=step).double().cpu()
        for b, (start, n) in enumerate(zip(done, lengths)):
            error = (out[b, :n] - whole[b][start : start + n]).norm() / whole[b][start : start + n].norm()
            assert error < limit, (lengths, b, error)
        done = [start + n for start, n in zip(done, lengths)]
    assert done == totals


@pytest.mark.parametrize("kind", ["plain", "latent"])
@pytest.mark.parametrize("place", ["paged", "dense"])
@torch.no_grad()
def test_decode_waits_for_nothing(place, kind, no_waiting):
    module = module_of(kind).to("cuda", torch.bfloat16)
    module = module.absorb() if kind == "latent" else module
    cache = cache_of(place, module, torch.bfloat16)
    x = torch.randn(3, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    sequences = [cache.allocate() for _ in range(3)]

    def decode():
        with cache.extend(sequences, [1, 1, 1]) as step:
            return module(x, cache=step)

    decode()
    decode()
    with no_waiting():
        for _ in range(20):
            out = decode()
    assert out.isfinite().all()


@pytest.mark.slow(12)
@pytest.mark.parametrize("kind", ["plain", "latent"])
@torch.no_grad()
def test_decode_in_a_graph(kind):
    """One capture, replayed for other lengths, tables and numbers of sequences."""
    module = module_of(kind).cuda()
    module = module.absorb() if kind == "latent" else module
    plain, own = (cache_of("paged", module, torch.float32) for _ in range(2))
    prompt, rows = torch.randn(3, 50, WIDTH, device="cuda"), torch.randn(3, 1, WIDTH, device="cuda")
    sequences = [[c.allocate() for _ in range(3)] for c in (plain, own)]
    for cache, ids in zip((plain, own), sequences):
        with cache.extend(ids, [50, 7, 33]) as step:
            module(prompt, cache=step)
    fixed = own.fixed_step(3, pages=8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        module(rows, cache=fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = module(rows, cache=fixed)
    for chosen in ([0, 1, 2], [0, 2], *[[0, 1, 2]] * 20, [1]):
        x = torch.randn(len(chosen), 1, WIDTH, device="cuda")
        with plain.extend([sequences[0][n] for n in chosen], [1] * len(chosen)) as step:
            wanted = module(x, cache=step)
        with own.extend([sequences[1][n] for n in chosen], [1] * len(chosen)) as step:
            fixed.fill(step)
            rows[: len(chosen)] = x
            graph.replay()
        torch.testing.assert_close(out[: len(chosen)], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.slow(24)
@pytest.mark.parametrize(
    ("kind", "backend"),
    mostly([("plain", "aot_eager")], [(k, b) for k in ("plain", "latent") for b in ("aot_eager", "inductor")]),
)
def test_compiled_in_one_graph(kind, backend):
    module = module_of(kind).cuda().bfloat16()
    module = module.absorb() if kind == "latent" else module
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    outs = []
    x = torch.randn(2, 20, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for run in (module, compiled):
            cache = cache_of("paged", module, torch.bfloat16)
            ids, found = [cache.allocate() for _ in range(2)], []
            for n in (20, 1, 1, 1, 1):
                with cache.extend(ids, [n, n]) as step:
                    found.append(run(x[:, :n].contiguous(), cache=step))
            outs.append(torch.cat(found, 1))
    error = (outs[0].float() - outs[1].float()).norm() / outs[0].float().norm()
    assert error < 2e-2


@torch.no_grad()
def test_the_server_decodes_by_graphs():
    """Requests of different lengths, which come, go and are swapped, are answered as without graphs."""
    torch.manual_seed(2)
    embedding, head = torch.nn.Embedding(50, WIDTH).cuda(), torch.nn.Linear(WIDTH, 50).cuda()
    module, asked, texts = module_of("plain").cuda(), [], []

    def model(tokens, step, last):
        asked.append(len(tokens))
        x = embedding(tokens)
        x = x + module(x, cache=step)
        return head(x[torch.arange(len(x), device="cuda"), last])

    prompts = [torch.randint(50, (n,)).tolist() for n in (40, 3, 100, 17, 64, 9, 30)]
    for graphs in (False, True):
        cache = PagedCache(16, page=16, kv_heads=2, head_dim=64, dtype=torch.float32, device="cuda")
        server = Server(Graphed(model, cache) if graphs else model, cache, most=5)
        requests = [server.submit(p, 40) for p in prompts]
        asked.clear()
        server.run()
        texts.append([r.written for r in requests])
        assert server.totals.swaps
    assert texts[0] == texts[1]
    assert len(asked) < server.totals.steps / 2  # captured once for some sizes, then replayed


@pytest.mark.slow(20)
def test_the_server_runs():
    words = (
        "bench-serve --requests 12 --prompt-len 40:200 --shared 33 --blocks 40 --on cuda --head-dim 64 --new-tokens 40"
    )
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert f"{11 * 32} more found in the cache" in result.output and "swapped out" in result.output
