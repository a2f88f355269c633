"""The reference evaluator against plain torch: it defines what every kernel must compute."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.ir import functions as fn
from weft.ir.attention import Attention, Latent
from weft.ir.errors import InternalError
from weft.ir.expr import scalar, symbol, tensor
from weft.ir.reference import Value, evaluate, expand_latent, reference

q_pos, kv_pos, head, batch, score = (symbol(n) for n in ("q_pos", "kv_pos", "head", "batch", "score"))
causal = kv_pos <= q_pos
window = scalar("window", int)


def operands(heads: int = 4, kv_heads: int = 2, q_len: int = 5, kv_len: int = 7, dim: int = 8, value_dim: int = 6):
    """Random query, key and value in float64, with gradients."""
    random = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    shapes = (2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, value_dim)
    return tuple(torch.randn(s, generator=random, dtype=torch.float64, requires_grad=True) for s in shapes)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), inputs)


# -- against scaled_dot_product_attention ----------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (7, 7), (5, 7), (1, 9)])
def test_causal_is_that_of_torch(heads: int, kv_heads: int, q_len: int, kv_len: int) -> None:
    """Positions count from the end (bottom right), so the torch mask is shifted by kv_len - q_len."""
    query, key, value = operands(heads, kv_heads, q_len, kv_len)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    out, lse = reference(Attention(mask=causal), query, key, value, {})
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, heads, q_len)
    for got, want in zip(gradients(out, query, key, value), gradients(expected, query, key, value), strict=True):
        torch.testing.assert_close(got, want)


def test_additive_scores_are_a_float_mask() -> None:
    query, key, value = operands()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)
    alibi = Attention(score=score + tensor("slopes", 1)[head] * (kv_pos - q_pos), mask=causal)
    distance = torch.arange(7)[None, :] - (torch.arange(5)[:, None] + 2)
    bias = (slopes.view(1, 4, 1, 1) * distance).masked_fill(distance > 0, -math.inf)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(reference(alibi, query, key, value, {"slopes": slopes})[0], expected)


def test_scale_and_lse() -> None:
    query, key, value = operands(kv_heads=4)
    out, lse = reference(Attention(scale=0.25), query, key, value, {})
    scores = 0.25 * query @ key.transpose(-1, -2)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ value)


def test_softcap_is_applied_to_the_scaled_score() -> None:
    query, key, value = operands(kv_heads=4)
    scores = 2.0 * torch.tanh(query @ key.transpose(-1, -2) / math.sqrt(8) / 2.0)
    out, _ = reference(Attention(score=2.0 * fn.tanh(score / 2.0)), query, key, value, {})
    torch.testing.assert_close(out, scores.softmax(-1) @ value)


def test_no_gradient_comes_from_the_branch_that_is_not_taken() -> None:
    """There log(0) and the square root of 0 have infinite derivatives, which torch.where makes NaN of."""
    query, key, value = operands(kv_heads=4)
    pace = torch.tensor([0.5, 0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    rates, distance = tensor("pace", 1), q_pos - kv_pos
    near = fn.where(distance > 0, fn.log(rates[head] * distance), 0.0)
    root = fn.where(score > 0.0, fn.sqrt(score), score)
    variant = Attention(root + near, causal)
    apart = torch.arange(5)[:, None] + 2 - torch.arange(7)
    scores = query @ key.mT / math.sqrt(8)
    scores = torch.where(scores > 0, scores.clamp(min=1e-30).sqrt(), scores)
    exact = scores + torch.where(apart > 0, torch.log(pace.view(4, 1, 1) * apart.clamp(min=1)), 0.0)
    expected = exact.masked_fill(apart < 0, -math.inf).softmax(-1) @ value
    out = reference(variant, query, key, value, {"pace": pace})[0]
    for got, want in zip(
        gradients(out, query, key, value, pace), gradients(expected, query, key, value, pace), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_no_gradient_of_one_number_comes_from_hidden_pairs() -> None:
    """log(1 + c (q - k)) is NaN at keys far behind the query, which a causal mask hides."""
    query, key, value = operands(q_len=7, kv_heads=4)
    rate, given = tensor("rate", 0), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    out = reference(
        Attention(score - fn.log(1.0 + rate * (q_pos - kv_pos)), causal), query, key, value, {"rate": given}
    )
    apart = torch.arange(7)[:, None] - torch.arange(7)
    scores = query @ key.mT / math.sqrt(8) - torch.log(1.0 + given * apart.clamp(min=0))
    expected = scores.masked_fill(apart < 0, -math.inf).softmax(-1) @ value
    torch.testing.assert_close(gradients(out[0], given), gradients(expected, given))


def test_constants_and_scalars_keep_all_their_digits() -> None:
    env: dict[str, Value] = {"cap": 0.1}
    for e in (0.1 + 0.0 * scalar("cap"), 0.0 + scalar("cap")):
        assert evaluate(e, env, torch.float64, torch.device("cpu")).item() == 0.1


def test_the_scale_may_depend_on_the_head() -> None:
    query, key, value = operands(kv_heads=4)
    temperature = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    variant = Attention(scale=1.0 / tensor("temperature", 1)[head])
    out, _ = reference(variant, query, key, value, {"temperature": temperature})
    scores = query @ key.transpose(-1, -2) / temperature.view(1, 4, 1, 1)
    torch.testing.assert_close(out, scores.softmax(-1) @ value)


# -- symbols ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 3, torch.tensor([0, 4], dtype=torch.int32)])
def test_q_offset_moves_the_queries(offset: int | Tensor) -> None:
    query, key, value = operands()
    out, _ = reference(Attention(mask=causal), query, key, value, {}, q_offset=offset)
    for row, shift in enumerate([offset, offset] if isinstance(offset, int) else offset.tolist()):
        mask = torch.ones(5, 7, dtype=torch.bool).tril(shift)
        expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out[row], expected[row])


def test_every_symbol_has_the_value_that_the_docs_say() -> None:
    """Each symbol is made visible through the softmax over one key: lse = score there."""
    query, key, value = operands(heads=4, kv_heads=2, q_len=3, kv_len=5)
    at = {
        "batch": 1,
        "head": 3,
        "kv_head": 1,
        "group": 2,
        "q_len": 3,
        "kv_len": 5,
        "head_dim": 8,
        "q_pos": 4,
        "kv_pos": 0,
    }
    for name, expected in at.items():
        only_first_key = Attention(score=symbol(name) + 0.0 * score, mask=kv_pos < 1)
        lse = reference(only_first_key, query, key, value, {})[1]
        assert lse[1, 3, 2].item() == expected, name


def test_division_and_remainder_round_down_like_python() -> None:
    env: dict[str, Value] = {"q_pos": torch.arange(-5, 6)}
    for e in (q_pos // 3, q_pos % 3, q_pos // -3, q_pos % -3, fn.floor(q_pos / 3)):
        expected = [eval(str(e), {"q_pos": n, "floor": math.floor}) for n in range(-5, 6)]
        assert evaluate(e, env, torch.float64, torch.device("cpu")).tolist() == expected


# -- rows that see nothing, and what is hidden -----------------------------------------------------


def test_empty_rows_give_zero_and_no_gradient() -> None:
    query, key, value = operands(q_len=7)
    sees_nothing_first = Attention(mask=(kv_pos < q_pos) & (head != 1))
    out, lse = reference(sees_nothing_first, query, key, value, {})
    assert (out[:, :, 0] == 0).all() and (out[:, 1] == 0).all() and out.isfinite().all()
    assert (lse[:, :, 0] == -math.inf).all() and (lse[:, 1] == -math.inf).all()
    dq, dk, dv = gradients(out, query, key, value)
    assert (dq[:, :, 0] == 0).all() and (dq[:, 1] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


def test_a_mask_that_hides_everything() -> None:
    query, key, value = operands()
    out, lse = reference(Attention(mask=False), query, key, value, {})
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((g == 0).all() for g in gradients(out, query, key, value))


def test_hidden_scores_may_be_nan_and_their_operands_out_of_range() -> None:
    """log(distance) is NaN above the diagonal and `table` has no entry there: none of it may be seen."""
    query, key, value = operands(kv_heads=4, q_len=7)
    table = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    distance = q_pos - kv_pos
    variant = Attention(
        score=score * fn.log(2 + distance * 1.5) + tensor("table", 1)[distance] * fn.sqrt(distance), mask=causal
    )
    out, lse = reference(variant, query, key, value, {"table": table})
    places = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    scores = query @ key.transpose(-1, -2) / math.sqrt(8) * torch.log(2 + places * 1.5) + table[places] * places.sqrt()
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ value)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    expected = gradients(scores.softmax(-1) @ value, query, key, value, table)
    for got, want in zip(gradients(out, query, key, value, table), expected, strict=True):
        torch.testing.assert_close(got, want)


# -- gradients -------------------------------------------------------------------------------------


def test_gradients_of_everything_that_is_differentiable() -> None:
    query, key, value = operands(heads=2, kv_heads=1, q_len=3, kv_len=4, dim=3, value_dim=2)
    slopes = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    bias = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    variant = Attention(
        score=3.0 * fn.tanh(score / 3.0)
        + tensor("slopes", 1)[head] * (kv_pos - q_pos)
        + fn.exp(tensor("bias", 1)[kv_pos]),
        mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window),
    )

    def compute(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return reference(variant, *inputs[:3], {"window": 3, "slopes": inputs[3], "bias": inputs[4]})

    assert torch.autograd.gradcheck(compute, (query, key, value, slopes, bias))


# -- latent attention ------------------------------------------------------------------------------


def test_latent_expanded_equals_absorbed() -> None:
    """(q . [c Uk, r]) = ([q Uk', q_rope] . [c, r]) and P (c Uv) = (P c) Uv: both forms, values and gradients."""
    batch_size, heads, q_len, kv_len, rank, rope, nope, value_dim = 2, 3, 4, 6, 8, 2, 5, 7
    random = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(s, generator=random, dtype=torch.float64, requires_grad=True)
        for s in (
            (batch_size, heads, q_len, nope + rope),
            (batch_size, 1, kv_len, rank + rope),
            (heads, rank, nope),
            (heads, rank, value_dim),
        )
    )
    query, cache, uk, uv = inputs
    variant = Attention(score=4.0 * fn.tanh(score / 4.0), mask=causal, latent=Latent(rank, rope))
    expanded, expanded_lse = reference(variant, *expand_latent(variant, query, cache, uk, uv), {})
    absorbed_query = torch.cat([query[..., :nope] @ uk.transpose(-1, -2), query[..., nope:]], dim=-1)
    latent_out, lse = reference(variant, absorbed_query, cache, cache[..., :rank], {}, head_dim=nope + rope)
    torch.testing.assert_close(latent_out @ uv, expanded)
    torch.testing.assert_close(lse, expanded_lse)
    for got, want in zip(gradients(latent_out @ uv, *inputs), gradients(expanded, *inputs), strict=True):
        torch.testing.assert_close(got, want)


# -- defects of ours -------------------------------------------------------------------------------


def test_what_the_evaluator_does_not_know_is_an_internal_error() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(InternalError, match="reference: unknown node object"):
        evaluate(object(), {}, torch.float64, cpu)
    with pytest.raises(InternalError, match="reference: operand slopes is not a tensor"):
        evaluate(tensor("slopes", 1)[head], {"slopes": 1.0, "head": 0}, torch.float64, cpu)
