"""Weft: an attention variant is one Python expression; forward and backward kernels are generated from it.

>>> import weft
>>> from weft import kv_pos, q_pos, score
>>> weft.Attention(score=50.0 * weft.tanh(score / 50.0), mask=kv_pos <= q_pos, name="capped")
weft.Attention(score=50.0 * tanh(score / 50.0), mask=kv_pos <= q_pos, name="capped")
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from . import installed as _installed

_installed.warn_of_the_other()  # before modules that it may have overwritten are imported

from . import fp8, integrations, kv, masks, nn, scores, serving, variants
from .attention import Attention, parse_attention
from .buckets import bucket
from .calls.merging import merge
from .compiler.planning.plan import Plan
from .compiler.planning.records import Shape
from .compiler.planning.schedule import Schedule
from .ir import foreign as _foreign
from .ir import functions as _functions
from .ir.attention import Latent
from .ir.errors import InternalError, UnavailableError, WeftError
from .ir.expr import scalar, symbol, tensor
from .ir.normalizer import Normalizer
from .ir.parse import parse
from .plans.request import shape
from .runtime.settings import settings
from .tools import notebook as _notebook  # noqa: F401

if TYPE_CHECKING:  # few programs want them, and they import what measures, or torch.distributed
    from . import distributed
    from .tools import build, calibrate, tune

__version__ = "0.1.0"

q_pos = symbol("q_pos")
kv_pos = symbol("kv_pos")
head = symbol("head")
kv_head = symbol("kv_head")
group = symbol("group")
batch = symbol("batch")
q_len = symbol("q_len")
kv_len = symbol("kv_len")
head_dim = symbol("head_dim")
score = symbol("score")

__all__ = [
    "Attention", "InternalError", "Latent", "Normalizer", "Plan", "Schedule", "Shape", "UnavailableError",
    "WeftError", "batch", "bucket", "build", "calibrate", "distributed", "fp8", "group", "head", "head_dim",
    "integrations", "kv", "kv_head", "kv_len", "kv_pos", "masks", "merge", "nn", "parse", "parse_attention", "q_len",
    "q_pos", "scalar", "score", "scores", "serving", "settings", "shape", "tensor", "tune", "variants",
]  # fmt: skip

if _taken := sorted({*globals()} & {*_functions.__all__}):
    raise InternalError(f"operators: weft.{_taken[0]} is something else already; choose another name for the operator")
__all__ += _functions.__all__


def __getattr__(name: str) -> Any:
    """The functions of the language, `weft.tanh` and whatever else ir/operators.py declares, and those of tools."""
    if name in ("build", "calibrate", "tune"):
        return getattr(_import_module(".tools", __name__), name)
    if name == "distributed":  # it imports torch.distributed
        return _import_module(".distributed", __name__)
    try:
        return _functions.__getattr__(name)
    except AttributeError as error:
        raise AttributeError(f"{error}{_elsewhere(name)}") from None


def _elsewhere(name: str) -> str:
    """Where a name is that people look for here, or what is written in place of it."""
    for part in (masks, scores, variants):
        if name in part.__all__:
            return f"; it is {part.__name__}.{name}"
    if name in _foreign.SYMBOL_NAMES:
        return f"; it is weft.{_foreign.SYMBOL_NAMES[name]}"
    if name in ("q", "k", "query", "key"):
        return "; weft.score is scale * (query . key), and a variant is called with tensors"
    if name.startswith("_") or name in _functions.__all__:
        return ""
    if _foreign.is_written_otherwise(name):
        return f"; {_foreign.instead_of(name)}"
    return "; weft.Attention(score=..., mask=...) declares a variant, weft.scalar and weft.tensor its operands"


def __dir__() -> list[str]:
    return sorted(__all__)
