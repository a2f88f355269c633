"""Tile bounds against brute force: named families tile by tile, and random masks from the grammar of the language."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from weft import batch, group, head, kv_len, kv_pos, masks, q_len, q_pos
from weft.codegen.dialects import TORCH
from weft.codegen.functions import FunctionPrinter
from weft.compiler.analysis.tiles.bounds import MAX_INTERVALS, kv_bounds, q_bounds
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.values.affine import at_most, const, simplified
from weft.ir.canonical import canonical
from weft.ir.expr import Expr, call, expression

from .tiling import Case, assert_exact, assert_sound, classes, predicted

window, prefix, size, stride = (weft.scalar(n, int) for n in ("window", "prefix", "size", "stride"))
windows = weft.tensor("windows", 1, int)
causal = masks.causal

FAMILIES: dict[str, Expr] = {
    "everything": expression(True),
    "nothing": expression(False),
    "causal": causal,
    "anti-causal": ~causal,
    "window": causal & masks.sliding_window(window),
    "window both sides": masks.sliding_window(window, ahead=prefix),
    "window by abs": abs(q_pos - kv_pos) <= window,
    "not window": ~(causal & masks.sliding_window(window)),
    "prefix": masks.prefix_lm(prefix),
    "not prefix": ~masks.prefix_lm(prefix),
    "prefix of half": masks.prefix_lm(kv_len // 2),
    "dilated": masks.dilated(3, window),
    "dilated run time": masks.dilated(stride, window),
    "block causal": masks.block_causal(12),
    "block causal run time": masks.block_causal(size),
    "not block causal": ~masks.block_causal(size),
    "block by remainder": kv_pos - kv_pos % 12 <= q_pos,
    "block diagonal": masks.block_diagonal(12),
    "block diagonal run time": masks.block_diagonal(size),
    "not block diagonal": ~masks.block_diagonal(12),
    "global and window": masks.global_window(prefix, window),
    "global both ways": (kv_pos < prefix) | (q_pos < prefix) | masks.sliding_window(window),
    "not global and window": ~masks.global_window(prefix, window),
    "window by head": causal & masks.sliding_window(windows[head]),
    "window by head index": causal & masks.sliding_window(4 * head + 5),
    "window by batch": causal & masks.sliding_window(windows[batch]),
    "heads differ in kind": weft.where(head < 2, causal, masks.sliding_window(window)),
    "causal or first heads": causal | (head == 0),
    "compressed keys": stride * kv_pos + stride - 1 <= q_pos,
    "strided": masks.strided(window, stride),
    "neighbourhood in 1d": abs(kv_pos - weft.minimum(weft.maximum(q_pos, 5), kv_len - 6)) <= 5,
    "rows of a grid": abs(kv_pos // 8 - q_pos // 8) <= 2,
    "rows of a grid, run time": abs(kv_pos // size - q_pos // size) <= 1,
}


def operands(draw: random.Random) -> dict[str, object]:
    return {
        "window": draw.randint(1, 60), "prefix": draw.randint(0, 90), "size": draw.choice([1, 3, 4, 7, 16, 32]),
        "stride": draw.randint(2, 5), "windows": np.array([draw.randint(1, 50) for _ in range(4)]),
        "head": draw.randint(0, 3), "batch": draw.randint(0, 3),
    }  # fmt: skip


def family_case(mask: Expr, draw: random.Random) -> Case:
    q_length, kv_length = draw.randint(1, 120), draw.randint(1, 120)
    offset = draw.choice([None, 0, draw.randint(-30, 60)])
    blocks = draw.choice([8, 16, 17]), draw.choice([8, 16, 17])
    return Case(mask, q_length, kv_length, *blocks, offset, operands(draw))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_exact_for_every_tile_of_both_axes(family: str) -> None:
    draw = random.Random(family)
    for _ in range(25):
        assert_exact(family_case(FAMILIES[family], draw))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_sound_for_all_run_time_values(family: str) -> None:
    draw = random.Random(family)
    for _ in range(15):
        some = family_case(FAMILIES[family], draw)
        wild = {n: draw.randint(-20, 3) for n in ("window", "prefix", "size", "stride")}
        assert_sound(Case(some.mask, some.q_len, some.kv_len, 16, 8, some.q_offset, {**some.operands, **wild}, True))


@pytest.mark.parametrize("length", [16, 24, 40])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_block_diffusion_is_exact(length: int, block: int) -> None:
    for mask, values in (
        (masks.block_diffusion(length, block), {}),
        (masks.block_diffusion(prefix, size), {"prefix": length, "size": block}),
    ):
        for tile in (8, 16):
            assert_exact(Case(mask, 2 * length, 2 * length, tile, tile, 0, values))


def test_block_diffusion_has_at_most_three_intervals() -> None:
    mask = canonical(masks.block_diffusion(512, 16))
    assert len(kv_bounds(mask).intervals) <= 3
    assert len(q_bounds(mask).intervals) <= 3
    assert kv_bounds(mask).closed_form


@pytest.mark.parametrize("height", [None, 9])
def test_neighbourhoods_of_a_grid_visit_the_rows_that_matter(height: int | None) -> None:
    mask = masks.natten_2d(16, 2, height=height)
    given = Case(mask, 9 * 16, 9 * 16, 16, 16, 0)  # one row of the grid a tile
    assert_exact(given)
    assert any("no closed form" in note for note in kv_bounds(canonical(mask)).notes)  # columns


def bounds_text(mask: Expr) -> list[str]:
    return [f"[{i.lo}, {i.hi}) full [{i.full_lo}, {i.full_hi})" for i in kv_bounds(canonical(mask)).intervals]


def test_bounds_of_simple_masks_read_as_a_person_would_write_them() -> None:
    assert bounds_text(causal) == ["[0, q_last + 1) full [0, q_first + 1)"]
    assert bounds_text(causal & masks.sliding_window(4)) == ["[q_first - 3, q_last + 1) full [q_last - 3, q_first + 1)"]
    assert bounds_text(masks.prefix_lm(prefix)) == [
        "[0, maximum(prefix, q_last + 1)) full [0, maximum(prefix, q_first + 1))"
    ]
    assert bounds_text(masks.block_causal(64)) == ["[0, 64 * (q_last // 64) + 64) full [0, 64 * (q_first // 64) + 64)"]
    assert bounds_text(expression(True)) == ["[0, kv_len) full [0, kv_len)"]


def test_what_only_run_time_knows_is_guarded() -> None:
    (interval,) = kv_bounds(canonical(masks.block_causal(size))).intervals
    assert str(interval.hi) == "where(0 < size, q_last // size * size + size, kv_len)"
    assert str(interval.full_hi) == "where(0 < size, q_first // size * size + size, 0)"


@pytest.mark.parametrize("value", [-2, 0, 3])
@pytest.mark.parametrize(
    "mask", [stride * q_pos <= 100, (stride * q_pos == 8) | (kv_pos == 3), ~((stride * kv_pos < q_pos) & (kv_pos < 9))]
)
def test_no_program_divides_by_zero_on_a_cpu(mask: Expr, value: int) -> None:
    """A coefficient that becomes a divisor may be 0, and Python raises for that even if the quotient is not used."""
    facts = facts_of(weft.Attention(mask=mask))
    for program in (facts.kv_tiles, facts.q_tiles):
        made: dict[str, object] = {}
        exec(FunctionPrinter(facts, TORCH).tiles(program), made)
        made[f"{program.axis}_tiles"](0, 15, 0, 0, 0, 1, 40, 40, 64, value, *([0] if program.axis == "q" else []), 16)
    assert_sound(Case(mask, 40, 40, operands={"stride": value}))


document = weft.tensor("document", 1, int)
flags = weft.tensor("flags", 1, bool)
slopes = weft.tensor("slopes", 1)


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        (masks.document(document), "document[kv_pos] == document[q_pos]"),
        (flags[kv_pos], "flags[kv_pos]"),
        (slopes[head] * (q_pos - kv_pos) < 3.5, "slopes[head]"),
        ((q_pos - kv_pos) % 3 == 0, "% 3"),
        (q_pos * kv_pos < 9, "kv_pos * q_pos"),
        (kv_pos // (q_pos + 1) < 2, "kv_pos // (1 + q_pos)"),
        (document[q_pos] < kv_pos, "document[q_pos]"),
    ],
)
def test_what_has_no_closed_form_is_visited_and_named(mask: Expr, named: str) -> None:
    found = kv_bounds(canonical(mask))
    assert not found.closed_form
    assert any(named in note for note in found.notes), found.notes
    ids = np.array([0, 0, 1, 1, 2])
    assert_sound(Case(mask, 40, 50, 8, 16, 0, {"document": ids, "flags": ids > 0, "slopes": np.array([0.3])}))


def test_a_part_without_closed_form_leaves_the_rest_of_the_mask_at_work() -> None:
    mask = causal & masks.document(document)
    found = predicted(Case(mask, 64, 64, 16, 16, 0, {"document": np.arange(7)}), "kv")
    assert np.array_equal(found, np.tril(np.ones((4, 4), int)))


def test_a_flag_by_head_needs_no_note() -> None:
    mask = causal | flags[head]
    assert kv_bounds(canonical(mask)).closed_form
    for flag in (True, False):
        assert_exact(Case(mask, 70, 70, 16, 16, None, {"flags": np.array([flag])}))


def test_many_alternatives_share_a_hull_and_say_so() -> None:
    mask = expression(False)
    for n in range(7):
        mask = mask | (abs(kv_pos - q_pos - 40 * n) <= 2)
    found = kv_bounds(canonical(mask))
    assert len(found.intervals) == MAX_INTERVALS
    assert any("share one" in note for note in found.notes)
    assert_sound(Case(mask, 90, 300, 16, 16, 0))


def test_a_grammar_of_alternatives_stays_fast() -> None:
    mask = expression(True)
    for n in range(12):
        mask = mask & ((kv_pos <= q_pos - 20 * n) | (kv_pos > q_pos + 10 * n) | (head == n))
    begun = time.perf_counter()
    found = kv_bounds(canonical(mask)), q_bounds(canonical(mask))
    assert time.perf_counter() - begun < 5
    assert all("too many" in f.notes[0] for f in found)
    assert_sound(Case(mask, 90, 120, 16, 16, 0))


# -- random masks -----------------------------------------------------------------------------------------------------
NUMBERS = [*3 * [q_pos, kv_pos], window, prefix, size, stride, head, q_len, kv_len, windows[head]]
COUNTED = {"cases": 0, "visited": 0, "skipped": 0, "full": 0}


def number(draw: random.Random, depth: int) -> Expr:
    if depth == 0 or draw.random() < 0.3:
        return draw.choice([*NUMBERS, expression(draw.randint(-9, 40))])
    a, b = number(draw, depth - 1), number(draw, depth - 1)
    divisor = draw.choice([expression(draw.choice([1, 2, 3, 4, 7, 16, -2, 0])), size, stride, group, b])
    return draw.choice([
        lambda: a + b, lambda: a - b, lambda: a - b, lambda: a - b, lambda: draw.choice([-3, -1, 2, 3]) * a,
        lambda: stride * a, lambda: a // divisor, lambda: a % divisor, lambda: weft.minimum(a, b),
        lambda: weft.maximum(a, b), lambda: abs(a), lambda: document[a],
        lambda: weft.where(condition(draw, depth - 1), a, b),
    ])()  # fmt: skip


def condition(draw: random.Random, depth: int) -> Expr:
    if depth == 0 or draw.random() < 0.35:
        a, b = number(draw, 2), number(draw, 1)
        compared = call(draw.choice(["lt", "le", "gt", "ge", "lt", "le", "eq", "ne"]), a, b)
        rare = [flags[head], flags[q_pos], slopes[head] * (q_pos - kv_pos) < 2.5, masks.document(document)]
        return draw.choice(rare) if draw.random() < 0.08 else compared
    a, b = condition(draw, depth - 1), condition(draw, depth - 1)
    return draw.choice([
        lambda: a & b, lambda: a & b, lambda: a & b, lambda: a | b, lambda: a | b, lambda: ~a, lambda: a ^ b,
        lambda: call("eq", a, b), lambda: weft.where(condition(draw, depth - 1), a, b),
    ])()  # fmt: skip


def random_case(mask: Expr, draw: random.Random) -> Case:
    values: dict[str, object] = {
        "window": draw.randint(-9, 60), "prefix": draw.randint(-3, 70), "size": draw.randint(-3, 20),
        "stride": draw.randint(-2, 9), "windows": np.array([draw.randint(-3, 40) for _ in range(3)]),
        "head": draw.randint(0, 2), "group": draw.randint(1, 3), "flags": np.array([True, False, True]),
        "slopes": np.array([0.3, -0.2, 0.0]), "document": np.array([draw.randint(0, 30) for _ in range(13)]),
    }  # fmt: skip
    blocks = draw.choice([4, 8, 16, 11]), draw.choice([4, 8, 16, 11])
    offset = draw.choice([None, 0, draw.randint(-30, 40)])
    lengths = draw.randint(1, 70), draw.randint(1, 70)
    return Case(mask, *lengths, *blocks, offset, values, past_end=draw.random() < 0.5)


@settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**40))
def test_random_masks_are_sound_on_both_axes(seed: int) -> None:
    check_random_mask(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_more_random_masks_are_sound(first: int) -> None:
    for seed in range(first, first + 100):
        check_random_mask(seed)


def check_random_mask(seed: int) -> None:
    draw = random.Random(seed)
    mask = condition(draw, draw.choice([0, 1, 1, 2]))
    for _ in range(3):
        case = random_case(mask, draw)
        assert_sound(case)
        found = predicted(case, "kv")
        for label, kind in (("skipped", 0), ("visited", 1), ("full", 2)):
            COUNTED[label] += int((found == kind).sum())
        COUNTED["cases"] += 1


def test_random_masks_were_many_and_not_all_trivial(record_property: pytest.RecordProperty) -> None:
    record_property("random cases", COUNTED["cases"])
    print(f"\nrandom masks checked on both axes, cases and tiles: {COUNTED}")
    if COUNTED["cases"] == 0:
        pytest.skip("the random masks ran in another process")
    assert COUNTED["cases"] >= 300
    assert COUNTED["skipped"] > COUNTED["cases"]
    assert COUNTED["full"] > COUNTED["cases"]


# -- the algebra under it ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "simple"),
    [
        (q_pos + 1 - q_pos, "1"),
        (1 + (q_pos - kv_pos) - 1, "q_pos - kv_pos"),
        ((8 * q_pos + 9) // 4, "2 * q_pos + 2"),
        ((4 * kv_pos + q_pos) % 4, "q_pos % 4"),
        (q_pos // -3, "-q_pos // 3"),
        (-(q_pos - window), "window - q_pos"),
        (5 - q_pos, "5 - q_pos"),
        (window * (q_pos + 2), "q_pos * window + 2 * window"),
    ],
)
def test_integers_are_written_one_way(written: Expr, simple: str) -> None:
    assert str(simplified(written)) == simple


def test_proofs_know_what_every_call_guarantees() -> None:
    assert at_most(const(0), kv_pos)
    assert not at_most(const(0), q_pos)  # q_offset may be negative
    assert at_most(weft.minimum(q_pos, kv_pos), kv_pos)
    assert at_most(kv_pos // 4, (kv_pos + window * window * 0 + 3) // 4)
    assert not at_most(kv_pos // window, (kv_pos + 3) // window)
    assert at_most(weft.where(head < 3, kv_pos, 0), kv_pos + group)


def test_classes_count_an_incomplete_tile_by_its_pairs() -> None:
    assert classes(Case(causal, 20, 20, 16, 16)).tolist() == [[1, 0], [2, 1]]
