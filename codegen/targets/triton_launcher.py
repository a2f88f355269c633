"""Launches of Triton kernels: what of a call decides which code runs, the workspace, and the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiler.analysis.distances import ByDistance
from ...compiler.analysis.facts import Facts
from ...compiler.analysis.records import PAIR_KINDS, Axis
from ...compiler.analysis.survey import CELL
from ...compiler.planning import kernels as formulas
from ...compiler.planning.distances import levels_in, tables_in
from ...compiler.planning.forms import Tiling
from ...compiler.planning.kernels import (
    CELLS_TOGETHER,
    DISTANCE_TABLES,
    ENDS,
    FEW,
    LIST_HEAD,
    LIST_ROOM,
    LISTED,
    LISTS,
    LONG_SPANS,
    MEASURES,
    PAIR_CELLS,
    RUNS,
    SPANS,
    STRETCH,
    WORK,
    Kernel,
)
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.signature import MOST_SHORT, PACKED, PAGED
from ...compiler.planning.tables import DDIAGONALS, DPAIRS, MOST_LISTED, Way
from ...compiler.planning.target import CallTensors, Named, Partition, Place
from ...compiler.planning.tilings import FIXED
from ...ir.errors import WeftError
from ...ir.expr import Symbol, TensorOperand
from ...ir.parse import PARSING
from ...ir.walk import loads
from ..binding import OPERAND_STRIDE, Binding, Packer, ShortestWay, alignment, direct, fitting, like, packing, rows_of
from ..repeating import Again, Guard, Pin, repeated
from .triton_workspace import (
    WORK_SIDES,
    add_listed,
    by_sequence,
    cells_of,
    reduced,
    tiles_of,
    ways_in,
    workspace_of,
)

HEAD_BUNCH = 8  # heads whose tiles run together, so that their keys and values are shared in L2
PADDING = 256  # rows of statistics are padded to a multiple of it, and of every BLOCK_Q
ROWS_TOGETHER = 4096  # positions of the other axis that a program that measures tiles looks at together
ENDS_TOGETHER = 8192  # the same of one that writes their ends, which has twice the warps
TILES_TOGETHER = 256  # tiles of the other axis that it looks at together, at most
# Operands that go through registers on their way to SRAM: Triton 3.6 gives wrong results for large tiles on sm_90 (two
# asynchronous products in a row whose right operands come from registers); tiles of 32 rows use plain mma.
UNALIGNED = Tiling(32, 32, 4, 2)

_Q_TILES, _KV_TILES = "(q_len + {BLOCK_Q} - 1) // {BLOCK_Q}", "(kv_len + {BLOCK_KV} - 1) // {BLOCK_KV}"
_PROGRAMS: dict[Callable[..., float], str] = {
    formulas.query_programs: f"{_Q_TILES} * batches * heads",
    formulas.key_programs: f"{_KV_TILES} * batches * kv_heads",
    formulas.pair_programs: f"{_Q_TILES} * ({_KV_TILES}) * batches * heads",
    formulas.head_programs: "batches * heads",
    formulas.kv_head_programs: "batches * kv_heads",
    formulas.diagonal_programs: f"({_Q_TILES} + ({_KV_TILES}) - 1) * batches * heads",
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


_LENGTHS = {"dense": (), "lengths": ("q_lens", "kv_lens"), "packed": ("cu_q", "cu_kv"),
            "paged": ("q_lens", "kv_lens", "table"), "packed_paged": ("cu_q", "kv_lens", "table")}  # fmt: skip
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _nothing_yet(*arguments: object) -> None:
    """The shortest way before something is prepared."""


def _of_records(found: Callable[..., Any], wanted: frozenset[str]) -> Callable[[Any], Any]:
    """The shortest way of a backward, from a BackwardCall to its gradients by name."""

    def direct(b: Any) -> dict[str, Tensor] | None:
        call = b.call
        gradients = found(
            call.query, call.key, call.value, call.operands, call.ragged or call.sequences.q_offset, b.out, b.lse,
            b.dout, b.dlse,
        )  # fmt: skip
        if gradients is None:
            return None
        return {n: g for n, g in zip(("query", "key", "value"), gradients) if n in wanted}

    return direct


@dataclass(frozen=True)
class _Prepared:
    """What is prepared for calls of one mode. A kernel is compiled by the first call that launches it."""

    bindings: Sequence[Binding]
    options: Sequence[Mapping[str, int]]
    absent: Sequence[str]  # tensors that such calls do not have
    pack: Callable[[Mapping[str, Any]], Any]  # makes the arguments of all kernels
    typed: Callable[[Mapping[str, Any]], Any]  # the same with tensors in place of addresses
    runs: dict[int, Any]  # those that are compiled, by number


class TritonLauncher:
    """Launches of the portable kernels of one direction."""

    tools: Mapping[str, object] = MappingProxyType({})  # functions that rows of the vocabulary call
    numbers = frozenset({"lse2", "shift", "delta"})  # of what is made: those that are no tensors

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
        self.direct: Callable[[Any], Any] = _nothing_yet
        self.backward_of: Callable[..., Any] = _nothing_yet  # `direct` of a backward, without the records of its call
        self.repeated: Callable[..., Again | None] = _nothing_yet  # for calls like one that the shortest way took
        self.guard: Guard | None = None  # of tensors; None: no call is known to be like another
        # both made by torch's public functions; quicker ones may take their places
        self.empty: Callable[..., Tensor] = self._empty  # contiguous or not
        self.current_device: Callable[[], int] = torch.cuda.current_device
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
        return {name: f"{name} {form.block_q}x{form.block_kv}" for name, form in forms.items()}

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        return workspace_of(self, call, partition.mode)  # type: ignore[arg-type]

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        given = {**self._given(call, results), **workspace}
        of_pairs = self.pair_programs(call, partition.mode) if DPAIRS in self.ways.kernels else (0, 1)  # type: ignore[arg-type]
        given |= {"first_program": 0, "most_programs": of_pairs[1], **self._divided(partition)}
        ready = self._modes.get(partition.mode) or self._prepare(partition.mode, given)  # type: ignore[arg-type]
        launches = ready.pack(given)
        due = self._due(launches, partition)
        if not ready.runs.keys() >= set(due):
            self._compile_these(due, ready, partition.mode, given)  # type: ignore[arg-type]
        stream = self._stream()
        for n in due:
            ready.runs[n](*launches[n], stream)
        tables = self._tables(call, workspace)
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

    def _list_more(
        self, ready: _Prepared, given: Mapping[str, Any], first: int, tables: Mapping[int, Tensor], stream: int
    ) -> None:
        """Launch flash_dpairs for the programs from this one on, and add up what they list."""
        at = next(n for n, kernel in enumerate(self.code.kernels) if kernel.name == DPAIRS)
        listed = [n for n, way in enumerate(self.ways.of_reads) if way == Way(DPAIRS, "list")]
        for n in listed:  # programs of what is not there list nothing
            given[f"sum{n}"].zero_()
            given[f"entry{n}"].zero_()
        ready.runs[at](*ready.pack({**given, "first_program": first})[at], stream)
        for n in listed:
            self._add_listed(tables[n], given[f"entry{n}"], given[f"sum{n}"])

    def _tables(self, call: CallTensors, workspace: Named) -> dict[int, Tensor]:
        """What the kernels listed, added up in the shape of its operand, by number of the read."""
        tables = {}
        for n, way in enumerate(self.ways.of_reads):
            if way is not None and way.finish == "list":
                tables[n] = torch.zeros(self._shape_of(n, call), device=call.query.device)
                self._add_listed(tables[n], workspace[f"entry{n}"], workspace[f"sum{n}"])
        return tables

    def _add_listed(self, table: Tensor, entries: Tensor, sums: Tensor) -> None:
        add_listed(table, entries, sums)

    def _shape_of(self, n: int, call: CallTensors) -> tuple[int, ...]:
        """Of the operand of a read."""
        operand = call.operands[self.sums[n].load.tensor.name]
        assert isinstance(operand, Tensor)
        return tuple(operand.shape)

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
    def _operand_names(self) -> list[str]:
        """Tensors [B, H, rows, D] whose alignment decides how they are loaded; those that we make are like these."""
        keys = [f"key{i}" for i in self.own_keys]
        value = [] if self.code.signature.widths.value_is_key else ["value"]
        return ["query", "key", *keys, *value, *(["dout", "out"] if self.backward else ["out"])]

    def form(self, kernel: str, aligned: bool) -> Tiling:
        form = self.code.form(kernel)
        assert isinstance(form, Tiling)
        if aligned or kernel in (*FIXED, PAIR_CELLS, DISTANCE_TABLES):
            return form
        return Tiling(UNALIGNED.block_q, UNALIGNED.block_kv, form.num_warps, 1) if kernel in MEASURES else UNALIGNED

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
        absent = [n for n in ("q_offset_ptr", "dlse", *_LENGTHS[self.sequences]) if given.get(n) is None]
        tensors = [n for n, value in given.items() if isinstance(value, Tensor)]
        sources = {n: f"given[{n!r}]" for n in given if n not in absent}
        rows = self._rows(mode.aligned)

        def packer(pointers: bool) -> Packer:
            return Packer(sources, tensors, absent=absent, rows=rows, ranks=self.tensors, pointers=pointers)

        self._length_dtypes = {n: str(given[n].dtype).removeprefix("torch.") for n in _LENGTHS[self.sequences]
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

    def _empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", self.device))

    @property
    def _may_go_directly(self) -> bool:
        return not (
            self.interprets or self.own_keys or self.sums or self.code.schedule.algorithm not in ("flash", "split_kv")
        )

    def _go_directly(self, mode: Mode, ready: _Prepared) -> None:
        """The shortest way: one function from a call to its results, for operands that fit and are aligned."""
        absent = ready.absent
        names = self._given_names()
        operands = "operands" if self.backward else "call.operands"
        record = "offset" if self.backward else "call.sequences"
        lengths = [n for n in _LENGTHS[self.sequences] if n not in absent]
        # of a dense call a backward is handed the offset alone
        offset = record if self.backward and self.sequences == "dense" else f"{record}.q_offset"
        sources = {n: n if self.backward else f"call.{n}" for n in names}
        sources |= {n: f"{operands}[{n.removeprefix('arg_')!r}]" for n in self._operand_arguments()}
        sources |= {n: f"{record}.{n}" for n in lengths}
        sources |= {"q_offset_ptr": offset} if mode.per_row else {"q_offset": offset}
        rows = self._rows(mode.aligned) | ({} if self._has_number(mode) else {"q_offset": "0"})
        made = self._made(mode)
        tensors = {*names, *self.tensors, *made, *lengths, "q_offset_ptr", "counter_ptr"} - self.numbers
        given, returns = "call", "out, lse"
        if self.backward:
            wanted = self.code.signature.wanted
            given = "query, key, value, operands, offset, out, lse, dout, dlse"
            sources |= {f"d{n}": n for n in ("query", "key", "value") if n not in wanted}
            tensors |= {f"d{n}" for n in ("query", "key", "value")}
            block = self.padding(mode)
            rows |= {"padded_len": f"(q_len + {block - 1}) // {block} * {block}"}
            returns = ", ".join(f"d{n}" if n in wanted else "None" for n in ("query", "key", "value"))
        if self.code.signature.share == "short":  # into what the launch of the other module made
            given = "call, out, lse"
            made = {n: text for n, text in made.items() if n not in ("out", "out_strides", "lse")}
            sources |= {"out": "out", "lse": "lse"}
        launching = self._launching
        tools: dict[str, object] = {
            "float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
            "device": self.device,
            "empty": self.empty, "is_heard": launching.is_heard, "current_stream": launching.stream_function(),
            "current_device": self.current_device, "dtype": _DTYPES[self.code.signature.dtype], **self.tools,
        }  # fmt: skip
        packer = Packer(sources, tensors, absent=absent, rows=rows, ranks=self.tensors)
        conditions = self._conditions(mode, lengths)
        launches = [ready.runs[n].shortest if n in ready.runs else None for n in range(len(ready.bindings))]
        way = direct(packer, ready.bindings, launches, given, conditions, made, returns, tools, self._kept)
        found = way.function()
        guarded = {n: sources[n] for n in (*names, *self.tensors, *lengths) if n not in absent}
        guarded |= {"q_offset_ptr": offset} if mode.per_row else {}
        self._repeat(way, guarded, *self._unchanging(mode, record, offset, lengths))
        if not self.backward:
            self.direct = found
        else:
            self.backward_of, self.direct = found, _of_records(found, self.code.signature.wanted)

    def _repeat(
        self, way: ShortestWay, guarded: Mapping[str, str], pins: Sequence[Pin], conditions: Sequence[str]
    ) -> None:
        guard = self.guard
        if guard is None:
            return

        @cache
        def factory() -> Callable[..., Again | None]:
            with PARSING:
                return repeated(way, guarded, pins, conditions, guard)

        self.repeated = lambda *given: factory()(*given)  # made for the first call that repeats

    def _unchanging(
        self, mode: Mode, record: str, offset: str, lengths: Sequence[str]
    ) -> tuple[list[Pin], list[str]]:  # fmt: skip
        """What of a call, beside its tensors, the shortest way was chosen for, and conditions on what it lacks.

        A backward is asked after a forward of its kind, which settles what stands in the call alone.
        """
        pins, conditions = [], []
        if not self.backward:
            pins = [Pin("options", "call.options"), Pin("width", "call.head_dim", "==")]
            conditions = ["call.rope is None"]
            conditions += ["call.value is None"] if self.code.signature.widths.value_is_key else []
        elif mode.no_dlse:
            conditions = ["dlse is None"]
        if not self.backward or self.sequences != "dense":
            pins += [Pin("sequences", f"type({record})")]
            conditions += [f"{record}.{n} is None" for n in _LENGTHS[self.sequences] if n not in lengths]
        if self._has_number(mode):
            pins += [Pin("offset_type", f"type({offset})"), Pin("q_offset", offset, "==")]
        elif not mode.per_row and self.sequences != "dense":
            conditions += [f"{offset} is None"]
        operands = "operands" if self.backward else "call.operands"
        for parameter in self.facts.attention.parameters:
            given_operand = f"{operands}[{parameter.name!r}]"
            if not isinstance(parameter, TensorOperand):
                pins += [Pin(f"type_of_{parameter.name}", f"type({given_operand})")]
            elif parameter.rank > 1:  # boxes of it are brought where it begins at 16 bytes
                pins += [Pin(f"bits_of_{parameter.name}", f"{given_operand}.data_ptr() & 15", "==", of_address=True)]
        return pins, conditions

    def _kept(self, parameter: str, meta: Mapping[str, Any]) -> tuple[str, Mapping[Any, Sequence[object]]]:
        """For a tensor descriptor of a launch: an expression, and what the launch is handed by its value."""
        found = self._described()[parameter]
        return found.key, self._launching.Descriptors(self._launching.encoder(meta), found.places)

    def _described(self) -> dict[str, Any]:
        """Of which tensors the kernels take descriptors, by name of the parameter."""
        return {}

    def _given_names(self) -> list[str]:
        """The tensors [B, H, rows, D], and the statistics of rows, that `direct` is handed."""
        names = [n for n in self._operand_names() if n not in ("out", "dout")]
        return [*names, "out", "lse", "dout", "dlse"] if self.backward else names

    def _operand_arguments(self) -> list[str]:
        return [f"arg_{p.name}" for p in self.facts.attention.parameters]

    def _has_number(self, mode: Mode) -> bool:
        """Whether kernels take q_offset as a number of the call."""
        return not mode.per_row and self.code.signature.offset != "bottom_right"

    def _conditions(self, mode: Mode, lengths: Sequence[str]) -> list[str]:
        """What must hold for `direct`, beyond what is prepared for: shapes that fit, and alignment."""
        given = [n for n in self._given_names() if n not in ("lse", "dlse")]
        conditions = ["not is_heard()", "current_device() == device"]
        conditions += fitting(self.code.signature.widths.value_is_key, self.sequences in PAGED)
        if self.sequences in PAGED:
            conditions += [f"kv_len == {mode.page}"]
        if self.backward:
            conditions += self._backward_conditions(mode, given, lengths)
        if self.sequences in PACKED:
            of_keys = [f"{n}.shape[0] == n_sequences" for n in lengths if n in ("kv_lens", "table")]
            conditions += ["batches == 1", "n_sequences > 0", *(of_keys or ["cu_kv.shape[0] == n_sequences + 1"])]
        else:
            conditions += [f"{n}.shape[0] == batches" for n in lengths]
        if mode.per_row:
            conditions += [f"q_offset_ptr.shape[0] == {'n_sequences' if self.sequences in PACKED else 'batches'}"]
        elif self._has_number(mode):
            conditions += [f"-{2**30} < q_offset < {2**30}"]
        conditions += [" == ".join([*(f"{n}_sd" for n in given), "1"])]
        strides = " | ".join(f"{n}_s{axis}" for n in given for axis in "bhl")
        addresses = " | ".join(f"at_{n}" for n in given)
        size = _DTYPES[self.code.signature.dtype].itemsize
        conditions += [f"({addresses}) & 15 == 0", f"({strides}) * {size} & 15 == 0"]
        conditions += [f"({' | '.join(f'{n}_sl' for n in given)}) < {2**31 // 512}"]
        return conditions

    def _backward_conditions(self, mode: Mode, given: Sequence[str], lengths: Sequence[str]) -> list[str]:
        """What autograd hands over may have gone through hooks of the user: it is what was prepared for, too."""
        statistics = ["lse", *(() if mode.no_dlse else ("dlse",))]
        conditions = [
            " == ".join([*(f"{n}.dtype" for n in given), "dtype"]),
            " == ".join([*(f"{n}.get_device()" for n in (*given, *statistics)), "device"]),
            f"not ({' or '.join(f'{n}.is_neg()' for n in (*given, *statistics))})",
            "out.shape == dout.shape == (batches, heads, q_len, value_dim)",
        ]
        for name in statistics:
            conditions += [f"{name}.dtype == float32", f"{name}.shape == {self._statistics_shape}"]
            conditions += [f"{name}.is_contiguous()"]
        if mode.per_row:
            conditions += ["q_offset_ptr.dtype == int32", "q_offset_ptr.get_device() == device"]
            conditions += ["q_offset_ptr.is_contiguous()"]
        for name in lengths:
            dtype = self._length_dtypes[name]
            conditions += [f"{name}.dtype == {dtype}", f"{name}.get_device() == device", f"{name}.is_contiguous()"]
        return conditions

    def _made(self, mode: Mode) -> dict[str, str]:
        """Results and workspace, as expressions that make them."""
        made = self._made_measures(mode)
        if not self.backward:
            width = str(self.code.signature.widths.value_dim)
            made |= like("out", "query", "heads", "q_len", width)
            return made | {
                "lse": rows_of(*(["2"] if self.shifts else []), "batches", "heads", "q_len", dtype="float32")
            }
        made |= self._made_gradients()
        if not self.saves_lse:
            return made
        # all in one allocation, which takes the host longer than addresses
        names = ("lse2", *(("shift",) if self.shifts else ()), "delta")
        made |= {"statistics": rows_of(str(len(names)), "batches", "heads", "padded_len", dtype="float32")}
        size = "4 * batches * heads * padded_len"
        places = [f"lse2 + {n} * {size}" if n else "statistics.data_ptr()" for n in range(len(names))]
        return made | dict(zip(names, places))

    def _made_gradients(self) -> dict[str, str]:
        shapes = {"query": ("heads", "q_len", "q_dim"), "key": ("kv_heads", "kv_len", "key_dim"),
                  "value": ("kv_heads", "kv_len", "value_dim")}  # fmt: skip
        wanted = {n: like(f"d{n}", n, *shape) for n, shape in shapes.items() if n in self.code.signature.wanted}
        return {name: made for places in wanted.values() for name, made in places.items()}

    @property
    def saves_lse(self) -> bool:
        return self.facts.attention.weighs.saves_lse

    def padding(self, mode: Mode) -> int:
        """What the rows of statistics are padded to a multiple of."""
        return max(PADDING, *(self.form(k.name, mode.aligned).block_q for k in self.code.kernels))

    def _made_measures(self, mode: Mode) -> dict[str, str]:
        """Lists of the tiles of packed sequences, and what is measured of tiles, as expressions."""
        rows = "batches * heads" if self.facts.mask_differs_by_head else "batches"
        programs = (("kv", self.facts.kv_tiles), ("q", self.facts.q_tiles))
        made = {f"distances{n}": rows_of(*self._table_heads(t), "1", "n_distances", dtype="float32")
                for n, t in enumerate(self.tables)}  # fmt: skip
        made |= {f"{s}_work": rows_of(f"{s}_slots", "2", dtype="int32") for n, s in WORK_SIDES if self.code.has(n)}
        tiles = {"kv": "q_slots", "q": "kv_slots"} if self.sequences == "packed" else {}
        if self.code.has(PAIR_CELLS):
            cells = [f"(({length} + {CELL - 1}) // {CELL})" for length in ("q_len", self._kv_rows)]
            made[PAIR_CELLS] = rows_of(rows, *cells, dtype="uint8")
        for axis, program in programs:
            own = tiles.get(axis, f"{axis}_measured_tiles")
            if self.code.has(f"{axis}_spans"):
                made[f"{axis}_spans"] = rows_of(rows, own, str(len(program.outputs)), dtype="int32")
            if self.code.has(f"{axis}_lists"):
                made[f"{axis}_lists"] = rows_of(rows, own, f"({LIST_HEAD} + {axis}_room)", dtype="int32")
        return made | self._made_ends(mode)

    def _made_ends(self, mode: Mode) -> dict[str, str]:
        """Ends of tiles and stretches, as expressions; where none are written, in place of them what is there."""
        made = {}
        for kernel in self.code.kernels:
            if kernel.name in ENDS:
                axis, block = kernel.kernel.axis, self.rows_of_tiles(kernel.kernel.axis, mode.aligned)
                places = f"({self._places(axis, str(block))} + {self._places(axis, f'{STRETCH} * {block}')})"
                ends = rows_of(self._mask_rows, str(2 * self.measured_values(axis)), places, dtype="int64")
                made[kernel.name] = f"{ends} if {self._launched_if(kernel.kernel)} else {axis}_spans"
        return made

    def measured_values(self, axis: Axis) -> int:
        """Values of an axis whose least and greatest are measured: not positions, which tiles have by themselves."""
        found = self.facts.traits.measured
        assert found is not None
        return found.kv_values if axis == "kv" else found.q_values

    def rows_of_tiles(self, axis: Axis, aligned: bool) -> int:
        """Rows of the tiles of an axis whose ends are written."""
        form = self.form(f"{axis}_ends", aligned)
        return form.block_kv if axis == "kv" else form.block_q

    @staticmethod
    def _table_heads(table: ByDistance) -> tuple[str, str]:
        """Batch rows and heads that a table by distance has, as expressions."""
        return "batches" if table.by_batch else "1", "heads" if table.by_head else "1"

    def beyond(self, aligned: bool) -> int:
        """Distances that tables have at either end for tiles that lie over the ends of a call."""
        forms = [self.form(k.name, aligned) for k in self.code.kernels if k.name != DISTANCE_TABLES]
        return max(max(f.block_q, f.block_kv) for f in forms)

    def _table_rows(self, aligned: bool) -> dict[str, str]:
        """Which distances tables have: all of a call; of sequences with lengths all that any may have."""
        if not self.tables:
            return {}
        beyond = self.beyond(aligned)
        ends = "1 - q_len" if self.code.signature.offset == "bottom_right" else f"q_offset - {self._kv_rows} + 1"
        rows = {"first_distance": f"{ends} - {beyond}", "n_distances": f"q_len + {self._kv_rows} - 1 + {2 * beyond}"}
        values = [table.value for table in self.tables]
        if self.levels is not None:
            values += self.levels.indices
            block = self.form(DDIAGONALS, aligned).block_q
            listed = self._programs(
                next(k.kernel for k in self.code.kernels if k.name == DDIAGONALS), {"BLOCK_Q": block, "BLOCK_KV": block}
            )
            rows |= {"beyond": str(beyond), "level_list": f"{listed} * {2 * block}"}
            rows |= {f"n_entries{n}": f"arg_{g.load.tensor.name}.numel()" for n, g in enumerate(self.sums)}
        read = {load.tensor for value in values for load in loads(value)}
        return rows | {f"last{d}_{t.name}": f"arg_{t.name}.shape[{d}] - 1" for t in read for d in range(t.rank)}

    def _options(self, form: Any) -> dict[str, int]:
        return {"num_warps": form.num_warps, "num_stages": form.num_stages, **self._rounding()}

    def _limits(self, kernel: Kernel, form: Any, mode: Mode) -> dict[str, int]:
        """Options that hold a kernel's registers to what its programs have room for."""
        return {}

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
            "DOT_PRECISION": "ieee",
        }  # fmt: skip

    @property
    def _kv_rows(self) -> str:
        """Keys that a call has room for, as an expression: the key of a paged one has rows of blocks."""
        return "kv_extent" if self.sequences in PAGED else "kv_len"

    def _looking(self, kernel: Kernel, form: Tiling) -> dict[str, object]:
        """How a kernel that measures tiles looks at them: how many together, and how many blocks of pairs of each."""
        rows = form.block_kv if kernel.axis == "kv" else form.block_q
        if kernel.name in RUNS:
            if kernel.name in ENDS:
                return {"TILES": min(max(1, ENDS_TOGETHER // rows), STRETCH), "STRETCH": STRETCH}
            return {"TILES": max(1, ROWS_TOGETHER // rows), "STRETCH": STRETCH}
        if kernel.name not in (*LISTS, PAIR_CELLS):
            return {}
        found = self.facts.survey
        assert found is not None
        own: dict[str, object] = {
            "TOGETHER": CELLS_TOGETHER,
            "Q_CELLS": max(1, form.block_q // CELL), "KV_CELLS": max(1, form.block_kv // CELL),
        }  # fmt: skip
        numbers = [max(1, form.block_q // CELL) * max(1, form.block_kv // CELL)]
        for n, cells in enumerate(found.cells):
            q, kv = cells_of(form.block_q, cells.q, False), cells_of(form.block_kv, cells.kv, True)
            own |= {f"Q_CELLS{n}": q, f"KV_CELLS{n}": kv}
            numbers.append(q * kv)
        values = found.kv_values if kernel.axis == "kv" else found.q_values
        numbers += [rows] if any(not isinstance(value, Symbol) for value in values) else []
        return {**own, "TILES": max(1, min(TILES_TOGETHER, ROWS_TOGETHER // max(numbers)))}

    def pair_programs(self, call: CallTensors, mode: Mode) -> tuple[int, int]:
        """Programs of flash_dpairs of a call, and how many are launched at once, which bounds what they list."""
        form = self.form(DPAIRS, mode.aligned)
        batches, heads, q_len, _ = call.query.shape
        kv_heads, kv_len = call.key.shape[1:3]
        over = self.ways.over
        shares = (1 if "batch" in over else batches) * (1 if "head" in over else kv_heads if "group" in over else heads)
        programs = tiles_of(q_len, form.block_q) * tiles_of(kv_len, form.block_kv) * shares
        if Way(DPAIRS, "list") not in self.ways.of_reads:
            return programs, programs
        return programs, min(programs, max(1, MOST_LISTED // (form.block_q * form.block_kv)))

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name == "row_statistics":
            text = "padded_len // {BLOCK_Q} * batches * heads"
        elif kernel.name == DPAIRS:
            over = self.ways.over
            shares = ([] if "batch" in over else ["batches"]) + (
                [] if "head" in over else ["kv_heads" if "group" in over else "heads"]
            )
            text = f"min({' * '.join([_Q_TILES, f'({_KV_TILES})', *shares])} - first_program, most_programs)"
        elif kernel.name == DDIAGONALS and self.sequences == "packed":
            text = "(q_len // {BLOCK_Q} + kv_len // {BLOCK_KV} + 2 * n_sequences + 2) * heads"
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

    def _measuring_programs(self, kernel: Kernel) -> str:
        """Of a kernel that measures tiles: one for each tile that visits, or for each stretch of visited ones."""
        if kernel.name in ENDS:
            tiles = self._places(kernel.axis, f"{STRETCH} * {{BLOCK_{kernel.axis.upper()}}}")
        elif self.sequences == "packed":
            tiles = "q_slots" if kernel.axis == "kv" else "kv_slots"
        else:
            tiles = _Q_TILES if kernel.axis == "kv" else _KV_TILES
        text = f"{tiles} * {self._mask_rows}"
        if kernel.name == PAIR_CELLS:
            others = _KV_TILES.replace("kv_len", self._kv_rows)
            text = f"{text} * (({others} + {CELLS_TOGETHER - 1}) // {CELLS_TOGETHER})"
        return f"{text} * ({self._launched_if(kernel)})" if kernel.name in RUNS else text

    def _launched_if(self, kernel: Kernel) -> str:
        """When a kernel of this module has something to do, over names of the vocabulary; "" for always."""
        if kernel.name not in RUNS:
            return ""
        return f"{self._extent(kernel.axis)} {'<=' if kernel.name in SPANS else '>'} {FEW}"

    def _extent(self, axis: Axis) -> str:
        """Positions of an axis that a call has room for, as an expression."""
        return self._kv_rows if axis == "kv" else "q_len"

    @property
    def _mask_rows(self) -> str:
        """For how many rows of heads a mask is measured, as an expression."""
        heads = ["heads"] if self.facts.mask_differs_by_head else []
        return " * ".join([*([] if self.sequences == "packed" else ["batches"]), *heads]) or "1"

    def _places(self, axis: Axis, block: str) -> str:
        """Places of tiles of `block` positions, as an expression: a packed sequence begins one of its own."""
        if self.sequences == "packed":
            return f"({self._extent(axis)} // ({block}) + n_sequences + 1)"
        return f"(({self._extent(axis)} + ({block}) - 1) // ({block}))"

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
        for axis, own, others in (("kv", _Q_TILES, _KV_TILES), ("q", _KV_TILES, _Q_TILES)):
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
                number = f"min(n_sequences, q_len // {MOST_SHORT + 1})" if self._lists_long else "n_sequences"
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
        return rows // block + (min(number, rows // (MOST_SHORT + 1)) if self._lists_long else number) + 1

    @property
    def _lists_long(self) -> bool:
        """Whether lists have the tiles of long sequences alone."""
        return self.code.signature.share == "long"

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
