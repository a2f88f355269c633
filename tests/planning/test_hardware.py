"""Hardware records: names, cards as a driver reports them, and figures that must hold together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from weft.compiler.planning.machines import hardware
from weft.compiler.planning.machines.hardware import (
    A100,
    B200,
    BOARDS,
    H100,
    H200,
    KNOWN,
    MI300X,
    by_name,
    for_device,
    of_device,
    this_machine,
    usable_cores,
)
from weft.ir.errors import WeftError


@dataclass(frozen=True)
class Card:
    """What torch.cuda.get_device_properties reports, as far as it is read."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int = 0
    total_memory: int = 0
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    shared_memory_per_block_optin: int = 0
    gcnArchName: str = ""


def test_names_in_either_case() -> None:
    assert by_name("h200") is H200
    assert by_name("MI300X") is MI300X
    assert set(KNOWN) == {"a100", "h100", "h200", "b200", "mi300x", "cpu"}


@pytest.mark.parametrize("name", ["h300", "", None])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        WeftError, match=r"hardware: expected one of a100, h100, h200, b200, mi300x, a100-40gb, .*cpu, got"
    ):
        by_name(name)


def test_measured_figures_of_one_h200() -> None:
    assert H200.hbm_bytes_per_second == pytest.approx(4240e9)
    assert H200.matrix_flops("bf16") == pytest.approx(794e12)
    assert H200.matrix_flops("fp32") < H200.matrix_flops("fp16") / 10


def test_exponentials_of_an_h100_are_those_of_the_flash_attention_3_paper() -> None:
    assert H100.exp_per_second == pytest.approx(3.9e12, rel=0.02)


@pytest.mark.parametrize("record", [*KNOWN.values(), *BOARDS], ids=lambda record: record.name)
def test_a_record_is_consistent(record) -> None:
    assert 0 < record.sram_per_block <= record.sram_per_sm < record.l2_bytes
    assert 0 < record.hbm_bytes_per_second < record.hbm_peak
    assert record.matrix_flops("bf16") >= record.matrix_flops("fp32") > record.matrix_flops("fp64") > 0
    assert record.memory_bytes > record.l2_bytes


def test_a_known_card_takes_its_record_and_what_the_driver_reports() -> None:
    card = Card("NVIDIA H200", 9, 0, 132, L2_cache_size=60 << 20, shared_memory_per_block_optin=232448)
    record = of_device(card)
    assert (record.name, record.l2_bytes, record.sram_per_block) == ("h200", 60 << 20, 227 * 1024)
    assert of_device(Card("NVIDIA A100-SXM4-80GB", 8, 0, 108)) == A100


NAMED = [  # what a driver calls a card, its SMs, the record that it is
    ("NVIDIA A100-SXM4-80GB", 108, "a100"),
    ("NVIDIA A100-SXM4-40GB", 108, "a100-40gb"),
    ("NVIDIA A100-PCIE-40GB", 108, "a100-40gb"),
    ("NVIDIA A100 80GB PCIe", 108, "a100-pcie"),
    ("NVIDIA H100 80GB HBM3", 132, "h100"),
    ("NVIDIA H100 PCIe", 114, "h100-pcie"),
    ("NVIDIA H100 NVL", 132, "h100-nvl"),
    ("NVIDIA H200", 132, "h200"),
    ("NVIDIA H200 NVL", 132, "h200-nvl"),
    ("NVIDIA GH200 480GB", 132, "gh200"),
    ("NVIDIA GH200 144G HBM3e", 132, "gh200-144g"),
    ("NVIDIA B200", 148, "b200"),
    ("NVIDIA GB200", 148, "gb200"),
    ("NVIDIA L40S", 142, "l40s"),
    ("AMD Instinct MI300X", 304, "mi300x"),
    ("AMD Instinct MI300A", 228, "mi300a"),
    ("AMD Instinct MI325X", 304, "mi325x"),
]


@pytest.mark.parametrize(("name", "sms", "expected"), NAMED)
def test_a_card_is_the_record_whose_words_its_name_has(name: str, sms: int, expected: str) -> None:
    gcn = "gfx942:sramecc+" if name.startswith("AMD") else ""
    record = of_device(Card(name, 9, 0, sms, gcnArchName=gcn))
    assert record == by_name(expected) == by_name(expected.upper().replace("-", " "))


@pytest.mark.parametrize(
    ("name", "capability", "relative"),
    [
        ("NVIDIA RTX A1000", (8, 6), A100),
        ("NVIDIA A10", (8, 6), A100),
        ("NVIDIA A1000 Laptop GPU", (8, 6), A100),
        ("NVIDIA L40", (8, 9), A100),
        ("NVIDIA H20", (9, 0), H100),
        ("NVIDIA H800", (9, 0), H100),
        ("NVIDIA B300 SXM6", (10, 3), B200),
        ("NVIDIA GeForce RTX 5090", (12, 0), B200),
        ("AMD Instinct MI308X", (9, 4), MI300X),
        ("AMD Radeon Graphics", (11, 0), MI300X),
    ],
)
def test_a_card_without_a_record_names_the_relative_whose_figures_it_has(name, capability, relative) -> None:
    sms = relative.sms // 4
    record = of_device(Card(name, *capability, sms, gcnArchName="gfx942" if name.startswith("AMD") else ""))
    assert record.title == f"{name} (figures scaled from {relative.title} by SMs)"
    assert record.name not in (*KNOWN, *(board.name for board in BOARDS)) and record.sms == sms
    assert record.hbm_peak == pytest.approx(relative.hbm_peak / 4)


def test_a_card_without_a_record_has_the_figures_of_its_own_clocks() -> None:
    clocks = {
        "clock_rate": 1_695_000,
        "memory_clock_rate": 9_751_000,
        "memory_bus_width": 384,
        "total_memory": 24 << 30,
    }
    record = of_device(Card("NVIDIA GeForce RTX 3090", 8, 6, 82, **clocks))
    assert record.title == "NVIDIA GeForce RTX 3090 (figures from the 82 SMs and the clocks that its driver reports)"
    assert record.hbm_peak == pytest.approx(936e9, rel=0.001)  # its data sheet
    assert record.peak("fp32") == pytest.approx(35.6e12, rel=0.001)  # likewise
    assert (record.arch, record.memory_bytes) == ("sm_86", 24 << 30)


@pytest.mark.parametrize(
    ("record", "clock", "memory"),
    [(A100, 1410e3, (1593e3, 5120)), (H100, 1830e3, (2619e3, 5120)), (B200, 1850e3, None)],
)
def test_the_rates_per_clock_are_those_of_the_records(record, clock, memory) -> None:
    clock_rates = {"memory_clock_rate": 1, "memory_bus_width": 8}
    if memory:
        clock_rates = {"memory_clock_rate": memory[0], "memory_bus_width": memory[1]}
    card = Card("another of its kind", *divmod(record.capability, 10), record.sms, clock_rate=clock, **clock_rates)
    made = of_device(card)
    assert made.peak("16-bit") == pytest.approx(record.peak("16-bit"), rel=0.1)
    assert made.peak("fp32") == pytest.approx(record.peak("fp32"), rel=0.15)
    assert made.exp_per_second == pytest.approx(record.exp_per_second, rel=0.01)
    assert not memory or made.hbm_peak == pytest.approx(record.hbm_peak, rel=0.01)


def test_a_part_of_a_card_has_its_share() -> None:
    mig = of_device(Card("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0, 60, total_memory=40 * 10**9))
    assert (mig.name, mig.title, mig.sms) == ("h100-60sms", "NVIDIA H100 SXM5, 60 of 132 SMs", 60)
    assert mig.peak("16-bit") == pytest.approx(H100.peak("16-bit") * 60 / 132)
    assert mig.hbm_peak == pytest.approx(H100.hbm_peak / 2)
    fewer = of_device(Card("NVIDIA H100 80GB HBM3", 9, 0, 128))
    assert fewer.hbm_peak == H100.hbm_peak and fewer.exp_per_second < H100.exp_per_second


def test_an_h200_has_its_own_bandwidth_and_memory() -> None:
    found = of_device(Card("NVIDIA H200", 9, 0, 132, total_memory=150_754_820_096))
    assert found.title == H200.title and found.hbm_peak == 4800e9 > H100.hbm_peak
    assert found.memory_bytes == 150_754_820_096 and H200.memory_bytes == 141 * 10**9 > H100.memory_bytes


def test_the_cpu_is_the_one_of_this_machine(monkeypatch, tmp_path) -> None:
    assert by_name("cpu") is for_device("cpu") and by_name("cpu").sms == usable_cores()
    assert f"CPU, {usable_cores()} core" in by_name("CPU").title
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(6)))
    limits = tmp_path / "cpu.max"
    monkeypatch.setattr(hardware, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "none")
    for content, cores in (
        (None, 6),
        ("max 100000", 6),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("800000 100000", 6),
    ):
        if content is not None:
            limits.write_text(content)
        assert usable_cores() == cores


@pytest.mark.parametrize(
    ("own", "folder", "files", "cores"),
    [
        ("0::/a.slice/b.scope\n", "a.slice/b.scope", {"cpu.max": "200000 100000"}, 2),
        ("0::/a.slice/b.scope\n", "a.slice", {"cpu.max": "300000 100000"}, 3),
        ("0::/\n", "a.slice", {"cpu.max": "300000 100000"}, 6),
        ("4:cpu,cpuacct:/job\n", "cpu,cpuacct/job", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu:/job\n", "cpu", {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu:/job\n", "cpu/job", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 6),
        ("4:memory:/job\n", "memory/job", {"cpu.max": "200000 100000"}, 6),
        ("no lines of groups\n", "", {}, 6),
    ],
)
def test_cores_are_what_a_control_group_has_time_for(monkeypatch, tmp_path, own, folder, files, cores) -> None:
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(hardware, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (tmp_path / folder / name).write_text(content)
    assert usable_cores() == cores


def test_the_l2_that_rocm_reports_is_of_one_die_and_not_taken() -> None:
    card = Card("AMD Instinct MI300X", 9, 4, 304, L2_cache_size=4 << 20, gcnArchName="gfx942:sramecc+:xnack-")
    assert of_device(card) == MI300X


def test_an_unknown_card_is_scaled_from_the_nearest_record() -> None:
    record = of_device(Card("NVIDIA L40", 8, 9, 54, shared_memory_per_block_optin=101376))
    assert (record.arch, record.capability, record.sms) == ("sm_89", 89, 54)
    assert record.peak("16-bit") == pytest.approx(A100.peak("16-bit") / 2)
    assert record.sram_per_block == 101376
    assert "scaled from NVIDIA A100" in record.title


def test_devices_of_torch() -> None:
    assert for_device("cpu") is for_device(torch.device("cpu"))
    assert for_device("cpu").kind == "cpu"
    assert this_machine().sms > 0
    with pytest.raises(WeftError, match=r"expected a cpu or cuda device, got meta; move the operands"):
        for_device("meta")
