"""Which latent attention goes to target hopper, and what is said of the rest."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import batch, head, kv_pos, masks, q_pos


def variant(rank=512, rope=64, **more):
    given = {"mask": masks.causal, "latent": weft.Latent(rank, rope), "scale": 0.1, "name": "decoded"}
    return weft.Attention(**{**given, **more})


def sizes(heads=128, q_len=1, dtype="bf16"):
    return weft.shape(batch=2, heads=heads, q_len=q_len, kv_len=4096, head_dim=192, value_dim=128, dtype=dtype)


def chosen(declared, shape, **options):
    options = {"form": "absorbed", "device": "h200", **options}
    plan = declared.plan(shape, **options)
    return plan.code("forward"), plan.notes


def test_few_queries_of_a_latent_cache_go_to_hopper():
    for heads in (1, 16, 64, 128, 192):
        for q_len in (1, 2, 8, 16):
            code, _ = chosen(variant(), sizes(heads, q_len))
            assert code.target == "hopper" and [k.name for k in code.kernels] == ["split_forward", "join_parts"]
    assert chosen(variant(rank=256), sizes(dtype="fp16"))[0].target == "hopper"
    assert chosen(variant(), sizes(), device="a100")[0].target == "triton"


def test_many_queries_of_a_latent_cache_go_to_hopper_too():
    for heads in (1, 16, 128):
        for q_len in (17, 512):
            code, notes = chosen(variant(), sizes(heads, q_len))
            assert code.target == "hopper" and code.schedule.algorithm == "split_kv"
            assert any("many queries of a latent cache are computed by split_kv too" in note for note in notes)
    assert not any("many queries" in note for note in chosen(variant(), sizes())[1])
    for options in ({"schedule": "flash"}, {"target": "triton"}, {"device": "a100"}):
        code, _ = chosen(variant(), sizes(q_len=512), **options)
        assert code.target == "triton" and code.schedule.algorithm == "flash"
    with pytest.raises(weft.UnavailableError, match="absorbed latent attention has schedule split_kv alone"):
        chosen(variant(), sizes(q_len=512), target="hopper", schedule="flash")


def test_parts_of_many_queries_take_no_more_memory_than_two_waves_of_programs():
    def parts(batch, heads, q_len):
        shape = weft.shape(batch=batch, heads=heads, q_len=q_len, kv_len=4096, head_dim=192, value_dim=128)
        return variant().plan(shape, device="h200", form="absorbed").kernels[0].letters["S"]

    assert parts(1, 128, 512) == parts(1, 16, 2048) == parts(2, 128, 40) == parts(5, 16, 300) == 1
    assert parts(1, 16, 65) > 4 and parts(1, 16, 300) == 3


def packed(declared, q_lens, heads=128, **options):
    """The plan of a call with these queries packed over pages of 64."""
    number, table = len(q_lens), torch.zeros(len(q_lens), 4, dtype=torch.int32)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    query, pool = (torch.empty(*n, 576, dtype=torch.bfloat16) for n in ((1, heads, sum(q_lens)), (9, 1, 64)))
    given = {"cu_seqlens_q": starts, "kv_lens": torch.full((number,), 256), "block_table": table}
    return declared.plan(query, pool, device="h200", **given, **options)


def test_one_module_computes_chunks_beside_single_tokens():
    plan = packed(variant(), [1, 200, 1])
    assert [(code.target, code.signature.serves) for code in plan.codes] == [("hopper", "all")]
    assert any("equal shares of the keys" in note for note in plan.notes)


def test_chunks_that_hopper_lacks_are_shared_out():
    for options, reason in (({"heads": 24}, "must divide 64"), ({"target": "triton"}, "")):
        plan = packed(variant(), [1, 200, 1], **options)
        assert [(code.target, code.signature.serves) for code in plan.codes] == [
            ("triton", "long"),
            ("triton", "short"),
        ]
        assert any(reason in note for note in plan.notes)


slopes, pad, doc = weft.tensor("slopes", 1), weft.tensor("pad", 2), weft.tensor("doc", 2, int)


@pytest.mark.parametrize(
    ("declared", "shape", "reason"),
    [
        (variant(), sizes(dtype="fp32"), "needs bf16 or fp16 operands, got fp32"),
        (variant(rank=320), sizes(), "have a rank of 128, 256, 384 or 512 and a multiple of 8 rotary"),
        (variant(rope=72), sizes(), "a multiple of 8 rotary columns up to 64, got 512 and 72"),
        (variant(normalizer="sigmoid"), sizes(), "has the normalizer softmax only"),
        (variant(mask=masks.causal & (doc[batch, q_pos] == doc[batch, kv_pos])), sizes(), "a mask that reads tensors"),
        (variant(mask=masks.causal & (q_pos - kv_pos < 90 * (head + 1))), sizes(), "a mask whose tiles differ by head"),
        (variant(), sizes(heads=24), "must divide 64 or be a multiple of it, got 24"),
    ],
)  # fmt: skip
def test_what_it_lacks_is_left_to_triton_with_a_reason(declared, shape, reason):
    code, notes = chosen(declared, shape)
    assert code.target == "triton" and any(reason in note for note in notes), notes


def test_pages_of_few_rows_and_odd_strides_are_left_to_triton():
    lens = torch.ones(2, dtype=torch.int32)
    query = torch.empty(2, 16, 1, 576, dtype=torch.bfloat16)

    def said(page, key, **options):
        table = torch.zeros(2, 4, dtype=torch.int32)
        return variant().explain(query, key, block_table=table, kv_lens=lens, device="h200", **options)

    pool = torch.empty(8, 1, 16, 576, dtype=torch.bfloat16)
    assert "split_forward=hopper:" in said(16, pool)
    assert "split_forward=hopper:" in said(8, pool[:, :, :8].clone())
    assert "pages of 4 rows are too small" in " ".join(said(4, pool[:, :, :4].clone()).split())
    odd = torch.empty(8, 1, 16, 580, dtype=torch.bfloat16)[..., :576]
    assert "must be multiples of 16 bytes" in " ".join(said(16, odd).split())
    with pytest.raises(weft.UnavailableError, match="pages of 4 rows are too small"):
        said(4, pool[:, :, :4].clone(), target="hopper")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("64x64p13", "bytes of SRAM"),
        ("64x64p7", "expected 8 slots or more"),
        ("64x64w4s2", "expected a form like 64x64p11"),
    ],
)
def test_forms_that_it_cannot_have(form, reason):
    with pytest.raises(weft.WeftError, match=reason):
        variant().plan(sizes(), device="h200", schedule=f"split_kv/split_forward=hopper:{form}")


def test_a_sequence_is_not_divided_where_sequences_fill_the_machine():
    def parts(batch, kv_len, heads):
        shape = weft.shape(batch=batch, heads=heads, q_len=1, kv_len=kv_len, head_dim=192, value_dim=128)
        return variant().plan(shape, device="h200").kernels[0].letters["S"]

    assert parts(64, 4096, 128) == parts(128, 8192, 128) == 1
    assert parts(64, 8192, 64) == 2 and parts(1, 65536, 128) == 64


# -- the expanded form -------------------------------------------------------------------------------------------------
def expanded(head_dim=192, value_dim=128, rope=64, **more):
    """(target of the forward, of the backward, kernels of both, notes) of a long call."""
    shape = weft.shape(batch=2, heads=16, q_len=4096, head_dim=head_dim, value_dim=value_dim, dtype="bf16")
    plan = variant(rope=rope).plan(shape, device="h200", form="expanded", **more)
    codes = [plan.code(direction) for direction in ("forward", "backward")]
    return *(code.target for code in codes), [k.name for code in codes for k in code.kernels], plan.notes


TWO_PASSES = ["flash_forward", "row_statistics", "flash_dquery", "flash_dkey_dvalue"]
ONE_PASS = ["flash_forward", "row_statistics", "flash_backward", "round_dquery"]


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "rope", "kernels"),
    [
        (192, 128, 64, TWO_PASSES), (160, 64, 32, TWO_PASSES), (136, 128, 8, TWO_PASSES), (96, 64, 32, ONE_PASS),
        (80, 128, 16, ONE_PASS),
    ],
)  # fmt: skip
def test_keys_in_two_tensors_train_on_hopper(head_dim, value_dim, rope, kernels):
    assert expanded(head_dim, value_dim, rope)[:3] == ("hopper", "hopper", kernels)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "rope", "targets", "reason"),
    [
        (128, 128, 64, ("triton", "triton"), "keys of 64 or 128 columns and fewer rotary ones"),
        (256, 128, 64, ("triton", "triton"), "got 192 and 64"),
        (260, 256, 4, ("triton", "triton"), "needs D and Dv to be multiples of 8 from 16 to 256"),
        (160, 128, 64, ("triton", "triton"), "got 96 and 64"),
        (192, 256, 64, ("hopper", "triton"), "needs Dv of 128 or less for gradients"),
    ],
)  # fmt: skip
def test_widths_of_two_tensors_that_are_left_to_triton(head_dim, value_dim, rope, targets, reason):
    *found, _, notes = expanded(head_dim, value_dim, rope)
    assert tuple(found) == targets and any(reason in note for note in notes), notes


def test_keys_in_two_tensors_of_sequences_with_lengths_train_on_hopper():
    forward, backward, kernels, notes = expanded(kv_lens=torch.full((2,), 9), q_lens=torch.full((2,), 9))
    assert (forward, backward, kernels) == ("hopper", "hopper", TWO_PASSES) and not any("triton" in n for n in notes)


def test_what_is_said_of_keys_in_two_tensors():
    shape = weft.shape(batch=2, heads=16, q_len=4096, head_dim=192, value_dim=128)
    text = " ".join(variant().explain(shape, device="h200", form="expanded").split())
    assert "query, key 128 + 64 (rotary, a tensor of its own); value 128" in text
    assert "- 128*B*T*(Hkv - 1)" in text  # bytes of rotary columns that 15 heads read from L2
    stages = {s.key: s.what for k in variant().plan(shape, device="h200", form="expanded").kernels for s in k.stages}
    assert stages["store dkey"].endswith("; of columns that heads share, float32 sums of each head or of all")


def test_the_sum_over_heads_is_made_in_hbm_where_it_need_not_repeat():
    shape = weft.shape(heads=2, q_len=256, head_dim=192, value_dim=128)
    given = {"device": "h200", "form": "expanded", "direction": "backward"}
    any_order, repeats = (variant().source(shape, **given, deterministic=d) for d in (False, True))
    assert any_order.count("tma_reduce_add(") == 1 and "tma_reduce_add" not in repeats
    assert "so that its last bits differ" in any_order and "bitwise repeatable" in repeats


def test_the_cache_is_not_copied_for_each_head():
    """Neither before keys are made of it, nor when their gradients are summed."""
    heads, rows, rank = 8, 64, 40
    mla = variant(rank, 16, scale=None)
    query, cache = torch.randn(2, heads, rows, 48), torch.randn(2, 1, rows, rank + 16)
    uk, uv = torch.randn(heads, rank, 32), torch.randn(heads, rank, 24)
    for leaf in (query, cache, uk, uv):
        leaf.requires_grad_()

    class Largest(TorchDispatchMode):
        """The most floats that lie in a tensor with as many columns as a cached vector."""

        copied = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (rank,):
                self.copied = max(self.copied, result.untyped_storage().nbytes() // 4)
            return result

    with Largest() as seen:
        mla(query, cache, uk=uk, uv=uv, form="expanded").sum().backward()
    assert cache.grad is not None and 0 < seen.copied < 2 * heads * rows * rank


def test_keys_and_values_of_one_column_have_any_stride() -> None:
    """What expands a cache to them may leave one that leads nowhere."""
    latent = weft.Attention(latent=weft.Latent(20, 8), name="narrow")
    query, cache = torch.randn(1, 2, 3, 9), torch.randn(1, 1, 5, 28)
    more = {"uk": torch.randn(2, 20, 1), "uv": torch.randn(2, 20, 1)}
    found = latent(query, cache, **more, target="cpu", form="expanded")
    assert torch.allclose(found, latent.reference(query, cache, **more), atol=1e-5)


def test_what_a_step_of_a_decode_is_not_asked_before_is_told_after() -> None:
    """Its checks are made once it has failed, and say the same as before."""
    mla = variant(rank=32, rope=16, scale=0.1)
    query, cache = torch.randn(2, 4, 1, 48), torch.randn(2, 1, 9, 48)
    for tensors, options, reason in (
        ((query.int(), cache.int()), {}, "expected bfloat16, float16 or float32, got torch.int32"),
        ((query, cache.double()), {}, "cache: expected dtype torch.float32 as in query"),
        ((query, cache.expand(2, 2, 9, 48)), {}, "cache: expected 1 head"),
        ((query[:, :0], cache), {}, "query: expected at least 1 head, got 0"),
        ((query, cache[:1]), {}, "cache: expected batch 2 as in query, got 1"),
        ((query[..., :40], cache), {}, r"query: expected dim 48 \(rank \+ rope\) without uk, got 40"),
        ((query, None), {}, "cache: expected a tensor, got NoneType"),
        ((query, cache), {"form": "absorbd"}, "form: expected 'expanded' or 'absorbed', got 'absorbd'"),
    ):
        with pytest.raises(weft.WeftError, match=reason):
            mla(*tensors, **options)
