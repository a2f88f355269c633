"""Into how many parts a split-KV kernel divides the keys of a sequence: decided on the host, from sizes alone.

Lengths on the device only decide where parts begin. Each sequence is cut into at most `parts` equal ones of at least
`tiles` tiles. So programs have as much to do whatever the lengths are, and no two plans differ in a bit.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from ...ir.errors import WeftError
from ..analysis.tiles.programs import Environment, count_tiles
from ..analysis.tiles.results import TileProgram

MOST_PARTS = 128
START = 2.0e-6  # seconds that a program takes before its first tile is there, and after its last
AHEAD, TILE = 4, 5.0e-7  # tiles that are there when the last one arrives, and seconds that a program computes on one
JOINED_PARTS = 16  # parts of a row that the kernel which joins them reads together
JOINING, JOINING_ROUND = 3.0e-6, 1.2e-6  # seconds of that kernel, and of each time that it reads so many
LONE = 2.0  # times its share of the bandwidth that a program reads where others are idle, at the least
LATENCY = 1.45e-6  # seconds from a load to its bytes: so much of the bandwidth has to be on its way at any time


class Parts(NamedTuple):
    """The division of one call."""

    parts: int  # of a sequence, at the most; 1: nothing is to be joined
    tiles: int  # of a part, at the least


def tile_rows(most: int, rows: int) -> int:
    """Rows of a tile of queries: as few as hold all that share keys, from 16 on."""
    return min(most, max(16, 1 << max(rows - 1, 0).bit_length()))


def longest_visits(
    program: TileProgram, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: int | None, env: Environment,
    unknown: bool = False,
) -> int:  # fmt: skip
    """Tiles of keys that the last queries of a sequence visit, by positions; all where that takes more to know.

    env: values of scalars, and of head_dim. unknown: offsets lie on the device. Queries may then be far behind the last
    key, as where ranks hold every n-th one: further away they are asked for as long as they see more.
    """
    rows = min(q_len, block_q)
    last = kv_len - rows if q_offset is None else q_offset + q_len - rows

    def visited(last: int) -> int:
        return count_tiles(
            program, q_len=rows, kv_len=kv_len, block_q=rows, block_kv=block_kv, q_offset=last, env=env
        ).visited  # fmt: skip

    try:
        found = visited(last)
        while unknown and (more := visited(last := 2 * (last + rows) - rows)) > found:
            found = more
    except WeftError:  # it reads tensors
        return -(-kv_len // block_kv)
    return found


@lru_cache(maxsize=4096)
def divided(
    units: int, tiles: int, slots: int, enough: float, tile_bytes: float, bytes_per_second: float,
    uneven: bool = False, busy: float = 0.0, most: int = MOST_PARTS, sms: int = 1, together: float = 0.0,
) -> Parts:  # fmt: skip
    """The division with the least predicted time.

    units: (sequence, key head, tile of rows). tiles: of keys that the longest of them visits. slots: programs that run
    together, which share the bandwidth. enough: of them read as fast as the memory can. tile_bytes: of keys and values
    that a program reads for a tile. uneven: lengths lie on the device, where sequences may be as long as each other, or
    half as long on average. busy: seconds that a program computes on a tile, at the least. most: parts.
    together: seconds that an SM computes on a tile of one program, where it has several.
    """

    def seconds(size: int, programs: float) -> float:
        """Of so many programs with so many tiles each."""
        sharing = max(min(programs, slots), enough)
        computed = max(busy, ceil(min(programs, slots) / sms) * together)
        alone = START + min(size, AHEAD) * TILE
        return ceil(programs / slots) * (size * max(tile_bytes * sharing / bytes_per_second, computed) + alone)

    best, least = Parts(1, max(tiles, 1)), inf
    for parts in range(1, min(most, max(tiles, 1)) + 1):
        size = -(-tiles // parts)
        if parts > 1 and -(-tiles // size) < parts:  # fewer parts are as short
            continue
        predicted = seconds(size, units * parts)
        if uneven:
            half = units * parts / 2
            last = size / 2 * max(tile_bytes * enough / bytes_per_second, busy)  # of the last, beside idle others
            predicted = (2 * predicted + seconds(size, half)) / 3 + (last if units * parts > slots else 0.0)
        predicted += JOINING + ceil(parts / JOINED_PARTS) * JOINING_ROUND if parts > 1 else 0.0
        if predicted < least:
            best, least = Parts(parts, max(size, 1)), predicted
    return best
