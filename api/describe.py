"""The methods of an attention variant that need no operands: plan, explain, source, show_mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import validate
from .compiler.analysis import proven
from .compiler.analysis.facts import Facts, facts_of
from .compiler.analysis.measured import Measurement, Table, visited
from .compiler.analysis.records import TileProgram
from .compiler.analysis.tiles import tile_ranges
from .compiler.planning import hardware, picture
from .compiler.planning.cost import CountTiles
from .compiler.planning.kernels import SPANS
from .compiler.planning.picture import Ranges
from .compiler.planning.plan import CodePlan, Plan, counter, make_plan
from .compiler.planning.records import Shape
from .compiler.planning.schedule import Schedule
from .compiler.planning.signature import Direction, Dtypes, Signature, Widths
from .ir import parse
from .ir.errors import WeftError, collected
from .ir.expr import Scalar, TensorOperand
from .ir.reference import dense_mask, positions
from .ir.walk import scalars, symbols, tensors
from .runtime import driver
from .runtime.checks import DTYPES, check_tensors, tensor_problems
from .runtime.settings import default_target

if TYPE_CHECKING:
    from .attention import Attention, Form


def shape(
    *, batch: int = 1, heads: int, kv_heads: int | None = None, q_len: int, kv_len: int | None = None,
    head_dim: int, value_dim: int | None = None, dtype: str = "bf16",
) -> Shape:  # fmt: skip
    """The sizes of a call, in place of its tensors: kv_heads, kv_len and value_dim default to heads, q_len, head_dim.

    dtype: "bf16", "fp16" or "fp32". For latent attention head_dim is the query's nope + rope and value_dim is Dv.
    """
    made = Shape(batch, heads, kv_heads or heads, q_len, kv_len or q_len, head_dim, value_dim or head_dim, dtype)
    if dtype not in ("bf16", "fp16", "fp32"):
        raise WeftError(f"shape: dtype: expected bf16, fp16 or fp32, got {dtype!r}")
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
        return operands[0], None
    tensors = [t for t in operands if isinstance(t, Tensor)]
    wanted = 2 if attention.latent is not None else 3
    if len(tensors) != wanted or len(tensors) != len(operands):
        raise WeftError(
            f"{attention.name}: expected weft.shape(...) or {wanted} tensors, got {len(operands)} arguments"
        )
    query, key = tensors[0], tensors[1]
    uk, uv = options.get("uk"), options.get("uv")
    if wanted == 3:
        check_tensors(str(attention.name), *tensors)
    else:
        validate.check_latent(attention, query, key, uk, uv)
    if 0 in (query.shape[0], query.shape[2], key.shape[2]):
        raise WeftError(f"{attention.name}: nothing is computed for empty operands, and there is no plan")
    width = tensors[2].shape[3] if wanted == 3 else uv.shape[2] if isinstance(uv, Tensor) else attention.latent.rank  # type: ignore[union-attr]
    kv_heads = key.shape[1] if wanted == 3 else query.shape[1]
    made = Shape(query.shape[0], query.shape[1], kv_heads, query.shape[2], key.shape[2], query.shape[3], width,
                 DTYPES[query.dtype])  # fmt: skip
    return made, str(query.device)


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
    operands = {load.tensor.name for load, kind in facts.gradient_kinds if kind != "mixed"}
    return frozenset({"query", "key", "value", *({"rope"} if widths.rope_dim else ()), *operands})


class _Request(NamedTuple):
    """What a plan is asked of."""

    sizes: Shape
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
    machine = _hardware(device, tensors_on)
    if form is None and tensors_on is not None and attention.latent is not None:
        form = _form_of_call(attention, operands, options)
    sizes, widths = _seen(attention, sizes, form)
    offset = "per_row" if isinstance(options.get("q_offset"), Tensor) else "number"
    target = target or default_target()

    def resolved(direction: Direction, wanted: frozenset[str]) -> driver.Resolved:
        dtypes = Dtypes.all(sizes.dtype)
        signature = Signature(direction, machine.arch, dtypes, widths, offset=offset, wanted=wanted)  # type: ignore[arg-type]
        return driver.resolve(attention, signature, machine, target, schedule)

    forward = resolved("forward", frozenset())
    if widths.value_is_key:
        return _Request(sizes, machine, forward, None, (*forward.notes, _NO_BACKWARD))
    backward = resolved("backward", _everything(attention, widths))
    notes = tuple(dict.fromkeys((*forward.notes, *backward.notes)))
    return _Request(sizes, machine, forward, backward, notes)


_NO_BACKWARD = "the absorbed form has no backward: call with form='expanded' to train"


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
def _environment(attention: Attention, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as tile programs read them: numbers as they are, tensors that the mask reads as tables."""
    env: dict[str, Any] = {n: v for n, v in options.items() if not isinstance(v, Tensor)}
    problems: list[str] = []
    for operand in _mask_operands(attention):
        value = options.get(operand.name)
        if isinstance(operand, Scalar) or value is None:
            continue
        if isinstance(value, Tensor):
            problems += tensor_problems(operand, value, value.device)
            env[operand.name] = Table(operand.name, value.detach().tolist)
        elif not callable(value):
            problems.append(f"{operand.name}: expected a tensor of {operand.dtype}, got {type(value).__name__}")
    if problems:
        raise collected(str(attention.name), problems)
    return env


def _mask_operands(attention: Attention) -> list[Scalar | TensorOperand]:
    """The operands that the mask reads, by name."""
    mask = attention.folded_mask
    return sorted((*scalars(mask), *tensors(mask)), key=lambda operand: operand.name)


def _to_give(attention: Attention, options: Mapping[str, Any]) -> str:
    """What the mask reads and was not given, as arguments: "doc=..., window=..."; "" where all is there."""
    return ", ".join(f"{o.name}=..." for o in _mask_operands(attention) if o.name not in options)


def _counter(
    attention: Attention, sizes: Shape, code: CodePlan, options: Mapping[str, Any]
) -> tuple[CountTiles | None, tuple[str, ...]]:
    """Tile counts of the whole problem, with a note where they are not those of a call.

    None where they depend on operands that were not given.
    """
    facts, missing = facts_of(attention), _to_give(attention, options)
    measured = _measures(code)
    survey = facts.survey if measured and not missing else None
    lines = (*facts.kv_tiles.body, *facts.q_tiles.body)
    decisive = [attention.folded_mask] if survey else [line.value for line in lines]
    read = {name for value in decisive for name in symbols(value)}
    offset = options.get("q_offset")
    count = counter(
        facts.kv_tiles,
        facts.q_tiles,
        sizes,
        q_offset=offset if isinstance(offset, int) else None,
        env=_environment(attention, options),
        by_head=bool(read & {"head", "kv_head"}),
        by_batch="batch" in read,
        survey=survey,
    )
    if survey is not None:
        return count, ()
    try:
        count("kv", 128, 128)
    except WeftError:
        if not missing:
            raise
        return None, (f"tiles are counted as without a mask: give {missing} for exact counts",)
    if measured:
        return count, (f"tiles are counted by positions alone, an upper limit: give {missing} for those of a call",)
    open_mask = code.looks_first and not facts.kv_bounds.closed_form
    return count, ("tiles are counted by positions alone, an upper limit",) if open_mask else ()


def _measures(code: CodePlan) -> bool:
    """Whether kernels read from memory which tiles to visit, as measured for the call."""
    return any(code.has(name) for name in SPANS)


def plan(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any],
) -> Plan:  # fmt: skip
    r = _request(attention, operands, device, target, schedule, form, options)
    facts = facts_of(attention)
    count, counted = _counter(attention, r.sizes, r.forward.code, options)
    codes = [found.code for found in (r.forward, r.backward) if found]
    notes = (*r.notes, *_open_parts(facts, r.forward.code), *counted)
    return make_plan(str(attention.name), r.sizes, r.machine, codes, facts.traits, count=count, notes=notes)


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
    r = _request(attention, operands, device, target, schedule, form, options)
    found = r.forward if direction == "forward" else r.backward
    if found is None:
        raise WeftError(f"{attention.name}: {_NO_BACKWARD}")
    return generate(facts_of(attention), found.code, found.target)


def show_mask(
    attention: Attention, q_len: int, kv_len: int, block_q: int, block_kv: int, path: str | Path | None,
    q_offset: int | None, head: int, batch: int, options: Mapping[str, Any],
) -> str:  # fmt: skip
    facts = facts_of(attention)
    _check_drawable(attention, facts.kv_tiles, options)
    offset, missing = kv_len - q_len if q_offset is None else q_offset, _to_give(attention, options)
    env = {
        "q_len": q_len, "kv_len": kv_len, "q_offset": offset, "head": head, "kv_head": head, "group": 1,
        "batch": batch, "head_dim": 64, **_environment(attention, options),
    }  # fmt: skip

    title = f"{attention.name}: {q_len} queries, {kv_len} keys"
    if facts.survey is not None and missing:
        title += f"; by positions alone, give {missing} for the tiles of a call"
    measured = facts.survey is not None and not missing
    find = _measured_ranges if measured else _ranges_by_position
    ranges = find(facts, env, block_q, block_kv)
    grid = picture.grid_of(ranges, q_len, kv_len, block_q, block_kv)
    if path is not None:
        dense = None if missing else _dense(attention, q_len, kv_len, offset, head, batch, options)
        picture.mask_picture(grid, path, title=title, dense=dense)
    return picture.mask_text(grid, title=title)


def _ranges_by_position(facts: Facts, env: Mapping[str, Any], block_q: int, block_kv: int) -> Ranges:
    def ranges(first_row: int, last_row: int) -> tuple[list[int], list[int]]:
        ends = {"q_first": first_row + env["q_offset"], "q_last": last_row + env["q_offset"]}
        return tile_ranges(facts.kv_tiles, {**env, **ends}, block=block_kv, length=env["kv_len"])

    return ranges


def _measured_ranges(facts: Facts, env: Mapping[str, Any], block_q: int, block_kv: int) -> Ranges:
    assert facts.survey is not None
    lengths = {name: env[name] for name in ("q_len", "kv_len", "q_offset")}
    spans = Measurement(facts.survey, env, **lengths).spans(facts.kv_tiles, block_q, block_kv)
    return lambda first_row, last_row: visited(spans(first_row // block_q))


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


def _dense(
    attention: Attention, q_len: int, kv_len: int, offset: int, head: int, batch: int, options: Mapping[str, Any]
) -> Any:
    """The mask itself, where it is small enough to draw."""
    if q_len * kv_len > 1 << 22:
        return None
    device = torch.device("cpu")
    env = positions(batch + 1, head + 1, head + 1, q_len, kv_len, offset, device) | {"head_dim": 1, **options}
    return dense_mask(attention, env, (batch + 1, head + 1, q_len, kv_len), device)[batch, head].numpy()
