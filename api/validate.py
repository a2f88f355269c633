"""What a call must satisfy, checked before any op runs; all problems of a call are raised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ir.errors import WeftError, collected
from .ir.expr import SMALLER, Scalar
from .ir.foreign import number_in
from .runtime.call import Call
from .runtime.checks import (
    check_operand_kinds,
    check_q_offset,
    float_problems,
    form_problem,
    kind_problems,
    length_problems,
    rank_problems,
)
from .runtime.options import check_values

if TYPE_CHECKING:
    from .ir.attention import Attention


def by_position(attention: Attention, more: Sequence[object]) -> str:
    """What to say of arguments behind query, key and value: others have a mask, a function or a flag there."""
    got = ", ".join(type(value).__name__ for value in more)
    own = ", ".join(f"{p.name}=..." for p in attention.parameters)
    return (
        f"{attention.name}: expected query, key and value by position, got {len(more)} more ({got}); options go by name"
        f"{f', operands too ({own})' if own else ''}, and a mask or a score is declared: "
        "weft.Attention(mask=weft.kv_pos <= weft.q_pos)"
    )


def explain_failure(attention: Attention, call: Call, error: Exception) -> None:
    """Raise WeftError for what Python said of a call, where its numbers or its expressions are to blame."""
    if isinstance(error, RecursionError):
        raise WeftError(f"{attention.name}: too deep to be compiled from here; {SMALLER}") from error
    numbers = ", ".join(f"{n}={v!r}" for n, v in call.operands.items() if not isinstance(v, Tensor))
    if isinstance(error, (ArithmeticError, ValueError)) and numbers:
        raise WeftError(
            f"{attention.name}: the expressions have no value for {numbers} ({error}); give other numbers, or guard "
            "them where they are written: weft.maximum(x, 1e-6)"
        ) from error


def seed_of(name: str, seed: object, device: torch.device) -> Tensor | None:
    """The option `seed` as kernels take it, int64 [1] on the device; None where it is not given."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise WeftError(
                f"{name}: seed: expected an int, or an int64 tensor with one element on {device}, got {seed.dtype} "
                f"{list(seed.shape)} on {seed.device}"
            )
        return seed.reshape(1)
    number = as_number(seed, int)
    if isinstance(number, (bool, float)) or not isinstance(number, (int, torch.SymInt)):
        raise WeftError(f"{name}: seed: expected an int, or an int64 tensor with one element on {device}, got {seed!r}")
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise WeftError(f"{name}: seed: expected an int of 64 bits, got {number}")
    return torch.full((1,), number, dtype=torch.int64, device=device)  # type: ignore[arg-type]


def check_dropout(attention: Attention, operands: Mapping[str, object]) -> None:
    """That a dropout which the call gives is a share; what is no number at all is refused with the other operands."""
    share = attention.dropout
    if not isinstance(share, Scalar) or torch.compiler.is_compiling():  # read there, each value would compile anew
        return
    number = as_number(operands.get(share.name), float)
    if isinstance(number, float) and not 0.0 <= number < 1.0:
        raise WeftError(f"{attention.name}: {share.name}: expected a dropout from 0 on and below 1, got {number}")


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


def check_no_latent(attention: Attention, uk: object, uv: object, form: object = None) -> None:
    """Raise for the options of latent attention, given to a variant that is none."""
    given = [name for name, option in (("uk", uk), ("uv", uv), ("form", form)) if option is not None]
    if given:
        raise WeftError(
            f"{attention.name}: {', '.join(given)}: uk, uv and form belong to variants declared with "
            "latent=weft.Latent(rank=..., rope=...)"
        )


def check_operands(
    attention: Attention, given: Mapping[str, object], device: torch.device | None, others: Sequence[str] = ()
) -> None:
    """The variant's own operands: all there, none unknown, each of the declared kind.

    others: what is wrong with the call besides, to be told together.
    """
    problems = [*others, *check_operand_kinds(attention, given, device)]
    if problems:
        raise collected(str(attention.name), problems)


def check_floats(attention: Attention, given: Mapping[str, Any], dtype: torch.dtype) -> None:
    """That float scalars are floats of a call whose query has this dtype."""
    numbers = [s for s in attention.scalars if s.dtype == "float"]
    if problems := [p for s in numbers for p in float_problems(s, given[s.name], dtype)]:
        raise collected(str(attention.name), problems)


def described(
    attention: Attention,
    options: Mapping[str, Any],
    batch: int | None,
    device: torch.device | None,
    extra: Sequence[str],
) -> dict[str, Any]:
    """Operands of a call that is only described, as kernels take them; they need not all be there.

    batch: of the call, None where it has none. device: that operands must be on; any where None.
    extra: options of the call that may be among them.
    """
    name, kinds = str(attention.name), {s.name: int if s.dtype == "int" else float for s in attention.scalars}
    given = {n: as_number(value, kinds.get(n)) for n, value in options.items()}
    own = {n: value for n, value in given.items() if n not in extra}
    declared = {p.name for p in attention.parameters}
    problems = check_operand_kinds(attention, own, device, all_of=declared & own.keys())
    if problems:
        raise collected(name, problems)
    check_values(name, {n: value for n, value in given.items() if n in extra and value is not None})
    if given.get("q_offset") is not None:
        given["q_offset"] = as_number(given["q_offset"], int)
        check_q_offset(given["q_offset"], batch, device)
    if attention.latent is None:
        check_no_latent(attention, given.get("uk"), given.get("uv"))
    return given


def check_absorbed(attention: Attention, form: object, tensors: Sequence[Tensor] = ()) -> None:
    """That a call over pages is absorbed, and wants no gradient: pages are read as they are."""
    if form == "expanded":
        raise WeftError(
            f"{attention.name}: form='expanded' reads no pages; leave form= out for the absorbed form, or gather the "
            "pages into a cache [B, 1, T, rank + rope], and pass kv_lens= alone"
        )
    if form not in (None, "absorbed"):
        raise WeftError(f"{attention.name}: form: expected 'expanded' or 'absorbed', got {form!r}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise WeftError(
            f"{attention.name}: a call with block_table has no backward: call under torch.no_grad(), or gather the "
            "pages into padded operands, and pass kv_lens= alone, to train"
        )


def check_latent(
    attention: Attention, query: Tensor, cache: Tensor, uk: Tensor | None, uv: Tensor | None, paged: bool = False
) -> None:
    """query [B, H, L, nope + rope], cache [B, 1, T, rank + rope], uk [H, rank, nope], uv [H, rank, Dv].

    paged: cache [blocks, 1, page, rank + rope] is a pool.
    """
    latent, name = attention.latent, str(attention.name)
    assert latent is not None
    problems = list(rank_problems({"query": query, "cache": cache}))
    if problems:
        raise collected(name, problems)
    if cache.shape[1] != 1:
        problems.append(f"cache: expected 1 head [B, 1, T, rank + rope], got {cache.shape[1]}")
    if cache.shape[3] != latent.rank + latent.rope:
        problems.append(f"cache: expected dim {latent.rank + latent.rope} (rank + rope), got {cache.shape[3]}")
    if cache.shape[0] != query.shape[0] and not paged:
        problems.append(f"cache: expected batch {query.shape[0]} as in query, got {cache.shape[0]}")
    problems += list(kind_problems({"query": query, "cache": cache}))  # torch.compile adds no generator
    if not torch.compiler.is_compiling():  # which would hold an exported program to the answer: the op asks again
        for label, tensor in (("query", query), ("cache", cache)):
            problems += list(length_problems(label, tensor.shape[2]))
    if (uk is None) != (uv is None):
        problems.append("uk, uv: expected both or neither")
    elif uk is None:
        if attention.scale is None:
            problems.append(
                "scale: without uk and uv the query is latent and its true width is unknown; declare scale="
            )
        if query.shape[3] != latent.rank + latent.rope:
            problems.append(
                f"query: expected dim {latent.rank + latent.rope} (rank + rope) without uk, got {query.shape[3]}"
            )
    else:
        problems += list(_projection_problems(latent.rank, latent.rope, query, uk, uv))  # type: ignore[arg-type]
    if problems:
        raise collected(name, problems)


def _projection_problems(rank: int, rope: int, query: Tensor, uk: Tensor, uv: Tensor) -> Iterator[str]:
    heads, nope = query.shape[1], query.shape[3] - rope
    if nope < 1:
        yield f"query: expected dim above {rope}, the latent's rope, got {query.shape[3]}"
    for label, tensor in (("uk", uk), ("uv", uv)):
        if (problem := form_problem(label, tensor)) is not None:
            yield problem
        elif tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[1] != rank:
            yield f"{label}: expected [{heads}, {rank}, width], got shape {list(tensor.shape)}"
        elif tensor.dtype != query.dtype or tensor.device != query.device:
            expected, got = (f"{t.dtype} on {t.device}" for t in (query, tensor))
            yield f"{label}: expected {expected} as in query, got {got}"
        elif label == "uk" and nope > 0 and tensor.shape[2] != nope:
            yield f"uk: expected width {nope} (query's dim minus rope), got {tensor.shape[2]}"
        elif tensor.shape[2] < 1:
            yield f"{label}: expected a width of at least 1, got {tensor.shape[2]}"
