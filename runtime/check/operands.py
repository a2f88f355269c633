"""Rules of a variant's own operands, and of options that are numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from ...ir.attention import Attention
from ...ir.errors import Problem, WeftError, collected, counted, shown
from ...ir.expr import CALL_OPTIONS, INT32_MAX, SMALLER, Scalar, TensorOperand
from ...ir.foreign import number_in, option_hint
from ...ir.numbers import is_int, is_number
from ..call import Call
from ..options import check_values
from .tensors import FLOATS, INTS, NO_PAGES, form_problem, known_memory_problems, place_problems, wrong

FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # of float32
LARGEST_OFFSET = INT32_MAX // 2  # of q_offset, in size
_FIELDS = frozenset(field.name for field in fields(Attention))


# -- the variant's own operands ----------------------------------------------------------------------------------------
def operand_problems(
    attention: Attention, given: Mapping[str, object], device: torch.device | None,
    all_of: Collection[str] | None = None, dtype: torch.dtype | None = None, drawn: bool = False,
) -> list[Problem]:  # fmt: skip
    """What is wrong with the variant's own operands: each must be there and of the declared kind.

    device: that tensors must be on; any where None. all_of: those that must be there; all where None. dtype: of the
    query; None: not known. drawn: a function of its indices may stand for a tensor.
    """
    declared = {p.name: p for p in attention.canonical.parameters}
    problems = [_unknown(n, declared) for n in given if n not in declared]
    for name, operand in declared.items():
        if name not in given:
            if all_of is None or name in all_of:
                how, where = f"pass {name}=...", operand.where or ""
                problems.append(
                    Problem(operand=name, what="missing", expected=_kind(operand), next_step=how, where=where)
                )
        elif isinstance(operand, Scalar):
            problems += scalar_problems(operand, given[name], dtype)
        elif not (drawn and callable(given[name])):
            problems += _tensor_problems(operand, given[name], device)
    return problems


def _unknown(name: str, declared: Mapping[str, object]) -> Problem:
    hint, names = option_hint(name), ", ".join(sorted(declared)) or "none"
    close = get_close_matches(name, declared, 1) or get_close_matches(name, CALL_OPTIONS, 1, 0.8)
    if hint is None and name in _FIELDS:
        hint = f"declare it: weft.Attention({name}=...)"
    elif hint is None and name in CALL_OPTIONS:
        hint = "what is called here does not take it"
    elif hint is None and close:
        hint = f"did you mean {close[0]}?"
    what = f"unknown operand or option; this variant's operands are: {names}"
    return Problem(operand=name, what=what, next_step=hint or "")


def _kind(operand: Scalar | TensorOperand) -> str:
    if isinstance(operand, Scalar):
        return f"{'an' if operand.dtype == 'int' else 'a'} {operand.dtype}"
    return f"a tensor of {operand.dtype} with {counted(operand.rank, 'dimension')}"


def scalar_problems(operand: Scalar, value: object, dtype: torch.dtype | None = None) -> list[Problem]:
    """What keeps a value from being an int of 32 bits, or a float that kernels compute in."""
    name, kind = operand.name, operand.dtype
    if isinstance(value, Tensor):
        how = "" if value.requires_grad else f"pass {name}={kind}({name}), or "
        how += f'declare it with weft.tensor to pass a tensor: {name} = weft.tensor("{name}", 0, {kind}), '
        how += f"read as {name} and given as {name}={name}{'.reshape(())' if value.dim() else ''}"
        return [wrong(name, "a Python number", "a tensor", how)]
    if kind == "int":
        if isinstance(value, torch.SymInt):
            return []
        if not is_int(value):
            return [wrong(name, "an int", shown(value))]
        if not -INT32_MAX <= value <= INT32_MAX:
            return [wrong(name, "a value within 32 bits", shown(value), what="integer overflow")]
        return []
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return []
    if not is_number(value):
        return [wrong(name, "a number", shown(value))]
    if value != value:
        return [wrong(name, "a number", "NaN")]
    most = 2**1023 if dtype in (None, torch.float64) else FLOAT32_MAX
    if abs(value) > most and abs(value) != math.inf:
        bits = "64" if most != FLOAT32_MAX else "32"
        return [wrong(name, f"a number that {bits} bits hold, or inf", shown(value), what="float overflow")]
    return []


def _tensor_problems(operand: TensorOperand, value: object, device: torch.device | None) -> list[Problem]:
    """What a kernel needs of a tensor operand."""
    name, kind = operand.name, operand.dtype
    if not isinstance(value, Tensor):
        has_entries = hasattr(value, "__len__") and not isinstance(value, str)
        return [wrong(name, _kind(operand), type(value).__name__, "torch.as_tensor(x) makes one" * has_entries)]
    if (problem := form_problem(name, value)) is not None:
        return [problem]
    found = []
    if value.dim() != operand.rank:
        expected, got = counted(operand.rank, "dimension"), f"shape {list(value.shape)}"
        found.append(Problem(operand=name, expected=expected, got=got, where=operand.where or ""))
    found += place_problems(name, value, device)
    fits = {"float": value.dtype in FLOATS, "int": value.dtype in INTS, "bool": value.dtype == torch.bool}
    if not fits[kind]:
        cast = {"float": "float()", "int": "to(torch.int32)", "bool": "bool()"}[kind]
        how = f"cast it, {name}.{cast}"
        if kind == "bool" and value.is_floating_point():
            how += ", or declare it with dtype float where it is to be added: score=score + x[...]"
        found.append(wrong(name, f"a tensor of {kind}", value.dtype, how))
    return found


def check_operands(
    attention: Attention, given: Mapping[str, object], device: torch.device | None, others: Sequence[Problem] = (),
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Raise WeftError for what is wrong with operands. others: what is wrong with the call besides, to be told too."""
    if problems := [*others, *operand_problems(attention, given, device, dtype=dtype)]:
        raise collected(str(attention.name), problems)


def as_number(value: Any, kind: type | None) -> Any:
    """numpy's scalars, and ints for floats, as Python's numbers; anything else as it is, for the checks to refuse."""
    if kind is None or isinstance(value, (bool, Tensor)):
        return value
    number = value if isinstance(value, (int, float)) else number_in(value)
    if number is None or isinstance(number, bool) or (kind is int and not isinstance(number, int)):
        return value
    try:
        return kind(number)
    except OverflowError:
        return value


# -- options -----------------------------------------------------------------------------------------------------------
def by_position(attention: Attention, more: Sequence[object]) -> WeftError:
    """Of arguments behind query, key and value: others have a mask, a function or a flag there."""
    got = ", ".join(type(value).__name__ for value in more)
    own = ", ".join(f"{p.name}=..." for p in attention.canonical.parameters)
    how = (
        f"options go by name{f', operands too ({own})' if own else ''}, and a mask or a score is declared: "
        "weft.Attention(mask=weft.kv_pos <= weft.q_pos)"
    )
    problem = Problem(expected="query, key and value by position", got=f"{len(more)} more ({got})", next_step=how)
    return WeftError.of(str(attention.name), problem)


def offset_problems(q_offset: object, number: int | None, device: torch.device | None) -> list[Problem]:
    """q_offset: an int, or int32 [number] on the operands' device. No tensor for None; any device for device None."""
    label = "q_offset"
    if isinstance(q_offset, Tensor):
        if number is None:
            return [wrong(label, "an int", "a tensor", "a picture is of one row of the batch")]
        if (problem := form_problem(label, q_offset)) is not None:
            return [problem]
        if q_offset.dtype != torch.int32 or q_offset.dim() != 1 or q_offset.shape[0] != number:
            how = "pass int(x)" if q_offset.dim() == 0 else "pass x.to(torch.int32), one for each batch row"
            return [wrong(label, _positions_of(number), f"{q_offset.dtype} {list(q_offset.shape)}", how)]
        return place_problems(label, q_offset, device)
    if isinstance(q_offset, torch.SymInt):
        return []
    return overflow_problems(q_offset) if is_int(q_offset) else [wrong(label, _positions_of(number), shown(q_offset))]


def _positions_of(number: int | None) -> str:
    """Written where it is wrong alone: a size that torch.compile traces becomes a constant in a text."""
    return "an int" if number is None else f"an int or an int32 tensor [{number}]"


def overflow_problems(q_offset: int, *row: int) -> list[Problem]:
    """A position with which no kernel can compute. row: of the tensor that it is in."""
    if -LARGEST_OFFSET <= q_offset <= LARGEST_OFFSET:
        return []
    return [wrong("q_offset", "a value within 31 bits", shown(q_offset), what="integer overflow", place=row)]


def check_q_offset(name: str, q_offset: object, number: int | None, device: torch.device | None) -> None:
    """Raise WeftError for what is no q_offset of so many sequences."""
    if problems := offset_problems(q_offset, number, device):
        raise collected(name, problems)


def seed_of(name: str, seed: object, device: torch.device) -> Tensor | None:
    """The option `seed` as kernels take it, int64 [1] on the device; None where it is not given."""
    either = f"an int, or an int64 tensor with one element on {device}"
    number = as_number(seed, int)
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if (unread := form_problem("seed", seed)) is not None:
            raise collected(name, [unread])
        if seed.dtype == torch.int64 and seed.numel() == 1 and seed.device == device:
            if seed.is_cpu and (problems := known_memory_problems({"seed": seed})):
                raise collected(name, problems)
            return seed.reshape(1)
        problem = wrong("seed", either, f"{seed.dtype} {list(seed.shape)} on {seed.device}")
    elif not isinstance(number, torch.SymInt) and not is_int(number):
        problem = wrong("seed", either, shown(seed))
    elif isinstance(number, int) and not is_int(number, -(2**63), 2**63 - 1):
        problem = wrong("seed", "an int of 64 bits", shown(number))
    else:
        return torch.full((1,), number, dtype=torch.int64, device=device)  # type: ignore[arg-type]
    raise collected(name, [problem])


def share_problems(name: str, share: float) -> list[Problem]:
    """A dropout that is no share. name: of the operand."""
    return [] if 0.0 <= share < 1.0 else [wrong(name, "a dropout from 0 on and below 1", share)]


def check_memory(attention: Attention, query: object) -> None:
    """Raise WeftError for a query on a CPU without memory, which kernels that draw would read."""
    if type(query) is Tensor and query.is_cpu and (problems := known_memory_problems({"query": query})):
        raise collected(str(attention.name), problems)


def check_dropout(attention: Attention, operands: Mapping[str, object]) -> None:
    """That a dropout which the call gives is a share; what is no number at all is refused with the other operands."""
    share = attention.dropout
    if not isinstance(share, Scalar) or torch.compiler.is_compiling():  # read there, each value would compile anew
        return
    number = as_number(operands.get(share.name), float)
    if isinstance(number, float) and (problems := share_problems(share.name, number)):
        raise collected(str(attention.name), problems)


def check_no_latent(attention: Attention, uk: object, uv: object, form: object = None, rope: object = None) -> None:
    """Raise for the options of latent attention, given to a variant that is none."""
    options = {"uk": uk, "uv": uv, "form": form, "rope": rope}
    given = [name for name, option in options.items() if option is not None]
    if given:
        own = "uk, uv and form" if rope is None else "uk, uv, form and rope"
        what = f"{', '.join(given)}: {own} belong to variants declared with latent="
        problem = Problem(option=given[0], what=f"{what}weft.Latent(rank=..., rope=...)", named=True)
        raise collected(str(attention.name), [problem])


def check_absorbed(attention: Attention, form: object, tensors: Sequence[Tensor] = ()) -> None:
    """That a call over pages is absorbed, and wants no gradient: pages are read as they are."""
    problem = None
    if form == "expanded":
        what = (
            "form='expanded' reads no pages; leave form= out for the absorbed form, or gather the pages into a cache "
            "[B, 1, T, rank + rope], and pass kv_lens= alone"
        )
        problem = Problem(option="form", what=what, named=True)
    elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        problem = Problem(option="block_table", what=NO_PAGES, named=True)
    if problem is not None:
        raise collected(str(attention.name), [problem])


def described(
    attention: Attention, options: Mapping[str, Any], number: int | None, device: torch.device | None,
    extra: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Operands of a call that is only described, as kernels take them; they need not all be there.

    number: of sequences, None where a call has none. device: that operands must be on; any where None.
    extra: options of the call that may be among them.
    """
    name, kinds = str(attention.name), {s.name: int if s.dtype == "int" else float for s in attention.canonical.scalars}
    given = {n: as_number(value, kinds.get(n)) for n, value in options.items()}
    own = {n: value for n, value in given.items() if n not in extra}
    if problems := operand_problems(attention, own, device, all_of=()):
        raise collected(name, problems)
    check_values(name, {n: value for n, value in given.items() if n in extra and value is not None})
    if given.get("q_offset") is not None:
        given["q_offset"] = as_number(given["q_offset"], int)
        check_q_offset(name, given["q_offset"], number, device)
    if attention.latent is None:
        check_no_latent(attention, given.get("uk"), given.get("uv"), rope=given.get("rope"))
    return given


def explain_failure(attention: Attention, call: Call, error: Exception) -> None:
    """Raise WeftError for what Python said of a call, where its numbers or its expressions are to blame."""
    name, numbers = str(attention.name), {n: v for n, v in call.operands.items() if not isinstance(v, Tensor)}
    if isinstance(error, RecursionError):
        raise collected(name, [Problem(what="too deep to be compiled from here", next_step=SMALLER)]) from error
    if isinstance(error, (ArithmeticError, ValueError)) and numbers:
        got = ", ".join(f"{n}={shown(v)}" for n, v in numbers.items())
        what = f"the expressions have no value for {got} ({error})"
        how = "give other numbers, or guard them where they are written: weft.maximum(x, 1e-6)"
        about = next(iter(numbers))
        raise collected(name, [Problem(operand=about, what=what, next_step=how, named=True)]) from error
