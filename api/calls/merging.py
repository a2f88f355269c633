"""`weft.merge`: attention over disjoint sets of keys, joined to attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.errors import Problem, WeftError, collected, shown
from ..runtime.check.tensors import FLOATS, form_problem, known_memory_problems
from ..runtime.joining import lse_and_shares


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """out [B, Hq, L, Dv] and lse [B, Hq, L] of all keys, from those of disjoint sets of keys.

    parts: (out, lse) of each set, as calls with `return_lse=True` give them, at least one. out is the sum of
    exp(lse_i - lse) * out_i, and lse = log(sum of exp(lse_i)) (Dao et al. 2023, "Flash-Decoding"), computed in float32,
    float64 where a part is. It has the dtype of the first out. Every part gets its gradient. A row that sees no key in
    any part gives 0 and -inf, with zero gradients. A part whose lse is -inf has seen no key: its out may be
    anything beside others, also NaN; one part alone is given back as it is. A sink belongs to one part alone.

    Raises WeftError for parts of different shapes or devices, naming all that differ.

    >>> first, second = (torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1)), (torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge([first, second])[0]
    tensor([[[[0.5000, 0.5000]]]])
    """
    _check(parts)
    is_double = torch.float64 in {t.dtype for part in parts for t in part}
    dtype = torch.float64 if is_double else torch.float32
    if len(parts) == 1:
        return parts[0][0], parts[0][1].to(dtype)
    own = [part.masked_fill((lse == -torch.inf)[..., None], 0.0) for part, lse in parts]
    lses = torch.stack([lse.to(dtype) for _, lse in parts])
    lse, shares = lse_and_shares(lses)
    out = sum(share[..., None] * part.to(dtype) for share, part in zip(shares, own))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), lse


def _freed(n: int, part: Sequence[Tensor]) -> list[Problem]:
    """Tensors of a part that have no memory."""
    return [problem for t in part for problem in known_memory_problems({f"part {n}": t})]


def _check(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not isinstance(parts, (list, tuple)) or not parts:
        raise WeftError(f"merge: expected a list of (out, lse), at least one, got {shown(parts)}")
    problems: list[Problem] = []
    first: Tensor | None = None
    for n, part in enumerate(parts):
        pair = isinstance(part, (list, tuple)) and len(part) == 2 and all(isinstance(t, Tensor) for t in part)
        if not pair:
            got = ", ".join(type(x).__name__ for x in part) if isinstance(part, (list, tuple)) else type(part).__name__
            expected = "(out, lse), as a call with return_lse=True gives them"
            problems.append(Problem(operand=f"part {n}", expected=expected, got=got))
            continue
        out, lse = part
        if unread := [p for p in (form_problem(f"part {n}", t) for t in part) if p] or _freed(n, part):
            problems += unread
            continue
        first = out if first is None else first
        if out.shape[:-1] != lse.shape or out.dim() != 4:
            expected = "out [B, Hq, L, Dv] and lse [B, Hq, L]"
            problems.append(Problem(operand=f"part {n}", expected=expected, got=f"{[*out.shape]} and {[*lse.shape]}"))
        elif not {out.dtype, lse.dtype} <= {*FLOATS} or out.device != lse.device:
            got = f"{out.dtype} on {out.device} and {lse.dtype} on {lse.device}"
            problems.append(Problem(operand=f"part {n}", expected="bf16, fp16, fp32 or fp64 on one device", got=got))
        elif (out.shape, out.device) != (first.shape, first.device):
            expected = f"out like that of the first part, {[*first.shape]} on {first.device}"
            problems.append(Problem(operand=f"part {n}", expected=expected, got=f"{[*out.shape]} on {out.device}"))
    if problems:
        raise collected("merge", problems)
