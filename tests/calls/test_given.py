"""What calls are given: unsound operands after sound ones, negated views, gradients that are flat, options, forms."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score


def test_what_is_prepared_for_sound_operands_takes_no_others():
    query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    variant = weft.Attention(mask=masks.causal, name="prepared_plain")
    variant(query, key, value)
    for bad, said in (
        ((query, key.to("meta"), value), "key: expected device cpu as in query, got meta"),
        ((query, key, value.to("meta")), "value: expected device cpu as in query, got meta"),
        ((query, key[:, :0], value[:, :0]), "key: expected at least 1 head, got 0"),
        ((query[:, :0], key, value), "query: expected at least 1 head, got 0"),
        ((query, key, [1]), "value: expected a tensor, got list"),
        ((query, key, torch.tensor(1.0)), "value: expected 4 dimensions"),
    ):
        with pytest.raises(weft.WeftError, match=said):
            variant(*bad)


def test_negated_views_are_read_with_their_sign():
    query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    weights = weft.tensor("weights", 1)
    variant = weft.Attention(score=score * weights[head], name="prepared_negated")
    lazy = torch.randn(4, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    for target in ("cpu", "interpret"):
        want = variant(query, key, value, weights=lazy.clone(), target=target)
        assert torch.equal(variant(query, key, value, weights=lazy, target=target), want), target
        assert torch.equal(variant(torch._neg_view(-query), key, value, weights=lazy.clone(), target=target), want)


def test_an_operand_that_only_a_mask_reads_has_no_gradient_but_zeros():
    query, key, value = (torch.randn(2, h, 9, 16, requires_grad=True) for h in (4, 2, 2))
    limits = torch.randn(4, requires_grad=True)
    limit = weft.tensor("limit", 1)
    variant = weft.Attention(mask=limit[head] + kv_pos * 0.1 < q_pos * 0.1, name="prepared_limit")
    for call in (variant, torch.compile(variant, backend="aot_eager")):
        out = call(query, key, value, limit=limits)
        found = torch.autograd.grad(out.sum(), (query, limits), retain_graph=True)
        assert found[0].isfinite().all() and torch.equal(found[1], torch.zeros(4))
        assert torch.equal(torch.autograd.grad(out.sum(), limits)[0], torch.zeros(4))


def test_latent_calls_compute_the_form_that_their_plan_describes():
    weights = weft.tensor("weights", 1)
    variant = weft.Attention(
        score=score * weights[head], mask=masks.causal, latent=weft.Latent(rank=16, rope=8), name="prepared_form"
    )
    query, cache = torch.randn(1, 4, 1, 16), torch.randn(1, 1, 30, 24)
    uk, uv = torch.randn(4, 16, 8), torch.randn(4, 16, 8)
    factors = torch.rand(4, requires_grad=True)
    out = variant(query, cache, uk=uk, uv=uv, weights=factors)
    assert torch.autograd.grad(out.sum(), factors)[0].abs().max() > 0
    trained = variant.plan(query, cache, uk=uk, uv=uv, weights=factors)
    assert {k.direction for k in trained.kernels} == {"forward", "backward"}
    with torch.no_grad():
        assert {k.direction for k in variant.plan(query, cache, uk=uk, uv=uv, weights=factors).kernels} == {"forward"}


def test_an_option_cannot_bring_another_along():
    query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    variant = weft.Attention(mask=masks.causal, name="prepared_option")
    with torch.profiler.profile(), pytest.raises(weft.WeftError, match="schedule: expected"):
        variant(query, key, value, schedule="flash;target=interpret")


@pytest.mark.parametrize("given", [{"q_offset": True}, {"q_offset": 1.5}, {"width": True}, {"width": 1.5}])
def test_values_are_checked_where_something_watches_too(given):
    query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    variant = weft.Attention(mask=q_pos - kv_pos < weft.scalar("width", int), name="prepared_watched")
    with torch.profiler.profile(), pytest.raises(weft.WeftError, match=f"{next(iter(given))}: expected an int"):
        variant(query, key, value, **{"width": 3, **given})
