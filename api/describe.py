"""The methods of an attention variant that need no operands: plan, explain, source, show_mask."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import parts, validate
from .compiler.analysis import proven
from .compiler.analysis.facts import Facts, facts_of
from .compiler.analysis.measured import Blocks, Measurement, Table
from .compiler.analysis.ranges import Ranges, check_integers
from .compiler.analysis.records import TileProgram
from .compiler.analysis.survey import CELL, Survey
from .compiler.analysis.tiles import tile_ranges
from .compiler.planning import hardware, picture
from .compiler.planning.cost import CountLongest, CountTiles
from .compiler.planning.distances import tables_in
from .compiler.planning.kernels import MEASURES
from .compiler.planning.plan import HEADS_COUNTED, CodePlan, Plan, VisiblePairs, counter, make_plan, some_heads
from .compiler.planning.records import Shape
from .compiler.planning.schedule import Schedule
from .compiler.planning.signature import Direction, Dtypes, Signature, Widths, has_few
from .compiler.planning.splits import longest_visits
from .ir import parse
from .ir.errors import UnavailableError, WeftError, collected
from .ir.expr import Scalar, TensorOperand
from .ir.reference import dense_mask, positions
from .ir.walk import scalars, symbols, tensors
from .runtime import driver
from .runtime.checks import (
    DTYPES,
    MAX_HEAD_DIM,
    check_q_offset,
    check_tensors,
    length_problems,
    range_problems,
    tensor_problems,
)
from .runtime.lengths import TABLE
from .runtime.settings import default_target
from .runtime.variant import offset_kind

if TYPE_CHECKING:
    from .attention import Attention, Form


def shape(
    *, batch: int = 1, heads: int, kv_heads: int | None = None, q_len: int, kv_len: int | None = None,
    head_dim: int, value_dim: int | None = None, dtype: str = "bf16",
) -> Shape:  # fmt: skip
    """The sizes of a call, in place of its tensors: kv_heads, kv_len and value_dim default to heads, q_len, head_dim.

    dtype: "bf16", "fp16" or "fp32". For latent attention head_dim is the query's nope + rope and value_dim is Dv.
    """
    own = (heads if kv_heads is None else kv_heads, q_len if kv_len is None else kv_len)
    made = Shape(batch, heads, own[0], q_len, own[1], head_dim, head_dim if value_dim is None else value_dim, dtype)
    if dtype not in ("bf16", "fp16", "fp32"):
        raise WeftError(f"shape: dtype: expected 'bf16', 'fp16' or 'fp32', got {dtype!r}")
    sizes = {"batch": made.batch, "heads": heads, "kv_heads": made.kv_heads, "q_len": q_len, "kv_len": made.kv_len,
             "head_dim": head_dim, "value_dim": made.value_dim}  # fmt: skip
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WeftError(f"shape: {name}: expected a positive int, got {value!r}")
    if heads % made.kv_heads:
        raise WeftError(f"shape: heads: expected a multiple of kv_heads {made.kv_heads}, got {heads}")
    return made


def parse_attention(text: str) -> Attention:
    """The variant that `str(variant)` printed."""
    from .attention import Attention  # lazy: the class has the functions of this module as its methods

    declared = parse.parse_attention(text)
    return Attention(**{field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)})


# -- what a request means ----------------------------------------------------------------------------------------------
def _shape_of(
    attention: Attention, operands: Sequence[Tensor | Shape], options: Mapping[str, Any]
) -> tuple[Shape, str | None]:
    """The sizes that the arguments stand for, and the device that tensors are on."""
    if len(operands) == 1 and isinstance(operands[0], Shape):
        _check_sizes(attention, operands[0])
        return operands[0], None
    tensors = [t for t in operands if isinstance(t, Tensor)]
    wanted = 2 if attention.latent is not None else 3
    if len(tensors) != wanted or len(tensors) != len(operands):
        got = ", ".join(type(o).__name__ for o in operands) or "nothing"
        raise WeftError(
            f"{attention.name}: expected weft.shape(heads=..., q_len=..., head_dim=...) or {wanted} tensors "
            f"({'query and cache' if wanted == 2 else 'query, key and value'}), got {got}"
        )
    query, key = tensors[0], tensors[1]
    uk, uv, paged = options.get("uk"), options.get("uv"), options.get(TABLE) is not None
    if wanted == 3:
        check_tensors(str(attention.name), query, key, tensors[2], paged)
    else:
        validate.check_latent(attention, query, key, uk, uv, paged)
    kv_len = parts.kv_rows(str(attention.name), query, key, options) if paged else key.shape[2]
    if 0 in (query.shape[0], query.shape[2], kv_len):
        raise WeftError(f"{attention.name}: nothing is computed for empty operands, and there is no plan")
    width = tensors[2].shape[3] if wanted == 3 else uv.shape[2] if isinstance(uv, Tensor) else attention.latent.rank  # type: ignore[union-attr]
    kv_heads = key.shape[1] if wanted == 3 else query.shape[1]
    made = Shape(query.shape[0], query.shape[1], kv_heads, query.shape[2], kv_len, query.shape[3], width,
                 DTYPES[query.dtype])  # fmt: skip
    return made, str(query.device)


def _check_sizes(attention: Attention, sizes: Shape) -> None:
    """Raise WeftError for sizes that a call refuses."""
    latent, problems = attention.latent, []
    widths = {"head_dim": sizes.head_dim, "value_dim": sizes.value_dim}
    for name, width in widths.items():
        if latent is None and not 0 < width <= MAX_HEAD_DIM:
            problems.append(
                f"shape: {name}: expected 1 to {MAX_HEAD_DIM}, got {width}; wider heads are for latent attention"
            )
    for name, length in (("q_len", sizes.q_len), ("kv_len", sizes.kv_len)):
        problems += length_problems(f"shape: {name}", length)
    if latent is not None and sizes.head_dim <= latent.rope:
        problems.append(f"shape: head_dim: expected more than {latent.rope}, the latent's rope, got {sizes.head_dim}")
    if sizes.heads % sizes.kv_heads:
        problems.append(f"shape: heads: expected a multiple of kv_heads {sizes.kv_heads}, got {sizes.heads}")
    if problems:
        raise collected(str(attention.name), problems)


# What a call takes besides operands, as far as it is available; a plan is the same for every value of most of these.
_OPTIONS = ("q_offset", "uk", "uv", "return_lse", "deterministic", *parts.OPTIONS)


def _check_options(attention: Attention, sizes: Shape, form: Form | None, options: Mapping[str, Any]) -> None:
    """Raise WeftError for options and operands that a call of these sizes refuses."""
    name = str(attention.name)
    given = {n: value for n, value in options.items() if n not in _OPTIONS}
    check_operands(name, attention, given)
    offset = options.get("q_offset")
    if offset is not None and not any(options.get(n) is not None for n in parts.OPTIONS):
        device = offset.device if isinstance(offset, Tensor) else torch.device("cpu")
        check_q_offset(offset, sizes.batch, device)
    if attention.latent is None:
        validate.check_no_latent(attention, options.get("uk"), options.get("uv"), form)
    if form not in (None, "expanded", "absorbed"):
        raise WeftError(f"{name}: form: expected 'expanded' or 'absorbed', got {form!r}")


def _hardware(device: str | None, tensors_on: str | None) -> hardware.Hardware:
    if device is not None:
        return hardware.by_name(device)
    return hardware.for_device(tensors_on) if tensors_on not in (None, "meta") else hardware.this_machine()


def _seen(attention: Attention, sizes: Shape, form: Form | None) -> tuple[Shape, Widths]:
    """Sizes and widths as kernels see them: latent forms change widths and heads."""
    latent = attention.latent
    if latent is None:
        return sizes, Widths(sizes.head_dim, sizes.value_dim)
    form = form or cheaper_form(attention, sizes)
    if form == "expanded":
        return sizes, Widths(sizes.head_dim, sizes.value_dim, rope_dim=latent.rope)
    width = latent.rank + latent.rope
    absorbed = Shape(sizes.batch, sizes.heads, 1, sizes.q_len, sizes.kv_len, width, latent.rank, sizes.dtype)
    return absorbed, Widths(width, latent.rank, value_is_key=True)


def _everything(attention: Attention, widths: Widths) -> frozenset[str]:
    """All gradients that a backward can be asked for."""
    facts = facts_of(attention)
    operands = {load.tensor.name for load, _ in facts.gradient_kinds}
    return frozenset({"query", "key", "value", *({"rope"} if widths.rope_dim else ()), *operands})


def _sums_pairs(attention: Attention, wanted: frozenset[str]) -> bool:
    """Whether a wanted gradient may be summed faster in any order."""
    return any(kind == "pair" and load.tensor.name in wanted for load, kind in facts_of(attention).gradient_kinds)


class _Request(NamedTuple):
    """What a plan is asked of."""

    sequences: parts.Described | None  # those of their own lengths
    sizes: Shape  # as kernels see them
    head_dim: int  # the value of the symbol: of the call, which latent forms change
    machine: hardware.Hardware
    forward: driver.Resolved
    backward: driver.Resolved | None  # None where there is no backward
    notes: tuple[str, ...]


def _request(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any],
) -> _Request:  # fmt: skip
    """The very choices that a call makes: both ask the driver."""
    sizes, tensors_on = _shape_of(attention, operands, options)
    _check_options(attention, sizes, form, options)
    if target is not None:
        validate.check_target(str(attention.name), target)
    machine = _hardware(device, tensors_on)
    if attention.latent is not None and options.get(TABLE) is not None:
        validate.check_absorbed(attention, form)
        form = "absorbed"
    if form is None and tensors_on is not None and attention.latent is not None:
        form = _form_of_call(attention, operands, options)
    head_dim = sizes.head_dim
    sizes, widths = _seen(attention, sizes, form)
    found = _sequences(attention, operands, sizes, options)
    ranges = (
        _ranges_of(sizes, options.get("q_offset")) if found is None else _ranges_of(sizes, 0) | parts.ranges_of(found)
    )
    _check_read(attention, ranges, options)
    offset = offset_kind(options.get("q_offset")) if found else "number"
    offset = "per_row" if isinstance(options.get("q_offset"), Tensor) else offset
    target = default_target() if target is None else target
    asked = options.get("deterministic")
    repeats = torch.are_deterministic_algorithms_enabled() if asked is None else asked

    def resolved(direction: Direction, wanted: frozenset[str]) -> driver.Resolved:
        dtypes = Dtypes.all(sizes.dtype)
        signature = Signature(
            direction, machine.arch, dtypes, widths, offset=offset, wanted=wanted,
            sequences="dense" if found is None else found.sequences.kind,
            few=has_few(direction, "dense" if found is None else found.sequences.kind, sizes.q_len),
            deterministic=direction == "backward" and repeats,
            atomics=direction == "backward" and asked is False and _sums_pairs(attention, wanted),
        )  # fmt: skip
        made = driver.resolve(attention, signature, machine, target, schedule)
        misfit = _misfit(made, signature, operands, sizes)
        if misfit is None:
            return made
        if target == made.target.name:
            raise UnavailableError(f"{attention.name}: target {misfit}")
        other = driver.resolve(attention, signature, machine, target, schedule, frozenset({made.target.name}))
        return dataclasses.replace(other, notes=(*other.notes, misfit))

    forward = resolved("forward", frozenset())
    lacking = _PAGES_HAVE_NO_BACKWARD if options.get(TABLE) is not None else _NO_BACKWARD
    if widths.value_is_key or lacking != _NO_BACKWARD:
        return _Request(found, sizes, head_dim, machine, forward, None, (*forward.notes, lacking))
    given = {n for n, value in options.items() if isinstance(value, Tensor) and not value.requires_grad}
    backward = resolved("backward", _everything(attention, widths) - given)
    notes = tuple(dict.fromkeys((*forward.notes, *backward.notes)))
    return _Request(found, sizes, head_dim, machine, forward, backward, notes)


def _misfit(
    made: driver.Resolved, signature: Signature, operands: Sequence[Tensor | Shape], sizes: Shape
) -> str | None:
    """Why the target cannot take these very tensors, where a call's are given; of a latent cache also these sizes."""
    given: Sequence[Any] = operands
    if signature.widths.value_is_key:
        if len(given) != 2 or not all(isinstance(t, Tensor) for t in given):
            rows = ((sizes.heads, sizes.q_len), (sizes.kv_heads, sizes.kv_len))
            given = [torch.empty(sizes.batch, *own, signature.widths.head_dim, device="meta") for own in rows]
        given = (*given, None)
    elif len(given) != 3 or not all(isinstance(t, Tensor) for t in given):
        return None
    call: Any = SimpleNamespace(**dict(zip(("query", "key", "value"), given)), rope=None)
    return made.target.misfit(signature, call)


def _sequences(
    attention: Attention, operands: Sequence[Tensor | Shape], sizes: Shape, options: Mapping[str, Any]
) -> parts.Described | None:
    """The sequences of a call that gives lengths. sizes: of all rows."""
    rows: tuple[Any, Any] = operands[:2]  # type: ignore[assignment]
    if isinstance(operands[0], Shape):
        rows = [(sizes.batch, sizes.heads, length, sizes.head_dim) for length in (sizes.q_len, sizes.kv_len)]  # type: ignore[assignment]
        if isinstance(options.get(TABLE), Tensor):
            rows[1] = parts.pool_of(str(attention.name), sizes, options[TABLE])  # type: ignore[index]
    return parts.described(str(attention.name), *rows, options)


_NO_BACKWARD = "the absorbed form has no backward: call with form='expanded' to train"
_PAGES_HAVE_NO_BACKWARD = "a call with block_table has no backward: gather the pages to train"


def cheaper_form(attention: Attention, sizes: Shape) -> Form:
    """The form of latent attention with fewer multiplications.

    Expanded multiplies each key vector by uk and uv once, then attends over nope + rope and Dv columns; absorbed
    multiplies each query instead and attends over rank + rope and rank columns.
    """
    latent = attention.latent
    assert latent is not None
    nope = sizes.head_dim - latent.rope
    projected = latent.rank * (nope + sizes.value_dim)
    expanded = sizes.kv_len * projected + sizes.q_len * sizes.kv_len * (sizes.head_dim + sizes.value_dim)
    absorbed = sizes.q_len * projected + sizes.q_len * sizes.kv_len * (2 * latent.rank + latent.rope)
    return "expanded" if expanded <= absorbed else "absorbed"


def latent_form(
    attention: Attention, query: Tensor, cache: Tensor, uk: Tensor, uv: Tensor, operands: Mapping[str, Any]
) -> Form:
    """The form of a call: expanded wherever gradients are wanted, else the cheaper one."""
    if torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in (query, cache, uk, uv, *operands.values())
    ):
        return "expanded"
    sizes = Shape(
        query.shape[0], query.shape[1], query.shape[1], query.shape[2], cache.shape[2], query.shape[3], uv.shape[2]
    )
    return cheaper_form(attention, sizes)


def _form_of_call(attention: Attention, operands: Sequence[Any], options: Mapping[str, Any]) -> Form:
    """The form that a call with these tensors computes: without uk and uv the query is latent already."""
    uk, uv = options.get("uk"), options.get("uv")
    if uk is None or uv is None:
        return "absorbed"
    own = {p.name: options.get(p.name) for p in attention.parameters}
    return latent_form(attention, operands[0], operands[1], uk, uv, own)


# -- the methods -------------------------------------------------------------------------------------------------------
def _described(attention: Attention, operands: Sequence[Tensor | Shape], options: Mapping[str, Any]) -> dict[str, Any]:
    """The operands and options of a call that is planned, checked as far as they are given."""
    first = operands[0] if operands else None
    if any(options.get(n) is not None for n in parts.OPTIONS):
        offset = validate.as_number(options.get("q_offset"), int)  # one for each sequence: checked with these
        rest = {n: value for n, value in options.items() if n != "q_offset"}
        return validate.described(attention, rest, None, getattr(first, "device", None), _OPTIONS) | {
            "q_offset": offset
        }
    if isinstance(first, Tensor):
        return validate.described(attention, options, len(first), first.device, _OPTIONS)
    batch = first.batch if isinstance(first, Shape) else 1
    return validate.described(attention, options, batch, None, _OPTIONS)


def _environment(attention: Attention, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as tile programs read them: numbers as they are, tensors that the mask reads as tables."""
    env: dict[str, Any] = {n: v for n, v in options.items() if not isinstance(v, Tensor)}
    for operand in _mask_operands(attention):
        value = options.get(operand.name)
        if isinstance(operand, TensorOperand) and isinstance(value, Tensor):
            env[operand.name] = Table(operand.name, value.detach().tolist)
    return env


def check_operands(title: str, attention: Attention, options: Mapping[str, Any]) -> None:
    """Raise WeftError for operands that a call would refuse: unknown names, and scalars of another kind.

    Those that are missing are nobody's mistake here. A function of its indices may stand for a tensor.
    """
    declared = {p.name: p for p in attention.parameters}
    problems: list[str] = []
    for name, value in options.items():
        operand = declared.get(name)
        if operand is None:
            problems.append(_unknown(name, sorted(declared)))
        elif isinstance(operand, Scalar):
            problems += _scalar_problems(operand, value)
        elif isinstance(value, Tensor):
            problems += tensor_problems(operand, value, value.device)
        elif not callable(value):
            problems.append(f"{name}: expected a tensor of {operand.dtype}, got {type(value).__name__}")
    if problems:
        raise collected(title, problems)


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{name}: unknown operand or option; this variant's operands are: {', '.join(known) or 'none'}{meant}"


def _scalar_problems(operand: Scalar, value: object) -> Iterator[str]:
    """What a call says of the value of a scalar."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if operand.dtype == "int" and whole:
        yield from range_problems(operand, value)  # type: ignore[arg-type]
    elif not whole and (operand.dtype == "int" or not isinstance(value, float)):
        yield f"{operand.name}: expected {'an int' if operand.dtype == 'int' else 'a number'}, got {value!r}"


def _mask_operands(attention: Attention) -> list[Scalar | TensorOperand]:
    """The operands that the mask reads, by name."""
    mask = attention.folded_mask
    return sorted((*scalars(mask), *tensors(mask)), key=lambda operand: operand.name)


def _to_give(attention: Attention, options: Mapping[str, Any]) -> str:
    """What the mask reads and was not given, as arguments: "doc=..., window=..."; "" where all is there."""
    return ", ".join(f"{o.name}=..." for o in _mask_operands(attention) if o.name not in options)


def _counter(
    attention: Attention, r: _Request, options: Mapping[str, Any]
) -> tuple[CountTiles | None, tuple[str, ...]]:
    """Tile counts of the whole problem, with a note where they are not those of a call.

    None where they depend on operands that were not given.
    """
    facts, missing, code = facts_of(attention), _to_give(attention, options), r.forward.code
    measured = _measures(code)
    survey = facts.survey if measured and not missing else None
    lines = (*facts.kv_tiles.body, *facts.q_tiles.body)
    decisive = [attention.folded_mask] if survey else [line.value for line in lines]
    read = {name for value in decisive for name in symbols(value)}
    offset = options.get("q_offset")
    env = {"head_dim": r.head_dim, **_environment(attention, options)}

    def blocks_of(part: parts.Part, survey: Survey | None) -> Callable[[Mapping[str, int]], Blocks] | None:
        if survey is None or not survey.by_pair or code.signature.sequences == "packed":
            return None
        sizes, first = part.sizes, part.q_offset
        lengths = {"q_len": sizes.q_len, "kv_len": sizes.kv_len, "head_dim": r.head_dim}
        lengths["q_offset"] = sizes.kv_len - sizes.q_len if first is None else first
        return lambda head: _blocks(facts, {**lengths, **head, **options})

    found = parts.parts_of(r.sizes, offset if isinstance(offset, int) else None, r.sequences, "batch" in read)
    counters = [
        (
            counter(
                facts.kv_tiles, facts.q_tiles, part.sizes, q_offset=part.q_offset, env=env,
                by_head=bool(read & {"head", "kv_head"}), by_batch="batch" in read, survey=survey,
                first_batch=part.number, blocks=blocks_of(part, survey),
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


def _blocks(facts: Facts, env: Mapping[str, Any]) -> Blocks:
    """What is found of the pairs of a head, CELL queries at a time. env: symbols, operands and q_offset."""
    device, kv_len = torch.device("cpu"), env["kv_len"]
    keys = torch.arange(kv_len).view(1, 1, 1, -1)
    values = {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in env.items()}

    def of(number: int) -> list[int]:
        rows = torch.arange(number * CELL, min((number + 1) * CELL, env["q_len"])).view(1, 1, -1, 1) + env["q_offset"]
        shape = (1, 1, rows.shape[2], kv_len)
        mask = dense_mask(facts.attention, {**values, "q_pos": rows, "kv_pos": keys}, shape, torch.float32, device)
        some, every = mask[0, 0].any(0).split(CELL), mask[0, 0].all(0).split(CELL)
        return [int(a.any()) + int(b.all()) for a, b in zip(some, every)]

    return of


def _longest(attention: Attention, r: _Request, options: Mapping[str, Any]) -> CountLongest:
    """What a launch divides keys by: tiles of a sequence with all rows, by positions."""
    offset, program = options.get("q_offset"), facts_of(attention).kv_tiles
    numbers = {n: v for n, v in options.items() if isinstance(v, (int, float))}
    rows = r.sizes.q_len, r.sizes.kv_len

    def longest(block_q: int, block_kv: int) -> int:
        known = offset if isinstance(offset, int) else None
        return longest_visits(program, *rows, block_q, block_kv, known, {"head_dim": r.head_dim, **numbers})

    return longest


def _measures(code: CodePlan) -> bool:
    """Whether kernels read from memory which tiles to visit, as measured for the call."""
    return any(code.has(name) for name in MEASURES)


def plan(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any],
) -> Plan:  # fmt: skip
    options = _described(attention, operands, options)
    r = _request(attention, operands, device, target, schedule, form, options)
    facts = facts_of(attention)
    count, counted = _counter(attention, r, options)
    codes = [found.code for found in (r.forward, r.backward) if found]
    notes = (*r.notes, *_open_parts(facts, r.forward.code), *counted)
    if any(code.target == "interpret" for code in codes):
        notes = (*notes, "the interpreter is for debugging: times are of such work in compiled code, not of its steps")
    notes = (*notes, *_computed_whole(facts, r.forward))
    if r.sequences is not None:
        notes = (*notes, parts.note(r.sequences))
    elif isinstance(options.get("q_offset"), Tensor):
        notes = (*notes, "tiles are counted as if the queries were the last positions: q_offset is a tensor")
    if facts.survey is not None and facts.survey.by_pair and r.forward.code.signature.sequences == "packed":
        notes = (*notes, "tiles of packed sequences are listed without a look at pairs")
    if facts.traits.drops:
        notes = (
            *notes,
            "drop(X): of X the pairs that Philox-4x32-7 of seed, batch, head, q_pos and kv_pos keeps, over their "
            "share; its arithmetic is not in the times above",
        )
    tables = tables_in(r.forward.code, facts)
    traits = facts.traits_with(tables)
    for table in tables:
        notes = (*notes, f"read by distance, q_pos - kv_pos, from a table that is made in each call: {table.part}")
    if traits.pair_bytes:
        most = traits.pair_bytes
        notes = (*notes, f"what score and mask read for each pair, at most {most} bytes, is not in the bytes above")

    longest = _longest(attention, r, options)

    def made(visible: VisiblePairs | None = None) -> Plan:
        name = str(attention.name)
        return make_plan(
            name, r.sizes, r.machine, codes, traits, count=count, longest=longest, notes=notes, visible=visible
        )

    try:
        offset = options.get("q_offset") if r.sequences is None else None
        by_batch = "batch" in symbols(attention.folded_mask)
        found = parts.parts_of(r.sizes, offset, r.sequences, by_batch)
        return made(parts.summed_pairs([(_visible_pairs(attention, p, r.head_dim, options), n) for p, n in found]))
    except WeftError:
        made()  # counting tiles says more of operands that do not fit
        raise


ALL_PAIRS = 1 << 24  # up to so many pairs the mask is looked at whole,
SOME_PAIRS = 1 << 21  # and beyond it evenly spaced rows with so many pairs stand for all: a twentieth of a second


def _visible_pairs(
    attention: Attention, part: parts.Part, head_dim: int, options: Mapping[str, Any]
) -> VisiblePairs | None:
    """Pairs that see each other, by the mask itself; None where operands that it reads are missing."""
    sizes, offset = part.sizes, part.q_offset
    heads, rows = sizes.batch * sizes.heads, sizes.q_len
    if not attention.is_masked:
        return VisiblePairs(heads * rows * sizes.kv_len, heads * rows, heads * rows)
    values = {operand.name: options.get(operand.name) for operand in _mask_operands(attention)}
    if isinstance(offset, Tensor) or not all(isinstance(v, (int, float, Tensor)) for v in values.values()):
        return None
    values = {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
    read = symbols(attention.folded_mask)
    batches, different = sizes.batch if "batch" in read else 1, sizes.heads if read & {"head", "kv_head"} else 1
    of = some_heads(batches, different, HEADS_COUNTED)
    each = sizes.kv_len * len(of)
    chosen = _some_rows(rows, rows if rows * each <= ALL_PAIRS else max(1, SOME_PAIRS // each))
    first = sizes.kv_len - rows if offset is None else offset
    env = {**values, "q_len": rows, "kv_len": sizes.kv_len, "group": sizes.group, "head_dim": head_dim}
    seen = 0
    for batch, head in of:
        own = {**env, "batch": part.number + batch, "head": head, "kv_head": head // sizes.group}
        seen += _seen_by(attention, own, [first + row for row in chosen], sizes.kv_len)
    looked = len(of) * len(chosen)
    return VisiblePairs(round(seen * heads * rows / looked), looked, batches * different * rows)


def _some_rows(rows: int, most: int) -> Sequence[int]:
    """All rows, or this many of them, each from the middle of its share."""
    return range(rows) if rows <= most else [(2 * k + 1) * rows // (2 * most) for k in range(most)]


def _seen_by(attention: Attention, env: Mapping[str, Any], positions: Sequence[int], kv_len: int) -> int:
    """Pairs that these queries of one head see, a few rows at a time so that it stays in a cache."""
    device, step, seen = torch.device("cpu"), max(1, (1 << 18) // kv_len), 0
    keys = torch.arange(kv_len).view(1, 1, 1, -1)
    for start in range(0, len(positions), step):
        rows = torch.tensor(positions[start : start + step]).view(1, 1, -1, 1)
        shape = (1, 1, rows.shape[2], kv_len)
        try:
            mask = dense_mask(attention, {**env, "q_pos": rows, "kv_pos": keys}, shape, torch.float32, device)
        except (IndexError, RuntimeError) as error:
            raise WeftError(f"{attention.name}: the mask cannot be computed for these operands: {error}") from error
        seen += int(mask.sum())
    return seen


def _computed_whole(facts: Facts, found: driver.Resolved) -> tuple[str, ...]:
    """Which forwards have no tiles on a CPU."""
    if found.code.target != "cpu":
        return ()
    context = found.target.context(found.code, facts)
    seen = "the same keys" if facts.attention.is_masked and context["one_run"] else "all keys"
    seen += ", or all up to its own," if context["causal"] else ""
    whole = f"a forward in which every query sees {seen} is torch's own kernel, which is the faster one"
    return (f"{whole}; figures are of tiles",) if context["whole"] and not context["in_tiles"] else ()


def _open_parts(facts: Facts, code: CodePlan) -> tuple[str, ...]:
    """The parts of the mask without a closed form, which decide nothing where no tile is left out for what it reads."""
    left_out = code.looks_first or _measures(code)
    return tuple(f"by positions alone, {note}" if left_out else note for note in facts.kv_bounds.notes)


def explain(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any],
) -> str:  # fmt: skip
    from .compiler.planning.explain import explain as render  # lazy: imports rich

    facts = facts_of(attention)
    made = plan(attention, operands, device, target, schedule, form, options)
    return render(made, attention, facts.kv_bounds, facts.q_bounds, proven.claim(facts))


def source(
    attention: Attention, operands: Sequence[Tensor | Shape], direction: Literal["forward", "backward"],
    device: str | None, target: str | None, schedule: str | Schedule | None, form: Form | None,
    options: Mapping[str, Any],
) -> str:  # fmt: skip
    from .codegen.generate import generate  # lazy: imports sympy

    if direction not in ("forward", "backward"):
        raise WeftError(f"source: direction: expected 'forward' or 'backward', got {direction!r}")
    options = _described(attention, operands, options)
    r = _request(attention, operands, device, target, schedule, form, options)
    found = r.forward if direction == "forward" else r.backward
    if found is None:
        raise WeftError(f"{attention.name}: {r.notes[-1]}")
    return generate(facts_of(attention), found.code, found.target)


def show_mask(
    attention: Attention, q_len: int, kv_len: int, block_q: int, block_kv: int, path: str | Path | None,
    q_offset: int | None, head: int, batch: int, options: Mapping[str, Any],
) -> str:  # fmt: skip
    """Of `options`, heads, kv_heads and head_dim are sizes as in `weft.shape`, unless they are operands' names."""
    facts, name = facts_of(attention), f"{attention.name}: show_mask"
    operands = {p.name for p in attention.parameters}
    sizes = {n: options[n] for n in _PICTURE_SIZES if n in options and n not in operands}
    options = {n: value for n, value in options.items() if n not in sizes}
    counts = {"q_len": q_len, "kv_len": kv_len, "block_q": block_q, "block_kv": block_kv}
    _check_counts(name, {**counts, **{n: size for n, size in sizes.items() if size is not None}}, least=1)
    _check_counts(name, {"head": head, "batch": batch}, least=0)
    if path is not None:
        if not isinstance(path, (str, Path)):
            raise WeftError(f"{name}: path: expected the name of a picture such as 'mask.png', got {path!r}")
        picture.check_path(path)
    options = validate.described(attention, {**options, "q_offset": q_offset}, None, None, ("q_offset",))
    q_offset = options.pop("q_offset")
    _check_drawable(attention, facts.kv_tiles, options)
    if q_offset is not None:
        check_q_offset(q_offset, 1, torch.device("cpu"))
    offset, missing = kv_len - q_len if q_offset is None else q_offset, _to_give(attention, options)
    drawn = _drawn_head(attention, name, head, **sizes)
    env = {**drawn, "q_len": q_len, "kv_len": kv_len, "q_offset": offset, "batch": batch,
           **_environment(attention, options)}  # fmt: skip

    one = Shape(1, 1, 1, q_len, kv_len, drawn["head_dim"], drawn["head_dim"])
    here = {name: (value, value) for name, value in (*drawn.items(), ("batch", batch))}
    _check_read(attention, {**_ranges_of(one, offset), **here}, options)
    title = f"{attention.name}: {q_len} queries, {kv_len} keys{_which(attention, drawn, batch)}"
    if facts.survey is not None and missing:
        title += f"; by positions alone, give {missing} for the tiles of a call"
    measured = facts.survey is not None and not missing
    ranges = (
        _measured_ranges(facts, env, block_q, block_kv, options)
        if measured
        else _ranges_by_position(facts, env, block_q, block_kv)
    )
    grid = picture.grid_of(ranges, q_len, kv_len, block_q, block_kv)
    if path is not None:
        dense = None if missing else _dense(attention, {**env, **options})
        picture.mask_picture(grid, path, title=title, dense=dense)
    return picture.mask_text(grid, title=title)


_PICTURE_SIZES = ("heads", "kv_heads", "head_dim")


def _drawn_head(
    attention: Attention, name: str, head: int, heads: int | None = None, kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """What the mask may read of the head that is drawn. Sizes that it needs are asked for, and never made up."""
    read = symbols(attention.folded_mask)
    grouped = read & ({"group", "kv_head"} if head else {"group"})  # head 0 reads key head 0, however many there are
    if grouped and heads is None:
        reads = ", ".join(sorted(grouped))
        raise WeftError(f"{name}: the mask reads {reads}: pass heads=..., and kv_heads=... where keys have fewer")
    if kv_heads is not None and heads is None:
        raise WeftError(f"{name}: expected heads=... with kv_heads, got kv_heads={kv_heads} alone")
    if "head_dim" in read and head_dim is None:
        raise WeftError(f"{name}: the mask reads head_dim: pass head_dim=...")
    heads = heads or head + 1
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise WeftError(f"{name}: heads: expected a multiple of kv_heads {kv_heads}, got {heads}")
    if head >= heads:
        raise WeftError(f"{name}: head: expected 0 to {heads - 1}, got {head}")
    group = heads // kv_heads
    return {"head": head, "kv_head": head // group, "group": group, "head_dim": head_dim or 64}


def _which(attention: Attention, drawn: Mapping[str, int], batch: int) -> str:
    """What a picture is of, as far as the mask tells heads and batch rows apart: ", head 5 (kv_head 1)"."""
    read = symbols(attention.folded_mask)
    kv_head = f" (kv_head {drawn['kv_head']})" if "kv_head" in read else ""
    head = f", head {drawn['head']}{kv_head}" if read & {"head", "kv_head"} else ""
    return head + (f", batch row {batch}" if "batch" in read else "")


def _check_counts(name: str, counts: Mapping[str, object], least: int) -> None:
    """Raise WeftError, naming all of them, for what is no int of at least `least`."""
    problems = [
        f"{n}: expected an int of at least {least}, got {value!r}"
        for n, value in counts.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < least
    ]
    if problems:
        raise collected(name, problems)


def _ranges_by_position(facts: Facts, env: Mapping[str, Any], block_q: int, block_kv: int) -> picture.Ranges:
    def ranges(first_row: int, last_row: int) -> tuple[list[int], list[int]]:
        ends = {"q_first": first_row + env["q_offset"], "q_last": last_row + env["q_offset"]}
        return tile_ranges(facts.kv_tiles, {**env, **ends}, block=block_kv, length=env["kv_len"])

    return ranges


def _measured_ranges(
    facts: Facts, env: Mapping[str, Any], block_q: int, block_kv: int, given: Mapping[str, Any]
) -> picture.Ranges:
    """given: the operands as they are."""
    assert facts.survey is not None
    lengths = {name: env[name] for name in ("q_len", "kv_len", "q_offset")}
    blocks = _blocks(facts, {**env, **given}) if facts.survey.by_pair else None
    tiles = Measurement(facts.survey, env, **lengths, blocks=blocks).tiles(facts.kv_tiles, block_q, block_kv)
    return lambda first_row, last_row: tiles(first_row // block_q)


def _check_drawable(attention: Attention, program: TileProgram, options: Mapping[str, Any]) -> None:
    """Raise WeftError where the tiles depend on an operand that was not given."""
    if not attention.is_masked:
        return
    needed = {s.name for s in attention.scalars if s.dtype == "int"}
    needed |= {s.name for line in program.body for s in scalars(line.value)}
    needed |= {t.name for line in program.body for t in tensors(line.value)}
    missing = sorted(name for name in needed if name not in options)
    if missing:
        raise WeftError(f"{attention.name}: show_mask: missing the operand {', '.join(missing)}; pass {missing[0]}=...")


def _check_read(attention: Attention, ranges: Ranges, options: Mapping[str, Any]) -> None:
    """Raise WeftError where expressions read beyond the tensors that were given, as a call would.

    ranges: of symbols, by name. Expressions that read an operand that was not given are passed over.
    """
    extents = {n: tuple(v.shape) for n, v in options.items() if isinstance(v, Tensor)}
    ints = {s.name: (options[s.name],) * 2 for s in attention.scalars if s.dtype == "int" and s.name in options}
    floats = {s.name: options[s.name] for s in attention.scalars if s.dtype == "float" and s.name in options}
    problems: list[str] = []
    for root in attention.expressions:
        read = {t.name for t in tensors(root)}
        if read and read <= extents.keys() and {s.name for s in scalars(root) if s.dtype == "int"} <= ints.keys():
            problems += check_integers(root, ranges | ints, extents, floats)
    if problems:
        raise collected(str(attention.name), list(dict.fromkeys(problems)))


def _ranges_of(sizes: Shape, q_offset: object) -> Ranges:
    """Of the symbols in a call of these sizes."""
    offset = q_offset if isinstance(q_offset, int) else sizes.kv_len - sizes.q_len
    return {
        "q_pos": (offset, offset + sizes.q_len - 1), "kv_pos": (0, sizes.kv_len - 1), "batch": (0, sizes.batch - 1),
        "head": (0, sizes.heads - 1), "kv_head": (0, sizes.kv_heads - 1), "group": (sizes.heads // sizes.kv_heads,) * 2,
        "q_len": (sizes.q_len,) * 2, "kv_len": (sizes.kv_len,) * 2, "head_dim": (sizes.head_dim,) * 2,
    }  # fmt: skip


def _dense(attention: Attention, env: Mapping[str, Any]) -> Any:
    """The mask of one head itself, where it is small enough to draw. env: of the picture, with operands as given."""
    q_len, kv_len = env["q_len"], env["kv_len"]
    if q_len * kv_len > 1 << 22:
        return None
    device = torch.device("cpu")
    own = positions(1, 1, 1, q_len, kv_len, env["q_offset"], device)
    values = {**env, "q_pos": own["q_pos"], "kv_pos": own["kv_pos"]}
    return dense_mask(attention, values, (1, 1, q_len, kv_len), torch.float32, device)[0, 0].numpy()
