"""One variant at run time: finds what is prepared for a call, checks the call, and launches.

What is prepared is kept by dtypes, widths, device and options, never by strides or values. Of lengths counts no more
than whether queries are few, and whether a call is short, where that has a form of its own: a cache that grows by a
token a step, or a scalar that is annealed, finds it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...codegen.launch.fast.repeats import Known, Repeats
from ...codegen.launch.fast.ways import nothing_yet
from ...codegen.torch_private import are_plain, constant_while_tracing
from ...compiler.analysis.tiles.facts import facts_of
from ...compiler.planning.signature import Direction, is_short_call
from ...compiler.planning.target import Place
from ...ir.attention import Attention
from ...ir.errors import UnavailableError, collected
from ...ir.expr import TensorOperand
from ...ir.parse import parse_attention
from .. import descales, driver
from ..call import MAIN, BackwardCall, Call, Choices, Dense
from ..check import check_call, fits
from ..check.sequences import check_ragged
from ..check.sizes import SizeChecks
from ..check.tensors import check_backward, check_kept, trainable_problems
from ..check.values import check_contents
from ..settings import checks_values, keeps_tiles
from .first_key import FirstKey
from .gradients import gradients_of_nothing, lse_of_nothing, operand_gradients, rows_like
from .kept import any_kept
from .key import key_of
from .prepared import Prepared, prepare

_known: dict[str, Variant] = {}


def variant_of(attention: Attention) -> Variant:
    """The variant at run time, shared by all equal declarations."""
    found = _known.get(attention.canonical.line)
    return found if found is not None else _known.setdefault(attention.canonical.line, Variant(attention))


def forget() -> None:
    """Choose, load and prepare anew, as after tuning."""
    driver.forget()
    for variant in list(_known.values()):
        variant.forget()


def variant_of_text(text: str) -> Variant:
    """The variant of a canonical text, declared here or not: an exported program brings its text along."""
    found = _known.get(text)
    return found if found is not None else _known.setdefault(text, variant_of(parse_attention(text)))


@constant_while_tracing
def say_of_first_key(text: str) -> None:
    """Of a traced call of the variant with this text, whose own q_offset is negative."""
    variant_of_text(text).first_key.traced()


class Variant:
    """Forward and backward of one variant on any device."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.text = attention.canonical.line
        self.name = str(attention.name)
        self.facts = facts_of(attention)
        self.names = tuple(p.name for p in attention.canonical.parameters)
        self.kinds = tuple(
            "tensor" if isinstance(p, TensorOperand) else p.dtype for p in attention.canonical.parameters
        )
        self.tensor_names = (*MAIN, *(n for n, kind in zip(self.names, self.kinds) if kind == "tensor"))
        self.recorded: dict[object, Any] = {}  # what is kept for kinds of calls that autograd records
        self._forwards: dict[object, Prepared] = {}
        self._backwards: dict[object, Prepared] = {}
        self.repeats = Repeats()  # of forwards
        self.first_key = FirstKey(attention)
        self._sizes = SizeChecks(self.facts, attention.canonical.parameters)

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self, call: Call, key: object = None) -> tuple[Tensor, Tensor]:
        """out [B, Hq, L, Dv] and lse [B, Hq, L]. Raises WeftError for a call that is not sound. key: key_of(call).

        Where scores may lie far from 0, lse is [2, B, Hq, L]: the maximum of a row, and the log of its sum.
        """
        at = key or key_of(call)
        query = call.query
        repeats, ready = self.repeats, self._forwards.get(at)  # in this order, against that of `forget`
        if ready is not None and ready.differs:
            at, ready = ready.of(self._forwards, at, call)
        if ready is not None:
            if self._sizes.needed:
                self._sizes.check(call)
            direct = type(call.sequences) is Dense or not checks_values()
            if direct and ready.measures:
                direct = not keeps_tiles()  # only the longer way keeps what is measured
            found = ready.launcher.fast.direct(call) if direct else None
            if found is not None:
                if repeats.wants():
                    _look(repeats, ready, call)
                return found
        ready = self._found("forward", call, at)
        ways = ready.launcher.fast
        out, lse = [place.beside(query) for place in self.forward_places(query, call.key, call.value, call.choices)]
        if _is_empty(call):
            return out.zero_(), lse_of_nothing(self.facts, call, lse)
        ready.run(call, {"out": out, "lse": lse}, keeps=ready.measures and keeps_tiles())
        if ready.launcher.fast is not ways:  # more kernels are compiled: what is known does without them
            self.repeats = Repeats()
        return out, lse

    def forward_like(self, call: Call, known: Known) -> tuple[Tensor, Tensor]:
        """The same of a call that fits what is known."""
        return self.forward_again(call, known) or self.forward(call)

    def forward_again(self, call: Call, known: Known) -> tuple[Tensor, Tensor] | None:
        """The same where what is known takes the call; None, with nothing done, where it does not."""
        repeats = self.repeats  # before anything is launched, against `forget`
        if self._sizes.needed and (not known.checked or checks_values()):
            self._sizes.check(call)
        if (known.measures and keeps_tiles()) or (type(call.sequences) is not Dense and checks_values()):
            return None
        found: tuple[Tensor, Tensor] | None = known.launch(call)
        if found is not None:
            if known.look is None:
                repeats.hits += 1
            else:
                repeats.grew(known, call)
        return found

    def forward_keeping(self, call: Call, key: object) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same of a call that has a backward, and the weights, where that takes them."""
        first: tuple[Tensor, Tensor] | None = None
        at, ready = key, self._forwards.get(key)
        if ready is None:
            first = self.forward(call, key)
            ready = self._forwards.get(key)
        if ready is not None and ready.differs:
            at, ready = ready.of(self._forwards, at, call)
        if ready is not None and ready.launcher.fast.keeping is not nothing_yet:
            if self._sizes.needed:
                self._sizes.check(call)
            found: tuple[Tensor, Tensor, Tensor] | None = ready.launcher.fast.keeping(call)
            if found is not None:
                if self.repeats.wants():
                    _look(self.repeats, ready, call)
                return found
        return *(first or self.forward(call, key)), None

    def forward_keeping_like(self, call: Call, known: Known) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same of a call that fits what is known, which keeps weights."""
        repeats = self.repeats
        if self._sizes.needed and (not known.checked or checks_values()):
            self._sizes.check(call)
        found = known.keeping(call)  # type: ignore[misc]
        if found is not None:
            repeats.hits += 1
            return found
        return *self.forward_like(call, known), None

    def forward_own(self, call: Call) -> tuple[Tensor, Any] | None:
        """The same, where torch itself records what computes out, and nobody wants lse; None for other calls."""
        at: object = key_of(call)
        ready = self._forwards.get(at)
        if ready is not None and ready.differs:
            at, ready = ready.of(self._forwards, at, call)
        if ready is None:
            ready = self._found("forward", call, at)
        elif self._sizes.needed:
            self._sizes.check(call)
        found: tuple[Tensor, Any] | None = ready.launcher.fast.recorded(call)
        if found is not None and self.repeats.wants():
            with torch.no_grad():  # nobody is to see what is tried, as torch.utils.checkpoint would
                _look(self.repeats, ready, call)
        return found

    def own_again(self, call: Call, known: Known) -> tuple[Tensor, Any] | None:
        """The same of a call that fits what is known."""
        repeats = self.repeats
        if self._sizes.needed and (not known.checked or checks_values()):
            self._sizes.check(call)
        found: tuple[Tensor, Any] | None = known.record(call)  # type: ignore[misc]
        if known.look is None:
            repeats.hits += found is not None
        elif found is not None:
            with torch.no_grad():  # as in forward_own
                repeats.grew(known, call)
        return found

    def forward_places(
        self, query: Tensor, key: Tensor, value: Tensor | None, choices: Choices
    ) -> tuple[Place, Place]:  # fmt: skip
        """Of out and lse."""
        batch, heads, rows, _ = query.shape
        width = value.shape[-1] if value is not None else self.attention.latent.rank  # type: ignore[union-attr]
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        shape, strides = (batch, heads, rows), (heads * rows, rows, 1)
        if self.facts.scores_lie_far:
            shape, strides = (2, *shape), (batch * heads * rows, *strides)  # type: ignore[assignment]
        out = rows_like(query, heads, width)._replace(dtype=descales.out_dtype_of(query, key, value, choices.out))
        return out, Place(shape, strides, lse_dtype)

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward_directly(self, b: BackwardCall, key: object, repeats: Repeats) -> Sequence[Tensor | None] | None:
        """Gradients of the op's tensors, in their order, the direct way; None, with nothing done, where `backward` is
        to be asked. key: of the call, which the forward had."""
        ready = self._backwards.get((key, b.wanted, b.dlse is None))
        if ready is not None and ready.timed:
            _, ready = ready.of(self._backwards, (key, b.wanted, b.dlse is None), b.call)
        if ready is None or ready.launcher.fast.direct is nothing_yet or (ready.measures and any_kept()):
            return None
        if self._sizes.needed:
            self._sizes.check(b.call)
        found: Sequence[Tensor | None] | None = ready.launcher.fast.direct(b)
        if found is not None and repeats.wants():
            repeats.learn(ready.launcher.fast.like(b), ready.measures, recorded=False)
        return found

    def backward_like(self, b: BackwardCall, repeats: Repeats) -> Sequence[Tensor | None] | None:
        """The same where it is like one that is known."""
        known = repeats.known
        if known is None or not known.fits(b) or (known.measures and any_kept()):
            return None
        if self._sizes.needed:
            self._sizes.check(b.call)
        found: Sequence[Tensor | None] | None = known.launch(b)
        repeats.hits += found is not None
        return found

    def backward(self, b: BackwardCall) -> dict[str, Tensor]:
        """The gradients that are wanted, by name."""
        call = b.call
        if call.query.dim() != 4 or call.key.dim() != 4:
            check_kept(self.name, b)
        at: object = (key_of(call), b.wanted, b.dlse is None)
        ready = self._backwards.get(at)
        if ready is not None and ready.timed:
            at, ready = ready.of(self._backwards, at, call)
        if ready is not None:
            if self._sizes.needed:
                self._sizes.check(call)
            direct = None if ready.measures and any_kept() else ready.launcher.fast.direct(b)
            if direct is not None:
                return {n: g for n, g in zip(self.tensor_names, direct) if n in b.wanted}
        if ready is None:
            read = {load.tensor.name for load, _ in self.facts.gradient_kinds}
            if flat := b.wanted.difference(MAIN, read):
                return self._flat(b, flat)
        ready = self._found("backward", call, at, b)
        if b.weights is not None and (of_weights := ready.launcher.from_weights(b)) is not None:  # type: ignore[attr-defined]
            found, sums = of_weights
            return found | operand_gradients(call, b.wanted, ready.facts.operand_gradients(b.wanted), sums)
        gradients = {n: rows_like(t, t.shape[1], t.shape[3]) for n, t in call.tensors.items() if n in b.wanted}
        if _is_empty(call):
            return gradients_of_nothing(self.facts, b, gradients)
        found = {name: place.beside(call.query) for name, place in gradients.items()}
        results: dict[str, Any] = {"out": b.out, "lse": b.lse, "dout": b.dout, "dlse": b.dlse}
        results |= {f"d{name}": tensor for name, tensor in found.items()}
        sums = ready.run(call, results)
        if sums:
            found |= operand_gradients(call, b.wanted, ready.facts.operand_gradients(b.wanted), sums)
        return found

    def _flat(self, b: BackwardCall, names: frozenset[str]) -> dict[str, Tensor]:
        """Gradients where some are of operands that no derivative reads, such as those of a mask: zeros."""
        rest = b.wanted - names
        found = self.backward(replace(b, wanted=rest)) if rest else {}
        operands = {n: t for n, t in b.call.operands.items() if n in names and isinstance(t, Tensor)}
        return found | {n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in operands.items()}

    def check_sizes(self, call: Call) -> None:
        """Raise WeftError for sizes and values that kernels could not compute with. Of tensors the shapes count."""
        if self._sizes.needed:
            self._sizes.check(call)

    # -- what is prepared ----------------------------------------------------------------------------------------------
    def _found(self, direction: Direction, call: Call, at: object, b: BackwardCall | None = None) -> Prepared:
        """What is prepared for such calls. The call is checked: in full the first time, then what may vary."""
        kept = self._forwards if b is None else self._backwards
        ready, ragged = kept.get(at), call.ragged
        if ready is None or not fits(call):
            if b is not None:
                check_kept(self.name, b)
            if ragged is not None and call.query.dim() == call.key.dim() == 4:
                check_ragged(self.name, call.query, call.key, ragged)
            check_call(self.attention, call)
            ready = kept.get(at)
        if ragged is not None:
            check_contents(self.name, call.query, call.key, ragged)
            if b is None:
                self.first_key.ragged(ragged, call.query, call.key)
        if b is not None:
            check_backward(self.name, b, self.facts.scores_lie_far)
        self._sizes.check(call)
        wanted: frozenset[str] = frozenset() if b is None else b.wanted
        ready = ready or kept.setdefault(at, self._prepare(direction, call, wanted))
        misfit = ready.target.misfit(ready.signature, call)
        if misfit is None:
            return ready
        if call.choices.target == ready.target.name:
            raise UnavailableError(f"{self.name}: target {misfit}")
        unfit = frozenset({ready.target.name})
        return kept.get((at, unfit)) or kept.setdefault((at, unfit), self._prepare(direction, call, wanted, unfit))

    def _prepare(
        self, direction: Direction, call: Call, wanted: frozenset[str], unfit: frozenset[str] = frozenset()
    ) -> Prepared:
        return prepare(self.attention, self.facts, direction, call, wanted, unfit)

    def forget(self) -> None:
        """Prepare anew, as after tuning. What calls under way prepare and learn goes where nobody looks anymore."""
        self._forwards, self._backwards, self.recorded = {}, {}, {}
        self.repeats = Repeats()


def _look(repeats: Repeats, ready: Prepared, call: Call) -> None:
    """Learn what serves calls like this one; where there were others before, also what serves those of more keys."""
    given = call.query, call.key, call.value, call.rope, *call.operands.values()
    tensors = [t for t in given if isinstance(t, Tensor)]
    if not are_plain(tensors):  # a call like it has to go through torch's dispatcher, as it did
        return
    recorded = any([t.requires_grad for t in tensors])
    look = partial(_like, ready)
    repeats.learn(look(call), ready.measures, recorded)
    if repeats.wants_growing() and (found := ready.launcher.fast.growing(call)) is not None:
        fits, rows, masked = found.fits, call.query.shape[2], ready.facts.traits.masked
        keys_decide = is_short_call(rows, rows, masked) != is_short_call(rows, rows + 1, masked)
        if (ready.by_length and keys_decide) or ready.timed:
            fits = lambda c: found.fits(c) and ready.serves(c)  # noqa: E731
        repeats.growing = Known(fits, found.launch, ready.measures, recorded, look, found.keeping, found.record)


def _like(ready: Prepared, call: Call) -> Any:
    return ready.launcher.fast.like(call)


def _is_empty(call: Call) -> bool:
    """Whether there is nothing to compute, whatever lengths say."""
    ragged = call.ragged
    none = ragged is not None and ragged.number(call.query) == 0
    return none or 0 in (call.query.shape[0], call.query.shape[2], call.kv_rows)


def check_trainable(
    variant: Variant, main: Sequence[Tensor | None], wanted: Sequence[str], paged: bool = False
) -> None:  # fmt: skip
    """Raise where a gradient that is wanted cannot be computed. main: query, key, value and perhaps more."""
    if problems := trainable_problems(main, wanted, paged):
        raise collected(variant.name, problems)


__all__ = ["Variant", "check_trainable", "forget", "variant_of", "variant_of_text"]
