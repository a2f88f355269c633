"""How the keys of a call are divided among programs, whose parts a second kernel joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...compiler.planning.cost import parts_of, sizes_of, split_programs_per_sm
from ...compiler.planning.machines.hardware import Hardware
from ...compiler.planning.quantities import Sizes
from ...compiler.planning.records import Shape
from ...compiler.planning.signature import MOST_SHORT
from ...compiler.planning.splits import Parts, longest_visits
from ...compiler.planning.target import CallTensors
from ...ir.errors import WeftError
from ...ir.walk import scalars
from .job import Job, Mode, Part

MOST_DIVISIONS = 4096  # that are kept
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


class Division(Part):
    """Into how many parts keys are divided, by what the host knows of a call."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.kernel = next(k.kernel for k in job.code.kernels if k.kernel.divides)
        self.divided, self._of_tiles = _Divisions(self._parts), _Divisions(self._by_tiles)
        read = {scalar.name for line in job.facts.kv_tiles.body for scalar in scalars(line.value)}
        self._numbers = [p.name for p in job.facts.attention.canonical.parameters if p.name in read]
        self._divisions = _Divisions(self.divide)

    # -- one call ------------------------------------------------------------------------------------------------------
    def parts_of(self, call: CallTensors) -> Parts:
        batches, q_len = self._sequences_of(call)
        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        offset = None if call.ragged is not None else call.q_offset
        known = offset if isinstance(offset, int) else None
        return self.divide(batches, heads, kv_heads, q_len, call.kv_rows, known, call.head_dim, call.operands)

    def rows_of(self, call: CallTensors) -> tuple[int, int]:
        """Query heads a key head, and queries of a sequence."""
        return call.query.shape[1] // call.key.shape[1], self._sequences_of(call)[1]

    def _sequences_of(self, call: CallTensors) -> tuple[int, int]:
        """Sequences, and queries of each: of packed ones as if all had as many."""
        batches, heads, q_len, _ = call.query.shape
        if not self._job.sequences.rows.packed:
            return batches, q_len
        assert call.ragged is not None
        if q_len * heads > MOST_ROWS:
            raise WeftError(f"{self._job.facts.attention.name}: {_TOO_MANY}, got {q_len} of {heads} heads")
        batches = call.ragged.number(call.query)
        return batches, self._tile_queries(heads // call.key.shape[1]) if self.takes_short else -(-q_len // batches)

    def _tile_queries(self, group: int) -> int:
        """Queries of a tile of rows."""
        return max(int(self.form.block_q) // group, 1)

    @property
    def form(self) -> Any:
        """Of the kernel that divides keys."""
        return self._job.form(self.kernel.name)

    @property
    def takes_short(self) -> bool:
        """Whether long sequences are those of another module."""
        return self._job.signature.serves == "short"

    # -- texts ---------------------------------------------------------------------------------------------------------
    def tools(self) -> dict[str, Any]:
        return {"divide": self.divide, "divisions": self._divisions}

    def conditions(self, mode: Mode) -> list[str]:
        return [f"q_len * heads <= {MOST_ROWS}"] if self._job.sequences.rows.packed else []

    def found_by_call(self, mode: Mode) -> dict[str, str]:
        dense = not self._job.sequences.ragged
        number = self._job.sequences.number
        offset = "q_offset" if dense and self._job.has_number and not mode.per_row else "None"
        sizes = f"{number}, heads, kv_heads, {self.queries}, {self._job.kv_rows}, {offset}, {mode.head_dim}"
        division = f"divide({sizes}, {'call.operands' if self._numbers else '{}'})"
        # a cache that is not dense has room for as many keys at every step, so that they need not be rounded first
        if not dense and not self._numbers:
            division = f"divisions[{sizes}]"
        return {"division": division, "n_parts": "division[0]", "least_tiles": "division[1]"}

    @property
    def queries(self) -> str:
        """Queries of a sequence, as an expression: of packed ones as many as each would have if all had as many.

        The average says nothing of short ones beside long ones: each is taken to have a tile of rows.
        """
        if self.takes_short:
            return f"max({self.form.block_q} // (heads // kv_heads), 1)"
        return "((q_len + n_sequences - 1) // n_sequences)" if self._job.sequences.rows.packed else "q_len"

    @property
    def part_rows(self) -> str:
        """Rows of a head that parts have a place for, as an expression."""
        return f"min(q_len, {MOST_SHORT} * n_sequences)" if self.takes_short else "q_len"

    @property
    def width(self) -> int:
        """Columns of a part."""
        return sum(s.width for s in self._job.code.segments.v)

    @property
    def statistics(self) -> int:
        """Of a row of a part."""
        return 2 if self._job.shifts else 1

    # -- how keys are divided ------------------------------------------------------------------------------------------
    def divide(
        self, batches: int, heads: int, kv_heads: int, q_len: int, kv_len: int, q_offset: int | None, head_dim: int,
        operands: Mapping[str, Any] = MappingProxyType({}),
    ) -> Parts:  # fmt: skip
        """By sizes and scalars that the host knows. Lengths count up to a 32nd, so that a cache that grows by a token
        does not ask anew. head_dim: what a mask reads, which is not the width of an absorbed query."""
        step = 1 << max(kv_len.bit_length() - 6, 4)
        rounded = -(-kv_len // step) * step
        short = 0 if q_offset is None else (kv_len - q_len - q_offset) // step * step
        key = (batches, heads, kv_heads, q_len, rounded, short, head_dim)
        return self.divided[(*key, *[operands[name] for name in self._numbers]) if self._numbers else key]

    def _parts(
        self, batches: int, heads: int, kv_heads: int, q_len: int, kv_len: int, short: int, head_dim: int,
        *numbers: float,
    ) -> Parts:  # fmt: skip
        form = self.form
        offset = kv_len - q_len - short
        env = {"head_dim": head_dim, **dict(zip(self._numbers, numbers))}
        tiles = self._job.facts.kv_tiles
        unknown = self._job.signature.offset == "per_row"
        longest = longest_visits(tiles, q_len, kv_len, form.block_q, form.block_kv, offset, env, unknown)
        return self._of_tiles[batches, heads, kv_heads, q_len, longest]

    def _by_tiles(self, batches: int, heads: int, kv_heads: int, q_len: int, longest: int) -> Parts:
        """By the tiles of keys that the longest unit visits: beyond them a division asks nothing of lengths."""
        machine, form = self._job.device.hardware(), self.form
        narrow = form.of_rows(heads // kv_heads * q_len)
        sizes = self._sizes(narrow, machine, (batches, heads, kv_heads, q_len, longest * form.block_kv))
        uneven, few_queries = self._job.sequences.ragged, self._job.signature.few_queries
        return parts_of(self.kernel, narrow, sizes, longest, machine, self._job.code.segments, uneven, few_queries)

    def _sizes(self, form: Any, machine: Hardware, lengths: tuple[int, int, int, int, int]) -> Sizes:
        """lengths: B, Hq, Hkv, L and T."""
        signature, code = self._job.signature, self._job.code
        widths, stored = signature.widths, signature.dtypes.fp8_key
        shape = Shape(*lengths, widths.head_dim, widths.value_dim, signature.dtype, stored)
        return sizes_of(self.kernel, form, shape, machine, code.segments, 1, self._job.facts.traits)

    def registers(self, form: Any, rows: int) -> int:
        """Of a thread, that leave room for the programs that a division counts on."""
        machine = self._job.device.hardware()
        sizes = self._sizes(form, machine, (1, rows, 1, 1, form.block_kv))
        programs = split_programs_per_sm(self.kernel, form, sizes, machine, self._job.code.segments)
        return machine.registers_per_sm // (programs * 32 * int(form.num_warps)) // 8 * 8
