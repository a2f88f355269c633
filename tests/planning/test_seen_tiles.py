"""All tiles of a head at once against the same tile by tile, and how long that takes."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from weft import masks
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.measured import Measurement, Table
from weft.compiler.planning.pairs import pair_blocks
from weft.compiler.planning.seen_tiles import ALL, NONE, SOME, seen_tiles
from weft.ir.errors import WeftError
from weft.ir.expr import Expr

from ..analysis import test_measured as ranges
from ..attention import test_lists as lists

blocks = weft.tensor("blocks", 2, bool)


def both(mask: Expr, sizes: tuple[int, int, int], block: int, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All at once, and one by one. sizes: of queries and keys, and the position of the first query."""
    facts = facts_of(weft.Attention(mask=mask, name="looked_at"))
    assert facts.survey is not None
    q_len, kv_len, offset = sizes
    tables = {n: Table(n, v.tolist) if isinstance(v, Tensor) else v for n, v in values.items()}
    env = {"batch": 0, "head": 0, "kv_head": 0, "group": 1, "head_dim": 64, **values,
           "q_len": q_len, "kv_len": kv_len, "q_offset": offset}  # fmt: skip
    pairs = pair_blocks(facts, env) if facts.survey.by_pair else None
    found = Measurement(facts.survey, tables, q_len=q_len, kv_len=kv_len, q_offset=offset, blocks=pairs)
    expected = torch.full((-(-q_len // block), -(-kv_len // block)), NONE, dtype=torch.uint8)
    one_by_one = found.lists(facts.kv_tiles, block, block)
    for tile, row in enumerate(expected):
        edge, full = one_by_one(tile)
        row[edge], row[full] = SOME, ALL
    return seen_tiles(found, facts.kv_tiles, env, block), expected


@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("name", ranges.MASKS)
def test_masks_of_what_one_position_reads(name: str, order: str) -> None:
    draw = random.Random(name)
    for _ in range(12):
        case = ranges.random_case(ranges.MASKS[name], draw, order)
        if name == "indirect":
            case.operands["marks"] = case.operands["marks"] % 7
        values = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in case.operands.items()}
        if name == "indirect" and len(values["marks"]) < 20:
            continue
        found, expected = both(case.mask, (case.q_len, case.kv_len, case.offset), case.block_q, values)
        assert torch.equal(found, expected), case


@pytest.mark.parametrize("name", lists.MASKS)
@pytest.mark.parametrize("block", [16, 64, 96])
def test_masks_that_read_a_tensor_by_both_positions(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = lists.given(weft.Attention(mask=lists.MASKS[name], name=name))
    for number, most in ((0, 1 << 22), (1, 20)):  # all tiles together, and few at a time
        monkeypatch.setattr("weft.compiler.planning.seen_tiles._MOST", most)
        for sizes in ((70, 130, 30), (300, 310, 10), (320, 320, 0), (1, 1, 0)):
            own = {**values, "batch": number, "head": number, "group": 2}
            found, expected = both(lists.MASKS[name], sizes, block, own)
            assert torch.equal(found, expected), sizes


def test_reads_beyond_a_tensor_are_refused_where_pairs_may_be_seen() -> None:
    table = torch.ones(4, 4, dtype=torch.bool)
    causal = masks.causal & masks.block_sparse(blocks, 16)
    found, expected = both(causal, (64, 64, 0), 16, {"blocks": table})
    assert torch.equal(found, expected) and int((found == NONE).sum()) == 6
    for sizes in ((65, 65, 0), (64, 65, 1)):
        with pytest.raises(WeftError, match="blocks: the mask reads index 4, expected 0 to 3"):
            both(causal, sizes, 16, {"blocks": table})


def test_operands_may_have_any_name() -> None:
    """Also one that the survey has for what it measures."""
    ids, low = weft.tensor("ids", 1, int), weft.scalar("q0_low", int)
    same = (ids[weft.q_pos] == ids[weft.kv_pos]) | (weft.head < low)
    for number in (0, 3):
        found, expected = both(same, (64, 64, 0), 8, {"ids": torch.arange(64) // 8 + 1, "q0_low": number})
        assert torch.equal(found, expected) and bool((found == NONE).any()) == (number == 0)


@pytest.mark.slow(3)
def test_a_long_sequence_takes_a_moment() -> None:
    """2048 x 2048 tiles, of which one in twenty is seen."""
    table = torch.rand(2048, 2048, generator=torch.Generator().manual_seed(1)) < 0.05
    facts = facts_of(weft.Attention(mask=masks.causal & masks.block_sparse(blocks, 128), name="sparse"))
    assert facts.survey is not None
    env = {"q_len": 1 << 18, "kv_len": 1 << 18, "q_offset": 0, "blocks": table}
    found = Measurement(facts.survey, {"blocks": Table("blocks", table.tolist)}, q_len=1 << 18, kv_len=1 << 18)
    begin = time.thread_time()
    seen = seen_tiles(found, facts.kv_tiles, env, 128)
    assert time.thread_time() - begin < 2.0
    assert torch.equal(seen > 0, table.tril()) and int((seen == ALL).sum()) == int(table.tril(-1).sum())
