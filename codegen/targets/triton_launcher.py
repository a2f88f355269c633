"""Launches of Triton kernels: what of a call decides which code runs, the workspace, and the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiler.analysis.facts import Facts
from ...compiler.analysis.measured import LIST_ROOM
from ...compiler.analysis.records import PAIR_KINDS
from ...compiler.planning import quantities as formulas
from ...compiler.planning.distances import levels_in, tables_in
from ...compiler.planning.kernel import Kernel
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.signature import MOST_SHORT, PACKED, PAGED
from ...compiler.planning.tables import DIAGONAL_PARTS, DIAGONAL_PROGRAMS, DIAGONAL_REGISTERS
from ...compiler.planning.target import CallTensors, Named, Partition, Place
from ...ir.errors import WeftError
from ...ir.expr import TensorOperand
from ...ir.parse import PARSING
from ..binding import OPERAND_STRIDE, Binding, Packer, alignment, packing
from .triton.forms import Tiling
from .triton.kernels.measures import LONG_SPANS, MEASURES, PAIR_CELLS
from .triton.kernels.pair_sums import DDIAGONALS, DPAIRS, diagonal_programs
from .triton.kernels.tables import DISTANCE_TABLES
from .triton.kernels.work import LISTED, WORK
from .triton_direct import LENGTHS, DirectLauncher, nothing_yet
from .triton_measures import KV_TILES, Q_TILES
from .triton_workspace import (
    WORK_SIDES,
    by_sequence,
    reduced,
    ways_in,
    workspace_of,
)

HEAD_BUNCH = 8  # heads whose tiles run together, so that their keys and values are shared in L2

_PROGRAMS: dict[Callable[..., float], str] = {
    formulas.query_programs: f"{Q_TILES} * batches * heads",
    formulas.key_programs: f"{KV_TILES} * batches * kv_heads",
    formulas.pair_programs: f"{Q_TILES} * ({KV_TILES}) * batches * heads",
    formulas.head_programs: "batches * heads",
    formulas.kv_head_programs: "batches * kv_heads",
    diagonal_programs: f"({Q_TILES} + ({KV_TILES}) - 1) * batches * heads * {DIAGONAL_PARTS}",
}


class Mode(NamedTuple):
    """What of a call's tensors the compiled code depends on, besides its signature."""

    aligned: bool  # every address and stride of query, key, value, out and dout is a multiple of 16 bytes
    per_row: bool  # q_offset is a tensor
    no_dlse: bool
    head_dim: int  # the value of the symbol
    page: int = 0  # rows of a block of a paged cache
    rows: int = 0  # of a tile of queries, where these depend on how many there are
    heads: int = 0  # of a query's rows that are brought together, where a tile has rows of all heads of a group
    joined: bool = False  # whether rows in parts are many, and the parts of each few


@dataclass(frozen=True)
class _Prepared:
    """What is prepared for calls of one mode. A kernel is compiled by the first call that launches it."""

    bindings: Sequence[Binding]
    options: Sequence[Mapping[str, int]]
    absent: Sequence[str]  # tensors that such calls do not have
    pack: Callable[[Mapping[str, Any]], Any]  # makes the arguments of all kernels
    typed: Callable[[Mapping[str, Any]], Any]  # the same with tensors in place of addresses
    runs: dict[int, Any]  # those that are compiled, by number


class TritonLauncher(DirectLauncher):
    """Launches of the portable kernels of one direction."""

    def __init__(
        self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: int, interprets: bool
    ) -> None:
        from .. import launching  # lazy: imports triton

        self._launching = launching
        self.modules, self.code, self.facts = modules, code, facts
        self.device, self.interprets = device, interprets
        self.own_keys = [i for i, s in enumerate(code.segments.qk) if s.source == "rope"]
        self.backward = code.signature.direction == "backward"
        self.sequences = code.signature.sequences
        self.tensors = {f"arg_{p.name}": p.rank for p in facts.attention.parameters if isinstance(p, TensorOperand)}
        self.direct = self.backward_of = self.repeated = self.growing = nothing_yet
        self.guard = None
        self.empty, self.current_device = self._empty, torch.cuda.current_device
        names = self._operand_names()
        # gradients have the width of their tensor and not its strides: rows of padded operands start elsewhere there
        made = [f"d{n}" for n in names if n not in ("out", "dout")] if self.backward else []
        self._aligned = alignment([*names, *made])
        self._modes: dict[object, _Prepared] = {}
        # scores less the maximum of their row: two statistics of it are handed from the forward to the backward
        self.shifts = facts.scores_lie_far
        pair = "2, " if self.shifts else ""
        self._statistics_shape = f"({pair}batches, heads, q_len)"
        self.sums = facts.operand_gradients(code.signature.wanted) if self.backward else ()
        self.ways = ways_in(code, facts)
        self.tables = tables_in(code, facts)
        self.levels = levels_in(code, facts)

    # -- one call ------------------------------------------------------------------------------------------------------
    def partition(self, call: CallTensors, results: Named) -> Partition:
        given = self._given(call, results)
        aligned, row = self._aligned(given)
        if row >= 2**31 // 512:
            self._check_rows(row, aligned)
        no_dlse = results.get("dlse") is None
        page = call.key.shape[2] if self.sequences in PAGED else 0
        return Partition(mode=Mode(aligned, "q_offset_ptr" in given, no_dlse, call.head_dim, page))

    def measures(self, partition: Partition) -> dict[str, str]:
        aligned = partition.mode.aligned  # type: ignore[attr-defined]
        found = [k.name for k in self.code.kernels if k.name in MEASURES and k.name not in LONG_SPANS]
        forms = {name: self.form(name, aligned) for name in found}
        beside = f" by {self._neighbours}" if self._neighbours != 1 else ""
        return {name: f"{name} {form.block_q}x{form.block_kv}{beside}" for name, form in forms.items()}

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        return workspace_of(self, call, partition.mode)  # type: ignore[arg-type]

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        given = {**self._given(call, results), **workspace}
        of_pairs = self.pair_programs(call, partition.mode) if "pairs" in self.ways.owners else (0, 1)  # type: ignore[arg-type]
        given |= {"first_program": 0, "most_programs": of_pairs[1], **self._divided(partition)}
        ready = self._modes.get(partition.mode) or self._prepare(partition.mode, given)  # type: ignore[arg-type]
        launches = ready.pack(given)
        if self.sequences != "dense":
            self._clear_levels(workspace, partition.mode)  # type: ignore[arg-type]
        due = self._due(launches, partition)
        if not ready.runs.keys() >= set(due):
            self._compile_these(due, ready, partition.mode, given)  # type: ignore[arg-type]
        stream = self._stream()
        for n in due:
            ready.runs[n](*launches[n], stream)
        tables = self._tables(call, workspace, partition.mode)  # type: ignore[arg-type]
        for first in range(of_pairs[1], *of_pairs):
            self._list_more(ready, given, first, tables, stream)
        return self._finished(call, results, {**workspace, **{f"sum{n}": table for n, table in tables.items()}})

    def _due(self, launches: Sequence[tuple[int, Any]], partition: Partition) -> Sequence[int]:
        """Which kernels a call launches, by number: those with programs, but for what is measured already."""
        return [
            n
            for n, code in enumerate(self.code.kernels)
            if launches[n][0] and code.name.replace("_long_", "_") not in partition.known  # both leave the same
        ]

    def _divided(self, partition: Partition) -> dict[str, Any]:
        """What kernels are told of how the work is divided."""
        return {}

    def _given(self, call: CallTensors, results: Named) -> dict[str, Any]:
        """Every tensor of the call by the name that kernels have for it."""
        given: dict[str, Any] = {"query": call.query, "key": call.key, **results}
        if self.backward:  # kernels name what they do not write too
            for name, tensor in call.tensors.items():
                given.setdefault(f"d{name}", tensor)
        if call.value is not None:
            given["value"] = call.value
        if call.rope is not None:
            given[f"key{self.own_keys[0]}"] = call.rope
            if self.backward:
                given[f"dkey{self.own_keys[0]}"] = results.get("drope", call.rope)
        for name, operand in call.operands.items():
            given[f"arg_{name}"] = operand
        ragged = call.ragged
        if ragged is not None:
            given |= ragged.tensors
        offset = call.q_offset if ragged is None else ragged.q_offset
        if isinstance(offset, Tensor):
            given["q_offset"], given["q_offset_ptr"] = 0, offset
        else:
            given["q_offset"] = offset or 0
        return given

    def _finished(self, call: CallTensors, results: Named, workspace: Named) -> list[Tensor]:
        """Shares of a key that heads have in common are summed; sums of operand gradients take their shape."""
        if not self.backward:
            return []
        for i in self.own_keys:
            share = workspace.get(f"dkey{i}")
            if share is not None and "drope" in results:
                whole = results["drope"]
                whole.copy_(share.unflatten(1, (whole.shape[1], -1)).sum(2))
        q_len, ragged = call.query.shape[2], call.ragged
        sums = {n: workspace[f"sum{n}"] for n in range(len(self.sums))}
        found = []
        for n, g in enumerate(self.sums):
            if g.kind in PAIR_KINDS:
                found.append(sums[n])
            elif ragged is None or ragged.kind != "packed":
                found.append(reduced(sums[n], self.code.schedule.algorithm, g.kind, q_len))
            elif g.kind in ("total", "sink"):
                found.append(by_sequence(sums[n], workspace["q_work"][:, 0], ragged.number(call.query)))
            else:
                found.append(sums[n])
        return found

    # -- what is prepared ----------------------------------------------------------------------------------------------
    def _check_rows(self, row: int, aligned: bool) -> None:
        rows = max(max(f.block_q, f.block_kv) for f in (self.form(k.name, aligned) for k in self.code.kernels))
        if row * rows >= 2**31:
            raise WeftError(
                f"{self.facts.attention.name}: expected row strides below {2**31 // rows} elements, got {row}: "
                "copy the operand"
            )

    def _prepare(self, mode: Mode, given: Mapping[str, Any]) -> _Prepared:
        bindings, options = [], []
        for code in self.code.kernels:
            form = self.form(code.name, mode.aligned)
            constants = self._constants(code.kernel, form, mode)
            parameters, defaults = self._launching.parameters_of(self._function(code.name))
            used = {n: constants.get(n, default) for n, default in defaults.items()}
            programs = self._programs(code.kernel, constants)
            only = self._launched_if(code.kernel)
            bindings.append(Binding(code.name, parameters, programs, used, self._renamed(code.kernel), only))
            options.append(self._options(form) | self._limits(code.kernel, form, mode))
        absent = [n for n in ("q_offset_ptr", "dlse", *LENGTHS[self.sequences]) if given.get(n) is None]
        tensors = [n for n, value in given.items() if isinstance(value, Tensor)]
        sources = {n: f"given[{n!r}]" for n in given if n not in absent}
        rows = self._rows(mode.aligned)

        def packer(pointers: bool) -> Packer:
            return Packer(sources, tensors, absent=absent, rows=rows, ranks=self.tensors, pointers=pointers)

        self._length_dtypes = {n: str(given[n].dtype).removeprefix("torch.") for n in LENGTHS[self.sequences]
                               if n not in absent}  # fmt: skip
        with PARSING:
            typed = packing(packer(False), bindings, self.tools)
            pack = packing(packer(not self.interprets), bindings, self.tools)
        made = _Prepared(bindings, options, absent, pack, typed, {})
        return self._modes.setdefault(mode, made)

    def _compile_these(self, due: Sequence[int], ready: _Prepared, mode: Mode, given: Mapping[str, Any]) -> None:
        """Compile the kernels with these numbers that are not yet."""
        with PARSING:
            missing = [n for n in due if n not in ready.runs]  # another thread may have been here
            bindings, options = [ready.bindings[n] for n in missing], [ready.options[n] for n in missing]
            typed = ready.typed(given)
            ready.runs.update(zip(missing, self._compiled(bindings, options, [typed[n] for n in missing])))
            if mode.aligned and self._may_go_directly:  # by the last one here, which finds the kernels of all
                self._go_directly(mode, ready)

    def _options(self, form: Any) -> dict[str, int]:
        return {"num_warps": form.num_warps, "num_stages": form.num_stages, **self._rounding()}

    def _limits(self, kernel: Kernel, form: Any, mode: Mode) -> dict[str, int]:
        """Options that hold a kernel's registers to what its programs have room for."""
        signature = self.code.signature
        if kernel.name != DDIAGONALS or self.levels is None or self.interprets or signature.arch != "sm_90":
            return {}
        narrow = max(signature.widths.head_dim, signature.widths.value_dim) <= 64  # or loops spill
        return {"maxnreg": DIAGONAL_REGISTERS} if narrow and form.num_warps == 4 else {}

    def _rounding(self) -> dict[str, int]:
        """Far from 0 every kernel must round scores alike: where one of them adds to a product before that is rounded,
        their scores differ by as much as numbers there lie apart, and weights by its power."""
        return {"enable_fp_fusion": False} if self.shifts else {}

    def _function(self, name: str) -> Any:
        return next(getattr(module, name) for module in self.modules if hasattr(module, name))

    def _constants(self, kernel: Kernel, form: Tiling, mode: Mode) -> dict[str, object]:
        """Values of the constexpr parameters that kernels of this target have."""
        return {
            "BLOCK_Q": form.block_q, "BLOCK_KV": form.block_kv, "HEAD_BUNCH": HEAD_BUNCH, "ALIGNED": mode.aligned,
            **self._looking(kernel, form),
            "Q_OFFSET_PER_BATCH": mode.per_row, "BOTTOM_RIGHT": self.code.signature.offset == "bottom_right",
            "HAS_DLSE": not mode.no_dlse, "head_dim": mode.head_dim, "PAGE": mode.page,
            # fp32 operands are multiplied as fp32, as torch does by default, not as TF32
            "DOT_PRECISION": "ieee", "PARTS": DIAGONAL_PARTS,
        }  # fmt: skip

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name == "row_statistics":
            text = "padded_len // {BLOCK_Q} * batches * heads"
        elif kernel.name == DPAIRS:
            over = self.ways.over
            shares = ([] if "batch" in over else ["batches"]) + (
                [] if "head" in over else ["kv_heads" if "group" in over else "heads"]
            )
            text = f"min({' * '.join([Q_TILES, f'({KV_TILES})', *shares])} - first_program, most_programs)"
        elif kernel.name == DDIAGONALS:
            text = self._diagonal_slots()
            if self.levels is not None and self.sequences != "packed":  # programs go through those of a head
                parts = f"batches * heads * {DIAGONAL_PARTS}"
                text = f"min({text}, {parts} * (1 + {DIAGONAL_PROGRAMS} // ({parts})))"
        elif kernel.name == DISTANCE_TABLES:
            of = [(t.by_batch, t.by_head) for t in self.tables]
            of += [(self.levels.by_batch, self.levels.by_head)] if self.levels is not None else []
            heads = "batches * heads" if any(by_batch for by_batch, _ in of) else "heads"
            rows = heads if any(map(any, of)) else "1"
            text = f"(n_distances + {{BLOCK_KV}} - 1) // {{BLOCK_KV}} * {rows}"
        elif kernel.name in WORK:
            text = f"n_sequences // {LISTED} + 1"  # with the rows behind all
        elif kernel.name in MEASURES:
            text = self._measuring_programs(kernel)
        elif self.sequences in PACKED:
            text = "q_slots * heads" if kernel.axis == "kv" else "kv_slots * kv_heads"
        else:
            text = _PROGRAMS[kernel.programs]
        return text.format(**constants)

    def _diagonal_slots(self) -> str:
        """Parts of diagonals, of which flash_ddiagonals lists sums."""
        if self.sequences == "packed":
            return "(q_len // {BLOCK_Q} + kv_len // {BLOCK_KV} + 2 * n_sequences + 2) * heads * {PARTS}"
        return _PROGRAMS[diagonal_programs]

    def _renamed(self, kernel: Kernel) -> dict[str, str]:
        """Both axes call what was measured for them `spans` or `lists`, both sides the list of their tiles `work`."""
        side = "q" if kernel.axis == "kv" else "kv"
        return {
            "spans": f"{kernel.axis}_spans", "n_tiles": f"{kernel.axis}_measured_tiles", "work": f"{side}_work",
            "n_slots": f"{side}_slots", "lists": f"{kernel.axis}_lists", "room": f"{kernel.axis}_room",
            "cells": PAIR_CELLS, "ends": f"{kernel.axis}_ends",
        }  # fmt: skip

    def _rows(self, aligned: bool) -> dict[str, str]:
        rows = self._sequence_rows(aligned) | self._table_rows(aligned)
        for n, gradient in enumerate(self.sums):
            tensor = gradient.load.tensor
            rows |= {f"e{n}_{d}": f"arg_{tensor.name}.shape[{d}]" for d in range(1, tensor.rank)}
        for axis, own, others in (("kv", Q_TILES, KV_TILES), ("q", KV_TILES, Q_TILES)):
            for kernel in (f"{axis}_spans", f"{axis}_lists"):
                if self.code.has(kernel):
                    form = self.form(kernel, aligned)
                    blocks = {"BLOCK_Q": form.block_q, "BLOCK_KV": form.block_kv}
                    rows[f"{axis}_measured_tiles"] = own.format(**blocks)
                    others = others.format(**blocks).replace("kv_len", self._kv_rows)
                    rows[f"{axis}_room"] = f"min({others}, {LIST_ROOM})"
        if self.code.schedule.algorithm == "streaming" and not self.backward:
            rows["padded_len"] = "running_max.shape[2]"
        if self.code.schedule.algorithm == "standard" and self.backward:
            rows["row_units"] = "weights.shape[3] // 16"
        if self.code.signature.widths.value_is_key:
            rows["value"] = f"key[..., :{self.code.signature.widths.value_dim}]"
        return rows

    def _sequence_rows(self, aligned: bool) -> dict[str, str]:
        """Sizes of calls with lengths: rows of the operands in memory, sequences, and slots of lists of tiles."""
        if self.sequences == "dense":
            return {}
        rows = {"q_extent": "q_len", "kv_extent": "kv_len", "n_sequences": "cu_q.shape[0] - 1"}
        if self.sequences in PAGED:
            rows |= {"kv_extent": "table.shape[1] * kv_len", "table_row": "table.stride(0)", "n_blocks": "key_batches"}
        for kernel in self.code.kernels:
            if kernel.name in WORK:
                side, block = self._listed(kernel.name, aligned)
                # each sequence, and what lies behind all, has one tile at most that is not whole
                number = f"min(n_sequences, q_len // {MOST_SHORT + 1})" if self.lists_long else "n_sequences"
                rows[f"{side}_slots"] = f"{side}_len // {block} + {number} + 1"
        return rows

    def _listed(self, kernel: str, aligned: bool) -> tuple[str, int]:
        """Of a kernel that lists tiles: whose, and rows of a tile."""
        form = self.form(kernel, aligned)
        side = dict(WORK_SIDES)[kernel]
        return side, form.block_q if side == "q" else form.block_kv

    def slots(self, side: str, call: CallTensors, aligned: bool) -> int:
        """Of the list of a side's tiles of a packed call."""
        block = next(
            b for k in self.code.kernels if k.name in WORK for s, b in [self._listed(k.name, aligned)] if s == side
        )
        rows = (call.query if side == "q" else call.key).shape[2]
        number = call.ragged.number(call.query)  # type: ignore[union-attr]
        return rows // block + (min(number, rows // (MOST_SHORT + 1)) if self.lists_long else number) + 1

    def _compiled(
        self, bindings: Sequence[Binding], options: Sequence[Mapping[str, int]], typed: Sequence[Any]
    ) -> list[Any]:
        """The kernels for the types of these arguments."""
        functions = [self._function(b.name) for b in bindings]
        if self.interprets:
            return [self._launching.interpreted(f, b, o) for f, b, o in zip(functions, bindings, options)]
        types = [self._types(b, arguments) for b, (_, arguments) in zip(bindings, typed)]
        return self._launching.compiled_together(self.device, list(zip(functions, bindings, types, options)))

    def _stream(self) -> int:
        return 0 if self.interprets else self._launching.current_stream(self.device)

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        """Arguments as a compilation takes them: in a wide module every stride of an operand has 64 bits."""
        types = self._launching.types_of(arguments)
        wide = [self.code.signature.wide and OPERAND_STRIDE.fullmatch(name) for name in binding.parameters]
        return [1 << 40 if is_wide else value for value, is_wide in zip(types, [*wide, *[None] * len(types)])]
