"""Targets `triton` (portable kernels, NVIDIA sm_80 and later, AMD) and `interpret` (the same source on a CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ...compiler.analysis.facts import Facts
from ...compiler.planning.cost import sram_bytes
from ...compiler.planning.forms import Form, Tiling, check_tiling
from ...compiler.planning.hardware import Hardware
from ...compiler.planning.kernels import (
    FLASH,
    KERNELS,
    ROW_STATISTICS,
    SPANS,
    WORK,
    Algorithm,
    Kernel,
    with_measuring,
    with_work,
)
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.records import Shape
from ...compiler.planning.segments import Segments, segments_of
from ...compiler.planning.signature import Direction, Signature, Widths
from ...compiler.planning.target import CallTensors, Context, Launcher
from ...compiler.planning.tilings import FIXED, tilings
from ...ir.attention import Attention
from ...ir.errors import WeftError
from ..functions import TRITON_LANGUAGE
from ..loader import load
from ..normalizers import lacks, softmax_only
from .triton_launcher import TritonLauncher

if TYPE_CHECKING:
    pass


# Which gradients a backward kernel is there for; a kernel without an entry runs always.
_SERVES = {
    "flash_dquery": {"query"}, "flash_dkey_dvalue": {"key", "value", "rope"}, "standard_dquery": {"query"},
    "standard_dkey": {"key", "rope"}, "standard_dvalue": {"value"}, "standard_dweights": {"query", "key", "rope"},
    "standard_dscores": {"query", "key", "rope"}, "standard_weights": {"query", "key", "value", "rope"},
    "streaming_backward": {"query", "key", "value", "rope"},
}  # fmt: skip
# Which of them also sum gradients of operands, by how these are reduced; those of a sink are row_statistics' own, but
# in sequences with lengths, where it does not know whose a row is.
_SUMS = {
    "flash_dquery": {"total", "row"}, "flash_dkey_dvalue": {"column"}, "standard_dweights": {"total", "row", "column"},
    "standard_dscores": {"total", "row", "column"}, "standard_weights": {"total", "row", "column"},
    "streaming_backward": {"total", "row", "column"},
}  # fmt: skip


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return find_spec("triton") is not None


class TritonTarget:
    name = measured_by = "triton"
    by_name_only = False
    partial = False
    language = TRITON_LANGUAGE
    family = "triton"
    interprets = False

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        own, wanted = [k for k in KERNELS[algorithm] if k.direction == signature.direction], signature.wanted
        if signature.direction == "backward":
            kinds: set[str] = {kind for load, kind in facts.gradient_kinds if load.tensor.name in wanted}
            if signature.sequences != "dense" and "sink" in kinds:  # each sequence has sinks of its own
                kinds.add("total")
            own = [k for k in own if _is_needed(k.name, wanted, kinds)]
            if not facts.attention.weighs.saves_lse:
                own.remove(ROW_STATISTICS)
        found = with_measuring(own, facts.traits.measured)
        return with_work(found) if signature.sequences == "packed" else found

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm: it has all."""
        return f"{self.name}: has no {direction} of schedule {algorithm}"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch == "cpu":
            return f"{self.name}: needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'"
        if not has_triton():
            return f"{self.name}: needs Triton; pip install triton"
        if signature.dtype == "fp64":
            return f"{self.name}: expected fp32, fp16 or bf16 operands, got fp64; use .reference(...) for float64"
        return self._dense_only(kernel, signature, facts) or self._lacking(kernel, facts)

    def _dense_only(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        """Why it has no such kernel for sequences of their own lengths: of schedules only flash has."""
        if signature.sequences == "dense":
            return None
        if kernel in FLASH or kernel.name in (*SPANS, *WORK):
            return None
        return (
            f"{self.name}: schedule {_algorithm(kernel)} computes sequences of one length, got {signature.sequences} "
            "ones; use schedule='flash'"
        )

    def _lacking(self, kernel: Kernel, facts: Facts) -> str | None:
        """Why it has no text for the normalizer; schedules other than flash write a softmax out."""
        if kernel in FLASH or kernel.name in (*SPANS, *WORK):
            where, lacking = "", lacks(facts.attention.weighs, self.family)
        else:
            where, lacking = f"schedule {_algorithm(kernel)} ", softmax_only(facts.attention.weighs)
            if facts.attention.drops:
                lacking = "has no dropout; use schedule='flash'"
        return None if lacking is None else f"{self.name}: {where}{lacking}"

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        return None

    def parts(self, attention: Attention, widths: Widths) -> Segments:
        return segments_of(attention, widths)

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        widths = signature.widths
        sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        parts = segments_of(facts.attention, widths)
        return tilings(kernel, _algorithm(kernel), sizes, hardware, parts, facts.traits)

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if not isinstance(form, Tiling):
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected <queries>x<keys>w<warps>s<stages> for target {self.name}"
            )
        if kernel.name in FIXED:
            if form != FIXED[kernel.name]:
                raise WeftError(f"schedule: {kernel.name} has one form, {FIXED[kernel.name]}, got {form}")
            return
        check_tiling(kernel.name, form)
        if not self.interprets:
            _check_sram(kernel, form, signature, hardware, facts)

    def template(self, code: CodePlan) -> str:
        return f"triton/{code.schedule.algorithm}_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        return {}

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, interpret=self.interprets, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        return TritonLauncher(modules, code, facts, device.index or 0, self.interprets)


class InterpretTarget(TritonTarget):
    name = measured_by = "interpret"
    by_name_only = True
    interprets = True

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch != "cpu":
            return "interpret: runs on CPU tensors; the operands are on a GPU"
        if not has_triton():
            return "interpret: needs Triton; pip install triton"
        if signature.dtype not in ("fp32", "fp16"):
            return f"interpret: Triton's interpreter computes fp32 and fp16 correctly, not {signature.dtype}"
        return self._dense_only(kernel, signature, facts) or self._lacking(kernel, facts)

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        return [FIXED.get(kernel.name, Tiling(32, 32, 4, 1))]  # small: short test problems have several tiles


def _is_needed(kernel: str, wanted: frozenset[str], kinds: set[str]) -> bool:
    serves = _SERVES.get(kernel)
    return serves is None or bool(serves & wanted or _SUMS.get(kernel, set()) & kinds)


def _algorithm(kernel: Kernel) -> Algorithm:
    return next(name for name, kernels in KERNELS.items() if kernel in kernels)


def _check_sram(kernel: Kernel, form: Tiling, signature: Signature, hardware: Hardware, facts: Facts) -> None:
    widths = signature.widths
    sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
    needed = sram_bytes(kernel, form, sizes, hardware, segments_of(facts.attention, widths), facts.traits)
    if needed > hardware.sram_per_block:
        raise WeftError(
            f"schedule: {kernel.name} with {form} needs {needed} bytes of SRAM for D {widths.head_dim}, "
            f"Dv {widths.value_dim}, {signature.dtype}; a program of {hardware.title} has {hardware.sram_per_block}: "
            "use smaller tiles or fewer stages, or leave schedule= to be chosen"
        )
