"""The whole path in one flat list of steps: from a variant to a loaded module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Literal

from ..compiler.analysis.facts import Facts, facts_of
from ..compiler.planning import hardware, schedule, segments
from ..compiler.planning import target as targets
from ..compiler.planning.cost import measures_tiles
from ..compiler.planning.records import Schedule, Shape, Specialisation
from ..compiler.planning.segments import Segments
from ..ir.attention import Attention
from . import cache, settings, tuner

_built = 0


@dataclass(frozen=True)
class Compiled:
    """A generated module and what it was generated for."""

    module: ModuleType
    path: Path
    source: str
    schedule: Schedule
    segments: Segments
    facts: Facts
    spec: Specialisation
    notes: tuple[str, ...]  # why another target was not chosen
    spans: ModuleType | None = None  # measures which tiles to visit, where the mask reads tensors by position


def builds() -> int:
    """How many modules this process has loaded so far: a new length or scalar value must not change it."""
    return _built


@lru_cache(maxsize=4096)
def compile_kernel(attention: Attention, spec: Specialisation, target: str | None, wanted: str | None) -> Compiled:
    """The module that computes one direction of a variant; made once, then found again.

    target: None for the best one on spec.arch. wanted: None, the name of an algorithm, or the text of a Schedule.
    """
    # ir.Attention -> Facts
    facts = facts_of(attention)
    # Specialisation -> target and reasons
    chosen, notes = targets.choose(spec, target, algorithm_of(wanted))
    # widths -> Segments
    parts = segments_of(attention, spec)
    # Facts + Shape + Hardware -> Schedule, a measured one where there is one
    plan = schedule.resolve(
        wanted or measured(attention, spec, chosen),
        nominal_shape(spec),
        hardware_of(spec.arch),
        chosen,
        segments=parts,
        traits=facts.traits,
    )
    settings.trace(settings.PLAN, f"{attention.name} {spec.direction}: {plan}")
    settings.trace(settings.IR, f"{attention.name}: score = {attention.folded_score}; mask = {attention.folded_mask}")
    # Schedule -> source, unless an edited copy or the cache has it -> module
    entry = cache.load_or_build(cache_key(attention, spec, plan), lambda: _generate(facts, spec, plan, parts))
    settings.trace(settings.SOURCE, entry.source)
    module = _load(entry.path, entry.source, chosen)
    spans = _spans_module(facts, spec.arch, chosen) if measures_tiles(plan, facts.traits) else None
    return Compiled(module, entry.path, entry.source, plan, parts, facts, spec, notes, spans)


def _spans_module(facts: Facts, arch: str, target: str) -> ModuleType:
    key = cache.Key(
        name=str(facts.attention.name), kernel="tile_spans", target="interpret" if target == "interpret" else "triton",
        layout=arch, variant=facts.attention.canonical_text, schedule="",
    )  # fmt: skip
    entry = cache.load_or_build(key, lambda: _generate_spans(facts))
    settings.trace(settings.SOURCE, entry.source)
    return _load(entry.path, entry.source, key.target)


def _generate(facts: Facts, spec: Specialisation, plan: Schedule, parts: Segments) -> str:
    from ..codegen.generate import generate

    return generate(facts, spec, plan, parts)


def _generate_spans(facts: Facts) -> str:
    from ..codegen.generate import generate_spans

    return generate_spans(facts)


def _load(path: Path, source: str, target: str) -> ModuleType:
    global _built
    from ..codegen.loader import load

    _built += 1
    return load(path, interpret=target == "interpret", source=source)


def cache_key(attention: Attention, spec: Specialisation, plan: Schedule) -> cache.Key:
    """Everything that the generated text depends on."""
    return cache.Key(
        name=str(attention.name),
        kernel=f"{plan.algorithm}_{spec.direction}",
        target=plan.target,
        layout=f"{spec.layout}-{spec.arch}",
        variant=attention.canonical_text,
        schedule=f"{plan}; {spec}",
    )


def segments_of(attention: Attention, spec: Specialisation) -> Segments:
    """The head dimensions as the kernel's tiles hold them."""
    latent = attention.latent
    if latent is None:
        return segments.for_heads(spec.head_dim, spec.value_dim)
    nope = spec.head_dim - latent.rope
    form: Literal["absorbed", "expanded"] = "absorbed" if spec.value_is_key else "expanded"
    return segments.for_latent(form, latent.rank, latent.rope, nope, spec.value_dim)


def nominal_shape(spec: Specialisation) -> Shape:
    """A shape with these widths: schedules never depend on lengths, batch or heads."""
    return Shape(1, 1, 1, 4096, 4096, spec.head_dim, spec.value_dim, spec.dtype)


def measured(attention: Attention, spec: Specialisation, target: str) -> Schedule | None:
    """The schedule that `weft tune` found fastest for such calls on this machine."""
    machine = hardware.this_machine()
    if machine.arch != spec.arch:
        return None
    shape = tuner.shape_class(nominal_shape(spec))
    return tuner.remembered(tuner.TuneKey(attention.digest, shape, machine.name, target, "flash"))


def algorithm_of(wanted: str | None) -> str:
    """The algorithm that a schedule's name or text asks for."""
    if wanted is None or wanted in schedule.ALGORITHMS:
        return wanted or "flash"
    return schedule.parse_schedule(wanted).algorithm


def hardware_of(arch: str) -> hardware.Hardware:
    """The record whose limits hold for code generated for `arch`."""
    known = (h for h in hardware.KNOWN.values() if h.arch == arch)
    return next(known, None) or hardware.this_machine()
