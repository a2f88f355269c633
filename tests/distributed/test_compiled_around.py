"""torch.compile around a call over ranks: graphs break at it, and where they may not, the error says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import fresh

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")

PROGRAM = """
import torch, weft
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from weft import head, kv_pos, q_pos, score
from weft.distributed import ContextParallel

slopes, sinks = weft.tensor("slopes", 1), weft.tensor("sinks", 1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cp, causal = ContextParallel(), weft.Attention(mask=weft.masks.causal, name="causal")
plan = cp.plan(causal, heads=2, length=16, head_dim=16, dtype="fp32")
graphs = []

def backend(graph, example):
    graphs.append(str(graph.code))
    return graph.forward

def around(query, key, value):
    return cp.attention(causal, query * 2, key, value, plan=plan) + 1

def told(call, *tensors):
    torch._dynamo.reset()  # which would take the graphs from before
    try:
        torch.compile(call, backend=backend, fullgraph=True)(*tensors)
        print("traced")
    except Exception as error:
        print(error)

query = torch.randn(1, 2, 16, 16)
out = torch.compile(around, backend=backend)(query, query, query)
print("same", torch.equal(out, around(query, query, query)), "graphs", len(graphs))
told(around, query, query, query)

mesh = init_device_mesh("cpu", (1,))
mla = weft.Attention(mask=weft.masks.causal, latent=weft.Latent(8, 8), scale=0.3, name="mla")
rows = distribute_tensor(query, mesh, [Shard(2)])
doubled = torch.compile(lambda *tensors: causal(*tensors) * 2, backend=backend)(rows, rows, rows)
print("rows", torch.equal(doubled.full_tensor(), causal(query, query, query) * 2))
told(lambda *tensors: causal(*tensors) * 2, rows, rows, rows)
biased = weft.Attention(score + slopes[head] * (kv_pos - q_pos), sink=sinks[head], name="biased")
heads = [distribute_tensor(query, mesh, [Shard(1)]).requires_grad_() for _ in range(3)]
learned = {n: torch.rand(2, requires_grad=True) for n in ("slopes", "sinks")}
call = lambda *tensors: biased(tensors[0] * 2, *tensors[1:], **learned)
leaves = [*heads, *learned.values()]
torch._dynamo.reset()
traced = torch.compile(call, backend="aot_eager", fullgraph=True)
gradients = (torch.autograd.grad(f(*heads).square().sum(), leaves) for f in (traced, call))
found, right = ([t.full_tensor() if isinstance(t, DTensor) else t for t in gs] for gs in gradients)
print("heads", all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, right)))
told(lambda *tensors: mla(*tensors) * 2, rows, distribute_tensor(query[:, :1], mesh, [Shard(2)]))
"""


def test_graphs_break_at_a_call_over_ranks(tmp_path: Path) -> None:
    """Two graphs: what lies before it, and behind it; nothing of the call is traced. Calls that send nothing are."""
    made = fresh.run(PROGRAM, cwd=tmp_path)
    assert "same True graphs 2" in made.stdout, made.stdout + made.stderr
    assert "heads True" in made.stdout, made.stdout + made.stderr
    assert "rows True" in made.stdout and "traced" not in made.stdout
    said = (
        "sends and receives, which torch.compile does not trace; compile the layers around it, or leave out fullgraph="
    )
    assert made.stdout.count(f"Message: ContextParallel.attention {said}True") == 1, made.stdout
    assert made.stdout.count(f"Message: a call with a sharded sequence {said}True") == 2, made.stdout
