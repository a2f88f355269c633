"""What a caller gives to a cache: lists of ids, lengths and tokens, layers, sizes, a device. Each rule stands once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..ir.errors import WeftError, shown
from ..ir.numbers import is_int
from ..runtime.check.tensors import INTS, form_problem, known_memory_problems

MOST = 2**30  # tokens of a sequence, rows of a cache or a step: as calls have it


def is_size(value: object) -> TypeGuard[int]:
    """Whether this is a positive int."""
    return is_int(value, least=1)


def size_problems(given: Mapping[str, object]) -> list[str]:
    """Sizes of a cache, or of a step, that are none. given: by name."""
    return [f"{n}: expected a positive int, got {shown(v)}" for n, v in given.items() if not is_size(v)]


def check_flag(method: str, name: str, value: object) -> None:
    """Raise WeftError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise WeftError(f"{method}: {name}: expected True or False, got {shown(value)}")


def listed(what: str, expected: str, values: object) -> list[Any]:
    """The entries of a list of a caller. Raises WeftError for a tensor, a text, and whatever else is no list."""
    if not isinstance(values, Iterable) or isinstance(values, (Tensor, str, bytes, Mapping)):
        raise WeftError(f"{what}: expected {expected}, got {shown(values)}")
    try:
        return list(values)
    except TypeError:  # of an array without dimensions
        raise WeftError(f"{what}: expected {expected}, got {shown(values)}") from None


def token_ids(what: str, tokens: object) -> list[int]:
    """Token ids as ints of Python, of a tensor on the host too."""
    if isinstance(tokens, Tensor):
        _check_ids(what, tokens)
        tokens = tokens.tolist()
    found = listed(what, "a list of ids", tokens)
    if not all(isinstance(t, Integral) and not isinstance(t, bool) for t in found):  # numpy's ints too
        raise WeftError(f"{what}: expected ints, got {shown(found[:8])}")
    return [int(t) for t in found]


def _check_ids(what: str, tokens: Tensor) -> None:
    if (problem := form_problem("tokens", tokens)) is not None:
        raise WeftError(f"{what}: {problem.text('')}")
    if not tokens.is_cpu:
        raise WeftError(f"{what}: expected ids on the host, got a tensor on {tokens.device}")
    if tokens.dim() != 1 or tokens.dtype not in INTS:
        raise WeftError(f"{what}: expected ints in one dimension, got {shown(tokens)}")
    for problem in known_memory_problems({"tokens": tokens}):
        raise WeftError(f"{what}: {problem.text('')}")


def checked_tokens(lengths: Sequence[int], tokens: object) -> list[Sequence[int] | None]:
    """The ids of the new tokens of each sequence, None where they are not known. Raises WeftError for others."""
    if tokens is None:
        return [None] * len(lengths)
    is_matrix = isinstance(tokens, Tensor) and form_problem("tokens", tokens) is None and tokens.dim() == 2
    rows = listed("extend: tokens", "a list of ids for each sequence", tokens.unbind() if is_matrix else tokens)  # type: ignore[attr-defined]
    found: list[Sequence[int] | None] = [None if t is None else token_ids("extend: tokens", t) for t in rows]
    got = [None if t is None else len(t) for t in found]
    if len(got) != len(lengths) or any(g not in (None, n) for g, n in zip(got, lengths)):
        raise WeftError(f"extend: tokens: expected the ids of {list(lengths)} new tokens, got {got}")
    return found


def device_of(name: str, device: torch.device | str) -> torch.device:
    """The device that a cache lies on, with its number. Raises WeftError for one that cannot be used here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise WeftError(f"{name}: device: expected a device, got {shown(device)}") from error
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise WeftError(f"{name}: device: expected one that torch can use here, got {shown(device)}")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found
