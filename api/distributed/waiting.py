"""Which ranks of a group wait for others: what they write into its store once something has gone wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_GRACE = 1.0  # seconds after the last rank that said it waits: others wait for nobody
_EACH = 5e-3  # seconds for each rank between two looks, so that a thousand of them do not flood the store
_ELSE = "one of them has ended or makes no such call"
_MOST = 200  # characters of what a rank says of its failure


class Waiting:
    """Of one rank. Nothing is written, and nobody is asked, while all goes well."""

    def __init__(self, store: Any, members: Sequence[int], rank: int) -> None:
        self.store, self.members, self.rank = store, members, rank
        self.seen: Counter[int] = Counter()  # how often each rank has said that it waits
        self.has_failed = False

    def failed(self, text: str) -> None:
        """Say that this rank does not go on with what others may wait for."""
        self.has_failed = True
        with suppress(RuntimeError):  # the error that is on its way says more
            self.store.set(f"failed/{self.rank}", text[:_MOST])

    def goes_on(self) -> None:
        """Say that this rank is in step with others again."""
        if self.has_failed:
            self.has_failed = False
            self.store.delete_key(f"failed/{self.rank}")

    def who_does_not(self) -> str:
        """Say that this rank waits, and find out which others do not."""
        try:
            absent = self._absent()
            told = {r: self.store.get(f"failed/{r}").decode() for r in absent if self.store.check([f"failed/{r}"])}
        except RuntimeError:
            return f"{_ELSE}, as the rank that keeps the store of the group"
        lines = [f"rank {rank} failed in {text}" for rank, text in told.items()]
        if silent := [r for r in absent if r not in told]:
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            lines.append(f"{who}: ended, or does something else")
        return "; ".join(lines) or _ELSE

    def _absent(self) -> list[int]:
        self.store.append("waits", f"{self.rank};")
        absent, end = {r for r in self.members if r != self.rank}, time.monotonic() + _GRACE
        while absent and time.monotonic() < end:
            said = Counter(map(int, self.store.get("waits").decode().split(";")[:-1]))
            if here := {r for r in absent if said[r] > self.seen[r]}:
                absent -= here
                self.seen.update({r: said[r] - self.seen[r] for r in here})
                end = time.monotonic() + _GRACE
            else:
                time.sleep(_EACH * len(self.members))
        return sorted(absent)
