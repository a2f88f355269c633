"""Which target computes a call, and why not another."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

from ...ir.attention import Attention
from ...ir.errors import UnavailableError, WeftError
from .records import Specialisation

_CPU_IS_FLASH = "cpu: has schedule flash only; {algorithm} runs on targets triton and interpret"
Target = Literal["hopper", "triton", "interpret", "cpu"]
TARGETS: tuple[Target, ...] = get_args(Target)


def check_name(target: str | None) -> Target | None:
    """The target of that name. Raises WeftError where there is none."""
    found = next((t for t in TARGETS if t == target), None)
    if found is None and target is not None:
        raise WeftError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    return found


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return find_spec("triton") is not None


def why_not_hopper(spec: Specialisation) -> str | None:
    """Why the Hopper forward cannot compute such calls; None where it can."""
    if spec.arch != "sm_90":
        return f"hopper: needs compute capability 9.0, this is {spec.arch}"
    if spec.dtype not in ("bf16", "fp16"):
        return f"hopper: needs bf16 or fp16 operands, got {spec.dtype}"
    if spec.rope_dim or spec.value_is_key:
        return "hopper: latent attention is computed by the triton target"
    if spec.head_dim not in (64, 128) or spec.value_dim != spec.head_dim:
        return f"hopper: needs D = Dv = 64 or 128, got D {spec.head_dim}, Dv {spec.value_dim}"
    return None


def why_not(target: str, spec: Specialisation) -> str | None:
    """Why a target cannot compute such calls on this kind of device; None where it can."""
    on_gpu = spec.arch != "cpu"
    match target:
        case "cpu":
            return "cpu: the operands are on a GPU" if on_gpu else None
        case "interpret":
            if on_gpu:
                return "interpret: runs on CPU tensors; the operands are on a GPU"
            if not has_triton():
                return "interpret: needs Triton; pip install triton"
            if spec.dtype not in ("fp32", "fp16"):
                return f"interpret: Triton's interpreter computes fp32 and fp16 correctly, not {spec.dtype}"
            return None
        case "triton" | "hopper":
            if not on_gpu:
                return f"{target}: needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'"
            if not has_triton():
                return f"{target}: needs Triton; pip install triton"
            if spec.dtype == "fp64":
                return f"{target}: expected fp32, fp16 or bf16 operands, got fp64; use .reference(...) for float64"
            return why_not_hopper(spec) if target == "hopper" else None
        case _:
            raise WeftError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")


def choose(spec: Specialisation, asked: str | None, algorithm: str = "flash") -> tuple[Target, tuple[str, ...]]:
    """The target of such calls and notes for `explain`.

    Raises UnavailableError where the target that was asked for cannot compute them.
    """
    wanted = check_name(asked)
    if wanted is not None:
        reason = why_not(wanted, spec)
        if reason is None and wanted == "hopper" and (spec.direction == "backward" or algorithm != "flash"):
            reason = "hopper: has the forward of schedule flash only"
        if reason is None and asked == "cpu" and algorithm != "flash":
            reason = _CPU_IS_FLASH.format(algorithm=algorithm)
        if reason is not None:
            raise UnavailableError(f"target {reason}")
        return wanted, ()
    if spec.arch == "cpu":
        if algorithm != "flash":
            raise UnavailableError(f"target {_CPU_IS_FLASH.format(algorithm=algorithm)}; pass target='interpret'")
        return "cpu", ()
    if algorithm != "flash":
        return "triton", ()
    reason = why_not_hopper(spec)
    if reason is None and spec.direction == "forward":
        return "hopper", ()
    problem = why_not("triton", spec)
    if problem is not None:
        raise UnavailableError(f"target {problem}")
    return "triton", (reason,) if reason else ()


def available(attention: Attention | None = None) -> dict[str, str | None]:
    """Each target, with None where this machine can run it or the reason why it cannot (for `weft doctor`)."""
    import torch

    arch = device_arch(torch.device("cuda", 0)) if torch.cuda.is_available() else "cpu"
    spec = Specialisation("forward", arch, "fp16", 64, 64)
    return {t: None if t == "cpu" else why_not(t, spec if t in ("hopper", "triton") else _CPU_SPEC) for t in TARGETS}


_CPU_SPEC = Specialisation("forward", "cpu", "fp16", 64, 64)


@lru_cache(maxsize=64)
def device_arch(device: object) -> str:
    """ "cpu", "sm_90", "gfx942": what code is generated for."""
    import torch

    assert isinstance(device, torch.device)
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UnavailableError(f"expected operands on a CPU or a CUDA or ROCm GPU, got device {device}")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
