"""Head dimensions as power-of-two tiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.compiler.planning.segments import SEGMENT_COLUMNS, for_heads, for_latent, split
from weft.ir.errors import InternalError


@pytest.mark.parametrize(
    ("width", "blocks"),
    [
        (1, [16]), (8, [16]), (16, [16]), (24, [32]), (40, [32, 16]), (64, [64]), (80, [64, 16]), (96, [64, 32]),
        (128, [128]), (160, [128, 32]), (192, [128, 64]), (256, [256]), (576, [512, 64]),
    ],
)  # fmt: skip
def test_blocks_of_common_widths(width: int, blocks: list[int]) -> None:
    assert [s.block for s in split(width)] == blocks


@given(st.integers(1, 1024))
def test_segments_cover_every_column_once_and_never_cost_more_than_padding(width: int) -> None:
    pieces = split(width, start=7)
    assert [s.start for s in pieces] == [7 + sum(p.width for p in pieces[:i]) for i in range(len(pieces))]
    assert sum(s.width for s in pieces) == width
    assert all(s.block >= 16 and s.block & (s.block - 1) == 0 and s.width <= s.block for s in pieces)
    whole = max(16, 1 << (width - 1).bit_length())
    assert sum(s.block for s in pieces) + SEGMENT_COLUMNS * (len(pieces) - 1) <= whole


def test_query_key_and_value_may_differ() -> None:
    parts = for_heads(192, 128)
    assert (parts.qk_columns, parts.v_columns, parts.value_is_key) == (192, 128, False)
    assert {s.source for s in parts.qk} == {"key"} and {s.source for s in parts.v} == {"value"}


def test_expanded_latent_attention_has_a_rotary_tensor_of_its_own() -> None:
    parts = for_latent("expanded", rank=512, rope=64, nope=128, value_dim=128)
    assert [(s.start, s.width, s.source) for s in parts.qk] == [(0, 128, "key"), (0, 64, "rope")]
    assert [(s.start, s.width, s.source) for s in parts.v] == [(0, 128, "value")]
    assert not parts.value_is_key


def test_absorbed_latent_attention_uses_its_first_key_segment_as_value() -> None:
    parts = for_latent("absorbed", rank=512, rope=64, nope=128, value_dim=128)
    assert [(s.start, s.width, s.source) for s in parts.qk] == [(0, 512, "key"), (512, 64, "key")]
    assert parts.value_is_key and parts.v[0].width == 512


def test_an_odd_rank_stays_one_masked_tile() -> None:
    parts = for_latent("absorbed", rank=96, rope=0, nope=32, value_dim=32)
    assert [(s.width, s.block) for s in parts.qk] == [(96, 128)]


def test_a_width_of_nothing_is_our_mistake() -> None:
    with pytest.raises(InternalError, match="expected a positive width, got 0"):
        split(0)
