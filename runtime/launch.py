"""Run a generated module on tensors: what each target's entry points want, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.planning.records import Tiling
from ..ir.errors import InternalError
from ..runtime.driver import Compiled

Operand = Tensor | int | float
HEAD_BUNCH = 8  # heads whose tiles run together, so that their keys and values are shared in L2


class CallTensors(NamedTuple):
    """Operands of one call, checked: shapes as in the public call, value None where it is part of the key."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    rope: Tensor | None
    operands: Sequence[Operand]  # the variant's own, by name
    q_offset: int | Tensor
    head_dim: int  # the value of the symbol head_dim

    @property
    def keys(self) -> list[Tensor]:
        return [self.key] if self.rope is None else [self.key, self.rope]


class Place(NamedTuple):
    """How a tensor that is to be made lies in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def beside(self, tensor: Tensor) -> Tensor:
        """An empty tensor there, on the device of `tensor`."""
        return tensor.new_empty_strided(self.size, self.stride, dtype=self.dtype)


def rows_like(tensor: Tensor, heads: int, width: int) -> Place:
    """[B, heads, rows, width] in the memory order of `tensor` ([B, L, H, D] views stay such)."""
    batch, _, rows, _ = tensor.shape
    of_head, of_row = (width, heads * width) if tensor.stride(1) < tensor.stride(2) else (rows * width, width)
    return Place((batch, heads, rows, width), (heads * rows * width, of_head, of_row, 1), tensor.dtype)


Launches = dict[str, object]  # what a module settled for calls that are equal in all but addresses; {} at first
Forward = Callable[[CallTensors, Tensor, Tensor], None]
Backward = Callable[[CallTensors, Tensor, Tensor, Tensor, Tensor | None, Sequence[Tensor]], list[Tensor]]


def forward(compiled: Compiled) -> Forward:
    """A function of (call, out, lse) that fills out [B, Hq, L, Dv] and lse [B, Hq, L].

    It is meant for calls that are equal in all but addresses: what the module settles at the first is kept in it.
    """
    module, tiling = compiled.module, compiled.schedule.forward
    launches: Launches = {}
    measuring = _measuring(compiled, launches)
    match compiled.schedule.target:
        case "cpu":
            blocks = {"block_q": tiling.block_q, "block_kv": tiling.block_kv}
            return lambda call, out, lse: module.forward(*_cpu_arguments(call), out=out, lse=lse, **blocks)
        case "hopper":
            return lambda call, out, lse: module.launch(
                call.query, call.key, call.value, out, lse, call.q_offset, *_flat(call.operands), launches,
                *measuring(call),
            )  # fmt: skip
        case "triton" | "interpret":
            config = gpu_config(tiling)
            return lambda call, out, lse: module.launch_forward(
                call.query, call.keys, call.value, out, lse, call.q_offset, call.operands, config, call.head_dim,
                launches, *measuring(call),
            )  # fmt: skip
        case _:
            raise InternalError(f"launch: unknown target {compiled.schedule.target}")


def backward(compiled: Compiled) -> Backward:
    """A function of (call, out, lse, dout, dlse, gradients), to be kept like that of `forward`.

    It fills the gradients of query, key, value and rope (where there is one), and returns the raw sums of operand
    gradients, one for each of spec's gradient reads: total [B, Hq], row [B, Hq, L], column [B, Hq, T], float32.
    """
    schedule, module = compiled.schedule, compiled.module
    launches: Launches = {}
    measuring = _measuring(compiled, launches)
    match schedule.target:
        case "cpu":
            blocks = {"block_q": schedule.backward_q.block_q, "block_kv": schedule.backward_q.block_kv}

            def run(call, out, lse, dout, dlse, gradients):  # type: ignore[no-untyped-def]
                dquery, dkey, dvalue, *drope = gradients
                into = {"dquery": dquery, "dkeys": [dkey, *drope], "dvalue": dvalue}
                return list(module.backward(dout, dlse, *_cpu_arguments(call), out=out, lse=lse, **into, **blocks))

        case "triton" | "interpret":
            configs = gpu_config(schedule.backward_q), gpu_config(schedule.backward_kv)

            def run(call, out, lse, dout, dlse, gradients):  # type: ignore[no-untyped-def]
                dquery, dkey, dvalue, *drope = gradients
                return module.launch_backward(
                    dout, dlse, call.query, call.keys, call.value, out, lse, dquery, [dkey, *drope], dvalue,
                    call.q_offset, call.operands, *configs, call.head_dim, launches, *measuring(call),
                )  # fmt: skip

        case _:
            raise InternalError(f"launch: target {schedule.target} has no backward")
    return run


def _measuring(compiled: Compiled, launches: Launches) -> Callable[[CallTensors], Sequence[Callable[..., Tensor]]]:
    """For kernels that read from memory which tiles to visit: what measures that, given axis, block_q and block_kv."""
    spans = compiled.spans
    if spans is None:
        return lambda call: ()
    return lambda call: (
        partial(
            spans.launch_spans, query=call.query, key=call.key, q_offset=call.q_offset, operands=call.operands,
            head_dim=call.head_dim, launches=launches,
        ),
    )  # fmt: skip


def _cpu_arguments(call: CallTensors) -> tuple[object, ...]:
    return (call.query, call.keys, call.value, call.operands, call.q_offset, call.head_dim)


def _flat(operands: Sequence[Operand]) -> list[Operand]:
    """GPU kernels take a tensor's strides behind it."""
    flat: list[Operand] = []
    for operand in operands:
        flat.append(operand)
        if isinstance(operand, Tensor):
            flat += operand.stride()
    return flat


def gpu_config(tiling: Tiling) -> dict[str, int | str]:
    """A tiling as the keyword arguments of a Triton launch."""
    return {
        "BLOCK_Q": tiling.block_q,
        "BLOCK_KV": tiling.block_kv,
        "HEAD_BUNCH": HEAD_BUNCH,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        # fp32 operands are multiplied as fp32, as torch does by default, not as TF32
        "DOT_PRECISION": "ieee",
    }


def zero_forward(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What a call gives when there is nothing to see."""
    return out.zero_(), lse.fill_(-torch.inf)
