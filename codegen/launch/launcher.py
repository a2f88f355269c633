"""The launcher of GPU kernels: what of a call decides which code runs, its workspace, and the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

from torch import Tensor

from ...compiler.planning.buffer import Buffer
from ...compiler.planning.plan import CodePlan, KernelCode
from ...compiler.planning.target import CallTensors, Named, Partition, Place
from ...ir.errors import InternalError, WeftError
from ...ir.parse import PARSING
from .binding import OPERAND_STRIDE, Binding, Packer, alignment, evaluating, packing
from .buffers import PLACING, place_text
from .descriptors import Descriptors
from .device import Asked, Device
from .division import Division
from .fast.direct import DirectWay, Prepared, may_go_directly
from .fast.ways import Ways, first_of
from .job import Job, KernelLaunch, Mode, OwnPart, Part, SummingPart
from .scaled import shift_of, spread

HEAD_BUNCH = 8  # heads whose tiles run together, so that their keys and values are shared in L2
_MOST_ROWS = 512  # of a tile


class KernelLauncher:
    """Launches of the kernels of one direction, as its parts say.

    own: the part of the target's own kernels. measures: of those that find out which tiles there are. sums: of those
    that sum operands' gradients. division: of keys, where these are divided. descriptors: where kernels read by TMA.
    """

    def __init__(
        self, job: Job, own: OwnPart, measures: Part, sums: SummingPart, *, division: Division | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:  # fmt: skip
        self.job, self.own, self.sums, self.division, self.descriptors = job, own, sums, division, descriptors
        found = own, measures, sums, division, descriptors
        self.parts: Sequence[Part] = [part for part in found if part is not None]
        # gradients have the width of their tensor and not its strides: rows of padded operands start elsewhere there
        made = [f"d{n}" for n in job.operand_names if n not in ("out", "dout")] if job.is_backward else []
        # what TMA cannot read a target turns away before
        self._asks_alignment = descriptors is None or division is not None
        self._aligned = alignment([*job.operand_names, *made], bool(job.signature.dtypes.quantized))
        self._modes: dict[Mode, Prepared] = {}
        self._evaluating: dict[tuple[str, Mode], Callable[[Mapping[str, Any]], Any]] = {}
        self._ways: dict[Mode, Ways] = {}
        self.fast = Ways()  # replaced as kernels are compiled; read at every call, and so no property

    @property
    def code(self) -> CodePlan:
        return self.job.code

    @property
    def device(self) -> Device:
        return self.job.device

    # -- one call ------------------------------------------------------------------------------------------------------
    def partition(self, call: CallTensors, results: Named) -> Partition:
        given = self._given(call, results)
        aligned, row = self._aligned(given) if self._asks_alignment else (True, 0)
        if row >= 2**31 // _MOST_ROWS:
            self._check_rows(row, aligned)
        page = call.key.shape[2] if self.job.sequences.keys.pooled else 0
        mode = Mode(aligned, "q_offset_ptr" in given, results.get("dlse") is None, call.head_dim, page)
        mode = self.own.mode_of(mode, call)
        if self.division is None:
            return Partition(mode=mode)
        parts = self.division.parts_of(call)
        return Partition(parts.parts, mode, parts.tiles)

    def measures(self, partition: Partition) -> dict[str, str]:
        mode = _mode_of(partition)
        return {name: form for part in self.parts for name, form in part.known(mode).items()}

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        mode, given = _mode_of(partition), self._given(call, results, partition)
        return dict(self._evaluated("places", mode, given)(given))

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        mode, results = _mode_of(partition), self.own.readable(results)
        given = {**self._given(call, results, partition), **workspace}
        programs, at_once = 0, 2**31 - 1
        if self.sums.listed_by_pairs():
            programs, at_once = self._evaluated("pairs", mode, given)(given)
        given |= {"first_program": 0, "most_programs": at_once}
        ready = self._modes.get(mode) or self._prepare(mode, given)
        launches = ready.pack(given)
        if self.job.sequences.ragged:
            self.sums.clear(workspace, mode)
        due = self._due(launches, partition)
        if not ready.runs.keys() >= set(due):
            self._compile_these(due, ready, mode, given)
        stream = self.device.stream()
        for n in due:
            ready.runs[n](*launches[n], stream)
        tables = self.sums.tables(call, workspace, mode)
        for first in range(at_once, programs, at_once):
            self._list_more(ready, {**given, "first_program": first}, tables, stream)
        if not self.job.is_backward:
            return []
        self._add_shares(results, workspace)
        return self.sums.finished(call, workspace, tables)

    def _due(self, launches: Sequence[tuple[int, Any]], partition: Partition) -> Sequence[int]:
        """Which kernels a call launches, by number: those with programs, but for what is measured already."""
        if self.device.launches_all:
            return range(len(launches))
        return [
            n
            for n, code in enumerate(self.code.kernels)
            if launches[n][0] and code.name.replace("_long_", "_") not in partition.known  # both leave the same
        ]

    def _list_more(
        self, ready: Prepared, given: Mapping[str, Any], tables: Mapping[int, Tensor], stream: int
    ) -> None:  # fmt: skip
        """Launch the kernel that lists sums of pairs from another program on, and add up what it lists."""
        at = next(n for n, binding in enumerate(ready.bindings) if "first_program" in binding.parameters)
        listed = self.sums.listed_by_pairs()
        for n in listed:  # programs of what is not there list nothing
            given[f"sum{n}"].zero_()
            given[f"entry{n}"].zero_()
        ready.runs[at](*ready.pack(given)[at], stream)
        for n in listed:
            self.device.add_listed(tables[n], given[f"entry{n}"], given[f"sum{n}"])

    def _given(self, call: CallTensors, results: Named, partition: Partition | None = None) -> dict[str, Any]:
        """Every tensor of the call by the name that kernels have for it, and how its work is divided."""
        given: dict[str, Any] = {"query": call.query, "key": call.key, **results, **self.own.given()}
        if self.job.is_backward:  # kernels name what they do not write too
            for name, tensor in call.tensors.items():
                given.setdefault(f"d{name}", tensor)
        if call.value is not None:
            given["value"] = call.value
        if call.rope is not None:
            given |= {f"key{i}": self.job.columns_of(i, call.rope) for i in self.job.own_keys}
            if self.job.is_backward:
                drope = results.get("drope", call.rope)
                given |= {f"dkey{i}": self.job.columns_of(i, drope) for i in self.job.own_keys}
        for name, operand in call.operands.items():
            given[f"arg_{name}"] = operand
        given |= call.sequences.tensors
        given |= call.read or {}
        offset = call.sequences.q_offset
        given["q_offset"] = 0 if isinstance(offset, Tensor) else offset or 0
        if isinstance(offset, Tensor):
            given["q_offset_ptr"] = offset
        if partition is not None and self.division is not None:
            given |= {"n_parts": partition.splits, "least_tiles": partition.least}
        return given

    def _add_shares(self, results: Named, workspace: Named) -> None:
        """Shares of a key that heads have in common are summed."""
        for i in self.job.own_keys:
            share = workspace.get(f"dkey{i}")
            if share is not None and "drope" in results:
                whole = self.job.columns_of(i, results["drope"])
                whole.copy_(share.unflatten(1, (whole.shape[1], -1)).sum(2))

    # -- texts ---------------------------------------------------------------------------------------------------------
    def buffers(self, mode: Mode) -> list[Buffer]:
        """The workspace of calls of a mode."""
        return [buffer for part in self.parts for buffer in part.buffers(mode)]

    def _rows(self, mode: Mode) -> dict[str, str]:
        """The vocabulary of calls of a mode, beyond that of all kernels (binding.py)."""
        job = self.job
        rows = {**job.sequences.vocabulary}
        if job.signature.widths.value_is_key:
            rows["value"] = f"key[..., :{job.signature.widths.value_dim}]"
        for n, rows_of in job.descales.items():
            rows[f"{n}_strides"] = f"spread({n}.shape, {n}.stride())"
            rows[f"{n}_shift"] = f"shift_of({n}.shape[2], {rows_of})"
        if job.is_backward:
            block = job.padding(mode)
            rows["padded_len"] = f"(q_len + {block - 1}) // {block} * {block}"
        for part in self.parts:
            rows |= part.rows(mode)
        return rows

    def _tools(self) -> dict[str, Any]:
        own = {"shift_of": shift_of, "spread": spread} if self.job.descales else {}
        return own | {name: tool for part in self.parts for name, tool in part.tools().items()}

    def _packer(self, mode: Mode, given: Mapping[str, Any], pointers: bool = True) -> Packer:
        """Of the longer way."""
        absent = self._absent(given)
        sources = {n: f"given[{n!r}]" for n in given if n not in absent}
        tensors = [n for n, value in given.items() if isinstance(value, Tensor)]
        return Packer(
            sources, tensors, absent=absent, rows=self._rows(mode), ranks=self.job.ranks, pointers=pointers
        )  # fmt: skip

    def _absent(self, given: Mapping[str, Any]) -> list[str]:
        return [n for n in ("q_offset_ptr", "dlse", *self.job.sequences.pointers) if given.get(n) is None]

    def _evaluated(self, what: str, mode: Mode, given: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
        """The function of what a call is given that finds the places of its workspace, or how pairs are launched."""
        found = self._evaluating.get((what, mode))
        if found is None:
            packer, tools = self._packer(mode, given), {**PLACING, **self._tools()}
            if what == "pairs":
                texts = [*self.sums.programs(mode)]
            else:
                texts = [f"({buffer.name!r}, {place_text(buffer)})" for buffer in self.buffers(mode)]
            found = self._evaluating[what, mode] = evaluating(packer, texts, tools)
        return found

    # -- what is prepared ----------------------------------------------------------------------------------------------
    def _check_rows(self, row: int, aligned: bool) -> None:
        forms = [self.job.form(k.name, aligned) for k in self.code.kernels]
        rows = max(max(f.block_q, f.block_kv) for f in forms)
        if row * rows >= 2**31:
            raise WeftError(
                f"{self.job.facts.attention.name}: expected row strides below {2**31 // rows} elements, got {row}: "
                "copy the operand"
            )

    def _prepare(self, mode: Mode, given: Mapping[str, Any]) -> Prepared:
        found = [self._bound(code, mode) for code in self.code.kernels]
        bindings, options = [binding for binding, _ in found], [own for _, own in found]
        absent = self._absent(given)
        dtypes = {n: str(given[n].dtype).removeprefix("torch.") for n in self.job.sequences.pointers if n not in absent}
        with PARSING:
            typed, pack = (
                packing(self._packer(mode, given, pointers), bindings, self._tools())
                for pointers in (False, not self.device.interprets)
            )
        return self._modes.setdefault(mode, Prepared(bindings, options, absent, dtypes, pack, typed, {}))

    def _bound(self, code: KernelCode, mode: Mode) -> tuple[Binding, Mapping[str, int]]:
        """A kernel with what its arguments are, and the options of its compilation."""
        launch = self._launch_of(code, mode)
        parameters, defaults = self.device.parameters_of(self._function(code.name))
        constants = {**self._common(code, mode), **launch.constants}
        renamed = {**_renamed(code.kernel.axis), **launch.renamed}
        used = {n: constants.get(n, default) for n, default in defaults.items()}
        if missing := [n for n, value in used.items() if value is Parameter.empty]:
            raise InternalError(f"{code.name}: no part of its launcher knows the constants {', '.join(missing)}")
        return Binding(code.name, parameters, launch.programs, used, renamed, launch.only_if), launch.options

    def _launch_of(self, code: KernelCode, mode: Mode) -> KernelLaunch:
        """What the one part says that a kernel belongs to."""
        found = [one for part in self.parts if (one := part.launch(code.kernel, mode)) is not None]
        if len(found) != 1:
            raise InternalError(f"{code.name}: expected one part of the launcher to launch it, got {len(found)}")
        return found[0]

    def _common(self, code: KernelCode, mode: Mode) -> dict[str, object]:
        """Values of the constexpr parameters that mean the same in every kernel."""
        return {
            **self.job.blocks(code.name, mode), "HEAD_BUNCH": HEAD_BUNCH, "ALIGNED": mode.aligned,
            "Q_OFFSET_PER_BATCH": mode.per_row, "BOTTOM_RIGHT": self.job.signature.offset == "bottom_right",
            "HAS_DLSE": not mode.no_dlse, "head_dim": mode.head_dim, "PAGE": mode.page,
            # fp32 operands are multiplied as fp32, as torch does by default, not as TF32
            "DOT_PRECISION": "ieee",
        }  # fmt: skip

    def _function(self, name: str) -> Any:
        return next(getattr(module, name) for module in self.job.modules if hasattr(module, name))

    def _compile_these(self, due: Sequence[int], ready: Prepared, mode: Mode, given: Mapping[str, Any]) -> None:
        """Compile the kernels with these numbers that are not yet."""
        with PARSING:
            missing = [n for n in due if n not in ready.runs]  # another thread may have been here
            typed = ready.typed(given)
            asked = []
            for n in missing:
                binding, (_, arguments) = ready.bindings[n], typed[n]
                types = partial(self._types, binding)
                asked.append(Asked(self._function(binding.name), binding, arguments, types, ready.options[n]))
            ready.runs.update(zip(missing, self.device.compiled(asked)))
            if mode.aligned and self.device.goes_directly and may_go_directly(self.job):
                self._go_directly(mode, ready)  # by the last one here, which finds the kernels of all

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        """Arguments as a compilation takes them: strides of operands have 64 bits where offsets do."""
        types = self.device.types_of(arguments)
        long = [self.job.signature.offsets_64 and OPERAND_STRIDE.fullmatch(name) for name in binding.parameters]
        found = [1 << 40 if is_long else value for value, is_long in zip(types, [*long, *[None] * len(types)])]
        return found if self.descriptors is None else self.descriptors.types(binding, found)

    def _go_directly(self, mode: Mode, ready: Prepared) -> None:
        """The direct way: one function from a call to its results, for operands that fit and are aligned."""
        kept: Any = None if self.descriptors is None else self.descriptors.kept
        way = DirectWay(
            self.job, self.parts, mode, ready, self.buffers(mode), self._rows(mode), self._tools(),
            self.sums.of_list, kept,
        )  # fmt: skip
        self._ways[mode] = way.ways()
        own = [*self._ways.values()] if self.division is not None else [self._ways[mode]]
        self.fast = first_of(own)


def _mode_of(partition: Partition) -> Mode:
    assert isinstance(partition.mode, Mode)
    return partition.mode


def _renamed(axis: str) -> dict[str, str]:
    """Both axes call what was measured for them `spans` or `lists`, both sides the list of their tiles `work`."""
    side = "q" if axis == "kv" else "kv"
    return {
        "spans": f"{axis}_spans", "n_tiles": f"{axis}_measured_tiles", "work": f"{side}_work",
        "n_slots": f"{side}_slots", "lists": f"{axis}_lists", "room": f"{axis}_room", "cells": "pair_cells",
        "ends": f"{axis}_ends",
    }  # fmt: skip
