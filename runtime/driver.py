"""The whole path in one flat list of steps: from a variant and a signature to loaded modules.

`resolve` is the one place that chooses: calls, plan, explain, source and tune all ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import ModuleType

from ..codegen import normalizers
from ..codegen.loader import digest_of_templates
from ..codegen.targets import target_named, targets
from ..compiler.analysis.tiles.facts import Facts, facts_of
from ..compiler.planning import sources
from ..compiler.planning.by_distance import levels_in, levels_of, tables_in
from ..compiler.planning.freed import frees
from ..compiler.planning.gradient_sums import ways_of
from ..compiler.planning.kernel import Algorithm, Kernel, Module
from ..compiler.planning.machines.hardware import Hardware, this_machine
from ..compiler.planning.plan import CodePlan, KernelCode, code_plan
from ..compiler.planning.schedule import Choice, Schedule, asked
from ..compiler.planning.signature import (
    TALL,
    Described,
    Direction,
    LengthClass,
    Signature,
    Widths,
    in_words,
    signature_of,
)
from ..compiler.planning.target import Target
from ..ir.attention import Attention
from ..ir.errors import UnavailableError, WeftError
from . import settings
from .store import calibrated, prune, shelf, tuned  # noqa: F401  say what was measured here, where templates lie
from .store import modules as cache

_built = 0


@dataclass(frozen=True)
class Resolved:
    """What was chosen for one direction."""

    target: Target
    code: CodePlan
    # why a target that comes before was passed over; whether the call is short, and of which class of lengths it is, if
    # that counts
    notes: tuple[str, ...]
    by_length: bool = False  # short calls (Signature.short_call) and others have forms of their own
    # calls whose forms were timed on this machine: whether they are short, as far as that counts, and their lengths
    timed: frozenset[tuple[bool, LengthClass]] = frozenset()


@dataclass(frozen=True)
class Compiled:
    """The modules of one direction, loaded."""

    resolved: Resolved
    modules: tuple[ModuleType, ...]  # the kernels, and what measures their tiles where there is such
    path: Path
    source: str


def builds() -> int:
    """How many modules this process has loaded so far: a new length must not change it, where the call is as short as
    another one was, nor a new scalar value."""
    return _built


def resolve(
    attention: Attention,
    signature: Signature,
    hardware: Hardware,
    target: str | None = None,
    schedule: str | Schedule | None = None,
    unfit: frozenset[str] = frozenset(),
) -> Resolved:
    """The target, and the form of each kernel, for one direction of a variant.

    target, schedule: what the call asks for. unfit: targets that cannot take its tensors.
    Raises UnavailableError where what was asked for cannot compute such calls, WeftError for a schedule that is none.
    """
    return _resolve(attention, signature, hardware, target, None if schedule is None else str(asked(schedule)), unfit)


@lru_cache(maxsize=4096)
def _resolve(
    attention: Attention, signature: Signature, hardware: Hardware, target: str | None, schedule: str | None,
    unfit: frozenset[str],
) -> Resolved:  # fmt: skip
    # ir.Attention -> Facts
    facts = facts_of(attention).with_order(signature.sequences.in_order)
    # what was asked for -> algorithm, and kernels with forms
    given = _algorithm(asked(schedule), schedule, facts, signature, target, unfit)
    # Facts + Signature -> target and its kernels
    chosen, notes = _target(facts, signature, given, target, unfit)
    kernels = _kernels(chosen, given.algorithm, signature, facts)
    by_length = _is_by_length(facts, signature, hardware, given, chosen, kernels)
    signature = replace(signature, short_call=signature.short_call and by_length)
    notes += ((SHORT_CALL if signature.short_call else LONG_CALL),) if by_length else ()
    # Facts + Signature + Hardware -> Schedule: asked for, else timed on this machine, else the target's own choice
    timed = {} if given.kernels else _timed(attention, signature, hardware, chosen.name, given.algorithm, by_length)
    remembered = timed.get((signature.short_call, signature.lengths)) if signature.lengths else None
    notes += _timed_words(signature, timed)
    signature = replace(signature, lengths=signature.lengths if remembered else None)
    remembered = remembered or Schedule(given.algorithm, {})
    schedule_found = _schedule(facts, signature, hardware, given, remembered, chosen, kernels)
    # Schedule -> CodePlan
    parts = chosen.parts(attention, signature.widths)
    reads = [(load, kind) for load, kind in facts.gradient_kinds if load.tensor.name in signature.wanted]
    sums: frozenset[str] = frozenset(kind for _, kind in reads)
    sums |= {"stored"} if "queries" in ways_of(reads, signature).owners else set()
    makes_tables = any(kernel.module == "tables" for kernel in kernels)
    sums |= {"freed"} if frees(signature, facts) else set()
    sums |= {"level"} if makes_tables and levels_of(facts, schedule_found.algorithm, signature) else set()
    code = code_plan(signature, chosen.name, chosen.measured_by, schedule_found, kernels, parts, facts.traits, sums)
    settings.trace(settings.PLAN, f"{attention.name} {signature.direction}: {schedule_found}")
    return Resolved(chosen, code, notes, by_length, frozenset(timed))


SHORT_CALL = (
    f"a short call: tiles of {TALL} queries would have too many rows without one, so that the forward has lower tiles; "
    "other calls take another form"
)
LONG_CALL = f"the forward takes another form in short calls, where tiles of {TALL} queries are too tall"


def _timed(
    attention: Attention, signature: Signature, hardware: Hardware, target: str, algorithm: Algorithm, by_length: bool
) -> dict[tuple[bool, LengthClass], Schedule]:  # fmt: skip
    """Schedules that were timed on this machine, by whether calls are short, if that counts, and by their lengths."""
    return {
        (short, lengths): found
        for short in ((False, True) if by_length else (False,))
        for lengths, found in tuned.remembered(
            attention, replace(signature, short_call=short), hardware, target, algorithm
        ).items()
    }


def _timed_words(signature: Signature, timed: Mapping[tuple[bool, LengthClass], Schedule]) -> tuple[str, ...]:
    """Which lengths the forms were timed at that a call takes, or would take if it had these."""
    classes = sorted({lengths for _, lengths in timed})
    if not classes:
        return ()
    direction, lengths = signature.direction, signature.lengths
    if lengths and (signature.short_call, lengths) in timed:
        about = in_words(lengths)
        return (f"forms of the {direction} are those that `weft tune` found for about {about} queries and keys",)
    about = ", ".join(map(in_words, classes))
    return (
        f"`weft tune` timed the {direction} for about {about} queries and keys alone: this call has the forms that are "
        "chosen without timing",
    )


def shared_out(
    attention: Attention, signature: Signature, hardware: Hardware, target: str | None = None,
    schedule: str | Schedule | None = None, unfit: frozenset[str] = frozenset(),
) -> tuple[Signature, ...]:  # fmt: skip
    """The signatures of the modules that compute a call with this one.

    There are two, of its long sequences and its short ones, where it may have both, no schedule is asked for, and only
    keys of few queries are divided. Arguments as of `resolve`.
    """
    both = replace(signature, serves="all")
    if signature.serves == "all" or schedule is not None:
        return (both,)
    short = replace(signature, serves="short", few_queries=True)
    divided = [
        resolve(attention, own, hardware, target, None, unfit).code.schedule.algorithm == "split_kv"
        for own in (both, short)
    ]
    return (signature, short) if divided == [False, True] else (both,)


def _algorithm(
    given: Schedule, text: str | None, facts: Facts, signature: Signature, name: str | None, unfit: frozenset[str]
) -> Schedule:  # fmt: skip
    """What was asked for; unasked, keys of few queries are divided where a target of this device can, and those of
    many where the first target that computes them has no other schedule.

    A backward of calls whose forward divides keys is that of flash: both leave the same behind.
    """
    if signature.direction == "backward" and given.algorithm == "split_kv":
        forward = replace(signature, direction="forward")
        names = {k.name for target in targets() for k in target.kernels("split_kv", forward, facts)}
        return Schedule("flash", {kernel: choice for kernel, choice in given.kernels.items() if kernel not in names})
    if text is not None or signature.direction == "backward":
        return given
    for target in targets():
        if target.name != name and (name is not None or target.by_name_only or target.name in unfit):
            continue
        if not signature.few_queries and why_not(target, "flash", signature, facts) is None:
            return given
        if why_not(target, "split_kv", signature, facts) is None:
            return Schedule("split_kv", {})
    return given


def _target(
    facts: Facts, signature: Signature, given: Schedule, name: str | None, unfit: frozenset[str]
) -> tuple[Target, tuple[str, ...]]:
    """The target of such calls and notes for `explain`."""
    written = _written_target(given, facts, signature)
    if name is not None and written not in (None, name) and _binds(name, given, facts, signature):
        raise WeftError(f"schedule: it is for target {written}, the call's target is {name}; pass target={written!r}")
    name = written or name
    if name is not None:
        wanted = target_named(name)
        reason = why_not(wanted, given.algorithm, signature, facts)
        if reason is None:
            return wanted, ()
        if written or signature.direction == "forward" or _binds(name, given, facts, signature):
            raise UnavailableError(f"target {reason}")
    notes: list[str] = []
    for target in targets():
        if target.by_name_only or target.name in unfit:
            continue
        reason = why_not(target, given.algorithm, signature, facts)
        if reason is None:
            return target, tuple(notes)
        if signature.arch != "cpu" and _has(target.name, given, facts, signature):  # else it is no news
            notes.append(reason)
    raise UnavailableError(f"target {_most_telling(given, facts, signature)}")


def _binds(name: str, given: Schedule, facts: Facts, signature: Signature) -> bool:
    """Whether a call that names a target is refused where that cannot compute it: a partial one leaves backwards."""
    leaves = signature.direction == "backward" and target_named(name).partial
    return not leaves and _has(name, given, facts, signature)


def _has(name: str, given: Schedule, facts: Facts, signature: Signature) -> bool:
    """Whether a target has kernels for this algorithm and direction at all."""
    return bool(_kernels(target_named(name), given.algorithm, signature, facts))


def _most_telling(given: Schedule, facts: Facts, signature: Signature) -> str:
    """Of why no target can: what the target says that serves this kind of machine."""
    kind = "cpu" if signature.arch == "cpu" else "cuda"
    reasons = (why_not(t, given.algorithm, signature, facts) for t in targets() if t.serves == kind)
    return next((reason for reason in reasons if reason is not None), "no target is left")


def _kernels(target: Target, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
    return target.kernels(algorithm, signature, facts)


def _written_target(given: Schedule, facts: Facts, signature: Signature) -> str | None:
    """The target that a schedule's text names for kernels of this direction."""
    named = {choice.target for choice in given.kernels.values()}
    found: list[tuple[bool, str]] = []
    for target in targets():
        if target.name not in named:
            continue
        kernels = _kernels(target, given.algorithm, signature, facts)
        own = {k.name for k in kernels if not k.follows}
        own &= {kernel for kernel, choice in given.kernels.items() if choice.target == target.name}
        found += [(own <= {k.name for k in kernels if k.is_lent}, target.name)] if own else []
    return min(found, key=lambda each: each[0])[1] if found else None  # others borrow that one


def why_not(target: Target, algorithm: Algorithm, signature: Signature, facts: Facts) -> str | None:
    """Why a target cannot compute one direction; None where it can."""
    kernels = _kernels(target, algorithm, signature, facts)
    reasons = (target.supports(kernel, signature, facts) for kernel in kernels)
    unread = signature.options.difference(*(kernel.options for kernel in kernels)) if kernels else ()
    if unread and not signature.dtypes.quantized:  # of FP8 operands a target says itself that it has none
        return f"{target.name} has no kernel that reads {', '.join(sorted(unread))}"
    found = next(
        (r for r in reasons if r is not None), None if kernels else target.refusal(algorithm, signature.direction)
    )
    return found or (f"{target.name} has no kernel that reads {', '.join(sorted(unread))}" if unread else None)


@lru_cache(maxsize=256)
def reading_fp8(attention: Attention, signature: Signature, algorithm: Algorithm) -> tuple[Target, ...]:
    """The targets whose forward reads the FP8 operands of such calls at the full rate of its products."""
    own = (target for target in targets() if target.multiplies_fp8)
    return tuple(t for t in own if why_not(t, algorithm, signature, facts_of(attention)) is None)


def available() -> dict[str, str | None]:
    """Each target, with None where this machine can run it or the reason why it cannot (for `weft doctor`)."""
    facts = facts_of(Attention())
    found: dict[str, str | None] = {}
    for target in targets():
        reasons = []
        for arch in dict.fromkeys((this_machine().arch, "cpu")):
            call = Described("forward", arch, "fp16", Widths(64, 64))
            signature = signature_of(call, masked=False, sums_pairs=False)
            reasons.append(why_not(target, "flash", signature, facts))
        found[target.name] = None if None in reasons else reasons[0]
    return found


def _schedule(
    facts: Facts, signature: Signature, hardware: Hardware, given: Schedule, remembered: Schedule, target: Target,
    kernels: Sequence[Kernel],
) -> Schedule:  # fmt: skip
    choices: dict[str, Choice] = {}
    for kernel in kernels:
        if not kernel.has_choice:
            continue
        choice = given.kernels.get(kernel.name)
        owner = target.measured_by if kernel.is_lent else target.name
        if choice is None:
            kept = remembered.kernels.get(kernel.name)
            form = kept.form if kept else target.forms(kernel, signature, hardware, facts)[0]
            choices[kernel.name] = Choice(owner, form)
            continue
        if choice.target != owner:
            target_named(choice.target)
            raise WeftError(
                f"schedule: {kernel.name} is for target {choice.target}, the call's target is {target.name}; "
                + (
                    f"pass target={choice.target!r}"
                    if owner == target.name
                    else f"it is a kernel that {target.name} borrows: write {kernel.name}={owner}:{choice.form}"
                )
            )
        target.check(kernel, choice.form, signature, hardware, facts)
        choices[kernel.name] = choice
    if given.kernels:
        other = replace(signature, deterministic=not signature.deterministic)
        _check_used(given, target, kernels, target.kernels(given.algorithm, other, facts), signature.deterministic)
        _check_names(given, signature, facts)
    return Schedule(given.algorithm, choices)


def _is_by_length(
    facts: Facts, signature: Signature, hardware: Hardware, given: Schedule, target: Target, kernels: Sequence[Kernel]
) -> bool:  # fmt: skip
    """Whether a kernel whose form is not asked for has another one in short calls."""
    if signature.direction == "backward" or signature.sequences.ragged:
        return False
    both = [replace(signature, short_call=short) for short in (False, True)]
    free = [k for k in kernels if k.has_choice and k.name not in given.kernels]
    return any(len({target.forms(k, own, hardware, facts)[0] for own in both}) > 1 for k in free)


def _check_used(
    given: Schedule, target: Target, kernels: Sequence[Kernel], others: Sequence[Kernel], deterministic: bool
) -> None:
    """Raise WeftError for forms of kernels that take theirs from another, or that only other gradients have.

    others: the kernels where `deterministic` is the other way.
    """
    followed = {k.name: k.follows for k in kernels if k.follows}
    for name, choice in given.kernels.items():
        if choice.target != target.name:
            continue
        if name in followed:
            raise WeftError(f"schedule: {name} of target {target.name} has the form of {followed[name]}: leave it out")
        if name in {k.name for k in others} - {k.name for k in kernels}:
            raise WeftError(
                f"schedule: {name} of target {target.name} runs with deterministic={not deterministic} only"
            )


def _check_names(given: Schedule, signature: Signature, facts: Facts) -> None:
    """Kernels that a schedule names must be some target's, in one direction or the other."""
    known: set[str] = set()
    for kernels in _every_kernel(given, signature, facts):
        known |= {k.name for k in kernels if k.has_choice}
        if given.kernels.keys() <= known:
            return
    unknown = [name for name in given.kernels if name not in known]
    raise WeftError(f"schedule: expected kernels among {', '.join(sorted(known))}, got {', '.join(unknown)}")


def _every_kernel(given: Schedule, signature: Signature, facts: Facts) -> Iterator[Sequence[Kernel]]:
    """The kernels of all targets for both directions; first those of targets that the schedule names."""
    operands = {operand.name for operand in facts.attention.canonical.tensors}
    everything = replace(signature, wanted=signature.wanted | operands | {"query", "key", "value", "rope"})
    algorithms: set[Algorithm] = {given.algorithm, *(("flash",) if given.algorithm == "split_kv" else ())}
    named = {choice.target for choice in given.kernels.values()}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for target in sorted(targets(), key=lambda target: target.name not in named):
        for direction, repeats in product(directions, (False, True)):
            own = replace(everything, direction=direction, deterministic=repeats)
            yield from (target.kernels(algorithm, own, facts) for algorithm in algorithms)


# -- modules -----------------------------------------------------------------------------------------------------------
def compile_kernels(
    attention: Attention, signature: Signature, hardware: Hardware, target: str | None = None,
    schedule: str | None = None, unfit: frozenset[str] = frozenset(),
) -> Compiled:  # fmt: skip
    """The modules that compute one direction of a variant; made once, then found again. Arguments as of `resolve`."""
    # ... -> CodePlan
    found = resolve(attention, signature, hardware, target, schedule, unfit)
    return _compiled(attention, found.code.signature, hardware, target, schedule, unfit)


@lru_cache(maxsize=4096)
def _compiled(
    attention: Attention, signature: Signature, hardware: Hardware, target: str | None, schedule: str | None,
    unfit: frozenset[str],
) -> Compiled:  # fmt: skip
    """The same of a signature as it was resolved, which calls of different lengths may share."""
    found = resolve(attention, signature, hardware, target, schedule, unfit)
    code = found.code
    facts = facts_of(attention).with_order(code.signature.sequences.in_order)
    settings.trace(
        settings.IR,
        f"{attention.name}: score = {attention.canonical.folded_score}; mask = {attention.canonical.folded_mask}",
    )
    # CodePlan -> source, unless an edited copy or the cache has it -> module
    entry = cache.load_or_build(cache_key(attention, code), lambda: _generate(facts, code, found.target))
    settings.trace(settings.SOURCE, entry.source)
    modules = [_load(found.target, entry)]
    modules += [_module_beside(facts, code, kernel) for kernel in code.beside]
    return Compiled(found, tuple(modules), entry.path, entry.source)


def forget() -> None:
    """Choose and load anew, as after tuning."""
    _resolve.cache_clear()
    _compiled.cache_clear()


def _module_beside(facts: Facts, code: CodePlan, kernel: KernelCode) -> ModuleType:
    """A module whose kernels run beside those of the target's own."""
    target, key = target_named(kernel.target), _KEYS[kernel.kernel.module](facts, code, kernel)
    entry = cache.load_or_build(key, lambda: target.source_beside(kernel, code, facts))
    settings.trace(settings.SOURCE, entry.source)
    return _load(target, entry)


def _measures_key(facts: Facts, code: CodePlan, kernel: KernelCode) -> cache.Key:
    return cache.Key(
        name=str(facts.attention.name), kernel=f"tile_{facts.tile_source}", target=kernel.target,
        layout=code.signature.arch, variant=facts.attention.canonical.text, schedule=_measures_kind(code),
    )  # fmt: skip


def _tables_key(facts: Facts, code: CodePlan, kernel: KernelCode) -> cache.Key:
    levels = levels_in(code, facts)
    indices = [] if levels is None else ["levels", *(index.text for index in levels.indices)]
    parts = "; ".join([*(table.part.text for table in tables_in(code, facts)), *indices])
    return cache.Key(
        name=str(facts.attention.name), kernel=kernel.name, target=kernel.target, layout=code.signature.arch,
        variant=facts.attention.canonical.text, schedule=f"{_measures_kind(code)} {parts}",
    )  # fmt: skip


def _lent_key(facts: Facts, code: CodePlan, kernel: KernelCode) -> cache.Key:
    return replace(cache_key(facts.attention, code), kernel=kernel.name, target=kernel.target)


# What the text of a module beside depends on, besides the variant
_KEYS: dict[Module, Callable[[Facts, CodePlan, KernelCode], cache.Key]] = {
    "measures": _measures_key, "tables": _tables_key, "": _lent_key,
}  # fmt: skip


def _generate(facts: Facts, code: CodePlan, target: Target) -> str:
    from ..codegen.generate import generate  # lazy: imports sympy, which a warm start does without

    return generate(facts, code, target)


def _measures_kind(code: CodePlan) -> str:
    """What the text of such a module depends on besides the variant."""
    sequences = code.signature.sequences
    return " ".join([*(["wide"] if code.signature.offsets_64 else []), *([sequences.name] if sequences.ragged else [])])


def _load(target: Target, entry: cache.Entry) -> ModuleType:
    global _built
    _built += 1
    return target.load(entry.path, entry.source)


def cache_key(attention: Attention, code: CodePlan) -> cache.Key:
    """Everything that the generated text depends on."""
    own = normalizers.digest(attention.normalizer) + sources.digest(code.signature.sequences)
    kind, features = code.signature.sequences, [f.part for k in code.own for f in k.kernel.features]
    own += digest_of_templates([*features, kind.rows.template, kind.keys.template])
    return cache.Key(
        name=str(attention.name),
        kernel=f"{code.schedule.algorithm}_{code.signature.direction}",
        target=code.target,
        layout=f"{code.signature.label}-{code.signature.arch}",
        variant=attention.canonical.text,
        schedule=f"{code.schedule}; {code.signature}; {own}",
    )
