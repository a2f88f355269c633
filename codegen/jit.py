"""What generated Triton modules import: a decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from . import triton_versions

triton_versions.check("triton")


def run_time_kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` that specialises on no run-time value: a new length, stride, window or batch compiles nothing."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if p.annotation is not tl.constexpr])
