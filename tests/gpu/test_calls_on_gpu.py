"""What a call on a GPU may bring: addresses, strides and sizes of any kind, streams, devices, kernels built ahead."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen.launch import launching
from weft.compiler.planning.machines import hardware
from weft.runtime.call import SLOTS
from weft.runtime.run.variant import forget

from ..support import check_variant, mostly

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

slopes, factor, doc = weft.tensor("slopes", 1), weft.tensor("factor", 1), weft.tensor("doc", 1, int)
bias, table = weft.tensor("bias", 4), weft.tensor("table", 2)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
TARGETS = ["triton", "hopper"]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def qkv(batch, heads, length, dim, kv_len=None):
    return [normal(batch, heads, n, dim, seed=i) for i, n in enumerate((length, kv_len or length, kv_len or length))]


def exact(variant, *tensors, **given):
    """The reference in float64."""
    doubles = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in given.items()}
    return variant.reference(*(x.double() for x in tensors), **doubles)


def error(found, wanted):
    """Relative to the norm; NaN where there is one."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("axis", [0, 2])
def test_strides_that_lead_nowhere_need_no_alignment(axis):
    q, k, v = qkv(1, 4, 1, 64, kv_len=256)
    strides = [stride + 3 * (n == axis) for n, stride in enumerate(q.stride())]
    odd = torch.as_strided(q, q.shape, strides)
    assert torch.equal(CAUSAL(odd, k, v, target="hopper"), CAUSAL(q, k, v, target="hopper"))


@pytest.mark.parametrize("target", TARGETS)
def test_alignment_may_change_from_call_to_call(target):
    q, k, v = qkv(1, 4, 256, 64)
    whole = torch.rand(9, device="cuda")
    odd = torch.empty(q.numel() + 8, device="cuda", dtype=q.dtype)[1 : 1 + q.numel()].view(q.shape).copy_(q)
    ALIBI(q, k, v, slopes=whole[:4], target=target)
    for query in (q, odd, q):
        if query is odd and target == "hopper":
            with pytest.raises(weft.UnavailableError, match="16 bytes"):
                ALIBI(query, k, v, slopes=whole[1:5], target=target)
            query, given = odd, {}
        else:
            given = {"target": target}
        for mine in (whole[1:5], whole[4:8], whole[::2][:4]):
            assert error(ALIBI(query, k, v, slopes=mine, **given), exact(ALIBI, q, k, v, slopes=mine)) < 6e-3


FACTORED = {"causal": {"mask": masks.causal}, "documents": {"mask": masks.causal & masks.document(doc)}, "dense": {}}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mask", FACTORED)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_a_factor_of_scores_may_be_negative_or_zero(target, dim, mask):
    """The maximum of scaled scores is then that of the least ones: no sign of the factor is known when generating."""
    given = {"doc": torch.arange(300, device="cuda") // 70} if mask == "documents" else {}
    values = torch.tensor([1.5, -1.5, 0.0, -80.0], device="cuda")
    variant = weft.Attention(score * factor[head], **FACTORED[mask], name="by_head")
    check_variant(variant, *qkv(2, 4, 300, dim), target=target, operands={"factor": values, **given})


def test_offsets_may_be_a_column_of_a_table():
    q, k, v = qkv(3, 2, 64, 64, kv_len=256)
    pool = torch.tensor([[100, 7], [50, 9], [192, 3]], device="cuda", dtype=torch.int32)
    want = exact(CAUSAL, q, k, v, q_offset=pool[:, 0].contiguous())
    assert error(CAUSAL(q, k, v, q_offset=pool[:, 0]), want) < 6e-3


@pytest.mark.parametrize("target", TARGETS)
def test_operands_that_reach_beyond_32_bits(target):
    variant = weft.Attention(score + table[weft.batch, kv_pos], name="tables")
    q, k, v = qkv(3, 2, 64, 64, kv_len=256)
    base = torch.zeros(2 * (2**31 + 8) + 256, device="cuda", dtype=torch.float16)
    far = base.as_strided((3, 256), (2**31 + 8, 1)).copy_(normal(3, 256, seed=5))
    want = exact(variant, q, k, v, table=far.clone())
    assert error(variant(q, k, v, table=far.clone(), target=target), want) < 6e-3
    assert error(variant(q, k, v, table=far, target=target), want) < 6e-3


def test_a_bias_of_more_than_two_to_the_31_elements():
    variant = weft.Attention(score + bias[weft.batch, head, q_pos, kv_pos], name="biased")
    q, k, v = qkv(3, 16, 8192, 64)
    given = torch.zeros(3, 16, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    given[2, 15, -64:] = normal(64, 8192, seed=4)
    last = (slice(2, 3), slice(15, 16))
    row = weft.Attention(score + bias[weft.batch, head, q_pos, kv_pos], name="biased_rows")
    want = exact(row, q[last][:, :, -64:], k[last], v[last], bias=given[last][:, :, -64:], q_offset=0)
    assert error(variant(q, k, v, bias=given, target="triton")[last][:, :, -64:], want) < 6e-3


def test_calls_on_several_streams_do_not_meet():
    """The hopper target hands out work by a counter in memory: each stream, of torch or not, has one of its own."""
    inputs = [[normal(1, 8, 3000, 128, seed=3 * n + i) for i in range(3)] for n in range(4)]
    want = [CAUSAL(*each) for each in inputs]
    torch.cuda.synchronize()
    owned = [torch.cuda.Stream() for _ in range(3)]
    streams = [*owned, torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)]
    for turn in range(50):
        found = []
        for stream, each in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(CAUSAL(*each))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want)), f"turn {turn}"


def views_of_one_address(dim):
    """Operands of several sizes and strides, query, key and value each at one address for all of them."""
    memory = [normal(2 * 4 * 320 * dim, seed=n) for n in range(3)]
    for rows, heads_last in ((320, False), (200, False), (200, True), (77, True), (320, True), (33, False)):
        size = (2, rows, 4, dim) if heads_last else (2, 4, rows, dim)
        made = [m[: 8 * rows * dim].view(size) for m in memory]
        yield [m.transpose(1, 2) for m in made] if heads_last else made


@pytest.mark.parametrize("most", [2, 1024])
@pytest.mark.parametrize("dim", mostly([64], [64, 128]))
def test_what_lies_at_an_address_may_change_from_call_to_call(dim, most, monkeypatch):
    """The hopper target keeps tensor descriptors by address, sizes and strides."""
    monkeypatch.setattr(launching, "MOST_DESCRIPTORS", most)
    for _ in range(2):
        for q, k, v in views_of_one_address(dim):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = CAUSAL(*leaves, target="hopper")
            dout = normal(*out.shape, seed=7)
            want = exact(CAUSAL, *leaves)
            assert error(out, want) < 6e-3
            found, true = (torch.autograd.grad(o, leaves, d) for o, d in ((out, dout), (want, dout.double())))
            assert all(error(a, b) < 1.5e-2 for a, b in zip(found, true, strict=True)), (q.shape, q.stride())


def test_threads_share_what_is_kept(monkeypatch):
    monkeypatch.setattr(launching, "MOST_DESCRIPTORS", 3)  # cleared all the time
    inputs = [views for views in views_of_one_address(64)]
    want = [CAUSAL(*each, target="hopper") for each in inputs]
    wrong = []

    def calls(first):
        for n in range(400):
            at = (first + n) % len(inputs)
            if n % 20 == 0 and not torch.equal(CAUSAL(*inputs[at], target="hopper"), want[at]):
                wrong.append((first, n))
            CAUSAL(*inputs[at], target="hopper")

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_threads_that_have_called_nothing_of_cuda_yet(kind):
    """Descriptors want a context, which CUDA gives to a thread at its first call: first calls, and prepared ones."""
    q, k, v = qkv(1, 4, 300, 64)
    starts = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    given = {} if kind == "dense" else {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    variant, dout, found = CAUSAL.replace(name=f"fresh_threads_{kind}"), torch.randn_like(q), []

    def call():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = variant(*leaves, **given, target="hopper")
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(found) == 3
    first, *others = found
    for other in others:
        assert all(torch.equal(first[n], other[n]) for n in (0, 2, 3))


@pytest.mark.slow(12)
@pytest.mark.parametrize("lengths", [False, True], ids=["dense", "lengths"])
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_known_of_calls_that_repeat_changes_no_result(target, lengths, monkeypatch):
    """Layouts that come back, in other memory and in other streams, beside a process that knows nothing of the last."""
    lens = {"kv_lens": torch.tensor([20, 33], device="cuda", dtype=torch.int32)} if lengths else {}
    inputs = [views for views in views_of_one_address(64)]
    douts = [normal(*views[0].shape, seed=7) for views in inputs]
    known = CAUSAL.replace(name=f"known_{target}_{lengths}")

    def step(at, variant=known):
        leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs[at]]
        out = variant(*leaves, **lens, target=target)
        return [out.detach(), *torch.autograd.grad(out, leaves, douts[at])]

    with monkeypatch.context() as without:
        without.setattr("weft.codegen.torch_private.guard", None)
        want = [step(at, CAUSAL.replace(name=f"unknown_{target}_{lengths}")) for at in range(len(inputs))]
    for turn in range(3):
        for at, wanted in enumerate(want):
            for n in range(6):
                with torch.cuda.stream(torch.cuda.Stream() if n == 5 else torch.cuda.current_stream()):
                    torch.cuda.synchronize()
                    out, dq, *rest = step(at)
                    torch.cuda.synchronize()
                assert all(map(torch.equal, [out, *rest], [wanted[0], *wanted[2:]])), (turn, at, n)
                assert error(dq, wanted[1]) < 5e-3  # of hopper added up in any order
    assert known._variant.repeats.hits >= 4
    assert [kind.repeats.hits for kind in known._variant.recorded.values()] >= [4]


@pytest.mark.parametrize("lengths", [False, True], ids=["dense", "lengths"])
@pytest.mark.parametrize(("target", "rows"), [("triton", 1), ("triton", 30), ("hopper", 30)])
def test_keys_that_grow_are_computed_as_if_nothing_were_known(target, rows, lengths, monkeypatch):
    """Nor is what lies behind them seen, where others will lie."""
    q, *made = [normal(2, heads, n, 64, seed=n) for heads, n in ((4, rows), (2, 1200), (2, 1201))]
    caches = [torch.full_like(m, torch.nan) for m in made]
    lens = {"kv_lens": torch.tensor([20, 33], device="cuda", dtype=torch.int32)} if lengths else {}
    known, unknown = (CAUSAL.replace(name=f"{name}_{target}_{rows}_{lengths}") for name in ("grown", "alone"))

    def step(variant, length):
        return variant(q, *(cache[:, :, :length] for cache in caches), **lens, target=target)

    def served(length):
        found = known._variant.repeats.growing
        return found is not None and step(known, length) is not None and found is known._variant.repeats.growing

    steps = [*range(33, 150), *range(250, 264), *range(380, 390), *range(1016, 1030), 1199]
    for n in steps:
        for cache, own in zip(caches, made):
            cache[:, :, :n] = own[:, :, :n]
        out = step(known, n)
        assert error(out, exact(CAUSAL, q, *(cache[:, :, :n] for cache in caches), **lens)) < 6e-3, n
        with monkeypatch.context() as without:
            without.setattr("weft.codegen.torch_private.guard", None)
            assert torch.equal(out, step(unknown, n)), n
    assert served(1199) and served(40)
    assert unknown._variant.repeats.growing is None


def test_a_graph_needs_nothing_of_what_is_kept():
    q, k, v = qkv(2, 4, 300, 64)
    want = CAUSAL(q, k, v, target="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = CAUSAL(q, k, v, target="hopper")
    forget()  # what was prepared, with the descriptors
    gc.collect()
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def test_the_device_of_the_operands_is_the_one_that_computes():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for target in TARGETS:
        q, k, v = (x.to("cuda:1").requires_grad_() for x in qkv(2, 4, 300, 64))
        out = CAUSAL(q, k, v, target=target)  # the current device is cuda:0
        want = exact(CAUSAL, q, k, v)
        assert out.device == q.device and error(out, want) < 6e-3
        dout = torch.ones_like(out)
        for mine, true in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
            assert mine.device == q.device and error(mine, true) < 1e-2
        again = CAUSAL(*(x.detach().to("cuda:0") for x in (q, k, v)), target=target)
        assert torch.equal(again.cpu(), out.detach().cpu()), target
    with pytest.raises(weft.WeftError, match="key: expected device cuda:1"):
        CAUSAL(q, k.detach().to("cuda:0"), v)


class Watching(TorchDispatchMode):
    """Something that watches ops, so that calls go through torch's dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def rows_before_heads(tensor):
    """The same numbers in memory order [B, L, H, ...]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dim() > 2 else tensor


WINDOW = weft.Attention(mask=masks.causal & (q_pos - kv_pos < weft.scalar("window", int)), name="window")


@pytest.mark.parametrize("variant", [CAUSAL, ALIBI, WINDOW], ids=lambda variant: variant.name)
@pytest.mark.parametrize("dlse", [False, True], ids=["", "dlse"])
def test_every_way_of_a_backward_gives_the_same_bits(variant, dlse):
    """The shortest one, that of the op, and those that tensors take which hooks or callers bring in another form."""
    given = {"alibi": {"slopes": torch.rand(4, device="cuda")}, "window": {"window": 50}}.get(str(variant.name), {})
    leaves = [x.requires_grad_() for x in qkv(2, 4, 200, 64)]
    dout, dstatistics = normal(2, 4, 200, 64, seed=8), normal(2, 4, 200, seed=9, dtype=torch.float32)

    def gradients(dout=dout, dstatistics=dstatistics):
        out, lse = variant(*leaves, return_lse=True, **given)
        pairs = ([out, lse], [dout, dstatistics]) if dlse else ([out], [dout])
        return torch.autograd.grad(pairs[0], leaves, pairs[1])

    with Watching():
        want = gradients()  # dispatched by torch
    found = {"first": gradients(), "again": gradients(), "negated": gradients(torch._neg_view(-dout))}
    found["columns"] = gradients(dout.mT.contiguous().mT, dstatistics.mT.contiguous().mT)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.cuda()):
        found["offloaded"] = gradients()
    with torch.autograd.graph.saved_tensors_hooks(rows_before_heads, lambda t: t):
        found["in other strides"] = gradients()
    for way, tensors in found.items():
        assert all(map(torch.equal, tensors, want)), way
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(dout)
    assert all(map(torch.equal, gradients(one), gradients(one.contiguous())))


def test_a_backward_that_is_ready_takes_no_other_tensors():
    query, key, value = leaves = [x.requires_grad_() for x in qkv(1, 4, 100, 64)]
    for _ in range(2):
        torch.autograd.grad(CAUSAL(*leaves).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t):
        out = CAUSAL(*leaves)
    with pytest.raises(weft.WeftError, match="dout: expected"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    call = (query, key, value, None, [], [], [], 0, *[None] * len(SLOTS), 64, CAUSAL.canonical.text, "")
    out, lse = torch.ops.weft.attention(*call)
    for dout in (out.double(), out[:, :, :7], out.cpu()):
        with pytest.raises(weft.WeftError, match="dout: expected"):
            torch.ops.weft.attention_backward(dout, None, out, lse, *call, [True, True, True, False])


def test_rows_that_are_padded_to_16_bytes_have_gradients_that_are_not():
    q, k = (torch.zeros(2, 4, 200, 24, device="cuda", dtype=torch.bfloat16) for _ in "qk")
    for seed, tensor in enumerate((q, k)):
        tensor[..., :20] = normal(2, 4, 200, 20, seed=seed)
    check_variant(CAUSAL, q[..., :20], k[..., :20], normal(2, 4, 200, 64, seed=2), target="triton", label="padded rows")


DECLARED = """
    import weft
    from weft import head, kv_pos, masks, q_pos, score
    causal = weft.Attention(mask=masks.causal, name="causal")
    alibi = weft.Attention(score + weft.tensor("slopes", 1)[head] * (kv_pos - q_pos), masks.causal, name="alibi")
"""
CALLED = """
    import sys, torch, declared
    variant = getattr(declared, sys.argv[1])
    given = {"slopes": torch.rand(4, device="cuda")} if sys.argv[1] == "alibi" else {}
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    for target in sys.argv[2:]:
        variant(q, k, v, target=target, **given).sum().backward()
    torch.cuda.synchronize()
"""


@pytest.mark.slow(32)
@pytest.mark.parametrize("name", mostly(["alibi"], ["causal", "alibi"]))
def test_what_was_built_ahead_compiles_nothing_at_its_first_call(name, tmp_path):
    targets = TARGETS if torch.cuda.get_device_capability() == (9, 0) else ["triton"]
    (tmp_path / "declared.py").write_text(textwrap.dedent(DECLARED))
    (tmp_path / "called.py").write_text(textwrap.dedent(CALLED))
    caches = {"WEFT_CACHE_DIR": tmp_path / "generated", "TRITON_CACHE_DIR": tmp_path / "compiled"}
    environment = os.environ | {name: str(folder) for name, folder in caches.items()}

    def start(*command):
        return subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
            env=environment,
        )  # fmt: skip

    def kernels_after(*running):
        for process in running:
            said, _ = process.communicate(timeout=500)
            assert process.returncode == 0, said
        return {p.name for p in caches["TRITON_CACHE_DIR"].rglob("*.cubin")}

    device = hardware.for_device("cuda").name
    if device not in hardware.KNOWN:
        pytest.skip(f"no record of {device} to build for")
    built = kernels_after(*(
        start("-m", "weft", "build", f"declared.py:{name}", "--head-dim", "64", "--dtype", "bf16", "--device", device,
              "--jobs", "1", "--target", target)
        for target in targets
    ))  # fmt: skip
    assert built
    assert kernels_after(start("called.py", name, *targets)) == built, "a call compiled what was not built ahead"
