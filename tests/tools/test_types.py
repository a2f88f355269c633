"""Types as a user's checker sees them: the package as it is installed, with the marker of PEP 561, and the examples."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# torch itself has functions without annotations, such as Tensor.backward. One cache: torch is read once for all tests.
MYPY = ["--strict", "--allow-untyped-calls", "--follow-imports=silent", "--config-file=", "--no-error-summary",
        f"--cache-dir={ROOT}/build/mypy-of-users"]  # fmt: skip
USER = """
import numpy as np
import torch
from typing_extensions import assert_type

import weft
from weft import head, kv_pos, masks, q_pos, score, scores

window, slopes = weft.scalar("window", int), weft.tensor("slopes", 1)
local = weft.Attention(
    scores.softcap(50.0)(score) + slopes[head] * (kv_pos - q_pos), masks.causal & (q_pos - kv_pos < window),
    name="local",
)
capped = weft.Attention(50.0 * weft.tanh(score / 50.0), mask=(kv_pos <= q_pos) | (kv_pos < 4), scale=0.5)
x = torch.randn(1, 2, 8, 16)
pair = tuple[torch.Tensor, torch.Tensor]

assert_type(local(x, x, x, window=4, slopes=x), torch.Tensor)
assert_type(local(x, x, x, window=np.int64(4), slopes=x, return_lse=False, target="cpu"), torch.Tensor)
assert_type(local(x, x, x, window=4, slopes=x, return_lse=True), pair)
assert_type(local.reference(x, x, x, window=4, slopes=x), torch.Tensor)
assert_type(local.reference(x, x, x, window=4, slopes=x, return_lse=True), pair)
assert_type(local.replace(name="other"), weft.Attention)
assert_type(local.explain(weft.shape(heads=2, q_len=8, head_dim=16), device="h100"), str)
assert_type(local.plan(x, x, x, window=4, slopes=x), weft.Plan)


def either(flag: bool) -> None:
    assert_type(capped(x, x, x, return_lse=flag), torch.Tensor | pair)


with weft.settings(debug=1, target="cpu") as now:
    assert_type(now.debug, int)
"""
MISTAKES = """
import torch
import weft

x = torch.randn(1, 2, 8, 16)
causal = weft.Attention(mask=weft.masks.causal)
causal(x, x, x, return_lse="yes")
causal(x, x, x, schedule=3)
causal(x, x, x, window="4")
weft.Attention(is_causal=True)
weft.score.tanh()
weft.settings(colour=1)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as `pip install` lays it out."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", f"--build-lib={folder}"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project: the examples, a program that is sound, and one that is not. Those with transformers are left
    out, whose half a million lines a checker would read, and that with torchtitan, which few have."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(
        ROOT / "examples", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("transformers_*", "torchtitan_*")
    )
    (folder / "sound.py").write_text(USER)
    (folder / "mistakes.py").write_text(MISTAKES)
    return folder


def test_the_package_ships_its_types(installed: Path) -> None:
    assert (installed / "weft" / "py.typed").exists()


@pytest.mark.slow
def test_mypy_strict_is_content_with_programs_of_users(installed: Path, user: Path) -> None:
    sound = [str(p) for p in sorted(user.glob("*.py")) if p.stem != "mistakes"]
    found = _mypy(installed, user, *sound)
    assert found.returncode == 0, found.stdout
    wrong = _mypy(installed, user, "mistakes.py").stdout
    lines = {int(line.split(":")[1]) for line in wrong.splitlines() if ": error:" in line}
    assert lines == {7, 8, 9, 10, 11, 12}, wrong


def _mypy(installed: Path, user: Path, *files: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mypy", *MYPY, *files],
        cwd=user, env={"MYPYPATH": str(installed), "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_pyright_is_content_with_programs_of_users(installed: Path, user: Path) -> None:
    name = next((n for n in ("basedpyright", "pyright") if importlib.util.find_spec(n)), None)
    if name is None:
        pytest.skip("pyright is not installed: pip install basedpyright, which brings its own node")
    config = {
        "extraPaths": [str(installed)], "typeCheckingMode": "standard", "include": ["*.py"], "exclude": ["mistakes.py"],
    }  # fmt: skip
    (user / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", name, f"--pythonpath={sys.executable}", "-p", str(user)]
    found = subprocess.run(command, cwd=user, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
