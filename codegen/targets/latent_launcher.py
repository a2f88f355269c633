"""Launches of target `hopper` for latent caches: tensor descriptors, and a program for each unit of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...compiler.planning.forms import HopperLatentForm, Tiling
from ...compiler.planning.kernels import PIECE_COLUMNS, Kernel
from ..binding import Binding
from .hopper_launcher import Box, RaggedBox, processors
from .split_launcher import JOIN, SPLIT, SplitLauncher
from .triton_launcher import Mode


class HeadsBox(Box):
    """The descriptor of a tensor [B, H, L, D] as [B, L, H, D], so that a tile has rows of several heads."""

    def __init__(self, tensor: Tensor, width: int) -> None:
        super().__init__(tensor.transpose(1, 2), width)
        self.base = tensor


class LatentLauncher(SplitLauncher):
    """A forward of two kernels, of which the first reads a latent cache by TMA."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tools = {**self.tools, "box": Box, "ragged": RaggedBox, "heads_box": HeadsBox, "least": min}

    def form(self, kernel: str, aligned: bool) -> Any:
        found = self.code.form(SPLIT)
        return Tiling(found.block_q, found.block_kv, 4, 1) if kernel == JOIN else found

    def _of_group(self, mode: Mode, group: int, q_len: int) -> Mode:
        return mode._replace(aligned=True, heads=min(group, self._form.block_q))

    def _group_conditions(self, mode: Mode) -> list[str]:
        rows = self._form.block_q
        most = f"(heads // kv_heads) % {rows} == 0" if mode.heads == rows else f"heads // kv_heads == {mode.heads}"
        if self.sequences == "dense":
            return [most]
        return [most, "key_sl > 0", "key_sb % key_sl == 0"]  # is_ragged_readable

    @property
    def _form(self) -> HopperLatentForm:
        found = self.code.form(SPLIT)
        assert isinstance(found, HopperLatentForm)
        return found

    def _options(self, form: Any) -> dict[str, int]:
        return super()._options(form) if isinstance(form, Tiling) else {"num_warps": 4}

    def _limits(self, kernel: Kernel, form: Any, mode: Mode) -> dict[str, int]:
        return {}

    def _constants(self, kernel: Kernel, form: Any, mode: Mode) -> dict[str, object]:
        return super()._constants(kernel, form, mode) | {"HEADS": mode.heads}

    def _processors(self) -> int:
        return processors(self.device)

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name == SPLIT:
            return f"least({self._processors()}, n_work)" if self._form.persistent else "n_work"
        return super()._programs(kernel, constants)

    def _rows(self, aligned: bool) -> dict[str, str]:
        width = self.code.signature.widths.head_dim
        key = f"box(key, {width})" if self.sequences == "dense" else "ragged(key)"
        rows = self._form.block_q
        return super()._rows(aligned) | {
            "query_desc": f"heads_box(query, {width})", "query_rotary_desc": "query_desc",
            "key_desc": key, "key_rotary_desc": "key_desc",
            "key_step": "key_sb // key_sl",
            "n_row_tiles": f"(heads // kv_heads * q_len + {rows - 1}) // {rows}",
            "n_work": "n_row_tiles * batches * kv_heads * n_parts",
        }  # fmt: skip

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        constants, types = binding.constants, super()._types(binding, arguments)
        if binding.name != SPLIT:
            return types
        widths, heads = self.code.signature.widths, int(str(constants["HEADS"]))
        queries, ones = self._form.block_q // heads, [1, 1] if self.sequences == "dense" else [1, 1, 1]
        keys = min(int(str(constants["PAGE"])), self._form.block_kv) if "PAGE" in constants else self._form.block_kv
        blocks = {"query": [1, queries, heads], "key": [*ones, keys]}
        columns = {"": PIECE_COLUMNS, "_rotary": widths.head_dim - widths.value_dim}
        shapes = {f"{n}{piece}_desc": [*rows, width] for n, rows in blocks.items() for piece, width in columns.items()}
        return [
            self._launching.descriptor(value, shapes[name]) if isinstance(value, Box | RaggedBox) else value
            for name, value in zip([*binding.parameters, *binding.constants], types)
        ]
