"""Gradients of operands: where kernels leave their sums, how sums that are listed are added up, and what becomes of
them. With tables of what depends on the distance alone, which tell how far out a gradient levels off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .....compiler.analysis.tiles.results import PAIR_KINDS
from .....compiler.analysis.values.distances import ByDistance
from .....compiler.planning.buffer import ALWAYS, NEVER, Buffer
from .....compiler.planning.gradient_sums import DIAGONAL_PARTS, DIAGONAL_PROGRAMS, DIAGONAL_REGISTERS, MOST_LISTED, Way
from .....compiler.planning.kernel import Kernel
from .....compiler.planning.target import CallTensors, Named
from .....ir.walk import loads
from ....launch.adding import by_sequence, by_slot, reduced
from ....launch.job import KV_TILES, Q_TILES, Job, KernelLaunch, Mode, OwnPart, SummingPart
from ....launch.summing import SHARES
from ..kernels.pair_sums import DDIAGONALS, DPAIRS
from ..kernels.tables import BESIDE, DISTANCE_TABLES
from ..kernels.work import WORK
from .measures import options_of

DIAGONALS = f"({Q_TILES} + ({KV_TILES}) - 1) * batches * heads * {DIAGONAL_PARTS}"  # parts of them, of a dense call
NOT_OWN = frozenset({*BESIDE, *WORK, DPAIRS, DDIAGONALS})  # kernels that no target's own part launches
ALL_AT_ONCE = {"first_program": "0", "most_programs": str(2**31 - 1)}  # of flash_dpairs


class Sums(SummingPart):
    """Tables by distance, sums of operands' gradients, and the kernels that sum what pairs read."""

    def __init__(self, job: Job, own: OwnPart) -> None:
        self._job, self._own = job, own

    # -- buffers -------------------------------------------------------------------------------------------------------
    def buffers(self, mode: Mode) -> list[Buffer]:
        found = [
            Buffer(f"distances{n}", (*_table_heads(t), "1", "n_distances")) for n, t in enumerate(self._job.tables)
        ]
        if (levels := self._job.levels) is not None:
            size = "batches" if levels.by_batch else "1", "heads" if levels.by_head else "1", "1", "2"
            found.append(Buffer("levels", size, "int32", ALWAYS))
        for n, gradient in enumerate(self._job.gradients):
            way = self._job.ways.of_reads[n]
            is_listed = way is not None and way.owner == "diagonals"
            found += self._diagonals(n, mode) if is_listed else self._own.sum_buffers(n, gradient, mode)
        return found

    def _diagonals(self, n: int, mode: Mode) -> list[Buffer]:
        """Of the sums of diagonals, and behind them those of level pairs: a list of sums and entries, and the range of
        entries of each program. What nobody lists `clear_levels` clears."""
        block, parts = self._job.form(DDIAGONALS, mode.aligned).block_q, self._diagonal_slots(mode)
        sums, entries = listed(self._job, n, (f"{parts} * {2 * block} + {self._own.level_sums(mode)}",), NEVER)
        unlisted = ALWAYS if self._job.sequences.ragged else NEVER  # programs of what is not there write none
        return [sums, entries, Buffer(f"range{n}", (parts, "2"), entries.dtype, unlisted)]

    def _diagonal_slots(self, mode: Mode) -> str:
        """Parts of diagonals, of which flash_ddiagonals lists sums."""
        text = DIAGONALS
        if self._job.sequences.keys.packed:
            text = "(q_len // {BLOCK_Q} + kv_len // {BLOCK_KV} + 2 * n_sequences + 2) * heads * " + str(DIAGONAL_PARTS)
        block = self._job.form(DDIAGONALS, mode.aligned).block_q
        return text.format(BLOCK_Q=block, BLOCK_KV=block)

    # -- the vocabulary ------------------------------------------------------------------------------------------------
    def rows(self, mode: Mode) -> dict[str, str]:
        rows = self._table_rows(mode)
        for n, gradient in enumerate(self._job.gradients):
            tensor = gradient.load.tensor
            rows |= {f"e{n}_{d}": f"arg_{tensor.name}.shape[{d}]" for d in range(1, tensor.rank)}
        return rows

    def found_by_call(self, mode: Mode) -> dict[str, str]:
        return dict(ALL_AT_ONCE) if self._job.gradients else {}

    def _table_rows(self, mode: Mode) -> dict[str, str]:
        """Which distances tables have: all of a call; of sequences with lengths all that any may have."""
        if not self._job.tables:
            return {}
        beyond, kv_rows = self._beyond(mode), self._job.kv_rows
        ends = f"q_offset - {kv_rows} + 1" if self._job.has_number else "1 - q_len"
        rows = {"first_distance": f"{ends} - {beyond}", "n_distances": f"q_len + {kv_rows} - 1 + {2 * beyond}"}
        values = [table.value for table in self._job.tables]
        if self._job.levels is not None:
            values += self._job.levels.indices
            block = self._job.form(DDIAGONALS, mode.aligned).block_q
            rows |= {"beyond": str(beyond), "level_list": f"{self._diagonal_slots(mode)} * {2 * block}"}
        read = {load.tensor for value in values for load in loads(value)}
        return rows | {f"last{d}_{t.name}": f"arg_{t.name}.shape[{d}] - 1" for t in read for d in range(t.rank)}

    def _beyond(self, mode: Mode) -> int:
        """Distances that tables have at either end for tiles that lie over the ends of a call."""
        names = [k.name for k in self._job.code.kernels if k.name != DISTANCE_TABLES]
        return max(max(self._job.blocks(name, mode).values()) for name in names)

    # -- launches ------------------------------------------------------------------------------------------------------
    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        launched = {DISTANCE_TABLES: self._distance_tables, DPAIRS: self._dpairs, DDIAGONALS: self._ddiagonals}
        return launched[kernel.name](mode) if kernel.name in launched else None

    def _distance_tables(self, mode: Mode) -> KernelLaunch:
        tables: list[Any] = [*self._job.tables, *([] if self._job.levels is None else [self._job.levels])]
        heads = "batches * heads" if any(t.by_batch for t in tables) else "heads"
        rows = heads if any(t.by_batch or t.by_head for t in tables) else "1"
        form = self._job.form(DISTANCE_TABLES, mode.aligned)
        programs = f"(n_distances + {form.block_kv} - 1) // {form.block_kv} * {rows}"
        return KernelLaunch(programs, options_of(self._job, form))

    def _dpairs(self, mode: Mode) -> KernelLaunch:
        programs = f"min({pair_programs(self._job, mode)} - first_program, most_programs)"
        return KernelLaunch(programs, options_of(self._job, self._job.form(DPAIRS, mode.aligned)))

    def _ddiagonals(self, mode: Mode) -> KernelLaunch:
        form, levels = self._job.form(DDIAGONALS, mode.aligned), self._job.levels
        programs = self._diagonal_slots(mode)
        if levels is not None and not self._job.sequences.keys.packed:  # programs go through those of a head
            parts = f"batches * heads * {DIAGONAL_PARTS}"
            programs = f"min({programs}, {parts} * (1 + {DIAGONAL_PROGRAMS} // ({parts})))"
        options, widths = options_of(self._job, form), self._job.signature.widths
        narrow = max(widths.head_dim, widths.value_dim) <= 64  # or loops spill
        compiles = self._job.signature.arch == "sm_90" and not self._job.device.interprets
        if levels is not None and compiles and narrow and form.num_warps == 4:
            options |= {"maxnreg": DIAGONAL_REGISTERS}
        return KernelLaunch(programs, options, {"PARTS": DIAGONAL_PARTS})

    # -- what becomes of sums ------------------------------------------------------------------------------------------
    def listed_by_pairs(self) -> list[int]:
        return [n for n, way in enumerate(self._job.ways.of_reads) if way == Way("pairs", "list")]

    def tables(self, call: CallTensors, workspace: Named, mode: Mode) -> dict[int, Tensor]:
        tables = {}
        for n, way in enumerate(self._job.ways.of_reads):
            if way is not None and way.owner == "diagonals":
                lists = workspace[f"sum{n}"], workspace[f"entry{n}"], workspace[f"range{n}"]
                tables[n] = self.of_list(mode, *lists, self._job.operand(n, call.operands))
            elif way is not None and way.finish == "list":
                tables[n] = torch.zeros(self._job.operand(n, call.operands).shape, device=call.query.device)
                self._job.device.add_listed(tables[n], workspace[f"entry{n}"], workspace[f"sum{n}"])
        return tables

    def of_list(self, mode: Mode, *lists: Tensor) -> Tensor:
        """What flash_ddiagonals listed (sums, entries, ranges), float32 in the shape of its operand, the last one."""
        sums, entries, ranges, operand = lists
        shares = sums.new_empty((SHARES, operand.numel()))
        group = 2 * self._job.form(DDIAGONALS, mode.aligned).block_q
        self._job.device.sum_listed(sums, entries, ranges, group, shares)
        return shares.sum(0).view(operand.shape)

    def programs(self, mode: Mode) -> tuple[str, str]:
        return pair_programs(self._job, mode), pairs_at_once(self._job, mode)

    def clear(self, workspace: Named, mode: Mode) -> None:
        """Level pairs of sequences that are not there are listed by nobody."""
        for n, way in enumerate(self._job.ways.of_reads):
            if way is not None and way.owner == "diagonals" and self._job.levels is not None:
                first = workspace[f"range{n}"].shape[0] * 2 * self._job.form(DDIAGONALS, mode.aligned).block_q
                for name in ("sum", "entry"):
                    workspace[f"{name}{n}"][first:].zero_()

    def finished(self, call: CallTensors, workspace: Named, tables: Mapping[int, Tensor]) -> list[Tensor]:
        q_len, ragged, found = call.query.shape[2], call.ragged, []
        for n, gradient in enumerate(self._job.gradients):
            sums = tables[n] if n in tables else workspace[f"sum{n}"]
            if gradient.kind in PAIR_KINDS:
                found.append(sums)
            elif ragged is None or not ragged.kind.keys.packed:
                found.append(reduced(sums, self._job.algorithm, gradient.kind, q_len))
            elif gradient.kind in ("total", "sink"):
                owner = workspace["q_work"][:, 0]
                found.append(by_sequence(by_slot(sums, owner.shape[0]), owner, ragged.number(call.query)))
            else:
                found.append(sums)
        return found


# -- texts that kernels of several targets have in common --------------------------------------------------------------
def listed(job: Job, n: int, shape: tuple[str, ...], fill: str) -> list[Buffer]:
    """A list of sums, and of the entries that they belong to."""
    entries = "int64" if job.signature.offsets_64 else "int32"
    return [Buffer(f"sum{n}", shape, fill=fill), Buffer(f"entry{n}", shape, entries, fill)]


def pair_shares(job: Job) -> list[str]:
    """Sets of heads whose gradients flash_dpairs sums for itself, as factors."""
    over = job.ways.over
    batches = [] if "batch" in over else ["batches"]
    return batches + ([] if "head" in over else ["kv_heads" if "group" in over else "heads"])


def pair_programs(job: Job, mode: Mode) -> str:
    """Programs of flash_dpairs, as an expression: those of each set of heads whose gradients are summed apart."""
    return " * ".join([Q_TILES, f"({KV_TILES})", *pair_shares(job)]).format(**job.blocks(DPAIRS, mode))


def pairs_at_once(job: Job, mode: Mode) -> str:
    """How many of them are launched at once where they list sums, which bounds these, as an expression."""
    return f"min({pair_programs(job, mode)}, {max(1, MOST_LISTED // math.prod(job.blocks(DPAIRS, mode).values()))})"


def hides_some(job: Job, n: int, stored: Sequence[str]) -> str:
    """Whether entries of a gradient in the shape of its operand are left over, as a condition: a dense call without a
    mask has as many pairs that store one entry each. No program visits pairs that are hidden."""
    if job.sequences.ragged or job.facts.attention.canonical.is_masked or not stored:
        return ALWAYS
    return f"{' * '.join(shape_of_operand(job, n))} != {' * '.join(stored)}"


def shape_of_operand(job: Job, n: int) -> tuple[str, ...]:
    tensor = job.gradients[n].load.tensor
    return tuple(f"arg_{tensor.name}.shape[{d}]" for d in range(tensor.rank))


def _table_heads(table: ByDistance) -> tuple[str, str]:
    """Batch rows and heads that a table by distance has, as expressions."""
    return "batches" if table.by_batch else "1", "heads" if table.by_head else "1"
