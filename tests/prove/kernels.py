"""Arithmetic of kernels on numbers of tiles and rows, which is in 32 bits, outside tile programs.

Each step is a piece of a template, which must be there, and what it reaches. A tile that exists begins at `start`, a
multiple of its size before the length; a tile number times the size of tiles is the first row, whichever the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import z3

from .questions import FARTHEST, LONGEST, Question
from .terms import INT32, Terms

TEMPLATES = Path(__file__).parents[2] / "templates"
LARGEST_TILE = 512  # rows: forms of GPU kernels have 192 at most
TOGETHER = 4096  # rows that tile_spans looks at together, at most
start, block, length, offset = z3.Ints("start block length offset")
row = z3.Int("row")  # of a tile


@dataclass(frozen=True)
class Step:
    template: str
    text: str  # of the template
    reaches: tuple[z3.ArithRef, ...]  # the values of its ints


ROWS, SURVEY, SEEN = "triton/parts/rows.py.jinja", "triton/parts/survey.py.jinja", "hopper/parts/tiles_seen.py.jinja"
SPANS, LISTS = "triton/tile_spans.py.jinja", "triton/tile_lists.py.jinja"
STEPS = (
    Step(ROWS, "n_q_tiles = tl.cdiv({{ q_rows_of }}, BLOCK_Q)", (length + block - 1,)),
    Step(ROWS, "n_kv_tiles = tl.cdiv(kv_len, BLOCK_KV)", (length + block - 1,)),
    Step(ROWS, "q_first = q_tile * BLOCK_Q", (start,)),
    Step(ROWS, "kv_first = kv_tile * BLOCK_KV", (start,)),
    Step(ROWS, "q_rows = q_first + tl.arange(0, BLOCK_Q)", (start + row,)),
    Step(ROWS, "kv_rows = kv_first + tl.arange(0, BLOCK_KV)", (start + row,)),
    Step(ROWS, "q_last = tl.minimum(q_first + BLOCK_Q, q_len) - 1", (start + block,)),
    Step(ROWS, "kv_last = tl.minimum(kv_first + BLOCK_KV, kv_len) - 1", (start + block,)),
    Step(ROWS, "q_pos = (q_offset + tl.minimum(q_rows, q_len - 1))[:, None]", (offset + length - 1, offset)),
    Step(ROWS, "q_offset + q_first, q_offset + q_last, {{ env }}, BLOCK_KV", (offset + start, offset + length - 1)),
    Step(SURVEY, "tiles = tile + tl.arange(0, TILES)", (start + TOGETHER,)),
    Step(SURVEY, "tl.minimum((tiles + 1) * BLOCK_{{ AXIS }}, {{ axis }}_len) - 1", (start + TOGETHER + block,)),
    Step(SPANS, "((tiles + 1) * BLOCK_{{ AXIS }} <= {{ axis }}_len)", (start + TOGETHER + block,)),
    Step(LISTS, "((tiles + 1) * BLOCK_{{ AXIS }} <= {{ axis }}_len)", (start + TOGETHER + block,)),
    Step(SEEN, "last_row = gl.minimum(row + rows, {{ owner }}_len) - 1", (start + block,)),
    Step(SEEN, "return kv_tiles(q_offset + row, q_offset + last_row,", (offset + start, offset + length - 1)),
)


def missing() -> Iterator[str]:
    """Steps whose text is not in their template any more."""
    for step in STEPS:
        if step.text not in (TEMPLATES / step.template).read_text(encoding="utf-8"):
            yield f"{step.template} does not hold `{step.text}`"


def kernel_question(longest: int = LONGEST) -> Question:
    """Whether some step leaves 32 bits, for lengths up to `longest`."""
    given = (
        start >= 0, start < length, length <= longest, offset >= -FARTHEST, offset <= FARTHEST,
        block >= 1, block <= LARGEST_TILE, row >= 0, row < block,
    )  # fmt: skip
    wrong = [
        (f"{step.template}: {step.text}", z3.Or([z3.Or(value < -INT32, value >= INT32) for value in step.reaches]))
        for step in STEPS
    ]
    return Question("overflow", "", tuple(wrong), given, (), Terms())
