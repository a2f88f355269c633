"""Methods of an attention variant that need no operands: plan, explain, source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..compiler.analysis.tiles import proven
from ..compiler.analysis.tiles.facts import Facts, facts_of
from ..compiler.analysis.tiles.measured import Blocks
from ..compiler.analysis.tiles.survey import Survey
from ..compiler.planning.by_distance import levels_in, tables_in
from ..compiler.planning.cost import CountLongest, CountTiles
from ..compiler.planning.machines.hardware import Hardware, on_threads
from ..compiler.planning.pairs import pair_blocks, visible_pairs
from ..compiler.planning.plan import CodePlan, Plan, VisiblePairs, counter, make_plan
from ..compiler.planning.records import Shape
from ..compiler.planning.schedule import Schedule
from ..compiler.planning.signature import MOST_SHORT
from ..compiler.planning.splits import longest_visits
from ..compiler.planning.sum_times import sums_of
from ..compiler.planning.target import PlannedCall, Target
from ..ir.attention import Attention
from ..ir.errors import WeftError, counted, shown
from ..ir.walk import symbols
from ..runtime.options import Form
from . import parts
from .levels import differ_by, ends_of, watched_in
from .request import Request, described, environment, request_of, to_give


def _counter(attention: Attention, r: Request, options: Mapping[str, Any]) -> tuple[CountTiles | None, tuple[str, ...]]:
    """Tile counts of the whole problem, with a note where they are not those of a call.

    None where they depend on operands that were not given.
    """
    facts, missing, code = facts_of(attention), to_give(attention, options), r.forward.code
    measured = _measures(code)
    survey = facts.survey if measured and not missing else None
    lines = (*facts.kv_tiles.body, *facts.q_tiles.body)
    decisive = [attention.canonical.folded_mask] if survey else [line.value for line in lines]
    levels = watched_in(facts, r.backward.code if r.backward else None, options) if survey is None else ()
    read = {name for value in decisive for name in symbols(value)} | differ_by(levels)
    offset = options.get("q_offset")
    env = {"head_dim": r.head_dim, **environment(attention, options)}

    def blocks_of(part: parts.Part, survey: Survey | None) -> Callable[[Mapping[str, int]], Blocks] | None:
        if survey is None or not survey.by_pair or code.signature.sequences.keys.packed:
            return None
        sizes, first = part.sizes, part.q_offset
        lengths = {"q_len": sizes.q_len, "kv_len": sizes.kv_len, "head_dim": r.head_dim}
        lengths["q_offset"] = sizes.kv_len - sizes.q_len if first is None else first
        return lambda head: pair_blocks(facts, {**options, **lengths, **head})

    found = parts.parts_of(r.sizes, offset if isinstance(offset, int) else None, r.sequences, "batch" in read)
    counters = [
        (
            counter(
                facts.kv_tiles, facts.q_tiles, part.sizes, q_offset=part.q_offset, env=env,
                by_head=bool(read & {"head", "kv_head"}), by_batch="batch" in read, survey=survey,
                first_batch=part.number, blocks=blocks_of(part, survey),
                level_ends=ends_of(levels, part, r.head_dim, options),
            ),
            times,
        )
        for part, times in found
    ]  # fmt: skip
    count = parts.summed_counts(counters, r.sizes)
    if survey is not None:
        return count, ()
    try:
        count("kv", 128, 128)
        count("q", 128, 128)  # the tiles of one axis may depend on what those of the other do not
    except WeftError:
        if not missing:
            raise
        return None, (
            f"tiles are counted as without a mask, an upper limit that holds for any value: give {missing} for those "
            "of a call",
        )
    if measured:
        return count, (f"tiles are counted by positions alone, an upper limit: give {missing} for those of a call",)
    open_mask = code.looks_first and not facts.kv_bounds.closed_form
    return count, ("tiles are counted by positions alone, an upper limit",) if open_mask else ()


def _longest(attention: Attention, r: Request, options: Mapping[str, Any]) -> CountLongest:
    """What a launch divides keys by: tiles of a sequence with all rows, by positions."""
    offset, program = options.get("q_offset"), facts_of(attention).kv_tiles
    numbers = {n: v for n, v in options.items() if isinstance(v, (int, float))}
    rows, unknown = (r.sizes.q_len, r.sizes.kv_len), r.forward.code.signature.offset == "per_row"

    def longest(block_q: int, block_kv: int) -> int:
        known = offset if isinstance(offset, int) else None
        env = {"head_dim": r.head_dim, **numbers}
        return longest_visits(program, *rows, block_q, block_kv, known, env, unknown)

    return longest


def _measures(code: CodePlan) -> bool:
    """Whether kernels read from memory which tiles to visit, as measured for the call."""
    return code.of_module("measures") is not None


def plan(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any],
) -> Plan:  # fmt: skip
    options = described(attention, operands, options)
    r = request_of(attention, operands, device, target, schedule, form, options)
    first, *rest = (_plan(attention, share, options) for share in r.shares)
    if not rest:
        return first
    (short,) = rest
    shared = (
        f"sequences with up to {MOST_SHORT} queries are computed by {short.codes[0].schedule}, others by "
        f"{first.codes[0].schedule}: each finds its own on the device"
    )
    said = {n: n for n in (*first.notes, *short.notes, shared) if n != parts.NO_SEQUENCE}
    codes, kernels = (*first.codes, *short.codes), (*first.kernels, *short.kernels)
    seen = [plan.visible for plan in (first, short)]
    visible = parts.summed_pairs([(each, 1.0) for each in seen])
    return dataclasses.replace(first, shape=r.sizes, codes=codes, kernels=kernels, notes=tuple(said), visible=visible)


def _plan(attention: Attention, r: Request, options: Mapping[str, Any]) -> Plan:
    """Of one module of a forward, and of the backward."""
    facts = facts_of(attention)
    count, how = _counter(attention, r, options)
    codes = [found.code for found in (r.forward, r.backward) if found]
    notes = (*r.notes, *_open_parts(facts, r.forward.code), *how)
    if r.sequences is not None:
        notes = (*notes, parts.note(r.sequences))
    elif isinstance(options.get("q_offset"), Tensor):
        notes = (*notes, "tiles are counted as if the queries were the last positions: q_offset is a tensor")
    if facts.survey is not None and facts.survey.by_pair and r.forward.code.signature.sequences.keys.packed:
        notes = (*notes, "tiles of packed sequences are listed without a look at pairs")
    if facts.traits.drops:
        notes = (
            *notes,
            "drop(X): of X the pairs that Philox-4x32-7 of seed, batch, head, q_pos and kv_pos keeps, over their "
            "share; its arithmetic is not in the times above",
        )
    tables = tables_in(r.forward.code, facts)
    levels = levels_in(r.backward.code, facts) if r.backward else None
    traits = dataclasses.replace(
        facts.traits_with(tables, r.forward.code.signature.doubles),
        level_reads=0 if levels is None else len(levels.reads),
        level_steps=levels is not None and levels.score is not None,
    )
    for table in tables:
        notes = (*notes, f"read by distance, q_pos - kv_pos, from a table that is made in each call: {table.part}")
    notes = (*notes, *r.forward.target.remarks(r.forward.code, facts))
    if r.backward and r.backward.target.interprets and not r.forward.target.interprets:
        notes = (*notes, *r.backward.target.remarks(r.backward.code, facts))
    if traits.pair_bytes:
        most = traits.pair_bytes
        notes = (
            *notes,
            f"what score and mask read for each pair, at most {counted(most, 'byte')}, is not in the bytes above",
        )

    longest = _longest(attention, r, options)
    sums = sums_of(facts, r.backward.code.signature, r.sizes) if r.backward else None

    def made(visible: VisiblePairs | None = None) -> Plan:
        name = str(attention.name)
        said = [target.says(planned(attention, r, target, options, visible)) for target in r.targets]
        own = {direction: seconds for each in said for direction, seconds in each.seconds.items()}
        return make_plan(
            name,
            r.sizes,
            _with_threads(r.machine),
            codes,
            traits,
            count=count,
            longest=longest,
            notes=(*notes, *(note for each in said for note in each.notes)),
            visible=visible,
            sums=sums,
            packed=parts.packed(r.sequences),
            own=own,
        )

    try:
        offset = options.get("q_offset") if r.sequences is None else None
        by_batch = "batch" in symbols(attention.canonical.folded_mask)
        found = parts.parts_of(r.sizes, offset, r.sequences, by_batch)
        return made(parts.summed_pairs([(visible_pairs(attention, *p, r.head_dim, options), n) for p, n in found]))
    except WeftError:
        made()  # counting tiles says more of operands that do not fit
        raise


def planned(
    attention: Attention, r: Request, target: Target, options: Mapping[str, Any], visible: VisiblePairs | None
) -> PlannedCall:
    """The call as a target is asked about it."""
    found = [each for each in (r.forward, r.backward) if each is not None and each.target is target]
    return PlannedCall(
        facts_of(attention), r.sizes, _with_threads(r.machine),
        {each.code.signature.direction: each.code for each in found}, r.sequences is not None, options.get("q_offset"),
        None if visible is None else visible.count, r.free,
    )  # fmt: skip


def may_be_whole(attention: Attention, r: Request, options: Mapping[str, Any]) -> bool:
    """Whether a library may compute a dense call, if it has such scores."""
    if isinstance(offset := options.get("q_offset"), Tensor):
        return False
    visible = visible_pairs(attention, r.sizes, offset, 0, r.head_dim, options)
    return r.forward.target.says(planned(attention, r, r.forward.target, options, visible)).may_be_whole


def _with_threads(machine: Hardware) -> Hardware:
    """A CPU as torch uses it in this process."""
    return on_threads(machine, torch.get_num_threads())


def _open_parts(facts: Facts, code: CodePlan) -> tuple[str, ...]:
    """The parts of the mask without a closed form, which decide nothing where no tile is left out for what it reads."""
    left_out = code.looks_first or _measures(code)
    return tuple(f"by positions alone, {note}" if left_out else note for note in facts.kv_bounds.notes)


def explain(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any], short: bool = False,
) -> str:  # fmt: skip
    """short: what a person wants first, on one screen."""
    from ..compiler.planning import explain as texts  # lazy: imports rich

    facts = facts_of(attention)
    made = plan(attention, operands, device, target, schedule, form, options)
    if short:
        return texts.explain_short(made)
    return texts.explain(made, attention, facts.kv_bounds, facts.q_bounds, proven.claim(facts))


def source(
    attention: Attention, operands: Sequence[Tensor | Shape], direction: Literal["forward", "backward"],
    device: str | None, target: str | None, schedule: str | Schedule | None, form: Form | None,
    options: Mapping[str, Any],
) -> str:  # fmt: skip
    from ..codegen.listing import generate_all  # lazy: imports sympy

    if not isinstance(direction, str) or direction not in ("forward", "backward"):
        raise WeftError(f"source: direction: expected 'forward' or 'backward', got {shown(direction)}")
    options = described(attention, operands, options)
    r = request_of(attention, operands, device, target, schedule, form, options)
    found = [r.forward, r.short] if direction == "forward" else [r.backward]
    if found[0] is None:
        raise WeftError(f"{attention.name}: {r.notes[-1]}")
    texts = [generate_all(facts_of(attention), each.code, each.target) for each in found if each is not None]
    if len(texts) == 1:
        return texts[0]
    said = (f"more than {MOST_SHORT} queries, and of rows that no sequence has", f"up to {MOST_SHORT} queries")
    return "\n\n".join(f"# ######## Of sequences with {what}\n{text}" for what, text in zip(said, texts))
