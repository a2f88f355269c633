"""Tile programs are checked before anything is planned from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft import kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.programs import verify_tiles
from weft.compiler.analysis.tiles.results import Assign
from weft.ir.errors import InternalError
from weft.ir.expr import Symbol, symbol

doc = weft.tensor("doc", 1, int)


@pytest.mark.parametrize(
    "mask", [masks.causal, (kv_pos < 7) | (kv_pos // 48 <= q_pos // 48), doc[q_pos] == doc[kv_pos]]
)
def test_programs_of_analysis_are_sound(mask):
    facts = facts_of(weft.Attention(mask=mask))
    for program in (facts.kv_tiles, facts.q_tiles):
        assert verify_tiles(program) is program


def test_everything_that_is_wrong_is_listed():
    program = facts_of(weft.Attention(mask=masks.causal)).kv_tiles
    first = program.body[0]
    for wrong, said in (
        (replace(program, body=program.body[1:]), first.name),
        (replace(program, body=(*program.body, first)), f"{first.name} is made twice"),
        (replace(program, body=(Assign("odd", symbol("q_pos")), *program.body)), "odd reads q_pos"),
        (replace(program, outputs=(*program.outputs, "lo9")), "nothing makes lo9"),
        (replace(program, edge_tile=Symbol("lo9", "int")), "edge_tile reads lo9"),
    ):
        with pytest.raises(InternalError, match=said):
            verify_tiles(wrong)
