"""What Weft uses of Triton that a version may lack or have otherwise."""

from __future__ import annotations

from functools import cache

import triton

from ..ir.versions import missing, refuse, version_of, warn_where_untested

_USED = (
    "triton:jit", "triton:knobs.runtime", "triton.language:core", "triton.language:constexpr", "triton.language:dot",
    "triton.runtime:driver", "triton.runtime.cache:triton_key", "triton.compiler:ASTSource",
    "triton.backends.compiler:GPUTarget",
)  # fmt: skip
_USED_BY_GLUON = (
    "triton._C.libtriton:ir.DESCRIPTOR_REDUCE_KIND.ADD", "triton.experimental.gluon:jit",
    "triton.experimental.gluon.language._core:builtin", "triton.experimental.gluon._runtime:GluonASTSource",
    "triton.experimental.gluon._runtime:GluonJITFunction",
    "triton.experimental.gluon.nvidia.hopper:TensorDescriptor",
)  # fmt: skip
_USED_BY_INTERPRET = tuple(
    f"triton.runtime.interpreter:{name}"
    for name in "InterpreterBuilder interpreter_builder InterpretedFunction TensorHandle ReduceOps "
    "_patch_lang _LangPatchScope _get_np_dtype".split()
)
_OF_TARGETS = {"triton": _USED, "hopper": _USED + _USED_BY_GLUON, "interpret": _USED + _USED_BY_INTERPRET}


@cache
def check(target: str) -> None:
    """Raise UnavailableError where this Triton lacks what a target uses; warn once where it was not tested."""
    refuse("triton", triton.__version__, missing(_OF_TARGETS[target]))
    warn_where_untested("triton", triton.__version__)


def takes_launches_in_c(launcher: object) -> bool:
    """Whether the function in C below a launcher takes its arguments in the order that is known of 3.6."""
    return version_of(triton.__version__) == (3, 6) and type(launcher).__name__ == "CudaLauncher"
