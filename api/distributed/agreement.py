"""Ranks compare what they are about to call, so that a mistake on one of them is an error on all, and never a hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..ir.errors import WeftError
from .collectives import all_gather

_SOUND = 1  # beside the digest of a rank's words: nothing is wrong with its call


class Agreement:
    """Of the ranks of a group. It speaks over gloo, from host to host, so that no device waits."""

    def __init__(self, group: Any) -> None:
        self.members = ranks = dist.get_process_group_ranks(group)  # as all processes count them
        is_gloo = dist.get_backend(group) == "gloo"
        self.group = group if is_gloo else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.rank, self.ranks, self.calls = dist.get_rank(), len(ranks), 0

    def check(self, told: Mapping[str, str], problem: Exception | None) -> None:
        """told: what a rank calls, by the name of each thing, short; first what it calls. problem: what is wrong.

        Raises WeftError on every rank where they differ, or where one has a problem, saying which rank and what. The
        rank that has a problem raises that itself.
        """
        self.calls += 1
        words = {"number of calls": str(self.calls), **told}
        text = json.dumps([words, None if problem is None else str(problem)])
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        mine = torch.tensor([digest, int(problem is None) * _SOUND])
        every = torch.empty(2 * self.ranks, dtype=torch.int64)
        name = next(iter(told.values()), "").split(" ")[0]
        try:
            all_gather(every, mine, self.group)
            digests, sound = every.view(-1, 2).unbind(1)
            if bool((digests == digest).all()) and bool((sound == _SOUND).all()):
                return
            texts: list[Any] = [None] * self.ranks
            dist.all_gather_object(texts, text, group=self.group)
        except RuntimeError as error:
            raise WeftError(
                f"{name}: rank {self.rank} got no answer from all {self.ranks} ranks for call {self.calls}; one of "
                f"them has ended or makes no such call: {str(error).splitlines()[0]}"
            ) from error
        if problem is None:
            raise WeftError(f"{name}: {_difference(self.members, [json.loads(t) for t in texts])}")


def _difference(members: list[int], said: list[Any]) -> str:
    """What ranks disagree about, in words. said: of each of them, what it calls, and what is wrong with that."""
    for rank, (_, problem) in zip(members, said):
        if problem is not None:
            return f"rank {rank} cannot make this call: {problem}"
    lines = []
    for what in said[0][0]:
        values = [words.get(what) for words, _ in said]
        by_value: dict[str, list[int]] = {}
        for rank, value in zip(members, values):
            by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            usual = max(by_value, key=lambda value: len(by_value[value]))
            for value, ranks in by_value.items():
                if value != usual:
                    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                    lines.append(f"{what}: {who}: {value or 'none'}; others: {usual or 'none'}")
    return "the ranks do not make the same call\n" + "\n".join(f"  {line}" for line in lines)
