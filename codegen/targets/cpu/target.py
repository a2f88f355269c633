"""Target `cpu`: tiles of plain torch code. The default where operands are on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.planning.dtypes import FP32, FP64, HALVES
from ....compiler.planning.form import Form
from ....compiler.planning.kernel import Algorithm, Kernel
from ....compiler.planning.machines.hardware import CPU, Hardware
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.records import Shape
from ....compiler.planning.signature import Direction, Signature
from ....compiler.planning.sources import not_in_order
from ....compiler.planning.target import Launcher, PlannedCall, Printing, Said, Target
from ....ir.errors import UnavailableError, WeftError
from ...dialects import TORCH
from ...loader import load
from ...normalizers import lacks
from ...products import one_dnn_linear
from .by_torch import has_whole, own_kernel, said, share_needed
from .choice import USUAL, cpu_forms
from .context import records_of
from .forms import CpuForm
from .kernels import FLASH_BACKWARD, FLASH_FORWARD
from .launcher import CpuLauncher, keep_tiles_at_hand

COMPUTED = HALVES | {FP32.name, FP64.name}


class CpuTarget(Target):
    name = measured_by = "cpu"
    by_name_only = interprets = partial = multiplies_fp8 = False
    serves = "cpu"
    language = TORCH
    family = "cpu"
    printing = Printing(adds=True)

    def says(self, call: PlannedCall) -> Said:
        return said(call)

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm != "flash":
            return []
        return [FLASH_FORWARD if signature.direction == "forward" else FLASH_BACKWARD]

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return f"cpu: has schedule flash only; {algorithm} runs on targets triton and interpret"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch != "cpu":
            return "cpu: the operands are on a GPU"
        if signature.dtype not in COMPUTED:
            return f"cpu: expected {', '.join(sorted(COMPUTED))} operands, got {signature.dtype}"
        lacking, rows = lacks(facts.attention.canonical.weighs, self.family), signature.sequences
        if lacking is None and rows.is_outside:
            lacking = f"has no text for {rows} sequences; they are computed by targets triton and interpret"
        if not rows.in_order:
            lacking = f"{not_in_order(rows)} are computed by targets triton and interpret"
        return None if lacking is None else f"cpu: {lacking}"

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        machine = hardware if hardware.cpu else CPU
        widths, own = signature.widths, own_kernel(kernel.direction)
        shape = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        return list(
            cpu_forms(
                kernel, shape, machine, self.parts(facts.attention, widths), facts.traits,
                whole=share_needed(signature) if own is not None and has_whole(facts, signature) else None,
                one_dnn=one_dnn_linear() is not None,
            )
        )  # fmt: skip

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if not isinstance(form, CpuForm) or min(form.block_q, form.block_kv, form.cache_kib) < 1:
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected <queries>x<keys> for target cpu, as in {USUAL}, "
                f"and perhaps c<KiB of joined scores>, +onednn, +tiles"
            )
        if form.one_dnn and one_dnn_linear() is None:
            raise UnavailableError(
                f"schedule: {kernel.name} {form}: this torch has no product of oneDNN that can be called; "
                "leave +onednn out"
            )

    def template(self, code: CodePlan) -> str:
        return f"cpu/flash_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> tuple[object, ...]:
        return records_of(code, facts)

    def load(self, path: Path, source: str) -> ModuleType:
        keep_tiles_at_hand()
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: Any) -> Launcher:
        return CpuLauncher(modules[0], code, facts)
