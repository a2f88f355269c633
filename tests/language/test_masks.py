"""The library of masks: each against a loop that says what its paper says."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest
import torch

import weft
from weft import batch, masks
from weft.ir.expr import Expr
from weft.ir.parse import parse

from ..analysis.tiling import Case, assert_sound

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


def natten(extents: tuple[int, ...], radius: int, dilation: int) -> Rule:
    """DiNA: on each axis the places of the query's remainder are an axis of their own, with its window inside."""

    def seen(q: int, k: int, size: int) -> bool:
        own = range(q % dilation, size, dilation)
        at = own.index(q)
        begin = min(max(at - radius, 0), len(own) - 2 * radius - 1)
        return k in own[begin : begin + 2 * radius + 1]

    def rule(q: int, k: int) -> bool:
        found = True
        for size in reversed(extents):
            found, q, k = found and seen(q % size, k % size, size), q // size, k // size
        return found

    return rule


def swin(height: int, width: int, window: int, shift: int) -> Rule:
    """Swin: rolled by the shift, cut into windows, and in these hidden between what the roll made neighbours."""

    def region(place: int, size: int) -> tuple[int, int]:
        rolled = (place - shift) % size
        border = 0 if rolled < size - window else 1 if rolled < size - shift else 2
        return rolled // window, border if shift else 0

    def of(token: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return region(token // width, height), region(token % width, width)

    return lambda q, k: of(q) == of(k)


shared = np.array([t in (0, 7) for t in range(20)])
drawn = np.random.default_rng(0).random((2, 5, 5)) < 0.2
pairs = np.random.default_rng(1).random((21, 21)) < 0.4
prompts = np.array([1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0], dtype=bool)
parents = (-1, 0, 0, 1, 1, 2, 5)  # a tree of seven drafted tokens, behind a context of five


def family(token: int) -> set[int]:
    """A drafted token and its ancestors."""
    found = set()
    while token >= 0:
        found.add(token)
        token = parents[token]
    return found


ancestors = np.array([[j in family(i) for j in range(7)] for i in range(7)])
OPERANDS = {
    "ids": ids, "shared": shared, "drawn": drawn[0], "of_heads": drawn, "prompts": prompts, "counts": np.array([3]),
    "ancestors": ancestors, "bits": np.packbits(pairs, axis=-1, bitorder="little"),
}  # fmt: skip


def big(block: int, blocks: np.ndarray, window: int, first: int) -> Rule:
    def rule(q: int, k: int) -> bool:
        a, b = q // block, k // block
        return abs(a - b) <= window or b < first or a < first or bool(blocks[a, b])

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
    ("chunked", masks.chunked(5), lambda q, k: k <= q and k // 5 == q // 5, 17),
    ("fixed", masks.fixed(5, 2), lambda q, k: k <= q and (k // 5 == q // 5 or k % 5 >= 3), 23),
    ("longformer", masks.longformer(3, 2), lambda q, k: abs(q - k) < 3 or k < 2 or q < 2, 20),
    (
        "longformer of a tensor", masks.longformer(3, weft.tensor("shared", 1, bool)),
        lambda q, k: abs(q - k) < 3 or bool(shared[k] or shared[q]), 20,
    ),
    ("bigbird", masks.bigbird(4, weft.tensor("drawn", 2, bool)), big(4, drawn[0], 1, 1), 20),
    (
        "bigbird by head", masks.bigbird(4, weft.tensor("of_heads", 3, bool), window=0, shared=2),
        big(4, drawn[0], 0, 2), 20,
    ),
    (
        "block sparse", masks.block_sparse(weft.tensor("drawn", 2, bool), 4),
        lambda q, k: bool(drawn[0][q // 4, k // 4]), 20,
    ),
    (
        "block sparse by head, wide", masks.block_sparse(weft.tensor("of_heads", 3, bool), 4, 6),
        lambda q, k: bool(drawn[0][q // 4, k // 6]), 20,
    ),
    ("bit packed", masks.bit_packed(weft.tensor("bits", 2, int)), lambda q, k: bool(pairs[q, k]), 21),
    ("swin", masks.swin(6, 3), swin(6, 6, 3, 0), 36),
    ("swin shifted", masks.swin(6, 3, shift=1), swin(6, 6, 3, 1), 36),
    ("swin of another width, shifted", masks.swin(8, 4, shift=2), swin(4, 8, 4, 2), 32),
    ("natten 1d", masks.natten_1d(2), lambda q, k: abs(q - k) <= 2, 15),
    ("natten 1d to the end", masks.natten_1d(2, length=15), natten((15,), 2, 1), 15),
    ("natten 1d dilated", masks.natten_1d(2, dilation=3), lambda q, k: abs(q - k) <= 6 and (q - k) % 3 == 0, 20),
    ("natten 1d dilated to the end", masks.natten_1d(2, length=17, dilation=3), natten((17,), 2, 3), 17),
    ("natten 2d dilated", masks.natten_2d(7, 1, height=6, dilation=2), natten((6, 7), 1, 2), 42),
    (
        "natten 2d dilated, cut off", masks.natten_2d(6, 1, 2, dilation=2),
        lambda q, k: all(abs(a - b) <= 2 * r and (a - b) % 2 == 0
                         for a, b, r in ((q // 6, k // 6, 1), (q % 6, k % 6, 2))), 36,
    ),
    ("natten 3d", masks.natten_3d(4, 3, 1, depth=3), natten((3, 4, 3), 1, 1), 36),
    ("natten 3d dilated", masks.natten_3d(6, 2, 0, depth=4, dilation=2), natten((4, 6, 2), 0, 2), 48),
    ("registers", masks.registers(), lambda q, k: k <= q and (k % 2 == 0 or k == q), 14),
    ("registers, two", masks.registers(2), lambda q, k: k <= q and (k % 3 == 0 or k == q), 14),
    ("registers, none", masks.registers(0), lambda q, k: k <= q, 9),
    ("compressed", masks.compressed(3), lambda q, k: 3 * k + 2 <= q, 14),
    ("compressed, blocks overlap", masks.compressed(4, 2), lambda q, k: max(range(2 * k, 2 * k + 4)) <= q, 14),
    ("padding left", masks.causal & masks.padding_left(weft.tensor("counts", 1, int)), lambda q, k: 3 <= k <= q, 12),
    ("padding right", masks.padding_right(weft.tensor("counts", 1, int)), lambda q, k: k < 3, 12),
    (
        "documents with prefixes",
        masks.prefix_document(weft.tensor("ids", 1, int), weft.tensor("prompts", 1, bool)),
        lambda q, k: bool(ids[q] == ids[k] and (k <= q or prompts[k])), 12,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "rule", "length"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_masks_see_what_their_papers_say(mask: Expr, rule: Rule, length: int) -> None:
    expected = np.array([[rule(q, k) for k in range(length)] for q in range(length)])
    assert np.array_equal(Case(mask, length, length, operands=OPERANDS).visible(), expected)
    for block_q, block_kv in ((4, 4), (3, 7), (1, 2)):
        assert_sound(Case(mask, length, length, block_q, block_kv, operands=OPERANDS))


def test_compressed_keys_behind_the_first_query() -> None:
    """Queries count tokens and keys blocks: the call says where the first query stands."""
    for offset in (0, 5):
        expected = np.array([[4 * k + 3 <= q + offset for k in range(6)] for q in range(24 - offset)])
        case = Case(masks.compressed(4), 24 - offset, 6, 3, 2, offset)
        assert np.array_equal(case.visible(), expected)
        assert_sound(case)


def test_a_tree_of_drafted_tokens_behind_a_context() -> None:
    expected = np.array([[k < 5 or k - 5 in family(q) for k in range(12)] for q in range(7)])
    mask = masks.tree(weft.tensor("ancestors", 2, bool))
    assert np.array_equal(Case(mask, 7, 12, operands=OPERANDS).visible(), expected)
    assert_sound(Case(mask, 7, 12, 2, 4, operands=OPERANDS))
    query, key, value = torch.randn(1, 2, 7, 16), torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    out = weft.Attention(mask=mask, name="tree")(query, key, value, ancestors=torch.from_numpy(ancestors))
    by_hand = torch.nn.functional.scaled_dot_product_attention(query, key, value, torch.from_numpy(expected))
    torch.testing.assert_close(out, by_hand)


def test_the_whole_neighbourhood_is_seen_in_each_dimension_and_dilation() -> None:
    for mask, length, number in (
        (masks.natten_1d(2, length=21, dilation=4), 21, 5),
        (masks.natten_2d(8, 1, height=8, dilation=2), 64, 9),
        (masks.natten_3d(6, 6, 1, depth=6, dilation=2), 216, 27),
    ):
        assert set(Case(mask, length, length).visible().sum(1)) == {number}


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
    assert weft.Attention(mask=mask, name="composed").canonical.is_masked


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
        (lambda: masks.compressed(0), "masks.compressed: expected block to be at least 1, got 0"),
        (lambda: masks.compressed(4, 0), "masks.compressed: expected stride to be at least 1, got 0"),
        (lambda: masks.registers(-1), "masks.registers: expected count to be at least 0, got -1"),
        (lambda: masks.document(weft.tensor("ids", 3, int)), "masks.document: expected ids to have rank 1"),
        (lambda: masks.swin(8, 4, shift=4), "masks.swin: expected shift to be less than the window, 4, got 4"),
        (lambda: masks.natten_1d(2, dilation=0), "masks.natten_1d: expected dilation to be at least 1, got 0"),
        (lambda: masks.tree(weft.tensor("a", 2, int)), "masks.tree: expected a to be of dtype bool, got int"),
        (lambda: masks.tree(weft.tensor("a", 1, bool)), "masks.tree: expected a to have rank 2 .* or 3 .*, got 1"),
        (lambda: masks.padding_left(3), r"masks.padding_left: expected a tensor operand such as weft.tensor\('x', 1"),
        (lambda: masks.bigbird(0, weft.tensor("a", 2, bool)), "masks.bigbird: expected block"),
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
