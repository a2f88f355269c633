"""What a plan says of calls that target `cpu` computes without tiles, and how long these are predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ....compiler.planning.signature import Direction
from ....compiler.planning.target import PlannedCall, Said
from ...products import ANY_LENGTH
from .choice import own_seconds
from .cost import OwnWay, beside_products, causal_fraction

RECORDED = (
    "torch itself records this call where its output alone is wanted; else its backward may take the weights that its "
    "forward kept"
)
PRODUCTS_OF_WEIGHTS = 4 / 5  # of a backward's, where the forward kept the weights


class OwnKernel(NamedTuple):
    """What target.py knows of torch's own kernel, given a code and the facts of a variant."""

    computes_whole: Callable[..., bool]
    short_heads: Callable[..., int]
    heads_with_mask: Callable[..., int]
    mask_numbers: Callable[..., int]
    keeps_weights: Callable[..., bool]
    records_mask: Callable[..., bool]
    kind_of_mask: Callable[..., str]


def said(call: PlannedCall, known: OwnKernel) -> Said:
    """Which directions torch's own operations compute, and whether torch's own kernel may."""
    words = _Words(call, known)
    own = words.computed_whole()
    return Said(own, words.of_whole(own), "forward" in call.codes and words.sees_all())


class _Words:
    def __init__(self, call: PlannedCall, known: OwnKernel) -> None:
        self.call, self.known, x = call, known, call.sizes
        self.sizes = (x.batch, x.heads, x.kv_heads, x.q_len, x.kv_len, x.head_dim)

    def sees_all(self) -> bool:
        """Whether every query of the call sees all keys, or all up to its own under a causal mask."""
        x = self.call.sizes
        if self.call.visible is None or self.call.ragged:
            return False
        own = (
            self.known.kind_of_mask(self.call.facts) == "causal"
            and x.q_len == x.kv_len
            and self.call.q_offset in (None, 0)
        )
        return own or self.call.visible == x.batch * x.heads * x.q_len * x.kv_len

    def computed_whole(self) -> dict[Direction, float]:
        """Directions in which torch's own operations compute the call, and how long it is predicted to take."""
        if self.call.ragged:
            return {}
        found: dict[Direction, float] = {}
        facts, x, weighs = self.call.facts, self.call.sizes, self._weighs()
        scores, pairs = x.q_len * x.kv_len * x.head_dim, x.batch * x.heads * x.q_len * x.kv_len
        for direction, code in self.call.codes.items():
            whole = self.known.computes_whole(code, facts) or scores < self.known.short_heads(code, facts)
            way: OwnWay = "mask"
            share, numbers = 1.0, self.known.mask_numbers(facts, self.sizes)
            if whole and self.sees_all():
                way, share = "whole", 1.0 if self.call.visible == pairs else causal_fraction(x.kv_len)
            elif direction == "backward" and weighs:
                way, share, numbers = "weights", PRODUCTS_OF_WEIGHTS, pairs
            elif scores >= self.known.heads_with_mask(code, facts):
                continue
            seconds = own_seconds(direction, share * pairs, x.head_dim, x.dtype, self.call.machine)
            if seconds is not None:
                rows = x.batch * x.heads * x.q_len
                found[direction] = seconds + beside_products(way, direction, rows, numbers, self.call.machine)
        return found

    def _backward_has(self, kind: Callable[..., bool]) -> bool:
        """Whether there is a backward of a dense call, and it is of this kind."""
        code = self.call.codes.get("backward")
        return code is not None and not self.call.ragged and kind(code, self.call.facts, self.sizes, self.call.free)

    def _weighs(self) -> bool:
        """Whether its backward takes the weights that its forward kept."""
        return not self._backward_has(self.known.records_mask) and self._backward_has(self.known.keeps_weights)

    def of_whole(self, own: Mapping[Direction, float]) -> tuple[str, ...]:
        """Which calls have no tiles on a CPU, and whether the described one is such."""
        if "backward" in own and self._weighs():
            kept = "the backward of this call takes the weights that its forward kept"
            rest: dict[Direction, float] = {
                direction: seconds for direction, seconds in own.items() if direction != "backward"
            }
            return (f"{kept}: of tiles are all figures but its time", *self.of_whole(rest))
        if own:
            recorded = "backward" in own and self._backward_has(self.known.records_mask)
            return (*[RECORDED] * recorded, *self._of_own(own))
        directions = [
            direction for direction, code in self.call.codes.items() if self.known.computes_whole(code, self.call.facts)
        ]
        if not directions:
            return self._computed_short()
        mask = self.known.kind_of_mask(self.call.facts)
        seen = "the same keys" if mask in ("run", "causal") else "all keys"
        seen += ", or all up to its own," if mask == "causal" else ""
        first, *_ = directions
        what = "a forward" if first == "forward" else "the backward of a call"
        words = f"{what} in which every query sees {seen} is torch's own kernel, which is the faster one"
        if "backward" in directions:
            words += ", and so is its backward" * (len(directions) > 1)
            words += " where no gradient of the log-sum-exp arrives"
        return (f"{words}; figures are of tiles", *self._computed_short())

    def _of_own(self, own: Mapping[Direction, float]) -> tuple[str, ...]:
        both, are = " and the ".join(own), "are" if len(own) > 1 else "is"
        lse = "; its backward has tiles where a gradient of the log-sum-exp arrives" if "backward" in own else ""
        words = f"the {both} of this call {are} torch's own kernel, which is the faster one"
        return (f"{words}: of tiles are all figures but its time{lse}", *self._computed_short())

    def _computed_short(self) -> tuple[str, ...]:
        """Which calls have none although tiles are faster in longer ones."""
        ways = {
            "torch's own kernel": self.known.short_heads,
            "torch's own kernel, which is handed a mask": self.known.heads_with_mask,
        }
        words = []
        for way, limit_of in ways.items():
            found = {direction: limit_of(code, self.call.facts) for direction, code in self.call.codes.items()}
            limits = [f"{n:,} of a {direction}" for direction, n in found.items() if 0 < n < ANY_LENGTH]
            words += [f"a {direction} in so many threads is {way}" for direction, n in found.items() if n >= ANY_LENGTH]
            if limits:
                what = "with fewer queries * keys * columns than"
                words.append(f"short heads, {what} {' and '.join(limits)}, are computed by {way}")
        return tuple(words)
