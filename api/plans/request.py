"""What a plan is asked of: sizes or tensors with options, checked as a call checks them, and the choices for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import conversion
from ..compiler.analysis.tiles.facts import facts_of
from ..compiler.analysis.tiles.measured import Table
from ..compiler.analysis.values.ranges import Ranges, check_integers
from ..compiler.planning.dtypes import ALL, BF16, FP16
from ..compiler.planning.latent_forms import cheaper_form
from ..compiler.planning.machines import hardware
from ..compiler.planning.records import Shape, stored_beside
from ..compiler.planning.schedule import Schedule
from ..compiler.planning.signature import MOST_SHORT, Described, Direction, Dtypes, Signature, Widths, signature_of
from ..compiler.planning.sources import DENSE
from ..compiler.planning.target import Target
from ..ir.attention import Attention
from ..ir.errors import Problem, UnavailableError, WeftError, collected, shown
from ..ir.expr import Scalar, TensorOperand
from ..ir.numbers import is_int
from ..ir.walk import scalars, tensors
from ..latent import latent_form
from ..runtime import descales, driver
from ..runtime.call import LARGEST_PAGE
from ..runtime.check.operands import as_number, check_absorbed, check_no_latent, check_q_offset, operand_problems
from ..runtime.check.operands import described as described_operands
from ..runtime.check.tensors import (
    DTYPES,
    check_latent,
    check_tensors,
    length_problems,
    refuse_tracing,
    width_problems,
)
from ..runtime.ops.quantize import large_table
from ..runtime.options import DESCRIBED, LENGTHS, PLAIN, READ_BY_KERNELS, Form, check_values
from ..runtime.run.key import boxed_of, dtypes_of, has_doubles, needs_offsets_64, offset_kind
from ..runtime.run.variant import variant_of
from ..runtime.settings import default_target
from . import parts
from .stored import Stored, as_tensors, stored, stored_problems

_NUMBERS = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")  # of a Shape


def shape(
    *, batch: int = 1, heads: int, kv_heads: int | None = None, q_len: int, kv_len: int | None = None,
    head_dim: int, value_dim: int | None = None, dtype: str = "bf16", kv_dtype: str | None = None,
    descale: descales.Per | None = None,
) -> Shape:  # fmt: skip
    """The sizes of a call, in place of its tensors: kv_heads, kv_len and value_dim default to heads, q_len, head_dim.

    dtype: "bf16", "fp16" or "fp32", or of FP8 operands "e4m3" or "e5m2"; kv_dtype: that of key and value, where it
    differs. descale: what shares a descale of FP8 operands, "tensor", "head" (where not given), 64, 128 or "token", as
    in `weft.fp8.quantize`. For latent attention head_dim is the query's nope + rope and value_dim is Dv.
    """
    own = (heads if kv_heads is None else kv_heads, q_len if kv_len is None else kv_len)
    made = Shape(batch, heads, own[0], q_len, own[1], head_dim, head_dim if value_dim is None else value_dim, dtype)
    given = {"batch": batch, "heads": heads, "kv_heads": own[0], "q_len": q_len, "kv_len": own[1], "head_dim": head_dim,
             "value_dim": made.value_dim}  # fmt: skip
    as_others = {"kv_heads": kv_heads, "kv_len": kv_len, "value_dim": value_dim}
    given = {n: value for n, value in given.items() if n not in as_others or as_others[n] is not None}
    problems = number_problems(given)
    problems += stored_problems(dtype, kv_dtype, descale)
    if problems := problems or _heads_problems(made):
        raise collected("shape", problems)
    return stored(made, kv_dtype, descale)


def number_problems(sizes: Mapping[str, object]) -> list[Problem]:
    """Sizes that are none."""
    return [
        Problem(option=name, expected="a positive int", got=shown(value))
        for name, value in sizes.items()
        if not is_int(value, least=1)
    ]


def _shape_of(
    attention: Attention, operands: Sequence[Tensor | Shape], options: Mapping[str, Any]
) -> tuple[Shape, str | None]:
    """The sizes that the arguments stand for, and the device that tensors are on."""
    refuse_tracing(str(attention.name))
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
    uk, uv, paged = options.get("uk"), options.get("uv"), options.get("block_table") is not None
    if wanted == 3:
        check_tensors(str(attention.name), query, key, tensors[2], paged)
    else:
        check_latent(attention, query, key, uk, uv, paged, options.get("rope"))
    kv_len = parts.kv_rows(str(attention.name), query, key, options) if paged else key.shape[2]
    if 0 in (query.shape[0], query.shape[2], kv_len):
        raise WeftError(f"{attention.name}: nothing is computed for empty operands, and there is no plan")
    width = tensors[2].shape[3] if wanted == 3 else uv.shape[2] if isinstance(uv, Tensor) else attention.latent.rank  # type: ignore[union-attr]
    kv_heads = key.shape[1] if wanted == 3 else query.shape[1]
    dtype = DTYPES[query.dtype] if query.dtype not in descales.FP8 else FP16.name  # of products
    made = Shape(
        query.shape[0], query.shape[1], kv_heads, query.shape[2], kv_len, query.shape[3], width, dtype,
        *stored_beside(dtype, *(DTYPES[t.dtype] for t in tensors)),
    )  # fmt: skip
    return made, str(query.device)


def _check_sizes(attention: Attention, sizes: Shape) -> None:
    """Raise WeftError for sizes that a call refuses."""
    latent = attention.latent
    problems = number_problems({n: getattr(sizes, n) for n in _NUMBERS}) + _dtype_problems(sizes)
    if problems:
        raise collected(str(attention.name), [dataclasses.replace(problem, of="shape") for problem in problems])
    widths = {"head_dim": sizes.head_dim, "value_dim": sizes.value_dim}
    for name, width in widths.items() if latent is None else ():
        problems += width_problems(name, width, "")
    for name, length in (("q_len", sizes.q_len), ("kv_len", sizes.kv_len)):
        problems += length_problems(name, length)
    if latent is not None and sizes.head_dim <= latent.rope:
        more = f"more than {latent.rope}, the latent's rope"
        problems.append(Problem(option="head_dim", expected=more, got=str(sizes.head_dim)))
    problems += _heads_problems(sizes)
    if problems:
        raise collected(str(attention.name), [dataclasses.replace(problem, of="shape") for problem in problems])


def _dtype_problems(sizes: Shape) -> list[Problem]:
    """Dtypes of a `weft.Shape` that are none."""
    named = {"dtype": sizes.dtype}
    named |= {n: d for n in ("q_dtype", "kv_dtype", "v_dtype") if (d := getattr(sizes, n)) is not None}
    return [
        Problem(option=name, expected=f"one of {', '.join(ALL)}", got=shown(dtype))
        for name, dtype in named.items()
        if not isinstance(dtype, str) or dtype not in ALL
    ]


def _heads_problems(sizes: Shape) -> list[Problem]:
    """Heads that share key heads unevenly."""
    if sizes.heads % sizes.kv_heads == 0:
        return []
    return [Problem(option="heads", expected=f"a multiple of kv_heads {sizes.kv_heads}", got=str(sizes.heads))]


def _check_options(attention: Attention, sizes: Shape, form: Form | None, options: Mapping[str, Any]) -> None:
    """Raise WeftError for options and operands that a call of these sizes refuses."""
    name = str(attention.name)
    given = {n: value for n, value in options.items() if n not in DESCRIBED}
    check_operands(name, attention, given, torch.float64 if sizes.dtype == "fp64" else torch.float32)
    offset = options.get("q_offset")
    if offset is not None and not any(options.get(n) is not None for n in LENGTHS):
        device = offset.device if isinstance(offset, Tensor) else torch.device("cpu")
        check_q_offset(name, offset, sizes.batch, device)
    if attention.latent is None:
        check_no_latent(attention, options.get("uk"), options.get("uv"), form, options.get("rope"))
    check_values(name, {"form": form})


def _hardware(device: str | None, tensors_on: str | None) -> hardware.Hardware:
    if device is not None:
        return hardware.by_name(device)
    return hardware.for_device(tensors_on) if tensors_on not in (None, "meta") else hardware.this_machine()


def _seen(attention: Attention, sizes: Shape, form: Form | None, apart: bool) -> tuple[Shape, Widths]:
    """Sizes and widths as kernels see them: latent forms change widths and heads. apart: rotary columns of the cache
    are a tensor of their own."""
    latent = attention.latent
    if latent is None:
        return sizes, Widths(sizes.head_dim, sizes.value_dim)
    form = form or cheaper_form(latent, sizes)
    if form == "expanded":
        return sizes, Widths(sizes.head_dim, sizes.value_dim, rope_dim=latent.rope)
    width = latent.rank + latent.rope
    absorbed = dataclasses.replace(sizes, kv_heads=1, head_dim=width, value_dim=latent.rank)
    return absorbed, Widths(width, latent.rank, latent.rope * apart, value_is_key=True)


def _everything(attention: Attention, widths: Widths) -> frozenset[str]:
    """All gradients that a backward can be asked for."""
    facts = facts_of(attention)
    operands = {load.tensor.name for load, _ in facts.gradient_kinds}
    return frozenset({"query", "key", "value", *({"rope"} if widths.rope_dim else ()), *operands})


def _frozen(operands: Sequence[Tensor | Shape], options: Mapping[str, Any]) -> frozenset[str]:
    """Tensors of a call that want no gradient; query, key and value only where another of these wants one, as a
    backward is asked about with plain tensors, too."""
    main = dict(zip(("query", "key", "value"), operands)) if len(operands) == 3 else {}
    if not any(isinstance(t, Tensor) and t.requires_grad for t in main.values()):
        main = {}
    given: dict[str, Any] = {**options, **main}
    return frozenset(n for n, value in given.items() if isinstance(value, Tensor) and not value.requires_grad)


class Request(NamedTuple):
    """What a plan is asked of."""

    sequences: parts.Described | None  # those of their own lengths
    sizes: Shape  # as kernels see them
    head_dim: int  # the value of the symbol: of the call, which latent forms change
    machine: hardware.Hardware
    forward: driver.Resolved
    backward: driver.Resolved | None  # None where there is no backward
    notes: tuple[str, ...]
    short: driver.Resolved | None = None  # of short sequences, where those of `forward` are long ones
    free: bool = True  # no schedule is asked for; said of calls with a backward

    @property
    def targets(self) -> list[Target]:
        """The targets of both directions, each once."""
        found = [each.target for each in (self.forward, self.backward) if each is not None]
        return list(dict.fromkeys(found))

    @property
    def shares(self) -> list[Request]:
        """The same of each module of the forward alone, with the sequences that it computes."""
        if self.short is None:
            return [self]
        assert self.sequences is not None
        rows = self.sequences.rows
        shares = [(self.forward, [r for r in rows if r.q_len > MOST_SHORT])]
        shares += [(self.short, [r for r in rows if r.q_len <= MOST_SHORT])]
        return [
            self._replace(
                forward=forward, short=None, sequences=self.sequences._replace(rows=own),
                sizes=_averaged(self.sizes, len(own), sum(r.q_len for r in own)),
            )
            for forward, own in shares
        ]  # fmt: skip


def _averaged(sizes: Shape, number: int, rows: int) -> Shape:
    """As kernels see packed queries over pages: each sequence has keys of its own, of which the table has as many."""
    return dataclasses.replace(sizes, batch=max(number, 1), q_len=max(-(-rows // max(number, 1)), 1))


class _Asked(NamedTuple):
    """What both directions of a request are asked for."""

    attention: Attention
    operands: Sequence[Tensor | Shape]
    sizes: Shape
    choice: tuple[hardware.Hardware, str | None, str | Schedule | None]  # the machine, target and schedule

    def resolved(self, signature: Signature) -> list[driver.Resolved]:
        """The modules of one direction; those of another target where the first cannot take these tensors."""
        made = self._modules(signature)
        misfit = _misfit(made[0], signature, self.operands, self.sizes)
        if misfit is None:
            return made
        if self.choice[1] == made[0].target.name:
            raise UnavailableError(f"{self.attention.name}: target {misfit}")
        others = self._modules(signature, frozenset({made[0].target.name}))
        return [dataclasses.replace(other, notes=(*other.notes, misfit)) for other in others]

    def _modules(self, signature: Signature, unfit: frozenset[str] = frozenset()) -> list[driver.Resolved]:
        shares = driver.shared_out(self.attention, signature, *self.choice, unfit)
        return [driver.resolve(self.attention, own, *self.choice, unfit) for own in shares]


def request_of(
    attention: Attention, operands: Sequence[Tensor | Shape], device: str | None, target: str | None,
    schedule: str | Schedule | None, form: Form | None, options: Mapping[str, Any],
) -> Request:  # fmt: skip
    """The very choices that a call makes: both ask the driver."""
    if len(operands) == 1 and isinstance(operands[0], Stored):
        _check_sizes(attention, operands[0])
        operands, options = as_tensors(attention, operands[0], options)
    sizes, tensors_on = _shape_of(attention, operands, options)
    _check_options(attention, sizes, form, options)
    if target is not None:
        check_values(str(attention.name), {"target": target})
    machine = _hardware(device, tensors_on)
    if attention.latent is not None:
        form = _form_of(attention, operands, options, form, tensors_on is not None)
    absorbed = attention.latent is not None and (form or cheaper_form(attention.latent, sizes)) == "absorbed"
    operands, options, copies = _converted(attention, operands, options, target, schedule, machine, absorbed)
    if copies:
        sizes = dataclasses.replace(sizes, dtype=BF16.name, kv_dtype=None, q_dtype=None, v_dtype=None)
    head_dim = sizes.head_dim
    sizes, widths = _seen(attention, sizes, form, options.get("rope") is not None)
    found = _sequences(attention, operands, sizes, options)
    ranges = ranges_of(sizes, options.get("q_offset") if found is None else 0)
    ranges |= {} if found is None else parts.ranges_of(found)
    check_read(attention, ranges, options)
    offset = offset_kind(options.get("q_offset")) if found or isinstance(options.get("q_offset"), Tensor) else "number"
    target = default_target() if target is None else target
    asked = options.get("deterministic")
    repeats = True if asked is None and torch.are_deterministic_algorithms_enabled() else asked
    facts, on_gpu = facts_of(attention), machine.kind == "cuda"
    dtypes, rows_read, tiles_read = _of_fp8(attention, operands, options)

    def signature(direction: Direction, wanted: frozenset[str]) -> Signature:
        described = Described(
            direction, machine.arch, sizes.dtype, widths, DENSE if found is None else found.sequences.kind, offset,
            wanted, repeats, rows=(sizes.q_len, sizes.kv_len), number=1 if found is None else len(found.rows),
            lengths=_lengths(sizes, found), offsets_64=needs_offsets_64(options),
            doubles=on_gpu and has_doubles(options), boxed=boxed_of(facts, options, sizes.element_bytes * on_gpu),
            options=frozenset(n for n in READ_BY_KERNELS if options.get(n) is not None), scaled_rows=rows_read,
            scaled_tiles=tiles_read, dtypes=dtypes,
        )  # fmt: skip
        return signature_of(described, masked=attention.canonical.is_masked, sums_pairs=facts.sums_pairs(wanted))

    asked_of = _Asked(attention, operands, sizes, (machine, target, schedule))
    first = None
    if found is None and options.get("q_offset") is None:
        first = variant_of(attention).first_key.note(sizes.q_len, sizes.kv_len)
    forward, *rest = asked_of.resolved(signature("forward", frozenset()))
    short = rest[0] if rest else None
    if found is not None and found.sequences.kind.is_mixed and found.rows:
        sizes = _averaged(sizes, len(found.rows), sizes.q_len)
    lacking = _PAGES_HAVE_NO_BACKWARD if options.get("block_table") is not None else _NO_BACKWARD
    if copies or (dtypes is not None and dtypes.quantized):
        lacking = _FP8_HAS_NO_BACKWARD
    if widths.value_is_key or lacking != _NO_BACKWARD:
        notes = (*forward.notes, *copies, lacking, *([first] if first else []))
        return Request(found, sizes, head_dim, machine, forward, None, notes, short)
    asks = signature("backward", _everything(attention, widths) - _frozen(operands, options))
    try:
        (backward,) = asked_of.resolved(asks)
    except UnavailableError as error:
        if not asks.options:
            raise
        return Request(found, sizes, head_dim, machine, forward, None, (*forward.notes, f"no backward: {error}"), short)
    notes = tuple(dict.fromkeys((*forward.notes, *backward.notes, *([first] if first else []))))
    return Request(found, sizes, head_dim, machine, forward, backward, notes, free=schedule is None)


def _converted(
    attention: Attention, operands: Sequence[Tensor | Shape], options: Mapping[str, Any], target: str | None,
    schedule: str | Schedule | None, machine: hardware.Hardware, absorbed: bool,
) -> tuple[Sequence[Tensor | Shape], Mapping[str, Any], tuple[str, ...]]:  # fmt: skip
    """Operands and options of the call that is computed in place of one with FP8 operands, and what `explain` says."""
    given, rope = [t for t in operands if isinstance(t, Tensor)], options.get("rope")
    if len(given) not in (2, 3) or len(given) != len(operands):
        return operands, options, ()
    query, key, value = given[0], given[1], given[2] if len(given) > 2 else None
    main = {"query": query, "key": key, "value": value}
    names = (*descales.NAMES, "out_dtype", *LENGTHS)
    own = PLAIN.having(**{n: options.get(n) for n in names}, target=target, schedule=schedule)
    if (value is None and not absorbed) or not conversion.is_convertible(main, own, options, rope, is_planned=True):
        return operands, options, ()
    variant = variant_of(attention)
    if not conversion.is_faster(variant, machine.arch, main, own, rope) or conversion.are_multiplied(
        variant, machine.arch, main, own
    ):
        return operands, options, ()
    table = own.block_table
    descales.refuse_bare(str(attention.name), main, own)
    descales.read_by_kernels(str(attention.name), main, own, pooled=table is not None)
    rest = {n: v for n, v in options.items() if n not in (*descales.NAMES, "out_dtype", "rope")}
    shapes = [[*t.shape] for t in given]
    if value is None:
        shapes[1][3] += 0 if rope is None else rope.shape[3]
    if table is not None:
        rest["block_table"], number = large_table(table, key.shape[2])
        shapes[1:] = [[number, heads, LARGEST_PAGE, width] for _, heads, _, width in shapes[1:]]
    halves = [torch.empty(shape, dtype=conversion.HALF, device=query.device) for shape in shapes]
    return halves, rest, (conversion.note(main, machine, own, rope),)


def _of_fp8(
    attention: Attention, operands: Sequence[Tensor | Shape], options: Mapping[str, Any]
) -> tuple[Dtypes | None, frozenset[str], frozenset[str]]:  # fmt: skip
    """The dtypes of a call where they differ, which of its descales are numbers of rows, and which of 128 rows."""
    given = [t for t in operands if isinstance(t, Tensor)]
    asked = [n for n in (*descales.NAMES, "out_dtype") if options.get(n) is not None]
    if not given:
        if asked:
            raise WeftError(f"{attention.name}: {', '.join(asked)}: {_FP8_SIZES}")
        return None, frozenset(), frozenset()
    if not asked and not descales.are_quantized(given):
        return None, frozenset(), frozenset()
    query, key, value = given[0], given[1], given[2] if len(given) > 2 else None
    main, own = {"query": query, "key": key, "value": value}, PLAIN.having(**{n: options[n] for n in asked})
    descales.refuse_bare(str(attention.name), main, own)
    read = descales.read_by_kernels(str(attention.name), main, own, options.get("block_table") is not None)
    dtypes = dtypes_of(attention, query, key, value, descales.out_name(own))
    return dtypes, descales.rows_read(read), descales.tiles_read(read, key.shape[2])


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
        if isinstance(options.get("block_table"), Tensor):
            rows[1] = parts.pool_of(str(attention.name), sizes, options["block_table"])  # type: ignore[index]
    return parts.described(str(attention.name), *rows, options)


def _lengths(sizes: Shape, found: parts.Described | None) -> tuple[int, int]:
    """As of runtime.call.lengths_of."""
    kind = DENSE if found is None else found.sequences.kind
    number = max(1, len(found.rows)) if found is not None and kind.rows.packed else 1
    return sizes.q_len // number, sizes.kv_len // (number if kind.keys.packed else 1)


_NO_BACKWARD = "the absorbed form has no backward: call with form='expanded' to train"
_FP8_SIZES = "expected none beside sizes that are not FP8; name kv_dtype='e4m3' in weft.shape"
_FP8_HAS_NO_BACKWARD = "a call with FP8 operands has no backward: train with bf16 operands"
_PAGES_HAVE_NO_BACKWARD = "a call with block_table has no backward: gather the pages to train"


def _form_of(
    attention: Attention, operands: Sequence[Any], options: Mapping[str, Any], form: Form | None, tensors: bool
) -> Form | None:
    """The form that a latent call computes: that of `form`, of pages or of its tensors, where they are given.

    Without uk and uv the query is latent already.
    """
    if options.get("block_table") is not None:
        check_absorbed(attention, form)
        return "absorbed"
    if form is not None or not tensors:
        return form
    uk, uv = options.get("uk"), options.get("uv")
    if uk is None or uv is None:
        return "absorbed"
    own = {p.name: options.get(p.name) for p in attention.canonical.parameters}
    return latent_form(attention, operands[0], operands[1], uk, uv, own)


def described(attention: Attention, operands: Sequence[Tensor | Shape], options: Mapping[str, Any]) -> dict[str, Any]:
    """The operands and options of a call that is planned, checked as far as they are given. Beside tensors of
    device="meta" they may lie anywhere, as beside sizes."""
    first = operands[0] if operands else None
    device = None if not isinstance(first, Tensor) or first.is_meta else first.device
    if any(options.get(n) is not None for n in LENGTHS):
        offset = as_number(options.get("q_offset"), int)  # one for each sequence: checked with these
        rest = {n: value for n, value in options.items() if n != "q_offset"}
        return described_operands(attention, rest, None, device, DESCRIBED) | {"q_offset": offset}
    if isinstance(first, Tensor):
        number = None if first.is_nested or not first.dim() else len(first)
        return described_operands(attention, options, number, device, DESCRIBED)
    batch = first.batch if isinstance(first, Shape) else 1
    return described_operands(attention, options, batch, None, DESCRIBED)


def check_operands(
    title: str, attention: Attention, options: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    """Raise WeftError for operands that a call would refuse: unknown names, and scalars of another kind.

    dtype: of the query.
    Those that are missing are nobody's mistake here. A function of its indices may stand for a tensor.
    """
    if problems := operand_problems(attention, options, None, all_of=(), dtype=dtype, drawn=True):
        raise collected(title, problems)


def mask_operands(attention: Attention) -> list[Scalar | TensorOperand]:
    """The operands that the mask reads, by name."""
    mask = attention.canonical.folded_mask
    return sorted((*scalars(mask), *tensors(mask)), key=lambda operand: operand.name)


def to_give(attention: Attention, options: Mapping[str, Any]) -> str:
    """What the mask reads and was not given, as arguments: "doc=..., window=..."; "" where all is there."""
    return ", ".join(f"{o.name}=..." for o in mask_operands(attention) if o.name not in options)


def environment(attention: Attention, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as tile programs read them: numbers as they are, tensors that the mask reads as tables."""
    env: dict[str, Any] = {n: v for n, v in options.items() if not isinstance(v, Tensor)}
    for operand in mask_operands(attention):
        value = options.get(operand.name)
        if isinstance(operand, TensorOperand) and isinstance(value, Tensor):
            env[operand.name] = Table(operand.name, value.detach().tolist)
    return env


def check_read(attention: Attention, ranges: Ranges, options: Mapping[str, Any]) -> None:
    """Raise WeftError where expressions read beyond the tensors that were given, as a call would.

    ranges: of symbols, by name. Expressions that read an operand that was not given are passed over.
    """
    extents = {n: tuple(v.shape) for n, v in options.items() if isinstance(v, Tensor) and not v.is_nested}
    ints = {
        s.name: (options[s.name],) * 2 for s in attention.canonical.scalars if s.dtype == "int" and s.name in options
    }
    floats = {s.name: options[s.name] for s in attention.canonical.scalars if s.dtype == "float" and s.name in options}
    problems: list[str] = []
    for root in attention.canonical.expressions:
        read = {t.name for t in tensors(root)}
        if read and read <= extents.keys() and {s.name for s in scalars(root) if s.dtype == "int"} <= ints.keys():
            problems += check_integers(root, ranges | ints, extents, floats)
    if problems:
        raise collected(str(attention.name), list(dict.fromkeys(problems)))


def ranges_of(sizes: Shape, q_offset: object) -> Ranges:
    """Of the symbols in a call of these sizes."""
    offset = q_offset if isinstance(q_offset, int) else sizes.kv_len - sizes.q_len
    return {
        "q_pos": (offset, offset + sizes.q_len - 1), "kv_pos": (0, sizes.kv_len - 1), "batch": (0, sizes.batch - 1),
        "head": (0, sizes.heads - 1), "kv_head": (0, sizes.kv_heads - 1), "group": (sizes.heads // sizes.kv_heads,) * 2,
        "q_len": (sizes.q_len,) * 2, "kv_len": (sizes.kv_len,) * 2, "head_dim": (sizes.head_dim,) * 2,
    }  # fmt: skip
