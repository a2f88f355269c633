"""FLOPs of the ops as `torch.utils.flop_counter` counts them: two for each product of a pair's columns.

Counted are pairs that see each other, as far as positions, lengths and numbers say: what a mask reads from tensors by
position is not looked at, and counts as visible.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..codegen.torch_private import are_plain
from ..compiler.analysis.tiles.measured import Table
from ..compiler.analysis.tiles.pairs import visible_pairs
from ..compiler.analysis.tiles.results import TileProgram
from ..ir.sequences import padded_rows
from ..ir.walk import symbols, tensors
from .call import MAIN, Arguments, Call, Dense, call_of, numbers_of
from .run.variant import Variant, variant_of_text

COUNTER = "torch.utils.flop_counter"


def forward_flops(*flat: Any, out_val: object = None) -> int:
    """Of `weft::attention`: scores, and weights times values."""
    given = Arguments.of(flat)
    variant = variant_of_text(given.variant)
    value_dim = given.value.shape[3] if given.value is not None else variant.attention.latent.rank  # type: ignore[union-attr]
    return 2 * (given.query.shape[3] + value_dim) * _pairs(variant, given)


def backward_flops(*flat: Any, out_val: object = None) -> int:
    """Of `weft::attention_backward`: scores again, and a product for each gradient that is wanted, or leads to one."""
    *of_call, flags = flat[4:]
    given = Arguments.of(of_call)
    variant = variant_of_text(given.variant)
    wanted = {name for name, flag in zip(variant.tensor_names, flags) if flag}
    widths = {name: tensor.shape[3] for name, tensor in zip(MAIN, given.main) if tensor is not None}
    columns = widths["query"]
    if wanted - {"value"}:
        columns += widths["value"]  # of the gradient of weights
    columns += sum(width for name, width in widths.items() if name in wanted)
    return 2 * columns * _pairs(variant, given)


# -- pairs ------------------------------------------------------------------------------------------------------------
def _pairs(variant: Variant, given: Arguments) -> int:
    """Of all heads and sequences; all pairs that there is room for where numbers are not known, as while tracing."""
    query, key, table = given.query, given.key, given.slot("block_table")
    batch, heads, q_rows, _ = query.shape
    kv_rows = key.shape[2] if table is None else table.shape[1] * key.shape[2]
    program = variant.facts.kv_tiles
    read = {tensor.name for line in program.body for tensor in tensors(line.value)}
    looked_at = [t for name, t in zip(variant.tensor_names[len(MAIN) :], given.operands) if name in read]
    looked_at += [*given.floats[: variant.kinds.count("float")], *(t for t in given.slots if t is not None)]
    offset = 0 if given.q_offset is None else given.q_offset
    numbers = (*query.shape, *key.shape, *given.ints, offset, given.head_dim)
    if not (all(type(n) is int for n in numbers) and _are_readable(looked_at)):
        return batch * heads * q_rows * kv_rows
    return _counted(program, call_of(variant.names, variant.kinds, given), read)


def _are_readable(given: Iterable[Tensor]) -> bool:
    """Whether values are there, for this thread to wait for."""
    given = list(given)
    capturing = any(t.is_cuda for t in given) and torch.cuda.is_current_stream_capturing()
    return are_plain(given) and not capturing and not any(t.is_meta for t in given)


def _counted(program: TileProgram, call: Call, read: set[str]) -> int:
    """read: tensors that the program reads."""
    query, sequences = call.query, call.sequences
    batch, heads, q_rows, _ = query.shape
    if isinstance(sequences, Dense):
        rows = padded_rows(batch, q_rows, call.key.shape[2], None, None, numbers_of(sequences.q_offset))
    else:
        rows = sequences.rows(query, call.key)
    names = {name for line in program.body for name in symbols(line.value)}
    by_head, by_batch = bool(names & {"head", "kv_head"}), "batch" in names
    group = heads // call.key.shape[1]
    own = {n: v for n, v in call.operands.items() if not isinstance(v, Tensor)}
    tables = {n: Table(n, v.detach().tolist) for n, v in call.operands.items() if n in read and isinstance(v, Tensor)}
    kinds = Counter((r.q_len, r.kv_len, r.q_offset, r.number if by_batch else 0) for r in rows)
    total = 0
    for (q_len, kv_len, offset, number), times in kinds.items():
        for head in range(heads if by_head else 1):
            at = {"batch": number, "head": head, "kv_head": head // group, "group": group, "head_dim": call.head_dim}
            env = {**own, **at}
            sizes = {"q_len": q_len, "kv_len": kv_len, "q_offset": offset}
            if tables:
                seen = visible_pairs(program, env={**env, **tables}, **sizes)
            else:
                seen = _kept(program, tuple(env.items()), **sizes)
            total += times * seen * (1 if by_head else heads)
    return total


@lru_cache(maxsize=1024)
def _kept(program: TileProgram, env: tuple[tuple[str, Any], ...], q_len: int, kv_len: int, q_offset: int) -> int:
    """`visible_pairs`, which a loop of training asks for at each step."""
    return visible_pairs(program, q_len=q_len, kv_len=kv_len, q_offset=q_offset, env=dict(env))


# -- registering ------------------------------------------------------------------------------------------------------
def register(forward: Any, backward: Any) -> None:
    """Let the counter know the ops, now or once somebody imports it: it imports Triton, which few calls need."""

    def known(counter: ModuleType) -> None:
        counter.register_flop_formula(forward, get_raw=True)(forward_flops)
        counter.register_flop_formula(backward, get_raw=True)(backward_flops)

    if COUNTER in sys.modules:
        known(importlib.import_module(COUNTER))  # waits for another thread that is about to import it
    else:
        sys.meta_path.insert(0, _Imported(known))


class _Imported:
    """A finder of modules that finds none, but learns when the counter is imported."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
