"""The model of target `cpu`: torch operations one after the other, so that their times add up.

A tile of keys is two products (five in a backward), and operations of torch over the tile of scores. Plain ones, which
are passes, run as fast as the cache that holds the tile; exponentials and other functions have rates of their own, and
are counted as so many exponentials as take as long. Every operation also has its price as a call. Neighbours that need
no mask are one tile. What `weft calibrate` measured says how fast each of these is; without it rates.py guesses.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Literal

from ....compiler.analysis.tiles.results import TileCounts, TorchWork, Traits
from ....compiler.planning.dtypes import dtype_named
from ....compiler.planning.form import Machine
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.machines.rates import CpuRates, Library
from ....compiler.planning.machines.torch_times import CpuSpeed, CpuTimes, CpuWork, TorchCost
from ....compiler.planning.quantities import Sizes, score_count
from ....compiler.planning.signature import Direction
from ....ir.normalizer import RELU, SIGMOID

if TYPE_CHECKING:
    from .forms import CpuForm

OwnWay = Literal["whole", "mask", "weights"]  # torch's own kernel as it is or with a mask, or a product of weights
SCORE_BYTES = 4  # of a score on a CPU: float32

# Of each score, as the templates and normalizers have them; a pass reads a score and writes one, a sum is half of one.
PASSES = {"forward": 1.75, "backward": 1.5}  # of a softmax of linear scores: maximum and sum, the gradient of weights
SCORE_PASSES = {"forward": 4.0, "backward": 6.0}  # of other scores: units of log 2, less the maximum, small powers cut
WEIGHT_PASSES = {SIGMOID: {"forward": 1.0, "backward": 4.0}, RELU: {"forward": 1.0, "backward": 2.0}}  # in its place
MASK = TorchWork(plain=2, others=(("compare", 1),), shared=(("choice", 1),))  # pairs hidden, and looked through for NaN
MANY = 4  # heads of a short call
# What a call takes with two threads of Python, of which one runs at a time, over what it takes alone: measured where
# this was written. Of more cores torch divides its operations, of as many heads at once.
TAKING_TURNS = 2.0
SHARED = 0.25  # of what heads share: so many of them are taken to do
# Operations of torch and what Python does between them, as so many operations on a few numbers.
CALLS = {"forward": 24, "backward": 30}  # of a tile of keys
ROW_CALLS = {"forward": 44, "backward": 55}  # of a tile of queries

# Of calls without tiles: operations on the host, with what Python and autograd do between them; how many of them a row
# of a query takes in torch's own kernel, whatever its keys; passes over the numbers of a mask, and of weights.
OWN_CALLS: dict[OwnWay, dict[Direction, int]] = {
    "whole": {"forward": 6, "backward": 32},
    "mask": {"forward": 22, "backward": 54},
    "weights": {"backward": 44},
}
OWN_ROW = 0.03
OWN_PASSES: dict[OwnWay, float] = {"mask": 3.0, "weights": 5.0}
OWN_KEYS = 512  # that torch's own kernel computes at once: of them a causal mask saves nothing


def torch_cost(
    kernel: Kernel, form: CpuForm, x: Sizes, tiles: TileCounts, traits: Traits, machine: Machine,
    work: CpuWork | None = None,
) -> TorchCost:  # fmt: skip
    """Of a kernel in this form. x: the letters of the problem. work: that of `work_of`, where it is at hand."""
    hardware = machine.hardware
    assert hardware.cpu is not None
    sizes = with_joined(x, form, tiles, traits.masked)
    speed = speed_of(form, sizes, machine.sram, hardware, machine.dtype)
    work = work or work_of(kernel, traits, hardware.cpu)
    return TorchCost(sizes, times_of(kernel, sizes, speed, hardware, machine.busy, work), speed, work)


def speed_of(form: CpuForm, x: Sizes, working_set: float, hardware: Hardware, dtype: str) -> CpuSpeed:
    """x: the letters of with_joined."""
    rates = hardware.cpu
    assert rates is not None
    library: Library = "onednn" if form.one_dnn and not is_short(form, x) else "torch"
    return CpuSpeed(
        library=library,
        products=_products(library, x, rates) * dtype_named(dtype).rate,
        passes=rates.pass_bytes_per_second(working_set, hardware.sms),
        working_set=int(working_set),
        shares=rates.shares(working_set, hardware.sms),
        speedup=rates.all_products,
        cores=hardware.sms,
        call_seconds=rates.call_seconds * (TAKING_TURNS if hardware.sms == 2 else 1 / hardware.sms),
    )


def is_short(form: CpuForm, x: Sizes) -> bool:
    """Whether many heads are computed at once, whose products are torch's: `chunks` of the templates."""
    return form.most_scores >= MANY * (x.Hq / x.Hkv) * x.L * x.T


def _products(library: Library, x: Sizes, rates: CpuRates) -> float:
    """FLOP/s: of tiles that need the mask, and of joined ones, which have more keys."""
    queries, joined = min(x.bq, x.L), x.t - x.m

    def rate(keys: float) -> float:
        found = rates.product_flops(library, queries, keys) or rates.product_flops("torch", queries, keys)
        assert found is not None
        return found

    if not x.n:
        return rate(x.bkv)
    seconds = x.m / rate(min(x.bkv, x.T))
    if joined > 0:
        seconds += (x.n - x.m) / rate(min(x.bkv * (x.n - x.m) / joined, x.T))
    return x.n / seconds


def with_joined(x: Sizes, form: CpuForm, tiles: TileCounts, masked: bool) -> Sizes:
    """The letters, with m tiles that need the mask, and t tiles that are left where neighbours are joined."""
    edge = tiles.edge if masked else 0
    full = tiles.visited - edge
    rows = max(1, min(form.block_q, x.L))
    most = max(1, form.most_scores // int(rows * form.block_kv))
    # a run of neighbours ends anywhere, so that its last tile is half as long
    ends = x.B * x.Hq * x.nq * (0.5 if masked else 0.0)
    return x._replace(m=edge, t=edge + min(full, ceil(full / most + ends)))


def work_of(kernel: Kernel, traits: Traits, rates: CpuRates) -> CpuWork:
    """Of a kernel of a variant, with the prices of a machine."""
    passes = WEIGHT_PASSES.get(traits.normalizer, PASSES)[kernel.direction]
    exps = {SIGMOID: rates.exps_of("sigmoid"), RELU: 0.0}.get(traits.normalizer, 1.0)
    if not traits.linear:
        passes += SCORE_PASSES[kernel.direction]
        computed = [traits.score_torch, *([traits.slope_torch] if kernel.direction == "backward" else [])]
        passes += sum(work.plain for work in computed)
        exps += sum(_exps(work, rates) for work in computed)
    masks = [traits.mask_torch, MASK] if traits.masked else []
    mask_passes, mask_exps = sum(work.plain for work in masks), sum(_exps(work, rates) for work in masks)
    return _work(kernel.direction, passes, round(exps, 2), mask_passes, round(mask_exps, 2))


def _exps(work: TorchWork, rates: CpuRates) -> float:
    own, shared = (sum(count * rates.exps_of(kind) for kind, count in counts) for counts in (work.others, work.shared))
    return own + SHARED * shared


@lru_cache(maxsize=1024)
def _work(direction: str, each: float, special: float, mask_passes: float, mask_special: float) -> CpuWork:
    def passes(x: Sizes) -> float:
        return 2 * SCORE_BYTES * x.bq * x.bkv * (each * x.n + mask_passes * x.m)

    def exps(x: Sizes) -> float:
        return special * score_count(x) + mask_special * x.m * x.bq * x.bkv

    def calls(x: Sizes) -> float:
        return CALLS[direction] * x.t + ROW_CALLS[direction] * x.B * x.Hq * x.nq

    return CpuWork(passes, exps, calls)


def times_of(kernel: Kernel, x: Sizes, speed: CpuSpeed, hardware: Hardware, busy: float, work: CpuWork) -> CpuTimes:
    """x: the letters of with_joined. busy: share of the cores that work."""
    rates = hardware.cpu
    assert rates is not None
    cores = speed.speedup * busy
    return CpuTimes(
        matrix=kernel.flops(x) / (speed.products * cores),
        passes=work.passes(x) / (speed.passes * cores),
        memory=(kernel.read(x) + kernel.written(x)) / hardware.hbm_bytes_per_second,
        exp=work.exps(x) / (rates.exp_per_second * cores),
        calls=work.calls(x) * speed.call_seconds,
    )


def beside_products(
    way: OwnWay, direction: Direction, rows: float, numbers: float, hardware: Hardware
) -> float:  # fmt: skip
    """Seconds that a call without tiles takes beside its products, which is most of a short one.

    rows: of queries of all heads. numbers: of the mask that is made, or of weights.
    """
    rates = hardware.cpu
    assert rates is not None
    passes = OWN_PASSES.get(way, 0.0) * 2 * SCORE_BYTES * numbers
    rate = rates.pass_bytes_per_second(SCORE_BYTES * numbers, hardware.sms)
    in_rows = OWN_ROW * rates.call_seconds * rows
    return OWN_CALLS[way][direction] * rates.call_seconds + (passes / rate + in_rows) / rates.all_products


def causal_fraction(kv_len: int) -> float:
    """Which part of the pairs torch's own kernel computes under a causal mask, as many queries as keys."""
    blocks = ceil(kv_len / OWN_KEYS)
    return (blocks + 1) / (2 * blocks)
