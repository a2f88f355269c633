"""The direct way of a call, and that of calls that repeat: one function from a call to its results.

It is made of texts: what a call brings, what must hold of it, results and workspace as expressions that make them, and
the launches. `binding.direct` puts them together; `repeating` divides them for calls that are like one before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ....compiler.planning.buffer import Buffer
from ....compiler.planning.dtypes import dtype_named
from ....compiler.planning.kernel import DESCALES
from ....ir.expr import TensorOperand
from ....ir.parse import PARSING
from ..binding import SHAPES, Binding, Kept, Packer, Texts, WayText, direct, fitting, like
from ..buffers import ALLOCATING, ROOMS, apart, in_rooms, rows_of, strides_of
from ..finish import Finish, as_read, finishes, typed
from ..job import Job, Mode, Part
from ..scaled import OF_TILES
from .repeating import Pin, repeated
from .ways import Again, Guard, Ways, nothing_yet

_LISTED = re.compile(r"\b(?:sum|entry|range)\d+")
_WHERE = "call.sequences"
_OF_BACKWARD = ("out", "lse", "dout", "dlse")
_AT_ZERO = {"number": "q_offset == 0", "bottom_right": "q_len == kv_len", "per_row": "False"}


@dataclass(frozen=True)
class Prepared:
    """What is prepared for calls of one mode. A kernel is compiled by the first call that launches it."""

    bindings: Sequence[Binding]
    options: Sequence[Mapping[str, int]]
    absent: Sequence[str]  # tensors that such calls do not have
    dtypes: Mapping[str, str]  # of lengths, by name
    pack: Callable[[Mapping[str, Any]], Any]  # makes the arguments of all kernels
    typed: Callable[[Mapping[str, Any]], Any]  # the same with tensors in place of addresses
    runs: dict[int, Any]  # those that are compiled, by number


def finishes_of(job: Job) -> dict[str, Finish] | None:
    """How gradients of operands end, by name of the operand; None where that takes the longer way."""
    if job.gradients and not job.sequences.alike:
        return None
    return finishes(job.gradients, job.ways, _AT_ZERO[job.signature.offset])


def may_go_directly(job: Job) -> bool:
    """Whether calls of such kernels may take a direct way at all."""
    usual = job.algorithm in ("flash", "split_kv") and job.signature.options <= DESCALES
    # a rotary key of its own is one tensor there; heads' shares of its gradient are summed by the longer way
    usual = usual and len(job.own_keys) <= (0 if job.is_backward else 1)
    return usual and job.sequences.in_order and finishes_of(job) is not None


@dataclass(frozen=True)
class DirectWay:
    """The direct way of calls of one mode, for operands that fit and are aligned."""

    job: Job
    parts: Sequence[Part]
    mode: Mode
    ready: Prepared
    buffers: Sequence[Buffer]
    rows: Mapping[str, str]  # of the vocabulary
    tools: Mapping[str, object]  # functions that rows call
    of_list: Callable[..., Tensor]  # what flash_ddiagonals listed, in the shape of its operand
    kept: Kept  # of tensor descriptors

    def ways(self) -> Ways:
        way, job = self._way(), self.job
        growing: Callable[[Any], Again | None] = nothing_yet
        if not job.is_backward and not (job.sequences.keys.packed or job.sequences.keys.pooled):
            sizes = {"key": "kv_len", "value": "value_len"}
            free = {n: SHAPES[n].index(size) for n, size in sizes.items() if n in job.given_names}
            free |= dict.fromkeys([*job.signature.scaled_rows, *self._rotary], 2)
            growing = self._factory(way, free)
        return Ways(way.function(), like=self._factory(way), growing=growing)

    def _way(self) -> WayText:
        packer = Packer(
            self._sources, self._tensors, absent=self.ready.absent, rows=self._vocabulary, ranks=self.job.ranks
        )
        runs = self.ready.runs
        launches = [runs[n].shortest if n in runs else None for n in range(len(self.ready.bindings))]
        opening = ["call = b.call"] if self.job.is_backward else []
        texts = Texts(self._given, opening, self._conditions(), self._made, self._returns)
        return direct(packer, self.ready.bindings, launches, texts, self._tools(), self.kept)

    def _factory(
        self, way: WayText, free: Mapping[str, int] = MappingProxyType({})
    ) -> Callable[..., Again | None]:  # fmt: skip
        guard = self.job.device.guard
        if guard is None:
            return nothing_yet
        pins, asked = self._pins()
        if free:
            pins = [pin for pin in pins if pin.name != "q_offset"]  # of a query at the end it follows from the keys
        guarded = {n: self._sources[n] for n in self._guarded}
        return _repeating(way, guarded, pins, asked, guard, free)

    # -- what a call brings --------------------------------------------------------------------------------------------
    @property
    def _given(self) -> str:
        """Parameters of the function."""
        if self.job.is_backward:
            return "b"
        # short sequences go into what the launch of the other module made
        return "call, out, lse" if self._adds_to_results else "call"

    @property
    def _adds_to_results(self) -> bool:
        return self.job.signature.serves == "short"

    @property
    def _lengths(self) -> list[str]:
        return [n for n in self.job.sequences.pointers if n not in self.ready.absent]

    @cached_property
    def _sources(self) -> dict[str, str]:
        """What a call hands over, as expressions by name."""
        job = self.job
        found = {n: f"b.{n}" if n in _OF_BACKWARD else f"call.{n}" for n in job.given_names}
        found |= dict.fromkeys(self._rotary, "call.rope")
        found |= {n: f"call.operands[{n.removeprefix('arg_')!r}]" for n in job.arguments}
        found |= {n: f"{_WHERE}.{n}" for n in self._lengths}
        found |= {n: f"call.read[{n!r}]" for n in job.descales}
        found |= {"q_offset_ptr" if self.mode.per_row else "q_offset": f"{_WHERE}.q_offset"}
        if job.is_backward:  # kernels name what they do not write too
            found |= {f"d{n}": f"call.{n}" for n in ("query", "key", "value") if n not in job.signature.wanted}
        if self._adds_to_results:
            found |= {"out": "out", "lse": "lse"}
        return found

    @property
    def _rotary(self) -> list[str]:
        """The rotary key, where it is a tensor of its own."""
        return [f"key{i}" for i in self.job.own_keys]

    @property
    def _guarded(self) -> list[str]:
        """Tensors that a call brings."""
        names = [*self.job.given_names, *self.job.ranks, *self._lengths, *self.job.descales]
        found = [n for n in names if n not in self.ready.absent]
        return [*found, "q_offset_ptr"] if self.mode.per_row else found

    @property
    def _has_number(self) -> bool:
        """Whether kernels take q_offset as a number of the call."""
        return self.job.has_number and not self.mode.per_row

    @property
    def _tensors(self) -> set[str]:
        """Names of tensors: others are numbers or addresses."""
        made = {"out", "lse", "q_offset_ptr", "counter_ptr", *ROOMS, *(f"d{n}" for n in ("query", "key", "value"))}
        return made | {*self._guarded} | {b.name for b in self.buffers if b.name in self._are_tensors}

    # -- what is made --------------------------------------------------------------------------------------------------
    @cached_property
    def _finishes(self) -> dict[str, Finish]:
        return finishes_of(self.job) or {}

    @cached_property
    def _are_tensors(self) -> frozenset[str]:
        """Buffers that torch reads, too."""
        return frozenset(name for finish in self._finishes.values() for name in _LISTED.findall(finish.text))

    @property
    def _made(self) -> dict[str, str]:
        """Results and workspace, as expressions that make them."""
        made = self._gradients() if self.job.is_backward else self._results()
        for buffer in self.buffers:
            made |= apart(buffer) if buffer.name in self._are_tensors else {}
        return made | in_rooms([b for b in self.buffers if b.name not in self._are_tensors])

    def _results(self) -> dict[str, str]:
        if self._adds_to_results:
            return {}
        pair = ["2"] if self.job.shifts else []
        lse = rows_of(*pair, "batches", "heads", "q_len", dtype="float32")
        return {**like("out", "query", "heads", "q_len", str(self.job.signature.widths.value_dim)), "lse": lse}

    def _gradients(self) -> dict[str, str]:
        shapes = {"query": ("heads", "q_len", "q_dim"), "key": ("kv_heads", "kv_len", "key_dim"),
                  "value": ("kv_heads", "kv_len", "value_dim")}  # fmt: skip
        wanted = [like(f"d{n}", n, *shape) for n, shape in shapes.items() if n in self.job.signature.wanted]
        return {name: made for places in wanted for name, made in places.items()}

    @property
    def _returns(self) -> str:
        if not self.job.is_backward:
            return "out, lse"
        found = {n: f"d{n}" for n in ("query", "key", "value")} | {n: f.text for n, f in self._finishes.items()}
        wanted = self.job.signature.wanted
        return ", ".join(found[n] if n in wanted else "None" for n in self.job.gradient_names)

    @property
    def _vocabulary(self) -> dict[str, str]:
        found = {**self.rows} if self._has_number else {**self.rows, "q_offset": "0"}
        for part in self.parts:
            found |= part.found_by_call(self.mode)
        for buffer in self.buffers:
            if buffer.name not in self._are_tensors:
                found |= {f"at_{buffer.name}": buffer.name, f"{buffer.name}_strides": strides_of(buffer)}
        return found | {"counter_ptr": "counter(device)"}

    def _tools(self) -> dict[str, object]:
        dtype = dtype_named(self.job.signature.dtypes.out).torch
        own = {"dtype": dtype, "typed": typed, "as_read": as_read, "of_list": partial(self.of_list, self.mode)}
        return {**ALLOCATING, **own, **self.job.device.tools(), **self.tools}

    # -- what must hold ------------------------------------------------------------------------------------------------
    def _conditions(self) -> list[str]:
        """Beyond what is prepared for: shapes that fit, and alignment."""
        job, found = self.job, ["not is_heard()", "current_device() == device"]
        found += fitting(job.signature.widths.value_is_key, job.sequences.keys, self._rotary)
        if job.sequences.keys.pooled:
            found += [f"kv_len == {self.mode.page}"]
        if job.is_backward:
            found += self._of_backward()
        found += [*self._of_sequences(), *self._of_memory()]
        found += [f"{n}.shape[2] > 1" for n in sorted(job.signature.scaled_rows)]
        found += [f"{n}_shift == {OF_TILES}" for n in sorted(job.signature.scaled_tiles)]
        for part in self.parts:
            found += part.conditions(self.mode)
        return found + [text for finish in self._finishes.values() for text in finish.conditions]

    @property
    def _aligned(self) -> list[str]:
        """Tensors [B, H, rows, D] that a call brings."""
        return [n for n in self.job.given_names if n not in ("lse", "dlse")]

    def _of_sequences(self) -> list[str]:
        sequences = self.job.sequences
        found = sequences.conditions(self._lengths)
        if self.mode.per_row:
            found += [f"q_offset_ptr.shape[0] == {sequences.number}"]
        elif self._has_number:
            found += [f"-{2**30} < q_offset < {2**30}"]
        return found

    def _of_memory(self) -> list[str]:
        placed = {name for part in self.parts for name in part.placed()}
        names = [n for n in self._aligned if n not in placed]
        strides = " | ".join(f"{n}_s{axis}" for n in names for axis in "bhl")
        addresses = " | ".join(f"at_{n}" for n in names)
        size = dtype_named(self.job.signature.dtypes.smallest).bytes
        return [
            " == ".join([*(f"{n}_sd" for n in names), "1"]),
            *(f"at_{n}" for n in names),  # a tensor without memory is told of where there is time
            f"({addresses}) & 15 == 0",
            f"({strides}) * {size} & 15 == 0",
            f"({' | '.join(f'{n}_sl' for n in names)}) < {2**31 // 512}",
        ]

    def _of_backward(self) -> list[str]:
        """What autograd hands over may have gone through hooks of the user: it is what was prepared for, too."""
        names, statistics = self._aligned, ["lse", *(() if self.mode.no_dlse else ("dlse",))]
        found = [
            " == ".join([*(f"{n}.dtype" for n in names), "dtype"]),
            " == ".join([*(f"{n}.get_device()" for n in (*names, *statistics)), "device"]),
            f"not ({' or '.join(f'{n}.is_neg()' for n in (*names, *statistics))})",
            "out.shape == dout.shape == (batches, heads, q_len, value_dim)",
        ]
        shape = f"({'2, ' if self.job.shifts else ''}batches, heads, q_len)"
        for name in statistics:
            found += [f"{name}.dtype == float32", f"{name}.shape == {shape}", f"{name}.is_contiguous()"]
        dtypes = {**({"q_offset_ptr": "int32"} if self.mode.per_row else {}), **self.ready.dtypes}
        for name, dtype in dtypes.items():
            found += [f"{name}.dtype == {dtype}", f"{name}.get_device() == device", f"{name}.is_contiguous()"]
        return found

    # -- what calls that repeat have in common -------------------------------------------------------------------------
    def _pins(self) -> tuple[list[Pin], list[str]]:
        """What of a call, beside its tensors, the direct way was chosen for, and conditions on what it lacks.

        A backward is asked after a forward of its kind, which settles what stands in the call alone.
        """
        job, pins, conditions = self.job, [], []
        if not job.is_backward:
            pins = [Pin("options", "call.choices"), Pin("width", "call.head_dim", "==")]
            read = f"call.read is not None and call.read.keys() == {set(job.descales)!r}" if job.descales else ""
            conditions = [*([] if job.own_keys else ["call.rope is None"]), read or "call.read is None"]
            conditions += ["call.value is None"] if job.signature.widths.value_is_key else []
        elif self.mode.no_dlse:
            conditions = ["b.dlse is None"]
        if not job.is_backward or job.sequences.ragged:
            pins += [Pin("sequences", f"type({_WHERE})")]
            conditions += [f"{_WHERE}.{n} is None" for n in job.sequences.pointers if n not in self._lengths]
        if self._has_number:
            pins += [Pin("offset_type", f"type({_WHERE}.q_offset)"), Pin("q_offset", f"{_WHERE}.q_offset", "==")]
        elif not self.mode.per_row and job.sequences.ragged:
            conditions += [f"{_WHERE}.q_offset is None"]
        return [*pins, *self._pins_of_operands()], conditions

    def _pins_of_operands(self) -> list[Pin]:
        pins = []
        for parameter in self.job.facts.attention.canonical.parameters:
            given = f"call.operands[{parameter.name!r}]"
            if not isinstance(parameter, TensorOperand):
                pins += [Pin(f"type_of_{parameter.name}", f"type({given})")]
            elif parameter.rank > 1:  # boxes of it are brought where it begins at 16 bytes
                pins += [Pin(f"bits_of_{parameter.name}", f"{given}.data_ptr() & 15", "==", of_address=True)]
        return pins


def _repeating(
    way: WayText, guarded: Mapping[str, str], pins: Sequence[Pin], conditions: Sequence[str], guard: Guard,
    free: Mapping[str, int],
) -> Callable[..., Again | None]:  # fmt: skip
    """What is made for the first call that repeats."""

    @cache
    def factory() -> Callable[..., Again | None]:
        with PARSING:
            return repeated(way, guarded, pins, conditions, guard, free)

    return lambda given: factory()(given)
