"""How many pairs of a head positions leave visible, from numbers alone: exact where the mask has a closed form, else an
upper limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .measured import Column, _each
from .programs import Environment, _values
from .results import TileProgram

MOST_ROWS = 1 << 16  # of queries that are looked at one by one: a tenth of a second


def visible_pairs(
    program: TileProgram, *, q_len: int, kv_len: int, q_offset: int, env: Environment, most: int = MOST_ROWS
) -> int:
    """program: kv_tiles of the variant, which runs for tiles of one query and one key.

    env: values of scalars, symbols and tensors that it reads. Of more than `most` queries the ends of as many runs
    stand for what lies between them, which is exact where that grows evenly.
    """
    rows, times = _chosen(q_len, most)
    places: Column = [row + q_offset for row in rows]
    columns: dict[str, Column] = {"q_first": places, "q_last": places}
    values = {
        **_values(env), "q_len": q_len, "kv_len": kv_len, "q_offset": q_offset, "block": 1, "length": kv_len,
    }  # fmt: skip
    for line in program.body:
        found = _each(line.value, columns, values)
        if isinstance(found, (list, range)):
            columns[line.name] = found
        else:
            values[line.name] = found
            columns.pop(line.name, None)
    counts = [columns.get(name, values.get(name)) for name in ("n_edge", "n_full")]
    return sum(_total(count, times, q_len) for count in counts)


def _chosen(q_len: int, most: int) -> tuple[Sequence[int], list[float] | None]:
    """Rows to look at, and for how many each stands; None: for itself."""
    if q_len <= most:
        return range(q_len), None
    runs = most // 2
    starts = [k * q_len // runs for k in range(runs + 1)]
    rows = [row for a, b in pairwise(starts) for row in (a, b - 1)]
    return rows, [(b - a) / 2 for a, b in pairwise(starts) for _ in range(2)]


def _total(count: object, times: list[float] | None, q_len: int) -> int:
    if not isinstance(count, (list, range)):
        return count * q_len  # type: ignore[operator]
    return sum(count) if times is None else round(sum(n * t for n, t in zip(count, times)))
