"""A plan over ranks in words: who has which rows, what a rank receives, and the predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..ir.errors import counted
from .rows import count

if TYPE_CHECKING:
    from .shardplan import ShardPlan

_SHOWN = 16  # ranks
_OF_HOST = 4e-3  # seconds of the host for forward and backward, as two GPUs were timed: fewer portions take less


def lines(p: ShardPlan) -> Iterator[str]:
    """All times are predicted."""
    sizes, found, parts = p.sizes, p.predicted, p.strategy.split("+")
    heads = str(sizes.heads) if sizes.heads == sizes.kv_heads else f"{sizes.heads}/{sizes.kv_heads}"
    mesh = f" ({p.ranks // p.inner} x {p.inner})" if p.inner > 1 else ""
    where = f"{counted(p.ranks, 'rank')}{mesh}, {p.links.per_host} a host, {p.hardware.title}"
    yield f"variant    {p.attention.name} over {where}"
    yield (
        f"sequence   {sizes.q_len:,} queries, {sizes.kv_len:,} keys; B {sizes.batch} H {heads} D {sizes.head_dim}"
        f" Dv {sizes.value_dim} {sizes.dtype}"
    )
    chunks = len(p.queries.owners) // p.ranks
    yield f"rows       {p.balance}: {counted(chunks, 'chunk')} of {p.queries.chunk:,} queries a rank"
    if p.starts is not None:
        yield f"packed     {counted(len(p.starts) - 1, 'sequence')}"
    travels = p.of_some_heads if len(parts) == 2 else p
    meanwhile = ", and computes its own keys meanwhile" if travels.strategy == "exchange" and travels.overlaps else ""
    words = [f"{part}: {_STRATEGY_WORDS[part].format(rows=_together(p))}" for part in parts]
    yield "strategy   " + "\n           then ".join(words) + meanwhile
    if p.looked_at:
        yield f"stands on  the values of {', '.join(p.looked_at)}"
    if p.strategy != "heads":
        yield from _rows(travels, p.shares)
    near, far = (f"{n / 1e6:,.1f} MB" for n in (found.bytes_in_host, found.bytes_between))
    yield f"received   by the busiest rank {near} in a host and {far} between hosts; gradients go the same way back"
    yield (
        f"predicted  forward {found.forward * 1e3:,.3f} ms, backward {found.backward * 1e3:,.3f} ms: {found.gain:.2f}"
        f" times one device, bound by {found.bound}"
    )
    if found.seconds < _OF_HOST and p.hardware.kind == "cuda":
        yield f"           the host takes some {_OF_HOST * 1e3:g} ms for eager calls: capture them in a CUDA graph"
    for name, seconds, gain in p.others:
        yield f"           {name}: {seconds * 1e3:,.3f} ms both ways, {gain:.2f} times"


def _rows(p: ShardPlan, shares: int) -> Iterator[str]:
    """Who owns which queries, and receives which keys. shares: ranks that have these rows together."""
    most, mean = max(p.pairs), sum(p.pairs) / p.ranks
    each = "a rank and head" if shares == 1 else f"of {shares} ranks together and a head"
    yield f"pairs      {mean:,.0f} {each}, the most {most / mean if mean else 1:.3f} of that"
    names = [str(r) if shares == 1 else f"{r * shares}-{(r + 1) * shares - 1}" for r in range(min(p.ranks, _SHOWN))]
    width = max(4, *map(len, names))
    yield f"{'rank':<{width}}  queries                          keys needed   received in host   received between hosts"
    for rank, name in enumerate(names):
        inside, beyond = p.received_rows(rank)
        own = ", ".join(f"{a:,}-{b - 1:,}" for a, b in p.queries.rows(rank)[:2]) or "none"
        own += ", ..." if len(p.queries.rows(rank)) > 2 else ""
        yield f"{name:>{width}}  {own:<31}  {count(p.needed(rank)):>12,}  {inside:>17,}  {beyond:>23,}"
    if p.ranks > _SHOWN:
        yield f"      and {p.ranks - _SHOWN} more"


def _together(p: ShardPlan) -> str:
    """Which rows a rank has while heads are divided."""
    return "all rows" if p.strategy == "heads" else f"the rows of {p.shares} neighbours,"


_STRATEGY_WORDS: dict[str, str] = {
    "gather": "every rank gets all keys, and computes its queries at once",
    "exchange": "every rank gets the keys that its queries may see",
    "ring": "every rank gets these keys from one rank after the other, and keeps none of them",
    "heads": "every rank gets {rows} of its share of the heads, and gives the output back",
}
