"""What a call refuses, each with its message; and what it gives at the edges."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import weft
from weft import WeftError, head, kv_pos, masks, q_pos, score
from weft.ir.errors import UnavailableError
from weft.runtime.call import SLOTS

CAUSAL = weft.Attention(mask=masks.causal, name="causal")
window = weft.scalar("window", int)
WINDOW = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="window_causal")
slopes = weft.tensor("slopes", 1)
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi")
table = weft.tensor("table", 1)


def qkv(heads=4, kv_heads=2, q_len=8, kv_len=8, dim=16, value_dim=16, batch=2, dtype=torch.float32):
    query = torch.randn(batch, heads, q_len, dim, dtype=dtype)
    key = torch.randn(batch, kv_heads, kv_len, dim, dtype=dtype)
    return query, key, torch.randn(batch, kv_heads, kv_len, value_dim, dtype=dtype)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[0], k, v), r"query: expected 4 dimensions .* got shape \[4, 8, 16\]"),
        (lambda q, k, v: (q[:, :3], k, v), r"query: expected a multiple of the key's 2 heads, got 3"),
        (lambda q, k, v: (q[..., :8], k, v), r"key: expected dim 8 as in query, got 16"),
        (lambda q, k, v: (q, k, v[:, :, :7]), r"value: expected length 8 as in key, got 7"),
        (lambda q, k, v: (q, k[:1], v), r"key: expected batch 2 as in query, got 1"),
        (lambda q, k, v: (q, k, v[:, :1]), r"value: expected 2 heads as in key, got 1"),
        (lambda q, k, v: (q, k.half(), v), r"key: expected dtype torch.float32 as in query, got torch.float16"),
        (lambda q, k, v: (q, k.to("meta"), v), r"key: expected device cpu as in query, got meta"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), r"query: expected bfloat16, float16 or float32, got torch.int32"),
        (lambda q, k, v: (q.mT.contiguous().mT, k, v), r"query: expected a contiguous last dimension, got strides"),
        (lambda q, k, v: (q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v), r"query: expected dim 1 to 256, got 272"),
        (lambda q, k, v: (q, k, v[..., :0]), r"value: expected dim 1 to 256, got 0$"),
        (lambda q, k, v: (q[:, :0], k, v), r"query: expected at least 1 head, got 0"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), r"key: expected at least 1 head, got 0"),
        (lambda q, k, v: (q, k, None), r"value: missing; call it with query, key and value"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(change, message):
    with pytest.raises(WeftError, match=message):
        CAUSAL(*change(*qkv()))


def test_problems_are_listed_together():
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"(?s)causal:.*key: expected batch.*value: expected length"):
        CAUSAL(q, k[:1], v[:, :, :5])


def test_own_operands():
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"window: missing; pass window=... \(an int, declared at .*test_call.py:\d+\)"):
        WINDOW(q, k, v)
    with pytest.raises(WeftError, match=r"wimdow: unknown operand or option; this variant's operands are: window"):
        WINDOW(q, k, v, window=3, wimdow=4)
    with pytest.raises(WeftError, match=r"window: expected an int, got 3.5"):
        WINDOW(q, k, v, window=3.5)
    with pytest.raises(WeftError, match=r"window: expected a Python number, got a tensor"):
        WINDOW(q, k, v, window=torch.tensor(3))
    with pytest.raises(WeftError, match=r"window: integer overflow: expected a value within 32 bits, got 4294967296"):
        WINDOW(q, k, v, window=2**32)
    with pytest.raises(WeftError, match=r"slopes: expected 1 dimension, as declared at .*, got shape \[2, 4\]"):
        ALIBI(q, k, v, slopes=torch.ones(2, 4))
    with pytest.raises(WeftError, match=r"slopes: expected a tensor of float, got torch.int64"):
        ALIBI(q, k, v, slopes=torch.ones(4, dtype=torch.int64))
    with pytest.raises(WeftError, match=r"slopes: expected a tensor of float with 1 dimension, got list"):
        ALIBI(q, k, v, slopes=[1.0] * 4)


def test_an_op_checks_operands_that_no_call_has_seen():
    """A compiled or exported graph reaches the op with whatever tensors it is given."""
    ids = weft.tensor("ids", 1, int)
    packed = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.document(ids), name="packed_alibi")

    def call(ids, slopes):
        return torch.ops.weft.attention(
            *qkv(), None, [ids, slopes], [], [], 0, *[None] * len(SLOTS), 16, packed.canonical.text, "target=cpu"
        )

    out, _ = call(torch.zeros(8, dtype=torch.int64), torch.ones(4))
    assert bool(torch.isfinite(out).all())
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float32):
        with pytest.raises(WeftError, match=rf"packed_alibi: ids: expected a tensor of int, got {dtype}"):
            call(torch.zeros(8, dtype=dtype), torch.ones(4))
    with pytest.raises(WeftError, match=r"slopes: expected a tensor of float, got torch.int64"):
        call(torch.zeros(8, dtype=torch.int64), torch.ones(4, dtype=torch.int64))
    with pytest.raises(WeftError, match=r"(?s)ids: expected 1 dimension, .*slopes: expected a tensor of float"):
        call(torch.zeros(2, 8, dtype=torch.int64), torch.ones(4, dtype=torch.bool))


def test_an_index_that_can_leave_its_tensor_is_refused():
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"`slopes\[head\]`: index 0, `head`, ranges from 0 to 3 .* 2 entries"):
        ALIBI(q, k, v, slopes=torch.ones(2))
    with pytest.raises(WeftError, match=r"1 entry there; index it with 0, or pass x.expand.*nothing is broadcast"):
        ALIBI(q, k, v, slopes=torch.ones(1))
    loose = weft.Attention(score + table[kv_pos - q_pos + 7], name="loose")
    loose(q, k, v, table=torch.ones(15))
    with pytest.raises(WeftError, match=r"ranges from 0 to 14 .* 13 entries there; .* clamp the index: weft.minimum"):
        loose(q, k, v, table=torch.ones(13))
    with pytest.raises(WeftError, match=r"14 entries there; it is one entry short: pass .* 15 entries there$"):
        loose(q, k, v, table=torch.ones(14))
    clamped = weft.Attention(score + table[weft.minimum(weft.maximum(kv_pos - q_pos, 0), 3)], name="clamped")
    clamped(q, k, v, table=torch.ones(4))
    floored = weft.Attention(score + table[weft.floor(weft.log2(1.0 + weft.abs(kv_pos - q_pos)))], name="floored")
    with pytest.raises(WeftError, match=r"ranges from .* clamp the index"):
        floored(q, k, v, table=torch.ones(4))


def test_integers_stay_within_32_bits():
    q, k, v = qkv()
    wide = weft.Attention(mask=kv_pos * window <= q_pos, name="wide")
    wide(q, k, v, window=1000)
    with pytest.raises(WeftError, match=r"integer overflow: `kv_pos \* window` reaches \d+ in this call"):
        wide(q, k, v, window=2**30)
    blocks = weft.Attention(mask=kv_pos // window == q_pos // window, name="blocks")
    with pytest.raises(WeftError, match=r"the divisor `window` can be 0 in this call"):
        blocks(q, k, v, window=0)
    with pytest.raises(WeftError, match=r"integer overflow: the constant 4294967296 does not fit in 32 bits"):
        kv_pos + 2**32


def test_targets_and_schedules():
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"target: expected one of hopper, triton, interpret, cpu, got 'cuda'"):
        CAUSAL(q, k, v, target="cuda")
    with pytest.raises(weft.UnavailableError, match=r"triton: needs a GPU, the operands are on the CPU"):
        CAUSAL(q, k, v, target="triton")
    with pytest.raises(weft.UnavailableError, match=r"interpret: .* computes fp32 and fp16 correctly, not bf16"):
        CAUSAL(*qkv(dtype=torch.bfloat16), target="interpret")
    with pytest.raises(WeftError, match=r"schedule: expected standard, streaming, flash, split_kv, or text like"):
        CAUSAL(q, k, v, schedule="fast")
    with pytest.raises(WeftError, match=r"hardware: .*h900|h900"):
        CAUSAL.plan(weft.shape(heads=1, q_len=8, head_dim=64), device="h900")
    huge = "flash/flash_forward=triton:128x128w8s8"
    with pytest.raises(WeftError, match=r"bytes of SRAM .* use smaller tiles or fewer stages"):
        CAUSAL.plan(weft.shape(heads=1, q_len=8, head_dim=256), device="h100", target="triton", schedule=huge)


def test_options_that_are_not_there_say_so():
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"uk, uv and form belong to variants declared with latent="):
        CAUSAL(q, k, v, form="absorbed")
    with pytest.raises(WeftError, match=r"q_offset: expected an int or an int32 tensor \[2\]"):
        CAUSAL(q, k, v, q_offset=torch.ones(3, dtype=torch.int32))
    with pytest.raises(WeftError, match=r"q_offset: integer overflow"):
        CAUSAL(q, k, v, q_offset=2**31)


def test_tables_by_distance_have_gradients():
    q, k, v = qkv()
    by_distance = weft.Attention(score + table[kv_pos - q_pos + 7], name="by_distance")
    learned = torch.ones(15, requires_grad=True)
    by_distance(q, k, v, table=learned).sum().backward()
    assert learned.grad is not None and learned.grad.shape == (15,)


def test_second_derivatives_are_refused():
    q, k, v = qkv()
    q.requires_grad_()
    first = torch.autograd.grad(CAUSAL(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(WeftError, match=r"second derivatives are not available; use causal.reference"):
        first.sum().backward()
    with pytest.raises(WeftError, match=r"second derivatives are not available; use causal.reference"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: CAUSAL(q, k, v).sum())(q).sum())(q.detach())


@pytest.mark.parametrize("watched", ["", "backward", "forward and backward"])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("of", ["out", "lse"])
def test_gradients_in_batches_are_refused(of, prepared, watched):
    """Also where such a backward was prepared, and takes the direct way, and where torch's dispatcher is asked."""
    q, k, v = qkv()
    q.requires_grad_()
    variant = weft.Attention(mask=kv_pos <= q_pos, name="in_batches_" + f"{of}_{prepared}_{watched}".replace(" ", "_"))
    mode = torch.device("cpu") if watched else contextlib.nullcontext()
    with mode if "forward" in watched else contextlib.nullcontext():
        result = variant(q, k, v, return_lse=True)[of == "lse"]
    if prepared:
        torch.autograd.grad(result.sum(), q, retain_graph=True)
    many = torch.ones(3, *result.shape)
    refusal = r"is_grads_batched=True.* call torch.autograd.grad for each gradient"
    with mode, pytest.raises(UnavailableError, match=refusal):
        torch.autograd.grad(result, q, many, retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(result, q, many[0])


def test_tracing_by_torch_jit_is_refused():
    q, k, v = qkv()
    with pytest.raises(UnavailableError, match=r"torch.jit.trace is not available; use torch.export or torch.compile"):
        torch.jit.trace(lambda q: CAUSAL(q, k, v), (q,))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("number", range(3))
def test_so_is_tracing_of_what_looks_at_sizes(number: int) -> None:
    q, _, _ = qkv(kv_len=8, q_len=8)
    starts = torch.tensor([0, q.shape[2]])
    calls = (
        lambda q: CAUSAL(q[:1], q[:1], q[:1], cu_seqlens_q=starts, cu_seqlens_kv=starts),
        lambda q: CAUSAL.plan(q, q, q),
        lambda q: CAUSAL.explain(q, q, q),
    )
    with pytest.raises(UnavailableError, match=r"torch.jit.trace is not available; use torch.export or torch.compile"):
        torch.jit.trace(calls[number], (q,))


def test_empty_operands():
    q, k, v = qkv(kv_len=0)
    out, lse = CAUSAL(q, k, v, return_lse=True)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    q, k, v = qkv(q_len=0)
    assert CAUSAL(q, k, v).shape == (2, 4, 0, 16)
    q, k, v = (x.requires_grad_() for x in qkv(batch=0))
    CAUSAL(q, k, v).sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("target", [None, "cpu"])
def test_schedules_that_a_target_lacks(target):
    with pytest.raises(
        weft.UnavailableError, match=r"cpu: has schedule flash only; standard runs on targets triton and interpret"
    ):
        CAUSAL(*qkv(), schedule="standard", target=target)


def test_forward_mode_is_refused():
    q, k, v = qkv()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(
            weft.UnavailableError, match=r"forward-mode derivatives are not available; use causal.reference"
        ):
            CAUSAL(dual, k, v)
        assert CAUSAL(q, k, v).shape == q.shape
    for transform in (
        lambda: torch.func.jvp(lambda q: CAUSAL(q, k, v), (q,), (torch.ones_like(q),)),
        lambda: torch.func.hessian(lambda q: CAUSAL(q, k, v).sum())(q),
    ):
        with pytest.raises(
            weft.UnavailableError, match=r"forward-mode derivatives .*are not available; use .*reference"
        ):
            transform()


@pytest.mark.parametrize("latent", [False, True])
def test_lengths_end_where_proofs_do(latent: bool) -> None:
    """Of keys and of queries; what is given is a view of one row."""
    long = torch.zeros(1, 1, 1, 4).expand(1, 1, 2**30 + 1, 4)
    short = long[:, :, :2]
    variant = weft.Attention(latent=weft.Latent(4, 0), scale=1.0, name="long") if latent else CAUSAL
    for label, query, key in (("query", long, short), ("cache" if latent else "key", short, long)):
        with pytest.raises(
            weft.WeftError, match=rf"{label}: integer overflow: expected a length up to 2\*\*30, got 1073741825"
        ):
            variant(query, key) if latent else variant(query, key, key)


def test_an_operand_that_is_one_entry_short_is_not_clamped():
    """A clamp would let the last token join its neighbour's document, and say nothing."""
    q = torch.randn(1, 2, 40, 16)
    doc = weft.tensor("doc", 1, int)
    packed = weft.Attention(mask=weft.masks.causal & weft.masks.document(doc), name="packed")
    for call in (packed, packed.reference):
        with pytest.raises(
            WeftError, match=r"has 39 entries there; it is one entry short: pass .* 40 entries"
        ) as caught:
            call(q, q, q, doc=torch.zeros(39, dtype=torch.int32))
        assert "minimum" not in str(caught.value)


@pytest.mark.parametrize(("rows", "keys"), [(3, 5), (5, 3), (1, 4)])
def test_a_bias_of_query_rows_is_told_of_q_offset(rows, keys):
    """SDPA's attn_mask [L, T] counts rows of the query from 0, and so does q_offset=0; a clamp gives other numbers."""
    bias = weft.tensor("bias", 2)
    query, key = torch.randn(1, 1, rows, 16), torch.randn(1, 1, keys, 16)
    given = torch.randn(rows, keys)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=given)
    biased = weft.Attention(score + bias[weft.q_pos, weft.kv_pos], name="biased")
    for call in (biased, biased.reference):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(
                WeftError, match=r"pass q_offset=0 .*weft.q_pos - \(weft.kv_len - weft.q_len\)"
            ) as caught:
                call(query, key, key, bias=given)
        assert "clamp" not in str(caught.value)
    torch.testing.assert_close(biased(query, key, key, bias=given, q_offset=0), wanted)
    rewritten = weft.Attention(score + bias[weft.q_pos - (weft.kv_len - weft.q_len), weft.kv_pos], name="rewritten")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(rewritten(query, key, key, bias=given), wanted)
