"""Measured tuning: the fastest tiling of each kernel is found, kept and found again."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from weft.compiler.planning.hardware import H200
from weft.compiler.planning.records import Schedule, Shape, Tiling
from weft.compiler.planning.schedule import choose
from weft.ir.errors import WeftError
from weft.runtime.settings import settings
from weft.runtime.tuner import FOLDER, TuneKey, forget, remembered, shape_class, tune

SHAPE = Shape(2, 8, 2, 1024, 1024, 128, 128)
START = choose(SHAPE, H200, "triton")
KEY = TuneKey("0123abcd", shape_class(SHAPE), "h200", "triton", "flash")
FAST, SLOW, BROKEN = Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 2), Tiling(128, 128, 8, 4)
CHOICES = {"forward": [SLOW, FAST, BROKEN], "backward_kv": [SLOW, FAST]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path):
    with settings(cache_dir=tmp_path):
        yield tmp_path / FOLDER


def stopwatch(schedule: Schedule, slot: str) -> float:
    tiling = schedule.forward if slot == "forward" else schedule.backward_kv
    if tiling == BROKEN:
        raise RuntimeError("out of resource: shared memory")
    return {FAST: 1e-3, SLOW: 2e-3}[tiling]


def test_the_fastest_of_each_kernel_is_kept() -> None:
    found = tune(KEY, START, CHOICES, stopwatch, progress=False)
    assert found.schedule == replace(START, forward=FAST, backward_kv=FAST)
    assert found.seconds == {"forward": 1e-3, "backward_kv": 1e-3}
    assert found.tried == 5
    assert list(found.failed.values()) == ["RuntimeError: out of resource: shared memory"]
    assert remembered(KEY) == found.schedule


def test_another_key_remembers_nothing() -> None:
    tune(KEY, START, CHOICES, stopwatch, progress=False)
    for change in (
        {"hardware": "h100"},
        {"generator": "other"},
        {"triton": "9"},
        {"variant": "ffff"},
        {"shape": "d64"},
    ):
        assert remembered(replace(KEY, **change)) is None
    forget(KEY)
    assert remembered(KEY) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "schedule": "flash"}', "\x00"])
def test_a_torn_or_foreign_file_counts_as_absent(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / KEY.file_name).write_text(content)
    assert remembered(KEY) is None


def test_a_file_of_another_key_under_this_name_counts_as_absent(folder: Path) -> None:
    tune(KEY, START, CHOICES, stopwatch, progress=False)
    path = folder / KEY.file_name
    kept = json.loads(path.read_text())
    kept["key"]["hardware"] = "a100"
    path.write_text(json.dumps(kept))
    assert remembered(KEY) is None


def test_nothing_that_can_be_timed() -> None:
    with pytest.raises(
        WeftError, match=r"tune: no tiling of forward could be timed; the last one failed with RuntimeError: out of"
    ):
        tune(KEY, START, {"forward": [BROKEN]}, stopwatch, progress=False)
    assert remembered(KEY) is None


def test_progress_is_shown(folder: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    tune(KEY, START, CHOICES, stopwatch, console=console)
    shown = console.file.getvalue()
    assert "tuning backward_kv" in shown and "5/5" in shown
    assert [p.suffix for p in folder.iterdir() if p.name.endswith(".tmp")] == []


def test_shape_classes_ignore_lengths() -> None:
    assert shape_class(SHAPE) == shape_class(replace(SHAPE, batch=9, q_len=1, kv_len=77)) == "d128-bf16"
    assert shape_class(Shape(1, 16, 16, 8, 8, 192, 128, "fp16")) == "d192v128-fp16"


def test_a_tuned_schedule_is_the_one_that_calls_use(tmp_path, monkeypatch) -> None:
    import torch

    import weft
    from weft.compiler.planning import hardware
    from weft.runtime import driver
    from weft.tuning import tune as tune_variant

    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "this_machine", lambda: hardware.CPU)
    variant = weft.Attention(mask=weft.masks.causal & (weft.q_pos - weft.kv_pos < 77), name="tuned_once")
    sizes = weft.shape(heads=1, q_len=96, head_dim=16, dtype="fp32")
    found = tune_variant(variant, sizes, {}, progress=False)
    driver.compile_kernel.cache_clear()
    again = weft.Attention(variant.score, variant.mask, name="tuned_once")
    query = torch.randn(1, 1, 96, 16)
    spec = driver.Specialisation("forward", "cpu", "fp32", 16, 16)
    assert again(query, query, query).shape == query.shape
    assert driver.compile_kernel(again, spec, None, None).schedule == found.schedule
