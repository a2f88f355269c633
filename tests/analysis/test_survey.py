"""What a survey of tiles decides, against brute force: known masks as text, random masks over random reads."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

import weft
from weft import batch, head, kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.survey import Survey, cell_size, survey
from weft.compiler.analysis.values.affine import name
from weft.ir.canonical import canonical
from weft.ir.expr import Expr, call, expression
from weft.ir.walk import substitute, symbols

from ..support import mostly
from .test_bounds import number
from .tiling import Case, classes, evaluate

causal = masks.causal
window = weft.scalar("window", int)
rate = weft.scalar("rate", float)
ids, marks, limits = weft.tensor("ids", 2, int), weft.tensor("marks", 1, int), weft.tensor("limits", 1, int)
valid, allowed = weft.tensor("valid", 1, bool), weft.tensor("allowed", 2, bool)
weights = weft.tensor("weights", 1)
blocks = weft.tensor("blocks", 3, bool)
document = ids[batch, q_pos] == ids[batch, kv_pos]


def found(mask: Expr) -> Survey | None:
    return survey(canonical(expression(mask)))


def text(mask: Expr) -> list[str]:
    """q values, kv values, possible, certain."""
    result = found(mask)
    assert result is not None
    values = (", ".join(map(str, v)) for v in (result.q_values, result.kv_values))
    return [*values, str(result.possible), str(result.certain)]


# -- known masks ------------------------------------------------------------------------------------------------------
MEET, SAME = "(kv0_low <= q0_high) & (q0_low <= kv0_high)", "(kv0_high <= q0_low) & (q0_high <= kv0_low)"


def test_causal_documents() -> None:
    assert text(causal & document) == [
        "ids[batch, q_pos], q_pos",
        "ids[batch, kv_pos], kv_pos",
        f"{MEET} & (kv1_low <= q1_high)",
        f"{SAME} & (kv1_high <= q1_low)",
    ]


@pytest.mark.parametrize(
    ("mask", "possible", "certain"),
    [
        (marks[q_pos] != marks[kv_pos], "(kv0_low < q0_high) | (q0_low < kv0_high)",
         "(kv0_high < q0_low) | (q0_high < kv0_low)"),
        (~(marks[q_pos] == marks[kv_pos]), "(kv0_low < q0_high) | (q0_low < kv0_high)",
         "(kv0_high < q0_low) | (q0_high < kv0_low)"),
        (marks[q_pos] > marks[kv_pos], "kv0_low < q0_high", "kv0_high < q0_low"),
        (~(kv_pos <= q_pos), "q0_low < kv0_high", "q0_high < kv0_low"),
        (valid[kv_pos], "0 < kv0_high", "0 < kv0_low"),
        (~valid[q_pos] | valid[kv_pos], "(0 < kv0_high) | (0 < q0_high)", "(0 < kv0_low) | (0 < q0_low)"),
        (valid[q_pos] ^ valid[kv_pos], "(0 < kv0_high) & (q0_low <= 0) | (0 < q0_high) & (kv0_low <= 0)",
         "((0 < kv0_low) | (0 < q0_low)) & ((kv0_high <= 0) | (q0_high <= 0))"),
        (q_pos - kv_pos < window, "q0_low - kv0_high < window", "q0_high - kv0_low < window"),
        (weft.minimum(marks[q_pos], marks[kv_pos]) <= limits[batch], "minimum(kv0_low, q0_low) <= limits[batch]",
         "minimum(kv0_high, q0_high) <= limits[batch]"),
    ],
)  # fmt: skip
def test_each_rule(mask: Expr, possible: str, certain: str) -> None:
    assert text(mask)[2:] == [possible, certain]


def test_the_largest_parts_of_one_side_are_measured_once() -> None:
    mask = (marks[marks[q_pos] + 1] % 4 < kv_pos) & ((marks[q_pos] < 5) | (marks[marks[q_pos] + 1] % 4 < 2 * kv_pos))
    assert text(mask)[:2] == ["marks[1 + marks[q_pos]] % 4, marks[q_pos] < 5", "2 * kv_pos, kv_pos"]


@pytest.mark.parametrize(
    ("mask", "equal"),
    [
        (causal & document, ((0, 0),)),
        (document & (marks[kv_pos] + 1 == marks[q_pos]), ((0, 1), (1, 0))),
        (document | causal, ()),
        (marks[q_pos] == kv_pos, ()),
        (marks[q_pos] <= marks[kv_pos], ()),
        (valid[q_pos] == valid[kv_pos], ()),
    ],
)
def test_what_must_be_equal(mask: Expr, equal: tuple[tuple[int, int], ...]) -> None:
    result = found(mask)
    assert result is not None and result.equal == equal


def test_what_reads_no_position_stands_for_itself() -> None:
    assert text(causal & valid[head])[2:] == [
        "(kv0_low <= q0_high) & valid[head]",
        "(kv0_high <= q0_low) & valid[head]",
    ]
    assert text(valid[kv_pos] & valid[head])[:2] == ["", "valid[head] & valid[kv_pos]"]  # of one side as a whole
    assert text(head < window) == ["", "", "head < window", "head < window"]


@pytest.mark.parametrize(
    "unknown",
    [
        weights[q_pos] < weights[kv_pos],
        ~(weights[q_pos] < weights[kv_pos]),  # a NaN is neither below nor not below
        weights[q_pos] + 1.0 <= kv_pos,
        marks[q_pos] - marks[kv_pos] < 5,  # may leave 64 bits
        marks[q_pos] + kv_pos < 5,
        -weft.minimum(marks[q_pos], kv_pos) < 5,
        weft.floor(rate * q_pos) - kv_pos < 5,  # may leave 32 bits
        (q_pos - kv_pos) % 3 == 0,
        abs(q_pos - kv_pos) < 5,
        q_pos * kv_pos < 5,
    ],
)
def test_what_is_not_known_decides_nothing(unknown: Expr) -> None:
    assert found(unknown) is None
    assert found(unknown | valid[kv_pos]) is None
    assert found(weft.where(unknown, causal, True)) is None
    assert text(unknown & valid[kv_pos]) == ["", "valid[kv_pos]", "0 < kv0_high", "False"]
    assert found(unknown ^ valid[kv_pos]) is None
    assert found(call("eq", unknown, valid[kv_pos])) is None
    assert text(weft.where(unknown, causal, valid[kv_pos]))[2:] == [
        "(0 < kv1_high) | (kv0_low <= q0_high)",
        "(0 < kv1_low) & (kv0_high <= q0_low)",
    ]


BLOCKS = blocks[head, q_pos // 128, kv_pos // 64]


@pytest.mark.parametrize(
    ("condition", "sizes"),
    [
        (BLOCKS, (128, 64)),
        (blocks[head, q_pos // 16 // 2, kv_pos // 4 // 3 + q_pos // 48], (16, 12)),
        (marks[weft.minimum(q_pos // 64, kv_pos // 32)] - marks[kv_pos // 48] > 2, (64, 16)),
        (allowed[q_pos, kv_pos // 64], (1, 64)),
        (abs(q_pos // 64 - kv_pos // 64) <= marks[q_pos // 64 - kv_pos // 64], (64, 64)),
    ],
)
def test_blocks_of_pairs_are_looked_at_once(condition: Expr, sizes: tuple[int, int]) -> None:
    result = found(condition)
    assert result is not None and not result.by_pair and result.joins_reads
    (cells,) = result.cells
    assert (cells.q, cells.kv) == sizes and cells.condition.text == canonical(expression(condition)).text
    assert text(condition)[2:] == ["cells0_any", "cells0_all"]


def test_blocks_join_what_else_there_is() -> None:
    assert text(causal & BLOCKS & document)[2:] == [
        f"{MEET} & (cells0_any & (kv1_low <= q1_high))", f"{SAME} & (cells0_all & (kv1_high <= q1_low))",
    ]  # fmt: skip
    assert text(~BLOCKS)[2:] == ["~cells0_all", "~cells0_any"]
    near = abs(q_pos // 64 - kv_pos // 64) <= 1  # unknown by itself, and looked at beside a read of both positions
    assert found(near & valid[kv_pos]) is not None and not found(near & valid[kv_pos]).cells  # type: ignore[union-attr]
    assert len(found(near | BLOCKS).cells) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("read", [allowed[q_pos, kv_pos], marks[q_pos - kv_pos] < 5, allowed[q_pos // 8, kv_pos // 4]])
def test_what_differs_from_pair_to_pair_is_left_to_who_looks_at_pairs(read: Expr) -> None:
    for mask in (read, ~read, read ^ causal):
        result = found(mask)
        assert result is not None and result.by_pair and not result.cells and not result.decides
    assert text(read | causal)[2:] == ["True", "kv0_high <= q0_low"]
    result = found(read & causal)
    assert result is not None and result.by_pair and str(result.possible) == "kv0_low <= q0_high"


@pytest.mark.parametrize(
    ("node", "size"),
    [
        (q_pos // 32, 32), (q_pos // 4 // 3, 12), (q_pos // 32 + q_pos // 48, 16), (q_pos, 1), (2 * q_pos // 64, 1),
        ((q_pos + 3) // 64, 1), ((q_pos // 4 + 1) // 8, 4), (kv_pos // 8, 0), (q_pos % 64 // 8, 1), (q_pos // head, 1),
        ((q_pos // 16) % 4, 16), (weft.floor(1.0 * (q_pos // 16)) * 3, 16), (-(q_pos // 16), 16),
    ],
)  # fmt: skip
def test_sizes_of_blocks(node: Expr, size: int) -> None:
    assert cell_size(node, "q_pos") == size
    values = np.array([evaluate(node, {"q_pos": q, "kv_pos": 7, "head": 3}) for q in range(-100, 300)])
    if size > 1:
        assert all(
            len(set(values[start : start + size].tolist())) == 1 for start in range(100 % size, 400 - size, size)
        )


def test_floats_of_one_side_are_measured_as_the_condition_they_make() -> None:
    assert text((weights[q_pos] > 0.5) & (weights[kv_pos] == weights[head]))[:2] == [
        "0.5 < weights[q_pos]",
        "weights[head] == weights[kv_pos]",
    ]


def test_a_negation_stays_outside_a_comparison_of_floats() -> None:
    assert text(~((weights[head] < 0.5) | causal))[2] == "(q0_low < kv0_high) & ~(weights[head] < 0.5)"


def test_an_operand_may_have_the_name_of_an_end() -> None:
    namesake = weft.scalar("q0_high", int)
    mask = (kv_pos <= weft.where(allowed[q_pos, kv_pos], namesake, q_pos)) & (q_pos <= namesake)
    assert text(mask)[1:3] == ["kv_pos", "(0 < q1_high) & (kv0_low <= maximum(q0_high, q0_high))"]


def test_a_mask_without_pairs_to_leave_out_has_no_survey() -> None:
    assert found(expression(True)) is None
    nothing = found(expression(False))
    assert nothing is not None and str(nothing.possible) == "False" and not nothing.q_values


def test_nested_alternatives_stay_small() -> None:
    mask = document
    for n in range(24):
        mask = mask ^ (marks[q_pos] < marks[kv_pos + n])
    assert found(mask) is None
    assert text(mask & valid[kv_pos])[2:] == ["0 < kv0_high", "False"]


# -- brute force ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Decided:
    """A case, what its survey says of each pair of tiles, and what is true."""

    case: Case
    possible: np.ndarray
    certain: np.ndarray
    truth: np.ndarray  # 0 empty, 1 edge, 2 full


def ends(values: tuple[Expr, ...], axis: str, case: Case) -> dict[str, object]:
    """Least and greatest value of each over the tiles of an axis, [tiles, 1] for q and [1, tiles] for kv."""
    length, block, first = (case.q_len, case.block_q, case.offset) if axis == "q" else (case.kv_len, case.block_kv, 0)
    starts, made = np.arange(0, length, block), {}
    for n, value in enumerate(values):
        env = {**case.env, f"{axis}_pos": first + np.arange(length)}
        rows = np.broadcast_to(evaluate(value, env), (length,)).astype(np.int64)
        for end, reduce in (("low", np.minimum), ("high", np.maximum)):
            made[f"{axis}{n}_{end}"] = reduce.reduceat(rows, starts).reshape((-1, 1) if axis == "q" else (1, -1))
    return made


def of_blocks(length: int, block: int, first: int, size: int) -> list[list[int]]:
    """Of each tile a position of every block of `size` positions that it reaches into."""
    tiles = [range(first + start, first + min(start + block, length)) for start in range(0, length, block)]
    return [sorted({max(p - p % size, tile[0]) for p in tile}) for tile in tiles]


def cells(result: Survey, case: Case) -> dict[str, object]:
    """What conditions on blocks of pairs say of each pair of tiles, by one pair of each block."""
    made: dict[str, object] = {}
    for n, each in enumerate(result.cells):
        rows = of_blocks(case.q_len, case.block_q, case.offset, each.q)
        columns = of_blocks(case.kv_len, case.block_kv, 0, each.kv)
        looked = [
            [
                evaluate(each.condition, {**case.env, "q_pos": np.array(q)[:, None], "kv_pos": np.array(kv)[None]})
                for kv in columns
            ]
            for q in rows
        ]
        made[f"cells{n}_any"] = np.array([[bool(np.any(found)) for found in row] for row in looked])
        made[f"cells{n}_all"] = np.array([[bool(np.all(found)) for found in row] for row in looked])
    return made


def decided(case: Case, result: Survey) -> Decided:
    with np.errstate(all="ignore"):  # random masks overflow and compute with NaN on purpose
        truth = classes(case)
        env = {**case.env, **ends(result.q_values, "q", case), **ends(result.kv_values, "kv", case)}
        env |= cells(result, case)
        possible, certain = (np.broadcast_to(evaluate(e, env), truth.shape) for e in (result.possible, result.certain))
    return Decided(case, possible, certain, truth)


def assert_sound(d: Decided, label: object) -> None:
    """Nothing visible is called impossible and nothing hidden certain."""
    assert not (~d.possible & (d.truth > 0)).any(), f"{label}: a visible tile is called empty: {d.case}"
    assert not (d.certain & (d.truth < 2)).any(), f"{label}: a tile with hidden pairs is called full: {d.case}"


# -- documents --------------------------------------------------------------------------------------------------------
def documents(draw: random.Random, length: int, kind: str) -> np.ndarray:
    """Ids of two batch rows: sorted, sorted but for a few, or none of both."""
    lowest = draw.choice([0, -7, -(2**63), 2**63 - 60, 2**40])
    rows = np.array([sorted(draw.randrange(50) for _ in range(length)) for _ in range(2)])
    if kind == "shuffled":
        rows = np.array([draw.sample(row.tolist(), length) for row in rows])
    if kind == "padded":
        rows[:, -draw.randrange(1, length) :] = 0
    return rows.astype(np.int64) + np.int64(lowest)


def document_case(mask: Expr, draw: random.Random, kind: str) -> Case:
    length, blocks = draw.randint(2, 120), (draw.choice([4, 8, 16, 11]), draw.choice([4, 8, 16, 11]))
    rows = documents(draw, length, kind)
    values = {"ids": rows, "valid": rows[0] > rows[0][draw.randrange(length)], "batch": draw.randrange(2)}
    return Case(mask, length, length, *blocks, 0, values)


@pytest.mark.parametrize("mask", [document, causal & document, document & (kv_pos - q_pos < 20)])
def test_tiles_of_sorted_documents_are_exact(mask: Expr) -> None:
    result = found(mask)
    assert result is not None
    draw, counts = random.Random(1), Counter[str]()
    for n in range(150):
        d = decided(document_case(mask, draw, "sorted"), result)
        assert_sound(d, n)
        assert np.array_equal(d.possible, d.truth > 0), f"{n}: not exact: {d.case}\n{d.possible}\n{d.truth}"
        assert np.array_equal(d.certain, d.truth == 2), f"{n}: not exact: {d.case}\n{d.certain}\n{d.truth}"
        counts.update(empty=int((d.truth == 0).sum()), full=int((d.truth == 2).sum()))
    assert counts["empty"] > 5000, counts
    assert counts["full"] > 0, counts


@pytest.mark.parametrize(("kind", "share"), [("padded", 0.7), ("shuffled", 0.1)])
def test_empty_tiles_of_other_documents_are_found_where_ranges_tell(kind: str, share: float) -> None:
    mask = causal & document & valid[kv_pos]
    result = found(mask)
    assert result is not None
    draw, counts = random.Random(2), Counter[str]()
    for n in range(150):
        d = decided(document_case(mask, draw, kind), result)
        assert_sound(d, n)
        counts.update(empty=int((d.truth == 0).sum()), found=int((~d.possible).sum()))
    assert counts["found"] > share * counts["empty"] > 1000, counts


def swapped(result: Survey, axis: str) -> Survey:
    """A wrong survey: least and greatest values of one side exchanged."""
    names = symbols(result.possible) | symbols(result.certain)
    sides = {n: n.replace("low", "HIGH").replace("high", "low").lower() for n in names if n.startswith(axis)}
    wrong = {n: name(other) for n, other in sides.items()}
    return replace(result, possible=substitute(result.possible, wrong), certain=substitute(result.certain, wrong))


@pytest.mark.parametrize("axis", ["q", "kv"])
@pytest.mark.parametrize("mask", [document, causal, valid[q_pos] ^ valid[kv_pos], marks[q_pos] != marks[kv_pos]])
def test_brute_force_notices_ends_that_are_exchanged(mask: Expr, axis: str) -> None:
    result, draw = found(mask), random.Random(3)
    assert result is not None
    with pytest.raises(AssertionError, match="is called"):
        for n in range(50):
            case = document_case(mask, draw, "sorted")
            values = {**case.operands, "marks": np.asarray(case.operands["ids"])[0]}
            assert_sound(decided(replace(case, operands=values), swapped(result, axis)), n)


# -- random masks -----------------------------------------------------------------------------------------------------
SMALLEST, LARGEST = -(2**63), 2**63 - 1
EXTREMES = [SMALLEST, SMALLEST + 1, -(2**31), -1, 0, 1, 2**31 - 1, 2**31, LARGEST - 1, LARGEST]


def place(draw: random.Random) -> Expr:
    return draw.choice([q_pos, kv_pos, q_pos, kv_pos, q_pos // 3, kv_pos + 1, head, marks[q_pos], q_pos - kv_pos])


def whole(draw: random.Random, depth: int) -> Expr:
    """An int: reads, positions, and arithmetic on both."""
    if depth == 0 or draw.random() < 0.4:
        return draw.choice([
            lambda: ids[batch, place(draw)], lambda: marks[place(draw)], lambda: number(draw, 1),
            lambda: limits[batch], lambda: expression(draw.randint(-3, 9)), lambda: weft.floor(weights[place(draw)]),
            lambda: weft.floor(rate * place(draw)),
        ])()  # fmt: skip
    a, b = whole(draw, depth - 1), whole(draw, depth - 1)
    return draw.choice([
        lambda: a + b, lambda: a - b, lambda: -a, lambda: weft.minimum(a, b), lambda: weft.maximum(a, b),
        lambda: number(draw, 2), lambda: number(draw, 1) - number(draw, 1), lambda: abs(a), lambda: a % 5,
        lambda: weft.where(condition(draw, depth - 1), a, b),
    ])()  # fmt: skip


def condition(draw: random.Random, depth: int) -> Expr:
    if depth == 0 or draw.random() < 0.3:
        compared = draw.choice(["lt", "le", "gt", "ge", "eq", "ne"])
        return draw.choice([
            lambda: call(compared, whole(draw, 2), whole(draw, 1)),
            lambda: call(compared, whole(draw, 0), whole(draw, 0)),
            lambda: call(compared, ids[batch, q_pos], ids[batch, kv_pos]), lambda: causal,
            lambda: valid[place(draw)], lambda: allowed[place(draw), place(draw)],
            lambda: allowed[q_pos // draw.choice([8, 12]), kv_pos // draw.choice([8, 16])],
            lambda: call(compared, weights[place(draw)], draw.choice([0.5, rate, weights[kv_pos], whole(draw, 0)])),
        ])()  # fmt: skip
    a, b = condition(draw, depth - 1), condition(draw, depth - 1)
    return draw.choice([
        lambda: a & b, lambda: a & b, lambda: a | b, lambda: ~a, lambda: a ^ b, lambda: call("eq", a, b),
        lambda: call("ne", a, b), lambda: weft.where(condition(draw, depth - 1), a, b),
    ])()  # fmt: skip


def read(draw: random.Random, length: int) -> np.ndarray:
    """Ints as a tensor may hold them: sorted, in blocks, in any order, up to the ends of 64 bits."""
    plain = [draw.randint(-4, 9) for _ in range(length)]
    kinds = [sorted(plain), plain, [n // 8 for n in range(length)], draw.choices(EXTREMES, k=length)]
    kinds.append(sorted(kinds[3]))
    return np.array(draw.choice(kinds), dtype=np.int64)


def random_case(mask: Expr, draw: random.Random) -> Case:
    q_len, kv_len = draw.randint(1, 48), draw.randint(1, 48)
    length = max(q_len, kv_len)
    flags = [np.array([draw.random() < p for _ in range(length)]) for p in (0.5, draw.choice([0.05, 0.95]))]
    floats = [draw.choice([0.0, 0.5, -3.5, float("nan"), float("inf"), 1e30]) for _ in range(length)]
    values: dict[str, object] = {
        "ids": np.stack([read(draw, length) for _ in range(2)]), "marks": read(draw, length), "limits": read(draw, 3),
        "valid": np.sort(draw.choice(flags)) if draw.random() < 0.5 else draw.choice(flags),
        "allowed": np.outer(flags[0], flags[1]), "weights": np.array(sorted(floats) if draw.random() < 0.5 else floats),
        "rate": draw.choice([0.5, -2.0, 1e30, float("nan"), float("inf")]), "batch": draw.randint(0, 1),
        "head": draw.randint(0, 2), "group": draw.randint(1, 3), "document": read(draw, 13),
        "windows": read(draw, 3), "flags": flags[0], "slopes": np.array(floats), "window": draw.randint(-9, 60),
        "prefix": draw.randint(-3, 70), "size": draw.randint(-3, 20), "stride": draw.randint(-2, 9),
    }  # fmt: skip
    blocks = draw.choice([1, 4, 8, 11]), draw.choice([1, 4, 8, 11])
    return Case(mask, q_len, kv_len, *blocks, draw.choice([None, 0, draw.randint(-9, 30)]), values)


@pytest.mark.parametrize("first", mostly([0], [0, 1500, 3000, 4500]))
def test_random_masks_over_random_reads_are_sound(first: int) -> None:
    counts = Counter[str]()
    for seed in range(first, first + 1500):
        draw = random.Random(seed)
        mask = condition(draw, draw.choice([0, 1, 2, 2, 3]))
        result = found(mask)
        counts["masks"] += 1
        for _ in range(2 if result else 0):
            d = decided(random_case(mask, draw), result)
            assert_sound(d, seed)
            counts.update(
                cases=1, tiles=d.truth.size, empty=int((d.truth == 0).sum()), full=int((d.truth == 2).sum()),
                impossible=int((~d.possible).sum()), certain=int(d.certain.sum()),
            )  # fmt: skip
    print(f"\nrandom masks and pairs of tiles: {dict(counts)}")
    assert counts["cases"] > 2000 and counts["tiles"] > 125_000, counts
    assert counts["impossible"] > counts["empty"] / 3 and counts["certain"] > counts["full"] / 4, counts
