"""What a call on a GPU may bring: addresses, strides and sizes of any kind, streams, devices, kernels built ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.planning import hardware

from ..support import check_variant

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


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_a_factor_of_scores_may_be_negative_or_zero(target, dim):
    """The maximum of scaled scores is then that of the least ones: no sign of the factor is known when generating."""
    documents = (torch.arange(300, device="cuda") // 70).to(torch.int64)
    values = torch.tensor([1.5, -1.5, 0.0, -80.0], device="cuda")
    for mask, given in ((masks.causal, {}), (masks.causal & masks.document(doc), {"doc": documents}), (None, {})):
        variant = weft.Attention(score * factor[head], **({} if mask is None else {"mask": mask}), name="by_head")
        check_variant(
            variant, *qkv(2, 4, 300, dim), target=target, operands={"factor": values, **given},
            label=f"factor {target} D{dim} {mask}",
        )  # fmt: skip


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


DECLARED = """
    import weft
    from weft import head, kv_pos, masks, q_pos, score
    causal = weft.Attention(mask=masks.causal, name="causal")
    alibi = weft.Attention(score + weft.tensor("slopes", 1)[head] * (kv_pos - q_pos), masks.causal, name="alibi")
"""
CALLED = """
    import torch, declared
    for variant, given in ((declared.causal, {}), (declared.alibi, {"slopes": torch.rand(4, device="cuda")})):
        q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        for target in TARGETS:
            variant(q, k, v, target=target, **given).sum().backward()
    torch.cuda.synchronize()
"""


def test_what_was_built_ahead_compiles_nothing_at_its_first_call(tmp_path):
    targets = TARGETS if torch.cuda.get_device_capability() == (9, 0) else ["triton"]
    (tmp_path / "declared.py").write_text(textwrap.dedent(DECLARED))
    (tmp_path / "called.py").write_text(f"TARGETS = {targets}\n" + textwrap.dedent(CALLED))
    caches = {"WEFT_CACHE_DIR": tmp_path / "generated", "TRITON_CACHE_DIR": tmp_path / "compiled"}
    environment = os.environ | {name: str(folder) for name, folder in caches.items()}

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {p.name for p in caches["TRITON_CACHE_DIR"].rglob("*.cubin")}

    device = hardware.for_device("cuda").name
    if device not in hardware.KNOWN:
        pytest.skip(f"no record of {device} to build for")
    for target in targets:
        directions = [] if target == "triton" else ["--direction", "forward"]
        built = run("-m", "weft", "build", "declared.py:causal", "declared.py:alibi", "--head-dim", "64",
                    "--dtype", "bf16", "--device", device, "--target", target, *directions)  # fmt: skip
    assert built
    assert run("called.py") == built, "a call compiled what was not built ahead"
