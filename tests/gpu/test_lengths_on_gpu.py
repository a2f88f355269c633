"""Sequences of their own lengths on a GPU: padded and packed, against float64, under graphs, and what is checked."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

from ..attention import cases
from ..attention.cases import CAUSAL, pad
from ..support import check_variant, mostly, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

slopes, rows, columns = weft.tensor("slopes", 2), weft.tensor("rows", 2), weft.tensor("columns", 2)
BIASES = weft.Attention(
    score * (1.0 + 0.1 * slopes[batch, head]) + rows[head, q_pos] + columns[batch, kv_pos], masks.causal, name="biases"
)
VARIANTS = {
    **{name: cases.VARIANTS[name] for name in ("dense", "causal", "documents")},
    "window": weft.Attention(mask=masks.sliding_window(100), name="window_of_100"),
    "cap": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="cap"),
    "far": weft.Attention(score + pad[batch, kv_pos], masks.causal, name="far"),
}
PADDED = ([300, 0, 1, 129, 257], [400, 5, 1, 200, 0])
PACKED = ([300, 0, 1, 129, 257, 5], [400, 7, 1, 200, 300, 0])


def cumulated(lens, device="cuda"):
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def given(kind, dim=64, dtype=torch.bfloat16, heads=4, kv_heads=2, value_dim=None):
    """(query, key, value) with NaN behind lengths and around, and the options of the call."""
    q_lens, kv_lens = PADDED if kind == "padded" else PACKED
    number = len(q_lens)
    sizes = (number, max(q_lens) + 3, max(kv_lens)) if kind == "padded" else (1, sum(q_lens) + 20, sum(kv_lens) + 9)
    widths = ((heads, sizes[1], dim), (kv_heads, sizes[2], dim), (kv_heads, sizes[2], value_dim or dim))
    made = [poisoned((sizes[0], *w), dtype, "cuda", blhd=True, seed=n) for n, w in enumerate(widths)]
    for tensor, lens in zip(made, (q_lens, kv_lens, kv_lens)):
        if kind == "packed":
            tensor[:, :, sum(lens) :] = torch.nan
        else:
            for b, length in enumerate(lens):
                tensor[b, :, length:] = torch.nan
    if kind == "packed":
        return made, {"cu_seqlens_q": cumulated(q_lens), "cu_seqlens_kv": cumulated(kv_lens)}
    lens = {"q_lens": torch.tensor(q_lens, device="cuda"), "kv_lens": torch.tensor(kv_lens, device="cuda")}
    return made, lens | {"kv_lens": lens["kv_lens"].to(torch.int32)}


sinks_of = weft.tensor("sinks_of", 2)
SUNK = {
    "sunk": CAUSAL.replace(sink=sinks_of[batch, head], name="sunk"),
    "sunk window": VARIANTS["window"].replace(sink=sinks_of[batch, 0], name="sunk_window"),
    "sunk documents": VARIANTS["documents"].replace(sink=sinks_of[batch, head], name="sunk_documents"),
    "sunk far": VARIANTS["far"].replace(sink=sinks_of[batch, head], name="sunk_far"),
}


def operands_of(name):
    name = name.removeprefix("sunk ")
    if name == "documents":
        return {"doc": (torch.arange(1000, device="cuda") // 70).repeat(6, 1)}
    if name == "far":
        return {"pad": torch.where(torch.arange(1000, device="cuda") % 7 == 3, -1e9, 0.0).repeat(6, 1)}
    return {}


@pytest.fixture(params=["triton", "hopper"])
def target(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")
    return request.param


@pytest.mark.sampled(29)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name, dim, kind, target):
    made, lengths = given(kind, dim)
    check_variant(VARIANTS[name], *made, operands=operands_of(name) | lengths, target=target)


@pytest.mark.slow(11)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype, kind):
    made, lengths = given(kind, dtype=dtype)
    check_variant(CAUSAL, *made, operands=lengths)


@pytest.mark.slow(10)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("dim, value_dim", [(20, 40), (40, 128), (80, 64), (96, 96), (128, 80), (192, 128), (256, 256)])
def test_widths(dim, value_dim, kind):
    made, lengths = given(kind, dim, value_dim=value_dim)
    check_variant(CAUSAL, *made, operands=lengths)


@pytest.mark.sampled(45)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 1), (6, 3)])
@pytest.mark.parametrize("offset", [0, 7, -5, "tensor"])
def test_heads_and_offsets(heads, kv_heads, offset, kind, target):
    made, lengths = given(kind, 128, heads=heads, kv_heads=kv_heads)
    number = 5 if kind == "padded" else 6
    given_offset = torch.arange(number, dtype=torch.int32, device="cuda") * 9 - 4 if offset == "tensor" else offset
    check_variant(CAUSAL, *made, operands=lengths, q_offset=given_offset, target=target)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_wanted_gradients_alone(wanted, kind):
    made, lengths = given(kind)
    leaves = [torch.nan_to_num(t).requires_grad_(n in wanted) for n, t in zip("qkv", made)]
    out = CAUSAL(*leaves, **lengths)
    found = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], torch.ones_like(out))
    everything = [t.detach().requires_grad_() for t in leaves]
    whole = torch.autograd.grad(CAUSAL(*everything, **lengths, target="triton"), everything, torch.ones_like(out))
    for got, right in zip(found, [g for n, g in zip("qkv", whole) if n in wanted], strict=True):
        torch.testing.assert_close(got, right, atol=4e-2, rtol=2e-2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("dim", [64, 128])
def test_many_lengths(dim, kind, target):
    """Lengths at the edges of tiles, in every mixture of a batch."""
    generator = torch.Generator().manual_seed(dim)
    edges = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385])
    for turn in range(8):
        q_lens, kv_lens = (edges[torch.randint(0, len(edges), (9,), generator=generator)] for _ in range(2))
        if turn % 2:
            kv_lens = q_lens
        made, lens = [torch.randn(9, 2, 390, dim, device="cuda").bfloat16() for _ in "qkv"], (q_lens, kv_lens, kv_lens)
        for tensor, of_rows in zip(made, lens):
            for b, length in enumerate(of_rows.tolist()):
                tensor[b, :, length:] = torch.nan
        operands = {"q_lens": q_lens.cuda(), "kv_lens": kv_lens.cuda().int()}
        if kind == "packed":
            made = [
                torch.cat([t[b : b + 1, :, :n] for b, n in enumerate(of_rows.tolist())], 2)
                for t, of_rows in zip(made, lens)
            ]
            operands = {"cu_seqlens_q": cumulated(q_lens.tolist()), "cu_seqlens_kv": cumulated(kv_lens.tolist())}
        check_variant(CAUSAL, *made, operands=operands, target=target)


@pytest.mark.parametrize("kind", mostly(["packed"], ["padded", "packed"]))
def test_gradients_of_operands(kind):
    made, lengths = given(kind, dtype=torch.float32)
    # as the other operands, of one draw: of a row's sum rounding is what is left, and that of plain torch may be luck
    generator = torch.Generator().manual_seed(0)
    tables = {"slopes": torch.rand(6, 4, generator=generator)}
    tables |= {n: torch.randn(k, 1000, generator=generator) for n, k in (("rows", 4), ("columns", 6))}
    tables = {n: t.cuda() for n, t in tables.items()}
    check_variant(BIASES, *made, operands=tables | lengths, differentiate=tuple(tables))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("name", SUNK)
def test_sinks(name, kind, target):
    made, lengths = given(kind)
    operands = operands_of(name) | {"sinks_of": torch.randn(6, 4, device="cuda")}
    check_variant(SUNK[name], *made, operands=operands | lengths, differentiate=("sinks_of",), target=target)


@pytest.mark.parametrize("kind", mostly(["packed"], ["padded", "packed"]))
def test_sinks_alone_repeat_bit_for_bit(kind):
    made, lengths = given(kind)
    table = torch.randn(6, 4, device="cuda", requires_grad=True)
    found = []
    for wanted in ((table,), (table, *made), (table,)):
        for t in made:
            t.requires_grad_(len(wanted) > 1)
        # sinks alone are computed by triton in any case; other targets add up other tiles
        out, lse = SUNK["sunk"](*made, **lengths, sinks_of=table, return_lse=True, target="triton")
        dlse = torch.where(lse == -torch.inf, torch.nan, 1.0)
        found.append(torch.autograd.grad([out, lse], wanted, [torch.ones_like(out), dlse])[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and not found[0].isnan().any()


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_repeated_calls_agree_bit_for_bit(kind, target):
    made, lengths = given(kind)
    leaves = [t.requires_grad_() for t in made]
    found = []
    for _ in range(3 if target == "triton" else 50):
        out = CAUSAL(*leaves, **lengths, target=target)
        dquery, *others = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found.append((out, *others, *([dquery] if target == "triton" else [])))  # hopper adds up dQ in any order
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again))


@pytest.mark.slow(25)
def test_ten_thousand_sequences_and_one_of_a_hundred_thousand_tokens():
    generator = torch.Generator().manual_seed(0)
    many = torch.randint(0, 21, (10_000,), generator=generator).tolist()
    for lens in (many, [100_000], [3, 100_000, 0, 5], [7] * 20_000):
        total = sum(lens)
        query, key, value = (torch.randn(1, 2, total, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        leaves = [t.requires_grad_() for t in (query, key, value)]
        out = CAUSAL(*leaves, cu_seqlens_q=cumulated(lens))
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
        starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
        picked = [b for b, length in enumerate(lens) if 0 < length < 3000][::500] or [
            b for b, n in enumerate(lens) if n
        ]
        for b in picked:
            part = slice(starts[b], starts[b + 1])
            if lens[b] > 3000:  # the last rows of a long one, against dense
                dense = CAUSAL(*(t.detach()[:, :, part] for t in leaves))
                torch.testing.assert_close(out[:, :, part], dense, atol=4e-3, rtol=2e-2)  # of another target
                continue
            own = [t.detach()[:, :, part].double().requires_grad_() for t in leaves]
            exact = CAUSAL.reference(*own)
            torch.testing.assert_close(out[:, :, part].double(), exact, atol=2e-2, rtol=2e-2)
            wanted = torch.autograd.grad(exact, own, torch.ones_like(exact))
            for got, right in zip(found, wanted):
                torch.testing.assert_close(got[:, :, part].double(), right, atol=6e-2, rtol=4e-2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_a_graph_is_replayed_with_other_lengths(kind, target):
    """Nothing waits for the device, and no size is taken from what lies there."""
    (query, key, value), lengths = given(kind)
    query, key, value = (torch.nan_to_num(t).requires_grad_() for t in (query, key, value))
    lengths = {n: t.clone() for n, t in lengths.items()}
    dout = torch.randn_like(query)

    def step():
        out, lse = CAUSAL(query, key, value, **lengths, return_lse=True, target=target)
        return (*torch.autograd.grad(out, (query, key, value), dout), out, lse)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    others = [lengths, {n: t // 2 for n, t in lengths.items()}, {n: t // 5 for n, t in lengths.items()},
              {n: torch.zeros_like(t) for n, t in lengths.items()}]  # fmt: skip
    others = [{n: t.clone() for n, t in o.items()} for o in others]
    for other in others:
        for name, tensor in other.items():
            lengths[name].copy_(tensor)
        graph.replay()
        for n, (got, wanted) in enumerate(zip(captured, step())):
            if n == 0 and target == "hopper":  # which adds up dQ in any order
                torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
            else:
                assert torch.equal(got, wanted)


def compiled_kernels():
    """How many GPU kernels this process has compiled."""
    import gc

    from triton.runtime.jit import JITFunction

    made = [o for o in gc.get_objects() if type(o) is JITFunction]
    return sum(len(cache[0]) for kernel in made for cache in kernel.device_caches.values())


def test_new_lengths_compile_nothing(target):
    (query, key, value), lengths = given("packed")
    CAUSAL(query, key, value, **lengths, target=target)
    before = compiled_kernels()
    for lens in ([5, 6, 7], [200], [1] * 100):
        CAUSAL(query, key, value, cu_seqlens_q=cumulated(lens), cu_seqlens_kv=cumulated(lens), target=target)
    assert compiled_kernels() == before


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_no_call_waits_for_the_device(kind, target, no_waiting):
    made, lengths = given(kind)
    leaves = [t.requires_grad_() for t in made]
    out = CAUSAL(*leaves, **lengths, target=target)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    with no_waiting():
        out = CAUSAL(*leaves, **lengths, target=target)
        torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_contents_are_looked_at_on_request_and_cut_otherwise(kind, target):
    bad = {"padded": {"q_lens": [-5, 43, 1000], "kv_lens": [2**30, -1, 76]},
           "packed": {"cu_seqlens_q": [-7, 30, 20, 2**30], "cu_seqlens_kv": [0, 500, 3, 40]}}[kind]  # fmt: skip
    rows = (3, 42) if kind == "padded" else (1, 60)
    shapes = [(rows[0], heads, rows[1], 64) for heads in (4, 2, 2)]
    made = [poisoned(shape, torch.bfloat16, "cuda", True, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    # of the types that other tests have, whose kernels are then compiled
    lengths = {n: torch.tensor(x, device="cuda", dtype=None if n == "q_lens" else torch.int32) for n, x in bad.items()}
    with weft.settings(check=True), pytest.raises(weft.WeftError, match=r"expected (a length from 0|0, where)"):
        CAUSAL(*made, **lengths)
    out = CAUSAL(*made, **lengths, target=target)
    found = torch.autograd.grad(out, made, torch.ones_like(out))
    torch.cuda.synchronize()  # nothing was read or written outside
    assert all(torch.isfinite(g).all() for g in found)


def test_lengths_on_another_device_are_refused():
    (query, key, value), lengths = given("padded")
    with pytest.raises(weft.WeftError, match=r"q_lens: expected device cuda:0 as in query, got cpu"):
        CAUSAL(query, key, value, q_lens=lengths["q_lens"].cpu())


def test_hopper_says_what_it_leaves_to_triton():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")
    made, lengths = given("padded", 128)
    assert "hopper" in CAUSAL.explain(*made, **lengths)
    steps = torch.empty(2, 5, 400 * 128 + 8, device="cuda", dtype=torch.bfloat16)[:, :, 8:].unflatten(2, (400, 128))
    said = " ".join(CAUSAL.explain(made[0][:2], steps[:, :4], steps[:, :4], kv_lens=lengths["kv_lens"][:2]).split())
    assert "batch rows must lie a whole number of rows of a head apart" in said
    CAUSAL(made[0][:2].nan_to_num(), steps[:, :4], steps[:, :4], kv_lens=lengths["kv_lens"][:2])


def test_torch_compile():
    (query, key, value), lengths = given("packed")
    query, key, value = (torch.nan_to_num(t) for t in (query, key, value))
    compiled = torch.compile(lambda q, k, v, lens: CAUSAL(q, k, v, **lens) * 2, fullgraph=True)
    for lens in (lengths, {n: t // 2 for n, t in lengths.items()}):
        assert torch.equal(compiled(query, key, value, lens), CAUSAL(query, key, value, **lens) * 2)


def test_work_is_balanced():
    """64 sequences of 1 to 16k tokens take little longer than equal ones of as much visible work."""
    lens = [1 + i * 16383 // 63 for i in range(64)]
    equal = round((sum(n * n for n in lens) / 64) ** 0.5)
    generator = torch.Generator().manual_seed(1)
    shuffled = [lens[i] for i in torch.randperm(64, generator=generator).tolist()]

    def milliseconds(query, key, value, starts):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        CAUSAL(query, key, value, cu_seqlens_q=starts)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    calls = [
        [torch.randn(1, 4, sum(lens), 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)] + [cumulated(lens)]
        for lens in (shuffled, [equal] * 64)
    ]
    times = [[milliseconds(*call) for call in calls] for _ in range(40)][1:]  # in turns: others may use this GPU
    assert min(t for t, _ in times) <= 1.1 * min(t for _, t in times)
