"""Stages of the kernels that find out which tiles there are, and what is read by distance."""

from __future__ import annotations

from ..analysis.survey import CELL
from .measures import STRETCH, ends_of
from .records import Stage
from .steps import EACH_KV, EACH_Q, ONCE, Tiles, computes, loads, stores


def kv_spans(t: Tiles) -> list[Stage]:
    return _spans("queries", "keys", EACH_KV)


def q_spans(t: Tiles) -> list[Stage]:
    return _spans("keys", "queries", EACH_Q)


def kv_long_spans(t: Tiles) -> list[Stage]:
    return _long_spans(kv_spans(t), "kv_ends", t)


def q_long_spans(t: Tiles) -> list[Stage]:
    return _long_spans(q_spans(t), "q_ends", t)


def _long_spans(by_tiles: list[Stage], wrote: str, t: Tiles) -> list[Stage]:
    """The same by stretches, whose ends another kernel wrote where they are not those of positions."""
    own, others, matches, *stored = by_tiles
    known = f"what {wrote} wrote of" if wrote in ends_of(t.traits.measured) else "least and greatest position of"
    what = f"{known} {STRETCH} tiles as one, then of each where that leaves it open"
    ends = loads("ends", what, others.per, others.moves)
    return [own, ends, matches, *stored]


def kv_ends(t: Tiles) -> list[Stage]:
    return _ends("keys", EACH_KV)


def q_ends(t: Tiles) -> list[Stage]:
    return _ends("queries", EACH_Q)


def _ends(others: str, each: str) -> list[Stage]:
    return [
        loads("values", f"what the mask reads at {others}; least and greatest of each", each, "HBM -> registers"),
        stores("ends", f"these, of each tile and of {STRETCH} tiles at once"),
    ]


def _spans(own: str, others: str, each: str) -> list[Stage]:
    """Spans are measured by one module for tiles of every size, so that no size is in the words."""
    return [
        loads("own", f"what the mask reads at {own} of a tile; least and greatest of each", ONCE, "HBM -> registers"),
        loads("others", f"what the mask reads at {others}; least and greatest of each", each, "HBM -> registers"),
        computes("matches", "by least and greatest: can any pair match, must every pair", each),
        stores("ranges", "first and last tile to visit, run of full ones; for each range"),
        stores("list", "the tiles to visit, one by one, where an eighth of these ranges and more is none"),
    ]


def distance_tables(t: Tiles) -> list[Stage]:
    """One module makes the tables of kernels with tiles of any size."""
    return [
        computes("values", "what the score adds or multiplies by q_pos - kv_pos alone, of each distance", ONCE),
        stores("tables", "float32, a value a distance: of all heads, or of each where they differ"),
        *([stores("levels", "int32: from where on nothing changes with distance")] if "level" in t.sums else []),
    ]


def kv_lists(t: Tiles) -> list[Stage]:
    return _lists("queries", "keys", EACH_KV, t)


def q_lists(t: Tiles) -> list[Stage]:
    return _lists("keys", "queries", EACH_Q, t)


def _lists(own: str, others: str, each: str, t: Tiles) -> list[Stage]:
    measured = t.traits.measured
    looked = ["least and greatest of each"] + (
        ["blocks of pairs by one of each"] if measured and measured.cells else []
    )
    return [
        loads("own", f"what the mask reads at {own} of a tile; least and greatest of each", ONCE, "HBM -> registers"),
        loads("others", f"what the mask reads at {others}; {', '.join(looked)}", each, "HBM -> registers"),
        computes("matches", "can any pair match, must every pair", each),
        stores("list", "the tiles to visit, one by one, edge and full ones apart", each),
    ]


def pair_cells(t: Tiles) -> list[Stage]:
    return [
        computes("cells", f"the mask of {CELL} queries and {CELL} keys: does none, some or every pair match", EACH_KV),
        stores("cells", "that, a byte", EACH_KV),
    ]


def query_work(t: Tiles) -> list[Stage]:
    return _work(f"[{t.q} queries]", "keys")


def key_work(t: Tiles) -> list[Stage]:
    return _work(f"[{t.kv} keys]", "queries")


def _work(tile: str, others: str) -> list[Stage]:
    return [
        loads("lengths", "first rows and lengths of sequences", ONCE, "HBM -> registers"),
        computes("places", f"first slot of each sequence: those with more {others} come first", ONCE),
        stores("work", f"sequence and number of each tile {tile}"),
    ]
