"""Tile programs: what they say, that their ranges are well formed, and that counts agree with brute force."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import weft
from weft import head, kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.bounds import kv_bounds, q_bounds
from weft.compiler.analysis.tiles.programs import MOST_EXACT, count_tiles, tile_program, tile_ranges
from weft.compiler.analysis.tiles.results import Bounds, Interval, TileProgram
from weft.compiler.analysis.values.affine import const, make
from weft.ir.canonical import canonical
from weft.ir.expr import Expr, expression, symbol
from weft.ir.walk import symbols

from .tiling import Case, assert_exact, classes, evaluate

window, length, block = (weft.scalar(n, int) for n in ("window", "length", "block"))


def kv_program(mask: Expr) -> TileProgram:
    return tile_program(kv_bounds(canonical(mask)))


def q_program(mask: Expr) -> TileProgram:
    return tile_program(q_bounds(canonical(mask)))


def text(program: TileProgram) -> list[str]:
    lines = [f"{line.name} = {line.value}" for line in program.body]
    return [*lines, f"edge {program.edge_tile}", f"full {program.full_tile}"]


def test_causal_reads_as_a_person_would_write_it() -> None:
    assert text(kv_program(masks.causal)) == [
        "lo0 = 0",
        "hi0 = (maximum(minimum(q_last + 1, length), 0) + block - 1) // block",
        "full_lo0 = 0",
        "full_hi0 = maximum(minimum(q_first + 1, length), 0) // block",
        "n_full = full_hi0",
        "n_edge = hi0 - full_hi0",
        "edge full_hi0 + i",
        "full i",
    ]


def test_no_mask_has_an_edge_only_where_the_last_tile_is_incomplete() -> None:
    assert text(kv_program(expression(True))) == [
        "lo0 = 0",
        "hi0 = (length + block - 1) // block",
        "full_lo0 = 0",
        "full_hi0 = length // block",
        "n_full = full_hi0",
        "n_edge = hi0 - full_hi0",
        "edge full_hi0 + i",
        "full i",
    ]


def test_causal_over_query_rows_starts_at_the_tile_of_the_first_key() -> None:
    assert text(q_program(masks.causal)) == [
        "begin0 = maximum(kv_first - q_offset, 0)",
        "hi0 = (length + block - 1) // block",
        "lo0 = where(begin0 < length, begin0 // block, hi0)",
        "full_lo0 = minimum((maximum(kv_last - q_offset, 0) + block - 1) // block, hi0)",
        "full_hi0 = maximum(length // block, full_lo0)",
        "n_full = full_hi0 - full_lo0",
        "n_edge = full_lo0 + hi0 - full_hi0 - lo0",
        "edge i + lo0 + where(i < full_lo0 - lo0, 0, full_hi0 - full_lo0)",
        "full full_lo0 + i",
    ]


def test_a_mask_that_is_never_full_has_no_full_tiles() -> None:
    program = kv_program(masks.causal & ((q_pos + kv_pos) % 3 == 0))
    assert text(program)[-4:] == ["n_full = 0", "n_edge = hi0", "edge i", "full i"]


@pytest.mark.parametrize(
    "mask", [masks.causal, masks.global_window(4, window), masks.block_diffusion(20, 4), ~masks.sliding_window(window)]
)
def test_a_program_reads_only_what_it_may_and_defines_its_outputs(mask: Expr) -> None:
    for program, own in ((kv_program(mask), {"q_first", "q_last", "length", "block"}),
                         (q_program(mask), {"kv_first", "kv_last", "length", "block", "q_offset"})):  # fmt: skip
        known = set(own)
        for line in program.body:
            assert symbols(line.value) <= known, line
            assert line.name not in known, "a name is written once"
            known.add(line.name)
        assert {*program.outputs, "n_edge", "n_full"} <= known
        assert symbols(program.edge_tile) | symbols(program.full_tile) <= {*program.outputs, "i"}
        assert len(program.outputs) % 4 == 0
        assert program.outputs[:4] == ("lo0", "full_lo0", "full_hi0", "hi0")


def random_bounds(draw: random.Random, count: int) -> Bounds:
    """Intervals at any places, some empty, their full parts inside."""
    intervals = []
    for _ in range(count):
        lo, hi = draw.randint(-9, 60), draw.randint(-9, 80)
        full_lo = draw.randint(lo, max(lo, hi))
        full_hi = draw.randint(full_lo, max(full_lo, hi)) if draw.random() < 0.8 else full_lo
        # As a kernel sees them: numbers that only run time knows.
        intervals.append(Interval(*(make("add", symbol("q_first"), const(n)) for n in (lo, hi, full_lo, full_hi))))
    return Bounds("kv", tuple(intervals), ())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_intervals_become_sorted_disjoint_tiles(count: int) -> None:
    draw = random.Random(count)
    for _ in range(150):
        bounds = random_bounds(draw, count)
        limit, tile = draw.randint(1, 70), draw.choice([1, 4, 16])
        program = tile_program(bounds)
        given = {"q_first": 0, "q_last": 0}
        edge, full = tile_ranges(program, given, block=tile, length=limit)
        seen, sure = np.zeros(limit, bool), np.zeros(limit, bool)
        for interval in bounds.intervals:
            lo, hi, full_lo, full_hi = (int(i.args[1].value) for i in interval_ends(interval))
            seen[max(lo, 0) : max(hi, 0)] = True
            if full_lo < full_hi:
                sure[max(full_lo, 0) : max(full_hi, 0)] = True
        assert len({*edge, *full}) == len(edge) + len(full)
        tiles = [slice(t * tile, (t + 1) * tile) for t in range(-(-limit // tile))]
        expected_full = [t for t, s in enumerate(tiles) if sure[s].all() and s.stop <= limit]
        visited = [t for t, s in enumerate(tiles) if seen[s].any()]
        assert set(full) <= set(expected_full)
        assert set(visited) <= {*edge, *full}
        if count <= 2:  # exact; with more, a full part may be visited as an edge where intervals overlap in odd ways
            assert sorted(full) == expected_full
            assert sorted([*edge, *full]) == visited


def interval_ends(interval: Interval) -> tuple[Expr, ...]:
    return interval.lo, interval.hi, interval.full_lo, interval.full_hi


@pytest.mark.parametrize("mask", [masks.causal, masks.global_window(4, 30), masks.block_diffusion(40, 4)])
def test_outputs_are_in_order_interval_by_interval(mask: Expr) -> None:
    program = kv_program(mask)
    for q_first in range(-32, 96, 16):
        env: dict[str, object] = {"q_first": q_first, "q_last": q_first + 15, "block": 8, "length": 80}
        for line in program.body:
            env[line.name] = int(evaluate(line.value, env))
        ends = [env[name] for name in program.outputs]
        assert ends == sorted(ends)  # type: ignore[type-var]
        assert ends[0] >= 0  # type: ignore[operator]
        assert ends[-1] <= 10  # type: ignore[operator]


def test_operands_may_have_the_names_of_the_program() -> None:
    mask = (kv_pos // block <= q_pos // block) & (q_pos - kv_pos < length)
    operands = {"block": 12, "length": 30}
    assert_exact(Case(mask, 70, 70, 16, 16, operands=operands))
    counts = count_tiles(kv_program(mask), q_len=64, kv_len=64, block_q=16, block_kv=16, env=operands)
    table = classes(Case(mask, 64, 64, 16, 16, operands=operands))
    assert (counts.empty, counts.edge, counts.full) == tuple((table == n).sum() for n in range(3))


@pytest.mark.parametrize(
    "mask", [masks.causal, masks.sliding_window(40), masks.prefix_lm(70), masks.global_window(5, 40)]
)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "offset"), [(256, 256, None), (100, 300, None), (300, 100, 0), (1, 500, None)]
)
def test_counts_agree_with_brute_force(mask: Expr, q_len: int, kv_len: int, offset: int | None) -> None:
    table = classes(Case(mask, q_len, kv_len, 32, 16, offset))
    for program in (kv_program(mask), q_program(mask)):
        counts = count_tiles(program, q_len=q_len, kv_len=kv_len, block_q=32, block_kv=16, q_offset=offset)
        assert counts.empty == (table == 0).sum()
        assert counts.visited == (table > 0).sum()


def test_counts_of_a_long_sequence_are_fast_and_close() -> None:
    program = kv_program(masks.global_window(16, window))
    sizes = {"block_q": 128, "block_kv": 128, "env": {"window": 4096}}
    begun = time.perf_counter()
    exact = count_tiles(program, q_len=100_000, kv_len=100_000, **sizes)
    assert time.perf_counter() - begun < 0.2
    assert exact.visited == 26027

    tiles = 3 * MOST_EXACT
    sampled = count_tiles(kv_program(masks.causal), q_len=tiles * 128, kv_len=tiles * 128, block_q=128, block_kv=128)
    assert sampled.edge == tiles
    assert sampled.full == pytest.approx(tiles * (tiles - 1) / 2, rel=1e-3)


def test_counts_say_which_values_they_need() -> None:
    windows = weft.tensor("windows", 1, int)
    mask = masks.causal & (q_pos - kv_pos < windows[head] + window)
    with pytest.raises(weft.WeftError, match="the tiles depend on window, windows: give values"):
        count_tiles(kv_program(mask), q_len=64, kv_len=64, block_q=16, block_kv=16)
    env = {"window": 3, "windows": lambda head: 5 + head}
    counts = count_tiles(kv_program(mask), q_len=64, kv_len=64, block_q=16, block_kv=16, env=env)
    assert counts.visited == 7
