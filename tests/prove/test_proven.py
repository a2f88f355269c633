"""What explain says of proofs: of what is in the file, and of nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import weft
from weft import kv_pos, masks, q_pos
from weft.compiler.analysis.tiles import proven
from weft.compiler.analysis.tiles.facts import Facts, facts_of
from weft.ir.expr import Expr

SHAPE = weft.shape(heads=2, q_len=512, head_dim=64)
PROVEN, OTHERWISE = "tiles: proven for all positions", "tiles: sound by construction"
near, far = weft.scalar("near", int), weft.scalar("far", int)


def facts(mask: Expr) -> Facts:
    return facts_of(weft.Attention(mask=mask))


def digest(mask: Expr) -> str:
    found = facts(mask)
    return proven.digest(found.attention.canonical.folded_mask, found.kv_tiles, found.q_tiles, found.survey)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal,
        masks.causal & masks.sliding_window(near),
        masks.prefix_lm(far),
        masks.causal & masks.document(weft.tensor("own_name", 2, int)),
        masks.natten_2d(32, 3, height=32),
    ],
)
def test_masks_of_the_library_are_proven_whatever_operands_are_called(mask: Expr) -> None:
    text = weft.Attention(mask=mask).explain(SHAPE, device="h100")
    assert PROVEN in text and OTHERWISE not in text


@pytest.mark.parametrize("mask", [masks.causal & (kv_pos != 17), kv_pos <= q_pos + 1, masks.sliding_window(near + far)])
def test_nothing_is_claimed_of_other_masks(mask: Expr) -> None:
    text = weft.Attention(mask=mask).explain(SHAPE, device="cpu")
    assert OTHERWISE in text and PROVEN not in text


def test_a_claim_does_not_outlive_the_program_that_was_proven() -> None:
    found = facts(masks.causal)
    mask, kv, q = found.attention.canonical.folded_mask, found.kv_tiles, found.q_tiles
    other = facts(masks.causal & masks.sliding_window(near)).kv_tiles
    fewer = replace(kv, body=kv.body[:-1])
    digests = {proven.digest(mask, program, q, None) for program in (kv, other, fewer)}
    assert len(digests) == 3


def test_operands_are_told_apart_by_place_and_kind_but_not_by_name() -> None:
    assert digest(kv_pos < near) == digest(kv_pos < far)
    assert digest((kv_pos < near) & (q_pos < near)) != digest((kv_pos < near) & (q_pos < far))
    flags, ids = weft.tensor("near", 1, bool), weft.tensor("near", 1, int)
    assert digest(flags[weft.head] | masks.causal) != digest((ids[weft.head] == 1) | masks.causal)


def test_the_file_is_written_and_read_back(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(proven, "FILE", tmp_path / "proven.json")
    proven._digests.cache_clear()
    try:
        mask = kv_pos <= q_pos + 1
        proven.write({digest(mask): "one ahead"})
        assert json.loads(proven.FILE.read_text())["proven"] == {digest(mask): "one ahead"}
        assert PROVEN in proven.claim(facts(mask))
        assert OTHERWISE in proven.claim(facts(masks.causal))
    finally:
        proven._digests.cache_clear()
