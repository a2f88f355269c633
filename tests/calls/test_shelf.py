"""Templates are compiled once for all processes of a cache folder, and again where what is kept is not sound."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

import weft
from weft.codegen import templates
from weft.runtime.store import prune

SIZES = weft.shape(heads=2, q_len=256, head_dim=64)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def generate(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[str, int]]:
    """Source as a new process gives it, and how many templates were compiled for it."""
    compiled: list[str] = []
    plain = jinja2.Environment.compile

    def counted(self: jinja2.Environment, source: str, name: str, *others: object) -> object:
        compiled.append(name)
        return plain(self, source, name, *others)

    monkeypatch.setattr(jinja2.Environment, "compile", counted)

    def generate() -> tuple[str, int]:
        templates.environment.cache_clear()
        compiled.clear()
        return weft.Attention(mask=weft.masks.causal).source(SIZES, device="h200", target="triton"), len(compiled)

    return generate


def kept(root: Path) -> list[Path]:
    return sorted(root.glob(".templates-*/*"))


def test_another_process_compiles_no_template(root: Path, generate: Callable[[], tuple[str, int]]) -> None:
    text, compiled = generate()
    assert compiled == len(kept(root)) > 1
    assert generate() == (text, 0)
    assert {path.stat().st_mode & 0o777 for path in kept(root)} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in root.glob(".templates-*")} == {0o700}


@pytest.mark.parametrize("damage", ["torn", "other", "empty", "link", "writable", "folder"])
def test_what_is_not_sound_is_compiled_again(damage: str, root: Path, generate: Callable[[], tuple[str, int]]) -> None:
    text, compiled = generate()
    path, other = kept(root)[:2]
    content = path.read_bytes()
    if damage == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        {
            "torn": lambda: path.write_bytes(content[:-100]), "other": lambda: path.write_bytes(other.read_bytes()),
            "empty": path.touch, "link": lambda: path.symlink_to(other), "folder": path.mkdir,
        }[damage]()  # fmt: skip
    assert generate() == (text, 1)
    assert generate() == (text, 1 if damage == "folder" else 0)
    assert compiled == len(kept(root)), "nothing is left over"


def test_a_folder_that_cannot_be_made_costs_time_alone(root: Path, generate: Callable[[], tuple[str, int]]) -> None:
    found = generate()
    (folder,) = root.glob(".templates-*")
    prune.clear()
    assert not kept(root)
    folder.touch()  # a file in its place
    assert generate() == found
    assert generate() == found


def test_pruning_takes_away_what_no_process_has_written_for_long(
    root: Path, generate: Callable[[], tuple[str, int]]
) -> None:
    generate()
    (folder,) = root.glob(".templates-*")
    prune.prune()
    assert folder.exists()
    then = time.time() - 2 * prune.UNUSED_SECONDS
    os.utime(folder, (then, then))
    prune.prune()
    assert not folder.exists()
    prune.clear()
    assert generate()[1] > 1
