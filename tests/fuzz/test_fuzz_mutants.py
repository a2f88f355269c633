"""The defects that the fuzzer must catch (tests/fuzz/mutants.py) are really planted: each changes today's code.

Nothing is computed here: `make fuzz MUTANTS=1` says whether they are caught.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from sympy.core.cache import clear_cache

import weft
from tests.fuzz.mutants import MUTANTS, Instead, InText, Mutant
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen import generate
from weft.compiler.analysis.tiles.facts import facts_of
from weft.ir.operators import OPERATORS
from weft.runtime import driver

bias, slopes, sinks = weft.tensor("bias", 2), weft.tensor("slopes", 1), weft.tensor("sinks", 1)
reach, sharpness, width = weft.tensor("reach", 1, int), weft.scalar("sharpness", float), weft.scalar("width", float)
grown = weft.exp(bias[head, q_pos])
bent = weft.tanh(score)
SCALED, BIASED = (
    weft.Attention(mask=masks.causal, scale=weft.rsqrt(width) * sharpness, sink=sinks[head], name="scaled"),
    weft.Attention(
        weft.where(kv_pos < reach[head], abs(score) * grown, score) + grown * slopes[head] + bent * bent,
        (kv_pos // 3 <= q_pos // 3) & (q_pos - kv_pos <= reach[head]), name="biased",
    ),
)  # fmt: skip
SIGMOID = weft.Attention(mask=masks.causal, name="sigmoid_attention", normalizer="sigmoid")
LEARNED = weft.Attention(
    score + bias[head, abs(q_pos - kv_pos)] + weft.tensor("shared", 2)[q_pos, kv_pos], masks.causal, name="learned"
)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
DROPPED = weft.Attention(mask=masks.causal, dropout=0.1, name="dropped")
ENDS = weft.Attention(
    score + weft.log(1.0 * (weft.kv_len - q_pos)), weft.floor((q_pos - kv_pos) / 7) % 2 == 0, name="ends"
)
SIZES = weft.shape(heads=2, q_len=256, head_dim=64, dtype="fp32")
ONE, TWO = torch.tensor([256], dtype=torch.int32), torch.tensor([0, 100, 256], dtype=torch.int32)
# Linear in q.k, not linear, with lengths, gradients of pairs, no softmax, undefined behind the last row: they have
# every text that is replaced.
SAMPLES: tuple[tuple[weft.Attention, dict[str, torch.Tensor]], ...] = (
    (SCALED, {}),
    (BIASED, {}),
    (CAUSAL, {"q_lens": ONE, "kv_lens": ONE}),
    (CAUSAL, {"cu_seqlens_q": TWO, "cu_seqlens_kv": TWO}),
    (DROPPED, {}),
    (LEARNED, {}),
    (SIGMOID, {}),
    (ENDS, {}),
)
# A step of a server: two modules, of its long sequences and its short ones, and no backward.
MIXED = {
    "cu_seqlens_q": torch.tensor([0, 1, 200, 256], dtype=torch.int32),
    "kv_lens": torch.tensor([256, 200, 100], dtype=torch.int32), "block_table": torch.zeros(3, 16, dtype=torch.int32),
}  # fmt: skip
# How often each text is found, forward and backward: scaled, biased, padded, packed, dropped, learned, sigmoid, ends;
# mixed.
FOUND = {
    "kv_head_of_another_group": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    "lse_in_base_2": (1, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1),
    "dlse_added": (0, 1, 0, 2, 0, 2, 0, 2, 0, 1, 0, 2, 0, 0, 0, 2, 0),
    "delta_forgotten": (0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0),
    "offset_of_the_first_row": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    "scale_missing_in_dquery": (0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0),
    "hidden_nan_kept": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    "hidden_gradient_kept": (0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "key_gradient_of_last_tile": (0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0),
    "small_ints_wrap": (0, 0, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),  # one for each read
    "heads_of_a_long_call": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    "one_hidden_key_overlooked": (1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1),
    "sink_beside_the_output": (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "sink_of_another_head": (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "sink_gradient_without_dlse": (0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "one_of_the_heads_that_share": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0),
    "diagonals_below_dropped": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0),
    "shared_by_one_batch_row": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0),
    "sigmoid_in_base_2": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0),
    "stride_of_another_dimension": (0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0),
    "last_partial_tile_unmasked": (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2),
    "offsets_not_by_batch": (1, 2, 1, 2, 1, 2, 0, 0, 1, 2, 1, 6, 1, 2, 1, 2, 0),  # of packed ones it is masked
    "rows_behind_a_length_kept": (0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "first_sequence_bottom_right": (0, 0, 0, 0, 1, 2, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3),
    "packed_keys_of_the_queries": (0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "sink_left_out_of_lse": (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "sink_gradient_of_the_other_sign": (0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "gradient_of_values_not_dropped": (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0),
    "all_heads_drop_the_same": (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0),
    "gradient_of_weights_not_dropped": (0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0),
    "halves_of_words_swapped": (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0),
    "slope_of_sigmoid_not_falling": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0),
    "floor_div_truncates_on_gpu": (0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0),
    "table_of_the_first_sequence": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2),
    "first_rows_of_a_page": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2),
    "parts_weigh_alike": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    "long_sequences_left_out": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    "hidden_times_0": (0, 3, 0, 5, 0, 3, 0, 3, 0, 3, 0, 5, 0, 3, 0, 3, 0),
}  # fmt: skip
AT_RUN_TIME = {  # they change no generated text
    "read_gradient_to_next_head",
    "equal_queries_equal_keys",
    "read_gradient_to_first_sequence",
    "mixed_alignment_ignored",
    "pages_of_the_first_sequence",
}


def sources(target: str) -> list[str]:
    """The modules of all samples, forward and backward."""
    if target == "interpret":
        pytest.importorskip("triton")
    options = {"device": "cpu", "target": target}
    if target == "hopper":
        given = {"device": "h200", "target": target}
        return [ENDS.source(replace(SIZES, dtype="bf16"), direction="backward", **given)]
    found = [
        variant.source(SIZES, direction=direction, schedule="flash", **options, **lengths)
        for variant, lengths in SAMPLES
        for direction in ("forward", "backward")
    ]
    return [*found, CAUSAL.source(SIZES, direction="forward", **options, **MIXED)]


sound_sources = lru_cache(sources)


@lru_cache
def dump_of(text: str) -> str:
    return ast.dump(ast.parse(text))


def mutants(kind: type) -> list[Mutant]:
    return [m for m in MUTANTS if isinstance(m.defect, kind)]


def by_name(chosen: list[Mutant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mutant", chosen, ids=lambda m: m.name)


@by_name(mutants(InText))
def test_the_text_is_found_as_often_as_it_should_be(mutant: Mutant) -> None:
    assert isinstance(mutant.defect, InText)
    texts = sound_sources(mutant.target)
    assert tuple(len(re.findall(mutant.defect.pattern, text)) for text in texts) == FOUND[mutant.name]
    assert any(FOUND[mutant.name])


@by_name(mutants(InText))
def test_what_stands_in_its_place_is_other_code(mutant: Mutant) -> None:
    assert isinstance(mutant.defect, InText)
    for text in sound_sources(mutant.target):
        planted, times = re.subn(mutant.defect.pattern, mutant.defect.replacement, text)
        assert ast.dump(ast.parse(planted)) != dump_of(text) if times else planted == text


def test_no_text_is_listed_of_a_mutant_that_is_no_more() -> None:
    assert set(FOUND) == {m.name for m in mutants(InText)}
    assert {m.name for m in MUTANTS} >= AT_RUN_TIME


@pytest.fixture
def anew() -> Iterator[None]:
    """What is known of variants is found out in this test, and again in the next."""

    def forget() -> None:
        facts_of.cache_clear()
        driver._resolve.cache_clear()
        generate._functions.cache_clear()
        clear_cache()

    forget()
    yield
    forget()


@by_name([m for m in MUTANTS if not isinstance(m.defect, InText) and m.name not in AT_RUN_TIME])
def test_a_defect_of_the_compiler_changes_what_it_generates(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    sound = sound_sources(mutant.target)
    if isinstance(mutant.defect, Instead):
        owner, name = mutant.defect.owner()
        monkeypatch.setattr(owner, name, owner.__dict__[name])  # to be put back
    else:
        monkeypatch.setitem(OPERATORS, mutant.defect.name, OPERATORS[mutant.defect.name])
    request.getfixturevalue("anew")  # ends before the defect does
    mutant.defect.plant()
    assert sources(mutant.target) != sound


@by_name([m for m in MUTANTS if m.name in AT_RUN_TIME])
def test_a_defect_at_run_time_is_called_by_its_module(mutant: Mutant) -> None:
    assert isinstance(mutant.defect, Instead)
    if "triton" in mutant.defect.module:
        pytest.importorskip("triton")
    owner, name = mutant.defect.owner()
    with open(owner.__file__) as file:
        calls = [n for n in ast.walk(ast.parse(file.read())) if isinstance(n, ast.Call)]
    assert [n.func.id for n in calls if isinstance(n.func, ast.Name)].count(name) == 1


def test_planting_in_texts_reaches_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module passes once through the function that is replaced."""
    mutant = next(m for m in MUTANTS if m.name == "delta_forgotten")
    monkeypatch.setattr(generate, "_tidy", generate._tidy)  # to be put back
    sound = sound_sources("cpu")
    mutant.defect.plant()
    changed = [a != b for a, b in zip(sources("cpu"), sound, strict=True)]
    assert changed == [bool(n) for n in FOUND[mutant.name]]
