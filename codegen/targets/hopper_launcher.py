"""Launches of target `hopper`: tensor descriptors, workspace and the arithmetic of arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiler.analysis.places import rows_of_boxes
from ...compiler.planning.kernel import Kernel
from ...compiler.planning.signature import PACKED, PAGED
from ...compiler.planning.target import CallTensors, Named, Partition, Place
from ...ir.expr import Load
from ..binding import Binding, rows_of
from .hopper.forms import ROWS, HopperBackwardForm
from .hopper.gradients import stores_first
from .hopper.pieces import (
    CONSUMERS,
    Piece,
    backward_form,
    columns_of,
    forward_form,
    is_persistent,
    main_form,
    part_columns,
    pieces_of,
    statistics_of_a_row,
    sums_of_a_tile,
)
from .triton.forms import Tiling
from .triton.kernels.measures import MEASURES
from .triton.kernels.pair_sums import DDIAGONALS
from .triton.kernels.tables import BESIDE
from .triton.kernels.work import WORK
from .triton_direct import PADDING
from .triton_launcher import Mode, TritonLauncher
from .triton_workspace import distances_of, flat_place, listed_diagonals, measures_of, tiles_of, work_of, writes_all

L2_BYTES = 40_000_000  # of an H100's or H200's 50 MB: what K and V of the heads in flight may take
_LINE = 128  # floats of a line of a part
_LEAST_STEP = 8  # elements of 16 bytes, of operands
_ANY = 0x7FFF0000  # a size that no coordinate reaches
# what flash_dquery calls tensors of whose tiles the main kernel has others
_TENSORS = {
    "query_rows": "query",
    "dquery_rows": "dquery",
    "dout_rows": "dout",
    "seen_key": "key",
    "seen_value": "value",
}


class Box:
    """What a launch needs of a tensor descriptor: far cheaper to build than the checked one.

    width: a stride where none is used, in elements.
    """

    __slots__ = ("base", "shape", "strides")
    padding, in_order = "zero", False
    round_f32_to_tf32 = False

    def __init__(self, tensor: Tensor, width: int) -> None:
        self.base = tensor
        self.shape, self.strides = self.places(width, *self.numbers(tensor))

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        """All that a descriptor depends on besides the address."""
        return *tensor.shape, *tensor.stride()[:3]

    @staticmethod
    def places(
        width: int, batches: int, heads: int, rows: int, dim: int, of_batch: int, of_head: int, of_row: int
    ) -> tuple[list[int], list[int]]:
        """Sizes and strides that the descriptor has, from `numbers`."""
        # multiples of 16 bytes even where, the size being 1, they are never used
        strides = [
            of_batch if batches > 1 else width,
            of_head if heads > 1 else width,
            of_row if rows > 1 else width,
            1,
        ]
        return [batches, heads, rows, dim], strides


class RaggedBox(Box):
    """The same of rows that end anywhere: [2**30 rows back, a sequence's end, head, row of 2**30, column].

    templates/hopper/parts/sequences.py.jinja has the coordinates.
    """

    __slots__ = ()

    @staticmethod
    def places(
        width: int, batches: int, heads: int, rows: int, dim: int, of_batch: int, of_head: int, of_row: int
    ) -> tuple[list[int], list[int]]:
        strides = [(1 << 34) - of_row, of_row, of_head if heads > 1 else of_row, of_row, 1]
        return [_ANY, _ANY, heads, 1 << 30, dim], strides


def sharing_l2(batch_heads: int, kv_bytes: float) -> int:
    """Query heads whose K and V fit L2 together, of as many equal groups as it takes."""
    if batch_heads * kv_bytes <= L2_BYTES:
        return batch_heads
    groups = -(-batch_heads // max(1, int(L2_BYTES / max(1.0, kv_bytes))))
    return -(-batch_heads // groups)


class OperandBox(Box):
    """The same of an operand that pairs read: its dimension `width` is along queries, the last along keys."""

    __slots__ = ()

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        return *tensor.shape, *tensor.stride()

    @staticmethod
    def places(width: int, *numbers: int) -> tuple[list[int], list[int]]:
        rank = len(numbers) // 2
        sizes, strides = numbers[:rank], numbers[rank:]
        order = [*(d for d in range(rank - 1) if d != width), width, rank - 1]
        # a stride of a dimension of one entry is never used
        return [sizes[d] for d in order], [*(strides[d] if sizes[d] > 1 else 16 for d in order[:-1]), 1]


class FlatBox(Box):
    """The same of memory of our own: rows of `width` floats, or one row of all of them."""

    __slots__ = ()
    in_order = True  # in SRAM as in memory

    @staticmethod
    def numbers(tensor: Tensor) -> Sequence[int]:
        return (tensor.numel(),)

    @staticmethod
    def places(width: int, floats: int) -> tuple[list[int], list[int]]:  # type: ignore[override]
        return ([floats // width, width], [width, 1]) if width else ([floats], [1])


# `Box.numbers` of tensors that the function of a call has names for: sizes, and strides by the tensor's name
_OF_QUERY, _OF_KEY = "batches, heads, q_len", "key_batches, kv_heads, kv_len"
_EXTENTS = {
    "query": f"{_OF_QUERY}, q_dim", "out": f"{_OF_QUERY}, value_dim", "key": f"{_OF_KEY}, key_dim",
    "value": f"{_OF_KEY}, value_dim",
}  # fmt: skip


class Described(NamedTuple):
    """Which tensor a descriptor is of, by name, and how."""

    tensor: str
    box: type[Box]
    width: int = 0

    @property
    def text(self) -> str:
        """The box, as an expression."""
        return f"{self.box.__name__}({self.tensor}, {self.width})"

    @property
    def key(self) -> str:
        """Address and `numbers`, as an expression."""
        name = self.tensor
        if issubclass(self.box, FlatBox):
            return f"at_{name}, {name}_floats"
        if issubclass(self.box, OperandBox):
            made = not name.startswith("arg_")
            of = [f"places[{name!r}][0]", f"places[{name!r}][1]"] if made else [f"{name}.shape", f"{name}.stride()"]
            return f"at_{name}, *{of[0]}, *{of[1]}"
        return f"at_{name}, {_EXTENTS[name.removeprefix('d')]}, {name}_sb, {name}_sh, {name}_sl"

    @property
    def places(self) -> Callable[..., tuple[list[int], list[int]]]:
        """Sizes and strides that the descriptor has, from the numbers that `key` has after the address."""
        return partial(self.box.places, self.width)


def _of_pairs(tensor: str, read: Load) -> Described:
    """Of a tensor in the shape of what pairs read."""
    rows = rows_of_boxes(read)
    assert rows is not None
    return Described(tensor, OperandBox, rows)


def readable(tensor: Tensor, ragged: bool = False) -> Tensor:
    """The tensor [B, H, rows, D], or a copy that the tensor memory accelerator can read."""
    is_fit = is_ragged_readable(tensor) if ragged else is_readable(tensor)
    return tensor if is_fit else tensor.clone(memory_format=torch.contiguous_format)


def is_ragged_readable(tensor: Tensor) -> bool:
    """The same of sequences with lengths: batch rows lie a whole number of rows of a head apart, whatever the sizes."""
    batch, _, row, _ = tensor.stride()
    whole = row > 0 and (tensor.shape[0] == 1 or batch % row == 0)
    return whole and row * tensor.element_size() % 16 == 0 and is_readable(tensor)


def is_readable(tensor: Tensor) -> bool:
    """Whether address and strides are multiples of 16 bytes."""
    # a stride in a dimension of one entry leads nowhere: Box gives another in its place
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()) if size > 1]
    return not any(n % 16 for n in (tensor.data_ptr(), *(tensor.element_size() * stride for stride in strides)))


_BOXED = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


def boxed_bytes(tensor: Tensor) -> int:
    """Bytes of an element where boxes of a float tensor may be brought by the tensor memory accelerator, else 0."""
    size = _BOXED.get(tensor.dtype)
    *steps, last = tensor.stride() or (0,)
    if size is None or not steps or last != 1 or tensor.data_ptr() & 15:
        return 0
    for extent, step in zip(tensor.shape, steps):  # a loop, for speed: at every call
        if extent == 0 or (extent > 1 and (step == 0 or step * size & 15)):
            return 0
    return size


class HopperLauncher(TritonLauncher):
    """What launches of both directions share: tensor descriptors, and forms of this target."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.columns, self.value_columns = columns_of(self.code.signature.widths)
        self.tools = {
            **{box.__name__: box for box in (Box, RaggedBox, OperandBox, FlatBox)}, "sharing_l2": sharing_l2,
            "least": min,
            "counter": self._launching.counter, "cleared": cleared,
        }  # fmt: skip

    def partition(self, call: CallTensors, results: Named) -> Partition:
        per_row = self.code.signature.offset == "per_row"
        page = call.key.shape[2] if self.sequences in PAGED else 0
        return Partition(mode=Mode(True, per_row, results.get("dlse") is None, call.head_dim, page))

    def _conditions(self, mode: Mode, lengths: Sequence[str]) -> list[str]:
        found = super()._conditions(mode, lengths)
        if self.sequences in ("lengths", *PAGED):  # is_ragged_readable
            given = [n for n in self._given_names() if n not in ("lse", "dlse")]
            found += [f"min({', '.join(f'{n}_sl' for n in given)}) > 0"]
            found += [" == ".join([*(f"{n}_sb % {n}_sl" for n in given), "0"])]
        return found

    def form(self, kernel: str, aligned: bool) -> Any:
        return self.code.form(kernel)

    def _options(self, form: Any) -> dict[str, int]:
        return super()._options(form) if isinstance(form, Tiling) else {"num_warps": 4, **self._rounding()}

    def _rows(self, aligned: bool) -> dict[str, str]:
        rows = {f"{n}_step": f"{n}_sb // {n}_sl" for n in self._tiled_names()}
        if self._apart:
            sides = ("", "d") if self.backward else ("",)
            rows |= {f"{side}rope_step": f"{side}key{self._apart}_sb // {side}key{self._apart}_sl" for side in sides}
        return super()._rows(aligned) | rows | {n: found.text for n, found in self._described().items()}

    @property
    def _apart(self) -> str:
        """What is added to the name of a key whose heads share some columns: those are a tensor of their own."""
        return "".join(map(str, self.own_keys))

    def _tiled_names(self) -> list[str]:
        """Tensors that the main kernel reads and writes by tiles."""
        return [*self._operand_names(), *(("dquery", "dkey", "dvalue") if self.backward else ())]

    def _described(self) -> dict[str, Described]:
        boxes = {f"{n}{piece.box}": _TENSORS.get(n, n) + self._apart * piece.is_apart(n) for n, piece in self._pieces}
        boxes |= {n: n for n in self._tiled_names() if n not in boxes}
        found = {f"{n}_desc": self._box(tensor) for n, tensor in boxes.items()}
        if (read := self._brought) is not None:
            found["pairs_desc"] = _of_pairs(f"arg_{read.tensor.name}", read)
        return found

    @property
    def _brought(self) -> Load | None:
        """What pairs read, where tiles of it are brought to SRAM."""
        return self.facts.boxed_read if self.code.brings_boxes else None

    def _boxes_of_pairs(self, queries: int, keys: int) -> dict[str, list[int]]:
        """The tile of the descriptor of what pairs read, and of that of its gradient."""
        read = self._brought
        if read is None:
            return {}
        return dict.fromkeys(("pairs_desc", "dpairs_desc"), [1] * (read.tensor.rank - 2) + [queries, keys])

    def _is_persistent(self) -> bool:
        """Whether programs of the main kernel take units of work until none are left."""
        raise NotImplementedError

    def _given(self, call: CallTensors, results: Named) -> dict[str, Any]:
        given = super()._given(call, results)
        return {**given, "counter_ptr": self._counter()} if self._is_persistent() else given

    def _made(self, mode: Mode) -> dict[str, str]:
        return super()._made(mode) | self._counted()

    def _counted(self) -> dict[str, str]:
        return {"counter_ptr": "counter(device)"} if self._is_persistent() else {}

    def _counter(self) -> Tensor:
        return self._launching.counter(self.device)

    def _processors(self) -> int:
        return processors(self.device)

    def _one_an_sm(self, units: str) -> str:
        """Programs for units of work: those that run at a time."""
        return f"least({self._processors()}, {units})"

    def _box(self, tensor: str) -> Described:
        return Described(tensor, Box if self.sequences == "dense" else RaggedBox, self.columns)

    @property
    def _ones(self) -> list[int]:
        """Sizes of a tile before its rows."""
        return [1, 1] if self.sequences == "dense" else [1, 1, 1]

    @property
    def _head_bytes(self) -> str:
        """K and V of one query head, whose elements have two bytes."""
        return f"{(self.columns + self.value_columns) * 2} * {self._kv_rows} / group"

    @property
    def _pieces(self) -> list[tuple[str, Piece]]:
        """Pieces of the tensors that the main kernel reads and writes by tiles."""
        raise NotImplementedError

    def _blocks(self) -> dict[str, list[int]]:
        """The tile that each descriptor is for, by its name."""
        raise NotImplementedError

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        blocks, types = self._blocks(), super()._types(binding, arguments)
        if page := binding.constants.get("PAGE"):  # a tile of keys is brought a block, or a part of one, at a time
            assert isinstance(page, int)
            for name, block in blocks.items():
                if name.startswith(("key", "value")):
                    block[-2] = min(block[-2], page)
        return [
            self._launching.descriptor(value, blocks[name]) if isinstance(value, Box) else value
            for name, value in zip([*binding.parameters, *binding.constants], types)
        ]


class HopperForwardLauncher(HopperLauncher):
    """Launches of the persistent forward: a counter for the work, and a grid of one program an SM."""

    def _is_persistent(self) -> bool:
        return True

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name in (*BESIDE, *WORK):
            return super()._programs(kernel, constants)
        return self._one_an_sm("query_tiles * batch_heads")

    @property
    def _neighbours(self) -> int:
        whole = self.sequences == "packed" or self.code.tile_source == "lists"
        return 1 if whole else forward_form(self.code).consumers

    def _rows(self, aligned: bool) -> dict[str, str]:
        block_q = forward_form(self.code).block_q
        return {
            **super()._rows(aligned),
            "lse_ptr": "lse",
            "n_heads": "heads",
            "query_tiles": "q_slots" if self.sequences in PACKED else f"(q_len + {block_q - 1}) // {block_q}",
            "kv_bytes": self._head_bytes,
            "heads_together": "sharing_l2(batch_heads, kv_bytes)",
        }  # fmt: skip

    @property
    def _pieces(self) -> list[tuple[str, Piece]]:
        pieces, _ = pieces_of(forward_form(self.code), self.code.signature.widths)
        return [(name, piece) for name in ("query", "key") for piece in pieces]

    def _blocks(self) -> dict[str, list[int]]:
        block_kv = forward_form(self.code).block_kv
        rows = {"query": ROWS, "key": block_kv}
        blocks = {"value": (block_kv, self.value_columns), "out": (ROWS, self.value_columns)}
        blocks |= {f"{n}{piece.box}": (rows[n], piece.columns) for n, piece in self._pieces}
        return {f"{n}_desc": [*self._ones, *block] for n, block in blocks.items()} | self._boxes_of_pairs(
            ROWS, block_kv
        )


class HopperBackwardLauncher(HopperLauncher):
    """Launches of the backward: the statistics of rows, the main kernel, and dQ from its sums."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # in one allocation, which takes the host longer than addresses, where no statistics are cleared
        self._together = self.code.has("flash_backward") and self.sequences != "packed"
        # nobody else clears them
        self._clears = self.code.has("flash_backward") and not self.code.has("row_statistics")
        if self._together:
            self.numbers |= {"statistics", "dquery_sums", "shares_stored"}
        self._stores_first = self.code.has("flash_backward") and stores_first(self.code.signature, self.facts)

    def _is_persistent(self) -> bool:
        return is_persistent(self.code, self.facts)

    def _options(self, form: Any) -> dict[str, int]:
        if isinstance(form, Tiling):
            return super()._options(form)
        return super()._options(form) | {"launch_pdl": True}  # they wait by themselves for what they read

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        batches, heads, q_len, _ = call.query.shape
        packed, ragged = self.sequences == "packed", self.sequences != "dense"
        block_q = self._form.block_q
        of_head = q_len // block_q + call.ragged.number(call.query) + 1 if packed else tiles_of(q_len, block_q)  # type: ignore[union-attr]
        tiles = batches * heads * of_head
        # a sequence without queries has a tile that nobody writes, and that its keys visit
        own = {}
        if self.code.has("row_statistics"):
            own["statistics"] = flat_place(tiles, self._statistics_of_a_tile, fill=0.0 if packed else None)
        fill = 0.0 if self._clears else None
        if self.code.has("flash_backward"):
            stored = self._clears and self._stores_first and self._begins_stored(call)
            floats = sums_of_a_tile(self._form, self.code.signature.widths)
            own["dquery_sums"] = flat_place(tiles, floats, fill=None if stored else fill)
        if self._stores_first:
            own["shares_stored"] = flat_place(tiles, CONSUMERS, fill=fill, dtype=torch.int32)
        if "drope" in results:  # of all heads together, or of each where sums must repeat
            shares, fill = (call.key.shape[1], None) if self.code.signature.deterministic else (1, 0.0)
            own[f"dkey{self._apart}"] = flat_place(batches, shares, *results["drope"].shape[2:], fill=fill)
        of_diagonals = self._diagonals_of(call, partition)
        for n, gradient in enumerate(self.sums):
            if gradient.kind == "diagonal":
                continue
            if gradient.kind == "pair":
                own[f"sum{n}"] = self._place_of_pairs(call, n)
                continue
            number = self._sums_of_a_head(gradient.kind, call)
            if packed and gradient.kind in ("total", "sink"):
                number = self.slots("q", call, True) * self._sums_of_a_slot(gradient.kind)
            # some slots have no tile, some keys no head that sees them, some rows no sequence
            whole = gradient.kind in ("total", "sink", "row") and not (packed or (ragged and gradient.kind == "row"))
            own[f"sum{n}"] = flat_place(batches, heads, number, fill=None if whole else 0.0)
        mode: Mode = partition.mode  # type: ignore[assignment]
        return work_of(self, call, mode) | measures_of(self, call, mode) | own | of_diagonals

    def _begins_stored(self, call: CallTensors) -> bool:
        """As `stored_first` of the vocabulary: whether first shares of dQ are stored, and not added to zeros."""
        alone, offset = call.query.shape[1] == call.key.shape[1], call.q_offset
        return alone and not isinstance(offset, Tensor) and (offset or 0) >= 0 and call.key.shape[2] > 0

    def _diagonals_of(self, call: CallTensors, partition: Partition) -> dict[str, Place]:
        """What is read by distance, and what flash_ddiagonals reads and lists: level pairs last, two numbers a head."""
        mode: Mode = partition.mode  # type: ignore[assignment]
        places = distances_of(self, call, mode)
        batches, heads, q_len, _ = call.query.shape
        rows = flat_place(batches, heads, tiles_of(q_len, PADDING) * PADDING)
        keys = flat_place(batches, heads, call.key.shape[2], fill=0.0)
        for n, gradient in enumerate(self.sums):
            if gradient.kind != "diagonal":
                continue
            places |= dict.fromkeys(("lse2", "shift", "delta") if self.shifts else ("lse2", "delta"), rows)
            number = call.ragged.number(call.query) if self.sequences == "packed" else batches  # type: ignore[union-attr]
            places |= listed_diagonals(self, call, mode, n, 2 * number * heads if self.levels else 0)
            places |= dict.fromkeys((f"far_sum{n}", f"near_sum{n}") if self.levels else (), keys)
        return places

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        ragged = self.sequences != "dense"  # hooks of the user may have made them
        read = {name: readable(results[name], ragged) for name in ("out", "dout")}
        return super().__call__(call, {**results, **read}, workspace, partition)

    def _place_of_pairs(self, call: CallTensors, n: int) -> Place:
        """Of the gradient of what pairs read, in the shape of its operand, with rows that TMA can write where it does.

        Where all pairs of a dense call are visible, and there are as many entries, every entry is written.
        """
        size = tuple(self._operand_of(n, call).shape)
        words = self.code.signature.boxed == 4
        row = size[-1] if words else tiles_of(size[-1], _LEAST_STEP) * _LEAST_STEP
        batches, heads, q_len, _ = call.query.shape
        fill = None if writes_all(self, size, batches * heads * q_len * call.key.shape[2]) else 0.0
        dtype = torch.float32 if words else call.query.dtype
        return Place(size, flat_place(*size[:-1], row).stride, dtype, fill)

    def _sums_of_a_head(self, kind: str, call: CallTensors) -> int:
        """How many partial sums of an operand's gradient a query head has."""
        q_len = call.query.shape[2]
        if kind in ("row", "column"):
            return q_len if kind == "row" else call.key.shape[2]
        if kind == "sink":
            return tiles_of(q_len, self._form.block_q)
        return tiles_of(q_len, self._query_form.block_q) * CONSUMERS

    def _sums_of_a_slot(self, kind: str) -> int:
        """The same of a slot of the list of query tiles."""
        return self._share if kind == "sink" else CONSUMERS

    @property
    def _share(self) -> int:
        """Tiles of statistics in a slot of the list of query tiles, which is that of the kernel that owns queries."""
        return self._query_form.block_q // self._form.block_q if self.code.has("flash_dquery") else 1

    def _finished(self, call: CallTensors, results: Named, workspace: Named) -> list[Tensor]:
        if self.sequences == "packed" and self.sums:
            slots = self.slots("q", call, True)
            of_tiles = [f"sum{n}" for n, gradient in enumerate(self.sums) if gradient.kind in ("total", "sink")]
            of_slots = {name: workspace[name].unflatten(2, (slots, -1)).sum(3) for name in of_tiles}
            workspace = {**workspace, **of_slots}
        return super()._finished(call, results, workspace)

    @property
    def _form(self) -> HopperBackwardForm:
        return main_form(self.code)[1]

    @property
    def _statistics_of_a_tile(self) -> int:
        return statistics_of_a_row(self.facts) * self._form.block_q

    def _made(self, mode: Mode) -> dict[str, str]:
        if not self.code.has("row_statistics"):
            own = self._made_sums()
        elif self._together:
            counts = f" + {CONSUMERS} * all_query_tiles" if self._stores_first else ""  # ints of as many bytes
            own = {
                "sums": rows_of(f"statistics_floats + dquery_sums_floats{counts}", dtype="float32"),
                "statistics": "sums.data_ptr()", "at_statistics": "statistics",
                "dquery_sums": "statistics + 4 * statistics_floats", "at_dquery_sums": "dquery_sums",
            }  # fmt: skip
            if self._stores_first:
                own["shares_stored"] = "dquery_sums + 4 * dquery_sums_floats"
        else:
            statistics = rows_of("statistics_floats", dtype="float32")
            own = {"statistics": f"{statistics}.zero_()" if self.sequences == "packed" else statistics}
            if self.code.has("flash_backward"):
                own["dquery_sums"] = rows_of("dquery_sums_floats", dtype="float32")
        return self._made_measures(mode) | self._made_gradients() | own | self._counted()

    def _made_sums(self) -> dict[str, str]:
        """Sums of dQ, which begin at 0 unless first shares are stored; then what counts these does."""
        if not self.code.has("flash_backward"):
            return {}
        if not self._together:
            return {"dquery_sums": f"{rows_of('dquery_sums_floats', dtype='float32')}.zero_()"}
        counts, kept = "", "0"
        if self._stores_first:
            counts, kept = f" + {CONSUMERS} * all_query_tiles", "stored_first * dquery_sums_floats"
        sums = rows_of(f"dquery_sums_floats{counts}", dtype="float32")
        own = {"sums": f"cleared({sums}, {kept})", "dquery_sums": "sums.data_ptr()", "at_dquery_sums": "dquery_sums"}
        if self._stores_first:
            own["shares_stored"] = "dquery_sums + 4 * dquery_sums_floats"
        return own

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name in (DDIAGONALS, *BESIDE, *WORK):
            return super()._programs(kernel, constants)
        if kernel.axis == "q":
            units = "key_tiles * batch_kv_heads"
            return self._one_an_sm(units) if self._is_persistent() else units
        if kernel.name == "flash_dquery":
            return "own_tiles * batch_heads"
        if self.sequences == "packed" and self._share > 1:
            return f"own_tiles * {self._share} * batch_heads"
        return "query_tiles * batch_heads"

    def _renamed(self, kernel: Kernel) -> dict[str, str]:
        if kernel.name == "row_statistics":
            return super()._renamed(kernel) | {"n_heads": "heads", "delta_ptr": "delta"}
        if kernel.name in MEASURES or kernel.axis == "kv":
            own = {"heads_together": "heads_sharing_keys"} if kernel.name == "flash_dquery" else {}
            return super()._renamed(kernel) | {"n_heads": "heads"} | own
        return super()._renamed(kernel) | {"n_heads": "kv_heads", "batch_heads": "batch_kv_heads"}

    def _rows(self, aligned: bool) -> dict[str, str]:
        form, packed = self._form, self.sequences == "packed"
        floats = {"statistics": self._statistics_of_a_tile} if self.code.has("row_statistics") else {}
        if self.code.has("flash_backward"):
            floats["dquery_sums"] = sums_of_a_tile(form, self.code.signature.widths)
        return {
            **super()._rows(aligned),
            **{f"{name}_floats": f"all_query_tiles * {number}" for name, number in floats.items()},
            "all_query_tiles": "batches * heads * query_tiles",
            "n_rows": "batches * heads * q_len",
            "query_tiles": f"q_len // {form.block_q} + n_sequences + 1" if packed
            else f"(q_len + {form.block_q - 1}) // {form.block_q}",
            "key_tiles": "kv_slots" if packed else f"(kv_len + {form.block_kv - 1}) // {form.block_kv}",
            # Q, dO and the sums of dQ of one head of keys
            "query_bytes": f"{(self.columns + self.value_columns) * 2 + self.columns * 4} * q_len * group",
            "heads_together": "sharing_l2(batch_kv_heads, query_bytes)",
            "stored_first": "int(group == 1 and q_offset >= 0 and kv_len > 0)",
        } | ({} if not self.code.has("flash_dquery") else {
            "own_tiles": "q_slots" if packed
            else f"(q_len + {self._query_form.block_q - 1}) // {self._query_form.block_q}",
            "kv_bytes": self._head_bytes,
            "heads_sharing_keys": "sharing_l2(batch_heads, kv_bytes)",
        })  # fmt: skip

    def _described(self) -> dict[str, Described]:
        return super()._described() | {
            "statistics_desc": Described("statistics", FlatBox),
            "dquery_sums_desc": Described("dquery_sums", FlatBox, _LINE),
            **self._stored(),
        }

    def _stored(self) -> dict[str, Described]:
        """Of the gradient of what pairs read, where it is stored by tiles."""
        if self.code.signature.boxed == 4:
            return {}  # entry by entry
        stored = [_of_pairs(f"sum{n}", g.load) for n, g in enumerate(self.sums) if g.kind == "pair"]
        return dict(zip(["dpairs_desc"], stored))

    @property
    def _query_form(self) -> HopperBackwardForm:
        return backward_form(self.code, "flash_dquery")

    @property
    def _pieces(self) -> list[tuple[str, Piece]]:
        of_keys, of_values = pieces_of(self._form, self.code.signature.widths)
        names = [(name, of_keys) for name in ("query", "key", "dkey")]
        names += [(name, of_values) for name in ("value", "dout", "dvalue")]
        if self.code.has("flash_dquery"):
            of_keys, of_values = pieces_of(self._query_form, self.code.signature.widths)
            names += [(name, of_keys) for name in ("query_rows", "dquery_rows", "seen_key")]
            names += [(name, of_values) for name in ("dout_rows", "seen_value")]
        return [(name, piece) for name, pieces in names for piece in pieces]

    def _blocks(self) -> dict[str, list[int]]:
        form, columns = self._form, part_columns(self._form, self.code.signature.widths)
        rows = {"query": form.block_q, "dout": form.block_q, "out": form.block_q,
                "key": ROWS, "value": ROWS, "dkey": ROWS, "dvalue": ROWS,
                "query_rows": ROWS, "dout_rows": ROWS, "dquery_rows": ROWS}  # fmt: skip
        if self.code.has("flash_dquery"):
            rows |= dict.fromkeys(("seen_key", "seen_value"), self._query_form.block_kv)
        narrow = {"dout", "out", "value", "dvalue", "dout_rows", "seen_value"}
        blocks = {n: (count, self.value_columns if n in narrow else self.columns) for n, count in rows.items()}
        blocks |= {f"{name}{piece.box}": (rows[name], piece.columns) for name, piece in self._pieces}
        return {f"{name}_desc": [*self._ones, *block] for name, block in blocks.items()} | {
            "dquery_desc": [*self._ones, ROWS, columns],
            "statistics_desc": [self._statistics_of_a_tile],
            "dquery_sums_desc": [ROWS * columns // _LINE, _LINE],
            **self._boxes_of_pairs(form.block_q, ROWS),
        }


def cleared(tensor: Tensor, kept: int) -> Tensor:
    """The tensor, 0 behind the first `kept` elements."""
    (tensor[kept:] if kept else tensor).zero_()
    return tensor


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
