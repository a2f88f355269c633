"""What the shell does, as functions: tune, build, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from weft import kv_pos, q_pos

WINDOW = weft.scalar("window", int)
LOCAL = weft.Attention(mask=q_pos - kv_pos < WINDOW, name="of_tools")


def test_tune_gives_its_operands_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("weft.tools.tuning.tune", lambda *given, **options: asked.append((given, options)))
    shape = weft.shape(heads=2, q_len=64, head_dim=16)
    weft.tune(LOCAL, shape, window=8, target="cpu")
    assert asked == [((LOCAL, shape, {"window": 8}), {"target": "cpu", "algorithm": "flash", "progress": False})]


def test_build_says_of_each_job_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.runtime.build.build_one", lambda job: job)
    jobs: list[Any] = weft.build(LOCAL, device="h100", head_dims=[64], directions=["forward"], jobs=1)
    assert [(job.head_dim, job.direction, job.device) for job in jobs] == [(64, "forward", "h100")]
    with pytest.raises(weft.WeftError, match="build: dtypes: expected some of"):
        weft.build(LOCAL, device="h100", dtypes=["fp8"])


def test_calibrate_keeps_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("weft.tools.calibration.calibrate", lambda device: f"figures of {device}")
    monkeypatch.setattr("weft.runtime.store.calibrated.write", lambda found, path: kept.append((found, path)))
    assert weft.calibrate("cpu", tmp_path / "mine.json") == "figures of cpu"
    assert kept == [("figures of cpu", tmp_path / "mine.json")]
    with pytest.raises(weft.WeftError, match="calibrate: path: .*none is no folder"):
        weft.calibrate("cpu", tmp_path / "none" / "mine.json")
