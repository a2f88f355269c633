"""The one interface of the fast ways: what a launcher offers calls before its longer way.

Each way takes one argument: a `Call` in a forward, a `BackwardCall` in a backward. It gives None, with nothing done,
where it does not serve that call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Again(NamedTuple):
    """What was found for a call, and serves others like it."""

    fits: Callable[[Any], bool]
    launch: Callable[[Any], Any]
    keeping: Callable[[Any], Any] | None = None  # the same with weights for the backward, where a launcher keeps them
    record: Callable[[Any], Any] | None = None  # the output alone, whose gradients torch records
    checked: bool = False  # whether sizes and numbers of calls that fit are those of a call that was checked


# of tensors: whether as many others are like them but for their addresses, and for sizes of dimensions that are `free`
Guard = Callable[..., Callable[..., bool]]


def nothing_yet(*arguments: object) -> None:
    """A way before something is prepared, or where there is none."""


class Ways(NamedTuple):
    """The fast ways of a launcher.

    Results of a forward are (out, lse). Those of a backward are the gradients of the op's tensors in their order, with
    None where one is not wanted.
    """

    direct: Callable[..., Any] = nothing_yet  # results of a call whose operands fit
    keeping: Callable[..., Any] = nothing_yet  # (out, lse, weights), which the backward of the call takes
    recorded: Callable[..., Any] = nothing_yet  # (out, None), whose gradients torch records
    like: Callable[[Any], Again | None] = nothing_yet  # for calls like one that the direct way took
    growing: Callable[[Any], Again | None] = nothing_yet  # for those that have other numbers of keys, too


def first_of(ways: Sequence[Ways]) -> Ways:
    """What the first of them finds that takes the call."""

    def among(own: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        return lambda *given: next((found for way in own if (found := way(*given)) is not None), None)

    return ways[0] if len(ways) == 1 else Ways(*map(among, zip(*ways)))
