"""Arithmetic of kernels on numbers of tiles and rows, which is in 32 bits, outside tile programs; and their stretches.

Each step is a piece of a template, which must be there, and what it reaches. A tile that exists begins at `start`, a
multiple of its size before the length; a tile number times the size of tiles is the first row, whichever the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import z3

from weft.codegen.targets.triton.kernels.measures import STRETCH

from .questions import FARTHEST, LONGEST, Question
from .terms import INT32, Terms

TEMPLATES = Path(__file__).parents[2] / "templates"
LARGEST_TILE = 512  # rows: forms of GPU kernels have 192 at most
NEIGHBOURS = 3  # tiles that are listed for as one, at most
TOGETHER = 4096  # rows that tile_spans looks at together, at most
start, block, length, offset = z3.Ints("start block length offset")
row = z3.Int("row")  # of a tile
stretches = start + STRETCH * (STRETCH + 1) * block  # behind the last of the stretches that are looked at together


@dataclass(frozen=True)
class Step:
    template: str
    text: str  # of the template
    reaches: tuple[z3.ArithRef, ...]  # the values of its ints


ROWS, SURVEY, SEEN = "triton/parts/rows.py.jinja", "triton/parts/survey.py.jinja", "hopper/parts/tiles_seen.py.jinja"
DENSE = "triton/sources/dense.py.jinja"
SPANS, LISTS = "triton/tile_spans.py.jinja", "triton/tile_lists.py.jinja"
STEPS = (
    Step(DENSE, "n_q_tiles = tl.cdiv({{ rows }}, BLOCK_Q)", (length + block - 1,)),
    Step(ROWS, "n_kv_tiles = tl.cdiv(kv_len, BLOCK_KV)", (length + block - 1,)),
    Step(ROWS, "q_first = q_tile * BLOCK_Q", (start,)),
    Step(ROWS, "kv_first = kv_tile * BLOCK_KV", (start,)),
    Step(ROWS, "q_rows = q_first + tl.arange(0, BLOCK_Q)", (start + row,)),
    Step(ROWS, "kv_rows = kv_first + tl.arange(0, BLOCK_KV)", (start + row,)),
    Step(ROWS, "q_last = tl.minimum(q_first + BLOCK_Q, q_len) - 1", (start + block,)),
    Step(ROWS, "kv_last = tl.minimum(kv_first + BLOCK_KV, kv_len) - 1", (start + block,)),
    Step(
        ROWS,
        "q_pos = (q_offset + {{ queries.position('tl.minimum(q_rows, q_len - 1)') }})[:, None]",
        (offset + length - 1, offset),
    ),
    Step(ROWS, "q_offset + q_first, q_offset + q_last, {{ env }}, BLOCK_KV", (offset + start, offset + length - 1)),
    Step(SURVEY, "tiles = tile + tl.arange(0, TILES)", (start + TOGETHER,)),
    Step(
        SURVEY, "{{ begins }} * BLOCK_{{ axis | upper }}", (start + TOGETHER, stretches, offset + start)
    ),  # of q where it counts
    Step(
        SURVEY,
        "tl.minimum({{ stops }} * BLOCK_{{ axis | upper }}, {{ axis }}_len) - 1",
        (start + TOGETHER + block, stretches),
    ),
    Step(SPANS, "(stops * BLOCK_{{ AXIS }} <= {{ axis }}_len)", (start + TOGETHER + block, stretches)),
    Step(SPANS, "stretches * STRETCH, (stretches + 1) * STRETCH", (stretches,)),
    Step(SPANS, "tiles = stretch * STRETCH + tl.arange(0, STRETCH)", (start + STRETCH * block,)),
    Step(SPANS, "tiles = tile + tl.arange(0, {{ TOGETHER }})", (start + TOGETHER, start + STRETCH * block)),
    Step(SURVEY, "{{ own }}_first + {{ 'NEIGHBOURS * ' if neighbours }}BLOCK_{{ OWN }}", (start + NEIGHBOURS * block,)),
    Step(LISTS, "((tiles + 1) * BLOCK_{{ AXIS }} <= {{ axis }}_len)", (start + TOGETHER + block,)),
    Step(SEEN, "last_row = gl.minimum(row + rows, here.{{ owner }}_len) - 1", (start + block,)),
    Step(SEEN, "return kv_tiles(q_offset + row, q_offset + last_row,", (offset + start, offset + length - 1)),
)


def missing() -> Iterator[str]:
    """Steps whose text is not in their template any more."""
    for text in OF_STRETCHES:
        if text not in (TEMPLATES / SPANS).read_text(encoding="utf-8"):
            yield f"{SPANS} does not hold `{text}`"
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


# -- stretches ---------------------------------------------------------------------------------------------------------
# of a tile that positions leave over: the range's ends, the turns of the loop over stretches, and what a stretch covers
OF_STRETCHES = (
    "for some in range(lo // STRETCH, tl.cdiv(hi, STRETCH), STRETCH):",
    "begins, stops = tl.maximum(begins, lo), tl.minimum(stops, hi)",
    "full = full & seen & (stops * BLOCK_{{ AXIS }} <= {{ axis }}_len)",
)


def stretch_question() -> Question:
    """Whether a tile could be left out of the stretches, or be looked at by ends that are not those of its positions.

    What conditions say of least and greatest values holds for any positions between them (`survey_questions`);
    a stretch's values are those of its tiles, and of a position that is a value the ends follow from tile numbers here.
    """
    tile, lo, hi, stretch = z3.Ints("tile lo hi stretch")
    begins = z3.If(stretch * STRETCH >= lo, stretch * STRETCH, lo)
    stops = z3.If((stretch + 1) * STRETCH <= hi, (stretch + 1) * STRETCH, hi)
    least, most = begins * block, z3.If(stops * block <= length, stops * block, length) - 1
    position = tile * block + row
    given = (
        lo >= 0, lo <= tile, tile < hi, block >= 1, block <= LARGEST_TILE, length <= LONGEST, row >= 0, row < block,
        position < length, stretch == tile / STRETCH,
    )  # fmt: skip
    wrong = [
        ("a tile in no stretch", z3.Or(stretch < lo / STRETCH, stretch >= (hi + STRETCH - 1) / STRETCH)),
        ("a tile outside of its stretch", z3.Or(tile < begins, tile >= stops)),
        ("a position outside of the ends", z3.Or(position < least, position > most)),
        ("a full stretch with a tile past the end", z3.And(stops * block <= length, (tile + 1) * block > length)),
    ]
    return Question("stretches", "", tuple(wrong), given, (), Terms())
