"""What `pip install` makes of a checkout: the same package, found by scripts anywhere and by checkers of types."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import weft
from weft import installed
from weft.tools.cli import main

from .test_docs import ROOT, blocks
from .test_types import MYPY

FOLDERS = ("api", "ir", "compiler", "codegen", "runtime", "templates")
NOT_COPIED = (".git", ".venv", "build", "out", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
SCRIPT = """
import pickle, torch, weft
from weft.codegen.loader import TEMPLATES
causal = weft.Attention(mask=weft.kv_pos <= weft.q_pos)
x = torch.randn(1, 2, 40, 16)
assert torch.allclose(causal(x, x, x), causal.reference(x, x, x), atol=1e-5)
assert pickle.loads(pickle.dumps(causal)) == causal and (TEMPLATES / "cpu").is_dir()
print(weft.__file__)
"""
FOUND = "import importlib.util; print(importlib.util.find_spec('weft').origin)"  # which imports nothing
TYPED = """
import torch, weft
a = weft.Attention(mask=weft.kv_pos <= weft.q_pos)
x: torch.Tensor = a(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
y: int = a(x, x, x)
"""


def start() -> list[str]:
    """The lines for a shell of the README's section Start."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("\n## Start\n") : text.index("\n## Speed\n")]
    found = [line for block in blocks("README.md", "sh") if block in section for line in block.splitlines()]
    return [shlex.join(shlex.split(line, comments=True)) for line in found if line.strip()]


def copy_of_the_tree(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED)))


def files_of_the_package() -> set[str]:
    """Every file below the folders of the package, by its name inside it; links from one folder to another aside."""
    found = set()
    for folder in FOLDERS:
        for parent, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = Path(parent).relative_to(ROOT / "api" if folder == "api" else ROOT)
            found |= {(Path("weft") / inside / name).as_posix() for name in names}
    return found


def run(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, what: str) -> Path:
    """A wheel or an sdist of a folder of sources, without an index."""
    into = source.parent / what
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(into)!r}))"
    return into / run(sys.executable, "-c", code, cwd=source).splitlines()[-1]


def test_a_wheel_and_an_sdist_hold_the_files_of_the_tree(tmp_path: Path) -> None:
    """Real ones, not links: every module and template, the marker of types, what is proven."""
    source = copy_of_the_tree(tmp_path / "weft")
    (tmp_path / "wheel").mkdir(), (tmp_path / "sdist").mkdir()
    with tarfile.open(build(source, "sdist")) as sources:
        assert all(member.isfile() or member.isdir() for member in sources)
        sources.extractall(tmp_path / "extracted", filter="data")
    (extracted,) = (tmp_path / "extracted").iterdir()
    assert {path.relative_to(extracted / "src").as_posix() for path in (extracted / "src" / "weft").rglob("*.*")} == (
        files_of_the_package()
    )
    (tmp_path / "extracted" / "wheel").mkdir()
    for wheel in (build(source, "wheel"), build(extracted, "wheel")):
        with zipfile.ZipFile(wheel) as archive:
            entries = {entry.filename: entry for entry in archive.infolist() if ".dist-info/" not in entry.filename}
            assert set(entries) == files_of_the_package()
            assert all(archive.read(name) == (source / "src" / name).read_bytes() for name in entries)
        assert wheel.name.startswith(f"weft_attention-{weft.__version__}-")


def test_links_of_the_package_stay_inside_the_tree() -> None:
    """They travel with a checkout, an archive, or a copy; and lead to folders, so that no module is listed."""
    links = [ROOT / "src" / "weft", *(ROOT / "api" / name for name in FOLDERS[1:])]
    for link in links:
        assert link.is_symlink() and os.readlink(link) == f"../{link.name if link.name != 'weft' else 'api'}"
    assert {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_symlink()} == {*links[1:]}


def environment_beside(folder: Path) -> Path:
    """An empty environment that sees the packages of this Python, but not how weft is installed in it."""
    environment = folder / "environment"
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "zz_packages_of_the_tests.pth").write_text("\n".join(site.getsitepackages()))
    pip = environment / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{environment}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)
    return pip.parent


@pytest.mark.slow(20)
def test_a_clone_called_weft_works_by_the_line_of_the_readme(tmp_path: Path) -> None:
    """From a script beside it, in it and elsewhere; and a checker of types follows it. There is no index here."""
    clone, programs = copy_of_the_tree(tmp_path / "weft"), environment_beside(tmp_path)
    (line,) = [line for line in start() if line.startswith("pip install")]
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    alone = {
        "PYTHONPATH": "", "WEFT_CACHE_DIR": str(tmp_path / "cache"), "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "",  # or each run would compile the clone anew
    }  # fmt: skip
    run("sh", "-c", line, cwd=clone, **alone, **offline)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "found.py").write_text(FOUND)
    said = run(programs / "python", tmp_path / "script.py", cwd=tmp_path, **alone)
    assert said.strip() == str(clone / "src" / "weft" / "__init__.py")
    for cwd in (tmp_path, clone, tmp_path / "elsewhere"):
        assert run(programs / "python", tmp_path / "found.py", cwd=cwd, **alone) == said
    assert run(programs / "python", "-c", FOUND, cwd=tmp_path, **alone) == said
    assert weft.__version__ in run(programs / "weft", "--version", cwd=tmp_path, **alone)
    (tmp_path / "typed.py").write_text(TYPED)
    found = subprocess.run(
        [programs / "python", "-m", "mypy", *MYPY, "typed.py"],
        cwd=tmp_path, env={**os.environ, **alone}, capture_output=True, text=True,
    )  # fmt: skip
    assert [row.split(": ")[0] for row in found.stdout.splitlines() if ": error:" in row] == ["typed.py:5"], found


@pytest.mark.thorough
@pytest.mark.slow
def test_the_other_lines_of_the_readme_run_in_a_clone_called_weft(tmp_path: Path) -> None:
    """`make test` collects here what it would run; all commands of `weft` but this run in test_docs.py."""
    clone, programs = copy_of_the_tree(tmp_path / "weft"), environment_beside(tmp_path)
    settings = {
        "PYTHONPATH": "", "PATH": f"{programs}:{os.environ['PATH']}", "WEFT_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHON": str(programs / "python"), "WEFT_SYSTEM_PYTHON": "1", "WORKERS": "--collect-only",
    }  # fmt: skip
    for line in start():
        if line.split()[0] == "make" or line == "weft calibrate":
            run("sh", "-c", line, cwd=clone, **settings)
    assert any((clone / "out").iterdir())  # of the demo


def test_no_line_of_the_readme_is_left_out() -> None:
    lines = start()
    assert {"make demo", "make test", "weft calibrate", "weft doctor"} <= {*lines}
    assert {line.split()[0] for line in lines} == {"make", "pip", "weft"}
    assert [line for line in lines if line.startswith("pip")] == ["pip install -e '.[kernels]'"]


# -- the other project of that name ------------------------------------------------------------------------------------


def test_an_import_says_that_another_project_lies_over_this_one(tmp_path: Path) -> None:
    (tmp_path / "weft").symlink_to(ROOT / "api")
    said = "import weft; weft.Attention"
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "error"}
    run(sys.executable, "-c", said, cwd=tmp_path, **environment)
    (tmp_path / "weft-0.9.1.dist-info").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", said], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert "RuntimeWarning: weft: another project is installed over this one (weft-0.9.1.dist-info in" in done.stderr


@pytest.mark.parametrize("name", ["weft-0.9.118.dist-info", "weft.egg-info", "weft-1-py3.egg-info"])
def test_metadata_of_the_other_project_is_known(name: str, tmp_path: Path) -> None:
    for harmless in ("weft_attention-0.1.0.dist-info", "weft_attention.egg-info", "wefty-1.dist-info", "weft"):
        (tmp_path / harmless).mkdir()
    installed.warn_of_the_other(tmp_path)  # warnings are errors here
    (tmp_path / name).mkdir()
    with pytest.warns(RuntimeWarning, match=r"pip uninstall weft weft-attention`, then install Weft again"):
        installed.warn_of_the_other(tmp_path)


def test_doctor_sees_the_other_project_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "weft-0.9.118.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: weft\nVersion: 0.9.118\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = CliRunner().invoke(main, ["doctor"]).output
    assert f"  weft        {weft.__version__}, in " in said
    assert f"problem     pip also installed 'weft' 0.9.118 ({tmp_path / 'weft'}): another project" in said
