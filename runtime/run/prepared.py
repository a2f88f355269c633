"""What is prepared for calls of one kind: a launcher with its plan, made by the driver, and its longer way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...codegen.launch import starting
from ...codegen.launch.shared import SharedLauncher
from ...codegen.targets.triton.kernels.measures import PAIR_CELLS
from ...compiler.analysis.tiles.facts import Facts
from ...compiler.planning.machines import hardware
from ...compiler.planning.signature import Direction, LengthClass, Signature, class_of, is_short_call
from ...compiler.planning.target import Launcher, Target
from ...ir.attention import Attention
from ...ir.parse import PARSING
from .. import driver
from ..call import Call, lengths_of
from .kept import any_kept, measured_of
from .key import signature_of_call

Form = tuple[bool, LengthClass | None]  # whether a call is short, and its class of lengths, where these count


@dataclass(frozen=True)
class Prepared:
    """What is prepared for calls of one kind."""

    launcher: Launcher
    target: Target
    signature: Signature
    facts: Facts
    measures: bool  # which tiles to visit, by kernels of its own
    by_length: bool  # short calls and others have forms of their own
    timed: frozenset[tuple[bool, LengthClass]]  # as of driver.Resolved
    differs: bool  # by either: whether calls that are prepared as one may have other forms than this

    def form_of(self, call: Call) -> Form:
        """What the forms of a call are known by."""
        query, key = call.query, call.key
        short, lengths = False, None
        if self.by_length:
            short = is_short_call(query.shape[2], key.shape[-2], self.facts.traits.masked)
        if self.timed and query.dim() == key.dim() == 4:
            lengths = class_of(*lengths_of(query, key, call.sequences))
            lengths = lengths if (short, lengths) in self.timed else None
        return short, lengths

    def serves(self, call: Call) -> bool:
        """Whether its forms are those of the call."""
        return self.form_of(call) == (self.signature.short_call, self.signature.lengths)

    def of(self, kept: Mapping[object, Prepared], at: object, call: Call) -> tuple[object, Prepared | None]:
        """What is prepared for calls of the same kind that has the forms of this one, and where: itself, or None where
        there is none yet. at: where this is kept."""
        form = self.form_of(call)
        if form == (self.signature.short_call, self.signature.lengths):
            return at, self
        return (at, form), kept.get((at, form))

    # -- its longer way ------------------------------------------------------------------------------------------------
    def run(self, call: Call, results: Mapping[str, Any], keeps: bool | None = None) -> list[Tensor]:
        """Launch, and give the sums of reads that have a gradient.

        keeps: what is measured of tiles is kept, and what was is used; None: where it was kept for these tensors.
        """
        query, launcher = call.query, self.launcher
        if call.value is not None and call.value.stride(3) != 1:  # an FP8 value whose length is contiguous
            call = replace(call, value=call.value.contiguous())
        with _on_device(query):
            partition = launcher.partition(call, results)
            places = launcher.workspace(call, results, partition)
            found = None
            if keeps or (keeps is None and self.measures and any_kept()):
                found = measured_of(self.facts, call, make=bool(keeps))
            if found is None:
                workspace = {name: place.beside(query) for name, place in places.items()} if places else {}
                return launcher(call, results, workspace, partition)
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


def prepare(
    attention: Attention, facts: Facts, direction: Direction, call: Call, wanted: frozenset[str],
    unfit: frozenset[str] = frozenset(),
) -> Prepared:  # fmt: skip
    """What serves calls of this kind. unfit: targets that cannot take its tensors."""
    if call.query.is_cuda:
        starting.begin()
    signature = signature_of_call(facts, direction, call, wanted)
    machine = hardware.for_device(call.query.device)
    options = call.choices
    asked = (options.target, options.schedule, unfit)
    with PARSING:
        signatures = driver.shared_out(attention, signature, machine, *asked)
    found = []
    for own in signatures:
        with PARSING:
            made = driver.compile_kernels(attention, own, machine, *asked)
        found.append(_bound(facts, made.resolved, made.modules, call.query))
    first, *others = found
    if not others:
        return first
    return replace(first, launcher=SharedLauncher(*(one.launcher for one in found)))


def _bound(facts: Facts, resolved: driver.Resolved, modules: Sequence[ModuleType], query: Tensor) -> Prepared:
    target, code = resolved.target, resolved.code
    facts = facts.with_order(code.signature.sequences.in_order)
    launcher = target.bind(modules, code, facts, query.device)
    measures = code.tile_source != "program" and not code.looks_first
    differs = resolved.by_length or bool(resolved.timed)
    return Prepared(
        launcher, target, code.signature, facts, measures, resolved.by_length, resolved.timed, differs
    )  # fmt: skip
