"""Compile the kernels of a plan ahead of time, for a GPU that need not be there.

What is compiled is what a launch would compile: the launcher itself makes the arguments of a call of tiny tensors, and
hands their types to us in place of Triton's dispatch. The result lies in Triton's cache, where a launch on such a GPU
finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..compiler.analysis.facts import Facts
from ..compiler.planning.hardware import BOARDS, CPU, KNOWN, Hardware
from ..compiler.planning.plan import CodePlan
from ..compiler.planning.target import CallTensors, Partition, Target
from ..ir.errors import UnavailableError
from .binding import Binding
from .launching import AnyRun, assembled, parameters_of
from .loader import without_holes
from .summing import KERNEL, OPTIONS, binding_of, types_of
from .targets.triton_launcher import TritonLauncher

TYPE_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_WARP = {"cuda": 32, "hip": 64}


@dataclass(frozen=True)
class Compilation:
    """One kernel as a launch asks for it."""

    function: Any  # what triton.jit made
    arguments: Mapping[str, Any]  # by parameter: a dtype for a tensor, a value for a number or a constant
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def compile(self, hardware: Hardware) -> Any:
        """Triton's compiled kernel for this machine; found again in Triton's cache by whoever compiles the same."""

        def made(options: Mapping[str, int]) -> Any:
            return triton.compile(self._source(), target=gpu_target(hardware), options=dict(options))

        return assembled(self.name, made, self.options)

    def _source(self) -> ASTSource:
        signature, constants = {}, {}
        for number, parameter in enumerate(self.function.params):
            value = self.arguments.get(parameter.name, parameter.default)
            signature[parameter.name] = _type_of(parameter, value)
            if signature[parameter.name] == "constexpr":
                constants[(number,)] = value
        kind = GluonASTSource if isinstance(self.function, GluonJITFunction) else ASTSource
        return kind(self.function, signature, constants, {})


def gpu_target(hardware: Hardware) -> GPUTarget:
    """What Triton calls a machine. Raises UnavailableError for one without a GPU."""
    if hardware.kind == "cpu":
        raise UnavailableError(f"expected a GPU to compile for, got {hardware.name}; pass device='h100' or another one")
    arch = hardware.capability if hardware.kind == "cuda" else hardware.arch
    return GPUTarget(hardware.kind, arch, _WARP[hardware.kind])


def _type_of(parameter: Any, value: Any) -> str:
    """A parameter's type as Triton has it at run time; kernels of Weft are specialised on no run-time value."""
    if parameter.is_constexpr or value is None:
        return "constexpr"
    if parameter.annotation_type:
        return str(parameter.annotation_type)
    match value:
        case TensorDescriptor():
            return f"tensordesc<{TYPE_NAMES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        case torch.dtype():
            return "*" + TYPE_NAMES[value]
        case float():
            return "fp32"
        case int():
            return "i32" if value < 2**31 else "i64"
        case _:
            raise TypeError(f"{parameter.name}: no type for {value!r}")


class _Recorder(TritonLauncher):
    """Mixed into a launcher: it compiles nothing and launches nothing, and remembers what it would have compiled."""

    seen: list[Compilation]
    arguments: Mapping[str, object]

    def _due(self, launches: Sequence[tuple[int, Any]], partition: Partition) -> Sequence[int]:
        """All that any call launches, not those of this tiny one alone."""
        return range(len(launches))

    def _compiled(
        self, bindings: Sequence[Binding], options: Sequence[Mapping[str, int]], typed: Sequence[Any]
    ) -> list[AnyRun]:
        for binding, own, (_, arguments) in zip(bindings, options, typed):
            given = dict(zip([*binding.parameters, *binding.constants], self._types(binding, arguments)))
            self.seen.append(Compilation(self._function(binding.name), given, own))
        return [lambda programs, arguments, stream: None] * len(bindings)

    @property
    def _may_go_directly(self) -> bool:
        return False

    def _stream(self) -> int:
        return 0

    def _add_listed(self, table: Tensor, entries: Tensor, sums: Tensor) -> None:
        """Nothing was listed: entries may be any."""

    def _sum_listed(self, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        kernel = getattr(without_holes(KERNEL, False), KERNEL)
        names, _ = parameters_of(kernel)
        found = binding_of(names, group)
        arguments = {**dict(zip(names, types_of(entries.dtype))), **found.constants}
        self.seen.append(Compilation(kernel, arguments, OPTIONS))

    def _counter(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cpu")

    def _processors(self) -> int:
        return 132  # a number of the launch, which code does not depend on

    def _machine(self) -> Hardware:
        arch = self.code.signature.arch
        return next((m for m in (*KNOWN.values(), *BOARDS) if m.arch == arch), CPU)  # one of those that the code is for


def compilations(
    target: Target, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, call: CallTensors,
    results: Mapping[str, Any],
) -> list[Compilation]:  # fmt: skip
    """The kernels that a call launches, in order, without running any. Tensors may be on any device."""
    launcher = target.bind(modules, code, facts, torch.device("cpu"))
    if not isinstance(launcher, TritonLauncher):
        raise UnavailableError(f"target {target.name} compiles nothing ahead of time; its code is Python")
    kind = type(launcher)
    launcher.__class__ = type(f"Recording{kind.__name__}", (_Recorder, kind), {})
    launcher.seen = []  # type: ignore[attr-defined]
    partition = launcher.partition(call, results)
    places = launcher.workspace(call, results, partition)
    launcher(call, results, {n: place.beside(call.query) for n, place in places.items()}, partition)
    return launcher.seen  # type: ignore[attr-defined]
