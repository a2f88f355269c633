"""One variant at run time: finds what is prepared for a call, checks the call, and launches.

What is prepared is kept by dtypes, widths, device and options, never by strides or values. Of lengths counts no more
than whether queries are few, and whether a call is short, where that has a form of its own. A cache that grows by a
token a step, or a scalar that is annealed, finds it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..codegen.launch import starting
from ..codegen.launch.descriptors import boxed_bytes
from ..codegen.launch.finish import as_read, read_of, sizes_as_read
from ..codegen.launch.launcher import KernelLauncher
from ..codegen.launch.repeating import Again
from ..codegen.launch.shared import SharedLauncher
from ..codegen.targets.triton.kernels.measures import PAIR_CELLS
from ..compiler.analysis.tiles.facts import Facts, facts_of
from ..compiler.analysis.tiles.results import PAIR_KINDS, OperandGradient
from ..compiler.planning.machines import hardware
from ..compiler.planning.signature import (
    FEW_QUERIES,
    Described,
    Direction,
    LengthClass,
    Offset,
    Signature,
    Widths,
    class_of,
    has_few_queries,
    is_short_call,
    serves_of,
    signature_of,
)
from ..compiler.planning.sources import PACKED_PAGED
from ..compiler.planning.target import Launcher, Place, Target
from ..ir.attention import Attention
from ..ir.errors import UnavailableError, WeftError
from ..ir.expr import INT32_MAX, TensorOperand
from ..ir.parse import PARSING, parse_attention
from ..ir.reference import evaluate
from . import driver
from .call import MAIN, BackwardCall, Call, Choices, Dense, Lengths, Packed, PackedPaged, Paged, Ragged, lengths_of
from .checks import DTYPES, check_backward, check_call, check_kept, fits
from .first_key import FirstKey
from .kept import any_kept, measured_of
from .lengths import check_contents, check_ragged, queries_of, rows_of, summed_by_sequence
from .repeated import Known, Repeats
from .settings import checks_values, keeps_tiles
from .sizes import SizeChecks
from .torch_private import are_plain, constant_while_tracing, current_gpu, empty_on_gpu, guard

_known: dict[str, Variant] = {}


def variant_of(attention: Attention) -> Variant:
    """The variant at run time, shared by all equal declarations."""
    found = _known.get(attention.line)
    return found if found is not None else _known.setdefault(attention.line, Variant(attention))


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


@dataclass(frozen=True)
class _Ready:
    """What is prepared for calls of one kind."""

    launcher: Launcher
    target: Target
    signature: Signature
    facts: Facts
    measures: bool  # which tiles to visit, by kernels of its own
    by_length: bool  # short calls and others have forms of their own
    timed: frozenset[tuple[bool, LengthClass]]  # as of driver.Resolved
    differs: bool  # by either: whether calls that are prepared as one may have other forms than this

    def form_of(self, query: Tensor, key: Tensor, sequences: object) -> tuple[bool, LengthClass | None]:
        """What the forms of a call of these lengths are known by."""
        short, lengths = False, None
        if self.by_length:
            short = is_short_call(query.shape[2], key.shape[-2], self.facts.traits.masked)
        if self.timed and query.dim() == key.dim() == 4:
            lengths = class_of(*lengths_of(query, key, sequences))
            lengths = lengths if (short, lengths) in self.timed else None
        return short, lengths

    def has_form_of(self, query: Tensor, key: Tensor, sequences: object) -> bool:
        """Whether its forms are those of a call of these lengths."""
        return self.form_of(query, key, sequences) == (self.signature.short_call, self.signature.lengths)

    def of(
        self, kept: Mapping[object, _Ready], at: tuple[object, ...], query: Tensor, key: Tensor, sequences: object
    ) -> tuple[tuple[object, ...], _Ready | None]:
        """What is prepared for calls of other lengths that has the forms of these, and where: itself, or None where
        there is none yet. at: where this is kept."""
        form = self.form_of(query, key, sequences)
        if form == (self.signature.short_call, self.signature.lengths):
            return at, self
        return (at, form), kept.get((at, form))


class Variant:
    """Forward and backward of one variant on any device."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.text = attention.line
        self.name = str(attention.name)
        self.facts = facts_of(attention)
        self.names = tuple(p.name for p in attention.parameters)
        self.kinds = tuple("tensor" if isinstance(p, TensorOperand) else p.dtype for p in attention.parameters)
        self.tensor_names = (*MAIN, *(n for n, kind in zip(self.names, self.kinds) if kind == "tensor"))
        self.recorded: dict[tuple[object, ...], Any] = {}  # what ops keep for kinds of calls that autograd records
        self._forwards: dict[object, _Ready] = {}
        self._backwards: dict[object, _Ready] = {}
        self.repeats = Repeats()  # of forwards
        self.first_key = FirstKey(attention)
        self._sizes = SizeChecks(self.facts, attention.parameters)

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self, call: Call, key: tuple[object, ...] | None = None) -> tuple[Tensor, Tensor]:
        """out [B, Hq, L, Dv] and lse [B, Hq, L]. Raises WeftError for a call that is not sound. key: key_of(call).

        Where scores may lie far from 0, lse is [2, B, Hq, L]: the maximum of a row, and the log of its sum.
        """
        at: tuple[object, ...] = key or key_of(call)
        query = call.query
        repeats, ready = self.repeats, self._forwards.get(at)  # in this order, against that of `forget`
        if ready is not None and ready.differs:
            at, ready = ready.of(self._forwards, at, query, call.key, call.sequences)
        if ready is not None:
            if self._sizes.needed:
                self._sizes.check(call)
            direct = type(call.sequences) is Dense or not checks_values()
            found = ready.launcher.direct(call) if direct and not (ready.measures and keeps_tiles()) else None
            if found is not None:
                if repeats.wants():
                    _look(repeats, ready, call)
                return found
        ready = self._found("forward", call, self._forwards, at)
        way = ready.launcher.direct
        out, lse = [place.beside(query) for place in self.forward_places(call.query, call.value)]
        if _is_empty(call):
            return out.zero_(), self._lse_of_nothing(call, lse)
        _run(ready, call, {"out": out, "lse": lse}, keeps=ready.measures and keeps_tiles())
        if ready.launcher.direct != way:  # more kernels are compiled: what is known does without them
            self.repeats = Repeats()
        return out, lse

    def forward_recorded(self, call: Call, key: tuple[object, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same of a call that has a backward, and the weights, where that takes them."""
        first: tuple[Tensor, Tensor] | None = None
        at, ready = key, self._forwards.get(key)
        if ready is None:
            first = self.forward(call, key)
            ready = self._forwards.get(key)
        if ready is not None and ready.differs:
            at, ready = ready.of(self._forwards, at, call.query, call.key, call.sequences)
        keeping = None if ready is None else getattr(ready.launcher, "keeping", None)
        if keeping is not None:
            if self._sizes.needed:
                self._sizes.check(call)
            found: tuple[Tensor, Tensor, Tensor] | None = keeping(call)
            if found is not None:
                if self.repeats.wants():
                    _look(self.repeats, ready, call)  # type: ignore[arg-type]
                return found
        return *(first or self.forward(call, key)), None

    def forward_again(self, call: Call, known: Known) -> tuple[Tensor, Tensor]:
        """The same of a call that fits what is known."""
        repeats = self.repeats  # before anything is launched, against `forget`
        if self._sizes.needed and (not known.checked or checks_values()):
            self._sizes.check(call)
        if (type(call.sequences) is Dense or not checks_values()) and not (known.measures and keeps_tiles()):
            found: tuple[Tensor, Tensor] | None = known.launch(call)
            if found is not None:
                if known.look is None:
                    repeats.hits += 1
                elif repeats.growing is known and repeats.wants_of_grown():
                    repeats.learn(known.look(call), known.measures, known.recorded)
                return found
        return self.forward(call)

    def forward_recorded_again(self, call: Call, known: Known) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same of a call that has a backward, and the weights, where that takes them."""
        repeats, keeping = self.repeats, known.keeping
        if keeping is not None:
            if self._sizes.needed and (not known.checked or checks_values()):
                self._sizes.check(call)
            found: tuple[Tensor, Tensor, Tensor] | None = keeping(call)
            if found is not None:
                repeats.hits += 1
                return found
        return *self.forward_again(call, known), None

    def forward_own(self, call: Call) -> tuple[Tensor, Any] | None:
        """The same, where torch itself records what computes out, and nobody wants lse; None for other calls."""
        at: tuple[object, ...] = key_of(call)
        ready = self._forwards.get(at)
        if ready is not None and ready.differs:
            at, ready = ready.of(self._forwards, at, call.query, call.key, call.sequences)
        if ready is None:
            ready = self._found("forward", call, self._forwards, at)
        elif self._sizes.needed:
            self._sizes.check(call)
        way: Callable[[Call], tuple[Tensor, Any] | None] | None = getattr(ready.launcher, "recorded", None)
        found = None if way is None else way(call)
        if found is not None and self.repeats.wants():
            with torch.no_grad():  # nobody is to see what is tried, as torch.utils.checkpoint would
                _look(self.repeats, ready, call)
        return found

    def own_again(self, call: Call, known: Known) -> tuple[Tensor, Any] | None:
        """The same of a call that fits what is known."""
        if self._sizes.needed and (not known.checked or checks_values()):
            self._sizes.check(call)
        found: tuple[Tensor, Any] | None = known.record(call)
        self.repeats.hits += found is not None
        return found

    def forward_places(self, query: Tensor, value: Tensor | None) -> tuple[Place, Place]:
        """Of out and lse."""
        batch, heads, rows, _ = query.shape
        width = value.shape[-1] if value is not None else self.attention.latent.rank  # type: ignore[union-attr]
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        shape, strides = (batch, heads, rows), (heads * rows, rows, 1)
        if self.facts.scores_lie_far:
            shape, strides = (2, *shape), (batch * heads * rows, *strides)  # type: ignore[assignment]
        return rows_like(query, heads, width), Place(shape, strides, lse_dtype)

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward_of(
        self, kind: tuple[object, ...], wanted: frozenset[str], repeats: Repeats, query: Tensor, key: Tensor,
        value: Tensor | None, operands: Mapping[str, Any], q_offset: int | Tensor | Ragged, out: Tensor, lse: Tensor,
        dout: Tensor, dlse: Tensor | None, *weights: Tensor,
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        """Gradients of the op's tensors, without the records that `backward` takes: the direct way, after a
        forward with this key, `kind`. None, with nothing done, where `backward` is to be asked.

        q_offset: of a call without lengths; else its sequences. weights: those that the forward kept, if it did."""
        at = kind, wanted, dlse is None
        ready = self._backwards.get(at)
        if ready is not None and ready.timed:
            _, ready = ready.of(self._backwards, at, query, key, q_offset)
        direct = None if ready is None else getattr(ready.launcher, "backward_of", None)
        if direct is None or (ready.measures and any_kept()):  # type: ignore[union-attr]
            return None
        if self._sizes.needed:
            self._check_sizes(query, key, value, operands, q_offset)
        given = (query, key, value, operands, q_offset, out, lse, dout, dlse, *weights)
        found: tuple[Tensor | None, ...] | None = direct(*given)
        if found is not None and repeats.wants():
            repeats.learn(_repeated(ready, *given), ready.measures, recorded=False)  # type: ignore[arg-type, union-attr]
        return found

    def backward_again(
        self, repeats: Repeats, known: Known, query: Tensor, key: Tensor, value: Tensor | None,
        operands: Mapping[str, Any], q_offset: int | Tensor | Ragged, out: Tensor, lse: Tensor, dout: Tensor,
        dlse: Tensor | None, *weights: Tensor,
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        """The same where it is like one that is known; None, with nothing done, elsewhere."""
        given = (query, key, value, operands, q_offset, out, lse, dout, dlse, *weights)
        if not known.fits(*given) or (known.measures and any_kept()):
            return None
        if self._sizes.needed:
            self._check_sizes(query, key, value, operands, q_offset)
        found: tuple[Tensor | None, ...] | None = known.launch(*given)
        repeats.hits += found is not None
        return found

    def _check_sizes(
        self, query: Tensor, key: Tensor, value: Tensor | None, operands: Mapping[str, Any],
        q_offset: int | Tensor | Ragged,
    ) -> None:  # fmt: skip
        sequences = q_offset if isinstance(q_offset, (Lengths, Packed, Paged, PackedPaged)) else Dense(q_offset)
        self._sizes.check(Call(query, key, value, None, operands, sequences, Choices(), query.shape[3]))

    def backward(self, b: BackwardCall) -> dict[str, Tensor]:
        """The gradients that are wanted, by name."""
        call = b.call
        if call.query.dim() != 4 or call.key.dim() != 4:
            check_kept(self.name, b)
        key: tuple[object, ...] = (key_of(call), b.wanted, b.dlse is None)
        ready = self._backwards.get(key)
        if ready is not None and ready.timed:
            key, ready = ready.of(self._backwards, key, call.query, call.key, call.sequences)
        if ready is not None:
            if self._sizes.needed:
                self._sizes.check(call)
            direct = None if ready.measures and any_kept() else ready.launcher.direct(b)
            if direct is not None:
                return direct
        if ready is None:
            read = {load.tensor.name for load, _ in self.facts.gradient_kinds}
            if flat := b.wanted.difference(MAIN, read):
                return self._flat(b, flat)
        ready = self._found("backward", call, self._backwards, key, b)
        if b.weights is not None and (of_weights := ready.launcher.from_weights(b)) is not None:  # type: ignore[attr-defined]
            found, sums = of_weights
            return found | self._operand_gradients(call, b.wanted, ready.facts.operand_gradients(b.wanted), sums)
        gradients = {n: rows_like(t, t.shape[1], t.shape[3]) for n, t in call.tensors.items() if n in b.wanted}
        if _is_empty(call):
            return self._nothing(b, gradients)
        found = {name: place.beside(call.query) for name, place in gradients.items()}
        results: dict[str, Any] = {"out": b.out, "lse": b.lse, "dout": b.dout, "dlse": b.dlse}
        results |= {f"d{name}": tensor for name, tensor in found.items()}
        sums = _run(ready, call, results)
        if sums:
            found |= self._operand_gradients(call, b.wanted, ready.facts.operand_gradients(b.wanted), sums)
        return found

    def _flat(self, b: BackwardCall, names: frozenset[str]) -> dict[str, Tensor]:
        """Gradients where some are of operands that no derivative reads, such as those of a mask: zeros."""
        rest = b.wanted - names
        found = self.backward(replace(b, wanted=rest)) if rest else {}
        operands = {n: t for n, t in b.call.operands.items() if n in names and isinstance(t, Tensor)}
        return found | {n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in operands.items()}

    def _lse_of_nothing(self, call: Call, lse: Tensor) -> Tensor:
        """The log-sum-exp of rows where there is no key at all: the sink, if there is one."""
        sink = self.attention.folded_sink
        if sink is None or 0 in lse.shape:
            return lse.fill_(-torch.inf)
        ragged = call.ragged
        if ragged is None:
            value = evaluate(sink, _env(call), lse.dtype, lse.device)
        elif ragged.number(call.query) == 0:
            return lse.fill_(-torch.inf)
        else:
            own, exists = queries_of(ragged, call.query, call.key)
            value = evaluate(sink, _heads(call) | own, lse.dtype, lse.device, exists)
            value = torch.where(exists, value, -torch.inf)  # what no sequence has
        if not self.facts.scores_lie_far:
            return lse.copy_(value.expand(lse.shape))
        lse[0].copy_(value.expand(lse.shape[1:]))
        lse[1].zero_()
        return lse

    def _nothing(self, b: BackwardCall, gradients: Mapping[str, Place]) -> dict[str, Tensor]:
        """Gradients where there are no pairs: 0, but for what a sink reads, which is all of the log-sum-exp."""
        call, wanted, lse, dlse = b.call, b.wanted, b.lse, b.dlse
        found = {name: place.beside(call.query).zero_() for name, place in gradients.items()}
        tensors = {n: t for n, t in call.operands.items() if n in wanted and isinstance(t, Tensor)}
        none = call.ragged is not None and call.ragged.number(call.query) == 0
        if none or not tensors or dlse is None or 0 in dlse.shape:
            return found | {n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in tensors.items()}
        if self.facts.scores_lie_far:
            lse, dlse = lse[0], dlse[0]  # of the sum of both statistics, which is what callers see
        dlse = torch.where(lse == -torch.inf, 0.0, dlse)  # of rows without a sink, and of those that no sequence has
        exists, sums = None, []
        if call.ragged is None:
            of_sinks, env = dlse.sum(-1), _env(call)
        else:
            of_sinks, own, exists = summed_by_sequence(dlse, call.ragged, call.query, call.key)
            env = _heads(call) | own
        read = [g for g in self.facts.operand_gradients(wanted) if g.kind == "sink"]
        for gradient in read:
            slope = evaluate(gradient.derivative, env, dlse.dtype, dlse.device, exists).expand(*of_sinks.shape, 1)
            sums.append(torch.where(of_sinks == 0.0, 0.0, of_sinks * slope[..., 0]))
        return found | self._operand_gradients(call, wanted, read, sums)

    def _operand_gradients(
        self, call: Call, wanted: frozenset[str], gradients: Sequence[OperandGradient], sums: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        operands = {n: t for n, t in call.operands.items() if n in wanted and isinstance(t, Tensor)}
        totals = {}
        for name, tensor in operands.items():
            own = [(g, total) for g, total in zip(gradients, sums) if g.load.tensor.name == name]
            if len(own) == 1 and own[0][0].kind in PAIR_KINDS:
                totals[name] = own[0][1]  # in its shape already: a large one is not gone through again
                continue
            dtype = torch.float64 if torch.float64 in {total.dtype for _, total in own} else torch.float32
            totals[name] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            for gradient, total in own:
                if gradient.kind in PAIR_KINDS:
                    totals[name].add_(total)
                else:
                    scatter(gradient, total, call, totals[name])
        return {n: total.to(operands[n].dtype) for n, total in totals.items()}

    # -- what is prepared ----------------------------------------------------------------------------------------------
    def _found(
        self, direction: Direction, call: Call, kept: dict[object, _Ready], key: object, b: BackwardCall | None = None
    ) -> _Ready:
        """What is prepared for such calls. The call is checked: in full the first time, then what may vary."""
        ready, ragged = kept.get(key), call.ragged
        if ready is None or not fits(call):
            if b is not None:
                check_kept(self.name, b)
            if ragged is not None and call.query.dim() == call.key.dim() == 4:
                check_ragged(self.name, call.query, call.key, ragged)
            check_call(self.attention, call)
            ready = kept.get(key)
        if ragged is not None:
            check_contents(self.name, call.query, call.key, ragged)
            if b is None:
                self.first_key.ragged(ragged, call.query, call.key)
        if b is not None:
            check_backward(self.name, b, self.facts.scores_lie_far)
        self._sizes.check(call)
        ready = ready or self._prepare(direction, call, kept, key, b)
        misfit = ready.target.misfit(ready.signature, call)
        if misfit is None:
            return ready
        if call.choices.target == ready.target.name:
            raise UnavailableError(f"{self.name}: target {misfit}")
        unfit = frozenset({ready.target.name})
        return kept.get((key, unfit)) or self._prepare(direction, call, kept, (key, unfit), b, unfit)

    def _prepare(
        self, direction: Direction, call: Call, kept: dict[object, _Ready], key: object, b: BackwardCall | None,
        unfit: frozenset[str] = frozenset(),
    ) -> _Ready:  # fmt: skip
        if call.query.is_cuda:
            starting.begin()
        signature = self.signature(direction, call, b.wanted if b else frozenset())
        machine = hardware.for_device(call.query.device)
        options = call.choices
        asked = (options.target, options.schedule, unfit)
        with PARSING:
            signatures = driver.shared_out(self.attention, signature, machine, *asked)
        found = []
        for own in signatures:
            with PARSING:
                made = driver.compile_kernels(self.attention, own, machine, *asked)
            found.append(self._ready(made.resolved, made.modules, call.query))
        ready = found[0]
        if len(found) > 1:
            ready = replace(ready, launcher=SharedLauncher(*(one.launcher for one in found)))
        return kept.setdefault(key, ready)

    def _ready(self, resolved: driver.Resolved, modules: Sequence[ModuleType], query: Tensor) -> _Ready:
        target, code = resolved.target, resolved.code
        facts = self.facts.with_order(code.signature.sequences.in_order)
        launcher = target.bind(modules, code, facts, query.device)
        if isinstance(launcher, KernelLauncher) and query.is_cuda:
            launcher.device.current = current_gpu
            if empty_on_gpu is not None:
                launcher.device.empty = empty_on_gpu
            launcher.device.guard = guard
        elif hasattr(launcher, "guard"):
            launcher.guard = guard
        measures = code.tile_source != "program" and not code.looks_first
        differs = resolved.by_length or bool(resolved.timed)
        return _Ready(
            launcher, target, code.signature, facts, measures, resolved.by_length, resolved.timed, differs
        )  # fmt: skip

    def forget(self) -> None:
        """Prepare anew, as after tuning. What calls under way prepare and learn goes where nobody looks anymore."""
        self._forwards, self._backwards, self.recorded = {}, {}, {}
        self.repeats = Repeats()

    def signature(self, direction: Direction, call: Call, wanted: frozenset[str] = frozenset()) -> Signature:
        """The static half of a call."""
        value_dim = call.value.shape[3] if call.value is not None else self.attention.latent.rank  # type: ignore[union-attr]
        rope_dim = 0 if call.rope is None else call.rope.shape[3]
        described = Described(
            direction, hardware.for_device(call.query.device).arch, DTYPES[call.query.dtype],
            Widths(call.query.shape[3], value_dim, rope_dim, call.value is None), call.sequences.kind,
            offset_kind(call.sequences.q_offset), wanted, call.choices.deterministic,
            rows=(call.query.shape[2], call.key.shape[2]), number=_number(call),
            lengths=lengths_of(call.query, call.key, call.sequences),
            offsets_64=needs_offsets_64(call.operands),
            doubles=call.query.is_cuda and has_doubles(call.operands),
            boxed=boxed_of(self.facts, call.operands) if call.query.is_cuda else 0,
            options=frozenset(call.read or ()),
        )  # fmt: skip
        sums_pairs = self.facts.with_order(call.sequences.kind.in_order).sums_pairs(wanted)
        return signature_of(described, masked=self.attention.is_masked, sums_pairs=sums_pairs)


def _look(repeats: Repeats, ready: _Ready, call: Call) -> None:
    """Learn what serves calls like this one; where there were others before, also what serves those of more keys."""
    tensors = [t for t in (call.query, call.key, call.value, *call.operands.values()) if isinstance(t, Tensor)]
    if not are_plain(tensors):  # a call like it has to go through torch's dispatcher, as it did
        return
    recorded = any([t.requires_grad for t in tensors])
    look = partial(_repeated, ready)
    repeats.learn(look(call), ready.measures, recorded)
    growing: Callable[..., Again | None] | None = getattr(ready.launcher, "growing", None)
    if growing is not None and repeats.wants_growing() and (found := growing(call)) is not None:
        fits, rows, masked = found.fits, call.query.shape[2], ready.facts.traits.masked
        keys_decide = is_short_call(rows, rows, masked) != is_short_call(rows, rows + 1, masked)
        if (ready.by_length and keys_decide) or ready.timed:
            fits = lambda c: found.fits(c) and ready.has_form_of(c.query, c.key, c.sequences)  # noqa: E731
        repeats.growing = Known(fits, found.launch, ready.measures, recorded, look, found.keeping)


def _repeated(ready: _Ready, *given: Any) -> Again | None:
    """What serves calls like the one that these are the arguments of."""
    found: Callable[..., Again | None] | None = getattr(ready.launcher, "repeated", None)
    return None if found is None else found(*given)


def key_of(call: Call) -> tuple[object, ...]:
    """What of a call the prepared kernels depend on."""
    query, key, value, rope, options = call.query, call.key, call.value, call.rope, call.choices
    sequences = call.sequences
    offset = sequences.q_offset
    _, _, rows, width = query.shape
    kind = type(sequences)  # quicker than isinstance, as names are than a loop: these are of every step of a decode
    few_queries: object = rows <= FEW_QUERIES
    if kind is PackedPaged:
        number = sequences.number(query)  # type: ignore[union-attr]
        few_queries = has_few_queries("forward", PACKED_PAGED, rows, number) or serves_of(
            "forward", PACKED_PAGED, rows, number
        )
    found: tuple[object, ...] = (
        query.dtype, key.dtype, query.get_device(), key.get_device(), width, call.head_dim,
        type(offset), options.target, options.schedule, options.deterministic, few_queries,
    )  # fmt: skip
    if isinstance(offset, Tensor):
        found += (offset.dtype, offset.get_device(), offset.is_meta, offset.dim())
    if kind is not Dense:
        found += (sequences.kind,)
        if kind is Packed:
            found += _kind_of(sequences.cu_q) + _kind_of(sequences.cu_kv)  # type: ignore[union-attr]
        elif kind is PackedPaged:
            found += _kind_of(sequences.cu_q) + _kind_of(sequences.kv_lens)  # type: ignore[union-attr]
            found += (sequences.page, *_kind_of(sequences.table))  # type: ignore[union-attr]
        elif isinstance(sequences, Dense):
            found += tuple([each for t in sequences.tensors.values() for each in _kind_of(t)])
        else:
            found += _kind_of(sequences.kv_lens) + _kind_of(sequences.q_lens)  # type: ignore[union-attr]
            if kind is Paged:
                found += (sequences.page, *_kind_of(sequences.table))  # type: ignore[union-attr]
    if value is not None:
        sizes = value.shape
        found += (value.dtype, value.get_device(), len(sizes), sizes[-1])
    if rope is not None:
        found += (rope.dtype, rope.get_device(), rope.dim(), rope.shape[-1])
    if call.read is not None:
        found += (*call.read, *kinds_of(call.read))
    return found + kinds_of(call.operands) if call.operands else found


def _kind_of(lengths: Tensor | None) -> tuple[object, ...]:
    """What of lengths, or of a table of blocks, the prepared kernels depend on."""
    return (None,) if lengths is None else (lengths.dtype, lengths.get_device(), lengths.dim())


def offset_kind(q_offset: object) -> Offset:
    if q_offset is None:
        return "bottom_right"
    return "per_row" if isinstance(q_offset, Tensor) else "number"


def _number(call: Call) -> int:
    """How many sequences there are."""
    return call.query.shape[0] if call.ragged is None else call.ragged.number(call.query)


def _is_empty(call: Call) -> bool:
    """Whether there is nothing to compute, whatever lengths say."""
    ragged = call.ragged
    none = ragged is not None and ragged.number(call.query) == 0
    return none or 0 in (call.query.shape[0], call.query.shape[2], call.kv_rows)


def kinds_of(operands: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a variant's own operands the prepared kernels depend on."""
    found: list[object] = []
    for operand in operands.values():
        if isinstance(operand, Tensor):
            found += (
                operand.dtype, operand.dim(), operand.get_device(), operand.is_meta, _reach(operand) > INT32_MAX,
            )  # fmt: skip
            found += (boxed_bytes(operand),) if operand.is_cuda and operand.dim() > 1 else ()
        else:
            found.append(type(operand))
    return tuple(found)


def has_doubles(operands: Mapping[str, Any]) -> bool:
    """Whether one is a tensor of float64."""
    return torch.float64 in [v.dtype for v in operands.values() if isinstance(v, Tensor)]


def boxed_of(facts: Facts, operands: Mapping[str, Any], otherwise: int = 0) -> int:
    """Bytes of an element of what pairs read, where tiles of it may be brought; `otherwise`: if it is not given."""
    read = facts.boxed_read
    if read is None:
        return 0
    operand = operands.get(read.tensor.name)
    return boxed_bytes(operand) if isinstance(operand, Tensor) else otherwise


def needs_offsets_64(operands: Mapping[str, object]) -> bool:
    """Whether places in a tensor operand lie so far apart that offsets need 64 bits."""
    return any(isinstance(v, Tensor) and _reach(v) > INT32_MAX for v in operands.values())


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last place of a tensor, or of its gradient, which repeats none."""
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())])
    return max(last, tensor.numel() - 1)


def _run(ready: _Ready, call: Call, results: Mapping[str, Any], keeps: bool | None = None) -> list[Tensor]:
    """keeps: what is measured of tiles is kept, and what was is used; None: where it was kept for these tensors."""
    query, launcher = call.query, ready.launcher
    with _on_device(query):
        partition = launcher.partition(call, results)
        places = launcher.workspace(call, results, partition)
        found = None
        if keeps or (keeps is None and ready.measures and any_kept()):
            found = measured_of(ready.facts, call, make=bool(keeps))
        if found is None:
            workspace = {name: place.beside(query) for name, place in places.items()} if places else places
            return launcher(call, results, workspace, partition)  # type: ignore[arg-type]
        names = launcher.measures(partition)
        known = {name: found[key] for name, key in names.items() if key in found}
        if names.keys() - known.keys() <= {PAIR_CELLS}:  # nobody asks what it found
            known |= {name: query.new_empty(0, dtype=torch.uint8) for name in names.keys() - known.keys()}
        workspace = {n: known[n] if n in known else place.beside(query) for n, place in places.items()}
        sums = launcher(call, results, workspace, partition._replace(known=frozenset(known)))
        found |= {key: workspace[name] for name, key in names.items() if name not in known}
        return sums


_HERE = nullcontext()


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the operands' GPU the current one: Triton launches there, whatever the caller's current device is."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


def rows_like(tensor: Tensor, heads: int, width: int) -> Place:
    """[B, heads, rows, width] in the memory order of `tensor` ([B, L, H, D] views stay such)."""
    batch, _, rows, _ = tensor.shape
    of_head, of_row = (width, heads * width) if tensor.stride(1) < tensor.stride(2) else (rows * width, width)
    return Place((batch, heads, rows, width), (heads * rows * width, of_head, of_row, 1), tensor.dtype)


def contiguous_like(tensor: Tensor) -> Place:
    strides = tuple([math.prod(tensor.shape[n + 1 :]) for n in range(tensor.dim())])
    return Place(tuple(tensor.shape), strides, tensor.dtype)


def _env(call: Call) -> dict[str, Any]:
    """Values of the symbols and operands of a dense call, to broadcast over [B, Hq, L] or [B, Hq, T]."""
    return _heads(call) | _dense_rows(call, call.query.device)


def _heads(call: Call) -> dict[str, Any]:
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    head = torch.arange(heads, device=call.query.device).view(1, -1, 1)
    return {
        "head": head, "kv_head": head // (heads // kv_heads), "group": heads // kv_heads, "head_dim": call.head_dim,
        **call.operands,
    }  # fmt: skip


def scatter(gradient: OperandGradient, total: Tensor, call: Call, result: Tensor) -> None:
    """Add the sums of one read, shaped [B, Hq], [B, Hq, L] or [B, Hq, T], to the places that it was read from."""
    device, read = total.device, read_of(gradient)
    sums = total if total.dim() == 3 else total[..., None]
    if device.type == "cuda" and read is not None and type(call.sequences) is Dense:
        is_whole = result.shape == sizes_as_read(read, *sums.shape)
        if is_whole and (gradient.kind != "row" or (type(call.q_offset) is int and call.q_offset == 0)):
            result += as_read(sums, read.over, read.order, result)  # the usual one, as the direct way does it
            return
    by_head = total.dim() == 2 and [i.text for i in gradient.load.index] == ["head"]
    if by_head and result.shape[0] >= total.shape[1]:  # in few launches; nobody reads a shorter operand
        result[: total.shape[1]] += total.sum(0)
        return
    env = _heads(call)
    ragged, exists = call.ragged, None
    if ragged is None:
        env |= _dense_rows(call, device)
    else:
        own, exists = rows_of(ragged, gradient.kind, call.query, call.key)
        env |= own
        sums = torch.where(exists, sums, 0.0)  # what no sequence has was not written
    index = [evaluate(i, env, torch.float64, device, exists).expand(sums.shape) for i in gradient.load.index]
    if exists is not None:
        index = [torch.where(exists, places, 0) for places in index]
    if not index:  # the one number of a tensor without dimensions
        result.add_(sums.sum())
        return
    if device.type == "cuda":
        result.index_put_(tuple(index), sums, accumulate=True)  # sorts, so the order of additions is fixed
        return
    flat = torch.zeros_like(index[0])
    for places, extent in zip(index, result.shape):
        flat = flat * extent + places
    # index_put_ adds in any order on a CPU; bincount goes through its input once, from first to last
    result += torch.bincount(flat.flatten(), sums.flatten(), result.numel()).view(result.shape).to(result.dtype)


def _dense_rows(call: Call, device: torch.device) -> dict[str, Any]:
    """Symbols of rows, that broadcast over [B, Hq, rows]."""
    batch, _, q_len, _ = call.query.shape
    kv_len = call.key.shape[2]
    offset = call.q_offset.view(-1, 1, 1) if isinstance(call.q_offset, Tensor) else call.q_offset
    rows = call.sequences
    assert isinstance(rows, Dense)
    return {
        "batch": torch.arange(batch, device=device).view(-1, 1, 1), "q_len": q_len, "kv_len": kv_len,
        "q_pos": rows.q_rows(q_len, device) + offset, "kv_pos": rows.kv_rows(kv_len, device),
    }  # fmt: skip


def check_trainable(variant: Variant, has_value: bool, wanted: Sequence[str], paged: bool = False) -> None:
    """Raise where a gradient that is wanted cannot be computed."""
    if paged and wanted:
        raise WeftError(
            f"{variant.name}: a call with block_table has no backward: call under torch.no_grad(), or gather the pages "
            "into padded operands, and pass kv_lens= alone, to train"
        )
    if not has_value and wanted:
        raise WeftError(
            f"{variant.name}: the absorbed form has no backward; call with uk=, uv= and form='expanded' to train"
        )


__all__ = ["Variant", "check_trainable", "contiguous_like", "forget", "rows_like", "variant_of", "variant_of_text"]
