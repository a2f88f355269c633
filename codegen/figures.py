"""What the docstring of a generated module says of its kernels: form, SRAM, registers, and what bounds each.

Figures of time are a model's, for one problem and one card of the architecture, so that the text depends on no call.
"""

from __future__ import annotations

import textwrap

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.analysis.tiles.results import Traits
from ..compiler.planning.cost import predict, sram_bytes
from ..compiler.planning.dtypes import dtype_named
from ..compiler.planning.kernel import Bound
from ..compiler.planning.machines.hardware import BOARDS, KNOWN, Hardware
from ..compiler.planning.plan import CodePlan, KernelCode
from ..compiler.planning.records import Shape, stored_beside
from .context import Figures

WIDTH = 118
BOUNDS: dict[Bound, str] = {
    "matrix": "matrix products", "exp": "exponentials", "other": "instructions of scores and weights",
    "mask": "instructions of the mask", "tiles": "what each tile costs besides", "memory": "HBM", "L2": "L2",
    "latency": "its launch", "passes": "reads and writes of scores", "calls": "calls of torch",
    "torch": "torch's own kernel",
}  # fmt: skip


def figures(code: CodePlan, facts: Facts, for_gpus: bool) -> Figures:
    """The variant and its kernels, in words. An interpreter has no SRAM, and no time that counts."""
    text, card = str(facts.attention), card_of(code.signature.arch)
    if card is None or (for_gpus and card.kind == "cpu"):
        return Figures(text, "\n".join(f"  {kernel.name}: form {kernel.form}" for kernel in code.own))
    lines = [line for kernel in code.own for line in _wrapped(_of_kernel(kernel, code, facts.traits, card))]
    for divides in sorted({kernel.kernel.shares_keys for kernel in code.own}):
        shape = problem(code, divides)
        heads, pairs = f"{shape.heads} heads over {shape.kv_heads}", f"{shape.q_len:,} x {shape.kv_len:,} pairs"
        lines += _wrapped(
            f"(bound as a model says of batch {shape.batch}, {heads}, {pairs}, all visible; {card.title})"
        )
    return Figures(text, "\n".join(lines))


def card_of(arch: str) -> Hardware | None:
    """The last card on record of an architecture; of sm_90 that is an H200, by which the model was made."""
    return next((record for record in (*reversed(KNOWN.values()), *BOARDS) if record.arch == arch), None)


def problem(code: CodePlan, divides: bool) -> Shape:
    """A problem that stands for those of a kernel. divides: for kernels of few queries."""
    kv_heads = 1 if code.segments.value_is_key else 4 if divides else 16
    return _shape(code, (8, 32, kv_heads, 1, 16384) if divides else (1, 16, kv_heads, 4096, 4096))


def _shape(code: CodePlan, sizes: tuple[int, int, int, int, int]) -> Shape:
    widths, dtypes = code.signature.widths, code.signature.dtypes
    stored = stored_beside(dtypes.products, dtypes.query, dtypes.key, dtypes.value)
    return Shape(*sizes, widths.head_dim, widths.value_dim, dtypes.products, *stored)


def _of_kernel(kernel: KernelCode, code: CodePlan, traits: Traits, card: Hardware) -> str:
    """What a program of one kernel takes, and what bounds it."""
    record, form, parts = kernel.kernel, kernel.form, code.segments
    needed = sram_bytes(record, form, _shape(code, (1, 1, 1, form.block_q, form.block_kv)), card, parts, traits)
    found = [f"form {form}"]
    if needed:
        found.append(f"{needed:,} bytes of " + ("a core's cache" if card.kind == "cpu" else "SRAM a program"))
    if record.program is not None and (registers := record.program(form, parts, traits).registers_of_roles):
        found.append(f"registers a thread: {registers}")
    if bound := _bound(kernel, code, traits, card):
        found.append(f"bound by {bound}")
    return f"{kernel.name}: {'; '.join(found)}"


def _bound(kernel: KernelCode, code: CodePlan, traits: Traits, card: Hardware) -> str:
    """What bounds a kernel; nothing of one without programs in that problem, or of products whose rate is not known."""
    record, divides = kernel.kernel, kernel.kernel.shares_keys
    shape = problem(code, divides)
    if not any(units == dtype_named(shape.dtype).units for units, _ in card.peaks):
        return ""
    (cost,) = predict(shape, [(record, kernel.form)], card, code.segments, traits, few_queries=divides)
    return f"{BOUNDS[cost.bound]}, {cost.times.share:.0%} of its time" if cost.seconds else ""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
