"""Sequences of their own lengths, and pages that keys lie in, as records: where each row of an operand belongs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

GARBAGE = (-1, 10**6, 0)  # what stands in a table behind a length: it is never read


@dataclass(frozen=True)
class Lens:
    """Sequences of their own lengths: padded, one in each batch row, or packed one after the other in a single one."""

    packed: bool
    q: tuple[int, ...]
    kv: tuple[int, ...]
    dtype: str = "int32"
    brief: bool = False  # lengths that are those of the operands are not given

    def starts(self, side: str) -> list[int]:
        """First row of each sequence, and the end."""
        lens: tuple[int, ...] = getattr(self, side)
        return [sum(lens[:n]) for n in range(len(lens) + 1)] if self.packed else [0] * (len(lens) + 1)

    def fitted(self, batch: int, q_rows: int, kv_rows: int) -> Lens:
        """The same, cut to operands of this size."""
        if not self.packed:
            return replace(
                self,
                q=tuple(min(n, q_rows) for n in self.q[:batch]),
                kv=tuple(min(n, kv_rows) for n in self.kv[:batch]),
            )
        return replace(self, q=_cut(self.q, q_rows), kv=_cut(self.kv, kv_rows))

    def options(self, device: str, q_rows: int, kv_rows: int, pages: Pages | None) -> dict[str, str]:
        """Texts of the call's options, by name. q_rows, kv_rows: of the operands, where these are no pages."""
        given = {"cu_seqlens_q": self.starts("q")} if self.packed else {"q_lens": list(self.q)}
        if pages is None and self.packed:
            given["cu_seqlens_kv"] = self.starts("kv")
        else:
            given["kv_lens"] = list(self.kv)
        if self.brief:
            for name in self._unneeded(q_rows, kv_rows, pages is not None):
                del given[name]
        place = "" if device == "cpu" else f", device={device!r}"
        options = {n: f"torch.tensor({values}, dtype=torch.{self.dtype}{place})" for n, values in given.items()}
        if pages is not None:
            options["block_table"] = pages.text(self.kv, place)
        return options

    def _unneeded(self, q_rows: int, kv_rows: int, paged: bool) -> list[str]:
        """One of the options, where a call means the same without it."""
        if self.packed:
            return ["cu_seqlens_kv"] if self.q == self.kv and q_rows == kv_rows and not paged else []
        whole = {"q_lens": {*self.q} <= {q_rows}, "kv_lens": {*self.kv} <= {kv_rows} and not paged}
        return [name for name, holds in whole.items() if holds][:1]


def _cut(lens: tuple[int, ...], rows: int) -> tuple[int, ...]:
    found = []
    for length in lens:
        found.append(min(length, rows))
        rows -= found[-1]
    return tuple(found)


@dataclass(frozen=True)
class Pages:
    """Keys in blocks of a pool, in any order. Which block holds what follows from the lengths and the seed."""

    rows: int  # of a block
    seed: int
    shares: bool  # entries of the table may name one block
    spare: int  # blocks that no sequence has, and columns of the table that none needs

    def table(self, kv: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return _laid_out(self, kv)[1]

    def blocks(self, kv: tuple[int, ...]) -> int:
        return _laid_out(self, kv)[0]

    def used(self, kv: tuple[int, ...]) -> list[int]:
        """How many rows of each block some sequence has."""
        rows = [0] * self.blocks(kv)
        for own, length in zip(self.table(kv), kv):
            for i in range(-(-length // self.rows)):
                rows[own[i]] = max(rows[own[i]], min(self.rows, length - i * self.rows))
        return rows

    def places(self, kv: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """Of the keys of each sequence: the block, and the row in it."""
        return [
            [(own[i // self.rows], i % self.rows) for i in range(length)] for own, length in zip(self.table(kv), kv)
        ]

    def text(self, kv: tuple[int, ...], place: str) -> str:
        """The table as Python, some as the first columns of a larger one."""
        rows, more = [list(row) for row in self.table(kv)], self.seed % 3
        wide = [[*row, *[GARBAGE[1]] * more] for row in rows]
        return f"torch.tensor({wide}, dtype=torch.int32{place})" + (f"[:, :{-more}]" if more else "")


@lru_cache(maxsize=256)
def _laid_out(pages: Pages, kv: tuple[int, ...]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How many blocks there are, and the table."""
    random = Random(pages.seed)
    needed = [-(-length // pages.rows) for length in kv]
    columns = max(1, max(needed, default=0) + pages.spare)
    blocks = max(1, sum(needed) + pages.spare)
    free = random.sample(range(blocks), blocks)
    taken: list[int] = []
    rows = []
    for number in needed:
        own = []
        for _ in range(number):
            again = taken and pages.shares and random.random() < 0.4
            own.append(random.choice(taken) if again else free.pop())
            taken.append(own[-1])
        rows.append((*own, *(random.choice(GARBAGE) for _ in range(columns - number))))
    return blocks, tuple(rows)


__all__ = ["Lens", "Pages"]
