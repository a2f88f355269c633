"""The model of target `cpu`: torch operations one after the other, so that their times add up.

A tile of keys is two products (five in a backward), an exponential a pair, and passes of torch over the tile of scores,
which runs as fast as the cache that holds the tile; every operation also has its price as a call. Neighbours that need
no mask are one tile. What `weft calibrate` measured says how fast each of these is; without it rates.py guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ..analysis.records import TileCounts
from .forms import SCORE_BYTES, CpuForm
from .hardware import Hardware
from .kernels import Bound, Kernel
from .quantities import Formula, Sizes
from .rates import Library

# Passes over a tile of scores besides those of products and of the exponential, and calls, as the templates have them.
# A pass reads or writes each score once.
PASSES = {"forward": 5, "backward": 9}  # a bias added, small powers cut, and sums; in a backward dP's too
SCORE_PASSES = 6  # of a score that is not a multiple of q.k
MASK_PASSES = 6  # of a tile at the edge of a mask: hidden scores are replaced, and looked through for NaN
CALLS = {"forward": 14, "backward": 20}  # of a tile of keys, views and operations
ROW_CALLS = {"forward": 24, "backward": 30}  # of a tile of queries


@dataclass(frozen=True)
class CpuSpeed:
    """What one core does in a form."""

    library: Library
    products: float  # FLOP/s
    passes: float  # bytes/s
    working_set: int  # bytes that are gone over again and again
    shares: tuple[float, float, float, float]  # of these in L1, L2, L3 and RAM
    speedup: float  # products of all cores over those of one
    cores: int
    call_seconds: float


def library_of(form: CpuForm) -> Library:
    return "onednn" if form.one_dnn else "torch"


def speed_of(form: CpuForm, working_set: float, hardware: Hardware, dtype: str) -> CpuSpeed:
    rates = hardware.cpu
    assert rates is not None
    keys = max(form.block_kv, form.most_scores // form.block_q)
    products = rates.product_flops(library_of(form), form.block_q, keys) or rates.product_flops(
        "torch", form.block_q, keys
    )
    assert products is not None
    return CpuSpeed(
        library=library_of(form),
        products=products / (2 if dtype == "fp64" else 1),
        passes=rates.pass_bytes_per_second(working_set, hardware.sms),
        working_set=int(working_set),
        shares=rates.shares(working_set, hardware.sms),
        speedup=rates.all_products,
        cores=hardware.sms,
        call_seconds=rates.call_seconds,
    )


def with_joined(x: Sizes, form: CpuForm, tiles: TileCounts, masked: bool) -> Sizes:
    """The letters, with m tiles that need the mask, and t tiles that are left where neighbours are joined."""
    edge = tiles.edge if masked else 0
    full = tiles.visited - edge
    rows = max(1, min(form.block_q, x.L))
    most = max(1, form.most_scores // int(rows * form.block_kv))
    # a run of neighbours ends anywhere, so that its last tile is half as long
    ends = x.B * x.Hq * x.nq * (0.5 if masked else 0.0)
    return x._replace(m=edge, t=edge + min(full, ceil(full / most + ends)))


def pass_bytes(kernel: Kernel, linear: bool) -> Formula:
    """Bytes of passes over tiles of scores."""
    return _pass_bytes(PASSES[kernel.direction] + (0 if linear else SCORE_PASSES))


@lru_cache(maxsize=16)
def _pass_bytes(passes: int) -> Formula:
    def found(x: Sizes) -> float:
        return SCORE_BYTES * x.bq * x.bkv * (passes * x.n + MASK_PASSES * x.m)

    return found


@lru_cache(maxsize=16)
def calls(direction: str) -> Formula:
    """Operations of torch."""

    def found(x: Sizes) -> float:
        return CALLS[direction] * x.t + ROW_CALLS[direction] * x.B * x.Hq * x.nq

    return found


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of each part, which add up."""

    matrix: float
    memory: float
    passes: float
    exp: float
    calls: float

    @property
    def parts(self) -> dict[Bound, float]:
        return {
            "matrix": self.matrix, "memory": self.memory, "passes": self.passes, "exp": self.exp, "calls": self.calls,
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


def times_of(
    kernel: Kernel, x: Sizes, speed: CpuSpeed, hardware: Hardware, busy: float, linear: bool, exps: Formula
) -> CpuTimes:  # fmt: skip
    """x: the letters of with_joined. busy: share of the cores that work. exps: with those of the score."""
    cores = speed.cores * busy
    return CpuTimes(
        matrix=kernel.flops(x) / (speed.products * speed.speedup * busy),
        passes=pass_bytes(kernel, linear)(x) / (speed.passes * cores),
        memory=(kernel.read(x) + kernel.written(x)) / hardware.hbm_bytes_per_second,
        exp=exps(x) / (hardware.exp_per_second * busy),
        calls=calls(kernel.direction)(x) * speed.call_seconds / cores,
    )
