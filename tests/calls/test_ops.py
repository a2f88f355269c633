"""The torch ops: opcheck, torch.compile, export, autocast, checkpointing, functional_call, no rebuild at new sizes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.runtime.call import SLOTS
from weft.runtime.driver import builds

window = weft.scalar("window", int)
slopes = weft.tensor("slopes", 1)
VARIANT = weft.Attention(
    20.0 * weft.tanh(score / 20.0) + slopes[head] * (kv_pos - q_pos),
    masks.causal & (q_pos - kv_pos < window),
    name="op_test",
)


def operands(length=24, batch=2, requires_grad=True):
    shapes = ((batch, 4, length, 16), (batch, 2, length, 16), (batch, 2, length, 8))
    return [torch.randn(s, requires_grad=requires_grad) for s in shapes] + [torch.rand(4, requires_grad=requires_grad)]


def attend(query, key, value, slopes):
    return VARIANT(query, key, value, window=9, slopes=slopes)


def test_opcheck():
    query, key, value, table = operands()
    arguments = (query, key, value, None, [table], [], [9], 0, *[None] * len(SLOTS), 16, VARIANT.canonical.text, "")
    found = torch.library.opcheck(torch.ops.weft.attention.default, arguments)
    assert set(found.values()) == {"SUCCESS"}, found
    with torch.no_grad():
        out, lse = torch.ops.weft.attention(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    plain[4] = [table.detach()]
    wanted = [True, True, True, False, True]
    backward = (torch.randn_like(out), torch.randn_like(lse), out, lse, *plain, wanted)
    found = torch.library.opcheck(torch.ops.weft.attention_backward.default, backward)
    assert set(found.values()) == {"SUCCESS"}, found


def test_graphs_hold_no_second_lines():
    """torch 2.11 prints nodes into comments of the code that it generates; a second line of one would be code."""
    nodes = []

    def backend(graph, _):
        nodes.extend(node.format_node() for node in graph.graph.nodes)
        return graph

    *tensors, slopes = operands(requires_grad=False)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors, slopes), attend(*tensors, slopes))
    (call,) = (node for node in nodes if node and "weft.attention" in node)
    assert "weft.Attention(" in call and "\n" not in call
    assert weft.parse_attention(VARIANT.canonical.line) == VARIANT and "\n" in VARIANT.canonical.text


LENGTHS = {
    "padded": {"q_lens": torch.tensor([20, 3]), "kv_lens": torch.tensor([24, 3], dtype=torch.int32)},
    "packed": {"cu_seqlens_q": torch.tensor([0, 7, 7, 20], dtype=torch.int32)},
    "packed, offsets": {
        "cu_seqlens_q": torch.tensor([0, 7, 24], dtype=torch.int32),
        "q_offset": torch.tensor([0, 5], dtype=torch.int32),
    },
}  # fmt: skip


def ragged(name):
    return lambda query, key, value, slopes: VARIANT(query, key, value, window=9, slopes=slopes, **LENGTHS[name])


@pytest.mark.parametrize("name", LENGTHS)
def test_opcheck_with_lengths(name):
    given = LENGTHS[name]
    query, key, value, table = operands(batch=2 if name == "padded" else 1)
    starts = [given.get("cu_seqlens_q")] * 2
    lengths = (given.get("q_offset"), given.get("q_lens"), given.get("kv_lens"), *starts)
    lengths += (None,) * (len(SLOTS) - len(lengths))
    arguments = (query, key, value, None, [table], [], [9], None, *lengths, 16, VARIANT.canonical.text, "")
    found = torch.library.opcheck(torch.ops.weft.attention.default, arguments)
    assert set(found.values()) == {"SUCCESS"}, found
    with torch.no_grad():
        out, lse = torch.ops.weft.attention(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    plain[4] = [table.detach()]
    backward = (torch.randn_like(out), torch.randn_like(lse), out, lse, *plain, [True, True, True, False, True])
    found = torch.library.opcheck(torch.ops.weft.attention_backward.default, backward)
    assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_whole_graphs_with_lengths(name, dynamic):
    torch._dynamo.reset()  # the calls of all names are one function to Dynamo, which compiles it a few times only
    call = ragged(name)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (24, 31):
        inputs = operands(length, batch=2 if name == "padded" else 1)
        out, wanted = compiled(*inputs), call(*inputs)
        assert torch.equal(out, wanted)
        for a, b in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True):
            torch.testing.assert_close(a, b)


def test_lengths_are_inputs_of_a_compiled_graph_and_of_an_exported_program():
    class Ragged(torch.nn.Module):
        def forward(self, query, key, value, slopes, starts):
            return VARIANT(query, key, value, window=9, slopes=slopes, cu_seqlens_q=starts)

    module, inputs = Ragged(), operands(batch=1, requires_grad=False)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(module, (*inputs, torch.tensor([0, 5, 9, 24]))).module()
    for starts in ([0, 5, 9, 24], [0, 24, 24, 24], [0, 1, 2, 3]):
        wanted = module(*inputs, torch.tensor(starts))
        assert torch.equal(compiled(*inputs, torch.tensor(starts)), wanted)
        assert torch.equal(exported(*inputs, torch.tensor(starts)), wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_whole_graphs(dynamic):
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (24, 31):
        inputs = operands(length)
        out, wanted = compiled(*inputs), attend(*inputs)
        assert torch.equal(out, wanted)
        for a, b in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True):
            torch.testing.assert_close(a, b)


def test_one_number_trains_in_a_compiled_graph():
    """The gradient of an operand of rank 0, as the graph foresees it, has no dimensions either."""
    one = weft.tensor("one", 0)
    warm = weft.Attention(score * weft.exp(one), masks.causal, name="warm")
    query, number = torch.randn(1, 2, 8, 16), torch.tensor(0.3, requires_grad=True)

    def call(number):
        return warm(query, query, query, one=number).sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    (found,), (wanted,) = (torch.autograd.grad(f(number), number) for f in (compiled, call))
    assert found.shape == () and torch.equal(found, wanted)


def test_compile_with_inductor():
    inputs = operands(requires_grad=False)
    compiled = torch.compile(lambda *x: attend(*x) * 2 + 1, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), attend(*inputs) * 2 + 1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4))

    def forward(self, query, key, value):
        return attend(query, key, value, self.slopes)


def test_export():
    layer = Layer()
    inputs = tuple(operands(requires_grad=False)[:3])
    exported = torch.export.export(layer, inputs)
    assert torch.equal(exported.module()(*inputs), layer(*inputs))
    assert all(part in str(exported.graph) for part in ("weft.attention", 'name="op_test"'))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_calls_have_no_empty_lists_and_the_same_gradients(strict):
    """AOTInductor's runner gives an op None in place of an empty list."""

    class Bare(torch.nn.Module):
        def forward(self, query, key, value):
            return CAUSAL(query, key, value)

    inputs = operands(requires_grad=False)[:3]
    exported = torch.export.export(Bare(), tuple(inputs), strict=strict)
    (node,) = [n for n in exported.graph.nodes if n.target is torch.ops.weft.attention.default]
    assert all(len(given) == 1 for given in node.args[4:7])
    found, wanted = [t.clone().requires_grad_() for t in inputs], [t.clone().requires_grad_() for t in inputs]
    exported.module()(*found).square().sum().backward()
    CAUSAL(*wanted).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow(16)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, of itself
def test_a_package_of_aotinductor(tmp_path):
    class Both(torch.nn.Module):
        def forward(self, query, key, value, slopes):
            return CAUSAL(query, key, value) + attend(query, key, value, slopes)

    inputs, length = operands(requires_grad=False), torch.export.Dim("length", min=2, max=1024)
    exported = torch.export.export(Both(), tuple(inputs), dynamic_shapes=({2: length},) * 3 + (None,))
    quickly = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}  # of C++
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=quickly
    )
    package = torch._inductor.aoti_load_package(path)
    for given in (inputs, operands(31, requires_grad=False)):
        assert torch.equal(package(*given), Both()(*given))


LATENT = weft.Attention(mask=masks.causal, latent=weft.Latent(8, 8), name="op_test_latent")
CAUSAL = weft.Attention(mask=masks.causal, name="op_test_causal")


def pages(batch, number):
    return torch.randint(0, 7, (batch, number), dtype=torch.int32)


ROWS = ((5, 9), (4, 12), (6, 20))  # sequences, and rows or pages of each; the first sizes all differ
# a call, and operands of several sizes
SIZES = {
    "dense": (lambda q, k: CAUSAL(q, k, k), [[torch.randn(b, 2, n, 8), torch.randn(b, 1, n + b, 8)] for b, n in ROWS]),
    "latent": (
        lambda q, c, u: LATENT(q, c, uk=u, uv=u, form="absorbed"),
        [[torch.randn(b, 2, n, 16), torch.randn(b, 1, n + b, 16), torch.ones(2, 8, 8)] for b, n in ROWS],
    ),
    "padded": (
        lambda q, lens: CAUSAL(q, q, q, q_lens=lens, kv_lens=lens),
        [[torch.randn(b, 2, n, 8), torch.arange(b) + 2] for b, n in ROWS],
    ),
    "paged": (
        lambda q, k, table, lens: CAUSAL(q, k, k, q_lens=lens - 1, kv_lens=lens, block_table=table),
        [[torch.randn(b, 2, 8, 8), torch.randn(7, 1, 4, 8), pages(b, n), torch.arange(b) + 2] for b, n in ROWS],
    ),
    "packed over pages": (
        lambda q, k, table, lens, starts: CAUSAL(
            q, k, k, cu_seqlens_q=starts, kv_lens=lens, block_table=table, q_offset=starts[1:] * 0
        ),
        [
            [
                torch.randn(1, 2, b, 8),
                torch.randn(7, 1, 4, 8),
                pages(b, n),
                torch.arange(b) + 2,
                torch.arange(b + 1).int(),
            ]
            for b, n in ROWS
        ],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_graph_of_sizes_serves_all_sizes(name):
    """Numbers of sequences too, which texts of errors wrote out, so that each was a graph of its own."""
    torch._dynamo.reset()
    call, given = SIZES[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for tensors in given:
        torch.testing.assert_close(compiled(*tensors), call(*tensors))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["dense", "latent", "padded", "paged"])
def test_an_exported_program_takes_sizes_without_limits(name, strict):
    call, given = SIZES[name]

    class Called(torch.nn.Module):
        def forward(self, tensors):
            return call(*tensors)

    def size(first, other):  # those that are the same in both calls are one
        return None if first == other else torch.export.Dim(f"size_{first}_{other}")

    sizes = [{d: size(a.shape[d], b.shape[d]) for d in range(a.dim())} for a, b in zip(*given[:2])]
    exported = torch.export.export(Called(), (given[0],), dynamic_shapes=(sizes,), strict=strict).module()
    for tensors in given:
        torch.testing.assert_close(exported(tensors), call(*tensors))


def test_checkpointing_and_functional_call():
    layer = Layer()
    inputs = operands()[:3]
    wanted = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    again = checkpoint(layer, *inputs, use_reentrant=False).square().sum()
    for a, b in zip(torch.autograd.grad(again, inputs), wanted, strict=True):
        assert torch.equal(a, b)
    zero = {"slopes": torch.zeros(4)}
    out = torch.func.functional_call(layer, zero, tuple(inputs))
    assert torch.equal(out, attend(*inputs, zero["slopes"]))


def test_autocast_casts_operands():
    inputs = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert inputs[0].grad.dtype == torch.float32


def test_a_new_length_batch_or_scalar_builds_nothing():
    for length in (16, 17):  # few queries, and more
        VARIANT(*operands(length)[:3], window=3, slopes=torch.rand(4)).sum().backward()
    before = builds()
    for length, batch, size in ((16, 3, 3), (18, 2, 3), (100, 1, 50), (1, 1, 1)):
        query, key, value, table = operands(length, batch)
        VARIANT(query, key, value, window=size, slopes=table.detach()).sum().backward()
    assert builds() == before


def test_gradients_are_right_by_finite_differences():
    query, key, value, table = (x.detach().double().requires_grad_() for x in operands(7, 1))
    assert torch.autograd.gradcheck(attend, (query, key, value, table), atol=1e-6)


def test_equal_variants_share_what_is_prepared():
    again = weft.Attention(
        weft.tanh(score / 20.0) * 20.0 + (kv_pos - q_pos) * slopes[head],
        (q_pos >= kv_pos) & (window > q_pos - kv_pos),
        name="op_test",
    )
    assert again == VARIANT and again._variant is VARIANT._variant
