"""What operations of torch take, one after the other, so that their times add up: the records of a target's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..kernel import Bound
from ..quantities import Formula, Sizes
from .rates import Library


@dataclass(frozen=True)
class CpuSpeed:
    """What one core does in a form."""

    library: Library
    products: float  # FLOP/s
    passes: float  # bytes/s
    working_set: int  # bytes that are gone over again and again
    shares: tuple[float, float, float, float]  # of these in L1, L2, L3 and RAM
    speedup: float  # what all cores do over what one does
    cores: int
    call_seconds: float  # of all cores


@dataclass(frozen=True)
class CpuWork:
    """What a kernel computes besides products, as formulas."""

    passes: Formula  # bytes of passes over tiles of scores
    exps: Formula  # exponentials, and other functions as so many as take as long
    calls: Formula  # operations of torch


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of each part, which add up."""

    matrix: float
    memory: float
    passes: float
    exp: float
    calls: float
    own: float = 0.0  # of torch's own kernel; where it computes a call, nothing else takes time

    @property
    def parts(self) -> dict[Bound, float]:
        return {
            "matrix": self.matrix, "memory": self.memory, "passes": self.passes, "exp": self.exp, "calls": self.calls,
            "torch": self.own,
        }  # fmt: skip

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> Bound:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def share(self) -> float:
        """Of the kernel's time, of what bounds it."""
        return self.parts[self.bound] / self.seconds


def computed_whole(seconds: float) -> CpuTimes:
    """Of a call that is torch's own kernel, which takes so long."""
    return CpuTimes(0.0, 0.0, 0.0, 0.0, 0.0, seconds)


class TorchCost(NamedTuple):
    """What such a model says of a kernel."""

    sizes: Sizes  # the letters, with those that the model adds
    times: CpuTimes
    speed: CpuSpeed
    work: CpuWork
