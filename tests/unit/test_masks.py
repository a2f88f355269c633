"""The library of masks: each against a loop that says what its paper says."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest

import weft
from weft import batch, masks
from weft.ir.expr import Expr
from weft.ir.parse import parse

from .tiling import Case

Rule = Callable[[int, int], bool]
ids = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])


def neighbours(width: int, height: int, rows: int, columns: int) -> Rule:
    """NATTEN: the window is shifted inward at borders, so that every query sees as many keys."""

    def shifted(place: int, radius: int, size: int) -> range:
        begin = min(max(place - radius, 0), size - 2 * radius - 1)
        return range(begin, begin + 2 * radius + 1)

    return lambda q, k: (
        k // width in shifted(q // width, rows, height) and k % width in shifted(q % width, columns, width)
    )


def diffusion(length: int, block: int) -> Rule:
    """BD3-LM: block-diagonal in the noised half, earlier clean blocks for it, block-causal in the clean half."""

    def rule(q: int, k: int) -> bool:
        q_clean, k_clean, q_block, k_block = q >= length, k >= length, q % length // block, k % length // block
        if not k_clean:
            return not q_clean and q_block == k_block
        return k_block <= q_block if q_clean else k_block < q_block

    return rule


RULES: list[tuple[str, Expr, Rule, int]] = [
    ("causal", masks.causal, lambda q, k: k <= q, 12),
    ("window", masks.sliding_window(3), lambda q, k: abs(q - k) < 3, 12),
    ("window ahead", masks.sliding_window(4, ahead=2), lambda q, k: -2 < q - k < 4, 12),
    ("causal window", masks.causal & masks.sliding_window(4), lambda q, k: 0 <= q - k < 4, 12),
    ("prefix", masks.prefix_lm(5), lambda q, k: k < 5 or k <= q, 12),
    ("dilated", masks.dilated(3, 8), lambda q, k: 0 <= q - k < 8 and (q - k) % 3 == 0, 20),
    ("dilated to the edge", masks.dilated(3, 7), lambda q, k: 0 <= q - k < 7 and (q - k) % 3 == 0, 20),
    ("document", masks.document(weft.tensor("ids", 1, int)), lambda q, k: bool(ids[q] == ids[k]), 12),
    ("block causal", masks.block_causal(5), lambda q, k: k // 5 <= q // 5, 17),
    ("block diagonal", masks.block_diagonal(5), lambda q, k: k // 5 == q // 5, 17),
    ("global window", masks.global_window(2, 4), lambda q, k: k <= q and (k < 2 or q - k < 4), 17),
    ("strided", masks.strided(3, 5), lambda q, k: k <= q and (q - k < 3 or (q - k) % 5 == 0), 23),
    ("grid", masks.natten_2d(6, 1, 2), lambda q, k: abs(q // 6 - k // 6) <= 1 and abs(q % 6 - k % 6) <= 2, 30),
    ("natten", masks.natten_2d(6, 1, 2, height=5), neighbours(6, 5, 1, 2), 30),
    ("block diffusion", masks.block_diffusion(12, 3), diffusion(12, 3), 24),
]


@pytest.mark.parametrize(("mask", "rule", "length"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_masks_see_what_their_papers_say(mask: Expr, rule: Rule, length: int) -> None:
    expected = np.array([[rule(q, k) for k in range(length)] for q in range(length)])
    assert np.array_equal(Case(mask, length, length, operands={"ids": ids}).visible(), expected)


def test_natten_lets_every_query_see_a_whole_neighbourhood() -> None:
    seen = Case(masks.natten_2d(8, 1, 2, height=6), 48, 48).visible().sum(1)
    assert set(seen) == {3 * 5}


def test_documents_of_each_batch_row() -> None:
    table = weft.tensor("ids", 2, int)
    mask = masks.document(table)
    assert str(mask) == "ids[batch, q_pos] == ids[batch, kv_pos]"
    values = {"ids": np.stack([ids, ids[::-1]]), "batch": 1}
    assert np.array_equal(Case(mask, 12, 12, operands=values).visible(), ids[::-1][:, None] == ids[::-1][None, :])


def test_masks_compose_and_read_back() -> None:
    window = weft.scalar("window", int)
    mask = masks.prefix_lm(4) & ~masks.block_diagonal(window) | masks.causal & (batch == 0)
    assert str(parse(str(mask), {"window": window})) == str(mask)
    assert weft.Attention(mask=mask, name="composed").is_masked


def test_arguments_may_be_operands_or_expressions() -> None:
    sizes = weft.tensor("sizes", 1, int)
    mask = masks.causal & masks.sliding_window(sizes[weft.head] + 1)
    assert Case(mask, 9, 9, operands={"sizes": np.array([2])}).visible().sum(1).max() == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.dilated(0, 8), "masks.dilated: expected step to be at least 1, got 0"),
        (lambda: masks.block_causal(-4), "masks.block_causal: expected size to be at least 1, got -4"),
        (lambda: masks.block_diagonal(0), "masks.block_diagonal: expected size"),
        (lambda: masks.strided(4, 0), "masks.strided: expected stride"),
        (lambda: masks.natten_2d(0, 1), "masks.natten_2d: expected width"),
        (lambda: masks.natten_2d(4, 1, height=0), "masks.natten_2d: expected height"),
        (lambda: masks.block_diffusion(8, 0), "masks.block_diffusion: expected block"),
        (lambda: masks.document(weft.tensor("ids", 3, int)), "masks.document: expected ids to have rank 1"),
        (lambda: masks.block_causal(2.5), "expected int, got float"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_written(make: Callable[[], Expr], message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        make()


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(masks)
    assert found.attempted > 10
    assert found.failed == 0
