"""The texts of one triple of the corpus: what is generated, planned, said and compiled."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import weft
from weft.codegen.at_once import _has_dots
from weft.codegen.loader import WITHOUT_HOLES, text_without_holes
from weft.codegen.products import multiplies
from weft.compiler.planning.machines import hardware
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.machines.rates import guessed_rates
from weft.runtime.driver import compile_kernels

from .corpus import Triple, corpus

_EVERY = "every variant"


CORES = 2  # of the CPU that the record is of, whatever this one is
FLAGS = ["avx512f", "avx512_bf16"]  # and what it can do, as Linux lists it


@contextmanager
def recorded_machine() -> Iterator[None]:
    """This CPU as one with two cores of a server, which nobody measured: choices follow from its figures."""
    record = hardware.cpu_with(guessed_rates(CORES), CORES)
    flags = mock.patch.object(hardware, "_flags", lambda: FLAGS)
    maker = mock.patch.object(hardware, "_made_by_intel", lambda: False)
    known = multiplies, _has_dots  # remembered of this processor, and then of that one
    with flags, maker, mock.patch.object(hardware, "for_device", lambda device: record):
        _forget(known)
        yield
    _forget(known)


def _forget(known: Iterable[Any]) -> None:
    for function in known:
        function.cache_clear()


@cache
def _triples() -> dict[str, Triple]:
    return {t.name: t for t in corpus()}


def texts_of(name: str) -> dict[str, str]:
    """Schedule, stages, explanation and sources of a triple, or why it is refused."""
    triple = _triples()[name]
    asked = _asked(triple)
    with warnings.catch_warnings(), recorded_machine():
        warnings.simplefilter("ignore")
        try:
            plan = triple.variant.plan(*triple.operands, **asked)
        except weft.WeftError as error:
            return {"refusal": str(error)}
        found = {"schedule": str(plan.schedule), "explain": triple.variant.explain(*triple.operands, **asked)}
        found["stages"] = "\n".join(f"{k.name}: {stage}" for k in plan.kernels for stage in k.stages)
        for direction in dict.fromkeys(k.direction for k in plan.kernels):
            found[direction] = triple.variant.source(*triple.operands, direction=direction, **asked)
    return found


def _asked(triple: Triple) -> dict[str, Any]:
    given: dict[str, Any] = {"device": triple.card, "target": triple.target, **triple.options}
    given |= {n: v for n, v in (("schedule", triple.schedule), ("form", triple.form)) if v is not None}
    return given


def without_holes(only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Kernels that are the same for every variant: their templates have nothing to fill in.

    They are compared like a triple named "every variant", where that name has `only` in it.
    """
    if only in _EVERY:
        yield _EVERY, {kernel: text_without_holes(kernel) for kernel in WITHOUT_HOLES}


# -- machine code ------------------------------------------------------------------------------------------------------
_COMPILED = re.compile(
    r"(causal|alibi|documents|dropout|sink|sigmoid|far|t5|bias|encoding|blocks)-(hopper|triton)-h200"
    r"|(causal|t5)-repeats-hopper-h200|causal-(64x64|192x128|256x256|decode)-(hopper|triton)-h200"
    r"|mla-(expanded-1024|absorbed-1|paged-700)-.*|causal-card-.*"
    r"|causal-(decode-)?(lengths|packed|paged|packed_paged)-(hopper|triton)"
)


def machine_code(name: str) -> dict[str, str]:
    """PTX of the kernels of a triple, without what names places of the source; {} of triples that are not compiled."""
    triple = _triples()[name]
    if not _COMPILED.fullmatch(name) or triple.card == "cpu":
        return {}
    try:
        return {f"ptx {kernel}": text for kernel, text in _kernels(triple)}
    except weft.WeftError:
        return {}  # refused, as its texts say


def machine_code_without_holes(only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """PTX of kernels that are the same for every variant, likewise."""
    if only not in _EVERY:
        return
    from ..machine_code.fixed import each  # lazy: imports Triton, which texts do without

    yield _EVERY, {f"ptx {name}": _without_places(kernel.assembly) for name, kernel in each()}


def _kernels(triple: Triple) -> Iterator[tuple[str, str]]:
    """The kernels that a call launches: direction, number in order and name; PTX."""
    from ..machine_code.ahead import compile_ahead, launched  # lazy: imports Triton, which texts do without

    machine, asked = by_name(triple.card), _asked(triple)
    plan = triple.variant.plan(*triple.operands, **asked)
    for code in plan.codes:
        direction, schedule = code.signature.direction, str(code.schedule)
        made = compile_kernels(triple.variant, code.signature, machine, code.target, schedule)
        for number, seen in enumerate(launched(made, triple.variant, plan.shape)):
            kernel = compile_ahead(seen, machine)
            yield f"{direction} {code.signature.serves} {number} {kernel.name}", _without_places(kernel.assembly)


def _without_places(assembly: str) -> str:
    """Assembly without lines that name files, lines and debugging sections."""
    kept = (line for line in assembly.splitlines() if not re.match(r"\s*(\.loc|\.file|//|\$L__tmp)", line))
    return re.sub(r"\s*\.section\s+\.debug.*", "", "\n".join(kept), flags=re.DOTALL)
