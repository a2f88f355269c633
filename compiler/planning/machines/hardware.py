"""What a machine can do, as far as schedules and predicted times need to know.

Where `weft calibrate` has measured this machine, its figures hold; else those of a record below, and a guess of a CPU.

Peaks are published figures, dense (no sparsity) and at boost clock. Two fractions say how much of a peak a good kernel
gets for long; they were measured on one H200 (torch 2.11: a bf16 matrix product runs at 794 TFLOP/s, a device copy at
4240 GB/s) and are assumed of the other accelerators, so that records rank alike.

Sources
  [A100]   NVIDIA A100 Tensor Core GPU Architecture, whitepaper v1.0, tables 1 and 4
  [H100]   NVIDIA H100 Tensor Core GPU Architecture, whitepaper v1.04, table 3 and "H100 SM"
  [H200]   NVIDIA H200 data sheet, 2024 (the GH100 chip of [H100] with HBM3e)
  [B200]   NVIDIA Blackwell architecture technical brief and DGX B200 data sheet, 2024-2025
  [L40S]   NVIDIA L40S data sheet, 2023; NVIDIA Ada GPU Architecture, whitepaper v2.1
  [boards] NVIDIA data sheets of A100 PCIe, H100 PCIe, H100 NVL, H200 NVL, GH200 and GB200
  [MI300X] AMD Instinct MI300X, MI300A and MI325X data sheets; AMD CDNA 3 architecture whitepaper, 2023
  [CUDA]   CUDA C++ Programming Guide: "Technical Specifications per Compute Capability" and "Throughput of Native
           Arithmetic Instructions" (16 results of ex2.approx per clock and SM for 8.0, 9.0 and 10.0)
  [CDNA3]  AMD Instinct MI300 Instruction Set Architecture (transcendentals at a quarter of the vector rate)
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ....ir.errors import Problem, WeftError, shown
from ..dtypes import dtype_named
from .rates import KIB, MIB, Calibration, CpuRates, GpuRates, Machine, guessed_rates

if TYPE_CHECKING:
    import torch

SHIPPED = "shipped: published peaks, and shares of them that one H200 sustained"
GUESSED = "guessed: `weft calibrate` measures this machine"
MATRIX_SUSTAINED = 794e12 / 989.4e12  # measured on one H200
HBM_SUSTAINED = 4240e9 / 4800e9  # likewise


@dataclass(frozen=True)
class Hardware:
    """One accelerator, or a CPU seen as one: a core is an SM, its L2 cache the SRAM, its last cache the L2."""

    name: str  # what a user writes: "h100"
    title: str  # what `explain` prints
    kind: Literal["cuda", "hip", "cpu"]
    arch: str  # of the compiler: "sm_90", "gfx942", "cpu"
    capability: int  # 80, 90, 100; 942; 0 for a CPU
    sms: int
    sram_per_sm: int  # bytes of shared memory that all programs of an SM share
    sram_per_block: int  # bytes that one program may use
    registers_per_sm: int  # of 32 bits
    l2_bytes: int  # the last cache before HBM
    memory_bytes: int  # of HBM, or of RAM
    hbm_peak: float  # bytes/s
    peaks: tuple[tuple[str, float], ...]  # FLOP/s of products, by units (dtypes.py): of matrix units, of ordinary ones
    exp_per_second: float  # results of the special function units
    hbm_sustained: float = HBM_SUSTAINED  # fraction of hbm_peak
    matrix_sustained: float = MATRIX_SUSTAINED  # fraction of a peak
    launch_seconds: float = 3e-6  # from one kernel to the next in a stream
    figures: str = SHIPPED  # where they are from, for people
    cpu: CpuRates | None = None  # of a CPU: one core in detail
    calibrated: GpuRates | None = None  # of a GPU, where it was calibrated

    @property
    def hbm_bytes_per_second(self) -> float:
        """What a long copy reaches, bytes read plus bytes written."""
        return self.hbm_peak * self.hbm_sustained

    def matrix_flops(self, dtype: str) -> float:
        """FLOP/s that long matrix products of this dtype reach."""
        if self.calibrated and (found := self.calibrated.product_flops(dtype)):
            return found
        of = dtype_named(dtype)
        return self.peak(of.units) * of.rate * self.matrix_sustained

    def peak(self, units: str) -> float:
        """FLOP/s of products of these units. Raises WeftError where the record has no such figure."""
        for name, flops in self.peaks:
            if name == units:
                return flops
        known = ", ".join(name for name, _ in self.peaks)
        what = f"{self.title} has no peak of {units} products; its record has {known}"
        raise WeftError.of("hardware", Problem(option="device", what=what, named=True))

    @property
    def words(self) -> frozenset[str]:
        """The words of a card's name that mean this record."""
        return frozenset(self.name.split("-"))


def _peaks(half: float, full: float, fp8: bool = True) -> tuple[tuple[str, float], ...]:
    """Of 16-bit products with sums in fp32, of fp32 ones in full precision (no TF32), and of FP8, twice the first."""
    return ("16-bit", half), ("fp32", full), *((("8-bit", 2 * half),) if fp8 else ())


A100 = Hardware(
    name="a100",
    title="NVIDIA A100 SXM4 80 GB",
    kind="cuda",
    arch="sm_80",
    capability=80,
    sms=108,  # [A100] table 1
    sram_per_sm=164 * KIB,  # [CUDA] 8.0
    sram_per_block=163 * KIB,  # [CUDA] 8.0
    registers_per_sm=64 * KIB,  # [CUDA] 8.0
    l2_bytes=40 * MIB,  # [A100] table 4
    memory_bytes=80 * 10**9,
    hbm_peak=2039e9,  # NVIDIA A100 80 GB data sheet
    peaks=_peaks(312e12, 19.5e12, fp8=False),  # [A100] table 1
    exp_per_second=108 * 16 * 1.41e9,  # [CUDA] rate at the boost clock of [A100] table 4
)
H100 = Hardware(
    name="h100",
    title="NVIDIA H100 SXM5",
    kind="cuda",
    arch="sm_90",
    capability=90,
    sms=132,  # [H100] table 3
    sram_per_sm=228 * KIB,  # [CUDA] 9.0
    sram_per_block=227 * KIB,  # [CUDA] 9.0
    registers_per_sm=64 * KIB,  # [CUDA] 9.0
    l2_bytes=50 * MIB,  # [H100] table 3
    memory_bytes=80 * 10**9,
    hbm_peak=3352e9,  # [H100] table 3
    peaks=_peaks(989.4e12, 66.9e12),  # [H100] table 3
    exp_per_second=132 * 16 * 1.83e9,  # [CUDA] rate at 1830 MHz; the 3.9e12/s of FlashAttention-3, arXiv 2407.08608
)
H200 = replace(
    H100,
    name="h200",
    title="NVIDIA H200 SXM",
    hbm_peak=4800e9,  # [H200]
    memory_bytes=141 * 10**9,  # [H200]
    l2_bytes=50 * MIB,  # [H200]; the chip has 60 MiB, and the driver's figure is used where there is one
)
B200 = Hardware(
    name="b200",
    title="NVIDIA B200 SXM",
    kind="cuda",
    arch="sm_100",
    capability=100,
    sms=148,  # cudaDeviceProp.multiProcessorCount as reported for HGX B200
    sram_per_sm=228 * KIB,  # [CUDA] 10.0
    sram_per_block=227 * KIB,  # [CUDA] 10.0
    registers_per_sm=64 * KIB,  # [CUDA] 10.0
    l2_bytes=126 * MIB,  # cudaDeviceProp.l2CacheSize as reported for HGX B200
    memory_bytes=180 * 10**9,  # [B200]
    hbm_peak=8000e9,  # [B200]
    peaks=_peaks(2250e12, 80e12),  # [B200], half of the sparse figure
    exp_per_second=148 * 16 * 1.85e9,  # [CUDA] rate at 1850 MHz
)
MI300X = Hardware(
    name="mi300x",
    title="AMD Instinct MI300X",
    kind="hip",
    arch="gfx942",
    capability=942,
    sms=304,  # [MI300X] compute units
    sram_per_sm=64 * KIB,  # [MI300X] LDS of a compute unit
    sram_per_block=64 * KIB,  # [MI300X]
    registers_per_sm=128 * KIB,  # [CDNA3] 4 SIMDs x 512 VGPRs x 64 lanes
    l2_bytes=256 * MIB,  # [MI300X] Infinity Cache, what stands before HBM; the 4 MiB L2 of each die is above it
    memory_bytes=192 * 10**9,  # [MI300X]
    hbm_peak=5300e9,  # [MI300X]
    peaks=_peaks(1307.4e12, 163.4e12),  # [MI300X]
    exp_per_second=304 * 16 * 2.1e9,  # [CDNA3] 64 lanes / 4 per clock at the 2100 MHz of [MI300X]
)


# Cards that share a chip with one of the above, or a generation, and differ in what decides: never named by a part of
# their names, but by all words of the record's.
BOARDS = (
    replace(A100, name="a100-40gb", title="NVIDIA A100 40 GB", hbm_peak=1555e9, memory_bytes=40 * 10**9),
    replace(A100, name="a100-pcie", title="NVIDIA A100 PCIe 80 GB", hbm_peak=1935e9),
    replace(
        H100, name="h100-pcie", title="NVIDIA H100 PCIe", sms=114, hbm_peak=2039e9, peaks=_peaks(756e12, 51.2e12),
        exp_per_second=114 * 16 * 1.755e9,
    ),
    replace(
        H100, name="h100-nvl", title="NVIDIA H100 NVL", hbm_peak=3938e9, peaks=_peaks(835e12, 60e12),
        exp_per_second=132 * 16 * 1.785e9, memory_bytes=94 * 10**9,
    ),
    replace(
        H200, name="h200-nvl", title="NVIDIA H200 NVL", peaks=_peaks(835e12, 60e12),
        exp_per_second=132 * 16 * 1.785e9,
    ),
    replace(H100, name="gh200", title="NVIDIA GH200 96 GB", hbm_peak=4000e9, memory_bytes=96 * 10**9),
    replace(H100, name="gh200-144g", title="NVIDIA GH200 144 GB", hbm_peak=4900e9, memory_bytes=144 * 10**9),
    replace(B200, name="gb200", title="NVIDIA GB200", peaks=_peaks(2500e12, 80e12), memory_bytes=186 * 10**9),
    replace(
        A100, name="l40s", title="NVIDIA L40S", arch="sm_89", capability=89, sms=142, sram_per_sm=100 * KIB,
        sram_per_block=99 * KIB, l2_bytes=96 * MIB, memory_bytes=48 * 10**9, hbm_peak=864e9,
        peaks=_peaks(362e12, 91.6e12), exp_per_second=142 * 16 * 2.52e9,
    ),
    replace(
        MI300X, name="mi300a", title="AMD Instinct MI300A", sms=228, memory_bytes=128 * 10**9,
        peaks=_peaks(980.6e12, 122.6e12), exp_per_second=228 * 16 * 2.1e9,
    ),
    replace(MI300X, name="mi325x", title="AMD Instinct MI325X", hbm_peak=6000e9, memory_bytes=256 * 10**9),
)  # fmt: skip


def cpu_with(rates: CpuRates, cores: int, memory_bytes: int = 32 * 10**9, figures: str = GUESSED) -> Hardware:
    """A CPU whose cores have these rates."""
    _, l2, l3 = rates.caches
    best = max(rate.flops for rate in rates.products) * rates.all_products
    return Hardware(
        name="cpu",
        title=f"CPU, {cores} core{'s' * (cores > 1)}" + " (rough figures of a server's core)" * (figures == GUESSED),
        kind="cpu",
        arch="cpu",
        capability=0,
        sms=cores,
        sram_per_sm=l2,
        sram_per_block=l2,
        registers_per_sm=16 * 8,  # AVX2: 16 registers of 8 floats
        l2_bytes=max(l3, cores * l2),
        memory_bytes=memory_bytes,
        hbm_peak=rates.all_ram / 0.8,
        peaks=_peaks(best / 0.8, best / 0.8, fp8=False),  # computed in fp32
        exp_per_second=cores * rates.exp_per_second,
        hbm_sustained=0.8,
        matrix_sustained=0.8,
        launch_seconds=rates.call_seconds,
        figures=figures,
        cpu=rates,
    )


@lru_cache(maxsize=64)
def on_threads(record: Hardware, threads: int) -> Hardware:
    """A CPU of which so many cores work, as torch has threads. What all share grows evenly with them.

    Other machines, and CPUs with no more cores, stay as they are.
    """
    rates, cores = record.cpu, record.sms
    if rates is None or threads >= cores:
        return record
    share = (threads - 1) / (cores - 1)
    ram = rates.bandwidths[3]
    own = replace(
        rates, all_products=1 + (rates.all_products - 1) * share, all_ram=ram + max(0, rates.all_ram - ram) * share
    )  # fmt: skip
    made = cpu_with(own, threads, record.memory_bytes, record.figures)
    return replace(made, title=f"{record.title}, of which torch uses {threads}")


CPU = cpu_with(guessed_rates(8), 8)  # a record that does not depend on where it is read
KNOWN = {record.name: record for record in (A100, H100, H200, B200, MI300X, CPU)}
NAMES = (*(name for name in KNOWN if name != "cpu"), *(board.name for board in BOARDS), "cpu")


def by_name(name: str) -> Hardware:
    """The record of "a100", "h100", "h200", "b200", "mi300x" or one of BOARDS, in either case; "cpu": of this machine.

    Raises WeftError for any other name, listing the known ones.
    """
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower()) if isinstance(name, str) else None
    if wanted == "cpu":
        return for_device("cpu")
    record = next((r for r in (*KNOWN.values(), *BOARDS) if r.name == wanted), None)
    if record is None:
        expected = f"one of {', '.join(NAMES)}"
        raise WeftError.of("hardware", Problem(option="device", expected=expected, got=shown(name), named=True))
    return record


class DeviceProperties(Protocol):
    """The part of torch.cuda.get_device_properties(...) that is read here."""

    @property
    def name(self) -> str: ...
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...
    @property
    def multi_processor_count(self) -> int: ...


def of_device(properties: DeviceProperties) -> Hardware:
    """The record of a card, with the number of SMs, SRAM, L2 and memory that its driver reports.

    A card is its record's where its name has all words of the record's: "NVIDIA A100-SXM4-80GB" is an A100, "NVIDIA RTX
    A1000" is none, and the record with the most words holds. A part of a card (MIG, a partition) has its share of the
    rates. Of a card without a record, the title says where its figures come from.
    """
    gcn = getattr(properties, "gcnArchName", "")
    kind: Literal["cuda", "hip"] = "hip" if gcn.startswith("gfx") else "cuda"
    record = _named((r for r in (*KNOWN.values(), *BOARDS) if r.kind == kind), properties.name)
    found = _unknown(kind, properties, gcn) if record is None else _share_of(record, properties)
    return _as_reported(found, properties)


def _named(records: Iterable[Hardware], name: str) -> Hardware | None:
    fitting = [record for record in records if record.words <= _words(name)]
    return max(fitting, key=lambda record: len(record.words), default=None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _share_of(record: Hardware, properties: DeviceProperties) -> Hardware:
    """`record`, or the part of it that a process sees, by the SMs and the memory that there are."""
    sms = properties.multi_processor_count
    if sms == record.sms:
        return record
    memory = getattr(properties, "total_memory", 0) or record.memory_bytes
    part = "mig" in _words(properties.name)
    return replace(
        _scaled(record, sms / record.sms, min(1.0, memory / record.memory_bytes) if part else 1.0),
        name=f"{record.name}-{sms}sms",
        title=f"{record.title}, {sms} of {record.sms} SMs",
    )


def _scaled(record: Hardware, share: float, of_memory: float) -> Hardware:
    return replace(
        record,
        hbm_peak=record.hbm_peak * of_memory,
        peaks=tuple((units, flops * share) for units, flops in record.peaks),
        exp_per_second=record.exp_per_second * share,
    )


# FLOPs of one SM and clock, 16-bit products with sums in fp32, and fp32 without tensor cores: the peaks of [A100],
# [H100], [B200] and [L40S] over their SMs and clocks. Consumer cards of 8.6, 8.9 and 12.0 reach half of the first.
_PER_CLOCK = {80: (2048, 128), 86: (1024, 256), 89: (1024, 256), 90: (4096, 256), 100: (8192, 256), 120: (1024, 256)}
_EXPS_PER_CLOCK = 16  # [CUDA]


def _unknown(kind: Literal["cuda", "hip"], properties: DeviceProperties, gcn: str) -> Hardware:
    """A card without a record: from its clocks where the driver reports them, else from a relative's figures."""
    if kind == "hip":
        base, arch, capability = MI300X, gcn.split(":")[0], 0
    else:
        capability = properties.major * 10 + properties.minor
        # 8.6, 8.9 and 12.x have the small SRAM of consumer chips, which the driver reports below.
        base, arch = (A100 if capability < 90 else H100 if capability < 100 else B200), f"sm_{capability}"
    name = "-".join(re.findall(r"[a-z0-9]+", properties.name.lower()))
    record = replace(base, name=name, arch=arch, capability=capability)
    clock, memory_clock, bus_bits = (
        getattr(properties, n, 0) for n in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    sms, rates = properties.multi_processor_count, _PER_CLOCK.get(capability)
    if kind == "hip" or rates is None or not (clock and memory_clock and bus_bits):
        share = sms / base.sms
        return replace(
            _scaled(record, share, share), title=f"{properties.name} (figures scaled from {base.title} by SMs)"
        )
    per_second = sms * clock * 1e3  # clocks are reported in kHz
    return replace(
        record,
        title=f"{properties.name} (figures from the {sms} SMs and the clocks that its driver reports)",
        hbm_peak=2 * memory_clock * 1e3 * bus_bits / 8,  # two transfers a clock
        peaks=_peaks(per_second * rates[0], per_second * rates[1], fp8=False),
        exp_per_second=per_second * _EXPS_PER_CLOCK,
    )


def _as_reported(record: Hardware, properties: DeviceProperties) -> Hardware:
    """`record` with what the driver knows better. torch reports 0 or nothing for what it cannot read."""
    block = getattr(properties, "shared_memory_per_block_optin", 0) or record.sram_per_block
    per_sm = getattr(properties, "shared_memory_per_multiprocessor", 0) or record.sram_per_sm
    # ROCm reports the L2 of one die, and nothing of the Infinity Cache.
    l2 = (getattr(properties, "L2_cache_size", 0) if record.kind == "cuda" else 0) or record.l2_bytes
    memory = getattr(properties, "total_memory", 0) or record.memory_bytes
    return replace(
        record, sms=properties.multi_processor_count, sram_per_block=block, sram_per_sm=max(per_sm, block), l2_bytes=l2,
        memory_bytes=memory,
    )  # fmt: skip


def this_machine() -> Hardware:
    """The record of the first GPU, or of the CPU where there is none."""
    import torch

    return for_device(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def for_device(device: torch.device | str) -> Hardware:
    """The record of a torch device or its name ("cuda:1", "cpu").

    With what `weft calibrate` measured of it, if it did. Raises WeftError unless it is a CPU or an accelerator of CUDA
    or ROCm.
    """
    import torch

    device = torch.device(device)
    record = _for_device(device)
    found = _look_up(machine_of(device))
    return record if found is None else calibrated(record, found)


@cache
def _for_device(device: torch.device) -> Hardware:
    import torch

    if device.type == "cpu":
        wide = "avx512f" in _flags()
        rates = guessed_rates(usable_cores(), _made_by_intel(), cpu_caches(), matrix_units(), dot_units(), wide)
        return cpu_with(rates, usable_cores(), _ram())
    if device.type != "cuda":
        raise WeftError(f"device: expected a cpu or cuda device, got {device}; move the operands to one of these")
    return of_device(torch.cuda.get_device_properties(device))


# -- what was measured -------------------------------------------------------------------------------------------------
_look_up: Callable[[Machine], Calibration | None] = lambda machine: None  # noqa: E731  replaced below


def look_up_calibrations(find: Callable[[Machine], Calibration | None]) -> None:
    """Tell `for_device` where to ask what was measured of a machine: files are none of planning's business."""
    global _look_up
    _look_up = find


@cache
def machine_of(device: torch.device | str) -> Machine:
    """What a calibration of this device is for."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return Machine("cpu", processor(), usable_cores())
    properties = torch.cuda.get_device_properties(device)
    return Machine(_for_device(device).kind, properties.name, properties.multi_processor_count)


@cache
def calibrated(record: Hardware, found: Calibration) -> Hardware:
    """`record` with what was measured of it."""
    if isinstance(found.rates, CpuRates):
        return cpu_with(found.rates, record.sms, record.memory_bytes, found.title)
    rates = found.rates
    return replace(
        record, calibrated=rates, figures=found.title, hbm_sustained=rates.hbm / record.hbm_peak,
        exp_per_second=rates.exp_per_second, launch_seconds=rates.launch_seconds,
    )  # fmt: skip


# -- this CPU ----------------------------------------------------------------------------------------------------------
_CPU_INFO, _CPU_CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")


@cache
def processor() -> str:
    """The name of this machine's processor, as the system has it."""
    with suppress(OSError):
        found = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", _CPU_INFO.read_text(), re.MULTILINE))
        if name := found.get("model name"):
            return str(name).strip()
        if part := found.get("CPU part"):  # ARM
            return f"{platform.machine()} {found.get('CPU implementer', '')} {part}".strip()
    return platform.processor() or platform.machine() or "unknown"


def _made_by_intel() -> bool:
    """Whether MKL knows this processor: on others it leaves half of it unused (measured: docs/experiments)."""
    return "Intel" in processor()


def matrix_units() -> tuple[str, ...]:
    """Dtypes of 16 bits that this processor multiplies in tiles (AMX), as Linux lists it; none where it does not."""
    flags = _flags()
    return tuple(dtype for dtype in ("bf16", "fp16") if f"amx_{dtype}" in flags)


def dot_units() -> tuple[str, ...]:
    """Dtypes of 16 bits that it has dot products of (AVX-512), which torch's own backward was seen to gain by: on
    processors that are not Intel's."""
    return ("bf16",) if "avx512_bf16" in _flags() and not _made_by_intel() else ()


def _flags() -> list[str]:
    """What this processor can do, as Linux lists it; nothing where it does not."""
    with suppress(OSError):
        listed = re.search(r"^flags\s*:(.*)$", _CPU_INFO.read_text(), re.MULTILINE)
        return listed[1].split() if listed else []
    return []


def cpu_caches() -> tuple[int, int, int]:
    """Bytes of L1 and L2 of a core and of the L3, as the system reports them; those of a common server where it does
    not. Of an L3 that is there for some of the cores only, those of the first core have this."""
    found = _caches_in(_CPU_CACHES) or _caches_of_sysconf()
    usual = guessed_rates(1).caches
    return (found.get(1) or usual[0], found.get(2) or usual[1], found.get(3, 0) if found else usual[2])


def _caches_in(folder: Path) -> dict[int, int]:
    """{level: bytes} of what holds data, as Linux lists it."""
    found: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError, KeyError):
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
            if kind in ("Data", "Unified"):
                found[int(level)] = int(size[:-1]) * {"K": KIB, "M": MIB}[size[-1]]
    return found


def _caches_of_sysconf() -> dict[int, int]:
    names = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE", 3: "SC_LEVEL3_CACHE_SIZE"}
    found = {}
    for level, name in names.items():
        with suppress(ValueError, OSError, AttributeError):
            if (size := os.sysconf(name)) > 0:
                found[level] = size
    return found


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, or what its control groups have time for."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    limits = [limit for folder in _control_groups() if (limit := _quota(folder)) is not None]
    return max(1, min([cores, *limits]))


_CONTROL_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _control_groups() -> Iterator[Path]:
    """The folders of this process's control groups that may limit its time, and of those that hold them, of both
    versions; a container sees its own as the first."""
    yield from (_CONTROL_GROUPS, _CONTROL_GROUPS / "cpu")
    with suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, place = line.split(":", 2)  # no controllers: version 2
            if controllers == "" or "cpu" in controllers.split(","):
                own = Path(place.lstrip("/"))
                yield from (_CONTROL_GROUPS / controllers / folder for folder in (own, *own.parents))


def _quota(folder: Path) -> int | None:
    """Whole cores that a control group may use at a time; None where it has no limit."""
    with suppress(OSError, ValueError):
        limit, period = (folder / "cpu.max").read_text().split()
        return max(1, int(limit) // int(period))  # "max" is no int
    with suppress(OSError, ValueError, ZeroDivisionError):
        limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(1, int(limit) // int(period)) if int(limit) > 0 else None
    return None


def _ram() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 32 * 10**9
