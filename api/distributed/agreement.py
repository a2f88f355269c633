"""Ranks compare what they are about to call, so that a mistake on one of them is an error on all, and never a hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..codegen.torch_private import timeout_of
from ..ir.errors import WeftError
from ..runtime import ending
from .collectives import is_of_a_collective
from .waiting import Waiting

_TOLD = "_weft_told"  # a mark of errors
_CPU = torch.device("cpu")  # whatever the default device is


class Agreement:
    """Of the ranks of a group. It speaks over gloo, from host to host, so that no device waits.

    who: what makes it, for errors. Raises WeftError where a rank makes none within the timeout of the group.
    """

    def __init__(self, group: Any, who: str = "ContextParallel") -> None:
        self.members = dist.get_process_group_ranks(group)  # as all processes count them
        self.rank, self.ranks = dist.get_rank(), len(self.members)
        self.hosts = _between_hosts(group, who)

    @property
    def calls(self) -> int:
        """How many were compared, by all who speak for the group."""
        return self.hosts.calls

    def check(self, told: Mapping[str, str], problem: Exception | None) -> None:
        """told: what a rank calls, by the name of each thing, short; first what it calls. problem: what is wrong.

        Raises WeftError on every rank where they differ, or where one has a problem, saying which rank and what. The
        rank that has a problem raises that itself.
        """
        self.hosts.calls += 1
        words = {"number of calls": str(self.calls), **told}
        digest = hashlib.sha256("\0".join((*words, *words.values())).encode()).digest()
        own = [int.from_bytes(digest[:7], "big"), int(problem is None)]
        name = next(iter(told.values()), "").split(" ")[0]
        try:
            if all(row == [own[0], 1] for row in self._gathered(torch.tensor(own, device=_CPU)).tolist()):
                self.hosts.waiting.goes_on()
                return
            texts = self._texts([words, None if problem is None else str(problem) or type(problem).__name__])
        except RuntimeError as error:
            raise WeftError(
                f"{name}: rank {self.rank} got no answer from all {self.ranks} ranks for call {self.calls}; "
                f"{self.hosts.waiting.who_does_not()}: {str(error).splitlines()[0]}"
            ) from error
        if problem is None:
            raise WeftError(f"{name}: {_difference(self.members, texts)}")

    @contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """Around what ranks do once they have agreed. An error of this rank is told to others, who may wait for it. An
        error of a collective gets a note, which says whom it waited for.

        what: such as "the forward of causal".
        """
        waiting = self.hosts.waiting
        what = f"{what}, call {self.calls}"
        try:
            yield
        except Exception as error:
            if not getattr(error, _TOLD, False):  # by a part of it
                setattr(error, _TOLD, True)
                if is_of_a_collective(error):
                    error.add_note(f"rank {self.rank} waits in {what}; {waiting.who_does_not()}")
                else:
                    waiting.failed(f"{what}: {type(error).__name__}: {error}")
            raise

    def _texts(self, own: Any) -> list[Any]:
        """What all ranks have to say."""
        text = json.dumps(own).encode()
        sizes = self._gathered(torch.tensor([len(text)], device=_CPU))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_CPU)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(self._gathered(padded), sizes)]

    def _gathered(self, own: Tensor) -> Tensor:
        """What all ranks have, [ranks, n] of each own [n]."""
        every = own.new_empty(self.ranks, len(own))
        self.hosts.gloo.allgather([list(every.unbind())], [own]).wait()
        return every


@contextmanager
def kept(agreement: Agreement | None, what: str) -> Iterator[None]:
    """`Agreement.kept`, or where ranks do not compare calls a note alone."""
    if agreement is not None:
        with agreement.kept(what):
            yield
        return
    try:
        yield
    except Exception as error:
        if is_of_a_collective(error):
            error.add_note(
                f"rank {dist.get_rank()} waits in {what}, until the timeout of its group, for a rank that has ended, "
                "or calls something else"
            )
        raise


class Backwards(NamedTuple):
    """What ranks compare before the backward of a call: autograd may run those of a rank in another order, or not."""

    agreement: Agreement | None
    name: str  # of the variant
    call: int  # its number

    @contextmanager
    def of(self, what: str, problem: Exception | None = None) -> Iterator[None]:
        """Around one part of it. problem: what is wrong with it on this rank, which is raised."""
        if self.agreement is not None:
            told = {"backward": f"{self.name} of call {self.call}", "gradients of": what}
            self.agreement.check(told, problem)
        if problem is not None:
            raise problem
        with kept(self.agreement, f"the backward of {self.name}"):
            yield


def backwards(agreement: Agreement | None, name: str) -> Backwards:
    """Of the call that was compared last."""
    return Backwards(agreement, name, 0 if agreement is None else agreement.calls)


class _Hosts:
    """What all who speak for a group share: ranks that call different things hear of it."""

    def __init__(self, group: Any, who: str) -> None:
        store = dist.PrefixStore("weft", group.get_group_store())  # type: ignore[attr-defined]
        members, rank, timeout = dist.get_process_group_ranks(group), dist.get_rank(), timeout_of(group)
        self.calls, self.waiting = 0, Waiting(store, members, rank)
        ending.sends()
        try:
            self.gloo: Any = dist.ProcessGroupGloo(store, dist.get_rank(group), len(members), timeout=timeout)
        except RuntimeError as error:
            raise WeftError(
                f"{who}: rank {rank} did not meet all {len(members)} ranks of its group within "
                f"{timeout.total_seconds():g} s, each of which has to make one; {self.waiting.who_does_not()}"
            ) from error


_hosts: WeakKeyDictionary[Any, _Hosts] = WeakKeyDictionary()  # by the group that they speak for


def _between_hosts(group: Any, who: str) -> _Hosts:
    """Gloo between the ranks of a group, the same for all who ask for it.

    It is not the group itself where that is gloo's, too: gloo ends processes that are in different collectives. It
    meets in the store of the group. `new_group(use_local_synchronization=True)` meets under a name that follows from
    how many groups a process belongs to, so that ranks which differ in that wait forever: pytorch/pytorch#173608.
    """
    if group not in _hosts:
        _hosts[group] = _Hosts(group, who)
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
