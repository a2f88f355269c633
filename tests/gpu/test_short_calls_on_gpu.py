"""Short calls on a GPU, and those around them: right in both forms, of each of which one kernel is compiled."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import head, masks, score
from weft.compiler.planning.signature import is_short_call
from weft.runtime.driver import builds
from weft.runtime.run.variant import forget

from ..support import check_variant, mostly
from .test_kernels_on_gpu import _compiled_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="of sm_90"),
]

CAUSAL = weft.Attention(mask=masks.causal, name="causal")
VARIANTS = {
    "full": weft.Attention(name="full"),
    "causal": CAUSAL,
    "window": weft.Attention(mask=masks.causal & masks.sliding_window(100), name="window"),
    "softcap": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="softcap"),
    "sink": weft.Attention(mask=masks.causal, sink=weft.tensor("sinks", 1)[head], name="sunk"),
}
EDGES = [1, 63, 64, 65, 127, 128, 129, 197, 255, 256, 257, 1023, 1024, 1025]


def qkv(q_len, kv_len=None, dim=64, value_dim=None, dtype=torch.bfloat16, batch=2, heads=4, kv_heads=2):
    sizes = ((heads, q_len, dim), (kv_heads, kv_len or q_len, dim), (kv_heads, kv_len or q_len, value_dim or dim))
    return [
        torch.randn(batch, *size, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
        for seed, size in enumerate(sizes)
    ]


def check(name, tensors, label):
    operands = {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0], device="cuda")} if name == "sink" else {}
    check_variant(VARIANTS[name], *tensors, target="hopper", operands=operands, label=label)


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("name", mostly(["full", "causal"], [*VARIANTS]))
def test_lengths_at_which_the_form_changes(name, length):
    """Grouped heads; out, lse and all gradients against float64."""
    check(name, qkv(length), f"{name} {length}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(128, 1000), (200, 513), (512, 512), (512, 513), (640, 300), (1024, 1500)]
)
@pytest.mark.parametrize("name", mostly(["full", "causal"], [*VARIANTS]))
def test_other_numbers_of_keys(name, q_len, kv_len):
    if name != "full" and q_len > kv_len:
        pytest.skip("rows that see nothing are of other tests")
    check(name, qkv(q_len, kv_len), f"{name} {q_len} {kv_len}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (64, 40), (16, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_widths_and_dtypes(name, dtype, dim, value_dim):
    for length in (100, 197, 500):
        check(name, qkv(length, dim=dim, value_dim=value_dim, dtype=dtype, heads=6, kv_heads=1), f"{dim} {length}")


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("first", [200, 2048])
def test_the_other_form_is_one_kernel_more(name, first):
    """Compiled when a call of that kind is met, and not before; backwards are the same behind both."""
    variant = VARIANTS[name].replace(name=f"{name}_from_{first}")
    forget()

    def run(length):
        leaves = [t.requires_grad_() for t in qkv(length)]
        out = variant(*leaves, target="hopper")
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    run(first)
    modules, kernels = builds(), _compiled_kernels()
    for length in (first, first + 1, first + 30):
        run(length)
    assert (builds(), _compiled_kernels()) == (modules, kernels)
    run(2248 - first)
    assert (builds(), _compiled_kernels()) == (modules + 1, kernels + 1)
    for length in (64, 128, 129, 256, 257, 512, 600, 1024, 1025, 3000):
        run(length)
    assert (builds(), _compiled_kernels()) == (modules + 1, kernels + 1)


@pytest.mark.parametrize("target", [None, "hopper"])
def test_forms_take_turns(target):
    """Each length again and again, so that every way of a repeated call is taken: the same bits as the first time."""
    lengths = [512, 700, 200, 2048, 512, 300]
    given = {n: qkv(n) for n in lengths}
    first = {n: CAUSAL(*given[n], target=target) for n in lengths}
    for _ in range(3):
        for n in lengths:
            for _ in range(3):
                assert torch.equal(CAUSAL(*given[n], target=target), first[n]), n


def test_keys_that_grow_behind_a_chunk():
    """The first chunk of a prompt is short, the others are not, and then comes the next prompt's first one."""
    query, key, value = qkv(512, 4096)
    for n in [*range(512, 4097, 512), *range(512, 4097, 512)]:
        tensors = [query, key[:, :, :n], value[:, :, :n]]
        for _ in range(2):
            out = CAUSAL(*tensors)
        want = CAUSAL.reference(*(t.double() for t in tensors))
        assert (out.double() - want).norm() / want.norm() < 6e-3, n
        assert is_short_call(512, n, True) == (n == 512)


def test_graphs_of_both_forms(captured):
    for length in (200, 512, 2048):
        tensors = qkv(length)
        graph, found = captured(lambda tensors=tensors: CAUSAL(*tensors, target="hopper"))
        for t in tensors:
            t.normal_()
        graph.replay()
        assert torch.equal(found, CAUSAL(*tensors, target="hopper"))


@pytest.mark.slow
def test_lengths_that_a_graph_leaves_open():
    graphs = []

    def counted(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    traced = torch.compile(lambda q, k, v: CAUSAL(q, k, v) * 2, backend=counted, dynamic=True, fullgraph=True)
    for n in (300, 200, 129, 2000, 512, 257, 64, 1025):
        tensors = qkv(n)
        assert torch.equal(traced(*tensors), CAUSAL(*tensors) * 2), n
    assert len(graphs) == 1
