"""The attentions of known models: each against what it says by hand, densely, in torch."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft import masks, variants

L, D = 40, 16
q, k = torch.arange(L)[:, None], torch.arange(L)[None, :]
causal = k <= q
sinks, slopes, prefix = torch.tensor([0.5, -1.0]), torch.tensor([0.5, 0.25]), torch.tensor([5, 11])
made = torch.Generator().manual_seed(0)
query, key, value = (torch.randn(2, 2, L, D, generator=made) for _ in range(3))
products = query @ key.mT
scaled = products / math.sqrt(D)


def softmax(scores: Tensor, mask: Tensor, sink: Tensor | None = None) -> Tensor:
    hidden = scores.masked_fill(~mask, -math.inf)
    if sink is None:
        return hidden.softmax(-1) @ value
    column = sink.view(1, -1, 1, 1).expand(2, 2, L, 1)
    return torch.cat([hidden, column], -1).softmax(-1)[..., :-1] @ value


def cap(scores: Tensor, most: float) -> Tensor:
    return most * torch.tanh(scores / most)


def forgotten(gates: Tensor) -> Tensor:
    """Of each query and key the logarithms of the gates of all tokens after the key, up to the query: [2, 2, L, L]."""
    between = (k[..., None] < torch.arange(L)) & (torch.arange(L) <= q[..., None])  # [L, L, L]: query, key, token
    return torch.einsum("bht,ijt->bhij", gates, between.to(gates.dtype))


table = weft.tensor("sinks", 1)
gates = torch.nn.functional.logsigmoid(torch.randn(2, 2, L, generator=made))
CASES: dict[str, tuple[weft.Attention, dict[str, Tensor], Callable[[], Tensor]]] = {
    "softmax1": (variants.softmax1(), {}, lambda: softmax(scaled, causal, torch.zeros(2))),
    "sigmoid": (
        variants.sigmoid_attention(), {},
        lambda: torch.sigmoid(scaled - math.log(L)).masked_fill(~causal, 0.0) @ value,
    ),
    "relu": (variants.relu_attention(), {}, lambda: (torch.relu(scaled) / L).masked_fill(~causal, 0.0) @ value),
    "learned alibi": (
        variants.learned_alibi(weft.tensor("slopes", 1)), {"slopes": slopes},
        lambda: softmax(scaled + slopes.view(2, 1, 1) * (k - q), causal),
    ),
    "fox": (
        variants.fox(weft.tensor("decay", 3)), {"decay": gates.cumsum(-1)},
        lambda: softmax(scaled + forgotten(gates), causal),
    ),
    "fox, in a window": (
        variants.fox(weft.tensor("decay", 3), masks.causal & masks.sliding_window(9)), {"decay": gates.cumsum(-1)},
        lambda: softmax(scaled + forgotten(gates), causal & (q - k < 9)),
    ),
    "streaming llm": (
        variants.streaming_llm(2, 7), {}, lambda: softmax(scaled, causal & ((k < 2) | (q - k < 7)))
    ),
    "gpt oss": (variants.gpt_oss(table, 9), {"sinks": sinks}, lambda: softmax(scaled, causal & (q - k < 9), sinks)),
    "gpt oss, full": (variants.gpt_oss(table, None), {"sinks": sinks}, lambda: softmax(scaled, causal, sinks)),
    "gemma 2": (variants.gemma2(9, cap=2.0), {}, lambda: softmax(cap(scaled, 2.0), causal & (q - k < 9))),
    "gemma 2, full": (
        variants.gemma2(None, scale=144**-0.5), {}, lambda: softmax(cap(products / 12, 50.0), causal)
    ),
    "gemma 3": (variants.gemma3(9), {}, lambda: softmax(scaled, causal & (q - k < 9))),
    "gemma 3, full": (variants.gemma3(None), {}, lambda: softmax(scaled, causal)),
    "llama 4": (variants.llama4(8), {}, lambda: softmax(scaled, causal & (k // 8 == q // 8))),
    "llama 4, full": (
        variants.llama4(None), {}, lambda: softmax(scaled * (torch.log(((q + 1) // 8192) + 1.0) * 0.1 + 1), causal)
    ),
    "paligemma": (
        variants.paligemma(weft.tensor("prefix", 1, int)), {"prefix": prefix},
        lambda: softmax(scaled, causal | (k < prefix.view(2, 1, 1, 1))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_they_are_what_models_compute(name: str) -> None:
    variant, operands, by_hand = CASES[name]
    for call in (variant, variant.reference):
        torch.testing.assert_close(call(query, key, value, **operands), by_hand())


def test_forget_gates_learn_as_they_do_by_hand() -> None:
    (first, second) = (gates.clone().requires_grad_() for _ in range(2))
    variants.fox(weft.tensor("decay", 3))(query, key, value, decay=first.cumsum(-1)).square().sum().backward()
    softmax(scaled + forgotten(second), causal).square().sum().backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_a_step_of_decoding_goes_on_with_the_running_sum() -> None:
    fox, sums = variants.fox(weft.tensor("decay", 3)), gates.cumsum(-1)
    whole, last = fox(query, key, value, decay=sums), fox(query[:, :, -1:], key, value, decay=sums)
    torch.testing.assert_close(last, whole[:, :, -1:])


def test_slopes_and_sinks_learn() -> None:
    for variant, name, given in ((CASES["learned alibi"][0], "slopes", slopes), (CASES["gpt oss"][0], "sinks", sinks)):
        leaf = given.clone().requires_grad_()
        variant(query, key, value, **{name: leaf}).sum().backward()
        assert leaf.grad is not None and bool((leaf.grad != 0).all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: variants.gpt_oss(3), r"variants.gpt_oss: expected a tensor operand \[heads\]"),
        (lambda: variants.paligemma(weft.tensor("p", 1)), r"variants.paligemma: expected a tensor operand \[batch\]"),
        (lambda: variants.fox(weft.tensor("d", 2)), r"scores.forgetting: expected d to have rank 3 \[batch, heads, le"),
        (lambda: variants.streaming_llm(-1, 4), "masks.global_window: expected first to be at least 0"),
        (lambda: variants.gemma2(cap=0.0), "scores.softcap: expected cap to be above 0"),
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_written(make: Callable[[], object], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        make()


def test_names_that_are_none_are_answered_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="weft.variants has no 'gemma'; it has fox, gemma2, gemma3"):
        variants.gemma  # noqa: B018
    with pytest.raises(AttributeError, match="it is weft.variants.gpt_oss"):
        weft.gpt_oss  # noqa: B018


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(variants, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 8 and found.failed == 0
