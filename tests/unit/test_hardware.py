"""Hardware records: names, cards as a driver reports them, and figures that must hold together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from weft.compiler.planning.hardware import (
    A100,
    H100,
    H200,
    KNOWN,
    MI300X,
    by_name,
    for_device,
    of_device,
    this_machine,
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
    shared_memory_per_block_optin: int = 0
    gcnArchName: str = ""


def test_names_in_either_case() -> None:
    assert by_name("h200") is H200
    assert by_name("MI300X") is MI300X
    assert set(KNOWN) == {"a100", "h100", "h200", "b200", "mi300x", "cpu"}


@pytest.mark.parametrize("name", ["h300", "", None])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(WeftError, match=r"hardware: expected one of a100, h100, h200, b200, mi300x, cpu, got"):
        by_name(name)


def test_measured_figures_of_one_h200() -> None:
    assert H200.hbm_bytes_per_second == pytest.approx(4240e9)
    assert H200.matrix_flops("bf16") == pytest.approx(794e12)
    assert H200.matrix_flops("fp32") < H200.matrix_flops("fp16") / 10


def test_exponentials_of_an_h100_are_those_of_the_flash_attention_3_paper() -> None:
    assert H100.exp_per_second == pytest.approx(3.9e12, rel=0.02)


@pytest.mark.parametrize("record", KNOWN.values(), ids=list(KNOWN))
def test_a_record_is_consistent(record) -> None:
    assert 0 < record.sram_per_block <= record.sram_per_sm < record.l2_bytes
    assert 0 < record.hbm_bytes_per_second < record.hbm_peak
    assert record.matrix_flops("bf16") >= record.matrix_flops("fp32") > 0


def test_a_known_card_takes_its_record_and_what_the_driver_reports() -> None:
    card = Card("NVIDIA H200", 9, 0, 132, L2_cache_size=60 << 20, shared_memory_per_block_optin=232448)
    record = of_device(card)
    assert (record.name, record.l2_bytes, record.sram_per_block) == ("h200", 60 << 20, 227 * 1024)
    assert of_device(Card("NVIDIA A100-SXM4-80GB", 8, 0, 108)) == A100


def test_the_l2_that_rocm_reports_is_of_one_die_and_not_taken() -> None:
    card = Card("AMD Instinct MI300X", 9, 4, 304, L2_cache_size=4 << 20, gcnArchName="gfx942:sramecc+:xnack-")
    assert of_device(card) == MI300X


def test_an_unknown_card_is_scaled_from_the_nearest_record() -> None:
    record = of_device(Card("NVIDIA L40S", 8, 9, 54, shared_memory_per_block_optin=101376))
    assert (record.arch, record.capability, record.sms) == ("sm_89", 89, 54)
    assert record.matrix_peak_16 == pytest.approx(A100.matrix_peak_16 / 2)
    assert record.sram_per_block == 101376
    assert "scaled from NVIDIA A100" in record.title


def test_devices_of_torch() -> None:
    assert for_device("cpu") is for_device(torch.device("cpu"))
    assert for_device("cpu").kind == "cpu"
    assert this_machine().sms > 0
    with pytest.raises(WeftError, match=r"expected a cpu or cuda device, got meta; move the operands"):
        for_device("meta")
