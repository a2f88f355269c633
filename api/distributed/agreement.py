"""Ranks compare what they are about to call, so that a mistake on one of them is an error on all, and never a hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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

Agreed = Callable[[], None]  # waits until all ranks have agreed, and raises WeftError where they do not


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
        self.asks(told, problem).answered()

    def asks(self, told: Mapping[str, str], problem: Exception | None = None) -> Question:
        """Begin such a check: its end is `answered`. A rank may compute meanwhile, and sends nothing."""
        self.hosts.calls += 1
        return Question(self, {"number of calls": str(self.calls), **told}, problem)

    @contextmanager
    def kept(self, what: str, question: Question | None = None) -> Iterator[None]:
        """Around what ranks do once they have agreed. An error of this rank is told to others, who may wait for it. An
        error of a collective gets a note, which says whom it waited for.

        what: such as "the forward of causal". question: what they may be agreeing on still: others wait for an answer.
        """
        waiting = self.hosts.waiting
        what = f"{what}, call {self.calls}"
        try:
            yield
        except Exception as error:
            if question is not None:
                with suppress(WeftError):
                    question.answered()
            if not getattr(error, _TOLD, False):  # by a part of it
                setattr(error, _TOLD, True)
                if is_of_a_collective(error):
                    error.add_note(f"rank {self.rank} waits in {what}; {waiting.who_does_not()}")
                else:
                    waiting.failed(f"{what}: {type(error).__name__}: {error}")
            raise


class Question:
    """What the ranks of an agreement compare. Each has told its own, and may not have heard of the others."""

    def __init__(self, agreement: Agreement, words: Mapping[str, str], problem: Exception | None) -> None:
        self.agreement, self.words, self.problem, self.number = agreement, words, problem, agreement.calls
        self.is_open, self.failed = True, None
        digest = hashlib.sha256("\0".join((*words, *words.values())).encode()).digest()
        self.own = [int.from_bytes(digest[:7], "big"), int(problem is None)]
        self.every: Any = None
        try:
            self.every = self._gathering(torch.tensor(self.own, device=_CPU))
        except RuntimeError as error:
            self.failed = error

    def answered(self) -> None:
        """Wait for all ranks. Raises as `Agreement.check`, once: nothing where that was heard."""
        if not self.is_open:
            return
        self.is_open = False
        agreement, waiting = self.agreement, self.agreement.hosts.waiting
        name = next((v for n, v in self.words.items() if n != "number of calls"), "").split(" ")[0]
        try:
            if self.failed is not None:
                raise self.failed
            if all(row == [self.own[0], 1] for row in self.every().tolist()):
                waiting.goes_on()
                return
            problem = self.problem
            texts = self._texts([self.words, None if problem is None else str(problem) or type(problem).__name__])
        except RuntimeError as error:
            raise _told_to_all(
                f"{name}: rank {agreement.rank} got no answer from all {agreement.ranks} ranks for call {self.number}; "
                f"{waiting.who_does_not()}: {str(error).splitlines()[0]}"
            ) from error
        if problem is None:
            raise _told_to_all(f"{name}: {_difference(agreement.members, texts)}")

    def _texts(self, own: Any) -> list[Any]:
        """What all ranks have to say."""
        text = json.dumps(own).encode()
        sizes = self._gathering(torch.tensor([len(text)], device=_CPU))()[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_CPU)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(self._gathering(padded)(), sizes)]

    def _gathering(self, own: Tensor) -> Callable[[], Tensor]:
        """Begin to gather what all ranks have; the end of it gives [ranks, n] of each own [n]."""
        every = own.new_empty(self.agreement.ranks, len(own))
        work = self.agreement.hosts.gloo.allgather([list(every.unbind())], [own])

        def end() -> Tensor:
            work.wait()
            return every

        return end


def _told_to_all(text: str) -> WeftError:
    """An error that every rank has, or of a rank that others do not hear."""
    error = WeftError(text)
    setattr(error, _TOLD, True)
    return error


@contextmanager
def kept(agreement: Agreement | None, what: str, question: Question | None = None) -> Iterator[None]:
    """`Agreement.kept`, or where ranks do not compare calls a note alone."""
    if agreement is not None:
        with agreement.kept(what, question):
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


def agreed_in(question: Question | None) -> Agreed:
    """What waits for the answers; nothing does where ranks do not compare calls."""
    return nothing if question is None else question.answered


def nothing() -> None:
    """Where all have agreed."""


class Backwards(NamedTuple):
    """What ranks compare before the backward of a call: autograd may run those of a rank in another order, or not."""

    agreement: Agreement | None
    name: str  # of the variant
    call: int  # its number

    @contextmanager
    def of(self, what: str, problem: Exception | None = None, *, at_once: bool = True) -> Iterator[Agreed]:
        """Around one part of it. problem: what is wrong with it on this rank, which is raised. at_once: wait for all
        before the part begins; else it waits itself, before it sends anything."""
        question: Question | None = None
        if self.agreement is not None:
            told = {"backward": f"{self.name} of call {self.call}", "gradients of": what}
            question = self.agreement.asks(told, problem)
            if at_once or problem is not None:
                question.answered()
        if problem is not None:
            raise problem
        with kept(self.agreement, f"the backward of {self.name}", question):
            yield agreed_in(question)
            agreed_in(question)()


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
