"""Launches of target `hopper` for latent caches: descriptors, and into how many shares the keys are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from ....compiler.planning.buffer import ALWAYS, Buffer
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.target import CallTensors
from ...launch.binding import Binding
from ...launch.descriptors import Described, Descriptors, HeadsBox, rows_described
from ...launch.division import Division
from ...launch.job import Job, KernelLaunch, Mode, OwnPart
from .forms import HopperLatentForm
from .kernels.latent import ROTARY_COLUMNS

MANY = 16  # programs for each SM, from which on sequences of any lengths keep all busy to the end
# (rows, parts, columns) that a program which joins parts reads together: where rows are many, parts are few
JOINED_FEW, JOINED_MANY = (4, 2, 512), (2, 64, 128)
MANY_ROWS = 512
JOINERS = 32  # programs for each SM at most: more only cost time where nothing is to be joined


class LatentKernels(OwnPart):
    """A forward of two kernels, of which the first reads a latent cache by TMA."""

    def __init__(self, job: Job, division: Division) -> None:
        self._job, self._division = job, division
        form = division.form
        assert isinstance(form, HopperLatentForm)
        self._form = form
        self._is_packed, self._has_few_queries = job.sequences.rows.packed, job.signature.few_queries
        width = job.signature.widths.head_dim
        query, key = Described("query", HeadsBox, width), rows_described(job, "key", width)
        self._rotary = f"key{job.own_keys[0]}" if job.own_keys else "key"  # the tensor that has these columns
        rotary = rows_described(job, self._rotary, width)
        found = {"query_desc": query, "query_rotary_desc": query, "key_desc": key, "key_rotary_desc": rotary}
        self.descriptors = Descriptors(job, found, self._tiles)

    def tools(self) -> dict[str, Any]:
        return {"least": min, "most": max, "even_shares": self.even_shares, "together": self._together}

    # -- one call ------------------------------------------------------------------------------------------------------
    def mode_of(self, mode: Mode, call: CallTensors) -> Mode:
        rows, (group, q_len) = self._form.block_q, self._division.rows_of(call)
        batches, heads, all_queries, _ = call.query.shape
        return mode._replace(
            aligned=True, heads=min(group, rows), rows=rows * (1 + (group * q_len > rows)),
            joined=batches * heads * all_queries >= MANY_ROWS,
        )  # fmt: skip

    def conditions(self, mode: Mode) -> list[str]:
        """That a call has what `mode_of` made of another one."""
        rows = self._form.block_q
        return [
            f"(heads // kv_heads) % {rows} == 0" if mode.heads == rows else f"heads // kv_heads == {mode.heads}",
            f"heads // kv_heads * {self._division.queries} {'>' if mode.rows > rows else '<='} {rows}",
            f"batches * heads * q_len {'>=' if mode.joined else '<'} {MANY_ROWS}",
        ]

    def _together(self, heads: int, kv_heads: int) -> int:
        """Programs of packed queries: as many as run together, at least one for each tile of rows of a round."""
        return max(self._job.device.processors(), heads // self._form.block_q, 2 * kv_heads)

    def even_shares(self, batches: int, units: int) -> int:
        """How many shares, each of so many programs, keep the machine busy where they are equal; 0: they need not be,
        as sequences have the same length, programs are many, or rows, whose parts would take much memory."""
        at_once = self._job.device.processors()
        if not self._job.sequences.ragged or batches * units >= MANY * at_once or not self._has_few_queries:
            return 0
        few = -(-units // at_once)
        shares = {waves: waves * at_once // units for waves in range(few, few + 4)}
        full = {waves: n * units / (waves * at_once) for waves, n in shares.items()}
        return shares[next((w for w in full if full[w] > 0.9), max(full, key=lambda w: full[w]))]

    # -- texts ---------------------------------------------------------------------------------------------------------
    def buffers(self, mode: Mode) -> list[Buffer]:
        rows, joins = "slots * heads * q_len", "2 * batches + 1"
        if self._is_packed:
            rows = f"{2 * self._form.block_q} * n_programs"
            tiles = f"heads // kv_heads * q_len // {self._form.block_q}"
            joins = f"2 * ({tiles} + n_sequences + 3)" if self._has_few_queries else "4 * n_programs + 4"
        when = ALWAYS if self._is_packed else "slots > 0"
        return [
            Buffer("part_lse", (f"{self._division.statistics} * {rows}",), when=when),
            Buffer("part_out", (rows, str(self._division.width)), when=when),
            Buffer("joins", (joins,), "int32"),
        ]

    def rows(self, mode: Mode) -> dict[str, str]:
        rows = self._form.block_q
        return {
            "key_step": "key_sb // key_sl",
            **({"rope_step": f"{self._rotary}_sb // {self._rotary}_sl"} if self._rotary != "key" else {}),
            "n_row_tiles": f"(heads // kv_heads * q_len + {rows - 1}) // {rows}",
            "n_at_once": str(self._job.device.processors()),
            "n_programs": "together(heads, kv_heads)",
            "n_even": "even_shares(batches, n_row_tiles * kv_heads)",
            "n_shares": "most(n_parts * batches, n_even)",
            "slots": "2 * (n_shares if n_parts > 1 else n_even)",
        }

    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        if not kernel.shares_keys:
            return None
        rows, parts, columns = JOINED_FEW if mode.joined else JOINED_MANY
        constants = {
            "BLOCK_Q": mode.rows, "SPAN_Q": self._form.block_q, "HEADS": mode.heads,
            "ORDERED": self._form.ordered and mode.rows > self._form.block_q, "JOINED_ROWS": rows,
            "JOINED_PARTS": parts, "JOINED_COLUMNS": gcd(columns, self._division.width),
        }  # fmt: skip
        early = {"launch_pdl": True}  # both wait by themselves for what they read
        if kernel.divides:
            programs = "n_programs" if self._is_packed else "n_row_tiles * kv_heads * n_shares"
            return KernelLaunch(programs, {"num_warps": 4, **self._job.rounding, **early}, constants)
        options = {"num_warps": 4, "num_stages": 1, **self._job.rounding, **early}
        # of packed queries the device alone knows whether there is something to join
        only = "" if self._is_packed else "n_parts > 1 or n_even > 0"
        programs = self._joiners(rows, self._division.width // gcd(columns, self._division.width))
        return KernelLaunch(f"{programs} * ({only})" if only else programs, options, constants, only_if=only)

    def _joiners(self, rows: int, columns: int) -> str:
        """Programs that join, given what one of them reads together."""
        if self._is_packed and not self._has_few_queries:  # a round of each share, at the most
            return f"n_programs * {self._form.block_q * columns} // {rows}"
        of_each, number = ("heads // kv_heads", "q_len") if self._is_packed else (
            "heads // kv_heads * q_len", "batches"
        )  # fmt: skip
        blocks = f"({of_each} + {rows} - 1) // {rows} * {number} * kv_heads * {columns}"
        return f"least({JOINERS * self._job.device.processors()}, {blocks})"

    def _tiles(self, binding: Binding) -> Mapping[str, Sequence[int]]:
        """The tile of each descriptor, by its name."""
        heads, page = int(str(binding.constants["HEADS"])), int(str(binding.constants.get("PAGE") or 0))
        queries, ones = self._form.block_q // heads, [1, 1, 1] if self._job.sequences.ragged else [1, 1]
        keys = min(page or self._form.block_kv, self._form.block_kv)
        blocks = {"query": [1, queries, heads], "key": [*ones, keys]}
        columns = {"": self._form.piece, "_rotary": ROTARY_COLUMNS}
        return {f"{n}{piece}_desc": [*rows, width] for n, rows in blocks.items() for piece, width in columns.items()}
