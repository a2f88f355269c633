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

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.planning.machines.hardware import BOARDS, CPU, KNOWN, Hardware
from ..compiler.planning.plan import CodePlan
from ..compiler.planning.target import CallTensors, Target
from ..ir.errors import UnavailableError
from .launch.device import Asked, Device
from .launch.fixed import WARPS
from .launch.launcher import KernelLauncher
from .launch.launching import AnyRun, assembled, parameters_of
from .launch.summing import KERNEL, constants_of, types_of
from .loader import without_holes

TYPE_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
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


class Recording(Device):
    """A device that compiles nothing and launches nothing, and remembers what it would have compiled."""

    launches_all = True  # all that any call launches, not what this tiny one does alone

    def __init__(self, code: CodePlan) -> None:
        super().__init__(0, False)
        self.seen: list[Compilation] = []
        self.goes_directly = False
        arch = code.signature.arch  # one of those that the code is for
        self._machine = next((m for m in (*KNOWN.values(), *BOARDS) if m.arch == arch), CPU)

    def compiled(self, asked: Sequence[Asked]) -> list[AnyRun]:
        for one in asked:
            names = [*one.binding.parameters, *one.binding.constants]
            self.seen.append(Compilation(one.function, dict(zip(names, one.types(one.arguments))), one.options))
        return [lambda programs, arguments, stream: None] * len(asked)

    def hardware(self) -> Hardware:
        return self._machine

    def processors(self) -> int:
        return 132  # a number of the launch, which code does not depend on

    def stream(self) -> int:
        return 0

    def counter(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cpu")

    def add_listed(self, table: Tensor, entries: Tensor, sums: Tensor) -> None:
        """Nothing was listed: entries may be any."""

    def sum_listed(self, sums: Tensor, entries: Tensor, ranges: Tensor, group: int, shares: Tensor) -> None:
        kernel = getattr(without_holes(KERNEL, False), KERNEL)
        names, _ = parameters_of(kernel)
        arguments = {**dict(zip(names, types_of(entries.dtype))), **constants_of(group)}
        self.seen.append(Compilation(kernel, arguments, {"num_warps": WARPS}))


def compilations(
    target: Target, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, call: CallTensors,
    results: Mapping[str, Any],
) -> list[Compilation]:  # fmt: skip
    """The kernels that a call launches, in order, without running any. Tensors may be on any device."""
    launcher = target.bind(modules, code, facts, torch.device("cpu"))
    if not isinstance(launcher, KernelLauncher):
        raise UnavailableError(f"target {target.name} compiles nothing ahead of time; its code is Python")
    launcher.job.device = recording = Recording(code)
    partition = launcher.partition(call, results)
    places = launcher.workspace(call, results, partition)
    launcher(call, results, {n: place.beside(call.query) for n, place in places.items()}, partition)
    return recording.seen
