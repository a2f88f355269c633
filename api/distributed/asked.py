"""What a caller asks a plan for: strategies, balances and links, and what is wrong with what is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from ..compiler.planning.dtypes import ALL, EIGHTHS
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.errors import Problem, WeftError, collected, shown
from ..ir.numbers import is_int, is_number
from ..runtime.check.operands import as_number, operand_problems, overflow_problems
from ..runtime.check.tensors import form_problem, known_memory_problems, length_problems, width_problems

Strategy = Literal["gather", "ring", "exchange", "heads", "heads+exchange", "heads+ring"]
Balance = Literal["contiguous", "zigzag", "striped", "pairs"]
STRATEGIES: tuple[Strategy, ...] = ("exchange", "ring", "gather", "heads", "heads+exchange", "heads+ring")
_DTYPES = tuple(name for name in ALL if name not in EIGHTHS)  # that ranks compute
HEADS = "heads+"  # before what strategies of two dimensions do between ranks of the same heads
BALANCES: tuple[Balance, ...] = ("contiguous", "zigzag", "striped", "pairs")
AUTO = "auto"
_ONE_DIMENSION = "expected two dimensions: ranks=(outer, inner) of a plan, dim=(outer, inner) of ContextParallel"
_MOST_RANKS = 2**16


@dataclass(frozen=True)
class Links:
    """What a device receives from others, bytes/s one way: a guess where nobody measured it."""

    per_host: int = 8  # devices of a host
    in_host: float = 270e9  # NVLink of an H100, all-to-all of 256 MB between two of them; its data sheet says 450e9
    between: float = 40e9  # a network card of 400 Gb/s a device, and 0.8 of it

    def __post_init__(self) -> None:
        problems = [
            Problem(option=n, expected="a positive number of bytes/s", got=shown(value))
            for n in ("in_host", "between")
            if not is_number(value := getattr(self, n)) or not value > 0
        ]
        if not is_int(self.per_host, least=1):
            problems.append(Problem(option="per_host", expected="a positive int", got=shown(self.per_host)))
        if problems:
            raise WeftError.of("Links", *problems)


def starts_of(given: Sequence[int] | Tensor, sizes: Shape, q_offset: int | None) -> tuple[int, ...]:
    """The starts of packed sequences. Raises WeftError for those that are none."""
    numbers = _numbers_in(given)
    if not all(is_int(n) for n in numbers):
        expected, got = "ints, the first row of each sequence and the end", shown(given)
        raise WeftError.of("plan", Problem(option="cu_seqlens", expected=expected, got=got))
    starts = tuple(map(int, numbers))
    problems = []
    if not starts or starts[0] != 0 or any(a > b for a, b in pairwise(starts)) or starts[-1] > sizes.q_len:
        expected = f"the first row of each sequence from 0 on, and the end, at most {sizes.q_len}"
        problems.append(Problem(option="cu_seqlens", expected=expected, got=shown(list(starts[:8]))))
    if sizes.batch != 1 or sizes.q_len != sizes.kv_len:
        got = f"{sizes.batch} and {sizes.q_len}, {sizes.kv_len}"
        expected = "one batch row, and as many queries as keys"
        problems.append(Problem(option="cu_seqlens", expected=expected, got=got))
    if q_offset is not None:
        problems.append(Problem(option="q_offset", what="packed sequences start at position 0; leave it out"))
    if problems:
        raise WeftError.of("plan", *problems)
    return starts


def _numbers_in(given: object) -> list[Any]:
    """The numbers of a list, an array or a tensor; None in place of what cannot be read."""
    if isinstance(given, Tensor) and (
        given.is_meta or form_problem("cu_seqlens", given) or known_memory_problems({"cu_seqlens": given})
    ):
        return [None]
    numbers = given.tolist() if hasattr(given, "tolist") and not isinstance(given, type) else given  # of numpy, too
    if isinstance(numbers, Mapping) or not isinstance(numbers, Iterable):
        return [None]
    return [as_number(n, int) for n in numbers]


def check_known(attention: Attention, looked_at: Mapping[str, Any]) -> None:
    """Raise WeftError for operands whose values decide what is seen, and which have none."""
    what, how = "a tensor with values, on which the plan stands", "pass one of a device that is here"
    problems = [
        Problem(operand=n, expected=what, got=shown(v), next_step=how)
        for n, v in looked_at.items()
        if isinstance(v, Tensor) and v.is_meta
    ]
    if problems := problems or known_memory_problems(looked_at):
        raise collected(f"{attention.name}: plan", problems)


def own_operands(attention: Attention, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Operands that are given, of those that the variant reads. Raises WeftError for what a call would refuse. Options
    of dropout may be there, as in other plans."""
    beside = {*attention.canonical.unread, "seed", "train"}
    given = as_numbers(attention, {n: v for n, v in operands.items() if n not in beside})
    if problems := operand_problems(attention, given, None, all_of=()):
        raise collected(f"{attention.name}: plan", problems)
    return given


def as_numbers(attention: Attention, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Operands with numbers as Python's, so that ranks which give numpy's say the same."""
    kinds = {s.name: int if s.dtype == "int" else float for s in attention.canonical.scalars}
    return {n: as_number(value, kinds.get(n)) for n, value in operands.items()}


def check_asked(
    mesh: tuple[Any, ...], sizes: Shape, strategy: str, balance: str, is_latent: bool, q_offset: object, links: object
) -> None:  # fmt: skip
    numbers = {"batch": sizes.batch, "heads": sizes.heads, "kv_heads": sizes.kv_heads,
               "length": sizes.q_len, "kv_length": sizes.kv_len, "head_dim": sizes.head_dim,
               "value_dim": sizes.value_dim}  # fmt: skip
    problems = [
        Problem(option=n, expected="a positive int", got=shown(v)) for n, v in numbers.items() if not is_int(v, least=1)
    ]
    if len(mesh) > 2 or not all(is_int(n, 1, _MOST_RANKS) for n in mesh) or math.prod(mesh) > _MOST_RANKS:
        got = shown(mesh[0] if len(mesh) == 1 else mesh)
        expected = "a positive int, or two of them, up to 2**16 ranks"
        problems.insert(0, Problem(option="ranks", expected=expected, got=got))
    if not isinstance(sizes.dtype, str) or sizes.dtype not in _DTYPES:
        problems.append(Problem(option="dtype", expected=f"one of {', '.join(_DTYPES)}", got=shown(sizes.dtype)))
    for name, value, known in (("strategy", strategy, STRATEGIES), ("balance", balance, BALANCES)):
        if not isinstance(value, str) or value not in (AUTO, *known):
            problems.append(Problem(option=name, expected=f"one of {', '.join((AUTO, *known))}", got=shown(value)))
    if not problems:
        problems += [*length_problems("length", sizes.q_len), *length_problems("kv_length", sizes.kv_len)]
        widths = {} if is_latent else {"head_dim": sizes.head_dim, "value_dim": sizes.value_dim}
        problems += [problem for n, width in widths.items() for problem in width_problems(n, width, "")]
    if is_int(q_offset):
        problems += overflow_problems(q_offset)
    elif q_offset is not None:
        problems.append(Problem(option="q_offset", expected="an int or None", got=shown(q_offset)))
    if links is not None and not isinstance(links, Links):
        problems.append(Problem(option="links", expected="weft.distributed.Links or None", got=shown(links)))
    if not problems and sizes.heads % sizes.kv_heads:
        problems.append(
            Problem(option="heads", expected=f"a multiple of kv_heads {sizes.kv_heads}", got=str(sizes.heads))
        )
    if is_latent and is_int(sizes.kv_heads, least=2):
        problems.append(Problem(option="kv_heads", expected="1, as a latent cache has", got=str(sizes.kv_heads)))
    if problems:
        raise WeftError.of("plan", *problems)
    why = None
    if strategy == "heads":
        why = not_by_heads(sizes, math.prod(mesh), is_latent)
    elif strategy.startswith(HEADS):
        why = _ONE_DIMENSION if len(mesh) == 1 else not_by_heads(sizes, mesh[1], is_latent)
    if why:
        raise WeftError(f"plan: strategy={strategy!r}: {why}")


def not_by_heads(sizes: Shape, ranks: int, is_latent: bool) -> str | None:
    """Why heads cannot be divided; None where they can."""
    if is_latent:
        return "expected a variant without latent=, whose keys are those of some heads; take strategy='exchange'"
    if sizes.heads % ranks:
        return f"expected a number of heads that {ranks} ranks divide, got {sizes.heads}"
    if sizes.kv_heads % ranks and ranks % sizes.kv_heads:
        return f"expected key heads that divide {ranks} ranks, or the other way around, got {sizes.kv_heads}"
    return None
