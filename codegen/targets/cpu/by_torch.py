"""Calls that torch's own operations compute on target `cpu`, not tiles: which these are, and what plans say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.dtypes import HALVES, dtype_named
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.signature import Direction, Signature, Widths
from ....compiler.planning.target import PlannedCall, Said
from ....ir.expr import Expr, call, symbol
from ....ir.normalizer import SOFTMAX
from ....ir.walk import symbols
from ... import at_once, products
from ...dialects import is_uniform
from ...launch.fast.own import axes_of_mask, in_one_order, numbers_of_mask, records_with_mask
from ...products import ANY_LENGTH, own_attention, own_backward
from .choice import own_seconds
from .cost import OwnWay, beside_products, causal_fraction
from .forms import CpuForm

RECORDED = (
    "torch itself records this call where its output alone is wanted; else its backward may take the weights that its "
    "forward kept"
)
PRODUCTS_OF_WEIGHTS = 4 / 5  # of a backward's, where the forward kept the weights
_PRODUCTS = {"query": {"dP", "dQ"}, "key": {"dP", "dK"}, "value": {"dV"}}  # that a gradient needs, besides scores


def kind_of_mask(facts: Facts) -> str:
    """By what a query sees, as bounds tell it."""
    if not facts.attention.canonical.is_masked:
        return "none"
    if not facts.kv_bounds.closed_form:
        return "open"
    if facts.attention.canonical.folded_mask.text == call("le", symbol("kv_pos"), symbol("q_pos")).text:
        return "causal"
    return "run" if len(facts.kv_tiles.outputs) == 4 else "runs"


def scale_of(facts: Facts) -> Expr | None:
    """What q.k is multiplied by, where that is one number for a head."""
    return facts.linear_scale if facts.scale_and_rest is None else facts.scale_and_rest[0]


def differs_by_head(facts: Facts) -> bool:
    """Whether the mask does, or where tiles to visit begin and end."""
    return bool(symbols(facts.attention.canonical.folded_mask) & {"head", "kv_head"}) or facts.bounds_differ_by_head


def computes_whole(code: CodePlan, facts: Facts) -> bool:
    """Whether torch's own attention, which is there, computes those calls of this code."""
    form = code.kernels[-1].form
    assert isinstance(form, CpuForm)
    return has_whole(facts, code.signature) and not form.in_tiles and own_kernel(code.signature.direction) is not None


def short_heads(code: CodePlan, facts: Facts) -> int:
    """Queries times keys times columns of a head below which it computes them although tiles are faster; or 0."""
    form, direction = code.kernels[-1].form, code.signature.direction
    assert isinstance(form, CpuForm)
    if not form.in_tiles or not has_whole(facts, code.signature) or own_kernel(direction) is None:
        return 0
    return products.short_head(direction == "backward", code.signature.dtype in HALVES)


def heads_with_mask(code: CodePlan, facts: Facts) -> int:
    """The same of heads that it computes where it is handed a mask; 0 where it is handed none."""
    if not takes_a_mask(facts, code.signature) or not products.takes_masks():
        return 0
    backward_in = None if code.signature.direction == "forward" else dtype_named(code.signature.dtype).torch
    return products.short_head_with_mask(backward_in)


def mask_numbers(facts: Facts, sizes: at_once.Sizes) -> int:
    """Of the mask that torch's own attention is handed; 0 where it is handed none."""
    return numbers_of_mask(axes_of_mask(facts), sizes) if _adds_to_products(facts) else 0


def keeps_weights(code: CodePlan, facts: Facts, sizes: at_once.Sizes, free: bool) -> bool:
    """Whether the backward of a dense call takes the weights that its forward kept. free: no schedule is asked for."""
    dtype, signature = dtype_named(code.signature.dtype).torch, code.signature
    if not weighs_short(facts, signature):
        return False
    recorded = (
        not signature.wanted <= _PRODUCTS.keys()
        and _may_be_recorded(facts, signature, free)
        and in_one_order(facts, sizes)
        and at_once.records_at_once(sizes, dtype)
    )
    return recorded or at_once.weighs_at_once(sizes, dtype, keeps=True)


def records_mask(code: CodePlan, facts: Facts, sizes: at_once.Sizes, free: bool) -> bool:
    """Whether torch itself records a dense call whose output alone is wanted, as its own attention with a mask."""
    signature = code.signature
    if not (_may_be_recorded(facts, signature, free) and takes_a_mask(facts, signature) and products.takes_masks()):
        return False
    numbers = mask_numbers(facts, sizes)
    return 0 < numbers <= products.MOST_OF_A_MASK and records_with_mask(dtype_named(signature.dtype).torch, sizes)


def _may_be_recorded(facts: Facts, signature: Signature, free: bool) -> bool:
    """Whether torch itself may record a call: not where tiles were asked for, or timed, or there is a sink."""
    return free and signature.lengths is None and facts.attention.canonical.folded_sink is None


def own_kernel(direction: Direction) -> Callable[..., Any] | None:
    """torch's own attention or its backward, where it is there."""
    return own_attention() if direction == "forward" else own_backward()


def _is_own(facts: Facts, signature: Signature) -> bool:
    """Whether it is a softmax of a multiple of q.k, and perhaps of what is added, as torch's own attention has it. Its
    backward gives the gradients of query, key and value alone."""
    widths = signature.widths
    fits = signature.wanted <= _PRODUCTS.keys() and widths.head_dim == widths.value_dim
    return fits and _is_plain_softmax(facts, widths)


def _is_plain_softmax(facts: Facts, widths: Widths) -> bool:
    """Whether it is a softmax without dropout, of scores with one factor of q.k; keys and values are two tensors."""
    scale = scale_of(facts)
    return (
        not (widths.value_is_key or widths.rope_dim)
        and scale is not None
        and is_uniform(scale)
        and not facts.attention.canonical.drops
        and facts.attention.canonical.weighs == SOFTMAX
    )


def weighs_short(facts: Facts, signature: Signature) -> bool:
    """Whether short calls may be torch's product, softmax and product, whose weights are kept for the backward."""
    return (
        not signature.sequences.ragged
        and _is_plain_softmax(facts, signature.widths)
        and facts.attention.canonical.folded_sink is None
        and _adds_to_products(facts)
    )


def _adds_to_products(facts: Facts) -> bool:
    return facts.attention.canonical.is_masked or facts.scale_and_rest is not None


def has_whole(facts: Facts, signature: Signature) -> bool:
    """Whether it computes some calls as they are: where every query sees all keys, or all up to its own."""
    return (
        _is_own(facts, signature)
        and facts.linear_scale is not None
        and facts.kv_bounds.closed_form
        and not differs_by_head(facts)
        and "batch" not in symbols(facts.attention.canonical.folded_mask)
    )


def takes_a_mask(facts: Facts, signature: Signature) -> bool:
    """Whether it computes short calls where it is handed a mask, to which what a score adds belongs."""
    return _is_own(facts, signature) and _adds_to_products(facts)


def share_needed(signature: Signature) -> float:
    """Which share of torch's own products tiles need: torch's backward computes every gradient."""
    return (1 + len(set().union(*map(_PRODUCTS.__getitem__, signature.wanted)))) / 5 if signature.wanted else 1.0


# -- what a plan says --------------------------------------------------------------------------------------------------
def said(call: PlannedCall) -> Said:
    """Which directions torch's own operations compute, and whether torch's own kernel may."""
    words = _Words(call)
    found = words.computed_whole()
    return Said(found, words.of_whole(found), "forward" in call.codes and words.sees_all())


class _Words:
    def __init__(self, call: PlannedCall) -> None:
        self.call, x = call, call.sizes
        self.sizes = (x.batch, x.heads, x.kv_heads, x.q_len, x.kv_len, x.head_dim)

    def sees_all(self) -> bool:
        """Whether every query of the call sees all keys, or all up to its own under a causal mask."""
        x = self.call.sizes
        if self.call.visible is None or self.call.ragged:
            return False
        own = kind_of_mask(self.call.facts) == "causal" and x.q_len == x.kv_len and self.call.q_offset in (None, 0)
        return own or self.call.visible == x.batch * x.heads * x.q_len * x.kv_len

    def computed_whole(self) -> dict[Direction, float]:
        """Directions in which torch's own operations compute the call, and how long it is predicted to take."""
        if self.call.ragged:
            return {}
        found: dict[Direction, float] = {}
        facts, x, weighs = self.call.facts, self.call.sizes, self._weighs()
        scores, pairs = x.q_len * x.kv_len * x.head_dim, x.batch * x.heads * x.q_len * x.kv_len
        for direction, code in self.call.codes.items():
            whole = computes_whole(code, facts) or scores < short_heads(code, facts)
            way: OwnWay = "mask"
            share, numbers = 1.0, mask_numbers(facts, self.sizes)
            if whole and self.sees_all():
                way, share = "whole", 1.0 if self.call.visible == pairs else causal_fraction(x.kv_len)
            elif direction == "backward" and weighs:
                way, share, numbers = "weights", PRODUCTS_OF_WEIGHTS, pairs
            elif scores >= heads_with_mask(code, facts):
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
        return not self._backward_has(records_mask) and self._backward_has(keeps_weights)

    def of_whole(self, own: Mapping[Direction, float]) -> tuple[str, ...]:
        """Which calls have no tiles on a CPU, and whether the described one is such."""
        if "backward" in own and self._weighs():
            kept = "the backward of this call takes the weights that its forward kept"
            rest: dict[Direction, float] = {
                direction: seconds for direction, seconds in own.items() if direction != "backward"
            }
            return (f"{kept}: of tiles are all figures but its time", *self.of_whole(rest))
        if own:
            recorded = "backward" in own and self._backward_has(records_mask)
            return (*[RECORDED] * recorded, *self._of_own(own))
        directions = [direction for direction, code in self.call.codes.items() if computes_whole(code, self.call.facts)]
        if not directions:
            return self._computed_short()
        mask = kind_of_mask(self.call.facts)
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
            "torch's own kernel": short_heads,
            "torch's own kernel, which is handed a mask": heads_with_mask,
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
