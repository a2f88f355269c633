"""Targets `triton` (portable kernels, NVIDIA sm_80 and later, AMD) and `interpret` (the same source on a CPU)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import PAIR_KINDS, Traits
from ....compiler.planning.by_distance import levels_of, tables_of
from ....compiler.planning.cost import sram_bytes
from ....compiler.planning.dtypes import E4M3, EIGHTHS, HALVES, ON_GPUS
from ....compiler.planning.form import Form
from ....compiler.planning.gradient_sums import Owner, ways_of
from ....compiler.planning.kernel import Algorithm, Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.plan import CodePlan, KernelCode
from ....compiler.planning.records import Shape, stored_beside
from ....compiler.planning.segments import segments_of
from ....compiler.planning.signature import Direction, Signature
from ....compiler.planning.target import Launcher, Printing, Target
from ....ir.errors import WeftError
from ....ir.walk import symbols
from ...dialects import TRITON
from ...loader import load
from ...normalizers import lacks, softmax_only
from .context import records_of
from .features import QUANTIZED
from .forms import UNALIGNED, UNALIGNED_WIDE, Tiling, check_tiling
from .kernels.backward import FLASH_DKEY_DVALUE, FLASH_DQUERY, ROW_STATISTICS
from .kernels.forward import FLASH_FORWARD
from .kernels.measures import with_measuring
from .kernels.pair_sums import FLASH_DDIAGONALS, FLASH_DPAIRS
from .kernels.split_kv import JOIN_PARTS, SPLIT_FORWARD
from .kernels.tables import with_tables_made
from .kernels.teaching import STANDARD, STREAMING
from .kernels.work import WORK, with_work
from .launcher import launcher_of
from .tilings import FIXED, SPLIT_FP8, fits, nominal, split_tilings, square_tilings, tilings

KERNELS: dict[Algorithm, tuple[Kernel, ...]] = {
    "flash": (FLASH_FORWARD, ROW_STATISTICS, FLASH_DQUERY, FLASH_DKEY_DVALUE), "split_kv": (SPLIT_FORWARD, JOIN_PARTS),
    "streaming": STREAMING, "standard": STANDARD,
}  # fmt: skip
PAIR_SUMS = (FLASH_DPAIRS, FLASH_DDIAGONALS)
_OWNS: dict[Kernel, Owner] = {FLASH_DQUERY: "queries", FLASH_DPAIRS: "pairs", FLASH_DDIAGONALS: "diagonals"}
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


TEACHING = ("standard", "streaming")  # schedules of papers, whose kernels show what flash saves


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return find_spec("triton") is not None


class TritonTarget(Target):
    name = measured_by = "triton"
    by_name_only = partial = multiplies_fp8 = False
    serves = "cuda"
    language = TRITON
    family = "triton"
    printing = Printing(joins_sink=True)
    interprets = False

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        own, wanted = [k for k in KERNELS[algorithm] if k.direction == signature.direction], signature.wanted
        if signature.direction == "backward":
            reads = [(load, kind) for load, kind in facts.gradient_kinds if load.tensor.name in wanted]
            owners = ways_of(reads, signature).owners
            kinds: set[str] = {kind for _, kind in reads}
            if signature.sequences.ragged and "sink" in kinds:  # each sequence has sinks of its own
                kinds.add("total")
            refuses = algorithm != "flash" and not kinds.isdisjoint(PAIR_KINDS)  # `supports` says so of its kernels
            own = [k for k in own if refuses or _OWNS.get(k) in owners or _is_needed(k.name, wanted, kinds)]
            if not facts.attention.canonical.weighs.saves_lse:
                own = [k for k in own if k != ROW_STATISTICS]
            if algorithm == "flash":
                own += [k for k in PAIR_SUMS if _OWNS[k] in owners]
        found = with_measuring(own, facts.traits.measured, signature.sequences)
        found = with_work(found) if signature.sequences.rows.packed else found
        return with_tables_made(found, tables_of(facts, algorithm, signature)) if found else found

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm: it has all."""
        return f"{self.name}: has no {direction} of schedule {algorithm}"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch == "cpu":
            return f"{self.name}: needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'"
        if not has_triton():
            return f"{self.name}: needs Triton; pip install triton"
        if lacking := {signature.dtype, signature.dtypes.query, signature.dtypes.out}.difference(ON_GPUS, EIGHTHS):
            return (
                f"{self.name}: expected fp32, fp16, bf16 or FP8 operands, got {lacking.pop()}; use .reference(...) for "
                "float64"
            )
        if E4M3.name in astuple(signature.dtypes) and signature.arch in ("sm_80", "sm_86"):
            return f"{self.name}: has e4m3 from compute capability 8.9 on, this is {signature.arch}; quantise to e5m2"
        return self._why_not(kernel, signature, facts)

    def _why_not(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        """Why it has no text of a kernel for such calls of this variant, wherever the operands are."""
        lacking = next(self._lacking(kernel, signature, facts), None)
        return None if lacking is None else f"{self.name}: {lacking}"

    def _lacking(self, kernel: Kernel, signature: Signature, facts: Facts) -> Iterator[str]:
        """What it lacks for them, in words: schedules of papers have less than flash."""
        variant, kind, flash = facts.attention.canonical, signature.sequences, "use schedule='flash'"
        paper = "" if is_of_flash(kernel) else f"schedule {_algorithm(kernel)}"
        if kernel.shares_keys and (variant.drops or kind.keys.packed):
            yield f"schedule split_kv has no {'dropout' if variant.drops else 'packed sequences'}; {flash}"
        if paper and not kind.alike:
            rows = "sequences of one length" if kind.in_order else "rows in the order of their positions"
            yield f"{paper} computes {rows}, got {kind} ones; {flash}"
        if paper and signature.dtypes.quantized:
            yield f"{paper} has no FP8 operands; {flash}"
        read = {name for expression in variant.expressions for name in symbols(expression)}
        for length in sorted(kind.lengths_unknown() & read):
            yield f"{length} is not the number of rows of {kind} sequences, and the variant reads it"
        if paper and variant.drops:
            yield f"{paper} has no dropout; {flash}"
        normalizers = softmax_only(variant.weighs) if paper else lacks(variant.weighs, self.family)
        if normalizers is not None:
            yield f"{paper} {normalizers}".lstrip()
        reads = [(each, how) for each, how in facts.gradient_kinds if each.tensor.name in signature.wanted]
        of_pairs = [each for each, how in reads if how in PAIR_KINDS and signature.direction == "backward"]
        for each in of_pairs if paper else ():
            yield (
                f"{paper} has no gradient of `{each}`, whose index has q_pos and kv_pos; {flash}, or pass "
                f"{each.tensor.name}.detach()"
            )
        if of_pairs and (refused := ways_of(reads, signature).refused) is not None:
            yield (
                f"in packed sequences the gradient of `{refused}`, whose entries several pairs read, is summed by "
                "atomic additions alone, which do not repeat bit for bit: pass deterministic=False to allow them, or "
                "padded sequences with q_lens= and kv_lens="
            )

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        found = self._forms(kernel, signature, hardware, facts)
        if not converts_beside_wgmma(kernel, signature):
            return found
        rows, wide = UNALIGNED.block_q, [UNALIGNED_WIDE] if signature.widths.value_dim > 256 else []
        few = (t if t.block_q <= rows else Tiling(rows, t.block_kv, UNALIGNED.num_warps, t.num_stages) for t in found)
        few_bytes = self._takes_split_fp8(kernel, signature, hardware, facts)
        return [*dict.fromkeys([*[SPLIT_FP8] * few_bytes, *wide, *few])]

    @staticmethod
    def _takes_split_fp8(kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> bool:
        """Whether keys are FP8, and its tiles have SRAM: values and what pairs read may take more bytes than keys.

        Keys that become 32-bit numbers take as many bytes again.
        """
        widths, dtypes = signature.widths, signature.dtypes
        if not kernel.shares_keys or dtypes.fp8_key is None or signature.dtype not in HALVES:
            return False
        if not 64 < max(widths.head_dim, widths.value_dim) <= 128:
            return False
        stored = stored_beside(signature.dtype, dtypes.query, dtypes.key, dtypes.value)
        sizes = nominal(Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype, *stored))
        parts, traits = segments_of(facts.attention, widths), traits_of(kernel, signature, facts)
        return fits(kernel, SPLIT_FP8, sizes, hardware, parts, traits)

    def _forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Tiling]:
        widths = signature.widths
        sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        parts = segments_of(facts.attention, widths)
        traits = traits_of(kernel, signature, facts)
        if kernel in PAIR_SUMS:
            return square_tilings(kernel, sizes, hardware, parts, traits)
        if kernel.shares_keys:
            return split_tilings(kernel, sizes, hardware, parts, traits, not signature.sequences.ragged)
        found = tilings(kernel, _algorithm(kernel), sizes, hardware, parts, traits)
        has_tables = traits != facts.traits_with((), signature.doubles)
        sums_pairs = any(
            (kind == "pair" or (kind == "diagonal" and not has_tables)) and load.tensor.name in signature.wanted
            for load, kind in facts.gradient_kinds
        )
        if kernel is not FLASH_DQUERY or signature.dtype not in HALVES:
            return found
        first = []
        if sums_pairs:  # what is read and stored for each pair wants registers: larger tiles spill in their loop
            first.append(Tiling(64, 64, 4 if max(parts.qk_columns, parts.v_columns) <= 64 else 8, 2))
        if found and found[0].block_q == 128 and levels_of(facts, _algorithm(kernel), signature):
            # the sums of level pairs want registers too: with 4 warps they spill in their loop
            first.append(Tiling(128, 64, 8, 3))
        fitting = [own for own in first if fits(kernel, own, nominal(sizes), hardware, parts, traits)][:1]
        return [*fitting, *(form for form in found if form not in fitting)]

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
        if converts_beside_wgmma(kernel, signature) and form.block_q > UNALIGNED.block_q:
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected at most {UNALIGNED.block_q} queries a tile for FP8 operands "
                f"on {signature.arch}: larger ones take wgmma, which Triton 3.6 computes wrongly from converted tiles"
            )
        if kernel is FLASH_DDIAGONALS and form.block_q != form.block_kv:
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected as many queries as keys, of which it has diagonals"
            )
        if not self.interprets:
            _check_sram(kernel, form, signature, hardware, facts)

    def template(self, code: CodePlan) -> str:
        room = "triton/teaching" if code.schedule.algorithm in TEACHING else "triton"
        return f"{room}/{code.schedule.algorithm}_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> tuple[object, ...]:
        return records_of(code, facts, WAY_KERNELS)

    def source_beside(self, kernel: KernelCode, code: CodePlan, facts: Facts) -> str:
        from . import modules  # lazy: imports sympy, which a warm start does without

        match kernel.kernel.module:
            case "measures":
                return modules.measures(facts, code.signature.offsets_64, code.signature.sequences)
            case "tables":
                return modules.tables(facts, code)
            case "":
                return modules.lent(facts, code, self)

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, interpret=self.interprets, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        return launcher_of(modules, code, facts, device.index or 0, self.interprets)


class InterpretTarget(TritonTarget):
    name = measured_by = "interpret"
    by_name_only = interprets = True
    serves = ""

    def remarks(self, code: CodePlan, facts: Facts) -> Sequence[str]:
        return ("the interpreter is for debugging: times are of such work in compiled code, not of its steps",)

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch != "cpu":
            return "interpret: runs on CPU tensors; the operands are on a GPU"
        if not has_triton():
            return "interpret: needs Triton; pip install triton"
        d = signature.dtypes
        if lacking := {*astuple(d)}.difference(("fp32", "fp16"), EIGHTHS):
            why = ""
            if lacking.isdisjoint((d.query, d.key, d.value, d.out)):
                why = ", the dtype of weights that are no softmax's, beside FP8 values; pass a float32 query"
            elif lacking.isdisjoint((d.query, d.key, d.value)):
                why = ", the dtype of the output; pass out_dtype=torch.float16 or torch.float32"
            return f"interpret: Triton's interpreter computes fp32 and fp16 correctly, not {lacking.pop()}{why}"
        return self._why_not(kernel, signature, facts)

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        return [FIXED.get(kernel.name, Tiling(32, 32, 4, 1))]  # small: short test problems have several tiles


def _is_needed(kernel: str, wanted: frozenset[str], kinds: set[str]) -> bool:
    serves = _SERVES.get(kernel)
    return serves is None or bool(serves & wanted or _SUMS.get(kernel, set()) & kinds)


WAY_KERNELS: dict[Owner, str] = {owner: kernel.name for kernel, owner in _OWNS.items()}  # as templates call them


def is_of_flash(kernel: Kernel) -> bool:
    """Whether it belongs to schedule flash, or comes before its kernels; or computes as these do."""
    own = (*KERNELS["flash"], *PAIR_SUMS, *KERNELS["split_kv"])
    return kernel in own or bool(kernel.module) or kernel.name in WORK


def converts_beside_wgmma(kernel: Kernel, signature: Signature) -> bool:
    """Whether tiles are converted in registers on cards whose larger products are wgmma (see UNALIGNED)."""
    return signature.arch == "sm_90" and bool(signature.dtypes.quantized) and QUANTIZED in kernel.features


def traits_of(kernel: Kernel, signature: Signature, facts: Facts) -> Traits:
    """Those of a variant in a kernel of such calls."""
    algorithm: Algorithm = "flash" if kernel in PAIR_SUMS else _algorithm(kernel)
    return facts.traits_with(tables_of(facts, algorithm, signature), signature.doubles)


def _algorithm(kernel: Kernel) -> Algorithm:
    return next(name for name, kernels in KERNELS.items() if kernel in kernels)


def _check_sram(kernel: Kernel, form: Tiling, signature: Signature, hardware: Hardware, facts: Facts) -> None:
    widths, traits = signature.widths, traits_of(kernel, signature, facts)
    sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
    needed = sram_bytes(kernel, form, sizes, hardware, segments_of(facts.attention, widths), traits)
    if needed > hardware.sram_per_block:
        raise WeftError(
            f"schedule: {kernel.name} with {form} needs {needed} bytes of SRAM for D {widths.head_dim}, "
            f"Dv {widths.value_dim}, {signature.dtype}; a program of {hardware.title} has {hardware.sram_per_block}: "
            "use smaller tiles or fewer stages, or leave schedule= to be chosen"
        )
