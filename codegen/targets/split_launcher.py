"""Launches of split-KV kernels: how a call's keys are divided, and the parts between the two kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from ...compiler.analysis.facts import Facts
from ...compiler.planning.cost import parts_of, sizes_of, split_programs_per_sm
from ...compiler.planning.hardware import Hardware, for_device
from ...compiler.planning.kernel import Kernel
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.quantities import Sizes
from ...compiler.planning.records import Shape
from ...compiler.planning.signature import MOST_SHORT, PACKED, PAGED, starts_early
from ...compiler.planning.splits import JOINED_PARTS, Parts, longest_visits, tile_rows
from ...compiler.planning.target import CallTensors, Named, Partition, Place
from ...ir.errors import WeftError
from ...ir.walk import scalars
from .triton.forms import Tiling
from .triton.kernels.measures import RUNS
from .triton.kernels.split_kv import JOIN_PARTS, SPLIT_FORWARD
from .triton_launcher import Mode, TritonLauncher
from .triton_workspace import flat_place

SPLIT, JOIN = SPLIT_FORWARD.name, JOIN_PARTS.name
MOST_DIVISIONS = 4096  # that are kept
ROWS_APART = 4  # programs that join the rows of a short sequence, each every fourth: most have one row or none
MOST_ROWS = 2**30  # of packed queries, times heads: places of tiles have 32 bits
_TOO_MANY = "schedule split_kv: expected up to 2**30 packed queries times heads; use schedule='flash'"


class _Divisions(dict[tuple[Any, ...], Parts]):
    """How keys are divided, by sizes of a call and what follows from them."""

    def __init__(self, divide: Callable[..., Parts]) -> None:
        super().__init__()
        self._divide = divide

    def __missing__(self, sizes: tuple[Any, ...]) -> Parts:
        if len(self) >= MOST_DIVISIONS:
            self.clear()
        found = self[sizes] = self._divide(*sizes)
        return found


def _first_of(ways: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """What the first way finds that takes the call."""
    return lambda *given: next((found for way in ways if (found := way(*given)) is not None), None)


class SplitLauncher(TritonLauncher):
    """A forward of two kernels, of which the second is launched where there is something to join."""

    numbers = TritonLauncher.numbers | {
        "division", "n_parts", "least_tiles", "rows", "statistics", "part_out", "part_lse",
    }  # fmt: skip

    def __init__(
        self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: int, interprets: bool
    ) -> None:
        super().__init__(modules, code, facts, device, interprets)
        self.tools = {"divide": self._divide, "divisions": _Divisions(self._divide)}
        # the shortest ways, and those of calls like the last one
        self._ways: dict[Mode, tuple[Callable[..., Any], ...]] = {}
        self._known, self._of_tiles = _Divisions(self._parts), _Divisions(self._by_tiles)
        read = {scalar.name for line in facts.kv_tiles.body for scalar in scalars(line.value)}
        self._numbers = [p.name for p in facts.attention.parameters if p.name in read]

    # -- one call ------------------------------------------------------------------------------------------------------
    def partition(self, call: CallTensors, results: Named) -> Partition:
        found = super().partition(call, results)
        mode = found.mode
        assert isinstance(mode, Mode)
        (batches, heads, q_len, _), kv_heads = call.query.shape, call.key.shape[1]
        if self.sequences in PACKED:  # as if all had as many queries
            assert call.ragged is not None
            if q_len * heads > MOST_ROWS:
                raise WeftError(f"{self.facts.attention.name}: {_TOO_MANY}, got {q_len} of {heads} heads")
            batches = call.ragged.number(call.query)
            q_len = self._tile_queries(heads // kv_heads) if self._takes_short else -(-q_len // batches)
        mode = self._of_group(mode, heads // kv_heads, q_len)
        offset = None if call.ragged is not None else call.q_offset
        known = offset if isinstance(offset, int) else None
        parts = self._divide(batches, heads, kv_heads, q_len, call.kv_rows, known, call.head_dim, call.operands)
        return Partition(parts.parts, mode, parts.tiles)

    def _of_group(self, mode: Mode, group: int, q_len: int) -> Mode:
        """The mode of calls with as many query heads a key head, and queries."""
        return mode._replace(rows=tile_rows(self.form(SPLIT, mode.aligned).block_q, group * q_len))

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        batches, heads, q_len, _ = call.query.shape
        n_parts = partition.splits
        if self._takes_short:  # as `_part_rows`
            q_len = min(q_len, MOST_SHORT * call.ragged.number(call.query))  # type: ignore[union-attr]
        rows = n_parts * batches * heads * q_len if n_parts > 1 else 1
        places = {"part_out": flat_place(rows, self._width), "part_lse": flat_place(self._statistics * rows)}
        return super().workspace(call, results, partition) | places

    @property
    def _width(self) -> int:
        return sum(s.width for s in self.code.segments.v)

    @property
    def _statistics(self) -> int:
        return 2 if self.shifts else 1

    def _divided(self, partition: Partition) -> dict[str, Any]:
        return {"n_parts": partition.splits, "least_tiles": partition.least}

    # -- how keys are divided ------------------------------------------------------------------------------------------
    def _machine(self) -> Hardware:
        return for_device("cpu" if self.interprets else torch.device("cuda", self.device))

    def _divide(
        self, batches: int, heads: int, kv_heads: int, q_len: int, kv_len: int, q_offset: int | None, head_dim: int,
        operands: Mapping[str, Any] = MappingProxyType({}),
    ) -> Parts:  # fmt: skip
        """By sizes and scalars that the host knows. Lengths count up to a 32nd, so that a cache that grows by a token
        does not ask anew. head_dim: what a mask reads, which is not the width of an absorbed query."""
        step = 1 << max(kv_len.bit_length() - 6, 4)
        rounded = -(-kv_len // step) * step
        short = 0 if q_offset is None else (kv_len - q_len - q_offset) // step * step
        key = (batches, heads, kv_heads, q_len, rounded, short, head_dim)
        return self._known[(*key, *[operands[name] for name in self._numbers]) if self._numbers else key]

    def _parts(
        self, batches: int, heads: int, kv_heads: int, q_len: int, kv_len: int, short: int, head_dim: int,
        *numbers: float,
    ) -> Parts:  # fmt: skip
        form = self.form(SPLIT, True)
        offset = kv_len - q_len - short
        env = {"head_dim": head_dim, **dict(zip(self._numbers, numbers))}
        longest = longest_visits(self.facts.kv_tiles, q_len, kv_len, form.block_q, form.block_kv, offset, env)
        return self._of_tiles[batches, heads, kv_heads, q_len, longest]

    def _by_tiles(self, batches: int, heads: int, kv_heads: int, q_len: int, longest: int) -> Parts:
        """By the tiles of keys that the longest unit visits: beyond them a division asks nothing of lengths."""
        machine, form = self._machine(), self.form(SPLIT, True)
        narrow = form.of_rows(heads // kv_heads * q_len)
        sizes = self._sizes(narrow, machine, (batches, heads, kv_heads, q_len, longest * form.block_kv))
        uneven, few = self.sequences != "dense", self.code.signature.few
        return parts_of(SPLIT_FORWARD, narrow, sizes, longest, machine, self.code.segments, uneven, few)

    def _sizes(self, form: Tiling, machine: Hardware, lengths: tuple[int, int, int, int, int]) -> Sizes:
        """lengths: B, Hq, Hkv, L and T."""
        widths = self.code.signature.widths
        shape = Shape(*lengths, widths.head_dim, widths.value_dim, self.code.signature.dtype)
        return sizes_of(SPLIT_FORWARD, form, shape, machine, self.code.segments, 1, self.facts.traits)

    def _limits(self, kernel: Kernel, form: Tiling, mode: Mode) -> dict[str, int]:
        """As many registers as leave room for the programs that a division counts on; both kernels may start early."""
        signature, machine = self.code.signature, self._machine()
        waits = kernel.name in (SPLIT, JOIN) and starts_early(signature.arch)
        early: dict[str, int] = {"launch_pdl": True} if waits else {}
        if kernel.name != SPLIT or self.interprets or not signature.arch.startswith("sm_"):
            return early
        form = form.of_rows(mode.rows)
        sizes = self._sizes(form, machine, (1, mode.rows, 1, 1, form.block_kv))
        programs = split_programs_per_sm(kernel, form, sizes, machine, self.code.segments)
        most = machine.registers_per_sm // (programs * 32 * form.num_warps) // 8 * 8
        return early | ({"maxnreg": most} if most < 255 else {})

    # -- what is prepared ----------------------------------------------------------------------------------------------
    def _go_directly(self, mode: Mode, ready: Any) -> None:
        super()._go_directly(mode, ready)
        self._ways[mode] = self.direct, self.repeated, self.growing
        if len(self._ways) > 1:
            self.direct, self.repeated, self.growing = map(_first_of, zip(*self._ways.values()))

    def _conditions(self, mode: Mode, lengths: Sequence[str]) -> list[str]:
        return super()._conditions(mode, lengths) + self._group_conditions(mode)

    def _group_conditions(self, mode: Mode) -> list[str]:
        """That a call has what `_of_group` made of another one."""
        rows, most = f"heads // kv_heads * {self._queries}", self.form(SPLIT, mode.aligned).block_q
        least = [f"{rows} > {mode.rows // 2}"] if mode.rows > 16 else []
        within = [f"q_len * heads <= {MOST_ROWS}"] if self.sequences in PACKED else []
        return within + least + ([f"{rows} <= {mode.rows}"] if mode.rows < most else [])

    @property
    def _queries(self) -> str:
        """Queries of a sequence, as an expression: of packed ones as many as each would have if all had as many.

        The average says nothing of short ones beside long ones: each is taken to have a tile of rows.
        """
        if self._takes_short:
            return f"max({self.form(SPLIT, True).block_q} // (heads // kv_heads), 1)"
        return "((q_len + n_sequences - 1) // n_sequences)" if self.sequences in PACKED else "q_len"

    @property
    def _part_rows(self) -> str:
        """Rows of a head that parts have a place for, as an expression."""
        return f"min(q_len, {MOST_SHORT} * n_sequences)" if self._takes_short else "q_len"

    def _tile_queries(self, group: int) -> int:
        """Queries of a tile of rows."""
        return max(self.form(SPLIT, True).block_q // group, 1)

    @property
    def _takes_short(self) -> bool:
        """Whether long sequences are those of another module."""
        return self.code.signature.share == "short"

    def _made(self, mode: Mode) -> dict[str, str]:
        kv_len = "table.shape[1] * kv_len" if self.sequences in PAGED else "kv_len"
        number = "n_sequences" if self.sequences in PACKED else "batches"
        offset = "q_offset" if self.sequences == "dense" and self._has_number(mode) else "None"
        sizes = f"{number}, heads, kv_heads, {self._queries}, {kv_len}, {offset}, {mode.head_dim}"
        # a cache that is not dense has room for as many keys at every step, so that they need not be rounded first
        kept = self.sequences != "dense" and not self._numbers
        return super()._made(mode) | {
            "division": f"divisions[{sizes}]"
            if kept
            else f"divide({sizes}, {'call.operands' if self._numbers else '{}'})",
            "n_parts": "division[0]",
            "least_tiles": "division[1]",
            # all in one allocation, which takes the host longer than addresses; one part writes the output itself
            "rows": f"n_parts * batches * heads * {self._part_rows}",
            "statistics": f"({self._statistics} * rows + 3) // 4 * 4",  # a multiple of 16 bytes
            "parts": f"empty((statistics + rows * {self._width},), (1,), float32) if n_parts > 1 else lse",
            "part_lse": "parts.data_ptr()",
            "part_out": "part_lse + (4 * statistics if n_parts > 1 else 0)",
        }

    def _constants(self, kernel: Kernel, form: Tiling, mode: Mode) -> dict[str, object]:
        constants = super()._constants(kernel, form, mode)
        if kernel.name in RUNS:
            return constants
        return constants | {
            "BLOCK_Q": mode.rows, "SPAN_Q": form.block_q, "ROWS_APART": ROWS_APART, "JOINED_PARTS": JOINED_PARTS,
        }  # fmt: skip

    @property
    def _neighbours(self) -> int:
        return 0 if self.facts.mask_differs_by_head else 1  # of rows of several heads, who ask for their runs

    def form(self, kernel: str, aligned: bool) -> Tiling:
        """That of the kernel that is joined has a few warps of its own."""
        found = super().form(SPLIT if kernel == JOIN else kernel, aligned)
        return replace(found, num_warps=4, num_stages=1) if kernel == JOIN else found

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name == SPLIT:
            block = constants["BLOCK_Q"]
            if self._takes_short:
                return (
                    f"({MOST_SHORT} * (heads // kv_heads) + {block} - 1) // {block} * n_sequences * kv_heads * n_parts"
                )
            if self.sequences in PACKED:
                return f"(heads // kv_heads * q_len // {block} + n_sequences + 1) * kv_heads * n_parts"
            return f"(heads // kv_heads * q_len + {block} - 1) // {block} * batches * kv_heads * n_parts"
        if kernel.name == JOIN:
            rows = f"n_sequences * {ROWS_APART}" if self._takes_short else "batches * q_len"
            return f"{rows} * heads * (n_parts > 1)"
        return super()._programs(kernel, constants)

    def _launched_if(self, kernel: Kernel) -> str:
        return "n_parts > 1" if kernel.name == JOIN else super()._launched_if(kernel)
