"""All modules of a plan as one text, for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.analysis.tiles.measured import LONG_AXIS
from ..compiler.planning.plan import CodePlan, KernelCode
from ..compiler.planning.target import Target
from .generate import generate
from .targets import target_named

_MAIN = "the kernels themselves"
_BESIDE = {"measures": "what measures which tiles to visit", "tables": "what makes tables by distance",
           "": "what sums along diagonals"}  # fmt: skip


def generate_all(facts: Facts, code: CodePlan, target: Target) -> str:
    """Source of all modules whose kernels a call launches, in the order of their first launches.

    Guarantee: where one module has them all, that module.
    """
    texts = {_MAIN: generate(facts, code, target)}
    for kernel in code.beside:
        texts[_BESIDE[kernel.kernel.module]] = target_named(kernel.target).source_beside(kernel, code, facts)
    if len(texts) == 1:
        return texts[_MAIN]
    places = {title: _defined(text, [k.name for k in code.kernels]) for title, text in texts.items()}
    launched = [f"#   {k.name}{_only_if(k)}" for k in code.kernels]
    parts = ["\n".join([f"# {len(texts)} modules. A call launches, in this order:", *launched])]
    for number, title in enumerate(sorted(texts, key=lambda title: places[title]), 1):
        names = ", ".join(code.kernels[place].name for place in places[title])
        heading = f"# ==== module {number} of {len(texts)}: {title} "
        parts.append(f"{heading.ljust(120, '=')}\n# {names}\n{texts[title]}")
    return "\n\n".join(parts)


def _defined(text: str, kernels: Sequence[str]) -> list[int]:
    """Which of these kernels a module has, by number."""
    return [n for n, name in enumerate(kernels) if re.search(rf"^def {name}\(", text, re.MULTILINE)]


def _only_if(code: KernelCode) -> str:
    """Of which axes a kernel that measures runs of tiles is launched."""
    kernel = code.kernel
    if kernel.finds not in ("runs", "ends"):
        return ""
    keys = "keys" if kernel.axis == "kv" else "queries"
    return f", of {'more than' if kernel.of_long_axis else 'up to'} {LONG_AXIS:,} {keys}"
