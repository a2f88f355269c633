"""The launcher of target `cpu`: runs a module of torch code. Its fast ways are codegen/launch/fast/on_cpu.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.target import WHOLE, CallTensors, Named, Partition, Place
from ...launch.fast.on_cpu import MAIN, CpuWays
from ...launch.runs import runs_of
from ...launch.scaled import Scaled, by_rows
from .forms import CpuForm

LARGEST_KEPT = 31 << 20  # bytes; glibc learns from blocks of up to 32 MiB


@lru_cache(maxsize=1)
def keep_tiles_at_hand() -> None:
    """Once a process: make and give back one block, which nobody writes to, so that glibc keeps smaller ones.

    A tile of scores and what is computed of it are torch tensors of up to some MiB, made and given back hundreds of
    times a call. glibc gives such blocks back to the system until it has seen a larger one come back. Each tile then
    waits for fresh pages, which may take three times as long as what is computed in them (docs/experiments).
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8, device="cpu")


class CpuLauncher:
    """Runs a module of torch code."""

    def __init__(self, module: ModuleType, code: CodePlan, facts: Facts) -> None:
        self.module, self.code = module, code
        self.sink = facts.attention.canonical.folded_sink is not None
        form = code.kernels[-1].form
        assert isinstance(form, CpuForm)
        self.blocks = {"block_q": form.block_q, "block_kv": form.block_kv}
        self.fast = CpuWays(module, code, facts).ways()

    def from_weights(self, b: Any) -> tuple[dict[str, Any], list[Any]] | None:
        """The gradients of a call whose weights were kept, by name, and the sums of reads; None where it has tiles."""
        way: Callable[..., Any] | None = getattr(self.module, "gradients_of_weights", None)
        call, weights = b.call, b.weights
        (batch, heads, q_len, _), (kv_heads, kv_len) = call.query.shape, call.key.shape[1:3]
        fits = weights.shape == (batch * kv_heads, heads // kv_heads * q_len, kv_len)
        if way is None or b.dlse is not None or not fits or torch.is_autocast_enabled("cpu"):
            return None
        sizes = batch, heads, kv_heads, q_len, kv_len, call.head_dim
        operands = list(call.operands.values())
        found = way(b.dout, weights, call.query, call.key, call.value, operands, call.q_offset, sizes)
        if found is None:
            return None
        return {n: g for n, g in zip(MAIN, found[0], strict=True) if g is not None}, found[1]

    # -- any call ------------------------------------------------------------------------------------------------------
    def partition(self, call: CallTensors, results: Named) -> Partition:
        return WHOLE

    def measures(self, partition: Partition) -> dict[str, str]:
        return {}

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        return {}

    def __call__(self, call: CallTensors, results: Any, workspace: Named, partition: Partition) -> list[Any]:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self._run(call, results)
        return self._run(call, results)

    def _run(self, call: CallTensors, results: Any) -> list[Any]:
        operands = list(call.operands.values())
        ragged = call.ragged
        if ragged is None:
            where: Any = call.q_offset
        else:
            rows = ragged.rows(call.query, call.key)
            where = runs_of(rows, ragged.kind.rows.packed, self.sink, ragged.tensors.get("table"))
        main = call.query, call.keys, call.value
        if self.code.signature.dtypes.quantized:
            main = self._real(call, None if ragged is None else where)
        arguments = (*main, operands, where, call.head_dim)
        if self.code.signature.direction == "forward":
            self.module.forward(*arguments, out=results["out"], lse=results["lse"], **self.blocks)
            return []
        given = {n: results.get(n) for n in ("out", "lse", "dquery", "dvalue")}
        dkeys = [results.get("dkey"), *([] if call.rope is None else [results.get("drope")])]
        sums = self.module.backward(results["dout"], results["dlse"], *arguments, dkeys=dkeys, **given, **self.blocks)
        return list(sums)

    def _real(self, call: CallTensors, runs: Any) -> Any:
        """Query, keys and value as real numbers; where there are runs, these make theirs of it, one at a time."""
        read = call.read or {}
        wide = torch.float64 in {call.query.dtype, call.key.dtype}
        dtype = torch.float64 if wide else torch.float32

        def made(tensor: Tensor | None, name: str) -> Any:
            if tensor is None:
                return None
            descale = read.get(name)
            rows = None if descale is None else by_rows(descale, tensor.shape)
            found = Scaled(tensor, rows, dtype)
            return found if runs is not None else found.real()

        first, *others = call.keys
        keys = [made(first, "k_descale"), *(made(t, "") for t in others)]
        return made(call.query, "q_descale"), keys, made(call.value, "v_descale")
