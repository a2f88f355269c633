"""What a machine was measured to do, by `weft calibrate`, and what is assumed of a CPU that was not.

A calibration is a small JSON file that a person can read; numbers are in bytes, FLOP, bytes/s and seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from ....ir.errors import WeftError

Library = Literal["torch", "onednn"]
FORMAT = 1  # of the file
KIB, MIB = 1024, 1024 * 1024
WIDTH = 64  # head dimension of the tiles whose products are measured
MOST_KNOWN = 4096  # tiles whose rate a machine remembers
CACHE_LEVELS = ("L1", "L2", "L3", "RAM")
# Exponentials (of 2) that take as long as an operation of each kind, where that was not measured beside them, as in
# files from before: so it is on one core of an AMD EPYC (Zen 5) with torch 2.13.
OPERATIONS = {
    "exp2": 1.0, "exp": 4.5, "log": 5.8, "tanh": 16.0, "sigmoid": 1.5, "root": 2.6, "sine": 8.0, "compare": 2.5,
    "choice": 3.6, "mixed choice": 24.0,
}  # fmt: skip


@dataclass(frozen=True)
class ProductRate:
    """The two products of a forward, for tiles of one head of width 64, in float32."""

    library: Library
    queries: int
    keys: int
    flops: float  # FLOP/s of one core


@dataclass(frozen=True)
class CpuRates:
    """One core of a CPU, and what all of them share. Bytes count as read and as written."""

    caches: tuple[int, int, int]  # bytes of L1 and L2 of a core, and of the L3 that all share; 0 where there is none
    products: tuple[ProductRate, ...]
    attention: tuple[tuple[str, float], ...]  # (dtype, FLOP/s) of torch's own attention; empty where it has none
    bandwidths: tuple[float, float, float, float]  # bytes/s of a pass of torch over what lies in L1, L2, L3 and RAM
    exp_per_second: float
    call_seconds: float  # of one torch operation on a few numbers
    all_products: float  # products of all cores over those of one
    all_ram: float  # bytes/s of all cores
    attention_backward: tuple[tuple[str, float], ...] = ()  # of its backward; where that was not measured, as forward
    operations: tuple[tuple[str, float], ...] = ()  # (kind, elements/s) of what torch computes slower than a pass

    def product_flops(self, library: Library, queries: float, keys: float) -> float | None:
        """FLOP/s of such a tile, between those that were measured; None where the library was not measured."""
        known, asked = self._between, (library, queries, keys)
        if asked not in known:
            if len(known) == MOST_KNOWN:
                known.clear()
            known[asked] = _between(self.products, library, queries, keys)
        return known[asked]

    @cached_property
    def _between(self) -> dict[tuple[Library, float, float], float | None]:
        """What was asked for before: a choice of a form asks for the same few tiles hundreds of times."""
        return {}

    def exps_of(self, kind: str) -> float:
        """How many exponentials (of 2) take as long as an operation of this kind."""
        found = self._rates_of_kinds.get(kind)
        return OPERATIONS[kind] if found is None else self.exp_per_second / found

    @cached_property
    def _rates_of_kinds(self) -> dict[str, float]:
        return dict(self.operations)

    def attention_flops(self, dtype: str, backward: bool = False) -> float | None:
        return dict((backward and self.attention_backward) or self.attention).get(dtype)

    def shares(self, size: float, cores: int) -> tuple[float, float, float, float]:
        """Which part of `size` bytes that are gone over again and again lies in L1, L2, L3 and RAM.

        >>> guessed_rates(1).shares(3 * MIB, 1)
        (0.0, 0.6666666666666666, 0.3333333333333333, 0.0)
        """
        l1, l2, l3 = self.caches
        if size <= l1:
            return 1.0, 0.0, 0.0, 0.0
        in_l2 = min(1.0, l2 / size)
        in_l3 = min(1.0, max(l2, l3 / cores) / size)
        return 0.0, in_l2, in_l3 - in_l2, 1.0 - in_l3

    def pass_bytes_per_second(self, size: float, cores: int) -> float:
        """Of one core that goes over `size` bytes again and again."""
        return 1 / sum(share / rate for share, rate in zip(self.shares(size, cores), self.bandwidths, strict=True))


def _between(products: tuple[ProductRate, ...], library: Library, queries: float, keys: float) -> float | None:
    """Seconds of a pair are taken to be linear in the logarithms of both lengths, and level beyond measured ones."""
    found = {(rate.queries, rate.keys): rate.flops for rate in products if rate.library == library}
    if not found:
        return None
    corners = [
        (q, k, a * b)
        for q, a in _weights(sorted({q for q, _ in found}), queries)
        for k, b in _weights(sorted({k for own, k in found if own == q}), keys)
    ]
    return 1 / sum(weight / found[q, k] for q, k, weight in corners)


def _weights(lengths: Sequence[int], length: float) -> list[tuple[int, float]]:
    """The measured lengths on both sides, and how much each counts."""
    if length <= lengths[0] or length >= lengths[-1]:
        return [(lengths[0] if length <= lengths[0] else lengths[-1], 1.0)]
    above = next(i for i, each in enumerate(lengths) if each > length)
    low, high = lengths[above - 1], lengths[above]
    share = math.log(length / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


@dataclass(frozen=True)
class GpuRates:
    """A GPU."""

    products: tuple[tuple[str, float], ...]  # (dtype, FLOP/s) of a large product
    hbm: float  # bytes/s of a long copy, read and written
    l2: float  # bytes/s of reading what L2 holds
    exp_per_second: float
    launch_seconds: float

    def product_flops(self, dtype: str) -> float | None:
        return dict(self.products).get(dtype)


@dataclass(frozen=True)
class Machine:
    """What a calibration holds for."""

    kind: str  # "cpu", "cuda" or "hip"
    name: str  # of the processor or card, as its system reports it
    units: int  # cores that the process may use, or SMs


@dataclass(frozen=True)
class Calibration:
    """What `weft calibrate` measured."""

    machine: Machine
    made: str  # the day and the time, ISO 8601 in UTC
    torch: str  # its version
    seconds: float  # that measuring took
    rates: CpuRates | GpuRates
    spread: float = 0.0  # how much longer a step took in the middle one of its rounds than in the best: 0.1, a tenth
    load: float = 0.0  # processes that wanted to run before it began, by the system's average of a minute
    cores: int = 0  # of the whole machine, also those that this process may not use; 0: not known
    place: str = field(default="", compare=False)  # of the file

    @property
    def title(self) -> str:
        doubted = ", on a busy machine: not to be trusted" if self.doubts else ""
        return f"calibrated on this machine, {self.made[:10]}, torch {self.torch}{doubted}"

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why its figures are not to be trusted; nothing where they are."""
        own = self.machine.units if self.machine.kind == "cpu" else 1
        found = []
        if self.cores and self.load > self.cores - own + LOAD_OF_OTHERS:
            found.append(
                f"{self.load:.1f} other processes were running before it began, on {self.cores} "
                f"core{'s' * (self.cores > 1)} of which it wants {own}"
            )
        if self.spread > MOST_SPREAD:
            found.append(
                f"the same steps took {self.spread:.0%} longer in the middle of their rounds than in the best, where "
                f"{MOST_SPREAD:.0%} are usual"
            )
        return tuple(found)


LOAD_OF_OTHERS = 0.5  # of one core, which a quiet machine's housekeeping takes at the most
MOST_SPREAD = 0.1  # of a quiet machine: what changes of its clock make


# -- as text -----------------------------------------------------------------------------------------------------------
def text_of(found: Calibration) -> str:
    """The file: calibration_of(text_of(c)) == c."""
    head = {
        "format": FORMAT,
        "machine": {"kind": found.machine.kind, "name": found.machine.name, "units": found.machine.units},
        "made": found.made, "torch": found.torch, "seconds": found.seconds, "spread": found.spread,
        "load": found.load, "cores": found.cores,
    }  # fmt: skip
    rates: dict[str, Any]
    if isinstance(found.rates, CpuRates):
        r = found.rates
        rates = {
            "cache_bytes": dict(zip(CACHE_LEVELS, r.caches)),
            "one_core": {
                "product_flops": _nested(r.products),
                "attention_flops": dict(r.attention),
                "attention_backward_flops": dict(r.attention_backward),
                "pass_bytes_per_second": dict(zip(CACHE_LEVELS, r.bandwidths)),
                "exp_per_second": r.exp_per_second,
                "operations_per_second": dict(r.operations),
                "call_seconds": r.call_seconds,
            },
            "all_cores": {"products_of_one": r.all_products, "ram_bytes_per_second": r.all_ram},
        }
    else:
        g = found.rates
        rates = {
            "product_flops": dict(g.products), "hbm_bytes_per_second": g.hbm, "l2_bytes_per_second": g.l2,
            "exp_per_second": g.exp_per_second, "launch_seconds": g.launch_seconds,
        }  # fmt: skip
    return json.dumps(head | rates, indent=1) + "\n"


def _nested(products: tuple[ProductRate, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """{library: {"256 queries": {"1024 keys": FLOP/s}}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for p in products:
        found.setdefault(p.library, {}).setdefault(f"{p.queries} queries", {})[f"{p.keys} keys"] = p.flops
    return found


def calibration_of(text: str, place: str = "") -> Calibration:
    """Read a file back. place: what messages call it. Raises WeftError for what is none, naming what is wrong."""
    where = f"calibration {place}".strip()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _broken(where, f"it is no JSON ({error})") from error
    top = _Fields(where, "", found)
    if top.whole("format") != FORMAT:
        raise _broken(where, f"expected format {FORMAT}, got {found['format']}")
    machine = top.inner("machine")
    here = Machine(machine.word("kind"), machine.word("name"), machine.whole("units"))
    rates: CpuRates | GpuRates
    if here.kind == "cpu":
        caches, one, everyone = (top.inner(n) for n in ("cache_bytes", "one_core", "all_cores"))
        passes = one.inner("pass_bytes_per_second")
        l1, l2, l3 = (caches.whole(n, least=int(n == "L2")) for n in CACHE_LEVELS[:3])
        in_l1, in_l2, in_l3, ram = (passes.rate(n) for n in CACHE_LEVELS)
        rates = CpuRates(
            caches=(l1, l2, l3), products=_products(one.inner("product_flops")),
            attention=one.rates("attention_flops", empty=True), bandwidths=(in_l1, in_l2, in_l3, ram),
            exp_per_second=one.rate("exp_per_second"), call_seconds=one.rate("call_seconds"),
            all_products=everyone.rate("products_of_one"), all_ram=everyone.rate("ram_bytes_per_second"),
            attention_backward=_later(one, "attention_backward_flops"), operations=_operations(one),
        )  # fmt: skip
    elif here.kind in ("cuda", "hip"):
        rates = GpuRates(
            top.rates("product_flops"), top.rate("hbm_bytes_per_second"), top.rate("l2_bytes_per_second"),
            top.rate("exp_per_second"), top.rate("launch_seconds"),
        )  # fmt: skip
    else:
        raise _broken(where, f"machine.kind: expected cpu, cuda or hip, got {here.kind!r}")
    spread, load = (top.number(name) for name in ("spread", "load"))
    cores = top.whole("cores") if "cores" in top.found else 0
    return Calibration(
        here, top.word("made"), top.word("torch"), top.rate("seconds"), rates, spread, load, cores, place
    )  # fmt: skip


def _later(one: _Fields, name: str) -> tuple[tuple[str, float], ...]:
    """Files from before it was measured have none."""
    return one.rates(name, empty=True) if name in one.found else ()


def _operations(one: _Fields) -> tuple[tuple[str, float], ...]:
    found = _later(one, "operations_per_second")
    unknown = sorted({kind for kind, _ in found} - OPERATIONS.keys())
    if unknown:
        raise _broken(
            one.where, f"{one.path}.operations_per_second: expected {', '.join(OPERATIONS)}, got {unknown[0]!r}"
        )
    return found


def _products(found: _Fields) -> tuple[ProductRate, ...]:
    rates = []
    for library in found.found:
        if library not in ("torch", "onednn"):
            raise _broken(found.where, f"{found.path}: expected torch and onednn, got {library!r}")
        for queries, by_keys in found.inner(library).items():
            tile = found.inner(library).inner(queries)
            for keys in by_keys if isinstance(by_keys, Mapping) else ():
                lengths = (_length(found.where, queries, "queries"), _length(found.where, keys, "keys"))
                rates.append(ProductRate(library, *lengths, tile.rate(keys)))
    if not any(rate.library == "torch" for rate in rates):
        raise _broken(found.where, f"{found.path}: expected rates of torch")
    return tuple(rates)


def _length(where: str, text: str, unit: str) -> int:
    number, _, of = text.partition(" ")
    if of != unit or not number.isdecimal() or not int(number):
        raise _broken(where, f"expected a length as '256 {unit}', got {text!r}")
    return int(number)


T = TypeVar("T")


@dataclass(frozen=True)
class _Fields:
    """An object of the file, whose values are checked where they are read."""

    where: str
    path: str
    found: Any

    def __post_init__(self) -> None:
        if not isinstance(self.found, Mapping):
            raise _broken(self.where, f"{self.path or 'the file'}: expected an object, got {self.found!r:.40}")

    def _at(self, name: str) -> Any:
        if name not in self.found:
            raise _broken(self.where, f"{self._path(name)} is missing")
        return self.found[name]

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def items(self) -> Any:
        return self.found.items()

    def inner(self, name: str) -> _Fields:
        return _Fields(self.where, self._path(name), self._at(name))

    def word(self, name: str) -> str:
        value = self._at(name)
        if not isinstance(value, str) or not value:
            raise _broken(self.where, f"{self._path(name)}: expected a text, got {value!r:.40}")
        return value

    def whole(self, name: str, least: int = 0) -> int:
        value = self._at(name)
        if type(value) is not int or value < least:
            raise _broken(
                self.where, f"{self._path(name)}: expected a whole number of at least {least}, got {value!r:.40}"
            )
        return value

    def rate(self, name: str) -> float:
        value = self._at(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _broken(self.where, f"{self._path(name)}: expected a positive number, got {value!r:.40}")
        return float(value)

    def number(self, name: str) -> float:
        """One that is not negative; 0 where there is none, as in files from before it was written."""
        value = self.found.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise _broken(self.where, f"{self._path(name)}: expected a number from 0 on, got {value!r:.40}")
        return float(value)

    def rates(self, name: str, empty: bool = False) -> tuple[tuple[str, float], ...]:
        inner = self.inner(name)
        if not inner.found and not empty:
            raise _broken(self.where, f"{self._path(name)} is empty")
        return tuple((key, inner.rate(key)) for key in inner.found)


def _broken(where: str, what: str) -> WeftError:
    return WeftError(f"{where}: {what}; measure again with `weft calibrate`")


# -- in words ----------------------------------------------------------------------------------------------------------
def rates_in_words(rates: CpuRates | GpuRates) -> list[tuple[str, str]]:
    """(what, how fast), for people."""
    if isinstance(rates, GpuRates):
        products = ", ".join(f"{dtype} {flops / 1e12:.0f}" for dtype, flops in rates.products)
        return [
            ("products", f"{products} TFLOP/s"),
            ("memory", f"HBM {rates.hbm / 1e9:.0f} GB/s, L2 {rates.l2 / 1e9:.0f} GB/s"),
            ("exponentials", f"{rates.exp_per_second / 1e9:.0f} G/s"),
            ("a launch", f"{rates.launch_seconds * 1e6:.2f} us"),
        ]
    best = {library: max(r.flops for r in rates.products if r.library == library) / 1e9
            for library in dict.fromkeys(r.library for r in rates.products)}  # fmt: skip
    sizes = zip(CACHE_LEVELS, rates.caches)
    speeds = zip(CACHE_LEVELS, rates.bandwidths, strict=True)
    own, back = (
        ", ".join(f"{dtype} {flops / 1e9:.0f}" for dtype, flops in each)
        for each in (rates.attention, rates.attention_backward)
    )
    own += f"; its backward {back}" if back else ""
    own_operations = ", ".join(f"{kind} {rate / 1e9:.2g}" for kind, rate in rates.operations)
    return [
        ("caches", ", ".join(f"{level} {size // KIB} KiB" for level, size in sizes if size)),
        ("products", ", ".join(f"{library} {flops:.0f}" for library, flops in best.items())
         + f" GFLOP/s of a core in fp32, all cores {rates.all_products:.2f} times that"),
        *([("own attention", f"torch's: {own} GFLOP/s of a core")] if own else []),
        ("passes", ", ".join(f"{level} {rate / 1e9:.0f}" for level, rate in speeds) + " GB/s of a core, all cores "
         f"{rates.all_ram / 1e9:.0f} from RAM"),
        ("exponentials", f"{rates.exp_per_second / 1e9:.2f} G/s of a core"),
        *([("operations", f"{own_operations} G/s of a core")] if own_operations else []),
        ("a call", f"{rates.call_seconds * 1e6:.2f} us"),
    ]  # fmt: skip


# -- what is assumed ---------------------------------------------------------------------------------------------------
DOTS = 1.7  # torch's own backward in bfloat16 over that in float32, where a processor has dot products of it
CLOCK = 2.5e9  # a common all-core clock of servers
WIDER = 1.8  # what cores with AVX-512 were seen to have over this, in products, functions and passes through caches
_TILES = tuple((queries, keys) for queries in (64, 128, 256, 512) for keys in (64, 256, 1024, 4096))
_PLAIN_CACHES = (32 * KIB, 2 * MIB, 32 * MIB)  # of servers' cores: L2 is 1 MiB (AMD Zen 4) or 2 (Intel Sapphire Rapids)


def guessed_rates(
    cores: int, mkl_knows_it: bool = True, caches: tuple[int, int, int] = _PLAIN_CACHES,
    matrix_units: Collection[str] = (), dot_units: Collection[str] = (), wide: bool = False,
) -> CpuRates:  # fmt: skip
    """A core of a server that was not measured. mkl_knows_it: it is Intel's, so that torch's products are the faster
    ones; on other processors MKL leaves a part of it unused (half on a Zen 5, nothing on a Zen 4). matrix_units: dtypes
    of 16 bits that it has such units for; without them torch's own backward in these is slower than one in float32.
    dot_units: those that it has instructions for, which make it faster. wide: it has AVX-512, not AVX2 alone."""
    gain = WIDER if wide else 1.0
    peak = CLOCK * 32 * gain  # two FMA of 8 floats a clock
    shares: tuple[tuple[Library, float], ...] = (("torch", 1.0), ("onednn", 0.7))
    if not mkl_knows_it:
        shares = (("torch", 0.8), ("onednn", 1.0))
    products = tuple(
        ProductRate(library, queries, keys, 0.8 * peak * share * _filled(queries, keys, caches))
        for library, share in shares
        for queries, keys in _TILES
    )
    own = products[[(p.library, p.queries, p.keys) for p in products].index(("torch", 256, 256))].flops
    return CpuRates(
        caches=caches,
        products=products,
        attention=tuple((dtype, own) for dtype in ("fp32", "fp64", "fp16", "bf16")),
        bandwidths=(100e9, gain * 60e9, gain * 40e9, 20e9),
        exp_per_second=CLOCK / 2 * gain,  # a vectorised exp of 8 floats takes about 16 clocks
        call_seconds=3e-6,
        all_products=0.9 * cores if cores > 1 else 1.0,
        all_ram=min(cores, 8) * 16e9,  # one DDR4-3200 channel is 25.6 GB/s; a core alone draws about 20
        attention_backward=tuple(
            (dtype, own if dtype in ("fp32", "fp64", *matrix_units) else own * (DOTS if dtype in dot_units else 0.5))
            for dtype in ("fp32", "fp64", "fp16", "bf16")
        ),
        operations=tuple((kind, rate * gain) for kind, rate in _GUESSED_OPERATIONS),
    )


# elements/s: what the same core has, at a common clock
_GUESSED_OPERATIONS = (
    ("exp", 0.7e9), ("log", 0.7e9), ("tanh", 0.35e9), ("sigmoid", 0.9e9), ("root", 1.2e9), ("sine", 0.5e9),
    ("compare", 1.5e9), ("choice", 1.2e9), ("mixed choice", 0.25e9),
)  # fmt: skip


def _filled(queries: int, keys: int, caches: tuple[int, int, int]) -> float:
    """Share of its best rate that a product reaches whose tiles are small, or are more than a core's cache holds."""
    size = 4 * (queries * keys + (queries + keys) * 2 * WIDTH)
    return min(1.0, (1 + caches[1] / size) / 2) / ((1 + 24 / queries) * (1 + 24 / keys))
