"""What lists the tiles of packed sequences, for the kernels that own them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .....compiler.analysis.tiles.results import Axis
from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import none
from .....compiler.planning.records import Stage
from .....compiler.planning.sources import Side
from .....compiler.planning.stage_words import ONCE, Tiles, computes, loads, stores

WORK = ("query_work", "key_work")
LISTED = 16  # sequences that a program of them lists
_PLACE = 8  # bytes of a tile's place in a list


def _words(tile: str, others: str) -> list[Stage]:
    return [
        loads("lengths", "first rows and lengths of sequences", ONCE, "HBM -> registers"),
        computes("places", f"first slot of each sequence: those with more {others} come first", ONCE),
        stores("work", f"sequence and number of each tile {tile}"),
    ]


@lru_cache(maxsize=64)
def work_kernel(owner: Kernel, side: Side) -> Kernel:
    """query_work or key_work: the tiles of all sequences on one side of the kernel that has these tiles.

    A sequence is as good as nothing beside its rows, so that formulas have the lists alone.
    """
    queries = side == "q"
    axis: Axis = "kv" if queries else "q"

    def words(t: Tiles) -> list[Stage]:
        return _words(f"[{t.q} queries]", "keys") if queries else _words(f"[{t.kv} keys]", "queries")

    return Kernel(
        KernelId("triton", WORK[0] if queries else WORK[1], owner.name), owner.direction, owner.slot, axis,
        "all sequences, many at a time", words, programs=lambda x: x.B, read=none,
        written=lambda x: _PLACE * x.B * (x.nq if queries else x.nkv), again=owner.again, follows=owner.name,
        visits="none",
    )  # fmt: skip


def with_work(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a packed call: before all others those that list tiles for the ones that own them.

    A kernel that follows another has the list of any kernel that owns tiles of its side, or one of its own.
    """
    found = [(kernel, side) for kernel in kernels if not kernel.follows for side in kernel.lists]
    named = {kernel.name: kernel for kernel in kernels}
    for kernel in kernels:
        for side in kernel.lists if kernel.follows else ():
            if side not in [known for _, known in found]:
                found.insert(0, (named[kernel.follows], side))  # type: ignore[index]
    return [*(work_kernel(owner, side) for owner, side in found), *kernels]
