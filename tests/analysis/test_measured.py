"""Which tiles a call visits where kernels measure that: the model against brute force, its counts, its speed."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

import weft
from weft import batch, head, kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.facts import Facts, facts_of
from weft.compiler.analysis.tiles.measured import MOST_POSITIONS, Measurement, Span, Table, visited
from weft.compiler.analysis.tiles.programs import count_tiles, lookups, tile_ranges
from weft.compiler.analysis.tiles.results import MeasuredAxis, Measuring, TileCounts
from weft.compiler.planning.plan import counter
from weft.compiler.planning.records import Shape
from weft.ir.errors import WeftError
from weft.ir.expr import Expr

from .tiling import Case, classes

ids, marks, limits = weft.tensor("ids", 2, int), weft.tensor("marks", 1, int), weft.tensor("limits", 1, int)
valid, weights = weft.tensor("valid", 1, bool), weft.tensor("weights", 1)
window, rate = weft.scalar("window", int), weft.scalar("rate", float)
same = masks.document(ids)

MASKS = {
    "documents": same,
    "causal_documents": masks.causal & same,
    "recent_documents": masks.sliding_window(window) & same,
    "documents_or_prefix": same | masks.prefix_lm(40),
    "two_ranges": same & masks.global_window(5, 17),
    "three_ranges": same & masks.block_diffusion(40, 8),  # of queries
    "closed_full_parts": masks.causal & ((abs(q_pos - kv_pos) < window) | same),
    "by_head": (ids[batch, kv_pos] % 3 <= head) & (kv_pos < q_pos + 20 * head),
    "padding": masks.causal & valid[kv_pos],
    "not_padding": ~(valid[q_pos] ^ valid[kv_pos]) & (marks[q_pos] != marks[kv_pos]),
    "indirect": marks[marks[q_pos] % 20] <= weft.minimum(marks[kv_pos], limits[batch]),
    "floats": (weights[q_pos] > 0.5) & (weft.floor(rate * weights[kv_pos]) <= marks[q_pos]),
    "never_full": same & ((q_pos + kv_pos) % 3 == 0),
}


def facts(mask: Expr) -> Facts:
    found = facts_of(weft.Attention(mask=mask, name="measured"))
    assert found.survey is not None
    return found


def measurement(found: Facts, case: Case) -> Measurement:
    env = {n: Table(n, v.tolist) if isinstance(v, np.ndarray) else v for n, v in case.env.items()}
    return Measurement(found.survey, env, q_len=case.q_len, kv_len=case.kv_len, q_offset=case.offset)


def table(found: Facts, case: Case, axis: str) -> np.ndarray:
    """The class of every tile as the ranges of an axis say, [query tiles, key tiles]; ranges must be in order."""
    program = found.kv_tiles if axis == "kv" else found.q_tiles
    rows, columns = -(-case.q_len // case.block_q), -(-case.kv_len // case.block_kv)
    classes = np.zeros((rows, columns) if axis == "kv" else (columns, rows), int)
    spans = measurement(found, case).spans(program, case.block_q, case.block_kv)
    for tile, row in enumerate(classes):
        ranges = spans(tile)
        ends = [end for span in ranges for end in span]
        assert all(list(span) == sorted(span) for span in ranges) and 0 <= min(ends) <= max(ends) <= len(row)
        edge, full = visited(ranges)
        assert len({*edge, *full}) == len(edge) + len(full), f"a tile is visited twice: {ranges}"
        row[edge], row[full] = 1, 2
    return classes if axis == "kv" else classes.T


def random_case(mask: Expr, draw: random.Random, order: str) -> Case:
    q_len, kv_len = draw.randint(1, 90), draw.randint(1, 90)
    offset = draw.choice([kv_len - q_len if kv_len >= q_len else 0, 0, draw.randint(0, 30)])
    length = max(kv_len, offset + q_len)
    numbers = np.array([[draw.randint(-4, 20) for _ in range(length)] for _ in range(2)])
    if order == "sorted":
        numbers.sort(axis=1)
    values = {
        "ids": numbers + draw.choice([0, 2**62]), "marks": abs(numbers[1]), "limits": np.array([5, 9]),
        "valid": numbers[0] > draw.randint(-5, 21), "weights": np.array([draw.random() for _ in range(length)]),
        "batch": draw.randrange(2), "head": draw.randrange(3), "window": draw.randint(-2, 40), "rate": 9.5,
    }  # fmt: skip
    return Case(mask, q_len, kv_len, draw.choice([4, 8, 11]), draw.choice([4, 8, 11]), offset, values)


# -- the ranges against brute force -----------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("name", [n for n in MASKS if n != "indirect"])
def test_ranges_are_sound(name: str, order: str) -> None:
    found, draw, skipped = facts(MASKS[name]), random.Random(name), 0
    for _ in range(40):
        case = random_case(MASKS[name], draw, order)
        truth = classes(case)
        for axis, length, block in (("kv", case.kv_len, case.block_kv), ("q", case.q_len, case.block_q)):
            classified = table(found, case, axis)
            assert not ((classified == 0) & (truth > 0)).any(), f"{axis}: a visible tile is skipped: {case}"
            assert not ((classified == 2) & (truth < 2)).any(), f"{axis}: a tile with hidden pairs is full: {case}"
            past = classified[:, length // block :] if axis == "kv" else classified[length // block :]
            assert not (past == 2).any(), f"{axis}: an incomplete tile is full: {case}"
            skipped += int((classified == 0).sum())
    assert skipped > 100 or order == "unsorted"


@pytest.mark.parametrize("name", [n for n in MASKS if n != "indirect"])
def test_lists_are_sound_and_leave_out_tiles_of_runs(name: str) -> None:
    found, draw, fewer = facts(MASKS[name]), random.Random(name), 0
    for _ in range(30):
        case = random_case(MASKS[name], draw, "unsorted")
        case.operands["ids"] = np.repeat(case.operands["ids"], 6, axis=1)[:, : case.operands["ids"].shape[1]]
        truth, measured = classes(case), measurement(found, case)
        for axis, program in (("kv", found.kv_tiles), ("q", found.q_tiles)):
            of, runs = (find(program, case.block_q, case.block_kv) for find in (measured.tiles, measured.spans))
            for tile, row in enumerate(truth if axis == "kv" else truth.T):
                edge, full = of(tile)
                assert {*np.flatnonzero(row)} <= {*edge, *full} and all(row[full] == 2), f"{axis} {tile}: {case}"
                fewer += sum(run.hi - run.lo for run in runs(tile)) - len(edge) - len(full)
    assert fewer > 50 or name not in ("documents", "causal_documents")


def test_values_that_must_be_equal_share_a_bit() -> None:
    """Between 3 and 9 lie 5 and 7, but no query has them."""
    mask = marks[q_pos] == marks[kv_pos]
    case = Case(mask, 8, 24, 8, 4, 0, {"marks": np.array([9] * 4 + [3] * 4 + [5, 7] * 6 + [3] * 4)})
    found = facts(mask)
    measured = measurement(found, case)
    assert measured.spans(found.kv_tiles, 8, 4)(0) == [Span(0, 6, 6, 6)]
    assert measured.tiles(found.kv_tiles, 8, 4)(0) == ([0, 1, 5], [])


def test_values_that_other_values_index_are_read_place_by_place() -> None:
    mask = MASKS["indirect"]
    values = {"marks": np.arange(60) % 7, "limits": np.array([5, 9]), "batch": 1}
    case = Case(mask, 60, 60, 8, 8, 0, values)
    assert not ((table(facts(mask), case, "kv") == 0) & (classes(case) > 0)).any()


@pytest.mark.parametrize("name", ["documents", "causal_documents", "recent_documents"])
def test_ranges_of_sorted_documents_are_exact(name: str) -> None:
    found, draw = facts(MASKS[name]), random.Random(5)
    for _ in range(60):
        case = random_case(MASKS[name], draw, "sorted")
        case = replace(case, operands={**case.operands, "window": draw.randint(1, 40)})
        for axis in ("kv", "q"):
            expected = classes(case)
            if axis == "kv" and case.kv_len % case.block_kv:
                expected[:, -1] = np.minimum(expected[:, -1], 1)
            if axis == "q" and case.q_len % case.block_q:
                expected[-1] = np.minimum(expected[-1], 1)
            assert np.array_equal(table(found, case, axis), expected), f"{axis}: {case}"


def ranges_of(marked: list[int], mask: Expr, tile: int = 0) -> list[Span]:
    """The ranges of a query tile of 4, with one mark for each 4 keys."""
    case = Case(mask, 8, 4 * len(marked), 4, 4, 0, {"marks": np.repeat(marked, 4)})
    found = facts(mask)
    return measurement(found, case).spans(found.kv_tiles, 4, 4)(tile)


def test_full_tiles_count_only_where_they_are_one_run() -> None:
    mask = marks[q_pos] <= marks[kv_pos]
    assert ranges_of([5, 5, 6, 1, 2], mask) == [Span(0, 0, 3, 3)]
    assert ranges_of([5, 1, 6, 7, 2], mask) == [Span(0, 4, 4, 4)]  # 0, 2 and 3 are full


def test_a_range_that_sees_nothing_ends_where_it_begins() -> None:
    assert ranges_of([5, 5, 6, 1, 2], marks[kv_pos] < marks[0]) == [Span(3, 3, 5, 5)]
    assert ranges_of([1, 5, 6, 1, 2], marks[kv_pos] < marks[0]) == [Span(0, 0, 0, 0)]
    later = (marks[kv_pos] < marks[0]) & (kv_pos >= q_pos)
    assert ranges_of([1, 5, 6, 1, 2], later, tile=1) == [Span(1, 1, 1, 1)]


def test_full_parts_by_position_count_too() -> None:
    mask = masks.causal & ((q_pos - kv_pos < 100) & (abs(q_pos - kv_pos) < 100) | (marks[q_pos] == marks[kv_pos]))
    assert ranges_of([1, 2, 3], mask, tile=1) == [Span(0, 0, 1, 2)]


def test_tiles_are_visited_in_the_order_of_the_kernels() -> None:
    program = lookups(facts(MASKS["two_ranges"]).kv_tiles)
    spans = [Span(1, 2, 4, 5), Span(7, 7, 9, 12)]
    given = dict(zip(program.outputs, (end for span in spans for end in span)))
    assert visited(spans) == ([1, 4, 9, 10, 11], [2, 3, 7, 8])
    assert tile_ranges(program, {**given, "n_edge": 5, "n_full": 4}) == visited(spans)


# -- operands ---------------------------------------------------------------------------------------------------------
def test_a_table_is_made_once_when_it_is_first_read() -> None:
    made = []

    def tolist() -> list[list[int]]:
        made.append(1)
        return [[1, 2, 3], [4, 5, 6]]

    read = Table("ids", tolist)
    assert not made
    assert (read(1, 2), read(0, 0), read.run([1], range(1, 3))) == (6, 1, [5, 6])
    assert len(made) == 1


@pytest.mark.parametrize("index", [(2, 0), (-1, 0), (0, 3), (0, -2)])
def test_a_read_beyond_a_table_says_where(index: tuple[int, int]) -> None:
    read = Table("ids", [[1, 2, 3], [4, 5, 6]].copy)
    with pytest.raises(WeftError, match=r"ids: the mask reads index (-?\d), expected 0 to [12]"):
        read(*index)


def test_a_tensor_that_is_too_short_is_an_error() -> None:
    with pytest.raises(WeftError, match="ids: the mask reads index 9, expected 0 to 6"):
        table(facts(same), Case(same, 10, 10, 4, 4, 0, {"ids": np.zeros((1, 7), int)}), "kv")


def test_missing_operands_are_named() -> None:
    found = facts(MASKS["recent_documents"])
    with pytest.raises(WeftError, match="the tiles depend on ids, window: give values for them to measure tiles"):
        Measurement(found.survey, {}, q_len=8, kv_len=8)


def test_a_value_that_cannot_be_computed_is_an_error() -> None:
    mask = weft.floor(weights[kv_pos]) < marks[q_pos]
    values = {"weights": np.array([1.0, float("nan")]), "marks": np.array([1, 2])}
    with pytest.raises(WeftError, match=r"`floor\(weights\[kv_pos\]\)` in the mask cannot be computed"):
        table(facts(mask), Case(mask, 2, 2, 4, 4, 0, values), "kv")


def test_functions_serve_as_tables() -> None:
    found = facts(MASKS["causal_documents"])
    env = {"ids": lambda b, position: position // 16}
    counts = Measurement(found.survey, env, q_len=64, kv_len=64).count(found.kv_tiles, 8, 8)
    assert counts == TileCounts(empty=64 - 12, edge=8, full=4)


# -- what the cost model is told --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal_documents", Measuring(False, kv=MeasuredAxis(1, 1, 1, 1), q=MeasuredAxis(1, 1, 1, 1))),
        ("two_ranges", Measuring(False, kv=MeasuredAxis(2, 1, 2, 1), q=MeasuredAxis(1, 1, 1, 1))),
        ("three_ranges", Measuring(False, kv=MeasuredAxis(2, 1, 5, 1), q=MeasuredAxis(3, 1, 5, 1))),
        ("by_head", Measuring(True, kv=MeasuredAxis(1, 1, 1), q=MeasuredAxis(1, 0, 1))),
        ("indirect", Measuring(False, kv=MeasuredAxis(1, 1, 1), q=MeasuredAxis(1, 2, 1))),
    ],
)
def test_traits(name: str, expected: Measuring) -> None:
    assert facts(MASKS[name]).traits.measured == expected
    assert hash(facts(MASKS[name]).traits) is not None


def test_traits_of_masks_that_are_not_measured() -> None:
    for mask in (masks.causal, (q_pos * kv_pos) % 7 < 3, kv_pos < limits[batch], True):
        assert facts_of(weft.Attention(mask=mask, name="other")).traits.measured is None


# -- counts -----------------------------------------------------------------------------------------------------------
def documents(batches: int, length: int, size: int) -> Table:
    return Table("ids", (np.arange(length)[None] // size + np.arange(batches)[:, None]).tolist)


def test_counts_are_those_of_the_ranges() -> None:
    for name in ("causal_documents", "two_ranges", "padding"):
        found, case = facts(MASKS[name]), random_case(MASKS[name], random.Random(8), "sorted")
        for axis, program in (("kv", found.kv_tiles), ("q", found.q_tiles)):
            classified = table(found, case, axis)
            counts = measurement(found, case).count(program, case.block_q, case.block_kv)
            assert (counts.empty, counts.edge, counts.full) == tuple((classified == c).sum() for c in range(3))


def test_counts_of_the_whole_problem() -> None:
    found, shape = facts(MASKS["causal_documents"]), Shape(4, 2, 2, 512, 512, 64, 64)
    env = {"ids": documents(4, 512, 128)}
    count = counter(found.kv_tiles, found.q_tiles, shape, env=env, by_batch=True, survey=found.survey)
    assert count("kv", 64, 64) == count("q", 64, 64) == TileCounts(empty=8 * 52, edge=8 * 8, full=8 * 4)
    by_positions = counter(found.kv_tiles, found.q_tiles, shape, env=env, by_batch=True)
    assert by_positions("kv", 64, 64) == TileCounts(empty=8 * 28, edge=8 * 36, full=0)


def test_counts_stand_for_all_batch_rows_and_heads() -> None:
    """Batch row 0 is one document, row 1 sixteen; more heads see more keys."""
    found = facts(same & (ids[batch, kv_pos] <= 2 * head))
    rows = np.stack([np.zeros(512, int), np.arange(512) // 32])
    env, shape = {"ids": Table("ids", rows.tolist)}, Shape(2, 4, 4, 512, 512, 64, 64)
    whole = counter(found.kv_tiles, found.q_tiles, shape, env=env, by_head=True, by_batch=True, survey=found.survey)
    each = [
        Measurement(found.survey, {**env, "batch": b, "head": h}, q_len=512, kv_len=512).count(found.kv_tiles, 32, 32)
        for b in range(2)
        for h in range(4)
    ]
    assert whole("kv", 32, 32) == TileCounts(
        *(sum(getattr(c, part) for c in each) for part in ("empty", "edge", "full"))
    )
    assert len({c.visited for c in each}) > 3


@pytest.mark.parametrize(("heads", "batches"), [(32, 1), (1, 32), (16, 16)])
def test_some_batch_rows_and_heads_stand_for_many(heads: int, batches: int) -> None:
    """Documents of 8 to 8 * 16 positions, whatever row and head are taken."""
    found = facts(ids[head, q_pos] == ids[head, kv_pos] if batches == 1 else same & (ids[0, kv_pos] >= -head))
    sizes = 8 * (1 + np.arange(max(heads, batches)) % 16)
    env = {"ids": Table("ids", (np.arange(512)[None] // sizes[:, None]).tolist)}
    shape = Shape(batches, heads, heads, 512, 512, 64, 64)
    some = counter(found.kv_tiles, found.q_tiles, shape, env=env, by_head=True, by_batch=True, survey=found.survey)
    exact = np.mean(
        [
            Measurement(found.survey, {**env, "batch": n, "head": n}, q_len=512, kv_len=512)
            .count(found.kv_tiles, 8, 8)
            .visited
            for n in range(len(sizes))
        ]
    )
    assert some("kv", 8, 8).visited == pytest.approx(exact * heads * batches, rel=0.15)


def test_counts_of_a_long_sequence_are_bounded_and_close() -> None:
    found, length = facts(MASKS["causal_documents"]), 100_000
    draw = np.random.default_rng(0)
    env = {"ids": Table("ids", np.sort(draw.integers(0, 100, (1, length))).tolist)}
    measured = Measurement(found.survey, env, q_len=length, kv_len=length)
    exact = measured.count(found.kv_tiles, 64, 64, most=10**9)
    begun = time.perf_counter()
    counts = measured.count(found.kv_tiles, 64, 64)
    assert time.perf_counter() - begun < 1
    assert counts != exact
    assert counts.visited == pytest.approx(exact.visited, rel=0.1)
    assert counts.empty + counts.visited == exact.empty + exact.visited == 1563**2


def test_fewer_heads_are_measured_where_they_are_long() -> None:
    read: set[int] = set()
    found, length = facts(MASKS["causal_documents"]), MOST_POSITIONS // 4

    def ids_of(b: int, position: int) -> int:
        read.add(b)
        return position // 4096

    shape = Shape(64, 1, 1, length, length, 64, 64)
    count = counter(found.kv_tiles, found.q_tiles, shape, env={"ids": ids_of}, by_batch=True, survey=found.survey)
    counts = count("kv", 1024, 1024)
    assert len(read) == 2
    assert counts == TileCounts(64 * (256 * 256 - 256 * 5 // 2), 64 * 256, 64 * 64 * 6)


def test_positions_alone_are_an_upper_limit() -> None:
    for name in ("causal_documents", "two_ranges", "padding", "closed_full_parts"):
        found, draw = facts(MASKS[name]), random.Random(11)
        for _ in range(20):
            case = random_case(MASKS[name], draw, "unsorted")
            sizes = {"q_len": case.q_len, "kv_len": case.kv_len}
            blocks = {"block_q": case.block_q, "block_kv": case.block_kv}
            for program in (found.kv_tiles, found.q_tiles):
                by_position = count_tiles(program, q_offset=case.offset, env={**case.operands}, **sizes, **blocks)
                assert measurement(found, case).count(program, **blocks).visited <= by_position.visited
