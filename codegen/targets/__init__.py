"""The targets, in the order in which they are tried for a call that names none: one object each.

>>> [target.name for target in targets()]
['hopper', 'triton', 'interpret', 'cpu']
"""

from __future__ import annotations

from ...compiler.planning.target import Target
from ...ir.errors import WeftError
from .cpu.target import CpuTarget
from .hopper.target import HopperTarget
from .triton.target import InterpretTarget, TritonTarget

_registered: dict[str, Target] = {}


def register(target: Target) -> None:
    """Add a target, or put it in place of the one of its name."""
    _registered[target.name] = target


def unregister(name: str) -> None:
    """Take a target away again."""
    del _registered[name]


def targets() -> tuple[Target, ...]:
    """All targets, best first."""
    return tuple(_registered.values())


def target_named(name: str) -> Target:
    """The target of that name. Raises WeftError where there is none."""
    if name not in _registered:
        raise WeftError(f"target: expected one of {', '.join(_registered)}, got {name!r}")
    return _registered[name]


for _target in (HopperTarget(), TritonTarget(), InterpretTarget(), CpuTarget()):
    register(_target)
