"""What of a mask is counted pair by pair: how many see each other, and what blocks of pairs hold.

The mask is computed as the reference does it, on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.attention import Attention
from ...ir.errors import WeftError
from ...ir.reference import dense_mask
from ...ir.walk import scalars, symbols, tensors
from ..analysis.tiles.facts import Facts
from ..analysis.tiles.measured import Blocks
from ..analysis.tiles.programs import evenly
from ..analysis.tiles.survey import CELL
from .plan import HEADS_COUNTED, VisiblePairs, some_heads
from .records import Shape

ALL_PAIRS = 1 << 24  # up to so many pairs the mask is looked at whole,
SOME_PAIRS = 1 << 21  # and beyond it evenly spaced rows with so many pairs stand for all: a twentieth of a second


def visible_pairs(
    attention: Attention, sizes: Shape, q_offset: int | Tensor | None, first_batch: int, head_dim: int,
    options: Mapping[str, Any],
) -> VisiblePairs | None:  # fmt: skip
    """Pairs that see each other, by the mask itself; None where operands that it reads are missing.

    q_offset: None where the last query sees the last key. first_batch: number of the first row of the batch. options:
    operands by name, among others.
    """
    heads, rows = sizes.batch * sizes.heads, sizes.q_len
    if not attention.canonical.is_masked:
        return VisiblePairs(heads * rows * sizes.kv_len, heads * rows, heads * rows)
    mask = attention.canonical.folded_mask
    values = {name: options.get(name) for name in ({s.name for s in scalars(mask)} | {t.name for t in tensors(mask)})}
    if isinstance(q_offset, Tensor) or not all(isinstance(v, (int, float, Tensor)) for v in values.values()):
        return None
    values = {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
    read = symbols(mask)
    batches, different = sizes.batch if "batch" in read else 1, sizes.heads if read & {"head", "kv_head"} else 1
    of = some_heads(batches, different, HEADS_COUNTED)
    each = sizes.kv_len * len(of)
    chosen = evenly(rows, rows if rows * each <= ALL_PAIRS else max(1, SOME_PAIRS // each))
    first = sizes.kv_len - rows if q_offset is None else q_offset
    env = {**values, "q_len": rows, "kv_len": sizes.kv_len, "group": sizes.group, "head_dim": head_dim}
    seen = 0
    for batch, head in of:
        own = {**env, "batch": first_batch + batch, "head": head, "kv_head": head // sizes.group}
        seen += _seen_by(attention, own, [first + row for row in chosen], sizes.kv_len)
    looked = len(of) * len(chosen)
    return VisiblePairs(round(seen * heads * rows / looked), looked, batches * different * rows)


def _seen_by(attention: Attention, env: Mapping[str, Any], positions: Sequence[int], kv_len: int) -> int:
    """Pairs that these queries of one head see, a few rows at a time so that it stays in a cache."""
    device, step, seen = torch.device("cpu"), max(1, (1 << 18) // kv_len), 0
    keys = torch.arange(kv_len, device=device).view(1, 1, 1, -1)
    for start in range(0, len(positions), step):
        rows = torch.tensor(positions[start : start + step], device=device).view(1, 1, -1, 1)
        shape = (1, 1, rows.shape[2], kv_len)
        try:
            mask = dense_mask(attention, {**env, "q_pos": rows, "kv_pos": keys}, shape, torch.float32, device)
        except (IndexError, RuntimeError) as error:
            raise WeftError(f"{attention.name}: the mask cannot be computed for these operands: {error}") from error
        seen += int(mask.sum())
    return seen


def pair_blocks(facts: Facts, env: Mapping[str, Any]) -> Blocks:
    """What is found of the pairs of a head, CELL queries at a time. env: symbols, operands and q_offset."""
    device, kv_len = torch.device("cpu"), env["kv_len"]
    keys = torch.arange(kv_len, device=device).view(1, 1, 1, -1)
    values = {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in env.items()}

    def of(number: int) -> list[int]:
        rows = torch.arange(number * CELL, min((number + 1) * CELL, env["q_len"]), device=device).view(1, 1, -1, 1)
        rows = rows + env["q_offset"]
        shape = (1, 1, rows.shape[2], kv_len)
        mask = dense_mask(facts.attention, {**values, "q_pos": rows, "kv_pos": keys}, shape, torch.float32, device)
        some, every = mask[0, 0].any(0).split(CELL), mask[0, 0].all(0).split(CELL)
        return [int(a.any()) + int(b.all()) for a, b in zip(some, every)]

    return of
