"""Mask functions of transformers become variants that see the pairs which the functions say, and no others."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft import UnavailableError, WeftError

masking = pytest.importorskip("transformers.masking_utils")  # the extra weft-attention[transformers]
from weft.integrations import rules  # noqa: E402
from weft.integrations.masking import Mask  # noqa: E402
from weft.integrations.rules import mask  # noqa: E402
from weft.integrations.traced import Untraceable, traced  # noqa: E402
from weft.integrations.transformers import REFUSED, attention, register, variants  # noqa: E402

BATCH, LENGTH = 2, 12
IDS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1], [0, 0, 0, 0, 0, -1, -1, -1, -1, -1, 2, 2]])
LEFT = torch.tensor([0, 3])
SEEN = torch.tensor([[True] * 9 + [False] * 3, [False] * 3 + [True] * 9])


def of_even_keys(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv % 2 == 0) ^ ~(-(q + 1) * 2 < -kv - 3)


def where_there_are_ids(b: Any, h: Any, q: Any, kv: Any) -> Any:
    at = torch.where(kv < 5, kv, 0)
    return torch.logical_or(torch.where(kv < 5, IDS[:, :5][b, at], -1) >= 0, abs(q - kv) < 2)


def below_a_number_in_memory(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.logical_not(torch.logical_and(kv > torch.tensor(4), kv - q <= LEFT[b]))


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers makes it for position_ids: since 5.23 by positions in each sequence."""
    if hasattr(masking, "packed_sequence_compatibility_function"):
        return masking.packed_sequence_compatibility_function(function, POSITIONS, IDS)
    return masking.and_masks(function, masking.packed_sequence_mask_function(IDS))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": masking.causal_mask_function,
    "all": masking.bidirectional_mask_function,
    "window": masking.sliding_window_causal_mask_function(4),
    "window both ways": masking.sliding_window_bidirectional_mask_function(3),
    "chunks": masking.chunked_causal_mask_function(5, LEFT),
    "packed": packed(masking.sliding_window_causal_mask_function(3)),
    "images": masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(IMAGES)),
    "window and images": masking.or_masks(
        masking.sliding_window_causal_mask_function(4), masking.blockwise_overlay(IMAGES)
    ),
    "a user's": of_even_keys,
    "a user's, with where": where_there_are_ids,
    "a user's, with numbers in memory": below_a_number_in_memory,
}


def pairs(given: Any, queries: int, keys: int, **options: Any) -> Tensor:
    """bool [batch, queries, keys]: the pairs that an attention under this mask sees. Keys and values are such that a
    weight is one number of the output."""
    query, key = torch.zeros(BATCH, 1, queries, 4), torch.zeros(BATCH, 1, keys, 4)
    value = torch.eye(keys).expand(BATCH, 1, -1, -1)
    out, weights = attention(nn.Module(), query, key, value.contiguous(), given, is_causal=False, **options)
    assert weights is None
    return out[:, :, 0] > 0


def asked(name: str, queries: int, first: Any, keys: int, kv_first: int, padding: Tensor | None) -> dict[str, Any]:
    return {"batch_size": BATCH, "q_length": queries, "kv_length": keys, "q_offset": first, "kv_offset": kv_first,
            "mask_function": FUNCTIONS[name], "attention_mask": padding, "device": "cpu"}  # fmt: skip


CALLS = {
    "training": (12, 0, 12, 0), "prefill of a static cache": (5, 0, 12, 0), "decode": (1, 11, 12, 0),
    "a chunk behind a window": (4, 8, 7, 5), "the last token behind a window": (1, 11, 4, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_becomes_a_rule_that_sees_the_same_pairs(name: str) -> None:
    for queries, first, keys, kv_first in CALLS.values():
        for padding in (None, SEEN, torch.ones_like(SEEN)):
            call = asked(name, queries, first, keys, kv_first, padding)
            expected = masking.sdpa_mask(**call, allow_is_causal_skip=False)[:, 0]
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # none is evaluated for every pair
                rule = mask(**call)
            assert isinstance(rule, Mask) and rule.shape == (BATCH, 1, queries, keys)
            assert torch.equal(pairs(rule, queries, keys), expected), (queries, first, keys, kv_first)
            if padding is not None and padding.all():  # the rule is that without padding
                continue
            # beside a bias, which is read by row, and with a position that lies on the device
            bias = torch.zeros(1, 1, queries, keys)
            assert torch.equal(pairs(rule, queries, keys, position_bias=bias), expected)
            rule.rule.q_first = torch.tensor(rule.rule.q_first)
            assert torch.equal(pairs(rule, queries, keys), expected), "from a tensor"
            if "[batch, q_idx]" not in rule.rule.text:
                assert torch.equal(pairs(rule, queries, keys, position_bias=bias), expected), "from a tensor"


def test_padding_is_read_only_where_it_hides_something() -> None:
    def reads(name: str, padding: Tensor, *call: int) -> bool:
        return mask(**asked(name, *call, padding)).rule.seen is not None

    assert reads("causal", SEEN, 12, 0, 12, 0) and not reads("causal", torch.ones_like(SEEN), 12, 0, 12, 0)
    written = torch.ones(BATCH, 5, dtype=torch.bool)  # of a static cache of 12 keys
    assert not reads("causal", written, 5, 0, 12, 0) and not reads("window", written, 1, 4, 12, 0)
    assert reads("all", written, 5, 0, 12, 0) and reads("images", written, 5, 0, 12, 0)
    assert not reads("window", torch.tensor([[False] * 5 + [True] * 7] * 2), 1, 11, 4, 8)  # padding left the window


def test_what_is_no_function_of_indices_alone_is_evaluated_for_every_pair_with_one_warning() -> None:
    def of_floats(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.cos(q.float()) > torch.sin(kv.float())

    def of_sizes(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q if q.dtype is torch.int64 else kv >= 0

    def of_the_key_before(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return IDS[b, kv - 1] == IDS[b, q]  # the last one, for the first key

    def of_a_branch(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q if q - kv else kv >= 0

    for function in (of_floats, of_sizes, of_the_key_before):
        both = masking.and_masks(masking.causal_mask_function, function)
        call = {**asked("causal", 12, 0, 12, 0, SEEN), "mask_function": both}
        with pytest.warns(RuntimeWarning, match=f"the mask function .*{function.__name__} is evaluated for every pair"):
            given = mask(**call)
        assert isinstance(given, Tensor)
        assert torch.equal(pairs(given, 12, 12), masking.sdpa_mask(**call, allow_is_causal_skip=False)[:, 0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mask(**call)  # the same function again
    with pytest.raises(Untraceable, match="decides what is run next"):
        traced(of_a_branch)

    def compiled(query: Tensor) -> Tensor:
        given = mask(**{**asked("causal", 12, 0, 12, 0, SEEN), "mask_function": of_floats})
        return attention(nn.Module(), query, query, query, given)[0]

    query = torch.randn(BATCH, 1, 12, 4)
    with pytest.warns(RuntimeWarning, match="of the model is evaluated for every pair.*without torch.compile to see"):
        found = torch.compile(compiled, fullgraph=True, backend="eager")(query)
    torch.testing.assert_close(found, compiled(query))


def test_a_mask_that_is_given_as_a_tensor_is_used_as_it_is() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 8, generator=random, dtype=torch.float64)
    module = nn.Module()
    for shape in ((2, 1, 9, 9), (1, 4, 9, 9), (2, 4, 1, 9), (1, 1, 9, 11)):
        bias = torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
        bools = torch.rand(shape, generator=random) < 0.7
        bools[..., 0] = True
        for given in (bias, bools):
            own = given[..., :9]
            expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=own).transpose(1, 2)
            out, _ = attention(module, query, key, value, given)
            torch.testing.assert_close(out, expected)
        (wanted,) = torch.autograd.grad(expected_of(query, key, value, bias).square().sum(), bias)
        (got,) = torch.autograd.grad(attention(module, query, key, value, bias)[0].square().sum(), bias)
        torch.testing.assert_close(got, wanted)
    # beside a position bias, as T5 has it
    bias, more = torch.randn(1, 4, 9, 9, generator=random).double(), torch.randn(2, 1, 9, 9, generator=random).double()
    out, _ = attention(module, query, key, value, more, position_bias=bias)
    torch.testing.assert_close(out, expected_of(query, key, value, bias + more))


def expected_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    weights = (query @ key.transpose(2, 3) / query.shape[3] ** 0.5 + bias[..., : key.shape[2]]).softmax(-1)
    return (weights @ value).transpose(1, 2)


def test_what_a_layer_asks_for() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 8, generator=random, dtype=torch.float64)
    module = nn.Module()
    module.is_causal = True
    hidden = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)
    torch.testing.assert_close(attention(module, query, key, value, None)[0], expected_of(query, key, value, hidden))
    last, _ = attention(module, query[:, :, -1:], key, value, None)
    torch.testing.assert_close(last, expected_of(query, key, value, hidden)[:, -1:])
    scale = torch.rand(4, 1, 1, generator=random, dtype=torch.float64)
    learned, _ = attention(module, query, key, value, None, scaling=scale)
    torch.testing.assert_close(learned, expected_of(query * scale * 8**0.5, key, value, hidden))
    with pytest.raises(WeftError, match="expected one, for 3 queries and 9 keys"):
        attention(module, query[:, :, :3], key, value, None)


def test_dropout_is_that_of_weft_and_of_training_alone() -> None:
    query, key = torch.zeros(2, 1, 1, 64, 4)
    value = torch.eye(64)[None, None]
    module = nn.Module()
    module.is_causal = False
    kept = []
    for _ in range(2):
        torch.manual_seed(3)
        kept.append(attention(module, query, key, value, None, dropout=0.25)[0] > 0)
    assert torch.equal(kept[0], kept[1]) and abs(kept[0].float().mean() - 0.75) < 0.03
    assert (attention(module.eval(), query, key, value, None, dropout=0.25)[0] > 0).all()


def test_packed_sequences_are_also_taken_from_their_first_rows() -> None:
    rule = mask(**asked("window", 12, 0, 12, 0, None))
    rule.rule.shape = (1, *rule.rule.shape[1:])
    starts = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    query = key = torch.zeros(1, 1, 12, 4)
    options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    out, _ = attention(nn.Module(), query, key, torch.eye(12)[None, None], rule, **options)
    apart = IDS[0] == IDS[0, :, None]
    whole = masking.sdpa_mask(**asked("window", 12, 0, 12, 0, None), allow_is_causal_skip=False)[:1, 0]
    assert torch.equal(out[:, :, 0] > 0, whole & apart)
    with pytest.raises(UnavailableError, match="without a cache, a padding mask or a bias"):
        attention(nn.Module(), query, key, key, rule, position_bias=torch.zeros(1, 1, 12, 12), **options)


def test_what_cannot_be_done_is_refused_with_words() -> None:
    query = torch.zeros(BATCH, 1, 12, 4)
    rule = mask(**asked("causal", 12, 0, 12, 0, None))
    for option in ({"output_attentions": True}, {"head_mask": torch.ones(1)}, {"indices": IDS}):
        with pytest.raises(UnavailableError, match=f'{next(iter(option))}: .*; load the model with .*"eager"'):
            attention(nn.Module(), query, query, query, rule, output_hidden_states=True, **option)
    with pytest.raises(
        WeftError, match=r"one of 11 queries and 12 keys, got Rule\(\[2, 1, 12, 12\], \(kv_idx <= q_idx\)\)"
    ):
        attention(nn.Module(), query[:, :, 1:], query, query, rule)
    for wrong in (SEEN, SEEN[:, None, None].long(), SEEN[:, None, :5]):
        with pytest.raises(WeftError, match=r"expected bools or floats \[batch or 1, heads or 1, queries or 1, keys\]"):
            attention(nn.Module(), query, query, query, wrong)
    with pytest.raises(WeftError, match="expected a mask of transformers, got dict"):
        attention(nn.Module(), query, query, query, {"full_attention": None})  # type: ignore[arg-type]


def test_all_that_layers_of_the_installed_models_ask_for_is_known() -> None:
    """By the calls in their sources: a name that is new may change what is computed."""
    asked_for: set[str] = set()
    for path in (Path(masking.__file__).parent / "models").glob("*/modeling_*.py"):
        for _, call in re.findall(r"\n( +)[^\n]*= attention_interface\((.*?)\n\1\)", path.read_text(), re.DOTALL):
            asked_for |= set(re.findall(r"^ +(\w+)=", call, re.MULTILINE))
    computed = set(inspect.signature(attention).parameters)
    told_by_the_mask = {"sliding_window", "position_ids", "max_length_q", "max_length_k"}
    assert {"scaling", "s_aux", "softcap", "position_bias", "indices"} <= asked_for
    assert asked_for <= computed | set(REFUSED) | told_by_the_mask


def test_versions_that_were_not_tested_are_tried_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    for version in ("5.25.0", "6.0.0.dev0", "5.16.1"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.warns(RuntimeWarning, match=f"transformers {re.escape(version)} is tried.*tested are 5.17 to 5.24"):
            register()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            register()


def test_versions_that_lack_what_is_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_positions(batch_size: int, cache_position: Tensor, kv_length: int) -> None:
        """As masks were asked for before there were offsets."""

    monkeypatch.setattr(masking, "sdpa_mask", of_positions)
    with pytest.raises(
        UnavailableError, match=r"lacks.*argument q_length of masks.*pip install 'transformers>=5\.17,<5\.25'"
    ):
        register()
    monkeypatch.delattr(masking, "AttentionMaskInterface")
    with pytest.raises(UnavailableError, match="transformers.masking_utils:AttentionMaskInterface.register"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnavailableError, match=r"pip install '.*\[transformers\]'"):
        register()


def test_numbers_that_kernels_do_not_compute_are_computed_for_every_pair() -> None:
    """Divisors that may be 0, and ints beyond 32 bits; where neither can be, masks stay rules."""
    chunk, chunks = torch.tensor(4), torch.tensor([4, 3])
    functions: list[tuple[Callable[..., Any], bool]] = [
        (lambda b, h, q, kv: q // chunk == kv // chunk, False),
        (lambda b, h, q, kv: q % chunks[b] >= kv % chunks[b], False),
        (lambda b, h, q, kv: (q * 200000003 + kv) % 5 < 2, False),
        (lambda b, h, q, kv: q // (kv - 20) < 0, True),
        (lambda b, h, q, kv: (q * 200003 + kv) % 5 < 2, True),
        (lambda b, h, q, kv: q // 3 == kv // 3, True),
        (lambda b, h, q, kv: (q * chunk + kv) % 5 < 2, True),
    ]
    for number, (function, is_rule) in enumerate(functions):
        for queries, first, keys, kv_first in CALLS.values():
            call = {**asked("all", queries, first, keys, kv_first, SEEN), "mask_function": function}
            with warnings.catch_warnings():
                warnings.simplefilter("error" if is_rule else "ignore")
                given = mask(**call)
            assert isinstance(given, Mask) == is_rule, number
            assert torch.equal(pairs(given, queries, keys), masking.sdpa_mask(**call, allow_is_causal_skip=False)[:, 0])


def test_keys_of_any_strides_are_computed_with() -> None:
    random = torch.Generator().manual_seed(0)
    module = nn.Module()
    module.is_causal = False
    plain = torch.randn(3, 2, 4, 9, 8, generator=random)
    expected = attention(module, *plain, None)[0]
    for given in ((0, 1, 2), (0,), (1,), (2,)):
        strided = [x.mT.contiguous().mT if number in given else x for number, x in enumerate(plain)]
        torch.testing.assert_close(attention(module, *strided, None)[0], expected)
    spread = torch.randn(2, 4, 9, 16, generator=random)[..., ::2]
    repeated = torch.randn(2, 4, 9, 1, generator=random).expand(2, 4, 9, 8)
    for odd in (spread, repeated):
        found = attention(module, plain[0], odd, odd, None)[0]
        torch.testing.assert_close(found, attention(module, plain[0], odd.contiguous(), odd.contiguous(), None)[0])


def test_a_mask_is_declared_once() -> None:
    before = len(variants())
    for length in (5, 7, 11):
        for window in (3, 3):
            call = asked("causal", length, 0, length, 0, None)
            pairs(
                mask(**{**call, "mask_function": masking.sliding_window_causal_mask_function(window)}), length, length
            )
    assert len(variants()) <= before + 1


def test_masks_without_end_are_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_problem_of", functools.cache(rules._problem_of.__wrapped__))
    with pytest.warns(
        RuntimeWarning, match=r"64 masks were declared, the last one .*q_idx - 64.*from call to call"
    ) as said:
        for window in range(1, 70):
            function = masking.sliding_window_causal_mask_function(window)
            mask(**{**asked("causal", 12, 0, 12, 0, None), "mask_function": function})
    assert len(said) == 1
