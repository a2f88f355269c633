"""Sinks of sequences: each has its own, which its queries see without any key, too."""

from __future__ import annotations

import math

import pytest
import torch

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_len, q_pos, score

from ..support import check_variant
from .cases import pad
from .test_lengths import KINDS, TARGETS, VARIANTS

sinks, sinks_of = weft.tensor("sinks", 1), weft.tensor("sinks_of", 2)
LEARNED = weft.Attention(mask=masks.causal, sink=sinks[head], name="learned_sinks")
OF_SEQUENCES = weft.Attention(mask=masks.causal, sink=sinks_of[batch, head], name="sinks_of_sequences")
SINKS = {
    "softmax1": weft.Attention(mask=masks.causal, sink=0.0, name="softmax1"),
    "learned": LEARNED,
    "of sequences": OF_SEQUENCES,
    "unmasked": OF_SEQUENCES.replace(mask=True, name="unmasked_with_sinks"),
    "of lengths": weft.Attention(sink=sinks[head] - 0.1 * kv_len + 0.2 * q_len, name="sinks_of_lengths"),
    "capped": OF_SEQUENCES.replace(score=5.0 * weft.tanh(score / 5.0), name="capped_with_sinks"),
    "steep": weft.Attention(mask=masks.causal, sink=weft.log(weft.abs(sinks[head])), name="steep_sinks"),
    "far": weft.Attention(score + pad[batch, kv_pos], sink=sinks_of[batch, head], name="far_with_sinks"),
    "documents": OF_SEQUENCES.replace(mask=VARIANTS["documents"][0].mask, name="documents_with_sinks"),
    "shared": weft.Attention(score + sinks_of[batch, head] * 0.1 * kv_pos, sink=sinks_of[batch, head], name="shared"),
}


def given_to(variant, around=0.0):
    generator = torch.Generator().manual_seed(3)
    known = {
        "sinks": torch.randn(2, generator=generator) + around,
        "sinks_of": torch.randn(6, 2, generator=generator) + around,
        "pad": VARIANTS["far"][1]["pad"], "doc": VARIANTS["documents"][1]["doc"],
    }  # fmt: skip
    return {p.name: known[p.name] for p in variant.canonical.parameters}


def check_sinks(variant, kind, target, around=0.0, **options):
    make, lengths = KINDS[kind]
    operands = given_to(variant, around)
    floats = tuple(n for n in operands if n != "doc")
    check_variant(variant, *make(), target=target, operands=operands | lengths, differentiate=floats, **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name, kind, target):
    check_sinks(SINKS[name], kind, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_and_dropout(kind, target):
    make, lengths = KINDS[kind]
    operands = given_to(OF_SEQUENCES)
    dropped = OF_SEQUENCES.replace(dropout=0.3, name="dropped_with_sinks")
    check_variant(dropped, *make(), target=target, operands=operands | lengths | {"seed": 7},
                  differentiate=tuple(operands))  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", [1e4, -1e9])
def test_sinks_far_from_0(around, kind, target):
    for variant in (OF_SEQUENCES, SINKS["far"]):
        check_sinks(variant, kind, target, around)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("target", "dtype"), [("interpret", torch.float16), ("cpu", torch.float16), ("cpu", torch.bfloat16)], ids=str
)
def test_sinks_in_half_precision(target, dtype, kind):
    make, lengths = KINDS[kind]
    operands = given_to(OF_SEQUENCES)
    check_variant(OF_SEQUENCES, *make(dtype=dtype, dim=24, value_dim=40), target=target, operands=operands | lengths,
                  differentiate=tuple(operands))  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_in_float64(kind):
    make, lengths = KINDS[kind]
    made = [torch.nan_to_num(t).contiguous().requires_grad_() for t in make(dtype=torch.float64, dim=4)]
    table = given_to(OF_SEQUENCES)["sinks_of"].double().requires_grad_()
    results = []
    for call in (OF_SEQUENCES, OF_SEQUENCES.reference):
        out, lse = call(*made, sinks_of=table, **lengths, return_lse=True)
        loss = out.sin().sum() + torch.where(lse == -torch.inf, 0.0, lse).cos().sum()
        results.append([out, lse, *torch.autograd.grad(loss, [*made, table])])
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_sinks_of_tiles_on_a_cpu_and_of_offsets(target):
    offsets = torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32)
    for kind in KINDS:
        check_sinks(OF_SEQUENCES, kind, target, q_offset=offsets)
        if target == "cpu":
            check_sinks(SINKS["far"], kind, target, schedule="flash/flash_forward=cpu:16x32/flash_backward=cpu:32x16")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_sees_only_a_sink_and_what_sees_nothing(kind, target):
    """The first give 0 and the sink, the second 0 and -inf; NaN behind lengths reaches no gradient of a sink."""
    make, lengths = KINDS[kind]
    empty = (3, slice(0, 33)) if kind == "padded" else (0, slice(20, 53))  # a sequence without keys
    sequence = 3 if kind == "padded" else 2
    table = torch.arange(12.0).view(6, 2).requires_grad_()
    tensors = [t.requires_grad_() for t in make()]
    out, lse = OF_SEQUENCES(*tensors, sinks_of=table, **lengths, target=target, return_lse=True)
    own = lse[empty[0], :, empty[1]]
    assert torch.equal(own, table.detach()[sequence][:, None].expand_as(own))
    assert not out[empty[0], :, empty[1]].any()
    exists = lse.detach() != -torch.inf
    assert int(exists.sum()) == 2 * (140 if kind == "padded" else 90)
    dout, dlse = (torch.where(exists[..., None] if x.dim() == 4 else exists, 1.0, torch.nan).expand_as(x)
                  for x in (out, lse))  # fmt: skip
    found = torch.autograd.grad([out, lse], [*tensors, table], [dout, dlse])
    assert all(not torch.isnan(g).any() for g in found)
    assert found[-1][sequence].tolist() == [33.0, 33.0]
    without_queries = 1
    assert not found[-1][without_queries].any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_alone_and_left_out(kind, target):
    """The gradient of the sinks has the same bits whatever else is wanted, also where nothing is."""
    make, lengths = KINDS[kind]
    tensors, table = make(), given_to(OF_SEQUENCES)["sinks_of"]

    def gradients(wanted):
        leaves = [t.detach().clone().requires_grad_(n in wanted) for n, t in enumerate((*tensors, table))]
        out, lse = OF_SEQUENCES(*leaves[:3], sinks_of=leaves[3], **lengths, target=target, return_lse=True)
        loss = [out, lse], [leaves[n] for n in wanted], [torch.nan_to_num(x.detach().cos()) for x in (out, lse)]
        return list(torch.autograd.grad(*loss))

    whole = gradients((0, 1, 2, 3))
    for wanted in ((0, 1, 2, 3), (3,), (0, 3), (2, 3), (0, 1, 2)):
        for n, g in zip(wanted, gradients(wanted), strict=True):
            same = torch.equal(g, whole[n]) or (target == "cpu" and torch.allclose(g, whole[n], rtol=1e-5, atol=1e-6))
            assert same, (wanted, n)


@pytest.mark.parametrize("name", ["of sequences", "far", "of lengths", "steep"])
def test_sinks_where_no_sequence_has_a_key(name):
    """Whether the keys have rows that are nobody's, or none at all; -inf is no sink."""
    variant, q_lens = SINKS[name], torch.tensor([4, 0, 3])
    query = torch.randn(3, 2, 4, 8)
    starts = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    operands = {n: t[:3] if n in ("sinks_of", "pad") else t for n, t in given_to(variant).items()}
    for n in ("sinks", "sinks_of"):
        if n in operands:
            operands[n] = operands[n].clone()
            operands[n].view(-1)[0] = 0.0 if name == "steep" else -torch.inf
    results = []
    for rows in (0, 5):
        key = torch.randn(3, 2, rows, 8)
        calls = [
            (query, key, {"q_lens": q_lens, "kv_lens": torch.zeros(3, dtype=torch.int64)}),
            (query.reshape(1, 2, 12, 8), key[:1], {"cu_seqlens_q": starts, "cu_seqlens_kv": starts * 0}),
        ]  # fmt: skip
        for q, k, lengths in calls:
            for call in (variant, variant.reference):
                own = {n: t.clone().requires_grad_() for n, t in operands.items()}
                out, lse = call(q, k, k, **own, **lengths, return_lse=True)
                assert not out.any()
                dlse = torch.where(lse == -torch.inf, torch.nan if call is variant else 0.0, 1.0)
                found = torch.autograd.grad(lse, list(own.values()), dlse, allow_unused=True)
                results.append([lse.detach(), *(torch.zeros(()) if g is None else g for g in found)])
    for got, right in zip(results[::2], results[1::2], strict=True):
        assert len(got) == len(right)
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, torch.nan_to_num(b, posinf=torch.inf, neginf=-torch.inf).expand_as(a))


def test_sequences_without_queries_read_no_sink():
    """An operand need not have what no sequence reads; a sequence without keys does read its sink."""
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 3, 16)
    starts = {"cu_seqlens_q": torch.tensor([0, 3, 5, 5]), "cu_seqlens_kv": torch.tensor([0, 3, 3, 3])}
    for call in (OF_SEQUENCES, OF_SEQUENCES.reference):
        lse = call(query, key, key, **starts, sinks_of=torch.ones(2, 2), return_lse=True)[1]
        assert bool((lse[:, :, 3:] == 1.0).all())
        with pytest.raises(weft.WeftError, match=r"sinks_of\[batch, head\]`: index 0, `batch`"):
            call(query, key, key, **starts, sinks_of=torch.ones(1, 2))


def test_a_score_need_not_be_readable_where_there_is_no_key():
    """Queries of a sequence without keys have positions before the first one, at which no operand has an entry."""
    variant = OF_SEQUENCES.replace(score=score + weft.tensor("by_query", 1)[q_pos], name="sink_and_reads_by_query")
    query, key = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 3, 16)
    starts = {"cu_seqlens_q": torch.tensor([0, 3, 8]), "cu_seqlens_kv": torch.tensor([0, 3, 3])}
    for call in (variant, variant.reference):
        out, lse = call(query, key, key, **starts, sinks_of=torch.ones(2, 2), by_query=torch.ones(3), return_lse=True)
        assert bool((lse[:, :, 3:] == 1.0).all()) and not out[:, :, 3:].any()


def test_a_constant_sink_without_keys_is_a_float64():
    """The log-sum-exp of a sequence without keys is the sink, to the last bit of the dtype."""
    sunk = weft.Attention(sink=weft.sin(1.5) - 0.1, name="sunk")
    query = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    _, lse = sunk(query, query, query, kv_lens=torch.tensor([0]), return_lse=True)
    assert lse.item() == math.sin(1.5) - 0.1
