"""Launches of a call whose sequences are shared out among two modules: long ones, then short ones, into one output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...compiler.planning.target import CallTensors, Launcher, Named, Partition, Place
from .fast.ways import Ways


class SharedLauncher:
    """Launches of both modules of a forward. Which sequences are whose, kernels find out: the host does not know."""

    def __init__(self, long: Launcher, short: Launcher) -> None:
        self._long, self._short = long, short
        self.fast = Ways(self._direct)

    def _direct(self, call: Any) -> Any:
        """The direct way. Where the second one turns a call away, what the first one made is dropped."""
        found = self._long.fast.direct(call)
        return None if found is None else self._short.fast.direct(call, *found)

    def partition(self, call: CallTensors, results: Named) -> Partition:
        return Partition(mode=tuple(each.partition(call, results) for each in (self._long, self._short)))

    def measures(self, partition: Partition) -> dict[str, str]:
        """None: calls with packed queries over pages measure no tiles."""
        return {}

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        found: dict[str, Place] = {}
        for which, each, own in self._each(partition):
            found |= {f"{which}_{name}": place for name, place in each.workspace(call, results, own).items()}
        return found

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        for which, each, own in self._each(partition):
            given = {n.removeprefix(f"{which}_"): t for n, t in workspace.items() if n.startswith(f"{which}_")}
            each(call, results, given, own)
        return []

    def _each(self, partition: Partition) -> list[tuple[str, Launcher, Partition]]:
        assert isinstance(partition.mode, tuple)
        return list(zip(("long", "short"), (self._long, self._short), partition.mode))
