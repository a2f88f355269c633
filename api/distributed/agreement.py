"""Ranks compare what they are about to call, so that a mistake on one of them is an error on all, and never a hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..ir.errors import WeftError


class Agreement:
    """Of the ranks of a group. It speaks over gloo, from host to host, so that no device waits."""

    def __init__(self, group: Any) -> None:
        self.members = dist.get_process_group_ranks(group)  # as all processes count them
        self.rank, self.ranks, self.calls = dist.get_rank(), len(self.members), 0
        self.hosts = _between_hosts(group)

    def check(self, told: Mapping[str, str], problem: Exception | None) -> None:
        """told: what a rank calls, by the name of each thing, short; first what it calls. problem: what is wrong.

        Raises WeftError on every rank where they differ, or where one has a problem, saying which rank and what. The
        rank that has a problem raises that itself.
        """
        self.calls += 1
        words = {"number of calls": str(self.calls), **told}
        text = json.dumps([words, None if problem is None else str(problem)]).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        name = next(iter(told.values()), "").split(" ")[0]
        try:
            digests, sound, sizes = self._gathered(torch.tensor([digest, int(problem is None), len(text)])).unbind(1)
            if bool((digests == digest).all()) and bool(sound.all()):
                return
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            texts = [bytes(row[:n].tolist()) for row, n in zip(self._gathered(padded), sizes.tolist())]
        except RuntimeError as error:
            raise WeftError(
                f"{name}: rank {self.rank} got no answer from all {self.ranks} ranks for call {self.calls}; one of "
                f"them has ended or makes no such call: {str(error).splitlines()[0]}"
            ) from error
        if problem is None:
            raise WeftError(f"{name}: {_difference(self.members, [json.loads(t) for t in texts])}")

    def _gathered(self, own: Tensor) -> Tensor:
        """What all ranks have, [ranks, n] of each own [n]."""
        every = own.new_empty(self.ranks, len(own))
        self.hosts.allgather([list(every.unbind())], [own]).wait()
        return every


_hosts: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the group that they speak for


def _between_hosts(group: Any) -> Any:
    """Gloo between the ranks of a group, the same for all who ask for it: ranks that call different things hear of it.
    It is not the group itself where that is gloo's, too: gloo ends processes that are in different collectives.

    It meets in the store of the group. `new_group(use_local_synchronization=True)` meets under a name that follows from
    how many groups a process belongs to, so that ranks which differ in that wait forever: pytorch/pytorch#173608.
    """
    if group not in _hosts:
        store = group.get_group_store()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        apart = dist.PrefixStore("weft", store)  # type: ignore[attr-defined]
        _hosts[group] = dist.ProcessGroupGloo(apart, rank, ranks, timeout=store.timeout)
    return _hosts[group]


def _difference(members: list[int], said: list[Any]) -> str:
    """What ranks disagree about, in words. said: of each of them, what it calls, and what is wrong with that."""
    for rank, (_, problem) in zip(members, said):
        if problem is not None:
            return f"rank {rank} cannot make this call: {problem}"
    calls = [words for words, _ in said]
    if len({tuple(words) for words in calls}) > 1:  # of different kinds: no more of each than what it is
        calls = [{"call": " ".join(list(words.items())[1]), "with": ", ".join(words)} for words in calls]
    lines = []
    for what in calls[0]:
        by_value: dict[str, list[int]] = {}
        for rank, words in zip(members, calls):
            by_value.setdefault(words[what], []).append(rank)
        if len(by_value) > 1:
            usual = max(by_value, key=lambda value: len(by_value[value]))
            for value, ranks in by_value.items():
                if value != usual:
                    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                    lines.append(f"{what}: {who}: {value or 'none'}; others: {usual or 'none'}")
    return "the ranks do not make the same call\n" + "\n".join(f"  {line}" for line in lines)
