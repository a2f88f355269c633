"""Launchers of target `triton`: what its kernels are handed, and where they leave what is not a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import OperandGradient
from ....compiler.planning import quantities as formulas
from ....compiler.planning.buffer import ALWAYS, NEVER, Buffer
from ....compiler.planning.gradient_sums import Way
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.signature import MOST_SHORT, starts_early
from ....compiler.planning.splits import JOINED_PARTS, tile_rows
from ....compiler.planning.target import CallTensors
from ...launch.device import Device
from ...launch.division import Division
from ...launch.job import KV_TILES, Q_TILES, Job, KernelLaunch, Mode, OwnPart
from ...launch.launcher import KernelLauncher
from .forms import UNALIGNED, Tiling
from .kernels.backward import DQUERY
from .kernels.measures import MEASURES, PAIR_CELLS
from .kernels.pair_sums import DPAIRS
from .kernels.tables import DISTANCE_TABLES
from .parts.measures import Measures, options_of
from .parts.sums import NOT_OWN, Sums, hides_some, listed, pair_shares, pairs_at_once, shape_of_operand
from .tilings import FIXED

JOINING = {"num_warps": 4, "num_stages": 1}  # options of the kernel that joins parts
ROWS_APART = 4  # programs that join the rows of a short sequence, each every fourth: most have one row or none

_PROGRAMS: dict[Callable[..., float], str] = {
    formulas.query_programs: f"{Q_TILES} * batches * heads",
    formulas.key_programs: f"{KV_TILES} * batches * kv_heads",
    formulas.pair_programs: f"{Q_TILES} * ({KV_TILES}) * batches * heads",
    formulas.head_programs: "batches * heads",
    formulas.kv_head_programs: "batches * kv_heads",
}
_TEACHING_SUMS = {"streaming": "streaming_backward", "standard": "standard_dscores"}


def launcher_of(
    modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: int, interprets: bool
) -> KernelLauncher:  # fmt: skip
    """The launcher of the portable kernels of one direction."""
    job = Job(modules, code, facts, Device(device, interprets), unaligned)
    if code.schedule.algorithm != "split_kv":
        kernels = TritonKernels(job)
        return KernelLauncher(job, kernels, Measures(job), Sums(job, kernels))
    division, neighbours = Division(job), 0 if facts.mask_differs_by_head else 1  # of rows of several heads
    split = SplitKernels(job, division)
    return KernelLauncher(job, split, Measures(job, neighbours), Sums(job, split), division=division)


def unaligned(kernel: str, form: Any) -> Any:
    """The form of a kernel where operands are not aligned."""
    if kernel in (*FIXED, PAIR_CELLS, DISTANCE_TABLES):
        return form
    return Tiling(UNALIGNED.block_q, UNALIGNED.block_kv, form.num_warps, 1) if kernel in MEASURES else UNALIGNED


class TritonKernels(OwnPart):
    """Kernels of the schedules flash, streaming and standard."""

    def __init__(self, job: Job) -> None:
        self._job = job

    # -- buffers -------------------------------------------------------------------------------------------------------
    def buffers(self, mode: Mode) -> list[Buffer]:
        return self._of_backward() if self._job.is_backward else self._of_forward()

    def _of_forward(self) -> list[Buffer]:
        match self._job.algorithm:
            case "streaming":
                columns = sum(s.block for s in self._job.code.segments.v)
                rows = "batches", "heads", "padded_len"
                running = [Buffer(name, rows) for name in ("running_max", "running_sum")]
                return [Buffer("running_out", (*rows, str(columns))), *running]
            case "standard":
                return [self._matrix("matrix")]
            case _:
                return []

    def _of_backward(self) -> list[Buffer]:
        job, rows = self._job, ("batches", "heads", "padded_len")
        names = ("lse2", *(("shift",) if job.shifts else ()), "delta") if job.saves_lse else ()
        names += ("whole2",) if job.levels is not None and job.levels.score is not None else ()
        found = [Buffer(name, rows) for name in names]
        # where there is one head too: kernels are compiled for a share in float32, whatever the heads of later calls
        found += [Buffer(f"dkey{i}", ("batches", "kv_heads", "kv_len", f"key{i}.shape[3]")) for i in job.own_keys]
        if job.algorithm == "streaming":
            columns = sum(s.block for s in job.code.segments.qk)
            found.append(Buffer("running_dquery", (*rows, str(columns)), fill=ALWAYS))
        if job.algorithm == "standard":
            found += [self._matrix("weights"), self._matrix("dweights")]
        return found

    def _matrix(self, name: str) -> Buffer:
        """One number for each pair of a query and a key, rows padded to 16."""
        return Buffer(name, ("batches", "heads", "q_len", "16 * row_units"), "query.dtype")

    def sum_buffers(self, n: int, gradient: OperandGradient, mode: Mode) -> list[Buffer]:
        job, dense = self._job, not self._job.sequences.ragged
        if (way := job.ways.of_reads[n]) is not None:
            return self._pair_buffers(n, way, mode)
        if gradient.kind == "sink" and dense:
            of_tiles = f"padded_len // {job.form('row_statistics', mode.aligned).block_q}"
            return [Buffer(f"sum{n}", ("batches", "heads", of_tiles))]
        kind = "total" if gradient.kind == "sink" else gradient.kind
        # programs of what is not there write none; what is streamed is added to
        fill = NEVER if dense and job.algorithm != "streaming" else ALWAYS
        return [Buffer(f"sum{n}", ("batches", "heads", *self._of_each_head(kind, mode)), fill=fill)]

    def _of_each_head(self, kind: str, mode: Mode) -> tuple[str, ...]:
        """Partial sums of one read's gradient, as the kernels of a schedule leave them."""
        algorithm = self._job.algorithm
        of_flash = "flash_dkey_dvalue" if kind == "column" else "flash_dquery"
        form = self._job.blocks(_TEACHING_SUMS.get(algorithm, of_flash), mode)
        q_tiles = "q_slots" if self._job.sequences.keys.packed else f"({Q_TILES})".format(**form)
        kv_tiles = f"({KV_TILES})".format(**form)
        match algorithm, kind:
            case "flash", "total":
                return (q_tiles,)
            case "streaming", "total" | "row":
                return ("padded_len",)
            case "standard", "total":
                return (f"{q_tiles} * {kv_tiles}",)
            case "standard", "row":
                return kv_tiles, "q_len"
            case "standard", "column":
                return q_tiles, "kv_len"
            case _:
                return ("q_len" if kind == "row" else "kv_len",)

    def _pair_buffers(self, n: int, way: Way, mode: Mode) -> list[Buffer]:
        """Of the sums of a read of pairs: a tensor in the shape of its operand, or a list of sums and entries."""
        job, dense = self._job, not self._job.sequences.ragged
        if way.finish == "list":  # by flash_dpairs
            size = pairs_at_once(job, mode), *map(str, job.blocks(DPAIRS, mode).values())
            return listed(job, n, size, NEVER if dense else ALWAYS)
        tensor = job.gradients[n].load.tensor
        alone = sum(g.load.tensor == tensor for g in job.gradients) == 1
        dtype = f"arg_{tensor.name}.dtype" if alone and way.finish == "store" else "float32"
        shares = ["batches", "heads"] if way.owner == "queries" else pair_shares(job)
        stored = [*shares, "q_len", "kv_len"] if way.finish == "store" else []
        return [Buffer(f"sum{n}", shape_of_operand(job, n), dtype, hides_some(job, n, stored))]

    def level_sums(self, mode: Mode) -> str:
        if self._job.levels is None:
            return "0"
        tiles = f"batches * ({Q_TILES})".format(**self._job.blocks(DQUERY, mode))
        return f"2 * heads * {'q_slots' if self._job.sequences.keys.packed else tiles}"

    # -- the vocabulary ------------------------------------------------------------------------------------------------
    def rows(self, mode: Mode) -> dict[str, str]:
        job = self._job
        if job.algorithm == "standard":
            return {"row_units": "(kv_len + 15) // 16"}
        if job.algorithm == "streaming" and not job.is_backward:
            block = job.form("streaming_forward", mode.aligned).block_q
            return {"padded_len": f"(q_len + {block - 1}) // {block} * {block}"}
        return {}

    # -- launches ------------------------------------------------------------------------------------------------------
    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        job = self._job
        if kernel.name in NOT_OWN:
            return None
        if kernel.name == "row_statistics":
            text = "padded_len // {BLOCK_Q} * batches * heads"
        elif job.sequences.rows.packed:
            text = "q_slots * heads" if kernel.axis == "kv" else "kv_slots * kv_heads"
        else:
            text = _PROGRAMS[kernel.programs]
        form = job.form(kernel.name, mode.aligned)
        return KernelLaunch(text.format(**job.blocks(kernel.name, mode)), options_of(job, form))


class SplitKernels(OwnPart):
    """A forward of two kernels, of which the second is launched where there is something to join."""

    def __init__(self, job: Job, division: Division) -> None:
        self._job, self._division = job, division

    def mode_of(self, mode: Mode, call: CallTensors) -> Mode:
        """As few rows of a tile as hold all that share keys."""
        group, q_len = self._division.rows_of(call)
        return mode._replace(rows=tile_rows(self._block_q(mode), group * q_len))

    def _block_q(self, mode: Mode) -> int:
        """Rows of a tile, at the most."""
        return int(self._job.form(self._division.kernel.name, mode.aligned).block_q)

    def conditions(self, mode: Mode) -> list[str]:
        """That a call has what `mode_of` made of another one."""
        rows, most = f"heads // kv_heads * {self._division.queries}", self._block_q(mode)
        least = [f"{rows} > {mode.rows // 2}"] if mode.rows > 16 else []
        return least + ([f"{rows} <= {mode.rows}"] if mode.rows < most else [])

    def buffers(self, mode: Mode) -> list[Buffer]:
        """The parts. One part writes the output itself."""
        rows = f"n_parts * batches * heads * {self._division.part_rows}"
        lse = Buffer("part_lse", (f"{self._division.statistics} * {rows}",), when="n_parts > 1")
        return [lse, Buffer("part_out", (rows, str(self._division.width)), when="n_parts > 1")]

    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        if not kernel.shares_keys:
            return None
        job, form = self._job, self._job.form(kernel.name, mode.aligned)
        options = options_of(job, form) | ({"launch_pdl": True} if starts_early(job.signature.arch) else {})
        constants = {
            "BLOCK_Q": mode.rows, "SPAN_Q": form.block_q, "ROWS_APART": ROWS_APART, "JOINED_PARTS": JOINED_PARTS,
        }  # fmt: skip
        if kernel.joins:
            options |= JOINING
            rows = f"n_sequences * {ROWS_APART}" if self._division.takes_short else "batches * q_len"
            return KernelLaunch(f"{rows} * heads * (n_parts > 1)", options, constants, only_if="n_parts > 1")
        if not job.device.interprets and job.signature.arch.startswith("sm_"):
            most = self._division.registers(form.of_rows(mode.rows), mode.rows)
            options |= {"maxnreg": most} if most < 255 else {}
        return KernelLaunch(f"{self._tiles(mode.rows)} * kv_heads * n_parts", options, constants)

    def _tiles(self, block: int) -> str:
        """Tiles of rows that share keys, of all sequences."""
        if self._division.takes_short:
            return f"({MOST_SHORT} * (heads // kv_heads) + {block} - 1) // {block} * n_sequences"
        if self._job.sequences.rows.packed:
            return f"(heads // kv_heads * q_len // {block} + n_sequences + 1)"
        return f"(heads // kv_heads * q_len + {block} - 1) // {block} * batches"
