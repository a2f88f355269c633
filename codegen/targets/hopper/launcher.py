"""Launchers of target `hopper`: descriptors and arguments of its kernels, and what they leave besides results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import OperandGradient
from ....compiler.planning.buffer import ALWAYS, NEVER, Buffer
from ....compiler.planning.dtypes import dtype_named
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.target import Named
from ....ir.expr import Load
from ...launch.binding import Binding
from ...launch.descriptors import Described, Descriptors, FlatBox, WholeBox, pairs_described, readable, rows_described
from ...launch.device import Device
from ...launch.division import Division
from ...launch.job import Job, KernelLaunch, Mode, OwnPart
from ...launch.launcher import KernelLauncher
from ..triton.parts.measures import Measures
from ..triton.parts.sums import NOT_OWN, Sums, hides_some, shape_of_operand
from .forms import ROWS, HopperBackwardForm
from .gradients import stores_first
from .kernels.forward import TURN_VALUES, TURNED_KEYS, turning_warps
from .latent_launcher import LatentKernels
from .pieces import (
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

L2_BYTES = 40_000_000  # of an H100's or H200's 50 MB: what K and V of the heads in flight may take
_LINE = 128  # floats of a line of a part
_LEAST_STEP = 8  # elements of 16 bytes, of operands
# what flash_dquery calls tensors of whose tiles the main kernel has others
_TENSORS = {
    "query_rows": "query",
    "dquery_rows": "dquery",
    "dout_rows": "dout",
    "seen_key": "key",
    "seen_value": "value",
}
_WHOLE_TILES = f"(kv_len + {TURNED_KEYS - 1}) // {TURNED_KEYS}"
Tiles = Mapping[str, Sequence[int]]  # sizes of the tile of each descriptor, by its name


def launcher_of(modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: int) -> KernelLauncher:
    """The launcher of the kernels of one direction."""
    job = Job(modules, code, facts, Device(device, False))
    if code.schedule.algorithm == "split_kv":
        division, neighbours = Division(job), 0 if facts.mask_differs_by_head else 1
        latent = LatentKernels(job, division)
        rest = Measures(job, neighbours), Sums(job, latent)
        return KernelLauncher(job, latent, *rest, division=division, descriptors=latent.descriptors)
    if job.is_backward:
        backward = HopperBackward(job)
        return KernelLauncher(job, backward, Measures(job), Sums(job, backward), descriptors=backward.descriptors)
    forward = HopperForward(job)
    rest = Measures(job, forward.neighbours), Sums(job, forward)
    return KernelLauncher(job, forward, *rest, descriptors=forward.descriptors)


def sharing_l2(batch_heads: int, kv_bytes: float) -> int:
    """Query heads whose K and V fit L2 together, of as many equal groups as it takes."""
    if batch_heads * kv_bytes <= L2_BYTES:
        return batch_heads
    groups = -(-batch_heads // max(1, int(L2_BYTES / max(1.0, kv_bytes))))
    return -(-batch_heads // groups)


_TOOLS: Mapping[str, Any] = {"sharing_l2": sharing_l2, "least": min}


class Tiled:
    """The tensors that kernels of either direction read and write by tiles, and the descriptors of these."""

    def __init__(self, job: Job, pieces: Sequence[tuple[str, Piece]]) -> None:
        self._job, self.pieces = job, pieces
        self.columns, self.value_columns = columns_of(job.signature.widths)
        # sizes of a tile before its rows
        self.ones = [1, 1, 1] if job.sequences.ragged else [1, 1]
        # what is added to the name of a key whose heads share some columns: those are a tensor of their own
        self.apart = "".join(map(str, job.own_keys))
        results = ("dquery", "dkey", "dvalue") if job.is_backward else ()
        self.names = [*job.operand_names, *results]

    def described(self) -> dict[str, Described]:
        boxes = {f"{n}{piece.box}": _TENSORS.get(n, n) + self.apart * piece.is_apart(n) for n, piece in self.pieces}
        boxes |= {n: n for n in self.names if n not in boxes}
        found = {f"{n}_desc": rows_described(self._job, tensor, self.columns) for n, tensor in boxes.items()}
        if (read := self._brought) is not None:
            found["pairs_desc"] = pairs_described(f"arg_{read.tensor.name}", read)
        return found

    @property
    def _brought(self) -> Load | None:
        """What pairs read, where tiles of it are brought to SRAM."""
        return self._job.facts.boxed_read if self._job.code.brings_boxes else None

    def pair_boxes(self, queries: int, keys: int) -> dict[str, list[int]]:
        """The tile of the descriptor of what pairs read, and of that of its gradient."""
        if (read := self._brought) is None:
            return {}
        return dict.fromkeys(("pairs_desc", "dpairs_desc"), [1] * (read.tensor.rank - 2) + [queries, keys])

    def steps(self) -> dict[str, str]:
        """Rows of a head from one batch row to the next, as rows of the vocabulary."""
        rows = {f"{n}_step": f"{n}_sb // {n}_sl" for n in self.names}
        sides = ("", *(("d",) if self._job.is_backward else ())) if self.apart else ()
        return rows | {f"{side}rope_step": f"{side}key{self.apart}_sb // {side}key{self.apart}_sl" for side in sides}

    @property
    def head_bytes(self) -> str:
        """K and V of one query head."""
        element = 1 if self._job.signature.dtypes.quantized else 2
        return f"{(self.columns + self.value_columns) * element} * {self._job.kv_rows} / group"


def blocks_of(tiles: Tiles, binding: Binding) -> Tiles:
    """The tiles of a kernel's descriptors: keys in pages are brought a block, or a part of one, at a time."""
    page = int(str(binding.constants.get("PAGE") or 0))
    of_keys = {name: block for name, block in tiles.items() if name.startswith(("key", "value"))} if page else {}
    return {**tiles, **{n: [*block[:-2], min(block[-2], page), block[-1]] for n, block in of_keys.items()}}


def one_an_sm(job: Job, units: str) -> str:
    """Programs for units of work: those that run at a time."""
    return f"least({job.device.processors()}, {units})"


class HopperForward(OwnPart):
    """The persistent forward: a counter for the work, and a grid of one program an SM."""

    def __init__(self, job: Job) -> None:
        self._job, self._form = job, forward_form(job.code)
        pieces, _ = pieces_of(self._form, job.signature.widths)
        self._tiled = Tiled(job, [(name, piece) for name in ("query", "key") for piece in pieces])
        described = self._tiled.described()
        if self._form.fp8:
            described["value_desc"] = Described("value_turned", WholeBox)
        self.descriptors = Descriptors(job, described, lambda binding: blocks_of(self._tiles(), binding))

    @property
    def neighbours(self) -> int:
        """Tiles of queries that consumers of one program visit together."""
        whole = self._job.sequences.keys.packed or self._job.code.tile_source == "lists"
        return 1 if whole else self._form.consumers

    def tools(self) -> dict[str, Any]:
        return dict(_TOOLS)

    def given(self) -> dict[str, Any]:
        return {"counter_ptr": self._job.device.counter()}

    def placed(self) -> frozenset[str]:
        return frozenset({"value"} if self._form.fp8 else ())

    def conditions(self, mode: Mode) -> list[str]:
        """Of a value whose rows or columns are contiguous, what `turn_values` asks."""
        if not self._form.fp8:
            return []
        steps = "value_sb | value_sh | (value_sl if value_sd == 1 else value_sd)"
        return ["at_value", "1 in (value_sl, value_sd)", f"(at_value | {steps}) & 15 == 0"]

    def buffers(self, mode: Mode) -> list[Buffer]:
        if not self._form.fp8:
            return []
        sizes = "batches", "kv_heads", "value_dim", "turned_pitch"
        return [Buffer("value_turned", sizes, dtype_named(self._job.signature.dtypes.value).torch_name)]

    def rows(self, mode: Mode) -> dict[str, str]:
        block_q = self._form.block_q
        # each packed sequence begins a tile of its own
        tiles = f"kv_len // {TURNED_KEYS} + n_sequences" if self._job.sequences.keys.packed else _WHOLE_TILES
        turned = {
            "key_tiles": tiles,
            "turned_pitch": f"key_tiles * {TURNED_KEYS}",
            "value_turned_sizes": "(batches, kv_heads, value_dim, turned_pitch)",
        }  # fmt: skip
        return {
            **self._tiled.steps(),
            "lse_ptr": "lse",
            "n_heads": "heads",
            "query_tiles": "q_slots" if self._job.sequences.rows.packed else f"(q_len + {block_q - 1}) // {block_q}",
            "kv_bytes": self._tiled.head_bytes,
            "heads_together": "sharing_l2(batch_heads, kv_bytes)",
        } | (turned if self._form.fp8 else {})  # fmt: skip

    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        if kernel.name in NOT_OWN:
            return None
        if kernel is TURN_VALUES:
            warps = {"num_warps": turning_warps(self._tiled.value_columns)}
            return KernelLaunch("key_tiles * batch_kv_heads", warps, renamed={"n_heads": "kv_heads"})
        return KernelLaunch(one_an_sm(self._job, "query_tiles * batch_heads"), {"num_warps": 4, **self._job.rounding})

    def _tiles(self) -> Tiles:
        tiled, block_kv = self._tiled, self._form.block_kv
        rows = {"query": ROWS, "key": block_kv}
        value = (block_kv, tiled.value_columns)
        blocks = {"value": value, "out": (ROWS, tiled.value_columns)}
        blocks |= {f"{n}{piece.box}": (rows[n], piece.columns) for n, piece in tiled.pieces}
        found = {f"{n}_desc": [*tiled.ones, *block] for n, block in blocks.items()}
        found |= {"value_desc": [1, 1, *reversed(value)]} if self._form.fp8 else {}
        return found | tiled.pair_boxes(ROWS, block_kv)


class HopperBackward(OwnPart):
    """The backward: the statistics of rows, the main kernel, and dQ from its sums."""

    def __init__(self, job: Job) -> None:
        self._job, self._form = job, main_form(job.code)[1]
        self._has_sums, self._has_statistics = job.code.has("flash_backward"), job.code.has("row_statistics")
        self._stores_first = self._has_sums and stores_first(job.signature, job.facts)
        self._is_persistent = is_persistent(job.code, job.facts)
        self._tiled = Tiled(job, self._pieces())
        self.descriptors = Descriptors(job, self._described(), lambda binding: blocks_of(self._tiles(), binding))

    def tools(self) -> dict[str, Any]:
        return dict(_TOOLS)

    def given(self) -> dict[str, Any]:
        return {"counter_ptr": self._job.device.counter()} if self._is_persistent else {}

    def readable(self, results: Named) -> Named:
        """Hooks of the user may have made them."""
        ragged = self._job.sequences.ragged
        return {**results, **{name: readable(results[name], ragged) for name in ("out", "dout")}}

    @property
    def _query_form(self) -> HopperBackwardForm:
        return backward_form(self._job.code, "flash_dquery")

    @property
    def _statistics_of_a_tile(self) -> int:
        return statistics_of_a_row(self._job.facts) * self._form.block_q

    @property
    def _tiles_of_a_slot(self) -> int:
        """Tiles of statistics in a slot of the list of query tiles, which is that of the kernel that owns queries."""
        return self._query_form.block_q // self._form.block_q if self._job.code.has("flash_dquery") else 1

    # -- buffers -------------------------------------------------------------------------------------------------------
    def buffers(self, mode: Mode) -> list[Buffer]:
        return [*self._of_tiles(), *self._of_shared_keys(), *self._of_diagonals()]

    def _of_tiles(self) -> list[Buffer]:
        """Statistics of the rows of query tiles, and sums of dQ with what counts them. Where there is a kernel of
        statistics, it clears these."""
        found, packed = [], self._job.sequences.keys.packed
        clears = self._has_sums and not self._has_statistics
        # a sequence without queries has a tile that nobody writes, and that its keys visit
        if self._has_statistics:
            tile = str(self._statistics_of_a_tile)
            found.append(Buffer("statistics", ("all_query_tiles", tile), fill=ALWAYS if packed else NEVER))
        if self._has_sums:
            floats = str(sums_of_a_tile(self._form, self._job.signature.widths))
            zeros = "not stored_first" if self._stores_first else ALWAYS
            found.append(Buffer("dquery_sums", ("all_query_tiles", floats), fill=zeros if clears else NEVER))
        if self._stores_first:
            counts = ("all_query_tiles", str(CONSUMERS))
            found.append(Buffer("dq_stored", counts, "int32", ALWAYS if clears else NEVER))
        return found

    def _of_shared_keys(self) -> list[Buffer]:
        """Shares of a key's gradient: of all heads together, or of each where sums must repeat."""
        if "rope" not in self._job.signature.wanted:
            return []
        name, repeats = f"key{self._tiled.apart}", self._job.signature.deterministic
        shape = "batches", "kv_heads" if repeats else "1", f"{name}.shape[2]", f"{name}.shape[3]"
        return [Buffer(f"d{name}", shape, fill=NEVER if repeats else ALWAYS)]

    def _of_diagonals(self) -> list[Buffer]:
        """What flash_ddiagonals reads, and sums of level pairs."""
        diagonals = [n for n, gradient in enumerate(self._job.gradients) if gradient.kind == "diagonal"]
        names = ("lse2", *(("shift",) if self._job.shifts else ()), "delta") if diagonals else ()
        found = [Buffer(name, ("batches", "heads", "padded_len")) for name in names]
        levels = [f"{end}_sum{n}" for n in diagonals for end in ("distant", "near")] if self._job.levels else []
        return found + [Buffer(name, ("batches", "heads", "kv_len"), fill=ALWAYS) for name in levels]

    def level_sums(self, mode: Mode) -> str:
        """Two numbers a head."""
        number = self._job.sequences.number
        return f"2 * {number} * heads" if self._job.levels else "0"

    def sum_buffers(self, n: int, gradient: OperandGradient, mode: Mode) -> list[Buffer]:
        if gradient.kind == "pair":
            return [self._pair_buffer(n)]
        packed, ragged = self._job.sequences.keys.packed, self._job.sequences.ragged
        # some slots have no tile, some keys no head that sees them, some rows no sequence
        whole = gradient.kind in ("total", "sink", "row") and not (packed or (ragged and gradient.kind == "row"))
        shape = "batches", "heads", self._sums_of_a_head(gradient.kind)
        return [Buffer(f"sum{n}", shape, fill=NEVER if whole else ALWAYS)]

    def _sums_of_a_head(self, kind: str) -> str:
        """How many partial sums of an operand's gradient a query head has."""
        if kind in ("row", "column"):
            return "q_len" if kind == "row" else "kv_len"
        number = self._tiles_of_a_slot if kind == "sink" else CONSUMERS
        if self._job.sequences.keys.packed:
            return f"q_slots * {number}"
        if kind == "sink":
            return "query_tiles"
        block = self._query_form.block_q
        return f"(q_len + {block - 1}) // {block} * {number}"

    def _pair_buffer(self, n: int) -> Buffer:
        """Of the gradient of what pairs read, in the shape of its operand: rows are such that TMA can write them."""
        words, shape = self._job.signature.boxed == 4, shape_of_operand(self._job, n)
        fill = hides_some(self._job, n, ["batches", "heads", "q_len", "kv_len"])
        if words:
            return Buffer(f"sum{n}", shape, "float32", fill)
        pitch = f"({shape[-1]} + {_LEAST_STEP - 1}) // {_LEAST_STEP} * {_LEAST_STEP}"
        return Buffer(f"sum{n}", shape, "query.dtype", fill, pitch=pitch)

    # -- the vocabulary ------------------------------------------------------------------------------------------------
    def rows(self, mode: Mode) -> dict[str, str]:
        form, tiled, packed = self._form, self._tiled, self._job.sequences.keys.packed
        floats = {"statistics": self._statistics_of_a_tile} if self._has_statistics else {}
        if self._has_sums:
            floats["dquery_sums"] = sums_of_a_tile(form, self._job.signature.widths)
        return {
            **tiled.steps(),
            **{f"{name}_floats": f"all_query_tiles * {number}" for name, number in floats.items()},
            "all_query_tiles": "batches * heads * query_tiles",
            "n_rows": "batches * heads * q_len",
            "query_tiles": f"q_len // {form.block_q} + n_sequences + 1" if packed
            else f"(q_len + {form.block_q - 1}) // {form.block_q}",
            "key_tiles": "kv_slots" if packed else f"(kv_len + {form.block_kv - 1}) // {form.block_kv}",
            # Q, dO and the sums of dQ of one head of keys
            "query_bytes": f"{(tiled.columns + tiled.value_columns) * 2 + tiled.columns * 4} * q_len * group",
            "heads_together": "sharing_l2(batch_kv_heads, query_bytes)",
            "stored_first": "int(group == 1 and q_offset >= 0 and kv_len > 0)",
        } | (self._rows_of_queries() if self._job.code.has("flash_dquery") else {})  # fmt: skip

    def _rows_of_queries(self) -> dict[str, str]:
        """Of the kernel that owns queries."""
        block = self._query_form.block_q
        return {
            "own_tiles": "q_slots" if self._job.sequences.keys.packed else f"(q_len + {block - 1}) // {block}",
            "kv_bytes": self._tiled.head_bytes,
            "heads_sharing_keys": "sharing_l2(batch_heads, kv_bytes)",
        }

    # -- launches ------------------------------------------------------------------------------------------------------
    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        if kernel.name in NOT_OWN:
            return None
        # they wait by themselves for what they read
        options = {"num_warps": 4, **self._job.rounding, "launch_pdl": True}
        renamed = {"n_heads": "heads"}
        if kernel.axis == "q":
            renamed = {"n_heads": "kv_heads", "batch_heads": "batch_kv_heads"}
        if kernel.name == "row_statistics":
            renamed = {"n_heads": "heads", "delta_ptr": "delta"}
        elif kernel.name == "flash_dquery":
            renamed |= {"heads_together": "heads_sharing_keys"}
        return KernelLaunch(self._programs(kernel), options, renamed=renamed)

    def _programs(self, kernel: Kernel) -> str:
        if kernel.axis == "q":
            units = "key_tiles * batch_kv_heads"
            return one_an_sm(self._job, units) if self._is_persistent else units
        if kernel.name == "flash_dquery":
            return "own_tiles * batch_heads"
        if self._job.sequences.keys.packed and self._tiles_of_a_slot > 1:
            return f"own_tiles * {self._tiles_of_a_slot} * batch_heads"
        return "query_tiles * batch_heads"

    # -- descriptors ---------------------------------------------------------------------------------------------------
    def _described(self) -> dict[str, Described]:
        found = self._tiled.described() | {
            "statistics_desc": Described("statistics", FlatBox),
            "dquery_sums_desc": Described("dquery_sums", FlatBox, _LINE),
        }
        if self._job.signature.boxed == 4:
            return found  # what pairs read is stored entry by entry
        stored = [pairs_described(f"sum{n}", g.load) for n, g in enumerate(self._job.gradients) if g.kind == "pair"]
        return found | dict(zip(["dpairs_desc"], stored))

    def _pieces(self) -> list[tuple[str, Piece]]:
        of_keys, of_values = pieces_of(self._form, self._job.signature.widths)
        names = [(name, of_keys) for name in ("query", "key", "dkey")]
        names += [(name, of_values) for name in ("value", "dout", "dvalue")]
        if self._job.code.has("flash_dquery"):
            of_keys, of_values = pieces_of(self._query_form, self._job.signature.widths)
            names += [(name, of_keys) for name in ("query_rows", "dquery_rows", "seen_key")]
            names += [(name, of_values) for name in ("dout_rows", "seen_value")]
        return [(name, piece) for name, pieces in names for piece in pieces]

    def _tiles(self) -> Tiles:
        form, tiled = self._form, self._tiled
        columns = part_columns(form, self._job.signature.widths)
        rows = {"query": form.block_q, "dout": form.block_q, "out": form.block_q,
                "key": ROWS, "value": ROWS, "dkey": ROWS, "dvalue": ROWS,
                "query_rows": ROWS, "dout_rows": ROWS, "dquery_rows": ROWS}  # fmt: skip
        if self._job.code.has("flash_dquery"):
            rows |= dict.fromkeys(("seen_key", "seen_value"), self._query_form.block_kv)
        narrow = {"dout", "out", "value", "dvalue", "dout_rows", "seen_value"}
        blocks = {n: (count, tiled.value_columns if n in narrow else tiled.columns) for n, count in rows.items()}
        blocks |= {f"{name}{piece.box}": (rows[name], piece.columns) for name, piece in tiled.pieces}
        return {f"{name}_desc": [*tiled.ones, *block] for name, block in blocks.items()} | {
            "dquery_desc": [*tiled.ones, ROWS, columns],
            "statistics_desc": [self._statistics_of_a_tile],
            "dquery_sums_desc": [ROWS * columns // _LINE, _LINE],
            **tiled.pair_boxes(form.block_q, ROWS),
        }
