"""What lies in tensors that kernels compute positions and indices with.

Looked at where it is on the host, and elsewhere where `weft.settings(check=True)` or WEFT_CHECK=1 asks for it: then a
call waits for its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...codegen.torch_private import under_transform
from ...compiler.analysis.values.ranges import Ranges, cure_of_index
from ...ir.attention import Attention
from ...ir.errors import Problem, collected, counted
from ...ir.expr import SYMBOLS, Call, Expr, Load
from ...ir.operators import OPERATORS, Range
from ...ir.reference import dense_mask, evaluate, positions
from ...ir.walk import loads, nodes
from ..call import PackedPaged, Paged, Pages, Ragged, key_rows, length_options
from ..pages import used_pages
from ..settings import checks_values
from .operands import LARGEST_OFFSET, overflow_problems
from .tensors import INTS, form_problem, known_memory_problems, wrong

_TRUSTED = 2**30  # ints read from a tensor are below it in size where ranges.py computes with them


def known_offsets(offset: int | Tensor) -> Range | None:
    """The lowest and the highest q_offset of a call; None where they lie on a device and no check was asked for, where
    torch.func maps over them, and where they are no ints, which is refused with what else is wrong."""
    if not isinstance(offset, Tensor):
        return offset, offset
    if not (offset.is_cpu or checks_values()) or under_transform():
        return None
    if offset.dtype not in INTS:
        return None
    if offset.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(offset)
    return int(low), int(high)


def check_offsets(name: str, offset: int | Tensor) -> None:
    """Raise WeftError for positions that no kernel can compute with; what a device holds is not looked at unasked."""
    if isinstance(offset, Tensor):
        if (problem := form_problem("q_offset", offset)) is not None:
            raise collected(name, [problem])
        if offset.is_cpu and (problems := known_memory_problems({"q_offset": offset})):
            raise collected(name, problems)
    found = known_offsets(offset)
    if found is None or (-LARGEST_OFFSET <= found[0] and found[1] <= LARGEST_OFFSET):
        return
    if isinstance(offset, Tensor):
        far = (overflow_problems(value, row) for row, value in enumerate(offset.tolist()))
        raise collected(name, next(filter(None, far)))
    raise collected(name, overflow_problems(offset))


def computed_with(attention: Attention) -> tuple[str, ...]:
    """The int tensors whose entries take part in int arithmetic: beyond comparing, choosing and turning into floats."""
    found: set[str] = set()
    for root in attention.canonical.expressions:
        for node in nodes(root):
            if isinstance(node, Call) and node.dtype == "int" and not OPERATORS[node.op].chooses:
                found |= {n.tensor.name for n in nodes(node) if isinstance(n, Load) and n.dtype == "int"}
    return tuple(sorted(found))


def check_entries(name: str, operands: Mapping[str, object], computed: Iterable[str]) -> None:
    """Raise WeftError, naming the place, where an int tensor holds what arithmetic in 32 bits is not sound for."""
    problems = []
    for operand in computed:
        tensor = operands[operand]
        assert isinstance(tensor, Tensor)
        far = ((tensor >= _TRUSTED) | (tensor <= -_TRUSTED)).nonzero()
        if len(far):
            place = far[0].tolist()
            sizes, got = "entries below 2**30 in size, as they are computed with", tensor[tuple(place)].item()
            problems.append(wrong(operand, sizes, got, what="integer overflow", place=place))
    if problems:
        raise collected(name, problems)


# -- lengths and tables ------------------------------------------------------------------------------------------------
def check_contents(name: str, query: Tensor, key: Tensor, sequences: Ragged) -> None:
    """Raise WeftError, naming the place, for lengths that no operands can have.

    Looked at on a CPU, and on a device where that is asked for: unasked, kernels cut them to what there is.
    """
    problems: list[Problem] = []
    for (label, tensor), most in zip(length_options(sequences).items(), (query.shape[2], key_rows(key, sequences))):
        if tensor is not None and (tensor.is_cpu or checks_values()):
            find = _starts_problems if label.startswith("cu_") else _lens_problems
            problems += find(label, tensor.tolist(), most, sequences)
    if not problems and isinstance(sequences, Pages) and (sequences.table.is_cpu or checks_values()):
        problems += _block_problems(sequences, key.shape[0])
    if problems:
        raise collected(name, problems)


def _rows_in_words(label: str, sequences: Ragged) -> str:
    """What a length of this option is at most."""
    if label == "kv_lens" and isinstance(sequences, Pages):
        return f"{counted(sequences.table.shape[1], 'page')} of {sequences.page} in block_table"
    return f"the rows of {'query' if label in ('q_lens', 'cu_seqlens_q') else 'key'}"


def _lens_problems(label: str, lens: list[int], most: int, sequences: Ragged) -> list[Problem]:
    """The first length that no rows can have."""
    if not lens or (min(lens) >= 0 and max(lens) <= most):
        return []
    b, length = next((b, length) for b, length in enumerate(lens) if not 0 <= length <= most)
    return [wrong(label, f"a length from 0 to {most}, {_rows_in_words(label, sequences)}", length, place=[b])]


def _starts_problems(label: str, starts: list[int], most: int, sequences: Ragged) -> list[Problem]:
    """The first entry that is no first row, or no end."""
    if starts[0] != 0:
        return [wrong(label, "0, where the first sequence begins", starts[0], place=[0])]
    for b, (first, end) in enumerate(pairwise(starts)):
        if end < first:
            return [wrong(label, f"at least {first}, where sequence {b} begins", end, place=[b + 1])]
        if end > most:
            return [wrong(label, f"at most {most}, {_rows_in_words(label, sequences)}", end, place=[b + 1])]
    return []


def _block_problems(sequences: Paged | PackedPaged, blocks: int) -> list[Problem]:
    """The first block that a sequence would read and that no pool has."""
    table, page = sequences.table, sequences.page
    used = torch.arange(table.shape[1], device=table.device) < used_pages(sequences)
    none = (((table < 0) | (table >= blocks)) & used).nonzero()
    if not len(none):
        return []
    b, i = none[0].tolist()
    keys = counted(int(sequences.kv_lens[b]), "key")
    expected, how = (
        f"a block from 0 to {blocks - 1}, as key has {blocks}",
        f"it holds rows {i * page} on of a sequence of {keys}",
    )
    return [wrong("block_table", expected, table[b, i].item(), how, place=[b, i])]


# -- the reference, which reads wherever its index leads ---------------------------------------------------------------
def check_reads(
    attention: Attention, query: Tensor, key: Tensor, operands: Mapping[str, Any], q_offset: int | Tensor | None,
    head_dim: int, first_batch: int = 0,
) -> None:  # fmt: skip
    """Raise WeftError where the mask, or the score of a visible pair, reads outside of an operand.

    On a CPU alone, where torch would take an index of -5 from the end; and not while torch traces.
    """
    if (
        not attention.canonical.tensors
        or not query.is_cpu
        or torch.compiler.is_compiling()
        or type(query) is not Tensor
    ):
        return
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    env = positions(batch, heads, kv_heads, q_len, kv_len, q_offset, query.device, first_batch)
    env |= {"head_dim": head_dim, **operands}
    ranges = {name: _range_of(value) for name, value in env.items() if type(value) is int or name in SYMBOLS}
    if attention.canonical.folded_sink is not None:
        _check_loads(attention, attention.canonical.folded_sink, env, ranges, None)
    if kv_len == 0:  # no pair reads
        return
    _check_loads(attention, attention.canonical.folded_mask, env, ranges, None)
    if loads(attention.canonical.folded_score):
        mask = dense_mask(attention, env, (batch, heads, q_len, kv_len), query.dtype, query.device)
        _check_loads(attention, attention.canonical.folded_score, env, ranges, mask)


def _range_of(value: Tensor | float) -> Range:
    if not isinstance(value, Tensor):
        return int(value), int(value)
    return (int(value.min()), int(value.max())) if value.numel() else (0, 0)


def _check_loads(
    attention: Attention, root: Expr, env: Mapping[str, Any], ranges: Ranges, visible: Tensor | None
) -> None:
    for load in sorted(loads(root), key=lambda load: len(load.text)):  # those inside an index first
        for axis, index in enumerate(load.index):
            extent = env[load.tensor.name].shape[axis]
            places = evaluate(index, env, torch.float64, torch.device("cpu"), visible)
            outside = (places < 0) | (places >= extent)
            if visible is not None:
                outside = outside & visible
            if bool(outside.any()):
                got = int(places.expand(outside.shape)[outside][0])
                cure = cure_of_index(index, _range_of(places), extent, ranges)
                what = f"`{load}`: index {axis}, `{index}`, is {got} in this call, but {load.tensor.name} has"
                entries = f"{what} {counted(extent, 'entry')} there"
                problem = Problem(operand=load.tensor.name, what=entries, next_step=cure, named=True)
                raise collected(str(attention.name), [problem])
