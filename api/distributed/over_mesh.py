"""A call on the rows of a process, where a mesh divides the sequence: of DTensors, and in torch's region."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..compiler.planning.records import Shape
from ..ir.attention import SEED, Attention
from ..runtime.check.operands import as_number
from ..runtime.check.tensors import DTYPES
from ..runtime.options import CallOptions
from .context import ContextParallel
from .seen import decisive_tensors
from .shardplan import ShardPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@lru_cache(maxsize=16)
def _of_mesh(mesh: DeviceMesh, dim: int, balance: str) -> ContextParallel:
    return ContextParallel(mesh, dim, balance=balance)


@lru_cache(maxsize=256)
def _plan_of_mesh(
    cp: ContextParallel, attention: Attention, sizes: Shape, q_offset: int, numbers: tuple[tuple[str, Any], ...]
) -> ShardPlan:
    return _planned(cp, attention, sizes, q_offset, dict(numbers))


def _planned(
    cp: ContextParallel, attention: Attention, sizes: Shape, q_offset: int, given: Mapping[str, Any]
) -> ShardPlan:
    return cp.plan(
        attention, batch=sizes.batch, heads=sizes.heads, kv_heads=sizes.kv_heads, length=sizes.q_len,
        kv_length=sizes.kv_len, head_dim=sizes.head_dim, value_dim=sizes.value_dim, dtype=sizes.dtype,
        q_offset=q_offset, **given,
    )  # fmt: skip


def over_mesh(
    mesh: DeviceMesh, dim: int, attention: Attention, tensors: tuple[Tensor, Tensor, Tensor | None],
    lengths: tuple[int, int], operands: Mapping[str, Any], options: CallOptions, balance: str = "contiguous",
) -> Any:  # fmt: skip
    """out, or (out, lse), of this process's rows of a sequence that a dimension of the mesh divides.

    tensors: its rows of query, key and value, or of query and a latent cache. lengths: of all queries and keys.
    operands: whole, as are uk and uv. balance: how rows are dealt, as neighbours where it is not given, which is how
    DTensors have them.
    """
    query, key, value = tensors
    width = query.shape[3] if attention.latent is None else attention.latent.rank
    if (last := value if attention.latent is None else options.uv) is not None:
        width = last.shape[-1]
    sizes = Shape(query.shape[0], query.shape[1], key.shape[1], *lengths, query.shape[3], width, DTYPES[query.dtype])
    q_offset = lengths[1] - lengths[0] if options.q_offset is None else as_number(options.q_offset, int)
    cp, decisive = _of_mesh(mesh, dim, balance), decisive_tensors(attention)
    numbers = {n: v for n, v in operands.items() if not isinstance(v, Tensor) and n != SEED.name}
    with cp.heard(attention.name):
        if decisive:
            tensors_read = {n: operands[n] for n in decisive if n in operands}
            plan = _planned(cp, attention, sizes, q_offset, numbers | tensors_read)
        else:
            plan = _plan_of_mesh(cp, attention, sizes, q_offset, tuple(sorted(numbers.items())))
    rest = {n: v for n, v in operands.items() if n != SEED.name}  # drawn by now, or as it was given
    return cp.attention(attention, query, key, value, plan=plan, return_lse=options.return_lse, target=options.target,
                        deterministic=options.deterministic, seed=operands.get(SEED.name), uk=options.uk, uv=options.uv,
                        form=options.form, **rest)  # fmt: skip
