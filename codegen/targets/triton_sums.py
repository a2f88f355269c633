"""Gradients of what pairs read that are listed and added up, and tables of what depends on the distance alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compiler.analysis.distances import ByDistance
from ...compiler.analysis.records import OperandGradient
from ...compiler.planning.distances import Levels
from ...compiler.planning.kernel import Kernel
from ...compiler.planning.tables import DIAGONAL_PARTS, MOST_LISTED, Way, Ways
from ...compiler.planning.target import CallTensors, Named
from ...ir.walk import loads
from ..summing import SHARES, summing
from .triton.kernels.pair_sums import DDIAGONALS, DPAIRS
from .triton.kernels.tables import DISTANCE_TABLES
from .triton_measures import MeasuringLauncher
from .triton_workspace import add_listed, tiles_of

if TYPE_CHECKING:
    from .triton_launcher import Mode, _Prepared


class SummingLauncher(MeasuringLauncher):
    """What launchers of Triton kernels do with sums that kernels list, and with tables by distance."""

    device: int
    interprets: bool
    sums: Sequence[OperandGradient]  # gradients of operands that are wanted
    ways: Ways
    tables: Sequence[ByDistance]
    levels: Levels | None

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        """The grid of a kernel, as an expression."""
        raise NotImplementedError

    def _diagonal_slots(self) -> str:
        """Parts of diagonals, of which flash_ddiagonals lists sums, as an expression of its blocks."""
        raise NotImplementedError

    def _list_more(
        self, ready: _Prepared, given: Mapping[str, Any], first: int, tables: Mapping[int, Tensor], stream: int
    ) -> None:
        """Launch flash_dpairs for the programs from this one on, and add up what they list."""
        at = next(n for n, kernel in enumerate(self.code.kernels) if kernel.name == DPAIRS)
        listed = [n for n, way in enumerate(self.ways.of_reads) if way == Way("pairs", "list")]
        for n in listed:  # programs of what is not there list nothing
            given[f"sum{n}"].zero_()
            given[f"entry{n}"].zero_()
        ready.runs[at](*ready.pack({**given, "first_program": first})[at], stream)
        for n in listed:
            self._add_listed(tables[n], given[f"entry{n}"], given[f"sum{n}"])

    def _tables(self, call: CallTensors, workspace: Named, mode: Mode) -> dict[int, Tensor]:
        """What the kernels listed, added up in the shape of its operand, by number of the read."""
        tables = {}
        for n, way in enumerate(self.ways.of_reads):
            if way is not None and way.owner == "diagonals":
                listed = workspace[f"sum{n}"], workspace[f"entry{n}"], workspace[f"range{n}"]
                tables[n] = self._of_list(*listed, self._operand_of(n, call), mode.aligned)
            elif way is not None and way.finish == "list":
                tables[n] = torch.zeros(self._operand_of(n, call).shape, device=call.query.device)
                self._add_listed(tables[n], workspace[f"entry{n}"], workspace[f"sum{n}"])
        return tables

    def _add_listed(self, table: Tensor, entries: Tensor, sums: Tensor) -> None:
        add_listed(table, entries, sums)

    def _of_list(self, sums: Tensor, entries: Tensor, ranges: Tensor, operand: Tensor, aligned: bool = True) -> Tensor:
        """What flash_ddiagonals listed, float32 in the shape of its operand."""
        shares = sums.new_empty((SHARES, operand.numel()))
        self._sum_listed(sums, entries, ranges, 2 * self.form(DDIAGONALS, aligned).block_q, shares)
        return shares.sum(0).view(operand.shape)

    def _clear_levels(self, workspace: Named, mode: Mode) -> None:
        """Level pairs of sequences that are not there are listed by nobody."""
        for n, way in enumerate(self.ways.of_reads):
            if way is not None and way.owner == "diagonals" and self.levels is not None:
                first = workspace[f"range{n}"].shape[0] * 2 * self.form(DDIAGONALS, mode.aligned).block_q
                for name in ("sum", "entry"):
                    workspace[f"{name}{n}"][first:].zero_()

    def _sum_listed(self, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        summing(self.device, self.interprets)(sums, entries, ranges, group, shares)

    def _operand_of(self, n: int, call: CallTensors) -> Tensor:
        """What a read is of."""
        operand = call.operands[self.sums[n].load.tensor.name]
        assert isinstance(operand, Tensor)
        return operand

    @staticmethod
    def _table_heads(table: ByDistance) -> tuple[str, str]:
        """Batch rows and heads that a table by distance has, as expressions."""
        return "batches" if table.by_batch else "1", "heads" if table.by_head else "1"

    def beyond(self, aligned: bool) -> int:
        """Distances that tables have at either end for tiles that lie over the ends of a call."""
        forms = [self.form(k.name, aligned) for k in self.code.kernels if k.name != DISTANCE_TABLES]
        return max(max(f.block_q, f.block_kv) for f in forms)

    def _table_rows(self, aligned: bool) -> dict[str, str]:
        """Which distances tables have: all of a call; of sequences with lengths all that any may have."""
        if not self.tables:
            return {}
        beyond = self.beyond(aligned)
        ends = "1 - q_len" if self.code.signature.offset == "bottom_right" else f"q_offset - {self._kv_rows} + 1"
        rows = {"first_distance": f"{ends} - {beyond}", "n_distances": f"q_len + {self._kv_rows} - 1 + {2 * beyond}"}
        values = [table.value for table in self.tables]
        if self.levels is not None:
            values += self.levels.indices
            block = self.form(DDIAGONALS, aligned).block_q
            blocks = {"BLOCK_Q": block, "BLOCK_KV": block, "PARTS": DIAGONAL_PARTS}
            listed = self._diagonal_slots().format(**blocks)
            rows |= {"beyond": str(beyond), "level_list": f"{listed} * {2 * block}"}
        read = {load.tensor for value in values for load in loads(value)}
        return rows | {f"last{d}_{t.name}": f"arg_{t.name}.shape[{d}] - 1" for t in read for d in range(t.rank)}

    def pair_shares(self, call: CallTensors) -> int:
        """Sets of heads whose gradients flash_dpairs sums for itself."""
        (batches, heads), kv_heads, over = call.query.shape[:2], call.key.shape[1], self.ways.over
        return (1 if "batch" in over else batches) * (1 if "head" in over else kv_heads if "group" in over else heads)

    def pair_programs(self, call: CallTensors, mode: Mode) -> tuple[int, int]:
        """Programs of flash_dpairs of a call, and how many are launched at once, which bounds what they list."""
        form = self.form(DPAIRS, mode.aligned)
        q_len, kv_len = call.query.shape[2], call.key.shape[2]
        programs = tiles_of(q_len, form.block_q) * tiles_of(kv_len, form.block_kv) * self.pair_shares(call)
        if Way("pairs", "list") not in self.ways.of_reads:
            return programs, programs
        return programs, min(programs, max(1, MOST_LISTED // (form.block_q * form.block_kv)))
