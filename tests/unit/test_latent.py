"""Which latent decode goes to target hopper, and what is said of the rest."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score


def variant(rank=512, rope=64, **more):
    given = {"mask": masks.causal, "latent": weft.Latent(rank, rope), "scale": 0.1, "name": "decoded"}
    return weft.Attention(**{**given, **more})


def sizes(heads=128, q_len=1, dtype="bf16"):
    return weft.shape(batch=2, heads=heads, q_len=q_len, kv_len=4096, head_dim=192, value_dim=128, dtype=dtype)


def chosen(declared, shape, **options):
    plan = declared.plan(shape, device=options.pop("device", "h200"), **options)
    return plan.code("forward"), plan.notes


def test_few_queries_of_a_latent_cache_go_to_hopper():
    for heads in (1, 16, 64, 128, 192):
        for q_len in (1, 2, 8, 16):
            code, _ = chosen(variant(), sizes(heads, q_len))
            assert code.target == "hopper" and [k.name for k in code.kernels] == ["split_forward", "join_parts"]
    assert chosen(variant(rank=256), sizes(dtype="fp16"))[0].target == "hopper"
    assert chosen(variant(), sizes(q_len=17))[0].target == "triton"
    assert chosen(variant(), sizes(), device="a100")[0].target == "triton"


slopes, pad, doc = weft.tensor("slopes", 1), weft.tensor("pad", 2), weft.tensor("doc", 2, int)


@pytest.mark.parametrize(
    ("declared", "shape", "reason"),
    [
        (variant(), sizes(dtype="fp32"), "needs bf16 or fp16 operands, got fp32"),
        (variant(rank=384), sizes(), "have a rank of 256 or 512 and 64 rotary columns, got 384 and 64"),
        (variant(rope=32), sizes(), "have a rank of 256 or 512 and 64 rotary columns, got 512 and 32"),
        (variant(normalizer="sigmoid"), sizes(), "has the normalizer softmax only"),
        (variant(sink=slopes[head]), sizes(), "latent caches with a sink"),
        (variant(score=score + pad[batch, kv_pos]), sizes(), "with scores that may lie far from 0"),
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
