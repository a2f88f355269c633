"""Launches of target `hopper` for latent caches: tensor descriptors, and into how many shares the keys are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import torch

from ...compiler.planning.kernel import Kernel
from ...compiler.planning.signature import PACKED
from ...compiler.planning.target import CallTensors, Named, Partition, Place
from ..binding import Binding
from .hopper.forms import HopperLatentForm
from .hopper.kernels.latent import ROTARY_COLUMNS
from .hopper_launcher import Box, Described, RaggedBox, processors
from .split_launcher import JOIN, MOST_ROWS, SPLIT, SplitLauncher
from .triton.forms import Tiling
from .triton_launcher import Mode
from .triton_workspace import flat_place

MANY = 16  # programs for each SM, from which on sequences of any lengths keep all busy to the end
# (rows, parts, columns) that a program which joins parts reads together: where rows are many, parts are few
JOINED_FEW, JOINED_MANY = (4, 2, 512), (2, 64, 128)
MANY_ROWS = 512
JOINERS = 32  # programs for each SM at most: more only cost time where nothing is to be joined


class HeadsBox(Box):
    """The descriptor of a tensor [B, H, L, D] as [B, L, H, D], so that a tile has rows of several heads."""

    __slots__ = ()

    @staticmethod
    def places(
        width: int, batches: int, heads: int, rows: int, dim: int, of_batch: int, of_head: int, of_row: int
    ) -> tuple[list[int], list[int]]:
        return Box.places(width, batches, rows, heads, dim, of_batch, of_row, of_head)


class LatentLauncher(SplitLauncher):
    """A forward of two kernels, of which the first reads a latent cache by TMA."""

    numbers = SplitLauncher.numbers | {"joins"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tools = {
            **self.tools, **{box.__name__: box for box in (Box, RaggedBox, HeadsBox)}, "least": min, "most": max,
            "even_shares": self._even_shares, "together": self._together,
        }  # fmt: skip

    def form(self, kernel: str, aligned: bool) -> Any:
        found = self.code.form(SPLIT)
        return Tiling(found.block_q, found.block_kv, 4, 1) if kernel == JOIN else found

    def _of_group(self, mode: Mode, group: int, q_len: int) -> Mode:
        rows = self._form.block_q
        return mode._replace(aligned=True, heads=min(group, rows), rows=rows * (1 + (group * q_len > rows)))

    def partition(self, call: CallTensors, results: Named) -> Partition:
        found = super().partition(call, results)
        assert isinstance(found.mode, Mode)
        return found._replace(mode=found.mode._replace(joined=_joined(call)))

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        batches, heads, q_len, _ = call.query.shape
        kv_heads, block = call.key.shape[1], self._form.block_q
        if self.sequences in PACKED:
            programs = self._together(heads, kv_heads)
            rows = 2 * block * programs
            joins = 2 * (heads // kv_heads * q_len // block + call.ragged.number(call.query) + 3)  # type: ignore[union-attr]
            joins = joins if self.code.signature.few else 4 * programs + 4
        else:
            tiles = -(-(heads // kv_heads * q_len) // block)
            even, own = self._even_shares(batches, tiles * kv_heads), partition.splits * batches
            slots = 2 * (max(own, even) if partition.splits > 1 else even)
            rows, joins = max(slots * heads * q_len, 1), 2 * batches + 1
        places = {"part_out": flat_place(rows, self._width), "part_lse": flat_place(self._statistics * rows)}
        places |= {"joins": flat_place(joins, dtype=torch.int32)}
        return super().workspace(call, results, partition) | places

    def _together(self, heads: int, kv_heads: int) -> int:
        """Programs of packed queries: as many as run together, at least one for each tile of rows of a round."""
        return max(self._processors(), heads // self._form.block_q, 2 * kv_heads)

    def _even_shares(self, batches: int, units: int) -> int:
        """How many shares, each of so many programs, keep the machine busy where they are equal; 0: they need not be,
        as sequences have the same length, programs are many, or rows, whose parts would take much memory."""
        at_once = self._processors()
        if self.sequences == "dense" or batches * units >= MANY * at_once or not self.code.signature.few:
            return 0
        few = -(-units // at_once)
        shares = {waves: waves * at_once // units for waves in range(few, few + 4)}
        full = {waves: n * units / (waves * at_once) for waves, n in shares.items()}
        return shares[next((w for w in full if full[w] > 0.9), max(full, key=lambda w: full[w]))]

    def _group_conditions(self, mode: Mode) -> list[str]:
        rows = self._form.block_q
        most = [
            f"(heads // kv_heads) % {rows} == 0" if mode.heads == rows else f"heads // kv_heads == {mode.heads}",
            f"heads // kv_heads * {self._queries} {'>' if mode.rows > rows else '<='} {rows}",
            f"batches * heads * q_len {'>=' if mode.joined else '<'} {MANY_ROWS}",
            *([f"q_len * heads <= {MOST_ROWS}"] if self.sequences in PACKED else []),
        ]
        if self.sequences == "dense":
            return most
        return [*most, "key_sl > 0", "key_sb % key_sl == 0"]  # is_ragged_readable

    @property
    def _form(self) -> HopperLatentForm:
        found = self.code.form(SPLIT)
        assert isinstance(found, HopperLatentForm)
        return found

    def _options(self, form: Any) -> dict[str, int]:
        found = super()._options(form) if isinstance(form, Tiling) else {"num_warps": 4, **self._rounding()}
        return found | {"launch_pdl": True}  # both wait by themselves for what they read

    def _limits(self, kernel: Kernel, form: Any, mode: Mode) -> dict[str, int]:
        return {}

    def _constants(self, kernel: Kernel, form: Any, mode: Mode) -> dict[str, object]:
        rows, parts, columns = JOINED_FEW if mode.joined else JOINED_MANY
        return super()._constants(kernel, form, mode) | {
            "HEADS": mode.heads, "ORDERED": self._form.ordered and mode.rows > self._form.block_q,
            "JOINED_ROWS": rows, "JOINED_PARTS": parts, "JOINED_COLUMNS": gcd(columns, self._width),
        }  # fmt: skip

    def _processors(self) -> int:
        return processors(self.device)

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        packed = self.sequences in PACKED
        if kernel.name == SPLIT:
            return "n_programs" if packed else "n_row_tiles * kv_heads * n_shares"
        rows, columns = constants["JOINED_ROWS"], self._width // int(str(constants["JOINED_COLUMNS"]))
        if packed and not self.code.signature.few:  # a round of each share, at the most
            return f"n_programs * {self._form.block_q * columns} // {rows}"
        of_each, number = ("heads // kv_heads", "q_len") if packed else ("heads // kv_heads * q_len", "batches")
        blocks = f"({of_each} + {rows} - 1) // {rows} * {number} * kv_heads * {columns}"
        condition = f" * ({found})" if (found := self._launched_if(kernel)) else ""
        return f"least({JOINERS * self._processors()}, {blocks}){condition}"

    def _launched_if(self, kernel: Kernel) -> str:
        """Of packed queries the device alone knows whether there is something to join."""
        return "n_parts > 1 or n_even > 0" if kernel.name == JOIN and self.sequences not in PACKED else ""

    def _made(self, mode: Mode) -> dict[str, str]:
        packed, rows = self.sequences in PACKED, self._form.block_q
        joins = f"2 * (heads // kv_heads * q_len // {rows} + n_sequences + 3)" if packed else "2 * batches + 1"
        joins = "4 * n_programs + 4" if packed and not self.code.signature.few else joins
        return super()._made(mode) | {
            "rows": f"{2 * rows} * n_programs" if packed else "slots * heads * q_len",
            "statistics": f"({self._statistics} * rows + 3) // 4 * 4",  # a multiple of 16 bytes
            "parts": f"empty((statistics + rows * {self._width} + {joins},), (1,), float32)",
            "part_out": "part_lse + 4 * statistics",
            "joins": f"part_out + 4 * rows * {self._width}",
        }

    def _rows(self, aligned: bool) -> dict[str, str]:
        rows = self._form.block_q
        return super()._rows(aligned) | {n: found.text for n, found in self._described().items()} | {
            "key_step": "key_sb // key_sl",
            "n_row_tiles": f"(heads // kv_heads * q_len + {rows - 1}) // {rows}",
            "n_at_once": str(self._processors()),
            "n_programs": "together(heads, kv_heads)",
            "n_even": "even_shares(batches, n_row_tiles * kv_heads)",
            "n_shares": "most(n_parts * batches, n_even)",
            "slots": "2 * (n_shares if n_parts > 1 else n_even)",
        }  # fmt: skip

    def _described(self) -> dict[str, Described]:
        width = self.code.signature.widths.head_dim
        query = Described("query", HeadsBox, width)
        key = Described("key", Box if self.sequences == "dense" else RaggedBox, width)
        return {"query_desc": query, "query_rotary_desc": query, "key_desc": key, "key_rotary_desc": key}

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        constants, types = binding.constants, super()._types(binding, arguments)
        if binding.name != SPLIT:
            return types
        heads = int(str(constants["HEADS"]))
        queries, ones = self._form.block_q // heads, [1, 1] if self.sequences == "dense" else [1, 1, 1]
        keys = min(int(str(constants["PAGE"])), self._form.block_kv) if "PAGE" in constants else self._form.block_kv
        blocks = {"query": [1, queries, heads], "key": [*ones, keys]}
        columns = {"": self._form.piece, "_rotary": ROTARY_COLUMNS}
        shapes = {f"{n}{piece}_desc": [*rows, width] for n, rows in blocks.items() for piece, width in columns.items()}
        return [
            self._launching.descriptor(value, shapes[name]) if isinstance(value, Box) else value
            for name, value in zip([*binding.parameters, *binding.constants], types)
        ]


def _joined(call: CallTensors) -> bool:
    """Whether rows are so many that the parts of each are few."""
    batches, heads, q_len, _ = call.query.shape
    return batches * heads * q_len >= MANY_ROWS
