"""The example of training over two dimensions of ranks: losses are those of one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ..tools.test_examples import EXAMPLES, load, on_forked_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


HOSTS = [("2x2", "heads+ring"), *(pytest.param(*c, marks=pytest.mark.thorough) for c in (
    ("2x2", "heads+exchange"), ("1x2", "heads+ring"), ("2x1", "heads+exchange"), ("2x2", "auto")))]  # fmt: skip


@pytest.mark.parametrize(("cp", "strategy"), HOSTS)
def test_training_in_two_dimensions_of_context_parallel(
    cp: str, strategy: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks with FSDP, as on one rank: with 1x2 and 2x1 they are two groups, of a sequence each."""
    monkeypatch.setattr(load("ranks"), "spawn", on_forked_ranks)
    losses = []
    for ranks, more in ((4, [f"--cp={cp}", f"--strategy={strategy}"]), (1, [])):
        load("train").main([f"--ranks={ranks}", *more, "--steps=3", "--length=64", "--window=16", "--batch=2",
                            "--dtype=fp32", f"--out=of-{ranks}"])  # fmt: skip
        output = capfd.readouterr().out
        losses.append([float(x) for x in re.findall(r"^step \d+ +loss (\S+)", output, re.M)])
        if ranks == 4:
            assert f"4 ranks in groups of {cp}: from the start" in output, output
            assert strategy == "auto" or f"then {strategy.split('+')[1]}: every rank" in output, output
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_training_refuses_meshes_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("2x", "0", "2x0", "1x2x2", "two"):
        with pytest.raises(SystemExit):
            load("train").main([f"--cp={wrong}"])
        assert f"expected a positive number, or two as 2x8, got {wrong}" in capsys.readouterr().err
