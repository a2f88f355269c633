"""Target `cpu`: tiles of plain torch code. The default where operands are on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...compiler.analysis.facts import Facts
from ...compiler.planning.forms import CpuForm, Form
from ...compiler.planning.hardware import Hardware
from ...compiler.planning.kernels import CPU_FLASH, Algorithm, Kernel
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.signature import Direction, Signature
from ...compiler.planning.target import WHOLE, CallTensors, Context, Launcher, Named, Partition, Place
from ...ir.errors import WeftError
from ...ir.walk import symbols
from ..functions import TORCH_LANGUAGE
from ..loader import load

FORM = CpuForm(128, 128)  # measured on two cores: score tiles stay in L2, and short problems have several


class CpuTarget:
    name = measured_by = "cpu"
    by_name_only = False
    language = TORCH_LANGUAGE
    family = "cpu"

    def kernels(
        self, algorithm: Algorithm, direction: Direction, facts: Facts, wanted: frozenset[str]
    ) -> Sequence[Kernel]:
        return [k for k in CPU_FLASH if k.direction == direction] if algorithm == "flash" else []

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return f"cpu: has schedule flash only; {algorithm} runs on targets triton and interpret"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        return None if signature.arch == "cpu" else "cpu: the operands are on a GPU"

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        return None

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        others = ((64, 64), (128, 256), (256, 256), (256, 512))
        return [FORM, *(CpuForm(*tile) for tile in others)]

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if not isinstance(form, CpuForm) or min(form.block_q, form.block_kv) < 1:
            raise WeftError(f"schedule: {kernel.name} {form}: expected <queries>x<keys> for target cpu, as in {FORM}")

    def template(self, code: CodePlan) -> str:
        return f"cpu/flash_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        """Where the mask has parts without closed form, what it reads also decides which tiles are visited."""
        open_mask, by_head = not facts.kv_bounds.closed_form, facts.bounds_differ_by_head
        read = symbols(facts.attention.folded_mask) if open_mask and not by_head else frozenset()
        return {
            "bounds": list(facts.kv_tiles.outputs),
            "q_bounds": list(facts.q_tiles.outputs),
            "open_mask": open_mask,
            "per_head_bounds": by_head,
            "apart": "heads" if read & {"head", "kv_head"} else "rows" if "batch" in read else "",
        }

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: Any) -> Launcher:
        return _CpuLauncher(modules[0], code)


@dataclass(frozen=True)
class _CpuLauncher:
    module: ModuleType
    code: CodePlan

    def direct(self, call: Any) -> None:
        """There is one way only."""

    def partition(self, call: CallTensors, results: Named) -> Partition:
        return WHOLE

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        return {}

    def __call__(self, call: CallTensors, results: Any, workspace: Named, partition: Partition) -> list[Any]:
        form = self.code.kernels[-1].form
        blocks = {"block_q": form.block_q, "block_kv": form.block_kv}
        operands = list(call.operands.values())
        arguments = (call.query, call.keys, call.value, operands, call.q_offset, call.head_dim)
        if self.code.signature.direction == "forward":
            self.module.forward(*arguments, out=results["out"], lse=results["lse"], **blocks)
            return []
        given = {n: results.get(n) for n in ("out", "lse", "dquery", "dvalue")}
        dkeys = [results.get("dkey"), *([] if call.rope is None else [results.get("drope")])]
        sums = self.module.backward(results["dout"], results["dlse"], *arguments, dkeys=dkeys, **given, **blocks)
        return list(sums)
