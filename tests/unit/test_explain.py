"""What explain prints, how fast, and how pictures show tiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft.compiler.explain import bytes_text, count_text, explain
from weft.compiler.facts import facts_of
from weft.compiler.hardware import H200, KNOWN
from weft.compiler.picture import TileGrid, grid_of, mask_picture, mask_text
from weft.compiler.plan import counter, make_plan
from weft.compiler.schedule import choose
from weft.compiler.tiles import tile_ranges
from weft.compiler.types import Shape, TileCounts
from weft.ir.attention import Attention
from weft.ir.expr import scalar, symbol

Q_POS, KV_POS = symbol("q_pos"), symbol("kv_pos")
LOCAL = Attention(mask=(KV_POS <= Q_POS) & (Q_POS - KV_POS < scalar("window", int)), name="local")
SHAPE = Shape(2, 16, 4, 8192, 8192, 128, 128)


def text_of(hardware=H200, algorithm: str = "flash", **notes) -> str:
    facts = facts_of(LOCAL)
    count = counter(facts.kv_tiles, facts.q_tiles, SHAPE, env={"window": 1024})
    target = "cpu" if hardware.kind == "cpu" else "triton"
    schedule = choose(SHAPE, hardware, target, algorithm)
    plan = make_plan("local", SHAPE, hardware, schedule, traits=facts.traits, count=count, **notes)
    return explain(plan, LOCAL, facts.kv_bounds, facts.q_bounds)


def test_what_is_printed() -> None:
    text = text_of(notes=("hopper: needs bf16 or fp16 operands, got fp32",))
    for part in (
        "mask          (kv_pos <= q_pos) & (q_pos - kv_pos < window)",
        "problem       B 2  Hq 16  Hkv 4  L 8192  T 8192  D 128  Dv 128  bf16",
        "hardware      NVIDIA H200 SXM",
        "queries q_first..q_last see keys [q_first - window + 1, q_last + 1)",
        "keys kv_first..kv_last are seen by queries [kv_first, kv_last + window)",
        "empty/edge/full",
        "forward: 169MB through HBM, 145GFLOP, predicted",
        "HBM read     2*B*D*Hq*L + 2*B*Hkv*T*(D + Dv) = 100,663,296",
        "HBM -> SRAM, ahead  per key tile",
        "- hopper: needs bf16 or fp16 operands, got fp32",
    ):
        assert part in text, part
    bounds = {"matrix", "memory", "exp", "latency"}
    assert {line.split()[-1] for line in text.splitlines() if line.startswith("flash_") and "(" not in line} <= bounds


@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
@pytest.mark.parametrize("algorithm", ["standard", "streaming", "flash"])
def test_lines_fit_and_text_is_stable(hardware, algorithm) -> None:
    text = text_of(hardware, algorithm)
    assert text == text_of(hardware, algorithm)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text  # nothing is cut off


def test_a_mask_without_closed_form_says_so() -> None:
    table = Attention(mask=(Q_POS * KV_POS) % 7 < 3, name="odd")
    facts = facts_of(table)
    plan = make_plan("odd", SHAPE, H200, choose(SHAPE, H200, "triton"), traits=facts.traits)
    assert facts.kv_bounds.notes
    assert "no closed form: " in explain(plan, table, facts.kv_bounds, facts.q_bounds)


def test_a_plan_is_explained_in_under_a_second_beyond_starting_python() -> None:
    code = """
import time, sys
import weft.ir.attention, weft.compiler.facts
started = time.process_time()
sys.path.insert(0, sys.argv[1])
import test_explain
started = time.process_time()
import sympy
test_explain.text_of()
print(time.process_time() - started)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) < 1.0


def test_numbers() -> None:
    assert [count_text(v) for v in (0, 999, 1000, 12_345, 123_456, 2.5e12)] == [
        "0",
        "999",
        "1.00K",
        "12.3K",
        "123K",
        "2.50T",
    ]
    assert bytes_text(541_065_216) == "541MB"


# -- pictures --------------------------------------------------------------------------------------------------------
def grid(q_len: int, kv_len: int, window: int, block: int = 32) -> TileGrid:
    program, offset = facts_of(LOCAL).kv_tiles, kv_len - q_len
    env = {"q_len": q_len, "kv_len": kv_len, "q_offset": offset, "block": block, "length": kv_len, "window": window}

    def ranges(first: int, last: int) -> tuple[list[int], list[int]]:
        return tile_ranges(program, {**env, "q_first": first + offset, "q_last": last + offset})

    return grid_of(ranges, q_len, kv_len, block, block)


def test_the_grid_is_what_the_tile_program_visits() -> None:
    assert grid(128, 128, 64).classes == ((1, 0, 0, 0), (2, 1, 0, 0), (1, 2, 1, 0), (0, 1, 2, 1))
    assert grid(128, 128, 64).counts == TileCounts(empty=7, edge=6, full=3)


def test_text_picture() -> None:
    assert mask_text(grid(128, 128, 64), title="local").splitlines() == [
        "local",
        "┌────┐",
        "│▒   │",
        "│█▒  │",
        "│▒█▒ │",
        "│ ▒█▒│",
        "└────┘",
        "7 empty, 6 edge ▒, 3 full █; tile 32 queries x 32 keys",
    ]


def test_a_large_grid_is_thinned() -> None:
    lines = mask_text(grid(4096, 4096, 1000), width=40).splitlines()
    assert all(len(line) <= 42 for line in lines[:-1])
    assert lines[-1].endswith("4 x 4 tiles a character")
    assert lines[1][1] == "▒" and lines[1][2] == " "


def test_a_png_is_written(tmp_path: Path) -> None:
    import numpy

    dense = numpy.tri(128, 128, dtype=bool)
    path = mask_picture(grid(128, 128, 64), tmp_path / "new" / "mask.png", title="local", dense=dense)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5000
