"""The shortest way of a call to a Triton kernel, and that of calls that repeat: one function from call to results."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compiler.analysis.measured import LIST_HEAD
from ...compiler.analysis.survey import CELL
from ...compiler.planning.signature import PACKED, PAGED
from ...compiler.planning.target import Place
from ...ir.expr import TensorOperand
from ...ir.parse import PARSING
from ..binding import SHAPES, Packer, ShortestWay, direct, fitting, like, rows_of
from ..repeating import Again, Guard, Pin, repeated
from .triton.kernels.measures import ENDS, PAIR_CELLS, STRETCH, span_width
from .triton_finish import DTYPES, Finish, as_read, finishes, places_of, typed
from .triton_sums import SummingLauncher
from .triton_workspace import WORK_SIDES

if TYPE_CHECKING:
    from .triton_launcher import Mode, _Prepared

PADDING = 256  # rows of statistics are padded to a multiple of it, and of every BLOCK_Q
LENGTHS = {"dense": (), "lengths": ("q_lens", "kv_lens"), "packed": ("cu_q", "cu_kv"),
            "paged": ("q_lens", "kv_lens", "table"), "packed_paged": ("cu_q", "kv_lens", "table")}  # fmt: skip
_LISTED = re.compile(r"\b(?:sum|entry|range)\d+")
_AT_ZERO = {"number": "q_offset == 0", "bottom_right": "q_len == kv_len", "per_row": "False"}


def nothing_yet(*arguments: object) -> None:
    """The shortest way before something is prepared."""


def _of_records(found: Callable[..., Any], names: Sequence[str], wanted: frozenset[str]) -> Callable[[Any], Any]:
    """The shortest way of a backward, from a BackwardCall to its gradients by name."""

    def direct(b: Any) -> dict[str, Tensor] | None:
        call = b.call
        gradients = found(
            call.query, call.key, call.value, call.operands, call.ragged or call.sequences.q_offset, b.out, b.lse,
            b.dout, b.dlse,
        )  # fmt: skip
        if gradients is None:
            return None
        return {n: g for n, g in zip(names, gradients) if n in wanted}

    return direct


class DirectLauncher(SummingLauncher):
    """What a launcher of Triton kernels prepares for operands that fit and are aligned."""

    tools: Mapping[str, object] = MappingProxyType({})  # functions that rows of the vocabulary call
    numbers = frozenset({"lse2", "shift", "delta"})  # of what is made: those that are no tensors
    device: int
    interprets: bool
    backward: bool
    own_keys: list[int]
    tensors: dict[str, int]  # ranks of tensor operands
    shifts: bool
    direct: Callable[[Any], Any]
    backward_of: Callable[..., Any]  # `direct` of a backward, without the records of its call
    repeated: Callable[..., Again | None]  # for calls like one that the shortest way took
    growing: Callable[..., Again | None]  # for those that have other numbers of keys, too
    guard: Guard | None  # of tensors; None: no call is known to be like another
    # both made by torch's public functions; quicker ones may take their places
    empty: Callable[..., Tensor]  # contiguous or not
    current_device: Callable[[], int]
    _launching: Any
    _statistics_shape: str
    _length_dtypes: dict[str, str]

    def _rows(self, aligned: bool) -> dict[str, str]:
        """Rows of the vocabulary that are this launcher's own."""
        raise NotImplementedError

    def _empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", self.device))

    @property
    def _may_go_directly(self) -> bool:
        by_flash = self.code.schedule.algorithm in ("flash", "split_kv")
        return by_flash and not (self.interprets or self.own_keys) and self._finishes is not None

    @property
    def _finishes(self) -> dict[str, Finish] | None:
        """How gradients of operands end, by name of the operand; None where that takes the longer way."""
        if self.sums and self.sequences != "dense":
            return None
        return finishes(self.sums, self.ways, _AT_ZERO[self.code.signature.offset])

    @property
    def lists_long(self) -> bool:
        """Whether lists have the tiles of long sequences alone, and their number behind them."""
        return self.code.signature.share == "long"

    def _go_directly(self, mode: Mode, ready: _Prepared) -> None:
        """The shortest way: one function from a call to its results, for operands that fit and are aligned."""
        absent = ready.absent
        names = self._given_names()
        operands = "operands" if self.backward else "call.operands"
        record = "offset" if self.backward else "call.sequences"
        lengths = [n for n in LENGTHS[self.sequences] if n not in absent]
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
        conditions = self._conditions(mode, lengths)
        if self.backward:
            wanted = self.code.signature.wanted
            given = "query, key, value, operands, offset, out, lse, dout, dlse"
            sources |= {f"d{n}": n for n in ("query", "key", "value") if n not in wanted}
            tensors |= {f"d{n}" for n in ("query", "key", "value")}
            block = self.padding(mode)
            rows |= {"padded_len": f"(q_len + {block - 1}) // {block} * {block}"}
            returned = {n: f"d{n}" for n in ("query", "key", "value")}
            if self.sums:
                found: dict[str, Finish] = self._finishes  # type: ignore[assignment]
                returned |= {name: finish.text for name, finish in found.items()}
                conditions += [text for finish in found.values() for text in finish.conditions]
                rows |= {"first_program": "0", "most_programs": str(2**31 - 1)}  # of flash_dpairs: all at once
                apart = {name for finish in found.values() for name in _LISTED.findall(finish.text)}
                made, tensors = self._made_for_sums(mode, made, apart) | made, tensors | apart | {"room", "zeros"}
            returns = ", ".join(returned[n] if n in wanted else "None" for n in self._gradient_names)
        if self.code.signature.share == "short":  # into what the launch of the other module made
            given = "call, out, lse"
            made = {n: text for n, text in made.items() if n not in ("out", "out_strides", "lse")}
            sources |= {"out": "out", "lse": "lse"}
        launching = self._launching
        tools: dict[str, object] = {
            "float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
            "device": self.device,
            "empty": self.empty, "is_heard": launching.is_heard, "current_stream": launching.stream_function(),
            "current_device": self.current_device, "dtype": DTYPES[self.code.signature.dtype], **self.tools,
        }  # fmt: skip
        packer = Packer(sources, tensors, absent=absent, rows=rows, ranks=self.tensors)
        launches = [ready.runs[n].shortest if n in ready.runs else None for n in range(len(ready.bindings))]
        way = direct(packer, ready.bindings, launches, given, conditions, made, returns, tools, self._kept)
        launch = way.function()
        guarded = {n: sources[n] for n in (*names, *self.tensors, *lengths) if n not in absent}
        guarded |= {"q_offset_ptr": offset} if mode.per_row else {}
        pins, asked = self._unchanging(mode, record, offset, lengths)
        self.repeated = self._factory(way, guarded, pins, asked)
        if not self.backward and self.sequences in ("dense", "lengths"):
            free = {n: SHAPES[n].index(f"{size}_len") for n, size in (("key", "kv"), ("value", "value")) if n in names}
            pins = [pin for pin in pins if pin.name != "q_offset"]  # of a query at the end it follows from the keys
            self.growing = self._factory(way, guarded, pins, asked, free)
        if not self.backward:
            self.direct = launch
        else:
            self.backward_of = launch
            self.direct = _of_records(launch, self._gradient_names, self.code.signature.wanted)

    @property
    def _gradient_names(self) -> tuple[str, ...]:
        """What a backward may have gradients of, in the order of the op's tensors."""
        return "query", "key", "value", "rope", *(n.removeprefix("arg_") for n in self.tensors)

    def _made_for_sums(self, mode: Mode, made: Container[str], apart: Container[str]) -> dict[str, str]:
        """What the workspace of a backward with sums has besides, as expressions; `apart`: that are tensors."""
        here = partial(places_of, self, mode, made, apart)  # type: ignore[arg-type]
        own = {"places_of": here, "at_place": self._at_place, "of_list": self._of_list}
        self.tools = {**self.tools, **own, "typed": typed, "as_read": as_read}
        some = here([1] * 4, [1] * 4, [([1] * rank, torch.float32) for rank in self.tensors.values()])
        operands = "".join(f"({n}.shape, {n}.dtype), " for n in self.tensors)
        found = {"places": f"places_of(query.shape, key.shape, ({operands}))"}
        found |= {n: f"at_place(places[{n!r}])" for n, place in some.items() if isinstance(place, Place)}
        for name, place in some.items():
            if name not in found:
                found[name] = f"at_{place[0]} + places[{name!r}][1]"
                found[f"{name}_strides"] = f"places[{name!r}][2]"
        return found

    def _at_place(self, place: Place) -> Tensor:
        found = self.empty(*place[:3])
        return found if place.fill is None else found.fill_(place.fill)

    def _factory(
        self, way: ShortestWay, guarded: Mapping[str, str], pins: Sequence[Pin], conditions: Sequence[str],
        free: Mapping[str, int] = MappingProxyType({}),
    ) -> Callable[..., Again | None]:  # fmt: skip
        guard = self.guard
        if guard is None:
            return nothing_yet

        @cache
        def factory() -> Callable[..., Again | None]:
            with PARSING:
                return repeated(way, guarded, pins, conditions, guard, free)

        return lambda *given: factory()(*given)  # made for the first call that repeats

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
            conditions += [f"{record}.{n} is None" for n in LENGTHS[self.sequences] if n not in lengths]
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

    def _operand_names(self) -> list[str]:
        """Tensors [B, H, rows, D] whose alignment decides how they are loaded; those that we make are like these."""
        keys = [f"key{i}" for i in self.own_keys]
        value = [] if self.code.signature.widths.value_is_key else ["value"]
        return ["query", "key", *keys, *value, *(["dout", "out"] if self.backward else ["out"])]

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
        size = DTYPES[self.code.signature.dtype].itemsize
        conditions += [f"at_{n}" for n in given]  # a tensor without memory is told of where there is time
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
        slots = {s: f"({s}_slots + 1)" if self.lists_long else f"{s}_slots" for n, s in WORK_SIDES if self.code.has(n)}
        made |= {f"{s}_work": rows_of(n, "2", dtype="int32") for s, n in slots.items()}
        tiles = {"kv": "q_slots", "q": "kv_slots"} if self.sequences == "packed" else {}
        if self.code.has(PAIR_CELLS):
            cells = [f"(({length} + {CELL - 1}) // {CELL})" for length in ("q_len", self._kv_rows)]
            made[PAIR_CELLS] = rows_of(rows, *cells, dtype="uint8")
        for axis, program in programs:
            own = tiles.get(axis, f"{axis}_measured_tiles")
            if self.code.has(f"{axis}_spans"):
                made[f"{axis}_spans"] = rows_of(rows, own, str(span_width(program)), dtype="int32")
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
                ends = rows_of(self._mask_rows, str(self.numbers_of_ends(axis)), places, dtype="int64")
                made[kernel.name] = f"{ends} if {self._launched_if(kernel.kernel)} else {axis}_spans"
        return made
